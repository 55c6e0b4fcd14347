// The exponentials of a softmax, as good as the type of the result can hold.
//
// A softmax is taken of u = x, or of -x where scale is negative (`sign`), so that the largest u has the largest exponential. An exponential is
// relative to a base, which is made of the largest u that was seen; `rescale` takes a sum from one base to another. A row's largest u is
// -inf where nothing was seen yet: then the exponentials are 0, and the sum is.
// |scale| is in 2^-100..2^100 (softmax.py sees to it): so u - largest may overflow, since its exponential is 0 then.
#pragma once
#include "common/math.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

constexpr double LOG2_E = 1.4426950408889634;
__device__ __forceinline__ float sign_of(double scale) { return scale < 0 ? -1.0f : 1.0f; }

// T is the type of the result. 16 bits: one multiplication and ex2.approx, whose errors are far below theirs.
template <typename T>
struct Exponential {
    using Base = float;
    static constexpr bool KEPT = false;  // it costs less to compute exponentials twice than to keep them
    float sign, size, rate;              // of scale; rate = |scale| log2(e)
    __device__ __forceinline__ Exponential(double scale, bool log, float sign, bool = true)
        : sign(sign), size(fabs(scale)), rate(fabs(scale) * LOG2_E) {}
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false) : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ float lift(float x) const { return sign * x; }
    __device__ __forceinline__ Base base(float largest) const { return largest == minus_infinity<float>() ? 0.0f : largest; }
    __device__ __forceinline__ float operator()(float u, Base base) const { return exp2_approx((u - base) * rate); }
    __device__ __forceinline__ float rescale(float largest, Base to) const { return exp2_approx((largest - to) * rate); }
    __device__ __forceinline__ float plain(float u) const { return exp2_approx(u * rate); }  // relative to u = 0
    __device__ __forceinline__ float reach(float largest) const { return largest; }
};

// 32 bits: to round u - largest, or its product with rate, would be an error of the result as large as they are. So u rate is split
// exactly, by fused multiplications, into an integer and a rest in [-1/2, 1/2], whose power of 2 is a polynomial. The base is an integer
// too, so that to rescale is exact.
template <>
struct Exponential<float> {
    struct Base {
        float center, power, least;  // exponentials are 2^((u - center) rate - power), and 0 where u - center is below `least`
    };
    static constexpr bool KEPT = true;
    static constexpr float ROUND = 12582912.0f + 127;  // 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits are
    static constexpr float LIFT = 64;                // exponentials go up to 2^64, so that those of the smallest results are normal numbers
    float sign, size, rate, rate_low, inverse, top;  // rate_low: the digits of rate that a float cannot hold; top: LIFT or 0
    bool log;                                        // then errors of small exponentials are lost in the sum, and that of 1 is to be 1
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false) : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ Exponential(double scale, bool log, float sign, bool lifted = true)
        : sign(sign), size(fabs(scale)), top(lifted && !log ? LIFT : 0.0f), log(log) {
        double exact = fabs(scale) * LOG2_E;
        rate = exact;
        rate_low = exact - rate;
        inverse = 1 / rate;
    }
    __device__ __forceinline__ float lift(float x) const { return sign * x; }
    __device__ __forceinline__ Base base(float largest) const {
        if (largest == minus_infinity<float>()) largest = 0;
        float whole = largest * rate;
        bool far = log || !(fabsf(whole) < 65536.0f);  // the largest is taken off first, exactly for what is not 0 then
        float power = (far ? 0.0f : rintf(whole)) - top;
        return {far ? largest : 0.0f, power, least(power)};
    }
    __device__ __forceinline__ float operator()(float u, const Base& base) const { return power(u - base.center, base.power, base.least); }
    __device__ __forceinline__ float rescale(float largest, const Base& to) const {
        if (largest == minus_infinity<float>()) return 0;
        Base from = base(largest);
        float offset = to.power - from.power - LIFT;                                            // so that it is no 0 before it must
        return power(from.center - to.center, offset, least(offset)) * 5.421010862427522e-20f;  // 2^-64
    }
    __device__ __forceinline__ float plain(float u) const { return power(u, 0.0f, least(0.0f)); }
    // The largest u for which a base made of `largest` will do: its exponential is 2^8 times as large, lifted 2^72. So End's factor is at
    // least 2^-109, of 2^29 columns, and a rescaling 2^-134, where a result is a normal number. (2^32 lost results near 2^-126.)
    __device__ __forceinline__ float reach(float largest) const { return log ? largest : fmaf(8.0f, inverse, largest); }
    // Where 2^(v rate - offset) becomes 2^-127, which is 0.
    __device__ __forceinline__ float least(float offset) const { return (offset - 127.0f) * inverse; }
    // 2^(v rate - offset), for an integer offset. NaN where v is.
    __device__ __forceinline__ float power(float v, float offset, float least) const {
        v = max_or_nan(v, least);
        float round = ROUND - offset, n = fmaf(v, rate, round), rest = fmaf(v, rate, round - n);
        return exp2_near_0(fmaf(v, rate_low, rest)) * __int_as_float(__float_as_int(n) << 23);
    }
};

