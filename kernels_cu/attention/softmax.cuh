// Online softmax of the scores that a warp holds in the layout of multiply_transposed (tile.cuh), in powers
// of 2.
#pragma once
#include "../common/ptx/math.cuh"
#include "../common/reduce.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// tanh(x); unless EXACT with an absolute error of about 2^-22.
template <bool EXACT>
__device__ __forceinline__ float tanh_of(float x) {
    return EXACT ? tanhf(x) : 1 - 2 * reciprocal_approx(1 + exp2_approx(x * 2.885390081777927f));
}

// Hide the scores where hidden(row, column). Both count from the lane's first row and column.
template <int R, int N, class Hidden>
__device__ __forceinline__ void hide(float (&s)[R][N][4], Hidden hidden) {
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) {
        int r = i / (N * 4), n = i / 4 % N, j = i % 4;
        if (hidden(16 * r + j / 2 * 8, 8 * n + j % 2)) s[r][n][j] = minus_infinity<float>();
    }
}

// One tile of scores to weights exp2(c s - c max). mask() hides scores; it comes after the softcap. Updates
// row_max (of s, without the factor c) and row_sum (of this lane's columns). rescale(r, i, shrink) is called
// for row i of block r, whose earlier products with V must be multiplied by shrink.
template <int R, int N, bool SOFTCAP, bool EXACT, class Mask, class Rescale>
__device__ __forceinline__ void softmax_rows(float (&s)[R][N][4], float (&row_max)[R][2],
                                             float (&row_sum)[R][2], Mask mask, float tanh_factor, float c,
                                             Rescale rescale) {
    if constexpr (SOFTCAP) {
#pragma unroll
        for (int i = 0; i < R * N * 4; i++)
            s[i / (N * 4)][i / 4 % N][i % 4] = tanh_of<EXACT>(s[i / (N * 4)][i / 4 % N][i % 4] * tanh_factor);
    }
    mask();
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int r = i / 2, j = i % 2 * 2;
        float top = row_max[r][i % 2];
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[r][n][j], s[r][n][j + 1]));
        top = warp_reduce<Max>(top, 4);
        // 0 for a row that has seen no key. The rounding error of top * c scales the row's weights and their
        // sum alike, so it cancels.
        float base = top == minus_infinity<float>() ? 0 : __fmul_rn(top, c);
        float shrink = exp2_approx(__fmul_rn(row_max[r][i % 2], c) - base),
              total = row_sum[r][i % 2] * shrink;
        row_max[r][i % 2] = top;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[r][n][j] = exp2_approx(fmaf(s[r][n][j], c, -base));
            s[r][n][j + 1] = exp2_approx(fmaf(s[r][n][j + 1], c, -base));
            total += s[r][n][j] + s[r][n][j + 1];
        }
        row_sum[r][i % 2] = total;
        rescale(r, i % 2, shrink);
    }
}

// softmax_rows that writes the factors of all rows to `shrink`.
template <int R, int N, bool SOFTCAP, class Mask>
__device__ __forceinline__ void softmax_weights(float (&s)[R][N][4], float (&row_max)[R][2],
                                                float (&row_sum)[R][2], float (&shrink)[R][2], Mask mask,
                                                float tanh_factor, float c) {
    auto keep = [&](int r, int i, float factor) { shrink[r][i] = factor; };
    softmax_rows<R, N, SOFTCAP, false>(s, row_max, row_sum, mask, tanh_factor, c, keep);
}

template <int R, int N>
__device__ __forceinline__ void multiply_rows(float (&x)[R][N][4], const float (&factor)[R][2]) {
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) x[i / (N * 4)][i / 4 % N][i % 4] *= factor[i / (N * 4)][i % 4 / 2];
}

// softmax_rows that multiplies the rows of `out` by these factors.
template <int R, int N, int D, bool SOFTCAP, bool EXACT = false, class Mask>
__device__ __forceinline__ void softmax_tile(float (&s)[R][N][4], float (&row_max)[R][2],
                                             float (&row_sum)[R][2], float (&out)[R][D / 8][4], Mask mask,
                                             float tanh_factor, float c) {
    auto multiply_out = [&](int r, int i, float factor) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) out[r][n][2 * i] *= factor, out[r][n][2 * i + 1] *= factor;
    };
    softmax_rows<R, N, SOFTCAP, EXACT>(s, row_max, row_sum, mask, tanh_factor, c, multiply_out);
}
