// The backward of one or two neighbouring factors in one launch, on tensor cores: from the input x and the
// incoming gradient g, the gradients of both factors and the gradient of x.
//
// Layout     For a pair of factors the array is [A][P1][P2][C], where P1 is the index of the left factor. A
//            tile is [L][P1][P2][R]: L of the A if C is 1 (then R is 1), otherwise R of the C. Z and H stay
//            in shared memory. All sizes are allowed: in shared memory factors and tiles are padded with
//            zeros to multiples of 8.
// Algorithm  With C = 1 a tile is L matrices X and L matrices G:
//                Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T.
//            With C > 1 the same holds for each of the R neighbours. A single factor is the left one if C > 1
//            (Z is X, and H is dX), or the right one if C = 1 (H is G). A factor may be the Kronecker product
//            of several tiny factors (Merged). Their gradients are computed from its gradient at the end.
// Precision  float: three TF32 products of split numbers (SPLIT, see split_tf32), or one product where TF32
//            is allowed. With SPLIT, sums of few elements are added to others by float additions, because
//            tensor cores truncate when they add, and tiny factors use the FMA units. 16-bit types: Z and H
//            are rounded to the type.
#pragma once
#include "common/reduce.cuh"
#include "tile.cuh"

// The padded length of a row of n elements: accesses along rows and along columns have no bank conflicts.
__device__ constexpr int padded(int n) { return (n + 7) / 16 * 16 + 8; }

// n rounded up to a multiple of 8, for tensor cores. In shared memory the rest is zeros.
__device__ constexpr int eights(int n) { return (n + 7) / 8 * 8; }

template <int THREADS_, int BLOCKS_, bool SPLIT_, int BYTES_, int STAGES_, int L_, int R_, long long C_,
          class Left_, class Right_>
struct Backward4 {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, WARPS = THREADS / 32, BYTES = BYTES_,
                         STAGES = STAGES_, L = L_, R = R_;
    static constexpr bool SPLIT = SPLIT_, ONE = R == 1;
    static constexpr long long C = C_;
    using Left = Left_;
    using Right = Right_;
    static constexpr int P1 = Left::P, Q1 = Left::Q, P2 = Right::P, Q2 = Right::Q, P = P1 * P2, Q = Q1 * Q2;
    static constexpr bool PAIR = Left::COUNT && Right::COUNT;
    // The padded sizes in shared memory.
    static constexpr int HP1 = Left::COUNT ? eights(P1) : 1, HQ1 = Left::COUNT ? eights(Q1) : 1;
    static constexpr int HP2 = Right::COUNT ? eights(P2) : 1, HQ2 = Right::COUNT ? eights(Q2) : 1;
    static constexpr bool ZEROS = HP1 > P1 || HQ1 > Q1 || HP2 > P2 || HQ2 > Q2;
    // Strides: S2 along P2 and Q2; SX along P1 in x, SG along P1 and Q1 in all other arrays; LD1 and LD2
    // between the rows of the matrices.
    static constexpr int S2 = ONE ? 1 : padded(R), SX = padded(HP2 * S2), SG = padded(HQ2 * S2),
                         LD1 = padded(HP1), LD2 = padded(HQ2);
    static constexpr int W1 = Left::COUNT ? HQ1 * LD1 : 0, W2 = Right::COUNT ? HP2 * LD2 : 0;
    static constexpr int X = L * HP1 * SX, G = L * HQ1 * SG, Z = PAIR ? L * HP1 * SG : 0;  // elements
    static constexpr int NUMBERS = W1 + W2 + STAGES * (X + G) + 2 * Z;
    static constexpr long long ACROSS = (C + R - 1) / R;
    static constexpr int SUMS1 = Left::COUNT ? P1 * Q1 : 0, SUMS2 = Right::COUNT ? P2 * Q2 : 0;
};

// The strides of an operand in shared memory: between its rows (operand a) or columns (operand b), and along
// k.
template <int ROW_, int K_>
struct Operand {
    static constexpr int ROW = ROW_, K = K_;
};

