// causal_softmax: the softmax of scale * x along the rows of attention scores, over the keys that each query
// sees; and its gradient.
//
//     dx = scale y (g - sum(y g))
//     dsink = p (h - sum(y g) - p h)      p: the sink's share of a row, h: the gradient of p
//
// Masking    The last query and the last key of a matrix are aligned. Query i sees key j if j <= i + keys -
//            queries and j > i + keys - queries - window. Other keys do not count, and their result is 0. A
//            row that sees no key, or only -inf, is 0. Each matrix may have a sink: a logit that adds
//            exp(sink) to the sum of every row and has no result.
// Layout     x is (matrices, queries, keys). Its columns are contiguous, its rows `x_row` and its matrices
//            `x_matrix` elements apart; g likewise. The other tensors are contiguous. `sink`, `share` and
//            their gradients are double.
// Algorithm  v1 reads a row twice (two_pass.cuh). v2 keeps it in registers and reads it once (one_pass.cuh).
// Launch     1-D grids. v1 and v2: one block per row. v2_warp: `width` lanes of a warp per row.
//
// H200, forward (backward), speed relative to a copy of the bytes that are seen and written:
//
// version  idea                                                         48x1024 float  192x1024    48x4096
// v1       a block per row, in a loop over 16-byte vectors; reads x twice 0.25 (0.61)
// v2       the row stays in registers; zeros written while loading     0.88 (0.96)    0.91 (0.96) 0.91 (0.95)
//
// v2 in bfloat16: 192x1024 0.93 (0.96), 48x4096 0.92 (0.96). A size MxT is M matrices of T queries and T
// keys. Experiments and dead ends: docs/notes/softmax.md
#include "common/ptx/launch.cuh"
#include "one_pass.cuh"
#include "two_pass.cuh"

// The columns that a row sees. `later_queries` is how many queries of its matrix come after its own. Index is
// int if the row stays on chip.
template <typename Index>
__device__ __forceinline__ Index visible_end(long long later_queries, Index keys) {
    return keys - Index(min(later_queries, (long long)keys));
}
template <typename Index>
__device__ __forceinline__ Index visible_begin(Index end, Index keys, long long window) {
    return max(end - Index(min(window, (long long)keys)), Index(0));
}

// Grid: at most matrices * queries.
template <typename T>
__global__ void causal_softmax_v1(T* out, double* share, const T* x, const double* sink, long long matrices,
                                  long long queries, long long keys, long long x_matrix, long long x_row,
                                  long long window, double scale) {
    __shared__ WarpPartials<T> partials;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long matrix = row / queries, query = row % queries;
        long long end = visible_end(queries - 1 - query, keys);
        Span span(visible_begin(end, keys, window), end, keys);
        const T* from = x + matrix * x_matrix + query * x_row;
        Sink extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
        compute_t<T> columns_max;
        sum_t<T> sum;
        scan_columns(from, span, block_loop(from, span.begin, span.end), exponential, columns_max, sum);
        merge_block(exponential, partials, columns_max, sum);
        compute_t<T> largest = extra.combined_max(columns_max);
        sum = extra.add_to<true>(sum * exponential.rescale(columns_max, exponential.base(largest)), largest,
                                 exponential, threadIdx.x == 0);
        Normalizer<T> normalizer(exponential, largest, sum, false, largest);
        T* to = out + row * keys;
        write_columns<true>(to, from, span, block_loop(to, 0, keys), normalizer);
        __syncthreads();
    }
}

template <typename T>
__global__ void causal_softmax_v1_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share,
                                      const double* share_grad, long long matrices, long long queries,
                                      long long keys, long long g_matrix, long long g_row, long long window,
                                      double scale) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, false);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long matrix = row / queries, query = row % queries;
        long long end = visible_end(queries - 1 - query, keys);
        Span span(visible_begin(end, keys, window), end, keys);
        const T *ys = y + row * keys, *gs = g + matrix * g_matrix + query * g_row;
        SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr,
                           dsink ? dsink + row : nullptr};
        compute_t<T> sum = sum_terms(ys, gs, span, block_loop(ys, span.begin, span.end), gradient);
        compute_t<T> total = extra.add_to(block_reduce<Sum>(sum, sums), threadIdx.x == 0);
        T* to = dx + row * keys;
        write_gradients<true>(to, ys, gs, span, block_loop(to, 0, keys), total, gradient);
        __syncthreads();
    }
}

