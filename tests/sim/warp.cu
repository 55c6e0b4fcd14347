// What lanes of a warp, and threads of a block, do together: each kernel writes all that it sees.

extern "C" __global__ void shuffles(int* out, const int* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = in[i], r = 0;
    unsigned all = 0xffffffffu;
    out[r++ * n + i] = __shfl_sync(all, v, v & 31);
    out[r++ * n + i] = __shfl_sync(all, v, v & 7, 8);
    out[r++ * n + i] = __shfl_up_sync(all, v, 1);
    out[r++ * n + i] = __shfl_up_sync(all, v, 5, 16);
    out[r++ * n + i] = __shfl_down_sync(all, v, 3);
    out[r++ * n + i] = __shfl_down_sync(all, v, 9, 16);
    out[r++ * n + i] = __shfl_xor_sync(all, v, 16);
    out[r++ * n + i] = __shfl_xor_sync(all, v, 5, 8);
    out[r++ * n + i] = (int)(__shfl_xor_sync(all, (long long)v * v, 3) >> 7);
    out[r++ * n + i] = __float_as_int(__shfl_down_sync(all, __int_as_float(v), 2));
    int inside;
    asm volatile("{ .reg .pred p; shfl.sync.up.b32 %0|p, %1, 3, 0, 0xffffffff; selp.b32 %0, 1, 0, p; }"
                 : "=r"(inside) : "r"(v));
    out[r++ * n + i] = inside;
    asm volatile("{ .reg .pred p; shfl.sync.down.b32 %0|p, %1, 3, 0x101f, 0xffffffff; selp.b32 %0, 1, 0, p; }"
                 : "=r"(inside) : "r"(v));
    out[r++ * n + i] = inside;
    asm volatile("{ .reg .pred p; shfl.sync.idx.b32 %0|p, %1, 9, 0x181f, 0xffffffff; selp.b32 %0, 1, 0, p; }"
                 : "=r"(inside) : "r"(v));
    out[r++ * n + i] = inside;
    if (threadIdx.x % 32 < 20) {
        out[r++ * n + i] = __shfl_sync(0xfffff, v, (v & 15) + 4);
        out[r++ * n + i] = __shfl_xor_sync(0xfffff, v, 1);
    }
}

extern "C" __global__ void votes(int* out, const int* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = in[i], r = 0, whole;
    unsigned all = 0xffffffffu;
    out[r++ * n + i] = __ballot_sync(all, v & 1);
    out[r++ * n + i] = __any_sync(all, (v & 63) == 0);
    out[r++ * n + i] = __all_sync(all, v & 0xff);
    asm volatile("{ .reg .pred p, q; setp.gt.s32 p, %1, 0; vote.sync.uni.pred q, p, 0xffffffff; "
                 "selp.b32 %0, 1, 0, q; }"
                 : "=r"(whole) : "r"(v));
    out[r++ * n + i] = whole;
    out[r++ * n + i] = __match_any_sync(all, v & 3);
    out[r++ * n + i] = __match_any_sync(all, (long long)(v & 1) << 40);
    out[r++ * n + i] = __match_all_sync(all, i / 64, &whole);
    out[r++ * n + i] = whole;
    out[r++ * n + i] = __match_all_sync(all, v & 1, &whole);
    out[r++ * n + i] = whole;
    out[r++ * n + i] = __activemask();
    if (threadIdx.x % 32 >= 7) {
        out[r++ * n + i] = __ballot_sync(0xffffff80, v & 2);
        out[r++ * n + i] = __match_any_sync(0xffffff80, v & 1);
    }
}

extern "C" __global__ void reductions(int* out, const int* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = in[i], r = 0;
    unsigned all = 0xffffffffu;
    out[r++ * n + i] = __reduce_add_sync(all, v);
    out[r++ * n + i] = __reduce_min_sync(all, v);
    out[r++ * n + i] = __reduce_max_sync(all, v);
    out[r++ * n + i] = __reduce_min_sync(all, (unsigned)v);
    out[r++ * n + i] = __reduce_max_sync(all, (unsigned)v);
    out[r++ * n + i] = __reduce_and_sync(all, (unsigned)v | 0xf0f0f0f0u);
    out[r++ * n + i] = __reduce_or_sync(all, (unsigned)v & 0x11111111u);
    out[r++ * n + i] = __reduce_xor_sync(all, (unsigned)v);
    if (threadIdx.x % 2) out[r++ * n + i] = __reduce_add_sync(0xaaaaaaaau, v);
    int t = threadIdx.x;
    out[9 * n + i] = __syncthreads_count(v & 1);
    out[10 * n + i] = __syncthreads_and(v & 0xff);
    out[11 * n + i] = __syncthreads_or(t == 5 && (v & 1));
}

// Sums that many threads make of the same words, in global and in shared memory: only the totals are
// determined.
extern "C" __global__ void atomics(int* totals, long long* wide, float* floats, double* doubles,
                                   const int* in) {
    __shared__ int shared[8];
    int v = in[blockIdx.x * blockDim.x + threadIdx.x], t = threadIdx.x;
    if (t < 8) shared[t] = t == 2 ? 0x7fffffff : t == 5 ? -1 : 0;
    __syncthreads();
    unsigned* bits = (unsigned*)totals;
    atomicAdd(totals + 0, v);
    atomicSub(totals + 1, v);
    atomicMin(totals + 2, v);
    atomicMax(totals + 3, v);
    atomicMin(bits + 4, (unsigned)v);
    atomicMax(bits + 5, (unsigned)v);
    atomicAnd(totals + 6, v | 0x0ff00ff0);
    atomicOr(totals + 7, v & 0x01010101);
    atomicXor(totals + 8, v);
    atomicInc(bits + 9, 100);
    atomicDec(bits + 10, 77);
    atomicAdd(totals + 11 + (v & 3), 1);
    atomicAdd((unsigned long long*)wide, (unsigned long long)v);
    atomicMax(wide + 1, (long long)v << 20);
    atomicMin((unsigned long long*)wide + 2, (unsigned long long)v);
    atomicAdd(floats + 0, (float)(v & 255));
    atomicAdd(doubles + 0, (double)v);
    atomicAdd(shared + 0, v);
    atomicXor(shared + 1, v);
    atomicMin(shared + 2, v);
    atomicMax(shared + 3, v);
    atomicOr(shared + 4, v & 0x100);
    atomicAnd(shared + 5, v);
    int old = atomicOr(shared + 6, 0), seen;
    do { seen = old; old = atomicCAS(shared + 6, seen, seen + (v & 15)); } while (old != seen);
    atomicAdd((float*)shared + 7, (float)(v & 7));
    __syncthreads();
    if (t < 8) totals[16 + blockIdx.x * 8 + t] = shared[t];
}

// Old values, of words that each thread has to itself.
extern "C" __global__ void exchanges(int* out, int* words, const int* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, v = in[i], r = 0;
    int* w = words + i;
    out[r++ * n + i] = atomicExch(w, v);
    out[r++ * n + i] = atomicAdd(w, 3);
    out[r++ * n + i] = atomicCAS(w, v + 3, v ^ 5);
    out[r++ * n + i] = atomicCAS(w, v, 7);
    out[r++ * n + i] = atomicMin(w, -5);
    out[r++ * n + i] = atomicInc((unsigned*)w, 0x80000000u);
    out[r++ * n + i] = atomicDec((unsigned*)w, 0x80000000u);
    out[r++ * n + i] = __float_as_int(atomicAdd((float*)w, 1.5f));
    out[r++ * n + i] = atomicXor(w, v);
}
