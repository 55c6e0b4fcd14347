// Tiles of 16-bit numbers in shared memory, and a warp's matrix products with them (mma.sync m16n8k16, sm_80 and newer).
//
// A tile has ROWS rows of D numbers, in D / 64 pages of 64 columns. A row of a page is 128 bytes: 8 chunks of 16 bytes. Chunk c of row r is
// stored at position c ^ (r % 8) (XOR swizzle), so that neither ldmatrix nor cp.async nor the stores of a fragment have bank conflicts.
// Tiles begin at multiples of 128 bytes. A tile and a lane's position in it are 32-bit shared-memory addresses.
#pragma once
#include "../common/pack.cuh"
#include "../common/ptx/async_copy.cuh"
#include "../common/ptx/mma.cuh"

constexpr int ROW_BYTES = 128;  // of a page

template <int ROWS>
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * ROW_BYTES + (chunk % 8 ^ row % 8) * 16;
}

// Strides in elements. The last dimension has stride 1.
struct Strides {
    long long batch, head, row;
};

// Start the copy of the rows first..first + ROWS - 1 of x by a group of THREADS threads: the block, or one warp. Rows from `rows` on and
// columns from `columns` on are filled with zeros.
template <int ROWS, int D, int THREADS, typename T>
__device__ __forceinline__ void copy_tile(unsigned tile, const T* x, long long stride, int first, int rows, int columns) {
    constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
    static_assert((STEP % 8 == 0 || 8 % STEP == 0) && ROWS % STEP == 0, "row % 8 is (i % 8) ^ (the first row's)");
    int row = threadIdx.x % THREADS / CHUNKS, chunk = threadIdx.x % CHUNKS;
    int limit = chunk * 8 < columns ? rows - first - row : 0;
    const T* from = x + (first + row) * stride + chunk * 8;
    unsigned to = tile + chunk_offset<ROWS>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * stride) cp_async_16((to ^ i % 8 * 16) + i * ROW_BYTES, from, i < limit);
}

// The position of a lane for ldmatrix.x4 on 16 rows and 16 columns: the four 8x8 tiles go down the rows first, or along the columns first.
__device__ __forceinline__ int down_rows(int lane) { return chunk_offset<0>(lane % 16, lane / 16); }
__device__ __forceinline__ int along_columns(int lane) { return chunk_offset<0>(lane % 8 + lane / 16 * 8, lane / 8 % 2); }

// The address of 16 columns, number k, for a lane at `position` of a tile.
template <int ROWS>
__device__ __forceinline__ unsigned columns_at(unsigned position, int k) {
    return (position ^ k % 4 * 32) + k / 4 * ROWS * ROW_BYTES;
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) { mma_f16(c, a, b); }
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    mma_bf16(c, a, b);
}

// c += a b for R x 1 blocks of 16x16, where b has two 16x8 halves.
template <typename T, int R, int N>
__device__ __forceinline__ void multiply_blocks(float (&c)[R][N][4], const unsigned (&a)[R][4], const unsigned (&b)[4], int n) {
    const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
    for (int r = 0; r < R; r++) {
        multiply_add(c[r][2 * n], a[r], left, T());
        multiply_add(c[r][2 * n + 1], a[r], right, T());
    }
}

// c = A B^T over D columns. A: 16 R rows of a tile of A_ROWS, from lane position `a` (down_rows). B: a tile of 8 N rows, from position `b`
// (along_columns). Lane l with g = l / 4 and t = l % 4 holds row 16 r + g + 8 i and column 8 n + 2 t + j of c in c[r][n][2 i + j].
template <typename T, int D, int A_ROWS, int R, int N>
__device__ __forceinline__ void multiply_transposed(float (&c)[R][N][4], unsigned a, unsigned b) {
#pragma unroll
    for (int i = 0; i < R * N * 4; i++) c[i / (N * 4)][i / 4 % N][i % 4] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        unsigned x[R][4], y[4];
#pragma unroll
        for (int r = 0; r < R; r++) load_tiles<false>(x[r], columns_at<A_ROWS>(a, k) + r * 16 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            load_tiles<false>(y, columns_at<8 * N>(b, k) + n * 16 * ROW_BYTES);
            multiply_blocks<T>(c, x, y, n);
        }
    }
}

// c += A B, with A (16 R x 8 K) in registers in the layout of multiply_transposed, which is rounded to T, and a tile B (8 K x D) from lane
// position `b` (down_rows). An accumulator becomes an operand in the lanes where it is.
template <typename T, int D, int R, int K>
__device__ __forceinline__ void multiply(float (&c)[R][D / 8][4], const float (&a)[R][K][4], unsigned b) {
    using Pair = typename PairOf<T>::type;
#pragma unroll
    for (int k = 0; k < K / 2; k++) {
        unsigned x[R][4], y[4];
#pragma unroll
        for (int i = 0; i < R * 4; i++) {
            const float* pair = &a[i / 4][2 * k + i % 4 / 2][i % 2 * 2];
            narrow(reinterpret_cast<Pair&>(x[i / 4][i % 4]), make_float2(pair[0], pair[1]));
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            load_tiles<true>(y, columns_at<8 * K>(b, n) + k * 16 * ROW_BYTES);
            multiply_blocks<T>(c, x, y, n);
        }
    }
}

// Store 16 R rows of a warp, c times `factor` of each row, through the warp's own rows of a tile, which no other warp uses. `tile` is
// the first of them. Rows from `rows` on and columns from `columns` on are not stored.
template <typename T, int D, int TILE_ROWS, int R>
__device__ __forceinline__ void store_rows(T* to, long long stride, int rows, int columns, const float (&c)[R][D / 8][4],
                                           const float (&factor)[R][2], unsigned char* tile) {
    using Pair = typename PairOf<T>::type;
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                unsigned char* at = tile + chunk_offset<TILE_ROWS>(16 * r + lane / 4 + 8 * i, n) + lane % 4 * 4;
                narrow(*reinterpret_cast<Pair*>(at), make_float2(c[r][n][2 * i] * factor[r][i], c[r][n][2 * i + 1] * factor[r][i]));
            }
    __syncwarp();
    constexpr int CHUNKS = D / 8;
    int chunk = lane % CHUNKS;
#pragma unroll
    for (int row = lane / CHUNKS; row < 16 * R; row += 32 / CHUNKS)
        if (row < rows && chunk * 8 < columns)
            *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) =
                *reinterpret_cast<const uint4*>(tile + chunk_offset<TILE_ROWS>(row, chunk));
}

// What a thread block computes: rows from block * (rows per block) on, of one head of one batch element.
struct Work {
    int block, head, batch;
};

// The order of work. Heads are taken in sections, so that the operands which a section reads many times stay in the L2 cache. In a section,
// the first block of each head comes first, then the second of each. `last_first`: the blocks of a head are taken in reverse.
__device__ __forceinline__ Work work_of(int index, int blocks, int heads, int batches, int section, bool last_first) {
    int number = index / (section * blocks), inside = index - number * section * blocks;
    int here = min(section, heads * batches - number * section), rank = inside / here;
    int head = number * section + inside - rank * here;
    return {last_first ? blocks - 1 - rank : rank, head % heads, head / heads};
}
