// One or two large float factors per launch by warpgroups (sm_90a): the forward, and the backward of two. split_one.cuh has the backward
// of one.
//
// A float is split once into three bfloat16 numbers (Pieces), and a product of floats is 6 products of them. wgmma reads its operands from
// shared memory at the full rate of the tensor cores, 64 x 64 x 16 in 32 cycles; mma.sync would wait for ldmatrix. X, G, H and the factors
// are stored there as 8 x 8 tiles, each of which can be an operand along its rows and along its columns. The accumulators of one product
// are operand a of the next, so the forward's z, and the backward's Z of
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T,
// never go through shared memory.
// If both operands are in shared memory, wgmma takes its whole bandwidth and that of L1, and other loads wait. So the forward keeps a left
// factor, or the rows of x, in registers. A single factor is either the left one, with 64 columns of what is to its right (Z is X), or the
// right one, with 64 rows.
// A team of warpgroups has its own tiles; teams wait for each other only at the end. In the forward a team prepares the next tile while
// wgmma multiplies; in the backward one more warpgroup prepares the tiles.
//
// Accuracy: the sum of each product of K terms starts at zero with the small terms first, and is then added to others by ordinary
// additions, because tensor cores truncate what they add.
// In TF32 a float is two pieces, and a product is three products.
// Measurements, experiments and dead ends: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "warpgroups.cuh"

// X is [P1][P2], G is [Q1][Q2]. WIDE and THREADS: the threads of a team, forward and backward (of two factors).
template <int TEAMS_, typename Kind_, long long C_, class Left_, class Right_>
struct Split4 {
    using Kind = Kind_;
    static constexpr bool LEFT = Left_::COUNT > 0, RIGHT = Right_::COUNT > 0, PAIR = LEFT && RIGHT;
    static constexpr int P1 = LEFT ? Left_::P : 64, Q1 = LEFT ? Left_::Q : 64, P2 = RIGHT ? Right_::P : 64, Q2 = RIGHT ? Right_::Q : 64;
    static constexpr int TEAMS = TEAMS_, THREADS = 128, WIDE = LEFT ? 2 * Q1 : 128, SUMS1 = P1 * Q1, SUMS2 = P2 * Q2;
    static constexpr long long ACROSS = RIGHT ? 1 : C_ / P2, X_STRIDE = RIGHT ? P2 : C_, G_STRIDE = RIGHT ? Q2 : C_;
    // Forward: a team's ring buffer of X has PLACES tiles. A tile is written LEAD tiles ahead, because the other warpgroup of the team sees
    // it only one turn later and may still multiply the previous tile.
    static constexpr int LEAD = WIDE / 128, PLACES = 2 * LEAD;
    using X = Tiles<P1, P2, Kind>;
    using G = Tiles<Q1, Q2, Kind>;
    using H = Tiles<P1, Q2, Kind>;
    using W1 = Tiles<P1, Q1, Kind>;
    using W2 = Tiles<P2, Q2, Kind>;
    static constexpr int ALL = (TEAMS + 1) * THREADS, X_PLACES = TEAMS + 1;  // backward
};

