// Sums and maxima over the lanes of a warp and over the threads of a block. Every thread gets the same
// result, bit for bit.
#pragma once

template <typename C>
__device__ __forceinline__ C minus_infinity() {
    return static_cast<C>(__int_as_float(0xff800000));
}

struct Sum {
    template <typename C>
    static __device__ __forceinline__ C of(C a, C b) {
        return a + b;
    }
    template <typename C>
    static __device__ __forceinline__ C nothing() {
        return 0;
    }
};

// Ignores NaN, as fmaxf does.
struct Max {
    template <typename C>
    static __device__ __forceinline__ C of(C a, C b) {
        return max(a, b);
    }
    template <typename C>
    static __device__ __forceinline__ C nothing() {
        return minus_infinity<C>();
    }
};

// Reduce over groups of `width` neighbouring lanes, a power of 2. All 32 lanes must call it.
template <class Op, typename C>
__device__ __forceinline__ C warp_reduce(C value, int width = 32) {
    for (int apart = width / 2; apart > 0; apart /= 2)
        value = Op::of(value, __shfl_xor_sync(~0u, value, apart));
    return value;
}

// The maximum of floats over a whole warp. They are mapped to integers of the same order, which one
// instruction reduces. From sm_80 on, a NaN counts as larger than infinity, or as smaller than -infinity if
// its sign bit is set.
__device__ __forceinline__ float warp_max(float value) {
#if __CUDA_ARCH__ >= 800
    int bits = __float_as_int(value), sorted = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(sorted ^ (sorted >> 31 & 0x7fffffff));
#else
    return warp_reduce<Max>(value);
#endif
}
__device__ __forceinline__ double warp_max(double value) { return warp_reduce<Max>(value); }

// Reduce over a block of whole warps. `shared` has room for 32 values. A __syncthreads() must come before
// `shared` is used again.
template <class Op, typename C>
__device__ __forceinline__ C block_reduce(C value, C* shared) {
    int lane = threadIdx.x % 32;
    value = warp_reduce<Op>(value);
    if (lane == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_reduce<Op>(lane < blockDim.x / 32 ? shared[lane] : Op::template nothing<C>());
}

// Kahan summation in one thread: `lost` is the rounding error of the last addition.
template <typename C>
struct Accumulator {
    C sum = 0, lost = 0;
    __device__ __forceinline__ void add(C x) {
        C corrected = x - lost, next = sum + corrected;
        lost = (next - sum) - corrected;
        if (lost != lost) lost = 0;  // NaN after an infinity
        sum = next;
    }
};
