// embedding: out[row] = weight[tokens[row]] + positions[row % time]; rows are all tokens, the last dimension
// of `tokens` is the time. Gradient: dweight[v] = sum of dout[row] over the rows with token v. That of
// positions is torch's sum of dout over the batch.
//
// Types      tokens are int, or long long if `wide`; positions may be null. 16-bit types are added in float
//            and rounded once.
// Layout     out and dout are (rows, features), weight is (vocabulary, features), positions is (table,
//            features); all contiguous.
// Bad tokens A token outside of the vocabulary gives a row of NaN, and its row of dout is dropped. The
// vocabulary is not empty.
// Order      Every sum has a fixed order, and there are no atomics: two runs give the same bits.
//
// version  idea
// v1       one thread per element; backward as v2
// v2       16-byte vectors, ROWS rows per thread. 32 x 1024 tokens of 768 features, of a copy of the same
//          bytes: forward 0.88 (float32) and 0.90 (bfloat16) on an H200, backward 0.34 (bfloat16) on an H100
//
// dweight    The launcher zeroes it. embedding_v2_bwd_few adds the rows of few tokens. More are sorted
//            (stable); order[i] is the row of sorted[i]. A block of embedding_v2_bwd adds the rows of CHUNK
//            sorted tokens, so the load is balanced however often one occurs. The sums of a chunk's first and
//            last token are partial, in its slots 0 and 1: embedding_v2_bwd_few adds these.
// Launch     v1: 1-D, one thread per element. v2: blockDim.x threads share a row, or a slice of it; grid.x =
//            groups of blockDim.y times, for each group of ROWS sequences, or chunks, or rows; grid.y =
//            slices.
// Predictions and experiments: docs/notes/embedding.md.
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"

constexpr int ROWS = 2;                          // of a thread of embedding_v2, which have the same time
constexpr int CHUNK = 64;                        // sorted tokens per block
constexpr int THREADS = 128, FEW_THREADS = 256;  // per block, at most; in embedding_v2_bwd_few
// rows that a thread loads at a time, so that enough bytes are in flight
constexpr int UNROLL = 8;

__device__ __forceinline__ bool is_inside(long long token, long long vocabulary) {
    return token >= 0 && token < vocabulary;
}

// ---- v1

template <typename T>
__global__ void embedding_v1(T* out, const void* tokens, const T* weight, const T* positions, long long rows,
                             long long time, long long vocabulary, long long features, bool wide) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= rows * features) return;
    long long row = i / features, column = i % features, token = index_at(tokens, wide, row);
    compute_t<T> y =
        is_inside(token, vocabulary) ? load_as(weight[token * features + column]) : not_a_number();
    if (positions) y += load_as(positions[row % time * features + column]);
    out[i] = T(y);
}

// ---- v2: vectors of N elements

// A block has blockDim.y times of ROWS sequences. A thread has one time, so it loads its position once; its
// rows are `time` apart. Without positions the launcher passes any time.
template <typename T, int N>
__global__ void embedding_v2(T* out, const void* tokens, const T* weight, const T* positions, long long rows,
                             long long time, long long vocabulary, long long features, bool wide) {
    wait_for_previous();
    unsigned times = (time + blockDim.y - 1) / blockDim.y, group = blockIdx.x / times;
    long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * N,
              at = (blockIdx.x - group * times) * (long long)blockDim.y + threadIdx.y;
    long long first = group * (ROWS * time) + at;
    if (column >= features || at >= time || first >= rows) return;
    long long token[ROWS];
    Vec<T, N> w[ROWS], p;
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        token[k] = index_at(tokens, wide, first + k * time < rows ? first + k * time : first);
    if (positions) p = load_vec<T, N>(positions + at * features + column);
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        w[k] = load_vec<T, N>(weight + (is_inside(token[k], vocabulary) ? token[k] : 0) * features + column);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (first + k * time >= rows) return;
        compute_t<T> y[N];
        unpack(y, w[k]);
        if (positions) add_to(y, p);
        if (!is_inside(token[k], vocabulary))
#pragma unroll
            for (int j = 0; j < N; j++) y[j] = not_a_number();
        store_vec_past_l1(out + (first + k * time) * features + column, pack<T, N>(y));
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 6)
    embedding_v2_bwd(T* dweight, compute_t<T>* partials, long long* tokens, const T* dout, const void* sorted,
                     const long long* order, long long rows, long long vocabulary, long long features,
                     bool wide) {
    wait_for_previous();
    long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * N;
    long long chunk = blockIdx.x, first = chunk * CHUNK, end = min(first + CHUNK, rows);
    if (column >= features) return;
    if (column == 0) tokens[2 * chunk + 1] = -1;
    compute_t<T> sum[N] = {};
    long long token = index_at(sorted, wide, first);
    long long slot = 2 * chunk;  // of the chunk's first token
    for (long long i = first; i < end; i += UNROLL) {
        Vec<T, N> v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k < end) v[k] = load_vec<T, N>(dout + order[i + k] * features + column);
        compute_t<T> part[2][N] = {};  // even and odd rows: short sums have small errors
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k >= end) break;
            add_to(part[k % 2], v[k]);
            bool is_last = i + k + 1 == end;
            long long next = index_at(sorted, wide, is_last ? i + k : i + k + 1);
            bool ends = is_last || next != token;
            if (!ends && k + 1 < UNROLL) continue;
