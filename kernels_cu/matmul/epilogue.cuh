// The epilogue of matmul v6 and newer: out = activation(product + bias) + residual, and the reduction of
// split-K.
//
// The accumulators of a warp are mma fragments. They pass through shared memory, 16 rows at a time, so that
// the warp reads and writes whole rows of global memory in vectors of 16 bytes. Rows that are not aligned to
// 16 bytes are accessed by elements.
#pragma once
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"

enum Activation { NONE, GELU, GELU_TANH, RELU, SILU };  // as ACTIVATIONS in cukern/ops/matmul/tensor_cores.py

// The sizes of a product, passed by value. For each of `batch` products, a and b advance by a_batch and
// b_batch elements; C is (batch, M, N) and contiguous. lda and ldb are the strides that are not 1. `splits`
// thread blocks share the sum over K of a tile.
struct Sizes {
    int M, N, K, batch, splits, activation;
    long long lda, ldb, a_batch, b_batch;
};

constexpr int BAND = 8;

// The origin of tile t of C. Tiles are numbered down a band of BAND tile rows, column by column. The tiles of
// a wave then form a compact rectangle of C, and their rows of A and columns of B stay in L2.
template <typename S>
__device__ __forceinline__ void tile_origin(int t, int M, int N, int& m0, int& n0) {
    int tiles_m = (M + S::BM - 1) / S::BM, tiles_n = (N + S::BN - 1) / S::BN;
    int band = t / (BAND * tiles_n), in_band = t % (BAND * tiles_n);
    int height = min(BAND, tiles_m - band * BAND);
    m0 = (band * BAND + in_band % height) * S::BM;
    n0 = in_band / height * S::BN;
}

__device__ __forceinline__ float exponential(float x) { return __expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }

template <typename C, int W>
__device__ __forceinline__ void activate(C (&v)[W], int activation) {
    if (activation == GELU) {
#pragma unroll
        for (int i = 0; i < W; ++i) v[i] *= C(0.5) * (1 + erf(v[i] * C(0.7071067811865476)));
    } else if (activation == RELU) {
#pragma unroll
        for (int i = 0; i < W; ++i) v[i] = v[i] < 0 ? C(0) : v[i];  // NaN stays
    } else if (activation != NONE) {
#pragma unroll
        for (int i = 0; i < W; ++i) {
            C u = activation == SILU ? v[i] : C(1.5957691216057308) * v[i] * (1 + C(0.044715) * v[i] * v[i]);
            v[i] = quotient(v[i], 1 + exponential(-u));
        }
    }
}

// The derivative of `activate`.
template <typename C>
__device__ __forceinline__ C slope(C v, int activation) {
    if (activation == RELU) return v > 0 ? C(1) : C(0);
    if (activation == GELU)
        return C(0.5) * (1 + erf(v * C(0.7071067811865476))) +
               v * C(0.3989422804014327) * exponential(C(-0.5) * v * v);
    C a = 1, b = 1;  // v sigmoid(a v), and b is the derivative of a v
    if (activation == GELU_TANH) {
        C square = v * v < 1600 ? v * v : C(1600);  // beyond, the sigmoid is 0 or 1
        a = C(1.5957691216057308) * (1 + C(0.044715) * square);
        b = C(1.5957691216057308) * (1 + C(0.134145) * square);
    }
    C gate = quotient(C(1), 1 + exponential(-a * v));
    return gate + v * b * gate * (1 - gate);
}

// Where results go. Null pointers: no pre-activation is stored, and there is no bias or residual. `residual`
// may be `out`, which is then added to.
template <typename T, typename O>
struct Output {
    O* out;
    O* pre;
    const T* bias;
    const O* residual;
    int activation;
    static constexpr int WIDTH = 16 / sizeof(O);

    // True if rows of N elements consist of aligned vectors of 16 bytes.
    __device__ __forceinline__ bool vectors(int N) const {
        unsigned long long of_out = reinterpret_cast<unsigned long long>(out) |
                                    reinterpret_cast<unsigned long long>(pre) |
                                    reinterpret_cast<unsigned long long>(residual);
        return N % WIDTH == 0 && of_out % 16 == 0 &&
               reinterpret_cast<unsigned long long>(bias) % (WIDTH * sizeof(T)) == 0;
    }

    // Finish W neighbouring results of row-major offset `at` and column n, and store them.
    template <int W>
    __device__ __forceinline__ void finish(float (&v)[W], long long at, int n) const {
        if (bias) add_to(v, load_vec<T, W>(bias + n));
        if (pre) store_vec(pre + at, pack<O, W>(v));
        activate(v, activation);
        if (residual) add_to(v, load_vec<O, W>(residual + at));
        store_vec(out + at, pack<O, W>(v));
    }
};

