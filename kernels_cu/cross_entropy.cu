// cross_entropy: the loss of each row of logits, their sum or mean, and the gradient of the logits; the
// entropy of each row, and the gradient of losses and entropies.
//
//     c = x, or softcap tanh(x / softcap)   lse = log(sum(exp(c)))   s = smoothing / vocab   p = exp(c - lse)
//     loss = lse - (1 - smoothing) c[target] - s sum(c) + z_loss lse^2
//     dx   = w c'(x) ((1 + 2 z_loss lse) p - s - (1 - smoothing) [column == target])
//     w: the gradient of the row's loss
//
// Sums run over the first `vocab` columns. Columns behind them are padding: they are not used, and their
// gradient is 0. A row with the target `ignored` has loss 0 and gradient 0. A row with another target outside
// 0..vocab-1 has loss NaN and gradient NaN.
//
// Layout     x is (rows, columns), rows `x_row` elements apart; dx has rows `dx_row` apart and may be x. loss
//            has the type of the computation: float, or double for double. Targets are int64 (`wide`) or
//            int32. Offsets are 64-bit. lse is stored as two numbers, because large logits would lose digits
//            of p in their sum.
// Algorithm  The forward is online softmax in one pass: each thread has the largest c so far and the sum of
//            exp(c - largest); both are reduced over the threads of the row in a fixed order. The backward
//            reads a row and writes its gradient: 5 instructions per 16-bit column, and one store more for
//            the target.
// Launch     Forward: a row has one block or, up to 16 KiB, 8, 16 or 32 lanes of a block of 128 threads. Each
//            block writes the sum of its losses; a second launch of one block adds these. Backward: one
//            thread per LOADS vectors.
//
// version idea                                             8192x50304 bf16, H100: forward, backward of a copy
// v1      a block per row, one element per thread and step
// v2      16-byte vectors, 4 loads per thread in flight    0.95, 0.97
//          short rows: a warp has several at a time, and finishes them together
// Experiments: docs/notes/cross_entropy.md. Online softmax: Milakov and Gimelshein, arXiv 1805.02867.
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

// By value. `dloss_step`: the gradient of the loss of row r is dloss[r * dloss_step].
struct Options {
    long long vocab, ignored, dloss_step;
    double smoothing, z_loss, softcap;
};

// lse = largest[0] + log_sum, with the largest c. An array, so that no bytes of padding stay unwritten.
template <typename C>
struct Lse {
    C largest[8 / sizeof(C)];
    double log_sum;
};

__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * LOG2E); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

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

// The largest of the elements seen by look(). NaN is ignored. 16-bit elements are compared in pairs.
template <typename T>
struct Top {
    Vec<T, 2> top = {minus_infinity<T>(), minus_infinity<T>()};
    template <int N>
    __device__ __forceinline__ void look(const Vec<T, N>& v) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            Vec<T, 2> two = {v.v[j], v.v[N > 1 ? j + 1 : j]};
            if constexpr (sizeof(T) == 2) {
                using Pair = typename PairOf<T>::type;
                reinterpret_cast<Pair&>(top) =
                    __hmax2(reinterpret_cast<Pair&>(top), reinterpret_cast<Pair&>(two));
            } else {
                top = {max(top.v[0], two.v[0]), max(top.v[1], two.v[1])};
            }
        }
    }
    __device__ __forceinline__ compute_t<T> value() const {
        return max(load_as(top.v[0]), load_as(top.v[1]));
    }
};

