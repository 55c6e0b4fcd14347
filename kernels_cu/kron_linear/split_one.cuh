// The backward of one large float factor in one launch, by warpgroups (sm_90a). split.cuh defines the terms.
//
// A line n is a column if the factor has elements to its right, otherwise a row. A tile has N lines:
//     dx[p][n] = W[p][q] g[q][n],  dW[p][q] += x[p][n] g[q][n].
// The operands with rows p are operand a, in the registers of a warpgroup, 64 rows each: W, which all lines need, and x, which each lane
// loads itself. Only g is in shared memory, for both products. Registers hold all accumulators of dW, those of a product of 64 columns q,
// and the pieces of W for five of the six products (all six if Q is 64).
//
// ptxas waits for each wgmma (warning C7514) if one is in flight at the end of a loop or after a branch that issued it. ptxas of NVRTC 12.9
// fails if the next product of W is issued before the second half of the product of x.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/launch.cuh"
#include "warpgroups.cuh"

// C: elements to the right of the factor. PLACES: tiles of g in shared memory, a ring buffer. A tile is written LEAD tiles ahead: if two
// warpgroups share it, one sees what the other has written only one turn later, and may still multiply the previous tile.
template <int TEAMS_, typename Kind_, long long C_, class Factor_>
struct SplitOne4 {
    using Kind = Kind_;
    static constexpr bool LEFT = C_ > 1;
    static constexpr int P = Factor_::P, Q = Factor_::Q, N = 32, COUNT = Pieces<Kind>::COUNT, HELD = Q == 64 ? COUNT : 2;
    static constexpr int LEAD = P == 64 ? 1 : 2, PLACES = 2 * LEAD;
    static constexpr int TEAMS = TEAMS_, THREADS = 2 * P;
    static constexpr unsigned ACROSS = LEFT ? C_ / N : 1;
    using X = Tiles<LEFT ? P : N, LEFT ? N : P, Kind>;
    using G = Tiles<LEFT ? Q : N, LEFT ? N : Q, Kind>;
    using W = Tiles<P, Q, Kind>;
    static constexpr long long X_STRIDE = LEFT ? C_ : P, G_STRIDE = LEFT ? C_ : Q;
    static constexpr int THIRD = HELD < COUNT ? W::PLANE : 0;  // the third piece of W, in shared memory
    // Bytes per team: TEAM for the tiles of g, where W is staged first; ROOM for elements in flight.
    static constexpr int STAGED = Staged<W>::SPACE / TEAMS, TEAM = PLACES * G::BYTES > STAGED ? PLACES * G::BYTES : STAGED,
                         ROOM = (P + Q) * N * 4;
};

// 64 rows of W as operand a: HELD pieces in registers, the rest in shared memory.
template <int K, int HELD_>
struct Partly {
    static constexpr int HELD = HELD_;
    static constexpr bool DOWN = false;
    unsigned pieces[HELD][K / 16][4];
    unsigned long long third;

    __device__ __forceinline__ unsigned long long operator()(int, int k) const { return third + k * 16; }
};

