// softmax.cu and causal_softmax.cu: loops over a row, or a part of one, which read it twice.
#pragma once
#include "exponential.cuh"
#include "row_reduction.cuh"
#include "row_vectors.cuh"

// Only columns [begin, end) of a row are read. Results are written to [from, to); with MASKED those outside
// of [begin, end) are 0.
struct Span {
    long long begin, end, from, to;
    __device__ __forceinline__ Span(long long begin, long long end)
        : begin(begin), end(end), from(begin), to(end) {}
    __device__ __forceinline__ Span(long long begin, long long end, long long columns)
        : begin(begin), end(end), from(0), to(columns) {}
    template <bool MASKED>
    __device__ __forceinline__ bool is_masked(long long column) const {
        return MASKED && (column < begin || column >= end);
    }
};

// The vectors of a thread: first, first + step, ... below end.
struct VectorLoop {
    long long first, end;
    int step;
};

// The vectors of this thread if its block covers columns [from, to).
template <typename T>
__device__ __forceinline__ VectorLoop block_loop(const T* row, long long from, long long to) {
    int shift = shift_of(row);
    return {(from + shift) / ELEMENTS<T> + threadIdx.x, vectors_until<T>(to, shift), int(blockDim.x)};
}

// Online softmax: the largest u and the sum of exponentials of a thread's vectors, in one pass. A larger u
// rescales the sum so far.
template <typename T>
__device__ __forceinline__ void scan_columns(const T* row, const Span& span, VectorLoop loop,
                                             const Exponential<T>& exponential, compute_t<T>& largest,
                                             sum_t<T>& sum) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    largest = minus_infinity<C>();
    sum = 0;
    for (long long i = loop.first; i < loop.end; i += loop.step) {
        C r[ELEMENTS<T>], before = largest, partial = 0;
        unpack(load_columns(row, i * ELEMENTS<T> - shift, span.begin, span.end, true,
                            exponential.sign * minus_infinity<C>()),
               r);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) largest = max(largest, exponential.to_u(r[j]));
        auto base = exponential.base(largest);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) partial += exponential(exponential.to_u(r[j]), base);
        sum = sum * exponential.rescale(before, base) + partial;
    }
}

// `loop` is made for the alignment of `out` (of dx in write_gradients), so stores have 16 bytes. Loads are
// narrower if the input has another alignment.
template <bool MASKED, typename T>
__device__ __forceinline__ void write_columns(T* out, const T* row, const Span& span, VectorLoop loop,
                                              const Normalizer<T>& normalizer) {
    int shift = shift_of(out);
    bool aligned = shift_of(row) == shift;
    for (long long i = loop.first; i < loop.end; i += loop.step) {
        long long first = i * ELEMENTS<T> - shift;
        compute_t<T> r[ELEMENTS<T>];
        unpack(load_columns(row, first, span.begin, span.end, aligned, compute_t<T>(0)), r);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j)
            r[j] = span.is_masked<MASKED>(first + j) ? compute_t<T>(0) : normalizer.from_x(r[j]);
        store_columns(out, first, span.from, span.to, r);
    }
}

template <typename T>
__device__ __forceinline__ void load_y_and_g(const T* y, const T* g, long long first, const Span& span,
                                             bool y_aligned, bool g_aligned, compute_t<T> (&a)[ELEMENTS<T>],
                                             compute_t<T> (&b)[ELEMENTS<T>]) {
    unpack(load_columns(y, first, span.begin, span.end, y_aligned, compute_t<T>(0)), a);
    unpack(load_columns(g, first, span.begin, span.end, g_aligned, compute_t<T>(0)), b);
}

template <typename T>
__device__ __forceinline__ compute_t<T> sum_terms(const T* y, const T* g, const Span& span, VectorLoop loop,
                                                  const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool aligned = shift_of(g) == shift;
    compute_t<T> sum = 0, a[ELEMENTS<T>], b[ELEMENTS<T>];
    for (long long i = loop.first; i < loop.end; i += loop.step) {
        load_y_and_g(y, g, i * ELEMENTS<T> - shift, span, true, aligned, a, b);
        compute_t<T> partial = 0;
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) partial += gradient.term(a[j], b[j]);
        sum += partial;
    }
    return sum;
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_gradients(T* dx, const T* y, const T* g, const Span& span,
                                                VectorLoop loop, compute_t<T> total,
                                                const Gradient<T>& gradient) {
    int shift = shift_of(dx);
    bool y_aligned = shift_of(y) == shift, g_aligned = shift_of(g) == shift;
    compute_t<T> a[ELEMENTS<T>], b[ELEMENTS<T>];
    for (long long i = loop.first; i < loop.end; i += loop.step) {
        long long first = i * ELEMENTS<T> - shift;
        load_y_and_g(y, g, first, span, y_aligned, g_aligned, a, b);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j)
            a[j] = span.is_masked<MASKED>(first + j) ? compute_t<T>(0) : gradient(a[j], b[j], total);
        store_columns(dx, first, span.from, span.to, a);
    }
}