// row / queries. A 64-bit division takes a hundred instructions.
__device__ __forceinline__ long long matrix_of(long long row, long long queries) {
    return (row | queries) >> 31 ? row / queries : unsigned(row) / unsigned(queries);
}

// v2: a team computes one row. A team beyond the last matrix takes part in the reductions of its warp, with
// an empty row.
template <int VECTORS, bool EXACT, class Team, typename T>
__device__ __forceinline__ void row_softmax(T* out, double* share, const T* x, const double* sink,
                                            long long matrices, long long queries, int keys,
                                            long long x_matrix, long long x_row, long long window,
                                            double scale, long long row, Team& team) {
    long long matrix = matrix_of(row, queries), query = row - matrix * queries;
    Sink extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
    int end = visible_end(queries - 1 - query, keys), begin = visible_begin(end, keys, window);
    if (matrix >= matrices) {
        matrix = query = row = begin = end = keys = 0;
        extra = Sink{};
    }
    team_softmax<VECTORS, false, true, EXACT, false>(out + row * keys, x + matrix * x_matrix + query * x_row,
                                                     begin, end, keys, team, scale, extra);
}

template <int VECTORS, bool EXACT, class Team, typename T>
__device__ __forceinline__ void row_gradient(T* dx, double* dsink, const T* y, const T* g,
                                             const double* share, const double* share_grad,
                                             long long matrices, long long queries, int keys,
                                             long long g_matrix, long long g_row, long long window,
                                             double scale, long long number, Team& team) {
    // Row order: the first query, the last, the second, the last but one, and so on. So long and short rows
    // run at the same time.
    long long matrix = matrix_of(number, queries), i = number - matrix * queries,
              query = i % 2 ? queries - 1 - i / 2 : i / 2;
    long long row = matrix * queries + query;
    SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr,
                       dsink ? dsink + row : nullptr};
    int end = visible_end(queries - 1 - query, keys), begin = visible_begin(end, keys, window);
    if (matrix >= matrices) {
        matrix = query = row = begin = end = keys = 0;
        extra = SinkGradient{};
    }
    team_gradient<VECTORS, false, true, EXACT, false>(dx + row * keys, y + row * keys,
                                                      g + matrix * g_matrix + query * g_row, begin, end, keys,
                                                      team, scale, extra);
}

// Grid ceil(matrices * queries / (THREADS / width)). LANES as in softmax_v6.
template <typename T, int VECTORS, int LANES, int THREADS, bool EXACT>
__global__ void __launch_bounds__(THREADS)
    causal_softmax_v2_warp(T* out, double* share, const T* x, const double* sink, long long matrices,
                           long long queries, int keys, long long x_matrix, long long x_row, long long window,
                           double scale, int width) {
    wait_for_previous();
    WarpTeam team(LANES ? LANES : width);
    long long row = blockIdx.x * (long long)(THREADS / team.width) + threadIdx.x / team.width;
    row_softmax<VECTORS, EXACT>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale,
                                row, team);
}

template <typename T, int VECTORS, int LANES, int THREADS, bool EXACT>
__global__ void __launch_bounds__(THREADS)
    causal_softmax_v2_warp_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share,
                               const double* share_grad, long long matrices, long long queries, int keys,
                               long long g_matrix, long long g_row, long long window, double scale,
                               int width) {
    wait_for_previous();
    WarpTeam team(LANES ? LANES : width);
    long long number = blockIdx.x * (long long)(THREADS / team.width) + threadIdx.x / team.width;
    row_gradient<VECTORS, EXACT>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row,
                                 window, scale, number, team);
}

// Grid matrices * queries.
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    causal_softmax_v2(T* out, double* share, const T* x, const double* sink, long long matrices,
                      long long queries, int keys, long long x_matrix, long long x_row, long long window,
                      double scale) {
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    BlockTeam<T, THREADS> team(partials);
    row_softmax<VECTORS, EXACT>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale,
                                blockIdx.x, team);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    causal_softmax_v2_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share,
                          const double* share_grad, long long matrices, long long queries, int keys,
                          long long g_matrix, long long g_row, long long window, double scale) {
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    BlockTeam<T, THREADS> team(partials);
    row_gradient<VECTORS, EXACT>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row,
                                 window, scale, blockIdx.x, team);
}
