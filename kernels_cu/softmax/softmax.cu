// softmax and log_softmax along the rows of a matrix, and their gradients.
//
//     softmax:      y = exp(scale x - m) / sum(exp(scale x - m))         dx = scale y (g - sum(y g))
//     log_softmax:  y = scale x - m - log(sum(exp(scale x - m)))         dx = scale (g - exp(y) sum(g))
//
// m is the row's largest scale x. Values are computed in float (double for double) and rounded once.
//
// Layout     x is (rows, columns), with rows `x_row` elements apart, and g with rows `g_row` apart. The other
//            tensors are contiguous. 16-byte vectors are aligned in the output. Rows of x or g with another
//            alignment, as in a slice x[:, :50257] of padded rows, are loaded by words or realigned in shared
//            memory (row_storage.cuh). Offsets are 64-bit.
// Algorithm  v1 to v5, the ladder, are in ladder.cu. v6 to v10 keep a row on chip and read it once
//            (one_pass.cuh). Each of them leaves the rows that it does not speed up to the previous one, and
//            the rest to softmax_two_pass (two_pass.cuh).
// Launch     1-D grids. The comment of each kernel gives the grid, the block, and the dynamic shared memory
//            of v8 to v10.
//
// H200, speed relative to a copy of the same bytes, with that of the backward in parentheses, for 1024x1024
// float:
//
// version  idea                                                                             speed
// v6       row in the registers of up to 32 lanes, read once                                0.51 (0.87)
// v7       row in the registers of a block; a few longer rows are divided into pieces,      1.10 (0.95)
//          in two launches
// v8       also shared memory, filled by cp.async (sm_80)                                   the same
// v9       clusters, mailboxes in shared memory (sm_90)                                     the same
// v10      several blocks per row, mailbox in global memory                                 the same
//
// v10        8192x1024    8192x4096    8192x16384   4096x50257   4096x50304   1024x131072  512x1M
// float      1.03 (1.03)  0.99 (1.04)  0.99 (1.03)  0.97 (1.03)  0.98 (1.03)  0.98 (1.01)  0.91 (0.91)
// bfloat16   1.08 (1.02)  1.02 (1.05)  0.98 (1.02)  0.98 (1.02)  0.98 (1.03)  0.96 (1.00)  0.93 (0.93)
//
// Speeds above 1: consecutive launches overlap (pdl.cuh), which the driver's copies do not.
// Experiments and dead ends: docs/notes/softmax.md
#include "common/ptx/launch.cuh"
#include "one_pass.cuh"
#include "two_pass.cuh"

// ---- two passes over a row, in a loop over 16-byte vectors: rows that v6 to v10 do not keep, and v5 of
// log_softmax

template <typename T>
__global__ void softmax_two_pass(T* out, const T* x, long long rows, long long columns, long long x_row,
                                 double scale, bool log) {
    __shared__ WarpPartials<T> partials;
    Exponential<T> exponential(scale, log);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        compute_t<T> largest;
        sum_t<T> sum;
        const T* from = x + row * x_row;
        T* to = out + row * columns;
        scan_columns(from, Span(0, columns), block_loop(from, 0, columns), exponential, largest, sum);
        merge_block(exponential, partials, largest, sum);
        Normalizer<T> normalizer(exponential, largest, sum, log, largest);
        write_columns<false>(to, from, Span(0, columns), block_loop(to, 0, columns), normalizer);
        __syncthreads();
    }
}

template <typename T>
__global__ void softmax_two_pass_bwd(T* dx, const T* y, const T* g, long long rows, long long columns,
                                     long long g_row, double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, log);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *ys = y + row * columns, *gs = g + row * g_row;
        T* to = dx + row * columns;
        compute_t<T> total = block_reduce<Sum>(
            sum_terms(ys, gs, Span(0, columns), block_loop(ys, 0, columns), gradient), sums);
        write_gradients<false>(to, ys, gs, Span(0, columns), block_loop(to, 0, columns), total, gradient);
        __syncthreads();
    }
}

// ---- v6 and v7: the row in registers

// Grid ceil(rows / (blockDim.x / width)), block 128. LANES is width, or 0 for any power of 2; rows with edges
// need a width of at least the elements of 2 vectors. In the last warp, lanes beyond the last row take part
// with an empty row.
template <typename T, int VECTORS, int LANES, bool EXACT, bool LOG>
__global__ void __launch_bounds__(128)
    softmax_v6(T* out, const T* x, long long rows, int columns, long long x_row, int width, double scale) {
    wait_for_previous();
    WarpTeam team(LANES ? LANES : width);
    long long row = blockIdx.x * (long long)(128 / team.width) + threadIdx.x / team.width;
    if (row >= rows) row = columns = 0;
    team_softmax<VECTORS, false, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns,
                                                    team, scale, Sink{});
}

