// Tiles of 16-bit numbers in shared memory, and a warp's matrix products with them (mma.sync m16n8k16, sm_80
// and newer).
//
// A tile has ROWS rows of D numbers, in D / 64 pages of 64 columns. A row of a page is 128 bytes: 8 chunks of
// 16 bytes. Chunk c of row r is stored at position c ^ (r % 8) (XOR swizzle), so that neither ldmatrix nor
// cp.async nor the stores of a fragment have bank conflicts. Tiles begin at multiples of 128 bytes. A tile
// and a lane's position in it are 32-bit shared-memory addresses. copy_tile takes floats as well, with pages
// of 32 columns.
//
// A float is the sum of PIECES bfloat16 numbers: three have its 24 bits, two have 16. A tile of floats is a
// tile for each piece, one behind the other. A product of floats is the sum of the products of piece i and
// piece j with i + j < PIECES: 6 or 3 products. The others are below 2^-24, or 2^-16. Tensor cores truncate
// when they add, so with three pieces the small products have sums of their own.
#pragma once
#include "../common/pack.cuh"
#include "../common/ptx/async_copy.cuh"
#include "../common/ptx/mma.cuh"

constexpr int ROW_BYTES = 128;  // of a page

template <int ROWS>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
}

// The registers of a warp cannot hold both dk and dv if D > 128. So in the backward of keys, PARTS warps (or
// warpgroups) own the same rows: each computes all weights and its part of the columns of dk and dv.
template <bool KEYS, int D>
constexpr int PARTS = KEYS && D > 128 ? 2 : 1;

// Strides in elements. The last dimension has stride 1.
struct Strides {
    long long batch, head, row;
};

// Start the copy of the rows first..first + ROWS - 1 of x by a group of THREADS threads: the block, or one
// warp. Rows from `rows` on and columns from `columns` on are filled with zeros. The pieces of a row of x are
// D numbers apart.
template <int ROWS, int D, int THREADS, int PIECES = 1, typename T>
__device__ __forceinline__ void copy_tile(unsigned tile, const T* x, long long stride, int first, int rows,
                                          int columns) {
    constexpr int CHUNK = 16 / sizeof(T), CHUNKS = D / CHUNK, STEP = THREADS / CHUNKS;
    static_assert((STEP % 8 == 0 || 8 % STEP == 0) && ROWS % STEP == 0,
                  "row % 8 is (i % 8) ^ (the first row's)");
    int row = threadIdx.x % THREADS / CHUNKS, chunk = threadIdx.x % CHUNKS;
    int limit = chunk * CHUNK < columns ? rows - first - row : 0;
    const T* from = x + (first + row) * stride + chunk * CHUNK;
    unsigned to = tile + chunk_offset<ROWS>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride)
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            cp_async_16((to ^ i % 8 * 16) + (p * D / 64 * ROWS + i) * ROW_BYTES, from + p * D, i < limit);
}

// The pieces of eight floats. All but the last are finite, and an infinity or NaN goes to the last.
template <typename T, int PIECES>
__device__ __forceinline__ void split(Vec<T, 8> (&pieces)[PIECES], const float (&x)[8]) {
    float rest[8], piece[8];
#pragma unroll
    for (int i = 0; i < 8; i++) rest[i] = x[i];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int i = 0; i < 8; i++) piece[i] = p + 1 < PIECES ? limited(rest[i], LARGEST_BF16) : rest[i];
        pieces[p] = pack<T, 8>(piece);
        unpack(piece, pieces[p]);
#pragma unroll
        for (int i = 0; i < 8; i++) rest[i] -= piece[i];
    }
}

// copy_tile for rows of floats, which are split on the way.
template <int ROWS, int D, int THREADS, int PIECES, typename T>
__device__ __forceinline__ void split_tile(T* tile, const float* x, long long stride, int first, int rows,
                                           int columns) {
    constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    int limit = chunk * 8 < columns ? rows - first - row : 0;
    const float* from = x + (first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride) {
        float numbers[8] = {};
        if (i < limit) unpack(numbers, load_vec<float, 8>(from));
        Vec<T, 8> pieces[PIECES];
        split(pieces, numbers);
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            store_vec(tile + p * ROWS * D + chunk_offset<ROWS>(row + i, chunk) / sizeof(T), pieces[p]);
    }
}

