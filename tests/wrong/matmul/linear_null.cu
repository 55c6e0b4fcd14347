// Wrong on purpose: matmul_v2 that does not ask whether there is a bias.

template <typename T>
__global__ void matmul_v2(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m, long long a_k, long long b_k,
                          long long b_n) {
    int tiles_n = (N + 15) / 16;
    int m = blockIdx.x / tiles_n * 16 + threadIdx.y;
    int n = blockIdx.x % tiles_n * 16 + threadIdx.x;
    if (m >= M || n >= N) return;
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + bias[n];
}
