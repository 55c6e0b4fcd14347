// attention of few queries: decoding, where each sequence asks 1 to 16 queries of a long cache of keys.
// Forward only; float16, bfloat16 and float32, sm_80 and newer. The math and the layouts of q, k, v and out
// are those of attention.cu.
//
// Limit      device memory: K and V are read once, and the time should be that of a copy of the same bytes.
// Rows       the queries of all heads that share a KV head are the rows of one tile: row r is query r %
//            queries of head r / queries of the group. A tile has 16 rows, which mma.sync needs; rows that do
//            not exist are 0. More rows are several tiles, whose thread blocks are neighbours and find K and
//            V in the L2 cache.
// Lengths    each sequence may have its own number of keys; what lies behind it in k and v is not read.
// Pages      k and v may be pools of pages, (pages, KV heads, page size, D): page table[batch][i] has the
//            keys from i * page size on. The page size is a power of two, at least 16, so 16 keys of a tile
//            are in one page. Only these instances have a window.
// Split      the keys of a KV head are split over `splits` thread blocks, in tiles of KEYS keys, and inside
//            of a block over its warps.
// float32    the products are FFMAs, see decode_floats. A loop for 8 rows takes half the time of that for 16.
// Pipeline   a warp copies its own tiles by cp.async, STAGES - 1 tiles of 8 KB ahead, so the loop has no
//            barrier. Q is in registers. With D = 256 tiles are twice as large, and half as many warps fit.
// Overlap    a block prefetches into L2 what its warps copy first, before it waits for the previous kernel
//            (pdl.cuh). attention_decode_sum signals before it waits, so the blocks of a next call start as
//            soon as blocks of this one exit.
// Sum        the sums of the warps are added in shared memory, in the order of the warps. With one split that
//            is the result. Otherwise each block writes its sums as float32, and attention_decode_sum adds
//            them in the order of the splits. Two runs give the same bits.
// Launch     1-D grid: row tiles (fastest), splits, KV heads, batch; block = 32 * WARPS; dynamic shared
//            memory = WARPS * STAGES * 8 KB, 16 KB with D = 256.
//
// Experiments and predictions: docs/notes/attention.md.
#pragma once
#include "../common/pdl.cuh"
#include "softmax.cuh"
#include "tile.cuh"

constexpr int MMA_ROWS = 16;

// The keys of a tile of K and V: 4 KB of each, and twice as much in 16 bits with D = 256, because mma.sync
// multiplies 16 rows of V.
template <typename T, int D>
constexpr int TILE_KEYS = sizeof(T) == 2 && D > 128 ? 16 : 4096 / (D * int(sizeof(T)));

// A row's sum of weights, relative to 2^base. base is -infinity if the row has seen no key.
struct Stats {
    float base, sum;
};

// The factor of a partial sum with `base`, relative to 2^top.
__device__ __forceinline__ float factor_of(float base, float top) {
    return top == minus_infinity<float>() ? 0 : exp2_approx(base - top);
}

__device__ __forceinline__ float lse_of(Stats x) {
    return x.sum == 0 ? minus_infinity<float>() : (x.base + log2_approx(x.sum)) * LN_2;
}

// The operand A of mma.sync, 16 x D, from rows of q in global memory. `rows`: this lane's two rows, null if
// they do not exist.
template <typename T, int D>
__device__ __forceinline__ void load_queries(unsigned (&a)[D / 16][1][4], const T* const (&rows)[2],
                                             int columns) {
#pragma unroll
    for (int i = 0; i < D / 4; i++) {
        int column = i / 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 4 * 2;
        a[i / 4][0][i % 4] =
            rows[i % 2] && column < columns ? *reinterpret_cast<const unsigned*>(rows[i % 2] + column) : 0;
    }
}

// The sum of WARPS partial sums of a row.
template <int WARPS>
__device__ __forceinline__ Stats add_stats(const Stats* of_warps, int stride) {
    Stats all = {minus_infinity<float>(), 0};
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.base = fmaxf(all.base, of_warps[w * stride].base);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        all.sum += of_warps[w * stride].sum * factor_of(of_warps[w * stride].base, all.base);
    return all;
}

// The last parameters of an instance with pages. The page size is 2^bits; window is 0 without a window.
struct PageTable {
    const int* table = nullptr;
    int bits = 0, window = 0;
};

