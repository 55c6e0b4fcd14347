// Convert vectors of stored elements to and from the type of the computation. 16-bit types are converted in
// pairs: one by one, a pair costs two more instructions in each direction, to move its halves to and from the
// low bits of a register.
#pragma once
#include "math.cuh"
#include "vec.cuh"

// A pair is read as 32 bits. As two numbers of 16 bits the compiler would keep it in two registers wherever
// control flow joins.
__device__ __forceinline__ float2 widen(__half2, unsigned bits) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
}
__device__ __forceinline__ float2 widen(__nv_bfloat162, unsigned bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000));
}
__device__ __forceinline__ void narrow(__half2& to, float2 v) { to = __float22half2_rn(v); }
__device__ __forceinline__ void narrow(__nv_bfloat162& to, float2 v) { to = __float22bfloat162_rn(v); }

template <typename T>
struct PairOf;
template <>
struct PairOf<__half> {
    using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
    using type = __nv_bfloat162;
};

template <typename T, int N, typename A>
__device__ __forceinline__ void unpack(A (&to)[N], const Vec<T, N>& from) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        using Pair = typename PairOf<T>::type;
        const unsigned* pairs = reinterpret_cast<const unsigned*>(&from);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            float2 v = widen(Pair(), pairs[i / 2]);
            to[i] = v.x;
            to[i + 1] = v.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = load_as(from.v[i]);
    }
}

template <typename T, int N, typename A>
__device__ __forceinline__ void add_to(A (&sum)[N], const Vec<T, N>& v) {
    A x[N];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] += x[i];
}

template <typename T, int N, typename A>
__device__ __forceinline__ Vec<T, N> pack(const A (&from)[N]) {
    Vec<T, N> to;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        using Pair = typename PairOf<T>::type;
        Pair* pairs = reinterpret_cast<Pair*>(&to);
#pragma unroll
        for (int i = 0; i < N; i += 2) narrow(pairs[i / 2], make_float2(from[i], from[i + 1]));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to.v[i] = T(from[i]);
    }
    return to;
}
