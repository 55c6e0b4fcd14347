// ldmatrix and cp.async, with nothing around them.

#define W2(X) "=r"(X[0]), "=r"(X[1])
#define W4(X) "=r"(X[0]), "=r"(X[1]), "=r"(X[2]), "=r"(X[3])

// 64 threads: each warp loads four tiles, out of order, in the six ways that there are.
extern "C" __global__ void ldmatrix(int* out, const int* in) {
    __shared__ __align__(16) int tile[2][32 * 4];  // 32 rows of 16 bytes a warp
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = 0, d[4];
    for (int i = lane; i < 128; i += 32) tile[warp][i] = in[(blockIdx.x * 2 + warp) * 128 + i];
    __syncwarp();
    unsigned address = (unsigned)__cvta_generic_to_shared(&tile[warp][(lane * 5 % 32) * 4]);
    int* o = out + blockIdx.x * 14 * 64 + threadIdx.x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(address));
    o[r++ * 64] = d[0];
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(d[0]) : "r"(address));
    o[r++ * 64] = d[0];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : W2(d) : "r"(address));
    for (int i = 0; i < 2; ++i) o[r++ * 64] = d[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : W2(d) : "r"(address));
    for (int i = 0; i < 2; ++i) o[r++ * 64] = d[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : W4(d) : "r"(address));
    for (int i = 0; i < 4; ++i) o[r++ * 64] = d[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : W4(d) : "r"(address));
    for (int i = 0; i < 4; ++i) o[r++ * 64] = d[i];
}

// 64 threads copy to shared memory in three groups, and read what their neighbours copied.
extern "C" __global__ void async_copies(int* out, const int* in) {
    __shared__ __align__(16) int a[64], b[64 * 2], c[64 * 4], z[64 * 4];
    int t = threadIdx.x, i = blockIdx.x * 64 + t, peer = t ^ 37;
    auto to = [](void* p) { return (unsigned)__cvta_generic_to_shared(p); };
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to(a + t)), "l"(in + i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;"
                 :: "r"(to(b + 2 * t)), "l"(in + 2 * i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(to(c + 4 * t)), "l"(in + 4 * i) : "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to(z + 4 * t)), "l"(in + 4 * i), "r"(t % 5 * 4) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 2;" ::: "memory");
    __syncthreads();
    out[i * 11] = a[peer];
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    for (int k = 0; k < 2; ++k) out[i * 11 + 1 + k] = b[2 * peer + k];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    for (int k = 0; k < 4; ++k) out[i * 11 + 3 + k] = c[4 * peer + k];
    for (int k = 0; k < 4; ++k) out[i * 11 + 7 + k] = z[4 * peer + k];
}