// A batch of COUNT products with two nested strides: A2 and B2 within each INNER products, A1 and B1 from one
// such group to the next.
template <int COUNT_, int INNER, int A1, int A2, int B1, int B2>
struct Batches {
    static constexpr int COUNT = COUNT_;
    __device__ static constexpr int a(int n) { return n / INNER * A1 + n % INNER * A2; }
    __device__ static constexpr int b(int n) { return n / INNER * B1 + n % INNER * B2; }
};

using Once = Batches<1, 1, 0, 0, 0, 0>;  // a single product

// A lane's two elements of a row, in TF32 or SPLIT, STEP apart: k is t and t + 4, or with PAIRED 2 t and 2 t
// + 1, which are one vector if the operand is contiguous along k.
template <bool PAIRED, bool SPLIT, class From, int STEP>
__device__ __forceinline__ void fetch_two(float* big, float* small, const float* p) {
    int t = threadIdx.x % 4;
    float v[2];
    if constexpr (From::K == 1) load_to<2>(v, p + 2 * t);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (From::K > 1) v[i] = p[(PAIRED ? 2 * t + i : t + 4 * i) * From::K];
        if constexpr (SPLIT) split_tf32(v[i], big[i * STEP], small[i * STEP]);
        else big[i * STEP] = to_tf32(v[i]);
    }
}

// sums += a b for RUN values of k, with 16 MI rows and 8 NI columns. `high`: the offset of rows 8 to 15 of
// the last 16 rows (0: none).
template <bool SPLIT, int MI, int NI, int RUN, class A, class B>
__device__ __forceinline__ void multiply_add(float (&sums)[MI][NI][4], const float* a, const float* b,
                                             int high) {
    constexpr bool PAIRED = A::K == 1 || B::K == 1;
    int g = threadIdx.x % 32 / 4;
    float part[MI][NI][4] = {};
#pragma unroll
    for (int k = 0; k < RUN; k += 8) {
        float x[2][MI][4], y[2][NI][2];
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* from =
                    a + (16 * m + g) * A::ROW + k * A::K + (i ? m == MI - 1 ? high : 8 * A::ROW : 0);
                fetch_two<PAIRED, SPLIT, A, 2>(x[0][m] + i, x[1][m] + i, from);
            }
#pragma unroll
        for (int n = 0; n < NI; ++n)
            fetch_two<PAIRED, SPLIT, B, 1>(y[0][n], y[1][n], b + (8 * n + g) * B::ROW + k * B::K);
#pragma unroll
        for (int i = SPLIT ? 2 : 0; i >= 0; --i)  // small products first
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int n = 0; n < NI; ++n)
                    mma_tf32(SPLIT ? part[m][n] : sums[m][n], x[i == 2][m], y[i == 1][n]);
    }
    if constexpr (SPLIT)
#pragma unroll
        for (int m = 0; m < MI; ++m) add(sums[m], part[m]);
}

// The same for 16-bit types. If RUN is 8, the other half of k is zeros.
template <bool, int MI, int NI, int RUN, class A, class B, typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[MI][NI][4], const T* a, const T* b, int high) {
    constexpr int HALVES = RUN == 8 ? 1 : 2;
    int row = threadIdx.x % 8, tile = threadIdx.x % 32 / 8;
#pragma unroll
    for (int k = 0; k < RUN; k += 16) {
        unsigned x[MI][4] = {}, y[NI][2] = {};
#pragma unroll
        for (int m = 0; m < MI;
             ++m) {  // 8x8 tiles: rows 0 to 7, rows 8 to 15; then the same 8 further along k
            const T* from = a + 16 * m * A::ROW + k * A::K + (tile % 2 ? m == MI - 1 ? high : 8 * A::ROW : 0);
            from += (A::K == 1 ? row * A::ROW : row * A::K) + tile / 2 % HALVES * (8 * A::K);
            load_tiles<A::K != 1>(reinterpret_cast<unsigned (&)[2 * HALVES]>(x[m]), shared_address(from));
        }
#pragma unroll
        for (int n = 0; n < NI;
             n +=
             HALVES == 2 && NI % 2 ? 1 : 2) {  // 8x8: 8 columns, the same 8 further along k; then the next 8
            int column = HALVES == 2 ? tile / 2 : tile % 2, half = HALVES == 2 ? tile % 2 : 0;
            const T* from = b + (n + (n + 1 < NI ? column : 0)) * (8 * B::ROW) + k * B::K + half * (8 * B::K);
            from += B::K == 1 ? row * B::ROW : row * B::K;
            if constexpr (HALVES == 2) {
                load_tiles<B::K != 1>(reinterpret_cast<unsigned (&)[NI % 2 ? 2 : 4]>(y[n]),
                                      shared_address(from));
            } else {
                unsigned two[2];
                load_tiles<B::K != 1>(two, shared_address(from));
                y[n][0] = two[0];
                if (n + 1 < NI) y[n + 1][0] = two[1];
            }
        }
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int n = 0; n < NI; ++n) mma_16_bit<T>(sums[m][n], x[m], y[n]);
    }
}

