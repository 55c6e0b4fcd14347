// kron_linear v4 for 16-bit types and factors of 2 to 16: tensor cores multiply a tile of 2^n elements that is held in registers.
//
// Layout     As in registers.cuh, all sizes are powers of two, and each bit of an element's index belongs to a factor or to none. A step
//            multiplies along four bits: those of a factor of 16, of smaller neighbouring factors whose product is 16 (merged), or of one
//            smaller factor and bits next to it; the matrix is then block-diagonal.
// Algorithm  The elements are operand b of mma m16n8k16: k is the lane bits t and two register bits, n is the lane bits g. In the result, j
//            is in g and one register bit, and n is in t and the other register bit. The index bits that were in g are then in t, and the
//            next step multiplies along them without moving data. After two steps (three if factors are at most 8) the elements are
//            exchanged as floats through shared memory, so that other index bits are in t and g: once for 8^5.
// Precision  Inputs from memory are exact. Between steps an element is two bfloat16 numbers: the first truncated, the second the rounded
//            rest, together 16 bits. A factor is one number, or two if it is float16 or merged; then a product is three products. Zero
//            times infinity is NaN: a row with infinities, or with a sum beyond the range of float, may have NaN instead.
// Pipeline   A warp copies its own part of the next tile as soon as it has read its part of this one. It waits for other warps twice per
//            tile: before it writes to the exchange buffer, until all have read the previous tile, and before it reads from that buffer.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/wgmma.cuh"
#include "registers.cuh"
#include "split_float.cuh"

#if __CUDA_ARCH__ >= 900

// One step. A and B are bits of the register index. Before the step, A is the lowest bit of k and B the highest. After it, A is the lowest
// bit of n and B the highest of j. Ks maps the bits of k to bits of the matrix row, Js those of j to bits of the column. SIZES: the sizes
// of the factors, the rightmost first.
template <int A_, int B_, class Ks_, class Js_, int... SIZES>
struct LaneStep {
    static constexpr int A = 1 << A_, B = 1 << B_, SIDE = (SIZES * ...), COUNT = sizeof...(SIZES);
    using Ks = Ks_;
    using Js = Js_;
    // EXACT: this step can use elements as loaded from memory, with exact products. PIECES: numbers that a factor is split into. WORDS:
    // their registers.
    template <typename T>
    static constexpr bool EXACT = COUNT == 1 || IS_BF16<T>;
    template <typename T, bool FIRST>
    static constexpr int PIECES = COUNT == 1 && (IS_BF16<T> || (FIRST && EXACT<T>)) ? 1 : 2;
    static constexpr int WORDS = 2 * 128;

    // Element [k][j] of the matrix of factors N, N + 1, ...
    template <typename T>
    __device__ static float number(const Factors4<T>& factors, int N, int k, int j) {
        if (k / SIDE != j / SIDE) return 0.0f;
        float value = 1.0f;
        ((value *= load_as(factors.at[N][k % SIZES * factors.p[N] + j % SIZES * factors.q[N]]), k /= SIZES, j /= SIZES, ++N), ...);
        return value;
    }
};

constexpr int VALUES = 32, LANE_PIECES = 2;  // elements per lane at a time, and the number of such parts in a tile

// A pass: the steps between two exchanges. A warp holds a part of a tile at a time. Regs and Lanes map register and lane bits to index bits
// before the steps; RegsAfter (with the register order Order) and LanesAfter do so after them. Pieces maps the number of the part to the
// other index bits. V elements are contiguous before the pass, and W (at least 4) after it.
template <int V_, int W_, class Regs_, class Lanes_, class RegsAfter_, class Order_, class LanesAfter_, class Pieces_, class... Steps_>
struct LanePass {
    static constexpr int V = V_, W = W_, COUNT = sizeof...(Steps_), WEIGHTS = (Steps_::WORDS + ...), FACTORS = (Steps_::COUNT + ...);
    using Regs = Regs_;
    using Lanes = Lanes_;
    using RegsAfter = RegsAfter_;
    using Order = Order_;
    using LanesAfter = LanesAfter_;
    using Pieces = Pieces_;
    using List = Steps4<Steps_...>;
};

// StagePlaces: the layout of a tile as loaded. Places: the layout of the exchange buffer. Copied: the index bits of a warp's part in the
// first pass.
template <int THREADS_, int BLOCKS_, int L_, int P_, int R_, long long C_, bool ADDED_, class StagePlaces_, class Places_, class Copied_,
          class... Passes>
