// attention: out = softmax(scale * q k^T) v without the matrix of scores, and its gradients. float16,
// bfloat16, float32; sm_80 and newer.
//
// Layout     q and out are (batch, heads, queries, head_dim), k and v (batch, heads / group, keys, head_dim),
//            with any strides that are multiples of 16 bytes, so q, k and v may be parts of one packed
//            tensor. head_dim is a multiple of 8, up to D. Under `causal` query i sees the keys up to i +
//            keys - queries. A query that sees no key gives 0, and lse = -infinity.
// Softmax    online, in powers of 2, of the scores s = q k^T: p = exp2(c s - c max), c = scale * log2(e).
//            With a softcap, s is first replaced by tanh(tanh_factor * s), with tanh_factor = scale / softcap
//            and c = softcap * log2(e).
// Forward    a thread block owns M queries, a warp M / WARPS. It loops over tiles of N keys, the last first.
//            Scores and weights stay in registers: an accumulator is an operand of the next product in the
//            same lanes.
// Backward   dq, dk and dv without atomics, so two runs give the same bits. Blocks of two kinds: one owns
//            keys and sums dk and dv over all queries (and over the heads of a group), the other owns queries
//            and sums dq over all keys. Both compute the weights again: 7 products of matrices instead of 5,
//            but no sums in global memory. v4 has a backward with 5 for head_dim 128 (wgmma_ordered.cuh).
// float32    attention_v3_split writes each number as a sum of PIECES bfloat16 numbers: 3 for the accuracy of
//            float32, 2 where torch allows TF32. The kernels are those of 16 bits, with 6 or 3 products in
//            place of one (tile.cuh) and results O of float32.
// Packed     sequences of different lengths in one tensor: batch = 1, and bounds (cu_seqlens) of queries and
//            keys. A thread block finds its sequence by a binary search (tile.cuh) and then computes that
//            sequence only.
// Dropout    weights are dropped by random numbers that are computed, not stored (dropout.cuh). The others
//            are scaled; lse and delta are as without dropout.
// Bias       is added to the scores (bias.cuh): p = exp2(c s + bias * log2(e) - ...). In the backward the
//            blocks that own queries store ds, its gradient, without the softcap's factor.
// Decoding   attention of up to 16 queries to many keys runs in decode.cuh, which splits the keys over thread
//            blocks.
// Pipeline   tiles are copied by cp.async. STAGES = 2: a tile is copied while the one before is multiplied;
//            one barrier per tile. With 1, K is copied while V is multiplied and V while K is; half the
//            shared memory, two or three barriers per tile.
// Launch     1-D grid, see work_of; block = 32 * WARPS; dynamic shared memory = Q + STAGES (K + V), backward:
//            see attention_v3_bwd.
//
// version  idea                                            4,16,4096,128 causal bf16, H200: forward, backward
// v1, v2   scores in memory (no kernels here)
// v3       fused (Dao, arXiv 2307.08691)                   793 us, 2738 us (1.19, 1.01 of torch's flash)
// v4       wgmma and TMA (wgmma_forward.cuh)               479 us, 1361 us (1.09, 1.08 of cuDNN)
// Experiments and predictions: docs/notes/attention.md.
#include "bias.cuh"
#include "decode.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "wgmma_backward.cuh"
#include "wgmma_forward.cuh"
#include "wgmma_ordered.cuh"

// The number of the last key that a query sees.
__device__ __forceinline__ int last_key(int query, int queries, int keys, bool causal) {
    return causal ? min(query + keys - queries, keys - 1) : keys - 1;
}

// ---- float32

// Store the pieces of eight floats in columns from `column` on of a row of (rows, PIECES, D).
template <int PIECES, int D, typename T>
__device__ __forceinline__ void store_pieces(T* to, long long row, int column, const float (&x)[8]) {
    Vec<T, 8> pieces[PIECES];
    split(pieces, x);
#pragma unroll
    for (int p = 0; p < PIECES; p++) store_vec(to + (row * PIECES + p) * D + column, pieces[p]);
}

