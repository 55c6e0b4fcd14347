// Wrong on purpose: square_v1 with <= where < belongs. Where n is no multiple of the block, one thread reads and writes element n.
#include "common/math.cuh"

template <typename T>
__global__ void square_v1(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i <= n) out[i] = T(load_as(x[i]) * load_as(x[i]));
}
