// y = x (W1 (x) W2 (x) .. (x) Wn): a linear layer whose matrix is a Kronecker product. The product matrix is
// never formed.
//
// Math       A row of x is an n-dimensional array of p_1 x .. x p_n numbers, the last index fastest. Factor i
//            multiplies along index i (a mode product). Mode products of different indices commute, so the
//            factors may be applied in any order. Each one sees [A][p][C]: A is everything before the index
//            (the rows of x too), C everything after it. A fiber is the p numbers x[a][.][c], C elements
//            apart:
//                out[a][j][c] = sum over k of x[a][k][c] * w[k][j].
// Layout     No array is transposed. A factor may have any strides; the backward reads its transpose from the
//            same memory. If each of S samples has its own factor, A is the same for all of them. Offsets are
//            64-bit.
// Precision  16-bit inputs are multiplied and accumulated in float.
// Launch     cukern/ops/kron_linear/planner.py groups the factors into launches and chooses a kernel, grid
// and tile for each.
//
// version  idea
// v1, v2   torch's own operations
// v3       one launch per factor: a GEMM whose rows are fibers, read and written in place
// v4       one launch per group of neighbouring factors: a tile stays on chip from the first factor to the
//          last; compiled for the sizes of the factors; 16-bit types, TF32, and float as split numbers use
//          tensor cores
//
// One H200, us, forward (forward + backward)        float: v2    v4          bfloat16: v2  v4
//     1024 x 32^3                                    387 (1864)   145 (554)   133 (598)     59 (208)
//     1024 x (128, 128)                              237 (804)    96 (277)    43 (238)      22 (181)
//
// This file has the kernels for any factors; tile.cuh describes v4's. Other kernels of v4 are for particular
// factors (sm_90a):
//     chain_wgmma.cuh    two factors of 16-bit types by warpgroups, forward
//     split_wgmma.cuh    one or two large float factors by warpgroups, forward and backward
//     few_rows.cuh       two 128 x 128 factors with few rows, backward
// Experiments and dead ends: docs/notes/kron_linear.md.

#include "chain_wgmma.cuh"
#include "few_rows.cuh"
#include "split_wgmma.cuh"
#include "tile_backward.cuh"

constexpr int THREADS = 256;

// Where fiber f begins in an array [A][n][C], for f = a * C + c.
__device__ __forceinline__ long long fiber_offset(long long f, int n, long long C) {
    return C == 1 ? f * n : f / C * n * C + f % C;
}

