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
// Algorithm  The forward is online softmax in one pass: each thread has the largest c so far and the sum of exp(c - largest); both are
//            reduced over the threads of the row in a fixed order. The backward reads a row and writes its gradient. lse is kept as a
//            double, and p is computed from its two float parts, so that large logits lose no digits. The backward has a fast path for
//            vectors that contain neither the target nor padding: 7 instructions per element.
// Launch     Forward: a row has one block or, up to 16 KiB, one warp of a block (32, 4). Each block writes the sum of its losses; a second
//            launch of one block adds these. Backward: one thread per LOADS vectors.
//
// version  idea                                                               8192x50304 bf16, H100: forward, backward of a copy
// v1       a block per row, one element per thread and step
// v2       16-byte vectors, 4 loads per thread in flight                      0.95, 0.97
//          short rows: a warp has several, and finishes them together
//
// Experiments: docs/notes/cross_entropy.md. Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// By value. `dloss_step`: the gradient of the loss of row r is dloss[r * dloss_step].
struct Options {
    long long vocab, ignored, dloss_step;
    double smoothing, z_loss, softcap;
};

__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * LOG2E); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

// Where maxima start: not -inf, so that c - largest is never NaN for c = -inf.
__device__ __forceinline__ float lowest(float) { return -3.4028235e38f; }
__device__ __forceinline__ double lowest(double) { return -1.7976931348623157e308; }

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

// The largest of the elements that were added. NaN is ignored. 16-bit elements are compared in pairs.
template <typename T, bool PAIRS = sizeof(T) == 2>
struct Top {
    T top = minus_infinity<T>();
    template <int N>
    __device__ __forceinline__ void add(const Vec<T, N>& v) {
#pragma unroll
        for (int j = 0; j < N; ++j) top = max(top, v.v[j]);
    }
    __device__ __forceinline__ T largest() const { return top; }
};
template <typename T>
struct Top<T, true> {
    using Pair = typename PairOf<T>::type;
    Pair top = {minus_infinity<T>(), minus_infinity<T>()};
    template <int N>
    __device__ __forceinline__ void add(const Vec<T, N>& v) {
        const Pair* pairs = reinterpret_cast<const Pair*>(&v);
#pragma unroll
        for (int j = 0; j < N / 2; ++j) top = __hmax2(top, pairs[j]);
        if (N == 1) top = __hmax2(top, Pair{v.v[0], v.v[0]});
    }
    __device__ __forceinline__ float largest() const { return max(load_as(top.x), load_as(top.y)); }
};

// How a row is read: use.look(v) for some vectors, then use.raise(), then use(column, values) for the same vectors. read_one reads one
// column.
template <typename T, class F>
__device__ __forceinline__ void read_one(const T* x, int column, F& use) {
    Vec<T, 1> v = {x[column]};
    use.look(v);
    use.raise();
    compute_t<T> value[1] = {load_as(v.v[0])};
    use(column, value);
}

// Reads a row, or one of its pieces, by the threads threadIdx.x, which are a warp if WARP: 16-byte vectors that are aligned in `to`, which has the
// same columns, and single columns before and after them. LOADS vectors per thread are in flight; LOADS = 0: single columns only, for v1.
// Without is_read, values have no meaning.
template <int LOADS, bool WARP, typename T, class F>
__device__ __forceinline__ void read_row(const T* x, const T* to, int columns, bool is_read, F& use, int piece = 0, int pieces = 1) {
    if constexpr (LOADS == 0) {
        for (int i = threadIdx.x; i < columns; i += blockDim.x) read_one(x, i, use);
        return;
    }
    constexpr int N = 16 / sizeof(T);
    int threads = WARP ? 32 : blockDim.x;
    unsigned from = reinterpret_cast<unsigned long long>(x), address = reinterpret_cast<unsigned long long>(to);
    int first = min(columns, int(-address % 16 / sizeof(T))), vectors = (columns - first) / N;
    x += first;
#pragma unroll 1
    for (int i = threadIdx.x + piece * LOADS * threads; i < vectors; i += pieces * LOADS * threads) {
        Vec<T, N> loaded[LOADS + !LOADS];
        int left = is_read ? vectors - i : 0;
        if ((address - from) % 16 == 0) {
#pragma unroll
            for (int k = 0; k < LOADS; ++k)
                if (k * threads < left) loaded[k] = load_vec<T, N>(x + (i + k * threads) * static_cast<long long>(N));
        } else {
#pragma unroll
            for (int k = 0; k < LOADS * N; ++k)
                if (k / N * threads < left) loaded[k / N].v[k % N] = x[(i + k / N * threads) * N + k % N];
        }
#pragma unroll
        for (int k = 0; k < LOADS; ++k)
            if (i + k * threads < vectors) use.look(loaded[k]);
        use.raise();
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            int vector = i + k * threads;
            if (vector >= vectors) break;
            compute_t<T> values[N];
            unpack(values, loaded[k]);
            use(first + vector * N, values);
        }
    }
    int edge = threadIdx.x < first ? threadIdx.x : threadIdx.x + vectors * N;
    if (edge < columns && piece == 0) read_one(x - first, edge, use);
}

