// cross_entropy: the loss of each row of logits, their sum or mean, and the gradient of the logits.
//
//     c = x, or softcap tanh(x / softcap)        lse = log(sum(exp(c)))        s = smoothing / vocab        p = exp(c - lse)
//     loss = lse - (1 - smoothing) c[target] - s sum(c) + z_loss lse^2
//     dx   = w c'(x) ((1 + 2 z_loss lse) p - s - (1 - smoothing) [column == target]),   w: the gradient of the row's loss
//
// Sums run over the first `vocab` columns. Columns behind them are padding: they are not used, and their gradient is 0. A row with the
// target `ignored` has loss 0 and gradient 0. A row with another target outside 0..vocab-1 has loss NaN and gradient NaN.
//
// Layout     x is (rows, columns), rows `x_row` elements apart; dx has rows `dx_row` apart and may be x. loss has the type of the
//            computation: float, or double for double. lse is double. Targets are int64 (`wide`) or int32. Offsets are 64-bit.
// Algorithm  one block per row. The forward is online softmax in one pass: each thread has the largest c so far and the sum of
//            exp(c - largest); both are reduced over the block in a fixed order. The backward reads a row and writes its gradient.
//            lse is kept as a double, and p is computed from its two float parts, so that large logits lose no digits. The backward
//            has a fast path for vectors that contain neither the target nor padding: 7 instructions per element.
// Launch     v1: grid = rows, block 256. v2: block (threads per row, rows); a block has several rows if each has one warp, else one row of
//            up to 256 threads. Each block writes the sum of its losses; a second launch of one block of 1024 adds these.
//
// version  idea                                                               8192x50304 bf16, H200: forward, backward of a copy
// v1       one element per thread and step
// v2       16-byte vectors; 4 loads (backward: 2) per thread in flight        1.00, 0.93
//
// Experiments: docs/notes/cross_entropy.md. Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * LOG2E); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// -inf, the maximum of a row of -inf, becomes 0, so that c - base is never NaN for c = -inf.
template <typename C>
__device__ __forceinline__ C base_of(C largest) {
    return largest == minus_infinity<C>() ? C(0) : largest;
}

// c(x) = cap tanh(x / cap). 16-bit types use an approximation with an absolute error of 3e-7 in tanh.
template <typename T, bool SOFTCAP>
struct Softcap {
    using C = compute_t<T>;
    C cap, inverse;
    __device__ __forceinline__ explicit Softcap(double cap) : cap(cap), inverse(1 / cap) {}
    __device__ __forceinline__ C tanh_of(C x) const {
        if constexpr (sizeof(T) == 2) return fmaf(-2, reciprocal_approx(exponential(2 * inverse * x) + 1), 1);
        else return tanh(x * inverse);
    }
    __device__ __forceinline__ C operator()(C x) const { return SOFTCAP ? cap * tanh_of(x) : x; }
};

// Calls use(column, values) for every column of a row, with arrays of consecutive values: fewer than 2^31 16-byte vectors that are aligned
// in `to`, which has the same columns, and single columns before and after them. LOADS vectors per thread are in flight. Without is_read,
// values are 0. WARP: the row has one warp.
template <int LOADS, bool WARP = false, typename T, class F>
__device__ __forceinline__ void read_row(const T* x, const T* to, long long columns, bool is_read, F& use) {
    constexpr int N = 16 / sizeof(T);
    int threads = WARP ? 32 : blockDim.x;
    unsigned long long from = reinterpret_cast<unsigned long long>(x), address = reinterpret_cast<unsigned long long>(to);
    int first = min(columns, static_cast<long long>(-address % 16 / sizeof(T))), vectors = (columns - first) / N;
    x += first;
    for (int i = threadIdx.x; i < vectors; i += LOADS * threads) {
        Vec<T, N> loaded[LOADS] = {};
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            int vector = i + k * threads;
            if (!is_read || vector >= vectors) continue;
            if ((address - from) % 16 == 0) loaded[k] = reinterpret_cast<const Vec<T, N>*>(x)[vector];
            else
                for (int j = 0; j < N; ++j) loaded[k].v[j] = x[vector * static_cast<long long>(N) + j];
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            int vector = i + k * threads;
            if (vector >= vectors) break;
            compute_t<T> values[N];
            unpack(values, loaded[k]);
            use(first + vector * static_cast<long long>(N), values);
        }
    }
    long long edge = threadIdx.x < first ? threadIdx.x : threadIdx.x + vectors * static_cast<long long>(N);
    if (edge < columns) {
        compute_t<T> values[1] = {load_as(x[edge - first])};
        use(edge, values);
    }
}

// The same for v1, with single columns only.
template <typename T, class F>
__device__ __forceinline__ void read_elements(const T* x, long long columns, F& use) {
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) {
        compute_t<T> value[1] = {load_as(x[i])};
        use(i, value);
    }
}