// The position of a lane for ldmatrix.x4 on 16 rows and 16 columns: the four 8x8 tiles go down the rows
// first, or along the columns first.
__device__ __forceinline__ int down_rows(int lane) { return chunk_offset<0>(lane % 16, lane / 16); }
__device__ __forceinline__ int along_columns(int lane) {
    return chunk_offset<0>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The address of columns 16 k to 16 k + 15, for a lane at `position` of a tile.
template <int ROWS>
__device__ __forceinline__ unsigned columns_at(unsigned position, int k) {
    return (position ^ k % 4 * 32) + k / 4 * ROWS * ROW_BYTES;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             __half) {
    mma_f16(c, a, b);
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                             __nv_bfloat16) {
    mma_bf16(c, a, b);
}

// c += a b for R x 1 blocks of 16x16, where b has two 16x8 halves.
template <typename T, int R, int N>
__device__ __forceinline__ void multiply_blocks(float (&c)[R][N][4], const unsigned (&a)[R][4],
                                                const unsigned (&b)[4], int n) {
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
    for (int r = 0; r < R; r++) {
        multiply_add(c[r][2 * n], a[r], left, T());
        multiply_add(c[r][2 * n + 1], a[r], right, T());
    }
}

// The same for sums of pieces, for G neighbouring blocks of columns. Products of first pieces are added to c,
// the others to `small`. Independent products come first, so that none waits for another.
template <typename T, int PIECES, int G, int R, int N>
__device__ __forceinline__ void multiply_pieces(float (&c)[R][N][4], float (&small)[R][N][4],
                                                const unsigned (&a)[PIECES][R][4],
                                                const unsigned (&b)[G][PIECES][4], int n) {
#pragma unroll
    for (int sum = PIECES - 1; sum >= 0; sum--)
#pragma unroll
        for (int i = 0; i <= sum; i++)
#pragma unroll
            for (int g = 0; g < G; g++) multiply_blocks<T>(sum ? small : c, a[i], b[g][sum - i], n + g);
}

template <int R, int N>
__device__ __forceinline__ void add(float (&c)[R][N][4], const float (&x)[R][N][4]) {
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) c[i / (N * 4)][i / 4 % N][i % 4] += x[i / (N * 4)][i / 4 % N][i % 4];
}

// c = A B^T over D columns. A: 16 R rows of a tile of A_ROWS, from lane position `a` (down_rows). B: a tile
// of 8 N rows, from position `b` (along_columns). Lane l with g = l / 4 and t = l % 4 holds row 16 r + g + 8
// i and column 8 n + 2 t + j of c in c[r][n][2 i + j].
template <typename T, int D, int A_ROWS, int PIECES = 1, int R, int N>
__device__ __forceinline__ void multiply_transposed(float (&c)[R][N][4], unsigned a, unsigned b) {
    constexpr int G = PIECES > 1 && R == 1 && N % 4 == 0 ? 2 : 1, A_PIECE = A_ROWS * D * sizeof(T),
                  B_PIECE = 8 * N * D * sizeof(T);
    float other[R][N][4] = {}, (&small)[R][N][4] = PIECES == 3 ? other : c;
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) c[i / (N * 4)][i / 4 % N][i % 4] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned x[PIECES][R][4], y[G][PIECES][4];
#pragma unroll
        for (int i = 0; i < PIECES * R; i++)
            load_tiles<false>(x[i / R][i % R],
                              columns_at<A_ROWS>(a, k) + i / R * A_PIECE + i % R * 16 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N / 2; n += G) {
#pragma unroll
            for (int i = 0; i < G * PIECES; i++)
                load_tiles<false>(y[i / PIECES][i % PIECES], columns_at<8 * N>(b, k) + i % PIECES * B_PIECE +
                                                                 (n + i / PIECES) * 16 * ROW_BYTES);
            multiply_pieces<T, PIECES, G>(c, small, x, y, n);
        }
    }
    if (PIECES == 3) add(c, other);
}

