// Vectors of N elements that are loaded and stored by one memory access of up to 16 bytes.
#pragma once
#include "ptx/memory.cuh"

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <typename T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& x) {
    *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// The same with a cache hint, for vectors of 8 or 16 bytes (see ptx/memory.cuh). Other sizes are loaded and
// stored without it.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec_kept(const T* p) {
    Vec<T, N> v;
    if constexpr (sizeof(v) == 16) load_kept(reinterpret_cast<uint4&>(v), p);
    else if constexpr (sizeof(v) == 8) load_kept(reinterpret_cast<uint2&>(v), p);
    else v = load_vec<T, N>(p);
    return v;
}

template <typename T, int N>
__device__ __forceinline__ void store_vec_past_l1(T* p, const Vec<T, N>& x) {
    if constexpr (sizeof(T) * N == 16) store_past_l1(p, *reinterpret_cast<const uint4*>(&x));
    else if constexpr (sizeof(T) * N == 8) store_past_l1(p, *reinterpret_cast<const uint2*>(&x));
    else store_vec(p, x);
}

// __shfl_xor_sync for vectors: the vector of lane ^ apart. Its size is a multiple of 4 bytes. All 32 lanes
// must call it.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> shuffled_xor(const Vec<T, N>& x, int apart) {
    Vec<T, N> other;
    const unsigned* from = reinterpret_cast<const unsigned*>(&x);
    unsigned* to = reinterpret_cast<unsigned*>(&other);
#pragma unroll
    for (int i = 0; i < int(sizeof(x) / 4); i++) to[i] = __shfl_xor_sync(~0u, from[i], apart);
    return other;
}