// The pieces of k, v and, for the backward, q: of tensor blockIdx.y, (batch, heads, rows, head_dim), as dense
// (batch, heads, rows, PIECES, D). Columns from head_dim on are 0.
template <typename T, int PIECES, int D>
__global__ void __launch_bounds__(256)
    attention_v3_split(T* k_pieces, T* v_pieces, T* q_pieces, const float* k, const float* v, const float* q,
                       Strides of_k, Strides of_v, Strides of_q, int batches, int kv_heads, int heads,
                       int keys, int queries, int head_dim) {
    constexpr int CHUNKS = D / 8;
    int which = blockIdx.y, here = which == 2 ? heads : kv_heads, column = threadIdx.x % CHUNKS * 8;
    Strides of = which == 0 ? of_k : which == 1 ? of_v : of_q;
    const float* from = which == 0 ? k : which == 1 ? v : q;
    long long row = blockIdx.x * (long long)(256 / CHUNKS) + threadIdx.x / CHUNKS,
              rows = which == 2 ? queries : keys, head = row / rows;
    if (head >= (long long)here * batches) return;
    float x[8] = {};
    from += head / here * of.batch + head % here * of.head + (row - head * rows) * of.row + column;
    if (column < head_dim) unpack(x, load_vec<float, 8>(from));
    store_pieces<PIECES, D>(which == 0 ? k_pieces : which == 1 ? v_pieces : q_pieces, row, column, x);
}

// ---- forward

