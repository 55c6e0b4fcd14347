// The ladder of softmax: five kernels, each with one new idea. This file compiles alone.
//
//     softmax    y = exp(scale x - m) / sum(exp(scale x - m)), where m is the largest scale x of the row
//     gradient   dx = scale y (g - sum(y g))
//
// Layout     x is (rows, columns), with rows `x_row` elements apart; those of g are `g_row` apart. The others
//            are contiguous.
// Numbers    Differences and sums are double: exp() enlarges the rounding error of a float difference.
// Launch     1-D grids, blocks of 256 threads.
//
// us for 1024x1024 float on an H200, where a copy of the bytes takes 3.4 (backward 4.5):
//
// version  forward                            us      backward                                        us
// v1       one thread per row, three passes   582     one thread per column, for all rows             57,650
// v2       one block per row                  14.0    v1 for groups of rows in parallel               1,551
// v3       tree reduction in shared memory    8.8     every row in parallel                           570
// v4       warp shuffles                      7.6     the row is copied to shared memory              389
// v5       16-byte vectors, online softmax    8.4     one sum per row instead of one per element      5.3
//
// v5's forward reads a row twice instead of three times, but the conversions to double and back take longer
// than the reads. softmax.cu computes exponentials in float.
// The next rungs are in softmax.cu. They read a row once: v7 takes 3.1 (backward 4.7).
#include "common/math.cuh"
#include "common/vec.cuh"

constexpr int BLOCK = 256;  // threads
// The least finite number. A row of -inf has the sum 0, and its results 0 / 0 are NaN, as in torch.
constexpr double LOWEST = -1.7976931348623157e308;

// exp(t), as accurate as T. Unless T is double: t log2(e) is split in double into an integer and a fraction
// in [-1/2, 1/2], and 2^fraction is computed in float. double's exp() takes several times as long.
template <typename T>
__device__ __forceinline__ double exponential(double t) {
    if (t < -700) return 0;  // also for -inf, whose fraction would be NaN
    double power = t * 1.4426950408889634, integer = rint(power);
    double scale = __hiloint2double((int(integer) + 1023) << 20, 0);  // 2^integer
    return exp2_near_0(power - integer) * scale;
}
template <>
__device__ __forceinline__ double exponential<double>(double t) {
    return exp(t);
}

// ---- v1: one thread per row. Few threads run, and a warp reads 32 rows at a time: loads are not coalesced.
// If scale is negative, the smallest x has the largest exponential. Grid ceil(rows / 256).
template <typename T>
__global__ void softmax_v1(T* out, const T* x,  // rows x_row elements apart
                           long long rows, long long columns, long long x_row, double scale) {
    long long row = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (row >= rows) return;
    x += row * x_row;
    out += row * columns;
    double sign = scale < 0 ? -1 : 1, largest = LOWEST, sum = 0;
    for (long long i = 0; i < columns; ++i) largest = max(largest, sign * load_as(x[i]));
    for (long long i = 0; i < columns; ++i) sum += exponential<T>(scale * (load_as(x[i]) - sign * largest));
    double inverse = 1 / sum;
    for (long long i = 0; i < columns; ++i) {
        out[i] = T(exponential<T>(scale * (load_as(x[i]) - sign * largest)) * inverse);
    }
}

// The whole Jacobian: dx_i = scale sum_j y_j g_j (delta_ij - y_i). Grid ceil(columns / 256).
template <typename T>
__global__ void softmax_v1_bwd(T* dx, const T* y, const T* g,  // rows g_row elements apart
                               long long rows, long long columns, long long g_row, double scale) {
    long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (i >= columns) return;
    for (long long row = 0; row < rows; ++row, dx += columns, y += columns, g += g_row) {
        double sum = 0;
        for (long long j = 0; j < columns; ++j) {
            sum += load_as(y[j]) * load_as(g[j]) * ((i == j) - load_as(y[i]));
        }
        dx[i] = T(scale * sum);
    }
}

// ---- v2: one block per row. Loads are coalesced, and 256 times as many threads run. Thread 0 reduces what
// the others found. Grid rows.
template <typename T>
__global__ void softmax_v2(T* out, const T* x, long long columns, long long x_row, double scale) {
    __shared__ double maxima[BLOCK], sums[BLOCK];
    x += blockIdx.x * x_row;
    out += blockIdx.x * columns;
    double sign = scale < 0 ? -1 : 1, largest = LOWEST, sum = 0;
    for (long long i = threadIdx.x; i < columns; i += BLOCK) largest = max(largest, sign * load_as(x[i]));
    maxima[threadIdx.x] = largest;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < BLOCK; ++i) maxima[0] = max(maxima[0], maxima[i]);
    }
    __syncthreads();
    largest = sign * maxima[0];
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        sum += exponential<T>(scale * (load_as(x[i]) - largest));
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < BLOCK; ++i) sums[0] += sums[i];
    }
    __syncthreads();
    double inverse = 1 / sums[0];
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        out[i] = T(exponential<T>(scale * (load_as(x[i]) - largest)) * inverse);
    }
}

