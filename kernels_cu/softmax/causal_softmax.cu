// out = softmax(scale * x) along the rows of attention scores, each over the keys that its query may see; and its gradient.
//
// x is (matrices x queries x keys). The matrices are aligned at their last query and key: query i sees key j if
// j <= i + keys - queries, and j > i + keys - queries - window. The others count for nothing, and 0 is written. A row that sees nothing,
// or -inf alone, is 0. Each matrix may have a sink: a logit that takes its share of every row's sum and writes nothing.
//
//     dx = scale y (g - sum(y g))       for the sink's share p of a row, whose own gradient is h:  dsink = p (h - sum(y g) - p h)
//
// x's columns lie side by side, its rows `x_row` and its matrices `x_matrix` elements apart, g's likewise; the others are contiguous.
//
//  version  idea
//  v1       one block a row, in turns of 16-byte vectors; read twice
//  v2       up to 32 lanes or a block a row, which stays in registers; zeros are written while the loads are under way
//
// H200, of a copy of the bytes that are seen and written, forward (backward). 48 matrices of 1024, float: v1 0.25 (0.61), v2 0.88 (0.96).
// v2, 192 of 1024 and 48 of 4096: float 0.915 (0.97), 0.92 (0.95), bfloat16 0.93 (0.96), 0.93 (0.96). What made it so, bfloat16, 4096: 0.72
// to 0.91 by no load before a row's own, fewer threads with more vectors each, and the diagonal's vectors as elements of a few threads
// instead of masks in all loops; 0.93 by the maximum in one instruction a warp. Kept exponentials, which softmax gains from, cost more
// registers than they save here: 0.87.
// Other lengths, by blocks of no more threads than a row has vectors: bfloat16 1500 0.50 (0.64) to 0.72 (0.79), 2048 0.70 (0.88) to 0.91
// (0.93), float 1500 0.43 (0.77) to 0.73 (0.93), 8192 0.48 (0.73) to 0.77 (0.95). Rows up to 256 are too short, and what is done once for
// each counts: 0.4 to 0.7. Blocks of 128 threads for those, not 64, are as fast.
// Float forward by 8 vectors a thread, not 4, since half of the instructions are done once a thread: 256 0.66 to 0.83, 1024, by whole
// warps, 0.893 to 0.915, 1500 0.71 to 0.81, 2048 0.84 to 0.91, 4096 0.87 to 0.925, 8192 0.74 to 0.92, 16384, by two blocks on a
// multiprocessor, 0.68 to 0.925; but 512 0.88 to 0.84, and bfloat16 of 4096 0.925 to 0.91. Left to itself the compiler took 52 registers,
// not 48, and there were four blocks of 256 threads on a multiprocessor, not five: 0.90 to 0.834. Sums in double within the warps: 0.91 to
// 0.88. Rows in backward's order: float 1024 0.915 to 0.93, 4096 as fast, but 512 0.88 to 0.82, bfloat16 0.925 to 0.885.
#include "common/ptx/launch.cuh"
#include "one_pass.cuh"
#include "two_pass.cuh"

// What a row of the scores sees, of which `hidden` queries of its matrix come later. Index is int where a row is held on chip.
template <typename Index>
__device__ __forceinline__ Index seen_end(long long hidden, Index keys) {
    return keys - Index(min(hidden, (long long)keys));
}
template <typename Index>
__device__ __forceinline__ Index seen_begin(Index end, Index keys, long long window) {
    return max(end - Index(min(window, (long long)keys)), Index(0));
}

// Grid matrices * queries, or less.
template <typename T>
__global__ void causal_softmax_v1(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                  long long keys, long long x_matrix, long long x_row, long long window, double scale) {
    __shared__ Found<T> found;
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < matrices * queries; row += gridDim.x) {
        long long matrix = row / queries, query = row % queries;
        long long last = seen_end(queries - 1 - query, keys);
        Span span(seen_begin(last, keys, window), last, keys);
        const T* from = x + matrix * x_matrix + query * x_row;
        Sink extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
        compute_t<T> own;
        sum_t<T> sum;
        scan_columns(from, span, block_turns(from, span.begin, span.end), exponential, own, sum);
        merge_block(exponential, found, own, sum);
        compute_t<T> largest = extra.largest(own);
        sum = extra.add_to<true>(sum * exponential.rescale(own, exponential.base(largest)), largest, exponential, threadIdx.x == 0);
        End<T> end(exponential, largest, sum, false, largest);
        T* to = out + row * keys;
        write_columns<true>(to, from, span, block_turns(to, 0, keys), end);
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
        long long last = seen_end(queries - 1 - query, keys);
        Span span(seen_begin(last, keys, window), last, keys);
        const T *ys = y + row * keys, *gs = g + matrix * g_matrix + query * g_row;
        SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr, dsink ? dsink + row : nullptr};
        compute_t<T> own = sum_terms(ys, gs, span, block_turns(ys, span.begin, span.end), gradient);
        compute_t<T> total = extra.add_to(block_reduce<Sum>(own, sums), threadIdx.x == 0);
        T* to = dx + row * keys;
        write_gradients<true>(to, ys, gs, span, block_turns(to, 0, keys), total, gradient);
        __syncthreads();
    }
}

