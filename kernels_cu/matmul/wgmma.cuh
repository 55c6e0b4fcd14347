// matmul v7: C = A . B on tensor cores by wgmma, with operands copied by TMA, persistent and warp-specialised (sm_90a).
//
// Operands   T is __half, __nv_bfloat16 or float (TF32). A_K and B_K as in mma.cuh; float requires both, because wgmma reads TF32 operands
//            only along k. Addresses and strides are multiples of 16 bytes. TMA fills what is outside of a matrix with zeros.
// Blocks     One warpgroup starts the copies (the producer); two compute, each half of the rows of the tile (the consumers). The producer
//            runs ahead of the consumers, also to the next tile, so copies overlap the epilogue. mbarriers full[stage] and empty[stage]
//            pass the stages of the ring buffer back and forth.
// Clusters   The CLUSTER blocks of a cluster have neighbouring tiles along m. Each copies its part of the tile of B to all of them.
// Layout     A stage has BM + BN rows of 128 bytes, with the 128-byte swizzle. Along k: a row is a row of the operand. Along m or n: a row
//            has 64 elements of one k, and each 64 rows are a box of 64 k.
// Results    16-bit rows of whole 16 bytes, without a residual or split-K, go to global memory by TMA (BY_TMA), while the next tile is
//            multiplied. Others are written by the threads.
// Launch     grid: a multiple of CLUSTER, at most the number of SMs; block 384, dynamic shared memory Tile::BYTES.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "epilogue.cuh"

template <int BM_, int BN_, int STAGES_, int CLUSTER_>
struct WgmmaTile {
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int NJ = BN / 8, STAGE = (BM + BN) * 128;
    static_assert(BM == 128, "64 rows for each of two consumers");
    using Staged = WarpTile<16, 32>;
    static constexpr int BOX = 64 * 128;  // bytes of 64 x 64 results; each consumer has two boxes
    static_assert(8 * Staged::BYTES <= 4 * BOX);
    static constexpr int BARRIERS = STAGES * STAGE + 4 * BOX, BYTES = BARRIERS + STAGES * 16;
};
// The tiles of a cluster, as a tile for tile_origin.
template <class S>
struct ClusterTile {
    static constexpr int BM = S::BM * S::CLUSTER, BN = S::BN;
};
using Wgmma128x256 = WgmmaTile<128, 256, 4, 2>;
using Wgmma128x192 = WgmmaTile<128, 192, 4, 2>;
using Wgmma128x128 = WgmmaTile<128, 128, 6, 1>;

#if __CUDA_ARCH__ >= 900
// Start the copies of COUNT rows (m or n) from `row` on, by 128 bytes of k from k0 on, of matrix z. The blocks of the cluster share them:
// each copies its part to all.
template <typename T, bool ALONG_K, int COUNT, int CLUSTER>
__device__ __forceinline__ void copy_operand(unsigned to, const CUtensorMap* map, unsigned full, int row, int k0, int z) {
    constexpr int BOX = ALONG_K ? COUNT / CLUSTER : 64;  // rows
    static_assert(BOX % 8 == 0 && COUNT % BOX == 0);
#pragma unroll
    for (int i = CLUSTER > 1 ? cluster_rank() : 0; i < COUNT / BOX; i += CLUSTER) {
        int x = ALONG_K ? k0 : row + BOX * i, y = ALONG_K ? row + BOX * i : k0;
        if constexpr (CLUSTER > 1) tma_multicast(to + i * BOX * 128, map, full, {x, y, z}, (1 << CLUSTER) - 1);
        else tma_load(to + i * BOX * 128, map, full, {x, y, z});
    }
}

// The descriptor of the rows from `row` (a multiple of 64, or 0) on of an operand in shared memory, for 32 bytes of k.
template <bool ALONG_K>
__device__ __forceinline__ unsigned long long operand_at(unsigned tile, int row, int step) {
    if constexpr (ALONG_K) return describe(tile + row * 128 + step * 32, 0, 1024) | SWIZZLED;
    else return describe(tile + row * 128 + step * 2048, 8192, 1024) | SWIZZLED;
}

