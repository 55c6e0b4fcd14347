// attention v4, backward for head_dim 128 in one launch (sm_90a): dk, dv and dq with 5 products of matrices.
// wgmma_backward.cuh takes 7, in two launches. Deterministic. A second kernel rounds dq.
//
// Blocks     a thread block owns 128 keys, a consumer warpgroup 64 of them, and loops over tiles of N = 64
//            queries, the last first. s = K Q^T, dp = V dO^T, p = exp2(c s - lse), ds = p (dp - delta), dv +=
//            p dO, dk += ds Q. Both warpgroups store ds to shared memory, and each multiplies all of it by 64
//            columns of K: the block's part of dq.
// Order      the parts of dq are added in global memory, in float32, and in the order of the keys: `turns`
//            counts the thread blocks that have added to a tile. The first one stores. A thread block waits
//            only for those with lower numbers, which the GPU starts before it.
// Overlap    dp is computed under the exponentials, dv under ds, and s of the next tile while dq leaves. The
//            last warpgroup has a thread that starts the loads, and two that wait for the turns and add, each
//            every second tile: to wait, add and pass on the turn takes longer than the products of a tile.
// Layout     of a tile of dq in shared and global memory: 2 warpgroups x 8 x 128 threads x 4 floats, as the
//            accumulators are.
// Launch     1-D grid, see work_of; block = 384; dynamic shared memory = OrderedShape::BYTES.
#pragma once
#include "../common/ptx/counter.cuh"
#include "wgmma_tile.cuh"

template <int D, int N>
struct OrderedShape {
    static constexpr int STAGES = 2, ROWS = 128, FIXED = PAGES<D> * ROWS * ROW_BYTES,
                         TILE = PAGES<D> * N * ROW_BYTES, DS_TILE = ROWS * ROW_BYTES, DQ_TILE = N * D * 4;
    static constexpr int DS = 2 * FIXED, DQ = DS + STAGES * DS_TILE, RING = DQ + STAGES * DQ_TILE,
                         STATS = RING + STAGES * 2 * TILE, BARRIERS = STATS + STAGES * 2 * N * 4,
                         LIST = BARRIERS + 8 * (1 + 4 * STAGES), BYTES = LIST + 4 * STAGES;
};