// The results of a row: the largest c, the sum of exp(c - largest), and the sum of c for label smoothing.
template <typename T>
struct RowSums {
    compute_t<T> largest;
    sum_t<T> sum = 0, total = 0;
};

// The same over the elements that a thread has read. TOTAL: with the sum of c.
template <typename T, bool SOFTCAP, bool TOTAL>
struct OnlineSum {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    Top<T> top;
    C largest = lowest(C());
    sum_t<T> sum = 0, total = 0;
    __device__ __forceinline__ explicit OnlineSum(const Options& o) : capped(o.softcap) {}
    template <int N>
    __device__ __forceinline__ void look(const Vec<T, N>& v) {
        top.add(v);
    }
    __device__ __forceinline__ void raise() {
        C c = capped(top.largest());
        if (!(c > largest)) return;
        sum *= exponential(largest - c);
        largest = c;
    }
    template <int N>
    __device__ __forceinline__ void operator()(int, C (&c)[N]) {
        C partial, all;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            c[j] = capped(c[j]);
            C e = exponential(c[j] - largest);
            partial = j ? partial + e : e;
            all = j ? all + c[j] : c[j];
        }
        sum += partial;
        if (TOTAL) total += all;
    }
    // Over all threads of the row.
    template <bool WARP>
    __device__ __forceinline__ RowSums<T> reduced() {
        __shared__ C maxima[32];
        __shared__ sum_t<T> sums[32], totals[32];
        RowSums<T> row;
        row.largest = WARP ? warp_max(largest) : block_reduce<Max>(largest, maxima);
        sum *= exponential(largest - row.largest);
        row.sum = WARP ? warp_reduce<Sum>(sum) : block_reduce<Sum>(sum, sums);
        if (TOTAL) row.total = WARP ? warp_reduce<Sum>(total) : block_reduce<Sum>(total, totals);
        return row;
    }
};

// Writes a row's lse and, if losses is not null, its loss, which is returned. All this is double: one thread computes it.
template <bool SOFTCAP, typename T>
__device__ __forceinline__ double write_loss(compute_t<T>* losses, double* lse, const RowSums<T>& sums, T at_target, long long row,
                                             long long target, const Options& o) {
    double base = sums.largest, log_sum = log(sums.sum), loss = target == o.ignored ? 0.0 : not_a_number();
    if (target != o.ignored && target >= 0 && target < o.vocab) {
        loss = (base - (1 - o.smoothing) * Softcap<T, SOFTCAP>(o.softcap)(load_as(at_target))) + log_sum;
        if (o.smoothing != 0) loss -= o.smoothing / o.vocab * sums.total;
        if (o.z_loss != 0) loss += o.z_loss * (base + log_sum) * (base + log_sum);
    }
    loss = compute_t<T>(loss);
    if (losses) losses[row] = loss;
    lse[row] = base + log_sum;
    return loss;
}

// The sums of x and y over a block of whole warps, in a fixed order.
__device__ __forceinline__ double2 block_sums(double x, double y) {
    __shared__ double2 warps[32];
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    double2 sum = {warp_reduce<Sum>(x), warp_reduce<Sum>(y)};
    if (thread % 32 == 0) warps[thread / 32] = sum;
    __syncthreads();
    sum = warps[0];
#pragma unroll 1
    for (int i = 1; i < blockDim.x * blockDim.y / 32; ++i) sum.x += warps[i].x, sum.y += warps[i].y;
    return sum;
}

