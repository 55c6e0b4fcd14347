// kron_linear v4: two factors of 16-bit types by warpgroups (sm_90a). y = w1^T x w2, where x is a contiguous
// matrix [P1][P2], one of A.
//
// A warpgroup has its own matrices x and waits for no other. It computes 64 rows of y at a time, from the
// whole x: z = w1^T x, whose accumulators are in the lanes where wgmma takes operand a, and then y = z w2.
// z is not rounded to 16 bits. For bfloat16 it is split into big + small, with two products; float16 has too
// small a range for this and uses TF32. z is divided into two groups of columns: while the tensor cores
// multiply one, the warps split the other or store results. If x has at most 32 columns and y at most 32
// rows, a warpgroup takes two x at a time: the columns of z are those of both, the first two warps continue
// with those of matrix 0, the others with those of matrix 1.
#pragma once
#include "common/math.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "tile.cuh"

// How many 8-column products give a lane neighbouring columns of y: 4, 2 or 1, for stores of 16, 8 or 4
// bytes.
template <int Q>
constexpr int NEIGHBOURS = gcd(Q, 32) >= 16 ? gcd(Q, 32) / 8 : 1;

// The column of the products that is column j of w2. Lane t has columns 2 t and 2 t + 1 of each product. The
// permutation makes those of NEIGHBOURS products neighbours in y.
template <int Q>
__device__ constexpr int place_of_column(int j) {
    constexpr int N = NEIGHBOURS<Q>;
    return j / (8 * N) * (8 * N) + j % (2 * N) / 2 * 8 + j / (2 * N) % 4 * 2 + j % 2;
}

// Call f(n, row, column) for the units of U elements of a matrix, where n counts the units of a thread. The
// units of a warp are in four rows: whole cache lines in global memory, and no bank conflicts wherever they
// are stored.
template <int P, int Q, int U, int THREADS, class F>
__device__ __forceinline__ void each_unit(const F& f) {
    constexpr unsigned ROW = Q / U, BLOCK = 4 * ROW, UNITS = (P + 3) / 4 * BLOCK;
    // Rows from one unit of a thread to the next.
    constexpr unsigned AGAIN = THREADS % BLOCK ? 0 : THREADS / ROW;
#pragma unroll
    for (unsigned n = 0; n < (UNITS + THREADS - 1) / THREADS; ++n) {
        unsigned e = AGAIN ? threadIdx.x : threadIdx.x + n * THREADS;
        int row = e / BLOCK * 4 + e % 4 + n * AGAIN;
        if ((UNITS % THREADS == 0 || threadIdx.x + n * THREADS < UNITS) && (P % 4 == 0 || row < P))
            f(n, row, int(e % BLOCK / 4 * U));
    }
}

// Call put(row, column, elements, several) for all elements of a factor, by all threads of a block: for N
// neighbours of a row if its rows are contiguous, otherwise (not `several`) for one. meanwhile() issues the
// loads of x. It is called after the loads of the factor if registers hold their results: a factor that is
// loaded after x would arrive after it.
template <int P, int Q, int THREADS, int N, typename T, class Put, class Meanwhile>
__device__ __forceinline__ void each_number(const T* w, long long p, long long q, const Put& put,
                                            const Meanwhile& meanwhile) {
    constexpr int U = gcd(Q, 16 / sizeof(T));
    constexpr int COUNT = ((P + 3) / 4 * 4 * Q / U + THREADS - 1) / THREADS,
                  REGISTERS = COUNT * ((U * int(sizeof(T)) + 3) / 4);
    bool aligned = reinterpret_cast<unsigned long long>(w) % 16 == 0,
         rows = REGISTERS <= 112 && q == 1 && p % U == 0 && aligned;
    Vec<T, U> v[COUNT];
    if (rows) each_unit<P, Q, U, THREADS>([&](int n, int k, int j) { v[n] = load_vec<T, U>(w + k * p + j); });
    __syncwarp();  // otherwise the compiler may move meanwhile() before the loads
    meanwhile();
    if (rows) {
        each_unit<P, Q, U, THREADS>([&](int n, int k, int j) {
#pragma unroll
            for (int u = 0; u < U; u += N) put(k, j + u, v[n].v + u, true);
        });
    } else {
        share<P, Q, THREADS>([&](int k, int j) { put(k, j, w + k * p + j * q, false); });
    }
}