template <typename T, int D, int N>
__global__ void __launch_bounds__(384, 1)
    attention_v4_bwd_ordered(T* grad_k, T* grad_v, float* grad_q, int* turns,
                             const __grid_constant__ CUtensorMap map_k,
                             const __grid_constant__ CUtensorMap map_v,
                             const __grid_constant__ CUtensorMap map_q,
                             const __grid_constant__ CUtensorMap map_dout, const float* lse,
                             const float* delta, Strides of_k, Strides of_v, int blocks, int heads,
                             int batches, int group, int section, int queries, int keys, int padded,
                             int window, int head_dim, bool causal, float c, float scale) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = OrderedShape<D, N>;
    using Regs = Registers<2, 1>;
    static_assert(D == 128 && N == 64, "a warpgroup computes 64 x 64 of dq");
    constexpr int STAGES = Shape::STAGES, ROWS = Shape::ROWS, FIXED = Shape::FIXED, TILE = Shape::TILE;
    // K, V, and of the last two tiles: ds, dq, Q and dO, lse and delta, mbarriers, list
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned fixed = shared_address(shared), ring = fixed + Shape::RING, stats = fixed + Shape::STATS;
    unsigned full_fixed = fixed + Shape::BARRIERS, full = full_fixed + 8, empty = full + 8 * STAGES,
             full_dq = empty + 8 * STAGES, empty_dq = full_dq + 8 * STAGES;
    int* list = reinterpret_cast<int*>(shared + Shape::LIST);  // the first queries of the tiles in the ring
    if (threadIdx.x == 0) {
        mbarrier_init(full_fixed, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 256);
            mbarrier_init(full_dq + 8 * i, 256), mbarrier_init(empty_dq + 8 * i, 1);
        }
        mbarriers_made();
    }
    wait_for_previous();
    __syncthreads();
    Work work = work_of(blockIdx.x, blocks, heads / group, batches, max(1, section / group), false);
    int first = work.block * ROWS, warpgroup = warpgroup_in_block();
    // Query i sees the keys from i + offset - window + 1 to i + offset.
    int offset = causal ? keys - queries : keys, begin = max(0, first - offset) / N,
        end = (min(queries, first + ROWS - 1 - offset + window) + N - 1) / N;
    int first_head = work.batch * heads + work.head * group, head = first_head, per_head = padded / N;
    int tiles = max(0, end - begin) * group, tile = end - 1;
    // All heads of a group take a tile before the next tile. Else causal blocks of many tiles would stop
    // those of few at each head. With a window the blocks have equally many tiles, and those of all heads
    // would not stay in the L2 cache.
    bool by_head = window < queries;
    auto next = [&] {
        if (by_head) {
            if (tile-- == begin) tile = end - 1, head++;
        } else if (++head == first_head + group) head = first_head, tile--;
    };
    if (warpgroup == 2) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x == 256 && tiles > 0) {
            mbarrier_arrive(full_fixed, 2 * FIXED);
            load_tile<D, ROWS, false>(fixed, &map_k, full_fixed, first, work.head, work.batch, 0, keys);
            load_tile<D, ROWS, false>(fixed + FIXED, &map_v, full_fixed, first, work.head, work.batch, 0,
                                      keys);
            for (Position<STAGES> at; tiles > 0; tiles--, at.advance(), next()) {
                unsigned barrier = full + 8 * at.stage, to = ring + at.stage * 2 * TILE,
                         to_stats = stats + at.stage * 2 * N * 4;
                long long of_stats = (long long)head * padded + tile * N;
                mbarrier_wait_in_block(empty + 8 * at.stage, at.phase ^ 1);
                list[at.stage] = tile * N;
                mbarrier_arrive(barrier, 2 * TILE + 2 * N * 4);
                load_tile<D, N, false>(to, &map_q, barrier, tile * N, head - work.batch * heads, work.batch,
                                       0, queries);
                load_tile<D, N, false>(to + TILE, &map_dout, barrier, tile * N, head - work.batch * heads,
                                       work.batch, 0, queries);
                bulk_load(to_stats, lse + of_stats, N * 4, barrier);
                bulk_load(to_stats + N * 4, delta + of_stats, N * 4, barrier);
            }
        } else if (threadIdx.x == 288 || threadIdx.x == 320) {  // each for every second tile
            int odd = threadIdx.x == 320;
            unsigned part = fixed + Shape::DQ + odd * Shape::DQ_TILE;
            for (int number = 0; number < tiles; number++, next()) {
                if (number % 2 != odd) continue;
                long long place = (long long)head * per_head + tile;  // in `turns`
                // thread blocks that add before
                int before = work.block - max(0, tile * N + 1 + offset - window) / ROWS;
                mbarrier_wait_in_block(full_dq + 8 * odd, number / 2 % 2);
                while (before && counter_read(turns + place) < before);
                if (before) bulk_add(grad_q + place * N * D, part, Shape::DQ_TILE);
                else bulk_store(grad_q + place * N * D, part, Shape::DQ_TILE);
                bulk_commit();
                bulk_wait_read<0>();
                mbarrier_arrive(empty_dq + 8 * odd);
                bulk_wait<0>();
                counter_add(turns + place);
            }
        }
    } else {
        more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, mine = first + warp_row + lane / 4;
        float s[N / 8][4], dp[N / 8][4], dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
        unsigned p[N / 16][4], ds[N / 16][4], x = fixed + 64 * warpgroup * ROW_BYTES;
        int number = 0;  // of the tile, whose stage is number % 2
        auto start_s = [&](int stage) {
            start_transposed<T, D, ROWS>(s, x, ring + stage * 2 * TILE);
            wgmma_commit();
        };
        auto start_dp = [&](int stage) {
            start_transposed<T, D, ROWS>(dp, x + FIXED, ring + stage * 2 * TILE + TILE);
            wgmma_commit();
        };
        auto start_dv = [&](int stage) {
            start_product<T, D>(dv[0], p, ring + stage * 2 * TILE + TILE);
            wgmma_commit();
        };
        auto start_dk_dq = [&](int stage) {
            start_product<T, D>(dk[0], ds, ring + stage * 2 * TILE);
            wgmma_commit();
            barrier_of(1, 256);  // ds of all keys is complete
            unsigned a = place_of(fixed + Shape::DS + stage * Shape::DS_TILE),
                     b = place_of(fixed + warpgroup * ROWS * ROW_BYTES);
#pragma unroll
            for (int k = 0; k < ROWS / 16; k++)
                wgmma<true, true, T>(dp, descriptor_of(a + k * ROW_BYTES), descriptor_of(b + k * ROW_BYTES),
                                     k > 0);
            wgmma_commit();
        };
        auto pass_on_dq = [&](int stage) {  // from dp
            mbarrier_wait_in_block(empty_dq + 8 * stage, (number / 2 + 1) % 2);
            float4* to = reinterpret_cast<float4*>(shared + Shape::DQ + stage * Shape::DQ_TILE) +
                         warpgroup * N * 16 + threadIdx.x % 128;
#pragma unroll
            for (int i = 0; i < N / 8; i++) to[i * 128] = make_float4(dp[i][0], dp[i][1], dp[i][2], dp[i][3]);
            fence_async();
            mbarrier_arrive(full_dq + 8 * stage);
        };
        if (tiles > 0) {
            mbarrier_wait_in_block(full_fixed, 0);
            mbarrier_wait_in_block(full, 0);
            wgmma_fence(dk[0], dv[0]);
            start_s(0);
            start_dp(0);
            for (;; number++) {
                int stage = number % 2, now = list[stage];
                // The least and the greatest difference query - key of this warpgroup and tile.
                int row = first + 64 * warpgroup, least = now - row - 63, most = now + N - 1 - row;
                bool masked = least + offset < 0 || most + offset >= window || row + 64 > keys;
                const float* of_column =
                    reinterpret_cast<const float*>(shared + Shape::STATS) + stage * 2 * N + lane % 4 * 2;
                wgmma_wait<1>(s);
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    s[i / 4][i % 4] = exp2_approx(fmaf(s[i / 4][i % 4], c, -of_column[i / 4 * 8 + i % 2]));
                if (masked) {
                    int distance = now + lane % 4 * 2 - mine + offset;
#pragma unroll
                    for (int i = 0; i < N / 2; i++) {
                        int down = i % 4 / 2 * 8;
                        if (unsigned(distance + i / 4 * 8 + i % 2 - down) >= unsigned(window) ||
                            mine + down >= keys)
                            s[i / 4][i % 4] = 0;
                    }
                }
                to_operand<T>(p, s);
                wgmma_fence(p);
                start_dv(stage);
                wgmma_wait<1>(dp);
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    dp[i / 4][i % 4] =
                        (dp[i / 4][i % 4] - of_column[N + i / 4 * 8 + i % 2]) * s[i / 4][i % 4];
                to_operand<T>(ds, dp);
                unsigned to = fixed + Shape::DS + stage * Shape::DS_TILE + warp_row * ROW_BYTES;
#pragma unroll
                for (int i = 0; i < N / 16; i++)
                    stmatrix_x4(columns_at<ROWS>(to + down_rows(lane), i), ds[i]);
                fence_async();
                if (number == tiles - 1) break;
                mbarrier_wait_in_block(full + 8 * (stage ^ 1), (number + 1) / 2 % 2);
                wgmma_fence(ds, dp);
                start_dk_dq(stage);
                wgmma_wait<1>();  // p and ds are free
#pragma unroll
                for (int i = 0; i < N / 2; i++) s[i / 4][i % 4] = 0;  // else s occupies registers in between
                wgmma_fence(s);
                start_s(stage ^ 1);
                wgmma_wait<1>(dp);
                mbarrier_arrive(empty + 8 * stage);
                pass_on_dq(stage);
                wgmma_fence(dp);
                start_dp(stage ^ 1);
            }
            wgmma_fence(ds, dp);
            start_dk_dq(number % 2);
            wgmma_wait<0>(dp);
            pass_on_dq(number % 2);
            written(dk[0]), written(dv[0]);
        }
        barrier_of(1, 256);  // all warps are done with K and V
        float factor[1][2] = {scale, scale}, one[1][2] = {1, 1};
        int left = keys - first - warp_row, from = first + warp_row;
        unsigned char* rows = shared + warp_row * ROW_BYTES;
        T* to = grad_k + work.batch * of_k.batch + work.head * of_k.head + from * of_k.row;
        store_rows<T, D, ROWS, true>(to, of_k.row, left, head_dim, dk, factor, rows);
        to = grad_v + work.batch * of_v.batch + work.head * of_v.head + from * of_v.row;
        store_rows<T, D, ROWS, true>(to, of_v.row, left, head_dim, dv, one, rows + FIXED);
    }
