// Wrong on purpose: square_v2 without its tail. Where n is no multiple of N, the last n % N elements are never written.
#include "common/math.cuh"
#include "common/vec.cuh"

template <typename T, int N>
__global__ void square_v2(T* out, const T* x, long long n) {
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        Vec<T, N> v = load_vec<T, N>(x + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = T(load_as(v.v[j]) * load_as(v.v[j]));
        store_vec(out + i, v);
    }
}