// Extras: the types of the arguments of an extra_of (bias.cuh).
template <typename O, typename T, int PIECES, int D, int M, int N, int WARPS, int STAGES, int BLOCKS_PER_SM,
          bool SOFTCAP, bool PACKED, class... Extras>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    attention_v3(O* out, float* lse, const O* q, const T* k, const T* v, const int* query_bounds,
                 const int* key_bounds, Strides of_out, Strides of_q, Strides of_k, Strides of_v, int blocks,
                 int heads, int batches, int group, int section, int queries, int keys, int sequences,
                 int head_dim, bool causal, float tanh_factor, float c, Extras... extras) {
    constexpr int R = M / (16 * WARPS), THREADS = 32 * WARPS, TILE = N * D * PIECES * sizeof(T);
    auto extra = extra_of(extras...);
    using Extra = decltype(extra);
    const float c_softmax = BIASED<Extra> ? 1 : c;            // of scores with their bias
    extern __shared__ __align__(128) unsigned char shared[];  // Q, stages of K, stages of V
    unsigned q_tile = shared_address(shared), k_tile = q_tile + M * D * PIECES * sizeof(T),
             v_tile = k_tile + STAGES * TILE;
    Work work = work_of(blockIdx.x, blocks, heads, batches, section, causal);
    __shared__ Sequence kept;
    Sequence found = sequence_of<PACKED, false, M>(work, query_bounds, key_bounds, sequences, queries, keys);
    const Sequence& of = keep<PACKED>(kept, found);
    int lane = threadIdx.x % 32, first = work.block * M, warp_row = threadIdx.x / 32 * 16 * R;
    int columns = PIECES > 1 ? D : head_dim;  // pieces are padded
    if (PACKED && first >= of.queries) return;
    out += work.batch * of_out.batch + work.head * of_out.head + of.first_query * of_out.row;
    q += work.batch * of_q.batch + work.head * of_q.head + of.first_query * of_q.row;
    k += work.batch * of_k.batch + work.head / group * of_k.head + of.first_key * of_k.row;
    v += work.batch * of_v.batch + work.head / group * of_v.head + of.first_key * of_v.row;
    auto copy_keys = [&](int tile, unsigned stage) {
        copy_tile<N, D, THREADS, PIECES>(k_tile + stage * TILE, k, of_k.row, tile * N, of.keys, columns);
    };
    auto copy_values = [&](int tile, unsigned stage) {
        copy_tile<N, D, THREADS, PIECES>(v_tile + stage * TILE, v, of_v.row, tile * N, of.keys, columns);
    };

    int tile = last_key(min(first + M, of.queries) - 1, of.queries, of.keys, causal);
    tile = tile < 0 ? -1 : tile / N;  // the number of the last tile that a query of the block sees
    if (tile >= 0) {
        copy_keys(tile, 0);
        if (STAGES == 2) copy_values(tile, 0);
        if constexpr (PIECES == 1) copy_tile<M, D, THREADS>(q_tile, q, of_q.row, first, of.queries, head_dim);
        else
            split_tile<M, D, THREADS, PIECES>(reinterpret_cast<T*>(shared), q, of_q.row, first, of.queries,
                                              head_dim);
        cp_async_commit();
    }
    int seen_first = last_key(first + warp_row, of.queries, of.keys, causal);
    int seen_last = last_key(first + warp_row + 16 * R - 1, of.queries, of.keys, causal);
    unsigned a = q_tile + warp_row * ROW_BYTES + down_rows(lane), stage = 0;
    float sums[R][D / 8][4] = {}, row_max[R][2], row_sum[R][2];
#pragma unroll
    for (int i = 0; i < 2 * R; i++)
        row_max[i / 2][i % 2] = minus_infinity<float>(), row_sum[i / 2][i % 2] = 0;

    for (; tile >= 0; tile--, stage ^= STAGES - 1) {
        cp_async_wait<0>();
        __syncthreads();  // K, and with two stages V, is there, and all warps are done with the tile before
        if (STAGES == 1) copy_values(tile, 0);
        if (STAGES == 2 && tile > 0) copy_keys(tile - 1, stage ^ 1), copy_values(tile - 1, stage ^ 1);
        cp_async_commit();
        bool seen = tile * N <= seen_last;  // by a query of the warp
        if (STAGES == 2 && !seen) continue;
        float s[R][N / 8][4];
        if (seen) {
            multiply_transposed<T, D, M, PIECES>(s, a, k_tile + stage * TILE + along_columns(lane));
            int column = tile * N + lane % 4 * 2,
                limit = first + warp_row + lane / 4 + of.keys - of.queries - column;
            auto hidden = [=](int row, int n) {
                return n >= of.keys - column || (causal && n - row > limit);
            };
            auto mask = [&] {
                auto add = [&](int r, int n, int j, float bias) { s[r][n][j] = fmaf(s[r][n][j], c, bias); };
                if constexpr (BIASED<Extra>)
                    extra.template each<false, R, N / 8>(work.batch, work.head, first + warp_row, tile * N,
                                                         of.queries, of.keys, LOG2_E, add);
                if (tile * N + N - 1 > seen_first) hide(s, hidden);
            };
            softmax_tile<R, N / 8, D, SOFTCAP, (PIECES > 1)>(s, row_max, row_sum, sums, mask, tanh_factor,
                                                             c_softmax);
            auto drop = [&](int r, int n, int j) { s[r][n][j] = 0; };
            if constexpr (DROPS<Extra>)
                extra.template each<false, R, N / 8>(first + warp_row, tile * N,
                                                     work.batch * heads + work.head, drop);
        }
        if constexpr (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // V is there, and all warps are done with K
            if (tile > 0) copy_keys(tile - 1, 0);
            cp_async_commit();
        }
        if (seen) multiply<T, D, PIECES>(sums, s, v_tile + stage * TILE + down_rows(lane));
    }

    long long stats = ((long long)work.batch * heads + work.head) * queries + of.first_query;
    float factor[R][2];
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int r = i / 2, query = first + warp_row + r * 16 + lane / 4 + i % 2 * 8;
        float sum = warp_reduce<Sum>(row_sum[r][i % 2], 4);
        factor[r][i % 2] = sum == 0 ? 0 : scale_of(extra) / sum;
        if (lane % 4 == 0 && query < of.queries)
            lse[stats + query] =
                sum == 0 ? minus_infinity<float>()
                         : fmaf(__fmul_rn(row_max[r][i % 2], c_softmax), LN_2, log2_approx(sum) * LN_2);
    }
    first += warp_row;
    store_rows<O, D, M>(out + first * of_out.row, of_out.row, of.queries - first, head_dim, sums, factor,
                        shared + warp_row * ROW_BYTES);
}

// ---- backward

