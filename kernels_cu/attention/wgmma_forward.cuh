// attention v4, forward: the algorithm of v3 (attention.cu) by wgmma and TMA, warp-specialised (sm_90a). float16 and bfloat16.
//
// Blocks     a thread block computes blocks of M = 64 * WARPGROUPS queries of one head. Each consumer warpgroup owns 64 of them; one more
//            warpgroup starts the copies (the producer), also those of the next block. Q has a ring buffer of 2 tiles, K and V of STAGES
//            tiles of N keys each, with mbarriers full and empty. O leaves through the place of Q.
// Overlap    a consumer multiplies Q by tile j - 1 of K, and its weights by tile j of V, while it computes the weights of tile j - 1. The
//            consumers take turns at starting products (ping-pong), so the softmax of one runs under the products of the others.
// Layout     a tile has D / 64 pages of 64 columns, with the 128-byte swizzle, as in tile.cuh. V is the operand that is contiguous across k.
// Launch     1-D grid, at most as many thread blocks as run at a time (persistent); block = 128 * (WARPGROUPS + 1); dynamic shared memory =
//            ForwardShape::BYTES.
#pragma once
#include "wgmma_tile.cuh"

template <int D, int N, int WARPGROUPS, int STAGES>
struct ForwardShape {
    static constexpr int M = 64 * WARPGROUPS, Q_BYTES = PAGES<D> * M * ROW_BYTES, TILE = PAGES<D> * N * ROW_BYTES;
    static constexpr int BARRIERS = 2 * Q_BYTES + 2 * STAGES * TILE, BYTES = BARRIERS + 8 * (4 + 4 * STAGES);
};

struct Blocks {
    int blocks, heads, batches, section, queries, keys, offset, window;
    bool causal;
};

