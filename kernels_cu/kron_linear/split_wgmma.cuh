// kron_linear v4: one or two large float factors per launch by warpgroups (sm_90a), forward and backward.
//
// A float is split once into three bfloat16 numbers (Pieces), and a product of floats is 6 products of them;
// in TF32 it is two, and 3 products. X, G, H and the factors are 8 x 8 tiles in shared memory, each of which
// can be an operand along its rows and along its columns. The accumulators of one product are operand a of
// the next, so the forward's z, and the backward's Z of
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T,
// never go through shared memory. If both operands are in shared memory, wgmma uses the whole bandwidth of
// shared memory and L1, and other loads wait. So the forward keeps a left factor, or the rows of x, in
// registers. A single factor is either the left one, with 64 columns of what is to its right (Z is X), or the
// right one, with 64 rows. A team of warpgroups has its own tiles; teams wait for each other only at the end.
// In the forward a team prepares the next tile while wgmma multiplies; in the backward one more warpgroup
// prepares the tiles.
//
// Accuracy: the sum of each product of K terms starts at zero with the small terms first, and is then added
// to others by ordinary additions, because tensor cores truncate what they add.
#pragma once
#include "common/ptx/mbarrier.cuh"
#include "split_float.cuh"
#include "tile.cuh"

// X is [P1][P2], G is [Q1][Q2]. WIDE and THREADS: the threads of a team, forward and backward (of two
// factors).
template <int TEAMS_, typename Kind_, long long C_, class Left_, class Right_>
struct Split4 {
    using Kind = Kind_;
    static constexpr bool LEFT = Left_::COUNT > 0, RIGHT = Right_::COUNT > 0, PAIR = LEFT && RIGHT;
    static constexpr int P1 = LEFT ? Left_::P : 64, Q1 = LEFT ? Left_::Q : 64, P2 = RIGHT ? Right_::P : 64,
                         Q2 = RIGHT ? Right_::Q : 64;
    static constexpr int TEAMS = TEAMS_, THREADS = 128, WIDE = LEFT ? 2 * Q1 : 128, SUMS1 = P1 * Q1,
                         SUMS2 = P2 * Q2;
    static constexpr long long ACROSS = RIGHT ? 1 : C_ / P2, X_STRIDE = RIGHT ? P2 : C_,
                               G_STRIDE = RIGHT ? Q2 : C_;
    // Forward: a team's ring buffer of X has PLACES tiles. A tile is written LEAD tiles ahead, because the
    // other warpgroup of the team sees it only one turn later and may still multiply the previous tile.
    static constexpr int LEAD = WIDE / 128, PLACES = 2 * LEAD;
    using X = Tiles<P1, P2, Kind>;
    using G = Tiles<Q1, Q2, Kind>;
    using H = Tiles<P1, Q2, Kind>;
    using W1 = Tiles<P1, Q1, Kind>;
    using W2 = Tiles<P2, Q2, Kind>;
    static constexpr int ALL = (TEAMS + 1) * THREADS, X_PLACES = TEAMS + 1;  // backward
};

// A left factor as operand a: [q][p] for the 64 q of a warpgroup. It goes through `staged` in shared memory.
template <int P, typename Kind, class W, int THREADS>
__device__ __forceinline__ void left_rows(RegisterOperand<P, Kind>& left, float* staged,
                                          const RegisterTile<W, THREADS>& factor, int group) {
    float numbers[P / 8][4];
    factor.stage(staged);
    __syncthreads();
    int q = 64 * group + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < P / 2; ++e) {
        numbers[e / 4][e % 4] = staged[(p + e % 2 + e / 4 * 8) * W::STAGED_ROW + q + e / 2 % 2 * 8];
    }
    left.split(numbers);
    __syncthreads();
}

