// Exact float products on tensor cores: a float is split into three bfloat16 numbers (Pieces), once, when it
// is written to shared memory or registers, and a product is 6 products of pieces. For the warpgroup kernels
// (split_wgmma.cuh, few_rows.cuh; sm_90a).
//
// SEATED: a dimension whose elements are permuted by seat() within each 16. A lane's two pairs of elements,
// of operand a or of accumulators, are then four neighbours in global memory. One access of four takes half
// the time of two accesses of two.
#pragma once
#include "common/math.cuh"
#include "common/pdl.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "tile_step.cuh"

// An element of type T in shared memory: COUNT numbers of `type`. A float is x = a + b + c exactly, with 8
// bits each, and all have its sign. With Tf32 it is a + b, 5 bits more than TF32 has.
template <typename T>
struct Pieces {
    using type = T;
    static constexpr int COUNT = 1;
};
template <int COUNT_>
struct SplitPieces {
    using type = __nv_bfloat16;
    static constexpr int COUNT = COUNT_;
};
struct Tf32;
template <>
struct Pieces<float> : SplitPieces<3> {};
template <>
struct Pieces<Tf32> : SplitPieces<2> {};

// Split x. All pieces but the last are finite, and an infinity or NaN goes to the last, so that differences
// do not create a NaN.
template <int COUNT>
__device__ __forceinline__ void split(float x, float (&pieces)[COUNT]) {
    unsigned bits = __float_as_uint(limited(x, 3.40282347e38f));
    float high = __uint_as_float(bits & 0xffff0000), both = __uint_as_float(bits & 0xffffff00);
    pieces[0] = high;
    if (COUNT == 3) pieces[1] = both - high;
    pieces[COUNT - 1] = x - (COUNT == 3 ? both : high);
}

// Split two neighbours, into pairs of pieces.
template <int COUNT>
__device__ __forceinline__ void split_two(float low, float high, unsigned (&pieces)[COUNT]) {
    float a[COUNT], b[COUNT];
    split(low, a);
    split(high, b);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        pieces[i] = __byte_perm(__float_as_uint(a[i]), __float_as_uint(b[i]), 0x7632);
}

// The same for every type of the tensor cores: 16-bit types are rounded.
template <typename T>
__device__ __forceinline__ void pieces_of(float low, float high, unsigned (&pieces)[Pieces<T>::COUNT]) {
    if constexpr (Pieces<T>::COUNT == 1)
        narrow(reinterpret_cast<typename PairOf<T>::type&>(pieces), make_float2(low, high));
    else split_two(low, high, pieces);
}

// The six products of the pieces of two numbers, small products first, because tensor cores truncate when
// they add. The omitted products are below 2^-22. For two pieces they are the last three, for one piece the
// last one.
constexpr int PRODUCTS = 6;
__device__ constexpr int first_product(int pieces) { return pieces == 3 ? 0 : pieces == 2 ? 3 : 5; }
__device__ constexpr int left_piece(int product) { return product == 0 ? 2 : product == 2 || product == 3; }
__device__ constexpr int right_piece(int product) { return product == 1 ? 2 : product == 2 || product == 4; }

// A matrix in shared memory, COUNT times, once for each piece: core matrices of 8 x 8 bfloat16 numbers, with
// contiguous rows of 16 bytes, as wgmma takes them.
template <int ROWS_, int COLUMNS_, typename Kind = float>
struct Tiles {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PLANE = ROWS * COLUMNS,
                         COUNT = Pieces<Kind>::COUNT, BYTES = COUNT * PLANE * 2;
    static constexpr int STAGED_ROW = COLUMNS + 4,
                         STAGED_BYTES = ROWS * STAGED_ROW * 4;  // as floats, padded against bank conflicts
    __device__ static constexpr int tile(int row, int column) {
        return (row / 8 * (COLUMNS / 8) + column / 8) * 64;
    }
    __device__ static constexpr int place(int row, int column) {
        return tile(row, column) + row % 8 * 8 + column % 8;
    }
};