struct LanePlan {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, P = P_, R = R_, WARPS = THREADS / 32;
    static constexpr long long C = C_;
    static constexpr bool ADDED = ADDED_;
    static constexpr int NUMBERS = THREADS * LANE_PIECES * VALUES, WEIGHTS = (Passes::WEIGHTS + ...);
    static constexpr int EXCHANGED = sizeof...(Passes) > 1 ? NUMBERS : 0;
    using StagePlaces = StagePlaces_;
    using Places = Places_;
    using Copied = Copied_;
    using List = Steps4<Passes...>;
    using Start = typename First<Passes...>::type;
    __device__ static constexpr long long memory(int e) { return R == C ? e : e / R * C + e % R; }
};

// Write the matrices to shared memory as operand a, [step][piece][lane][4], for factors N, N + 1, ... Different threads, from BY on, write
// those of each step.
template <typename T, bool FIRST, int N, int BY, int THREADS, class S>
__device__ __forceinline__ void load_lane_weights(unsigned* to, const Factors4<T>& factors) {
    constexpr bool AS_IS = S::template PIECES<T, FIRST> == 1;
    for (int e = (threadIdx.x + THREADS - BY % THREADS) % THREADS; e < 128; e += THREADS) {
        int j = S::Js::scatter(e / 16 + e % 2 * 8), k = e / 4 % 4 * 2 + e / 2 % 2 * 8;
        float pair[2] = {S::number(factors, N, S::Ks::scatter(k), j), S::number(factors, N, S::Ks::scatter(k + 1), j)};
        if constexpr (AS_IS) {
            Vec<T, 2> both = pack<T, 2>(pair);
            to[e] = reinterpret_cast<unsigned&>(both);
        } else {
            cut_pair(pair[0], pair[1], to[e], to[128 + e]);
        }
    }
}
template <typename T, bool FIRST, int N, int BY, int THREADS, class S, class... Others>
__device__ __forceinline__ void load_lane_weights(unsigned* to, const Factors4<T>& factors, Steps4<S, Others...>) {
    load_lane_weights<T, FIRST, N, BY, THREADS, S>(to, factors);
    if constexpr (sizeof...(Others))
        load_lane_weights<T, false, N + S::COUNT, BY + 128, THREADS>(to + S::WORDS, factors, Steps4<Others...>());
}
template <typename T, bool FIRST, int N, int BY, int THREADS, class P, class... Others>
__device__ __forceinline__ void load_all_lane_weights(unsigned* to, const Factors4<T>& factors, Steps4<P, Others...>) {
    load_lane_weights<T, FIRST, N, BY, THREADS>(to, factors, typename P::List());
    if constexpr (sizeof...(Others))
        load_all_lane_weights<T, false, N + P::FACTORS, BY + 128 * P::COUNT, THREADS>(to + P::WEIGHTS, factors, Steps4<Others...>());
}

template <int PIECES>
__device__ __forceinline__ void fetch_lane_weights(unsigned (&w)[PIECES][4], const unsigned* from) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        reinterpret_cast<uint4&>(w[i]) = *reinterpret_cast<const uint4*>(from + i * 128 + threadIdx.x % 32 * 4);
}

// The n-th register index whose bits A and B are 0.
template <class S>
__device__ constexpr int without_bits(int n) {
    constexpr int LOW = S::A < S::B ? S::A : S::B, HIGH = S::A < S::B ? S::B : S::A;
    n = n / LOW * (2 * LOW) + n % LOW;
    return n / HIGH * (2 * HIGH) + n % HIGH;
}
template <class S, int N>
__device__ __forceinline__ void put_sums(float (&v)[N], int at, const float (&d)[4]) {
    v[at] = d[0];
    v[at + S::A] = d[1];
    v[at + S::B] = d[2];
    v[at + S::A + S::B] = d[3];
}

// A step on elements as loaded from memory, two per register.
template <class S, typename T, int N>
__device__ __forceinline__ void multiply_exact(float (&v)[N], const unsigned (&x)[N / 2], const unsigned* weights) {
    constexpr int PIECES = S::template PIECES<T, true>;
    unsigned w[PIECES][4];
    fetch_lane_weights(w, weights);
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
        int at = without_bits<S>(n);
        unsigned b[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int one = at + h * S::B, two = one + S::A;
            b[h] = S::A == 1 ? x[one / 2] : __byte_perm(x[one / 2], x[two / 2], one % 2 ? 0x7632 : 0x5410);
        }
        float d[4] = {};
#pragma unroll
        for (int i = PIECES - 1; i >= 0; --i) mma_16_bit(d, w[i], b, T());
        put_sums<S>(v, at, d);
    }
}

