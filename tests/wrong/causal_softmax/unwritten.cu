// Wrong on purpose: causal_softmax_v1 that leaves what is above the diagonal as it was.
#include "softmax/two_pass.cuh"

template <typename T>
__global__ void causal_softmax_v1(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                  long long keys, long long x_matrix, long long x_row, long long window, double scale) {
    __shared__ WarpPartials<T> partials;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long query = row % queries, end = min(max(query + keys - queries + 1, 0LL), keys);
        Span span(0, end);
        const T* from = x + row / queries * x_matrix + query * x_row;
        compute_t<T> largest;
        sum_t<T> sum;
        scan_columns(from, span, block_loop(from, 0, end), exponential, largest, sum);
        merge_block(exponential, partials, largest, sum);
        write_columns<true>(out + row * keys, from, span, block_loop(from, 0, keys), Normalizer<T>(exponential, largest, sum, false, largest));
        __syncthreads();
    }
}