// For each query lse * log2(e) and delta = sum(dout * out) - dlse, both in rows of `padded` numbers. A query
// without a visible key gets 0 as its lse, so that its weights exp2(-infinity - lse) are 0. Padding gets
// infinity, so that its weights are 0 too. For float32, lse is not multiplied by log2(e), which would round
// it, and dout is split as q in attention_v3_split. Each packed sequence is padded to tiles.
template <typename O, typename T, int PIECES, int D>
__global__ void __launch_bounds__(256)
    attention_v3_preprocess(float* lse_log2, float* delta, T* dout_pieces, const O* out, const O* dout,
                            const float* lse, const float* dlse, const int* bounds, Strides of_out,
                            Strides of_dout, int heads, int queries, int padded, int tile, int sequences,
                            int head_dim) {
    constexpr int CHUNKS = D / 8, ROWS = 256 / CHUNKS;
    int per_head = (padded + ROWS - 1) / ROWS, head = blockIdx.x / per_head, chunk = threadIdx.x % CHUNKS;
    int row = (blockIdx.x - head * per_head) * ROWS + threadIdx.x / CHUNKS, query = row;
    bool inside = query < queries;
    if (bounds) {
        int i = sequence_of(bounds, sequences, queries, row / tile, tile),
            begin = begin_of(bounds, i, sequences, queries);
        query += begin - (begin / tile + i) * tile;
        inside = query < begin_of(bounds, i + 1, sequences, queries);
    }
    float sum = 0, a[8], b[8] = {};
    if (inside && chunk * 8 < head_dim) {
        unpack(a, load_vec<O, 8>(out + head / heads * of_out.batch + head % heads * of_out.head +
                                 query * of_out.row + chunk * 8));
        unpack(b, load_vec<O, 8>(dout + head / heads * of_dout.batch + head % heads * of_dout.head +
                                 query * of_dout.row + chunk * 8));
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
    }
    if constexpr (PIECES > 1)
        if (inside) store_pieces<PIECES, D>(dout_pieces, (long long)head * queries + query, chunk * 8, b);
    sum = warp_reduce<Sum>(sum, CHUNKS);
    if (chunk != 0 || row >= padded) return;
    long long from = (long long)head * queries + query, to = (long long)head * padded + row;
    float logarithm = inside ? lse[from] * (PIECES > 1 ? 1 : LOG2_E) : -minus_infinity<float>();
    lse_log2[to] = logarithm == minus_infinity<float>() ? 0 : logarithm;
    delta[to] = inside && dlse ? sum - dlse[from] : sum;
}

// The arguments of both kinds of thread blocks of the backward.
template <typename O, typename T>
struct Gradients {
    O *dq, *dk, *dv;
    const T *q, *k, *v, *dout;
    const float *lse, *delta;
    const int *query_bounds, *key_bounds;
    Strides of_dq, of_dk, of_dv, of_q, of_k, of_v, of_dout;
    int heads, batches, group, section, queries, keys, padded, stats_tile, sequences, head_dim, causal;
    float tanh_factor, c, scale;
};

// A block owns ROWS rows of the fixed operands: keys (K and V) if KEYS, else queries (Q and dO). It loops
// over tiles of N rows of the moving operands, the other two. With fixed X, Y and moving X', Y': s = X X'^T,
// dp = Y Y'^T, p = exp2(c s - lse), ds = p (dp - delta), and sums ds X' (dk or dq) and, if KEYS, p Y' (dv).
template <bool KEYS, int PIECES, int D, int R, int N, int WARPS, int STAGES, bool SOFTCAP, bool PACKED,
          typename O, typename T, class Extra>
