// Wrong on purpose: square_v1 with a 16-bit index. From element 65536 on it starts again at 0, and the last elements are never written.
#include "common/math.cuh"

template <typename T>
__global__ void square_v1(T* out, const T* x, long long n) {
    unsigned short i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = T(load_as(x[i]) * load_as(x[i]));
}
