// out = softmax(scale * x) along rows, or its logarithm, and the gradients of both. A ladder.
//
//     softmax:      y = exp(scale x - m) / sum(exp(scale x - m))         dx = scale y (g - sum(y g))
//     log_softmax:  y = scale x - m - log(sum(exp(scale x - m)))         dx = scale (g - exp(y) sum(g))
//
// with m the row's largest scale x. x is (rows x columns); its rows may lie `x_row` elements apart, those of the outputs and of y are
// contiguous. Computed in float (double for double) and rounded once. v1 to v5 are the rungs of a course on GPT-2.
//
//  version  forward                                                      backward
//  v1       one thread a row: three passes over it                       one thread a column, for all rows: the sum over the whole
//                                                                        Jacobian, columns^2 terms a row
//  v2       one block a row; thread 0 adds up what the threads found     the same, groups of rows side by side
//  v3       trees in shared memory                                       every row side by side
//  v4       shuffles within a warp, shared memory between the warps      rows staged in shared memory
//  v5       16-byte vectors, maximum and sum in one pass                 the dot product: columns terms a row
//  v6       up to 32 threads a row, which stays in registers: it is read once
//  v7       a block a row, which stays in registers; a few longer rows are cut into pieces, for two launches
//  v8       what registers do not hold stays in shared memory, which asynchronous copies fill (sm_80)
//  v9       clusters of blocks hold a longer row, and tell one another through distributed shared memory (sm_90)
//  v10      so many blocks hold a row as it needs, and tell one another through global memory
//  v11                                                                   all of the GPU goes over the longest rows in step
//
// v6 to v11 each do what the last did where they have nothing better. Vectors of 16 bytes are those of the results; where rows of x or g
// begin elsewhere, as in a slice x[:, :50257] of padded rows, they are read by words, or put together in shared memory (row_storage.cuh).
//
// H200, of a copy's speed. 1024x1024 float, forward (backward): v1 0.01 (0.0001), v2 0.24 (0.002), v3 0.36 (0.006), v4 0.42 (0.008),
// v5 and v6 0.51 (0.87), v7 1.10 (0.95). v11:
//
//            8192x1024    8192x4096    8192x16384   4096x50257   4096x50304   1024x131072  512x1M
//  float     1.04 (1.04)  1.02 (1.03)  1.01 (1.02)  0.97 (1.02)  0.98 (1.02)  0.97 (1.00)  0.92 (1.00)
//  bfloat16  1.09 (1.03)  1.02 (1.04)  1.00 (1.01)  0.98 (1.01)  0.98 (1.02)  0.96 (0.99)  0.94 (1.00)
//
// It can be faster than a copy where neighbouring launches lie side by side (pdl.cuh), which the driver's copies do not: 8192x1024 in
// bfloat16 takes 8.65 us, of which its 34 MB need 7.8 at the 4.28 TB/s of a large copy.
//
// What made it so, in a copy's speed, bfloat16 but where said otherwise:
// * No load before a row's own. A constant that the compiler had put into global memory: 8192x16384 0.90 to 0.96.
// * Exponentials kept as floats, fewer and fuller threads: 8192x4096 0.96 to 0.98, 8192x16384 0.96 to 0.98.
// * Edges as elements of a few threads, not masks in every loop: 131072 0.79 to 0.87; cut at multiples of 128 bytes: float 50257 0.89 to 0.93.
// * Four blocks of 256 threads on a multiprocessor, not two of 512: 131072 0.87 to 0.92.
// * v10: 512x1M 0.78 to 0.92, float backward 0.58 to 0.86.
// * Programmatic dependent launch (ptx.cuh): 8192x1024 0.98 to 1.00, 8192x4096 0.98 to 0.99. With the first rows fetched to L2 meanwhile
//   (pdl.cuh) 1.00 to 1.05, as predicted, and with signals from five sixths of the last blocks, of which each has one for 64 threads, to
//   1.07; backward 0.97 to 1.08, float 0.985 to 1.03 and 1.00 to 1.05; float 1024x1024 0.87 to 1.09; 8192x4096 1.00 to 1.02. Short rows
//   (v6) 0.915 to 0.905, so they go without. Long rows 0.000 to 0.005.
// * What goes to shared memory is fetched to L2 before: 50304 0.967 to 0.985, 50257 0.958 to 0.976, 32768 0.984 to 1.000; float, with one
//   block on a multiprocessor, as before. Of all of the row, with what goes to registers: float 0.96 to 0.94.
// * Exponentials of what has come while the rest is on its way: float 50304 0.95 to 0.96, 50257 0.92 to 0.95, 1M 0.87 to 0.89; 131072 0.92
//   to 0.935, 1M 0.92 to 0.93.
// * Words, not a barrier, between the blocks of a cluster, which had taken 3.8 us of a block's 12 to 15 (row_reduction.cuh): float 131072 0.93 to 0.96,
//   its backward 0.96 to 0.99, that of bfloat16, now with two blocks of 512 threads on a multiprocessor, 0.96 to 1.00.
// * Backward of 1M by one block of 512 threads on a multiprocessor, which has 128 KB of each tensor, not 64 (float 32) in each of two (four):
//   0.907 to 0.923, float 0.835 to 0.880. Five blocks of 256 threads, not two of 512: float 131072 0.959 to 0.966.
// * Blocks that take turns at their row (row_storage.cuh), 4 KB each, instead of one piece each: 131072 0.934 to 0.946, float 0.962 to 0.974, float
//   50304 in clusters of four 0.958 to 0.976. Predicted by copies of the same accesses, without maths or waits: 64 KB a block, four on a
//   multiprocessor, 0.932 in pieces and 0.957 in turns; 32 KB, six, 0.941 and 0.974; 4 KB a block 1.00. Turns of 8 KB gain nothing, and the
//   backward of 131072 lost 0.01 by them. Where blocks share a row through global memory turns are as good as pieces.
// * Clusters instead of a block that has a multiprocessor to itself: float 50304 0.957 to 0.984, 50257 0.946 to 0.972 (four blocks);
//   backward of 50304, four of 256 threads, 1.026 to 1.035. Of 131072 three blocks of 512 threads, not four of 256, 0.946 to 0.954, with
//   what goes to registers fetched ahead 0.960; float as before. Backward of 131072, eight of 256 threads, 0.988 to 1.003.
// * Nothing spilled: a vector that was to be spilled was waited for before the copies to shared memory began. Backward of 1M by blocks of
//   512 threads, two on a multiprocessor, that spill 12 bytes 0.85, that spill none 0.92 to 0.94. Float, of 48 such blocks a row 0.897.
//   Even numbers of blocks a row are 1 to 4 % faster than odd ones, which is not explained. More in registers: softmax_plan.py.
// * Several vectors a lane also where a row is short, so that a warp has many rows' bytes under way: float rows of 64 columns 0.60 to 0.98, of
//   128 0.64 to 0.98, of 256 0.84 to 0.98; bfloat16 of 64 0.90 to 1.01, of 128 0.86 to 1.00.
// * Blocks of no more threads than a row has vectors: backward of 1536 0.73 to 1.00 (float 0.68 to 0.99), of 2048 0.86 to 1.04 (0.79 to 1.04).
//   Three or four blocks of 256 threads, not two of 512: float 6000 0.75 to 0.99, 8192 0.90 to 0.98.
// * Slices of padded rows are held too: bfloat16 50257 of 50304 0.19 to 0.87, float 0.93; 16383 of 16384 0.90, 0.96. g so: 0.79, 0.87.
// * v11: backward of 1M 0.934 to 1.003, float 0.907 to 1.004; of 64 such rows 0.843 to 0.954, 0.877 to 0.984 (grid_backward.cuh).
// * What a block reads that comes 4.5 MB later fetched to L2 (one_pass.cuh), in v7 once its own loads are asked for: float 1536 0.92 to 0.98,
//   4096, with four blocks of 256 threads on a multiprocessor, not five, 0.99 to 1.015, 8192 0.98 to 1.00, 16384 0.99 to 1.01, 1024 1.03 to
//   1.04; bfloat16 3072 0.945 to 1.00, 8192 1.00 to 1.016, 16384 0.985 to 1.00; 1M, where it comes before the own loads, 0.926 to 0.936, float
//   0.91 to 0.92. It was to fill the time between two launches, which it does not. Instead memory is read in the order of the blocks' numbers:
//   the wider the range that is under way at a time, the slower it is, also where it is only copied (a vector a thread 1.00, two 0.97, four
//   0.955, eight 0.945), whatever the distance from what is written. As fast for 1 to 4.5 MB, slower for more. Slower: rows of 2 KB 1.07
//   to 1.03; what comes to shared memory (50304 0.99 to 0.94, 131072 0.96 to 0.95); all of backward (4096 1.03 to 0.98, 1M 0.93 to 0.81).
// * Two rows of 1024 to a block: 1.070 to 1.075; four 1.06.
// * Clusters or crowds for up to 16 rows of 64 KB or more that a block could hold: 1x50257 6.4 to 4.0 us, float 11.6 to 5.4. With more rows
//   blocks are as fast or faster: float 33x32000 8.0 to 10.5, 100x32000 9.9 to 14.4.
//
// What is left of 131072 is how memory is accessed: a copy of the same accesses is no faster, and the less a multiprocessor has under way the
// faster it is (32 KB 1.00, 64 KB 0.97, 128 KB 0.96, 256 KB 0.93), however few loads of it are asked for at a time. And the end of a
// launch: 4096 rows of it are at 0.96 where 1024 are at 0.934. Of 1M it is that blocks wait for one another: if they do not, it is at 0.97.
// A block waits 6 of 13 to 18 us: 3 for words behind its multiprocessor's loads, the others for the last of its row, whose loads take 5 to 8. The exponentials themselves cost little: without them 131072 takes as long, in float 1 % less.
// Nor is it the words of 1M: clusters of 16 (0.929 for 0.927, backward 0.916 for 0.913) and a board that need not be cleared are as fast.
// Slower: bulk copies (0.86 to 0.73 at 1M), L2 hints on all loads and stores, more threads or more than 16 vectors a thread, rows that are
// partly read twice, clusters for rows that a block holds beside another (50304 0.983 to 0.979), a row's blocks in numbers that divide the
// GPU's (1M 0.89 to 0.85) or more of them than must be (40 instead of 32: 0.89 to 0.81), what comes next fetched to L2 while a block waits
// (1M 0.927 to 0.90).
// Persistent blocks too, even where nobody waits. Those that fetch their next part into what they have just written, parts by a counter:
// 50304 0.97 to 0.91, float 0.96 to 0.93, 131072 0.94 to 0.84, 1M 0.93 to 0.86; parts in turns: 50304 0.89. Those that have a row in
// registers while up to three are under way: 131072 0.70.
// More of 1M in row_reduction.cuh. As fast: blocks that start one after another, one barrier less where blocks tell, no more than two groups of
// copies under way; what the blocks of a cluster or of a crowd copy to shared memory fetched to L2 before (131072 0.937 to 0.939); rows of
// 1024 by whole warps (1.035 for 1.05), or by 128 threads (1.01).
//
// Grids are 1-D. Offsets are 64-bit.
#include "common/ptx/launch.cuh"
#include "grid_backward.cuh"
#include "one_pass.cuh"
#include "two_pass.cuh"

