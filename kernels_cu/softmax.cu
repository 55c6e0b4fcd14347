// out = softmax(scale * x) along rows, or its logarithm, and the gradients of both. A ladder.
//
//     softmax:      y = exp(scale x - m) / sum(exp(scale x - m))         dx = scale y (g - sum(y g))
//     log_softmax:  y = scale x - m - log(sum(exp(scale x - m)))         dx = scale (g - exp(y) sum(g))
//
// with m the row's largest scale x. x is (rows x columns); its rows may lie `x_row` elements apart, those of the outputs and of y are
// contiguous. Computed in float (double for double) and rounded once. v1 to v5 are the rungs of a course on GPT-2.
//
//  version  forward                                                      backward
//  v1       one thread a row: three passes over it                       one thread a column, for all rows: the sum over the whole
//                                                                        Jacobian, columns^2 terms a row
//  v2       one block a row; thread 0 adds up what the threads found     the same, groups of rows side by side
//  v3       trees in shared memory                                       every row side by side
//  v4       shuffles within a warp, shared memory between the warps      rows staged in shared memory
//  v5       16-byte vectors, maximum and sum in one pass                 the dot product: columns terms a row
//  v6       up to 32 threads a row, which stays in registers: it is read once
//  v7       a block a row, which stays in registers
//  v8       several blocks a long row
//
// Grids are 1-D. Offsets are 64-bit.
#include "common/exponential.cuh"
#include "common/rows.cuh"

// ---- v1

// Grid ceil(rows / blockDim.x). The sum is in double, as one thread adds up a whole row.
template <typename T>
__global__ void softmax_v1(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    x += row * x_row;
    out += row * columns;
    Exponential<T> exponential(scale);
    C largest = minus_infinity<C>();
    for (long long i = 0; i < columns; ++i) largest = max(largest, exponential.lift(x[i]));
    double sum = 0;
    for (long long i = 0; i < columns; ++i) sum += exponential(exponential.lift(x[i]) - base_of(largest));
    Normalise<T> normalise(exponential, largest, C(sum), false);
    for (long long i = 0; i < columns; ++i) out[i] = T(normalise(exponential.lift(x[i])));
}

// dx_i = scale sum_j y_j g_j (delta_ij - y_i), term by term.
template <typename T>
__device__ __forceinline__ void jacobian_column(T* dx, const T* y, const T* g, long long columns, long long i, double scale) {
    using C = compute_t<T>;
    C sum = 0, y_i = load_as(y[i]);
    for (long long j = 0; j < columns; ++j) sum += load_as(y[j]) * load_as(g[j]) * ((i == j ? C(1) : C(0)) - y_i);
    dx[i] = T(C(scale) * sum);
}

// Grid ceil(columns / blockDim.x).
template <typename T>
__global__ void softmax_v1_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= columns) return;
    for (long long row = 0; row < rows; ++row) jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// ---- v2, v3, v4: one block a row, which differ in how its threads put together what each found

struct Serial {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        shared[threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < blockDim.x; ++i) value = Op::of(value, shared[i]);
            shared[0] = value;
        }
        __syncthreads();
        return shared[0];
    }
};

struct Tree {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        shared[threadIdx.x] = value;
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] = Op::of(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        __syncthreads();
        return shared[0];
    }
};

struct Shuffles {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        return block_reduce<Op>(value, shared);
    }
};

template <class Reduction, typename T>
__device__ __forceinline__ void block_softmax(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    __shared__ C maxima[256], sums[256];  // one for each, so that nobody writes a sum where another still reads the maximum
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * x_row;
        C largest = minus_infinity<C>(), sum = 0;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) largest = max(largest, exponential.lift(from[i]));
        largest = Reduction::template reduce<Max>(largest, maxima);
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) sum += exponential(exponential.lift(from[i]) - base_of(largest));
        sum = Reduction::template reduce<Sum>(sum, sums);
        Normalise<T> normalise(exponential, largest, sum, false);
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) out[row * columns + i] = T(normalise(exponential.lift(from[i])));
        __syncthreads();  // before the next row's values overwrite this one's
    }
}

