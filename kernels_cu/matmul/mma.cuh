// matmul v6: C = A . B on tensor cores by mma.sync, with operands copied by cp.async to a ring buffer and
// loaded by ldmatrix (sm_80).
//
// Operands   T is __half, __nv_bfloat16 or float. TERMS = 1: one product per element, float in TF32.
//            TERMS = 3: a float is the sum of two TF32 numbers, and three of their four products are added.
//            Each sum over 32 elements of K is added to a float register, because tensor cores truncate their
//            sums. The error is then that of float32.
// Layout     A_K: A is contiguous along k, else along m. B_K: B is contiguous along k, else along n. Nothing
//            is transposed in memory. A tile has 128 bytes of k. Along k: rows of 128 bytes. Along m or n: a
//            row per k. Units of 16 bytes are swizzled, so that copies and fragment loads have no bank
//            conflicts.
// Copies     cp.async of 16 bytes, so each line of an operand must be a whole number of 16-byte vectors;
//            matmul_pad copies other operands into such lines. Elements outside of a matrix become zeros.
// Launch     grid batch * splits * tiles, block Tile::THREADS, dynamic shared memory Tile::BYTES. With
//            splits > 1, partial sums go to `partials`, and matmul_v6_reduce adds them.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/mma.cuh"
#include "epilogue.cuh"

// A block tile of BM x BN. A warp computes WM x WN of it.
template <int BM_, int BN_, int WM_, int WN_, int STAGES_, int BLOCKS_PER_SM>
struct MmaTile {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, STAGES = STAGES_, BLOCKS = BLOCKS_PER_SM;
    static constexpr int WARPS_N = BN / WN, WARPS = BM / WM * WARPS_N, THREADS = 32 * WARPS;
    static constexpr int STAGE = (BM + BN) * 128, BYTES = STAGES * STAGE;
    static_assert(BYTES >= WARPS * WarpTile<WM, WN>::BYTES);
};
using Mma128x128 = MmaTile<128, 128, 64, 64, 3, 2>;
using Mma128x256 = MmaTile<128, 256, 64, 64, 4, 1>;
// for TERMS = 3, which needs more registers per result
using MmaSplit128x128 = MmaTile<128, 128, 64, 32, 3, 1>;
using Mma64x64 = MmaTile<64, 64, 32, 32, 3, 4>;
using MmaSplit64x64 = MmaTile<64, 64, 32, 32, 3, 3>;
using Mma16x128 = MmaTile<16, 128, 16, 32, 4, 3>;

// The tiles of one operand in shared memory, EXTENT rows (m or n) by 128 bytes of k.
template <typename T, bool ALONG_K, int EXTENT, int THREADS>
struct MmaOperand {
    static constexpr int BK = 128 / sizeof(T), PER_UNIT = 16 / sizeof(T);
    static constexpr int ROW = ALONG_K ? 128 : EXTENT * sizeof(T);  // bytes
    static constexpr int UNITS = ROW / 16, STEP = THREADS / UNITS;  // STEP rows are copied at a time
    static constexpr int ROWS = ALONG_K ? EXTENT : BK, COUNT = ROWS / STEP;
    static_assert(THREADS % UNITS == 0 && ROWS % STEP == 0);

    const char* from;  // the thread's next copy
    long long ld;      // bytes
    int extent, left;  // from the tile to the end of the matrix: rows, and elements of k

    // The tiles from row row0 and element k0 of K on.
    __device__ __forceinline__ MmaOperand(const T* matrix, long long stride, int row0, int rows, int k0,
                                          int K)
        : ld(stride * sizeof(T)), extent(rows - row0), left(K - k0) {
        long long first = threadIdx.x / UNITS + (ALONG_K ? row0 : k0);
        from = reinterpret_cast<const char*>(matrix + first * stride + (ALONG_K ? k0 : row0)) +
               threadIdx.x % UNITS * 16;
    }

