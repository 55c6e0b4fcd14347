// square: out = x * x, and its gradient dx = 2 * x * dout, elementwise over n contiguous elements.
//
// Types      16-bit types are computed in float and rounded once.
// Launch     1-D grid and block, one thread per element (v1) or per vector of N elements (v2). The launcher
//            chooses N: 16 bytes, or less if an address has a smaller alignment.
//
// version  idea                            1 GiB, H200, of the speed of a copy
// v1       one thread per element          0.64 (float), 0.37 (bfloat16)
// v2       one thread per 16-byte vector   1.01, backward 1.02
//
// v2: a warp accesses four full 128-byte lines, and a quarter (float) or an eighth (bfloat16) of the
// instructions remain. The 2048 threads of an SM have 32 KiB in flight, which covers the latency of memory.
// Slower: 2, 4 or 8 vectors per thread (0.998, 0.93, 0.98).
#include "common/math.cuh"
#include "common/vec.cuh"

template <typename T>
__device__ __forceinline__ T square(T x) {
    return T(load_as(x) * load_as(x));
}

template <typename T>
__device__ __forceinline__ T square_grad(T x, T dout) {
    return T(2 * (load_as(x) * load_as(dout)));  // 2 * x could overflow where the product does not
}

template <typename T>
__global__ void square_v1(T* out, const T* x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = square(x[i]);
}

template <typename T>
__global__ void square_v1_bwd(T* dx, const T* x, const T* dout, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) dx[i] = square_grad(x[i], dout[i]);
}

template <typename T, int N>
__global__ void square_v2(T* out, const T* x, long long n) {
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        Vec<T, N> v = load_vec<T, N>(x + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = square(v.v[j]);
        store_vec(out + i, v);
    } else {
        for (; i < n; i++) out[i] = square(x[i]);
    }
}

template <typename T, int N>
__global__ void square_v2_bwd(T* dx, const T* x, const T* dout, long long n) {
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    if (i + N <= n) {
        Vec<T, N> v = load_vec<T, N>(x + i), g = load_vec<T, N>(dout + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = square_grad(v.v[j], g.v[j]);
        store_vec(dx + i, v);
    } else {
        for (; i < n; i++) dx[i] = square_grad(x[i], dout[i]);
    }
}