// kron_linear_v4 for one or two large float factors. Any grid, block TEAMS * WIDE. Dynamic shared memory: the
// factors, split, and X of each team.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS* Plan::WIDE, 1)
    kron_linear_v4_split_wgmma(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual,
                               long long A, double scale, long long features) {
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, ALL = Plan::TEAMS * Plan::WIDE,
                  N = Plan::LEFT ? 64 : Q2;
    constexpr bool LEFT = Plan::LEFT, RIGHT = Plan::RIGHT, PAIR = Plan::PAIR;
    constexpr long long ACROSS = Plan::ACROSS, X_STRIDE = Plan::X_STRIDE, OUT_STRIDE = Plan::G_STRIDE;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (Plan::WIDE / 32),
        group = warp / 4 % (Plan::WIDE / 128);
    __nv_bfloat16* right = reinterpret_cast<__nv_bfloat16*>(dynamic);
    __nv_bfloat16* xs = right + ((RIGHT ? W2::BYTES : 0) + team * Plan::PLACES * X::BYTES) / 2;
    auto x_of = [&](long long a) { return x + a / ACROSS * P1 * X_STRIDE + a % ACROSS * P2; };
    auto rows_of = [&](long long a) { return LEFT || A - 64 * a >= 64 ? P1 : int(A - 64 * a); };
    auto store_tile = [&](long long a, const float (&d)[N / 8][4]) {
        long long at = (a / ACROSS * Q1 + 64 * group) * OUT_STRIDE + a % ACROSS * Q2;
        int rows = rows_of(a);
        store_seated(out, bias, residual, d, features, float(scale), [=](int row, int column) {
            return LEFT || row < rows ? at + row * OUT_STRIDE + column : -1;
        });
    };
    long long step = (long long)gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : (A + 63) / 64,
              a = blockIdx.x + team * gridDim.x;
    let_next_come();
    if constexpr (RIGHT) prefetch_factor(factors.at[0], P2, Q2, factors.p[0], factors.q[0]);
    if constexpr (LEFT) prefetch_factor(factors.at[PAIR], P1, Q1, factors.p[PAIR], factors.q[PAIR]);
    if constexpr (PAIR)
        if (a < tiles) prefetch_rows<X, Plan::WIDE>(x_of(a), X_STRIDE);
    wait_for_previous();
    RegisterTile<W2, ALL> factor;
    if constexpr (RIGHT) factor.fetch_any(factors.at[0], factors.p[0], factors.q[0]);
    if constexpr (LEFT) {
        constexpr int LEAD = Plan::LEAD, PLACES = Plan::PLACES;
        PingPong<Plan::WIDE / 128> turns{team, group};
        RegisterTile<X, Plan::WIDE> next;
        auto place = [&](int n) { return xs + n * X::BYTES / 2; };
        auto fetch = [&](long long a) {
            if (a < tiles) next.fetch(x_of(a), X_STRIDE);
        };
        fetch(a);
        if (LEAD > 1 && a + step < tiles) prefetch_rows<X, Plan::WIDE>(x_of(a + step), X_STRIDE);
        RegisterOperand<P1, Kind> left;  // [q][p] of this warpgroup's 64 q
        {
            using W1 = typename Plan::W1;
            RegisterTile<W1, ALL> whole;
            whole.fetch_any(factors.at[PAIR], factors.p[PAIR], factors.q[PAIR]);
            static_assert(W1::STAGED_BYTES <= Plan::TEAMS * PLACES * X::BYTES, "where X will be");
            if constexpr (PAIR) factor.template put<true, true>(right);
            left_rows(left, reinterpret_cast<float*>(right + (RIGHT ? W2::BYTES / 2 : 0)), whole, group);
        }
#pragma unroll
        for (int n = 0; n < LEAD; ++n) {
            if (a + n * step < tiles) next.put(place(n));
            fetch(a + (n + 1) * step);
        }
        fence_async();
        __syncthreads();
        if (a < tiles) turns.first();
        int now = 0;
#pragma unroll 1
        for (; a < tiles; a += step) {
            float y[8][4];
            turns.begin();
            start_product<P1, Kind>(y, left, SharedOperand<X, true>(place(now)));
            turns.end(a + step < tiles);
            if (a + LEAD * step < tiles) next.put(place((now + LEAD) % PLACES));
            fence_async();
            fetch(a + (LEAD + 1) * step);
            wgmma_wait<0>(y);
            if constexpr (PAIR) {
                RegisterOperand<P2, Kind> rows;
                rows.split(y);
                start_product<P2, Kind>(y, rows, SharedOperand<W2, true>(right));
                wgmma_wait<0>(y);
            }
            store_tile(a, y);
            turns.rest();
            now = (now + 1) % PLACES;
        }
    } else {
        RegisterOperand<P2, Kind> rows;
        float numbers[P2 / 8][4];
        auto fetch = [&](long long a) { fetch_seated(numbers, x_of(a), X_STRIDE, rows_of(a)); };
        if (a < tiles) fetch(a);
        factor.template put<true, true>(right);
        fence_async();
        __syncthreads();
#pragma unroll 1
        for (; a < tiles; a += step) {
            float y[N / 8][4];
            rows.split(numbers);
            start_product<P2, Kind>(y, rows, SharedOperand<W2, true>(right));
            if (a + step < tiles) fetch(a + step);
            wgmma_wait<0>(y);
            store_tile(a, y);
        }
    }
}

