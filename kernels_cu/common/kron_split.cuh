// One or two large factors of float in a launch by warpgroups (sm_90a), forward and backward.
//
// A float is three bfloat16 numbers (Pieces), split once, and a product is 6 of them. wgmma takes them from shared memory at the tensor
// cores' full rate, 64 x 64 x 16 in 32 cycles, where mma.sync waits for ldmatrix: X, G, H and the factors lie there as tiles of 8 x 8
// numbers, of which each is an operand along its rows and along its columns. What a product leaves in a lane is what the next one takes as
// operand a, so the forward's z, and Z of
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T
// never go there. With both operands there wgmma takes all that shared memory and L1 can give, and other loads wait:
// the forward has a left factor, or the rows of x, in registers. One factor alone is the left one, of 64 columns of what is to its right (Z
// is X, dX is H), or the right one, of 64 rows (H is G). A TEAM of warpgroups has tiles of its own, and makes ready the next one's numbers
// while wgmma multiplies; teams wait for each other only at the end.
//
// A sum of K products begins at zero, small products first, and is added to others by ordinary additions: tensor cores cut what they add.
// Errors are 1.3 times torch's for x (64, 64), 1.6 for 64^3, and 0.6 and 0.8 for their gradients.
//
// On one H200, in us, from .. to ..: forward, 1024 x (64, 64) 22.7 to 18.0; the left factor of 16 x 64^3 15.9 to 13.5; of 1024 x (128, 128)
// the right one 81 to 51, the left one 80 to 57. Backward with the partial sums' launch, from mma.sync: 54 to 39; 31 to 26; 144
// to 107; 159 to 111; the tensor cores need 17, 7, 56 and 56 for these. What made the backward of (64, 64) faster: a row's fetching,
// splitting and storing beside products (46 to 42), lines fetched to the L2 cache a row ahead (42 to 38). The forward's left factor in
// registers: of 128 from 66 to 56; the rows of x there: the right factor of 128 from 59 to 51. What did not help: three teams (forward of
// (64, 64) 17.7 for 16.8), a second X for them (18.0 for 16.8; it helps one factor alone), 128 bytes' swizzle or padded tiles (the same
// cycles), backward H as operand a in registers too (39 for 38).
#pragma once
#include "kron_pieces.cuh"
#include "wgmma.cuh"

// A matrix in shared memory, of each piece one: tiles of 8 x 8 numbers, whose rows of 16 bytes are neighbours, as wgmma takes them.
template <int ROWS_, int COLUMNS_>
struct Tiles {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PLANE = ROWS * COLUMNS, BYTES = 3 * PLANE * 2;
    __device__ static constexpr int tile(int row, int column) { return (row / 8 * (COLUMNS / 8) + column / 8) * 64; }
    __device__ static constexpr int place(int row, int column) { return tile(row, column) + row % 8 * 8 + column % 8; }
};

// Such a matrix as an operand: its columns are k, or (DOWN) its rows.
template <class M, bool DOWN_>
struct Described {
    static constexpr bool HELD = false, DOWN = DOWN_;
    static constexpr int STEP = DOWN ? 2 * M::COLUMNS : 16;  // in 16 bytes, from 16 numbers of k to the next
    unsigned long long at;
    // From this row, or column, on.
    template <typename U>
    __device__ __forceinline__ explicit Described(const U* matrix, int from = 0)
        : at(describe(shared_address(matrix + (DOWN ? M::tile(0, from) : M::tile(from, 0))), DOWN ? M::COLUMNS * 16 : 128,
                      DOWN ? 128 : M::COLUMNS * 16)) {}
    __device__ __forceinline__ unsigned long long operator()(int piece, int k) const { return at + piece * (M::PLANE / 8) + k * STEP; }
};

// A lane's pair e, of 16, of a warpgroup's 64 x 64 numbers: see Rows.
template <class M>
__device__ __forceinline__ void put_two(__nv_bfloat16* to, int e, const unsigned (&two)[3]) {
    unsigned* words = reinterpret_cast<unsigned*>(to) + M::tile(threadIdx.x / 32 % 4 * 16 + e % 2 * 8, e / 2 * 8) / 2 + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i * M::PLANE / 2] = two[i];
}

