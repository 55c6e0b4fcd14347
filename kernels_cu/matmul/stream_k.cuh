// matmul v5: register tiles of 8x16, filled by an asynchronous ring buffer, and stream-K. The last rung of
// ladder.cu, and the default for float without TF32.
//
// Registers  8x16 accumulators per thread: 128 FMAs for 24 elements loaded from shared memory. The order in
//            which they are stored keeps an accumulator and its operand in different register banks
//            (get_vector).
// Copies     cp.async fills a ring buffer of four stages while the FMA units work (TileCopy, multiply).
// Stream-K   The last, partly filled wave of tiles is divided evenly between all blocks. matmul_v5_fixup adds
//            the partial sums.
// Rounding   Long sums are divided into short chains of additions (multiply).
//
// The best block tile depends on the shape; cukern/ops/matmul/plan.py chooses it. A thread block of WARPS_M x
// WARPS_N warps computes a block tile of BM x BN. A warp is 8 x 4 threads. A thread has TM x TN accumulators.
// Tile128x128 is too large for double.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/vec.cuh"
#include "epilogue.cuh"

template <typename T>
__device__ __forceinline__ T bias_or_zero(const T* bias, int n) {
    return bias ? bias[n] : T(0);
}

// Elements in 16 bytes, the widest load and store: 4 floats or 2 doubles.
template <typename T>
constexpr int WIDE = 16 / sizeof(T);
template <typename T>
using Vec16 = Vec<T, WIDE<T>>;

// Load COUNT vectors of 16 bytes, `stride` elements apart, into consecutive registers.
template <typename T, int COUNT>
__device__ __forceinline__ void load_fragment(T* fragment, const T* shared, int stride) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        Vec16<T> x = load_vec<T, WIDE<T>>(shared + i * stride);
#pragma unroll
        for (int j = 0; j < WIDE<T>; ++j) fragment[i * WIDE<T> + j] = x.v[j];
    }
}

template <int TM_, int TN_, int WARPS_M, int WARPS_N_, int BLOCKS_PER_SM>
struct Tile {
    static constexpr int TM = TM_, TN = TN_, WARPS_N = WARPS_N_, BLOCKS = BLOCKS_PER_SM;
    static constexpr int BM = 8 * TM * WARPS_M, BN = 4 * TN * WARPS_N;
};
using Tile128x128 = Tile<8, 16, 2, 2, 2>;
using Tile64x64 = Tile<4, 8, 2, 2, 4>;
using Tile128x32 = Tile<4, 8, 4, 1, 4>;
using Tile32x128 = Tile<4, 8, 1, 4, 4>;
constexpr int THREADS = 128;
// length of a k tile. With 16, the unrolled loop does not fit into the instruction cache
constexpr int BK = 8;

// How an operand is copied to shared memory. "mn" is m for A and n for B.
enum CopyMode {
    ALONG_K,   // the operand is contiguous along k: copied by elements and transposed
    ALONG_MN,  // contiguous along mn: copied by elements
    // contiguous along mn: copied by 16 bytes. The address, the strides and the extent along mn must be
    // multiples of 16 bytes
    ALONG_MN_16B,
};

// A thread's part of copying the tiles of one operand to shared memory as [k][mn], tile after tile along k.
template <typename T, CopyMode COPY, int EXTENT>
struct TileCopy {
    static constexpr int WIDTH = COPY == ALONG_MN_16B ? WIDE<T> : 1;
    // ALONG_K: 8 neighbouring threads copy 8 neighbouring k (for float a sector of 32 bytes), and a warp
    // copies 4 rows. In shared memory rows are padded by 4 elements, so that bank(k, mn) = 4 k + mn and the
    // 32 stores of a warp have no bank conflicts.
    static constexpr int LD = EXTENT + (COPY == ALONG_K ? 4 : 0);
    static constexpr int LANES = COPY == ALONG_K ? 8 : EXTENT / WIDTH;
    static constexpr int STEP = THREADS / LANES;  // distance between a thread's copies in the other dimension
    static constexpr int COUNT = ((COPY == ALONG_K ? EXTENT : BK) + STEP - 1) / STEP;
    static constexpr int BYTES = BK * LD * sizeof(T);
    static constexpr int OUTSIDE = 0x7ffffff0;  // larger than any k

