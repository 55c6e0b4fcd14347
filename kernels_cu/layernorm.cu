// layernorm and rmsnorm along the rows of a matrix, with an optional residual add before them, and their gradients.
//
//     s = x + residual, rounded to T               n = (s - mean) * rstd            rstd = 1 / sqrt(variance + eps)
//     y = n * weight + bias                        h = dy * weight
//     dx = ds + rstd * (h - mean(h) - n * mean(h n))   dweight = sum(dy n), dbias = sum(dy), over the rows
//
// rmsnorm (RMS) is the same with mean = 0, mean(h) = 0, and the mean of squares as the variance. The gradient of x and that of the residual
// are both dx, where ds is the gradient of the output s (null: 0).
//
// Types      T: x, y, s and their gradients. W: weight and bias, T or float. C: float, or double for double. Null pointers: no residual,
//            no weight (1), no bias (0), no partial sums wanted.
// Layout     x, residual, s, dy and ds are (rows, columns) with a column stride of 1 and any row stride (x_row, ...). y, the output s and dx
//            are contiguous. stats is (rows, 2): the mean and rstd of each row. partials is (2, blocks, columns), of C: the sums of a
//            block's rows for dweight, then for dbias. Offsets are 64-bit.
// Algorithm  The variance is the mean of (s - mean)^2, from a second pass over registers (v2) or memory (v1). All sums are added in a fixed
//            order. The backward writes one row of partials per block; layernorm_add adds these. The number of blocks depends on the
//            number of SMs, so the bits of dweight and dbias may differ between GPUs, never between runs.
// Launch     block (threads per row, rows per block). A row has 8, 16 or 32 threads, or several warps. v1: see there.
//
// version  idea
// v1       one block per row, read three times; backward: a second kernel reads s and dy again for the sums over rows
// v2       row in registers, read once in 16-byte vectors; backward: a block loops over rows and keeps its sums in registers.
//          H100, 32768 x 768: forward 0.99 (bfloat16) and 1.00 (float32) of a copy of the same bytes, backward 0.88 and 0.92
// Experiments: docs/notes/layernorm.md
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/ptx/barrier.cuh"
#include "common/reduce.cuh"

// from[i], or `missing` for a null pointer.
template <typename W, typename C>
__device__ __forceinline__ C value_or(const W* from, long long i, C missing) {
    return from ? C(load_as(from[i])) : missing;
}

// ---- v1. Block (threads, 1), whole warps; the grid has any number of blocks, unless another one is named.

template <typename T, typename W, bool RMS>
__global__ void layernorm_v1(T* y, T* s, compute_t<T>* stats, const T* x, const T* residual, const W* weight, const W* bias, long long rows,
                             long long columns, long long x_row, long long residual_row, double eps) {
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
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) squares += (load_as(from[i]) - mean) * (load_as(from[i]) - mean);
        C rstd = 1 / sqrt(block_reduce<Sum>(squares, sums[1]) / columns + C(eps));
        for (long long i = threadIdx.x; i < columns; i += blockDim.x)
            y[row * columns + i] = T((load_as(from[i]) - mean) * rstd * value_or(weight, i, C(1)) + value_or(bias, i, C(0)));
        if (threadIdx.x == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
        __syncthreads();  // before the next row's sums overwrite this one's
    }
}

template <typename T, typename W, bool RMS>
__global__ void layernorm_v1_bwd(T* dx, const T* s, const T* dy, const T* ds, const compute_t<T>* stats, const W* weight, long long rows,
                                 long long columns, long long s_row, long long dy_row, long long ds_row) {
    using C = compute_t<T>;
    __shared__ C sums[2][32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        C mean = stats[2 * row], rstd = stats[2 * row + 1], sum_h = 0, sum_hn = 0;
        const T *row_s = s + row * s_row, *row_dy = dy + row * dy_row;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
            C h = load_as(row_dy[i]) * value_or(weight, i, C(1));
            sum_h += h;
            sum_hn += h * (load_as(row_s[i]) - mean) * rstd;
        }
        C a = RMS ? C(0) : rstd * block_reduce<Sum>(sum_h, sums[0]) / columns;  // rstd times the means of h and of h n
        C b = rstd * block_reduce<Sum>(sum_hn, sums[1]) / columns;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
            C h = load_as(row_dy[i]) * value_or(weight, i, C(1)), n = (load_as(row_s[i]) - mean) * rstd;
            dx[row * columns + i] = T(rstd * h - a - n * b + value_or(ds, row * ds_row + i, C(0)));
        }
        __syncthreads();
    }
}

