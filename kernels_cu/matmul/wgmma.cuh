// matmul v7: C = A . B on tensor cores by wgmma, with operands copied by TMA, persistent and warp-specialised
// (sm_90a).
//
// Operands   T is __half, __nv_bfloat16 or float (TF32). A_K and B_K as in mma.cuh; float requires both,
//            because wgmma reads TF32 operands only along k. Addresses and strides are multiples of 16 bytes.
//            TMA fills what is outside of a matrix with zeros. TERMS = 3: float operands that matmul_split
//            has split into two TF32 numbers. Three products of them are added, and sums of 32 elements of K
//            are added to float registers, because tensor cores truncate their sums. The error is then that
//            of float32.
// Blocks     One warpgroup starts the copies (the producer); two compute, each 64 rows of the tile (the
//            consumers). The producer runs ahead of the consumers, also to the next tile. mbarriers
//            full[stage] and empty[stage] pass the stages of the ring buffer back and forth.
// Clusters   CM blocks have neighbouring tiles along m: each copies its part of the tile of B to all. Or CK
//            blocks share the sum over K of a tile (split-K), and add their partial sums through distributed
//            shared memory; each block then has one tile.
// Split-K    Or s.splits blocks compute the parts of a tile's sum, as tiles of a float32 output (splits,
//            batch, M, N) without an epilogue, which matmul_v6_reduce adds.
// Layout     A stage has 128 + BN rows of 128 bytes, with the 128-byte swizzle. Along k: a row is a row of
//            the operand. Along m or n: a row has 64 elements of one k, and each 64 rows are a box of 64 k.
// Results    A warp writes boxes of 16 rows x 128 bytes to shared memory, from where TMA stores them. 16-bit
//            results are rounded, kept in registers, and stored while the next tile is multiplied, so the
//            tensor cores do not wait for the stores.
// Launch     grid: a multiple of the cluster, at most the number of SMs, or CK * tiles; block 384, dynamic
//            shared memory Tile::BYTES.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "epilogue.cuh"

template <int BN_, int STAGES_, int CM_, int CK_ = 1, int TERMS_ = 1>
struct WgmmaTile {
    static constexpr int BM = 128, BN = BN_, STAGES = STAGES_, CM = CM_, CK = CK_, CLUSTER = CM * CK,
                         TERMS = TERMS_;
    // fragments of a warp across a tile
    static constexpr int NJ = BN / 8;
    // of an operand: big and small numbers
    static constexpr int PARTS = TERMS == 3 ? 2 : 1;
    static constexpr int A = BM * 128, B = BN * 128, STAGE = (A + B) * PARTS;  // bytes
    // each warp has two boxes of results, at BOXES
    static constexpr int BOX = 16 * 128, BOXES = STAGES * STAGE;
    static constexpr int BARRIERS = BOXES + 16 * BOX, BYTES = BARRIERS + STAGES * 16;
    // floats of a row of partial sums; the stores of fragments have no bank conflicts
    static constexpr int LD = BN + 8;
    static_assert(BOXES >= BM * LD * 4 && (CK == 1 || CM == 1));
};
// The tiles of a cluster, as a tile for tile_origin.
template <class S>
struct ClusterTile {
    static constexpr int BM = S::BM * S::CM, BN = S::BN;
};
using Wgmma128x256 = WgmmaTile<256, 4, 2>;
using Wgmma128x192 = WgmmaTile<192, 4, 2>;
using Wgmma128x128 = WgmmaTile<128, 6, 1>;
using Wgmma128x64 = WgmmaTile<64, 8, 1>;
using Wgmma128x64k2 = WgmmaTile<64, 8, 1, 2>;
using WgmmaSplit128x128 = WgmmaTile<128, 3, 2, 1, 3>;

// How results are stored: by TMA; by TMA, added to what is there; or by the threads, where TMA cannot.
enum Storing { BY_TMA, ADDED, BY_THREADS };

// Two 16-bit results as the bits of a pair.
template <typename O>
__device__ __forceinline__ unsigned narrow_pair(float x, float y) {
    typename PairOf<O>::type pair;
    narrow(pair, make_float2(x, y));
    return reinterpret_cast<const unsigned&>(pair);
}