    const char* source;      // the thread's first element of the next tile
    unsigned offset[COUNT];  // from `source` to each of its elements, in bytes
    unsigned target;         // shared-memory address of its first element in stage 0 of the ring buffer
    int k;                   // k of its first element in the tile
    long long advance;       // bytes from one tile to the next

    __device__ __forceinline__ TileCopy(const T* x, long long ld, int mn0, int extent, int k0,
                                        unsigned ring) {
        int fast = threadIdx.x % LANES, slow = threadIdx.x / LANES;
        int last = extent - mn0 - WIDTH;  // the last mn in the tile that is inside the matrix
        unsigned pitch = ld * sizeof(T);
        k = COPY == ALONG_K ? fast : slow;
        int mn = COPY == ALONG_K ? slow : fast * WIDTH;
        target = ring + (k * LD + mn) * sizeof(T);
        int inside = min(mn, last);
        const T* first =
            COPY == ALONG_K ? x + (mn0 + inside) * ld + k0 + k : x + (k0 + k) * ld + mn0 + inside;
        source = reinterpret_cast<const char*>(first);
        advance = BK * sizeof(T) * (COPY == ALONG_K ? 1 : ld);
        // Beyond the edge of the matrix, copy its last row again. This needs no test in the loop, and the
        // results are not stored.
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            offset[i] = (COPY == ALONG_K ? min(mn + i * STEP, last) - inside : i * STEP) * pitch;
        // A thread whose first element is outside fills with zeros, because lanes that copy from the same
        // address are slow: they are serialized.
        if (mn > last) k = OUTSIDE;
    }

    // Start to copy the next tile to byte `stage` of the ring buffer. The first k_left k are copied; the rest
    // is filled with zeros.
    __device__ __forceinline__ void start(unsigned stage, int k_left) {
        // narrow tile: more threads than copies
        if (COPY != ALONG_K && LANES * BK < THREADS && threadIdx.x >= LANES * BK) return;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            unsigned step = COPY == ALONG_K ? i * STEP : i * STEP * LD;
            bool valid = (COPY == ALONG_K ? k : k + i * STEP) < k_left;
            cp_async<WIDTH * sizeof(T)>(target + stage + step * sizeof(T), source + offset[i], valid);
        }
        source += advance;
    }
};

// A thread's outputs in the block tile: rows m + row(i), columns n + column(j). They form vectors of 16
// bytes. Along m, the vectors of 8 threads are interleaved, and along n those of 4, so that the loads of a
// warp from shared memory are contiguous. A 16-byte load serves half a warp at a time if lanes i and i ^ 1,
// or i and i ^ 2, have the same address. Therefore bit 0 of the lane belongs to m and bit 1 to n: a load
// takes two steps instead of four.
template <typename T, typename S>
struct Place {
    static constexpr int V = WIDE<T>;
    int m, n;
    __device__ __forceinline__ Place() {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int lane_m = (lane & 1) | (lane >> 1 & 6), lane_n = (lane >> 1 & 1) | (lane >> 3 & 2);
        m = warp / S::WARPS_N * 8 * S::TM + lane_m * V;
        n = warp % S::WARPS_N * 4 * S::TN + lane_n * V;
    }
    __device__ __forceinline__ static int row(int i) { return i / V * 8 * V + i % V; }
    __device__ __forceinline__ static int column(int j) { return j / V * 4 * V + j % V; }
};

// acc += outer product of column and row, down one column of acc and up the next. Each FMA shares an operand
// with the FMA before it, which the operand reuse cache delivers. See get_vector about register banks.
template <typename T, int TM, int TN>
__device__ __forceinline__ void outer_product(T (&acc)[TM][TN], const T* column, const T* row) {
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int s = 0; s < TM; ++s) {
            int i = j % 2 ? TM - 1 - s : s;
            acc[i][j] += column[i] * row[j];
        }
}