// Operand A (16 R x 16) from column blocks 2 k and 2 k + 1 of the accumulators c. No data moves between
// lanes.
template <typename T, int PIECES, int R, int K>
__device__ __forceinline__ void to_operand(unsigned (&x)[PIECES][R][4], const float (&c)[R][K][4], int k) {
    using Pair = typename PairOf<T>::type;
#pragma unroll
    for (int i = 0; i < R * 4; i++) {
        const float* pair = &c[i / 4][2 * k + i % 4 / 2][i % 2 * 2];
        float2 rest = make_float2(pair[0], pair[1]);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            narrow(reinterpret_cast<Pair&>(x[p][i / 4][i % 4]), rest);
            if (p + 1 == PIECES) break;
            float2 piece = widen(Pair(), x[p][i / 4][i % 4]);
            rest = make_float2(rest.x - piece.x, rest.y - piece.y);
        }
    }
}

// c += A B, with A (16 R x 8 K) in registers in the layout of multiply_transposed, which is rounded to T or
// split, and a tile B (8 K x D) from lane position `b` (down_rows).
template <typename T, int D, int PIECES = 1, int R, int K>
__device__ __forceinline__ void multiply(float (&c)[R][D / 8][4], const float (&a)[R][K][4], unsigned b) {
    if constexpr (PIECES == 1) {
#pragma unroll
        for (int k = 0; k < K / 2; k++) {
            unsigned x[1][R][4], y[4];
            to_operand<T>(x, a, k);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                load_tiles<true>(y, columns_at<8 * K>(b, n) + k * 16 * ROW_BYTES);
                multiply_blocks<T>(c, x[0], y, n);
            }
        }
    } else {  // Tensor cores truncate when they add, so the sums of a tile are added to c by float additions.
        constexpr int G = R == 1 ? 2 : 1, PIECE = 8 * K * D * sizeof(T);
        unsigned x[K / 2][PIECES][R][4], y[G][PIECES][4];
#pragma unroll
        for (int k = 0; k < K / 2; k++) to_operand<T>(x[k], a, k);
#pragma unroll
        for (int n = 0; n < D / 16; n += G) {
            float sum[R][2 * G][4] = {};
#pragma unroll
            for (int k = 0; k < K / 2; k++) {
#pragma unroll
                for (int i = 0; i < G * PIECES; i++)
                    load_tiles<true>(y[i / PIECES][i % PIECES], columns_at<8 * K>(b, n + i / PIECES) +
                                                                    i % PIECES * PIECE + k * 16 * ROW_BYTES);
                multiply_pieces<T, PIECES, G>(sum, sum, x[k], y, 0);
            }
#pragma unroll
            for (int i = 0; i < R * 8 * G; i++)
                c[i / (8 * G)][2 * n + i / 4 % (2 * G)][i % 4] += sum[i / (8 * G)][i / 4 % (2 * G)][i % 4];
        }
    }
}

__device__ __forceinline__ void store_pair(float* to, float2 v) { *reinterpret_cast<float2*>(to) = v; }
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float2 v) {
    narrow(*reinterpret_cast<typename PairOf<T>::type*>(to), v);
}

// Store 16 R rows of a warp, c times `factor` of each row, through the warp's own rows of a tile, which no
// other warp uses. `tile` is the first of them. Rows from `rows` on and columns from `columns` on are not
// stored. STMATRIX: by stmatrix (sm_90, 16-bit types).
template <typename T, int D, int TILE_ROWS, bool STMATRIX = false, int R>
__device__ __forceinline__ void store_rows(T* to, long long stride, int rows, int columns,
                                           const float (&c)[R][D / 8][4], const float (&factor)[R][2],
                                           unsigned char* tile) {
    constexpr int CHUNKS = D * sizeof(T) / 16, PER_CHUNK = 16 / sizeof(T);
    int lane = threadIdx.x % 32;
    __syncwarp();
    if constexpr (STMATRIX) {
#pragma unroll
        for (int k = 0; k < R * D / 16; k++) {
            int r = k / (D / 16), n = k % (D / 16);
            unsigned bits[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &c[r][2 * n + i / 2][i % 2 * 2];
                store_pair(reinterpret_cast<T*>(&bits[i]),
                           make_float2(pair[0] * factor[r][i % 2], pair[1] * factor[r][i % 2]));
            }
            stmatrix_x4(columns_at<TILE_ROWS>(shared_address(tile) + down_rows(lane), n) + r * 16 * ROW_BYTES,
                        bits);
        }
    } else {
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int column = 8 * n + lane % 4 * 2;
                    unsigned char* at =
                        tile + chunk_offset<TILE_ROWS>(16 * r + lane / 4 + 8 * i, column / PER_CHUNK);
                    store_pair(reinterpret_cast<T*>(at) + column % PER_CHUNK,
                               make_float2(c[r][n][2 * i] * factor[r][i], c[r][n][2 * i + 1] * factor[r][i]));
                }
    }
    __syncwarp();
    int chunk = lane % CHUNKS;
    auto store = [&](int row) {
        if (row < rows && chunk * PER_CHUNK < columns)
            *reinterpret_cast<uint4*>(to + row * stride + chunk * PER_CHUNK) =
                *reinterpret_cast<const uint4*>(tile + chunk_offset<TILE_ROWS>(row, chunk));
    };
    if constexpr (D < 256) {
#pragma unroll
        for (int row = lane / CHUNKS; row < 16 * R; row += 32 / CHUNKS) store(row);
    } else {  // the compiler takes a tenth less time
#pragma unroll 4
        for (int row = lane / CHUNKS; row < 16 * R; row += 32 / CHUNKS) store(row);
    }
}