// The same for float on the FMA units, with the accumulators in the lanes of an mma fragment.
template <int MI, int NI, int RUN, class A, class B>
__device__ __forceinline__ void multiply_add_fma(float (&sums)[MI][NI][4], const float* a, const float* b,
                                                 int high) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < RUN; k += 4) {
        float x[MI][2][4], y[NI][2][4];
#pragma unroll
        for (int i = 0; i < 2 * MI; ++i) {
            const float* from =
                a + (i / 2 * 16 + g) * A::ROW + k * A::K + (i % 2 ? i / 2 == MI - 1 ? high : 8 * A::ROW : 0);
            if constexpr (A::K == 1) load_to<4>(x[i / 2][i % 2], from);
            else
#pragma unroll
                for (int e = 0; e < 4; ++e) x[i / 2][i % 2][e] = from[e * A::K];
        }
#pragma unroll
        for (int n = 0; n < NI; ++n) {
            const float* from = b + (8 * n + 2 * t) * B::ROW + k * B::K;
            if constexpr (B::K == 1) {
#pragma unroll
                for (int j = 0; j < 2; ++j) load_to<4>(y[n][j], from + j * B::ROW);
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    Vec<float, 2> two = load_vec<float, 2>(from + e * B::K);
                    y[n][0][e] = two.v[0];
                    y[n][1][e] = two.v[1];
                }
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int s = 0; s < MI * NI * 4; ++s)
                sums[s / 4 / NI][s / 4 % NI][s % 4] += x[s / 4 / NI][s % 4 / 2][e] * y[s / 4 % NI][s % 2][e];
    }
}

// The warp tile of an M x N product: MI x 16 rows and NI x 8 columns, chosen so that all WARPS have work. It
// has DOWN x ACROSS of these. If the product's size is not a multiple of the warp tile, the last warp tiles
// overlap others.
template <int M, int N, int COUNT, int WARPS>
struct Cut {
    static constexpr int MB = (M + 15) / 16, NB = eights(N) / 8;
    __device__ static constexpr int parts(int all, int each) { return (all + each - 1) / each; }
    __device__ static constexpr int
    wide() {  // the cost of loading the rows equals that of 1.5 columns of products
        int best = 1;
        for (int n = 2; n <= 4; ++n)
            if (n <= NB && parts(NB, n) * (2 * n + 3) < parts(NB, best) * (2 * best + 3)) best = n;
        return best;
    }
    static constexpr int WIDE = wide();
    static constexpr int MI =
        (MB % 2 == 0 || MB > 4) && COUNT * parts(MB, 2) * parts(NB, WIDE) >= WARPS ? 2 : 1;
    static constexpr int NI =
        WIDE % 2 == 0 && COUNT * parts(MB, MI) * parts(NB, WIDE) < WARPS ? WIDE / 2 : WIDE;
    static constexpr int DOWN = parts(MB, MI), ACROSS = parts(NB, NI);
    // The first 16 rows, or 8 columns, that a warp computes. They come before its own if the last warp tile
    // overlaps another.
    __device__ static int row(int own) { return MB % MI ? min(own, MB - MI) : own; }
    __device__ static int column(int own) { return NB % NI ? min(own, NB - NI) : own; }
};

