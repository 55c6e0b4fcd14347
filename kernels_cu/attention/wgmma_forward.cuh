// attention v4, forward: the algorithm of v3 (attention.cu) by wgmma and TMA, warp-specialised (sm_90a). float16 and bfloat16.
//
// Blocks     a thread block owns M = 64 * WARPGROUPS queries of one head. Each consumer warpgroup owns 64 of them; one more warpgroup starts
//            the copies (the producer). K and V each have a ring buffer of STAGES tiles of N keys, with mbarriers full and empty.
// Overlap    a consumer multiplies Q by tile j - 1 of K, and its weights by tile j of V, while it computes the weights of tile j - 1. The
//            consumers take turns at starting products (ping-pong), so the softmax of one runs under the products of the others.
// Layout     a tile has D / 64 pages of 64 columns, with the 128-byte swizzle, as in tile.cuh. V is the operand that is contiguous across k.
// Launch     1-D grid, see work_of; block = 128 * (WARPGROUPS + 1); dynamic shared memory = ForwardShape::BYTES.
#pragma once
#include "wgmma_tile.cuh"

template <int D, int N, int WARPGROUPS, int STAGES>
struct ForwardShape {
    static constexpr int M = 64 * WARPGROUPS;
    static constexpr int Q_BYTES = PAGES<D> * M * ROW_BYTES, TILE = PAGES<D> * N * ROW_BYTES;
    static constexpr int BARRIERS = Q_BYTES + 2 * STAGES * TILE, BYTES = BARRIERS + 8 * (1 + 4 * STAGES);
};

template <typename T, int D, int N, int WARPGROUPS, int STAGES, int PER_SM, bool SOFTCAP, bool PACKED>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), PER_SM)
    attention_v4(T* out, float* lse, const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                 const __grid_constant__ CUtensorMap map_v, const int* query_bounds, const int* key_bounds, Strides of_out, int blocks,
                 int heads, int batches, int group, int section, int queries, int keys, int sequences, int window, int head_dim,
                 bool causal, float before, float c) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = ForwardShape<D, N, WARPGROUPS, STAGES>;
    using Regs = Registers<WARPGROUPS, PER_SM>;
    constexpr int M = Shape::M, TILE = Shape::TILE;
    extern __shared__ __align__(1024) unsigned char shared[];  // Q, the rings of K and V, mbarriers
    unsigned q_tile = shared_address(shared), k_ring = q_tile + Shape::Q_BYTES, v_ring = k_ring + STAGES * TILE;
    unsigned full_q = q_tile + Shape::BARRIERS, full_k = full_q + 8, full_v = full_k + 8 * STAGES;
    unsigned empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;
    if (threadIdx.x == 0) {
        mbarrier_init(full_q, 1);
        for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(full_k + 8 * i, 1);
        for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(empty_k + 8 * i, 4 * WARPGROUPS);
        mbarriers_made();
    }
    __syncthreads();
    Work work = work_of(blockIdx.x, blocks, heads, batches, section, causal);
    Sequence of = sequence_of<PACKED, false, M>(work, query_bounds, key_bounds, sequences, queries, keys);
    if (PACKED && work.block * M >= of.queries) return;
    // Query i sees the keys from i + offset - window + 1 to i + offset. The block needs the tiles from `begin` to `tile`, the last first.
    int first = work.block * M, offset = causal ? of.keys - of.queries : of.keys, warpgroup = threadIdx.x / 128;
    int last = min(min(first + M, of.queries) - 1 + offset, of.keys - 1), begin = max(0, first + offset - window + 1) / N;
    int tile = last < 0 ? begin - 1 : last / N;
    if (warpgroup == WARPGROUPS) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x == 128 * WARPGROUPS && tile >= begin) {
            int head = work.head / group;
            mbarrier_arrive(full_q, Shape::Q_BYTES);
            load_tile<D, M, PACKED>(q_tile, &map_q, full_q, first, work.head, work.batch, of.first_query, of.queries);
            for (Position<STAGES> at; tile >= begin; tile--, at.advance()) {
                unsigned i = 8 * at.stage;
                mbarrier_wait_in_block(empty_k + i, at.phase ^ 1);
                mbarrier_arrive(full_k + i, TILE);
                load_tile<D, N, PACKED>(k_ring + at.stage * TILE, &map_k, full_k + i, tile * N, head, work.batch, of.first_key, of.keys);
                mbarrier_wait_in_block(empty_v + i, at.phase ^ 1);
                mbarrier_arrive(full_v + i, TILE);
                load_tile<D, N, PACKED>(v_ring + at.stage * TILE, &map_v, full_v + i, tile * N, head, work.batch, of.first_key, of.keys);
            }
        }
    } else {
        more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, row = first + warp_row + lane / 4;
        int high = min(first + 64 * warpgroup + offset, of.keys - 1), low = first + 64 * warpgroup + 64 + offset - window;
        float o[1][D / 8][4] = {}, s[1][N / 8][4], most[1][2], total[1][2] = {}, shrink[1][2];
        unsigned p[N / 16][4], q = q_tile + 64 * warpgroup * ROW_BYTES;
        most[0][0] = most[0][1] = minus_infinity<float>();
        auto release = [&](unsigned empty) {
            if (lane == 0) mbarrier_arrive(empty);
        };
        auto soften = [&] {  // scores of `tile` to weights
            int column = tile * N + lane % 4 * 2, limit = row + offset - column;
            auto hidden = [=](int row, int n) { return n >= of.keys - column || unsigned(limit + row - n) >= unsigned(window); };
            bool masked = tile * N < low || tile * N + N - 1 > high;  // each query of the warpgroup sees the keys from `low` to `high`
            softmax_weights<1, N / 8, SOFTCAP>(s, most, total, shrink, masked, hidden, before, c);
        };
        Position<STAGES> of_k, of_v;
        if (tile >= begin) {
            mbarrier_wait_in_block(full_q, 0);
            mbarrier_wait_in_block(full_k, 0);
            wgmma_fence();
            start_transposed<T, D, M>(s[0], q, k_ring);
            wgmma_commit();
            wgmma_wait<0>(s[0]);
            release(empty_k);
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
        }
        long long stats = ((long long)work.batch * heads + work.head) * queries + of.first_query;
        float factor[1][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = warp_reduce<Sum>(total[0][i], 4);
            factor[0][i] = sum == 0 ? 0 : 1 / sum;
            if (lane % 4 == 0 && row + 8 * i < of.queries)
                lse[stats + row + 8 * i] = sum == 0 ? minus_infinity<float>() : (__fmul_rn(most[0][i], c) + log2_approx(sum)) * LN_2;
        }
        barrier_of(8 + warpgroup, 128);  // all warps are done with Q
        T* to = out + work.batch * of_out.batch + work.head * of_out.head + (of.first_query + first + warp_row) * of_out.row;
        store_rows<T, D, M>(to, of_out.row, of.queries - first - warp_row, head_dim, o, factor, shared + warp_row * ROW_BYTES);
    }
#endif
}
