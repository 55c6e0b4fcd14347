// Wrong on purpose: embedding_v2_bwd_runs that leaves out the last chunk of a run.
#include "common/math.cuh"
#include "common/ptx/launch.cuh"

constexpr int CHUNK = 64;

__device__ __forceinline__ long long token_at(const void* tokens, bool wide, long long i) {
    return wide ? static_cast<const long long*>(tokens)[i] : static_cast<const int*>(tokens)[i];
}

__device__ __forceinline__ bool is_inside(long long token, long long vocabulary) { return token >= 0 && token < vocabulary; }

template <typename T>
__global__ void embedding_v2_bwd_runs(T* dweight, const compute_t<T>* partials, const void* sorted, long long rows, long long vocabulary,
                                      long long features, bool wide) {
    wait_for_previous();
    long long column = blockIdx.y * (long long)blockDim.x + threadIdx.x, chunk = blockIdx.x, first = chunk * CHUNK, next = first + CHUNK;
    if (column >= features || next >= rows) return;
    long long token = token_at(sorted, wide, next);
    if (!is_inside(token, vocabulary) || token_at(sorted, wide, next - 1) != token) return;
    if (first > 0 && token_at(sorted, wide, first - 1) == token) return;
    long long last = chunk + 1, beyond = (rows + CHUNK - 1) / CHUNK;  // bisection: the run reaches the start of `last`, not of `beyond`
    while (beyond - last > 1) {
        long long middle = (last + beyond) / 2;
        (token_at(sorted, wide, middle * CHUNK) == token ? last : beyond) = middle;
    }
    compute_t<T> sum = partials[(2 * chunk + 1) * features + column];
#pragma unroll 8
    for (long long i = chunk + 1; i < last; i++) sum += partials[2 * i * features + column];
    dweight[token * features + column] = T(sum);
}