// Block 256, a power of 2.
template <typename T>
__global__ void softmax_v2(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Serial>(out, x, rows, columns, x_row, scale);
}
template <typename T>
__global__ void softmax_v3(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Tree>(out, x, rows, columns, x_row, scale);
}
template <typename T>
__global__ void softmax_v4(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Shuffles>(out, x, rows, columns, x_row, scale);
}

// A block takes blockDim.x columns of `height` rows. Grid ceil(columns / blockDim.x) * ceil(rows / height).
template <typename T>
__global__ void softmax_v2_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, long long height,
                               double scale) {
    long long across = (columns + blockDim.x - 1) / blockDim.x;
    long long i = blockIdx.x % across * blockDim.x + threadIdx.x, first = blockIdx.x / across * height;
    if (i >= columns) return;
    for (long long row = first; row < min(first + height, rows); ++row)
        jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// Grid ceil(columns / blockDim.x) * rows.
template <typename T>
__global__ void softmax_v3_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    long long across = (columns + blockDim.x - 1) / blockDim.x;
    long long i = blockIdx.x % across * blockDim.x + threadIdx.x, row = blockIdx.x / across;
    if (i < columns) jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// Grid ceil(columns / 256) * rows, block 256.
template <typename T>
__global__ void softmax_v4_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    using C = compute_t<T>;
    __shared__ C ys[256], gs[256];  // 256 columns at a time
    long long across = (columns + 255) / 256;
    long long i = blockIdx.x % across * 256 + threadIdx.x, row = blockIdx.x / across;
    y += row * columns;
    g += row * g_row;
    C sum = 0, y_i = i < columns ? load_as(y[i]) : C(0);
    for (long long first = 0; first < columns; first += 256) {
        int here = min(256LL, columns - first);
        if (threadIdx.x < here) {
            ys[threadIdx.x] = load_as(y[first + threadIdx.x]);
            gs[threadIdx.x] = load_as(g[first + threadIdx.x]);
        }
        __syncthreads();
        for (int j = 0; j < here; ++j) sum += ys[j] * gs[j] * ((first + j == i ? C(1) : C(0)) - y_i);
        __syncthreads();
    }
    if (i < columns) dx[row * columns + i] = T(C(scale) * sum);
}

// ---- v5 and v8: a part of a row by 16-byte vectors, the threads of a block in turns

// Largest u and sum of exponentials of a thread's vectors of columns [begin, end), in one pass: where a larger u turns up, the sum so far
// is scaled down.
template <typename T>
__device__ __forceinline__ void scan_columns(const T* row, long long begin, long long end, const Exponential<T>& exponential,
                                             compute_t<T>& largest, compute_t<T>& sum) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    T missing = exponential.sign * minus_infinity<C>();
    largest = minus_infinity<C>();
    sum = 0;
    for (long long i = (begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> v = load_columns(row, i * WIDTH<T> - shift, begin, end, true, missing);
        C before = largest, here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, exponential.lift(v.v[j]));
        C base = base_of(largest);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += exponential(exponential.lift(v.v[j]) - base);
        sum = sum * exponential(before - base) + here;
    }
}

// The same over the block.
template <typename T>
__device__ __forceinline__ void block_scan(const Exponential<T>& exponential, compute_t<T>& largest, compute_t<T>& sum) {
    using C = compute_t<T>;
    __shared__ C maxima[32], sums[32];
    C own = largest;
    largest = block_reduce<Max>(own, maxima);
    sum = block_reduce<Sum>(sum * exponential(own - base_of(largest)), sums);
}