// ---- v1

// Grid ceil(rows / blockDim.x).
template <typename T>
__global__ void softmax_v1(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    x += row * x_row;
    out += row * columns;
    Exponential<T> exponential(scale);
    C largest = minus_infinity<C>();
    for (long long i = 0; i < columns; ++i) largest = max(largest, exponential.lift(load_as(x[i])));
    Accumulator<C> sum;
    for (long long i = 0; i < columns; ++i) sum.add(exponential(exponential.lift(load_as(x[i])), exponential.base(largest)));
    End<T> end(exponential, largest, sum.sum, false, largest);
    for (long long i = 0; i < columns; ++i) out[i] = T(end.of(load_as(x[i])));
}

// Adds y_j g_j (delta_ij - y_i) for `count` j, the i-th of which has delta 1.
template <typename T, typename C>
__device__ __forceinline__ void add_jacobian(Accumulator<C>& total, const T* y, const T* g, long long count, long long i, C y_i) {
    for (long long j = 0; j < count; ++j) total.add(load_as(y[j]) * load_as(g[j]) * ((i == j ? C(1) : C(0)) - y_i));
}

// dx_i = scale sum_j y_j g_j (delta_ij - y_i)
template <typename T>
__device__ __forceinline__ void jacobian_column(T* dx, const T* y, const T* g, long long columns, long long i, double scale) {
    using C = compute_t<T>;
    Accumulator<C> total;
    add_jacobian(total, y, g, columns, i, load_as(y[i]));
    dx[i] = T(C(scale) * total.sum);
}

