// attention v4, backward: the two kinds of thread blocks of v3 (attention.cu) by wgmma and TMA,
// warp-specialised (sm_90a). Deterministic.
//
// Operands   X, Y are fixed: K, V of 64 * WARPGROUPS keys, or Q, dO of as many queries. X', Y' move: tiles of
//            N rows of the other two. s = X X'^T, dp = Y Y'^T, p = exp2(c s - lse), ds = p (dp - delta),
//            dx += ds X', and with KEYS dy += p Y'. X is K: dx, dy are dk, dv. X is Q: dx is dq.
// Blocks     each consumer warpgroup owns 64 rows of X and Y. One more warpgroup starts the copies (the
//            producer). X', Y', and with KEYS lse and delta of their queries, have a ring buffer of STAGES
//            stages.
// Two roles  with KEYS and D > 128 two warpgroups share 64 keys, because dk and dv fill the registers of
//            both. The first computes s, p and dv. The second computes dp, ds and dk, and gets p through
//            shared memory.
// Overlap    s of the next tile is started before, and dp after, the sums of this one. So the tensor cores
//            have work while the weights of the next tile are computed.
// Launch     1-D grid, see work_of; block = 128 * (WARPGROUPS + 1); dynamic shared memory =
//            BackwardShape::BYTES.
#pragma once
#include "bias.cuh"
#include "wgmma_tile.cuh"

template <bool KEYS, int D, int N, int WARPGROUPS, int STAGES>
struct BackwardShape {
    static constexpr int ROWS = 64 * WARPGROUPS / PARTS<KEYS, D>, FIXED = PAGES<D> * ROWS * ROW_BYTES,
                         TILE = PAGES<D> * N * ROW_BYTES;
    static constexpr bool ROLES = PARTS<KEYS, D> == 2;
    static constexpr int WEIGHTS = ROLES ? 64 * N * 4 : 0;  // p of a tile; for two tiles
    static constexpr int STATS = 2 * FIXED + 2 * STAGES * TILE, SENT = STATS + STAGES * 2 * N * 4,
                         BARRIERS = SENT + 2 * WEIGHTS, BYTES = BARRIERS + 8 * (1 + 2 * STAGES);
};

template <bool KEYS, typename T, int D, int N, int WARPGROUPS, int STAGES, int PER_SM, bool SOFTCAP,
          bool PACKED, class... Extras>
