// layernorm and rmsnorm along the rows of a matrix, with an optional residual add before them, and their
// gradients.
//
//     s = x + residual, rounded to T       n = (s - mean) * rstd     rstd = 1 / sqrt(variance + eps)
//     y = n * weight + bias                        h = dy * weight
//     dx = ds + rstd * (h - mean(h) - n * mean(h n))   dweight = sum(dy n), dbias = sum(dy), over the rows
//
// rmsnorm (RMS) is the same with mean = 0, mean(h) = 0, and the mean of squares as the variance. The gradient
// of x and that of the residual are both dx, where ds is the gradient of the output s (null: 0).
//
// Types      T: x, y, s and their gradients. W: weight and bias, T or float. C: float, or double for double.
//            Null pointers: no residual, no weight (1), no bias (0), no partial sums wanted.
// Layout     x, residual, s, dy and ds are (rows, columns) with a column stride of 1 and any row stride
//            (x_row, ...). y, the output s and dx are contiguous. stats is (rows, 2): the mean and rstd of
//            each row. partials is (2, blocks, columns), of C: the sums of a block's rows for dweight, then
//            for dbias. Offsets are 64-bit.
// Algorithm  The variance is the mean of (s - mean)^2, from a second pass over registers or memory. All sums
//            are added in a fixed order. The blocks of the backward, if there are several, write partial sums
//            over their rows, and layernorm_add adds these. Their number depends on the number of SMs, so the
//            bits of dweight and dbias may differ between GPUs, never between runs.
// Launch     block (threads per row, rows per block). A row has 8, 16 or 32 threads, or several warps. v1:
//            see there.
//
// version  idea
// v1       one block per row, read three times; backward: as v2 for rows that do not fit, with single
//          elements
// v2       row in registers, read once in 16-byte vectors; backward: a block loops over rows and keeps its
//          sums in registers. H100, 32768 x 768: forward 0.99 (bfloat16) and 1.00 (float32) of a copy of the
//          same bytes, backward 0.88 and 0.92. Rows that do not fit are read in parts: twice in the forward,
//          and by two kernels in the backward
// Experiments: docs/notes/layernorm.md
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/ptx/barrier.cuh"
#include "common/reduce.cuh"

// N elements of the weight or bias, in vectors of at most 16 bytes; `missing` for a null pointer.
template <int N, typename W, typename I, typename C>
__device__ __forceinline__ void load_affine(C (&to)[N], const W* from, I column, C missing) {
    constexpr int M = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        C part[M];
        if (from) unpack(part, load_vec<W, M>(from + column + i));
#pragma unroll
        for (int j = 0; j < M; ++j) to[i + j] = from ? part[j] : missing;
    }
}

// ---- v1. Block (threads, 1), whole warps; the grid has any number of blocks, unless another one is named.

template <typename T, typename W, bool RMS>
__global__ void layernorm_v1(T* y, T* s, compute_t<T>* stats, const T* x, const T* residual, const W* weight,
                             const W* bias, long long rows, long long columns, long long x_row,
                             long long residual_row, double eps) {
    wait_for_previous();
    using C = compute_t<T>;
    __shared__ C sums[2][32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * x_row;
        if (residual) {
            for (long long i = threadIdx.x; i < columns; i += blockDim.x)
                s[row * columns + i] = T(load_as(from[i]) + load_as(residual[row * residual_row + i]));
            from = s + row * columns;  // each thread reads the elements that it wrote
        }
        C sum = 0, squares = 0;
        for (long long i = threadIdx.x; !RMS && i < columns; i += blockDim.x) sum += load_as(from[i]);
        C mean = RMS ? C(0) : block_reduce<Sum>(sum, sums[0]) / columns;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x)
            squares += (load_as(from[i]) - mean) * (load_as(from[i]) - mean);
        C rstd = 1 / sqrt(block_reduce<Sum>(squares, sums[1]) / columns + C(eps));
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
            C w = weight ? C(load_as(weight[i])) : C(1), b = bias ? C(load_as(bias[i])) : C(0);
            y[row * columns + i] = T((load_as(from[i]) - mean) * rstd * w + b);
        }
        if (threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
        __syncthreads();  // before the next row's sums overwrite this one's
    }
}