template <typename T>
__device__ __forceinline__ void write_columns(T* out, const T* row, long long begin, long long end, const Normalise<T>& normalise) {
    int shift = shift_of(row);
    bool aligned = shift_of(out) == shift;
    for (long long i = (begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> v = load_columns(row, i * WIDTH<T> - shift, begin, end, true, T(0.0f));
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) v.v[j] = T(normalise(normalise.exponential.lift(v.v[j])));
        store_columns(out, i * WIDTH<T> - shift, begin, end, aligned, v);
    }
}

template <typename T>
__global__ void softmax_v5(T* out, const T* x, long long rows, long long columns, long long x_row, double scale, bool log) {
    using C = compute_t<T>;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        C largest, sum;
        scan_columns(x + row * x_row, 0, columns, exponential, largest, sum);
        block_scan(exponential, largest, sum);
        write_columns(out + row * columns, x + row * x_row, 0, columns, Normalise<T>(exponential, largest, sum, log));
        __syncthreads();
    }
}

// The gradient of a column, once `total`, the row's sum of what `term` gives, is known.
template <typename T>
struct Gradient {
    using C = compute_t<T>;
    Exponential<T> exponential;
    C scale;
    bool log;
    __device__ __forceinline__ Gradient(double scale, bool log) : exponential(1.0), scale(scale), log(log) {}
    __device__ __forceinline__ C term(T y, T g) const { return log ? load_as(g) : load_as(y) * load_as(g); }
    __device__ __forceinline__ T operator()(T y, T g, C total) const {
        C value = load_as(y), gradient = load_as(g);
        return T(scale * (log ? fma(-exponential(value), total, gradient) : value * (gradient - total)));
    }
};

template <typename T>
__device__ __forceinline__ compute_t<T> sum_terms(const T* y, const T* g, long long begin, long long end, const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool aligned = shift_of(g) == shift;
    compute_t<T> sum = 0;
    for (long long i = (begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> a = load_columns(y, i * WIDTH<T> - shift, begin, end, true, T(0.0f));
        Vec<T, WIDTH<T>> b = load_columns(g, i * WIDTH<T> - shift, begin, end, aligned, T(0.0f));
        compute_t<T> here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.term(a.v[j], b.v[j]);
        sum += here;
    }
    return sum;
}

template <typename T>
__device__ __forceinline__ void write_gradients(T* dx, const T* y, const T* g, long long begin, long long end, compute_t<T> total,
                                                const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool g_aligned = shift_of(g) == shift, dx_aligned = shift_of(dx) == shift;
    for (long long i = (begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> a = load_columns(y, i * WIDTH<T> - shift, begin, end, true, T(0.0f));
        Vec<T, WIDTH<T>> b = load_columns(g, i * WIDTH<T> - shift, begin, end, g_aligned, T(0.0f));
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a.v[j] = gradient(a.v[j], b.v[j], total);
        store_columns(dx, i * WIDTH<T> - shift, begin, end, dx_aligned, a);
    }
}

template <typename T>
__global__ void softmax_v5_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, log);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *ys = y + row * columns, *gs = g + row * g_row;
        compute_t<T> total = block_reduce<Sum>(sum_terms(ys, gs, 0, columns, gradient), sums);
        write_gradients(dx + row * columns, ys, gs, 0, columns, total, gradient);
        __syncthreads();
    }
}

// ---- v6 and v7: the row in registers

// The threads that share a row. Every thread of the block must call reduce, each time with another `slot`, 0 or 1.
struct Lanes {  // neighbouring lanes of a warp, a power of 2
    int width;
    template <class Op, typename C>
    __device__ __forceinline__ C reduce(C value, int slot) const {
        return warp_reduce<Op>(value, width);
    }
};

template <typename C>
struct Block {
    int width;
    C* shared;  // room for 64
    template <class Op>
    __device__ __forceinline__ C reduce(C value, int slot) const {
        return block_reduce<Op>(value, shared + 32 * slot);
    }
};