    // The place of a unit of 16 bytes in its row. ldmatrix reads 8 rows of one unit; TF32 along mn reads 4
    // rows of 8 floats.
    __device__ __forceinline__ static int swizzled(int unit, int row) {
        if constexpr (ALONG_K) return unit ^ (row & 7);
        else if constexpr (sizeof(T) == 2)
            return unit ^ (UNITS >= 8 ? row & 7 : UNITS == 4 ? row >> 1 & 3 : row >> 2 & 1);
        else return unit ^ (UNITS >= 8 ? (row & 3) << 1 : (row >> 1 & 1) << 1);
    }

    // Start a quarter of the copies of the next tile to shared memory. There are no branches, so that they
    // mix with other instructions.
    __device__ __forceinline__ void copy(char* shared, int quarter) {
        int unit = threadIdx.x % UNITS;
        bool inside = unit * 16 < (ALONG_K ? left : extent) * int(sizeof(T));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            int row = threadIdx.x / UNITS + i * STEP;
            if (i * 4 / COUNT != quarter) continue;
            cp_async_16(shared_address(shared) + row * ROW + swizzled(unit, row) * 16, from,
                        inside && row < (ALONG_K ? extent : left));
            from += STEP * ld;
        }
        if (quarter < 3) return;
        left -= BK;
        if (ALONG_K) from += 128 - EXTENT * ld;
    }

    // Load 16 rows (m or n), 32 bytes of k: registers f[half of the rows + 2 * half of k] of mma's operand a,
    // or with B_ORDER f[half of k + 2 * half of the rows], which are two operands b. `step` counts 32 bytes
    // of k.
    template <bool B_ORDER>
    __device__ __forceinline__ static void load(unsigned (&f)[4], const char* shared, int row0, int step) {
        int lane = threadIdx.x % 32, i = lane / 8, half = B_ORDER ? i >> 1 : i & 1,
            k_half = B_ORDER ? i & 1 : i >> 1;
        unsigned from = shared_address(shared);
        if constexpr (ALONG_K) {
            int row = row0 + lane % 8 + 8 * half;
            load_tiles<false>(f, from + row * ROW + (swizzled(2 * step + k_half, row) << 4));
        } else if constexpr (sizeof(T) == 2) {
            int row = 16 * step + 8 * k_half + lane % 8;
            load_tiles<true>(f, from + row * ROW + (swizzled(row0 / 8 + half, row) << 4));
        } else {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                int row = 8 * step + lane % 4 + 4 * (B_ORDER ? r & 1 : r >> 1),
                    mn = row0 + lane / 4 + 8 * (B_ORDER ? r >> 1 : r & 1);
                f[r] = *reinterpret_cast<const unsigned*>(shared + row * ROW + (swizzled(mn / 4, row) << 4) +
                                                          mn % 4 * 4);
            }
        }
    }
};

__device__ __forceinline__ void mma(__half, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_f16(d, a, b);
}
__device__ __forceinline__ void mma(__nv_bfloat16, float (&d)[4], const unsigned (&a)[4],
                                    const unsigned (&b)[2]) {
    mma_bf16(d, a, b);
}
__device__ __forceinline__ void mma(float, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_tf32(d, reinterpret_cast<const float (&)[4]>(a), reinterpret_cast<const float (&)[2]>(b));
}