// A warp's part of decoding in float32. It computes ROWS rows, 8 or 16. Only the first `rows` have a query.
// copy(tile, stage) starts the copy of a tile.
// Scores  LANES lanes share a key. Each multiplies COLUMNS columns of it with all rows of q, which are in
//         registers. Then LANES scores are sums over these lanes. Lane l has score i ^ l in register i, so
//         lanes exchange halves without selects, and end with the score of row l % ROWS and key l / ROWS.
// P V     the weights go through shared memory, where K was. A lane sums 4 columns of all rows, and with D =
//         64 of every second key.
// Results the sums, relative to the largest base of all warps, in tile_sums, and their Stats in of_warps.
template <int ROWS, int D, int WARPS, int STAGES, bool SOFTCAP, class Copy>
__device__ __forceinline__ void decode_floats(float* tile_sums, Stats* of_warps, unsigned char* ring,
                                              const float* q, const Strides& of_q, int first, int rows,
                                              int queries, int keys, int head_dim, bool causal, int window,
                                              int tile, int end, bool signals, float tanh_factor, float c,
                                              Copy copy) {
    constexpr int KEYS = TILE_KEYS<float, D>, TILE_BYTES = KEYS * D * 4, LANES = ROWS * D / 64,
                  COLUMNS = D / LANES;
    constexpr int AT_ONCE = 32 / ROWS, SCORES = KEYS / AT_ONCE, OWNERS = D / 4, PITCH = D + 8;
    int lane = threadIdx.x % 32, row = lane % ROWS, query = (first + row) % queries;
    int last = causal ? query + keys - queries : keys - 1;  // the last key that this lane's row sees
    const float* from = row < rows ? q + (first + row) / queries * of_q.head + query * of_q.row : nullptr;
    float a[ROWS][COLUMNS] = {}, sums[ROWS][4] = {}, row_max = minus_infinity<float>(), row_sum = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        auto its = reinterpret_cast<const float*>(
            __shfl_xor_sync(~0u, reinterpret_cast<unsigned long long>(from), r));
#pragma unroll
        for (int part = 0; part < COLUMNS / 4; part++) {
            int column = (part * LANES + lane % LANES) * 4;
            if (its && column < head_dim) {
                auto x = load_vec<float, 4>(its + column);
#pragma unroll
                for (int j = 0; j < 4; j++) a[r][part * 4 + j] = x.v[j];
            }
        }
    }
    for (int stage = 0; tile < end; tile += WARPS, stage = stage == STAGES - 1 ? 0 : stage + 1) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();  // the tile is there, and all lanes are done with the stage before
        copy(tile + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
        unsigned char *k_tile = ring + stage * 2 * TILE_BYTES, *v_tile = k_tile + TILE_BYTES;
        float s[SCORES], top = row_max;
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            float dots[LANES] = {};
#pragma unroll
            for (int i = 0; i < LANES / ROWS * COLUMNS / 4; i++) {
                int pass = i % (LANES / ROWS), part = i / (LANES / ROWS),
                    key = n * AT_ONCE + (lane / ROWS ^ pass);
                auto x = load_vec<float, 4>(reinterpret_cast<const float*>(
                    k_tile + chunk_offset<KEYS>(key, part * LANES + lane % LANES)));
#pragma unroll
                for (int j = 0; j < 4 * ROWS; j++)
                    dots[pass * ROWS + j % ROWS] =
                        fmaf(a[j % ROWS][part * 4 + j / ROWS], x.v[j / ROWS], dots[pass * ROWS + j % ROWS]);
            }
#pragma unroll
            for (int i = LANES - 1; i > 0; i--) {
                int apart = i >= 16 ? 16 : i >= 8 ? 8 : i >= 4 ? 4 : i >= 2 ? 2 : 1;
                dots[i - apart] += __shfl_xor_sync(~0u, dots[i], apart);
            }
            int key = tile * KEYS + n * AT_ONCE + lane / ROWS;
            s[n] = SOFTCAP ? tanh_of<true>(dots[0] * tanh_factor) : dots[0];
            if (key > last || (window && key <= last - window)) s[n] = minus_infinity<float>();
            top = fmaxf(top, s[n]);
        }
#pragma unroll
        for (int apart = ROWS; apart < 32; apart *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
        float base = top == minus_infinity<float>() ? 0 : __fmul_rn(top, c);  // as in softmax_rows
        if (__any_sync(~0u, top != row_max)) {
            float shrink = exp2_approx(__fmul_rn(row_max, c) - base);
            row_max = top;
            row_sum *= shrink;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float its = __shfl_sync(~0u, shrink, r);
#pragma unroll
                for (int j = 0; j < 4; j++) sums[r][j] *= its;
            }
        }
        __syncwarp();                                     // all lanes are done with K
        auto weights = reinterpret_cast<float*>(k_tile);  // (KEYS, ROWS)