// A thread adds one column of the rows blockIdx.y, blockIdx.y + gridDim.y, ... Grid (ceil(columns / blockDim.x), row groups).
template <typename T>
__global__ void layernorm_v1_partials(compute_t<T>* partials, const T* s, const T* dy, const compute_t<T>* stats, long long rows,
                                      long long columns, long long s_row, long long dy_row) {
    using C = compute_t<T>;
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= columns) return;
    C dweight = 0, dbias = 0;
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
        C g = load_as(dy[row * dy_row + i]);
        dweight += g * (load_as(s[row * s_row + i]) - stats[2 * row]) * stats[2 * row + 1];
        dbias += g;
    }
    partials[blockIdx.y * columns + i] = dweight;
    partials[(gridDim.y + blockIdx.y) * columns + i] = dbias;
}

// dweight (blockIdx.y 0) or dbias (1): the sums of partials over the blocks. Grid (ceil(columns / 16), 1 or 2), block (16, 32).
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

// ---- v2. A thread has VECTORS vectors of N elements of a row, blockDim.x vectors apart. N = 1 for rows that are not aligned to 16 bytes.
// Threads of rows beyond the last one load the last row and write nothing: all threads of a block take part in its reductions.

// The sum over the threads of a row. `shared` has room for 32 values.
template <typename C>
__device__ __forceinline__ C row_sum(C value, C* shared) {
    if (blockDim.x <= 32) return warp_reduce<Sum>(value, blockDim.x);
    return block_reduce<Sum>(value, shared + threadIdx.y * (blockDim.x / 32));
}

// The sums of two values over the threads of a row, with one barrier of the row's warps (at most 16). After the first step, the lower half of
// a warp adds a and the upper half adds b. `shared` has room for 64 values.
template <typename C>
__device__ __forceinline__ void row_sums(C& a, C& b, C* shared) {
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

    // Out-of-range columns load column 0. An unconditional load lets the compiler keep a pair of 16 bits in one register.
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

// N elements of the weight or bias, in vectors of at most 16 bytes; `missing` for a null pointer.
template <int N, typename W, typename C>
__device__ __forceinline__ void load_affine(C (&to)[N], const W* from, int column, C missing) {
    constexpr int M = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
#pragma unroll
    for (int i = 0; i < N; i += M) {
        C part[M];
        if (from) unpack(part, load_vec<W, M>(from + column + i));
#pragma unroll
        for (int j = 0; j < M; ++j) to[i + j] = from ? part[j] : missing;
    }
}

// Grid ceil(rows / blockDim.y).
template <typename T, typename W, int N, int VECTORS, bool RMS>
__global__ void __launch_bounds__(512, N == 1 ? 1 : 0)  // 0: not specified; with 1, whole vectors would get more registers than they need
    layernorm_v2(T* y, T* s, compute_t<T>* stats, const T* x, const T* residual, const W* weight, const W* bias, long long rows,
                 int columns, long long x_row, long long residual_row, double eps) {
    using C = compute_t<T>;
    __shared__ C sums[2][32];
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y, from = min(row, rows - 1);
    int end = row < rows ? columns : 0;
    take_over(blockDim.y * columns * sizeof(T), 1024, [&] {
        constexpr int LINE = 128 / sizeof(T);
        for (int i = threadIdx.x * LINE; i < columns; i += blockDim.x * LINE) prefetch(x + from * x_row + i);
    });
    Row<T, N, VECTORS> values, added;
    values.load(x + from * x_row, columns);
    if (residual) {
        added.load(residual + from * residual_row, columns);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            C sum[N];
            unpack(sum, values.v[k]);
            add_to(sum, added.v[k]);
            values.v[k] = pack<T, N>(sum);
            if (values.column(k) < end) store_vec(s + row * columns + values.column(k), values.v[k]);
        }
    }
    C mean = RMS ? C(0) : row_sum(values.sum(columns, [](C a) { return a; }), sums[0]) / columns;
    C squares = row_sum(values.sum(columns, [mean](C a) { return (a - mean) * (a - mean); }), sums[1]);
    C rstd = 1 / sqrt(squares / columns + C(eps));
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int column = values.column(k);
        if (column >= end) break;
        C a[N], w[N], b[N];
        load_affine(w, weight, column, C(1));
        load_affine(b, bias, column, C(0));
        unpack(a, values.v[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) a[j] = (sizeof(T) == 2 ? a[j] * rstd - mean * rstd : (a[j] - mean) * rstd) * w[j] + b[j];
        store_vec(y + row * columns + column, pack<T, N>(a));
    }
    if (threadIdx.x == 0 && row < rows) store_vec(stats + 2 * row, Vec<C, 2>{{mean, rstd}});
}