// The largest c, the sum of exp(c - largest) and, for smoothing, the sum of c of what a thread has read.
template <typename T, bool SOFTCAP>
struct OnlineSum {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    bool adds_all;
    C largest = minus_infinity<C>();
    sum_t<T> sum = 0, total = 0;
    __device__ __forceinline__ OnlineSum(double softcap, double smoothing) : capped(softcap), adds_all(smoothing != 0) {}
    template <int N>
    __device__ __forceinline__ void operator()(long long, C (&c)[N]) {
        C top = largest, partial = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            c[j] = capped(c[j]);
            top = max(top, c[j]);
        }
        C base = base_of(top);
        if (top > largest) {
            sum *= exponential(largest - base);
            largest = top;
        }
#pragma unroll
        for (int j = 0; j < N; ++j) partial += exponential(c[j] - base);
        sum += partial;
        if (!adds_all) return;
        partial = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) partial += c[j];
        total += partial;
    }
};

// Reduces over the threads of a row. A row of one warp needs no barrier and does not use `shared`, which has room for 32 values.
template <class Op, bool WARP, typename C>
__device__ __forceinline__ C row_reduce(C value, C* shared) {
    if constexpr (WARP) return warp_reduce<Op>(value);
    else return block_reduce<Op>(value, shared);
}

// The loss and lse of a row, by all threads of the row. LOADS and WARP are those of read_row; LOADS = 0: read_elements. An ignored row is
// not read, unless it has one warp: that would have to wait for the target before it reads. Thread 0 returns the loss.
template <int LOADS, bool SOFTCAP, bool WARP = false, typename T>
__device__ __forceinline__ compute_t<T> write_loss(compute_t<T>* loss, double* lse, const T* x, long long target, long long vocab,
                                                   long long ignored, double smoothing, double z_loss, double softcap) {
    bool is_valid = target >= 0 && target < vocab;
    T at_target = threadIdx.x == 0 && is_valid ? x[target] : T();  // early, and not converted here, so that nothing waits for it
    OnlineSum<T, SOFTCAP> online(softcap, smoothing);
    long long shown = !WARP && target == ignored ? 0 : vocab;
    if constexpr (LOADS == 0) read_elements(x, shown, online);
    else read_row<LOADS, WARP>(x, x, shown, true, online);
    __shared__ compute_t<T> maxima[32];
    __shared__ sum_t<T> sums[32], totals[32];
    compute_t<T> largest = row_reduce<Max, WARP>(online.largest, maxima);
    double base = base_of(largest), total = 0, result = target == ignored ? 0.0 : not_a_number();
    sum_t<T> sum = row_reduce<Sum, WARP>(online.sum * exponential(online.largest - base_of(largest)), sums);
    if (online.adds_all) total = row_reduce<Sum, WARP>(online.total, totals);
    if (threadIdx.x != 0) return 0;
    double log_sum = log(sum);
    if (target != ignored && is_valid) {
        result = (base - (1 - smoothing) * online.capped(load_as(at_target))) + log_sum;
        if (smoothing != 0) result -= smoothing / vocab * total;
        if (z_loss != 0) result += z_loss * (base + log_sum) * (base + log_sum);
    }
    if (loss) *loss = result;
    *lse = base + log_sum;
    return result;
}

// Writes the sum of the losses of a block's rows, and the number of those that are not ignored. All threads of the block call this;
// threadIdx.x = 0 of each row has its values.
__device__ __forceinline__ void write_sums(double2* partials, double loss, bool is_counted) {
    __shared__ double2 rows[8];
    if (threadIdx.x == 0) rows[threadIdx.y] = {loss, is_counted ? 1.0 : 0.0};
    __syncthreads();
    if (threadIdx.x != 0 || threadIdx.y != 0) return;
    double2 sum = rows[0];
    for (int i = 1; i < blockDim.y; ++i) sum.x += rows[i].x, sum.y += rows[i].y;
    partials[blockIdx.x] = sum;
}

// Writes the gradient of columns to dx, from what all columns of a row have in common.
template <typename T, bool SOFTCAP>
struct Gradient {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    C high, low, of_p, of_target, of_all;  // high + low is lse; for float, low is multiplied by LOG2E
    long long target, vocab;
    bool is_zero;
    T* dx;
    __device__ __forceinline__ Gradient(T* dx, C dloss, const double* count, double lse, long long target, long long vocab,
                                        long long ignored, double smoothing, double z_loss, double softcap)
        : capped(softcap), high(lse), target(target), vocab(vocab), is_zero(target == ignored), dx(dx) {
        C weight = dloss / (count ? C(*count) : C(1));
        if (target < 0 || target >= vocab) weight = not_a_number();
        low = abs(lse) <= 3.4e38 ? C(lse - static_cast<double>(high)) * C(LOG2E) : C(0);
        of_p = weight * (1 + C(2 * z_loss) * high);
        of_target = weight * C(1 - smoothing);
        of_all = smoothing != 0 ? weight * C(smoothing) / vocab : C(0);
    }
    __device__ __forceinline__ C share(C c) const {
        if constexpr (sizeof(C) == 8) return exp(c - high);
        else return exp2_approx(fmaf(c - high, LOG2E, -low));
    }
    // The gradient of a column that is neither the target nor padding, or with `extra` that of the target.
    __device__ __forceinline__ C of(C x, C extra = 0) const {
        C t = SOFTCAP ? capped.tanh_of(x) : C(0), c = SOFTCAP ? capped.cap * t : x;
        return (1 - t) * (1 + t) * (of_p * share(c) - of_all - extra);
    }
    template <int N>
    __device__ __forceinline__ void operator()(long long column, C (&x)[N]) const {
        bool has_target = target >= column && target < column + N, is_whole = !is_zero && column + N <= vocab;
        if (is_whole && !has_target) {
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = of(x[j]);
        } else if (is_whole) {
            int at = target - column;
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = of(x[j], j == at ? of_target : C(0));
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = is_zero || column + j >= vocab ? C(0) : of(x[j], column + j == target ? of_target : C(0));
        }
        store_vec(dx + column, pack<T, N>(x));
    }
};