// The backward of two factors; arguments as for kron_linear_v4_tile_bwd. Grid: the number of partial sums
// (pieces); block: TEAMS + 1 warpgroups. Dynamic shared memory: the factors, split, G and H of each team,
// X_PLACES tiles of X, mbarriers; at the end the sums. The last warpgroup is the producer: it loads and
// splits X and G. The teams are consumers: they multiply, and take tiles in turn.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::ALL, 1)
    kron_linear_v4_split_wgmma_bwd(float* partials, T* dx, const T* x, const T* g, Factors4<T> factors,
                                   long long A, double scale) {
    using U = __nv_bfloat16;
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using G = typename Plan::G;
    using H = typename Plan::H;
    using W1 = typename Plan::W1;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, TEAMS = Plan::TEAMS,
                  THREADS = Plan::THREADS;
    constexpr int X_PLACES = Plan::X_PLACES, MULTIPLYING = TEAMS * THREADS;
    extern __shared__ uint4 dynamic[];
    unsigned team = __shfl_sync(~0u, threadIdx.x / THREADS, 0);
    U *right = reinterpret_cast<U*>(dynamic), *left = right + W2::BYTES / 2, *all_gs = left + W1::BYTES / 2;
    U *all_hs = all_gs + TEAMS * G::BYTES / 2, *all_xs = all_hs + TEAMS * H::BYTES / 2;
    unsigned mbarriers = shared_address(all_xs + X_PLACES * X::BYTES / 2);
    auto x_full = [&](unsigned n) { return mbarriers + 8 * (n % X_PLACES); };
    auto x_free = [&](unsigned n) { return x_full(n) + 8 * X_PLACES; };
    auto g_full = [&](unsigned n) { return mbarriers + 8 * (2 * X_PLACES + n % TEAMS); };
    auto g_free = [&](unsigned n) { return g_full(n) + 8 * TEAMS; };
    auto arrive = [&](unsigned mbarrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(mbarrier);
    };
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2 * (X_PLACES + TEAMS); ++n) mbarrier_init(mbarriers + 8 * n, THREADS / 32);
        mbarriers_made();
    }
    __syncthreads();
    auto x_of = [&](unsigned a) { return x + a * (1ll * P1 * P2); };
    auto g_of = [&](unsigned a) { return g + a * (1ll * Q1 * Q2); };
    unsigned tiles = A;  // tile n of this block is blockIdx.x + n * gridDim.x
    const T *w0 = factors.at[0], *w1 = factors.at[1];
    asm volatile("" : "+l"(w0), "+l"(w1));  // otherwise ptxas spills a register
    let_next_come();
    prefetch_factor(w1, P1, Q1, factors.p[1], factors.q[1]);
    prefetch_factor(w0, P2, Q2, factors.p[0], factors.q[0]);
    if (team == TEAMS) {
        fewer_registers<88>();
        auto ahead = [&](unsigned a) { prefetch_rows<X, THREADS>(x_of(a), P2); };
        unsigned a = blockIdx.x;
        ahead(a);
        wait_for_previous();
        RegisterTile<X, THREADS> next_x;
        RegisterTile<G, THREADS> next_g;
        next_x.fetch(x_of(a), P2);
        next_g.fetch(g_of(a), Q2);
#pragma unroll 1
        for (unsigned n = 0; a < tiles; ++n) {
            a += gridDim.x;
            if (a + gridDim.x < tiles) {
                ahead(a + gridDim.x);
                prefetch_rows<G, THREADS>(g_of(a + gridDim.x), Q2);
            }
            mbarrier_wait_in_block(x_free(n), n / X_PLACES % 2 ^ 1);
            next_x.put(all_xs + n % X_PLACES * X::BYTES / 2);
            fence_async();
            arrive(x_full(n));
            if (a < tiles) next_x.fetch(x_of(a), P2);
            mbarrier_wait_in_block(g_free(n), n / TEAMS % 2 ^ 1);
            next_g.put(all_gs + n % TEAMS * G::BYTES / 2);
            fence_async();
            arrive(g_full(n));
            if (a < tiles) next_g.fetch(g_of(a), Q2);
        }
    } else {
        more_registers<208>();
        U *gs = all_gs + team * G::BYTES / 2, *hs = all_hs + team * H::BYTES / 2;
        auto sync = [&] { barrier_of(1 + team, THREADS); };
        auto sync_teams = [&] { barrier_of(1 + TEAMS, MULTIPLYING); };
        float sums1[Q1 / 8][4] = {}, sums2[Q2 / 8][4] = {};
        wait_for_previous();
        {
            RegisterTile<W1, MULTIPLYING> factor1;
            RegisterTile<W2, MULTIPLYING> factor2;
            factor1.fetch_any(w1, factors.p[1], factors.q[1]);
            factor2.fetch_any(w0, factors.p[0], factors.q[0]);
            factor1.template put<false>(left);
            factor2.template put<true, true>(right);
        }
        fence_async();
        sync_teams();
        unsigned n = team, a = blockIdx.x + team * gridDim.x;
#pragma unroll 1
        for (; a < tiles; a += TEAMS * gridDim.x, n += TEAMS) {
            float h[8][4], z[8][4];
            RegisterOperand<64, Kind> rows, h_rows;
            U* xs = all_xs + n % X_PLACES * X::BYTES / 2;
            mbarrier_wait_in_block(x_full(n), n / X_PLACES % 2);
            mbarrier_wait_in_block(g_full(n), n / TEAMS % 2);
            start_product<P2, Kind>(z, SharedOperand<X, false>(xs), SharedOperand<W2, true>(right));
            start_product<Q1, Kind>(h, SharedOperand<W1, false>(left), SharedOperand<G, true>(gs));
            wgmma_wait<1>(z);
            rows.split(z);
            start_product<Q2, Kind>(z, rows, SharedOperand<G, false>(gs));
            wgmma_wait<1>(h);
            h_rows.split(h);
            h_rows.template put<H>(hs);
            fence_async();
            sync();
            start_product<Q2, Kind>(h, SharedOperand<H, false>(hs), SharedOperand<W2, false>(right));
            wgmma_wait<1>(z);
            arrive(g_free(n));
            add(sums1, z);
            start_product<P1, Kind>(z, SharedOperand<X, true>(xs), SharedOperand<H, true>(hs));
            wgmma_wait<1>(h);
            store_seated(dx + a * (1ll * P1 * P2), nullptr, nullptr, h, 0, float(scale),
                         [](int row, int column) { return row * P2 + column; });
            wgmma_wait<0>(z);
            arrive(x_free(n));
            add(sums2, z);
            sync();
        }
        // One team adds the sums of the left factor, the other team those of the right factor.
        float* room = reinterpret_cast<float*>(dynamic) + threadIdx.x % THREADS;
        static_assert(TEAMS == 2 && P1 == P2 && Q1 == Q2, "as many sums of both");
        auto exchange = [&](float (&own)[Q1 / 8][4], const float (&others)[Q1 / 8][4], int to) {
            sync_teams();
#pragma unroll
            for (int i = 0; i < Q1 / 2; ++i) room[(to * Q1 / 2 + i) * THREADS] = others[i / 4][i % 4];
            sync_teams();
#pragma unroll
            for (int i = 0; i < Q1 / 2; ++i) own[i / 4][i % 4] += room[((1 - to) * Q1 / 2 + i) * THREADS];
        };
        partials += (long long)blockIdx.x * (Plan::SUMS2 + Plan::SUMS1);
        if (threadIdx.x >= THREADS) {
            exchange(sums1, sums2, 0);
            each_part<false>(sums1, [&](Vec<float, 2> two, int row, int column) {
                store_vec(partials + Plan::SUMS2 + row * Q1 + column, two);
            });
        } else {
            exchange(sums2, sums1, 1);
            each_part<true>(sums2, [&](Vec<float, 4> four, int row, int column) {
                store_vec(partials + unseat(row) * Q2 + column, four);
            });
        }
    }
}