// Grid ceil(columns / blockDim.x).
template <typename T>
__global__ void softmax_v1_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= columns) return;
    for (long long row = 0; row < rows; ++row) jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// ---- v2, v3, v4: one block a row, which differ in how its threads put together what each found

struct Serial {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        shared[threadIdx.x] = value;
        __syncthreads();
        if (threadIdx.x == 0) {
            double all = value;
            for (int i = 1; i < blockDim.x; ++i) all = Op::of(all, double(shared[i]));
            shared[0] = all;
        }
        __syncthreads();
        return shared[0];
    }
};

struct Tree {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        shared[threadIdx.x] = value;
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.x < half) shared[threadIdx.x] = Op::of(shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        __syncthreads();
        return shared[0];
    }
};

struct Shuffles {
    template <class Op, typename C>
    static __device__ C reduce(C value, C* shared) {
        return block_reduce<Op>(value, shared);
    }
};

template <class Reduction, typename T>
__device__ __forceinline__ void block_softmax(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    __shared__ C maxima[256], sums[256];  // one for each, so that nobody writes a sum where another still reads the maximum
    Exponential<T> exponential(scale);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * x_row;
        C largest = minus_infinity<C>(), sum = 0;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) largest = max(largest, exponential.lift(load_as(from[i])));
        largest = Reduction::template reduce<Max>(largest, maxima);
        for (long long i = threadIdx.x; i < columns; i += blockDim.x)
            sum += exponential(exponential.lift(load_as(from[i])), exponential.base(largest));
        sum = Reduction::template reduce<Sum>(sum, sums);
        End<T> end(exponential, largest, sum, false, largest);
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) out[row * columns + i] = T(end.of(load_as(from[i])));
        __syncthreads();  // before the next row's values overwrite this one's
    }
}

