// embedding: out[row] = weight[tokens[row]] + positions[row % time]; rows are all tokens, the last dimension of `tokens` is the time.
// Gradient: dweight[v] = sum of dout[row] over the rows with token v. That of positions is torch's sum of dout over the batch.
//
// Types      tokens are int, or long long if `wide`; positions may be null. 16-bit types are added in float and rounded once.
// Layout     out and dout are (rows, features), weight is (vocabulary, features), positions is (table, features); all contiguous.
// Bad tokens A token outside of the vocabulary gives a row of NaN, and its row of dout is dropped. The vocabulary is not empty.
// Order      Every sum has a fixed order, and there are no atomics: two runs give the same bits.
//
// version  idea
// v1       one thread per element; in dweight it scans all tokens
// v2       16-byte vectors, ROWS rows per thread; dweight from sorted tokens. H200, 32 x 1024 tokens of 768 features: forward 0.88
//          (float32) and 0.90 (bfloat16) of a copy of the same bytes, backward 0.37 and 0.25
//
// dweight of v2: the launcher zeroes dweight and sorts the tokens (stable); order[i] is the row of sorted[i]. A run is a sequence of equal
// sorted tokens. Each block adds the rows of one chunk of CHUNK sorted tokens, so the load is balanced however often a token occurs. A run
// inside of one chunk is written to dweight. A run that crosses chunks leaves a partial sum per chunk: in slot 1 of the chunk where it
// starts, in slot 0 of the others. embedding_v2_bwd_runs adds these in the order of the chunks.
//
// Launch     v1: 1-D, one thread per element. v2: blockDim.x threads share a row, or a slice of it; grid.x = groups of blockDim.y times, for
//            each group of ROWS sequences, or chunks; grid.y = slices.
// Predictions and experiments: docs/notes/embedding.md.
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"

constexpr int ROWS = 2;               // of a thread of embedding_v2, which have the same time
constexpr int WARPS = 8, SPAN = 256;  // per block of embedding_v2_bwd: warps, and at most so many rows of dweight
constexpr int UNROLL = 8;             // rows that a thread loads at a time, so that enough bytes are in flight

__device__ __forceinline__ bool is_inside(long long token, long long vocabulary) { return token >= 0 && token < vocabulary; }

// ---- v1

template <typename T>
__global__ void embedding_v1(T* out, const void* tokens, const T* weight, const T* positions, long long rows, long long time,
                             long long vocabulary, long long features, bool wide) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= rows * features) return;
    long long row = i / features, column = i % features, token = index_at(tokens, wide, row);
    compute_t<T> y = is_inside(token, vocabulary) ? load_as(weight[token * features + column]) : not_a_number();
    if (positions) y += load_as(positions[row % time * features + column]);
    out[i] = T(y);
}

template <typename T>
__global__ void embedding_v1_bwd(T* dweight, const T* dout, const void* tokens, long long rows, long long vocabulary, long long features,
                                 bool wide) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= vocabulary * features) return;
    long long token = i / features, column = i % features;
    compute_t<T> sum = 0;
    for (long long row = 0; row < rows; row++)
        if (index_at(tokens, wide, row) == token) sum += load_as(dout[row * features + column]);
    dweight[i] = T(sum);
}

// ---- v2: vectors of N elements

