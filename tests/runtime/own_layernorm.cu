// layernorm over the last dimension, with its gradients: the kernels of own_layernorm.py.
#include <cuda_bf16.h>

// The sum over a thread block of 256 threads, in all of them.
__device__ float block_sum(float v) {
    __shared__ float part[8];
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < 8; w++) v += part[w];
    return v;
}
template <typename T>
__global__ void ln(T* out, float* mean, float* rstd, const T* x, const T* w, const T* b, int n) {
    long long row = blockIdx.x * (long long)n;
    float s = 0, q = 0;
    for (int i = threadIdx.x; i < n; i += 256) s += float(x[row + i]);
    float m = block_sum(s) / n;
    for (int i = threadIdx.x; i < n; i += 256) q += (float(x[row + i]) - m) * (float(x[row + i]) - m);
    float r = rsqrtf(block_sum(q) / n + 1e-5f);
    for (int i = threadIdx.x; i < n; i += 256) {
        out[row + i] = T((float(x[row + i]) - m) * r * float(w[i]) + float(b[i]));
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = m, rstd[blockIdx.x] = r;
}
template <typename T>
__global__ void ln_dx(T* dx, const T* dout, const T* x, const T* w, const float* mean, const float* rstd,
                      int n) {
    long long row = blockIdx.x * (long long)n;
    float m = mean[blockIdx.x], r = rstd[blockIdx.x], a = 0, c = 0;
    for (int i = threadIdx.x; i < n; i += 256) {
        float g = float(dout[row + i]) * float(w[i]);
        a += g, c += g * (float(x[row + i]) - m) * r;
    }
    a = block_sum(a) / n, c = block_sum(c) / n;
    for (int i = threadIdx.x; i < n; i += 256)
        dx[row + i] = T(r * (float(dout[row + i]) * float(w[i]) - a - (float(x[row + i]) - m) * r * c));
}
template <typename T>
__global__ void ln_dw(T* dw, T* db, const T* dout, const T* x, const float* mean, const float* rstd, int rows,
                      int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = 0, c = 0;
    for (int row = 0; row < rows; row++) {
        long long at = row * (long long)n + i;
        a += float(dout[at]) * (float(x[at]) - mean[row]) * rstd[row], c += float(dout[at]);
    }
    dw[i] = T(a), db[i] = T(c);
}