// The backward of one factor. A line n is a column if the factor has elements to its right, otherwise a row.
// A tile has N lines:
//     dx[p][n] = W[p][q] g[q][n],  dW[p][q] += x[p][n] g[q][n].
// The operands with rows p, W and x, are operand a in registers, 64 rows for each warpgroup. Only g is in
// shared memory. Registers hold all accumulators of dW, and the pieces of W for five of the six products (all
// six if Q is 64).
//
// ptxas waits for each wgmma (warning C7514) if one is in flight at the end of a loop or after a branch that
// issued it. ptxas of NVRTC 12.9 fails if the next product of W is issued before the second half of the
// product of x.
//
// C: elements to the right of the factor. PLACES: tiles of g in shared memory, a ring buffer. A tile is
// written LEAD tiles ahead: if two warpgroups share it, one sees what the other has written only one turn
// later, and may still multiply the previous tile.
template <int TEAMS_, typename Kind_, long long C_, class Factor_>
struct SplitOne4 {
    using Kind = Kind_;
    static constexpr bool LEFT = C_ > 1;
    static constexpr int P = Factor_::P, Q = Factor_::Q, N = 32, COUNT = Pieces<Kind>::COUNT,
                         HELD = Q == 64 ? COUNT : 2;
    static constexpr int LEAD = P == 64 ? 1 : 2, PLACES = 2 * LEAD;
    static constexpr int TEAMS = TEAMS_, THREADS = 2 * P;
    static constexpr unsigned ACROSS = LEFT ? C_ / N : 1;
    using X = Tiles<LEFT ? P : N, LEFT ? N : P, Kind>;
    using G = Tiles<LEFT ? Q : N, LEFT ? N : Q, Kind>;
    using W = Tiles<P, Q, Kind>;
    static constexpr long long X_STRIDE = LEFT ? C_ : P, G_STRIDE = LEFT ? C_ : Q;
    static constexpr int THIRD = HELD < COUNT ? W::PLANE : 0;  // the third piece of W, in shared memory
    // Bytes per team: TEAM for the tiles of g, where W is staged first; ROOM for elements in flight.
    static constexpr int STAGED = W::STAGED_BYTES / TEAMS,
                         TEAM = PLACES * G::BYTES > STAGED ? PLACES * G::BYTES : STAGED,
                         ROOM = (P + Q) * N * 4;
};

