// Rows of any length and alignment as 16-byte vectors.
//
// Vectors are aligned to 16 bytes: vector i holds the columns from i * ELEMENTS - shift on. shift is how many
// elements the row begins after a multiple of 16 bytes. The first and the last vector may contain columns
// that are not the row's; these are not touched.
#pragma once
#include "common/math.cuh"

template <typename T>
constexpr int ELEMENTS = 16 / sizeof(T);

// A vector as four 32-bit words. With 16-bit elements, as in Vec, the compiler gives many elements a register
// each: up to 25 registers more in total.
template <typename T>
struct alignas(16) Vector {
    unsigned w[4];
};

__device__ __forceinline__ void unpack(const Vector<float>& v, float (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = __uint_as_float(v.w[i]);
}
__device__ __forceinline__ void unpack(const Vector<double>& v, double (&r)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i] = __hiloint2double(v.w[2 * i + 1], v.w[2 * i]);
}
__device__ __forceinline__ void unpack(const Vector<__nv_bfloat16>& v, float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r[2 * i] = __uint_as_float(v.w[i] << 16);
        r[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void unpack(const Vector<__half>& v, float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 two = __half22float2(*reinterpret_cast<const __half2*>(&v.w[i]));
        r[2 * i] = two.x;
        r[2 * i + 1] = two.y;
    }
}

// The largest element; NaN is ignored. 16-bit elements are compared in pairs, before they are unpacked.
template <typename T>
__device__ __forceinline__ compute_t<T> max_element(const Vector<T>& v) {
    compute_t<T> r[ELEMENTS<T>];
    unpack(v, r);
    compute_t<T> largest = r[0];
#pragma unroll
    for (int i = 1; i < ELEMENTS<T>; ++i) largest = max(largest, r[i]);
    return largest;
}
template <typename Pair>
__device__ __forceinline__ float2 max_of_pairs(const unsigned (&w)[4]) {
    const Pair* pairs = reinterpret_cast<const Pair*>(w);
    Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return make_float2(float(largest.x), float(largest.y));
}
template <>
__device__ __forceinline__ float max_element(const Vector<__nv_bfloat16>& v) {
    float2 halves = max_of_pairs<__nv_bfloat162>(v.w);
    return max(halves.x, halves.y);
}
template <>
__device__ __forceinline__ float max_element(const Vector<__half>& v) {
    float2 halves = max_of_pairs<__half2>(v.w);
    return max(halves.x, halves.y);
}

// Rounds to T.
__device__ __forceinline__ void pack(Vector<float>& v, const float (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = __float_as_uint(r[i]);
}
__device__ __forceinline__ void pack(Vector<double>& v, const double (&r)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        v.w[2 * i] = __double2loint(r[i]);
        v.w[2 * i + 1] = __double2hiint(r[i]);
    }
}
__device__ __forceinline__ void pack(Vector<__nv_bfloat16>& v, const float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        __nv_bfloat162 two = __floats2bfloat162_rn(r[2 * i], r[2 * i + 1]);
        v.w[i] = *reinterpret_cast<unsigned*>(&two);
    }
}
__device__ __forceinline__ void pack(Vector<__half>& v, const float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        __half2 two = __floats2half2_rn(r[2 * i], r[2 * i + 1]);
        v.w[i] = *reinterpret_cast<unsigned*>(&two);
    }
}

// How far p is after a multiple of 16 bytes, in bytes and in elements.
__device__ __forceinline__ int bytes_past_16(const void* p) {
    return reinterpret_cast<unsigned long long>(p) % 16;
}
template <typename T>
__device__ __forceinline__ int shift_of(const T* p) {
    return bytes_past_16(p) / int(sizeof(T));
}

// The number of vectors from a row's start to its column `end`.
template <typename T>
__device__ __forceinline__ long long vectors_until(long long end, int shift) {
    return (end + shift + ELEMENTS<T> - 1) / ELEMENTS<T>;
}

// A vector of equal elements.
template <typename T>
__device__ __forceinline__ Vector<T> filled(compute_t<T> value) {
    compute_t<T> r[ELEMENTS<T>];
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; ++j) r[j] = value;
    Vector<T> v;
    pack(v, r);
    return v;
}

// Loads N vectors, `step` elements apart, from an address that need not be a multiple of 16 bytes: by 4-byte
// words. If 16-bit elements begin inside a word, the first and the last element are loaded alone, and the
// vectors are assembled once all loads are issued. Only vectors with is_valid(k) are loaded; the others keep
// their value if all their elements are equal.
template <int N, typename T, typename IsValid>
__device__ __forceinline__ void load_unaligned(Vector<T> (&to)[N], const T* from, int step,
                                               IsValid is_valid) {
    bool odd = sizeof(T) == 2 && reinterpret_cast<unsigned long long>(from) % 4;
    unsigned last[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        last[k] = to[k].w[0];
        if (!is_valid(k)) continue;
        const unsigned* words = reinterpret_cast<const unsigned*>(from + k * step - odd);
#pragma unroll
        for (int i = 1; i < 4; ++i) to[k].w[i] = words[i];
        if (odd) {
            to[k].w[0] = *reinterpret_cast<const unsigned short*>(from + k * step);
            last[k] = *reinterpret_cast<const unsigned short*>(words + 4);
        } else {
            to[k].w[0] = words[0];
        }
    }
    if (!odd) return;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        to[k].w[0] <<= 16;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[k].w[i] = __funnelshift_r(to[k].w[i], i < 3 ? to[k].w[i + 1] : last[k], 16);
    }
}

// The vector of columns that begins at `first`; columns outside of [begin, end) get `missing`. If all are
// inside and `aligned` (column `first` is at a multiple of 16 bytes), it is one 16-byte load. Index is int or
// long long.
template <typename T, typename Index>
__device__ __forceinline__ Vector<T> load_columns(const T* row, Index first, Index begin, Index end,
                                                  bool aligned, compute_t<T> missing) {
    if (first >= begin && first + ELEMENTS<T> <= end) {
        if (aligned) return *reinterpret_cast<const Vector<T>*>(row + first);
        Vector<T> v[1];
        load_unaligned(v, row + first, 0, [](int) { return true; });
        return v[0];
    }
    compute_t<T> r[ELEMENTS<T>];
#pragma unroll
    for (int j = 0; j < ELEMENTS<T>; ++j)
        r[j] = first + j >= begin && first + j < end ? load_as(row[first + j]) : missing;
    Vector<T> v;
    pack(v, r);
    return v;
}

// Stores the columns in [begin, end). Column `first` is at a multiple of 16 bytes.
template <typename T, typename Index>
__device__ __forceinline__ void store_columns(T* row, Index first, Index begin, Index end,
                                              const compute_t<T> (&r)[ELEMENTS<T>]) {
    if (first >= begin && first + ELEMENTS<T> <= end) {
        Vector<T> v;
        pack(v, r);
        *reinterpret_cast<Vector<T>*>(row + first) = v;
    } else {
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j)
            if (first + j >= begin && first + j < end) row[first + j] = T(r[j]);
    }
}