// Several blocks share the rows. Grid ceil(columns / 256) * ceil(rows / rows_per_block).
template <typename T>
__global__ void softmax_v2_bwd(T* dx, const T* y, const T* g,                       // rows g_row apart
                               long long rows, long long columns, long long g_row,  // one group per block
                               long long rows_per_block, double scale) {
    long long blocks_per_row = (columns + BLOCK - 1) / BLOCK;
    long long i = blockIdx.x % blocks_per_row * BLOCK + threadIdx.x;
    long long first = blockIdx.x / blocks_per_row * rows_per_block;
    if (i >= columns) return;
    for (long long row = first; row < min(first + rows_per_block, rows); ++row) {
        const T *ys = y + row * columns, *gs = g + row * g_row;
        double sum = 0;
        for (long long j = 0; j < columns; ++j) {
            sum += load_as(ys[j]) * load_as(gs[j]) * ((i == j) - load_as(ys[i]));
        }
        dx[row * columns + i] = T(scale * sum);
    }
}

// ---- v3: the threads of a block reduce in a tree: 8 steps instead of 255.

template <bool MAX>
__device__ __forceinline__ double combine(double a, double b) {
    return MAX ? max(a, b) : a + b;
}

// The maximum, or the sum, of the values of the block's threads.
template <bool MAX>
__device__ double tree_reduce(double value) {
    __shared__ double values[BLOCK];  // one array for the maximum and another one for the sum
    values[threadIdx.x] = value;
    for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            values[threadIdx.x] = combine<MAX>(values[threadIdx.x], values[threadIdx.x + half]);
        }
    }
    __syncthreads();
    return values[0];
}

// Grid rows.
template <typename T>
__global__ void softmax_v3(T* out, const T* x, long long columns, long long x_row, double scale) {
    x += blockIdx.x * x_row;
    out += blockIdx.x * columns;
    double sign = scale < 0 ? -1 : 1, largest = LOWEST, sum = 0;
    for (long long i = threadIdx.x; i < columns; i += BLOCK) largest = max(largest, sign * load_as(x[i]));
    largest = sign * tree_reduce<true>(largest);
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        sum += exponential<T>(scale * (load_as(x[i]) - largest));
    }
    double inverse = 1 / tree_reduce<false>(sum);
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        out[i] = T(exponential<T>(scale * (load_as(x[i]) - largest)) * inverse);
    }
}

// A thread computes one element. Grid ceil(columns / 256) * rows.
template <typename T>
__global__ void softmax_v3_bwd(T* dx, const T* y, const T* g,  // rows g_row elements apart
                               long long columns, long long g_row, double scale) {
    long long blocks_per_row = (columns + BLOCK - 1) / BLOCK, row = blockIdx.x / blocks_per_row;
    long long i = blockIdx.x % blocks_per_row * BLOCK + threadIdx.x;
    if (i >= columns) return;
    y += row * columns;
    g += row * g_row;
    double sum = 0;
    for (long long j = 0; j < columns; ++j) sum += load_as(y[j]) * load_as(g[j]) * ((i == j) - load_as(y[i]));
    dx[row * columns + i] = T(scale * sum);
}

// ---- v4: the lanes of a warp exchange registers by shuffles. Only the results of the 8 warps go through
// shared memory: one barrier instead of nine.

template <bool MAX>
__device__ double shuffle_reduce(double value) {
    __shared__ double of_warp[BLOCK / 32];
    for (int apart = 16; apart > 0; apart /= 2) {
        value = combine<MAX>(value, __shfl_xor_sync(~0u, value, apart));
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[0];
    for (int warp = 1; warp < BLOCK / 32; ++warp) value = combine<MAX>(value, of_warp[warp]);
    return value;
}

// Grid rows.
template <typename T>
__global__ void softmax_v4(T* out, const T* x, long long columns, long long x_row, double scale) {
    x += blockIdx.x * x_row;
    out += blockIdx.x * columns;
    double sign = scale < 0 ? -1 : 1, largest = LOWEST, sum = 0;
    for (long long i = threadIdx.x; i < columns; i += BLOCK) largest = max(largest, sign * load_as(x[i]));
    largest = sign * shuffle_reduce<true>(largest);
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        sum += exponential<T>(scale * (load_as(x[i]) - largest));
    }
    double inverse = 1 / shuffle_reduce<false>(sum);
    for (long long i = threadIdx.x; i < columns; i += BLOCK) {
        out[i] = T(exponential<T>(scale * (load_as(x[i]) - largest)) * inverse);
    }
}