// The work of a cluster: tile, matrix z, and the k tiles [first, first + count).
template <typename T, class S>
struct Work {
    int m0, n0, z, split, first, count;
    __device__ __forceinline__ Work(int i, int tiles, const Sizes& s) {
        constexpr int BK = 128 / sizeof(T);
        int part = i / tiles, k_tiles = (s.K + BK - 1) / BK;
        split = part % s.splits, z = part / s.splits;
        first = int((long long)split * k_tiles / s.splits), count = int((split + 1ll) * k_tiles / s.splits) - first;
        tile_origin<ClusterTile<S>>(i % tiles, s.M, s.N, m0, n0);
        if constexpr (S::CLUSTER > 1) m0 += cluster_rank() * S::BM;
    }
};

// Write 64 x 64 results of a warpgroup, eight fragments of its accumulators, to a box with the 128-byte swizzle.
template <typename O>
__device__ __forceinline__ void put_box(unsigned box, const float (&v)[8][4]) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        Vec<O, 8> packed = pack<O, 8>(reinterpret_cast<const float (&)[8]>(v[j]));
        stmatrix_x4(box + row * 128 + ((j + lane / 16) ^ (row & 7)) * 16, reinterpret_cast<const unsigned (&)[4]>(packed));
    }
}

// Finish a warpgroup's 64 rows of a tile, from (m, n) of matrix z on, and start their copies to global memory. `slot` is the next of the
// warpgroup's two boxes.
template <typename T, typename O, int NJ>
__device__ __forceinline__ void store_boxes(const float (&acc)[NJ][4], unsigned boxes, int& slot, const Output<T, O>& to,
                                            const CUtensorMap* map_out, const CUtensorMap* map_pre, int m, int n, int z, int N) {
    int number = 1 + threadIdx.x / 128, t = threadIdx.x % 4;
    bool leader = threadIdx.x % 128 == 0;
#pragma unroll 1
    for (int i = 0; i < NJ / 8 && n < N; ++i, n += 64) {
        float v[8][4];
#pragma unroll
        for (int j = 0; j < NJ; ++j)
            if (i == j / 8)
#pragma unroll
                for (int k = 0; k < 4; ++k) v[j % 8][k] = acc[j][k];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (to.bias && n + 8 * j < N) {
                float b[2];
                unpack(b, load_vec<T, 2>(to.bias + n + 8 * j + 2 * t));
#pragma unroll
                for (int k = 0; k < 4; ++k) v[j][k] += b[k % 2];
            }
#pragma unroll 1
        for (bool last = !to.pre;; last = true) {  // the pre-activation, then the result
            if (last) activate(reinterpret_cast<float (&)[32]>(v), to.activation);
            unsigned box = boxes + slot * 64 * 128;
            slot ^= 1;
            if (leader) bulk_wait_read<1>();  // the last copy from this box has read it
            barrier_of(number, 128);
            put_box<O>(box, v);
            fence_async();
            barrier_of(number, 128);
            if (leader) {
                tma_store(last ? map_out : map_pre, box, {n, m, z});
                bulk_commit();
            }
            if (last) break;
        }
    }
}