// Adds the sums of this threadIdx.y to those of smaller ones, which are in `shared`. The last threadIdx.y writes the result to `out`.
template <typename T, typename C, int N, int VECTORS>
__device__ __forceinline__ void add_row(C* out, const C (&sums)[VECTORS][N], C* shared, int columns) {
    constexpr int M = N * sizeof(C) > 16 ? 16 / sizeof(C) : N;
#pragma unroll
    for (int i = 0; i < VECTORS * N; i += M) {
        int column = Row<T, N, VECTORS>::column(i / N) + i % N;
        if (column >= columns) break;
        Vec<C, M> sum = {};
        if (threadIdx.y) sum = load_vec<C, M>(shared + column);
#pragma unroll
        for (int j = 0; j < M; ++j) sum.v[j] += sums[i / N][i % N + j];
        store_vec((threadIdx.y == blockDim.y - 1 ? out : shared) + column, sum);
    }
}

// Grid: any number of blocks. Dynamic shared memory: 2 * columns values of C if blockDim.y > 1 and partials are wanted. Blocks have
// at most THREADS threads. Resident blocks per SM: 3 of 128 threads, 2 of 384, or 1 of 512.
template <typename T, typename W, int N, int VECTORS, int THREADS, bool RMS>
__global__ void __launch_bounds__(THREADS, THREADS == 128 ? 3 : 1 + (THREADS < 512))
    layernorm_v2_bwd(T* dx, compute_t<T>* partials, const T* s, const T* dy, const T* ds, const compute_t<T>* stats, const W* weight,
                     long long rows, int columns, long long s_row, long long dy_row, long long ds_row) {
    wait_for_previous();
    using C = compute_t<T>;
    constexpr bool AHEAD = sizeof(T) < 8 && VECTORS * N * sizeof(T) <= 48;  // registers suffice to load the next row early
    __shared__ C sums[2][64];
    C dweight[VECTORS][N] = {}, dbias[VECTORS][N] = {};
    long long step = gridDim.x * (long long)blockDim.y, row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    Row<T, N, VECTORS> row_s, row_dy;
    Vec<C, 2> mean_rstd;
    C inverse = C(1) / columns;
    auto load = [&](long long from) {
        from = min(from, rows - 1);
        mean_rstd = load_vec<C, 2>(stats + 2 * from);
        row_s.load(s + from * s_row, columns);
        row_dy.load(dy + from * dy_row, columns);
    };
    if (AHEAD) load(row);
    for (int half = 0; row - threadIdx.y < rows; row += step, half ^= 1) {  // the same number of iterations in all threads
        int end = row < rows ? columns : 0;
        if (!AHEAD) load(row);
        C mean = mean_rstd.v[0], rstd = mean_rstd.v[1], sum_h = 0, sum_hn = 0, n[VECTORS][N], h[VECTORS][N];
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            if (row_s.column(k) >= end) break;
            C g[N];
            unpack(n[k], row_s.v[k]);
            unpack(g, row_dy.v[k]);
            load_affine(h[k], weight, row_s.column(k), C(1));
#pragma unroll
            for (int j = 0; j < N; ++j) {
                n[k][j] = sizeof(T) == 2 ? n[k][j] * rstd - mean * rstd : (n[k][j] - mean) * rstd;
                h[k][j] *= g[j];
                sum_h += h[k][j];
                sum_hn += h[k][j] * n[k][j];
                dweight[k][j] += g[j] * n[k][j];
                dbias[k][j] += g[j];
            }
        }
        if (AHEAD && row + step < rows) load(row + step);  // the data arrives while this row is reduced and written
        row_sums(sum_h, sum_hn, sums[half]);               // a barrier separates two uses of the same half
        C a = RMS ? C(0) : rstd * sum_h * inverse, b = rstd * sum_hn * inverse;
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            int column = row_s.column(k);
            if (column >= end) break;
#pragma unroll
            for (int j = 0; j < N; ++j) h[k][j] = rstd * h[k][j] - a - n[k][j] * b;
            if (ds) {
                unpack(n[k], load_vec<T, N>(ds + row * ds_row + column));
#pragma unroll
                for (int j = 0; j < N; ++j) h[k][j] += n[k][j];
            }
            store_vec(dx + row * columns + column, pack<T, N>(h[k]));
        }
    }
    if (!partials) return;
    extern __shared__ double dynamic_shared[];
    C *out = partials + blockIdx.x * (long long)columns, *shared = reinterpret_cast<C*>(dynamic_shared);
#pragma unroll 1
    for (int y = 0; y < blockDim.y; ++y) {
        if (threadIdx.y == y) {
            add_row<T>(out, dweight, shared, columns);
            if (!RMS) add_row<T>(out + gridDim.x * (long long)columns, dbias, shared + columns, columns);
        }
        __syncthreads();
    }
}