__global__ void __launch_bounds__(128 * (WARPGROUPS + 1), PER_SM)
    attention_v4_bwd(T* grad_x, T* grad_y, const __grid_constant__ CUtensorMap map_x,
                     const __grid_constant__ CUtensorMap map_y,
                     const __grid_constant__ CUtensorMap map_moving_x,
                     const __grid_constant__ CUtensorMap map_moving_y, const float* lse, const float* delta,
                     const int* query_bounds, const int* key_bounds, Strides of_x, Strides of_y, int blocks,
                     int heads, int batches, int group, int section, int queries, int keys, int padded,
                     int stats_tile, int sequences, int window, int head_dim, bool causal, float tanh_factor,
                     float c, float scale, Extras... extras) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    using Shape = BackwardShape<KEYS, D, N, WARPGROUPS, STAGES>;
    using Regs = Registers<WARPGROUPS, PER_SM>;
    auto extra = extra_of(extras...);
    using Extra = decltype(extra);
    static_assert(!(SOFTCAP && (DROPS<Extra> || BIASED<Extra>)), "not together");
    constexpr int ROWS = Shape::ROWS, FIXED = Shape::FIXED, TILE = Shape::TILE;
    // X, Y, the ring of X', Y', the ring of lse, delta, p, mbarriers
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned fixed = shared_address(shared), ring = fixed + 2 * FIXED, stats = fixed + Shape::STATS;
    unsigned full_fixed = fixed + Shape::BARRIERS, full = full_fixed + 8, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        mbarrier_init(full_fixed, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, KEYS ? 128 * WARPGROUPS : 4 * WARPGROUPS);
        }
        mbarriers_made();
    }
    wait_for_previous();
    __syncthreads();
    int owners = KEYS ? heads / group : heads;
    Work work = work_of(blockIdx.x, blocks, owners, batches, KEYS ? max(1, section / group) : section,
                        !KEYS && causal);
    Sequence of = sequence_of<PACKED, KEYS, ROWS>(work, query_bounds, key_bounds, sequences, queries, keys);
    queries = of.queries, keys = of.keys;
    if (PACKED && work.block * ROWS >= (KEYS ? keys : queries)) return;
    int first = work.block * ROWS;
    // with more arguments the uniform number costs spills
    int warpgroup = sizeof...(Extras) ? threadIdx.x / 128 : warpgroup_in_block();
    // The moving tiles that a row of the block needs. Query i sees the keys from i + offset - window + 1 to
    // i + offset.
    int offset = causal ? keys - queries : keys;
    int begin = max(0, KEYS ? first - offset : first + offset - window + 1) / N;
    int end = KEYS ? (min(queries, first + ROWS - 1 - offset + window) + N - 1) / N
                   : (min(keys, max(0, min(first + ROWS, queries) + offset)) + N - 1) / N;
    int head = KEYS ? work.head * group : work.head;
    long long of_stats = ((long long)work.batch * heads + head) * padded + of.stats(stats_tile);
    int tiles = max(0, end - begin) * (KEYS ? group : 1), tile = begin;
    if (warpgroup == WARPGROUPS) {
        fewer_registers<Regs::PRODUCER>();
        if (threadIdx.x == 128 * WARPGROUPS && tiles > 0) {
            mbarrier_arrive(full_fixed, 2 * FIXED);
            int owned_begin = KEYS ? of.first_key : of.first_query, owned_count = KEYS ? keys : queries;
            load_tile<D, ROWS, PACKED>(fixed, &map_x, full_fixed, first, work.head, work.batch, owned_begin,
                                       owned_count);
            load_tile<D, ROWS, PACKED>(fixed + FIXED, &map_y, full_fixed, first, work.head, work.batch,
                                       owned_begin, owned_count);
            int moving_head = KEYS ? head : head / group, begin_moving = KEYS ? of.first_query : of.first_key,
                count = KEYS ? queries : keys;
            for (Position<STAGES> at; tiles > 0; tiles--, at.advance()) {
                unsigned barrier = full + 8 * at.stage, to = ring + at.stage * 2 * TILE,
                         to_stats = stats + at.stage * 2 * N * 4;
                mbarrier_wait_in_block(empty + 8 * at.stage, at.phase ^ 1);
                mbarrier_arrive(barrier, 2 * TILE + (KEYS ? 2 * N * 4 : 0));
                load_tile<D, N, PACKED>(to, &map_moving_x, barrier, tile * N, moving_head, work.batch,
                                        begin_moving, count);
                load_tile<D, N, PACKED>(to + TILE, &map_moving_y, barrier, tile * N, moving_head, work.batch,
                                        begin_moving, count);
                if constexpr (KEYS) {
                    bulk_load(to_stats, lse + of_stats + tile * N, N * 4, barrier);
                    bulk_load(to_stats + N * 4, delta + of_stats + tile * N, N * 4, barrier);
                }
                // the next head of the group
                if (++tile == end) tile = begin, moving_head++, of_stats += padded;
            }
        }
    } else if constexpr (Shape::ROLES) {
        more_registers<Regs::CONSUMER>();
        // The first product is s = K Q^T or dp = V dO^T, and the sum dv += p dO or dk += ds Q.
        bool second = warpgroup == 1;
        int lane = threadIdx.x % 32, warp_row = threadIdx.x % 128 / 32 * 16,
            mine = first + warp_row + lane / 4;
        float s[N / 8][4], sum[1][D / 8][4] = {};
        unsigned p[N / 16][4];
        Position<STAGES> at;
        auto start_first = [&] {
            start_transposed<T, D, ROWS>(s, fixed + second * FIXED, ring + (2 * at.stage + second) * TILE);
            wgmma_commit();
        };
        auto start_sum = [&] {
            start_product<T, D>(sum[0], p, ring + (2 * at.stage + !second) * TILE);
            wgmma_commit();
        };
        if (tiles > 0) {
            mbarrier_wait_in_block(full_fixed, 0);
            mbarrier_wait_in_block(full, 0);
            wgmma_fence(sum[0]);
            start_first();
            for (int done = 0;; done++, tiles--) {
                int now = tile * N, of_head = head;
                if (++tile == end) tile = begin, head++;
                const float* of_column = reinterpret_cast<const float*>(shared + Shape::STATS) +
                                         (2 * at.stage + second) * N + lane % 4 * 2;
                float4* sent = reinterpret_cast<float4*>(shared + Shape::SENT + done % 2 * Shape::WEIGHTS) +
                               threadIdx.x % 128;
                int is_sent = 1 + done % 2, is_read = 3 + done % 2;  // barriers
                auto drop = [&](int, int n, int j) { s[n][j] = 0; };
                auto drop_all = [&] {
                    if constexpr (DROPS<Extra>) {
                        extra.template each<true, 1, N / 8>(first + warp_row, now,
                                                            work.batch * heads + of_head, drop);
#pragma unroll
                        for (int i = 0; i < N / 2; i++) s[i / 4][i % 4] *= scale_of(extra);
                    }
                };
                wgmma_wait<0>(s);
                if (!second) {
                    auto add = [&](int, int n, int j, float bias) { s[n][j] = fmaf(s[n][j], c, bias); };
                    if constexpr (BIASED<Extra>)
                        extra.template each<true, 1, N / 8>(work.batch, of_head, first + warp_row, now,
                                                            queries, keys, LOG2_E, add);
                    float slope[N / 8][4];  // of the softcap
#pragma unroll
                    for (int i = 0; i < N / 2; i++) {
                        float& w = s[i / 4][i % 4];
                        if constexpr (SOFTCAP) w = tanh_of<false>(w * tanh_factor);
                        slope[i / 4][i % 4] = SOFTCAP ? 1 - w * w : 1;
                        w = exp2_approx(fmaf(w, BIASED<Extra> ? 1 : c, -of_column[i / 4 * 8 + i % 2]));
                    }
                    if (now - first - 63 + offset < 0 || now + N - 1 - first + offset >= window) {
                        int distance = now + lane % 4 * 2 - mine + offset;
#pragma unroll
                        for (int i = 0; i < N / 2; i++)
                            if (unsigned(distance + i / 4 * 8 + i % 2 - i % 4 / 2 * 8) >= unsigned(window))
                                s[i / 4][i % 4] = 0;
                    }
                    if (done > 1) barrier_of(is_read, 256);
#pragma unroll
                    for (int i = 0; i < N / 8; i++)
                        sent[i * 128] = make_float4(s[i][0] * slope[i][0], s[i][1] * slope[i][1],
                                                    s[i][2] * slope[i][2], s[i][3] * slope[i][3]);
                    arrive_at(is_sent, 256);
                    drop_all();
                } else {
                    drop_all();
                    barrier_of(is_sent, 256);
#pragma unroll
                    for (int i = 0; i < N / 8; i++) {
                        float4 w = sent[i * 128];
                        float factor[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            s[i][j] = (s[i][j] - of_column[i * 8 + j % 2]) * factor[j];
                    }
                    if (tiles > 2) arrive_at(is_read, 256);
                }
                to_operand<T>(p, s);
                wgmma_fence(p);
                start_sum();
                if (tiles == 1) break;
                unsigned of_stage = empty + 8 * at.stage;
                at.advance();
                mbarrier_wait_in_block(full + 8 * at.stage, at.phase);
                wgmma_fence(s);
                start_first();
                wgmma_wait<1>();
                mbarrier_arrive(of_stage);
            }
            wgmma_wait<0>(sum[0]);
        }
        barrier_of(5, 256);  // both are done with K and V
        float factor[1][2] = {1, 1};
        if (second) factor[0][0] = factor[0][1] = scale;
        const Strides& to = second ? of_x : of_y;
        int from = first + warp_row;
        store_rows<T, D, ROWS, true>((second ? grad_x : grad_y) + work.batch * to.batch +
                                         work.head * to.head + (from + of.first_key) * to.row,
                                     to.row, keys - from, head_dim, sum, factor,
                                     shared + second * FIXED + warp_row * ROW_BYTES);
    } else {
        more_registers<Regs::CONSUMER>();
        int lane = threadIdx.x % 32;
        // the warpgroup's first
        int warp_row = threadIdx.x / 32 * 16, row = first + 64 * warpgroup;
        int mine = first + warp_row + lane / 4;
        float s[N / 8][4], dp[N / 8][4], dx[1][D / 8][4] = {}, dy[1][D / 8][4] = {}, of_row[2][2];
        unsigned p[N / 16][4], ds[N / 16][4], x = fixed + 64 * warpgroup * ROW_BYTES;
        if constexpr (!KEYS)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int query = min(mine + 8 * i, queries - 1);
                of_row[0][i] = lse[of_stats + query], of_row[1][i] = delta[of_stats + query];
            }
        Position<STAGES> at;
        auto start_s = [&](int stage) {
            start_transposed<T, D, ROWS>(s, x, ring + stage * 2 * TILE);
            wgmma_commit();
        };
        auto start_dp = [&](int stage) {
            start_transposed<T, D, ROWS>(dp, x + FIXED, ring + stage * 2 * TILE + TILE);
            wgmma_commit();
        };
        auto start_sums = [&](int stage) {
            if constexpr (KEYS) start_product<T, D>(dy[0], p, ring + stage * 2 * TILE + TILE);
            start_product<T, D>(dx[0], ds, ring + stage * 2 * TILE);
            wgmma_commit();
        };
        if (tiles > 0) {
            mbarrier_wait_in_block(full_fixed, 0);
            mbarrier_wait_in_block(full, 0);
            wgmma_fence(dx[0], dy[0]);
            start_s(0);
            start_dp(0);
            for (;; tiles--) {
                int now = tile * N, stage = at.stage, of_head = head, number = work.batch * heads + head;
                if (++tile == end) tile = begin, head++;
                // The least and the greatest difference query - key of this warpgroup and tile.
                int least = KEYS ? now - row - 63 : row - now - N + 1,
                    most = KEYS ? now + N - 1 - row : row + 63 - now;
                bool masked = least + offset < 0 || most + offset >= window || (!KEYS && now + N > keys);
                const float* of_column =
                    reinterpret_cast<const float*>(shared + Shape::STATS) + stage * 2 * N + lane % 4 * 2;
                auto delta_of = [&](int i) {
                    return KEYS ? of_column[N + i / 4 * 8 + i % 2] : of_row[1][i % 4 / 2];
                };
                wgmma_wait<SOFTCAP ? 0 : 1>(s);
                if constexpr (SOFTCAP) written(dp);
                auto add = [&](int, int n, int j, float bias) { s[n][j] = fmaf(s[n][j], c, bias); };
                if constexpr (BIASED<Extra>)
                    extra.template each<KEYS, 1, N / 8>(work.batch, of_head, first + warp_row, now, queries,
                                                        keys, LOG2_E, add);
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    float& w = s[i / 4][i % 4];
                    if constexpr (SOFTCAP) {
                        w = tanh_of<false>(w * tanh_factor);
                        dp[i / 4][i % 4] = (dp[i / 4][i % 4] - delta_of(i)) * (1 - w * w);
                    }
                    w = exp2_approx(fmaf(w, BIASED<Extra> ? 1 : c,
                                         -(KEYS ? of_column[i / 4 * 8 + i % 2] : of_row[0][i % 4 / 2])));
                }
                if (masked) {
                    int other = now + lane % 4 * 2, distance = (KEYS ? other - mine : mine - other) + offset;
#pragma unroll
                    for (int i = 0; i < N / 2; i++) {
                        int down = i % 4 / 2 * 8, along = i / 4 * 8 + i % 2,
                            away = distance + (KEYS ? along - down : down - along);
                        if (unsigned(away) >= unsigned(window) || (!KEYS && along >= keys - other))
                            s[i / 4][i % 4] = 0;
                    }
                }
                if constexpr (!SOFTCAP) wgmma_wait<0>(dp);
                bool is_dropped[N / 8][4] = {};
                auto drop = [&](int, int n, int j) { is_dropped[n][j] = true; };
                if constexpr (DROPS<Extra>)
                    extra.template each<KEYS, 1, N / 8>(first + warp_row, now, number, drop);
#pragma unroll
                for (int i = 0; i < N / 2; i++) {
                    float &w = s[i / 4][i % 4], &y = dp[i / 4][i % 4];
                    if constexpr (DROPS<Extra>) y = is_dropped[i / 4][i % 4] ? 0 : y * scale_of(extra);
                    y = (SOFTCAP ? y : y - delta_of(i)) * w;
                    // dv is the sum of the weights that the forward used
                    if constexpr (KEYS && DROPS<Extra>)
                        w = is_dropped[i / 4][i % 4] ? 0 : w * scale_of(extra);
                }
                auto gradient = [&](int, int n, int j) { return dp[n][j]; };
                if constexpr (BIASED<Extra> && !KEYS)
                    extra.template store<1, N / 8>(number, first + warp_row, now, queries, keys, gradient);
                if constexpr (KEYS) to_operand<T>(p, s);
                to_operand<T>(ds, dp);
                if (tiles == 1) break;
                at.advance();
                mbarrier_wait_in_block(full + 8 * at.stage, at.phase);
                wgmma_fence(p, ds);
                start_sums(stage);
                start_s(at.stage);
                wgmma_wait<1>();
                // KEYS: each lane has read lse and delta
                if (KEYS || lane == 0) mbarrier_arrive(empty + 8 * stage);
                start_dp(at.stage);
            }
            wgmma_fence(p, ds);
            start_sums(at.stage);
            wgmma_wait<0>(dx[0]);
            written(dy[0]);
        }
        barrier_of(1 + warpgroup, 128);  // all warps are done with X and Y
        // No stmatrix for D = 96: it makes the main loop 2 % slower.
        float factor[1][2] = {scale, scale}, one[1][2] = {1, 1};
        int left = (KEYS ? keys : queries) - first - warp_row,
            from = first + warp_row + (KEYS ? of.first_key : of.first_query);
        T* to = grad_x + work.batch * of_x.batch + work.head * of_x.head + from * of_x.row;
        unsigned char* rows = shared + warp_row * ROW_BYTES;
        store_rows<T, D, ROWS, D != 96>(to, of_x.row, left, head_dim, dx, factor, rows);
        if constexpr (KEYS) {
            to = grad_y + work.batch * of_y.batch + work.head * of_y.head + from * of_y.row;
            store_rows<T, D, ROWS, D != 96>(to, of_y.row, left, head_dim, dy, one, rows + FIXED);
        }
    }
#endif
}
