// attention v4, forward: the algorithm of v3 (attention.cu) by wgmma and TMA, warp-specialised (sm_90a).
// float16 and bfloat16.
//
// Blocks     a thread block computes blocks of M = 64 * WARPGROUPS queries of one head. Each consumer
//            warpgroup owns 64 of them; one more warpgroup starts the copies (the producer), also those of
//            the next block. Q has a ring buffer of Q_STAGES tiles, K and V of STAGES tiles of N keys each,
//            with mbarriers full and empty. O is stored through the shared memory of Q.
// Overlap    a consumer multiplies Q by tile j - 1 of K, and its weights by tile j of V, while it computes
//            the weights of tile j - 1. The consumers take turns at starting products (ping-pong), so the
//            softmax of one runs under the products of the others.
// Layout     a tile has D / 64 pages of 64 columns, with the 128-byte swizzle, as in tile.cuh. V is
//            contiguous across k.
// Launch     1-D grid: a thread block for each block of queries (work_of), or as many as run at a time
//            (persistent), under `causal` with pairs of blocks of equal time. block = 128 * (WARPGROUPS + 1);
//            dynamic shared memory = ForwardShape::BYTES.
#pragma once
#include "bias.cuh"
#include "wgmma_tile.cuh"

// A block of queries, from `first` on, and its tiles of keys from `begin` to `tile`, the last first. Query i
// sees the keys from i + offset - window + 1 to i + offset. If it sees none, tile < begin.
struct Block {
    Sequence of;
    int head, batch, first, offset, begin, tile;
};

template <int D, int N, int WARPGROUPS, int STAGES>
struct ForwardShape {
    static constexpr int M = 64 * WARPGROUPS, Q_STAGES = D > 128 ? 1 : 2;
    static constexpr int Q_BYTES = PAGES<D> * M * ROW_BYTES, TILE = PAGES<D> * N * ROW_BYTES;
    static constexpr int BARRIERS = Q_STAGES * Q_BYTES + 2 * STAGES * TILE,
                         LIST = BARRIERS + 16 * (Q_STAGES + 2 * STAGES);
    static constexpr int BYTES = LIST + Q_STAGES * sizeof(Block);
};