// acc += a b for MI x NJ tiles of mma. TERMS = 3: a and b are split, and the small products come first.
template <typename T, int TERMS, int MI, int NJ>
__device__ __forceinline__ void multiply_tiles(float (&acc)[MI][NJ][4], unsigned (&a)[MI][4],
                                               unsigned (&b)[NJ / 2][4]) {
    if constexpr (TERMS == 3) {
        float big_a[MI][4], small_a[MI][4], big_b[NJ][2], small_b[NJ][2];
#pragma unroll
        for (int i = 0; i < MI * 4; ++i)
            split_tf32(__uint_as_float(a[i / 4][i % 4]), big_a[i / 4][i % 4], small_a[i / 4][i % 4]);
#pragma unroll
        for (int j = 0; j < NJ * 2; ++j)
            split_tf32(__uint_as_float(b[j / 4][j % 4]), big_b[j / 2][j % 2], small_b[j / 2][j % 2]);
#pragma unroll
        for (int term = 0; term < 3; ++term)
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int j = 0; j < NJ; ++j)
                    mma_tf32(acc[i][j], term == 0 ? small_a[i] : big_a[i], term == 1 ? small_b[j] : big_b[j]);
    } else {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < MI * 4; ++i)
                a[i / 4][i % 4] = __float_as_uint(to_tf32(__uint_as_float(a[i / 4][i % 4])));
#pragma unroll
            for (int j = 0; j < NJ * 2; ++j)
                b[j / 4][j % 4] = __float_as_uint(to_tf32(__uint_as_float(b[j / 4][j % 4])));
        }
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < NJ; ++j)
                mma(T(), acc[i][j], a[i], reinterpret_cast<const unsigned (&)[2]>(b[j / 2][j % 2 * 2]));
    }
}

// Copies of the operands that are not aligned to 16 bytes, one after the other in `to`: lines that are
// contiguous in memory become lines of whole vectors of 16 bytes. What follows a line's last element in its
// last vector is zero. Each of batch matrices has `lines` lines of `length` elements, ld elements apart, and
// `across` vectors. Grid ceil(vectors of both / 256), block 256.
struct Lines {
    unsigned vectors, across, lines;
    int length;
    long long ld, batch;
};
struct TwoLines {
    Lines a, b;
};
template <typename T>
__global__ void __launch_bounds__(256) matmul_pad(T* to, const T* a, const T* b, TwoLines s) {
    constexpr int W = 16 / sizeof(T);
    wait_for_previous();
    let_next_start();
    unsigned i = blockIdx.x * 256 + threadIdx.x;
    bool of_a = i < s.a.vectors;
    Lines x = of_a ? s.a : s.b;
    unsigned vector = of_a ? i : i - s.a.vectors, line = vector / x.across;
    if (vector >= x.vectors) return;
    int first = int(vector - line * x.across) * W;
    const T* from = (of_a ? a : b) + line / x.lines * x.batch + line % x.lines * x.ld + first;
    Vec<T, W> v;
#pragma unroll
    for (int k = 0; k < W; ++k) v.v[k] = first + k < x.length ? from[k] : T(0);
    store_vec(to + i * (long long)W, v);
}

template <typename T, typename O, int TERMS, bool A_K, bool B_K, typename S>
__global__ void __launch_bounds__(S::THREADS, S::BLOCKS)
    matmul_v6(O* out, O* pre, float* partials, const T* a, const T* b, const T* bias, const O* residual,
              Sizes s) {
    using A = MmaOperand<T, A_K, S::BM, S::THREADS>;
    using B = MmaOperand<T, B_K, S::BN, S::THREADS>;
    constexpr int MI = S::WM / 16, NJ = S::WN / 8, STEPS = 4;
    // AHEAD: load the next tile's first fragments early. Off, and one of BUFFERS of fragments, where
    // registers do not suffice.
    constexpr bool AHEAD = sizeof(T) == 2;
    constexpr int BUFFERS = sizeof(T) == 4 && TERMS == 1 && !A_K && !B_K ? 1 : 2;
    extern __shared__ __align__(128) char ring[];
    wait_for_previous();
    let_next_start();
    int tiles = ((s.M + S::BM - 1) / S::BM) * ((s.N + S::BN - 1) / S::BN), tile = blockIdx.x % tiles,
        part = blockIdx.x / tiles;
    int split = part % s.splits, z = part / s.splits, k_tiles = (s.K + A::BK - 1) / A::BK, m0, n0;
    int first = int((long long)split * k_tiles / s.splits),
        count = int((split + 1ll) * k_tiles / s.splits) - first;
    tile_origin<S>(tile, s.M, s.N, m0, n0);
    int k0 = first * A::BK, end = min(s.K, k0 + count * A::BK);
    A copy_a(a + z * s.a_batch, s.lda, m0, s.M, k0, end);
    B copy_b(b + z * s.b_batch, s.ldb, n0, s.N, k0, end);
    int filled = 0, read = 0;  // the stages that are filled and read next, in bytes from `ring`
    auto advance = [](int stage) { return stage == (S::STAGES - 1) * S::STAGE ? 0 : stage + S::STAGE; };
    auto start = [&](int quarter) {  // zeros beyond the last tile
        copy_a.copy(ring + filled, quarter);
        copy_b.copy(ring + filled + S::BM * 128, quarter);
        if (quarter == 3) {
            cp_async_commit();
            filled = advance(filled);
        }
    };
    int warp = threadIdx.x / 32, m = warp / S::WARPS_N * S::WM, n = warp % S::WARPS_N * S::WN;
    float acc[MI][NJ][4] = {};
    unsigned fa[BUFFERS][MI][4], fb[BUFFERS][NJ / 2][4];
    auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < MI; ++j)
            A::template load<false>(fa[step % BUFFERS][j], ring + read, m + 16 * j, step);