__device__ __forceinline__ void backward_block(const Gradients<O, T>& g, const Extra& extra, int index,
                                               int blocks, unsigned char* shared) {
    constexpr int SHARERS = PARTS<KEYS, D>, COLUMNS = D / SHARERS, ROWS = 16 * R * WARPS / SHARERS,
                  THREADS = 32 * WARPS;
    constexpr int FIXED = ROWS * D * PIECES * sizeof(T), TILE = N * D * PIECES * sizeof(T),
                  PART = COLUMNS / 64 * ROW_BYTES;
    // X, Y, then stages of X', Y'
    unsigned fixed = shared_address(shared), moving = fixed + 2 * FIXED;
    // lse and delta: of the ROWS queries, or stages
    float* stats = reinterpret_cast<float*>(shared + 2 * FIXED + 2 * STAGES * TILE);
    int owners = KEYS ? g.heads / g.group : g.heads;
    int section = KEYS ? max(1, g.section / g.group) : g.section;
    Work work = work_of(index, blocks, owners, g.batches, section, !KEYS && g.causal);
    __shared__ Sequence kept;
    Sequence found =
        sequence_of<PACKED, KEYS, ROWS>(work, g.query_bounds, g.key_bounds, g.sequences, g.queries, g.keys);
    const Sequence& of = keep<PACKED>(kept, found);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SHARERS;
    int first = work.block * ROWS, warp_row = warp / SHARERS * 16 * R, row = first + warp_row;
    int kv_head = KEYS ? work.head : work.head / g.group, head = KEYS ? work.head * g.group : work.head;
    if (PACKED && first >= (KEYS ? of.keys : of.queries)) return;
    const T* k = g.k + work.batch * g.of_k.batch + kv_head * g.of_k.head + of.first_key * g.of_k.row;
    const T* v = g.v + work.batch * g.of_v.batch + kv_head * g.of_v.head + of.first_key * g.of_v.row;
    const T* q = g.q + work.batch * g.of_q.batch + head * g.of_q.head + of.first_query * g.of_q.row;
    const T* dout =
        g.dout + work.batch * g.of_dout.batch + head * g.of_dout.head + of.first_query * g.of_dout.row;
    long long of_stats = ((long long)work.batch * g.heads + head) * g.padded + of.stats(g.stats_tile);

    // The moving tiles that a row of the block needs. offset: query i sees the keys up to i + offset.
    int offset = g.causal ? of.keys - of.queries : of.keys;
    int begin = KEYS ? max(0, first - offset) / N : 0;
    int end = KEYS ? (of.queries + N - 1) / N
                   : (min(of.keys, max(0, min(first + ROWS, of.queries) + offset)) + N - 1) / N;
    int tiles = max(0, end - begin) * (KEYS ? g.group : 1), tile = begin;

    int columns = PIECES > 1 ? D : g.head_dim;
    auto copy_x = [&](int tile, unsigned stage) {
        unsigned to = moving + stage * 2 * TILE;
        if (KEYS) copy_tile<N, D, THREADS, PIECES>(to, q, g.of_q.row, tile * N, of.queries, columns);
        else copy_tile<N, D, THREADS, PIECES>(to, k, g.of_k.row, tile * N, of.keys, columns);
    };
    auto copy_y = [&](int tile, unsigned stage) {  // and lse and delta
        unsigned to = moving + (stage * 2 + 1) * TILE;
        if (KEYS) copy_tile<N, D, THREADS, PIECES>(to, dout, g.of_dout.row, tile * N, of.queries, columns);
        else copy_tile<N, D, THREADS, PIECES>(to, v, g.of_v.row, tile * N, of.keys, columns);
        if (KEYS && threadIdx.x < N / 2) {
            int i = threadIdx.x % (N / 4) * 4;
            const float* from = (threadIdx.x < N / 4 ? g.lse : g.delta) + of_stats + tile * N + i;
            cp_async_16(shared_address(stats + stage * 2 * N + threadIdx.x / (N / 4) * N + i), from);
        }
    };
    if (tiles > 0) {
        copy_tile<ROWS, D, THREADS, PIECES>(fixed, KEYS ? k : q, KEYS ? g.of_k.row : g.of_q.row, first,
                                            KEYS ? of.keys : of.queries, columns);
        copy_tile<ROWS, D, THREADS, PIECES>(fixed + FIXED, KEYS ? v : dout, KEYS ? g.of_v.row : g.of_dout.row,
                                            first, KEYS ? of.keys : of.queries, columns);
        if (STAGES == 2) copy_x(tile, 0);
        copy_y(tile, 0);
        cp_async_commit();
    }
    if constexpr (!KEYS) {
        for (int i = threadIdx.x; i < 2 * ROWS; i += THREADS) {
            int query = min(first + i % ROWS, of.queries - 1);
            stats[i] = (i < ROWS ? g.lse : g.delta)[of_stats + query];
        }
    }
    unsigned a = fixed + warp_row * ROW_BYTES + down_rows(lane), stage = 0;
    float dx[R][COLUMNS / 8][4] = {}, dy[KEYS ? R : 1][COLUMNS / 8][4] = {};

    for (; tiles > 0; tiles--, stage ^= STAGES - 1) {
        cp_async_wait<0>();
        __syncthreads();  // Y', and with two stages X', is there, and all warps are done with the tile before
        if (STAGES == 1) copy_x(tile, 0);
        int now = tile++ * N, number = head;
        if (KEYS && tile == end && tiles > 1) {  // the next head of the group
            tile = begin;
            head++;
            q += g.of_q.head;
            dout += g.of_dout.head;
            of_stats += g.padded;
        }
        if (STAGES == 2 && tiles > 1) copy_x(tile, stage ^ 1), copy_y(tile, stage ^ 1);
        cp_async_commit();
        // Queries and keys of this warp and tile that are furthest apart, in both directions.
        int oldest = KEYS ? now : row, newest = KEYS ? now + N - 1 : row + 16 * R - 1, low = KEYS ? row : now;
        int high = KEYS ? row + 16 * R - 1 : now + N - 1;
        bool seen = low <= newest + offset, masked = high > oldest + offset || (!KEYS && high >= of.keys);
        if (STAGES == 2 && !seen) continue;

        float s[R][N / 8][4], dp[R][N / 8][4];
        unsigned x = moving + stage * 2 * TILE, y = x + TILE;
        if (STAGES == 2) multiply_transposed<T, D, ROWS, PIECES>(s, a, x + along_columns(lane));
        if (seen) multiply_transposed<T, D, ROWS, PIECES>(dp, a + FIXED, y + along_columns(lane));
        if constexpr (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // X' is there, and all warps are done with the first product of Y'
            if (!KEYS && tiles > 1) copy_y(tile, 0);
            cp_async_commit();
        }
        if (seen) {
            if (STAGES == 1) multiply_transposed<T, D, ROWS, PIECES>(s, a, x + along_columns(lane));
            bool dropped[R][N / 8][4] = {};
            float slope[R][N / 8][4] = {};  // of the softcap
            if constexpr (BIASED<Extra>) {
                auto add = [&](int r, int n, int j, float bias) {
                    float& x = s[r][n][j];
                    if constexpr (SOFTCAP)
                        x = tanh_of<(PIECES > 1)>(x * g.tanh_factor), slope[r][n][j] = 1 - x * x;
                    x = fmaf(x, g.c, bias);
                };
                extra.template each<KEYS, R, N / 8>(work.batch, number, row, now, of.queries, of.keys,
                                                    PIECES > 1 ? 1 : LOG2_E, add);
            }
            if constexpr (DROPS<Extra>) {
                auto drop = [&](int r, int n, int j) { dropped[r][n][j] = true; };
                extra.template each<KEYS, R, N / 8>(row, now, work.batch * g.heads + number, drop);
#pragma unroll
                for (int i = 0; i < R * N / 2; i++) {
                    int r = i / (N / 2), n = i / 4 % (N / 8), j = i % 4;
                    dp[r][n][j] = dropped[r][n][j] ? 0 : dp[r][n][j] * scale_of(extra);
                }
            }
            // of_lane[at]: lse of a lane's element. delta follows N numbers (KEYS) or ROWS numbers later.
            const float* of_lane = KEYS ? stats + stage * 2 * N + lane % 4 * 2 : stats + warp_row + lane / 4;
#pragma unroll
            for (int i = 0; i < R * N / 2; i++) {
                int r = i / (N / 2), n = i / 4 % (N / 8), j = i % 4,
                    at = KEYS ? 8 * n + j % 2 : 16 * r + j / 2 * 8;
                float x = s[r][n][j];
                dp[r][n][j] -= of_lane[at + (KEYS ? N : ROWS)];
                if constexpr (SOFTCAP && !BIASED<Extra>)
                    x = tanh_of<(PIECES > 1)>(x * g.tanh_factor), dp[r][n][j] *= 1 - x * x;
                x = fmaf(x, BIASED<Extra> ? 1 : g.c, -of_lane[at]);
                s[r][n][j] = exp2_approx(PIECES > 1 ? x * LOG2_E : x);
            }
            if (masked) {
                int mine = row + lane / 4, other = now + lane % 4 * 2,
                    end = KEYS ? mine - offset - other : mine + offset - other;
                // hidden are the columns before `end` if KEYS, else those after it
                int columns = KEYS ? 0 : of.keys - other;
#pragma unroll
                for (int i = 0; i < R * N / 2; i++) {
                    int r = i / (N / 2), n = i / 4 % (N / 8), j = i % 4, down = 16 * r + j / 2 * 8,
                        along = 8 * n + j % 2;
                    if (KEYS ? along < end + down : along > end + down || along >= columns) s[r][n][j] = 0;
                }
            }
#pragma unroll
            for (int i = 0; i < R * N / 2; i++)
                dp[i / (N / 2)][i / 4 % (N / 8)][i % 4] *= s[i / (N / 2)][i / 4 % (N / 8)][i % 4];
            if constexpr (BIASED<Extra> && !KEYS) {
                auto gradient = [&](int r, int n, int j) { return dp[r][n][j]; };
                extra.template store<R, N / 8>((long long)work.batch * g.heads + work.head, row, now,
                                               of.queries, of.keys, gradient);
            }
            if constexpr (BIASED<Extra> && SOFTCAP)
#pragma unroll
                for (int i = 0; i < R * N / 2; i++)
                    dp[i / (N / 2)][i / 4 % (N / 8)][i % 4] *= slope[i / (N / 2)][i / 4 % (N / 8)][i % 4];
            if constexpr (KEYS && DROPS<Extra>)  // dv is the sum of the weights that the forward used
#pragma unroll
                for (int i = 0; i < R * N / 2; i++) {
                    int r = i / (N / 2), n = i / 4 % (N / 8), j = i % 4;
                    s[r][n][j] = dropped[r][n][j] ? 0 : s[r][n][j] * scale_of(extra);
                }
            if constexpr (KEYS) multiply<T, COLUMNS, PIECES>(dy, s, y + part * N * PART + down_rows(lane));
        }
        if constexpr (KEYS && STAGES == 1) {
            __syncthreads();  // all warps are done with Y', lse and delta
            if (tiles > 1) copy_y(tile, 0);
            cp_async_commit();
        }
        if (seen) multiply<T, COLUMNS, PIECES>(dx, dp, x + part * N * PART + down_rows(lane));
    }

    if (SHARERS > 1) __syncthreads();  // all warps are done with X and Y
    float scale[R][2], one[R][2];
#pragma unroll
    for (int i = 0; i < 2 * R; i++) scale[i / 2][i % 2] = g.scale, one[i / 2][i % 2] = 1;
    const Strides& of_dx = KEYS ? g.of_dk : g.of_dq;
    int from = row + (KEYS ? of.first_key : of.first_query), left = (KEYS ? of.keys : of.queries) - row;
    O* to = (KEYS ? g.dk : g.dq) + work.batch * of_dx.batch + work.head * of_dx.head + from * of_dx.row +
            part * COLUMNS;
    unsigned char* rows = shared + warp_row * ROW_BYTES + part * ROWS * PART;
    store_rows<O, COLUMNS, ROWS>(to, of_dx.row, left, g.head_dim - part * COLUMNS, dx, scale, rows);
    if constexpr (KEYS) {
        to = g.dv + work.batch * g.of_dv.batch + work.head * g.of_dv.head + from * g.of_dv.row +
             part * COLUMNS;
        store_rows<O, COLUMNS, ROWS>(to, g.of_dv.row, left, g.head_dim - part * COLUMNS, dy, one,
                                     rows + FIXED);
    }
}

