// What the kernels by warpgroups have in common (split.cuh, split_one.cuh, quarter.cuh; sm_90a): numbers, in pieces, in shared
// memory and in registers as wgmma takes them, a product of them, and whose turn it is.
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "split_float.cuh"

// A matrix in shared memory, of each piece one: tiles of 8 x 8 numbers, whose rows of 16 bytes are neighbours, as wgmma takes them.
template <int ROWS_, int COLUMNS_, typename Kind = float>
struct Tiles {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PLANE = ROWS * COLUMNS, COUNT = Pieces<Kind>::COUNT, BYTES = COUNT * PLANE * 2;
    __device__ static constexpr int tile(int row, int column) { return (row / 8 * (COLUMNS / 8) + column / 8) * 64; }
    __device__ static constexpr int place(int row, int column) { return tile(row, column) + row % 8 * 8 + column % 8; }
};

// Where of 16 neighbours number n sits along a dimension that is SEATED: a lane's two pairs of numbers of operand a, or of sums, are four
// neighbours in memory, which takes half the time of two times two. All that meets along it must be seated, and where() is the way back.
__device__ constexpr int seat(int n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }
__device__ constexpr int where(int seat) { return seat / 16 * 16 + seat % 8 / 2 * 4 + seat % 16 / 8 * 2 + seat % 2; }

// Such a matrix as an operand: its columns are k, or (DOWN) its rows.
template <class M, bool DOWN_>
struct Described {
    static constexpr int HELD = 0;  // pieces in registers
    static constexpr bool DOWN = DOWN_;
    static constexpr int STEP = DOWN ? 2 * M::COLUMNS : 16;  // in 16 bytes, from 16 numbers of k to the next
    unsigned long long at;
    // From this row, or column, on.
    template <typename U>
    __device__ __forceinline__ explicit Described(const U* matrix, int from = 0)
        : at(describe(shared_address(matrix + (DOWN ? M::tile(0, from) : M::tile(from, 0))), DOWN ? M::COLUMNS * 16 : 128,
                      DOWN ? 128 : M::COLUMNS * 16)) {}
    __device__ __forceinline__ unsigned long long operator()(int piece, int k) const { return at + piece * (M::PLANE / 8) + k * STEP; }
};

// One piece of a lane's pair e of a warpgroup's 64 rows: see Rows.
template <class M, typename U>
__device__ __forceinline__ void put_word(U* to, int e, unsigned two) {
    reinterpret_cast<unsigned*>(to)[M::tile(threadIdx.x / 32 % 4 * 16 + e % 2 * 8, e / 2 * 8) / 2 + threadIdx.x % 32] = two;
}

// 64 x K numbers of a warpgroup as operand a in registers, in T's pieces. They are where its sums are: lane l of a warp, with g = l / 4 and
// t = l % 4, has of 8 columns from 8 n on [g + 8 i][2 t + j] in numbers[n][2 i + j].
template <int K, typename T = float>
struct Rows {
    static constexpr int HELD = Pieces<T>::COUNT;
    unsigned pieces[HELD][K / 16][4];

    __device__ __forceinline__ void split(const float (&numbers)[K / 8][4]) {
#pragma unroll
        for (int e = 0; e < K / 4; ++e) {
            unsigned two[HELD];
            pieces_of<T>(numbers[e / 2][e % 2 * 2], numbers[e / 2][e % 2 * 2 + 1], two);
#pragma unroll
            for (int i = 0; i < HELD; ++i) pieces[i][e / 4][e % 4] = two[i];
        }
    }
    // To shared memory, 64 rows.
    template <class M>
    __device__ __forceinline__ void put(typename Pieces<T>::type* to) const {
#pragma unroll
        for (int e = 0; e < K / 4; ++e)
#pragma unroll
            for (int i = 0; i < HELD; ++i) put_word<M>(to + i * M::PLANE, e, pieces[i][e / 4][e % 4]);
    }
};

// To the L2 cache, before the kernels before this one have ended: pdl.cuh says why that is not to read it.
template <class M, int THREADS>
__device__ __forceinline__ void factor_ahead(const float* w, long long p, long long q) {
    if (q == 1) Ahead<M::ROWS, M::COLUMNS, THREADS, float>::ahead(w, p);
    else if (p == 1) Ahead<M::COLUMNS, M::ROWS, THREADS, float>::ahead(w, q);
}