#pragma unroll
        for (int n = 0; n < SCORES; n++) {
            float weight = exp2_approx(fmaf(s[n], c, -base));
            row_sum += weight;
            weights[n * 32 + lane] = weight;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < KEYS * OWNERS / 32; i++) {
            int key = i * (32 / OWNERS) + lane / OWNERS;
            auto x = load_vec<float, 4>(
                reinterpret_cast<const float*>(v_tile + chunk_offset<KEYS>(key, lane % OWNERS)));
#pragma unroll
            for (int r = 0; r < ROWS; r += 4) {
                auto weight = load_vec<float, 4>(weights + key * ROWS + r);
#pragma unroll
                for (int j = 0; j < 16; j++)
                    sums[r + j / 4][j % 4] = fmaf(weight.v[j / 4], x.v[j % 4], sums[r + j / 4][j % 4]);
            }
        }
    }
    if (signals) let_next_come();  // see attention_decode
#pragma unroll
    for (int apart = ROWS; apart < 32; apart *= 2) row_sum += __shfl_xor_sync(~0u, row_sum, apart);
    Stats own = {row_sum == 0 ? minus_infinity<float>() : __fmul_rn(row_max, c), row_sum};
    if (lane < ROWS) of_warps[threadIdx.x / 32 * MMA_ROWS + lane] = own;
    cp_async_wait<0>();
    __syncthreads();  // all warps are done with their tiles
    float factor = factor_of(own.base, add_stats<WARPS>(of_warps + row, MMA_ROWS).base);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float its = __shfl_sync(~0u, factor, r);
        Vec<float, 4> x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x.v[j] = sums[r][j] * its;
            if (OWNERS < 32) x.v[j] += __shfl_xor_sync(~0u, x.v[j], OWNERS);
        }
        if (lane < OWNERS) store_vec(tile_sums + (threadIdx.x / 32 * MMA_ROWS + r) * PITCH + lane * 4, x);
    }
}

