// relu2: out = max(x, 0)^2 and its gradient dx = 2 max(x, 0) dout. One thread per element.
#include "common/math.cuh"  // of cukern: load_as, float for 16-bit types

template <typename T>
__global__ void relu2(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    auto v = load_as(x[i]);
    out[i] = T(v > 0 ? v * v : 0);
}

template <typename T>
__global__ void relu2_bwd(T* dx, const T* x, const T* dout, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    auto v = load_as(x[i]);
    dx[i] = T(v > 0 ? 2 * v * load_as(dout[i]) : 0);
}