// 64 x K numbers of a warpgroup as operand a in registers. They are where its sums are: lane l of a warp, with g = l / 4 and t = l % 4,
// has of 8 columns from 8 n on [g + 8 i][2 t + j] in numbers[n][2 i + j].
template <int K>
struct Rows {
    static constexpr bool HELD = true;
    unsigned pieces[3][K / 16][4];

    __device__ __forceinline__ void split(const float (&numbers)[K / 8][4]) {
#pragma unroll
        for (int e = 0; e < K / 4; ++e) {
            unsigned two[3];
            split_two(numbers[e / 2][e % 2 * 2], numbers[e / 2][e % 2 * 2 + 1], two);
#pragma unroll
            for (int i = 0; i < 3; ++i) pieces[i][e / 4][e % 4] = two[i];
        }
    }
    // To shared memory, 64 rows.
    template <class M>
    __device__ __forceinline__ void put(__nv_bfloat16* to) const {
#pragma unroll
        for (int e = 0; e < K / 4; ++e) {
            unsigned two[3] = {pieces[0][e / 4][e % 4], pieces[1][e / 4][e % 4], pieces[2][e / 4][e % 4]};
            put_two<M>(to, e, two);
        }
    }
};

// Such numbers, of a matrix of any strides, or (PAIRS) of rows whose pairs are aligned; those from row `rows` on are 0.
template <bool PAIRS, int N>
__device__ __forceinline__ void fetch_lanes(float (&numbers)[N][4], const float* from, long long row_stride, long long column_stride,
                                            int rows = 64) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 2 * N; ++e) {
        const float* at = from + (row + e % 2 * 8) * row_stride + (column + e / 2 * 8) * column_stride;
        Vec<float, 2> two = {};
        if (row + e % 2 * 8 < rows) {
            if constexpr (PAIRS)
                two = load_vec<float, 2>(at);
            else
                two = {at[0], at[column_stride]};
        }
        numbers[e / 2][e % 2 * 2] = two.v[0];
        numbers[e / 2][e % 2 * 2 + 1] = two.v[1];
    }
}

// The same of numbers that are not split yet.
template <class M>
__device__ __forceinline__ void put_rows(__nv_bfloat16* to, const float (&numbers)[8][4]) {
#pragma unroll
    for (int e = 0; e < 16; ++e) {
        unsigned two[3];
        split_two(numbers[e / 2][e % 2 * 2], numbers[e / 2][e % 2 * 2 + 1], two);
        put_two<M>(to, e, two);
    }
}

// d = a b, of K numbers of k, in the background.
template <int K, class A, class B, int N>
__device__ __forceinline__ void start_product(float (&d)[N][4], const A& a, const B& b) {
    wgmma_fence();
#pragma unroll
    for (int e = 0; e < PRODUCTS * K / 16; ++e) {
        int k = e % (K / 16), of_a = left_piece(e / (K / 16)), of_b = right_piece(e / (K / 16));
        if constexpr (A::HELD)
            wgmma<__nv_bfloat16, B::DOWN>(d, a.pieces[of_a][k], b(of_b, k), e > 0);
        else
            wgmma<A::DOWN, B::DOWN>(d, a(of_a, k), b(of_b, k), e > 0);
    }
    wgmma_commit();
}

// A warpgroup's sums, 64 rows: f(two neighbours, row, column).
template <int N, class F>
__device__ __forceinline__ void each_two(const float (&d)[N][4], const F& f) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < 2 * N; ++e) f(Vec<float, 2>{d[e / 2][e % 2 * 2], d[e / 2][e % 2 * 2 + 1]}, row + e % 2 * 8, column + e / 2 * 8);
}