// Vector q of a thread's accumulators: 4 rows of one column, in the order 1 0 3 2. The order avoids register
// bank conflicts in the main loop. The register file has two banks, of odd and of even registers. Each
// delivers one operand per cycle, and an FMA with two operands in one bank stalls. The compiler allocates
// consecutive registers for what is stored as one vector, and for column[0..3]. With this order, acc[i][j]
// and column[i] are in different banks. It is 8 % faster than 0 1 2 3.
template <typename T, int TM, int TN>
__device__ __forceinline__ Vec16<T> get_vector(const T (&acc)[TM][TN], int q) {
    constexpr int V = WIDE<T>;
    Vec16<T> x;
#pragma unroll
    for (int v = 0; v < V; ++v) x.v[v] = acc[q / TN * V + (v ^ 1)][q % TN];
    return x;
}

template <typename T, int TM, int TN>
__device__ __forceinline__ void set_vector(T (&acc)[TM][TN], int q, Vec16<T> x) {
    constexpr int V = WIDE<T>;
#pragma unroll
    for (int v = 0; v < V; ++v) acc[q / TN * V + (v ^ 1)][q % TN] = x.v[v];
}

template <typename T>
__device__ __forceinline__ Vec16<T> sum_of(Vec16<T> a, Vec16<T> b) {
#pragma unroll
    for (int v = 0; v < WIDE<T>; ++v) a.v[v] += b.v[v];
    return a;
}

// sums += acc, or sums = acc if `first`. `sums` is the thread's part of the workspace. The accumulators go
// through `scratch` in shared memory: with additions to `acc` itself the compiler does not allocate registers
// as described above get_vector, which is 4 % slower.
template <typename T, int TM, int TN>
__device__ __forceinline__ void add_to(T* sums, T* scratch, const T (&acc)[TM][TN], bool first) {
    constexpr int NEXT = WIDE<T> * THREADS, COUNT = TM * TN / WIDE<T>;
    constexpr int AHEAD = COUNT / 4;  // loads in flight at a time; there are not enough registers for all
#pragma unroll
    for (int q = 0; q < COUNT; q += AHEAD) {
        Vec16<T> earlier[AHEAD] = {};
        if (!first) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) earlier[i] = load_vec<T, WIDE<T>>(sums + (q + i) * NEXT);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i += 2) {
            store_vec(scratch, get_vector(acc, q + i));
            store_vec(scratch + NEXT, get_vector(acc, q + i + 1));
            // otherwise the compiler takes the values from acc instead of from scratch
            asm volatile("" ::: "memory");
            store_vec(sums + (q + i) * NEXT, sum_of<T>(earlier[i], load_vec<T, WIDE<T>>(scratch)));
            store_vec(sums + (q + i + 1) * NEXT,
                      sum_of<T>(earlier[i + 1], load_vec<T, WIDE<T>>(scratch + NEXT)));
        }
    }
}