// ------------------------------------------------------------------------------------------ v3
//
// A block computes BN columns j of BM = 4096 / BN fibers, and a thread 4x4 of these. Adjacent threads access
// adjacent memory, along c, or along k and j if C is 1. out [S][A][q][C], x [S][A][p][C], w [S][p][q]. Grid S
// * ceil(A * C / BM) * ceil(q / BN), block 256.
template <typename T, int BN>
__global__ void __launch_bounds__(THREADS)
    kron_linear_v3(T* out, const T* x, const T* w, const T* bias, const T* residual, long long A, int p,
                   int q, long long C, long long w_s, long long w_p, long long w_q, double scale,
                   long long features) {
    constexpr int BM = 4096 / BN, BK = BN < 16 ? 8 : 16, TN = BN / 4, TM = BM / 4;
    using F = compute_t<T>;
    __shared__ F xs[BK][BM + 1], ws[BK][BN + 1];
    __shared__ long long places[BM];
    long long fibers = A * C, tiles_m = (fibers + BM - 1) / BM, block = blockIdx.x;
    int tiles_n = (q + BN - 1) / BN, n0 = block % tiles_n * BN;
    long long m0 = block / tiles_n % tiles_m * BM, sample = block / tiles_n / tiles_m;
    x += sample * fibers * p;
    w += sample * w_s;
    bool along_k = C == 1;
    int t = threadIdx.x, tn = along_k ? t % TN : t / TM, tm = along_k ? t / TN : t % TM;
    for (int i = t; i < BM; i += THREADS) places[i] = m0 + i < fibers ? fiber_offset(m0 + i, p, C) : -1;
    __syncthreads();

    F sums[4][4] = {};
    for (int k0 = 0; k0 < p; k0 += BK) {
        for (int e = t; e < BM * BK; e += THREADS) {
            int m = along_k ? e / BK : e % BM, k = along_k ? e % BK : e / BM;
            bool in = places[m] >= 0 && k0 + k < p;
            xs[k][m] = in ? load_as(x[places[m] + (k0 + k) * C]) : F(0);
        }
        for (int e = t; e < BN * BK; e += THREADS) {
            int n = e % BN, k = e / BN;
            bool in = n0 + n < q && k0 + k < p;
            ws[k][n] = in ? load_as(w[(k0 + k) * w_p + (n0 + n) * w_q]) : F(0);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < BK; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += xs[k][tm + TM * i] * ws[k][tn + TN * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        long long f = m0 + tm + TM * i;
        if (f >= fibers) continue;
        long long first = sample * fibers * q + fiber_offset(f, q, C);
        // bias has `features` elements, one for each output of a row
        const T* b = bias ? bias + first % features : nullptr;
        const T* r = residual ? residual + first : nullptr;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = n0 + tn + TN * j;
            if (n >= q) continue;
            F y[1] = {sums[i][j]};
            finish<true>(y, F(scale), b, n * C, r, n * C);
            out[first + n * C] = T(y[0]);
        }
    }
}

// ------------------------------------------------------------------------------------------ v4, forward

// Grid SLICES * min(tiles, resident blocks), block THREADS. Dynamic shared memory: the matrices, the stage,
// the tile.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_tile(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual,
                        long long A, double scale, long long features) {
    using F = compute_t<T>;
    using In = typename Plan::Rightmost::In;
    extern __shared__ uint4 dynamic[];
    char* matrices = reinterpret_cast<char*>(dynamic);
    T* stage = reinterpret_cast<T*>(matrices + matrices_bytes<Plan, T>(typename Plan::List()));
    F* tile = reinterpret_cast<F*>(stage + (Plan::AHEAD * sizeof(T) + 15) / 16 * 16 / sizeof(T));
    int slice = blockIdx.x % Plan::SLICES;
    constexpr long long ACROSS = Plan::C / Plan::R;
    long long tiles = (A + Plan::L - 1) / Plan::L * ACROSS, step = gridDim.x / Plan::SLICES;
    long long number = blockIdx.x / Plan::SLICES;  // index of the next tile to load
    if (number >= tiles) return;  // the grid is planned for the largest number of rows of the bucket
    auto first = [&](int row) {
        return number / ACROSS * Plan::L * row * Plan::C + number % ACROSS * Plan::R;
    };
    auto rows = [&] {
        return int(A - number / ACROSS * Plan::L < Plan::L ? A - number / ACROSS * Plan::L : Plan::L);
    };
    auto load = [&](bool ahead) {
        if (number >= tiles) return;
        const T* from = x + first(Plan::P);
        if (ahead) load_tile4<Plan, 0, Plan::AHEAD, In>(stage, from, rows());
        else if constexpr (Plan::REST)
            load_tile4<Plan, Plan::AHEAD, Plan::NUMBERS, In>(reinterpret_cast<T*>(tile), from, rows());
    };
    if constexpr (!Plan::REST) {  // without this test, 1024 x 32^3 in float takes 155 us instead of 153
        prefetch_factors(0, factors, typename Plan::List());
        prefetch_tile<Plan::P, Plan::R>(x + first(Plan::P), rows(), Plan::C);
    }
    wait_for_previous();
    load(true);
    load(false);
    load_matrices<Plan, 0, Plan::R>(matrices, factors, slice, typename Plan::List());
    cp_async_commit();
    if constexpr (Plan::BLOCKS == 1) let_next_come();
    else let_next_come(tiles, step);
    cp_async_wait<Plan::LOCAL ? 0 : 1>();
    __syncthreads();
    while (true) {
        long long at = first(Plan::Q) + slice * Plan::COLUMNS * Plan::C;
        Global4<T> global = {out, bias, residual, at, features, rows(), F(scale), A > 0 ? F(1) : F(0)};
        number += step;
        auto after = [&] {
            if constexpr (Plan::LOCAL) __syncwarp();
            else __syncthreads();
            load(true);
            cp_async_commit();
        };
        auto late = [&] {
            __syncthreads();
            load(false);
            cp_async_commit();
        };
        run4<Plan, true, Plan::NUMBERS / Plan::Rightmost::P / Plan::R, Plan::R>(
            stage, reinterpret_cast<const T*>(tile), tile, matrices, global, after, late,
            typename Plan::List());
        if (number >= tiles) break;
        cp_async_wait<0>();
        if constexpr (Plan::LOCAL) __syncwarp();
        else __syncthreads();
    }
}