template <int N>
__device__ __forceinline__ void add(float (&sums)[N][4], const float (&d)[N][4]) {
#pragma unroll
    for (int e = 0; e < 4 * N; ++e) sums[e / 4][e % 4] += d[e / 4][e % 4];
}

// f(i, row, column) of a lane's four neighbours number i, of a matrix that WARPS warps share out. A warp takes 8 rows of 16 columns at a
// time: whole sectors to read, and two whole tiles to write.
template <class M, int WARPS, class F>
__device__ __forceinline__ void each_four(const F& f) {
    constexpr int BLOCKS = M::PLANE / 128, ACROSS = M::COLUMNS / 16;
    int warp = threadIdx.x / 32 % WARPS, row = threadIdx.x / 2 % 8, column = threadIdx.x % 2 * 4 + threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int i = 0; i < (BLOCKS + WARPS - 1) / WARPS; ++i) {
        int block = warp + i * WARPS;
        if (BLOCKS % WARPS == 0 || block < BLOCKS) f(i, block / ACROSS * 8 + row, block % ACROSS * 16 + column);
    }
}

// A matrix on its way from memory to shared memory.
template <class M, int THREADS>
struct Underway {
    static constexpr int WARPS = THREADS / 32;
    Vec<float, 4> part[(M::PLANE / 128 + WARPS - 1) / WARPS];

    __device__ __forceinline__ void fetch(const float* from, long long stride) {
        each_four<M, WARPS>([&](int i, int row, int column) { part[i] = load_vec<float, 4>(from + row * stride + column); });
    }
    // Of any strides.
    __device__ __forceinline__ void fetch_any(const float* from, long long p, long long q) {
        if (q == 1 && p % 4 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0) return fetch(from, p);
        each_four<M, WARPS>([&](int i, int row, int column) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[i].v[e] = from[row * p + (column + e) * q];
        });
    }
    __device__ __forceinline__ void put(__nv_bfloat16* to) const {
        each_four<M, WARPS>([&](int i, int row, int column) { put_pieces<M::PLANE>(to + M::place(row, column), part[i]); });
    }
};

// X [P1][P2], G [Q1][Q2]. WIDE and THREADS: of a team, forward and backward. TEAM: its shared memory, backward; of one factor alone two G, or
// X and G.
template <int TEAMS_, long long C_, class Left_, class Right_>
struct Split4 {
    static constexpr bool LEFT = Left_::COUNT > 0, RIGHT = Right_::COUNT > 0, PAIR = LEFT && RIGHT;
    static constexpr int P1 = LEFT ? Left_::P : 64, Q1 = LEFT ? Left_::Q : 64, P2 = RIGHT ? Right_::P : 64, Q2 = RIGHT ? Right_::Q : 64;
    static constexpr int TEAMS = TEAMS_, GROUPS = (LEFT ? P1 : P2) / 64, THREADS = 128 * GROUPS, WIDE = LEFT ? 2 * Q1 : 128;
    static constexpr int SUMS1 = LEFT ? P1 * Q1 : 0, SUMS2 = RIGHT ? P2 * Q2 : 0;
    static constexpr long long ACROSS = RIGHT ? 1 : C_ / P2, X_STRIDE = RIGHT ? P2 : C_, G_STRIDE = RIGHT ? Q2 : C_;
    using X = Tiles<P1, P2>;
    using G = Tiles<Q1, Q2>;
    using H = Tiles<P1, Q2>;
    using W1 = Tiles<P1, Q1>;
    using W2 = Tiles<P2, Q2>;
    static constexpr int FACTORS = (LEFT ? W1::BYTES : 0) + (RIGHT ? W2::BYTES : 0);
    static constexpr int TEAM = (RIGHT ? X::BYTES : G::BYTES) + G::BYTES + (PAIR ? H::BYTES : 0);
};

