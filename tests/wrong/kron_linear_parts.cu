// kron_linear_v4_sum. Bug: the places in the second array are those in all of them.
template <typename T>
__global__ void __launch_bounds__(1024)
kron_linear_v4_sum(T* out0, T* out1, T* out2, T* out3, T* out4, T* out5, T* out6, T* out7, const float* partials, int n0, int n1, int n2,
                   int n3, int n4, int n5, int n6, int n7, int pieces, double scale) {
    __shared__ double sums[32][32];
    T* outs[] = {out0, out1, out2, out3, out4, out5, out6, out7};
    int counts[] = {n0, n1, n2, n3, n4, n5, n6, n7}, all = n0 + n1 + n2 + n3 + n4 + n5 + n6 + n7;
    int at = blockIdx.x * 32 + threadIdx.x;
    double sum = 0;
    if (at < all)
        for (int piece = threadIdx.y; piece < pieces; piece += 32) sum += partials[(long long)piece * all + at];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || at >= all) return;
    for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
    for (int i = 0; i < 8; ++i) {
        if (at >= 0 && at < counts[i]) outs[i][at] = T(sum * scale);
        at -= i * counts[i];
    }
}
