// Wrong on purpose: causal_softmax_v1_bwd whose next row's sum overwrites this one's while a slow warp still reads it.
#include "softmax/two_pass.cuh"

template <typename T>
__global__ void causal_softmax_v1_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad,
                                      long long matrices, long long queries, long long keys, long long g_matrix, long long g_row,
                                      long long window, double scale) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, false);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long query = row % queries;
        Span span(0, min(max(query + keys - queries + 1, 0LL), keys), keys);
        const T *ys = y + row * keys, *gs = g + row / queries * g_matrix + query * g_row;
        compute_t<T> total = block_reduce<Sum>(sum_terms(ys, gs, span, block_loop(ys, 0, span.end), gradient), sums);
        write_gradients<true>(dx + row * keys, ys, gs, span, block_loop(ys, 0, keys), total, gradient);
        // no __syncthreads()
    }
}