#pragma unroll
        for (int j = 0; j < NJ / 2; ++j)
            B::template load<true>(fb[step % BUFFERS][j], ring + read + S::BM * 128, n + 16 * j, step);
    };
    auto wait = [&] {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();  // the next tile is there, and the stage that is filled next has been read
    };
    if (count)
#pragma unroll 1
        for (int i = 0; i < S::STAGES - 1; ++i)
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) start(quarter);
    if (AHEAD && count) {
        wait();
        load(0);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        if (!AHEAD) {
            wait();
#pragma unroll(BUFFERS == 1 ? 1 : 4)
            for (int quarter = 0; quarter < 4; ++quarter) start(quarter);
            load(0);
        }
        float sum[TERMS == 3 ? MI : 1][NJ][4] = {};
#pragma unroll
        // while one step is multiplied, the fragments of the next one are loaded
        for (int step = 0; step < STEPS; ++step) {
            if (BUFFERS == 1 && step > 0) load(step);
            if (BUFFERS == 2 && step + 1 < STEPS) load(step + 1);
            if (AHEAD) start(step);
            // also after the last tile, without a branch, so that these loads and the products mix
            if (AHEAD && step + 1 == STEPS) {
                wait();
                read = advance(read);
                load(0);
            }
            if constexpr (TERMS == 3) multiply_tiles<T, TERMS>(sum, fa[step % BUFFERS], fb[step % BUFFERS]);
            else multiply_tiles<T, TERMS>(acc, fa[step % BUFFERS], fb[step % BUFFERS]);
        }
        if constexpr (TERMS == 3) {
#pragma unroll
            for (int j = 0; j < MI * NJ * 4; ++j)
                acc[j / (NJ * 4)][j / 4 % NJ][j % 4] += sum[j / (NJ * 4)][j / 4 % NJ][j % 4];
        }
        if (!AHEAD) read = advance(read);
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring buffer is free
    using Staged = WarpTile<S::WM, S::WN>;
    float* stage = reinterpret_cast<float*>(ring + warp * Staged::BYTES);
#pragma unroll
    for (int i = 0; i < MI; ++i) Staged::put(stage, acc[i], 16 * i);
    long long C = (long long)s.M * s.N;
    if (s.splits > 1) {
        Output<T, float> to{partials + ((long long)split * s.batch + z) * C, nullptr, nullptr, nullptr, NONE};
        Staged::store(to, stage, m0 + m, n0 + n, s.M, s.N);
    } else {
        Output<T, O> to{out + z * C, pre ? pre + z * C : pre, bias, residual ? residual + z * C : residual,
                        s.activation};
        Staged::store(to, stage, m0 + m, n0 + n, s.M, s.N);
    }
}