// Split two floats into two bfloat16 numbers each: the first is truncated, the second is the rounded rest.
// For an infinity the second is finite and has its sign, so that the sum of products is not NaN. A NaN stays
// in the first (min returns the operand that is not NaN).
__device__ __forceinline__ void split_pair(float one, float two, unsigned& big, unsigned& small) {
    __nv_bfloat162 rest;
    unsigned most = 0x7f7f7f7f;
    big = __byte_perm(__float_as_uint(one), __float_as_uint(two), 0x7632);
    narrow(rest, make_float2(one - __uint_as_float(big << 16), two - __uint_as_float(big & 0xffff0000)));
    rest = __hmin2(rest, reinterpret_cast<__nv_bfloat162&>(most));
    small = reinterpret_cast<unsigned&>(rest) & 0x7fff7fff | big & 0x80008000;
}

__device__ constexpr int sixteens(int n) { return (n + 15) / 16 * 16; }

// TEAMS: warpgroups per block. STAGES: tiles in shared memory per warpgroup. COLUMNS and REST: the sizes of
// the two groups of columns of z. PARTS: the number of parts of w1^T, 64 rows each. IN_REGISTERS: parts that
// stay in registers; if not all do, each is reloaded for each tile. P2 is even, other sizes are any: x has
// P1_PADDED rows of P2_PADDED columns in shared memory, with zeros beyond P1 and P2; so do w1 and w2.
// MATRICES: matrices x of a tile, side by side in shared memory; each group of columns has first those of
// matrix 0, then those of matrix 1. ROWS: of y, for each matrix. BYTES: of a copy. PACKED: rows of y are
// unaligned and are stored through shared memory, UNIT elements at a time.
template <int TEAMS_, int STAGES_, bool ADDED_, class Left, class Right>
struct Chain4 {
    static constexpr int TEAMS = TEAMS_, STAGES = STAGES_, THREADS = 128 * TEAMS;
    static constexpr bool ADDED = ADDED_;
    static constexpr int P1 = Left::P, Q1 = Left::Q, P2 = Right::P, Q2 = Right::Q;
    static constexpr int P1_PADDED = sixteens(P1), P2_PADDED = sixteens(P2), Q2_PADDED = sixteens(Q2),
                         LD1 = sixteens(Q1) + 8;
    static constexpr int MATRICES = Q1 <= 32 && P2_PADDED <= 32 ? 2 : 1, PARTS = (Q1 + 63) / 64,
                         ROWS = PARTS * 64 / MATRICES;
    static constexpr int COLUMNS = P2_PADDED > 64 ? 64 : sixteens(P2_PADDED / 2), REST = P2_PADDED - COLUMNS;
    static constexpr int IN_REGISTERS =
        PARTS <= 2 && (P2_PADDED + Q2_PADDED) / 2 + PARTS * P1_PADDED / 4 <= 192 ? PARTS : 1;
    static constexpr int BYTES = gcd(16, 2 * P2), UNIT = gcd(8, Q1* Q2);
    static constexpr bool PACKED = Q2 % 16 > 0, PADDED = (P1 | Q1 | P2 | Q2) % 16 > 0;
    // Where column `column` of a matrix is, in the order of z.
    __device__ static constexpr int place(int matrix, int column) {
        return column < COLUMNS ? matrix * COLUMNS + column
                                : MATRICES * COLUMNS + matrix * REST + column - COLUMNS;
    }
};

// A matrix [ROWS][COLUMNS] of a 16-bit type in shared memory, as operand b of wgmma with the 128-byte
// swizzle: panels of 64 columns. A row of a panel is 128 bytes, eight units of 16 bytes, and unit i of row r
// is at i ^ (r % 8), so that eight rows have no bank conflicts.
template <int ROWS, int COLUMNS>
struct Panels {
    static constexpr int PANEL = ROWS * 64, SIZE = (COLUMNS + 63) / 64 * PANEL;  // elements
    __device__ static constexpr int at(int row, int column) {
        return column / 64 * PANEL + row * 64 + ((column / 8 ^ row) & 7) * 8 + column % 8;
    }
    __device__ static unsigned long long described(const void* from) {
        return describe(shared_address(from), PANEL * 2, 8 * 128) | SWIZZLED;
    }
    // The offset to add to the descriptor for the elements from [row][column] on. `row` is a multiple of 8.
    // At `column` a panel begins, or all columns are in one panel.
    __device__ static constexpr int step(int row, int column) {
        return (column / 64 * PANEL + row * 64 + column % 64) * 2 / 16;
    }
};