template <>
struct Exponential<double> {
    using Base = double;
    static constexpr bool KEPT = true;
    double sign, size;
    __device__ __forceinline__ Exponential(double scale, bool log, double sign, bool = true) : sign(sign), size(fabs(scale)) {}
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false) : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ double lift(double x) const { return sign * x; }
    __device__ __forceinline__ Base base(double largest) const { return largest == minus_infinity<double>() ? 0.0 : largest; }
    __device__ __forceinline__ double operator()(double u, Base base) const { return exp((u - base) * size); }
    __device__ __forceinline__ double rescale(double largest, Base to) const { return exp((largest - to) * size); }
    __device__ __forceinline__ double plain(double u) const { return exp(u * size); }
};

// scale x - the largest - log_sum: a logarithm. By halves, whose difference does not overflow.
template <typename T, typename C>
__device__ __forceinline__ C log_of(const Exponential<T>& exponential, C x, C largest, C log_sum) {
    return fma(fma(C(0.5) * exponential.sign, x, C(-0.5) * largest), 2 * exponential.size, -log_sum);
}

// The end of a row: from its largest u and its sum to results. `kept` is x, or where KEPT, and no logarithm is wanted, the exponential of
// x relative to the base of `own`. A row of -inf alone has the sum 0, and gives NaN as torch does.
template <typename T>
struct End {
    using C = compute_t<T>;
    Exponential<T> exponential;
    C largest, log_sum;  // log_sum: to the base 2 unless `log`
    bool log;
    __device__ __forceinline__ End(const Exponential<T>& e, C largest, C sum, bool log, C own)
        : exponential(e), largest(e.base(largest)), log_sum(log ? logf(sum) : log2_approx(sum)), log(log) {}
    template <bool LOG>
    __device__ __forceinline__ C from(C kept) const {
        if (LOG) return log_of(exponential, kept, largest, log_sum);
        return exp2_approx(fma(exponential.lift(kept) - largest, exponential.rate, -log_sum));
    }
    __device__ __forceinline__ C of(C x) const { return log ? from<true>(x) : from<false>(x); }
};

template <>
struct End<float> {
    Exponential<float> exponential;
    Exponential<float>::Base base;
    float largest, factor, factor_low, log_sum;
    bool log;
    __device__ __forceinline__ End(const Exponential<float>& e, float largest, double whole, bool log, float own)
        : exponential(e), base(e.base(largest)), largest(largest), log(log) {
        float sum = whole, low = whole - sum, scaled = e.rescale(own, base), inverse = reciprocal_approx(sum), near = scaled * inverse;
        factor = fmaf(fmaf(-near, sum, scaled) - near * low, inverse, near);
        factor_low = (fmaf(-factor, sum, scaled) - factor * low) * inverse;  // what the division rounds away
        log_sum = log ? logf(sum) + low * inverse : 0.0f;
    }
    template <bool LOG>
    __device__ __forceinline__ float from(float kept) const {
        return LOG ? log_of(exponential, kept, largest, log_sum) : fmaf(kept, factor, kept * factor_low);
    }
    __device__ __forceinline__ float of(float x) const { return log ? from<true>(x) : from<false>(exponential(exponential.lift(x), base)); }
};