// A thread block's work: action(first query, last and first tile of keys that its queries see, head, batch). If there is none, the last is
// before the first. Query i sees the keys from i + offset - window + 1 to i + offset. Every second round goes through the thread blocks
// backwards, so that all get as many long blocks as short ones.
template <int M, int N, class Action>
__device__ __forceinline__ void for_each_block(const Blocks& b, Action action) {
    for (int i = 0, round = 0; i < b.blocks * b.heads * b.batches; i += gridDim.x, round ^= 1) {
        int index = i + (round ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (index >= b.blocks * b.heads * b.batches) continue;
        Work work = work_of(index, b.blocks, b.heads, b.batches, b.section, b.causal);
        int first = work.block * M, last = min(min(first + M, b.queries) - 1 + b.offset, b.keys - 1);
        int begin = max(0, first + b.offset - b.window + 1) / N;
        action(first, last < 0 ? begin - 1 : last / N, begin, work.head, work.batch);
    }
}

template <typename T, int D, int N, int WARPGROUPS, int STAGES, int PER_SM, bool SOFTCAP>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), PER_SM)
    attention_v4(T* out, float* lse, const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                 const __grid_constant__ CUtensorMap map_v, Strides of_out, int blocks, int heads, int batches, int group, int section,
                 int queries, int keys, int window, int head_dim, bool causal, float before, float c) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = ForwardShape<D, N, WARPGROUPS, STAGES>;
    using Regs = Registers<WARPGROUPS, PER_SM>;
    constexpr int M = Shape::M, TILE = Shape::TILE;
    extern __shared__ __align__(1024) unsigned char shared[];  // the rings of Q, K and V, mbarriers
    unsigned q_ring = shared_address(shared), k_ring = q_ring + 2 * Shape::Q_BYTES, v_ring = k_ring + STAGES * TILE;
    unsigned full_q = q_ring + Shape::BARRIERS, full_k = full_q + 16, full_v = full_k + 8 * STAGES;
    unsigned empty_q = full_v + 8 * STAGES, empty_k = empty_q + 16, empty_v = empty_k + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 + 2 * STAGES; i++) {
            mbarrier_init(full_q + 8 * i, 1);
            mbarrier_init(empty_q + 8 * i, 4 * WARPGROUPS);
        }
        mbarriers_made();
    }
    __syncthreads();
    int offset = causal ? keys - queries : keys, warpgroup = threadIdx.x / 128;
    Blocks grid{blocks, heads, batches, section, queries, keys, offset, window, causal};
    if (warpgroup == WARPGROUPS) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            Position<2> of_q;
            Position<STAGES> at;
            for_each_block<M, N>(grid, [&](int first, int tile, int begin, int head, int batch) {
                mbarrier_wait_in_block(empty_q + 8 * of_q.stage, of_q.phase ^ 1);
                mbarrier_arrive(full_q + 8 * of_q.stage, Shape::Q_BYTES);
                load_tile<D, M>(q_ring + of_q.stage * Shape::Q_BYTES, &map_q, full_q + 8 * of_q.stage, first, head, batch);
                of_q.advance();
                for (; tile >= begin; tile--, at.advance()) {
                    unsigned i = 8 * at.stage;
                    mbarrier_wait_in_block(empty_k + i, at.phase ^ 1);
                    mbarrier_arrive(full_k + i, TILE);
                    load_tile<D, N>(k_ring + at.stage * TILE, &map_k, full_k + i, tile * N, head / group, batch);
                    mbarrier_wait_in_block(empty_v + i, at.phase ^ 1);
                    mbarrier_arrive(full_v + i, TILE);
                    load_tile<D, N>(v_ring + at.stage * TILE, &map_v, full_v + i, tile * N, head / group, batch);
                }
            });
        }
    } else {
        more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
        Position<2> of_q;
        Position<STAGES> of_k, of_v;
        auto release = [&](unsigned empty) {
            if (lane == 0) mbarrier_arrive(empty);
        };
        for_each_block<M, N>(grid, [&](int first, int tile, int begin, int head, int batch) {
            int row = first + warp_row + lane / 4, low = first + 64 * warpgroup + offset - window + 64;
            int high = min(first + 64 * warpgroup + offset, keys - 1);  // keys from `low` to `high` are seen by each query of the warpgroup
            float o[1][D / 8][4] = {}, s[1][N / 8][4], most[1][2], total[1][2] = {}, shrink[1][2];
            unsigned p[N / 16][4], q = q_ring + of_q.stage * Shape::Q_BYTES + 64 * warpgroup * ROW_BYTES;
            most[0][0] = most[0][1] = minus_infinity<float>();
            auto soften = [&] {  // scores of `tile` to weights
                int column = tile * N + lane % 4 * 2, limit = row + offset - column;
                auto hidden = [=](int row, int n) { return n >= keys - column || unsigned(limit + row - n) >= unsigned(window); };
                bool masked = tile * N + N - 1 > high || tile * N < low;
                softmax_weights<1, N / 8, SOFTCAP>(s, most, total, shrink, masked, hidden, before, c);
            };
            mbarrier_wait_in_block(full_q + 8 * of_q.stage, of_q.phase);
            if (tile >= begin) {
                mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                wgmma_fence();
                start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                wgmma_commit();
                wgmma_wait<0>(s[0]);
                release(empty_k + 8 * of_k.stage);
                of_k.advance();
                if (WARPGROUPS > 1 && warpgroup == WARPGROUPS - 1 && tile > begin) arrive_at(1, 256);  // warpgroup 0 starts
                soften();
                to_operand<T>(p, s[0]);
                for (tile--; tile >= begin; tile--) {
                    mbarrier_wait_in_block(full_v + 8 * of_v.stage, of_v.phase);
                    mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                    if constexpr (WARPGROUPS > 1) barrier_of(1 + warpgroup, 256);
                    wgmma_fence(o[0], p);
                    start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                    wgmma_commit();
                    start_product<T, D>(o[0], p, v_ring + of_v.stage * TILE);
                    wgmma_commit();
                    if (WARPGROUPS > 1 && (tile > begin || warpgroup < WARPGROUPS - 1)) arrive_at(1 + (warpgroup + 1) % WARPGROUPS, 256);
                    wgmma_wait<1>(s[0]);
                    release(empty_k + 8 * of_k.stage);
                    soften();
                    wgmma_wait<0>(o[0]);
                    release(empty_v + 8 * of_v.stage);
                    multiply_rows(o, shrink);
                    to_operand<T>(p, s[0]);
                    of_k.advance();
                    of_v.advance();
                }
                mbarrier_wait_in_block(full_v + 8 * of_v.stage, of_v.phase);
                wgmma_fence(o[0], p);
                start_product<T, D>(o[0], p, v_ring + of_v.stage * TILE);
                wgmma_commit();
                wgmma_wait<0>(o[0]);
                release(empty_v + 8 * of_v.stage);
                of_v.advance();
            }
            long long stats = ((long long)batch * heads + head) * queries;
            float factor[1][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float sum = warp_reduce<Sum>(total[0][i], 4);
                factor[0][i] = sum == 0 ? 0 : 1 / sum;
                if (lane % 4 == 0 && row + 8 * i < queries)
                    lse[stats + row + 8 * i] = sum == 0 ? minus_infinity<float>() : (__fmul_rn(most[0][i], c) + log2_approx(sum)) * LN_2;
            }
            barrier_of(8 + warpgroup, 128);  // all warps are done with Q
            T* to = out + batch * of_out.batch + head * of_out.head + (first + warp_row) * of_out.row;
            store_rows<T, D, M>(to, of_out.row, queries - first - warp_row, head_dim, o, factor,
                                shared + of_q.stage * Shape::Q_BYTES + warp_row * ROW_BYTES);
            fence_async();
            __syncwarp();
            release(empty_q + 8 * of_q.stage);
            of_q.advance();
        });
    }
#endif
}
