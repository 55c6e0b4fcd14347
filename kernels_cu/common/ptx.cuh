// Inline PTX: the instructions that CUDA C++ has no name for.
#pragma once

// cp.async (sm_80 and newer): copy BYTES (4, 8 or 16) from global to shared memory without passing through
// registers. The copy runs in the background; cp_async_wait says when it is done. Both addresses must be multiples
// of BYTES. Where `valid` is false nothing is read and zeros are written, so `src` may then point anywhere.
template <int BYTES>
__device__ __forceinline__ void cp_async(unsigned shared_dst, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_dst), "l"(src), "n"(BYTES), "r"(valid ? BYTES : 0)
                 : "memory");
}

// The same of 16 bytes, past the L1 cache, whatever they are.
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_dst), "l"(src) : "memory");
}
// Only so many of them, and zeros behind.
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src, bool valid) {
    cp_async_16(shared_dst, src, valid ? 16 : 0);
}

// Close the group of copies that this thread has issued since the last call.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING of this thread's newest groups are still under way. Other threads' copies are visible
// only after a barrier that follows.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The address of a shared-memory object as the 32-bit number that PTX instructions take.
__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// A barrier of some of a block's warps, `threads` threads; its number is 1 to 15.
__device__ __forceinline__ void barrier_of(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// The same of those who do not wait for the others.
__device__ __forceinline__ void arrive_at(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Fetch the 128 bytes that hold *p to the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// The same of those of so many bytes that begin at a multiple of 16, whole 16 of them (sm_90).
__device__ __forceinline__ void prefetch(const void* p, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    if (bytes >= 16)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(reinterpret_cast<unsigned long long>(p) & ~15ull),
                     "r"(bytes & ~15u));
#endif
}

// Programmatic dependent launch (sm_90 and newer). A kernel that calls this before it touches global memory, and whose Template says `pdl`,
// is put onto the multiprocessors while the kernels before it on the stream come to an end: from here on they have ended, and what they
// wrote is seen. It saves 0.2 to 0.6 us a launch on an H200.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once each block has called this or ended, the next such kernel's may come. ahead.cuh says when it pays.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Thread-block clusters (sm_90 and newer). The blocks of a cluster run at the same time and read and write each other's
// shared memory. `__cluster_dims__` of the kernel says how many they are, and the grid must be a multiple of it. NVRTC
// refuses that word for older GPUs, even in a template that nobody instantiates: put the kernel in
// `#if __CUDA_ARCH__ >= 900`.

// This block's number in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The cluster's barrier in two halves, between which a thread may do what concerns no other block. What a thread did
// before it arrived is seen by every thread of the cluster that has waited. Each thread arrives once, then waits once.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// To arrive and tell nobody of what was done before: enough at a kernel's start, for the others to know that this block
// runs and that its shared memory may be written.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// A __syncthreads() of the whole cluster. One must stand before the first access to another block's shared memory,
// since that block may not have started, and one after the last, since it may have exited.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The shared::cluster address of what lies in block `rank` of the cluster where `shared_address` lies in this one.
__device__ __forceinline__ unsigned shared_of_rank(unsigned shared_address, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
    return address;
}

// Load and store through such an address: a float, two at a multiple of 8 bytes, or four at one of 16.
template <typename T>
__device__ __forceinline__ T ld_cluster(unsigned address);
template <>
__device__ __forceinline__ float ld_cluster(unsigned address) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ float2 ld_cluster(unsigned address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ float4 ld_cluster(unsigned address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void st_cluster(unsigned address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void st_cluster(unsigned address, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void st_cluster(unsigned address, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}

// An mbarrier: 8 bytes of shared memory that count, in phases, `count` arrivals and the bytes that st_async brings. It costs no fence,
// where the cluster's barrier waits for all of a thread's stores, also to global memory. One thread makes it; then mbarriers_made() and a
// barrier of the cluster must come before others use it.
__device__ __forceinline__ void mbarrier_init(unsigned mbarrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrive, at another block's too (shared_of_rank): those who wait may write what this thread has read. Its own block sees what it wrote;
// another does not, unless a cluster_fence() comes before.
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Arrive at one of this block's, whose phase must also wait for so many bytes more.
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
// Wait until this block's mbarrier has ended its phase of that parity, 0 for the first; of 1 there seems to be one before the first.
__device__ __forceinline__ void mbarrier_wait(unsigned mbarrier, unsigned parity) {
    unsigned ended;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(ended)
                     : "r"(mbarrier), "r"(parity)
                     : "memory");
    } while (!ended);
}
// The same where only this block's threads arrive, which spares the L1 cache.
__device__ __forceinline__ void mbarrier_wait_in_block(unsigned mbarrier, unsigned parity) {
    unsigned ended;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(ended)
                     : "r"(mbarrier), "r"(parity)
                     : "memory");
    } while (!ended);
}
// Four floats to a block's shared memory, of which that block's mbarrier is told: who has waited for its phase sees them.
__device__ __forceinline__ void st_async(unsigned address, float4 x, unsigned mbarrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w), "r"(mbarrier)
                 : "memory");
}