// Prefetch a matrix of M's size into L2, one cache line per thread.
template <class M, int THREADS, typename T>
__device__ __forceinline__ void prefetch_rows(const T* from, long long stride) {
    constexpr int LINE = 128 / sizeof(T) < M::COLUMNS ? 128 / sizeof(T) : M::COLUMNS,
                  LINES = M::COLUMNS / LINE;
    for (int e = threadIdx.x % THREADS; e < M::ROWS * LINES; e += THREADS)
        prefetch(from + e / LINES * stride + e % LINES * LINE);
}

// The seat of element n along a SEATED dimension. All operands that share the dimension must be seated.
// unseat() is the inverse.
__device__ constexpr int seat(int n) { return n / 16 * 16 + n % 4 / 2 * 8 + n % 16 / 4 * 2 + n % 2; }
__device__ constexpr int unseat(int seat) {
    return seat / 16 * 16 + seat % 8 / 2 * 4 + seat % 16 / 8 * 2 + seat % 2;
}

// The descriptor of such a matrix as an operand. Its columns are k, or with DOWN its rows.
template <class M, bool DOWN_>
struct SharedOperand {
    static constexpr int HELD = 0;  // pieces in registers
    static constexpr bool DOWN = DOWN_;
    static constexpr int STEP = DOWN ? 2 * M::COLUMNS : 16;  // distance of 16 k, in units of 16 bytes
    unsigned long long at;
    // `from`: the first row (with DOWN: column).
    template <typename U>
    __device__ __forceinline__ explicit SharedOperand(const U* matrix, int from = 0)
        : at(describe(shared_address(matrix + (DOWN ? M::tile(0, from) : M::tile(from, 0))),
                      DOWN ? M::COLUMNS * 16 : 128, DOWN ? 128 : M::COLUMNS * 16)) {}
    __device__ __forceinline__ unsigned long long operator()(int piece, int k) const {
        return at + piece * (M::PLANE / 8) + k * STEP;
    }
};

// Store one piece of a lane's pair e of a warpgroup's 64 rows; see RegisterOperand.
template <class M, typename U>
__device__ __forceinline__ void put_word(U* to, int e, unsigned two) {
    reinterpret_cast<unsigned*>(
        to)[M::tile(threadIdx.x / 32 % 4 * 16 + e % 2 * 8, e / 2 * 8) / 2 + threadIdx.x % 32] = two;
}

// 64 x K elements of a warpgroup as operand a in registers, split into the pieces of T. They have the layout
// of accumulators: of the 8 columns from 8 n on, lane l of a warp, with g = l / 4 and t = l % 4, has [g + 8
// i][2 t + j] in numbers[n][2 i + j].
template <int K, typename T = float>
struct RegisterOperand {
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
    // Store the 64 rows to shared memory.
    template <class M>
    __device__ __forceinline__ void put(typename Pieces<T>::type* to) const {
#pragma unroll
        for (int e = 0; e < K / 4; ++e)
#pragma unroll
            for (int i = 0; i < HELD; ++i) put_word<M>(to + i * M::PLANE, e, pieces[i][e / 4][e % 4]);
    }
};

// Load 64 rows whose columns are seated, four aligned elements at a time. Rows from `rows` on are zeros.
template <int N>
__device__ __forceinline__ void fetch_seated(float (&numbers)[N][4], const float* from, long long stride,
                                             int rows = 64) {
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 4;
#pragma unroll
    for (int e = 0; e < N; ++e) {
        Vec<float, 4> four = {};
        if (row + e % 2 * 8 < rows)
            four = load_vec<float, 4>(from + (row + e % 2 * 8) * stride + column + e / 2 * 16);
#pragma unroll
        for (int k = 0; k < 4; ++k) numbers[e / 2 * 2 + k / 2][e % 2 * 2 + k % 2] = four.v[k];
    }
}

