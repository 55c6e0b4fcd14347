// The exponentials of a softmax, as accurate as the type T of the result allows; and the last step from a
// row's sum to its results.
//
// u = sign * x: x, or -x if scale is negative, so that the largest u has the largest exponential.
// exponential(u, base) is exp(|scale| u) relative to a base. The base is made from the largest u seen so far,
// and rescale() converts a sum from one base to another. Before the first u, the largest u is -inf, and the
// exponentials and the sum are 0. |scale| is in 2^-100..2^100 (checked in cukern/ops/softmax), so u
// - largest may overflow only where the exponential is 0.
#pragma once
#include "common/math.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

constexpr double LOG2_E = 1.4426950408889634;
__device__ __forceinline__ float sign_of(double scale) { return scale < 0 ? -1.0f : 1.0f; }

// 16-bit results: one multiplication and ex2.approx, whose errors are far below the rounding of the result.
template <typename T>
struct Exponential {
    using Base = float;
    // computing an exponential twice costs less than storing it
    static constexpr bool STORES_EXPONENTIALS = false;
    float sign, abs_scale, rate;  // rate = |scale| log2(e)
    __device__ __forceinline__ Exponential(double scale, bool log, float sign, bool = true)
        : sign(sign), abs_scale(fabs(scale)), rate(fabs(scale) * LOG2_E) {}
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false)
        : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ float to_u(float x) const { return sign * x; }
    __device__ __forceinline__ Base base(float largest) const {
        return largest == minus_infinity<float>() ? 0.0f : largest;
    }
    __device__ __forceinline__ float operator()(float u, Base base) const {
        return exp2_approx((u - base) * rate);
    }
    __device__ __forceinline__ float rescale(float largest, Base to) const {
        return exp2_approx((largest - to) * rate);
    }
    // exp(|scale| u)
    __device__ __forceinline__ float unshifted(float u) const { return exp2_approx(u * rate); }
    __device__ __forceinline__ float rescale_limit(float largest) const { return largest; }
};

// 32-bit results: rounding u - largest, or its product with rate, would cause an error as large as that of
// the result. So u * rate is split exactly by FMAs into an integer and a fraction in [-1/2, 1/2], and
// 2^fraction is a polynomial. The base is an integer too, so that rescaling is exact.
template <>
struct Exponential<float> {
    struct Base {
        // exponentials are 2^((u - center) rate - offset), and 0 for u - center < min_difference
        float center, offset, min_difference;
    };
    static constexpr bool STORES_EXPONENTIALS = true;
    // 1.5 * 2^23: a sum with it is rounded to an integer, in its low bits
    static constexpr float ROUND = 12582912.0f + 127;
    // exponentials go up to 2^64, so that those of the smallest results are normal numbers
    static constexpr float MAX_EXPONENT = 64;
    float sign, abs_scale, rate, rate_low, inverse_rate;  // rate + rate_low: |scale| log2(e)
    float max_exponent;                                   // MAX_EXPONENT or 0
    bool log;  // errors of small exponentials vanish in the sum, and the largest exponential must be 1
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false)
        : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ Exponential(double scale, bool log, float sign, bool raised = true)
        : sign(sign), abs_scale(fabs(scale)), max_exponent(raised && !log ? MAX_EXPONENT : 0.0f), log(log) {
        double exact = fabs(scale) * LOG2_E;
        rate = exact;
        rate_low = exact - rate;
        inverse_rate = 1 / rate;
    }
    __device__ __forceinline__ float to_u(float x) const { return sign * x; }
    __device__ __forceinline__ Base base(float largest) const {
        if (largest == minus_infinity<float>()) largest = 0;
        float product = largest * rate;
        // subtract the largest u: exact wherever the result is not 0
        bool subtract_first = log || !(fabsf(product) < 65536.0f);
        float offset = (subtract_first ? 0.0f : rintf(product)) - max_exponent;
        return {subtract_first ? largest : 0.0f, offset, min_argument(offset)};
    }
    __device__ __forceinline__ float operator()(float u, const Base& base) const {
        return exp2_scaled(u - base.center, base.offset, base.min_difference);
    }
    __device__ __forceinline__ float rescale(float largest, const Base& to) const {
        if (largest == minus_infinity<float>()) return 0;
        Base from = base(largest);
        // makes exp2_scaled 2^64 times as large, so that it does not underflow
        float offset = to.offset - from.offset - MAX_EXPONENT;
        // 2^-64
        return exp2_scaled(from.center - to.center, offset, min_argument(offset)) * 5.421010862427522e-20f;
    }
    __device__ __forceinline__ float unshifted(float u) const {
        return exp2_scaled(u, 0.0f, min_argument(0.0f));
    }
    // The largest u for which a base made from `largest` may be kept: its exponential is 2^8, or 2^72 with
    // MAX_EXPONENT. So Normalizer's factor is at least 2^-109 with 2^29 columns, and a rescaling factor at
    // least 2^-134 if a result is a normal number. A limit of 2^32 instead of 2^8 lost results near 2^-126.
    __device__ __forceinline__ float rescale_limit(float largest) const {
        return log ? largest : fmaf(8.0f, inverse_rate, largest);
    }
    // The v at which 2^(v rate - offset) is 2^-127, which counts as 0.
    __device__ __forceinline__ float min_argument(float offset) const {
        return (offset - 127.0f) * inverse_rate;
    }
    // 2^(v rate - offset) for an integer offset. NaN if v is NaN.
    __device__ __forceinline__ float exp2_scaled(float v, float offset, float min_v) const {
        v = max_or_nan(v, min_v);
        float round = ROUND - offset, n = fmaf(v, rate, round), fraction = fmaf(v, rate, round - n);
        return exp2_near_0(fmaf(v, rate_low, fraction)) * __int_as_float(__float_as_int(n) << 23);
    }
};

