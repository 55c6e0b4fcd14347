// What softmax.cu and causal_softmax.cu do with a row, or a part of one: in a loop of a block's threads, which reads it twice, or held in
// registers by a team of threads, which read it once.
#pragma once
#include "exponential.cuh"
#include "reduce.cuh"
#include "rows.cuh"

// Columns [begin, end) of a row, the only ones that are read. Results are written to [from, to). With MASKED those outside of
// [begin, end) are 0.
struct Span {
    long long begin, end, from, to;
    __device__ __forceinline__ Span(long long begin, long long end) : begin(begin), end(end), from(begin), to(end) {}
    __device__ __forceinline__ Span(long long begin, long long end, long long columns) : begin(begin), end(end), from(0), to(columns) {}
    template <bool MASKED>
    __device__ __forceinline__ bool hides(long long column) const {
        return MASKED && (column < begin || column >= end);
    }
};

// ---- in a loop

// Largest u and sum of exponentials of a thread's vectors, in one pass: where a larger u turns up, the sum so far is scaled down.
template <typename T>
__device__ __forceinline__ void scan_columns(const T* row, Span span, const Exponential<T>& exponential, compute_t<T>& largest,
                                             compute_t<T>& sum) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    T missing = exponential.sign * minus_infinity<C>();
    largest = minus_infinity<C>();
    sum = 0;
    for (long long i = (span.begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(span.end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> v = load_columns(row, i * WIDTH<T> - shift, span.begin, span.end, true, missing);
        C before = largest, here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, exponential.lift(v.v[j]));
        C base = base_of(largest);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += exponential(exponential.lift(v.v[j]) - base);
        sum = sum * exponential(before - base) + here;
    }
}

