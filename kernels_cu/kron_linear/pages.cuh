// kron_linear v4: two factors at once. y = w1^T x w2, where a page x is a contiguous matrix [P1][P2].
//
// A warp computes 16 MT rows of y from the whole page. It multiplies w1^T by some columns of x at a time. The accumulators of this product
// are in the lanes where mma takes operand a, so the warp multiplies these columns by w2 without leaving registers. The intermediate result
// z is not rounded to 16 bits. For bfloat16 it is split into big + small, with two products (SPLIT). These take as long as one TF32 product
// and keep 16 bits instead of 11. Splitting costs more instructions, but w2 is half as large. float16 has too small a range for this.
//
// A TEAM of warps shares a page. It copies the next pages while it multiplies, and does not wait for other teams. On sm_90a warpgroups
// multiply large factors: wide.cuh.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/mma.cuh"
#include "tile.cuh"

// TEAMS: teams per block. STAGES: pages in shared memory per team. HELD: w2 stays in registers, as w1 always does. COLUMNS: columns of x
// that are multiplied by w1^T at a time.
template <int BLOCKS_, int TEAMS_, int STAGES_, int MT_, bool HELD_, bool SPLIT_, bool ADDED_, class Left, class Right>
struct Pages4 {
    static constexpr int BLOCKS = BLOCKS_, TEAMS = TEAMS_, STAGES = STAGES_, MT = MT_;
    static constexpr bool HELD = HELD_, SPLIT = SPLIT_, ADDED = ADDED_;
    static constexpr int P1 = Left::P, Q1 = Left::Q, P2 = Right::P, Q2 = Right::Q, COLUMNS = gcd(P2, 32);
    static constexpr int TEAM = (Q1 + 16 * MT - 1) / (16 * MT);               // warps
    static constexpr int ROWS = TEAM * MT * 16, THREADS = 32 * TEAM * TEAMS;  // ROWS: rows of y for which the team has accumulators
    static constexpr int LD1 = Q1 + 8, LD2 = Q2 + 8,
                         LDX = P2 + 8;  // padded strides of rows in shared memory: 8 rows have no bank conflicts
};

template <class Plan, typename T>
struct PageMemory {
    static constexpr int K2 = Plan::SPLIT ? 16 : 8;
    static constexpr int W1 = sizeof(T) == 2 ? Plan::P1 * Plan::LD1 * 2 : Plan::P1 * Plan::Q1 * 4;  // bytes
    static constexpr int W2 = Plan::SPLIT ? Plan::P2 * Plan::LD2 * 2 : Plan::P2 * Plan::Q2 * 4;
    static constexpr int PAGE = Plan::P1 * Plan::LDX;  // elements
};

// The number of products from which a lane has neighbouring elements of y: stores of 16, 8 or 4 bytes.
template <int Q>
constexpr int NEIGHBOURS = Q % 16   ? 1
                           : Q % 32 ? 2
                                    : 4;

// The column of the products that is column j of w2. Lane t has columns 2 t and 2 t + 1 of each product. The permutation makes those of
// NEIGHBOURS products neighbours in y.
template <int Q>
__device__ constexpr int place_of_column(int j) {
    constexpr int N = NEIGHBOURS<Q>;
    return j / (8 * N) * (8 * N) + j % (2 * N) / 2 * 8 + j / (2 * N) % 4 * 2 + j % 2;
}

// The offset of element [k][j] of w1 as operand a in TF32, and of w2 as operand b; see mma_tf32.
template <class Plan>
__device__ constexpr int place_a(int k, int j) {
    return ((j / 16 * (Plan::P1 / 8) + k / 8) * 32 + j % 8 * 4 + k % 4) * 4 + k % 8 / 4 * 2 + j % 16 / 8;
}
template <class Plan>
__device__ constexpr int place_b(int k, int j) {
    int n = place_of_column<Plan::Q2>(j);
    return ((k / 8 * (Plan::Q2 / 16) + n / 16) * 32 + n % 8 * 4 + k % 8 / 2) * 4 + n % 16 / 8 * 2 + k % 2;
}