// The results of a warp, ROWS x COLUMNS, in shared memory.
template <int ROWS, int COLUMNS>
struct WarpTile {
    static constexpr int LD = COLUMNS + 8;  // floats; the stores of a half warp have no bank conflicts
    static constexpr int BYTES = ROWS * LD * 4;

    // 16 rows from `row` on, as mma fragments d: lane (g, t) = (l / 4, l % 4) has row g, columns 8 j + 2 t +
    // {0, 1} in d[j][0..1], and row g + 8 in d[j][2..3].
    template <int NJ>
    __device__ __forceinline__ static void put(float* stage, const float (&d)[NJ][4], int row) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < NJ; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *reinterpret_cast<float2*>(stage + (row + g + 8 * i) * LD + 8 * j + 2 * t) =
                    make_float2(d[j][2 * i], d[j][2 * i + 1]);
    }

    // Finish all and store them to C at (m0, n0).
    template <class Out>
    __device__ __forceinline__ static void store(const Out& to, const float* stage, int m0, int n0, int M,
                                                 int N) {
        __syncwarp();
        if (to.vectors(N)) rows<Out::WIDTH>(to, stage, m0, n0, M, N);
        else rows<1>(to, stage, m0, n0, M, N);
    }

    template <int W, class Out>
    __device__ __forceinline__ static void rows(const Out& to, const float* stage, int m0, int n0, int M,
                                                int N) {
        constexpr int ACROSS = COLUMNS / W, V = W < 4 ? W : 4;
#pragma unroll(8 / V)
        for (int i = threadIdx.x % 32; i < ROWS * ACROSS; i += 32) {
            int row = i / ACROSS, column = i % ACROSS * W, m = m0 + row, n = n0 + column;
            if (m >= M || n >= N) continue;
            float v[W];
#pragma unroll
            for (int k = 0; k < W; k += V)
                store_vec(v + k, load_vec<float, V>(stage + row * LD + column + k));
            to.template finish<W>(v, m * (long long)N + n, n);
        }
    }
};

// Split-K: out = epilogue(sum of the partial sums), added in the order of k. `partials` is (splits, batch, M,
// N). Grid: ceil(batch * M * N / (256 W)), block 256; W is 1, or 16 / sizeof(O) if rows are vectors. Four
// blocks per SM are fewer than ptxas aims at: registers for four partial sums in flight.
template <typename T, typename O, int W>
__global__ void __launch_bounds__(256, 4)
    matmul_v6_reduce(O* out, O* pre, const float* partials, const T* bias, const O* residual, Sizes s) {
    wait_for_previous();
    let_next_start();
    long long n = (long long)s.batch * s.M * s.N, at = (blockIdx.x * 256ll + threadIdx.x) * W;
    if (at >= n) return;
    float sum[W] = {};
    for (int k = 0; k < s.splits; ++k) add_to(sum, load_vec<float, W>(partials + k * n + at));
    Output<T, O>{out, pre, bias, residual, s.activation}.template finish<W>(sum, at, int(at % s.N));
}

// The gradient of the epilogue: dpre = dout * slope(pre), and sums[chunk][n] = the sum of dpre[m][n] over
// `rows_per_chunk` rows, which torch adds up. All are contiguous. Grid ceil(N / (32 W)) * ceil(M /
// rows_per_chunk), block (32, 8): a thread has W columns. W is 1, or 16 / sizeof(T) if rows are vectors.
template <typename T, int W>
__global__ void __launch_bounds__(256)
    matmul_activation_bwd(T* dpre, compute_t<T>* sums, const T* dout, const T* pre, int M, int N,
                          int rows_per_chunk, int activation) {
    using C = compute_t<T>;
    __shared__ C shared[8][32 * W];
    int tiles_n = (N + 32 * W - 1) / (32 * W), chunk = blockIdx.x / tiles_n,
        n0 = blockIdx.x % tiles_n * 32 * W, n = n0 + threadIdx.x * W;
    long long first = (long long)chunk * rows_per_chunk;
    int end = int(min(first + rows_per_chunk, (long long)M));
    C sum[W] = {};
#pragma unroll 2
    for (int m = int(first) + threadIdx.y; m < end && n < N; m += 8) {
        long long at = m * (long long)N + n;
        C d[W], x[W];
        unpack(d, load_vec<T, W>(dout + at));
        unpack(x, load_vec<T, W>(pre + at));
#pragma unroll
        for (int i = 0; i < W; ++i) {
            d[i] *= slope(x[i], activation);
            sum[i] += d[i];
        }
        store_vec(dpre + at, pack<T, W>(d));
    }
#pragma unroll
    for (int i = 0; i < W; ++i) shared[threadIdx.y][threadIdx.x * W + i] = sum[i];
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * W && n0 + c < N; c += 256) {
        C total = shared[0][c];
#pragma unroll
        for (int i = 1; i < 8; ++i) total += shared[i][c];
        sums[chunk * (long long)N + n0 + c] = total;
    }
}