// A small right factor next to a large left one: out [Q][fibers] = (in [fibers][P] times w) transposed. With
// BACK, without w: out [fibers][Q] = in [Q][fibers] transposed. A thread computes EACH fibers. Grid
// ceil(fibers / 256), block 64.
template <typename T, int P, int Q, bool BACK>
__global__ void __launch_bounds__(64)
    kron_linear_v4_transposed(T* out, const T* in, const T* w, long long fibers) {
    constexpr int SIDE = BACK ? Q : P, EACH = 4, LD = SIDE + 4 / sizeof(T);
    __shared__ T stage[64 * EACH * LD];
    __shared__ __align__(16) compute_t<T> factor[P * Q];
    long long first = blockIdx.x * (64ll * EACH);
    int count = int(fibers - first < 64 * EACH ? fibers - first : 64 * EACH), thread = threadIdx.x;
    compute_t<T> sums[EACH][Q] = {};
    for (int e = thread; e < (BACK ? 0 : P * Q); e += 64) factor[e] = load_as(w[e]);
#pragma unroll
    for (int e = 0; e < (BACK ? EACH * Q : 0); ++e)
        if (int f = e / Q * 64 + thread; f < count) stage[f * LD + e % Q] = in[e % Q * fibers + first + f];
#pragma unroll 16
    for (int e = thread; e < (BACK ? 0 : count * P); e += 64) stage[e / P * LD + e % P] = in[first * P + e];
    __syncthreads();
#pragma unroll 16
    for (int e = thread; e < (BACK ? count * Q : 0); e += 64) out[first * Q + e] = stage[e / Q * LD + e % Q];
#pragma unroll 4
    for (int k = 0; k < (BACK ? 0 : P); ++k)
#pragma unroll
        for (int e = 0; e < EACH * Q; ++e)
            sums[e / Q][e % Q] +=
                compute_t<T>(load_as(stage[(e / Q * 64 + thread) * LD + k])) * factor[k * Q + e % Q];
#pragma unroll
    for (int e = 0; e < (BACK ? 0 : EACH * Q); ++e)
        if (int f = e / Q * 64 + thread; f < count) out[e % Q * fibers + first + f] = T(sums[e / Q][e % Q]);
}

// ------------------------------------------------------------------------------------------ v4, backward