// Two neighbouring biases: 16-bit ones in one register.
template <typename T>
struct TwoOf {
    unsigned bits;
    __device__ __forceinline__ float2 wide() const { return widen(typename PairOf<T>::type(), bits); }
};
template <>
struct TwoOf<float> {
    float2 two;
    __device__ __forceinline__ float2 wide() const { return two; }
};

template <typename T>
__device__ __forceinline__ TwoOf<T> load_two(const T* bias, int n, int N) {
    if (n + 1 < N) return *reinterpret_cast<const TwoOf<T>*>(bias + n);
    TwoOf<T> two = {};
    if (n < N) reinterpret_cast<T&>(two) = bias[n];
    return two;
}

// A warp's part of the results: it finishes boxes of 16 rows x COLUMNS columns, each 128 bytes wide, in
// shared memory. The 16-byte unit u of row r is at unit u ^ (r & 7), the 128-byte swizzle of TMA.
template <typename T, typename O>
struct Results {
    O *out, *pre;
    const O* residual;
    const CUtensorMap *map_out, *map_pre;
    int M, N, storing;
    static constexpr int COLUMNS = 128 / sizeof(O), W = 16 / sizeof(O), BYTES = 2048;

    // Wait until at most PENDING of the stores from boxes still read shared memory.
    template <int PENDING>
    __device__ __forceinline__ static void wait() {
        if (threadIdx.x % 32 == 0) bulk_wait_read<PENDING>();
        __syncwarp();
    }

    // Write a box. get(i) is the pair of row lane / 4 + i % 2 * 8 and columns i / 2 * 8 + lane % 4 * 2 + {0,
    // 1}.
    template <class Get>
    __device__ __forceinline__ static void put(char* box, Get get) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i += 4) {
            if constexpr (sizeof(O) == 2) {
                unsigned bits[4] = {get(i), get(i + 1), get(i + 2), get(i + 3)};
                stmatrix_x4(shared_address(box) + lane % 16 * 128 + ((i / 2 + lane / 16) ^ (lane & 7)) * 16,
                            bits);
            } else {
#pragma unroll
                for (int j = i; j < i + 4; ++j) {
                    int row = lane / 4 + j % 2 * 8, unit = j / 2 * 2 + lane % 4 / 2;
                    *reinterpret_cast<float2*>(box + row * 128 + (unit ^ (row & 7)) * 16 + lane % 2 * 8) =
                        get(j);
                }
            }
        }
    }

    // Add the residual to a box at (m, n) of matrix z, and start to store it.
    __device__ __forceinline__ void finish(char* box, int m, int n, int z) const {
        if (m >= M || n >= N) return;
        if (residual) add_residual(box, m, n, z);
        send(out, map_out, box, m, n, z, storing == ADDED);
    }

    // Start to store a box: add it to what is there, or overwrite that.
    __device__ __forceinline__ void send(O* to, const CUtensorMap* map, char* box, int m, int n, int z,
                                         bool add) const {
        int lane = threadIdx.x % 32;
        if (storing == BY_THREADS) {
            __syncwarp();
            O* at = to + ((long long)z * M + m) * N + n + lane;
#pragma unroll 4
            for (int row = 0; row < 16; ++row, at += N)
#pragma unroll
                for (int c = 0; c < COLUMNS; c += 32) {
                    const O* unit =
                        reinterpret_cast<const O*>(box + row * 128 + (((c + lane) / W) ^ (row & 7)) * 16);
                    if (m + row < M && n + c + lane < N) at[c] = unit[lane % W];
                }
            __syncwarp();
            return;
        }
        fence_async();
        __syncwarp();
        if (lane) return;
        if (add) tma_add(map, shared_address(box), {n, m, z});
        else tma_store(map, shared_address(box), {n, m, z});
        bulk_commit();
    }

  private:
    __device__ __forceinline__ void add_residual(char* box, int m, int n, int z) const {
        __syncwarp();
#pragma unroll 2
        for (int i = threadIdx.x % 32; i < 128; i += 32) {
            int row = i / 8, column = n + i % 8 * W;
            if (m + row >= M || column >= N) continue;
            const O* from = residual + ((long long)z * M + m + row) * N + column;
            Vec<O, W>& x = *reinterpret_cast<Vec<O, W>*>(box + row * 128 + (i % 8 ^ (row & 7)) * 16);
            float v[W];
            unpack(v, x);
            if (storing != BY_THREADS) {
                add_to(v, load_vec<O, W>(from));
            } else {
#pragma unroll
                for (int k = 0; k < W; ++k)
                    if (column + k < N) v[k] += load_as(from[k]);
            }
            x = pack<O, W>(v);
        }
    }
};