// partial is (splits, batch, heads, queries, D), stats (splits, batch, heads, queries); used if splits > 1,
// out and lse if splits = 1. Paged: nothing, or the types of PageTable's members.
template <typename T, int D, int WARPS, int STAGES, int BLOCKS_PER_SM, bool SOFTCAP, class... Paged>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    attention_decode(T* out, float* lse, float* partial, void* stats, const T* q, const T* k, const T* v,
                     const int* key_lengths, Strides of_out, Strides of_q, Strides of_k, Strides of_v,
                     int row_tiles, int splits, int kv_heads, int batches, int group, int queries, int keys,
                     int head_dim, bool causal, float tanh_factor, float c, Paged... paged) {
    constexpr bool PAGED = sizeof...(Paged) > 0;
    PageTable pages{paged...};
    // pitch of a row of float32 sums: no bank conflicts
    constexpr int KEYS = TILE_KEYS<T, D>, TILE_BYTES = KEYS * D * sizeof(T), PITCH = D + 8;
    static_assert(WARPS * MMA_ROWS * PITCH * sizeof(float) <= WARPS * STAGES * 2 * TILE_BYTES,
                  "the sums fit where the tiles were");
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Stats of_warps[WARPS][MMA_ROWS];
    int row_tile = blockIdx.x % row_tiles, split = blockIdx.x / row_tiles % splits,
        pair = blockIdx.x / row_tiles / splits;
    int batch = pair / kv_heads, kv_head = pair % kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first = row_tile * MMA_ROWS, rows = group * queries - first;
    k += (PAGED ? 0 : batch * of_k.batch) + kv_head * of_k.head;
    v += (PAGED ? 0 : batch * of_v.batch) + kv_head * of_v.head;
    if constexpr (PAGED) pages.table += (long long)batch * (keys >> pages.bits);
    q += batch * of_q.batch + kv_head * group * of_q.head;
    out += batch * of_out.batch + kv_head * group * of_out.head;

    int unseen = 0;  // the number of first tiles that are outside of all windows
    // its first tile
    auto begin_of = [&](int split) {
        return unseen + int(((keys + KEYS - 1) / KEYS - unseen) * (long long)split / splits);
    };
    // what the warp copies first, see pdl.cuh; 4 KB are a line of 128 bytes for each lane
    if (!PAGED && !key_lengths) {
        constexpr int LINE = 128 / sizeof(T), LINES = D / LINE;
        int begin = (begin_of(split) + warp) * KEYS, column = lane % LINES * LINE;
#pragma unroll
        for (int i = 0; i < TILE_BYTES / 4096; i++) {
            int row = begin + (i * 32 + lane) / LINES;
            if (row < keys && column < head_dim)
                prefetch(k + row * of_k.row + column), prefetch(v + row * of_v.row + column);
        }
    }
    wait_for_previous();
    if (key_lengths) keys = max(0, min(keys, key_lengths[batch]));
    if (PAGED && pages.window) unseen = max(0, keys - queries - pages.window + 1) / KEYS;
    int tile = begin_of(split) + warp, end = begin_of(split + 1);
    unsigned ring = shared_address(shared) + warp * STAGES * 2 * TILE_BYTES;
    // an empty group after the last tile, so that groups are counted alike
    auto copy = [&](int tile, int stage) {
        if (PAGED && tile < end) {
            constexpr int PART = KEYS < 16 ? KEYS : 16;
            static_assert(KEYS == PART || D * sizeof(T) == ROW_BYTES, "the rows of a part are contiguous");
#pragma unroll
            for (int part = 0; part < KEYS; part += PART) {
                int key = tile * KEYS + part, row = key & ((1 << pages.bits) - 1), rows = row + keys - key;
                long long page = key < keys ? pages.table[key >> pages.bits] : 0;
                unsigned to = ring + stage * 2 * TILE_BYTES + part * ROW_BYTES;
                copy_tile<PART, D, 32>(to, k + page * of_k.batch, of_k.row, row, rows, head_dim);
                copy_tile<PART, D, 32>(to + TILE_BYTES, v + page * of_v.batch, of_v.row, row, rows, head_dim);
            }
        } else if (tile < end) {
            copy_tile<KEYS, D, 32>(ring + stage * 2 * TILE_BYTES, k, of_k.row, tile * KEYS, keys, head_dim);
            copy_tile<KEYS, D, 32>(ring + (stage * 2 + 1) * TILE_BYTES, v, of_v.row, tile * KEYS, keys,
                                   head_dim);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) copy(tile + i * WARPS, i);

    auto all_warps = [&](int row) { return add_stats<WARPS>(&of_warps[0][row], MMA_ROWS); };
    float* tile_sums = reinterpret_cast<float*>(shared);
    if constexpr (sizeof(T) == 4) {
        unsigned char* own_ring = shared + warp * STAGES * 2 * TILE_BYTES;
        if (rows <= 8)
            decode_floats<8, D, WARPS, STAGES, SOFTCAP>(tile_sums, of_warps[0], own_ring, q, of_q, first,
                                                        rows, queries, keys, head_dim, causal, pages.window,
                                                        tile, end, splits > 1, tanh_factor, c, copy);
        else
            decode_floats<16, D, WARPS, STAGES, SOFTCAP>(tile_sums, of_warps[0], own_ring, q, of_q, first,
                                                         rows, queries, keys, head_dim, causal, pages.window,
                                                         tile, end, splits > 1, tanh_factor, c, copy);
    } else {
        int last[2];  // the last key that each of this lane's two rows sees
        const T* from[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = lane / 4 + 8 * i, head = (first + row) / queries, query = (first + row) % queries;
            from[i] = row < rows ? q + head * of_q.head + query * of_q.row : nullptr;
            last[i] = causal ? query + keys - queries : keys - 1;
        }
        unsigned a[D / 16][1][4];
        load_queries<T, D>(a, from, head_dim);
        int always_seen = causal ? keys - queries : keys - 1;
        float sums[1][D / 8][4] = {}, row_max[1][2] = {minus_infinity<float>(), minus_infinity<float>()},
                          row_sum[1][2] = {};

        for (int stage = 0; tile < end; tile += WARPS, stage = stage == STAGES - 1 ? 0 : stage + 1) {
            cp_async_wait<STAGES - 2>();
            __syncwarp();  // the tile is there, and all lanes are done with the stage before
            copy(tile + (STAGES - 1) * WARPS, stage == 0 ? STAGES - 1 : stage - 1);
            unsigned k_tile = ring + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
            float s[1][KEYS / 8][4] = {};
#pragma unroll
            for (int i = 0; i < D / 16; i++)
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    unsigned b[4];
                    load_tiles<false>(b,
                                      columns_at<KEYS>(k_tile + along_columns(lane), i) + n * 16 * ROW_BYTES);
                    multiply_blocks<T>(s, a[i], b, n);
                }
            int column = tile * KEYS + lane % 4 * 2;
            auto hidden = [&](int row, int n) {
                return column + n > last[row / 8] ||
                       (PAGED && pages.window && column + n <= last[row / 8] - pages.window);
            };
            auto mask = [&] {
                if ((tile + 1) * KEYS - 1 > always_seen ||
                    (PAGED && pages.window && tile * KEYS < keys - pages.window))
                    hide(s, hidden);
            };
            softmax_tile<1, KEYS / 8, D, SOFTCAP>(s, row_max, row_sum, sums, mask, tanh_factor, c);
            multiply<T, D>(sums, s, v_tile + down_rows(lane));
        }

        // Not earlier: the next call's prefetches would delay this call's last loads. Not with one split:
        // slower if the grid leaves SMs idle.
        if (splits > 1) let_next_come();
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = warp_reduce<Sum>(row_sum[0][i], 4);
            base[i] = sum == 0 ? minus_infinity<float>() : __fmul_rn(row_max[0][i], c);
            if (lane % 4 == 0) of_warps[warp][lane / 4 + 8 * i] = {base[i], sum};
        }
        cp_async_wait<0>();
        __syncthreads();  // all warps are done with their tiles
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float factor = factor_of(base[i], all_warps(lane / 4 + 8 * i).base);
            float* to = tile_sums + (warp * MMA_ROWS + lane / 4 + 8 * i) * PITCH + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                *reinterpret_cast<float2*>(to + 8 * n) =
                    make_float2(sums[0][n][2 * i] * factor, sums[0][n][2 * i + 1] * factor);
        }
    }
    __syncthreads();
    // the first row among all
    long long at = ((long long)batch * kv_heads + kv_head) * group * queries + first;
    if (splits > 1) at += (long long)split * batches * kv_heads * group * queries;
    if (threadIdx.x < MMA_ROWS && int(threadIdx.x) < rows) {
        Stats all = all_warps(threadIdx.x);
        if (splits > 1) static_cast<Stats*>(stats)[at + threadIdx.x] = all;
        else lse[at + threadIdx.x] = lse_of(all);
    }
    for (int i = threadIdx.x; i < MMA_ROWS * D / 8; i += 32 * WARPS) {
        int row = i / (D / 8), chunk = i % (D / 8);
        if (row >= rows || chunk * 8 >= head_dim) continue;
        Vec<float, 4> x[2] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[j / 4].v[j % 4] += tile_sums[(w * MMA_ROWS + row) * PITCH + chunk * 8 + j];
        if (splits > 1) {
            store_vec(partial + (at + row) * D + chunk * 8, x[0]);
            store_vec(partial + (at + row) * D + chunk * 8 + 4, x[1]);
        } else {
            float sum = all_warps(row).sum, factor = sum == 0 ? 0 : 1 / sum, y[8];
#pragma unroll
            for (int j = 0; j < 8; j++) y[j] = x[j / 4].v[j % 4] * factor;
            int head = (first + row) / queries, query = (first + row) % queries;
            store_vec(out + head * of_out.head + query * of_out.row + chunk * 8, pack<T, 8>(y));
        }
    }
}