template <>
struct Exponential<double> {
    using Base = double;
    static constexpr bool STORES_EXPONENTIALS = true;
    double sign, abs_scale;
    __device__ __forceinline__ Exponential(double scale, bool log, double sign, bool = true)
        : sign(sign), abs_scale(fabs(scale)) {}
    __device__ __forceinline__ explicit Exponential(double scale, bool log = false)
        : Exponential(scale, log, sign_of(scale)) {}
    __device__ __forceinline__ double to_u(double x) const { return sign * x; }
    __device__ __forceinline__ Base base(double largest) const {
        return largest == minus_infinity<double>() ? 0.0 : largest;
    }
    __device__ __forceinline__ double operator()(double u, Base base) const {
        return exp((u - base) * abs_scale);
    }
    __device__ __forceinline__ double rescale(double largest, Base to) const {
        return exp((largest - to) * abs_scale);
    }
    __device__ __forceinline__ double unshifted(double u) const { return exp(u * abs_scale); }
};

// scale x - largest - log_sum: a logarithm. x and largest are halved first, so that their difference does not
// overflow.
template <typename T, typename C>
__device__ __forceinline__ C log_softmax(const Exponential<T>& exponential, C x, C largest, C log_sum) {
    return fma(fma(C(0.5) * exponential.sign, x, C(-0.5) * largest), 2 * exponential.abs_scale, -log_sum);
}

// Normalizes a row: from its largest u and its sum to its results. from_stored() takes x or, with
// STORES_EXPONENTIALS and without `log`, the exponential of x relative to the base made from `stored_max`.
// The sum of a row of -inf is 0, and its results are NaN, as in torch.
template <typename T>
struct Normalizer {
    using C = compute_t<T>;
    Exponential<T> exponential;
    C largest, log_sum;  // log_sum is to base 2 unless `log`
    bool log;
    __device__ __forceinline__ Normalizer(const Exponential<T>& e, C largest, C sum, bool log, C stored_max)
        : exponential(e), largest(e.base(largest)), log_sum(log ? logf(sum) : log2_approx(sum)), log(log) {}
    template <bool LOG>
    __device__ __forceinline__ C from_stored(C stored) const {
        if (LOG) return log_softmax(exponential, stored, largest, log_sum);
        return exp2_approx(fma(exponential.to_u(stored) - largest, exponential.rate, -log_sum));
    }
    __device__ __forceinline__ C from_x(C x) const {
        return log ? from_stored<true>(x) : from_stored<false>(x);
    }
};