// For TERMS = 3: split x, (batch, rows, K), into (2, batch, rows, ld_to): its big parts, then its small ones.
// ALONG_K: x is contiguous along k, else along the rows; ld is the other stride, x_batch that of the batch.
// Grid batch * ceil(rows / 32) * ceil(K / 32), block (32, 8).
template <bool ALONG_K>
__global__ void __launch_bounds__(256) matmul_split(float* to, const float* x, int batch, int rows, int K,
                                                    long long ld_to, long long ld, long long x_batch) {
    __shared__ float tile[32][33];
    wait_for_previous();
    int across = (K + 31) / 32, down = (rows + 31) / 32, z = blockIdx.x / (across * down);
    int row0 = blockIdx.x / across % down * 32, k0 = blockIdx.x % across * 32, lane = threadIdx.x;
    if constexpr (!ALONG_K) {
#pragma unroll
        for (int i = threadIdx.y; i < 32; i += 8)
            if (row0 + lane < rows && k0 + i < K)
                tile[lane][i] = x[z * x_batch + (k0 + i) * ld + row0 + lane];
        __syncthreads();
    }
#pragma unroll
    for (int i = threadIdx.y; i < 32; i += 8) {
        if (row0 + i >= rows || k0 + lane >= K) continue;
        float big, small;
        split_tf32(ALONG_K ? x[z * x_batch + (row0 + i) * ld + k0 + lane] : tile[i][lane], big, small);
        long long at = ((long long)z * rows + row0 + i) * ld_to + k0 + lane;
        to[at] = big;
        to[at + (long long)batch * rows * ld_to] = small;
    }
}

#if __CUDA_ARCH__ >= 900
// The ring buffer of a block, and the stage that is filled or read next.
template <class S>
struct Ring {
    unsigned at;
    int stage = 0, phase = 0;

    __device__ __forceinline__ unsigned full(int i) const { return at + S::BARRIERS + 8 * i; }
    __device__ __forceinline__ unsigned empty(int i) const { return at + S::BARRIERS + 8 * (S::STAGES + i); }
    __device__ __forceinline__ unsigned a(int part = 0) const { return at + stage * S::STAGE + part * S::A; }
    __device__ __forceinline__ unsigned b(int part = 0) const { return a(S::PARTS) + part * S::B; }
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == S::STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    }
    // Tell each block of the cluster that copies to it that this warp has read stage i.
    __device__ __forceinline__ void release(int i) const {
        int lane = threadIdx.x % 32;
        if (lane < S::CM) mbarrier_arrive(S::CM == 1 ? empty(i) : shared_of_rank(empty(i), lane));
    }
};

// A barrier of the cluster, or of the block if CLUSTER is 1. In a cluster it is relaxed: only what
// mbarriers_made released is visible after it.
template <int CLUSTER>
__device__ __forceinline__ void meet() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    } else {
        __syncthreads();
    }
}

// The work of a block: a tile of result z, which is part z / batch of the sum over K of matrix z % batch: k
// tiles [first, first + count).
template <typename T, class S>
struct Work {
    int m0, n0, z, matrix, first, count;
    __device__ __forceinline__ Work(int i, int tiles, const Sizes& s) : z(i / tiles), matrix(z % s.batch) {
        constexpr int BK = 128 / sizeof(T);
        int rank = S::CLUSTER > 1 ? cluster_rank() : 0, k_tiles = (s.K + BK - 1) / BK;
        int part = S::CK > 1 ? rank : z / s.batch, parts = S::CK > 1 ? S::CK : s.splits;
        first = part * k_tiles / parts;
        count = (part + 1) * k_tiles / parts - first;
        tile_origin<ClusterTile<S>>(i % tiles, s.M, s.N, m0, n0);
        if constexpr (S::CM > 1) m0 += rank * S::BM;
    }
};