// Main loop: acc = the product over `tiles` k tiles. Only the first k_left values of k exist. `as` and `bs`
// are the thread's first elements in stage 0 of the ring buffer. While one stage is used, the next STAGES - 1
// tiles are in flight. While the FMAs of one k run, the fragments of the next k are loaded from shared
// memory. After every `chain` tiles the accumulators are added to `sums`, the thread's part of the workspace,
// and set to zero: the error of one chain of additions grows with its length, that of several short chains
// with its square root.
template <int STAGES, typename T, int TM, int TN, typename CopyA, typename CopyB>
__device__ __forceinline__ void multiply(T (&acc)[TM][TN], T* sums, CopyA& copy_a, CopyB& copy_b, const T* as,
                                         const T* bs, T* ring, int tiles, int k_left, int chain) {
    constexpr int V = WIDE<T>, STAGE_BYTES = CopyA::BYTES + CopyB::BYTES, STAGE = STAGE_BYTES / sizeof(T);
    T column[2][TM], row[2][TN];
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        copy_a.start(s * STAGE_BYTES, k_left);
        copy_b.start(s * STAGE_BYTES, k_left);
        cp_async_commit();
        k_left -= BK;
    }
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load_fragment<T, TM / V>(column[0], as, 8 * V);
    load_fragment<T, TN / V>(row[0], bs, 4 * V);
    int use = 0, fill = STAGES - 1;
    for (int t = 0, end; t < tiles; t = end) {
        end = min(tiles, t + chain);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = 0;
        for (int i = t; i < end; ++i) {
#pragma unroll
            for (int k = 0; k < BK; ++k) {
                if (k == BK - 1) {  // the next fragment is in the next tile: wait for it
                    cp_async_wait<STAGES - 2>();
                    __syncthreads();
                    use = use + 1 == STAGES ? 0 : use + 1;
                }
                load_fragment<T, TM / V>(column[(k + 1) % 2], as + use * STAGE + (k + 1) % BK * CopyA::LD,
                                         8 * V);
                load_fragment<T, TN / V>(row[(k + 1) % 2], bs + use * STAGE + (k + 1) % BK * CopyB::LD,
                                         4 * V);
                // The stage that all threads left at the last barrier is free. Beyond the last tile it is
                // filled with zeros that are not used. The copies of A and B are issued at different k, so
                // that they do not queue up.
                if (k == 1) copy_a.start(fill * STAGE_BYTES, k_left);
                if (k == 4) {
                    copy_b.start(fill * STAGE_BYTES, k_left);
                    cp_async_commit();
                    k_left -= BK;
                    fill = fill + 1 == STAGES ? 0 : fill + 1;
                }
                outer_product(acc, column[k % 2], row[k % 2]);
            }
        }
        if (tiles > chain) {
            add_to(sums, ring + fill * STAGE + threadIdx.x * V, acc, t == 0);
            __syncthreads();  // `scratch` is the stage that is filled next
        }
    }
    if (tiles > chain) {
#pragma unroll
        for (int q = 0; q < TM * TN / V; ++q) set_vector(acc, q, load_vec<T, V>(sums + q * THREADS * V));
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring buffer is free again
}

// True if the rows of C, and bias, consist of aligned vectors of 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_are_vectors(const T* out, const T* bias, int N) {
    unsigned long long addresses =
        reinterpret_cast<unsigned long long>(out) | reinterpret_cast<unsigned long long>(bias);
    return N % WIDE<T> == 0 && addresses % 16 == 0;
}

// Epilogue: store the thread's outputs, plus bias, to C. (m0, n0) is the origin of the block tile.
template <typename T, typename S>
struct Store {
    using P = Place<T, S>;
    static constexpr int V = P::V, ROWS = S::BM / S::TM * V;
    // padded: the 16-byte stores of 8 lanes have no bank conflicts
    static constexpr int LD = S::BN + 32 / sizeof(T);
    static constexpr int BYTES = ROWS * LD * sizeof(T);

    __device__ __forceinline__ static Vec16<T> vector(const T (&acc)[S::TM][S::TN], int i, int j) {
        Vec16<T> x;
#pragma unroll
        for (int v = 0; v < V; ++v) x.v[v] = acc[i][j + v];
        return x;
    }

    // From registers, if rows_are_vectors.
    __device__ __forceinline__ static void directly(T* out, const T* bias, const T (&acc)[S::TM][S::TN],
                                                    const P& place, int m0, int n0, int M, int N) {
#pragma unroll
        for (int j = 0; j < S::TN; j += V) {
            int n = n0 + place.n + P::column(j);
            if (n >= N) continue;
            Vec16<T> b = {};
            if (bias) b = load_vec<T, V>(bias + n);
#pragma unroll
            for (int i = 0; i < S::TM; ++i) {
                int m = m0 + place.m + P::row(i);
                Vec16<T> x = vector(acc, i, j);
#pragma unroll
                for (int v = 0; v < V; ++v) x.v[v] += b.v[v];
                if (m < M) store_vec(out + m * (long long)N + n, x);
            }
        }
    }