// Writes the gradient of a row's columns to dx. raise() computes what is the same for all columns of the row, after the loads of the row are
// issued.
template <typename T, bool SOFTCAP>
struct Gradient {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    const Options& o;
    T* dx;
    double lse, count;                            // the gradient of the row's loss is divided by `count`
    C dloss, high, low, of_p, of_target, of_all;  // high + low is lse; for float, low is multiplied by LOG2E
    int target;                                   // -1 if it is outside of the vocabulary
    bool is_zero;
    __device__ __forceinline__ Gradient(T* dx, long long index, double lse, double count, C dloss, const Options& o)
        : capped(o.softcap), o(o), dx(dx), lse(lse), count(count), dloss(dloss) {
        is_zero = index == o.ignored, target = index >= 0 && index < o.vocab ? index : -1;
    }
    template <typename V>
    __device__ __forceinline__ void look(const V&) const {}
    __device__ __forceinline__ void raise() {
        asm volatile("" : "+d"(lse), "+d"(count));  // otherwise the compiler moves this before the loads of x, which then wait for it
        C weight = target >= 0 ? dloss / C(count) : C(not_a_number());
        high = lse;
        low = abs(lse) <= 3.4e38 ? C(lse - static_cast<double>(high)) * C(LOG2E) : C(0);
        of_p = weight * (1 + C(2 * o.z_loss) * high);
        of_target = weight * C(1 - o.smoothing);
        of_all = o.smoothing != 0 ? weight * C(o.smoothing) / o.vocab : C(0);
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
    __device__ __forceinline__ void operator()(int column, C (&x)[N]) const {
        int at = target - column;
        bool is_whole = !is_zero && column + N <= int(o.vocab);
        if (is_whole && !(at >= 0 && at < N)) {
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = of(x[j]);
        } else if (is_whole) {
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = of(x[j], j == at ? of_target : C(0));
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j) x[j] = is_zero || column + j >= int(o.vocab) ? C(0) : of(x[j], j == at ? of_target : C(0));
        }
        store_vec_past_l1(dx + column, pack<T, N>(x));  // store_vec would be compiled to stores of 4 bytes
    }
};

// ---- the losses. A row has one block of 256 threads or, if WARP, one warp of a block (32, 4), which has rows first, first + step, ..., at most
// 32. Lane r computes what row r of these needs once: the double-precision logarithm alone has as many instructions as 20 columns per lane.
// LOADS: see read_row; 0 for v1. An ignored row is not read. SMs have four blocks of 256 threads, and five where 48 registers suffice.

template <typename T, bool SOFTCAP, bool TOTAL, bool WARP, int LOADS>
__global__ void __launch_bounds__(256, sizeof(T) == 8 || SOFTCAP ? 1 : 5 - (WARP || __CUDA_ARCH__ >= 1000))
    cross_entropy_fwd(compute_t<T>* losses, double* lse, double2* partials, const T* x, const void* targets, bool wide, long long rows,
                      long long x_row, Options o) {
    long long first = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y, step = gridDim.x * static_cast<long long>(blockDim.y);
    long long mine = WARP ? first + threadIdx.x * step : threadIdx.x ? rows : first;
    wait_for_previous();
    if (WARP) let_next_come();
    long long target = mine < rows ? index_at(targets, wide, mine) : o.ignored;
    // Loaded early, and converted only when it is used, so that nothing waits for it.
    T at_target = mine < rows && target >= 0 && target < o.vocab ? x[mine * x_row + target] : T();
    RowSums<T> own;
    long long row = first;
    for (int r = 0; row < rows; ++r, row += step) {
        bool is_ignored = (WARP ? __shfl_sync(~0u, target, r) : index_at(targets, wide, row)) == o.ignored;
        OnlineSum<T, SOFTCAP, TOTAL> online(o);
        read_row<LOADS, WARP>(x + row * x_row, x + row * x_row, is_ignored ? 0 : int(o.vocab), true, online);
        RowSums<T> sums = online.template reduced<WARP>();
        if (!WARP || threadIdx.x == r) own = sums;
        if (!WARP) break;
    }
    double loss = mine < rows ? write_loss<SOFTCAP>(losses, lse, own, at_target, mine, target, o) : 0.0;
    if (!partials) return;
    double2 sum = block_sums(loss, target != o.ignored ? 1.0 : 0.0);
    if (threadIdx.x == 0 && threadIdx.y == 0) partials[blockIdx.x] = sum;
}

// ---- the gradient. Block (threads of a row, rows), grid `pieces` times the groups of rows: as many pieces of a row as give each thread LOADS
// vectors. As in elementwise kernels, short blocks without a loop reach the speed of a copy. The rows begin with the last one, which the
// forward has left in L2. LOADS = 0, for v1: one piece. An ignored row is not read.