// Reads a row by the threads threadIdx.x: 16-byte vectors that are aligned in `to`, which has the same
// columns, and single columns before and after them. It calls use.look(v) for some vectors, then use.raise(),
// then use(column, values) for the same vectors. LOADS vectors per thread are in flight; LOADS = 0: single
// columns only, for v1. If the row has several pieces, only one is read. PIECE: a piece has at most LOADS
// vectors per thread. Without is_read, values have no meaning.
template <int LOADS, bool PIECE, typename T, class F>
__device__ __forceinline__ void read_row(const T* x, const T* to, int columns, bool is_read, F& use,
                                         int piece = 0, int pieces = 1) {
    constexpr int N = 16 / sizeof(T);
    int threads = blockDim.x;
    unsigned from = reinterpret_cast<unsigned long long>(x),
             address = reinterpret_cast<unsigned long long>(to);
    int first = LOADS ? min(columns, int(-address % 16 / sizeof(T))) : columns,
        vectors = (columns - first) / N;
#pragma unroll 1
    for (int i = threadIdx.x; i < columns - vectors * N && piece == 0; i += threads) {
        int column = i < first ? i : i + vectors * N;
        Vec<T, 1> one = {x[column]};
        use.look(one);
        use.raise();
        compute_t<T> value[1] = {load_as(one.v[0])};
        use(column, value);
    }
    x += first;
#pragma unroll 1
    for (int i = threadIdx.x + piece * LOADS * threads; i < vectors; i += pieces * LOADS * threads) {
        Vec<T, N> loaded[LOADS + !LOADS];
        int left = is_read ? vectors - i : 0;
        if ((address - from) % 16 == 0) {
#pragma unroll
            for (int k = 0; k < LOADS; ++k)
                if (k * threads < left)
                    loaded[k] = load_vec<T, N>(x + (i + k * threads) * static_cast<long long>(N));
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
        if (PIECE) break;
    }
}

// The largest c, the sum of exp(c - largest) and, if TOTAL, that of c for label smoothing: of a thread, and
// after reduce() of the row.
template <typename T, bool SOFTCAP, bool TOTAL>
struct OnlineSum {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    Top<T> top;
    // not -inf, so that c - largest is not NaN for c = -inf
    C largest = sizeof(C) == 4 ? C(-3.4028235e38) : C(-1.7976931348623157e308);
    sum_t<T> sum = 0, total = 0;
    __device__ __forceinline__ explicit OnlineSum(const Options& o) : capped(o.softcap) {}
    template <int N>
    __device__ __forceinline__ void look(const Vec<T, N>& v) {
        top.look(v);
    }
    __device__ __forceinline__ void raise() {
        C c = capped(top.value());
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
    // Over all threads of the row: blockDim.x lanes of a warp if WARP, else the block.
    template <bool WARP>
    __device__ __forceinline__ void reduce() {
        __shared__ C maxima[32];
        __shared__ sum_t<T> sums[32], totals[32];
        C top = WARP ? warp_reduce<Max>(largest, blockDim.x) : block_reduce<Max>(largest, maxima);
        sum *= exponential(largest - top);
        largest = top;
        sum = WARP ? warp_reduce<Sum>(sum, blockDim.x) : block_reduce<Sum>(sum, sums);
        if (TOTAL) total = WARP ? warp_reduce<Sum>(total, blockDim.x) : block_reduce<Sum>(total, totals);
    }
};

// Writes a row's lse and, if losses is not null, its loss, which is returned. All this is double: one thread
// computes it.
template <typename T, bool SOFTCAP, bool TOTAL>
__device__ __forceinline__ double write_loss(compute_t<T>* losses, Lse<compute_t<T>>* lse,
                                             const OnlineSum<T, SOFTCAP, TOTAL>& sums, T at_target,
                                             long long row, long long target, const Options& o) {
    double base = sums.largest, log_sum = log(sums.sum), loss = target == o.ignored ? 0.0 : not_a_number();
    if (target != o.ignored && target >= 0 && target < o.vocab) {
        loss = (base - (1 - o.smoothing) * sums.capped(load_as(at_target))) + log_sum;
        if (o.smoothing != 0) loss -= o.smoothing / o.vocab * sums.total;
        if (o.z_loss != 0) loss += o.z_loss * (base + log_sum) * (base + log_sum);
    }
    loss = compute_t<T>(loss);
    if (losses) losses[row] = loss;
    lse[row] = {{sums.largest}, log_sum};
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

// x, not known to the compiler: what is computed from it stays behind the loads of a row, instead of waiting
// for x before them.
template <typename C>
__device__ __forceinline__ C opaque(C x) {
    if constexpr (sizeof(C) == 8) asm volatile("" : "+d"(x));
    else asm volatile("" : "+f"(x));
    return x;
}

// Writes the gradient of a row's columns to dx. raise() computes what all columns share, after the loads of
// the row are issued.
template <typename T, bool SOFTCAP>
struct Gradient {
    using C = compute_t<T>;
    Softcap<T, SOFTCAP> capped;
    const Options& o;
    const T* x;
    T* dx;
    Lse<C> lse;
    double count;  // the gradient of the row's loss is divided by this
    C dloss, slope, shift, of_p, of_target, of_all;
    int target;  // -1 if it is outside of the vocabulary
    bool is_zero;
    __device__ __forceinline__ Gradient(T* dx, const T* x, long long index, Lse<C> lse, double count, C dloss,
                                        const Options& o)
        : capped(o.softcap), o(o), x(x), dx(dx), lse(lse), count(count), dloss(dloss) {
        is_zero = index == o.ignored, target = index >= 0 && index < o.vocab ? index : -1;
    }
    template <typename V>
    __device__ __forceinline__ void look(const V&) const {}
    __device__ __forceinline__ void raise() {
        double log_sum = opaque(lse.log_sum), divisor = opaque(count);
        C largest = opaque(lse.largest[0]), weight = target >= 0 ? dloss / C(divisor) : C(not_a_number());
        of_p = weight * (1 + C(2 * o.z_loss) * C(largest + log_sum));
        of_target = weight * C(1 - o.smoothing);
        of_all = o.smoothing != 0 ? weight * C(o.smoothing) / o.vocab : C(0);
        if constexpr (sizeof(C) == 8) {
            shift = largest;
            of_p *= exp(-log_sum);
        } else {
            // p = 2^(slope c - shift) 2^(shift - slope lse), by one FMA per column; the second factor is in
            // of_p. Above 1e9 the float spacing is at least 64, so exp(c - largest) is 0 or 1. slope = 1
            // keeps slope * c exact.
            bool is_large = !(abs(largest) < 1e9);
            double scaled = (largest + log_sum) * LOG2E;
            slope = is_large ? 1.0f : LOG2E;
            shift = is_large ? largest : scaled;
            of_p *= exp2_approx(is_large ? -log_sum * LOG2E : shift - scaled);
        }
    }
    __device__ __forceinline__ C share(C c) const {
        if constexpr (sizeof(C) == 8) return exp(c - shift);
        else return exp2_approx(fmaf(c, slope, -shift));
    }
    // The gradient of a column that is not padding. `extra` is of_target for the target.
    __device__ __forceinline__ C of(C x, C extra = 0) const {
        C t = SOFTCAP ? capped.tanh_of(x) : C(0), c = SOFTCAP ? capped.cap * t : x;
        return (1 - t) * (1 + t) * (of_p * share(c) - of_all - extra);
    }
    template <int N>
    __device__ __forceinline__ void operator()(int column, C (&values)[N]) const {
        int at = target - column;
        bool has_target = !is_zero && at >= 0 && at < N;
        if (!is_zero && column + N <= int(o.vocab)) {
#pragma unroll
            for (int j = 0; j < N; ++j) values[j] = of(values[j]);
        } else {
#pragma unroll
            for (int j = 0; j < N; ++j)
                values[j] = is_zero || column + j >= int(o.vocab) ? C(0) : of(values[j]);
        }
        T at_target = has_target ? x[target] : T();  // before dx, which may be x, is written
        // store_vec would be compiled to stores of 4 bytes
        store_vec_past_l1(dx + column, pack<T, N>(values));
        if (has_target) dx[target] = T(of(load_as(at_target), of_target));
    }
};

// ---- the losses. A row has one block of 256 threads or, if WARP, blockDim.x lanes of a warp, which have
// rows first, first + step, ..., at most one per lane. Lane r computes what row r of these needs once: the
// double-precision logarithm alone is 90 instructions. LOADS: see read_row; 0 for v1. An ignored row is not
// read. SMs have four blocks of 256 threads, and five where 48 registers suffice.

template <typename T, bool SOFTCAP, bool TOTAL, bool WARP, int LOADS>
__global__ void __launch_bounds__(256, sizeof(T) == 8 || SOFTCAP ? 1 : 5 - (WARP || __CUDA_ARCH__ >= 1000))
    cross_entropy_fwd(compute_t<T>* losses, void* lse, double2* partials, const T* x, const void* targets,
                      bool wide, long long rows, long long x_row, Options o) {
    long long first = blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y,
              step = gridDim.x * static_cast<long long>(blockDim.y);
    long long mine = WARP ? first + threadIdx.x * step : threadIdx.x ? rows : first;
    wait_for_previous();
    long long target = mine < rows ? index_at(targets, wide, mine) : o.ignored;
    // Loaded early, and converted only when it is used, so that nothing waits for it.
    T at_target = mine < rows && target >= 0 && target < o.vocab ? x[mine * x_row + target] : T();
    OnlineSum<T, SOFTCAP, TOTAL> own(o);
    const T* row = x + first * x_row;
    // all lanes of a warp take part, those without a row read nothing
    for (int r = 0; r * step < rows; ++r, row += step * x_row) {
        bool is_ignored =
            (WARP ? __shfl_sync(~0u, target, r, blockDim.x) : index_at(targets, wide, first)) == o.ignored;
        OnlineSum<T, SOFTCAP, TOTAL> online(o);
        read_row<LOADS, false>(row, row, is_ignored ? 0 : int(o.vocab), true, online);
        online.template reduce<WARP>();
        if (!WARP || threadIdx.x == r) own = online;
        if (!WARP) break;
    }
    if (WARP) let_next_come();  // at the start it would slow these loops
    double loss = mine < rows ? write_loss(losses, static_cast<Lse<compute_t<T>>*>(lse), own, at_target, mine,
                                           target, o)
                              : 0.0;
    if (!partials) return;
    double2 sum = block_sums(loss, target != o.ignored ? 1.0 : 0.0);
    if (threadIdx.x == 0 && threadIdx.y == 0) partials[blockIdx.x] = sum;
}

// ---- the gradient. Block (threads of a row, rows), grid `pieces` times the groups of rows: as many pieces
// of a row as give each thread LOADS vectors. As in elementwise kernels, short blocks without a loop reach
// the speed of a copy. The rows begin with the last one, which the forward has left in L2. LOADS = 0, for v1:
// one piece. An ignored row is not read. float has 56 registers, 16-bit types up to 64.

template <typename T, bool SOFTCAP, int LOADS>
__global__ void __launch_bounds__(LOADS ? 128 : 256,
                                  sizeof(T) == 8 || SOFTCAP || !LOADS ? 1 : 8 + (sizeof(T) == 4))
    cross_entropy_bwd(T* dx, const T* x, const void* targets, const void* lse, const compute_t<T>* dloss,
                      const double* count, bool wide, long long rows, int columns, long long dx_row,
                      long long x_row, unsigned pieces, Options o) {
    let_next_come();
    wait_for_previous();
    long long row = rows - 1 - (blockIdx.x / pieces * static_cast<long long>(blockDim.y) + threadIdx.y);
    if (row < 0) return;
    Gradient<T, SOFTCAP> gradient(dx + row * dx_row, x + row * x_row, index_at(targets, wide, row),
                                  static_cast<const Lse<compute_t<T>>*>(lse)[row], count ? *count : 1,
                                  dloss[row * o.dloss_step], o);
    read_row<LOADS, true>(gradient.x, gradient.dx, columns, !gradient.is_zero, gradient, blockIdx.x % pieces);
}

// ---- the losses and, over the logits, their gradients for a gradient of each loss of 1. One block per row,
// which waits in shared memory for its lse: the logits are read once. Dynamic shared memory: the bytes of a
// row, and 16. Two blocks per SM, so that one reads while the other computes or writes. The row arrives in
// four groups of copies. The last one is read behind a barrier, because a thread reads the columns outside of
// whole vectors that others have copied.

template <typename T, bool SOFTCAP, bool TOTAL>
__global__ void __launch_bounds__(512, 2 - (SOFTCAP && __CUDA_ARCH__ >= 1000))
    cross_entropy_fused(T* x, compute_t<T>* losses, const void* targets, bool wide, int columns,
                        long long x_row, Options o) {
    constexpr int N = 16 / sizeof(T), LOADS = 4, GROUPS = 4;
    extern __shared__ uint4 dynamic_shared[];
    __shared__ Lse<compute_t<T>> lse;
    wait_for_previous();
    long long row = gridDim.x - 1 - blockIdx.x, target = index_at(targets, wide, row);
    x += row * x_row;
    bool is_ignored = target == o.ignored;
    int offset = reinterpret_cast<unsigned long long>(x) % 16 / sizeof(T),
        first = min(columns, (N - offset) % N);
    int vectors = (columns - first) / N, edge = threadIdx.x < first ? threadIdx.x : threadIdx.x + vectors * N;
    T* kept = reinterpret_cast<T*>(dynamic_shared) + offset;
    if (edge < columns) kept[edge] = x[edge];
#pragma unroll 1
    for (int group = 1; group <= GROUPS; ++group) {  // as read_row assigns the vectors to threads
        for (int i = threadIdx.x + group % GROUPS * LOADS * blockDim.x; i < vectors && !is_ignored;
             i += GROUPS * LOADS * blockDim.x)
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
        read_row<LOADS, false>(kept, kept, is_ignored ? 0 : int(o.vocab), true, online, group % GROUPS,
                               GROUPS);
    }
    online.template reduce<false>();
    if (threadIdx.x == 0) {
        T at_target = target >= 0 && target < o.vocab && !is_ignored ? kept[target] : T();
        write_loss(losses + row, &lse, online, at_target, 0, target, o);
    }
    __syncthreads();
    Gradient<T, SOFTCAP> gradient(x, kept, target, lse, 1, 1, o);
    read_row<LOADS, false>(kept, x, columns, !is_ignored, gradient);
}

// ---- the entropies of the rows, H = -sum(p log(p)), and the gradient of losses and entropies over the
// logits, dx = dloss (p - [column == target]) - dentropy p (log(p) + H), for linear_logprobs: no option but
// `vocab` and `ignored`. One block of 256 threads per row. An ignored row has the entropy 0. Columns with
// p = 0 add nothing, also where their logits are -inf.

template <typename T>
struct Entropy : Gradient<T, false> {
    using Base = Gradient<T, false>;
    using C = compute_t<T>;
    sum_t<T> sum = 0;  // of p log(p)
    __device__ __forceinline__ Entropy(T* x, long long index, Lse<C> lse, const Options& o)
        : Base(x, x, index, lse, 1, 1, o) {}
    __device__ __forceinline__ C probability(C c) const { return Base::of_p * Base::share(c); }
    __device__ __forceinline__ C log_of(C c, C p) const {
        return p == 0 ? C(0) : (c - Base::lse.largest[0]) - C(Base::lse.log_sum);
    }
    template <int N>
    __device__ __forceinline__ void operator()(int, C (&c)[N]) {
        C partial = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            C p = probability(c[j]);
            partial += p * log_of(c[j], p);
        }
        sum += partial;
    }
};

template <typename T>
__global__ void __launch_bounds__(256, sizeof(T) == 8 ? 1 : 4)
    cross_entropy_entropy(compute_t<T>* entropies, const T* x, const void* targets, const void* lse,
                          bool wide, long long x_row, Options o) {
    __shared__ sum_t<T> sums[32];
    wait_for_previous();
    long long row = blockIdx.x;
    bool is_ignored = index_at(targets, wide, row) == o.ignored;
    const T* from = x + row * x_row;
    // the target does not matter: 0
    Entropy<T> found(const_cast<T*>(from), 0, static_cast<const Lse<compute_t<T>>*>(lse)[row], o);
    read_row<4, false>(from, from, is_ignored ? 0 : int(o.vocab), true, found);
    sum_t<T> sum = block_reduce<Sum>(found.sum, sums);
    if (threadIdx.x == 0) entropies[row] = is_ignored ? compute_t<T>(0) : compute_t<T>(-sum);
}

template <typename T>
struct EntropyGradient : Entropy<T> {
    using Base = Entropy<T>;
    using C = compute_t<T>;
    C entropy, dloss, dentropy;
    __device__ __forceinline__ EntropyGradient(T* x, long long index, Lse<C> lse, C entropy, C dloss,
                                               C dentropy, const Options& o)
        : Base(x, index, lse, o), entropy(entropy), dloss(dloss), dentropy(dentropy) {}
    __device__ __forceinline__ C of(C c, C extra = 0) const {
        C p = Base::probability(c);
        return p * (dloss - dentropy * (Base::log_of(c, p) + entropy)) - extra;
    }
    template <int N>
    __device__ __forceinline__ void operator()(int column, C (&values)[N]) const {
        int at = Base::target - column;
        bool has_target = !Base::is_zero && at >= 0 && at < N;
#pragma unroll
        for (int j = 0; j < N; ++j)
            values[j] = Base::is_zero || column + j >= int(Base::o.vocab) ? C(0) : of(values[j]);
        T at_target = has_target ? Base::x[Base::target] : T();  // before it is written
        store_vec_past_l1(Base::dx + column, pack<T, N>(values));
        if (has_target) Base::dx[Base::target] = T(of(load_as(at_target), dloss));
    }
};

template <typename T>
__global__ void __launch_bounds__(256, sizeof(T) == 8 ? 1 : 4)
    cross_entropy_entropy_bwd(T* x, const void* targets, const void* lse, const compute_t<T>* entropies,
                              const compute_t<T>* dloss, const compute_t<T>* dentropy, bool wide, int columns,
                              long long x_row, Options o) {
    wait_for_previous();
    long long row = blockIdx.x;
    T* to = x + row * x_row;
    EntropyGradient<T> gradient(to, index_at(targets, wide, row),
                                static_cast<const Lse<compute_t<T>>*>(lse)[row], entropies[row],
                                dloss ? dloss[row] : compute_t<T>(0), dentropy[row], o);
    read_row<4, false>(to, to, columns, !gradient.is_zero, gradient);
}

// ---- the sum or mean of the rows' losses, added in a fixed order; count receives the number of targets that
// are not `ignored`. Grid 1, block 256. There is one partial sum per block of the forward. The next kernel
// may start while this one waits.

template <typename C>
__global__ void cross_entropy_reduce(C* out, double* count, const double2* partials, long long blocks,
                                     bool mean) {
    let_next_come();
    wait_for_previous();
    double sum = 0, number = 0;
#pragma unroll 8
    for (long long i = threadIdx.x; i < blocks; i += blockDim.x)
        sum += partials[i].x, number += partials[i].y;
    double2 total = block_sums(sum, number);
    if (threadIdx.x != 0) return;
    *out = mean ? total.x / total.y : total.x;
    *count = total.y;
}
