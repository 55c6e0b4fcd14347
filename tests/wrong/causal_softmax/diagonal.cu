// Wrong on purpose: causal_softmax_v1 whose queries do not see their own key.
#include "softmax/two_pass.cuh"

template <typename T>
__global__ void causal_softmax_v1(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                  long long keys, long long x_matrix, long long x_row, long long window, double scale) {
    __shared__ WarpPartials<T> partials;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long query = row % queries;
        Span span(0, min(max(query + keys - queries, 0LL), keys), keys);
        const T* from = x + row / queries * x_matrix + query * x_row;
        compute_t<T> largest;
        sum_t<T> sum;
        scan_columns(from, span, block_loop(from, 0, span.end), exponential, largest, sum);
        merge_block(exponential, partials, largest, sum);
        if (sum == 0) sum = 1;
        write_columns<true>(out + row * keys, from, span, block_loop(from, 0, keys), Normalizer<T>(exponential, largest, sum, false, largest));
        __syncthreads();
    }
}
