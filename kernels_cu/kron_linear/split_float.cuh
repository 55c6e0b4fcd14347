// Exact float products on tensor cores: a float is split into three bfloat16 numbers (Pieces), once, when it is written to shared memory. A
// float product is 6 products of pieces. By mma these take as long as three of m16n8k8 in TF32 (backward.cuh), and are more accurate.
// Splitting into two TF32 numbers in every warp that uses a number takes 6 to 8 instructions per product, more time than the products
// themselves. Storing both TF32 numbers would take more shared memory.
#pragma once
#include "backward.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"

// An element of type T in shared memory: COUNT numbers of `type`. A float is x = a + b + c exactly, with 8 bits each, and all have its
// sign. With Tf32 it is a + b, 5 bits more than TF32 has.
template <typename T>
struct Pieces {
    using type = T;
    static constexpr int COUNT = 1;
};
template <>
struct Pieces<float> {
    using type = __nv_bfloat16;
    static constexpr int COUNT = 3;
};

struct Tf32;
template <>
struct Pieces<Tf32> {
    using type = __nv_bfloat16;
    static constexpr int COUNT = 2;
};

// Split x. All pieces but the last are finite, and an infinity or NaN goes to the last, so that differences do not create a NaN.
template <int COUNT>
__device__ __forceinline__ void split(float x, float (&pieces)[COUNT]) {
    unsigned bits = __float_as_uint(limited(x, 3.40282347e38f));
    float high = __uint_as_float(bits & 0xffff0000), both = __uint_as_float(bits & 0xffffff00);
    pieces[0] = high;
    if (COUNT == 3) pieces[1] = both - high;
    pieces[COUNT - 1] = x - (COUNT == 3 ? both : high);
}

// Split two neighbours, into pairs of pieces.
template <int COUNT>
__device__ __forceinline__ void split_two(float low, float high, unsigned (&pieces)[COUNT]) {
    float a[COUNT], b[COUNT];
    split(low, a);
    split(high, b);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) pieces[i] = __byte_perm(__float_as_uint(a[i]), __float_as_uint(b[i]), 0x7632);
}

// Split two floats into two pieces each: the first is truncated, the second is the rounded rest. For infinities and NaN the second is NaN.
__device__ __forceinline__ void cut_pair(float low, float high, unsigned& big, unsigned& small) {
    big = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    float rest[2] = {low - __uint_as_float(big << 16), high - __uint_as_float(big & 0xffff0000)};
    Vec<__nv_bfloat16, 2> pair = pack<__nv_bfloat16, 2>(rest);
    small = reinterpret_cast<unsigned&>(pair);
}

// The same for every type of the tensor cores: 16-bit types are rounded.
template <typename T>
__device__ __forceinline__ void pieces_of(float low, float high, unsigned (&pieces)[Pieces<T>::COUNT]) {
    if constexpr (Pieces<T>::COUNT == 1) {
        typename PairOf<T>::type pair;
        narrow(pair, make_float2(low, high));
        pieces[0] = reinterpret_cast<unsigned&>(pair);
    } else {
        split_two(low, high, pieces);
    }
}

// Store V neighbours. Floats are split into COUNT pieces, which are PLANE elements apart.
template <int PLANE, int COUNT, typename T, int V>
__device__ __forceinline__ void put_pieces(typename Pieces<T>::type* to, const Vec<T, V>& numbers) {
    if constexpr (sizeof(T) == 2) {
        store_vec(to, numbers);
    } else {
        unsigned pairs[V / 2][COUNT];
#pragma unroll
        for (int i = 0; i < V / 2; ++i) split_two(numbers.v[2 * i], numbers.v[2 * i + 1], pairs[i]);
#pragma unroll
        for (int piece = 0; piece < COUNT; ++piece) {
            Vec<unsigned, V / 2> all;
#pragma unroll
            for (int i = 0; i < V / 2; ++i) all.v[i] = pairs[i][piece];
            store_vec(reinterpret_cast<unsigned*>(to + piece * PLANE), all);
        }
    }
}

// The six products of the pieces of two numbers, small products first, because tensor cores truncate when they add. The omitted products
// are below 2^-22. For two pieces they are the last three, for one piece the last one.
constexpr int PRODUCTS = 6;
__device__ constexpr int first_product(int pieces) { return pieces == 3 ? 0 : pieces == 2 ? 3 : 5; }
__device__ constexpr int left_piece(int product) { return product == 0 ? 2 : product == 2 || product == 3; }
__device__ constexpr int right_piece(int product) { return product == 1 ? 2 : product == 2 || product == 4; }

// Prefetch a part of a matrix into L2, one cache line per thread.
template <int ROWS, int COLUMNS, int THREADS, typename T>
struct Ahead {
    __device__ static __forceinline__ void ahead(const T* from, long long stride) {
        constexpr int LINE = 128 / sizeof(T) < COLUMNS ? 128 / sizeof(T) : COLUMNS, LINES = COLUMNS / LINE;
        for (int e = threadIdx.x % THREADS; e < ROWS * LINES; e += THREADS) prefetch(from + e / LINES * stride + e % LINES * LINE);
    }
};