template <typename T, typename O, bool A_K, bool B_K, class S>
__global__ void __launch_bounds__(384, 1) __cluster_dims__(S::CLUSTER, 1, 1)
    matmul_v7(O* out, O* pre, float* partials, const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
              const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_pre, const T* bias, const O* residual,
              Sizes s, int by_tma) {
#if __CUDA_ARCH__ == 900  // newer GPUs have no wgmma, and the kernel is not launched there
    constexpr int BK = 128 / sizeof(T);
    extern __shared__ __align__(1024) char shared[];
    unsigned ring = shared_address(shared), full = ring + S::BARRIERS, empty = full + 8 * S::STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::STAGES; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, 8 * S::CLUSTER);
        }
        mbarriers_made();
    }
    if constexpr (S::CLUSTER > 1) cluster_sync();
    else __syncthreads();
    int tiles = ((s.M + S::BM * S::CLUSTER - 1) / (S::BM * S::CLUSTER)) * ((s.N + S::BN - 1) / S::BN), works = tiles * s.splits * s.batch;
    int stage = 0, phase = 0, warpgroup = threadIdx.x / 128;
    auto advance = [&] {
        stage = stage + 1 == S::STAGES ? 0 : stage + 1;
        phase ^= stage == 0;
    };
    if (warpgroup == 2) {
        fewer_registers<40>();
        if (threadIdx.x == 256) {
            for (int i = blockIdx.x / S::CLUSTER; i < works; i += gridDim.x / S::CLUSTER) {
                Work<T, S> w(i, tiles, s);
                int z_a = s.a_batch ? w.z : 0, z_b = s.b_batch ? w.z : 0;
                for (int k = w.first; k < w.first + w.count; ++k, advance()) {
                    unsigned a = ring + stage * S::STAGE, b = a + S::BM * 128;
                    mbarrier_wait(empty + 8 * stage, phase ^ 1);
                    mbarrier_arrive(full + 8 * stage, S::STAGE);
                    copy_operand<T, A_K, S::BM, 1>(a, &map_a, full + 8 * stage, w.m0, k * BK, z_a);
                    copy_operand<T, B_K, S::BN, S::CLUSTER>(b, &map_b, full + 8 * stage, w.n0, k * BK, z_b);
                }
            }
        }
        __syncwarp();
    } else {
        more_registers<232>();
        int warp = threadIdx.x / 32, row = warpgroup * 64, slot = 0;
        float acc[S::NJ][4];
        auto release = [&](int i) {  // tell each block of the cluster that this warp has read stage i
            if (threadIdx.x % 32 < S::CLUSTER) mbarrier_arrive(shared_of_rank(empty + 8 * i, threadIdx.x % 32));
        };
        float* staged = reinterpret_cast<float*>(shared + S::STAGES * S::STAGE + warp * S::Staged::BYTES);
        for (int i = blockIdx.x / S::CLUSTER; i < works; i += gridDim.x / S::CLUSTER) {
            Work<T, S> w(i, tiles, s);
            int previous = 0;
            for (int k = 0; k < w.count; ++k, advance()) {
                unsigned a = ring + stage * S::STAGE, b = a + S::BM * 128;
                mbarrier_wait(full + 8 * stage, phase);
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 4; ++step)
                    wgmma<!A_K, !B_K, T>(acc, operand_at<A_K>(a, row, step), operand_at<B_K>(b, 0, step), k + step > 0);
                wgmma_commit();
                if (k > 0) {
                    wgmma_wait<1>();
                    release(previous);
                }
                previous = stage;
            }
            wgmma_wait<0>(acc);
            release(previous);
            long long C = (long long)s.M * s.N;
            bool whole = s.splits == 1;
            Output<T, O> to{out + w.z * C, pre ? pre + w.z * C : pre, bias, residual ? residual + w.z * C : residual, s.activation};
            if constexpr (sizeof(O) == 2) {
                if (by_tma) {
                    store_boxes(acc, ring + S::STAGES * S::STAGE + 2 * warpgroup * S::BOX, slot, to, &map_out, &map_pre, w.m0 + row, w.n0,
                                w.z, s.N);
                    continue;
                }
            }
            Output<T, float> part{partials + ((long long)w.split * s.batch + w.z) * C, nullptr, nullptr, nullptr, NONE};
#pragma unroll 1
            for (int i = 0; i < S::NJ / 4; ++i) {  // 16 rows and 32 columns at a time
#pragma unroll
                for (int j = 0; j < S::NJ / 4; ++j)
                    if (i == j) S::Staged::put(staged, reinterpret_cast<const float (&)[4][4]>(acc[4 * j]), 0);
                int m = w.m0 + warp * 16, n = w.n0 + i * 32;
                if (whole) S::Staged::store(to, staged, m, n, s.M, s.N);
                else S::Staged::store(part, staged, m, n, s.M, s.N);
                __syncwarp();
            }
        }
        bulk_wait_read<0>();
    }
    if constexpr (S::CLUSTER > 1) cluster_sync();  // no block may end while others write to its shared memory
#endif
}
#endif