// dweight (blockIdx.y 0) or dbias (1): the sums of partials over the blocks. Grid (ceil(columns / 16), 1 or
// 2), block (16, 32).
template <typename C, typename W>
__global__ void layernorm_add(W* dweight, W* dbias, const C* partials, long long blocks, long long columns) {
    wait_for_previous();
    __shared__ C sums[32][16];
    constexpr int LOADS = 8;
    long long column = blockIdx.x * 16LL + threadIdx.x;
    partials += blockIdx.y * blocks * columns + min(column, columns - 1);
    C sum = 0;
    for (long long b = threadIdx.y; b < blocks; b += 32 * LOADS) {
        C v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = b + 32 * k < blocks ? partials[(b + 32 * k) * columns] : C(0);
#pragma unroll
        for (int k = 0; k < LOADS; ++k) sum += v[k];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y >= 2) return;  // one warp is left
#pragma unroll
    for (int i = 2; i < 32; i += 2) sum += sums[i + threadIdx.y][threadIdx.x];
    sum += __shfl_xor_sync(~0u, sum, 16);
    if (threadIdx.y == 0 && column < columns) (blockIdx.y ? dbias : dweight)[column] = W(sum);
}

// ---- v2. A thread has VECTORS vectors of N elements of a row, blockDim.x vectors apart. N = 1 for rows that
// are not aligned to 16 bytes. Threads of rows beyond the last one load the last row and write nothing: all
// threads of a block take part in its reductions.

// The sum over the threads of a row. `shared` has room for 32 values.
template <typename C>
__device__ __forceinline__ C row_sum(C value, C* shared) {
    if (blockDim.x <= 32) return warp_reduce<Sum>(value, blockDim.x);
    return block_reduce<Sum>(value, shared + threadIdx.y * (blockDim.x / 32));
}

// The sums of two values over the threads of a row, with one barrier of the row's warps (at most 16). After
// the first step, the lower half of a warp adds a and the upper half adds b. `shared` has room for 64 values.
template <typename C>
__device__ __forceinline__ void row_sum(C& a, C& b, C* shared) {
    if (blockDim.x < 32) {
        a = warp_reduce<Sum>(a, blockDim.x), b = warp_reduce<Sum>(b, blockDim.x);
        return;
    }
    bool upper = threadIdx.x & 16;
    C sum = warp_reduce<Sum>((upper ? b : a) + __shfl_xor_sync(~0u, upper ? a : b, 16), 16);
    if (blockDim.x > 32) {
        int warps = blockDim.x / 32, i = threadIdx.x % 16;
        shared += threadIdx.y * warps + upper * 32;
        if (i == 0) shared[threadIdx.x / 32] = sum;
        barrier_of(threadIdx.y + 1, blockDim.x);
        sum = warp_reduce<Sum>(i < warps ? shared[i] : C(0), 16);
    }
    C other = __shfl_xor_sync(~0u, sum, 16);
    a = upper ? other : sum, b = upper ? sum : other;
}

template <typename T, int N, int VECTORS>
struct Row {
    Vec<T, N> v[VECTORS];

    static __device__ __forceinline__ int column(int k) { return (k * blockDim.x + threadIdx.x) * N; }

    // Out-of-range columns load column 0. An unconditional load lets the compiler keep a pair of 16 bits in
    // one register.
    __device__ __forceinline__ void load(const T* from, int end) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) v[k] = load_vec<T, N>(from + (column(k) < end ? column(k) : 0));
    }

    // This thread's sum of f(x) over the columns before `end`.
    template <typename F>
    __device__ __forceinline__ compute_t<T> sum(int end, F f) const {
        compute_t<T> result = 0;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (column(k) >= end) break;
            compute_t<T> a[N];
            unpack(a, v[k]);
#pragma unroll
            for (int j = 0; j < N; ++j) result += f(a[j]);
        }
        return result;
    }
};