// The first key_blocks * batch * (heads / group) blocks own keys. They do more work, so they start first. A
// warp owns 16 KEY_R keys or 16 QUERY_R queries. Shared memory, with R and N of either kind: 2 tiles of 16 R
// WARPS rows, 2 STAGES tiles of N rows, 4 N floats.
template <typename O, typename T, int PIECES, int D, int KEY_R, int KEY_N, int QUERY_R, int QUERY_N,
          int WARPS, int STAGES, int BLOCKS_PER_SM, bool SOFTCAP, bool PACKED, class... Extras>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    attention_v3_bwd(O* dq, O* dk, O* dv, const T* q, const T* k, const T* v, const T* dout, const float* lse,
                     const float* delta, const int* query_bounds, const int* key_bounds, Strides of_dq,
                     Strides of_dk, Strides of_dv, Strides of_q, Strides of_k, Strides of_v, Strides of_dout,
                     int key_blocks, int query_blocks, int heads, int batches, int group, int section,
                     int queries, int keys, int padded, int stats_tile, int sequences, int head_dim,
                     bool causal, float tanh_factor, float c, float scale, Extras... extras) {
    auto extra = extra_of(extras...);
    extern __shared__ __align__(128) unsigned char shared[];
    Gradients<O, T> g{dq,     dk,           dv,         q,        k,      v,           dout,    lse,
                      delta,  query_bounds, key_bounds, of_dq,    of_dk,  of_dv,       of_q,    of_k,
                      of_v,   of_dout,      heads,      batches,  group,  section,     queries, keys,
                      padded, stats_tile,   sequences,  head_dim, causal, tanh_factor, c,       scale};
    int with_keys = key_blocks * batches * (heads / group), index = blockIdx.x;
    if (index < with_keys)
        backward_block<true, PIECES, D, KEY_R, KEY_N, WARPS, STAGES, SOFTCAP, PACKED>(g, extra, index,
                                                                                      key_blocks, shared);
    else
        backward_block<false, PIECES, D, QUERY_R, QUERY_N, WARPS, STAGES, SOFTCAP, PACKED>(
            g, extra, index - with_keys, query_blocks, shared);
}