// Call f(n, row, column) for the units of U elements of a matrix, where n counts the units of a thread. The units of a warp are in four
// rows: whole cache lines in global memory, and no bank conflicts wherever they are stored.
template <int P, int Q, int U, int THREADS, class F>
__device__ __forceinline__ void each_unit(const F& f) {
    constexpr unsigned ROW = Q / U, BLOCK = 4 * ROW, UNITS = (P + 3) / 4 * BLOCK;
    constexpr unsigned AGAIN = THREADS % BLOCK ? 0 : THREADS / ROW;  // rows from one unit of a thread to the next
#pragma unroll
    for (unsigned n = 0; n < (UNITS + THREADS - 1) / THREADS; ++n) {
        unsigned e = AGAIN ? threadIdx.x : threadIdx.x + n * THREADS;
        int row = e / BLOCK * 4 + e % 4 + n * AGAIN;
        if ((UNITS % THREADS == 0 || threadIdx.x + n * THREADS < UNITS) && (P % 4 == 0 || row < P)) f(n, row, int(e % BLOCK / 4 * U));
    }
}

// Call put(row, column, elements) for all elements of a factor, by all threads of a block: N neighbours of a row if its rows are
// contiguous. `meanwhile` is called while these loads are in flight, if registers hold them. It issues the loads of the pages: factors that
// are loaded after the pages would arrive as late as these.
template <int P, int Q, int THREADS, typename T, class Put, class Meanwhile>
__device__ __forceinline__ void each_number(const T* w, long long p, long long q, const Put& put, const Meanwhile& meanwhile) {
    constexpr int U = gcd(Q, 16 / sizeof(T)), V = gcd(P, 16 / sizeof(T)), N = Put::TOGETHER < U ? Put::TOGETHER : U;
    constexpr int COUNT = ((P + 3) / 4 * 4 * Q / U + THREADS - 1) / THREADS, REGISTERS = COUNT * ((U * int(sizeof(T)) + 3) / 4);
    bool aligned = reinterpret_cast<unsigned long long>(w) % 16 == 0, rows = REGISTERS <= 112 && q == 1 && p % U == 0 && aligned;
    Vec<T, U> v[COUNT];
    if (rows) each_unit<P, Q, U, THREADS>([&](int n, int k, int j) { v[n] = load_vec<T, U>(w + k * p + j); });
    __syncwarp();  // otherwise the compiler may move `meanwhile` before the loads
    meanwhile();
    if (rows) {
        each_unit<P, Q, U, THREADS>([&](int n, int k, int j) {
#pragma unroll
            for (int u = 0; u < U; u += N) {
                Vec<T, N> part;
#pragma unroll
                for (int e = 0; e < N; ++e) part.v[e] = v[n].v[u + e];
                put(k, j + u, part);
            }
        });
    } else if (p == 1 && q % V == 0 && aligned) {
        share<P / V, Q, THREADS>([&](int i, int j) {
            Vec<T, V> v = load_vec<T, V>(w + i * V + j * q);
#pragma unroll
            for (int u = 0; u < V; ++u) put(i * V + u, j, Vec<T, 1>{v.v[u]});
        });
    } else {
        share<P, Q, THREADS>([&](int k, int j) { put(k, j, Vec<T, 1>{w[k * p + j * q]}); });
    }
}

// Functions for each_number that store a factor to shared memory as the warps load it, without conversion, or in TF32 if U is float.
template <class Plan, typename U>
struct PutLeft {
    static constexpr int TOGETHER = sizeof(U) == 2 ? 8 : 1;
    char* to;
    template <typename T, int N>
    __device__ __forceinline__ void operator()(int k, int j, const Vec<T, N>& v) const {
        if constexpr (sizeof(U) == 2) store_vec(reinterpret_cast<T*>(to) + k * Plan::LD1 + j, v);
        else reinterpret_cast<float*>(to)[place_a<Plan>(k, j)] = to_tf32(load_as(v.v[0]));
    }
};
template <class Plan, typename T>
struct PutRight {
    static constexpr int TOGETHER = Plan::SPLIT ? 2 : 1;
    char* to;
    template <int N>
    __device__ __forceinline__ void operator()(int k, int j, const Vec<T, N>& v) const {
        int n = place_of_column<Plan::Q2>(j);
        if constexpr (Plan::SPLIT) store_vec(reinterpret_cast<T*>(to) + k * Plan::LD2 + n, v);
        else reinterpret_cast<float*>(to)[place_b<Plan>(k, j)] = to_tf32(load_as(v.v[0]));
    }
};

