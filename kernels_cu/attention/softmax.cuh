// Online softmax of the scores that a warp holds in the layout of multiply_transposed (tile.cuh), in powers of 2.
#pragma once
#include "../common/ptx/math.cuh"
#include "../common/reduce.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// tanh(x) with an absolute error of about 2^-22.
__device__ __forceinline__ float tanh_approx(float x) { return 1 - 2 * reciprocal_approx(1 + exp2_approx(x * 2.885390081777927f)); }

// One tile of scores to weights exp2(c s - c max). If `masked`, those where hidden(row, column) are 0; both count from the lane's first row
// and column. Updates maxima (of s, not scaled) and sums (of this lane's columns). `shrink`: what earlier sums of the rows are to be
// multiplied by, which for `sum` is done.
template <int R, int N, bool SOFTCAP, class Hidden>
__device__ __forceinline__ void softmax_weights(float (&s)[R][N][4], float (&most)[R][2], float (&sum)[R][2], float (&shrink)[R][2],
                                                bool masked, Hidden hidden, float before, float c) {
    if constexpr (SOFTCAP) {
#pragma unroll
        for (int i = 0; i < R * N * 4; i++) s[i / (N * 4)][i / 4 % N][i % 4] = tanh_approx(s[i / (N * 4)][i / 4 % N][i % 4] * before);
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < R * N * 4; i++) {
            int r = i / (N * 4), n = i / 4 % N, j = i % 4;
            if (hidden(16 * r + j / 2 * 8, 8 * n + j % 2)) s[r][n][j] = minus_infinity<float>();
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * R; i++) {
        int r = i / 2, j = i % 2 * 2;
        float top = most[r][i % 2];
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[r][n][j], s[r][n][j + 1]));
        top = warp_reduce<Max>(top, 4);
        // Of a row without a visible key so far, 0. The rounding of the product is a factor of the whole row, which the sum has too.
        float base = top == minus_infinity<float>() ? 0 : __fmul_rn(top, c);
        shrink[r][i % 2] = exp2_approx(__fmul_rn(most[r][i % 2], c) - base);
        float total = sum[r][i % 2] * shrink[r][i % 2];
        most[r][i % 2] = top;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[r][n][j] = exp2_approx(fmaf(s[r][n][j], c, -base));
            s[r][n][j + 1] = exp2_approx(fmaf(s[r][n][j + 1], c, -base));
            total += s[r][n][j] + s[r][n][j + 1];
        }
        sum[r][i % 2] = total;
    }
}

template <int R, int N>
__device__ __forceinline__ void multiply_rows(float (&x)[R][N][4], const float (&factor)[R][2]) {
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) x[i / (N * 4)][i / 4 % N][i % 4] *= factor[i / (N * 4)][i % 4 / 2];
}

// The same, which also multiplies the rows of `out`.
template <int R, int N, int D, bool SOFTCAP, class Hidden>
__device__ __forceinline__ void softmax_tile(float (&s)[R][N][4], float (&most)[R][2], float (&sum)[R][2], float (&out)[R][D / 8][4],
                                             bool masked, Hidden hidden, float before, float c) {
    float shrink[R][2];
    softmax_weights<R, N, SOFTCAP>(s, most, sum, shrink, masked, hidden, before, c);
    multiply_rows(out, shrink);
}
