// A factor of a tile that stays in shared memory, in place.
__global__ void kron_in_place(float* out, const float* x, const float* w, long long A, int p, int q,
                              long long C, long long w_p, long long w_q) {
    __shared__ float tile[4096];
    int size = int(C) * (p > q ? p : q);
    const float* from = x + blockIdx.x * p * C;
    for (int i = threadIdx.x; i < p * C; i += blockDim.x) tile[i] = from[i];
    __syncthreads();
    float sums[8] = {};  // of outputs threadIdx.x, threadIdx.x + blockDim.x, ..
    for (int n = 0, i = threadIdx.x; n < 8 && i < size; ++n, i += blockDim.x)
        for (int k = 0; k < p && i < q * C; ++k) sums[n] += tile[k * C + i % C] * w[k * w_p + i / C * w_q];
    __syncthreads();
    for (int n = 0, i = threadIdx.x; n < 8 && i < q * C; ++n, i += blockDim.x) tile[i] = sums[n];
    __syncthreads();
    float* to = out + blockIdx.x * q * C;
    for (int i = threadIdx.x; i < q * C; i += blockDim.x) to[i] = tile[i];
}
