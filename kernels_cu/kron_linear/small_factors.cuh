// kron_linear v4 for factors of 2 to 16: a tile of 2^n elements lies in the registers of a block. FMA units multiply floats, tensor cores
// multiply 16-bit types.
//
// Layout     The size of each factor is a power of two. The bits of an element's index are the bits of its position in the row, and some
//            of them belong to a factor.
// Float      In a pass a thread holds the 128 elements whose indices differ in 7 bits, among them all bits of one or more factors. It
//            multiplies by these factors without communication. Then the elements go through shared memory to the threads that hold them in
//            the next pass: twice for 8^5, instead of five reads and writes with one step of tile_step.cuh per factor.
//            A thread writes its results where it read its elements, so it waits only before it reads, for the threads with the same higher
//            index bits. In the first pass a warp reads what it copied to the stage itself, and immediately copies its part of the next tile
//            there. Shared memory holds less than two tiles: the parts of the last warps are copied late, to the exchange buffer.
//            Cluster: each of the two blocks has half of the elements of an array: the highest bit of the index is the rank of the block. In
//            the exchange before the last pass, whose factor has that bit, the blocks exchange halves, and the rank becomes bit CROSS.
// 16 bits    A step multiplies along four bits: those of a factor of 16, of smaller neighbouring factors whose product is 16 (merged), or
//            of one smaller factor and bits next to it; the matrix is then block-diagonal. The elements are operand b of mma m16n8k16: k is
//            the lane bits t and two register bits, n is the lane bits g. In the result, j is in g and one register bit, and n is in t and
//            the other register bit. The index bits that were in g are then in t, and the next step multiplies along them without moving
//            data. After two steps (three if factors are at most 8) the elements are exchanged as floats: once for 8^5.
//            A warp waits for other warps twice per tile: before it writes to the exchange buffer, until all have read the previous tile,
//            and before it reads from that buffer. In a cluster of two blocks they exchange halves after the first pass, by st.async, and
//            mbarriers say when: a cluster barrier would also wait for stores to global memory.
// Precision  Inputs from memory are exact. Between steps an element is two bfloat16 numbers: the first truncated, the second the rounded
//            rest, together 16 bits. A factor is one number, or two if it is float16 or merged; then a product is three products. Zero
//            times infinity is NaN: a row with infinities, or with a sum beyond the range of float, may have NaN instead.
#pragma once
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
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
    __device__ static __forceinline__ void each_factor(int& n, const F& f) {
        (f(n++, SIZES), ...);
    }
};

// Where the elements of a tile of L x P x R are. CLUSTER blocks of NUMBERS elements each share it.
template <int CLUSTER_, int CROSS_, int NUMBERS_, int L_, int P_, int R_, long long C_>
struct SmallTile {
    static constexpr int CLUSTER = CLUSTER_, CROSS = CROSS_, NUMBERS = NUMBERS_, L = L_, P = P_, R = R_;
    static constexpr long long C = C_;
    static constexpr long long ACROSS = C / R;
    // The offset of tile n in global memory, and the number of its elements in an array of A rows.
    __device__ static long long first(long long n) { return n / ACROSS * L * P * C + n % ACROSS * R; }
    __device__ static int end(long long n, long long A) { return int(A - n / ACROSS * L < L ? A - n / ACROSS * L : L) * P * R; }
    // The offset of element e of a tile in global memory.
    __device__ static constexpr long long memory(int e) { return R == C ? e : e / R * C + e % R; }
    // The index of the result that is element e of this block in the last pass. The rank of the block is bit CROSS of it.
    __device__ static constexpr int result(int e) { return CLUSTER == 1 ? e : (e & ~(1 << CROSS)) | (e >> CROSS & 1) * NUMBERS; }
};

// Copied: the elements of a warp in the first pass, in memory order. AHEAD: the number of warps whose elements are copied one tile ahead.
template <int CLUSTER_, int VALUES_, int THREADS_, int BLOCKS_, int L_, int P_, int R_, long long C_, int AHEAD_, int CROSS_, bool ADDED_,
          class Places_, class Copied_, class... Passes>