// 256 columns of y and g at a time go to shared memory, for all threads. Grid ceil(columns / 256) * rows.
template <typename T>
__global__ void softmax_v4_bwd(T* dx, const T* y, const T* g,  // rows g_row elements apart
                               long long columns, long long g_row, double scale) {
    __shared__ compute_t<T> ys[BLOCK], gs[BLOCK];
    long long blocks_per_row = (columns + BLOCK - 1) / BLOCK, row = blockIdx.x / blocks_per_row;
    long long i = blockIdx.x % blocks_per_row * BLOCK + threadIdx.x;
    y += row * columns;
    g += row * g_row;
    compute_t<T> y_i = i < columns ? load_as(y[i]) : 0;
    double sum = 0;
    for (long long first = 0; first < columns; first += BLOCK) {
        int count = min((long long)BLOCK, columns - first);
        if (threadIdx.x < count) {
            ys[threadIdx.x] = load_as(y[first + threadIdx.x]);
            gs[threadIdx.x] = load_as(g[first + threadIdx.x]);
        }
        __syncthreads();
        for (int j = 0; j < count; ++j) sum += ys[j] * gs[j] * ((i == first + j) - y_i);
        __syncthreads();  // all threads have read these columns before the next ones overwrite them
    }
    if (i < columns) dx[row * columns + i] = T(scale * sum);
}

// ---- v5: loads of N elements, 16 bytes; N is 1 if rows are not aligned. Online softmax (Milakov and
// Gimelshein, arXiv 1805.02867): one pass for maximum and sum; when the maximum grows, the sum is rescaled.
// Grid rows.
template <typename T, int N>
__global__ void softmax_v5(T* out, const T* x, long long columns, long long x_row, double scale) {
    x += blockIdx.x * x_row;
    out += blockIdx.x * columns;
    double sign = scale < 0 ? -1 : 1, largest = LOWEST, sum = 0;
    for (long long i = threadIdx.x * N; i < columns; i += BLOCK * N) {
        Vec<T, N> v = load_vec<T, N>(x + i);
        double before = largest;
        for (int j = 0; j < N; ++j) largest = max(largest, sign * load_as(v.v[j]));
        if (largest > before) sum *= exp(fabs(scale) * (before - largest));
        for (int j = 0; j < N; ++j) sum += exponential<T>(scale * (load_as(v.v[j]) - sign * largest));
    }
    double of_row = shuffle_reduce<true>(largest);
    double inverse = 1 / shuffle_reduce<false>(sum * exp(fabs(scale) * (largest - of_row)));
    for (long long i = threadIdx.x * N; i < columns; i += BLOCK * N) {
        Vec<T, N> v = load_vec<T, N>(x + i);
        for (int j = 0; j < N; ++j) {
            v.v[j] = T(exponential<T>(scale * (load_as(v.v[j]) - sign * of_row)) * inverse);
        }
        store_vec(out + i, v);
    }
}

// dx_i = scale y_i (g_i - sum_j y_j g_j): the sum is the same for all elements of a row. Grid rows.
template <typename T, int N>
__global__ void softmax_v5_bwd(T* dx, const T* y, const T* g,  // rows g_row elements apart
                               long long columns, long long g_row, double scale) {
    dx += blockIdx.x * columns;
    y += blockIdx.x * columns;
    g += blockIdx.x * g_row;
    double sum = 0;
    for (long long i = threadIdx.x * N; i < columns; i += BLOCK * N) {
        Vec<T, N> ys = load_vec<T, N>(y + i), gs = load_vec<T, N>(g + i);
        for (int j = 0; j < N; ++j) sum += load_as(ys.v[j]) * load_as(gs.v[j]);
    }
    sum = shuffle_reduce<false>(sum);
    for (long long i = threadIdx.x * N; i < columns; i += BLOCK * N) {
        Vec<T, N> ys = load_vec<T, N>(y + i), gs = load_vec<T, N>(g + i);
        for (int j = 0; j < N; ++j) ys.v[j] = T(scale * load_as(ys.v[j]) * (load_as(gs.v[j]) - sum));
        store_vec(dx + i, ys);
    }
}
