// Wrong on purpose: square_v2_bwd whose tail forgets the factor 2. Whole vectors are right, so only sizes with a tail show it.
#include "common/math.cuh"
#include "common/vec.cuh"

template <typename T, int N>
__global__ void square_v2_bwd(T* dx, const T* x, const T* dout, long long n) {
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        Vec<T, N> v = load_vec<T, N>(x + i), g = load_vec<T, N>(dout + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = T(2 * load_as(v.v[j]) * load_as(g.v[j]));
        store_vec(dx + i, v);
    } else {
        for (; i < n; i++) dx[i] = T(load_as(x[i]) * load_as(dout[i]));
    }
}