// 64 rows of W as operand a: HELD pieces in registers, the rest in shared memory.
template <int K, int HELD_>
struct MixedOperand {
    static constexpr int HELD = HELD_;
    static constexpr bool DOWN = false;
    unsigned pieces[HELD][K / 16][4];
    unsigned long long third;

    __device__ __forceinline__ unsigned long long operator()(int, int k) const { return third + k * 16; }
};

// Arguments as for kron_linear_v4_tile_bwd. Grid: the number of partial sums (pieces); block TEAMS * THREADS.
// Dynamic shared memory: the third piece of W, PLACES tiles of g for each team, and each team's room for
// elements in flight, from which a thread reads only what it copied; at the end the sums.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS* Plan::THREADS, 1)
    kron_linear_v4_split_wgmma_one_bwd(float* partials, T* dx, const T* x, const T* g, Factors4<T> factors,
                                       long long A, double scale) {
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using G = typename Plan::G;
    using W = typename Plan::W;
    constexpr int P = Plan::P, Q = Plan::Q, N = Plan::N, PLACES = Plan::PLACES, LEAD = Plan::LEAD,
                  THREADS = Plan::THREADS;
    constexpr bool LEFT = Plan::LEFT;
    constexpr long long X_STRIDE = Plan::X_STRIDE, G_STRIDE = Plan::G_STRIDE;
    constexpr unsigned ACROSS = Plan::ACROSS;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (P / 16), group = warp / 4 % (P / 64);
    __nv_bfloat16 *third = reinterpret_cast<__nv_bfloat16*>(dynamic),
                  *gs = third + Plan::THIRD + team * Plan::TEAM / 2;
    // A lane's rows p are `own` and `own` + APART. They are neighbours in memory if rows p are contiguous.
    constexpr int APART = LEFT ? 8 : 1;
    int own = 64 * group + warp % 4 * 16 + threadIdx.x % 32 / 4 * (LEFT ? 1 : 2), lane = threadIdx.x % 4;
    Vec<T, 4>* room = reinterpret_cast<Vec<T, 4>*>(third + Plan::THIRD + Plan::TEAMS * Plan::TEAM / 2) +
                      team * Plan::ROOM / 16;
    AsyncTile<G, THREADS, T> next_g{room + threadIdx.x % THREADS};
    Vec<T, 4>* x_room = next_g.room + Q * N / 4;
    Vec<T, 2>* x_twos = reinterpret_cast<Vec<T, 2>*>(room + Q * N / 4) + threadIdx.x % THREADS;
    auto place = [&](int n) { return gs + n * G::BYTES / 2; };
    auto x_place = [&](unsigned a) {
        return LEFT ? a / ACROSS * (P * X_STRIDE) + a % ACROSS * N : a * (1ll * N * P);
    };
    auto g_place = [&](unsigned a) {
        return LEFT ? a / ACROSS * (Q * G_STRIDE) + a % ACROSS * N : a * (1ll * N * Q);
    };
    float h[N / 8][4], z[8][4], sums[Q / 8][4] = {};
    RegisterOperand<N, Kind> rows;
    auto fetch_g = [&](unsigned a) { next_g.fetch(g + g_place(a), G_STRIDE); };
    auto fetch_x = [&](unsigned a) {
        const T* from = x + x_place(a);
        if constexpr (LEFT) {
#pragma unroll
            for (int e = 0; e < N / 8; ++e)
                cp_async_16(shared_address(x_room + e * THREADS),
                            from + (own + e % 2 * 8) * X_STRIDE + lane * 4 + e / 2 * 16);
        } else {
#pragma unroll
            for (int e = 0; e < N / 4; ++e)
                cp_async<8>(shared_address(x_twos + e * THREADS),
                            from + own + (e / 2 * 8 + lane * 2 + e % 2) * X_STRIDE, true);
        }
        cp_async_commit();
    };
    auto split_x = [&] {
        float numbers[N / 8][4];
#pragma unroll
        for (int e = 0; e < N / 2; ++e)
            numbers[e / 4][e % 4] = LEFT ? x_room[(e / 8 * 2 + e / 2 % 2) * THREADS].v[e / 4 % 2 * 2 + e % 2]
                                         : x_twos[(e / 4 * 2 + e % 2) * THREADS].v[e / 2 % 2];
        rows.split(numbers);
    };
    auto ahead = [&](unsigned a) {
        prefetch_rows<X, THREADS>(x + x_place(a), X_STRIDE);
        prefetch_rows<G, THREADS>(g + g_place(a), G_STRIDE);
    };
    auto store_tile = [&](unsigned a) {
        T* to = dx + x_place(a);
#pragma unroll
        for (int e = 0; e < N / 2; ++e) h[e / 4][e % 4] *= float(scale);
        if constexpr (LEFT) {
            each_part<true>(h, [&](Vec<float, 4> four, int row, int column) {
                store_vec(to + (64 * group + row) * X_STRIDE + column, four);
            });
        } else {
#pragma unroll
            for (int e = 0; e < N / 4; ++e)
                store_vec(to + own + (e / 2 * 8 + lane * 2 + e % 2) * X_STRIDE,
                          Vec<T, 2>{h[e / 2][e % 2], h[e / 2][e % 2 + 2]});
        }
    };
    PingPong<P / 64> turns{team, group};
    unsigned step = gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : A / N,
             a = blockIdx.x + team * gridDim.x;
    const T* w = factors.at[0];
    asm volatile("" : "+l"(w));  // otherwise ptxas spills a register
    let_next_come();
    prefetch_factor(w, P, Q, factors.p[0], factors.q[0]);
    if (a < tiles) prefetch_rows<X, THREADS>(x + x_place(a), X_STRIDE);
    wait_for_previous();
    MixedOperand<Q, Plan::HELD> factor;
    {
        RegisterTile<W, Plan::TEAMS * THREADS, T> whole;
        whole.fetch_any(w, factors.p[0], factors.q[0]);
        if (a < tiles) {
            fetch_g(a);
            fetch_x(a);
        }
        if (a + step < tiles) ahead(a + step);  // after the first tile, for which all wait
        float *staged = reinterpret_cast<float*>(third + Plan::THIRD),
              all[Q / 8][4];  // [p][q]; q is seated if it is the column of g
        static_assert(W::STAGED_BYTES <= Plan::TEAMS * Plan::TEAM, "where g will be");
        whole.stage(staged);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < Q / 2; ++e) {
            int column = e / 4 * 8 + lane * 2 + e % 2;
            all[e / 4][e % 4] =
                staged[(own + e / 2 % 2 * APART) * W::STAGED_ROW + (LEFT ? column : unseat(column))];
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < Q / 4; ++e) {
            unsigned two[Plan::COUNT];
            split_two(all[e / 2][e % 2 * 2], all[e / 2][e % 2 * 2 + 1], two);
#pragma unroll
            for (int i = 0; i < Plan::HELD; ++i) factor.pieces[i][e / 4][e % 4] = two[i];
            if constexpr (Plan::HELD < Plan::COUNT)
                if (team == 0) put_word<W>(third + W::tile(64 * group, 0), e, two[Plan::COUNT - 1]);
        }
        factor.third = SharedOperand<W, false>(third, 64 * group).at;
    }
    cp_async_wait<0>();
    if (a < tiles) {
        split_x();
        next_g.put(gs);
    }