// The same for TF32: core matrices of 8 columns with 4 floats, contiguous along k. Lane t of a group of four
// has columns 2 t and 2 t + 1 of eight columns of z, and passes them to wgmma as k = t and t + 4. The rows of
// w2 are permuted accordingly.
template <int ROWS, int COLUMNS>
struct Cores {
    static constexpr int STRIDE = ROWS / 4 * 32, SIZE = COLUMNS / 8 * STRIDE;  // elements
    __device__ static constexpr int at(int row, int column) {
        return column / 8 * STRIDE + (row / 8 * 2 + row % 2) * 32 + column % 8 * 4 + row % 8 / 2;
    }
    __device__ static unsigned long long described(const void* from) {
        return describe(shared_address(from), 32 * 4, STRIDE * 4);
    }
    __device__ static constexpr int step(int row, int) { return row / 4 * 32 * 4 / 16; }
};

// The types of x and w2 in shared memory. U is the type of w2: bfloat16 is not converted and is multiplied by
// z in two pieces; float16 is multiplied in TF32.
template <typename T>
using right_t = conditional_t<IS_BF16<T>, T, float>;
template <class Plan>
using InputTile = Panels<Plan::P1_PADDED, Plan::MATRICES * Plan::P2_PADDED>;
template <class Plan, typename U>
using RightMatrix = conditional_t<sizeof(U) == 2, Panels<Plan::P2_PADDED, Plan::Q2_PADDED>,
                                  Cores<Plan::P2_PADDED, Plan::Q2_PADDED>>;

// A warpgroup copies a tile asynchronously. Only the first `count` of its matrices exist. 8 or 16 lanes copy
// a row, and a thread's next copy is 16 or 8 rows further.
template <class Plan, typename T>
__device__ __forceinline__ void load_matrices(T* to, const T* from, long long count) {
    constexpr int U = Plan::BYTES / sizeof(T), EACH = Plan::P2 / U, UNITS = Plan::MATRICES * EACH,
                  LANES = UNITS > 8 ? 16 : 8;
    // With 16 lanes per row a warp copies rows that are 4 apart, which have no bank conflicts.
    int row = LANES == 8 ? threadIdx.x % 128 / 8 : threadIdx.x % 128 / 32 + threadIdx.x % 32 / 16 * 4;
#pragma unroll
    for (int first = 0; first < UNITS; first += LANES) {
        int unit = first + threadIdx.x % LANES;
        if (first + LANES > UNITS && unit >= UNITS) break;
        int matrix = Plan::MATRICES > 1 ? unit / EACH : 0, column = (unit - matrix * EACH) * U;
        T* place = to + InputTile<Plan>::at(row, Plan::place(matrix, column));
        const T* source = from + (matrix * Plan::P1 + row) * Plan::P2 + column;
#pragma unroll
        for (int r = 0; r < Plan::P1; r += 128 / LANES) {
            if (r + 128 / LANES > Plan::P1 && row >= Plan::P1 - r) break;
            copy_or_zero<Plan::BYTES>(place + r * 64, source + r * Plan::P2,
                                      Plan::MATRICES == 1 || matrix < count);
        }
    }
}

// Load a warp's 16 rows of w1^T, of a part of 64 rows, as operand a. Rows beyond the last one repeat the last
// ones.
template <class Plan, typename T>
__device__ __forceinline__ void fetch_left(unsigned (&held)[Plan::P1_PADDED / 16][4], const T* w1, int part) {
    int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, column = lane / 8 % 2 * 8;  // of 8 x 8 tiles
    int rows = min(part * 4 + int(threadIdx.x / 32 % (4 / Plan::MATRICES)), (Plan::Q1 - 1) / 16) * 16;
    unsigned at = shared_address(w1 + row * Plan::LD1 + column + rows);
#pragma unroll
    for (int k = 0; k < Plan::P1_PADDED / 16; ++k) load_tiles<true>(held[k], at + k * 16 * Plan::LD1 * 2);
}

