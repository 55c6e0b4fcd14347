// The ladder of matmul: C = A . B (+ bias) on the FMA units in five kernels, each with one new idea. This
// file compiles alone.
//
// Layout     C is (M, N), row-major and contiguous. A is (M, K), B is (K, N), bias is (N) or null. A and B
//            have any strides, in elements: a_m, a_k, b_k and b_n. From v4 on, one stride of each matrix is
//            1; lda and ldb are the others. A transposed matrix is not copied.
// Types      float or double, never TF32. K = 0 gives zeros (plus bias).
// Launch     1-D grids, because y and z are limited to 65535.
//
// version  idea                                            TFLOP/s, float, 4096^3, H200 (cuBLAS: 51)
// v1       one thread per output                           0.5
// v2       coalesced loads                                 5.4
// v3       tiles in shared memory                          6.5
// v4       register tiles                                  33
// v5       asynchronous copies, register banks, stream-K   52
#include "common/vec.cuh"

// ---- v1: one thread per output. The 32 threads of a warp compute a column of C. They read 32 rows of A and
// write to 32 rows of C: each access takes 32 transactions. Grid ceil(M * N / 256), block 256.
template <typename T>
__global__ void matmul_v1(T* out, const T* a, const T* b, const T* bias, int M, int N, int K,  // and strides
                          long long a_m, long long a_k, long long b_k, long long b_n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)M * N) return;
    int m = i % M, n = i / M;
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}

// ---- v2: a warp computes neighbouring elements of rows of C. Its loads of B and its stores are coalesced,
// and its loads of A have one or two addresses. Grid ceil(M / 16) * ceil(N / 16), block (16, 16).
template <typename T>
__global__ void matmul_v2(T* out, const T* a, const T* b, const T* bias, int M, int N, int K,  // and strides
                          long long a_m, long long a_k, long long b_k, long long b_n) {
    int tiles_n = (N + 15) / 16;
    int m = blockIdx.x / tiles_n * 16 + threadIdx.y;
    int n = blockIdx.x % tiles_n * 16 + threadIdx.x;  // x is the fastest index in a warp, and n in a row of C
    if (m >= M || n >= N) return;
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}

// ---- v3: a block copies 32x32 tiles of A and B to shared memory. Each loaded element serves 32 threads: 32
// times fewer loads from global memory. Grid ceil(M / 32) * ceil(N / 32), block (32, 32).
template <typename T>
__global__ void __launch_bounds__(1024) matmul_v3(T* out, const T* a, const T* b, const T* bias,      //
                                                  int M, int N, int K, long long a_m, long long a_k,  // of A
                                                  long long b_k, long long b_n) {
    __shared__ T as[32][33], bs[32][33];  // [m][k] and [k][n]. 33: no bank conflicts along a column
    int tiles_n = (N + 31) / 32;
    int m0 = blockIdx.x / tiles_n * 32, n0 = blockIdx.x % tiles_n * 32;
    int x = threadIdx.x, y = threadIdx.y;
    // A warp has one y and 32 values of x. x is the index along which the matrix is contiguous, for
    // coalesced loads.
    int am = a_k == 1 ? y : x, ak = a_k == 1 ? x : y;
    int bk = b_n == 1 ? y : x, bn = b_n == 1 ? x : y;
    T sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        bool in_a = m0 + am < M && k0 + ak < K, in_b = k0 + bk < K && n0 + bn < N;
        as[am][ak] = in_a ? a[(m0 + am) * a_m + (k0 + ak) * a_k] : T(0);
        bs[bk][bn] = in_b ? b[(k0 + bk) * b_k + (n0 + bn) * b_n] : T(0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();  // all threads have read the tiles before they are overwritten
    }
    int m = m0 + y, n = n0 + x;
    if (m < M && n < N) out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}

// ---- v4: a thread computes 8x8 outputs, which stay in registers. 16 elements loaded from shared memory
// serve 64 FMAs, where v3 loads two per FMA. They are loaded by vectors of 16 bytes.

// Copies 128 rows (m or n) x 8 k of an operand to tile[k][row]. Neighbouring threads read neighbouring k if
// the operand is contiguous along k (ALONG_K), else neighbouring rows. `ld` is the stride that is not 1.
template <typename T, bool ALONG_K>
__device__ __forceinline__ void copy_tile(T (*tile)[132], const T* x, int row0, int rows,  // of x
                                          int k0, int K, long long ld) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int e = threadIdx.x + i * 256;
        int r = ALONG_K ? e / 8 : e % 128, k = ALONG_K ? e % 8 : e / 128;
        const T* from = ALONG_K ? x + (row0 + r) * ld + k0 + k : x + (k0 + k) * ld + row0 + r;
        tile[k][r] = row0 + r < rows && k0 + k < K ? *from : T(0);
    }
}

// A_K: A is contiguous along k, otherwise along m. B_N: B is contiguous along n, otherwise along k.
// Grid ceil(M / 128) * ceil(N / 128), block 256.
template <typename T, bool A_K, bool B_N>
__global__ void __launch_bounds__(256) matmul_v4(T* out, const T* a, const T* b, const T* bias,  // and sizes
                                                 int M, int N, int K, long long lda, long long ldb) {
    constexpr int V = 16 / sizeof(T);                 // elements of a vector
    __shared__ alignas(16) T as[8][132], bs[8][132];  // 132: copy_tile's stores have no bank conflicts
    int tiles_n = (N + 127) / 128;
    int m0 = blockIdx.x / tiles_n * 128, n0 = blockIdx.x % tiles_n * 128;
    // The thread's rows are ty * V + {0..V-1} + 16 V * {0, 1, ...}, and its columns likewise: a warp loads
    // whole lines.
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    T acc[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        copy_tile<T, A_K>(as, a, m0, M, k0, K, lda);
        copy_tile<T, !B_N>(bs, b, n0, N, k0, K, ldb);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            Vec<T, V> column[8 / V], row[8 / V];
#pragma unroll
            for (int i = 0; i < 8 / V; ++i) {
                column[i] = load_vec<T, V>(&as[k][(ty + 16 * i) * V]);
                row[i] = load_vec<T, V>(&bs[k][(tx + 16 * i) * V]);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) acc[i][j] += column[i / V].v[i % V] * row[j / V].v[j % V];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            int m = m0 + (ty + i / V * 16) * V + i % V, n = n0 + (tx + j / V * 16) * V + j % V;
            if (m < M && n < N) out[m * (long long)N + n] = acc[i][j] + (bias ? bias[n] : T(0));
        }
}

// ---- v5: what keeps the FMA units busy all the time. The copies of the next tiles run while this one is
// multiplied, accumulators and operands are in different register banks, and the last wave of tiles is
// divided between all SMs. It is the default for float without TF32, and long: see the head of its file.
#include "stream_k.cuh"
