// The second moments in chunks of vectors.
#include "common/vec.cuh"

constexpr int CHUNK = 512;

__global__ void adamw_moments(float* out, const float* grad, const float* exp_avg_sq, int n) {
    int begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, n), tail = end - end % 4;
    for (int i = begin + threadIdx.x * 4; i < tail; i += blockDim.x * 4) {
        Vec<float, 4> g = load_vec<float, 4>(grad + i), v = load_vec<float, 4>(exp_avg_sq + i);
        for (int j = 0; j < 4; j++) v.v[j] = 0.999f * v.v[j] + 0.001f * g.v[j] * g.v[j];
        store_vec(out + i, v);
    }
    for (int i = tail + threadIdx.x; i < end; i += blockDim.x)
        out[i] = 0.999f * exp_avg_sq[i] + 0.001f * grad[i] * grad[i];
}