    // Through shared memory, V rows per thread at a time. A warp then stores 32 neighbouring elements of a
    // row, whatever the alignment.
    __device__ __forceinline__ static void staged(T* out, const T* bias, const T (&acc)[S::TM][S::TN],
                                                  T* stage, const P& place, int m0, int n0, int M, int N) {
        int row = place.m / (8 * S::TM) * 8 * V + place.m % (8 * S::TM) / V, n = threadIdx.x % S::BN;
        T b = n0 + n < N ? bias_or_zero(bias, n0 + n) : T(0);
#pragma unroll
        for (int g = 0; g < S::TM; g += V) {
#pragma unroll
            for (int v = 0; v < V; ++v)
#pragma unroll
                for (int j = 0; j < S::TN; j += V)
                    store_vec(stage + (row + v * 8) * LD + place.n + P::column(j), vector(acc, g + v, j));
            __syncthreads();
#pragma unroll 4
            for (int r = threadIdx.x / S::BN; r < ROWS; r += THREADS / S::BN) {
                int m = m0 + r / (8 * V) * 8 * S::TM + g * 8 + r % 8 * V + r / 8 % V;  // r is (warp, v, lane)
                if (m < M && n0 + n < N) out[m * (long long)N + n0 + n] = stage[r * LD + n] + b;
            }
            __syncthreads();
        }
    }
};

// The offset of the thread's vector q of tile p of the workspace. Vectors of neighbouring threads are
// adjacent: a warp accesses 512 contiguous bytes.
template <typename T, typename S>
__device__ __forceinline__ long long partial_offset(long long p, int q) {
    return ((p * (S::TM * S::TN / WIDE<T>)+q) * THREADS + threadIdx.x) * WIDE<T>;
}

template <typename T, typename S>
__device__ __forceinline__ void store_partial(T* partials, long long p, const T (&acc)[S::TM][S::TN]) {
#pragma unroll
    for (int q = 0; q < S::TM * S::TN / WIDE<T>; ++q)
        store_vec(partials + partial_offset<T, S>(p, q), get_vector(acc, q));
}

// v5: a persistent kernel with stream-K. Tiles are numbered through all matrices C of a batch. Blocks [0,
// shared_blocks) share the k tiles of the first `shared_tiles` tiles equally: block b takes items [b * total
// / shared_blocks, (b + 1) * total / shared_blocks) of the list (tile 0, k tile 0), (tile 0, k tile 1), ...
// It stores the partial sums of an incomplete tile of C to the workspace, as tile 2 b, or 2 b + 1 if they
// begin at k = 0, and matmul_v5_fixup adds them. The other tiles of C are not split; all blocks take them in
// turn. Grid: at most the number of blocks that run at the same time; block 128. The workspace has room for
// 2 * shared_blocks tiles, and for one more per block if K is longer than `chain` k tiles. The BM (BN) rows
// of a tile must span less than 2^32 bytes of A (B).
template <typename T, CopyMode A_COPY, CopyMode B_COPY, typename S>
__global__ void __launch_bounds__(THREADS, S::BLOCKS * 4 / sizeof(T))
    matmul_v5(T* out, T* workspace, const T* a, const T* b, const T* bias, Sizes s, int shared_blocks,
              int shared_tiles, int chain) {
    using CopyA = TileCopy<T, A_COPY, S::BM>;
    using CopyB = TileCopy<T, B_COPY, S::BN>;
    constexpr int STAGES = 4, RING = STAGES * (CopyA::BYTES + CopyB::BYTES), STAGED = Store<T, S>::BYTES;
    __shared__ alignas(16) char ring[RING > STAGED ? RING : STAGED];
    Place<T, S> place;
    const T* as = reinterpret_cast<const T*>(ring) + place.m;
    const T* bs = reinterpret_cast<const T*>(ring + CopyA::BYTES) + place.n;

    int block = blockIdx.x, M = s.M, N = s.N, K = s.K, k_tiles = max(1, (K + BK - 1) / BK);
    int tiles = ((M + S::BM - 1) / S::BM) * ((N + S::BN - 1) / S::BN);  // of one matrix
    unsigned next = shared_tiles + block;                               // may exceed 2^31 by the grid
    // the next k tile of `tile`, and how many k tiles are left of the block's part
    int tile = 0, first = 0, left = 0;
    if (block < shared_blocks) {
        long long total = (long long)shared_tiles * k_tiles, begin = block * total / shared_blocks;
        left = int((block + 1) * total / shared_blocks - begin);
        tile = int(begin / k_tiles);
        first = int(begin % k_tiles);
    }
    bool vectors = rows_are_vectors(out, bias, N);
    for (;;) {
        if (left == 0) {
            if (next >= tiles * s.batch) return;
            tile = next;
            first = 0;
            left = k_tiles;
            next += gridDim.x;
        }
        int k0 = first * BK, count = min(k_tiles - first, left), m0, n0;
        bool whole = count == k_tiles;
        int p = whole ? 2 * shared_blocks + block : 2 * block + (first == 0);
        tile_origin<S>(tile % tiles, M, N, m0, n0);
        CopyA copy_a(a + tile / tiles * s.a_batch, s.lda, m0, M, k0, shared_address(ring));
        CopyB copy_b(b + tile / tiles * s.b_batch, s.ldb, n0, N, k0, shared_address(ring) + CopyA::BYTES);
        T acc[S::TM][S::TN];
        multiply<STAGES>(acc, workspace + partial_offset<T, S>(p, 0), copy_a, copy_b, as, bs,
                         reinterpret_cast<T*>(ring), count, min(K - k0, count * BK), chain);
        // the compiler computes m0 and n0 again instead of keeping them in registers
        asm volatile("" : "+r"(tile), "+r"(first));
        tile_origin<S>(tile % tiles, M, N, m0, n0);
        T* to = out + (long long)M * N * (tile / tiles);
        if (!whole) store_partial<T, S>(workspace, 2 * block + (first == 0), acc);
        else if (vectors) Store<T, S>::directly(to, bias, acc, place, m0, n0, M, N);
        else Store<T, S>::staged(to, bias, acc, reinterpret_cast<T*>(ring), place, m0, n0, M, N);
        ++tile;
        first = 0;
        left -= count;
    }
}