// Values of k at a time. The rest at the end is 8. (For k = 24, 16 and 8 took longer than three times 8.)
__device__ constexpr int run_of(int k) { return k < 16 || k == 24 ? 8 : 16; }

// Compute all products of a batch and call store(batch, row, column, two neighbours). Warps take warp tiles
// in turn. W is the factor that is multiplied by. Short sums (K <= 8) and merged tiny factors use the FMA
// units: they are more accurate for short sums. A layer of tiny factors has many such sums in sequence, so
// the error of split numbers would add up.
template <class Plan, class W, int M, int N, int K, class A, class B, class Batch, typename T, class Store>
__device__ __forceinline__ void multiply_all(const T* a, const T* b, const Store& store) {
    using C = Cut<M, N, Batch::COUNT, Plan::WARPS>;
    constexpr int ACROSS = C::ACROSS, DOWN = C::DOWN, RUN = Plan::SPLIT ? 8 : run_of(K);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int item = threadIdx.x / 32; item < Batch::COUNT * ACROSS * DOWN; item += Plan::WARPS) {
        int batch = item / (ACROSS * DOWN), own_row = item / ACROSS % DOWN * C::MI,
            own_column = item % ACROSS * C::NI;
        int m0 = 16 * C::row(own_row), n0 = 8 * C::column(own_column);
        const T *from = a + Batch::a(batch) + m0 * A::ROW, *with = b + Batch::b(batch) + n0 * B::ROW;
        int high = eights(M) % 16 && m0 + 16 * C::MI > M ? 0 : 8 * A::ROW;
        float sums[C::MI][C::NI][4] = {};
#pragma unroll 2
        for (int k = 0; k < K / RUN; ++k) {
            if constexpr (Plan::SPLIT && (K <= 8 || W::COUNT > 1))
                multiply_add_fma<C::MI, C::NI, RUN, A, B>(sums, from, with, high);
            else multiply_add<Plan::SPLIT, C::MI, C::NI, RUN, A, B>(sums, from, with, high);
            from += RUN * A::K;
            with += RUN * B::K;
        }
        if constexpr (K % RUN) multiply_add<Plan::SPLIT, C::MI, C::NI, K % RUN, A, B>(sums, from, with, high);
#pragma unroll
        for (int e = 0; e < C::MI * C::NI * 2; ++e) {
            int m = m0 + e / 2 / C::NI * 16 + e % 2 * 8 + g, n = n0 + e / 2 % C::NI * 8 + 2 * t;
            if ((M % 16 && m >= M) || (N % 8 && n >= N)) continue;
            if ((C::MB % C::MI && m < 16 * own_row) || (C::NB % C::NI && n < 8 * own_column)) continue;
            const float (&d)[4] = sums[e / 2 / C::NI][e / 2 % C::NI];
            store(batch, m, n, d[e % 2 * 2], N % 2 && n + 1 == N ? 0.0f : d[e % 2 * 2 + 1]);
        }
    }
}

// The part of a gradient's M x N accumulators that a warp has: DOWN x ACROSS warps share the matrix, and
// TIMES such groups share k. If the sizes do not divide, and a warp would need more than MOST accumulators,
// the last warp tiles overlap others.
template <int M, int N, int WARPS>
struct Sums {
    static constexpr int MB = (M + 15) / 16, NB = eights(N) / 8, MOST = 20;
    __device__ static constexpr int down(bool want_rows) {
        int mi = MB, ni = NB, down = 1, across = 1;
        while (mi * ni > 4 && down * across * 2 <= WARPS && (mi % 2 == 0 || ni % 2 == 0 || mi * ni > MOST)) {
            if (mi % 2 == ni % 2 ? 2 * mi >= ni : mi % 2 == 0) mi = (mi + 1) / 2, down *= 2;
            else ni = (ni + 1) / 2, across *= 2;
        }
        return want_rows ? down : across;
    }
    static constexpr int DOWN = down(true), ACROSS = down(false), MI = (MB + DOWN - 1) / DOWN,
                         NI = (NB + ACROSS - 1) / ACROSS;
    static constexpr int TIMES = WARPS / (DOWN * ACROSS);
    // A warp's own first 16 rows and 8 columns, and the first ones that it computes.
    __device__ static int own_row() { return int(threadIdx.x) / 32 / ACROSS % DOWN * MI; }
    __device__ static int own_column() { return int(threadIdx.x) / 32 % ACROSS * NI; }
    __device__ static int row() { return MB % DOWN ? min(own_row(), MB - MI) : own_row(); }
    __device__ static int column() { return NB % ACROSS ? min(own_column(), NB - NI) : own_column(); }
};

