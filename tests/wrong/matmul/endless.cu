// Wrong on purpose: matmul_v1 that counts k in 8 bits. Where K is more than 255, k never gets there.

template <typename T>
__global__ void matmul_v1(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m, long long a_k, long long b_k,
                          long long b_n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)M * N) return;
    int m = i % M, n = i / M;
    T sum = 0;
    for (unsigned char k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + (bias ? bias[n] : T(0));
}