// Block 256, a power of 2.
template <typename T>
__global__ void softmax_v2(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Serial>(out, x, rows, columns, x_row, scale);
}
template <typename T>
__global__ void softmax_v3(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Tree>(out, x, rows, columns, x_row, scale);
}
template <typename T>
__global__ void softmax_v4(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    block_softmax<Shuffles>(out, x, rows, columns, x_row, scale);
}

// A block takes blockDim.x columns of `height` rows. Grid ceil(columns / blockDim.x) * ceil(rows / height).
template <typename T>
__global__ void softmax_v2_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, long long height,
                               double scale) {
    long long across = (columns + blockDim.x - 1) / blockDim.x;
    long long i = blockIdx.x % across * blockDim.x + threadIdx.x, first = blockIdx.x / across * height;
    if (i >= columns) return;
    for (long long row = first; row < min(first + height, rows); ++row)
        jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// Grid ceil(columns / blockDim.x) * rows.
template <typename T>
__global__ void softmax_v3_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    long long across = (columns + blockDim.x - 1) / blockDim.x;
    long long i = blockIdx.x % across * blockDim.x + threadIdx.x, row = blockIdx.x / across;
    if (i < columns) jacobian_column(dx + row * columns, y + row * columns, g + row * g_row, columns, i, scale);
}

// Grid ceil(columns / 256) * rows, block 256.
template <typename T>
__global__ void softmax_v4_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale) {
    using C = compute_t<T>;
    __shared__ C ys[256], gs[256];  // 256 columns at a time
    long long across = (columns + 255) / 256;
    long long i = blockIdx.x % across * 256 + threadIdx.x, row = blockIdx.x / across;
    y += row * columns;
    g += row * g_row;
    Accumulator<C> total;
    C y_i = i < columns ? load_as(y[i]) : C(0);
    for (long long first = 0; first < columns; first += 256) {
        int here = min(256LL, columns - first);
        if (threadIdx.x < here) {
            ys[threadIdx.x] = load_as(y[first + threadIdx.x]);
            gs[threadIdx.x] = load_as(g[first + threadIdx.x]);
        }
        __syncthreads();
        add_jacobian(total, ys, gs, here, i - first, y_i);
        __syncthreads();
    }
    if (i < columns) dx[row * columns + i] = T(C(scale) * total.sum);
}

// ---- v5 and v8: a part of a row by 16-byte vectors, the threads of a block in turns