template <class Plan, class W, int RUN, class A, class B, int MI, int NI, typename T>
__device__ __forceinline__ void contract_run(float (&sums)[MI][NI][4], const T* a, const T* b, int high) {
    if constexpr (Plan::SPLIT && W::COUNT > 1) {
        float part[MI][NI][4] = {};
        multiply_add_fma<MI, NI, RUN, A, B>(part, a, b, high);
#pragma unroll
        for (int m = 0; m < MI; ++m) add(sums[m], part[m]);
    } else {
        multiply_add<Plan::SPLIT, MI, NI, RUN, A, B>(sums, a, b, high);
    }
}

// sums += the products of a batch; each warp computes its part of the accumulators. W is the factor whose
// gradient this is. The gradient of merged factors is computed as accurately as possible.
template <class Plan, class W, int M, int N, int K, class A, class B, class Batch, class S, int MI, int NI,
          typename T>
__device__ __forceinline__ void contract_all(float (&sums)[MI][NI][4], const T* a, const T* b, S) {
    constexpr int RUN = K % 32 == 0 ? 32 : run_of(K), EACH = (K + RUN - 1) / RUN;
    int time = threadIdx.x / 32 / (S::DOWN * S::ACROSS), m0 = 16 * S::row();
    int high = eights(M) % 16 && m0 + 16 * MI > M ? 0 : 8 * A::ROW;
    a += m0 * A::ROW;
    b += 8 * S::column() * B::ROW;
#pragma unroll 1
    for (int i = time; i < Batch::COUNT * EACH; i += S::TIMES) {
        int batch = i / EACH, k = i % EACH * RUN;
        const T *from = a + Batch::a(batch) + k * A::K, *with = b + Batch::b(batch) + k * B::K;
        if (K % RUN == 0 || k + RUN <= K) contract_run<Plan, W, RUN, A, B>(sums, from, with, high);
        else contract_run<Plan, W, K % RUN ? K % RUN : RUN, A, B>(sums, from, with, high);
    }
}

// Add the accumulators of a gradient of all TIMES groups of warps to all[M][N], in a fixed order.
template <int M, int N, class S, int MI, int NI>
__device__ __forceinline__ void gather_sums(float* all, const float (&sums)[MI][NI][4], S) {
    int time = threadIdx.x / 32 / (S::DOWN * S::ACROSS), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int m0 = 16 * S::row(), n0 = 8 * S::column();
#pragma unroll 1
    for (int turn = 0; turn < S::TIMES; ++turn) {
        if (turn == time)
#pragma unroll
            for (int e = 0; e < MI * NI * 4; ++e) {
                int m = m0 + e / 4 / NI * 16 + e % 4 / 2 * 8 + g, n = n0 + e / 4 % NI * 8 + 2 * t + e % 2;
                if ((S::MB % S::DOWN && m < 16 * S::own_row()) ||
                    (S::NB % S::ACROSS && n < 8 * S::own_column()))
                    continue;
                float sum = sums[e / 4 / NI][e / 4 % NI][e % 4];
                if (m < M && (N % 8 == 0 || n < N)) all[m * N + n] = turn ? all[m * N + n] + sum : sum;
            }
        __syncthreads();
    }
}

