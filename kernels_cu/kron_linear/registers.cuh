// What kron_linear v4 does in float where a tile fits into the registers of a block, 128 numbers a thread.
//
// A tile is 2^n numbers, and every factor's size a power of two up to 16: the bits of a number's index are those of its place in the row,
// some of them a factor's. In a pass a thread holds the 128 numbers whose indices differ in 7 bits, all of one factor, or of several, among
// them. It multiplies by these factors without a word to any other thread, and the numbers go through shared memory to those that hold
// them in the next pass: twice for 8^5, where a step of step.cuh for each factor would read and write them five times.
//
// A thread puts its results where it has read its numbers, so it waits for nobody before it writes: only for those threads, whose bits
// above are the same, from which it reads next. The first pass reads what its warp itself has copied, from the stage, and copies the
// warp's part of the next tile there at once. Shared memory holds less than two tiles, so the last warps' parts come late, to where the
// numbers are exchanged, when the last pass has read.
//
// In a cluster of two blocks, each has half of an array's numbers: the highest bit of the index is the block's rank. In the exchange before
// the last pass, whose factor has that bit, each block gives the other half of its numbers, and the rank becomes the bit CROSS below.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "tile.cuh"

// Where the bits of a number go: bit i to bit AT_i.
template <int... AT>
struct Bits {
    __device__ static constexpr int scatter(int n) {
        int to = 0, i = 0;
        ((to |= (n & 1 << i) << (AT > i ? AT - i : 0) >> (AT < i ? i - AT : 0), ++i), ...);
        return to;
    }
};

// Number e lies at e, but for its unit of 16 bytes, 2^UNIT numbers, among eight neighbours: bit UNIT + 3 + i of e turns it by TO_i, so that
// the lanes which one access serves meet different banks.
template <int UNIT, int... TO>
struct Turned {
    static constexpr int NEAR = (8 << UNIT) - 1;
    __device__ static constexpr int at(int e) {
        int turn = 0, i = UNIT + 3;
        ((turn ^= (e >> i & 1) * TO, ++i), ...);
        return e ^ turn << UNIT;
    }
    // The place of a + b, from that of a, and from that of b, a constant.
    __device__ static __forceinline__ int join(int a, int b) { return (a ^ (b & NEAR)) + (b & ~NEAR); }
};

// A thread's numbers, Regs::scatter(r) + Threads::scatter(thread), and the factors' sizes, those of the rightmost first, whose digit is
// r / RIGHT % size. V of the numbers, at least, are neighbours. WITH: the threads that exchange numbers before the next pass.
template <class Regs_, class Threads_, int V_, int RIGHT_, int WITH_, int... SIZES>
struct Pass {
    using Regs = Regs_;
    using Threads = Threads_;
    static constexpr int V = V_, WEIGHTS = ((SIZES * SIZES) + ...);
};

// Copied: the numbers of a warp in the first pass, in the order of memory. AHEAD: the warps whose numbers come ahead.
template <int CLUSTER_, int VALUES_, int THREADS_, int BLOCKS_, int L_, int P_, int R_, long long C_, int AHEAD_, int CROSS_, bool ADDED_,
          class Places_, class Copied_, class... Passes>
struct RegisterPlan {
    static constexpr int CLUSTER = CLUSTER_, VALUES = VALUES_, THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, P = P_, R = R_;
    static constexpr int AHEAD = AHEAD_, CROSS = CROSS_;
    static constexpr long long C = C_;
    static constexpr bool ADDED = ADDED_;
    static constexpr int NUMBERS = THREADS * VALUES, WEIGHTS = ((Passes::WEIGHTS + ...) + 31) / 32 * 32;
    using Places = Places_;
    using Copied = Copied_;
    using List = Steps4<Passes...>;
    using Start = typename First<Passes...>::type;

    // Where number e of a tile is in memory.
    __device__ static constexpr long long memory(int e) { return R == C ? e : e / R * C + e % R; }
    // Which number of the results e is, of a block's in the last pass.
    __device__ static constexpr int result(int e) { return CLUSTER == 1 ? e : (e & ~(1 << CROSS)) | (e >> CROSS & 1) * NUMBERS; }
};