// Grid ceil(rows / blockDim.y). With THREADS = 1024 a row may be longer than the block's registers. The first
// pass then reads it in parts and combines their means and squares (Chan, Golub and LeVeque). The second pass
// has the last part in registers and reads the others again.
template <typename T, typename W, int N, int VECTORS, int THREADS, bool RMS>
// 0: not specified; 1 would give whole vectors too many registers
__global__ void __launch_bounds__(THREADS, N == 1 && THREADS == 512)
    layernorm_v2(T* __restrict__ y, T* s, compute_t<T>* stats, const T* x, const T* residual,
                 const W* __restrict__ weight, const W* __restrict__ bias, long long rows, int columns,
                 long long x_row, long long residual_row, double eps) {
    using C = compute_t<T>;
    constexpr bool LONG = THREADS == 1024;
    __shared__ C sums[2][32];
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y, from = min(row, rows - 1);
    int part = VECTORS * N * blockDim.x, last = LONG ? (columns - 1) / part * part : 0;
    take_over(blockDim.y * columns * sizeof(T), 1024, [&] {
        constexpr int LINE = 128 / sizeof(T);
        for (int i = threadIdx.x * LINE; i < columns; i += blockDim.x * LINE) prefetch(x + from * x_row + i);
    });
    Row<T, N, VECTORS> values, added;
    C own = 0, squares = 0, count = 0;  // of this thread: mean, squared distances from it, elements
    for (int start = 0; start <= last; start += part) {
        int left = columns - start, end = row < rows ? left : 0;
        values.load(x + from * x_row + start, left);
        if (residual) {
            added.load(residual + from * residual_row + start, left);
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                C sum[N];
                unpack(sum, values.v[k]);
                add_to(sum, added.v[k]);
                values.v[k] = pack<T, N>(sum);
                if (values.column(k) < end)
                    store_vec(s + row * columns + start + values.column(k), values.v[k]);
            }
        }
        if (!LONG) break;
        C n = values.sum(left, [](C) { return C(1); }), share = n / (count + n);
        C m = RMS ? C(0) : values.sum(left, [](C a) { return a; }) / max(n, C(1));
        squares +=
            values.sum(left, [m](C a) { return (a - m) * (a - m); }) + (m - own) * (m - own) * count * share;
        own += (m - own) * share;
        count += n;
    }
    C mean =
        RMS ? C(0)
            : row_sum(LONG ? own * count : values.sum(columns, [](C a) { return a; }), sums[0]) / columns;
    if (LONG) squares += (own - mean) * (own - mean) * count;
    else squares = values.sum(columns, [mean](C a) { return (a - mean) * (a - mean); });
    C rstd = 1 / sqrt(row_sum(squares, sums[1]) / columns + C(eps));
    for (int start = last; start >= 0; start -= part) {
        int end = row < rows ? columns - start : 0;
        if (LONG && start < last)
            values.load((residual && row < rows ? s + row * columns : x + from * x_row) + start, end);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            // so the loads need no branch
            int column = values.column(k), at = start + (LONG && column >= end ? 0 : column);
            if (!LONG && column >= end) break;
            C a[N], w[N], b[N];
            load_affine(w, weight, at, C(1));
            load_affine(b, bias, at, C(0));
            unpack(a, values.v[k]);
#pragma unroll
            for (int j = 0; j < N; ++j)
                a[j] = (sizeof(T) == 2 ? a[j] * rstd - mean * rstd : (a[j] - mean) * rstd) * w[j] + b[j];
            if (!LONG || column < end) store_vec(y + row * columns + start + column, pack<T, N>(a));
        }
        if (!LONG) break;
    }
    if (threadIdx.x == 0 && row < rows) store_vec(stats + 2 * row, Vec<C, 2>{{mean, rstd}});
}

// N sums, to `partials`, or to `result` if there are no partial sums; null: not wanted.
template <int N, typename W, typename C>
__device__ __forceinline__ void store_sums(W* result, C* partials, long long column, const C (&sums)[N]) {
    if (partials) store_vec(partials + column, pack<C, N>(sums));
    else if (result) store_vec(result + column, pack<W, N>(sums));
}

// Adds the sums of a block's rows. `shared` has room for one sum per column and row, if the block has several
// rows.
template <typename T, typename W, typename C, int N, int VECTORS>
__device__ __forceinline__ void add_rows(W* result, C* partials, long long first, const C (&sums)[VECTORS][N],
                                         C* shared, int columns) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int column = Row<T, N, VECTORS>::column(k);
        if (column >= columns) break;
        if (blockDim.y == 1) store_sums(result, partials, first + column, sums[k]);
        else store_vec(shared + threadIdx.y * columns + column, pack<C, N>(sums[k]));
    }
    if (blockDim.y == 1) return;
    __syncthreads();
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < columns; i += blockDim.x * blockDim.y) {
        double sum = 0;  // up to 64 equal numbers would lose 6 epsilons in float
#pragma unroll 8
        for (int y = 0; y < blockDim.y; ++y) sum += shared[y * columns + i];
        C rounded[1] = {C(sum)};
        store_sums(result, partials, i, rounded);
    }
    __syncthreads();
}