// Extras: the types of the arguments of an extra_of (bias.cuh).
template <typename T, int D, int N, int WARPGROUPS, int STAGES, int PER_SM, bool SOFTCAP, bool PACKED,
          class... Extras>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), PER_SM)
    attention_v4(T* out, float* lse, const __grid_constant__ CUtensorMap map_q,
                 const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                 const int* query_bounds, const int* key_bounds, Strides of_out, int blocks, int heads,
                 int batches, int group, int section, int queries, int keys, int sequences, int window,
                 int head_dim, bool causal, float tanh_factor, float c, Extras... extras) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = ForwardShape<D, N, WARPGROUPS, STAGES>;
    using Regs = Registers<WARPGROUPS, PER_SM>;
    constexpr int M = Shape::M, Q_STAGES = Shape::Q_STAGES, Q_BYTES = Shape::Q_BYTES, TILE = Shape::TILE;
    extern __shared__ __align__(1024) unsigned char shared[];  // the rings of Q, K and V, mbarriers, list
    unsigned q_ring = shared_address(shared), k_ring = q_ring + Q_STAGES * Q_BYTES,
             v_ring = k_ring + STAGES * TILE;
    unsigned full_q = q_ring + Shape::BARRIERS, full_k = full_q + 8 * Q_STAGES, full_v = full_k + 8 * STAGES;
    unsigned empty_q = full_v + 8 * STAGES, empty_k = empty_q + 8 * Q_STAGES, empty_v = empty_k + 8 * STAGES;
    Block* list = reinterpret_cast<Block*>(shared + Shape::LIST);  // from the producer to the consumers
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&map_q), prefetch_tensor_map(&map_k), prefetch_tensor_map(&map_v);
        for (int i = 0; i < Q_STAGES + 2 * STAGES; i++)
            mbarrier_init(full_q + 8 * i, 1),
                mbarrier_init(empty_q + 8 * i, i < Q_STAGES ? 128 * WARPGROUPS : 4 * WARPGROUPS);
        mbarriers_made();
    }
    wait_for_previous();
    __syncthreads();
    auto extra = extra_of(extras...);
    using Extra = decltype(extra);
    const float c_softmax = BIASED<Extra> ? 1 : c;  // of scores with their bias
    // with more arguments the uniform number costs spills
    int warpgroup = sizeof...(Extras) ? threadIdx.x / 128 : warpgroup_in_block();
    if (warpgroup == WARPGROUPS) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x != 128 * WARPGROUPS) return;
        Position<Q_STAGES> of_q;
        Position<STAGES> at;
        // the last and the first block, the last but one and the second, ...
        bool paired = causal && gridDim.x < blocks * heads * batches;
        int units = paired ? (blocks + 1) / 2 : blocks;
        for (int i = blockIdx.x; i < units * heads * batches; i += gridDim.x)
            for (int half = 0; half <= paired; half++) {
                Work work = work_of(i, units, heads, batches, section, causal);
                if (half < paired) work.block = blocks - 1 - work.block;
                Sequence of =
                    sequence_of<PACKED, false, M>(work, query_bounds, key_bounds, sequences, queries, keys);
                if (half && 2 * work.block + 1 == blocks || PACKED && work.block * M >= of.queries) continue;
                int first = work.block * M, offset = causal ? of.keys - of.queries : of.keys,
                    head = work.head / group;
                int last = min(min(first + M, of.queries) - 1 + offset, of.keys - 1),
                    begin = max(0, first + offset - window + 1) / N;
                int tile = last < 0 ? begin - 1 : last / N;
                unsigned full = full_q + 8 * of_q.stage;
                mbarrier_wait_in_block(empty_q + 8 * of_q.stage, of_q.phase ^ 1);
                list[of_q.stage] = {of, work.head, work.batch, first, offset, begin, tile};
                mbarrier_arrive(full, Q_BYTES);
                load_tile<D, M, PACKED>(q_ring + of_q.stage * Q_BYTES, &map_q, full, first, work.head,
                                        work.batch, of.first_query, of.queries);
                of_q.advance();
                for (; tile >= begin; tile--, at.advance()) {
                    unsigned i = 8 * at.stage;
                    mbarrier_wait_in_block(empty_k + i, at.phase ^ 1);
                    mbarrier_arrive(full_k + i, TILE);
                    load_tile<D, N, PACKED>(k_ring + at.stage * TILE, &map_k, full_k + i, tile * N, head,
                                            work.batch, of.first_key, of.keys);
                    mbarrier_wait_in_block(empty_v + i, at.phase ^ 1);
                    mbarrier_arrive(full_v + i, TILE);
                    load_tile<D, N, PACKED>(v_ring + at.stage * TILE, &map_v, full_v + i, tile * N, head,
                                            work.batch, of.first_key, of.keys);
                }
            }
        mbarrier_wait_in_block(empty_q + 8 * of_q.stage, of_q.phase ^ 1);
        list[of_q.stage].first = -1;  // the end
        mbarrier_arrive(full_q + 8 * of_q.stage);
    } else {
        more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
        Position<Q_STAGES> of_q;
        Position<STAGES> of_k, of_v;
        auto release = [&](unsigned empty, Position<STAGES>& at) {
            if (lane == 0) mbarrier_arrive(empty + 8 * at.stage);
            at.advance();
        };
        for (;; of_q.advance()) {
            mbarrier_wait_in_block(full_q + 8 * of_q.stage, of_q.phase);
            Block block = list[of_q.stage];
            if (block.first < 0) break;
            Sequence of = block.of;
            int first = block.first, offset = block.offset, begin = block.begin, tile = block.tile;
            int row = first + warp_row + lane / 4, low = first + 64 * warpgroup + 64 + offset - window;
            int high = min(first + 64 * warpgroup + offset, of.keys - 1);
            float o[1][D / 8][4] = {}, s[1][N / 8][4], row_max[1][2], row_sum[1][2] = {}, shrink[1][2];
            unsigned p[N / 16][4], q = q_ring + of_q.stage * Q_BYTES + 64 * warpgroup * ROW_BYTES;
            row_max[0][0] = row_max[0][1] = minus_infinity<float>();
            auto finish_product = [&](bool started) {  // wait for the product by V, if one was started
                wgmma_wait<0>(o[0]);
                if (started) release(empty_v, of_v);
            };
            // of the scores of `tile`, while the previous tile's product by V runs, if started
            auto to_weights = [&](bool started) {
                int column = tile * N + lane % 4 * 2, limit = row + offset - column;
                auto mask = [&] {  // each query of the warpgroup sees the keys from `low` to `high`
                    auto add = [&](int r, int n, int j, float bias) {
                        float& x = s[r][n][j];
                        x = fmaf(x, c, bias);
                    };
                    if constexpr (BIASED<Extra>)
                        extra.template each<false, 1, N / 8>(block.batch, block.head, first + warp_row,
                                                             tile * N, of.queries, of.keys, LOG2_E, add);
                    auto hidden = [=](int row, int n) {
                        return n > min(limit + row, of.keys - 1 - column) || n <= limit + row - window;
                    };
                    if (tile * N + N - 1 > high || tile * N < low) hide(s, hidden);
                };
                softmax_weights<1, N / 8, SOFTCAP>(s, row_max, row_sum, shrink, mask, tanh_factor, c_softmax);
                auto drop = [&](int r, int n, int j) { s[r][n][j] = 0; };
                if constexpr (DROPS<Extra>)
                    extra.template each<false, 1, N / 8>(first + warp_row, tile * N,
                                                         block.batch * heads + block.head, drop);
                if constexpr (WARPGROUPS > 1) before_wait(fminf(row_sum[0][0], row_sum[0][1]));
                if (WARPGROUPS > 1 || started) {
                    finish_product(started);
                    multiply_rows(o, shrink);
                }
                to_operand<T>(p, s[0]);
            };
            auto next_products = [&] {  // Q by `tile` of K, and the weights by the tile of V before
                mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                if constexpr (WARPGROUPS > 1) barrier_of(1 + warpgroup, 256);
                wgmma_fence(o[0], p);
                start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                wgmma_commit();
                mbarrier_wait_in_block(full_v + 8 * of_v.stage, of_v.phase);
                start_product<T, D>(o[0], p, v_ring + of_v.stage * TILE);
                wgmma_commit();
                if (WARPGROUPS > 1 && (tile > begin || warpgroup < WARPGROUPS - 1))
                    arrive_at(1 + (warpgroup + 1) % WARPGROUPS, 256);
                wgmma_wait<1>(s[0]);
                release(empty_k, of_k);
            };
            if (tile >= begin) {
                mbarrier_wait_in_block(full_k + 8 * of_k.stage, of_k.phase);
                wgmma_fence();
                start_transposed<T, D, M>(s[0], q, k_ring + of_k.stage * TILE);
                wgmma_commit();
                wgmma_wait<0>(s[0]);
                release(empty_k, of_k);
                // warpgroup 0 starts
                if (WARPGROUPS > 1 && warpgroup == WARPGROUPS - 1 && tile > begin) arrive_at(1, 256);
                if constexpr (WARPGROUPS == 1) {  // Two copies of the softmax make the kernel faster.
                    to_weights(false);
                    for (tile--; tile >= begin; tile--) {
                        next_products();
                        to_weights(true);
                    }
                } else {  // One copy compiles in less time.
                    for (bool started = false;; started = true) {
                        to_weights(started);
                        if (tile-- == begin) break;
                        next_products();
                    }
                }
                mbarrier_wait_in_block(full_v + 8 * of_v.stage, of_v.phase);
                wgmma_fence(o[0], p);
                start_product<T, D>(o[0], p, v_ring + of_v.stage * TILE);
                wgmma_commit();
                finish_product(true);
            }
            long long stats = ((long long)block.batch * heads + block.head) * queries + of.first_query;
            float factor[1][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float sum = warp_reduce<Sum>(row_sum[0][i], 4);
                factor[0][i] = sum == 0 ? 0 : scale_of(extra) / sum;
                if (lane % 4 == 0 && row + 8 * i < of.queries)
                    lse[stats + row + 8 * i] =
                        sum == 0 ? minus_infinity<float>()
                                 : (__fmul_rn(row_max[0][i], c_softmax) + log2_approx(sum)) * LN_2;
            }
            barrier_of(8 + warpgroup, 128);  // all warps are done with Q
            T* to = out + block.batch * of_out.batch + block.head * of_out.head +
                    (of.first_query + first + warp_row) * of_out.row;
            store_rows<T, D, M, true>(to, of_out.row, of.queries - first - warp_row, head_dim, o, factor,
                                      shared + of_q.stage * Q_BYTES + warp_row * ROW_BYTES);
            // The next tile of Q comes here. Every lane arrives, as each has read O and the list.
            fence_async();
            mbarrier_arrive(empty_q + 8 * of_q.stage);
        }
    }
#endif
}