// Write a word that other blocks wait for, and wait for one, which is not 0. Nothing else is told by it.
__device__ __forceinline__ void post(unsigned long long* to, unsigned long long word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ unsigned long long look(const unsigned long long* from) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ __forceinline__ unsigned long long wait_for(const unsigned long long* from) {
    unsigned long long word;
    do word = look(from);
    while (word == 0);
    return word;
}

// The same through the shared memory of a cluster's blocks, of another block to write and one's own to wait.
__device__ __forceinline__ void post_cluster(unsigned address, unsigned long long word) {
    asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(word) : "memory");
}
__device__ __forceinline__ unsigned long long wait_for_shared(unsigned address) {
    unsigned long long word;
    do {
        asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(address) : "memory");
    } while (word == 0);
    return word;
}
// What this thread wrote before is seen by those of the cluster that learn, by what it does next, that it did.
__device__ __forceinline__ void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

// 2^x with an error of at most 2 units in the last place; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The logarithm to base 2, with an error of at most 2^-22 where x is in [1/2, 2], else as many units in the last place.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of at most 1 unit in the last place; 0 for what is beyond 2^126.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger, or NaN where one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a == a ? fmaxf(a, b) : a;
#endif
}

// Read 8 or 16 bytes that other blocks will read again, among streams that nobody will: L2 keeps them longest (sm_80 and newer).
__device__ __forceinline__ void load_kept(uint2& to, const void* p) {
#if __CUDA_ARCH__ >= 800
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(to.x), "=r"(to.y) : "l"(p), "l"(policy));
#else
    to = *static_cast<const uint2*>(p);
#endif
}
__device__ __forceinline__ void load_kept(uint4& to, const void* p) {
#if __CUDA_ARCH__ >= 800
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(p), "l"(policy));
#else
    to = *static_cast<const uint4*>(p);
#endif
}

// Write 16 or 8 bytes without keeping their line in L1.
__device__ __forceinline__ void store_past_l1(void* p, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_past_l1(void* p, uint2 v) {
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// The nearest number that the tensor cores' TF32 can hold: 8 bits of exponent, 10 of fraction (sm_80 and newer). Of two as near
// the even one where an instruction rounds, from sm_90 on.
__device__ __forceinline__ float to_tf32(float x) {
    unsigned bits;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
    return __uint_as_float(bits);
}

constexpr float LARGEST_TF32 = 3.40116213e38f;  // and nearly so in bfloat16
// x, but the finite `most`, of its sign, for what is beyond, and for NaN.
__device__ __forceinline__ float limited(float x, float most) {
#if __CUDA_ARCH__ >= 860
    float y;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
#else
    return fmaxf(fminf(x, most), -most);
#endif
}

// x = big + small, for tensor cores: with small products before the big one, a b = small_a big_b + big_a small_b + big_a big_b but for
// 2^-22 of it. big is in TF32 and finite: small is what has the infinity or the NaN, so that none comes of their difference. small
// is exact, 12 bits at most of fraction and sign, of which tensor cores see 11: rounding it would be no better than their cutting.
__device__ __forceinline__ void split_tf32(float x, float& big, float& small) {
    big = __uint_as_float((__float_as_uint(limited(x, LARGEST_TF32)) + 0x1000) &
                          0xffffe000);  // to nearest: of a finite number in two instructions
    small = x - big;
}

// d += a b of a warp, a 16 x 8 and b 8 x 8, in TF32, added in float. Lane l, with g = l / 4 and t = l % 4, holds
// a[g + 8 i][t + 4 k] in a[i + 2 k], b[t + 4 k][g] in b[k] and d[g + 8 i][2 t + j] in d[2 i + j].
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// The same of 16-bit numbers, a 16 x 16 and b 16 x 8, two neighbours along k in a register: lane l holds a[g + 8 i][2 t + 8 k ..] in
// a[i + 2 k] and b[2 t + 8 k ..][g] in b[k].
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Tiles of 8 x 8 numbers of 16 bits from shared memory to a warp's registers, as mma takes them: lane 8 i + j has the address of row j of
// tile i, of 16 bytes. A lane gets numbers 2 t and 2 t + 1 of row g, or, where the tiles are TRANSPOSED, of column g.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tiles(unsigned (&tiles)[4], unsigned row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                     : "r"(row)
                     : "memory");
}
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tiles(unsigned (&tiles)[2], unsigned row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(tiles[0]), "=r"(tiles[1])
                     : "r"(row)
                     : "memory");
    else asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(tiles[0]), "=r"(tiles[1]) : "r"(row) : "memory");
}