// The other steps, which split each element into two bfloat16 numbers.
template <class S, typename T, int N>
__device__ __forceinline__ void multiply_cut(float (&v)[N], const unsigned* weights) {
    constexpr int PIECES = S::template PIECES<T, false>;
    unsigned w[PIECES][4];
    fetch_lane_weights(w, weights);
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
        int at = without_bits<S>(n);
        unsigned big[2], small[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) cut_pair(v[at + h * S::B], v[at + h * S::B + S::A], big[h], small[h]);
        float d[4] = {};
        if constexpr (PIECES > 1) mma_bf16(d, w[1], big);
        mma_bf16(d, w[0], small);
        mma_bf16(d, w[0], big);
        put_sums<S>(v, at, d);
    }
}
template <typename T, int N>
__device__ __forceinline__ void multiply_steps(float (&)[N], const unsigned*, Steps4<>) {}
template <typename T, int N, class S, class... Others>
__device__ __forceinline__ void multiply_steps(float (&v)[N], const unsigned* weights, Steps4<S, Others...>) {
    multiply_cut<S, T>(v, weights);
    multiply_steps<T>(v, weights + S::WORDS, Steps4<Others...>());
}
template <typename T, int N, class S, class... Others>
__device__ __forceinline__ void multiply_first(float (&v)[N], const unsigned (&x)[N / 2], const unsigned* weights, Steps4<S, Others...>) {
    if constexpr (S::template EXACT<T>) {
        multiply_exact<S, T>(v, x, weights);
    } else {
#pragma unroll
        for (int r = 0; r < N; r += 2) {
            float2 two = widen(typename PairOf<T>::type(), x[r / 2]);
            v[r] = two.x, v[r + 1] = two.y;
        }
        multiply_cut<S, T>(v, weights);
    }
    multiply_steps<T>(v, weights + S::WORDS, Steps4<Others...>());
}

// The shared-memory offset of a lane's element r, for the part that begins at `piece`.
template <class Places, class Regs>
struct LanePlace {
    int first;
    template <class Lanes>
    __device__ static __forceinline__ LanePlace of(int piece, Lanes) {
        return {Places::at(piece | Lanes::scatter(threadIdx.x % 32))};
    }
    __device__ __forceinline__ int at(int r) const { return Places::join(first, Places::at(Regs::scatter(r))); }
};

// Load a lane's elements from shared memory, V neighbours at a time, without conversion. U holds one or two elements.
template <int V, typename T, typename U, int N, class Place>
__device__ __forceinline__ void fetch_numbers(U (&v)[N], const T* numbers, const Place& place) {
    constexpr int EACH = sizeof(U) / sizeof(T);
#pragma unroll
    for (int i = 0; i < N; i += V / EACH)
        reinterpret_cast<Vec<U, V / EACH>&>(v[i]) = load_vec<U, V / EACH>(reinterpret_cast<const U*>(numbers + place.at(i * EACH)));
}

// Store the results of a pass to the exchange buffer, or to global memory after the last pass.
template <class Plan, class P, bool LAST, typename T, int N>
__device__ __forceinline__ void put_numbers(float* numbers, const Output<T>& to, const float (&v)[N], int piece) {
    float y[N];
#pragma unroll
    for (int r = 0; r < N; ++r) y[r] = v[P::Order::scatter(r)];
    if constexpr (LAST) {
        int number = piece | P::LanesAfter::scatter(threadIdx.x % 32);
#pragma unroll
        for (int r = 0; r < N; r += P::W) store_results<Plan, P::W>(to, y, r, number, P::RegsAfter::scatter(r));
    } else {
        auto place = LanePlace<typename Plan::Places, typename P::RegsAfter>::of(piece, typename P::LanesAfter());
#pragma unroll
        for (int r = 0; r < N; r += 4) store_vec(numbers + place.at(r), reinterpret_cast<const Vec<float, 4>&>(y[r]));
    }
}

// All passes except the first. `read` is called when the last pass has loaded everything.
template <class Plan, typename T, class Read>
__device__ __forceinline__ void run_lane_passes(float*, const unsigned*, const Output<T>&, const Read&, Steps4<>) {}
template <class Plan, typename T, class Read, class P, class... Others>
__device__ __forceinline__ void run_lane_passes(float* numbers, const unsigned* weights, const Output<T>& to, const Read& read,
                                                Steps4<P, Others...>) {
    constexpr bool LAST = sizeof...(Others) == 0;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < LANE_PIECES; ++i) {
        int piece = P::Pieces::scatter(threadIdx.x / 32 * LANE_PIECES + i);
        float v[VALUES];
        fetch_numbers<4>(v, numbers, LanePlace<typename Plan::Places, typename P::Regs>::of(piece, typename P::Lanes()));
        if (LAST && i == LANE_PIECES - 1) read();
        if constexpr (!LAST) __syncwarp();
        multiply_steps<T>(v, weights, typename P::List());
        put_numbers<Plan, P, LAST>(numbers, to, v, piece);
    }
    run_lane_passes<Plan>(numbers, weights + P::WEIGHTS, to, read, Steps4<Others...>());
}
template <class P, class... Others>
__device__ Steps4<Others...> but_the_first(Steps4<P, Others...>);