// out and lse from the partial sums of all splits. A thread block has one row, each of its warps every
// WARPS-th split.
template <typename T, int D, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
    attention_decode_sum(T* out, float* lse, const float* partial, const void* stats_of_splits,
                         Strides of_out, int splits, int heads, int queries, int head_dim) {
    __shared__ float sums[WARPS][D];
    __shared__ Stats of_warps[WARPS];
    let_next_come();  // before this kernel waits, so that the next one prefetches while this one runs
    wait_for_previous();
    const Stats* stats = static_cast<const Stats*>(stats_of_splits);
    int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = threadIdx.x;
    long long rows = gridDim.x;
    Stats all = {minus_infinity<float>(), 0};
    Vec<float, D / 32> x = {};
#pragma unroll 4
    for (int i = warp; i < splits; i += WARPS) {  // no load waits for another
        Stats one = stats[i * rows + row];
        auto y = load_vec<float, D / 32>(partial + (i * rows + row) * D + lane * (D / 32));
        float base = fmaxf(all.base, one.base), before = factor_of(all.base, base),
              now = factor_of(one.base, base);
        all = {base, all.sum * before + one.sum * now};
#pragma unroll
        for (int j = 0; j < D / 32; j++) x.v[j] = x.v[j] * before + y.v[j] * now;
    }
    store_vec(&sums[warp][lane * (D / 32)], x);
    if (lane == 0) of_warps[warp] = all;
    __syncthreads();
    all = add_stats<WARPS>(of_warps, 1);
    if (column == 0) lse[row] = lse_of(all);
    if (column >= head_dim) return;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w][column] * factor_of(of_warps[w].base, all.base);
    int query = row % queries, head = row / queries % heads, batch = row / queries / heads;
    out[batch * of_out.batch + head * of_out.head + query * of_out.row + column] =
        T(all.sum == 0 ? 0.0f : sum / all.sum);
}