template <typename T, bool SOFTCAP, int LOADS>
__global__ void __launch_bounds__(256, sizeof(T) == 8 || SOFTCAP ? 1 : 4)
    cross_entropy_bwd(T* dx, const T* x, const void* targets, const double* lse, const compute_t<T>* dloss, const double* count, bool wide,
                      long long rows, int columns, long long dx_row, long long x_row, unsigned pieces, Options o) {
    wait_for_previous();
    long long row = rows - 1 - (blockIdx.x / pieces * static_cast<long long>(blockDim.y) + threadIdx.y);
    if (row < 0) return;
    Gradient<T, SOFTCAP> gradient(dx + row * dx_row, index_at(targets, wide, row), lse[row], count ? *count : 1, dloss[row * o.dloss_step],
                                  o);
    read_row<LOADS, false>(x + row * x_row, gradient.dx, columns, !gradient.is_zero, gradient, blockIdx.x % pieces, pieces);
}

// ---- the losses and, over the logits, their gradients for a gradient of each loss of 1. One block per row, which waits in shared memory for
// its lse: the logits are read once. Dynamic shared memory: the bytes of a row, and 16. Two blocks per SM, so that one reads while the other
// computes or writes. The row arrives in four groups of copies. The last one is read behind a barrier, because a thread reads the columns
// outside of whole vectors that others have copied.

template <typename T, bool SOFTCAP, bool TOTAL>
__global__ void __launch_bounds__(512, 2 - (SOFTCAP && __CUDA_ARCH__ >= 1000))
    cross_entropy_fused(T* x, compute_t<T>* losses, const void* targets, bool wide, int columns, long long x_row, Options o) {
    constexpr int N = 16 / sizeof(T), LOADS = 4, GROUPS = 4;
    extern __shared__ uint4 dynamic_shared[];
    __shared__ double lse;
    wait_for_previous();
    long long row = gridDim.x - 1 - blockIdx.x, target = index_at(targets, wide, row);
    x += row * x_row;
    bool is_ignored = target == o.ignored;
    int offset = reinterpret_cast<unsigned long long>(x) % 16 / sizeof(T), first = min(columns, (N - offset) % N);
    int vectors = (columns - first) / N, edge = threadIdx.x < first ? threadIdx.x : threadIdx.x + vectors * N;
    T* kept = reinterpret_cast<T*>(dynamic_shared) + offset;
    if (edge < columns) kept[edge] = x[edge];
#pragma unroll 1
    for (int group = 1; group <= GROUPS; ++group) {  // as read_row assigns the vectors to threads
        for (int i = threadIdx.x + group % GROUPS * LOADS * blockDim.x; i < vectors && !is_ignored; i += GROUPS * LOADS * blockDim.x)
#pragma unroll
            for (int k = i; k < i + LOADS * blockDim.x; k += blockDim.x)
                if (k < vectors) cp_async_16(shared_address(kept + first + k * N), x + first + k * N);
        cp_async_commit();
    }
    OnlineSum<T, SOFTCAP, TOTAL> online(o);
#pragma unroll 1
    for (int group = 1; group <= GROUPS; ++group) {
        if (group == 1) cp_async_wait<3>();
        else if (group == 2) cp_async_wait<2>();
        else if (group == 3) cp_async_wait<1>();
        else cp_async_wait<0>(), __syncthreads();
        read_row<LOADS, false>(kept, kept, is_ignored ? 0 : int(o.vocab), true, online, group % GROUPS, GROUPS);
    }
    RowSums<T> sums = online.template reduced<false>();
    if (threadIdx.x == 0) {
        T at_target = target >= 0 && target < o.vocab && !is_ignored ? kept[target] : T();
        write_loss<SOFTCAP>(losses + row, &lse, sums, at_target, 0, target, o);
    }
    __syncthreads();
    Gradient<T, SOFTCAP> gradient(x, target, lse, 1, 1, o);
    read_row<LOADS, false>(kept, x, columns, !is_ignored, gradient);
}

// ---- the sum or mean of the rows' losses, added in a fixed order; count receives the number of targets that are not `ignored`

// Grid 1, block 256. There is one partial sum per block of the forward. The next kernel may start while this one waits.
template <typename C>
__global__ void cross_entropy_reduce(C* out, double* count, const double2* partials, long long blocks, bool mean) {
    let_next_come();
    wait_for_previous();
    double sum = 0, number = 0;
#pragma unroll 8
    for (long long i = threadIdx.x; i < blocks; i += blockDim.x) sum += partials[i].x, number += partials[i].y;
    double2 total = block_sums(sum, number);
    if (threadIdx.x != 0) return;
    *out = mean ? total.x / total.y : total.x;
    *count = total.y;
}