// Copy a page asynchronously, by the threads of a team.
template <class Plan, typename T>
__device__ __forceinline__ void load_page(T* to, const T* from, int thread) {
    constexpr int U = 16 / sizeof(T), UNITS = Plan::P2 / U;
#pragma unroll 8
    for (int e = thread; e < Plan::P1 * UNITS; e += Plan::TEAM * 32)
        cp_async_16(shared_address(to + e / UNITS * Plan::LDX + e % UNITS * U), from + e * U);
}

// The address that a lane passes to load_tiles for 16 x 16 elements: a row of an 8 x 8 tile. The second tile is below the first, or with
// ASIDE next to it.
template <bool ASIDE>
__device__ __forceinline__ unsigned tile_address(const void* from, int distance) {
    int lane = threadIdx.x % 32, row = ASIDE ? lane / 16 * 8 + lane % 8 : lane % 16, column = ASIDE ? lane / 8 % 2 : lane / 16;
    return shared_address(from) + (row * distance + column * 8) * 2;
}

// Operand a of a warp: its rows of w1^T, from `tile` on, with all k, 16 at a time (8 in TF32). Rows beyond the last one repeat the last
// ones.
template <class Plan, typename T>
struct LeftOperand {
    static constexpr int K = 32 / sizeof(T), STEPS = Plan::P1 / K;
    unsigned held[STEPS][Plan::MT][4];
    __device__ __forceinline__ LeftOperand(const char* w1, int tile) {
        unsigned at = tile_address<true>(w1, Plan::LD1);
        const unsigned* lanes = reinterpret_cast<const unsigned*>(w1) + threadIdx.x % 32 * 4;
#pragma unroll
        for (int i = 0; i < STEPS * Plan::MT; ++i) {
            int k = i / Plan::MT, m = i % Plan::MT, from = Plan::ROWS > Plan::Q1 ? min(tile + m, Plan::Q1 / 16 - 1) : tile + m;
            if constexpr (sizeof(T) == 2) load_tiles<true>(held[k][m], at + (k * 16 * Plan::LD1 + from * 16) * 2);
            else unpack(held[k][m], load_vec<unsigned, 4>(lanes + (from * STEPS + k) * 128));
        }
    }
};

// Operand b: k to k + 16 (k + 8 in TF32) of 16 columns of w2, from n on.
template <class Plan, typename T>
struct RightOperand {
    static constexpr int K = PageMemory<Plan, T>::K2, STEPS = Plan::HELD ? Plan::P2 / K : 1, TILES = Plan::Q2 / 16;
    unsigned at;
    const unsigned* lanes;
    unsigned held[STEPS][TILES][4];
    __device__ __forceinline__ RightOperand(const char* w2)
        : at(tile_address<false>(w2, Plan::LD2)), lanes(reinterpret_cast<const unsigned*>(w2) + threadIdx.x % 32 * 4) {
        if constexpr (Plan::HELD)
#pragma unroll
            for (int i = 0; i < STEPS * TILES; ++i) fetch(held[i / TILES][i % TILES], i / TILES * K, i % TILES * 16);
    }
    __device__ __forceinline__ void fetch(unsigned (&b)[4], int k, int n) const {
        if constexpr (Plan::SPLIT) load_tiles<true>(b, at + (k * Plan::LD2 + n) * 2);
        else unpack(b, load_vec<unsigned, 4>(lanes + (k / 8 * TILES + n / 16) * 128));
    }
    __device__ __forceinline__ void operator()(unsigned (&b)[4], int k, int n) const {
        if constexpr (!Plan::HELD) fetch(b, k, n);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = held[k / K][n / 16][i];
    }
};