// Issue z = w1^T x for the columns that the descriptor `matrix` begins with.
template <class Plan, typename T, int N>
__device__ __forceinline__ void start_left(float (&z)[N][4], const unsigned (&w1)[Plan::P1_PADDED / 16][4],
                                           unsigned long long matrix) {
    wgmma_fence();
    wgmma<T, true>(z, w1[0], matrix, false);
#pragma unroll
    for (int k = 1; k < Plan::P1_PADDED / 16; ++k)
        wgmma<T, true>(z, w1[k], matrix + InputTile<Plan>::step(k * 16, 0), true);
    wgmma_commit();
}

// Issue y = z w2, or y += z w2 if FROM > 0, for the rows of w2 that the descriptor `right` begins with. z has
// the columns from FROM on, of all matrices; a warp takes those of its `matrix`. Those beyond P2 are replaced
// by zeros. (If zeros are written to z itself, ptxas waits for each product.)
template <class Plan, typename U, int FROM, int ALL>
__device__ __forceinline__ void start_right(float (&y)[Plan::Q2_PADDED / 8][4], const float (&z)[ALL][4],
                                            unsigned long long right, int matrix) {
    constexpr bool ADD = FROM > 0;
    constexpr int N = ALL / Plan::MATRICES;
    auto number = [&](int n, int i) {
        int column = FROM + n * 8 + i % 2;
        float value = Plan::MATRICES > 1 && matrix ? z[ALL - N + n][i] : z[n][i];
        return column + 6 >= Plan::P2 && column + int(threadIdx.x % 4) * 2 >= Plan::P2 ? 0.0f : value;
    };
    unsigned a[N][4];  // for each 16 columns the big pieces, then the small ones; in TF32 for each 8 columns
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
        int n = i / 2, row = i % 2;
        float one = number(n, row * 2), two = number(n, row * 2 + 1);
        if constexpr (sizeof(U) == 2) {
            split_pair(one, two, a[n / 2 * 2][n % 2 * 2 + row], a[n / 2 * 2 + 1][n % 2 * 2 + row]);
        } else {
            a[n][row] = __float_as_uint(to_tf32(one));
            a[n][row + 2] = __float_as_uint(to_tf32(two));
        }
    }
    wgmma_fence();
    wgmma<U, sizeof(U) == 2>(y, a[0], right, ADD);
#pragma unroll
    for (int n = 1; n < N; ++n)
        wgmma<U, sizeof(U) == 2>(
            y, a[n], right + RightMatrix<Plan, U>::step(sizeof(U) == 2 ? n / 2 * 16 : n * 8, 0), true);
    wgmma_commit();
}

// Store a warp's 16 rows of y, from row `first` on. place_of_column says which columns a lane has.
template <class Plan, typename T>
__device__ __forceinline__ void store_rows(T* out, const T* bias, const T* residual,
                                           float (&y)[Plan::Q2_PADDED / 8][4], int first, float scale) {
    constexpr int Q2 = Plan::Q2, N = NEIGHBOURS<Q2>;
    int g = threadIdx.x % 32 / 4, lane = (first + g) * Q2 + threadIdx.x % 4 * 2 * N;
    out += lane;
    if (scale != 1.0f)
#pragma unroll
        for (int i = 0; i < Plan::Q2_PADDED / 2; ++i) y[i / 4][i % 4] *= scale;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        if (Plan::ROWS > Plan::Q1 && first + m * 8 + (Plan::Q1 % 8 ? g : 0) >= Plan::Q1) continue;
#pragma unroll
        for (int n = 0; n < Q2 / 8; n += N) {
            float part[2 * N];
            int at = m * 8 * Q2 + n * 8;
#pragma unroll
            for (int e = 0; e < 2 * N; ++e) part[e] = y[n + e / 2][m * 2 + e % 2];
            finish<Plan::ADDED>(part, 1.0f, bias, lane + at, residual, lane + at);
            store_vec_past_l1(out + at, pack<T, 2 * N>(part));  // the compiler splits other stores
        }
    }
}