// Arguments as for kron_linear_v4_group_bwd. Grid: the number of partial sums (pieces); block TEAMS * THREADS. Dynamic shared memory: the
// third piece of W, PLACES tiles of g for each team, and each team's room for elements in flight, from which a thread reads only what it
// copied; at the end the sums.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::TEAMS* Plan::THREADS, 1)
    kron_linear_v4_split_one_bwd(float* partials, T* dx, const T* x, const T* g, const T* w, long long A, long long w_p, long long w_q,
                                 double scale) {
    using Kind = typename Plan::Kind;
    using X = typename Plan::X;
    using G = typename Plan::G;
    using W = typename Plan::W;
    constexpr int P = Plan::P, Q = Plan::Q, N = Plan::N, PLACES = Plan::PLACES, LEAD = Plan::LEAD, THREADS = Plan::THREADS;
    constexpr bool LEFT = Plan::LEFT;
    constexpr long long X_STRIDE = Plan::X_STRIDE, G_STRIDE = Plan::G_STRIDE;
    constexpr unsigned ACROSS = Plan::ACROSS;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / (P / 16), group = warp / 4 % (P / 64);
    __nv_bfloat16 *third = reinterpret_cast<__nv_bfloat16*>(dynamic), *gs = third + Plan::THIRD + team * Plan::TEAM / 2;
    // A lane's rows p are `own` and `own` + APART. They are neighbours in memory if rows p are contiguous.
    constexpr int APART = LEFT ? 8 : 1;
    int own = 64 * group + warp % 4 * 16 + threadIdx.x % 32 / 4 * (LEFT ? 1 : 2), lane = threadIdx.x % 4;
    Vec<T, 4>* room = reinterpret_cast<Vec<T, 4>*>(third + Plan::THIRD + Plan::TEAMS * Plan::TEAM / 2) + team * Plan::ROOM / 16;
    Arriving<G, THREADS, T> next_g{room + threadIdx.x % THREADS};
    Vec<T, 4>* x_room = next_g.room + Q * N / 4;
    Vec<T, 2>* x_twos = reinterpret_cast<Vec<T, 2>*>(room + Q * N / 4) + threadIdx.x % THREADS;
    auto place = [&](int n) { return gs + n * G::BYTES / 2; };
    auto x_place = [&](unsigned a) { return LEFT ? a / ACROSS * (P * X_STRIDE) + a % ACROSS * N : a * (1ll * N * P); };
    auto g_place = [&](unsigned a) { return LEFT ? a / ACROSS * (Q * G_STRIDE) + a % ACROSS * N : a * (1ll * N * Q); };
    float h[N / 8][4], z[8][4], sums[Q / 8][4] = {};
    Rows<N, Kind> rows;
    auto fetch_g = [&](unsigned a) { next_g.fetch(g + g_place(a), G_STRIDE); };
    auto fetch_x = [&](unsigned a) {
        const T* from = x + x_place(a);
        if constexpr (LEFT) {
#pragma unroll
            for (int e = 0; e < N / 8; ++e)
                cp_async_16(shared_address(x_room + e * THREADS), from + (own + e % 2 * 8) * X_STRIDE + lane * 4 + e / 2 * 16);
        } else {
#pragma unroll
            for (int e = 0; e < N / 4; ++e)
                cp_async<8>(shared_address(x_twos + e * THREADS), from + own + (e / 2 * 8 + lane * 2 + e % 2) * X_STRIDE, true);
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
        Ahead<X::ROWS, X::COLUMNS, THREADS, T>::ahead(x + x_place(a), X_STRIDE);
        Ahead<G::ROWS, G::COLUMNS, THREADS, T>::ahead(g + g_place(a), G_STRIDE);
    };
    auto give = [&](unsigned a) {
        T* to = dx + x_place(a);
#pragma unroll
        for (int e = 0; e < N / 2; ++e) h[e / 4][e % 4] *= float(scale);
        if constexpr (LEFT) {
            each_seated(h, [&](Vec<float, 4> four, int row, int column) { store_vec(to + (64 * group + row) * X_STRIDE + column, four); });
        } else {
#pragma unroll
            for (int e = 0; e < N / 4; ++e)
                store_vec(to + own + (e / 2 * 8 + lane * 2 + e % 2) * X_STRIDE, Vec<T, 2>{h[e / 2][e % 2], h[e / 2][e % 2 + 2]});
        }
    };
    Turns<P / 64> turns{team, group};
    unsigned step = gridDim.x * Plan::TEAMS, tiles = LEFT ? A * ACROSS : A / N, a = blockIdx.x + team * gridDim.x;
    let_next_come();
    factor_ahead<W, Plan::TEAMS * THREADS>(w, w_p, w_q);
    if (a < tiles) Ahead<X::ROWS, X::COLUMNS, THREADS, T>::ahead(x + x_place(a), X_STRIDE);
    wait_for_previous();
    Partly<Q, Plan::HELD> factor;
    {
        Underway<W, Plan::TEAMS * THREADS, T> whole;
        whole.fetch_any(w, w_p, w_q);
        if (a < tiles) {
            fetch_g(a);
            fetch_x(a);
        }
        if (a + step < tiles) ahead(a + step);                                         // after the first tile, for which all wait
        float *staged = reinterpret_cast<float*>(third + Plan::THIRD), all[Q / 8][4];  // [p][q]; q is seated if it is the column of g
        static_assert(Staged<W>::SPACE <= Plan::TEAMS * Plan::TEAM, "where g will be");
        Staged<W>::put(staged, whole);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < Q / 2; ++e) {
            int column = e / 4 * 8 + lane * 2 + e % 2;
            all[e / 4][e % 4] = staged[(own + e / 2 % 2 * APART) * Staged<W>::ROW + (LEFT ? column : where(column))];
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
        factor.third = Described<W, false>(third, 64 * group).at;
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
        start_product<N, Kind>(z, rows, Described<G, !LEFT>(place(now)));
        if constexpr (Q > 64) {
            wgmma_wait<0>(z);
            add(sums, z);
            start_product<N, Kind>(z, rows, Described<G, !LEFT>(place(now), 64));
        }
        start_product<Q, Kind>(h, factor, Described<G, LEFT>(place(now)));
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
        give(a);
        turns.rest();
        now = (now + 1) % PLACES;
    }
    if (!add_teams<Plan::TEAMS, THREADS, Q / 2>(dynamic, team, [&](int i) -> float& { return sums[i / 4][i % 4]; })) return;
    partials += (long long)blockIdx.x * (P * Q);
    if constexpr (LEFT)
        each_two(sums, [&](Vec<float, 2> two, int row, int column) { store_vec(partials + (64 * group + row) * Q + column, two); });
    else each_seated(sums, [&](Vec<float, 4> four, int row, int column) { store_vec(partials + (own + row / 8 % 2) * Q + column, four); });
}
