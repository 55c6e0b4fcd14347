// exp(scale * d) for d <= 0, as good as the result's type can hold, and what a softmax does with it.
#pragma once
#include "math.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

// A softmax is taken of u = x, or of -x where scale is negative, so that the largest u has the largest exponential.
// Its exponentials are those of d = u - (largest u): exact where it matters, near 0, however large u is.
//
// T is the type of the result. 16 bits: one multiplication and ex2.approx, whose error is far below theirs.
template <typename T>
struct Exponential {
    float sign, size, rate;  // of scale; rate = |scale| log2(e)
    __device__ __forceinline__ explicit Exponential(double scale)
        : sign(scale < 0 ? -1.0f : 1.0f), size(fabs(scale)), rate(max(float(fabs(scale) * 1.4426950408889634), LEAST)) {}
    static constexpr float LEAST = 1e-45f;  // of rate, so that a d of -inf gives 0 even where scale is 0
    __device__ __forceinline__ float lift(T x) const { return sign * load_as(x); }
    __device__ __forceinline__ float operator()(float d) const { return exp2_approx(d * rate); }
    __device__ __forceinline__ float log(float s) const { return logf(s); }
    __device__ __forceinline__ float ratio(float e, float, float reciprocal) const { return e * reciprocal; }
};

// 32 bits: |d| roundings of an argument d * rate would all be errors of the result. So split it exactly into an integer n and the
// rest, with the digits of rate that a float cannot hold; 2^n is a float's exponent field.
template <>
struct Exponential<float> {
    float sign, size, rate, rate_low;
    __device__ __forceinline__ explicit Exponential(double scale) : sign(scale < 0 ? -1.0f : 1.0f), size(fabs(scale)) {
        double exact = fabs(scale) * 1.4426950408889634;
        rate = max(float(exact), Exponential<__half>::LEAST);
        rate_low = exact - rate;
    }
    __device__ __forceinline__ float lift(float x) const { return sign * x; }
    __device__ __forceinline__ float operator()(float d) const {
        constexpr float round = 12582912.0f;             // 1.5 * 2^23: what is added to it is rounded to an integer
        float n = max(d * rate, -160.0f) + round;        // below 2^-160 all is 0
        int bits = __float_as_int(n);                    // its low bits are those of the integer
        n -= round;
        float rest = fmaf(max(d, -1e30f), rate_low, fmaf(d, rate, -n));  // -inf, or NaN, where d is
        int n1 = bits - __float_as_int(round), n2 = max(n1, -126);
        // in two steps: 2^-127 and less are no normal numbers, but a result may be
        return exp2_approx(rest) * __int_as_float((n2 + 127) << 23) * __int_as_float((n1 - n2 + 127) << 23);
    }
    __device__ __forceinline__ float log(float s) const { return logf(s); }
    __device__ __forceinline__ float ratio(float e, float s, float reciprocal) const {
        float q = e * reciprocal;
        return fmaf(fmaf(-q, s, e), reciprocal, q);  // one step of Newton's: as good as a division
    }
};

template <>
struct Exponential<double> {
    double sign, size;
    __device__ __forceinline__ explicit Exponential(double scale) : sign(scale < 0 ? -1.0 : 1.0), size(fabs(scale)) {}
    __device__ __forceinline__ double lift(double x) const { return sign * x; }
    __device__ __forceinline__ double operator()(double d) const { return exp(d * max(size, 4.9e-324)); }
    __device__ __forceinline__ double log(double s) const { return ::log(s); }
    __device__ __forceinline__ double ratio(double e, double s, double) const { return e / s; }
};

// What exponentials are taken relative to. Where all of a part of a row is -inf they are 0, not NaN: the rest may be finite.
template <typename C>
__device__ __forceinline__ C base_of(C largest) {
    return largest == minus_infinity<C>() ? C(0) : largest;
}

// One more term of a row's sum, exp(logit), that has no column of its own.
template <typename C>
struct Sink {
    const double* logit;  // null: there is none
    double* share;        // gets exp(logit) / sum
    double scale;         // of the columns; not negative
    __device__ __forceinline__ C base(C largest) const {
        return base_of(logit && scale > 0 ? max(largest, C(*logit / scale)) : largest);
    }
    __device__ __forceinline__ C term(C base) const { return logit ? exp(C(*logit - scale * base)) : C(0); }
};

// The row's whole sum. A row of which nothing is seen has the sum 0: with MASKED its results are 0, else NaN, as torch's of -inf alone.
template <bool MASKED, typename C>
__device__ __forceinline__ C finish(C sum, C base, const Sink<C>& sink, bool first) {
    C term = sink.term(base);
    sum += term;
    if (MASKED && sum == C(0)) sum = 1;
    if (sink.share && first) *sink.share = term / sum;
    return sum;
}

// The same of the gradients. The sum of y g has one more term, share * share_grad; the logit's gradient, without scale, goes to `grad`.
struct SinkGradient {
    const double *share, *share_grad;  // null: there is none
    double* grad;
    template <typename C>
    __device__ __forceinline__ C finish(C total, bool first) const {
        if (!share) return total;
        double of_share = share_grad ? *share_grad : 0.0;
        total += C(*share * of_share);
        if (first) *grad = *share * (of_share - total);
        return total;
    }
};

// The end of a row's softmax: from the base and the sum of the exponentials to the results, or to their logarithms.
template <typename T>
struct Normalise {
    using C = compute_t<T>;
    const Exponential<T>& exponential;
    C base, sum, reciprocal, log_sum;
    bool log;
    __device__ __forceinline__ Normalise(const Exponential<T>& e, C base, C sum, bool log)
        : exponential(e), base(base), sum(sum), reciprocal(C(1) / sum), log_sum(log ? e.log(sum) : C(0)), log(log) {}
    // What a column needs from here on, and what becomes of it: d for a logarithm, else the exponential.
    __device__ __forceinline__ C end(C kept) const {
        return log ? fma(kept, exponential.size, -log_sum) : exponential.ratio(kept, sum, reciprocal);
    }
    __device__ __forceinline__ C operator()(C u) const {
        C d = u - base;
        return end(log ? d : exponential(d));
    }
};
