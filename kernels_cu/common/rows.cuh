// Rows of any length and alignment as vectors of 16 bytes.
//
// The vectors of a row lie at multiples of 16 bytes: vector i holds the columns from i * WIDTH - shift on, where shift is how many
// elements the row's first is past such a multiple. The first and the last may hold columns that are not the row's: those are left alone.
#pragma once
#include "math.cuh"
#include "vec.cuh"

template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

// How many elements p is past a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ int shift_of(const T* p) {
    return reinterpret_cast<unsigned long long>(p) / sizeof(T) % WIDTH<T>;
}

// How many vectors, counted from a row's first, reach to its column `end`.
template <typename T>
__device__ __forceinline__ long long vectors_to(long long end, int shift) {
    return (end + shift + WIDTH<T> - 1) / WIDTH<T>;
}

// Index is int or long long. The columns of a row from `first` on, one vector; `missing` stands for those outside of [begin, end). One access of 16 bytes if
// `aligned`, which says that column `first` is at a multiple of them, and all columns are inside.
template <typename T, typename Index>
__device__ __forceinline__ Vec<T, WIDTH<T>> load_columns(const T* row, Index first, Index begin, Index end, bool aligned, T missing) {
    if (aligned && first >= begin && first + WIDTH<T> <= end) return load_vec<T, WIDTH<T>>(row + first);
    Vec<T, WIDTH<T>> v;
#pragma unroll
    for (int j = 0; j < WIDTH<T>; ++j) v.v[j] = first + j >= begin && first + j < end ? row[first + j] : missing;
    return v;
}

template <typename T, typename Index>
__device__ __forceinline__ void store_columns(T* row, Index first, Index begin, Index end, bool aligned, const Vec<T, WIDTH<T>>& v) {
    if (aligned && first >= begin && first + WIDTH<T> <= end) {
        store_vec(row + first, v);
    } else {
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j)
            if (first + j >= begin && first + j < end) row[first + j] = v.v[j];
    }
}