template <typename T>
__global__ void softmax_v5(T* out, const T* x, long long rows, long long columns, long long x_row, double scale, bool log) {
    __shared__ Found<T> found;
    Exponential<T> exponential(scale, log);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        compute_t<T> largest;
        sum_t<T> sum;
        const T* from = x + row * x_row;
        T* to = out + row * columns;
        scan_columns(from, Span(0, columns), block_turns(from, 0, columns), exponential, largest, sum);
        merge_block(exponential, found, largest, sum);
        End<T> end(exponential, largest, sum, log, largest);
        write_columns<false>(to, from, Span(0, columns), block_turns(to, 0, columns), end);
        __syncthreads();
    }
}

template <typename T>
__global__ void softmax_v5_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long g_row, double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    Gradient<T> gradient(scale, log);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *ys = y + row * columns, *gs = g + row * g_row;
        T* to = dx + row * columns;
        compute_t<T> total = block_reduce<Sum>(sum_terms(ys, gs, Span(0, columns), block_turns(ys, 0, columns), gradient), sums);
        write_gradients<false>(to, ys, gs, Span(0, columns), block_turns(to, 0, columns), total, gradient);
        __syncthreads();
    }
}

// ---- v6 and v7: the row in registers

// Grid ceil(rows / (blockDim.x / width)), block 128; WIDTH is width, or 0 for any that is a power of 2, but for the edges at least
// 2 vectors' elements. Where the last warp's rows come to an end, its lanes take part with an empty row.
template <typename T, int VECTORS, int WIDTH, bool EXACT, bool LOG>
__global__ void __launch_bounds__(128)
    softmax_v6(T* out, const T* x, long long rows, int columns, long long x_row, int width, double scale) {
    wait_for_previous();
    Lanes team(WIDTH ? WIDTH : width);
    long long row = blockIdx.x * (long long)(128 / team.width) + threadIdx.x / team.width;
    if (row >= rows) row = columns = 0;
    team_softmax<VECTORS, false, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns, team, scale, Sink{});
}

template <typename T, int VECTORS, int WIDTH, bool EXACT, bool LOG>
__global__ void __launch_bounds__(128)
    softmax_v6_bwd(T* dx, const T* y, const T* g, long long rows, int columns, long long g_row, int width, double scale) {
    wait_for_previous();
    Lanes team(WIDTH ? WIDTH : width);
    long long row = blockIdx.x * (long long)(128 / team.width) + threadIdx.x / team.width, at = row * columns;
    if (row >= rows) row = at = columns = 0;
    team_gradient<VECTORS, false, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns, team, scale, SinkGradient{});
}

// Two rows of 64 threads each lie side by side in a block, since half as many blocks cost less; of an odd number the last one twice. BLOCKS
// counts rows.
template <int THREADS>
constexpr int ROWS_A_BLOCK = THREADS == 64 ? 2 : 1;

// Grid ceil(rows / ROWS_A_BLOCK<THREADS>).
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS* ROWS_A_BLOCK<THREADS>, ON_SM_90(BLOCKS / ROWS_A_BLOCK<THREADS>))
    softmax_v7(T* out, const T* x, long long rows, int columns, long long x_row, double scale) {
    constexpr int ROWS = ROWS_A_BLOCK<THREADS>;
    __shared__ Found<T> found[ROWS];
    long long row = ROWS == 1 ? blockIdx.x : min(blockIdx.x * (long long)ROWS + threadIdx.x / THREADS, rows - 1);
    Block<T, THREADS, ROWS> team(found[ROWS == 1 ? 0 : threadIdx.x / THREADS]);
    take_over(ROWS * columns * sizeof(T), BLOCKS * THREADS, [&] { prefetch_row(team, x + row * x_row, 0, columns); });
    auto meanwhile = [&] {
        if constexpr (VECTORS * THREADS * sizeof(T) > 512) prefetch_later_row(BLOCKS, team, row, rows, columns, x, x_row);
    };
    team_softmax<VECTORS, false, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns, team, scale, Sink{}, nullptr,
                                                    meanwhile);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v7_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    __shared__ Found<T> found;
    long long row = blockIdx.x, at = row * columns;
    Block<T, THREADS> team(found);
    take_over_row(BLOCKS * THREADS, team, columns, y + at, g + row * g_row);
    team_gradient<VECTORS, false, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns, team, scale, SinkGradient{});
}

// Few rows that no block can hold: `pieces` blocks share each, in two launches. What the first found in each piece is in `parts`, (rows,
// pieces, 2) or (rows, pieces). Grids rows * pieces; a block has at least as many threads as a row has pieces; a piece is `length` columns.