// The gradients of the merged factors N, N + 1, ..., one after another, from the gradient of their product. A
// warp computes one element.
template <class Plan, int N, class... Factors, typename T>
__device__ __forceinline__ void separate(float* to, const float* all, const Factors4<T>& factors,
                                         Merged<Factors...>) {
    using W = Merged<Factors...>;
    if constexpr (W::COUNT == 1) {
        for (int e = threadIdx.x; e < W::P * W::Q; e += Plan::THREADS) to[e] = all[e];
    } else if constexpr (W::COUNT > 1) {
        constexpr int p[] = {Factors::P...}, q[] = {Factors::Q...};
#pragma unroll 1
        for (int output = threadIdx.x / 32; output < W::OUTPUTS; output += Plan::WARPS) {
            int at = output, own = -1, a = 0, b = 0, columns = 1, terms = 1;
#pragma unroll
            for (int f = 0; f < W::COUNT; ++f) {
                if (own < 0 && at < p[f] * q[f])
                    own = f, a = at / q[f], b = at % q[f], columns = W::Q / q[f],
                    terms = W::P / p[f] * columns;
                at -= p[f] * q[f];
            }
            double sum = 0;
            for (int i = threadIdx.x % 32; i < terms; i += 32) {
                int rows_left = i / columns, columns_left = i % columns, k = 0, j = 0, k_unit = 1, j_unit = 1;
                float value = 1;
#pragma unroll
                for (int f = 0; f < W::COUNT; ++f) {
                    int row = f == own ? a : rows_left % p[f], column = f == own ? b : columns_left % q[f];
                    if (f != own) {
                        value *=
                            load_as(factors.at[N + f][row * factors.p[N + f] + column * factors.q[N + f]]);
                        rows_left /= p[f];
                        columns_left /= q[f];
                    }
                    k += row * k_unit, j += column * j_unit;
                    k_unit *= p[f], j_unit *= q[f];
                }
                sum += all[k * W::Q + j] * value;
            }
            sum = warp_reduce<Sum>(sum);
            if (threadIdx.x % 32 == 0) to[output] = float(sum);
        }
    }
}

// Call act for each vector of W elements of a tile [L][P1][P2][R], which has H1 rows in shared memory: with
// its l and r, its offset in global memory from the first element of the tile, and its offset in shared
// memory.
template <class Plan, int P1, int P2, int H1, int S1, int W, class Do>
__device__ __forceinline__ void for_each_vector(const Do& act) {
    for (int e = threadIdx.x * W; e < Plan::L * P1 * P2 * Plan::R; e += Plan::THREADS * W) {
        int n = e / Plan::R, r = e % Plan::R, row = n / P2, l = row / P1;
        long long at = Plan::ONE ? e : n * Plan::C + r;
        act(l, r, at, (row + l * (H1 - P1)) * S1 + n % P2 * Plan::S2 + r);
    }
}

// Copy a tile to shared memory asynchronously, with zeros for rows beyond `rows` and for columns beyond
// `columns`.
template <class Plan, int P1, int P2, int H1, int S1, typename T>
__device__ __forceinline__ void load_arrays(T* to, const T* from, int rows, long long columns) {
    for_each_vector<Plan, P1, P2, H1, S1, Plan::BYTES / sizeof(T)>([&](int l, int r, long long at, int here) {
        bool in = l < rows && (Plan::C % Plan::R == 0 || r < columns);
        copy_or_zero<Plan::BYTES>(to + here, from + at, in);
    });
}

// Store a tile from shared memory to global memory in whole cache lines. Stores from accumulators would write
// parts of many lines.
template <class Plan, typename T>
__device__ __forceinline__ void store_arrays(T* to, const T* from, int rows, long long columns) {
    constexpr int W = Plan::BYTES / sizeof(T);
    for_each_vector<Plan, Plan::P1, Plan::P2, Plan::HP1, Plan::SX, W>(
        [&](int l, int r, long long at, int here) {
            if (l < rows && (Plan::C % Plan::R == 0 || r < columns))
                store_vec(to + at, load_vec<T, W>(from + here));
        });
}