// kron_linear_v4 of one large factor, or two, of float. Grid any, block TEAMS * WIDE; dynamic shared memory: the factors in pieces, each
// team's X.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS * Plan::WIDE, 1)
kron_linear_v4_split(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                     const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q,
                     long long w1_p, long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q,
                     long long w4_p, long long w4_q, long long w5_p, long long w5_q, long long w6_p, long long w6_q,
                     long long w7_p, long long w7_q, double scale, long long features) {
    using X = typename Plan::X;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, ALL = Plan::TEAMS * Plan::WIDE, N = Plan::LEFT ? 64 : Q2;
    constexpr bool LEFT = Plan::LEFT, RIGHT = Plan::RIGHT, PAIR = Plan::PAIR;
    constexpr long long ACROSS = Plan::ACROSS, X_STRIDE = Plan::X_STRIDE, OUT_STRIDE = Plan::G_STRIDE;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (Plan::WIDE / 32), group = warp / 4 % (Plan::WIDE / 128);
    __nv_bfloat16 *right = reinterpret_cast<__nv_bfloat16*>(dynamic), *xs = right + (RIGHT ? W2::BYTES / 2 : 0) + team * X::BYTES;
    auto x_of = [&](long long a) { return x + a / ACROSS * P1 * X_STRIDE + a % ACROSS * P2; };
    auto rows_of = [&](long long a) { return LEFT || A - 64 * a >= 64 ? P1 : int(A - 64 * a); };
    auto give = [&](long long a, const float (&d)[N / 8][4]) {
        long long at = (a / ACROSS * Q1 + 64 * group) * OUT_STRIDE + a % ACROSS * Q2;
        int rows = rows_of(a);
        each_two(d, [&](Vec<float, 2> two, int row, int column) {
            if (!LEFT && row >= rows) return;
            long long i = at + row * OUT_STRIDE + column;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                two.v[e] *= float(scale);
                if (bias) two.v[e] += bias[i % features + e];
                if (residual) two.v[e] += residual[i + e];
            }
            store_vec(out + i, two);
        });
    };
    long long step = (long long)gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : (A + 63) / 64, a = blockIdx.x + team * gridDim.x;
    wait_for_previous();
    Underway<W2, ALL> factor;
    if constexpr (RIGHT) factor.fetch_any(w0, w0_p, w0_q);
    if constexpr (LEFT) {
        Underway<X, Plan::WIDE> next;
        auto fetch = [&](long long a) { next.fetch(x_of(a), X_STRIDE); };
        if (a < tiles) fetch(a);
        Rows<P1> left;
        float numbers[P1 / 8][4];
        fetch_lanes<false>(numbers, (PAIR ? w1 : w0) + 64 * group * (PAIR ? w1_q : w0_q), PAIR ? w1_q : w0_q, PAIR ? w1_p : w0_p);
        if constexpr (PAIR) factor.put(right);
        left.split(numbers);
        if (a < tiles) next.put(xs);
        if (a + step < tiles) fetch(a + step);
        fence_async();
        __syncthreads();
        int other = X::BYTES / 2;
#pragma unroll 1
        for (; a < tiles; a += step) {
            float y[8][4];
            start_product<P1>(y, left, Described<X, true>(xs));
            xs += other;
            other = -other;
            if (a + step < tiles) next.put(xs);
            if (a + 2 * step < tiles) fetch(a + 2 * step);
            wgmma_wait<0>(y);
            if constexpr (PAIR) {
                Rows<P2> rows;
                rows.split(y);
                start_product<P2>(y, rows, Described<W2, true>(right));
                wgmma_wait<0>(y);
            }
            give(a, y);
            fence_async();
            barrier_of(1 + team, Plan::WIDE);
        }
    } else {
        Rows<P2> rows;
        float numbers[P2 / 8][4];
        auto fetch = [&](long long a) { fetch_lanes<true>(numbers, x_of(a), X_STRIDE, 1, rows_of(a)); };
        if (a < tiles) fetch(a);
        factor.put(right);
        fence_async();
        __syncthreads();
#pragma unroll 1
        for (; a < tiles; a += step) {
            float y[N / 8][4];
            rows.split(numbers);
            start_product<P2>(y, rows, Described<W2, true>(right));
            if (a + step < tiles) fetch(a + step);
            wgmma_wait<0>(y);
            give(a, y);
        }
    }
}

