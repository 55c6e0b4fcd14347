// matmul v7: C = A . B on tensor cores by wgmma, with operands copied by TMA, persistent and warp-specialised (sm_90a).
//
// Operands   T is __half, __nv_bfloat16 or float (TF32). A_K and B_K as in mma.cuh; float requires both, because wgmma reads TF32 operands
//            only along k. Addresses and strides are multiples of 16 bytes. TMA fills what is outside of a matrix with zeros.
//            TERMS = 3: float operands that matmul_split has split into two TF32 numbers. Three products of them are added, and sums of
//            32 elements of K are added to float registers, because tensor cores truncate their sums. The error is then that of float32.
// Blocks     One warpgroup starts the copies (the producer); two compute, each half of the rows of the tile (the consumers). The producer
//            runs ahead of the consumers, also to the next tile. mbarriers full[stage] and empty[stage] pass the stages of the ring buffer
//            back and forth.
// Clusters   A cluster computes CM x CN neighbouring tiles. Its blocks share the copies: each copies a part of the tile of A to the blocks
//            with the same rows, and a part of the tile of B to those with the same columns.
// Layout     A stage has BM + BN rows of 128 bytes, with the 128-byte swizzle. Along k: a row is a row of the operand. Along m or n: a row
//            has 64 elements of one k, and each 64 rows are a box of 64 k.
// Results    A warp writes 16 rows, 128 bytes of each at a time, to shared memory, from where TMA copies them. 16-bit results are rounded
//            to registers, and finished while the next tile is multiplied: the tensor cores do not wait for them.
// Launch     grid: a multiple of the cluster, at most the number of SMs; block 384, dynamic shared memory Tile::BYTES.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "epilogue.cuh"

template <int BM_, int BN_, int STAGES_, int CM_, int CN_, int CK_ = 1, int TERMS_ = 1>
struct WgmmaTile {
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CM = CM_, CN = CN_, CK = CK_, CLUSTER = CM * CN * CK, TERMS = TERMS_;
    static constexpr int NJ = BN / 8, PARTS = TERMS == 3 ? 2 : 1, STAGE = (BM + BN) * 128 * PARTS;
    static_assert(BM == 128, "64 rows for each of two consumers");
    static constexpr int BOX = 16 * 128;  // bytes; each warp has two boxes
    static constexpr int LD = BN + 8;  // floats of a row of partial sums; the stores of fragments have no bank conflicts
    static_assert(STAGES * STAGE >= BM * LD * 4 && (CK == 1 || CM * CN == 1));
    static constexpr int BOXES = STAGES * STAGE, BARRIERS = BOXES + 16 * BOX, BYTES = BARRIERS + STAGES * 16;
};
// The tiles of a cluster, as a tile for tile_origin.
template <class S>
struct ClusterTile {
    static constexpr int BM = S::BM * S::CM, BN = S::BN * S::CN;
};
using Wgmma128x256 = WgmmaTile<128, 256, 4, 2, 1>;
using Wgmma128x192 = WgmmaTile<128, 192, 4, 2, 1>;
using Wgmma128x128 = WgmmaTile<128, 128, 6, 1, 1>;
using Wgmma128x128k4 = WgmmaTile<128, 128, 6, 1, 1, 4>;
using WgmmaSplit128x128 = WgmmaTile<128, 128, 3, 2, 1, 1, 3>;

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
    return n < N ? *reinterpret_cast<const TwoOf<T>*>(bias + n) : TwoOf<T>{};
}

// A warp's part of the results: it finishes boxes of 16 rows x COLUMNS columns, each 128 bytes wide, in shared memory. The 16-byte unit u of
// row r is at unit u ^ (r & 7), the 128-byte swizzle of TMA.
template <typename T, typename O>
struct Results {
    O *out, *pre;
    const T* bias;
    const O* residual;
    const CUtensorMap *map_out, *map_pre;
    int M, N, activation, storing;
    static constexpr int COLUMNS = 128 / sizeof(O), W = 16 / sizeof(O), BYTES = 2048;

    // Wait until the copies from the boxes, but for PENDING of them, have read them.
    template <int PENDING>
    __device__ __forceinline__ static void wait() {
        if (threadIdx.x % 32 == 0) bulk_wait_read<PENDING>();
        __syncwarp();
    }