template <typename T, int VECTORS, int LANES, bool EXACT, bool LOG>
__global__ void __launch_bounds__(128) softmax_v6_bwd(T* dx, const T* y, const T* g, long long rows,
                                                      int columns, long long g_row, int width, double scale) {
    wait_for_previous();
    WarpTeam team(LANES ? LANES : width);
    long long row = blockIdx.x * (long long)(128 / team.width) + threadIdx.x / team.width, at = row * columns;
    if (row >= rows) row = at = columns = 0;
    team_gradient<VECTORS, false, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns,
                                                     team, scale, SinkGradient{});
}

// Two rows of 64 threads each share a block, because half as many blocks cost less. An odd last row is
// computed twice. BLOCKS counts rows.
template <int THREADS>
constexpr int ROWS_PER_BLOCK = THREADS == 64 ? 2 : 1;

// Grid ceil(rows / ROWS_PER_BLOCK<THREADS>).
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS* ROWS_PER_BLOCK<THREADS>,
                                  ON_SM_90(BLOCKS / ROWS_PER_BLOCK<THREADS>))
    softmax_v7(T* out, const T* x, long long rows, int columns, long long x_row, double scale) {
    constexpr int ROWS = ROWS_PER_BLOCK<THREADS>;
    __shared__ WarpPartials<T> partials[ROWS];
    long long row =
        ROWS == 1 ? blockIdx.x : min(blockIdx.x * (long long)ROWS + threadIdx.x / THREADS, rows - 1);
    BlockTeam<T, THREADS, ROWS> team(partials[ROWS == 1 ? 0 : threadIdx.x / THREADS]);
    take_over(ROWS * columns * sizeof(T), BLOCKS * THREADS,
              [&] { prefetch_row(team, x + row * x_row, 0, columns); });
    auto prefetch_later = [&] {
        if constexpr (VECTORS * THREADS * sizeof(T) > 512)
            prefetch_later_row(BLOCKS, team, row, rows, columns, x, x_row);
    };
    team_softmax<VECTORS, false, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns,
                                                    team, scale, Sink{}, nullptr, prefetch_later);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v7_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    __shared__ WarpPartials<T> partials;
    long long row = blockIdx.x, at = row * columns;
    BlockTeam<T, THREADS> team(partials);
    prefetch_and_wait(BLOCKS * THREADS, team, columns, y + at, g + row * g_row);
    team_gradient<VECTORS, false, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns,
                                                     team, scale, SinkGradient{});
}

// A few rows that no block can hold: `pieces` blocks share each row, in two launches. `parts` are the results
// of the first launch for each piece, (rows, pieces, 2) or (rows, pieces). Grid rows * pieces; a block has at
// least `pieces` threads; a piece has `length` columns.

template <typename T>
__global__ void softmax_v7_scan(double* parts, const T* x, long long columns, long long x_row, int pieces,
                                long long length, double scale, bool log) {
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length,
              end = min(begin + length, columns);
    compute_t<T> largest;
    sum_t<T> sum;
    Exponential<T> exponential(scale, log);
    const T* from = x + row * x_row;
    scan_columns(from, Span(begin, end), block_loop(from, begin, end), exponential, largest, sum);
    merge_block(exponential, partials, largest, sum);
    if (threadIdx.x == 0) {
        parts[2LL * blockIdx.x] = largest;
        parts[2LL * blockIdx.x + 1] = sum;
    }
}

template <typename T>
__global__ void softmax_v7_write(T* out, const T* x, const double* parts, long long columns, long long x_row,
                                 int pieces, long long length, double scale, bool log) {
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length,
              stop = min(begin + length, columns);
    Exponential<T> exponential(scale, log);
    compute_t<T> largest = minus_infinity<compute_t<T>>();
    sum_t<T> sum = 0;
    if (threadIdx.x < pieces) {
        largest = parts[2 * (row * pieces + threadIdx.x)];
        sum = parts[2 * (row * pieces + threadIdx.x) + 1];
    }
    merge_block(exponential, partials, largest, sum);
    Normalizer<T> normalizer(exponential, largest, sum, log, largest);
    const T* from = x + row * x_row;
    T* to = out + row * columns;
    write_columns<false>(to, from, Span(begin, stop), block_loop(to, begin, stop), normalizer);
}