struct RegisterPlan : SmallTile<CLUSTER_, CROSS_, THREADS_ * VALUES_, L_, P_, R_, C_> {
    static constexpr int VALUES = VALUES_, THREADS = THREADS_, BLOCKS = BLOCKS_, AHEAD = AHEAD_;
    static constexpr bool ADDED = ADDED_;
    static constexpr int WEIGHTS = ((Passes::WEIGHTS + ...) + 31) / 32 * 32;
    using Places = Places_;
    using Copied = Copied_;
    using List = Steps4<Passes...>;
    using Start = typename First<Passes...>::type;

    // Call f(number, size) for each factor.
    template <class F>
    __device__ static __forceinline__ void each_factor(const F& f) {
        int n = 0;
        (Passes::each_factor(n, f), ...);
    }
};

// y[r] for J columns from j0 on and F fibers from f0 on: sums of products of v and w. w begins with column j0.
template <int SIZE, int RIGHT, int F, int J, int N>
__device__ __forceinline__ void multiply_some(float (&y)[N], const float (&v)[N], const float* w, int f0, int j0) {
    constexpr int V = J < 4 ? J : 4;
#pragma unroll
    for (int k = 0; k < SIZE; ++k) {
        float c[J];
#pragma unroll
        for (int j = 0; j < J; j += V) load_to<V>(c + j, w + k * SIZE + j);
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

// Multiply by the factors of a pass. The results of the last factor are stored as they are computed, J columns at a time, the half `turn`
// (0 or 1) of the columns first. to(r) is the place of the columns that begin at y[r]; put(place, y, r) stores V neighbours from y[r] on;
// r counts within these columns. The loop is not unrolled, because code that does not fit into the instruction cache is slow.
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

// Store V results from y[r] on, which are elements number + own of the tile. Those from `to.rows` on are beyond the last row.
template <class Plan, int V, typename T, int N>
__device__ __forceinline__ void store_results(const Global4<T>& to, float (&y)[N], int r, int number, int own) {
    if (Plan::L > 1 && number + own >= to.rows) return;
    long long at = to.first + Plan::memory(number) + Plan::memory(own);
    float (&part)[V] = reinterpret_cast<float (&)[V]>(y[r]);
    finish<Plan::ADDED>(part, to.scale, to.bias, to.in_row(at), to.residual, at);
    store_vec_past_l1(to.out + at, pack<T, V>(part));
}

// Load a lane's elements for a pass from shared memory, V at a time, without conversion: element i is Regs::scatter(i) + own. A register
// (U) holds one or two elements.
template <class Places, class Regs, int V, typename T, typename U, int N>
__device__ __forceinline__ void fetch(U (&v)[N], const T* numbers, int own) {
    constexpr int EACH = sizeof(U) / sizeof(T);
    int place = Places::at(own);
#pragma unroll
    for (int i = 0; i < N; i += V / EACH)
        load_to<V / EACH>(v + i, reinterpret_cast<const U*>(numbers + Places::join(place, Places::at(Regs::scatter(i * EACH)))));
}

// The passes from P on, whose elements the thread has in v. `late` is called when the last pass has read its elements.
template <class Plan, typename T, class Late, class Regs, class Threads, int V, int RIGHT, int WITH, int... SIZES, class... Others>
__device__ __forceinline__ void run_passes(float (&v)[Plan::VALUES], float* numbers, const float* w, const Global4<T>& to, const Late& late,
                                           Steps4<Pass<Regs, Threads, V, RIGHT, WITH, SIZES...>, Others...>) {
    using Places = typename Plan::Places;
    int thread = Threads::scatter(threadIdx.x);
    if constexpr (sizeof...(Others) == 0) {
        int rank = Plan::CLUSTER > 1 ? cluster_rank() << Plan::CROSS : 0;
        multiply_pass<V, RIGHT, SIZES...>(
            v, w, 0, [&](int r) { return Plan::result(thread | Regs::scatter(r)) | rank; },
            [&](int number, float (&y)[Plan::VALUES], int r) { store_results<Plan, V>(to, y, r, number, Plan::result(Regs::scatter(r))); });
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
            [&](int place, float (&y)[Plan::VALUES], int r) {
                int own = Places::at(Regs::scatter(r));
                const Vec<float, V>& some = reinterpret_cast<const Vec<float, V>&>(y[r]);
                if constexpr (!CROSS) store_vec(numbers + Places::join(place, own), some);
                else  // joined as an address, because the buffer begins at a multiple of 128 bytes
                    st_cluster((place ^ 4 * (own & 31)) + 4 * (own & ~31), reinterpret_cast<const float4&>(some));
            });
        if constexpr (CROSS) cluster_sync();
        else if constexpr (WITH == 32) __syncwarp();
        else if constexpr (WITH == Plan::THREADS) __syncthreads();
        else barrier_of((Plan::THREADS + threadIdx.x) / WITH, WITH);  // barrier numbers that no other WITH uses
        using Next = typename First<Others...>::type;
        fetch<Places, typename Next::Regs, Next::V>(v, numbers, Next::Threads::scatter(threadIdx.x));
        if constexpr (sizeof...(Others) == 1) late();
        run_passes<Plan>(v, numbers, w + ((SIZES * SIZES) + ...), to, late, Steps4<Others...>());
    }
}

#if __CUDA_ARCH__ >= 900
// kron_linear_v4_tile with a tile in registers. Grid: at most CLUSTER * the number of tiles; block THREADS. Dynamic shared memory: the
// factors, the exchange buffer for a tile, the stage.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_small_factors(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual, long long A, double scale,
                                 long long features) {
    extern __shared__ uint4 dynamic[];
    using Places = typename Plan::Places;
    using Start = typename Plan::Start;
    float *w = reinterpret_cast<float*>(dynamic), *numbers = w + Plan::WEIGHTS;
    long long tiles = (A + Plan::L - 1) / Plan::L * Plan::ACROSS, number = blockIdx.x / Plan::CLUSTER;
    int warp = threadIdx.x / 32, half = Plan::CLUSTER > 1 ? cluster_rank() * Plan::NUMBERS : 0;
    if (number >= tiles) return;  // the grid is planned for the largest number of rows in a bucket
    int stage = warp < Plan::AHEAD ? Plan::NUMBERS : 0;
    int own = Start::Threads::scatter(threadIdx.x & ~31) + Plan::Copied::scatter(threadIdx.x % 32 * 4);
    auto load = [&](long long n) {  // a warp copies its elements of the first pass, with zeros beyond the last row
        if (n < tiles) {
            int place = Places::at(own) + stage;
            const T* from = x + Plan::first(n) + Plan::memory(half + own);
            asm volatile("" : "+l"(from));  // the compiler then addresses the others with constant offsets from it
#pragma unroll
            for (int i = 0; i < Plan::VALUES / 4; ++i) {
                int more = Plan::Copied::scatter(i * 128);
                unsigned at = shared_address(numbers + Places::join(place, Places::at(more)));
                if constexpr (Plan::L == 1) cp_async_16(at, from + Plan::memory(more));
                else cp_async_16(at, from + Plan::memory(more), own + more < Plan::end(n, A));
            }
        }
        cp_async_commit();
    };
    Plan::each_factor([&](int n, int size) { prefetch_factor(factors.at[n], size, size, factors.p[n], factors.q[n]); });
    prefetch_tile<Plan::P / Plan::CLUSTER, Plan::R>(x + Plan::first(number) + Plan::memory(half),
                                                    Plan::end(number, A) / (Plan::P * Plan::R), Plan::C);
    wait_for_previous();
    load(number);
    float* to = w;  // the factors as floats, one after another
    Plan::each_factor([&](int n, int size) {
        for (int i = threadIdx.x; i < size * size; i += Plan::THREADS)
            to[i] = load_as(factors.at[n][i / size * factors.p[n] + i % size * factors.q[n]]);
        to += size * size;
    });
    let_next_come();
    __syncthreads();
    for (; number < tiles; number += gridDim.x / Plan::CLUSTER) {
        long long next = number + gridDim.x / Plan::CLUSTER;
        Global4<T> output = {out, bias, residual, Plan::first(number), features, Plan::end(number, A), float(scale)};
        float v[Plan::VALUES];
        cp_async_wait<0>();
        __syncwarp();
        fetch<Places, typename Start::Regs, Start::V>(v, numbers + stage, Start::Threads::scatter(threadIdx.x));
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

// ------------------------------------------------------------------------------------------------ 16-bit types

// One step. A and B are bits of the register index. Before the step, A is the lowest bit of k and B the highest. After it, A is the lowest
// bit of n and B the highest of j. Ks maps the bits of k to bits of the matrix row, Js those of j to bits of the column. SIZES: the sizes
// of the factors, the rightmost first.
template <int A_, int B_, class Ks_, class Js_, int... SIZES>
struct MmaStep {
    static constexpr int A = 1 << A_, B = 1 << B_, LOW = A < B ? A : B, HIGH = A < B ? B : A, SIDE = (SIZES * ...),
                         COUNT = sizeof...(SIZES);
    using Ks = Ks_;
    using Js = Js_;
    // EXACT: this step can use elements as loaded from memory, with exact products. PIECES: numbers that a factor is split into.
    template <typename T>
    static constexpr bool EXACT = COUNT == 1 || IS_BF16<T>;
    template <typename T, bool FIRST>
    static constexpr int PIECES = COUNT == 1 && (IS_BF16<T> || FIRST) ? 1 : 2;

    // The n-th register index whose bits A and B are 0.
    __device__ static constexpr int without_bits(int n) {
        n = n / LOW * (2 * LOW) + n % LOW;
        return n / HIGH * (2 * HIGH) + n % HIGH;
    }
    // Element [k][j] of the matrix of factors n, n + 1, ...
    template <typename T>
    __device__ static float number(int n, const Factors4<T>& factors, int k, int j) {
        return k / SIDE == j / SIDE ? element(n, factors, k, j, Merged<Factor<SIZES, SIZES>...>()) : 0.0f;
    }
};

constexpr int MMA_VALUES = 32, MMA_PARTS = 2;  // elements per lane at a time, and the number of such parts in a tile
constexpr int MMA_WORDS = 2 * 128;             // registers of the pieces of a matrix, of all lanes

// A pass: the steps between two exchanges. A warp holds a part of a tile at a time. Regs and Lanes map register and lane bits to index bits
// before the steps; RegsAfter (with the register order Order) and LanesAfter do so after them. Parts maps the number of the part to the
// other index bits. V elements are contiguous before the pass, and W (at least 4) after it.
template <int V_, int W_, class Regs_, class Lanes_, class RegsAfter_, class Order_, class LanesAfter_, class Parts_, class... Steps_>
struct MmaPass {
    static constexpr int V = V_, W = W_, WORDS = sizeof...(Steps_) * MMA_WORDS;
    using Regs = Regs_;
    using Lanes = Lanes_;
    using RegsAfter = RegsAfter_;
    using Order = Order_;
    using LanesAfter = LanesAfter_;
    using Parts = Parts_;
    using List = Steps4<Steps_...>;
};

// Write the matrices of the steps, from factor N on, to shared memory as operand a, [step][piece][lane][4]. Different threads write those
// of each step.
template <class Plan, int N, int STEP, typename T, class S, class... Others, class... Passes>
__device__ __forceinline__ void load_mma_matrices(unsigned* to, const Factors4<T>& factors, Steps4<S, Others...>, Passes... more) {
    for (int e = (threadIdx.x + Plan::THREADS - STEP * 128 % Plan::THREADS) % Plan::THREADS; e < 128; e += Plan::THREADS) {
        int j = S::Js::scatter(e / 16 + e % 2 * 8), k = e / 4 % 4 * 2 + e / 2 % 2 * 8;
        float pair[2] = {S::number(N, factors, S::Ks::scatter(k), j), S::number(N, factors, S::Ks::scatter(k + 1), j)};
        if constexpr (S::template PIECES<T, N == 0> == 1) reinterpret_cast<Vec<T, 2>&>(to[e]) = pack<T, 2>(pair);
        else cut_pair(pair[0], pair[1], to[e], to[128 + e]);
    }
    if constexpr (sizeof...(Others)) load_mma_matrices<Plan, N + S::COUNT, STEP + 1>(to + MMA_WORDS, factors, Steps4<Others...>(), more...);
    else if constexpr (sizeof...(Passes)) load_mma_matrices<Plan, N + S::COUNT, STEP + 1>(to + MMA_WORDS, factors, more...);
}

// StagePlaces: the layout of a tile as loaded. Places: the layout of the exchange buffer. Copied: the index bits of a warp's part in the
// first pass.
template <int CLUSTER_, int THREADS_, int BLOCKS_, int L_, int P_, int R_, long long C_, int CROSS_, bool ADDED_, class StagePlaces_,
          class Places_, class Copied_, class Start_, class... Others>
struct MmaPlan : SmallTile<CLUSTER_, CROSS_, THREADS_ * MMA_PARTS * MMA_VALUES, L_, P_, R_, C_> {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, WARPS = THREADS / 32;
    static constexpr bool ADDED = ADDED_, ONE = sizeof...(Others) == 0;  // ONE: no exchange
    static constexpr int WORDS = Start_::WORDS + (0 + ... + Others::WORDS);
    using StagePlaces = StagePlaces_;
    using Places = Places_;
    using Copied = Copied_;
    using Start = Start_;
    using Rest = Steps4<Others...>;

    template <typename T>
    __device__ static void load_matrices(unsigned* to, const Factors4<T>& factors) {
        load_mma_matrices<MmaPlan, 0, 0>(to, factors, typename Start::List(), typename Others::List()...);
    }
};

// Multiply a lane's elements v by the matrices of the steps of a pass. FIRST: the first step of all, whose elements are in x, two per
// register.
template <bool FIRST, typename T, class S, class... Others>
__device__ __forceinline__ void multiply_mma(float (&v)[MMA_VALUES], const unsigned* x, const unsigned* matrices, Steps4<S, Others...>) {
    constexpr bool EXACT = FIRST && S::template EXACT<T>;
    constexpr int PIECES = S::template PIECES<T, FIRST>;
    unsigned w[PIECES][4];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) load_to<4>(w[i], matrices + i * 128 + threadIdx.x % 32 * 4);
    if constexpr (FIRST && !EXACT) unpack(v, reinterpret_cast<const Vec<T, MMA_VALUES>&>(*x));
#pragma unroll
    for (int n = 0; n < MMA_VALUES / 4; ++n) {
        int at = S::without_bits(n);
        unsigned big[2], small[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int one = at + h * S::B, two = one + S::A;
            if constexpr (!EXACT) cut_pair(v[one], v[two], big[h], small[h]);
            else big[h] = S::A == 1 ? x[one / 2] : __byte_perm(x[one / 2], x[two / 2], one % 2 ? 0x7632 : 0x5410);
        }
        float d[4] = {};
        if constexpr (EXACT) {
#pragma unroll
            for (int i = PIECES - 1; i >= 0; --i) mma_16_bit<T>(d, w[i], big);
        } else {
            if constexpr (PIECES > 1) mma_bf16(d, w[PIECES - 1], big);
            mma_bf16(d, w[0], small);
            mma_bf16(d, w[0], big);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) v[at + i % 2 * S::A + i / 2 * S::B] = d[i];
    }
    if constexpr (sizeof...(Others)) multiply_mma<false, T>(v, nullptr, matrices + MMA_WORDS, Steps4<Others...>());
}

// Store the results of a pass to the exchange buffer, or after the last pass to global memory. `full`: after the first pass of a cluster,
// the mbarrier of the block for what the other block sends. Bit CROSS of an element's index says which block gets it. There that bit is
// the rank of the block that sent it.
template <class Plan, class P, bool FIRST, bool LAST, typename T, int N>
__device__ __forceinline__ void put_part(float* numbers, const Global4<T>& to, const float (&v)[N], int part, unsigned full = 0) {
    using Places = typename Plan::Places;
    constexpr bool SENDS = Plan::CLUSTER > 1 && FIRST;
    constexpr int HALF = SENDS ? 1 << Plan::CROSS : 0;
    float y[N];
#pragma unroll
    for (int r = 0; r < N; ++r) y[r] = v[P::Order::scatter(r)];
    int number = part | P::LanesAfter::scatter(threadIdx.x % 32), rank = Plan::CLUSTER > 1 ? cluster_rank() : 0;
    int result = Plan::result(number) | rank << Plan::CROSS, place = Places::at(number | rank * HALF);
    unsigned apart = SENDS ? shared_of_rank(full, rank ^ 1) - full : 0;
#pragma unroll
    for (int r = 0; r < N; r += LAST ? P::W : 4) {
        int own = P::RegsAfter::scatter(r);
        float* at = numbers + Places::join(place, Places::at(own & ~HALF));
        if constexpr (LAST) store_results<Plan, P::W>(to, y, r, result, Plan::result(own));
        else if (!SENDS || (own & HALF) == rank * HALF) store_vec(at, reinterpret_cast<const Vec<float, 4>&>(y[r]));
        else st_async(shared_address(at) + apart, reinterpret_cast<const float4&>(y[r]), full + apart);
    }
}

// All passes except the first, when the exchange buffer is full. `read` is called when the last pass has loaded everything.
template <class Plan, typename T, class Read, class P, class... Others>
__device__ __forceinline__ void run_mma_passes(float* numbers, const unsigned* matrices, const Global4<T>& to, const Read& read,
                                               Steps4<P, Others...>) {
    constexpr bool LAST = sizeof...(Others) == 0;
#pragma unroll 1
    for (int i = 0; i < MMA_PARTS; ++i) {
        int part = P::Parts::scatter(threadIdx.x / 32 * MMA_PARTS + i);
        float v[MMA_VALUES];
        fetch<typename Plan::Places, typename P::Regs, 4>(v, numbers, part | P::Lanes::scatter(threadIdx.x % 32));
        if (LAST && i == MMA_PARTS - 1) read();
        if constexpr (!LAST) __syncwarp();
        multiply_mma<false, T>(v, nullptr, matrices, typename P::List());
        put_part<Plan, P, false, LAST>(numbers, to, v, part);
    }
    if constexpr (!LAST) {
        __syncthreads();
        run_mma_passes<Plan>(numbers, matrices + P::WORDS, to, read, Steps4<Others...>());
    }
}

// Grid: at most CLUSTER * the number of tiles; block THREADS. Dynamic shared memory: exchange buffer, stage of the next tile, matrices, two
// mbarriers.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_small_factors_mma(T* out, const T* x, Factors4<T> factors, const T* bias, const T* residual, long long A, double scale,
                                     long long features) {
    using Start = typename Plan::Start;
    using Stage = typename Plan::StagePlaces;
    extern __shared__ uint4 dynamic[];
    float* numbers = reinterpret_cast<float*>(dynamic);
    T* stage = reinterpret_cast<T*>(numbers + (Plan::ONE ? 0 : Plan::NUMBERS));
    unsigned* matrices = reinterpret_cast<unsigned*>(stage + Plan::NUMBERS);
    constexpr bool CLUSTER = Plan::CLUSTER > 1;
    long long tiles = (A + Plan::L - 1) / Plan::L * Plan::ACROSS, tile = blockIdx.x / Plan::CLUSTER, step = gridDim.x / Plan::CLUSTER;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = CLUSTER ? cluster_rank() : 0, half = rank * Plan::NUMBERS;
    if (tile >= tiles) return;  // the grid is planned for the largest number of rows in a bucket
    auto copy = [&](long long n, int part) {
        if (n < tiles) {
            int own = part | Plan::Copied::scatter(lane * 8), rows_end = Plan::end(n, A), place = Stage::at(own);
            const T* from = x + Plan::first(n) + Plan::memory(half | own);
#pragma unroll
            for (int i = 0; i < MMA_VALUES / 8; ++i) {
                int more = Plan::Copied::scatter(i * 256);
                unsigned at = shared_address(stage + Stage::join(place, Stage::at(more)));
                if constexpr (Plan::L == 1) cp_async_16(at, from + Plan::memory(more));
                else cp_async_16(at, from + Plan::memory(more), own + more < rows_end);
            }
        }
        cp_async_commit();
    };
    auto part_of = [&](int i) { return Start::Parts::scatter(warp * MMA_PARTS + i); };
    // A phase of `all_read` ends when all warps of the cluster have read the exchange buffer, one of `full` when the cluster has filled it.
    unsigned all_read = shared_address(matrices + Plan::WORDS), full = all_read + 8, parity = 0;
    if (!Plan::ONE && threadIdx.x == 0) {
        mbarrier_init(all_read, Plan::CLUSTER * Plan::WARPS);
        if constexpr (CLUSTER) {
            mbarrier_init(full, Plan::WARPS);
            mbarriers_made();
        }
    }
    if constexpr (CLUSTER) cluster_arrive_relaxed();
    prefetch_tile<Plan::P / Plan::CLUSTER, Plan::R>(x + Plan::first(tile) + Plan::memory(half), Plan::end(tile, A) / (Plan::P * Plan::R),
                                                    Plan::C);
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < MMA_PARTS; ++i) copy(tile, part_of(i));
    Plan::load_matrices(matrices, factors);
    let_next_come();
    __syncthreads();
    if constexpr (CLUSTER) cluster_wait();
    for (; tile < tiles; tile += step, parity ^= 1) {
        Global4<T> to = {out, bias, residual, Plan::first(tile), features, Plan::end(tile, A), float(scale)};
#pragma unroll 1
        for (int i = 0; i < MMA_PARTS; ++i) {
            int part = part_of(i);
            unsigned words[MMA_VALUES / 2];
            cp_async_wait<MMA_PARTS - 1>();
            __syncwarp();
            fetch<Stage, typename Start::Regs, Start::V>(words, stage, part | Start::Lanes::scatter(lane));
            __syncwarp();
            copy(tile + step, part);
            float v[MMA_VALUES];
            multiply_mma<true, T>(v, words, matrices, typename Start::List());
            if (CLUSTER && i == 0) mbarrier_wait(all_read, parity ^ 1);
            else if (!Plan::ONE && i == 0) mbarrier_wait_in_block(all_read, parity ^ 1);
            put_part<Plan, Start, true, Plan::ONE>(numbers, to, v, part, full);
        }
        if constexpr (CLUSTER) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(full, Plan::NUMBERS / 2 * 4 / Plan::WARPS);  // the other block sends as much as this one
            mbarrier_wait(full, parity);
        } else if constexpr (!Plan::ONE) {
            __syncthreads();
        }
        if constexpr (!Plan::ONE)
            run_mma_passes<Plan>(
                numbers, matrices + Start::WORDS, to,
                [&] {
                    __syncwarp();
                    if (lane || tile + step >= tiles) return;  // the other block may have ended
                    mbarrier_arrive(all_read);
                    if constexpr (CLUSTER) mbarrier_arrive(shared_of_rank(all_read, rank ^ 1));
                },
                typename Plan::Rest());
    }
}
#endif