// Start the copies of COUNT rows (m or n) from `row` on, by 128 bytes of k from k0 on, of matrix z. SHARERS
// blocks of the cluster copy a part each, to all of them.
template <typename T, bool ALONG_K, int COUNT, int SHARERS>
__device__ __forceinline__ void copy_operand(unsigned to, const CUtensorMap* map, unsigned full, int row,
                                             int k0, int z) {
    constexpr int BOX = ALONG_K ? COUNT / SHARERS : 64;  // rows
    static_assert(BOX % 8 == 0 && COUNT % BOX == 0);
#pragma unroll
    for (int i = SHARERS > 1 ? cluster_rank() : 0; i < COUNT / BOX; i += SHARERS) {
        int x = ALONG_K ? k0 : row + BOX * i, y = ALONG_K ? row + BOX * i : k0;
        if constexpr (SHARERS > 1)
            tma_multicast(to + i * BOX * 128, map, full, {x, y, z}, (1 << SHARERS) - 1);
        else tma_load(to + i * BOX * 128, map, full, {x, y, z});
    }
}

// The producer, one thread.
template <typename T, bool A_K, bool B_K, class S>
__device__ __forceinline__ void copy_tiles(Ring<S> ring, const CUtensorMap* map_a, const CUtensorMap* map_b,
                                           const Sizes& s, int tiles) {
    constexpr int BK = 128 / sizeof(T);
    for (int i = blockIdx.x / S::CLUSTER; i < tiles * s.batch * s.splits; i += gridDim.x / S::CLUSTER) {
        Work<T, S> w(i, tiles, s);
        for (int k = w.first; k < w.first + w.count; ++k, ring.advance()) {
            unsigned full = ring.full(ring.stage);
            mbarrier_wait_in_block(ring.empty(ring.stage), ring.phase ^ 1);
            mbarrier_arrive(full, S::STAGE);
#pragma unroll
            for (int p = 0; p < S::PARTS; ++p) {
                copy_operand<T, A_K, S::BM, 1>(ring.a(p), map_a, full, w.m0, k * BK,
                                               s.a_batch ? w.matrix + p * s.batch : p);
                copy_operand<T, B_K, S::BN, S::CM>(ring.b(p), map_b, full, w.n0, k * BK,
                                                   s.b_batch ? w.matrix + p * s.batch : p);
            }
        }
    }
}

// The descriptor of the rows from `row` (a multiple of 64, or 0) on of an operand in shared memory, for 32
// bytes of k.
template <bool ALONG_K>
__device__ __forceinline__ unsigned long long operand_at(unsigned tile, int row, int step) {
    if constexpr (ALONG_K) return describe(tile + row * 128 + step * 32, 0, 1024) | SWIZZLED;
    else return describe(tile + row * 128 + step * 2048, 8192, 1024) | SWIZZLED;
}

// acc = the product of `count` k tiles, for a consumer's 64 rows from `row` on. between(last) is called while
// a k tile is multiplied. The last products are not complete yet; their stage is returned.
template <typename T, bool A_K, bool B_K, class S, class Between>
__device__ __forceinline__ int multiply(float (&acc)[S::NJ][4], Ring<S>& ring, int row, int count,
                                        Between between) {
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k, ring.advance()) {
        mbarrier_wait_in_block(ring.full(ring.stage), ring.phase);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma<!A_K, !B_K, T>(acc, operand_at<A_K>(ring.a(), row, step),
                                 operand_at<B_K>(ring.b(), 0, step), k + step > 0);
        wgmma_commit();
        between(k + 1 == count);
        if (k > 0) {
            wgmma_wait<1>();
            ring.release(previous);
        }
        previous = ring.stage;
    }
    return previous;
}