// A block has blockDim.y times of ROWS sequences. A thread has one time, so it loads its position once; its rows are `time` apart. Without
// positions the launcher passes any time.
template <typename T, int N>
__global__ void embedding_v2(T* out, const void* tokens, const T* weight, const T* positions, long long rows, long long time,
                             long long vocabulary, long long features, bool wide) {
    wait_for_previous();
    unsigned times = (time + blockDim.y - 1) / blockDim.y, group = blockIdx.x / times;
    long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * N,
              at = (blockIdx.x - group * times) * (long long)blockDim.y + threadIdx.y;
    long long first = group * (ROWS * time) + at;
    if (column >= features || at >= time || first >= rows) return;
    long long token[ROWS];
    Vec<T, N> w[ROWS], p;
#pragma unroll
    for (int k = 0; k < ROWS; k++) token[k] = index_at(tokens, wide, first + k * time < rows ? first + k * time : first);
    if (positions) p = load_vec<T, N>(positions + at * features + column);
#pragma unroll
    for (int k = 0; k < ROWS; k++) w[k] = load_vec<T, N>(weight + (is_inside(token[k], vocabulary) ? token[k] : 0) * features + column);
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
__global__ void __launch_bounds__(32 * WARPS, 3)
    embedding_v2_bwd(T* dweight, const T* dout, const void* tokens, const long long* order, long long rows, long long vocabulary,
                     long long features, int span, bool wide) {
    extern __shared__ int found[];  // without order: by warp, the block's tokens as (token - first) << 16 | row; then their sorted rows
    __shared__ int of_warp[WARPS];  // tokens that it found
    __shared__ long long starts[SPAN + 1];
    __shared__ compute_t<T> sums[32 * WARPS * N];
    wait_for_previous();
    int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32, warp = thread / 32, width = blockDim.x * N;
    unsigned slices = (features + width - 1) / width, group = blockIdx.x / slices;
    long long first = group * (long long)span, column = (blockIdx.x - group * slices) * (long long)width + threadIdx.x * N;
    int count = min((long long)span, vocabulary - first), *own = found + rows, part = (rows + 32 * WARPS - 1) / (32 * WARPS) * 32;
    int here = 0, end = min(int(rows), (warp + 1) * part);
    for (int i = warp * part + lane; !order && i - lane < end; i += 32 * UNROLL) {
        long long token[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) token[k] = i + 32 * k < end ? index_at(tokens, wide, i + 32 * k) : -1;
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            bool is_here = token[k] >= first && token[k] < first + count;
            unsigned votes = __ballot_sync(~0u, is_here);
            if (is_here) found[warp * part + here + __popc(votes & ((1u << lane) - 1))] = int(token[k] - first) << 16 | (i + 32 * k);
            here += __popc(votes);
        }
    }
    of_warp[warp] = here;
    __syncthreads();
    for (int t = thread; t <= count; t += 32 * WARPS) {
        long long low = -1, high = order ? rows : 0;
        while (high - low > 1) {
            long long middle = (low + high) / 2;
            (index_at(tokens, wide, middle) < first + t ? low : high) = middle;
        }
        for (int w = 0; w < WARPS; w++)
            for (int i = 0; i < of_warp[w]; i++) high += found[w * part + i] >> 16 < t;
        starts[t] = high;
        for (int w = 0; w < WARPS; w++)
            for (int i = 0; i < of_warp[w]; i++)
                if (found[w * part + i] >> 16 == t) own[high++] = found[w * part + i] & 0xffff;
    }
    __syncthreads();
    long long most = min(max(2 * (starts[count] - starts[0]) / blockDim.y, 2LL * UNROLL), 8LL * UNROLL);
    bool whole = false, is_left = false;  // the whole block adds the rows of one token
    do {
        for (int t = whole ? 0 : threadIdx.y; t < count; t += whole ? 1 : blockDim.y) {
            bool is_long = starts[t + 1] - starts[t] > most;
            is_left |= is_long;
            if (is_long != whole) continue;
            compute_t<T> sum[N] = {};
            for (long long i = starts[t] + (whole ? threadIdx.y * UNROLL : 0); i < starts[t + 1] && column < features;
                 i += whole ? blockDim.y * UNROLL : UNROLL) {
                Vec<T, N> v[UNROLL];
#pragma unroll
                for (int k = 0; k < UNROLL; k++)
                    if (i + k < starts[t + 1]) v[k] = load_vec<T, N>(dout + (order ? order[i + k] : own[i + k]) * features + column);
                compute_t<T> part[2][N] = {};  // even and odd rows: short sums have small errors
#pragma unroll
                for (int k = 0; k < UNROLL; k++)
                    if (i + k < starts[t + 1]) add_to(part[k % 2], v[k]);
#pragma unroll
                for (int j = 0; j < N; j++) sum[j] += part[0][j] + part[1][j];
            }
            for (int half = whole ? blockDim.y / 2 : 0; half; half /= 2) {
#pragma unroll
                for (int j = 0; j < N; j++) sums[thread * N + j] = sum[j];
                __syncthreads();
                if (threadIdx.y < half)
#pragma unroll
                    for (int j = 0; j < N; j++) sum[j] += sums[(thread + half * blockDim.x) * N + j];
                __syncthreads();
            }
            if (column < features && !(whole && threadIdx.y)) store_vec(dweight + (first + t) * features + column, pack<T, N>(sum));
        }
        whole = !whole;
    } while (whole && __syncthreads_or(is_left));
}