// Thread `lane` of a team holds the row's vectors lane, lane + width, ...: VECTORS of them, all loaded before the first is used, so that
// their latencies overlap.
template <int VECTORS, class Team, typename T>
__device__ __forceinline__ void team_softmax(T* out, const T* row, int columns, int lane, Team team, double scale, bool log) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    T missing = scale < 0 ? -minus_infinity<C>() : minus_infinity<C>();
    Vec<T, WIDTH<T>> v[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) v[k] = load_columns(row, (lane + k * team.width) * WIDTH<T> - shift, 0, columns, true, missing);
    Exponential<T> exponential(scale);
    C kept[VECTORS][WIDTH<T>], largest = minus_infinity<C>(), sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, kept[k][j] = exponential.lift(v[k].v[j]));
    largest = team.template reduce<Max>(largest, 0);
    C base = base_of(largest);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) {
            C d = kept[k][j] - base, e = exponential(d);
            kept[k][j] = log ? d : e;
            sum += e;
        }
    sum = team.template reduce<Sum>(sum, 1);
    Normalise<T> normalise(exponential, largest, sum, log);
    bool aligned = shift_of(out) == shift;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) v[k].v[j] = T(normalise.end(kept[k][j]));
        store_columns(out, (lane + k * team.width) * WIDTH<T> - shift, 0, columns, aligned, v[k]);
    }
}

template <int VECTORS, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, int columns, int lane, Team team, double scale, bool log) {
    int shift = shift_of(y);
    bool g_aligned = shift_of(g) == shift, dx_aligned = shift_of(dx) == shift;
    Vec<T, WIDTH<T>> a[VECTORS], b[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int first = (lane + k * team.width) * WIDTH<T> - shift;
        a[k] = load_columns(y, first, 0, columns, true, T(0.0f));
        b[k] = load_columns(g, first, 0, columns, g_aligned, T(0.0f));
    }
    Gradient<T> gradient(scale, log);
    compute_t<T> total = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) total += gradient.term(a[k].v[j], b[k].v[j]);
    total = team.template reduce<Sum>(total, 0);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[k].v[j] = gradient(a[k].v[j], b[k].v[j], total);
        store_columns(dx, (lane + k * team.width) * WIDTH<T> - shift, 0, columns, dx_aligned, a[k]);
    }
}

// Grid ceil(rows / (blockDim.x / width)). Where the last warp's rows come to an end, its lanes take part with an empty row.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(128) softmax_v6(T* out, const T* x, long long rows, int columns, long long x_row, int width, double scale,
                                                  bool log) {
    long long row = blockIdx.x * (long long)(blockDim.x / width) + threadIdx.x / width;
    if (row >= rows) row = columns = 0;
    team_softmax<VECTORS>(out + row * columns, x + row * x_row, columns, threadIdx.x % width, Lanes{width}, scale, log);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(128) softmax_v6_bwd(T* dx, const T* y, const T* g, long long rows, int columns, long long g_row,
                                                      int width, double scale, bool log) {
    long long row = blockIdx.x * (long long)(blockDim.x / width) + threadIdx.x / width, at = row * columns;
    if (row >= rows) row = at = columns = 0;
    team_gradient<VECTORS>(dx + at, y + at, g + row * g_row, columns, threadIdx.x % width, Lanes{width}, scale, log);
}

// Grid rows.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(512) softmax_v7(T* out, const T* x, int columns, long long x_row, double scale, bool log) {
    __shared__ compute_t<T> shared[64];
    long long row = blockIdx.x;
    Block<compute_t<T>> team{int(blockDim.x), shared};
    team_softmax<VECTORS>(out + row * columns, x + row * x_row, columns, threadIdx.x, team, scale, log);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(512) softmax_v7_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale,
                                                       bool log) {
    __shared__ compute_t<T> shared[64];
    long long row = blockIdx.x, at = row * columns;
    Block<compute_t<T>> team{int(blockDim.x), shared};
    team_gradient<VECTORS>(dx + at, y + at, g + row * g_row, columns, threadIdx.x, team, scale, log);
}

