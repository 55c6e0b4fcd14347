// Wrong on purpose: matmul_v2 that takes B's rows for N elements apart, where the stride says how far. Columns of a wider matrix show it.

template <typename T>
__global__ void matmul_v2(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m, long long a_k, long long b_k,
                          long long b_n) {
    int tiles_n = (N + 15) / 16;
    int m = blockIdx.x / tiles_n * 16 + threadIdx.y;
    int n = blockIdx.x % tiles_n * 16 + threadIdx.x;
    if (m >= M || n >= N) return;
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * (long long)N + n * b_n];
    out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}