#pragma unroll
    for (int n = 1; n < LEAD; ++n)
        if (a + n * step < tiles) {
            fetch_g(a + n * step);
            cp_async_wait<0>();
            next_g.put(place(n));
        }
    // Load what the end of a turn needs: x of the next tile, and g of the tile LEAD tiles ahead.
    auto fetch = [&](unsigned a) {
        if (a + step < tiles) fetch_x(a + step);
        if (a + LEAD * step < tiles) fetch_g(a + LEAD * step);
    };
    fetch(a);
    fence_async();
    __syncthreads();
    if (a < tiles) turns.first();
    int now = 0;
#pragma unroll 1
    for (; a < tiles; a += step) {
        bool more = a + step < tiles;
        turns.begin();
        start_product<N, Kind>(z, rows, SharedOperand<G, !LEFT>(place(now)));
        if constexpr (Q > 64) {
            wgmma_wait<0>(z);
            add(sums, z);
            start_product<N, Kind>(z, rows, SharedOperand<G, !LEFT>(place(now), 64));
        }
        start_product<Q, Kind>(h, factor, SharedOperand<G, LEFT>(place(now)));
        turns.end(more);
        wgmma_wait<1>(z);
        add(sums, z, Q / 8 - 8);
        cp_async_wait<0>();
        split_x();
        if (a + LEAD * step < tiles) next_g.put(place((now + LEAD) % PLACES));
        fence_async();
        if (a + 2 * step < tiles) ahead(a + 2 * step);
        fetch(a + step);
        wgmma_wait<0>(h);
        store_tile(a);
        turns.rest();
        now = (now + 1) % PLACES;
    }
    // The first team adds the sums of the other teams to its own.
    float* others = reinterpret_cast<float*>(dynamic) + threadIdx.x % THREADS;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Q / 2; ++i)
        if (team) others[((team - 1) * Q / 2 + i) * THREADS] = sums[i / 4][i % 4];
    __syncthreads();
    if (team) return;
#pragma unroll
    for (int i = 0; i < (Plan::TEAMS - 1) * Q / 2; ++i) sums[i / 4 % (Q / 8)][i % 4] += others[i * THREADS];
    partials += (long long)blockIdx.x * (P * Q);
    if constexpr (LEFT)
        each_part<false>(sums, [&](Vec<float, 2> two, int row, int column) {
            store_vec(partials + (64 * group + row) * Q + column, two);
        });
    else
        each_part<true>(sums, [&](Vec<float, 4> four, int row, int column) {
            store_vec(partials + (own + row / 8 % 2) * Q + column, four);
        });
}