#endif
}

// dq = scale times the sums of attention_v4_bwd_ordered, 0 for queries that see no key. A thread block of 256
// threads for each tile; a thread has 8 columns of two rows at a time.
template <typename T, int D, int N>
__global__ void __launch_bounds__(256)
    attention_v4_round_dq(T* grad_q, const float* sums, Strides of_q, int heads, int queries, int padded,
                          int head_dim, int offset, float scale) {
#if __CUDA_ARCH__ == 900
    wait_for_previous();
    int per_head = padded / N, head = blockIdx.x / per_head, tile = blockIdx.x - head * per_head;
    int column = threadIdx.x % 8, row = tile * N + threadIdx.x / 64 * 16 + threadIdx.x / 8 % 8;
    bool seen = tile * N + N - 1 + offset >= 0;
    T* to = grad_q + head / heads * of_q.batch + head % heads * of_q.head;
#pragma unroll
    for (int half = 0; half < D / 64; half++) {
        const float* from = sums + ((long long)blockIdx.x * (D / 64) + half) * N * 64 + column * 512 +
                            threadIdx.x / 64 * 128 + threadIdx.x / 8 % 8 * 16;
        float x[2][8];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i / 2 % 2][i / 4 * 2 + i % 2] = seen ? scale * from[i] : 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < queries && half * 64 + column * 8 < head_dim)
                *reinterpret_cast<Vec<T, 8>*>(to + (row + 8 * i) * of_q.row + half * 64 + column * 8) =
                    pack<T, 8>(x[i]);
    }
#endif
}
