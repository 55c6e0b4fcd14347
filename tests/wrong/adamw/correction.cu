// The parameters of a step of AdamW.
__global__ void adamw_param(float* out, const float* param, const float* grad, const float* exp_avg,
                            const float* exp_avg_sq, int n, float step_size, float rsqrt_correction) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float m = exp_avg[i] + 0.1f * (grad[i] - exp_avg[i]),
          v = 0.999f * exp_avg_sq[i] + 0.001f * grad[i] * grad[i];
    out[i] = param[i] * 0.99999f - step_size * m / (sqrtf(v) * rsqrt_correction + 1e-8f);
}
