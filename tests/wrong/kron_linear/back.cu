// The backward of a factor whose array stays in shared memory: first the gradient of w,
// then dx in the place of x.
__global__ void kron_back(float* out, const float* x, const float* g, const float* w, int A, int p, int q) {
    __shared__ float xs[2048], gs[2048];
    for (int i = threadIdx.x; i < A * p; i += blockDim.x) xs[i] = x[i];
    for (int i = threadIdx.x; i < A * q; i += blockDim.x) gs[i] = g[i];
    __syncthreads();
    for (int i = threadIdx.x; i < p * q; i += blockDim.x) {
        float sum = 0;
        for (int a = 0; a < A; ++a) sum += xs[a * p + i / q] * gs[a * q + i % q];
        out[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < A * p; i += blockDim.x) {
        float back = 0;
        for (int j = 0; j < q; ++j) back += gs[i / p * q + j] * w[i % p * q + j];
        xs[i] = back;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < A * p; i += blockDim.x) out[p * q + i] = xs[i];
}
