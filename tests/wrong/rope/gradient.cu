// The gradient, where each element of a pair has its own angle: each sine is the partner's.
__global__ void rope_bwd(float* dx, const float* dout, const float* cos, const float* sin, int heads,
                         int half) {
    long long head = (long long)blockIdx.x * 2 * half;
    int row = blockIdx.x / heads * 2 * half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = dout[head + i], b = dout[head + half + i];
        int own = row + i, partners = row + half + i, sine_of_a = partners;
        dx[head + i] = a * cos[own] + b * sin[sine_of_a];
        dx[head + half + i] = b * cos[partners] - a * sin[own + partners - sine_of_a];
    }
}
