// Rows of any length and alignment as vectors of 16 bytes.
//
// The vectors of a row lie at multiples of 16 bytes: vector i holds the columns from i * WIDTH - shift on, where shift is how many
// elements the row's first is past such a multiple. The first and the last may hold columns that are not the row's: those are left alone.
#pragma once
#include "common/math.cuh"

template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

// A vector, as the four words that it is: a compiler that sees 16-bit elements, as in Vec, gives many of them a register each, in all up to
// 25 more than here.
template <typename T>
struct alignas(16) Words {
    unsigned w[4];
};

__device__ __forceinline__ void unpack(const Words<float>& v, float (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = __uint_as_float(v.w[i]);
}
__device__ __forceinline__ void unpack(const Words<double>& v, double (&r)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i] = __hiloint2double(v.w[2 * i + 1], v.w[2 * i]);
}
__device__ __forceinline__ void unpack(const Words<__nv_bfloat16>& v, float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        r[2 * i] = __uint_as_float(v.w[i] << 16);
        r[2 * i + 1] = __uint_as_float(v.w[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void unpack(const Words<__half>& v, float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 two = __half22float2(*reinterpret_cast<const __half2*>(&v.w[i]));
        r[2 * i] = two.x;
        r[2 * i + 1] = two.y;
    }
}

// The largest element; a NaN is passed over. 16-bit ones are compared in pairs, before they are unpacked.
template <typename T>
__device__ __forceinline__ compute_t<T> largest_of(const Words<T>& v) {
    compute_t<T> r[WIDTH<T>];
    unpack(v, r);
    compute_t<T> largest = r[0];
#pragma unroll
    for (int i = 1; i < WIDTH<T>; ++i) largest = max(largest, r[i]);
    return largest;
}
template <typename Pair>
__device__ __forceinline__ float2 largest_halves(const unsigned (&w)[4]) {
    const Pair* pairs = reinterpret_cast<const Pair*>(w);
    Pair largest = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
    return make_float2(float(largest.x), float(largest.y));
}
template <>
__device__ __forceinline__ float largest_of(const Words<__nv_bfloat16>& v) {
    float2 halves = largest_halves<__nv_bfloat162>(v.w);
    return max(halves.x, halves.y);
}
template <>
__device__ __forceinline__ float largest_of(const Words<__half>& v) {
    float2 halves = largest_halves<__half2>(v.w);
    return max(halves.x, halves.y);
}

// Rounded to T.
__device__ __forceinline__ void pack(Words<float>& v, const float (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = __float_as_uint(r[i]);
}
__device__ __forceinline__ void pack(Words<double>& v, const double (&r)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        v.w[2 * i] = __double2loint(r[i]);
        v.w[2 * i + 1] = __double2hiint(r[i]);
    }
}
__device__ __forceinline__ void pack(Words<__nv_bfloat16>& v, const float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        __nv_bfloat162 two = __floats2bfloat162_rn(r[2 * i], r[2 * i + 1]);
        v.w[i] = *reinterpret_cast<unsigned*>(&two);
    }
}
__device__ __forceinline__ void pack(Words<__half>& v, const float (&r)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        __half2 two = __floats2half2_rn(r[2 * i], r[2 * i + 1]);
        v.w[i] = *reinterpret_cast<unsigned*>(&two);
    }
}

// How far p is past a multiple of 16 bytes, and how many elements.
__device__ __forceinline__ int bytes_past_16(const void* p) { return reinterpret_cast<unsigned long long>(p) % 16; }
template <typename T>
__device__ __forceinline__ int shift_of(const T* p) {
    return bytes_past_16(p) / int(sizeof(T));
}

// How many vectors, counted from a row's first, reach to its column `end`.
template <typename T>
__device__ __forceinline__ long long vectors_to(long long end, int shift) {
    return (end + shift + WIDTH<T> - 1) / WIDTH<T>;
}

// A vector of one value.
template <typename T>
__device__ __forceinline__ Words<T> filled(compute_t<T> value) {
    compute_t<T> r[WIDTH<T>];
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j) r[j] = value;
    Words<T> v;
    pack(v, r);
    return v;
}

// N vectors, `step` elements apart, the first at `from`, which need not be a multiple of 16 bytes: by words of 4 bytes, and where 16-bit
// elements begin in the middle of one, the first and the last element alone; these are put together once all loads are under way. Only
// vectors that has(k) says; the others stay, if all their elements are equal.
template <int N, typename T, typename Has>
__device__ __forceinline__ void load_apart(Words<T> (&to)[N], const T* from, int step, Has has) {
    bool odd = sizeof(T) == 2 && reinterpret_cast<unsigned long long>(from) % 4;
    unsigned last[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
        last[k] = to[k].w[0];
        if (!has(k)) continue;
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
        for (int i = 0; i < 4; ++i) to[k].w[i] = __funnelshift_r(to[k].w[i], i < 3 ? to[k].w[i + 1] : last[k], 16);
    }
}

// The columns of a row from `first` on, one vector; `missing` stands for those outside of [begin, end). If all are inside: one access of 16
// bytes where `aligned`, which says that column `first` is at a multiple of them. Index is int or long long.
template <typename T, typename Index>
__device__ __forceinline__ Words<T> load_columns(const T* row, Index first, Index begin, Index end, bool aligned, compute_t<T> missing) {
    if (first >= begin && first + WIDTH<T> <= end) {
        if (aligned) return *reinterpret_cast<const Words<T>*>(row + first);
        Words<T> v[1];
        load_apart(v, row + first, 0, [](int) { return true; });
        return v[0];
    }
    compute_t<T> r[WIDTH<T>];
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j) r[j] = first + j >= begin && first + j < end ? load_as(row[first + j]) : missing;
    Words<T> v;
    pack(v, r);
    return v;
}

// Those in [begin, end), where column `first` is at a multiple of 16 bytes.
template <typename T, typename Index>
__device__ __forceinline__ void store_columns(T* row, Index first, Index begin, Index end, const compute_t<T> (&r)[WIDTH<T>]) {
    if (first >= begin && first + WIDTH<T> <= end) {
        Words<T> v;
        pack(v, r);
        *reinterpret_cast<Words<T>*>(row + first) = v;
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j)
            if (first + j >= begin && first + j < end) row[first + j] = T(r[j]);
    }
}
