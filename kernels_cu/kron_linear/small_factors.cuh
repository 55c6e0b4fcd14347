// kron_linear v4 for factors of 2 to 16: a tile lies in the registers of a block, 128 elements per thread, and FMA units multiply it.
//
// Layout     A tile has 2^n elements, and the size of each factor is a power of two. The bits of an element's index are the bits of its
//            position in the row, and some of them belong to a factor.
// Algorithm  In a pass a thread holds the 128 elements whose indices differ in 7 bits, among them all bits of one or more factors. It
//            multiplies by these factors without communication. Then the elements go through shared memory to the threads that hold them in
//            the next pass: twice for 8^5, instead of five reads and writes with one step of tile_step.cuh per factor.
// Pipeline   A thread writes its results where it read its elements, so it waits only before it reads, for the threads with the same higher
//            index bits. In the first pass a warp reads what it copied to the stage itself, and immediately copies its part of the next tile
//            there. Of floats the stage has less than a tile: the parts of the last warps are copied late, to the exchange buffer.
// Cluster    Each of the two blocks has half of the elements of an array: the highest bit of the index is the rank of the block. In the
//            exchange before the last pass, whose factor has that bit, the blocks exchange halves, and the rank becomes bit CROSS.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "tile.cuh"

// A permutation of index bits: bit i goes to bit AT_i.
template <int... AT>
struct Bits {
    __device__ static constexpr int scatter(int n) {
        int to = 0, i = 0;
        ((to |= (n & 1 << i) << (AT > i ? AT - i : 0) >> (AT < i ? i - AT : 0), ++i), ...);
        return to;
    }
};

// A swizzle of shared memory against bank conflicts. A unit is 16 bytes, 2^UNIT elements. Element e is at offset e, except that the unit
// moves among eight neighbouring units: if bit UNIT + 3 + i of e is set, the unit's number is xor-ed with TO_i.
template <int UNIT, int... TO>
struct Turned {
    static constexpr int NEAR = (8 << UNIT) - 1;
    __device__ static constexpr int at(int e) {
        int turn = 0, i = UNIT + 3;
        ((turn ^= (e >> i & 1) * TO, ++i), ...);
        return e ^ turn << UNIT;
    }
    // The offset of element a + b, from the offsets of a and b. That of b is a constant.
    __device__ static __forceinline__ int join(int a, int b) { return (a ^ (b & NEAR)) + (b & ~NEAR); }
};

// A pass. Register r of a thread has the element with index Regs::scatter(r) + Threads::scatter(thread). SIZES: the sizes of the factors,
// the rightmost first; the index along that factor is r / RIGHT % size. At least V elements are contiguous. WITH: the number of threads
// that exchange elements before the next pass.
template <class Regs_, class Threads_, int V_, int RIGHT_, int WITH_, int... SIZES>
struct Pass {
    using Regs = Regs_;
    using Threads = Threads_;
    static constexpr int V = V_, WEIGHTS = ((SIZES * SIZES) + ...);
    template <class F>
    __device__ static __forceinline__ void each_size(const F& f) {
        (f(SIZES), ...);
    }
};

// Copied: the elements of a warp in the first pass, in memory order. AHEAD: the number of warps whose elements are copied one tile ahead.
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

    // The offset of element e of a tile in global memory.
    __device__ static constexpr long long memory(int e) { return R == C ? e : e / R * C + e % R; }
    // The index of the result that is element e of this block in the last pass.
    __device__ static constexpr int result(int e) { return CLUSTER == 1 ? e : (e & ~(1 << CROSS)) | (e >> CROSS & 1) * NUMBERS; }
};

// y[r] for J columns from j0 on and F fibers from f0 on: sums of products of v and w. w begins with column j0.
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
        for (int n = 0; n < F * J; ++n) {  // back and forth, so that one operand is reused
            constexpr int FAST = RIGHT == 1 ? J : F;
            int slow = n / FAST, fast = slow % 2 ? FAST - 1 - n % FAST : n % FAST;
            int j = RIGHT == 1 ? fast : slow, f = f0 + (RIGHT == 1 ? slow : fast), at = f / RIGHT * SIZE * RIGHT + f % RIGHT;
            float& sum = y[at + (j0 + j) * RIGHT];
            sum = k ? fmaf(v[at + k * RIGHT], c[j], sum) : v[at] * c[j];
        }
    }
}

constexpr int SUMS = 32;  // accumulators per thread

// Multiply by the factors of a pass. The results of the last factor are stored as they are computed, some columns at a time, half `turn`
// first. to(r) is the place of the columns that begin with y[r]; put(place, y, r) stores V neighbours from y[r] on, where r counts in the
// first columns. This is a loop because code that does not fit into the instruction cache is slow.
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

// Call f(number, size) for each factor.
template <class F, class... Passes>
__device__ __forceinline__ void each_factor(const F& f, Steps4<Passes...>) {
    int n = 0;
    (Passes::each_size([&](int size) { f(n++, size); }), ...);
}