    // Write a box. get(i) is the pair of row lane / 4 + i % 2 * 8 and columns i / 2 * 8 + lane % 4 * 2 + {0, 1}.
    template <class Get>
    __device__ __forceinline__ static void put(char* box, Get get) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i += 4) {
            if constexpr (sizeof(O) == 2) {
                unsigned bits[4] = {get(i), get(i + 1), get(i + 2), get(i + 3)};
                stmatrix_x4(shared_address(box) + lane % 16 * 128 + ((i / 2 + lane / 16) ^ (lane & 7)) * 16, bits);
            } else {
#pragma unroll
                for (int j = i; j < i + 4; ++j) {
                    int row = lane / 4 + j % 2 * 8, unit = j / 2 * 2 + lane % 4 / 2;
                    *reinterpret_cast<float2*>(box + row * 128 + (unit ^ (row & 7)) * 16 + lane % 2 * 8) = get(j);
                }
            }
        }
    }

    // Half of the rows of a box at (m, n) of matrix z: change pre-activations to results. The second half starts to store the box.
    __device__ __forceinline__ void finish(char* box, int half, int m, int n, int z) const {
        if (m >= M || n >= N) return;
        if (half == 0 && pre && storing != BY_THREADS) {
            copy_box(map_pre, box, m, n, z, false);
            wait<0>();
        }
        if (changes()) change_rows(box, half, m, n, z);
        if (half == 1 && storing != BY_THREADS) copy_box(map_out, box, m, n, z, storing == ADDED);
    }

    __device__ __forceinline__ bool changes() const { return activation != NONE || residual || storing == BY_THREADS; }

private:
    __device__ __forceinline__ static void copy_box(const CUtensorMap* map, char* box, int m, int n, int z, bool add) {
        fence_async();
        __syncwarp();
        if (threadIdx.x % 32) return;
        if (add) tma_add(map, shared_address(box), {n, m, z});
        else tma_store(map, shared_address(box), {n, m, z});
        bulk_commit();
    }

    // activation(box) + residual, in the box or, if threads store the results, to global memory.
    __device__ __forceinline__ void change_rows(char* box, int half, int m, int n, int z) const {
        __syncwarp();
#pragma unroll 1
        for (int i = half * 64 + threadIdx.x % 32; i < half * 64 + 64; i += 32) {
            int row = i / 8, column = n + i % 8 * W;
            long long at = ((long long)z * M + m + row) * N + column;
            if (m + row >= M || column >= N) continue;
            Vec<O, W>& x = *reinterpret_cast<Vec<O, W>*>(box + row * 128 + (i % 8 ^ (row & 7)) * 16);
            float v[W];
            unpack(v, x);
            activate(v, activation);
            if (storing != BY_THREADS) {
                if (residual) add_to(v, load_vec<O, W>(residual + at));
                x = pack<O, W>(v);
            } else {
#pragma unroll
                for (int k = 0; k < W; ++k) {
                    if (column + k >= N) break;
                    if (pre) pre[at + k] = x.v[k];
                    out[at + k] = O(residual ? v[k] + load_as(residual[at + k]) : v[k]);
                }
            }
        }
        __syncwarp();
    }
};