// y[r] of J columns from j0 on, whose first is the first of w, of F fibers from f0 on: sums of numbers of v times those of w.
template <int SIZE, int RIGHT, int F, int J, int N>
__device__ __forceinline__ void multiply_some(float (&y)[N], const float (&v)[N], const float* w, int f0, int j0) {
    constexpr int V = J < 4 ? J : 4;
#pragma unroll
    for (int k = 0; k < SIZE; ++k) {
        float c[J];
#pragma unroll
        for (int j = 0; j < J; j += V) {
            Vec<float, V> some = load_vec<float, V>(w + k * SIZE + j);
#pragma unroll
            for (int e = 0; e < V; ++e) c[j + e] = some.v[e];
        }
#pragma unroll
        for (int n = 0; n < F * J; ++n) {  // to and fro, so that one operand always stays
            constexpr int FAST = RIGHT == 1 ? J : F;
            int slow = n / FAST, fast = slow % 2 ? FAST - 1 - n % FAST : n % FAST;
            int j = RIGHT == 1 ? fast : slow, f = f0 + (RIGHT == 1 ? slow : fast), at = f / RIGHT * SIZE * RIGHT + f % RIGHT;
            float& sum = y[at + (j0 + j) * RIGHT];
            sum = k ? fmaf(v[at + k * RIGHT], c[j], sum) : v[at] * c[j];
        }
    }
}

constexpr int SUMS = 32;  // that a thread adds up at once

// Multiply by a pass's factors. The results of the last leave as they are made, some of its columns at a time, those of half `turn` first:
// to(r) says where those of the columns that begin with y[r]'s go, put(place, y, r) takes V neighbours from y[r] on, where r is of the
// first columns. A loop: code that does not fit into the instruction cache is slow.
template <int V, int RIGHT, int SIZE, int... OTHERS, int N, class To, class Put>
__device__ __forceinline__ void multiply_pass(float (&v)[N], const float* w, int turn, const To& to, const Put& put) {
    float y[N];
    if constexpr (sizeof...(OTHERS) == 0) {
        constexpr int J = SUMS * SIZE < N ? 1 : SUMS * SIZE / N;
#pragma unroll 1
        for (int first = 0; first < SIZE; first += J) {
            int j = first ^ turn * (SIZE / 2);
            multiply_some<SIZE, RIGHT, N / SIZE, J>(y, v, w + j, 0, 0);
            auto place = to(j * RIGHT);
#pragma unroll
            for (int r = 0; r < N; r += V)
                if (r / RIGHT % SIZE < J) put(place, y, r);
        }
    } else {
        constexpr int F = SUMS / SIZE;
#pragma unroll
        for (int f = 0; f < N / SIZE; f += F) multiply_some<SIZE, RIGHT, F, SIZE>(y, v, w, f, 0);
        multiply_pass<V, RIGHT * SIZE, OTHERS...>(y, w + SIZE * SIZE, turn, to, put);
    }
}

// The factors from number N on, in float, one after another.
template <int THREADS, int N, typename T, int... SIZES>
__device__ __forceinline__ void load_weights_of(float* to, const Factors4<T>& factors) {
    constexpr int ALL[] = {SIZES...};
    int first = 0;
#pragma unroll
    for (int n = 0; n < int(sizeof...(SIZES)); ++n) {
        int size = ALL[n];
        for (int i = threadIdx.x; i < size * size; i += THREADS)
            to[first + i] = load_as(factors.at[N + n][i / size * factors.p[N + n] + i % size * factors.q[N + n]]);
        first += size * size;
    }
}
template <int THREADS, int N, typename T>
__device__ __forceinline__ void load_weights(float*, const Factors4<T>&, Steps4<>) {}
template <int THREADS, int N, typename T, class Regs, class Threads, int V, int RIGHT, int WITH, int... SIZES, class... Others>
__device__ __forceinline__ void load_weights(float* to, const Factors4<T>& factors,
                                             Steps4<Pass<Regs, Threads, V, RIGHT, WITH, SIZES...>, Others...>) {
    load_weights_of<THREADS, N, T, SIZES...>(to, factors);
    load_weights<THREADS, N + sizeof...(SIZES)>(to + ((SIZES * SIZES) + ...), factors, Steps4<Others...>());
}

template <int N, typename T>
__device__ __forceinline__ void prefetch_weights(const Factors4<T>&, Steps4<>) {}
template <int N, typename T, class Regs, class Threads, int V, int RIGHT, int WITH, int... SIZES, class... Others>
__device__ __forceinline__ void prefetch_weights(const Factors4<T>& factors,
                                                 Steps4<Pass<Regs, Threads, V, RIGHT, WITH, SIZES...>, Others...>) {
    prefetch_those<N, T, Factor<SIZES, SIZES>...>(factors);
    prefetch_weights<N + sizeof...(SIZES)>(factors, Steps4<Others...>());
}