// kron_linear_v4 for 16-bit types with a tile in registers. Grid: at most the number of tiles; block THREADS. Dynamic shared memory:
// exchange buffer, stage of the next tile, matrices, an mbarrier.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_lanes(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                         const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                         long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                         long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                         long long features) {
    using Start = typename Plan::Start;
    using Stage = typename Plan::StagePlaces;
    using Rest = decltype(but_the_first(typename Plan::List()));
    extern __shared__ uint4 dynamic[];
    float* numbers = reinterpret_cast<float*>(dynamic);
    T* stage = reinterpret_cast<T*>(numbers + Plan::EXCHANGED);
    unsigned* weights = reinterpret_cast<unsigned*>(stage + Plan::NUMBERS);
    Factors4<T> factors = {{w0, w1, w2, w3, w4, w5, w6, w7},
                           {w0_p, w1_p, w2_p, w3_p, w4_p, w5_p, w6_p, w7_p},
                           {w0_q, w1_q, w2_q, w3_q, w4_q, w5_q, w6_q, w7_q}};
    constexpr long long ACROSS = Plan::C / Plan::R;
    constexpr bool ONE = Plan::EXCHANGED == 0;
    long long tiles = (A + Plan::L - 1) / Plan::L * ACROSS, tile = blockIdx.x;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= tiles) return;  // the grid is planned for the largest number of rows in a bucket
    auto first = [&](long long n) { return n / ACROSS * Plan::L * Plan::P * Plan::C + n % ACROSS * Plan::R; };
    auto end = [&](long long n) {
        long long rows = A - n / ACROSS * Plan::L;
        return int(rows < Plan::L ? rows : Plan::L) * Plan::P * Plan::R;
    };
    auto copy = [&](long long n, int piece) {
        if (n < tiles) {
            int own = piece | Plan::Copied::scatter(lane * 8), rows_end = end(n);
            const T* from = x + first(n) + Plan::memory(own);
            int place = Stage::at(own);
#pragma unroll
            for (int i = 0; i < VALUES / 8; ++i) {
                int more = Plan::Copied::scatter(i * 256);
                unsigned at = shared_address(stage + Stage::join(place, Stage::at(more)));
                if constexpr (Plan::L == 1) cp_async_16(at, from + Plan::memory(more));
                else cp_async_16(at, from + Plan::memory(more), own + more < rows_end);
            }
        }
        cp_async_commit();
    };
    auto piece_of = [&](int i) { return Start::Pieces::scatter(warp * LANE_PIECES + i); };
    unsigned all_read = shared_address(weights + Plan::WEIGHTS), parity = 0;
    if (!ONE && threadIdx.x == 0) mbarrier_init(all_read, Plan::WARPS);
    prefetch_tile<Plan::P, Plan::R>(x + first(tile), end(tile) / (Plan::P * Plan::R), Plan::C);
    wait_for_previous();
#pragma unroll 1
    for (int i = 0; i < LANE_PIECES; ++i) copy(tile, piece_of(i));
    load_all_lane_weights<T, true, 0, 0, Plan::THREADS>(weights, factors, typename Plan::List());
    let_next_come();
    __syncthreads();
    for (; tile < tiles; tile += gridDim.x, parity ^= 1) {
        Output<T> to = {out, bias, residual, first(tile), features, end(tile), float(scale)};
#pragma unroll 1
        for (int i = 0; i < LANE_PIECES; ++i) {
            int piece = piece_of(i);
            unsigned words[VALUES / 2];
            cp_async_wait<LANE_PIECES - 1>();
            __syncwarp();
            fetch_numbers<Start::V>(words, stage, LanePlace<Stage, typename Start::Regs>::of(piece, typename Start::Lanes()));
            __syncwarp();
            copy(tile + gridDim.x, piece);
            float v[VALUES];
            multiply_first<T>(v, words, weights, typename Start::List());
            if (!ONE && i == 0) mbarrier_wait_in_block(all_read, parity ^ 1);
            put_numbers<Plan, Start, ONE>(numbers, to, v, piece);
        }
        run_lane_passes<Plan>(
            numbers, weights + Start::WEIGHTS, to,
            [&] {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(all_read);
            },
            Rest());
    }
}
#endif