// The same for TERMS = 3. The products are complete.
template <class S>
__device__ __forceinline__ void multiply_split(float (&acc)[S::NJ][4], Ring<S>& ring, int row, int count) {
#pragma unroll
    for (int j = 0; j < S::NJ * 4; ++j) acc[j / 4][j % 4] = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k, ring.advance()) {
        float sum[S::NJ][4];
        mbarrier_wait_in_block(ring.full(ring.stage), ring.phase);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 12; ++i)  // the small products first
            wgmma<false, false, float>(sum, operand_at<true>(ring.a(i < 4), row, i % 4),
                                       operand_at<true>(ring.b(i / 4 == 1), 0, i % 4), i > 0);
        wgmma_commit();
        wgmma_wait<0>(sum);
        ring.release(ring.stage);
#pragma unroll
        for (int j = 0; j < S::NJ * 4; ++j) acc[j / 4][j % 4] += sum[j / 4][j % 4];
    }
}

// Split-K in a cluster: store a consumer's accumulators, wait for those of the other blocks, add a part of
// the rows of the tile, in the order of k, and finish it.
template <typename T, typename O, class S>
__device__ __forceinline__ void add_partials(const float (&acc)[S::NJ][4], float* sums,
                                             const Output<T, O>& to, int m0, int n0, int M, int N) {
    int lane = threadIdx.x % 32, rank = cluster_rank();
    // all copies have arrived, and both consumers have read them: the ring buffer is free
    barrier_of(1, 256);
#pragma unroll
    for (int i = 0; i < 2 * S::NJ; ++i)
        *reinterpret_cast<float2*>(sums + (threadIdx.x / 32 * 16 + lane / 4 + i % 2 * 8) * S::LD + i / 2 * 8 +
                                   lane % 4 * 2) =
            make_float2(acc[i / 2][i % 2 * 2], acc[i / 2][i % 2 * 2 + 1]);
    cluster_sync();
    constexpr int W = Output<T, O>::WIDTH;
    int first = rank * S::BM / S::CK, end = (rank + 1) * S::BM / S::CK;
    for (int i = first * (S::BN / W) + threadIdx.x; i < end * (S::BN / W); i += 256) {
        int row = i / (S::BN / W), column = i % (S::BN / W) * W;
        long long at = (m0 + row) * (long long)N + n0 + column;
        float v[W] = {};
#pragma unroll
        for (int c = 0; c < S::CK; ++c)
#pragma unroll
            for (int k = 0; k < W; k += 4) {
                float4 x =
                    ld_cluster<float4>(shared_of_rank(shared_address(sums + row * S::LD + column + k), c));
                v[k] += x.x, v[k + 1] += x.y, v[k + 2] += x.z, v[k + 3] += x.w;
            }
        if (m0 + row >= M || n0 + column >= N) continue;
        if (to.vectors(N)) {
            to.template finish<W>(v, at, n0 + column);
        } else {
#pragma unroll
            for (int k = 0; k < W; ++k)
                if (n0 + column + k < N)
                    to.template finish<1>(reinterpret_cast<float (&)[1]>(v[k]), at + k, n0 + column + k);
        }
    }
}

// The results of a consumer's warp, from the accumulators to global memory. Two boxes of 16-bit results wait
// in shared memory and the others in registers, until they are stored while the next tile is multiplied.
// float results are stored at once.
template <typename T, typename O, int ACTIVATION, class S>
struct Tail {
    // NB: fragments across a box
    static constexpr int COLUMNS = Results<T, O>::COLUMNS, BOXES = S::BN / COLUMNS, NB = COLUMNS / 8;
    // boxes in registers
    static constexpr int QUEUED = sizeof(O) == 2 && BOXES > 2 ? BOXES - 2 : 0;
    Results<T, O> results;
    char* shared;
    // where the warp's part of the tile begins, and the next box to finish
    int m = 0, n = 0, z = 0, next = BOXES;
    // after the last tile, boxes also use the ring buffer, which is free then
    bool ended = false;
    unsigned queued[QUEUED * NB * 2 + 1] = {};  // the boxes from the third on