template <typename T>
__global__ void softmax_v7_scan_bwd(double* parts, const T* y, const T* g, long long columns, long long g_row,
                                    int pieces, long long length, double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length,
              end = min(begin + length, columns);
    Gradient<T> gradient(scale, log);
    const T* ys = y + row * columns;
    compute_t<T> sum = sum_terms(ys, g + row * g_row, Span(begin, end), block_loop(ys, begin, end), gradient);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <typename T>
__global__ void softmax_v7_write_bwd(T* dx, const T* y, const T* g, const double* parts, long long columns,
                                     long long g_row, int pieces, long long length, double scale, bool log) {
    using C = compute_t<T>;
    __shared__ C sums[32];
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length,
              end = min(begin + length, columns), at = row * columns;
    C total = block_reduce<Sum>(threadIdx.x < pieces ? C(parts[row * pieces + threadIdx.x]) : C(0), sums);
    Gradient<T> gradient(scale, log);
    write_gradients<false>(dx + at, y + at, g + row * g_row, Span(begin, end),
                           block_loop(dx + at, begin, end), total, gradient);
}

// ---- v8 to v10: the row in registers and shared memory, of one block or of several that alternate. Grid:
// rows times the blocks per row. Dynamic shared memory: 16 bytes for each vector of a thread beyond VECTORS;
// backward twice that, for y and g. 16-bit rows that need realignment take 16 bytes more for each warp and
// round (RowPart::trailing).

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v8(T* out, const T* x, int columns, long long x_row, double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    long long row = blockIdx.x;
    BlockTeam<T, THREADS> team(partials);
    // before it is copied to shared memory
    prefetch_row(team, x + row * x_row, VECTORS * THREADS * ELEMENTS<T>, columns);
    prefetch_and_wait(BLOCKS * THREADS, team, columns, x + row * x_row);
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns,
                                                   team, scale, Sink{}, dynamic_shared);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v8_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    long long row = blockIdx.x, at = row * columns;
    BlockTeam<T, THREADS> team(partials);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns,
                                                    team, scale, SinkGradient{}, dynamic_shared);
}

#if __CUDA_ARCH__ >= 900
template <typename T, int VECTORS, int THREADS, int BLOCKS, int SIZE, bool EXACT, bool LOG>
__global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v9(T* out, const T* x, int columns, long long x_row, double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    __shared__ unsigned long long words[SIZE];
    ClusterMailbox<SIZE> mailbox(words);
    long long row = blockIdx.x / SIZE;
    MultiBlockTeam<T, THREADS, ClusterMailbox<SIZE>> team(partials, mailbox);
    prefetch_and_wait(BLOCKS * THREADS, team, min(columns, VECTORS * SIZE * THREADS * ELEMENTS<T>),
                      x + row * x_row);  // only the part that goes to registers
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns,
                                                   team, scale, Sink{}, dynamic_shared);
    mailbox.wait_before_exit();
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, int SIZE, bool EXACT, bool LOG>
__global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v9_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    __shared__ unsigned long long words[SIZE];
    ClusterMailbox<SIZE> mailbox(words);
    wait_for_previous();
    long long row = blockIdx.x / SIZE, at = row * columns;
    MultiBlockTeam<T, THREADS, ClusterMailbox<SIZE>> team(partials, mailbox);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns,
                                                    team, scale, SinkGradient{}, dynamic_shared);
    mailbox.wait_before_exit();
}
#endif

// `words`: one per block, all 0.
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v10(T* out, const T* x, unsigned long long* words, int size, int columns, long long x_row,
                double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    long long row = blockIdx.x / size;
    GlobalMailbox mailbox(words, size);
    MultiBlockTeam<T, THREADS, GlobalMailbox> team(partials, mailbox);
    prefetch_later_chunk(BLOCKS, team, columns, x, x_row);
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns,
                                                   team, scale, Sink{}, dynamic_shared);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v10_bwd(T* dx, const T* y, const T* g, unsigned long long* words, int size, int columns,
                    long long g_row, double scale) {
    extern __shared__ Vector<float> dynamic_shared[];
    __shared__ WarpPartials<T> partials;
    wait_for_previous();
    long long row = blockIdx.x / size, at = row * columns;
    GlobalMailbox mailbox(words, size);
    MultiBlockTeam<T, THREADS, GlobalMailbox> team(partials, mailbox);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns,
                                                    team, scale, SinkGradient{}, dynamic_shared);
}

// ---- along a dimension that is not the last: x is (outer, columns, inner) and contiguous. Neighbouring
// threads take neighbouring rows, so accesses are coalesced. Grid ceil(outer * inner / blockDim.x).