// For TERMS = 3: split x, (batch, rows, K), into (2, batch, rows, ld_to): its big parts, then its small ones. ALONG_K: x is contiguous along
// k, else along the rows; ld is the other stride, x_batch that of the batch. Grid batch * ceil(rows / 32) * ceil(K / 32), block (32, 8).
template <bool ALONG_K>
__global__ void __launch_bounds__(256)
    matmul_split(float* to, const float* x, int batch, int rows, int K, long long ld_to, long long ld, long long x_batch) {
    __shared__ float tile[32][33];
    wait_for_previous();
    int across = (K + 31) / 32, down = (rows + 31) / 32, z = blockIdx.x / (across * down);
    int row0 = blockIdx.x / across % down * 32, k0 = blockIdx.x % across * 32, lane = threadIdx.x;
    if constexpr (!ALONG_K) {
#pragma unroll
        for (int i = threadIdx.y; i < 32; i += 8)
            if (row0 + lane < rows && k0 + i < K) tile[lane][i] = x[z * x_batch + (k0 + i) * ld + row0 + lane];
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
// Start the copies of COUNT rows (m or n) from `row` on, by 128 bytes of k from k0 on, of matrix z. SHARERS blocks of the cluster copy a
// part each, to all whose ranks are bits of `ranks`.
template <typename T, bool ALONG_K, int COUNT, int SHARERS>
__device__ __forceinline__ void copy_operand(unsigned to, const CUtensorMap* map, unsigned full, int row, int k0, int z, int part,
                                             unsigned ranks) {
    constexpr int BOX = ALONG_K ? COUNT / SHARERS : 64;  // rows
    static_assert(BOX % 8 == 0 && COUNT % BOX == 0);
#pragma unroll
    for (int i = SHARERS > 1 ? part : 0; i < COUNT / BOX; i += SHARERS) {
        int x = ALONG_K ? k0 : row + BOX * i, y = ALONG_K ? row + BOX * i : k0;
        if constexpr (SHARERS > 1) tma_multicast(to + i * BOX * 128, map, full, {x, y, z}, ranks);
        else tma_load(to + i * BOX * 128, map, full, {x, y, z});
    }
}

// The descriptor of the rows from `row` (a multiple of 64, or 0) on of an operand in shared memory, for 32 bytes of k.
template <bool ALONG_K>
__device__ __forceinline__ unsigned long long operand_at(unsigned tile, int row, int step) {
    if constexpr (ALONG_K) return describe(tile + row * 128 + step * 32, 0, 1024) | SWIZZLED;
    else return describe(tile + row * 128 + step * 2048, 8192, 1024) | SWIZZLED;
}

// A barrier of a cluster, or of a block alone. In a cluster it orders no memory accesses but those to mbarriers that mbarriers_made orders.
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

// The work of a cluster: tile, matrix z, and the k tiles [first, first + count).
template <typename T, class S>
struct Work {
    int m0, n0, z, split, first, count;
    __device__ __forceinline__ Work(int i, int tiles, const Sizes& s) {
        int rank = S::CLUSTER > 1 ? cluster_rank() : 0, part = i / tiles;
        z = part, split = 0, first = 0, count = (s.K + 128 / int(sizeof(T)) - 1) / (128 / int(sizeof(T)));
        if (S::CK > 1 || s.splits > 1) {
            int splits = S::CK > 1 ? S::CK : s.splits;
            if (S::CK > 1) split = rank;
            else split = part % splits, z = part / splits;
            first = split * unsigned(count) / splits, count = (split + 1) * unsigned(count) / splits - first;
        }
        tile_origin<ClusterTile<S>>(i % tiles, s.M, s.N, m0, n0);
        m0 += rank % S::CM * S::BM;
        n0 += rank / S::CM % S::CN * S::BN;
    }
};

// Split-K in a cluster: store a consumer's accumulators, wait for those of the other blocks, add a part of the rows of the tile, in the order
// of k, and finish it.
template <typename T, typename O, class S>
__device__ __forceinline__ void add_partials(const float (&acc)[S::NJ][4], float* sums, const Output<T, O>& to, int m0, int n0, int M, int N) {
    int lane = threadIdx.x % 32, rank = cluster_rank();
    barrier_of(1, 256);  // all copies have arrived, and both consumers have read them: the ring buffer is free
#pragma unroll
    for (int i = 0; i < 2 * S::NJ; ++i)
        *reinterpret_cast<float2*>(sums + (threadIdx.x / 32 * 16 + lane / 4 + i % 2 * 8) * S::LD + i / 2 * 8 + lane % 4 * 2) =
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
                float4 x = ld_cluster<float4>(shared_of_rank(shared_address(sums + row * S::LD + column + k), c));
                v[k] += x.x, v[k + 1] += x.y, v[k + 2] += x.z, v[k + 3] += x.w;
            }
        if (m0 + row >= M || n0 + column >= N) continue;
        if (to.vectors(N)) {
            to.template finish<W>(v, at, n0 + column);
        } else {
#pragma unroll
            for (int k = 0; k < W; ++k)
                if (n0 + column + k < N) to.template finish<1>(reinterpret_cast<float (&)[1]>(v[k]), at + k, n0 + column + k);
        }
    }
}