// Copy the warp's elements of the first pass asynchronously, to `stage` elements after the exchange buffer. Zeros beyond the last row.
template <class Plan, typename T>
__device__ __forceinline__ void copy_own(float* numbers, int stage, const T* x, int half, int end) {
    using Places = typename Plan::Places;
    int thread = Plan::Start::Threads::scatter(threadIdx.x & ~31) + Plan::Copied::scatter(threadIdx.x % 32 * 4);
    int place = Places::at(thread) + stage;
    x += Plan::memory(half + thread);
    asm volatile("" : "+l"(x));  // the compiler then addresses the others with constant offsets from it
#pragma unroll
    for (int i = 0; i < Plan::VALUES / 4; ++i) {
        int own = Plan::Copied::scatter(i * 128);
        unsigned at = shared_address(numbers + Places::join(place, Places::at(own)));
        if constexpr (Plan::L == 1) cp_async_16(at, x + Plan::memory(own));
        else cp_async_16(at, x + Plan::memory(own), thread + own < end);
    }
}

// The outputs of a tile. Element r of the thread goes to offset memory(result(r)) after `first`. Those from `end` on are beyond the last
// row.
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

// Load the thread's elements for a pass from shared memory.
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

// The passes from P on, whose elements the thread has in v. `late` is called when the last pass has read its elements.
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
        if constexpr (CROSS) cluster_arrive();  // the elements have been read
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
                else  // joined as an address, because the buffer begins at a multiple of 128 bytes
                    st_cluster((place ^ 4 * (own & 31)) + 4 * (own & ~31), reinterpret_cast<const float4&>(some));
            });
        if constexpr (CROSS) cluster_sync();
        else if constexpr (WITH == 32) __syncwarp();
        else if constexpr (WITH == Plan::THREADS) __syncthreads();
        else barrier_of((Plan::THREADS + threadIdx.x) / WITH, WITH);  // barrier numbers that no other WITH uses
        fetch<Plan, typename First<Others...>::type>(v, numbers);
        if constexpr (sizeof...(Others) == 1) late();
        run_passes<Plan>(v, numbers, w + ((SIZES * SIZES) + ...), to, late, Steps4<Others...>());
    }
}

#if __CUDA_ARCH__ >= 900
// kron_linear_v4_tile with a tile in registers. Grid: at most CLUSTER * the number of tiles; block THREADS. Dynamic shared memory: the factors,
// the exchange buffer for a tile, the stage.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_small_factors(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual, long long A, double scale,
                                 long long features) {
    extern __shared__ uint4 dynamic[];
    float *w = reinterpret_cast<float*>(dynamic), *numbers = w + Plan::WEIGHTS;
    constexpr long long ACROSS = Plan::C / Plan::R;
    long long tiles = (A + Plan::L - 1) / Plan::L * ACROSS, number = blockIdx.x / Plan::CLUSTER;
    int warp = threadIdx.x / 32, half = Plan::CLUSTER > 1 ? cluster_rank() * Plan::NUMBERS : 0;
    if (number >= tiles) return;  // the grid is planned for the largest number of rows in a bucket
    int stage = warp < Plan::AHEAD ? Plan::NUMBERS : 0;
    auto first = [&](long long n) { return n / ACROSS * Plan::L * Plan::P * Plan::C + n % ACROSS * Plan::R; };
    auto end = [&](long long n) { return int(A - n * Plan::L < Plan::L ? A - n * Plan::L : Plan::L) * Plan::P * Plan::R; };
    auto load = [&](long long n) {
        if (n < tiles) copy_own<Plan>(numbers, stage, x + first(n), half, end(n));
        cp_async_commit();
    };
    each_factor([&](int n, int size) { prefetch_factor(factors.at[n], size, size, factors.p[n], factors.q[n]); }, typename Plan::List());
    prefetch_tile<Plan::P / Plan::CLUSTER, Plan::R>(x + first(number) + Plan::memory(half), end(number) / (Plan::P * Plan::R), Plan::C);
    wait_for_previous();
    load(number);
    float* to = w;  // the factors as floats, one after another
    each_factor(
        [&](int n, int size) {
            for (int i = threadIdx.x; i < size * size; i += Plan::THREADS)
                to[i] = load_as(factors.at[n][i / size * factors.p[n] + i % size * factors.q[n]]);
            to += size * size;
        },
        typename Plan::List());
    let_next_come();
    __syncthreads();
    for (; number < tiles; number += gridDim.x / Plan::CLUSTER) {
        long long next = number + gridDim.x / Plan::CLUSTER;
        Output<T> output = {out, bias, residual, first(number), features, end(number), float(scale)};
        float v[Plan::VALUES];
        cp_async_wait<0>();
        __syncwarp();
        fetch<Plan, typename Plan::Start>(v, numbers, stage);
        __syncwarp();
        if (warp < Plan::AHEAD) load(next);
        run_passes<Plan>(
            v, numbers, w, output,
            [&] {
                __syncthreads();
                if (warp >= Plan::AHEAD) load(next);
            },
            typename Plan::List());
    }
}
#endif