template <typename T>
__global__ void softmax_v7_scan(double* parts, const T* x, long long columns, long long x_row, int pieces, long long length, double scale,
                                bool log) {
    __shared__ Found<T> found;
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length, end = min(begin + length, columns);
    compute_t<T> largest;
    sum_t<T> sum;
    Exponential<T> exponential(scale, log);
    const T* from = x + row * x_row;
    scan_columns(from, Span(begin, end), block_turns(from, begin, end), exponential, largest, sum);
    merge_block(exponential, found, largest, sum);
    if (threadIdx.x == 0) {
        parts[2LL * blockIdx.x] = largest;
        parts[2LL * blockIdx.x + 1] = sum;
    }
}

template <typename T>
__global__ void softmax_v7_write(T* out, const T* x, const double* parts, long long columns, long long x_row, int pieces, long long length,
                                 double scale, bool log) {
    __shared__ Found<T> found;
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length, stop = min(begin + length, columns);
    Exponential<T> exponential(scale, log);
    compute_t<T> largest = minus_infinity<compute_t<T>>();
    sum_t<T> sum = 0;
    if (threadIdx.x < pieces) {
        largest = parts[2 * (row * pieces + threadIdx.x)];
        sum = parts[2 * (row * pieces + threadIdx.x) + 1];
    }
    merge_block(exponential, found, largest, sum);
    End<T> end(exponential, largest, sum, log, largest);
    const T* from = x + row * x_row;
    T* to = out + row * columns;
    write_columns<false>(to, from, Span(begin, stop), block_turns(to, begin, stop), end);
}

template <typename T>
__global__ void softmax_v7_scan_bwd(double* parts, const T* y, const T* g, long long columns, long long g_row, int pieces, long long length,
                                    double scale, bool log) {
    __shared__ compute_t<T> sums[32];
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length, end = min(begin + length, columns);
    Gradient<T> gradient(scale, log);
    const T* ys = y + row * columns;
    compute_t<T> sum = sum_terms(ys, g + row * g_row, Span(begin, end), block_turns(ys, begin, end), gradient);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <typename T>
__global__ void softmax_v7_write_bwd(T* dx, const T* y, const T* g, const double* parts, long long columns, long long g_row, int pieces,
                                     long long length, double scale, bool log) {
    using C = compute_t<T>;
    __shared__ C sums[32];
    wait_for_previous();
    long long row = blockIdx.x / pieces, begin = blockIdx.x % pieces * length, end = min(begin + length, columns), at = row * columns;
    C total = block_reduce<Sum>(threadIdx.x < pieces ? C(parts[row * pieces + threadIdx.x]) : C(0), sums);
    Gradient<T> gradient(scale, log);
    write_gradients<false>(dx + at, y + at, g + row * g_row, Span(begin, end), block_turns(dx + at, begin, end), total, gradient);
}

// ---- v8 to v10: the row in registers and in shared memory, of one block, or of several in turns. Dynamic shared memory: 16 bytes for each
// vector of a thread beyond VECTORS; backward as much again, for g; and as much for each warp's round (tails) where 16-bit numbers of rows
// that begin apart are shifted. Grid rows times the blocks of a row.

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS)) softmax_v8(T* out, const T* x, int columns, long long x_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    long long row = blockIdx.x;
    Block<T, THREADS> team(found);
    prefetch_row(team, x + row * x_row, VECTORS * THREADS * WIDTH<T>, columns);  // sooner than it is copied to shared memory
    take_over_row(BLOCKS * THREADS, team, columns, x + row * x_row);
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns, team, scale, Sink{}, slots);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v8_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    wait_for_previous();
    long long row = blockIdx.x, at = row * columns;
    Block<T, THREADS> team(found);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns, team, scale, SinkGradient{},
                                                    slots);
}

#if __CUDA_ARCH__ >= 900
template <typename T, int VECTORS, int THREADS, int BLOCKS, int SIZE, bool EXACT, bool LOG>
__global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v9(T* out, const T* x, int columns, long long x_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    __shared__ unsigned long long words[SIZE];
    ClusterBoard<SIZE> board(words);
    long long row = blockIdx.x / SIZE;
    Crowd<T, THREADS, ClusterBoard<SIZE>> team(found, board);
    take_over_row(BLOCKS * THREADS, team, min(columns, VECTORS * SIZE * THREADS * WIDTH<T>), x + row * x_row);  // of what goes to registers
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns, team, scale, Sink{}, slots);
    board.leave();
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, int SIZE, bool EXACT, bool LOG>
__global__ void __cluster_dims__(SIZE, 1, 1) __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v9_bwd(T* dx, const T* y, const T* g, int columns, long long g_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    __shared__ unsigned long long words[SIZE];
    ClusterBoard<SIZE> board(words);
    wait_for_previous();
    long long row = blockIdx.x / SIZE, at = row * columns;
    Crowd<T, THREADS, ClusterBoard<SIZE>> team(found, board);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns, team, scale, SinkGradient{},
                                                    slots);
    board.leave();
}
#endif