// kron_linear_v4 for one or two large float factors. Any grid, block TEAMS * WIDE. Dynamic shared memory: the factors, split, and X of each
// team.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS* Plan::WIDE, 1)
    kron_linear_v4_split(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                         const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                         long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                         long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                         long long features) {
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, ALL = Plan::TEAMS * Plan::WIDE, N = Plan::LEFT ? 64 : Q2;
    constexpr bool LEFT = Plan::LEFT, RIGHT = Plan::RIGHT, PAIR = Plan::PAIR;
    constexpr long long ACROSS = Plan::ACROSS, X_STRIDE = Plan::X_STRIDE, OUT_STRIDE = Plan::G_STRIDE;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (Plan::WIDE / 32), group = warp / 4 % (Plan::WIDE / 128);
    __nv_bfloat16* right = reinterpret_cast<__nv_bfloat16*>(dynamic);
    __nv_bfloat16* xs = right + ((RIGHT ? W2::BYTES : 0) + team * Plan::PLACES * X::BYTES) / 2;
    auto x_of = [&](long long a) { return x + a / ACROSS * P1 * X_STRIDE + a % ACROSS * P2; };
    auto rows_of = [&](long long a) { return LEFT || A - 64 * a >= 64 ? P1 : int(A - 64 * a); };
    auto give = [&](long long a, const float (&d)[N / 8][4]) {
        long long at = (a / ACROSS * Q1 + 64 * group) * OUT_STRIDE + a % ACROSS * Q2;
        int rows = rows_of(a);
        store_seated(out, bias, residual, d, features, float(scale),
                     [=](int row, int column) { return LEFT || row < rows ? at + row * OUT_STRIDE + column : -1; });
    };
    long long step = (long long)gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : (A + 63) / 64, a = blockIdx.x + team * gridDim.x;
    let_next_come();
    if constexpr (RIGHT) factor_ahead<W2, ALL>(w0, w0_p, w0_q);
    if constexpr (LEFT) factor_ahead<typename Plan::W1, ALL>(PAIR ? w1 : w0, PAIR ? w1_p : w0_p, PAIR ? w1_q : w0_q);
    if constexpr (PAIR)
        if (a < tiles) Ahead<P1, P2, Plan::WIDE, T>::ahead(x_of(a), X_STRIDE);
    wait_for_previous();
    Underway<W2, ALL> factor;
    if constexpr (RIGHT) factor.fetch_any(w0, w0_p, w0_q);
    if constexpr (LEFT) {
        constexpr int LEAD = Plan::LEAD, PLACES = Plan::PLACES;
        Turns<Plan::WIDE / 128> turns{team, group};
        Underway<X, Plan::WIDE> next;
        auto place = [&](int n) { return xs + n * X::BYTES / 2; };
        auto fetch = [&](long long a) {
            if (a < tiles) next.fetch(x_of(a), X_STRIDE);
        };
        fetch(a);
        if (LEAD > 1 && a + step < tiles) Ahead<P1, P2, Plan::WIDE, T>::ahead(x_of(a + step), X_STRIDE);
        Rows<P1, Kind> left;  // [q][p] of this warpgroup's 64 q
        {
            using W1 = typename Plan::W1;
            Underway<W1, ALL> whole;
            whole.fetch_any(PAIR ? w1 : w0, PAIR ? w1_p : w0_p, PAIR ? w1_q : w0_q);
            float *staged = reinterpret_cast<float*>(right + (RIGHT ? W2::BYTES / 2 : 0)), numbers[P1 / 8][4];
            static_assert(Staged<W1>::SPACE <= Plan::TEAMS * PLACES * X::BYTES, "where X will be");
            Staged<W1>::put(staged, whole);
            if constexpr (PAIR) factor.template put<true>(right);
            __syncthreads();
            int q = 64 * group + warp % 4 * 16 + threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
            for (int e = 0; e < P1 / 2; ++e) numbers[e / 4][e % 4] = staged[(p + e % 2 + e / 4 * 8) * Staged<W1>::ROW + q + e / 2 % 2 * 8];
            left.split(numbers);
            __syncthreads();
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
            start_product<P1, Kind>(y, left, Described<X, true>(place(now)));
            turns.end(a + step < tiles);
            if (a + LEAD * step < tiles) next.put(place((now + LEAD) % PLACES));
            fence_async();
            fetch(a + (LEAD + 1) * step);
            wgmma_wait<0>(y);
            if constexpr (PAIR) {
                Rows<P2, Kind> rows;
                rows.split(y);
                start_product<P2, Kind>(y, rows, Described<W2, true>(right));
                wgmma_wait<0>(y);
            }
            give(a, y);
            turns.rest();
            now = (now + 1) % PLACES;
        }
    } else {
        Rows<P2, Kind> rows;
        float numbers[P2 / 8][4];
        auto fetch = [&](long long a) { fetch_seated(numbers, x_of(a), X_STRIDE, rows_of(a)); };
        if (a < tiles) fetch(a);
        factor.template put<true>(right);
        fence_async();
        __syncthreads();
#pragma unroll 1
        for (; a < tiles; a += step) {
            float y[N / 8][4];
            rows.split(numbers);
            start_product<P2, Kind>(y, rows, Described<W2, true>(right));
            if (a + step < tiles) fetch(a + step);
            wgmma_wait<0>(y);
            give(a, y);
        }
    }
}

