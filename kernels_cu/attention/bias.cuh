// What is added to attention's scores, after their scale and softcap: a tensor, or ALiBi (Press et al., arXiv
// 2108.12409). Both call use(r, n, j, bias * factor) for each element c[r][n][j] of 16 R rows, from `row` on,
// and 8 N columns, from `column` on, of a warp (multiply_transposed in tile.cuh). KEYS: rows are keys, and
// columns queries.
#pragma once
#include "../common/pack.cuh"
#include "dropout.cuh"

// Strides in elements, 0 for a dimension of size 1. `pairs` is not 0 if any two neighbouring keys, from an
// even one on, can be loaded at once.
struct BiasLayout {
    long long batch, head;
    int query, key, pairs;
};

// A lane loads the numbers of its elements. In place of rows and columns behind the end it loads the last.
template <typename B>
struct Bias {
    const B* bias;
    BiasLayout of;
    B* gradient;  // of the bias before it was broadcast: (batch, heads, queries, keys), or null

    template <bool KEYS, int R, int N, class Use>
    __device__ __forceinline__ void each(int batch, int head, int row, int column, int queries, int keys,
                                         float factor, Use use) const {
        int last_row = (KEYS ? keys : queries) - 1, last_column = (KEYS ? queries : keys) - 1;
        long long down = KEYS ? of.key : of.query, along = KEYS ? of.query : of.key;  // of 32 bits
        const B* from = bias + batch * of.batch + head * of.head;
        bool pairs = !KEYS && of.pairs && column + 8 * N <= keys;
        row += threadIdx.x % 32 / 4, column += threadIdx.x % 4 * 2;
        if (pairs) {
#pragma unroll
            for (int i = 0; i < 2 * R * N; i++) {
                int r = i / (2 * N), n = i / 2 % N, j = i % 2 * 2;
                float x[2];
                unpack(x, load_vec<B, 2>(from + min(row + 16 * r + 4 * j, last_row) * down + column + 8 * n));
                use(r, n, j, x[0] * factor);
                use(r, n, j + 1, x[1] * factor);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4 * R * N; i++) {
                int r = i / (4 * N), n = i / 4 % N, j = i % 4;
                use(r, n, j,
                    float(from[min(row + 16 * r + j / 2 * 8, last_row) * down +
                               min(column + 8 * n + j % 2, last_column) * along]) *
                        factor);
            }
        }
    }

    // Store the gradient ds(r, n, j) of each element.
    template <int R, int N, class Gradient>
    __device__ __forceinline__ void store(long long head, int row, int column, int queries, int keys,
                                          Gradient ds) const {
        if (!gradient) return;
        row += threadIdx.x % 32 / 4, column += threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * R * N; i++) {
            int r = i / (2 * N), n = i / 2 % N, j = i % 2 * 2, query = row + 16 * r + 4 * j,
                key = column + 8 * n;
            B* to = gradient + (head * queries + query) * keys + key;
            const float x[2] = {ds(r, n, j), ds(r, n, j + 1)};
            if (query >= queries || key >= keys) continue;
            if (keys % 2 == 0) store_vec(to, pack<B, 2>(x));
            else {
                to[0] = B(x[0]);
                if (key + 1 < keys) to[1] = B(x[1]);
            }
        }
    }
};

// -slope * |query + keys - queries - key|: the slope of the head times the distance.
struct Alibi {
    const float* slopes;
    int batch_stride;

    template <bool KEYS, int R, int N, class Use>
    __device__ __forceinline__ void each(int batch, int head, int row, int column, int queries, int keys,
                                         float factor, Use use) const {
        float slope = slopes[batch * batch_stride + head] * -factor;
        row += threadIdx.x % 32 / 4, column += threadIdx.x % 4 * 2;
        float distance = (KEYS ? column - row : row - column) + keys - queries;
#pragma unroll
        for (int i = 0; i < 4 * R * N; i++) {
            int r = i / (4 * N), n = i / 4 % N, j = i % 4, down = 16 * r + j / 2 * 8, along = 8 * n + j % 2;
            use(r, n, j, slope * fabsf(distance + (KEYS ? along - down : down - along)));
        }
    }

    template <int R, int N, class Gradient>
    __device__ __forceinline__ void store(long long, int, int, int, int, Gradient) const {}
};

struct Nothing {};  // neither dropout nor a bias

template <class Extra>
constexpr bool DROPS = false;
template <>
constexpr bool DROPS<Dropout> = true;
template <class Extra>
constexpr bool BIASED = false;
template <>
constexpr bool BIASED<Alibi> = true;
template <typename B>
constexpr bool BIASED<Bias<B>> = true;

// The factor of the weights that are not dropped.
__device__ __forceinline__ float scale_of(const Dropout& dropout) { return dropout.scale; }
template <class Extra>
__device__ __forceinline__ float scale_of(const Extra&) {
    return 1;
}

// What the last arguments of a kernel describe.
__device__ __forceinline__ Nothing extra_of() { return {}; }
__device__ __forceinline__ Dropout extra_of(const unsigned long long* seed, unsigned threshold, float scale) {
    return {seed, threshold, scale};
}
__device__ __forceinline__ Alibi extra_of(const float* slopes, int batch_stride) {
    return {slopes, batch_stride};
}
template <typename B>
__device__ __forceinline__ Bias<B> extra_of(const B* bias, BiasLayout layout, B* gradient) {
    return {bias, layout, gradient};
}