// Copy the warp's numbers of the first pass in the background, to `stage` numbers after where they are exchanged; zeros beyond the rows.
template <class Plan, typename T>
__device__ __forceinline__ void copy_own(float* numbers, int stage, const T* x, int half, int end) {
    using Places = typename Plan::Places;
    int thread = Plan::Start::Threads::scatter(threadIdx.x & ~31) + Plan::Copied::scatter(threadIdx.x % 32 * 4);
    int place = Places::at(thread) + stage;
    x += Plan::memory(half + thread);
    asm volatile("" : "+l"(x));  // so that the others are constants away from it
#pragma unroll
    for (int i = 0; i < Plan::VALUES / 4; ++i) {
        int own = Plan::Copied::scatter(i * 128);
        unsigned at = shared_address(numbers + Places::join(place, Places::at(own)));
        if constexpr (Plan::L == 1) cp_async_16(at, x + Plan::memory(own));
        else cp_async_16(at, x + Plan::memory(own), thread + own < end);
    }
}

// Where a tile's results go: of the thread's number r, number memory(result(r)) after `first`. Those from `end` on are beyond the rows.
template <typename T>
struct Output {
    T* out;
    const T *bias, *residual;
    long long first, features;
    int end;
    float scale;
};

template <class Plan, int V, typename T, int N>
__device__ __forceinline__ void store_results(const Output<T>& to, const float (&y)[N], int r, int number, int own) {
    if (Plan::L > 1 && number + own >= to.end) return;
    long long at = to.first + Plan::memory(number) + Plan::memory(own);
    float part[V];
#pragma unroll
    for (int e = 0; e < V; ++e) {
        part[e] = y[r + e] * to.scale;
        if (Plan::ADDED && to.bias) part[e] += load_as(to.bias[at % to.features + e]);
        if (Plan::ADDED && to.residual) part[e] += load_as(to.residual[at + e]);
    }
    store_vec_past_l1(to.out + at, pack<T, V>(part));
}

// The thread's numbers, from where they lie for a pass.
template <class Plan, class P>
__device__ __forceinline__ void fetch(float (&v)[Plan::VALUES], const float* numbers, int stage = 0) {
    using Places = typename Plan::Places;
    int place = Places::at(P::Threads::scatter(threadIdx.x)) + stage;
#pragma unroll
    for (int r = 0; r < Plan::VALUES; r += P::V) {
        Vec<float, P::V> some = load_vec<float, P::V>(numbers + Places::join(place, Places::at(P::Regs::scatter(r))));
#pragma unroll
        for (int e = 0; e < P::V; ++e) v[r + e] = some.v[e];
    }
}

