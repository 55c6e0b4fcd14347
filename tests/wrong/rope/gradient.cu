// Wrong on purpose: the gradient as the rotation by minus the angle, where each element has its own: each sine must be the partner's. With
// the same angle for both elements of a pair it is right.
__global__ void rope_bwd(float* dx, const float* dout, const float* cos, const float* sin, int heads, int half) {
    long long head = (long long)blockIdx.x * 2 * half;
    int row = blockIdx.x / heads * 2 * half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = dout[head + i], b = dout[head + half + i];
        int own = row + i, partners = row + half + i, sine_of_a = own;
        dx[head + i] = a * cos[own] + b * sin[sine_of_a];
        dx[head + half + i] = b * cos[partners] - a * sin[own + partners - sine_of_a];
    }
}