// Issue d = a b for K values of k, asynchronously. With one piece only the last of the products is computed.
template <int K, typename T = float, class A, class B, int N>
__device__ __forceinline__ void start_product(float (&d)[N][4], const A& a, const B& b) {
    using U = typename Pieces<T>::type;
    constexpr int COUNT = Pieces<T>::COUNT, FIRST = first_product(COUNT);
    wgmma_fence();
#pragma unroll
    for (int e = 0; e < (PRODUCTS - FIRST) * K / 16; ++e) {
        int k = e % (K / 16), of_a = left_piece(FIRST + e / (K / 16)),
            of_b = right_piece(FIRST + e / (K / 16));
        if constexpr (A::HELD > 0)
            if (of_a < A::HELD)
                wgmma<U, B::DOWN>(d, a.pieces[of_a < A::HELD ? of_a : 0][k], b(of_b, k), e > 0);
        if constexpr (A::HELD < COUNT)
            if (of_a >= A::HELD) wgmma<A::DOWN, B::DOWN, U>(d, a(of_a, k), b(of_b, k), e > 0);
    }
    wgmma_commit();
}

// Call f(neighbours, row, column) for a warpgroup's accumulators of 64 rows: two neighbours, or four if the
// columns are SEATED.
template <bool SEATED, int N, class F>
__device__ __forceinline__ void each_part(const float (&d)[N][4], const F& f) {
    constexpr int V = SEATED ? 4 : 2;
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * V;
#pragma unroll
    for (int e = 0; e < 4 * N / V; ++e) {
        Vec<float, V> part;
#pragma unroll
        for (int i = 0; i < V; ++i) part.v[i] = d[e / 2 * (V / 2) + i / 2][e % 2 * 2 + i % 2];
        f(part, row + e % 2 * 8, column + e / 2 * (4 * V));
    }
}

// Store seated accumulators, times scale plus bias and residual (which may be null pointers), to
// out[place(row, column)] and the next three elements. They are not stored if place is negative.
template <int N, class F>
__device__ __forceinline__ void store_seated(float* out, const float* bias, const float* residual,
                                             const float (&d)[N][4], long long features, float scale,
                                             const F& place) {
    auto store = [&](bool added) {
        each_part<true>(d, [&](Vec<float, 4> four, int row, int column) {
            long long at = place(row, column);
            if (at < 0) return;
            if (added) finish<true>(four.v, scale, bias, bias ? at % features : 0, residual, at);
            else finish<false>(four.v, scale, bias, 0, residual, at);
            store_vec_past_l1(out + at, four);
        });
    };
    if (bias || residual) store(true);
    else store(false);
}

// Call f(i, row, column) for each vector i of four neighbours of a lane, of a matrix that WARPS warps share.
// A warp takes 8 rows of 16 columns at a time: it loads whole sectors and stores two whole core matrices.
template <class M, int WARPS, class F>
__device__ __forceinline__ void each_four(const F& f) {
    constexpr int BLOCKS = M::PLANE / 128, ACROSS = M::COLUMNS / 16;
    int warp = threadIdx.x / 32 % WARPS, row = threadIdx.x / 2 % 8,
        column = threadIdx.x % 2 * 4 + threadIdx.x % 32 / 16 * 8;
#pragma unroll
    for (int i = 0; i < (BLOCKS + WARPS - 1) / WARPS; ++i) {
        int block = warp + i * WARPS;
        if (BLOCKS % WARPS == 0 || block < BLOCKS)
            f(i, block / ACROSS * 8 + row, block % ACROSS * 16 + column);
    }
}

// Store a lane's four neighbours of a row. Floats are split. SEATED: the columns are seated.
template <class M, bool SEATED, typename T>
__device__ __forceinline__ void put_four(typename Pieces<T>::type* to, int row, int column,
                                         const Vec<T, 4>& four) {
    to += M::place(row, SEATED ? seat(column) : column);
    if constexpr (sizeof(T) == 2) {
        store_vec(to, four);
    } else {
        unsigned low[M::COUNT], high[M::COUNT];
        split_two(four.v[0], four.v[1], low);
        split_two(four.v[2], four.v[3], high);
#pragma unroll
        for (int piece = 0; piece < M::COUNT; ++piece) {
            unsigned* words = reinterpret_cast<unsigned*>(to + piece * M::PLANE);
            if (SEATED) words[0] = low[piece], words[32] = high[piece];
            else store_vec(words, Vec<unsigned, 2>{low[piece], high[piece]});
        }
    }
}