// What a thread block computes: rows from block * (rows per block) on, of one head of one batch element.
struct Work {
    int block, head, batch;
};

// The order of work. A section is a group of heads whose operands fit into the L2 cache, where repeated reads
// find them. In a section, the first block of each head comes first, then the second of each. `last_first`:
// the blocks of a head are taken in reverse.
__device__ __forceinline__ Work work_of(int index, int blocks, int heads, int batches, int section,
                                        bool last_first) {
    int number = index / (section * blocks), inside = index - number * section * blocks;
    int here = min(section, heads * batches - number * section), rank = inside / here;
    int head = number * section + inside - rank * here;
    return {last_first ? blocks - 1 - rank : rank, head % heads, head / heads};
}

// ---- packed sequences. Sequence i has the tokens from bounds[i] to bounds[i + 1] - 1; bounds[0] counts
// as 0. Tokens after the last one form sequence number `sequences`, which sees no keys. Wrong bounds
// (decreasing, or above `tokens`) give wrong sequences, but no address outside the tensors. Sequence i's
// tiles of N tokens have numbers from begin / N + i on, below tokens / N + sequences + 1; some are empty.

__device__ __forceinline__ int begin_of(const int* bounds, int i, int sequences, int tokens) {
    return i == 0 ? 0 : i > sequences ? tokens : max(0, min(bounds[i], tokens));
}

// The sequence that has tile number `tile`.
__device__ __forceinline__ int sequence_of(const int* bounds, int sequences, int tokens, int tile, int N) {
    int low = 0, high = sequences + 1;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (begin_of(bounds, middle, sequences, tokens) / N + middle <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// The queries and keys of a sequence: how many, and the numbers of the first ones. Without packed sequences:
// all of a batch element.
struct Sequence {
    int queries, keys, first_query, first_key, number;

    // Where the sequence's lse and delta begin, which are stored in tiles of N.
    __device__ __forceinline__ int stats(int N) const { return (first_query / N + number) * N; }
};

// The sequence of a thread block that owns ROWS keys, if KEYS, or queries. Changes work.block to count from
// the sequence's begin on.
template <bool PACKED, bool KEYS, int ROWS>
__device__ __forceinline__ Sequence sequence_of(Work& work, const int* query_bounds, const int* key_bounds,
                                                int sequences, int queries, int keys) {
    if (!PACKED) return {queries, keys, 0, 0, 0};
    int i = sequence_of(KEYS ? key_bounds : query_bounds, sequences, KEYS ? keys : queries, work.block, ROWS);
    int query = begin_of(query_bounds, i, sequences, queries), key = begin_of(key_bounds, i, sequences, keys);
    work.block -= (KEYS ? key : query) / ROWS + i;
    bool last = i == sequences;
    queries = last && KEYS ? 0 : max(0, begin_of(query_bounds, i + 1, sequences, queries) - query);
    keys = last && !KEYS ? 0 : max(0, begin_of(key_bounds, i + 1, sequences, keys) - key);
    return {queries, keys, query, key, i};
}

// The same in shared memory if PACKED, so that it occupies no registers in a loop.
template <bool PACKED>
__device__ __forceinline__ const Sequence& keep(Sequence& kept, const Sequence& found) {
    if (!PACKED) return found;
    if (threadIdx.x == 0) kept = found;
    __syncthreads();
    return kept;
}
