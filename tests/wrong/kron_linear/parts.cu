// kron_linear_v4_sum. Bug: the places in the second array are those in all of them.
template <typename T>
__global__ void __launch_bounds__(1024)
kron_linear_v4_sum(T* out0, T* out1, T* out2, T* out3, T* out4, T* out5, T* out6, T* out7, const float* partials0, const float* partials1,
                   const float* partials2, const float* partials3, const float* partials4, const float* partials5, const float* partials6,
                   const float* partials7, int n0, int n1, int n2, int n3, int n4, int n5, int n6, int n7, int row0, int row1, int row2,
                   int row3, int row4, int row5, int row6, int row7, int pieces, double scale) {
    __shared__ double sums[32][32];
    T* outs[] = {out0, out1, out2, out3, out4, out5, out6, out7};
    const float* all[] = {partials0, partials1, partials2, partials3, partials4, partials5, partials6, partials7};
    int counts[] = {n0, n1, n2, n3, n4, n5, n6, n7}, rows[] = {row0, row1, row2, row3, row4, row5, row6, row7};
    int at = blockIdx.x * 32 + threadIdx.x, row = 0;
    T* out = nullptr;
    const float* partials = nullptr;
    for (int i = 0; i < 8; ++i) {
        if (at >= 0 && at < counts[i]) {
            out = outs[i] + at;
            partials = all[i] + at;
            row = rows[i];
        }
        at -= i * counts[i];
    }
    double sum = 0;
    if (out)
        for (int piece = threadIdx.y; piece < pieces; piece += 32) sum += partials[(long long)piece * row];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || !out) return;
    for (int y = 1; y < 32; ++y) sum += sums[y][threadIdx.x];
    *out = T(sum * scale);
}
