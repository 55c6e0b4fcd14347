// The rotation of a slice; the elements behind it are copied.
__global__ void rope_pairs(float* out, const float* x, const float* cos, const float* sin, int heads,
                           int head_dim, int half) {
    long long head = (long long)blockIdx.x * head_dim;
    int token = blockIdx.x / heads;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = x[head + i], b = x[head + half + i], c = cos[token * half + i], s = sin[token * half + i];
        out[head + i] = a * c - b * s;
        out[head + half + i] = b * c + a * s;
    }
    for (int i = 2 * half + threadIdx.x; i < head_dim; i += blockDim.x) out[head + i] = x[head + i];
}