// ---- v8: `pieces` blocks share a row, in two launches. What the first found in each piece is in `parts`, (rows, pieces, 2) or (rows,
// pieces). Grids rows * pieces; a block has at least as many threads as a row has pieces; a piece is `length` columns.

template <typename T>
__global__ void softmax_v8_scan(double* parts, const T* x, long long columns, long long x_row, int pieces, long long length,
                                double scale) {
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length;
    compute_t<T> largest, sum;
    Exponential<T> exponential(scale);
    scan_columns(x + row * x_row, begin, min(begin + length, columns), exponential, largest, sum);
    block_scan(exponential, largest, sum);
    if (threadIdx.x == 0) {
        parts[2LL * blockIdx.x] = largest;
        parts[2LL * blockIdx.x + 1] = sum;
    }
}

template <typename T>
__global__ void softmax_v8(T* out, const T* x, const double* parts, long long columns, long long x_row, int pieces, long long length,
                           double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length;
    Exponential<T> exponential(scale);
    C largest = minus_infinity<C>(), sum = 0;
    if (threadIdx.x < pieces) {
        largest = parts[2 * (row * pieces + threadIdx.x)];
        sum = parts[2 * (row * pieces + threadIdx.x) + 1];
    }
    block_scan(exponential, largest, sum);
    Normalise<T> normalise(exponential, largest, sum, log);
    write_columns(out + row * columns, x + row * x_row, begin, min(begin + length, columns), normalise);
}

template <typename T>
__global__ void softmax_v8_bwd_scan(double* parts, const T* y, const T* g, long long columns, long long g_row, int pieces, long long length,
                                    double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length;
    Gradient<T> gradient(scale, log);
    compute_t<T> sum = sum_terms(y + row * columns, g + row * g_row, begin, min(begin + length, columns), gradient);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <typename T>
__global__ void softmax_v8_bwd(T* dx, const T* y, const T* g, const double* parts, long long columns, long long g_row, int pieces,
                               long long length, double scale, bool log) {
    using C = compute_t<T>;
    __shared__ C sums[32];
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length, at = row * columns;
    C total = block_reduce<Sum>(threadIdx.x < pieces ? C(parts[row * pieces + threadIdx.x]) : C(0), sums);
    Gradient<T> gradient(scale, log);
    write_gradients(dx + at, y + at, g + row * g_row, begin, min(begin + length, columns), total, gradient);
}

// ---- along a dimension that is not the last: x is (outer, columns, inner) and contiguous. Neighbouring threads take neighbouring rows,
// so their accesses lie side by side. Grid ceil(outer * inner / blockDim.x). Sums in double, as in v1.

template <typename T>
__global__ void softmax_inner(T* out, const T* x, long long rows, long long columns, long long inner, double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Exponential<T> exponential(scale);
    C largest = minus_infinity<C>();
    double sum = 0;
    for (long long i = 0; i < columns; ++i) largest = max(largest, exponential.lift(x[at + i * inner]));
    for (long long i = 0; i < columns; ++i) sum += exponential(exponential.lift(x[at + i * inner]) - base_of(largest));
    Normalise<T> normalise(exponential, largest, C(sum), log);
    for (long long i = 0; i < columns; ++i) out[at + i * inner] = T(normalise(exponential.lift(x[at + i * inner])));
}

template <typename T>
__global__ void softmax_inner_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long inner, double scale,
                                  bool log) {
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Gradient<T> gradient(scale, log);
    double total = 0;
    for (long long i = 0; i < columns; ++i) total += gradient.term(y[at + i * inner], g[at + i * inner]);
    for (long long i = 0; i < columns; ++i) dx[at + i * inner] = gradient(y[at + i * inner], g[at + i * inner], total);
}
