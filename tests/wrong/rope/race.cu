// In place with a thread for each element of a head.
__global__ void rope_elements(float* x, const float* cos, const float* sin, int heads, int half) {
    float* head = x + (long long)blockIdx.x * 2 * half;
    int token = blockIdx.x / heads, i = threadIdx.x, pair = token * half + i % half;
    float mine = head[i], other = head[(i + half) % (2 * half)];
    __syncthreads();
    head[i] = mine * cos[pair] + (i < half ? -other : other) * sin[pair];
}