// Of rows whose fours are aligned, and whose columns are seated; those from row `rows` on are 0.
template <int N>
__device__ __forceinline__ void fetch_seated(float (&numbers)[N][4], const float* from, long long stride, int rows = 64) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 4;
#pragma unroll
    for (int e = 0; e < N; ++e) {
        Vec<float, 4> four = {};
        if (row + e % 2 * 8 < rows) four = load_vec<float, 4>(from + (row + e % 2 * 8) * stride + column + e / 2 * 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) numbers[e / 2 * 2 + k / 2][e % 2 * 2 + k % 2] = four.v[k];
    }
}

// To shared memory, where Rows put them, of numbers that are not split yet.
template <class M, int N>
__device__ __forceinline__ void put_rows(__nv_bfloat16* to, const float (&numbers)[N][4]) {
#pragma unroll
    for (int e = 0; e < 2 * N; ++e) {
        unsigned two[M::COUNT];
        split_two(numbers[e / 2][e % 2 * 2], numbers[e / 2][e % 2 * 2 + 1], two);
#pragma unroll
        for (int i = 0; i < M::COUNT; ++i) put_word<M>(to + i * M::PLANE, e, two[i]);
    }
}

// d = a b, of K numbers of k, in the background; of one piece only the last product is there.
template <int K, typename T = float, class A, class B, int N>
__device__ __forceinline__ void start_product(float (&d)[N][4], const A& a, const B& b) {
    using U = typename Pieces<T>::type;
    constexpr int COUNT = Pieces<T>::COUNT, FIRST = first_product(COUNT);
    wgmma_fence();
#pragma unroll
    for (int e = 0; e < (PRODUCTS - FIRST) * K / 16; ++e) {
        int k = e % (K / 16), of_a = left_piece(FIRST + e / (K / 16)), of_b = right_piece(FIRST + e / (K / 16));
        if constexpr (A::HELD > 0)
            if (of_a < A::HELD) wgmma<U, B::DOWN>(d, a.pieces[of_a < A::HELD ? of_a : 0][k], b(of_b, k), e > 0);
        if constexpr (A::HELD < COUNT)
            if (of_a >= A::HELD) wgmma<A::DOWN, B::DOWN, U>(d, a(of_a, k), b(of_b, k), e > 0);
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

// The same of seated columns: f(four neighbours, row, column).
template <int N, class F>
__device__ __forceinline__ void each_seated(const float (&d)[N][4], const F& f) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 4;
#pragma unroll
    for (int e = 0; e < N; ++e) {
        const float *low = d[e / 2 * 2] + e % 2 * 2, *high = d[e / 2 * 2 + 1] + e % 2 * 2;
        f(Vec<float, 4>{low[0], low[1], high[0], high[1]}, row + e % 2 * 8, column + e / 2 * 16);
    }
}

// Seated sums, times scale and with bias and residual (which may be null pointers) added, to out[place(row, column)] and the next three;
// nowhere if that is below 0.
template <int N, class F>
__device__ __forceinline__ void store_seated(float* out, const float* bias, const float* residual, const float (&d)[N][4],
                                             long long features, float scale, const F& place) {
    auto store = [&](bool added) {
        each_seated(d, [&](Vec<float, 4> four, int row, int column) {
            long long at = place(row, column);
            if (at < 0) return;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                four.v[e] *= scale;
                if (added && bias) four.v[e] += bias[at % features + e];
                if (added && residual) four.v[e] += residual[at + e];
            }
            store_vec_past_l1(out + at, four);
        });
    };
    if (bias || residual) store(true);
    else store(false);
}

// To the columns from 8 `from` on.
template <int M, int N>
__device__ __forceinline__ void add(float (&sums)[M][4], const float (&d)[N][4], int from = 0) {
#pragma unroll
    for (int e = 0; e < 4 * N; ++e) sums[from + e / 4][e % 4] += d[e / 4][e % 4];
}

// The first team adds the others' sums to its own, each thread those of its like, kept(i) for i < EACH; whether this is the first team.
template <int TEAMS, int THREADS, int EACH, class F>
__device__ __forceinline__ bool add_teams(void* shared, int team, const F& kept) {
    float* others = static_cast<float*>(shared) + threadIdx.x % THREADS;
    __syncthreads();
    if (team)
#pragma unroll
        for (int i = 0; i < EACH; ++i) others[((team - 1) * EACH + i) * THREADS] = kept(i);
    if (TEAMS > 1) __syncthreads();
    if (team) return false;
#pragma unroll
    for (int t = 0; t + 1 < TEAMS; ++t)
#pragma unroll
        for (int i = 0; i < EACH; ++i) kept(i) += others[(t * EACH + i) * THREADS];
    return true;
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

// A lane's four neighbours to a matrix whose columns are seated.
template <class M>
__device__ __forceinline__ void put_four(__nv_bfloat16* to, int row, int column, const Vec<float, 4>& four) {
    unsigned* words = reinterpret_cast<unsigned*>(to + M::place(row, seat(column)));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        unsigned two[M::COUNT];
        split_two(four.v[2 * pair], four.v[2 * pair + 1], two);
#pragma unroll
        for (int piece = 0; piece < M::COUNT; ++piece) words[piece * M::PLANE / 2 + pair * 32] = two[piece];
    }
}

