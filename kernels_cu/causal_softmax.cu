// out = softmax(scale * x) along the rows of attention scores, each over the keys that its query may see; and its gradient.
//
// x is (matrices x queries x keys). The matrices are aligned at their last query and key: query i sees key j if
// j <= i + keys - queries, and j > i + keys - queries - window. Of the others nothing is read, and 0 is written. A row that sees nothing,
// or -inf alone, is 0. Each matrix may have a sink: a logit that takes its share of every row's sum and writes nothing.
//
//     dx = scale y (g - sum(y g))       for the sink's share p of a row, whose own gradient is h:  dsink = p (h - sum(y g) - p h)
//
// x's columns lie side by side, its rows `x_row` and its matrices `x_matrix` elements apart, g's likewise; the others are contiguous.
//
//  version  idea
//  v1       one block a row, in turns of 16-byte vectors; read twice
//  v2       up to 32 lanes or a block a row, which stays in registers; the first row and the last, the second and the last but one, ... go
//           to one team, so that all have equally much to do
#include "common/softmax_rows.cuh"

// What a row of the scores sees.
__device__ __forceinline__ Span seen(long long query, long long queries, long long keys, long long window) {
    long long end = min(max(query + keys - queries + 1, 0LL), keys);
    return Span(min(max(query + keys - queries + 1 - window, 0LL), end), end, keys);
}

// Grid matrices * queries, or less.
template <typename T>
__global__ void causal_softmax_v1(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                  long long keys, long long x_matrix, long long x_row, long long window, double scale) {
    using C = compute_t<T>;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long matrix = row / queries, query = row % queries;
        Span span = seen(query, queries, keys, window);
        const T* from = x + matrix * x_matrix + query * x_row;
        Sink<C> extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
        C largest, sum;
        scan_columns(from, span, exponential, largest, sum);
        block_scan(exponential, extra, largest, sum);
        C base = extra.base(largest);
        Normalise<T> normalise(exponential, base, finish<true>(sum, base, extra, threadIdx.x == 0), false);
        write_columns<true>(out + row * keys, from, span, normalise);
        __syncthreads();
    }
}

template <typename T>
__global__ void causal_softmax_v1_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad,
                                      long long matrices, long long queries, long long keys, long long g_matrix, long long g_row,
                                      long long window, double scale) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, false);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long matrix = row / queries, query = row % queries;
        Span span = seen(query, queries, keys, window);
        const T *ys = y + row * keys, *gs = g + matrix * g_matrix + query * g_row;
        SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr, dsink ? dsink + row : nullptr};
        compute_t<T> total = extra.finish(block_reduce<Sum>(sum_terms(ys, gs, span, gradient), sums), threadIdx.x == 0);
        write_gradients<true>(dx + row * keys, ys, gs, span, total, gradient);
        __syncthreads();
    }
}

// v2: grid ceil(matrices * ceil(queries / 2) / teams of a block). `pair` counts the pairs of rows of all matrices.
template <int VECTORS, class Team, typename T>
__device__ __forceinline__ void pair_softmax(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                             int keys, long long x_matrix, long long x_row, long long window, double scale, long long pair,
                                             const Team& team) {
    long long pairs = (queries + 1) / 2, matrix = pair / pairs;
    for (int second = 0; second < 2; ++second) {
        long long query = second ? queries - 1 - pair % pairs : pair % pairs, row = matrix * queries + query;
        Span span = seen(query, queries, keys, window);
        Sink<compute_t<T>> extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
        const T* from = x + matrix * x_matrix + query * x_row;
        T* to = out + row * keys;
        if (matrix >= matrices) {  // a team with nothing to do takes part in the warp's reductions with an empty row
            span = Span(0, 0);
            from = x, to = out, extra = Sink<compute_t<T>>{};
        }
        team_softmax<VECTORS, true>(to, from, span, team, scale, false, extra);
    }
}

template <int VECTORS, class Team, typename T>
__device__ __forceinline__ void pair_gradient(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad,
                                              long long matrices, long long queries, int keys, long long g_matrix, long long g_row,
                                              long long window, double scale, long long pair, const Team& team) {
    long long pairs = (queries + 1) / 2, matrix = pair / pairs;
    for (int second = 0; second < 2; ++second) {
        long long query = second ? queries - 1 - pair % pairs : pair % pairs, row = matrix * queries + query, at = row * keys;
        Span span = seen(query, queries, keys, window);
        SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr, dsink ? dsink + row : nullptr};
        const T* gs = g + matrix * g_matrix + query * g_row;
        if (matrix >= matrices) {
            span = Span(0, 0);
            at = 0, gs = g, extra = SinkGradient{};
        }
        team_gradient<VECTORS, true>(dx + at, y + at, gs, span, team, scale, false, extra);
        __syncthreads();  // before the second row's sum overwrites the first's
    }
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(128) causal_softmax_v2_warp(T* out, double* share, const T* x, const double* sink, long long matrices,
                                                              long long queries, int keys, long long x_matrix, long long x_row,
                                                              long long window, double scale, int width) {
    long long pair = blockIdx.x * (long long)(blockDim.x / width) + threadIdx.x / width;
    pair_softmax<VECTORS>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale, pair, Lanes(width));
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(128) causal_softmax_v2_warp_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share,
                                                                  const double* share_grad, long long matrices, long long queries,
                                                                  int keys, long long g_matrix, long long g_row, long long window,
                                                                  double scale, int width) {
    long long pair = blockIdx.x * (long long)(blockDim.x / width) + threadIdx.x / width;
    pair_gradient<VECTORS>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row, window, scale, pair, Lanes(width));
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(512) causal_softmax_v2(T* out, double* share, const T* x, const double* sink, long long matrices,
                                                         long long queries, int keys, long long x_matrix, long long x_row,
                                                         long long window, double scale) {
    __shared__ compute_t<T> shared[64];
    Block<compute_t<T>> team(shared);
    pair_softmax<VECTORS>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale, blockIdx.x, team);
}

template <typename T, int VECTORS>
__global__ void __launch_bounds__(512) causal_softmax_v2_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share,
                                                             const double* share_grad, long long matrices, long long queries, int keys,
                                                             long long g_matrix, long long g_row, long long window, double scale) {
    __shared__ compute_t<T> shared[64];
    Block<compute_t<T>> team(shared);
    pair_gradient<VECTORS>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row, window, scale, blockIdx.x, team);
}
