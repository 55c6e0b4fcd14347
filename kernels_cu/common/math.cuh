// The types of computations and sums, NaN, indices of 32 or 64 bits, and 2^x near 0. 16-bit types are
// computed in float, as in torch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <bool FIRST, typename A, typename B>
struct Conditional {
    using type = A;
};
template <typename A, typename B>
struct Conditional<false, A, B> {
    using type = B;
};
template <bool FIRST, typename A, typename B>
using conditional_t = typename Conditional<FIRST, A, B>::type;

template <typename T>
using compute_t = conditional_t<sizeof(T) == 2, float, T>;

// The type of a sum over a row. float is summed in double, because rounding errors of the sum would dominate
// the error of the result.
template <typename T>
using sum_t = conditional_t<sizeof(T) == 2, float, double>;

template <typename T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<__nv_bfloat16> = true;

template <typename T>
__device__ __forceinline__ compute_t<T> load_as(T x) {
    return static_cast<compute_t<T>>(x);
}

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// Element i of an array of long long if `wide`, else of int.
__device__ __forceinline__ long long index_at(const void* indices, bool wide, long long i) {
    return wide ? static_cast<const long long*>(indices)[i] : static_cast<const int*>(indices)[i];
}

// 2^x for x in [-1/2, 1/2], with a relative error of at most 1.12 * 2^-24. Among the polynomials of degree 7
// that are 1 at 0, this one has the smallest relative error, 2^-34.3 before its coefficients are rounded
// (found by reweighted least squares). It is evaluated in float.
__device__ __forceinline__ float exp2_near_0(float x) {
    float y = 1.5196111235127319e-05f;
    y = fmaf(y, x, 0.0001546680723549798f);
    y = fmaf(y, x, 0.0013333936221897602f);
    y = fmaf(y, x, 0.009618038311600685f);
    y = fmaf(y, x, 0.055504102259874344f);
    y = fmaf(y, x, 0.24022650718688965f);
    y = fmaf(y, x, 0.6931471824645996f);
    return fmaf(y, x, 1.0f);
}
