// The squares of rows, by vectors where each row starts at a multiple of 16 bytes.
#include "common/vec.cuh"

// A block a row, a thread 4 elements.
__global__ void square_rows(float* out, const float* x, int n) {
    out += blockIdx.x * (long long)n, x += blockIdx.x * (long long)n;
    int i = threadIdx.x * 4;
    if (n % 4 == 0 && i + 4 <= n) {
        Vec<float, 4> v = load_vec<float, 4>(x + i);
#pragma unroll
        for (int j = 0; j < 4; j++) v.v[j] *= v.v[j];
        store_vec(out + i, v);
    } else {
        for (int end = min(i + 4, n); i < end; i++) out[i] = x[i] * x[i];
    }
}
