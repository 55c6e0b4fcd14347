// What softmax.cu and causal_softmax.cu do with a row, or a part of one, in a loop, which reads it twice.
#pragma once
#include "exponential.cuh"
#include "row_reduction.cuh"
#include "row_vectors.cuh"

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

// The vectors that a thread takes in turn: first, first + step, ... below end.
struct Turns {
    long long first, end;
    int step;
};

// Those of a block that takes columns [from, to).
template <typename T>
__device__ __forceinline__ Turns block_turns(const T* row, long long from, long long to) {
    int shift = shift_of(row);
    return {(from + shift) / WIDTH<T> + threadIdx.x, vectors_to<T>(to, shift), int(blockDim.x)};
}

// Largest u and sum of exponentials of a thread's vectors, in one pass: where a larger u turns up, the sum so far is scaled down.
template <typename T>
__device__ __forceinline__ void scan_columns(const T* row, const Span& span, Turns turns, const Exponential<T>& exponential,
                                             compute_t<T>& largest, sum_t<T>& sum) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    largest = minus_infinity<C>();
    sum = 0;
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        C r[WIDTH<T>], before = largest, here = 0;
        unpack(load_columns(row, i * WIDTH<T> - shift, span.begin, span.end, true, exponential.sign * minus_infinity<C>()), r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, exponential.lift(r[j]));
        auto base = exponential.base(largest);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += exponential(exponential.lift(r[j]), base);
        sum = sum * exponential.rescale(before, base) + here;
    }
}

// `turns` at out's vectors, as of write_gradients at dx's: what is written in 16 bytes may be read in less.
template <bool MASKED, typename T>
__device__ __forceinline__ void write_columns(T* out, const T* row, const Span& span, Turns turns, const End<T>& end) {
    int shift = shift_of(out);
    bool aligned = shift_of(row) == shift;
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        long long first = i * WIDTH<T> - shift;
        compute_t<T> r[WIDTH<T>];
        unpack(load_columns(row, first, span.begin, span.end, aligned, compute_t<T>(0)), r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) r[j] = span.hides<MASKED>(first + j) ? compute_t<T>(0) : end.of(r[j]);
        store_columns(out, first, span.from, span.to, r);
    }
}

// y and g of a vector.
template <typename T>
__device__ __forceinline__ void load_both(const T* y, const T* g, long long first, const Span& span, bool y_aligned, bool g_aligned,
                                          compute_t<T> (&a)[WIDTH<T>], compute_t<T> (&b)[WIDTH<T>]) {
    unpack(load_columns(y, first, span.begin, span.end, y_aligned, compute_t<T>(0)), a);
    unpack(load_columns(g, first, span.begin, span.end, g_aligned, compute_t<T>(0)), b);
}

template <typename T>
__device__ __forceinline__ compute_t<T> sum_terms(const T* y, const T* g, const Span& span, Turns turns, const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool aligned = shift_of(g) == shift;
    compute_t<T> sum = 0, a[WIDTH<T>], b[WIDTH<T>];
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        load_both(y, g, i * WIDTH<T> - shift, span, true, aligned, a, b);
        compute_t<T> here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.term(a[j], b[j]);
        sum += here;
    }
    return sum;
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_gradients(T* dx, const T* y, const T* g, const Span& span, Turns turns, compute_t<T> total,
                                                const Gradient<T>& gradient) {
    int shift = shift_of(dx);
    bool y_aligned = shift_of(y) == shift, g_aligned = shift_of(g) == shift;
    compute_t<T> a[WIDTH<T>], b[WIDTH<T>];
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        long long first = i * WIDTH<T> - shift;
        load_both(y, g, first, span, y_aligned, g_aligned, a, b);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[j] = span.hides<MASKED>(first + j) ? compute_t<T>(0) : gradient(a[j], b[j], total);
        store_columns(dx, first, span.from, span.to, a);
    }
}
