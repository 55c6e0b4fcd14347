// Tiles that TMA loads, and a warpgroup's matrix products with them (wgmma, sm_90a).
//
// A tile has D / 64 pages of 64 columns, with the 128-byte swizzle, which is the layout of tile.cuh. Its
// address is a multiple of 1024.
#pragma once
#include "../common/pack.cuh"
#include "../common/ptx/barrier.cuh"
#include "../common/ptx/launch.cuh"
#include "../common/ptx/mbarrier.cuh"
#include "../common/ptx/tma.cuh"
#include "../common/ptx/wgmma.cuh"
#include "softmax.cuh"
#include "tile.cuh"

// Registers per thread of a warpgroup, by setmaxnreg. PER_SM thread blocks share an SM.
template <int WARPGROUPS, int PER_SM>
struct Registers {
    static constexpr int AT_LAUNCH = 65536 / (128 * (WARPGROUPS + 1) * PER_SM) / 8 * 8;
    static constexpr int PRODUCER = 24, LEFT = (AT_LAUNCH * (WARPGROUPS + 1) - PRODUCER) / WARPGROUPS / 8 * 8;
    static constexpr int CONSUMER = LEFT < 240 ? LEFT : 240;
};

// A position in a ring buffer.
template <int STAGES>
struct Position {
    int stage = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};

template <int D>
constexpr int PAGES = (D + 63) / 64;

// Load ROWS rows of one head, from `first` on, into the pages of a tile. Rows after the end of the tensor, or
// with PACKED after the end of the sequence (`count` rows from `begin` on), are zeros. The tensor map of
// packed sequences has dimensions x (ROWS) and y (tokens + 1) in place of rows and batch: {x, y} is token x +
// y - ROWS, and x >= ROWS is outside. Made by _map in cukern/ops/attention/wgmma.py.
template <int D, int ROWS, bool PACKED>
__device__ __forceinline__ void load_tile(unsigned tile, const CUtensorMap* map, unsigned full, int first,
                                          int head, int batch, int begin, int count) {
    int end = min(first + ROWS, count), x = PACKED ? first + ROWS - end : first,
        y = PACKED ? begin + end : batch;
#pragma unroll
    for (int i = 0; i < PAGES<D>; i++) tma_load(tile + i * ROWS * ROW_BYTES, map, full, {64 * i, x, head, y});
}

// The low half of the descriptor of a place in a tile. Callers add offsets to it, and descriptor_of adds the
// high half. The asm keeps the compiler from computing all descriptors before a loop, where they would occupy
// many registers.
__device__ __forceinline__ unsigned place_of(unsigned address, int along_k = 0) {
    unsigned place = unsigned(describe(address, along_k, 0));
    asm volatile("" : "+r"(place));
    return place;
}
__device__ __forceinline__ unsigned long long descriptor_of(unsigned place) {
    return describe(0, 0, 1024) | SWIZZLED | place;
}

// c = A B^T over D columns by a warpgroup: 64 rows of a tile of A_ROWS, and a tile of 8 N rows.
template <typename T, int D, int A_ROWS, int N>
__device__ __forceinline__ void start_transposed(float (&c)[N][4], unsigned a, unsigned b) {
    a = place_of(a), b = place_of(b);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        int page = k / 4 * ROW_BYTES / 16, column = k % 4 * 2;
        wgmma<false, false, T>(c, descriptor_of(a + page * A_ROWS + column),
                               descriptor_of(b + page * N * 8 + column), k > 0);
    }
}

// c += A B, with A (64 x 16 K) in registers and a tile B (16 K x D).
template <typename T, int D, int K>
__device__ __forceinline__ void start_product(float (&c)[D / 8][4], const unsigned (&a)[K][4], unsigned b) {
    b = place_of(b, K * 16 * ROW_BYTES);
#pragma unroll
    for (int k = 0; k < K; k++) wgmma<T, true>(c, a[k], descriptor_of(b + k * ROW_BYTES), true);
}

// An accumulator as operand A of the next product, rounded to T.
template <typename T, int N>
__device__ __forceinline__ void to_operand(unsigned (&a)[N / 2][4], const float (&c)[N][4]) {
    using Pair = typename PairOf<T>::type;
#pragma unroll
    for (int i = 0; i < N * 2; i++) {
        const float* pair = &c[i / 2][i % 2 * 2];
        narrow(reinterpret_cast<Pair&>(a[i / 4][i % 4]), make_float2(pair[0], pair[1]));
    }
}
