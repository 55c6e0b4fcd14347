// Vectors of N elements that move as one memory access of up to 16 bytes.
#pragma once

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

// The unsigned integer, or vector of them, of a number of bytes: what the cache hints are defined on.
template <int BYTES>
struct Word;
template <>
struct Word<4> {
    using type = unsigned;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

// Read past L1, for what nobody of this multiprocessor reads again (ld.cg).
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_vec_past_l1(const T* p) {
    union {
        typename Word<sizeof(T) * N>::type word;
        Vec<T, N> vec;
    } x{__ldcg(reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(p))};
    return x.vec;
}

// Write what is evicted first from L2 (st.cs).
template <typename T, int N>
__device__ __forceinline__ void store_vec_streaming(T* p, const Vec<T, N>& x) {
    using W = typename Word<sizeof(T) * N>::type;
    __stcs(reinterpret_cast<W*>(p), *reinterpret_cast<const W*>(&x));
}