// The same of the whole block: the largest u, and the sum relative to the base that it makes.
template <typename T>
__device__ __forceinline__ void block_scan(const Exponential<T>& exponential, const Sink<compute_t<T>>& sink, compute_t<T>& largest,
                                           compute_t<T>& sum) {
    using C = compute_t<T>;
    __shared__ C maxima[32], sums[32];
    C own = largest;
    largest = block_reduce<Max>(own, maxima);
    sum = block_reduce<Sum>(sum * exponential(own - sink.base(largest)), sums);
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_columns(T* out, const T* row, Span span, const Normalise<T>& normalise) {
    int shift = shift_of(row);
    bool aligned = shift_of(out) == shift;
    for (long long i = (span.from + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(span.to, shift); i += blockDim.x) {
        long long first = i * WIDTH<T> - shift;
        Vec<T, WIDTH<T>> v = load_columns(row, first, span.begin, span.end, true, T(0.0f));
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j)
            v.v[j] = span.hides<MASKED>(first + j) ? T(0.0f) : T(normalise(normalise.exponential.lift(v.v[j])));
        store_columns(out, first, span.from, span.to, aligned, v);
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
__device__ __forceinline__ compute_t<T> sum_terms(const T* y, const T* g, Span span, const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool aligned = shift_of(g) == shift;
    compute_t<T> sum = 0;
    for (long long i = (span.begin + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(span.end, shift); i += blockDim.x) {
        Vec<T, WIDTH<T>> a = load_columns(y, i * WIDTH<T> - shift, span.begin, span.end, true, T(0.0f));
        Vec<T, WIDTH<T>> b = load_columns(g, i * WIDTH<T> - shift, span.begin, span.end, aligned, T(0.0f));
        compute_t<T> here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.term(a.v[j], b.v[j]);
        sum += here;
    }
    return sum;
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_gradients(T* dx, const T* y, const T* g, Span span, compute_t<T> total,
                                                const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool g_aligned = shift_of(g) == shift, dx_aligned = shift_of(dx) == shift;
    for (long long i = (span.from + shift) / WIDTH<T> + threadIdx.x; i < vectors_to<T>(span.to, shift); i += blockDim.x) {
        long long first = i * WIDTH<T> - shift;
        Vec<T, WIDTH<T>> a = load_columns(y, first, span.begin, span.end, true, T(0.0f));
        Vec<T, WIDTH<T>> b = load_columns(g, first, span.begin, span.end, g_aligned, T(0.0f));
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a.v[j] = span.hides<MASKED>(first + j) ? T(0.0f) : gradient(a.v[j], b.v[j], total);
        store_columns(dx, first, span.from, span.to, dx_aligned, a);
    }
}

// ---- in registers

// The threads that share a row. Every thread of the block must call reduce; between two calls with the same slot, 0 or 1, there must be
// a __syncthreads() or a call with the other.
struct Lanes {  // neighbouring lanes of a warp, a power of 2
    int width, lane;
    __device__ __forceinline__ explicit Lanes(int width) : width(width), lane(threadIdx.x % width) {}
    template <class Op, typename C>
    __device__ __forceinline__ C reduce(C value, int slot) const {
        return warp_reduce<Op>(value, width);
    }
};

template <typename C>
struct Block {  // all threads
    int width, lane;
    C* shared;  // room for 64
    __device__ __forceinline__ explicit Block(C* shared) : width(blockDim.x), lane(threadIdx.x), shared(shared) {}
    template <class Op>
    __device__ __forceinline__ C reduce(C value, int slot) const {
        return block_reduce<Op>(value, shared + 32 * slot);
    }
};

// A thread holds the row's vectors lane, lane + width, ...: VECTORS of them, all loaded before the first is used, so that their latencies
// overlap.
template <int VECTORS, bool MASKED, class Team, typename T>
__device__ __forceinline__ void team_softmax(T* out, const T* row, Span span, const Team& team, double scale, bool log,
                                             const Sink<compute_t<T>>& sink) {
    using C = compute_t<T>;
    int shift = shift_of(row), begin = span.begin, end = span.end;
    T missing = scale < 0 ? -minus_infinity<C>() : minus_infinity<C>();
    Vec<T, WIDTH<T>> v[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) v[k] = load_columns(row, (team.lane + k * team.width) * WIDTH<T> - shift, begin, end, true, missing);
    Exponential<T> exponential(scale);
    C kept[VECTORS][WIDTH<T>], largest = minus_infinity<C>(), sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, kept[k][j] = exponential.lift(v[k].v[j]));
    C base = sink.base(team.template reduce<Max>(largest, 0));
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) {
            C d = kept[k][j] - base, e = exponential(d);
            kept[k][j] = log ? d : e;
            sum += e;
        }
    sum = finish<MASKED>(team.template reduce<Sum>(sum, 1), base, sink, team.lane == 0);
    Normalise<T> normalise(exponential, base, sum, log);
    bool aligned = shift_of(out) == shift;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int first = (team.lane + k * team.width) * WIDTH<T> - shift;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) v[k].v[j] = span.hides<MASKED>(first + j) ? T(0.0f) : T(normalise.end(kept[k][j]));
        store_columns(out, first, int(span.from), int(span.to), aligned, v[k]);
    }
}

template <int VECTORS, bool MASKED, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, Span span, const Team& team, double scale, bool log,
                                              const SinkGradient& sink) {
    int shift = shift_of(y), begin = span.begin, end = span.end;
    bool g_aligned = shift_of(g) == shift, dx_aligned = shift_of(dx) == shift;
    Vec<T, WIDTH<T>> a[VECTORS], b[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int first = (team.lane + k * team.width) * WIDTH<T> - shift;
        a[k] = load_columns(y, first, begin, end, true, T(0.0f));
        b[k] = load_columns(g, first, begin, end, g_aligned, T(0.0f));
    }
    Gradient<T> gradient(scale, log);
    compute_t<T> total = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) total += gradient.term(a[k].v[j], b[k].v[j]);
    total = sink.finish(team.template reduce<Sum>(total, 0), team.lane == 0);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int first = (team.lane + k * team.width) * WIDTH<T> - shift;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[k].v[j] = span.hides<MASKED>(first + j) ? T(0.0f) : gradient(a[k].v[j], b[k].v[j], total);
        store_columns(dx, first, int(span.from), int(span.to), dx_aligned, a[k]);
    }
}