// A matrix on its way from memory to shared memory.
template <class M, int THREADS, typename T = float>
struct Underway {
    static constexpr int WARPS = THREADS / 32;
    Vec<T, 4> part[(M::PLANE / 128 + WARPS - 1) / WARPS];

    __device__ __forceinline__ void fetch(const T* from, long long stride) {
        each_four<M, WARPS>([&](int i, int row, int column) { part[i] = load_vec<T, 4>(from + row * stride + column); });
    }
    // Of any strides.
    __device__ __forceinline__ void fetch_any(const T* from, long long p, long long q) {
        if (q == 1 && p % 4 == 0 && reinterpret_cast<unsigned long long>(from) % (4 * sizeof(T)) == 0) return fetch(from, p);
        each_four<M, WARPS>([&](int i, int row, int column) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[i].v[e] = from[row * p + (column + e) * q];
        });
    }
    // Its columns are seated, and (ROWS) its rows.
    template <bool ROWS = false>
    __device__ __forceinline__ void put(__nv_bfloat16* to) const {
        each_four<M, WARPS>([&](int i, int row, int column) { put_four<M>(to, ROWS ? seat(row) : row, column, part[i]); });
    }
    __device__ __forceinline__ void put_unseated(typename Pieces<T>::type* to) const {
        each_four<M, WARPS>([&](int i, int row, int column) { put_pieces<M::PLANE, M::COUNT>(to + M::place(row, column), part[i]); });
    }
};

// A factor that all lanes need in registers, as it is, in shared memory: a lane's numbers come from eight rows, and eight lines of global
// memory a load took longer. SPACE bytes; of any strides; a barrier must follow.
template <class W>
struct Staged {
    static constexpr int ROW = W::COLUMNS + 4, SPACE = W::ROWS * ROW * 4;  // of different banks
    template <int THREADS>
    __device__ static __forceinline__ void put(float* to, const Underway<W, THREADS>& w) {
        each_four<W, THREADS / 32>([&](int i, int row, int column) { store_vec(to + row * ROW + column, w.part[i]); });
    }
};

// The same by way of shared memory, where a thread takes what it brought itself: no register is held while it comes. `room` is the thread's
// first four numbers, the next ones THREADS fours on.
template <class M, int THREADS, typename T = float>
struct Arriving {
    static constexpr int FOURS = (M::PLANE / 4 + THREADS - 1) / THREADS;
    Vec<T, 4>* room;

    __device__ __forceinline__ void fetch(const T* from, long long stride) const {
        each_four<M, THREADS / 32>(
            [&](int i, int row, int column) { cp_async_16(shared_address(room + i * THREADS), from + row * stride + column); });
        cp_async_commit();
    }
    // Once it has come: MOST are read before one is written, since for all that ptxas knows they might be the same memory.
    template <int MOST = FOURS>
    __device__ __forceinline__ void put(__nv_bfloat16* to) const {
        Vec<T, 4> fours[MOST];
#pragma unroll
        for (int first = 0; first < FOURS; first += MOST) {
            each_four<M, THREADS / 32>([&](int i, int, int) {
                if (i / MOST == first / MOST) fours[i % MOST] = room[i * THREADS];
            });
            each_four<M, THREADS / 32>([&](int i, int row, int column) {
                if (i / MOST == first / MOST) put_four<M>(to, row, column, fours[i % MOST]);
            });
        }
    }
};

// A warp that begins a product waits until tensor cores have taken nearly all of it, and what else it does costs their time unless another
// warpgroup multiplies then: a team's two take turns. What one of them wrote before its turn's end the other sees in its own next turn, but
// what it writes after, only in the one after that. Of a team of one, its warps wait for each other.
template <int GROUPS>
struct Turns {
    int team, group;
    __device__ __forceinline__ void first() const {  // once, before all turns
        if (GROUPS == 2 && group == 1) arrive_at(1, 256);
    }
    __device__ __forceinline__ void begin() const {
        if (GROUPS == 2) barrier_of(1 + group, 256);
    }
    __device__ __forceinline__ void end(bool more) const {
        if (GROUPS == 2 && (group == 0 || more)) arrive_at(2 - group, 256);
    }
    __device__ __forceinline__ void rest() const {  // when all of a tile is done
        if (GROUPS == 1) barrier_of(1 + team, 128);
    }
};