// `board`: a word for each block, all 0.
template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v10(T* out, const T* x, unsigned long long* board, int size, int columns, long long x_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    wait_for_previous();
    long long row = blockIdx.x / size;
    GlobalBoard words(board, size);
    Crowd<T, THREADS, GlobalBoard> team(found, words);
    prefetch_later_turns(BLOCKS, team, columns, x, x_row);
    team_softmax<VECTORS, true, false, EXACT, LOG>(out + row * columns, x + row * x_row, 0, columns, columns, team, scale, Sink{}, slots);
}

template <typename T, int VECTORS, int THREADS, int BLOCKS, bool EXACT, bool LOG>
__global__ void __launch_bounds__(THREADS, ON_SM_90(BLOCKS))
    softmax_v10_bwd(T* dx, const T* y, const T* g, unsigned long long* board, int size, int columns, long long g_row, double scale) {
    extern __shared__ Words<float> slots[];
    __shared__ Found<T> found;
    wait_for_previous();
    long long row = blockIdx.x / size, at = row * columns;
    GlobalBoard words(board, size);
    Crowd<T, THREADS, GlobalBoard> team(found, words);
    team_gradient<VECTORS, true, false, EXACT, LOG>(dx + at, y + at, g + row * g_row, 0, columns, columns, team, scale, SinkGradient{},
                                                    slots);
}

// ---- v11: long rows that all of the GPU shares (grid_backward.cuh). Grid BLOCKS times the multiprocessors, all of them there at a time;
// a row has at most 4 vectors for each of the threads of a block on each; dynamic shared memory for 3 * 4 * 2 vectors a thread.
// `board`: a word for each row and multiprocessor, all 0.
// Where shared memory is too small for it nobody launches it (softmax_plan.py): there it may have more registers.
#define BESIDE(BLOCKS) (__CUDA_ARCH__ < 1200 ? BLOCKS : 1)

template <typename T, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BESIDE(BLOCKS))
    softmax_v11_bwd(T* dx, const T* y, const T* g, unsigned long long* board, int rows, int columns, long long g_row, double scale) {
    using Steps = Steps<T, THREADS, BLOCKS>;
    extern __shared__ Words<float> slots[];
    __shared__ typename Steps::Found found[2];
    Gradient<T> gradient(scale, false);
    Steps::run(dx, y, g, board, rows, columns, g_row, gradient, reinterpret_cast<Words<T>*>(slots), found);
}

// ---- along a dimension that is not the last: x is (outer, columns, inner) and contiguous. Neighbouring threads take neighbouring rows,
// so their accesses lie side by side. Grid ceil(outer * inner / blockDim.x).

template <typename T>
__global__ void softmax_inner(T* out, const T* x, long long rows, long long columns, long long inner, double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Exponential<T> exponential(scale, log);
    C largest = minus_infinity<C>();
    Accumulator<C> sum;
    for (long long i = 0; i < columns; ++i) largest = max(largest, exponential.lift(load_as(x[at + i * inner])));
    for (long long i = 0; i < columns; ++i) sum.add(exponential(exponential.lift(load_as(x[at + i * inner])), exponential.base(largest)));
    End<T> end(exponential, largest, sum.sum, log, largest);
    for (long long i = 0; i < columns; ++i) out[at + i * inner] = T(end.of(load_as(x[at + i * inner])));
}

template <typename T>
__global__ void softmax_inner_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long inner, double scale,
                                  bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    Gradient<T> gradient(scale, log);
    Accumulator<C> total;
    for (long long i = 0; i < columns; ++i) total.add(gradient.term(load_as(y[at + i * inner]), load_as(g[at + i * inner])));
    for (long long i = 0; i < columns; ++i)
        dx[at + i * inner] = T(gradient(load_as(y[at + i * inner]), load_as(g[at + i * inner]), total.sum));
}