    // Called while a k tile is multiplied: finishes one box, or with the last k tile all boxes.
    __device__ __forceinline__ void between(bool last) {
        if constexpr (sizeof(O) == 2) {
#pragma unroll 1
            while (next < BOXES) {
                finish_next();
                if (!last) break;
            }
        }
    }

    // Take a tile with its bias. `last`: the thread block's last tile. Only float results use it.
    __device__ __forceinline__ void take(float (&acc)[S::NJ][4], bool last) {
        if (sizeof(O) == 4 && last) free_ring();
        if (results.pre) {
#pragma unroll(sizeof(O) == 2 ? BOXES : 1)
            for (int b = 0; b < BOXES && n + b * COLUMNS < results.N; ++b) {
                put(acc, b);
                if (m < results.M)
                    results.send(results.pre, results.map_pre, box_at(b), m, n + b * COLUMNS, z, false);
            }
        }
        activate(reinterpret_cast<float (&)[S::NJ * 4]>(acc), ACTIVATION);
        if constexpr (sizeof(O) == 2) {
#pragma unroll
            for (int b = 0; b < BOXES - QUEUED; ++b) put(acc, b);
#pragma unroll
            for (int i = 0; i < QUEUED * NB * 2; ++i) queued[i] = pair(acc, 2, i);
            next = 0;
        } else {
#pragma unroll 1
            for (int b = 0; b < BOXES && n + b * COLUMNS < results.N; ++b) {
                put(acc, b);
                results.finish(box_at(b), m, n + b * COLUMNS, z);
            }
        }
    }

    // After the last tile.
    __device__ __forceinline__ void end() {
        if constexpr (sizeof(O) == 2) free_ring();
        between(true);
        results.template wait<0>();
    }

  private:
    __device__ __forceinline__ char* box_at(int b) const {
        int warp = threadIdx.x / 32;
        return shared + (ended && b >= 2 ? warp * BOXES + b : S::BOXES / S::BOX + 2 * warp + b % 2) * S::BOX;
    }
    // all copies have arrived, and both consumers have read them
    __device__ __forceinline__ void free_ring() {
        barrier_of(1, 256);
        ended = true;
    }

    // Write box b of the tile, once earlier copies have read what is there.
    __device__ __forceinline__ void put(const float (&acc)[S::NJ][4], int b) const {
        if (b == 0) results.template wait<0>();  // of the tile before, either box may be the last
        else if (b == 1 || !ended) results.template wait<1>();
        if constexpr (sizeof(O) == 2) {
            results.put(box_at(b), [&](int i) { return pair(acc, b, i); });
        } else {
            results.put(box_at(b), [&](int i) {
                float2 x = {};
#pragma unroll
                for (int c = 0; c < BOXES; ++c) {
                    const float* d = acc[c * NB + i / 2] + i % 2 * 2;
                    x.x = b == c ? d[0] : x.x, x.y = b == c ? d[1] : x.y;
                }
                return x;
            });
        }
    }
    __device__ __forceinline__ static unsigned pair(const float (&acc)[S::NJ][4], int b, int i) {
        return narrow_pair<O>(acc[b * NB + i / 2][i % 2 * 2], acc[b * NB + i / 2][i % 2 * 2 + 1]);
    }

    __device__ __forceinline__ void finish_next() {
        int b = next++;
        if constexpr (QUEUED > 0) {
            if (b >= 2) {
                if (!ended) results.template wait<0>();
                results.put(box_at(b), [&](int i) {
                    unsigned bits = queued[i];
#pragma unroll
                    for (int c = 1; c < QUEUED; ++c) bits = b == c + 2 ? queued[c * NB * 2 + i] : bits;
                    return bits;
                });
            }
        }
        results.finish(box_at(b), m, n + b * COLUMNS, z);
    }
};