// A matrix that is loaded to registers, and later split and stored to shared memory.
template <class M, int THREADS, typename T = float>
struct RegisterTile {
    static constexpr int WARPS = THREADS / 32;
    Vec<T, 4> part[(M::PLANE / 128 + WARPS - 1) / WARPS];

    __device__ __forceinline__ void fetch(const T* from, long long stride) {
        each_four<M, WARPS>(
            [&](int i, int row, int column) { part[i] = load_vec<T, 4>(from + row * stride + column); });
    }
    // For any strides.
    __device__ __forceinline__ void fetch_any(const T* from, long long p, long long q) {
        if (q == 1 && p % 4 == 0 && reinterpret_cast<unsigned long long>(from) % (4 * sizeof(T)) == 0)
            return fetch(from, p);
        each_four<M, WARPS>([&](int i, int row, int column) {
#pragma unroll
            for (int e = 0; e < 4; ++e) part[i].v[e] = from[row * p + (column + e) * q];
        });
    }
    // Whether the columns and the rows are seated.
    template <bool COLUMNS = true, bool ROWS = false>
    __device__ __forceinline__ void put(typename Pieces<T>::type* to) const {
        each_four<M, WARPS>([&](int i, int row, int column) {
            put_four<M, COLUMNS>(to, ROWS ? seat(row) : row, column, part[i]);
        });
    }
    // As floats. A factor that all lanes need in registers takes this way, because a warp's loads touch eight
    // rows, and loads from global memory of eight cache lines each were slower.
    __device__ __forceinline__ void stage(float* to) const {
        each_four<M, WARPS>(
            [&](int i, int row, int column) { store_vec(to + row * M::STAGED_ROW + column, part[i]); });
    }
};

// As RegisterTile, but by cp.async to `room` in shared memory, from which a thread reads only what it copied.
// No registers are needed while the copy is in flight. `room` points to the thread's first four elements; the
// next ones are THREADS vectors of four further.
template <class M, int THREADS, typename T = float>
struct AsyncTile {
    static constexpr int FOURS = (M::PLANE / 4 + THREADS - 1) / THREADS;
    Vec<T, 4>* room;

    __device__ __forceinline__ void fetch(const T* from, long long stride) const {
        each_four<M, THREADS / 32>([&](int i, int row, int column) {
            cp_async_16(shared_address(room + i * THREADS), from + row * stride + column);
        });
        cp_async_commit();
    }
    // Split and store, after the copy has completed. All vectors are read before the first is written,
    // because ptxas cannot know that the two regions do not overlap.
    __device__ __forceinline__ void put(__nv_bfloat16* to) const {
        Vec<T, 4> fours[FOURS];
        each_four<M, THREADS / 32>([&](int i, int, int) { fours[i] = room[i * THREADS]; });
        each_four<M, THREADS / 32>(
            [&](int i, int row, int column) { put_four<M, true>(to, row, column, fours[i]); });
    }
};

// Ping-pong: the two warpgroups of a team alternate, because issuing wgmma stalls a warp until the tensor
// cores have taken nearly all of the product. While one warpgroup issues, the other does everything else.
// Writes before the end of a turn are visible to the other warpgroup in its next turn; later writes one turn
// later. In a team of one warpgroup, rest() is a barrier of its warps.
template <int GROUPS>
struct PingPong {
    int team, group;
    __device__ __forceinline__ void first() const {  // once, before the first turn
        if (GROUPS == 2 && group == 1) arrive_at(1, 256);
    }
    __device__ __forceinline__ void begin() const {
        if (GROUPS == 2) barrier_of(1 + group, 256);
    }
    __device__ __forceinline__ void end(bool more) const {
        if (GROUPS == 2 && (group == 0 || more)) arrive_at(2 - group, 256);
    }
    __device__ __forceinline__ void rest() const {  // at the end of a tile
        if (GROUPS == 1) barrier_of(1 + team, 128);
    }
};