// The gradient of a factor: see tile_backward.cuh. Grid pieces * ceil(P / K) * ceil(Q / J), block THREADS;
// dynamic shared memory: two chunks of z and of h, later the sums.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_gradient(float* partials, const T* z, const T* h, long long A, long long C,
                            long long pieces) {
    constexpr int P = Plan::P, Q = Plan::Q, K = Plan::K, J = Plan::J, TILES_K = (P + K - 1) / K,
                  TILES_J = (Q + J - 1) / J;
    using S = Sums<K, J, Plan::WARPS>;
    constexpr bool ROWS = Plan::R > 1;  // a chunk is contiguous along the fibers
    using Z = Operand<ROWS ? Plan::ALONG_K : 1, ROWS ? 1 : Plan::along_l(K)>;
    using H = Operand<ROWS ? Plan::ALONG_K : 1, ROWS ? 1 : Plan::along_l(J)>;
    extern __shared__ uint4 dynamic[];
    T* chunk = reinterpret_cast<T*>(dynamic);
    long long number = blockIdx.x / (TILES_K * TILES_J), piece = number, across = (C + Plan::R - 1) / Plan::R;
    long long chunks = (A + Plan::L - 1) / Plan::L * across;
    int k0 = blockIdx.x / TILES_J % TILES_K * K, j0 = blockIdx.x % TILES_J * J, stage = 0;
    auto load = [&](T* to) {
        if (number < chunks) {
            long long a = number / across * Plan::L, c = number % across * Plan::R;
            int rows = int(A - a < Plan::L ? A - a : Plan::L);
            load_chunk<Plan, K, P>(to, z + a * P * C + c, k0, rows, C - c, C);
            load_chunk<Plan, J, Q>(to + Plan::Z, h + a * Q * C + c, j0, rows, C - c, C);
        }
        cp_async_commit();
    };
    float sums[S::MI][S::NI][4] = {};
    wait_for_previous();
    for (load(chunk); number < chunks; stage ^= 1) {
        number += pieces;
        load(chunk + (stage ^ 1) * (Plan::Z + Plan::H));
        cp_async_wait<1>();
        __syncthreads();
        const T* now = chunk + stage * (Plan::Z + Plan::H);
        contract_all<Plan, Merged<>, K, J, Plan::L * Plan::R, Z, H, Once>(sums, now, now + Plan::Z, S());
        __syncthreads();
    }
    cp_async_wait<0>();
    float* all = reinterpret_cast<float*>(dynamic);
    gather_sums<K, J>(all, sums, S());
    partials += piece * P * Q;
    for (int e = threadIdx.x; e < K * J; e += Plan::THREADS)
        if (k0 + e / J < P && j0 + e % J < Q) partials[(k0 + e / J) * Q + j0 + e % J] = all[e];
}