template <>
struct Normalizer<float> {
    Exponential<float> exponential;
    Exponential<float>::Base base;
    float largest, factor, factor_low, log_sum;
    bool log;
    __device__ __forceinline__ Normalizer(const Exponential<float>& e, float largest, double whole, bool log,
                                          float stored_max)
        : exponential(e), base(e.base(largest)), largest(largest), log(log) {
        float sum = whole, low = whole - sum, scaled = e.rescale(stored_max, base),
              inverse = reciprocal_approx(sum), near = scaled * inverse;
        factor = fmaf(fmaf(-near, sum, scaled) - near * low, inverse, near);
        // the rounding error of the division
        factor_low = (fmaf(-factor, sum, scaled) - factor * low) * inverse;
        log_sum = log ? logf(sum) + low * inverse : 0.0f;
    }
    template <bool LOG>
    __device__ __forceinline__ float from_stored(float stored) const {
        return LOG ? log_softmax(exponential, stored, largest, log_sum)
                   : fmaf(stored, factor, stored * factor_low);
    }
    __device__ __forceinline__ float from_x(float x) const {
        return log ? from_stored<true>(x) : from_stored<false>(exponential(exponential.to_u(x), base));
    }
};

template <>
struct Normalizer<double> {
    Exponential<double> exponential;
    double base, factor, log_sum;
    bool log;
    __device__ __forceinline__ Normalizer(const Exponential<double>& e, double largest, double sum, bool log,
                                          double stored_max)
        : exponential(e),
          base(e.base(largest)),
          factor(e.rescale(stored_max, base) / sum),
          log_sum(log ? ::log(sum) : 0.0),
          log(log) {}
    template <bool LOG>
    __device__ __forceinline__ double from_stored(double stored) const {
        return LOG ? log_softmax(exponential, stored, base, log_sum) : stored * factor;
    }
    __device__ __forceinline__ double from_x(double x) const {
        return log ? from_stored<true>(x) : from_stored<false>(exponential(exponential.to_u(x), base));
    }
};

// A sink: one more term of a row's sum, exp(logit), without a column.
struct Sink {
    const double* logit;  // or null
    double* share;        // receives exp(logit) / sum
    double scale;         // of the columns, not negative
    // The maximum of the columns' largest u and the logit's u. Rounded toward 0: finite if the logit is
    // finite, NaN if it is NaN.
    template <typename C>
    __device__ __forceinline__ C combined_max(C columns_max) const {
        // scale is > 0 if there is a logit; without this test, float kernels spill
        if (!logit || !(scale > 0)) return columns_max;
        C u = sizeof(C) == 4 ? __double2float_rz(__ddiv_rz(*logit, scale)) : __ddiv_rz(*logit, scale);
        return columns_max >= u ? columns_max : u;
    }
    // The sum with the sink's term. MASKED: a row that sees no key has the sum 0; it becomes 1, so that the
    // results are 0.
    template <bool MASKED, typename T, typename C>
    __device__ __forceinline__ sum_t<T> add_to(sum_t<T> sum, C largest, const Exponential<T>& exponential,
                                               bool is_leader) const {
        sum_t<T> term = 0;
        if (logit) {
            C point = largest == minus_infinity<C>() ? C(0) : largest;
            C exponent = *logit - scale * point;  // large only if the columns' share of the sum is negligible
            term = exponential(point, exponential.base(largest)) * exp(min(exponent, C(40)));
            sum += term;
        }
        if (MASKED && sum == 0) sum = 1;
        if (share && is_leader) *share = term / sum;
        return sum;
    }
};

// The same for the gradients: sum(y g) gets the term share * share_grad, and the logit's gradient is written
// to `grad`.
struct SinkGradient {
    const double *share, *share_grad;  // or null
    double* grad;
    template <typename C>
    __device__ __forceinline__ C add_to(C total, bool is_leader) const {
        if (!share) return total;
        double dshare = share_grad ? *share_grad : 0.0;
        total += C(*share * dshare);
        if (is_leader) *grad = *share * (dshare - total);
        return total;
    }
};

// The gradient of a column. `total` is the row's sum of term().
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
    __device__ __forceinline__ C dx(C y, C g, C total) const {
        return scale * (LOG ? fma(-exponential.unshifted(y), total, g) : y * (g - total));
    }
    __device__ __forceinline__ C term(C y, C g) const { return log ? g : y * g; }
    __device__ __forceinline__ C operator()(C y, C g, C total) const {
        return log ? dx<true>(y, g, total) : dx<false>(y, g, total);
    }
};