// The passes from P on, of which the thread has its numbers. `late`: what to do when the last pass has read.
template <class Plan, typename T, class Late, class Regs, class Threads, int V, int RIGHT, int WITH, int... SIZES, class... Others>
__device__ __forceinline__ void run_passes(float (&v)[Plan::VALUES], float* numbers, const float* w, const Output<T>& to, const Late& late,
                                           Steps4<Pass<Regs, Threads, V, RIGHT, WITH, SIZES...>, Others...>) {
    using Places = typename Plan::Places;
    int thread = Threads::scatter(threadIdx.x);
    if constexpr (sizeof...(Others) == 0) {
        int rank = Plan::CLUSTER > 1 ? cluster_rank() << Plan::CROSS : 0;
        multiply_pass<V, RIGHT, SIZES...>(
            v, w, 0, [&](int r) { return Plan::result(thread | Regs::scatter(r)) | rank; },
            [&](int number, const float (&y)[Plan::VALUES], int r) {
                store_results<Plan, V>(to, y, r, number, Plan::result(Regs::scatter(r)));
            });
    } else {
        constexpr bool CROSS = Plan::CLUSTER > 1 && sizeof...(Others) == 1;
        constexpr int HALF = CROSS ? 1 << Plan::CROSS : 0;
        int rank = CROSS ? cluster_rank() : 0;
        if constexpr (CROSS) cluster_arrive();  // the numbers are read
        bool waits = CROSS;
        multiply_pass<V, RIGHT, SIZES...>(
            v, w, CROSS ? rank ^ 1 : 0,
            [&](int r) {
                int number = Regs::scatter(r), place = Places::at(thread | (number & ~HALF) | rank * HALF);
                if constexpr (!CROSS) return place;
                if (waits) cluster_wait();
                waits = false;
                return int(shared_of_rank(shared_address(numbers + place), number & HALF ? 1 : 0));
            },
            [&](int place, const float (&y)[Plan::VALUES], int r) {
                int own = Places::at(Regs::scatter(r));
                Vec<float, V> some;
#pragma unroll
                for (int e = 0; e < V; ++e) some.v[e] = y[r + e];
                if constexpr (!CROSS) store_vec(numbers + Places::join(place, own), some);
                else  // joined as an address: the numbers begin at a multiple of 128 bytes
                    st_cluster((place ^ 4 * (own & 31)) + 4 * (own & ~31), reinterpret_cast<const float4&>(some));
            });
        if constexpr (CROSS) cluster_sync();
        else if constexpr (WITH == 32) __syncwarp();
        else if constexpr (WITH == Plan::THREADS) __syncthreads();
        else barrier_of((Plan::THREADS + threadIdx.x) / WITH, WITH);  // other numbers than for another WITH
        fetch<Plan, typename First<Others...>::type>(v, numbers);
        if constexpr (sizeof...(Others) == 1) late();
        run_passes<Plan>(v, numbers, w + ((SIZES * SIZES) + ...), to, late, Steps4<Others...>());
    }
}

#if __CUDA_ARCH__ >= 900
// kron_linear_v4 where a tile's numbers lie in registers. Grid CLUSTER * (the tiles, or fewer), block THREADS; dynamic shared memory: the
// factors, a tile's numbers, the stage.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_registers(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                             const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                             long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                             long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                             long long features) {
    extern __shared__ uint4 dynamic[];
    float *w = reinterpret_cast<float*>(dynamic), *numbers = w + Plan::WEIGHTS;
    Factors4<T> factors = {{w0, w1, w2, w3, w4, w5, w6, w7},
                           {w0_p, w1_p, w2_p, w3_p, w4_p, w5_p, w6_p, w7_p},
                           {w0_q, w1_q, w2_q, w3_q, w4_q, w5_q, w6_q, w7_q}};
    constexpr long long ACROSS = Plan::C / Plan::R;
    long long tiles = (A + Plan::L - 1) / Plan::L * ACROSS, number = blockIdx.x / Plan::CLUSTER;
    int warp = threadIdx.x / 32, half = Plan::CLUSTER > 1 ? cluster_rank() * Plan::NUMBERS : 0;
    if (number >= tiles) return;  // a launch is planned for the most rows that there may be
    int stage = warp < Plan::AHEAD ? Plan::NUMBERS : 0;
    auto first = [&](long long n) { return n / ACROSS * Plan::L * Plan::P * Plan::C + n % ACROSS * Plan::R; };
    auto end = [&](long long n) { return int(A - n * Plan::L < Plan::L ? A - n * Plan::L : Plan::L) * Plan::P * Plan::R; };
    auto load = [&](long long n) {
        if (n < tiles) copy_own<Plan>(numbers, stage, x + first(n), half, end(n));
        cp_async_commit();
    };
    prefetch_weights<0>(factors, typename Plan::List());
    prefetch_tile<Plan::P / Plan::CLUSTER, Plan::R>(x + first(number) + Plan::memory(half), end(number) / (Plan::P * Plan::R), Plan::C);
    wait_for_previous();
    load(number);
    load_weights<Plan::THREADS, 0>(w, factors, typename Plan::List());
    let_next_come();
    __syncthreads();
    for (; number < tiles; number += gridDim.x / Plan::CLUSTER) {
        long long next = number + gridDim.x / Plan::CLUSTER;
        Output<T> to = {out, bias, residual, first(number), features, end(number), float(scale)};
        float v[Plan::VALUES];
        cp_async_wait<0>();
        __syncwarp();
        fetch<Plan, typename Plan::Start>(v, numbers, stage);
        __syncwarp();
        if (warp < Plan::AHEAD) load(next);
        run_passes<Plan>(
            v, numbers, w, to,
            [&] {
                __syncthreads();
                if (warp >= Plan::AHEAD) load(next);
            },
            typename Plan::List());
    }
}
#endif