// ---- v1. Grid rows, block 256.

template <typename T, bool SOFTCAP>
__global__ void cross_entropy_v1(compute_t<T>* losses, double* lse, double2* partials, const T* x, const void* targets, bool wide,
                                 long long rows, long long x_row, long long vocab, long long ignored, double smoothing, double z_loss,
                                 double softcap) {
    wait_for_previous();
    long long row = blockIdx.x, target = index_at(targets, wide, row);
    double loss = write_loss<0, SOFTCAP>(losses ? losses + row : nullptr, lse + row, x + row * x_row, target, vocab, ignored, smoothing,
                                         z_loss, softcap);
    if (partials) write_sums(partials, loss, target != ignored);
}

// The gradient of the loss of row r is dloss[r * dloss_step], divided by *count if that is not null.
template <typename T, bool SOFTCAP>
__global__ void cross_entropy_v1_bwd(T* dx, const T* x, const void* targets, const double* lse, const compute_t<T>* dloss,
                                     const double* count, bool wide, long long rows, long long dx_row, long long x_row, long long columns,
                                     long long vocab, long long ignored, long long dloss_step, double smoothing, double z_loss,
                                     double softcap) {
    wait_for_previous();
    long long row = blockIdx.x;
    Gradient<T, SOFTCAP> gradient(dx + row * dx_row, dloss[row * dloss_step], count, lse[row], index_at(targets, wide, row), vocab, ignored,
                                  smoothing, z_loss, softcap);
    read_elements(x + row * x_row, columns, gradient);
}

// ---- v2. WARP: a row has one warp, and a block several rows; else a block has one row.

template <typename T, bool SOFTCAP, bool WARP>
__global__ void __launch_bounds__(256, sizeof(T) < 8 && !SOFTCAP ? 5 : 1)
    cross_entropy_v2(compute_t<T>* losses, double* lse, double2* partials, const T* x, const void* targets, bool wide, long long rows,
                     long long x_row, long long vocab, long long ignored, double smoothing, double z_loss, double softcap) {
    wait_for_previous();
    constexpr int LOADS = sizeof(T) == 8 ? 2 : 4;
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    double loss = 0;
    bool is_counted = false;
    if (row < rows) {
        long long target = index_at(targets, wide, row);
        is_counted = target != ignored;
        loss = write_loss<LOADS, SOFTCAP, WARP>(losses ? losses + row : nullptr, lse + row, x + row * x_row, target, vocab, ignored,
                                                smoothing, z_loss, softcap);
    }
    if (partials) write_sums(partials, loss, is_counted);
}

template <typename T, bool SOFTCAP, bool WARP>
__global__ void __launch_bounds__(256, sizeof(T) < 8 && !SOFTCAP ? 5 : 1)
    cross_entropy_v2_bwd(T* dx, const T* x, const void* targets, const double* lse, const compute_t<T>* dloss, const double* count,
                         bool wide, long long rows, long long dx_row, long long x_row, long long columns, long long vocab,
                         long long ignored, long long dloss_step, double smoothing, double z_loss, double softcap) {
    wait_for_previous();
    long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (row >= rows) return;
    Gradient<T, SOFTCAP> gradient(dx + row * dx_row, dloss[row * dloss_step], count, lse[row], index_at(targets, wide, row), vocab, ignored,
                                  smoothing, z_loss, softcap);
    read_row<2, WARP>(x + row * x_row, gradient.dx, columns, !gradient.is_zero, gradient);
}

// ---- the sum or mean of the rows' losses, added in a fixed order; count receives the number of targets that are not `ignored`

// Grid 1, block 1024. There is one partial sum per block of the forward.
template <typename C>
__global__ void cross_entropy_reduce(C* out, double* count, const double2* partials, long long blocks, bool mean) {
    __shared__ double sums[32], counts[32];
    wait_for_previous();
    double sum = 0, number = 0;
#pragma unroll 8
    for (long long i = threadIdx.x; i < blocks; i += blockDim.x) sum += partials[i].x, number += partials[i].y;
    sum = block_reduce<Sum>(sum, sums);
    number = block_reduce<Sum>(number, counts);
    if (threadIdx.x == 0) {
        *out = mean ? sum / number : sum;
        *count = number;
    }
}
