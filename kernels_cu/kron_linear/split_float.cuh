// Numbers as tensor cores take them exactly: a float is three bfloat16 numbers (Pieces), made once, when it comes to shared memory. A product
// is 6 of theirs: by mma those take as long as 3 of m16n8k8 in TF32 (backward.cuh), and are more exact. To split in two for TF32 in
// every warp that multiplies a number takes 6 to 8 instructions a product, and more time than the products; both parts would take more
// shared memory.
#pragma once
#include "backward.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"

// What a number is in shared memory: COUNT numbers of `type`. A float is x = a + b + c exactly, of 8 bits each, all of its sign; in Tf32 it
// is a + b, which has 5 bits more than TF32's own.
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

// All but the last are finite, and the last has the infinity or the NaN, so that none comes of their difference.
template <int COUNT>
__device__ __forceinline__ void split(float x, float (&pieces)[COUNT]) {
    unsigned bits = __float_as_uint(limited(x, 3.40282347e38f));
    float high = __uint_as_float(bits & 0xffff0000), both = __uint_as_float(bits & 0xffffff00);
    pieces[0] = high;
    if (COUNT == 3) pieces[1] = both - high;
    pieces[COUNT - 1] = x - (COUNT == 3 ? both : high);
}

// Two neighbours' pieces.
template <int COUNT>
__device__ __forceinline__ void split_two(float low, float high, unsigned (&pieces)[COUNT]) {
    float a[COUNT], b[COUNT];
    split(low, a);
    split(high, b);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) pieces[i] = __byte_perm(__float_as_uint(a[i]), __float_as_uint(b[i]), 0x7632);
}

// Two numbers in two pieces each: the first cut, and what is left, rounded. Of what is not finite the second is NaN.
__device__ __forceinline__ void cut_pair(float low, float high, unsigned& big, unsigned& small) {
    big = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    float rest[2] = {low - __uint_as_float(big << 16), high - __uint_as_float(big & 0xffff0000)};
    Vec<__nv_bfloat16, 2> pair = pack<__nv_bfloat16, 2>(rest);
    small = reinterpret_cast<unsigned&>(pair);
}

// The same of any type that tensor cores take: 16 bits are rounded.
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

// V neighbours to their places, of floats of each of COUNT pieces, which lie PLANE apart.
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

// The six products of two numbers' pieces, small ones first, since tensor cores cut what they add; those left out are below 2^-22. Of two
// pieces it is the last three, of one the last.
constexpr int PRODUCTS = 6;
__device__ constexpr int first_product(int pieces) { return pieces == 3 ? 0 : pieces == 2 ? 3 : 5; }
__device__ constexpr int left_piece(int product) { return product == 0 ? 2 : product == 2 || product == 3; }
__device__ constexpr int right_piece(int product) { return product == 1 ? 2 : product == 2 || product == 4; }

// A part of a matrix to the L2 cache, a line a thread.
template <int ROWS, int COLUMNS, int THREADS, typename T>
struct Ahead {
    __device__ static __forceinline__ void ahead(const T* from, long long stride) {
        constexpr int LINE = 128 / sizeof(T) < COLUMNS ? 128 / sizeof(T) : COLUMNS, LINES = COLUMNS / LINE;
        for (int e = threadIdx.x % THREADS; e < ROWS * LINES; e += THREADS) prefetch(from + e / LINES * stride + e % LINES * LINE);
    }
};