// Store a warp's 16 rows of y, which are contiguous in memory, from row `first` on, through `room` in shared
// memory.
template <class Plan, typename T>
__device__ __forceinline__ void store_packed(T* out, T* room, const T* bias, const T* residual,
                                             const float (&y)[Plan::Q2_PADDED / 8][4], int first,
                                             float scale) {
    constexpr int Q2 = Plan::Q2, UNIT = Plan::UNIT, PAIR = gcd(Q2, 2);
    int numbers = min(16, Plan::Q1 - first) * Q2, lane = threadIdx.x % 32, own = lane / 4 * Q2 + lane % 4 * 2;
    if (numbers <= 0) return;
    out += first * Q2;
#pragma unroll
    for (int i = 0; i < Plan::Q2_PADDED / 2; i += PAIR) {
        int column = i / 4 * 8 + i % 2, at = own + i / 2 % 2 * 8 * Q2 + column;
        if (column + 6 >= Q2 && column + lane % 4 * 2 >= Q2) continue;
        float part[PAIR];
#pragma unroll
        for (int e = 0; e < PAIR; ++e) part[e] = y[i / 4][i % 4 + e];
        if (!Plan::ADDED || at < numbers)
            finish<Plan::ADDED>(part, scale, bias, first * Q2 + at, residual, first * Q2 + at);
        store_vec(room + at, pack<T, PAIR>(part));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * Q2; i += 32 * UNIT)
        if (int e = i + lane * UNIT; e < numbers) store_vec_past_l1(out + e, load_vec<T, UNIT>(room + e));
    __syncwarp();
}

// Any grid, block THREADS. Dynamic shared memory: w2, the tiles of the teams, w1.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, 1)
    kron_linear_v4_chain_wgmma(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual,
                               long long A, double scale, long long features) {
    using U = right_t<T>;
    using Right = RightMatrix<Plan, U>;
    constexpr int MATRICES = Plan::MATRICES, TILE = InputTile<Plan>::SIZE,
                  SECOND = InputTile<Plan>::step(0, MATRICES * Plan::COLUMNS), STAGES = Plan::STAGES;
    constexpr int NUMBERS = MATRICES * Plan::P1 * Plan::P2;
    constexpr bool ONE = STAGES == 1, ALL_IN_REGISTERS = Plan::IN_REGISTERS == Plan::PARTS,
                   TWO = Plan::REST > 0;
    extern __shared__ __align__(1024) char panels[];
    int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), team = warp / 4, stage = 0;
    U* right = reinterpret_cast<U*>(panels);
    T *xs = reinterpret_cast<T*>(right + Right::SIZE) + team * STAGES * TILE,
      *left = xs + (Plan::TEAMS - team) * STAGES * TILE;
    T* room = left + (ALL_IN_REGISTERS ? 0 : Plan::P1_PADDED * Plan::LD1) + warp * 16 * Plan::Q2;
    long long tile = blockIdx.x + (long long)team * gridDim.x, step = (long long)gridDim.x * Plan::TEAMS,
              next = tile;
    long long tiles = (A + MATRICES - 1) / MATRICES;
    int own = MATRICES > 1 ? warp % 4 / 2 : 0;  // the warp's matrix of a tile
    auto load = [&](int to) {
        if (next < tiles) load_matrices<Plan>(xs + to * TILE, x + next * NUMBERS, A - next * MATRICES);
        cp_async_commit();
        next += step;
    };
    auto arrive = [&] {
        cp_async_wait<ONE ? 0 : STAGES - 2>();
        fence_async();
        barrier_of(team + 1, 128);
    };
    prefetch_factor(factors.at[0], Plan::P2, Plan::Q2, factors.p[0], factors.q[0]);
    prefetch_factor(factors.at[1], Plan::P1, Plan::Q1, factors.p[1], factors.q[1]);
    for (long long first = blockIdx.x; first < min(A / MATRICES, step); first += gridDim.x)
        prefetch_tile<NUMBERS, 1>(x + first * NUMBERS, 1, 1);
    if constexpr (Plan::PADDED) {
        constexpr int BYTES =
            Right::SIZE * sizeof(U) + (Plan::TEAMS * STAGES * TILE + Plan::P1_PADDED * Plan::LD1) * sizeof(T);
        for (int e = threadIdx.x; e < BYTES / 16; e += Plan::THREADS)
            reinterpret_cast<uint4*>(panels)[e] = uint4();
        __syncthreads();
    }
    wait_for_previous();
    constexpr int LEFT_UNIT = gcd(Plan::Q1, 8), RIGHT_UNIT = sizeof(U) == 2 ? gcd(Plan::Q2, 2) : 1;
    auto put_left = [&](int k, int j, const T* v, bool several) {
        T* to = left + k * Plan::LD1 + j;
        if (several) store_vec(to, reinterpret_cast<const Vec<T, LEFT_UNIT>&>(*v));
        else *to = *v;
    };
    auto put_right = [&](int k, int j, const T* v, bool several) {
        U* to = right + Right::at(k, place_of_column<Plan::Q2>(j));
        if constexpr (sizeof(U) == 4) *to = to_tf32(load_as(*v));
        else if (several) store_vec(to, reinterpret_cast<const Vec<U, RIGHT_UNIT>&>(*v));
        else *to = *v;
    };
    each_number<Plan::P1, Plan::Q1, Plan::THREADS, LEFT_UNIT>(
        factors.at[1], factors.p[1], factors.q[1], put_left, [&] {
            each_number<Plan::P2, Plan::Q2, Plan::THREADS, RIGHT_UNIT>(
                factors.at[0], factors.p[0], factors.q[0], put_right, [&] {
                    for (int to = 0; to < (ONE ? 1 : STAGES - 1); ++to) load(to);
                });
        });
    let_next_come();
    fence_async();
    __syncthreads();
    unsigned w1[Plan::IN_REGISTERS][Plan::P1_PADDED / 16][4];