// acc += the bias of columns n + 8 j + 2 t + {0, 1}, where t = lane % 4. ready() waits for acc. Half of the
// biases are loaded before it; the other half is then in L1.
template <typename T, int NJ, class Ready>
__device__ __forceinline__ void add_bias(float (&acc)[NJ][4], const T* bias, int n, int N, Ready ready) {
    auto bias_at = [&](int j) { return load_two(bias, n + 8 * j + threadIdx.x % 4 * 2, N); };
    TwoOf<T> of_bias[NJ / 2];
    if (bias)
#pragma unroll
        for (int j = 0; j < NJ; j += 2) of_bias[j / 2] = bias_at(j);
    ready();
    if (bias)
#pragma unroll
        for (int j = 0; j < NJ; ++j) {
            float2 two = (j % 2 ? bias_at(j) : of_bias[j / 2]).wide();
#pragma unroll
            for (int k = 0; k < 4; ++k) acc[j][k] += k % 2 ? two.y : two.x;
        }
}

template <typename T, typename O, bool A_K, bool B_K, int ACTIVATION, class S>
__global__ void __launch_bounds__(384, 1) __cluster_dims__(S::CLUSTER, 1, 1)
    matmul_v7(O* out, O* pre, const __grid_constant__ CUtensorMap map_a,
              const __grid_constant__ CUtensorMap map_b, const __grid_constant__ CUtensorMap map_out,
              const __grid_constant__ CUtensorMap map_pre, const T* bias, const O* residual, Sizes s,
              int storing) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    extern __shared__ __align__(1024) char shared[];
    Ring<S> ring{shared_address(shared)};
    if (threadIdx.x < S::STAGES) {
        mbarrier_init(ring.full(threadIdx.x), 1);
        mbarrier_init(ring.empty(threadIdx.x), 8 * S::CM);
        mbarriers_made();
    } else if (threadIdx.x == 256) {
        prefetch_tensor_map(&map_a);
        prefetch_tensor_map(&map_b);
        prefetch_tensor_map(&map_out);
    }
    meet<S::CLUSTER>();
    wait_for_previous();
    let_next_start();
    int tiles = ((s.M + S::BM * S::CM - 1) / (S::BM * S::CM)) * ((s.N + S::BN - 1) / S::BN),
        works = tiles * s.batch * s.splits;
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == 2) {
        fewer_registers<40>();
        if (threadIdx.x == 256) copy_tiles<T, A_K, B_K, S>(ring, &map_a, &map_b, s, tiles);
        __syncwarp();
        if (S::CK > 1) cluster_sync();  // as in add_partials
    } else {
        more_registers<232>();
        int row = warpgroup * 64, next = gridDim.x / S::CLUSTER;
        Tail<T, O, ACTIVATION, S> tail{{out, pre, residual, &map_out, &map_pre, s.M, s.N, storing}, shared};
        float acc[S::NJ][4];
        for (int i = blockIdx.x / S::CLUSTER; i < works; i += next) {
            Work<T, S> w(i, tiles, s);
            int stage = 0;
            if constexpr (S::TERMS == 3) multiply_split(acc, ring, row, w.count);
            else
                stage =
                    multiply<T, A_K, B_K>(acc, ring, row, w.count, [&](bool last) { tail.between(last); });
            if constexpr (S::CK > 1) {
                if constexpr (S::TERMS == 1) wgmma_wait<0>(acc);
                if (w.count == 0)  // more blocks than k tiles
#pragma unroll
                    for (int j = 0; j < S::NJ * 4; ++j) acc[j / 4][j % 4] = 0;
                long long C = (long long)s.M * s.N * w.z;
                Output<T, O> to{out + C, pre ? pre + C : pre, bias, residual ? residual + C : residual,
                                s.activation};
                add_partials<T, O, S>(acc, reinterpret_cast<float*>(shared), to, w.m0, w.n0, s.M, s.N);
            } else {
                tail.m = w.m0 + row + threadIdx.x / 32 % 4 * 16, tail.n = w.n0, tail.z = w.z;
                add_bias(acc, bias, w.n0, s.N, [&] {
                    if constexpr (S::TERMS == 1) {
                        wgmma_wait<0>(acc);
                        ring.release(stage);
                    }
                });
                tail.take(acc, i + next >= works);
            }
        }
        if constexpr (S::CK == 1) tail.end();
    }
    // no block may end while others access its shared memory
    if constexpr (S::CLUSTER > 1) meet<S::CLUSTER>();
#endif
}
#endif