// Add the partial sums of the tiles of C that several blocks of matmul_v5 shared. Deterministic: they are
// added in the order of k. A thread computes V x V of its outputs in matmul_v5, where V is the number of
// elements in 16 bytes. Six blocks per SM are fewer than ptxas aims at: then there are registers for four
// partial sums in flight. Grid shared_tiles * (TM / V) * (TN / V), block 128.
template <typename T, typename S>
__global__ void __launch_bounds__(THREADS, 6)
    matmul_v5_fixup(T* out, const T* partials, const T* bias, Sizes s, int shared_blocks, int shared_tiles) {
    using P = Place<T, S>;
    constexpr int V = P::V, ACROSS = S::TN / V, PARTS = S::TM / V * ACROSS;
    int tile = blockIdx.x / PARTS, i = blockIdx.x % PARTS / ACROSS * V, j = blockIdx.x % ACROSS * V;
    int M = s.M, N = s.N, k_tiles = max(1, (s.K + BK - 1) / BK),
        tiles = ((M + S::BM - 1) / S::BM) * ((N + S::BN - 1) / S::BN);
    long long total = (long long)shared_tiles * k_tiles, begin = (long long)tile * k_tiles;
    // Block b begins at item b * total / shared_blocks. Solved for the blocks that have the first and the
    // last item of this tile.
    int first = int(((begin + 1) * shared_blocks - 1) / total);
    int last = int(((begin + k_tiles) * shared_blocks - 1) / total);
    if (first == last) return;  // one block computed the whole tile and stored it
    Vec16<T> sum[V] = {};
#pragma unroll 4
    for (int b = first; b <= last; ++b)
#pragma unroll
        for (int c = 0; c < V; ++c) {
            long long p = partial_offset<T, S>(2ll * b + (b == first), i / V * S::TN + j + c);
            Vec16<T> x = load_vec<T, V>(partials + p);
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v ^ 1].v[c] += x.v[v];
        }
    P place;
    int m0, n0;
    tile_origin<S>(tile % tiles, M, N, m0, n0);
    out += (long long)M * N * (tile / tiles);
    int m = m0 + place.m + P::row(i), n = n0 + place.n + P::column(j);
    bool vectors = rows_are_vectors(out, bias, N);
    if (n >= N) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if (m + v >= M) return;
        T* row = out + (m + v) * (long long)N + n;
#pragma unroll
        for (int c = 0; c < V; ++c) sum[v].v[c] += n + c < N ? bias_or_zero(bias, n + c) : T(0);
        if (vectors) {
            store_vec(row, sum[v]);
        } else {
#pragma unroll
            for (int c = 0; c < V; ++c)
                if (n + c < N) row[c] = sum[v].v[c];
        }
    }
}