// Its backward, as kron_linear_v4_group_bwd. Grid pieces, block TEAMS * THREADS; dynamic shared memory: the factors in pieces, each team's X,
// G and H, or the sums.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS * Plan::THREADS, 1)
kron_linear_v4_split_bwd(float* partials, T* dx, const T* x, const T* g, const T* w0, const T* w1, long long A, long long w0_p,
                         long long w0_q, long long w1_p, long long w1_q, double scale) {
    using U = __nv_bfloat16;
    using X = typename Plan::X;
    using G = typename Plan::G;
    using H = typename Plan::H;
    using W1 = typename Plan::W1;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, ALL = Plan::TEAMS * Plan::THREADS;
    constexpr bool LEFT = Plan::LEFT, RIGHT = Plan::RIGHT, PAIR = Plan::PAIR;
    constexpr long long ACROSS = Plan::ACROSS, X_STRIDE = Plan::X_STRIDE, G_STRIDE = Plan::G_STRIDE;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (4 * Plan::GROUPS), group = warp / 4 % Plan::GROUPS;
    U *right = reinterpret_cast<U*>(dynamic), *left = right + (RIGHT ? W2::BYTES / 2 : 0);
    U *gs = right + (Plan::FACTORS + team * Plan::TEAM) / 2, *xs = gs + G::BYTES / 2, *hs = xs + X::BYTES / 2;
    auto sync = [&] { barrier_of(1 + team, Plan::THREADS); };
    auto x_place = [&](long long a) { return a / ACROSS * P1 * X_STRIDE + a % ACROSS * P2; };
    auto g_place = [&](long long a) { return a / ACROSS * Q1 * G_STRIDE + a % ACROSS * Q2; };
    U* first = gs;
    float sums1[Q1 / 8][4] = {}, sums2[Q2 / 8][4] = {};
    Underway<G, Plan::THREADS> next_g;
    Underway<X, Plan::THREADS> next_x;
    float numbers[8][4];
    auto fetch_g = [&](long long a) { next_g.fetch(g + g_place(a), G_STRIDE); };
    auto fetch_x = [&](long long a) { next_x.fetch(x + x_place(a), X_STRIDE); };
    auto fetch_rows = [&](long long a) { fetch_lanes<true>(numbers, x + x_place(a) + 64 * group * X_STRIDE, X_STRIDE, 1); };
    auto ahead = [&](long long a) {
        Ahead<P1, P2, Plan::THREADS, T>::ahead(x + x_place(a), X_STRIDE);
        Ahead<Q1, Q2, Plan::THREADS, T>::ahead(g + g_place(a), G_STRIDE);
    };
    auto give = [&](long long a, const float (&d)[8][4]) {
        T* to = dx + x_place(a) + 64 * group * (LEFT ? X_STRIDE : 1);
        each_two(d, [&](Vec<float, 2> two, int row, int column) {
            store_vec(to + row * X_STRIDE + column, Vec<float, 2>{two.v[0] * float(scale), two.v[1] * float(scale)});
        });
    };
    long long step = (long long)gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : A / 64, a = blockIdx.x + team * gridDim.x;
    wait_for_previous();
    if (a < tiles) {
        fetch_g(a);
        if constexpr (PAIR) fetch_rows(a);
        if constexpr (!LEFT) fetch_x(a);
    }
    Underway<W1, ALL> factor1;
    Underway<W2, ALL> factor2;
    if constexpr (LEFT) factor1.fetch_any(PAIR ? w1 : w0, PAIR ? w1_p : w0_p, PAIR ? w1_q : w0_q);
    if constexpr (RIGHT) factor2.fetch_any(w0, w0_p, w0_q);
    if constexpr (LEFT) factor1.put(left);
    if constexpr (RIGHT) factor2.put(right);
    Rows<64> rows;
    if (a < tiles) next_g.put(gs);
    if constexpr (PAIR) rows.split(numbers);
    fence_async();
    __syncthreads();
#pragma unroll 1
    for (; a < tiles; a += step) {
        float h[8][4];
        bool more = a + step < tiles;
        if (more) ahead(a + step);
        if constexpr (PAIR) {
            float z[8][4];
            start_product<P2>(z, rows, Described<W2, true>(right));
            rows.template put<X>(xs);
            fence_async();
            sync();
            start_product<Q1>(h, Described<W1, false>(left), Described<G, true>(gs));
            wgmma_wait<1>(z);
            rows.split(z);
            start_product<Q2>(z, rows, Described<G, false>(gs));
            wgmma_wait<1>(h);
            put_rows<H>(hs, h);
            fence_async();
            sync();
            start_product<Q2>(h, Described<H, false>(hs), Described<W2, false>(right));
            if (more) fetch_rows(a + step);
            wgmma_wait<1>(z);
            if (more) fetch_g(a + step);
            add(sums1, z);
            start_product<P1>(z, Described<X, true>(xs), Described<H, true>(hs));
            sync();
            if (more) {
                next_g.put(gs);
                rows.split(numbers);
            }
            wgmma_wait<1>(h);
            give(a, h);
            wgmma_wait<0>(z);
            add(sums2, z);
        } else if constexpr (LEFT) {
            float z[Q1 / 8][4];
            start_product<Q1>(h, Described<W1, false>(left, 64 * group), Described<G, true>(gs));
            fetch_rows(a);
            rows.split(numbers);
            start_product<64>(z, rows, Described<G, false>(gs));
            wgmma_wait<1>(h);
            give(a, h);
            gs = gs == first ? xs : first;
            if (more) fetch_g(a + step);
            if (more) next_g.put(gs);
            wgmma_wait<0>(z);
            add(sums1, z);
            fence_async();
        } else {
            float z[Q2 / 8][4];
            start_product<Q2>(h, Described<G, false>(gs), Described<W2, false>(right, 64 * group));
            next_x.put(xs);
            fence_async();
            sync();
            start_product<64>(z, Described<X, true>(xs, 64 * group), Described<G, true>(gs));
            if (more) fetch_g(a + step);
            wgmma_wait<1>(h);
            if (more) fetch_x(a + step);
            give(a, h);
            wgmma_wait<0>(z);
            add(sums2, z);
            sync();
            if (more) next_g.put(gs);
            fence_async();
        }
        sync();
    }
    // The first team adds the others' sums to its own, each thread those of its like.
    __syncthreads();
    float* others = reinterpret_cast<float*>(dynamic) + threadIdx.x % Plan::THREADS;
    constexpr int EACH = (LEFT ? Q1 / 2 : 0) + (RIGHT ? Q2 / 2 : 0);
    auto kept = [&](int i) -> float& { return RIGHT && i < Q2 / 2 ? sums2[i / 4][i % 4] : sums1[(i - (RIGHT ? Q2 / 2 : 0)) / 4][i % 4]; };
    if (team)
#pragma unroll
        for (int i = 0; i < EACH; ++i) others[((team - 1) * EACH + i) * Plan::THREADS] = kept(i);
    if (Plan::TEAMS > 1) __syncthreads();
    if (team) return;
#pragma unroll
    for (int t = 0; t + 1 < Plan::TEAMS; ++t)
#pragma unroll
        for (int i = 0; i < EACH; ++i) kept(i) += others[(t * EACH + i) * Plan::THREADS];
    partials += (long long)blockIdx.x * (Plan::SUMS2 + Plan::SUMS1);
    if constexpr (RIGHT)
        each_two(sums2, [&](Vec<float, 2> two, int row, int column) { store_vec(partials + (64 * group + row) * Q2 + column, two); });
    if constexpr (LEFT)
        each_two(sums1, [&](Vec<float, 2> two, int row, int column) {
            store_vec(partials + Plan::SUMS2 + (64 * group + row) * Q1 + column, two);
        });
}