// number / queries; by 64 bits it takes a hundred instructions.
__device__ __forceinline__ long long matrix_of(long long number, long long queries) {
    return (number | queries) >> 31 ? number / queries : unsigned(number) / unsigned(queries);
}

// v2. A team takes one row, the number-th. Beyond the last matrix it takes part in its warp's reductions, with an empty row.
template <int VECTORS, bool EXACT, class Team, typename T>
__device__ __forceinline__ void row_softmax(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries,
                                            int keys, long long x_matrix, long long x_row, long long window, double scale, long long row,
                                            Team& team) {
    long long matrix = matrix_of(row, queries), query = row - matrix * queries;
    Sink extra{sink ? sink + matrix : nullptr, share ? share + row : nullptr, scale};
    int end = seen_end(queries - 1 - query, keys), begin = seen_begin(end, keys, window);
    if (matrix >= matrices) {
        matrix = query = row = begin = end = keys = 0;
        extra = Sink{};
    }
    team_softmax<VECTORS, false, true, EXACT, false>(out + row * keys, x + matrix * x_matrix + query * x_row, begin, end, keys, team, scale,
                                                     extra);
}

template <int VECTORS, bool EXACT, class Team, typename T>
__device__ __forceinline__ void row_gradient(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad,
                                             long long matrices, long long queries, int keys, long long g_matrix, long long g_row,
                                             long long window, double scale, long long number, Team& team) {
    // The first query, the last, the second, the last but one, ...: long rows and short ones at the same time.
    long long matrix = matrix_of(number, queries), i = number - matrix * queries, query = i % 2 ? queries - 1 - i / 2 : i / 2;
    long long row = matrix * queries + query;
    SinkGradient extra{share ? share + row : nullptr, share_grad ? share_grad + row : nullptr, dsink ? dsink + row : nullptr};
    int end = seen_end(queries - 1 - query, keys), begin = seen_begin(end, keys, window);
    if (matrix >= matrices) {
        matrix = query = row = begin = end = keys = 0;
        extra = SinkGradient{};
    }
    team_gradient<VECTORS, false, true, EXACT, false>(dx + row * keys, y + row * keys, g + matrix * g_matrix + query * g_row, begin, end,
                                                      keys, team, scale, extra);
}

// Grid ceil(matrices * queries / (THREADS / width)); WIDTH as in softmax_v6.
template <typename T, int VECTORS, int WIDTH, int THREADS, bool EXACT>
__global__ void __launch_bounds__(THREADS)
    causal_softmax_v2_warp(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries, int keys,
                           long long x_matrix, long long x_row, long long window, double scale, int width) {
    wait_for_previous();
    Lanes team(WIDTH ? WIDTH : width);
    long long row = blockIdx.x * (long long)(THREADS / team.width) + threadIdx.x / team.width;
    row_softmax<VECTORS, EXACT>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale, row, team);
}

template <typename T, int VECTORS, int WIDTH, int THREADS, bool EXACT>
__global__ void __launch_bounds__(THREADS)
    causal_softmax_v2_warp_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad,
                               long long matrices, long long queries, int keys, long long g_matrix, long long g_row, long long window,
                               double scale, int width) {
    wait_for_previous();
    Lanes team(WIDTH ? WIDTH : width);
    long long number = blockIdx.x * (long long)(THREADS / team.width) + threadIdx.x / team.width;
    row_gradient<VECTORS, EXACT>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row, window, scale, number, team);
}

// Grid matrices * queries.
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    causal_softmax_v2(T* out, double* share, const T* x, const double* sink, long long matrices, long long queries, int keys,
                      long long x_matrix, long long x_row, long long window, double scale) {
    __shared__ Found<T> found;
    wait_for_previous();
    Block<T, THREADS> team(found);
    row_softmax<VECTORS, EXACT>(out, share, x, sink, matrices, queries, keys, x_matrix, x_row, window, scale, blockIdx.x, team);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    causal_softmax_v2_bwd(T* dx, double* dsink, const T* y, const T* g, const double* share, const double* share_grad, long long matrices,
                          long long queries, int keys, long long g_matrix, long long g_row, long long window, double scale) {
    __shared__ Found<T> found;
    wait_for_previous();
    Block<T, THREADS> team(found);
    row_gradient<VECTORS, EXACT>(dx, dsink, y, g, share, share_grad, matrices, queries, keys, g_matrix, g_row, window, scale, blockIdx.x,
                                 team);
}