#pragma unroll
    for (int part = 0; part < Plan::IN_REGISTERS; ++part) fetch_left<Plan>(w1[part], left, part);
    if (Plan::PACKED && ALL_IN_REGISTERS) __syncthreads();
    if (tile >= tiles) return;
    arrive();
    if (!ONE) load(STAGES - 1);
    unsigned long long w2_at = Right::described(right), xs_at = InputTile<Plan>::described(xs);
    float z[MATRICES * Plan::COLUMNS / 8][4] = {}, y[Plan::Q2_PADDED / 8][4] = {};
    float rest[TWO ? MATRICES * Plan::REST / 8 : 1][4] = {};
    // At the end of an iteration no product is in flight. Otherwise the compiler, which does not track their
    // registers across iterations, waits for each product immediately.
    for (; tile < tiles; tile += step) {
        unsigned long long at = xs_at + stage * (TILE * 2 / 16);
        if (!ALL_IN_REGISTERS) fetch_left<Plan>(w1[0], left, 0);
        start_left<Plan, T>(z, w1[0], at);
        if constexpr (TWO) start_left<Plan, T>(rest, w1[0], at + SECOND);
#pragma unroll
        for (int part = 0; part < Plan::PARTS; ++part) {
            wgmma_wait<TWO>(z);
            start_right<Plan, U, 0>(y, z, w2_at, own);
            if constexpr (TWO) {
                wgmma_wait<1>(rest);
                start_right<Plan, U, Plan::COLUMNS>(y, rest, w2_at + Right::step(Plan::COLUMNS, 0), own);
            }
            if (part == Plan::PARTS - 1) {
                // The tile has been read, and with several stages the next one has arrived.
                if (ONE) barrier_of(team + 1, 128);
                else arrive();
                load(stage);
                stage = stage + 1 < STAGES ? stage + 1 : 0;
                wgmma_wait<0>(y);
            } else {
                unsigned (&next_w1)[Plan::P1_PADDED / 16][4] = w1[ALL_IN_REGISTERS ? part + 1 : 0];
                wgmma_wait<TWO>(z);
                if (!ALL_IN_REGISTERS) fetch_left<Plan>(next_w1, left, part + 1);
                start_left<Plan, T>(z, next_w1, at);
                wgmma_wait<1>(y);
                if constexpr (TWO) start_left<Plan, T>(rest, next_w1, at + SECOND);
            }
            long long row = (tile * MATRICES + own) * (Plan::Q1 * Plan::Q2);
            int first = part * 64 + warp % (4 / MATRICES) * 16;
            const T *added = residual ? residual + row : nullptr,
                    *own_bias = Plan::ADDED && bias ? bias + row % features : nullptr;
            if (MATRICES == 1 || tile * MATRICES + own < A) {
                if constexpr (Plan::PACKED)
                    store_packed<Plan>(out + row, room, own_bias, added, y, first, float(scale));
                else store_rows<Plan>(out + row, own_bias, added, y, first, float(scale));
            }
            __syncwarp();  // otherwise the compiler delays the stores and runs out of registers
        }
        if (ONE) arrive();
    }
}
#endif
