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
    static constexpr bool PRODUCER = WARPGROUPS > 1;
    static constexpr int M = 64 * WARPGROUPS, THREADS = 128 * (WARPGROUPS + PRODUCER);
    static constexpr int Q_BYTES = PAGES<D> * M * ROW_BYTES, TILE = PAGES<D> * N * ROW_BYTES;
    static constexpr int OUT = Q_BYTES + 2 * STAGES * TILE, BARRIERS = OUT + PRODUCER * Q_BYTES, BYTES = BARRIERS + 8 * (2 + 4 * STAGES);
};

struct Blocks {
    int blocks, heads, batches, section, queries, keys, offset, window;
    bool paired, causal;
};

// A thread block's work: action(first query, last and first tile of keys that its queries see, head, batch). If there is none, the last is
// before the first. Query i sees the keys from i + offset - window + 1 to i + offset. A pair of blocks of M queries takes the same time as any
// other pair: the last and the first, the last but one and the second, ...
template <int M, int N, class Action>
__device__ __forceinline__ void for_each_block(const Blocks& b, Action action) {
    int units = b.paired ? (b.blocks + 1) / 2 : b.blocks;
    for (int i = blockIdx.x; i < units * b.heads * b.batches; i += gridDim.x) {
        Work work = work_of(i, units, b.heads, b.batches, b.section, b.causal);
        int halves = b.paired && 2 * work.block + 1 != b.blocks ? 2 : 1;
        for (int half = 0; half < halves; half++) {
            int first = (half ? b.blocks - 1 - work.block : work.block) * M;
            int last = min(min(first + M, b.queries) - 1 + b.offset, b.keys - 1), begin = max(0, first + b.offset - b.window + 1) / N;
            action(first, last < 0 ? begin - 1 : last / N, begin, work.head, work.batch);
        }
    }
}