// The backward of one or two factors: see tile_backward.cuh. partials[block] has a block's sums for the
// factors' gradients. dx may be x. Grid min(tiles, resident blocks), block THREADS. Dynamic shared memory:
// the matrices, the tiles of x, g, Z and H; later the sums.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_tile_bwd(float* partials, T* dx, const T* x, const T* g, Factors4<T> factors, long long A,
                            double scale) {
    using Left = typename Plan::Left;
    using Right = typename Plan::Right;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, L = Plan::L, R = Plan::R,
                  FIRST = Right::COUNT;
    constexpr int HP1 = Plan::HP1, HQ1 = Plan::HQ1, HP2 = Plan::HP2, HQ2 = Plan::HQ2;
    constexpr int SX = Plan::SX, SG = Plan::SG, S2 = Plan::S2, LD1 = Plan::LD1, LD2 = Plan::LD2;
    constexpr bool ONE = Plan::ONE;
    extern __shared__ uint4 dynamic[];
    T *left = reinterpret_cast<T*>(dynamic), *right = left + Plan::W1, *tiles = right + Plan::W2;
    T *zs = tiles + Plan::STAGES * (Plan::X + Plan::G), *hs = zs + Plan::Z;
    constexpr long long ACROSS = Plan::ACROSS;
    long long count = (A + L - 1) / L * ACROSS, number = blockIdx.x, next = number;
    auto rows_of = [&](long long n) { return int(A - n / ACROSS * L < L ? A - n / ACROSS * L : L); };
    auto columns_of = [&](long long n) { return Plan::C - n % ACROSS * R; };
    auto first = [&](long long n, int row) { return n / ACROSS * L * row * Plan::C + n % ACROSS * R; };
    auto load = [&](T* to) {
        if (next < count) {
            load_arrays<Plan, P1, P2, HP1, SX>(to, x + first(next, Plan::P), rows_of(next), columns_of(next));
            load_arrays<Plan, Q1, Q2, HQ1, SG>(to + Plan::X, g + first(next, Plan::Q), rows_of(next),
                                               columns_of(next));
        }
        cp_async_commit();
        next += gridDim.x;
    };
    prefetch_factors(0, factors, Right());
    prefetch_factors(FIRST, factors, Left());
    if (next < count && (ACROSS == 1 || Plan::C % R == 0)) {
        constexpr int WIDE = ACROSS == 1 ? int(Plan::C) : R;
        prefetch_tile<Plan::P, WIDE>(x + first(next, Plan::P), rows_of(next), Plan::C);
        prefetch_tile<Plan::Q, WIDE>(g + first(next, Plan::Q), rows_of(next), Plan::C);
    }
    if constexpr (Plan::ZEROS) {
        for (int e = threadIdx.x; e < Plan::NUMBERS * int(sizeof(T)) / 16; e += Plan::THREADS)
            dynamic[e] = uint4();
        __syncthreads();
    }
    wait_for_previous();
    load_factor<Plan, FIRST, 1, LD1>(left, factors, Left());  // transposed
    load_factor<Plan, 0, LD2, 1>(right, factors, Right());
    load(tiles);
    let_next_come(count, gridDim.x);

    using S1 = Sums<P1, Q1, Plan::WARPS>;
    using Sr = Sums<P2, Q2, Plan::WARPS>;
    float sums1[S1::MI][S1::NI][4] = {}, sums2[Sr::MI][Sr::NI][4] = {};
    for (int stage = 0; number < count; number += gridDim.x) {
        T *xs = tiles + stage * (Plan::X + Plan::G), *gs = xs + Plan::X;
        if constexpr (Plan::STAGES == 2) {
            stage ^= 1;
            load(tiles + stage * (Plan::X + Plan::G));
        }
        cp_async_wait<Plan::STAGES - 1>();
        __syncthreads();
        auto keep = [](T* at, float one, float two) { store_vec(at, pack<T, 2>({one, two})); };
        // G as matrices with Q1 rows: their columns (as k: K1), and their number per row of the array.
        constexpr int N1 = ONE ? Q2 : R, K1 = ONE ? HQ2 : R, EACH = ONE ? 1 : Q2;
        auto back_left = [&](T* to, float times) {  // W1 G
            multiply_all<Plan, Left, P1, N1, HQ1, Operand<1, LD1>, Operand<1, SG>,
                         Batches<L * EACH, EACH, 0, 0, HQ1 * SG, S2>>(
                left, gs, [&](int n, int m, int j, float one, float two) {
                    keep(to + (n / EACH * HP1 + m) * SG + n % EACH * S2 + j, one * times, two * times);
                });
        };
        T* back = Plan::PAIR ? hs : gs;
        if constexpr (Plan::PAIR) {  // H, and Z = X W2
            back_left(hs, 1.0f);
            if constexpr (ONE)
                multiply_all<Plan, Right, L * HP1, Q2, HP2, Operand<SX, 1>, Operand<1, LD2>, Once>(
                    xs, right,
                    [&](int, int m, int j, float one, float two) { keep(zs + m * SG + j, one, two); });
            else
                multiply_all<Plan, Right, Q2, R, HP2, Operand<1, LD2>, Operand<1, S2>,
                             Batches<L * HP1, 1, 0, 0, SX, 0>>(
                    right, xs, [&](int n, int m, int j, float one, float two) {
                        keep(zs + n * SG + m * S2 + j, one, two);
                    });
            __syncthreads();
        }
        if constexpr (Left::COUNT)  // dW1 += Z G^T
            contract_all<Plan, Left, P1, Q1, K1, Operand<SG, 1>, Operand<SG, 1>,
                         Batches<L * EACH, EACH, HP1 * SG, S2, HQ1 * SG, S2>>(sums1, Plan::PAIR ? zs : xs, gs,
                                                                              S1());
        if constexpr (Right::COUNT && ONE)  // dW2 += X^T H
            contract_all<Plan, Right, P2, Q2, L * HP1, Operand<1, SX>, Operand<1, SG>, Once>(sums2, xs, back,
                                                                                             Sr());
        if constexpr (Right::COUNT && !ONE)
            contract_all<Plan, Right, P2, Q2, R, Operand<S2, 1>, Operand<S2, 1>,
                         Batches<L * HP1, 1, SX, 0, SG, 0>>(sums2, xs, back, Sr());
        __syncthreads();
        if constexpr (!Right::COUNT)  // dX = H W2^T, in the place of X
            back_left(xs, float(scale));
        else if constexpr (ONE)
            multiply_all<Plan, Right, L * HP1, P2, HQ2, Operand<SG, 1>, Operand<LD2, 1>, Once>(
                back, right, [&](int, int m, int j, float one, float two) {
                    if (m % HP1 < P1) keep(xs + m * SX + j, one * float(scale), two * float(scale));
                });
        else
            multiply_all<Plan, Right, P2, R, HQ2, Operand<LD2, 1>, Operand<1, S2>,
                         Batches<L * HP1, 1, 0, 0, SG, 0>>(
                right, back, [&](int n, int m, int j, float one, float two) {
                    if (n % HP1 < P1) keep(xs + n * SX + m * S2 + j, one * float(scale), two * float(scale));
                });
        __syncthreads();
        store_arrays<Plan>(dx + first(number, Plan::P), xs, rows_of(number), columns_of(number));
        __syncthreads();
        if constexpr (Plan::STAGES == 1) load(tiles);
    }
    cp_async_wait<0>();
    float* all = reinterpret_cast<float*>(tiles);
    if constexpr (Right::COUNT) gather_sums<P2, Q2>(all, sums2, Sr());
    if constexpr (Left::COUNT) gather_sums<P1, Q1>(all + Plan::SUMS2, sums1, S1());
    partials += (long long)blockIdx.x * (Right::OUTPUTS + Left::OUTPUTS);
    separate<Plan, 0>(partials, all, factors, Right());
    separate<Plan, FIRST>(partials + Right::OUTPUTS, all + Plan::SUMS2, factors, Left());
}