#pragma unroll
            for (int j = 0; j < N; j++) {
                sum[j] += part[0][j] + part[1][j];
                part[0][j] = part[1][j] = 0;
            }
            if (!ends) continue;
            if (slot == 2 * chunk || is_last) {
                if (column == 0) tokens[slot] = token;
                store_vec(partials + slot * features + column, pack<compute_t<T>, N>(sum));
            } else if (is_inside(token, vocabulary)) {
                store_vec(dweight + token * features + column, pack<T, N>(sum));
            }
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] = 0;
            token = next;
            slot = 2 * chunk + 1;
        }
    }
}

// Adds few rows, or the partial sums. A block adds the rows of one token: that of row blockIdx.x, unless an
// earlier row has it too. Threads of a warp look at 32 tokens at a time. Partial sums of a token are
// neighbors, with at most one slot in between.
template <typename T, typename S, int N>
__global__ void __launch_bounds__(FEW_THREADS, 4)
    embedding_v2_bwd_few(T* dweight, const S* dout, const void* tokens, long long rows, long long vocabulary,
                         long long features, bool wide, bool sorted) {
    __shared__ Vec<compute_t<T>, N> sums[FEW_THREADS];
    wait_for_previous();
    long long row = blockIdx.x, column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * N,
              token = index_at(tokens, wide, row);
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    bool is_done = !is_inside(token, vocabulary);
    for (long long i = thread + (sorted ? max(row - 2, 0LL) : 0); i < row; i += FEW_THREADS)
        is_done |= index_at(tokens, wide, i) == token;
    if (__syncthreads_or(is_done)) return;
    dout += min(column, features - N);
    compute_t<T> sum[N] = {};
    for (long long first = row + 32 * threadIdx.y; first < rows; first += 32 * blockDim.y) {
        long long i = first + threadIdx.x % 32;
        unsigned equal = __ballot_sync(~0u, i < rows && index_at(tokens, wide, i) == token);
        if (sorted && !equal) break;
        for (int left = __popc(equal); left > 0; left -= UNROLL / 2) {
            Vec<S, N> v[UNROLL / 2];
#pragma unroll
            for (int k = 0; k < UNROLL / 2; k++, equal &= equal - 1)
                if (k < left) v[k] = load_vec<S, N>(dout + (first + __ffs(equal) - 1) * features);
            compute_t<T> part[2][N] = {};
#pragma unroll
            for (int k = 0; k < UNROLL / 2; k++)
                if (k < left) add_to(part[k % 2], v[k]);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] += part[0][j] + part[1][j];
        }
    }
    sums[thread] = pack<compute_t<T>, N>(sum);
    __syncthreads();
    if (column >= features || threadIdx.y) return;
    for (int y = 1; y < blockDim.y; y++) add_to(sum, sums[y * blockDim.x + thread]);
    store_vec(dweight + token * features + column, pack<T, N>(sum));
}