template <typename T, int D, int N, int WARPGROUPS, int STAGES, int PER_SM, bool SOFTCAP>
__global__ void __launch_bounds__(128 * (WARPGROUPS + (WARPGROUPS > 1)), PER_SM)
    attention_v4(T* out, float* lse, const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                 const __grid_constant__ CUtensorMap map_v, Strides of_out, int blocks, bool paired, int heads, int batches, int group,
                 int section, int queries, int keys, int window, int head_dim, bool causal, float before, float c) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = ForwardShape<D, N, WARPGROUPS, STAGES>;
    using Regs = Registers<WARPGROUPS, PER_SM>;
    constexpr int M = Shape::M, TILE = Shape::TILE;
    constexpr bool PRODUCER = Shape::PRODUCER;
    extern __shared__ __align__(1024) unsigned char shared[];  // Q, the rings of K and V, with a producer also O, mbarriers
    unsigned q_tile = shared_address(shared), k_ring = q_tile + Shape::Q_BYTES, v_ring = k_ring + STAGES * TILE;
    unsigned full_q = q_tile + Shape::BARRIERS, empty_q = full_q + 8, full_k = empty_q + 8, full_v = full_k + 8 * STAGES;
    unsigned empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;
    if (threadIdx.x == 0) {
        mbarrier_init(full_q, 1);
        mbarrier_init(empty_q, 4 * WARPGROUPS);
        for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(full_k + 8 * i, 1);
        for (int i = 0; i < 2 * STAGES; i++) mbarrier_init(empty_k + 8 * i, 4 * WARPGROUPS);
        mbarriers_made();
    }
    __syncthreads();
    int offset = causal ? keys - queries : keys, warpgroup = threadIdx.x / 128;
    Blocks grid{blocks, heads, batches, section, queries, keys, offset, window, paired, causal};
    auto load_q = [&](int first, int head, int batch) {
        mbarrier_arrive(full_q, Shape::Q_BYTES);
        load_tile<D, M>(q_tile, &map_q, full_q, first, head, batch);
    };
    auto load = [&](const CUtensorMap* map, unsigned ring, unsigned full, int tile, Position<STAGES> at, int head, int batch) {
        full += 8 * at.stage;
        mbarrier_wait_in_block(full + 16 * STAGES, at.phase ^ 1);  // empty
        mbarrier_arrive(full, TILE);
        load_tile<D, N>(ring + at.stage * TILE, map, full, tile * N, head / group, batch);
    };
    if (warpgroup == WARPGROUPS) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            Position<STAGES> at;
            Position<1> of_q;
            for_each_block<M, N>(grid, [&](int first, int tile, int begin, int head, int batch) {
                if (tile < begin) return;
                mbarrier_wait_in_block(empty_q, of_q.phase ^ 1);
                load_q(first, head, batch);
                of_q.advance();
                for (; tile >= begin; tile--, at.advance()) {
                    load(&map_k, k_ring, full_k, tile, at, head, batch);
                    load(&map_v, v_ring, full_v, tile, at, head, batch);
                }
            });
        }
    } else {
        if constexpr (PRODUCER) more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
        Position<STAGES> of_k, of_v, next_k{0, 1}, next_v{0, 1};  // next: without a producer
        Position<1> of_q;
        for_each_block<M, N>(grid, [&](int first, int tile, int begin, int head, int batch) {
            int row = first + warp_row + lane / 4, first_tile = tile, low = first + 64 * warpgroup + offset - window + 64;
            int high = min(first + 64 * warpgroup + offset, keys - 1);  // keys from `low` to `high` are seen by each query of the warpgroup
            float o[1][D / 8][4] = {}, s[1][N / 8][4], most[1][2], total[1][2] = {}, shrink[1][2];
            unsigned p[N / 16][4], q = q_tile + 64 * warpgroup * ROW_BYTES;
            most[0][0] = most[0][1] = minus_infinity<float>();
            auto release = [&](unsigned empty) {
                if (lane == 0) mbarrier_arrive(empty);
            };
            auto soften = [&] {  // scores of `tile` to weights
                int column = tile * N + lane % 4 * 2, limit = row + offset - column;
                auto hidden = [=](int row, int n) { return n >= keys - column || unsigned(limit + row - n) >= unsigned(window); };
                bool masked = tile * N + N - 1 > high || tile * N < low;
                softmax_weights<1, N / 8, SOFTCAP>(s, most, total, shrink, masked, hidden, before, c);
            };
            if (!PRODUCER && threadIdx.x == 0 && tile >= begin) {  // thread 0 starts the copies
                load_q(first, head, batch);
                Position<STAGES> at;
                for (int i = 0; i < STAGES && tile - i >= begin; i++, at.advance()) {
                    load(&map_k, k_ring, full_k, tile - i, at, head, batch);
                    load(&map_v, v_ring, full_v, tile - i, at, head, batch);
                }
            }
            if (tile >= begin) {
                mbarrier_wait_in_block(full_q, of_q.phase);
                of_q.advance();
                mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                wgmma_fence();
                start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                wgmma_commit();
                wgmma_wait<0>(s[0]);
                release(empty_k + 8 * of_k.stage);
                of_k.advance();
                if (tile == begin) release(empty_q);
                else if (PRODUCER && warpgroup == WARPGROUPS - 1) arrive_at(1, 256);  // warpgroup 0 starts
                soften();
                to_operand<T>(p, s[0]);
                for (tile--; tile >= begin; tile--) {
                    if (!PRODUCER && threadIdx.x == 0) {  // into the stage of K of the last iteration, and that of V of the one before
                        if (tile + 1 >= begin + STAGES) {
                            load(&map_k, k_ring, full_k, tile + 1 - STAGES, next_k, head, batch);
                            next_k.advance();
                        }
                        if (tile + 2 >= begin + STAGES && tile + 2 <= first_tile) {
                            load(&map_v, v_ring, full_v, tile + 2 - STAGES, next_v, head, batch);
                            next_v.advance();
                        }
                    }
                    mbarrier_wait_in_block(full_v + 8 * of_v.stage, of_v.phase);
                    mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                    if constexpr (PRODUCER) barrier_of(1 + warpgroup, 256);
                    wgmma_fence(o[0], p);
                    start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                    wgmma_commit();
                    start_product<T, D>(o[0], p, v_ring + of_v.stage * TILE);
                    wgmma_commit();
                    if (PRODUCER && (tile > begin || warpgroup < WARPGROUPS - 1)) arrive_at(1 + (warpgroup + 1) % WARPGROUPS, 256);
                    wgmma_wait<1>(s[0]);
                    release(empty_k + 8 * of_k.stage);
                    if (tile == begin) release(empty_q);
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
            if constexpr (!PRODUCER) barrier_of(1, 128);  // all warps are done with Q, whose place O takes
            unsigned char* staged = shared + (PRODUCER ? Shape::OUT : 0) + warp_row * ROW_BYTES;
            T* to = out + batch * of_out.batch + head * of_out.head + (first + warp_row) * of_out.row;
            store_rows<T, D, M>(to, of_out.row, queries - first - warp_row, head_dim, o, factor, staged);
        });
    }
#endif
}
