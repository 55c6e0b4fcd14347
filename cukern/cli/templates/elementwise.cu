// my_op: out = x * sigmoid(x) elementwise (silu), and its gradient dx.
//
// Layout  n contiguous elements. 16-bit types are computed in float and rounded once.
// Launch  1-D grid, 256 threads per block, one thread per element.
#include "common/math.cuh"  // of cukern: load_as, which converts 16-bit types to float

template <typename T>
__global__ void my_op_fwd(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        auto a = load_as(x[i]);
        out[i] = T(a / (1 + exp(-a)));
    }
}

template <typename T>
__global__ void my_op_bwd(T* dx, const T* x, const T* dout, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) {
        auto a = load_as(x[i]);
        auto s = 1 / (1 + exp(-a));
        dx[i] = T(load_as(dout[i]) * s * (1 + a * (1 - s)));
    }
}