// The backward of two factors; arguments as for kron_linear_v4_group_bwd. Grid: the number of partial sums (pieces); block: TEAMS + 1
// warpgroups. Dynamic shared memory: the factors, split, G and H of each team, X_PLACES tiles of X, mbarriers; at the end the sums. The
// last warpgroup is the producer: it loads and splits X and G. The teams are consumers: they multiply, and take tiles in turn.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::ALL, 1)
    kron_linear_v4_split_bwd(float* partials, T* dx, const T* x, const T* g, const T* w0, const T* w1, long long A, long long w0_p,
                             long long w0_q, long long w1_p, long long w1_q, double scale) {
    using U = __nv_bfloat16;
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using G = typename Plan::G;
    using H = typename Plan::H;
    using W1 = typename Plan::W1;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, TEAMS = Plan::TEAMS, THREADS = Plan::THREADS;
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
    auto tell = [&](unsigned mbarrier) {
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
    let_next_come();
    factor_ahead<W1, Plan::ALL>(w1, w1_p, w1_q);
    factor_ahead<W2, Plan::ALL>(w0, w0_p, w0_q);
    if (team == TEAMS) {
        fewer_registers<88>();
        auto ahead = [&](unsigned a) { Ahead<P1, P2, THREADS, T>::ahead(x_of(a), P2); };
        unsigned a = blockIdx.x;
        ahead(a);
        wait_for_previous();
        Underway<X, THREADS> next_x;
        Underway<G, THREADS> next_g;
        next_x.fetch(x_of(a), P2);
        next_g.fetch(g_of(a), Q2);
#pragma unroll 1
        for (unsigned n = 0; a < tiles; ++n) {
            a += gridDim.x;
            if (a + gridDim.x < tiles) {
                ahead(a + gridDim.x);
                Ahead<Q1, Q2, THREADS, T>::ahead(g_of(a + gridDim.x), Q2);
            }
            mbarrier_wait_in_block(x_free(n), n / X_PLACES % 2 ^ 1);
            next_x.put(all_xs + n % X_PLACES * X::BYTES / 2);
            fence_async();
            tell(x_full(n));
            if (a < tiles) next_x.fetch(x_of(a), P2);
            mbarrier_wait_in_block(g_free(n), n / TEAMS % 2 ^ 1);
            next_g.put(all_gs + n % TEAMS * G::BYTES / 2);
            fence_async();
            tell(g_full(n));
            if (a < tiles) next_g.fetch(g_of(a), Q2);
        }
    } else {
        more_registers<208>();
        U *gs = all_gs + team * G::BYTES / 2, *hs = all_hs + team * H::BYTES / 2;
        auto sync = [&] { barrier_of(1 + team, THREADS); };
        auto sync_teams = [&] { barrier_of(1 + TEAMS, MULTIPLYING); };
        float sums1[Q1 / 8][4] = {}, sums2[Q2 / 8][4] = {};
        auto give = [&](unsigned a, const float (&d)[8][4]) {
            T* to = dx + a * (1ll * P1 * P2);
            each_seated(d, [&](Vec<float, 4> four, int row, int column) {
                for (float& one : four.v) one *= float(scale);
                store_vec(to + row * P2 + column, four);
            });
        };
        wait_for_previous();
        {
            Underway<W1, MULTIPLYING> factor1;
            Underway<W2, MULTIPLYING> factor2;
            factor1.fetch_any(w1, w1_p, w1_q);
            factor2.fetch_any(w0, w0_p, w0_q);
            factor1.put_unseated(left);
            factor2.template put<true>(right);
        }
        fence_async();
        sync_teams();
        unsigned n = team, a = blockIdx.x + team * gridDim.x;
#pragma unroll 1
        for (; a < tiles; a += TEAMS * gridDim.x, n += TEAMS) {
            float h[8][4], z[8][4];
            Rows<64, Kind> rows;
            U* xs = all_xs + n % X_PLACES * X::BYTES / 2;
            mbarrier_wait_in_block(x_full(n), n / X_PLACES % 2);
            mbarrier_wait_in_block(g_full(n), n / TEAMS % 2);
            start_product<P2, Kind>(z, Described<X, false>(xs), Described<W2, true>(right));
            start_product<Q1, Kind>(h, Described<W1, false>(left), Described<G, true>(gs));
            wgmma_wait<1>(z);
            rows.split(z);
            start_product<Q2, Kind>(z, rows, Described<G, false>(gs));
            wgmma_wait<1>(h);
            put_rows<H>(hs, h);
            fence_async();
            sync();
            start_product<Q2, Kind>(h, Described<H, false>(hs), Described<W2, false>(right));
            wgmma_wait<1>(z);
            tell(g_free(n));
            add(sums1, z);
            start_product<P1, Kind>(z, Described<X, true>(xs), Described<H, true>(hs));
            wgmma_wait<1>(h);
            give(a, h);
            wgmma_wait<0>(z);
            tell(x_free(n));
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
            each_two(sums1, [&](Vec<float, 2> two, int row, int column) { store_vec(partials + Plan::SUMS2 + row * Q1 + column, two); });
        } else {
            exchange(sums2, sums1, 1);
            each_seated(sums2, [&](Vec<float, 4> four, int row, int column) { store_vec(partials + where(row) * Q2 + column, four); });
        }
    }
}
