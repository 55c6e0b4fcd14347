// Sums and maxima over the lanes of a warp and over the threads of a block. Every thread gets the result, with the same bits in each.
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

// A NaN is passed over, as by fmaxf.
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

// Over groups of `width` neighbouring lanes, a power of 2. All 32 lanes must call it.
template <class Op, typename C>
__device__ __forceinline__ C warp_reduce(C value, int width = 32) {
    for (int apart = width / 2; apart > 0; apart /= 2) value = Op::of(value, __shfl_xor_sync(~0u, value, apart));
    return value;
}

// The maximum of floats over a whole warp: as integers, of the same order, in one instruction.
__device__ __forceinline__ float warp_max(float value) {
#if __CUDA_ARCH__ >= 800
    int bits = __float_as_int(value), sorted = __reduce_max_sync(~0u, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(sorted ^ (sorted >> 31 & 0x7fffffff));
#else
    return warp_reduce<Max>(value);
#endif
}
__device__ __forceinline__ double warp_max(double value) { return warp_reduce<Max>(value); }

// Over a block of whole warps. `shared` has room for 32 values; before it is used again there must be a __syncthreads().
template <class Op, typename C>
__device__ __forceinline__ C block_reduce(C value, C* shared) {
    int lane = threadIdx.x % 32;
    value = warp_reduce<Op>(value);
    if (lane == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_reduce<Op>(lane < blockDim.x / 32 ? shared[lane] : Op::template nothing<C>());
}

// What one thread adds up, however many: Kahan's sum, which keeps what each addition rounds away.
template <typename C>
struct Accumulator {
    C sum = 0, lost = 0;
    __device__ __forceinline__ void add(C x) {
        C corrected = x - lost, next = sum + corrected;
        lost = (next - sum) - corrected;
        if (lost != lost) lost = 0;  // of infinities
        sum = next;
    }
};
