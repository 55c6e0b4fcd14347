// my_op: out = x / sqrt(mean(x^2) + eps) over each row (RMS normalization), and its gradient dx.
//
// Layout  x is (rows, cols), contiguous. 16-bit types are computed in float.
// Launch  one thread block of THREADS threads per row.
#include "common/math.cuh"  // of cukern: load_as and compute_t, float for 16-bit types

constexpr int THREADS = 256;

// The sum over the thread block, returned to all of its threads.
template <typename T>
__device__ T block_sum(T v) {
    __shared__ T partial[THREADS / 32];
    for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffff, v, lane);
    __syncthreads();  // the previous call may still read partial
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int warp = 0; warp < THREADS / 32; warp++) v += partial[warp];
    return v;
}

template <typename T>
__global__ void my_op_fwd(T* out, compute_t<T>* scale, const T* x, int cols, double eps) {
    x += blockIdx.x * (long long)cols;
    out += blockIdx.x * (long long)cols;
    compute_t<T> sum = 0;
    for (int i = threadIdx.x; i < cols; i += THREADS) sum += load_as(x[i]) * load_as(x[i]);
    compute_t<T> s = 1 / sqrt(block_sum(sum) / cols + compute_t<T>(eps));
    for (int i = threadIdx.x; i < cols; i += THREADS) out[i] = T(load_as(x[i]) * s);
    if (threadIdx.x == 0) scale[blockIdx.x] = s;
}

template <typename T>
__global__ void my_op_bwd(T* dx, const T* x, const compute_t<T>* scale, const T* dout, int cols) {
    x += blockIdx.x * (long long)cols;
    dx += blockIdx.x * (long long)cols;
    dout += blockIdx.x * (long long)cols;
    compute_t<T> s = scale[blockIdx.x], sum = 0;
    for (int i = threadIdx.x; i < cols; i += THREADS) sum += load_as(dout[i]) * load_as(x[i]) * s;
    compute_t<T> mean = block_sum(sum) / cols;
    for (int i = threadIdx.x; i < cols; i += THREADS) {
        dx[i] = T(s * (load_as(dout[i]) - load_as(x[i]) * s * mean));
    }
}
