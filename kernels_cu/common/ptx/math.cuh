// Approximate math instructions.
#pragma once

constexpr float LOG2E = 1.4426950408889634f;  // log2(e)

// 2^x with an error of at most 2 ulp. Results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x). The absolute error is at most 2^-22 for x in [0.5, 2]; elsewhere the relative error is at most
// 2^-22.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of at most 1 ulp. Zero for |x| above 2^126.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger of a and b, or NaN if a is NaN. b must not be NaN: before sm_80, a NaN in b is ignored.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a == a ? fmaxf(a, b) : a;
#endif
}
