// The type in which a stored type is computed: float for the 16-bit ones, as torch does.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
struct Compute {
    using type = T;
};
template <>
struct Compute<__half> {
    using type = float;
};
template <>
struct Compute<__nv_bfloat16> {
    using type = float;
};
template <typename T>
using compute_t = typename Compute<T>::type;

template <typename T>
__device__ __forceinline__ compute_t<T> load_as(T x) {
    return static_cast<compute_t<T>>(x);
}
