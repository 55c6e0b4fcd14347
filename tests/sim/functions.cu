// CUDA's own mathematics, which is many instructions a call. Large arguments take the long way of sinf and
// cosf.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void single(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
    float x = in[i], y = in[n + i], s, c;
    out[r++ * n + i] = expf(x);
    out[r++ * n + i] = logf(fabsf(x));
    out[r++ * n + i] = tanhf(x);
    out[r++ * n + i] = powf(fabsf(x), y);
    out[r++ * n + i] = erff(x);
    out[r++ * n + i] = rsqrtf(fabsf(x));
    out[r++ * n + i] = sqrtf(fabsf(x));
    out[r++ * n + i] = x / y;
    out[r++ * n + i] = fmodf(x, y);
    out[r++ * n + i] = log1pf(fabsf(x));
    out[r++ * n + i] = exp2f(x);
    out[r++ * n + i] = cbrtf(x);
    sincosf(x, &s, &c);
    out[r++ * n + i] = s;
    out[r++ * n + i] = c;
    out[r++ * n + i] = x / (1.0f + __expf(-x));
    out[r++ * n + i] = 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

extern "C" __global__ void twofold(double* out, const double* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
    // beyond 1e5, sin calls a function, which the simulator does not
    double x = in[i], y = in[n + i], angle = fabs(x) < 1e5 ? x : 0.5;
    out[r++ * n + i] = exp(x);
    out[r++ * n + i] = log(fabs(x));
    out[r++ * n + i] = tanh(x);
    out[r++ * n + i] = sin(angle);
    out[r++ * n + i] = cos(angle);
    out[r++ * n + i] = rsqrt(fabs(x));
    out[r++ * n + i] = sqrt(fabs(x));
    out[r++ * n + i] = x / y;
    out[r++ * n + i] = log2(fabs(x) + y * y);
    out[r++ * n + i] = erf(x);
}

extern "C" __global__ void halves(__half* out, const __half* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
    __half x = in[i], y = in[n + i];
    out[r++ * n + i] = __hadd_rn(__hmul_rn(x, y), x);  // x * y + x would be the compiler's to fuse
    out[r++ * n + i] = x / y;
    out[r++ * n + i] = hexp(x);
    out[r++ * n + i] = hlog(__habs(x));
    out[r++ * n + i] = htanh(x);
    out[r++ * n + i] = hsqrt(__habs(x));
    out[r++ * n + i] = hsin(x);
    __half2 p = __halves2half2(x, y), q = __hfma2(p, p, __low2half2(p));
    out[r++ * n + i] = __low2half(q);
    out[r++ * n + i] = __high2half(q);
    out[r++ * n + i] = __high2half(h2exp(p));
}

extern "C" __global__ void brains(__nv_bfloat16* out, const __nv_bfloat16* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = 0;
    __nv_bfloat16 x = in[i], y = in[n + i];
    out[r++ * n + i] = __hadd_rn(__hmul_rn(x, y), x);  // x * y + x would be the compiler's to fuse
    out[r++ * n + i] = x / y;
    out[r++ * n + i] = hexp(x);
    out[r++ * n + i] = hlog(__habs(x));
    out[r++ * n + i] = htanh(x);
    out[r++ * n + i] = hsqrt(__habs(x));
    out[r++ * n + i] = hsin(x);
    __nv_bfloat162 p = __halves2bfloat162(x, y), q = __hfma2(p, p, __low2bfloat162(p));
    out[r++ * n + i] = __low2bfloat16(q);
    out[r++ * n + i] = __high2bfloat16(q);
    out[r++ * n + i] = __high2bfloat16(h2exp(p));
}