template <typename T>
__global__ void softmax_inner(T* out, const T* x, long long rows, long long columns, long long inner,
                              double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x,
              at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Exponential<T> exponential(scale, log);
    C largest = minus_infinity<C>();
    Accumulator<C> sum;
    for (long long i = 0; i < columns; ++i)
        largest = max(largest, exponential.to_u(load_as(x[at + i * inner])));
    for (long long i = 0; i < columns; ++i)
        sum.add(exponential(exponential.to_u(load_as(x[at + i * inner])), exponential.base(largest)));
    Normalizer<T> normalizer(exponential, largest, sum.sum, log, largest);
    for (long long i = 0; i < columns; ++i)
        out[at + i * inner] = T(normalizer.from_x(load_as(x[at + i * inner])));
}

template <typename T>
__global__ void softmax_inner_bwd(T* dx, const T* y, const T* g, long long rows, long long columns,
                                  long long inner, double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x,
              at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Gradient<T> gradient(scale, log);
    Accumulator<C> total;
    for (long long i = 0; i < columns; ++i)
        total.add(gradient.term(load_as(y[at + i * inner]), load_as(g[at + i * inner])));
    for (long long i = 0; i < columns; ++i)
        dx[at + i * inner] = T(gradient(load_as(y[at + i * inner]), load_as(g[at + i * inner]), total.sum));
}

// The same for few long rows: the blockDim.y threads of a row take every blockDim.y-th column, and have
// several loads in flight.

constexpr int SHARED_ROW_THREADS = 1024;  // the most per block

// The maximum of the threads that share a row, or their sum in a fixed order.
template <bool MAX, typename C>
__device__ __forceinline__ C of_row(C value) {
    __shared__ C values[SHARED_ROW_THREADS];
    __syncthreads();
    values[threadIdx.y * blockDim.x + threadIdx.x] = value;
    __syncthreads();
    C largest = value;
    Accumulator<C> sum;
    for (int i = threadIdx.x; i < blockDim.x * blockDim.y; i += blockDim.x) {
        if (MAX) largest = max(largest, values[i]);
        else sum.add(values[i]);
    }
    return MAX ? largest : sum.sum;
}

// f(offset, a's element, b's element) for each of the thread's columns. b may be null.
template <typename T, class F>
__device__ __forceinline__ void each_column(long long columns, long long inner, const T* a, const T* b, F f) {
    // loads in flight of each operand; with more, float spills on some GPUs
    constexpr int N = 16 / sizeof(T);
    for (long long first = threadIdx.y; first < columns; first += N * blockDim.y) {
        compute_t<T> of_a[N], of_b[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            long long i = first + j * blockDim.y;
            if (i >= columns) continue;
            of_a[j] = load_as(a[i * inner]);
            if (b) of_b[j] = load_as(b[i * inner]);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            long long i = first + j * blockDim.y;
            if (i < columns) f(i * inner, of_a[j], of_b[j]);
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(SHARED_ROW_THREADS)
    softmax_shared_inner(T* out, const T* x, long long rows, long long columns, long long inner, double scale,
                         bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x,
              start = row / inner * columns * inner + row % inner;
    if (row >= rows) columns = 0;  // no return: the block synchronizes
    Exponential<T> exponential(scale, log);
    C largest = minus_infinity<C>();
    Accumulator<C> sum;
    x += start;
    out += start;
    each_column<T>(columns, inner, x, nullptr,
                   [&](long long, C v, C) { largest = max(largest, exponential.to_u(v)); });
    largest = of_row<true>(largest);
    each_column<T>(columns, inner, x, nullptr, [&](long long, C v, C) {
        sum.add(exponential(exponential.to_u(v), exponential.base(largest)));
    });
    Normalizer<T> normalizer(exponential, largest, of_row<false>(sum.sum), log, largest);
    each_column<T>(columns, inner, x, nullptr,
                   [&](long long at, C v, C) { out[at] = T(normalizer.from_x(v)); });
}

template <typename T>
__global__ void __launch_bounds__(SHARED_ROW_THREADS)
    softmax_shared_inner_bwd(T* dx, const T* y, const T* g, long long rows, long long columns,
                             long long inner, double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x,
              start = row / inner * columns * inner + row % inner;
    if (row >= rows) columns = 0;
    Gradient<T> gradient(scale, log);
    Accumulator<C> total;
    y += start;
    g += start;
    dx += start;
    each_column(columns, inner, y, g,
                [&](long long, C of_y, C of_g) { total.add(gradient.term(of_y, of_g)); });
    C sum = of_row<false>(total.sum);
    each_column(columns, inner, y, g,
                [&](long long at, C of_y, C of_g) { dx[at] = T(gradient(of_y, of_g, sum)); });
}