// PASS 0: rows that fit into a block's registers; grid (1, any number of blocks). Longer rows, and v1, have
// two launches with the same grid, where block blockIdx.x has a part of each row. Pass 1 writes the sums of h
// and of h n over its part to row_sums, (rows, gridDim.x, 2). Pass 2 adds those of a row. Pass 1 ends with
// the first rows, which pass 2 finds in the L2 cache. Dynamic shared memory: a row of C per row of the block,
// if blockDim.y > 1 and sums over rows are wanted. Blocks have at most THREADS threads. Resident blocks per
// SM: 3 of 128 threads, 2 of 384 (pass 2 of double: 1), or 1 of 512.
template <typename T, typename W, int N, int VECTORS, int THREADS, int PASS, bool RMS>
__global__ void __launch_bounds__(THREADS, THREADS == 128 ? 3 : 1 + (THREADS < 512 && PASS * sizeof(T) < 16))
    layernorm_v2_bwd(T* dx, W* dweight, W* dbias, compute_t<T>* partials, compute_t<T>* row_sums, const T* s,
                     const T* dy, const T* ds, const compute_t<T>* stats, const W* weight, long long rows,
                     long long columns, long long s_row, long long dy_row, long long ds_row) {
    wait_for_previous();
    using C = compute_t<T>;
    // registers suffice to load the next row early
    constexpr bool AHEAD = sizeof(T) < 8 && VECTORS * N * sizeof(T) <= 48;
    __shared__ C sums[2][64];
    C dweights[VECTORS][N] = {}, dbiases[VECTORS][N] = {};
    long long step = gridDim.y * (long long)blockDim.y,
              row = blockIdx.y * (long long)blockDim.y + threadIdx.y;
    conditional_t<PASS == 0, int, long long> part = VECTORS * N * blockDim.x,
                                             first = PASS ? blockIdx.x * part : 0;
    int width = PASS ? min(columns - first, (long long)part) : columns;
    Row<T, N, VECTORS> row_s, row_dy;
    Vec<C, 2> mean_rstd, of_row;
    C inverse = C(1) / columns;
    auto load = [&](long long from) {
        from = PASS == 1 ? max(rows - 1 - from, 0LL) : min(from, rows - 1);
        mean_rstd = load_vec<C, 2>(stats + 2 * from);
        row_s.load(s + from * s_row + first, width);
        row_dy.load(dy + from * dy_row + first, width);
        of_row = {};
        for (int i = threadIdx.x % 32; PASS == 2 && i < gridDim.x; i += 32) {
            Vec<C, 2> of_part = load_vec<C, 2>(row_sums + 2 * (from * gridDim.x + i));
            of_row.v[0] += of_part.v[0], of_row.v[1] += of_part.v[1];
        }
    };
    if (AHEAD) load(row);
    // the same number of iterations in all threads
    for (int half = 0; row - threadIdx.y < rows; row += step, half ^= 1) {
        int end = row < rows ? width : 0;
        if (!AHEAD) load(row);
        // the compiler must not move the loads into the branches below, where each would wait for the one
        // before
        __syncwarp();
        C mean = mean_rstd.v[0], rstd = mean_rstd.v[1], sum_h = 0, sum_hn = 0, n[VECTORS][N], h[VECTORS][N];
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (row_s.column(k) >= end) break;
            C g[N];
            unpack(n[k], row_s.v[k]);
            unpack(g, row_dy.v[k]);
            load_affine(h[k], weight, first + row_s.column(k), C(1));
#pragma unroll
            for (int j = 0; j < N; ++j) {
                n[k][j] = sizeof(T) == 2 ? n[k][j] * rstd - mean * rstd : (n[k][j] - mean) * rstd;
                h[k][j] *= g[j];
                sum_h += h[k][j];
                sum_hn += h[k][j] * n[k][j];
                dweights[k][j] += g[j] * n[k][j];
                dbiases[k][j] += g[j];
            }
        }
        if (PASS == 2) sum_h = warp_reduce<Sum>(of_row.v[0]), sum_hn = warp_reduce<Sum>(of_row.v[1]);
        // the data arrives while this row is reduced and written
        if (AHEAD && row + step < rows) load(row + step);
        if (PASS != 2) row_sum(sum_h, sum_hn, sums[half]);  // a barrier separates two uses of the same half
        if (PASS == 1) {
            if (threadIdx.x == 0)
                store_vec(row_sums + 2 * ((rows - 1 - row) * gridDim.x + blockIdx.x),
                          Vec<C, 2>{{sum_h, sum_hn}});
            continue;
        }
        C a = RMS ? C(0) : rstd * sum_h * inverse, b = rstd * sum_hn * inverse;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            int column = row_s.column(k);
            if (column >= end) break;
#pragma unroll
            for (int j = 0; j < N; ++j) h[k][j] = rstd * h[k][j] - a - n[k][j] * b;
            if (ds) {
                unpack(n[k], load_vec<T, N>(ds + row * ds_row + first + column));
#pragma unroll
                for (int j = 0; j < N; ++j) h[k][j] += n[k][j];
            }
            store_vec(dx + row * columns + first + column, pack<T, N>(h[k]));
        }
    }
    if (PASS == 1 || (!partials && !dweight)) return;
    extern __shared__ double dynamic_shared[];
    C* shared = reinterpret_cast<C*>(dynamic_shared);
    C *to = partials ? partials + blockIdx.y * columns : nullptr,
      *to_bias = partials ? to + gridDim.y * columns : nullptr;
    add_rows<T>(dweight, to, first, dweights, shared, width);
    if (!RMS) add_rows<T>(dbias, to_bias, first, dbiases, shared, width);
}