template <>
struct End<double> {
    Exponential<double> exponential;
    double base, factor, log_sum;
    bool log;
    __device__ __forceinline__ End(const Exponential<double>& e, double largest, double sum, bool log, double own)
        : exponential(e), base(e.base(largest)), factor(e.rescale(own, base) / sum), log_sum(log ? ::log(sum) : 0.0), log(log) {}
    template <bool LOG>
    __device__ __forceinline__ double from(double kept) const {
        return LOG ? log_of(exponential, kept, base, log_sum) : kept * factor;
    }
    __device__ __forceinline__ double of(double x) const {
        return log ? from<true>(x) : from<false>(exponential(exponential.lift(x), base));
    }
};

// One more term of a row's sum, exp(logit), that has no column of its own.
struct Sink {
    const double* logit;  // null: there is none
    double* share;        // gets exp(logit) / sum
    double scale;         // of the columns; not negative
    // The largest u, that of the logit among them, rounded to 0: so it is finite if the logit is, and NaN if the logit is.
    template <typename C>
    __device__ __forceinline__ C largest(C of_columns) const {
        if (!logit || !(scale > 0)) return of_columns;  // scale is positive; without asking, float rows of a block spill
        C u = sizeof(C) == 4 ? __double2float_rz(__ddiv_rz(*logit, scale)) : __ddiv_rz(*logit, scale);
        return of_columns >= u ? of_columns : u;
    }
    // The whole sum. Of a row of which nothing is seen it is 0: with MASKED its results shall be 0, too.
    template <bool MASKED, typename T, typename C>
    __device__ __forceinline__ sum_t<T> add_to(sum_t<T> sum, C largest, const Exponential<T>& exponential, bool first) const {
        sum_t<T> term = 0;
        if (logit) {
            C point = largest == minus_infinity<C>() ? C(0) : largest;
            C above = *logit - scale * point;  // large only of logits that are so large that nothing is left of the columns
            term = exponential(point, exponential.base(largest)) * exp(min(above, C(40)));
            sum += term;
        }
        if (MASKED && sum == 0) sum = 1;
        if (share && first) *share = term / sum;
        return sum;
    }
};

// The same of the gradients. The sum of y g has one more term, share * share_grad; the logit's own gradient goes to `grad`.
struct SinkGradient {
    const double *share, *share_grad;  // null: there is none
    double* grad;
    template <typename C>
    __device__ __forceinline__ C add_to(C total, bool first) const {
        if (!share) return total;
        double of_share = share_grad ? *share_grad : 0.0;
        total += C(*share * of_share);
        if (first) *grad = *share * (of_share - total);
        return total;
    }
};

// The gradient of a column, once `total`, the row's sum of what `term` gives, is known.
template <typename T>
struct Gradient {
    using C = compute_t<T>;
    Exponential<T> exponential;
    C scale;
    bool log;
    __device__ __forceinline__ Gradient(double scale, bool log) : exponential(1.0), scale(scale), log(log) {}
    template <bool LOG>
    __device__ __forceinline__ C term(C y, C g) const {
        return LOG ? g : y * g;
    }
    template <bool LOG>
    __device__ __forceinline__ C of(C y, C g, C total) const {
        return scale * (LOG ? fma(-exponential.plain(y), total, g) : y * (g - total));
    }
    __device__ __forceinline__ C term(C y, C g) const { return log ? g : y * g; }
    __device__ __forceinline__ C operator()(C y, C g, C total) const { return log ? of<true>(y, g, total) : of<false>(y, g, total); }
};