// What kron_linear_v4_sum adds: `count` elements of each out, whose partial sums are `row` elements apart.
template <typename T>
struct Parts4 {
    T* out[MOST];
    const float* partials[MOST];
    int count[MOST], row[MOST];
};

// out[i] = scale * sum over the pieces of partials[i][piece * row[i]], always in the same order. One launch
// adds all partial sums of a backward. Grid ceil(sum of count / 32), block (32, WARPS); WARPS is 32, or 8 if
// the GPU cannot hold all blocks of 32 warps at a time.
template <typename T, int WARPS = 32>
__global__ void __launch_bounds__(32 * WARPS) kron_linear_v4_sum(Parts4<T> parts, int pieces, double scale) {
    __shared__ double sums[WARPS][32];
    let_next_come();
    int at = blockIdx.x * 32 + threadIdx.x, row = 0;
    T* out = nullptr;
    const float* partials = nullptr;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (at >= 0 && at < parts.count[i]) {
            out = parts.out[i] + at;
            partials = parts.partials[i] + at;
            row = parts.row[i];
        }
        at -= parts.count[i];
    }
    wait_for_previous();
    double sum = 0;
    if (out)
#pragma unroll 8
        for (int piece = threadIdx.y; piece < pieces; piece += WARPS) sum += partials[(long long)piece * row];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || !out) return;
#pragma unroll
    for (int y = 1; y < WARPS; ++y) sum += sums[y][threadIdx.x];
    *out = T(sum * scale);
}
