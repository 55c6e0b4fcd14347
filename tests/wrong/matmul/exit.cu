// Wrong on purpose: matmul_v3 whose threads without an output leave at once. The others wait for them, and for their part of the tiles.

template <typename T>
__global__ void __launch_bounds__(1024) matmul_v3(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m,
                                                  long long a_k, long long b_k, long long b_n) {
    __shared__ T as[32][33], bs[32][33];
    int tiles_n = (N + 31) / 32;
    int m0 = blockIdx.x / tiles_n * 32, n0 = blockIdx.x % tiles_n * 32;
    int x = threadIdx.x, y = threadIdx.y;
    int am = a_k == 1 ? y : x, ak = a_k == 1 ? x : y;
    int bk = b_n == 1 ? y : x, bn = b_n == 1 ? x : y;
    int m = m0 + y, n = n0 + x;
    if (m >= M || n >= N) return;
    T sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        bool in_a = m0 + am < M && k0 + ak < K, in_b = k0 + bk < K && n0 + bn < N;
        as[am][ak] = in_a ? a[(m0 + am) * a_m + (k0 + ak) * a_k] : T(0);
        bs[bk][bn] = in_b ? b[(k0 + bk) * b_k + (n0 + bn) * b_n] : T(0);
        __syncthreads();  // for those that left, too
#pragma unroll
        for (int k = 0; k < 32; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();
    }
    if (m < M && n < N) out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}