template <typename T, typename O, bool A_K, bool B_K, class S>
__global__ void __launch_bounds__(384, 1) __cluster_dims__(S::CLUSTER, 1, 1)
    matmul_v7(O* out, O* pre, const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
              const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_pre, const T* bias, const O* residual,
              Sizes s, int storing) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    constexpr int BK = 128 / sizeof(T), A_BYTES = S::BM * 128, B_BYTES = S::BN * 128;
    extern __shared__ __align__(1024) char shared[];
    unsigned ring = shared_address(shared), full = ring + S::BARRIERS, empty = full + 8 * S::STAGES;
    if (threadIdx.x < S::STAGES) {
        mbarrier_init(full + 8 * threadIdx.x, 1);
        mbarrier_init(empty + 8 * threadIdx.x, 8 * S::CLUSTER);
        mbarriers_made();
    } else if (threadIdx.x == 256) {
        prefetch_tensor_map(&map_a);
        prefetch_tensor_map(&map_b);
        prefetch_tensor_map(&map_out);
    }
    meet<S::CLUSTER>();
    wait_for_previous();
    let_next_start();
    int tiles = ((s.M + S::BM * S::CM - 1) / (S::BM * S::CM)) * ((s.N + S::BN * S::CN - 1) / (S::BN * S::CN));
    int works = tiles * s.splits * s.batch, stage = 0, phase = 0, warpgroup = threadIdx.x / 128;
    auto advance = [&] {
        stage = stage + 1 == S::STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    };
    if (warpgroup == 2) {
        fewer_registers<40>();
        if (threadIdx.x == 256) {
            int rank = S::CLUSTER > 1 ? cluster_rank() : 0, rank_m = rank % S::CM, rank_n = rank / S::CM;
            unsigned same_m = 0, same_n = ((1 << S::CM) - 1) << rank_n * S::CM;
            for (int i = 0; i < S::CN; ++i) same_m |= 1 << (rank_m + i * S::CM);
            for (int i = blockIdx.x / S::CLUSTER; i < works; i += gridDim.x / S::CLUSTER) {
                Work<T, S> w(i, tiles, s);
                for (int k = w.first; k < w.first + w.count; ++k, advance()) {
                    unsigned a = ring + stage * S::STAGE, b = a + A_BYTES * S::PARTS;
                    mbarrier_wait_in_block(empty + 8 * stage, phase ^ 1);
                    mbarrier_arrive(full + 8 * stage, S::STAGE);
#pragma unroll
                    for (int p = 0; p < S::PARTS; ++p) {
                        int z_a = s.a_batch ? w.z + p * s.batch : p, z_b = s.b_batch ? w.z + p * s.batch : p;
                        copy_operand<T, A_K, S::BM, S::CN>(a + p * A_BYTES, &map_a, full + 8 * stage, w.m0, k * BK, z_a, rank_n, same_m);
                        copy_operand<T, B_K, S::BN, S::CM>(b + p * B_BYTES, &map_b, full + 8 * stage, w.n0, k * BK, z_b, rank_m, same_n);
                    }
                }
            }
        }
        __syncwarp();
        if (S::CK > 1) cluster_sync();  // as in add_partials
    } else {
        more_registers<232>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warpgroup * 64;
        Results<T, O> results{out, pre, bias, residual, &map_out, &map_pre, s.M, s.N, s.activation, storing};
        constexpr int BOXES = S::BN / results.COLUMNS, NB = results.COLUMNS / 8;  // fragments of a box
        // 16-bit results are finished while the next tile is multiplied: two boxes wait in shared memory, the others in registers.
        constexpr int HELD = sizeof(O) == 2 && BOXES > 2 ? BOXES - 2 : 0;
        float acc[S::NJ][4];
        unsigned held[HELD * NB * 2 + 1] = {};
        int next = 2 * BOXES, m = 0, n = 0, z = 0;  // the next half of a box to finish, and where the warp's part of the tile begins
        auto release = [&](int i) {  // tell each block of the cluster that this warp has read stage i
            if (lane < S::CLUSTER) mbarrier_arrive(shared_of_rank(empty + 8 * i, lane));
        };
        bool ended = false;  // after the last tile: boxes are in the ring buffer, too, which is free then
        auto box_at = [&](int b) { return shared + (ended && b >= 2 ? warp * BOXES + b : S::BOXES / S::BOX + 2 * warp + b % 2) * S::BOX; };
        auto finish_next = [&] {
            int b = next / 2;
            if constexpr (HELD > 0) {
                if (b >= 2 && next % 2 == 0) {
                    if (!ended) results.template wait<0>();
                    results.put(box_at(b), [&](int i) {
                        unsigned bits = held[i];
#pragma unroll
                        for (int c = 1; c < HELD; ++c) bits = b == c + 2 ? held[c * NB * 2 + i] : bits;
                        return bits;
                    });
                }
            }
            results.finish(box_at(b), next % 2, m, n + b * results.COLUMNS, z);
            ++next;
        };
        auto free_ring = [&] {  // all copies have arrived, and both consumers have read them
            barrier_of(1, 256);
            ended = true;
        };
        for (int i = blockIdx.x / S::CLUSTER; i < works; i += gridDim.x / S::CLUSTER) {
            Work<T, S> w(i, tiles, s);
            int previous = 0;
            if constexpr (S::TERMS == 3) {
#pragma unroll
                for (int j = 0; j < S::NJ * 4; ++j) acc[j / 4][j % 4] = 0;
            }
#pragma unroll 1
            for (int k = 0; k < w.count; ++k, advance()) {
                unsigned a = ring + stage * S::STAGE, b = a + A_BYTES * S::PARTS;
                mbarrier_wait_in_block(full + 8 * stage, phase);
                wgmma_fence();
                if constexpr (S::TERMS == 3) {
                    float sum[S::NJ][4];
#pragma unroll
                    for (int i = 0; i < 12; ++i) {  // the small products first
                        bool small_a = i < 4, small_b = i >= 4 && i < 8;
                        wgmma<false, false, float>(sum, operand_at<true>(a + small_a * A_BYTES, row, i % 4),
                                                   operand_at<true>(b + small_b * B_BYTES, 0, i % 4), i > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<0>(sum);
                    release(stage);
#pragma unroll
                    for (int j = 0; j < S::NJ * 4; ++j) acc[j / 4][j % 4] += sum[j / 4][j % 4];
                    continue;
                }
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    wgmma<!A_K, !B_K, T>(acc, operand_at<A_K>(a, row, step), operand_at<B_K>(b, 0, step), k + step > 0);
                wgmma_commit();
                if constexpr (sizeof(O) == 2) {
#pragma unroll 1
                    while (next < 2 * BOXES) {
                        finish_next();
                        if (k + 1 < w.count && (next % 2 == 0 || results.changes())) break;
                    }
                }
                if (k > 0) {
                    wgmma_wait<1>();
                    release(previous);
                }
                previous = stage;
            }
            if constexpr (S::CK > 1) {
                wgmma_wait<0>(acc);
                long long C = (long long)s.M * s.N * w.z;
                Output<T, O> to{out + C, pre ? pre + C : pre, bias, residual ? residual + C : residual, s.activation};
                add_partials<T, O, S>(acc, reinterpret_cast<float*>(shared), to, w.m0, w.n0, s.M, s.N);
                break;
            }
            m = w.m0 + row + warp % 4 * 16, n = w.n0, z = w.split * s.batch + w.z;
            auto bias_at = [&](int j) { return load_two(bias, n + 8 * j + lane % 4 * 2, s.N); };
            TwoOf<T> of_bias[S::NJ / 2];  // half of them while the last products are computed; the others are then in L1
            if (bias)
#pragma unroll
                for (int j = 0; j < S::NJ; j += 2) of_bias[j / 2] = bias_at(j);
            if constexpr (S::TERMS == 1) {
                wgmma_wait<0>(acc);
                release(previous);
            }
            if (bias)
#pragma unroll
                for (int j = 0; j < S::NJ; ++j) {
                    float2 two = (j % 2 ? bias_at(j) : of_bias[j / 2]).wide();
#pragma unroll
                    for (int k = 0; k < 4; ++k) acc[j][k] += k % 2 ? two.y : two.x;
                }
            if constexpr (sizeof(O) == 2) {
                results.template wait<0>();
#pragma unroll
                for (int b = 0; b < BOXES - HELD; ++b)
                    results.put(box_at(b), [&](int i) { return narrow_pair<O>(acc[b * NB + i / 2][i % 2 * 2], acc[b * NB + i / 2][i % 2 * 2 + 1]); });
#pragma unroll
                for (int i = 0; i < HELD * NB * 2; ++i)
                    held[i] = narrow_pair<O>(acc[2 * NB + i / 2][i % 2 * 2], acc[2 * NB + i / 2][i % 2 * 2 + 1]);
                next = 0;
            } else {
                if (i + gridDim.x / S::CLUSTER >= works) free_ring();
#pragma unroll 1
                for (int b = 0; b < BOXES && n + b * results.COLUMNS < s.N; ++b) {
                    if (b == 0) results.template wait<0>();  // box 0 may be the last that the tile before has used
                    else if (b == 1 || !ended) results.template wait<1>();
                    results.put(box_at(b), [&](int i) {
                        float2 x = {};
#pragma unroll
                        for (int c = 0; c < BOXES; ++c) {
                            const float* d = acc[c * NB + i / 2] + i % 2 * 2;
                            x.x = b == c ? d[0] : x.x, x.y = b == c ? d[1] : x.y;
                        }
                        return x;
                    });
#pragma unroll 1
                    for (int half = 0; half < 2; ++half) results.finish(box_at(b), half, m, n + b * results.COLUMNS, z);
                }
            }
        }
        if constexpr (sizeof(O) == 2 && S::CK == 1) {
            free_ring();
#pragma unroll 1
            while (next < 2 * BOXES) finish_next();
        }
        results.template wait<0>();
    }
    if constexpr (S::CLUSTER > 1) meet<S::CLUSTER>();  // no block may end while others arrive at its mbarriers
#endif
}
#endif
