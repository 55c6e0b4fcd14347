// Wrong on purpose: embedding_v2_bwd_few that leaves out the last row.
#include "common/math.cuh"
#include "common/ptx/launch.cuh"

template <typename T, typename S, int N>
__global__ void embedding_v2_bwd_few(T* dweight, const S* dout, const void* tokens, long long rows, long long vocabulary,
                                     long long features, bool wide, bool sorted) {
    wait_for_previous();
    long long row = blockIdx.x, column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * N, token = index_at(tokens, wide, row);
    if (threadIdx.y || column >= features || token < 0 || token >= vocabulary) return;
    for (long long i = 0; i < row; i++)
        if (index_at(tokens, wide, i) == token) return;
    compute_t<T> sum = 0;
    for (long long i = row; i + 1 < rows; i++)
        if (index_at(tokens, wide, i) == token) sum += load_as(dout[i * features + column]);
    dweight[token * features + column] = T(sum);
}