// Copy a P x Q matrix to shared memory: element [k][j] to k K + j J, where K or J is 1. number(k, j) loads VK
// x VJ elements. Neighbouring lanes are neighbours along the dimension that is contiguous in shared memory,
// so that stores have no bank conflicts.
template <class Plan, int P, int Q, int K, int J, int VK, int VJ, typename T, class Number>
__device__ __forceinline__ void place_factor(T* to, const Number& number) {
    constexpr int KS = P / VK, JS = Q / VJ;
#pragma unroll 4
    for (int e = threadIdx.x; e < KS * JS; e += Plan::THREADS) {
        int k = (K == 1 ? e % KS : e / JS) * VK, j = (K == 1 ? e / KS : e % JS) * VJ;
        Vec<T, VK * VJ> v = number(k, j);
#pragma unroll
        for (int i = 0; i < VK * VJ; ++i) to[(k + i % VK) * K + (j + i / VK) * J] = v.v[i];
    }
}

// Copy the matrix of a (merged) factor, from factor N on, 16 bytes at a time along the dimension that is
// contiguous.
template <class Plan, int N, int K, int J, class W, typename T>
__device__ __forceinline__ void load_factor(T* to, const Factors4<T>& factors, W) {
    constexpr int V = 16 / sizeof(T);
    if constexpr (W::COUNT > 0) {
        long long p = factors.p[N], q = factors.q[N];
        const T* from = factors.at[N];
        auto neighbours = [&](int k, int j) { return load_vec<T, V>(from + k * p + j * q); };
        auto one = [&](int k, int j) { return Vec<T, 1>{T(element(N, factors, k, j, W()))}; };
        if constexpr (W::COUNT == 1 && W::P % V == 0 && W::Q % V == 0) {
            bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
            if (aligned && q == 1 && p % V == 0) place_factor<Plan, W::P, W::Q, K, J, 1, V>(to, neighbours);
            else if (aligned && p == 1 && q % V == 0)
                place_factor<Plan, W::P, W::Q, K, J, V, 1>(to, neighbours);
            else place_factor<Plan, W::P, W::Q, K, J, 1, 1>(to, one);
        } else {
            place_factor<Plan, W::P, W::Q, K, J, 1, 1>(to, one);
        }
    }
}

// The gradient of one factor, by mma of 16-bit types or in TF32: partials[piece][k][j] = sum over the fibers
// of a piece of z[a][k][c] * h[a][j][c]; z is [A][P][C], h is [A][Q][C]. A block computes K x J outputs from
// chunks of L of the A and R of the C, with zeros beyond P, Q and C. In shared memory a chunk of z is
// [K][L][R], or [L][K] if R is 1; that of h has J rows. Strict float and double go to cuBLAS.
template <int THREADS_, int L_, int R_, int BYTES_, int P_, int Q_, int K_, int J_>
struct Gradient4 {
    static constexpr int THREADS = THREADS_, WARPS = THREADS / 32, L = L_, R = R_, BYTES = BYTES_, P = P_,
                         Q = Q_, K = K_, J = J_;
    static constexpr bool SPLIT = false;
    static constexpr int BLOCKS = THREADS <= 256 ? 2 : 1;  // minimum per SM
    // Strides along k, and along l of a chunk of n rows; elements of a chunk.
    static constexpr int ALONG_K = R == 1 ? 1 : padded(L * R);
    __device__ static constexpr int along_l(int n) { return R == 1 ? padded(n) : R; }
    static constexpr int Z = R == 1 ? L * padded(K) : K * ALONG_K, H = R == 1 ? L * padded(J) : J * ALONG_K;
};

// Copy elements k0 to k0 + K (of N) of the fibers of a chunk, with zeros beyond N, beyond `rows` and beyond
// `columns`.
template <class Plan, int K, int N, typename T>
__device__ __forceinline__ void load_chunk(T* to, const T* from, int k0, int rows, long long columns,
                                           long long C) {
    constexpr int W = Plan::BYTES / sizeof(T), R = Plan::R;
    for (int e = threadIdx.x * W; e < Plan::L * K * R; e += Plan::THREADS * W) {
        int l = e / (K * R), k = e / R % K, r = e % R;
        bool in = l < rows && k0 + k < N && r < columns;
        int here = l * Plan::along_l(K) + k * Plan::ALONG_K + r;
        const T* x = from + (l * N + k0 + k) * C + r;
        copy_or_zero<Plan::BYTES>(to + here, x, in);
    }
}
