// kron_linear v4: a tile of the array, from loading it and the factors to storing the results.
//
// Layout     One launch multiplies by a group of neighbouring factors. It is compiled for the sizes of the
//            factors and the tile, so all strides are constants. Factor 0 is the rightmost. For the group the
//            array is [A][P][C] and a tile is [L][P][R]: L of the A if R is C (WHOLE), otherwise one of the A
//            and R of the C, where R divides C.
// Steps      A step sees the tile as [left][P][right] and multiplies along the middle index by the Kronecker
//            product of one or more neighbouring factors. Tiny factors are merged: this costs little more and
//            reads the tile once. The rightmost factor may be divided into SLICES of its columns; then
//            several blocks share a tile and no work is repeated.
// Pipeline   A tile is copied to `stage` asynchronously, in its stored type, while the previous tile is
//            multiplied. If shared memory has no room for two tiles, only the first AHEAD elements are, and
//            the others are copied late, to the place of the results. Results go to `tile`, in the compute
//            type. `tile` has room for one tile: a step keeps its accumulators in registers until every
//            thread has read.
// LOCAL      Each warp writes only where it alone has read. Warps then do not wait for each other, and one
//            loads while another multiplies. With block barriers all would load at the same time, and all
//            would multiply at the same time.
// Swizzle    All accesses are 16 bytes. A Layout puts the 16-byte unit u at u ^ (u >> S & M) ^ (u >> S2 & M2)
//            to avoid bank conflicts. This is linear in the bits of u: if all sizes are powers of two, the
//            offset of a + b is the xor of the offsets of a and b. Otherwise there is no swizzle.
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/async_copy.cuh"
#include "tile_step.cuh"

constexpr int MOST = 8;  // factors in a launch

// The factors of a launch, the rightmost first, with strides: a kernel's argument, by value. Null if there
// are fewer.
template <typename T>
struct Factors4 {
    const T* at[MOST];
    long long p[MOST], q[MOST];  // strides of rows and of columns
};

// Element [k][j] of the Kronecker product of factors n, n + 1, .... Factor n is the rightmost.
template <typename T, class... Factors>
__device__ __forceinline__ compute_t<T> element(int n, const Factors4<T>& factors, int k, int j,
                                                Merged<Factors...>) {
    compute_t<T> value = 1;
    ((value *= load_as(factors.at[n][k % Factors::P * factors.p[n] + j % Factors::Q * factors.q[n]]),
      k /= Factors::P, j /= Factors::Q, ++n),
     ...);
    return value;
}

// The type of a step's matrix in shared memory: that of the factor; for merged factors, and for what tensor
// cores take as floats, the compute type, so that elements are converted once.
template <class Plan, bool FIRST, typename T, class S>
using matrix_t =
    conditional_t<S::COUNT == 1 && (!Plan::TENSOR || (FIRST && in_pairs<S, T, T>())), T, compute_t<T>>;

template <class Plan, bool FIRST, typename T, class S>
__device__ constexpr int matrix_bytes() {
    using M = matrix_t<Plan, FIRST, T, S>;
    return (high<S, FIRST && in_pairs<S, T, M>()>() * S::PADDED * sizeof(M) + 15) / 16 * 16 *
           (Plan::SPLIT ? 2 : 1);
}
template <class Plan, typename T, class S, class... Others>
__device__ constexpr int matrices_bytes(Steps4<S, Others...>) {
    return matrix_bytes<Plan, true, T, S>() + (0 + ... + matrix_bytes<Plan, false, T, Others>());
}

// Copy BYTES bytes to shared memory, asynchronously if there are at least 4, or write zeros there.
template <int BYTES, typename T>
__device__ __forceinline__ void copy_or_zero(T* to, const T* from, bool in) {
    if constexpr (BYTES == 16) cp_async_16(shared_address(to), from, in);
    else if constexpr (BYTES >= 4) cp_async<BYTES>(shared_address(to), from, in);
    else *to = in ? *from : T(0.0f);
}

// Call f(row, column) for ROWS x COLUMNS, by all threads of a block. If possible, the column of a thread does
// not change.
template <int ROWS, int COLUMNS, int THREADS, class F>
__device__ __forceinline__ void share(const F& f) {
    if constexpr (THREADS % COLUMNS == 0) {
#pragma unroll 8
        for (int row = threadIdx.x / COLUMNS; row < ROWS; row += THREADS / COLUMNS)
            f(row, threadIdx.x % COLUMNS);
    } else {
#pragma unroll 8
        for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) f(e / COLUMNS, e % COLUMNS);
    }
}

// Store elements of a step's matrix. The small parts of split numbers are `apart` elements further.
template <class Plan, typename M, int N>
__device__ __forceinline__ void put(M* to, Vec<M, N> numbers, int apart) {
    if constexpr (Plan::SPLIT) {
        Vec<M, N> small;
#pragma unroll
        for (int e = 0; e < N; ++e) split_tf32(numbers.v[e], numbers.v[e], small.v[e]);
        store_vec(to + apart, small);
    } else if constexpr (Plan::IN_TF32 && sizeof(M) == 4) {
#pragma unroll
        for (int e = 0; e < N; ++e) numbers.v[e] = to_tf32(numbers.v[e]);
    }
    store_vec(to, numbers);
}

// Copy COLUMNS columns of a step's matrix from `first` on to shared memory, padded with zeros, 16 bytes at a
// time if they are contiguous.
template <class Plan, class S, int N, int RIGHT, int COLUMNS, typename T>
__device__ __forceinline__ void load_matrix(char* matrix, const Factors4<T>& factors, int first) {
    using M = matrix_t<Plan, N == 0, T, S>;
    M* to = reinterpret_cast<M*>(matrix);
    constexpr bool PAIRS = N == 0 && in_pairs<S, T, M>();
    constexpr int P = S::P, HIGH = high<S, PAIRS>(), K = PAIRS ? 2 : 1, PADDED = S::PADDED,
                  THREADS = Plan::THREADS;
    constexpr int U = gcd(COLUMNS, 16 / sizeof(T)),
                  V = gcd(P, 16 / sizeof(T));  // elements of a row, and of a column, per load
    constexpr bool BY_ROWS = S::COUNT == 1 && U > 1 && (Plan::TENSOR || PADDED % U == 0),
                   BY_COLUMNS = S::COUNT == 1 && V > 1;
    auto place = [](int k, int j) { return place_of<Plan, S, PAIRS, RIGHT>(k, j); };
    auto put_one = [&](int k, int j, M value) {
        put<Plan>(to + place(k, j), Vec<M, 1>{value}, HIGH * PADDED);
    };
    long long p = factors.p[N], q = factors.q[N];
    const T* from = factors.at[N] + first * q;
    bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
    if (BY_ROWS && q == 1 && p % U == 0 && aligned) {
        if constexpr (BY_ROWS && !Plan::ONCE) {
            share<P, COLUMNS / U, THREADS>([&](int k, int i) {
                copy_or_zero<U * sizeof(T)>(to + place(k, i * U),
                                            reinterpret_cast<const M*>(from + k * p + i * U), true);
            });
        } else if constexpr (BY_ROWS) {  // neighbouring lanes store neighbours: all k of one mma
            share<HIGH / (8 * K), COLUMNS / U * 8, THREADS>([&](int block, int i) {
                int k = i % 8 * K, j = i / 8 * U;
                if (HIGH > P && block * (8 * K) + k >= P) return;
                Vec<T, U> rows[K];
#pragma unroll
                for (int r = 0; r < K; ++r)
                    rows[r] = load_vec<T, U>(from + (block * (8 * K) + k + r) * p + j);
#pragma unroll
                for (int u = 0; u < U; u += 2) {
                    Vec<M, 2 * K> numbers;
#pragma unroll
                    for (int e = 0; e < 2 * K; ++e) numbers.v[e] = M(rows[e % K].v[u + e / K]);
                    put<Plan>(to + block * (8 * K * PADDED) + place(k, j + u), numbers, HIGH * PADDED);
                }
            });
        }
    } else if (BY_COLUMNS && p == 1 && q % V == 0 && aligned) {
        if constexpr (BY_COLUMNS)
            share<P / V, COLUMNS, THREADS>([&](int i, int j) {
                Vec<T, V> v = load_vec<T, V>(from + i * V + j * q);
#pragma unroll
                for (int u = 0; u < V; ++u) put_one(i * V + u, j, M(v.v[u]));
            });
    } else {
        share<P, COLUMNS, THREADS>([&](int k, int j) {
            if constexpr (S::COUNT == 1) put_one(k, j, from[k * p + j * q]);
            else put_one(k, j, element(N, factors, k, first + j, typename S::Product()));
        });
    }
    if constexpr (HIGH > P)
        share<HIGH - P, PADDED, THREADS>([&](int k, int j) { put_one(P + k, j, M(0.0f)); });
    if constexpr (PADDED > COLUMNS)
        share<P, PADDED - COLUMNS, THREADS>([&](int k, int j) { put_one(k, COLUMNS + j, M(0.0f)); });
}

// Prefetch the factors of a product, or of all steps, into L2, from factor n on.
template <typename T, class... Factors>
__device__ __forceinline__ void prefetch_factors(int n, const Factors4<T>& factors, Merged<Factors...>) {
    ((prefetch_factor(factors.at[n], Factors::P, Factors::Q, factors.p[n], factors.q[n]), ++n), ...);
}
template <typename T, class... Steps>
__device__ __forceinline__ void prefetch_factors(int n, const Factors4<T>& factors, Steps4<Steps...>) {
    ((prefetch_factors(n, factors, typename Steps::Product()), n += Steps::COUNT), ...);
}

// Copy the matrices of the steps to shared memory, from factor N on.
template <class Plan, int N, int RIGHT, typename T, class S, class... Others>
__device__ __forceinline__ void load_matrices(char* to, const Factors4<T>& factors, int slice,
                                              Steps4<S, Others...>) {
    constexpr int COLUMNS = N == 0 ? Plan::COLUMNS : S::Q;
    load_matrix<Plan, S, N, RIGHT, COLUMNS>(to, factors, N == 0 ? slice * COLUMNS : 0);
    if constexpr (N == 0) cp_async_commit();  // step 0 waits only for its matrix and its tile
    if constexpr (sizeof...(Others))
        load_matrices<Plan, N + S::COUNT, RIGHT * COLUMNS>(to + matrix_bytes<Plan, N == 0, T, S>(), factors,
                                                           slice, Steps4<Others...>());
}

// Copy elements BEGIN to END of a tile asynchronously, with zeros up to the end of a unit.
template <class Plan, int BEGIN, int END, class In, typename T>
__device__ __forceinline__ void load_tile4(T* to, const T* x, int rows) {
    constexpr int W = Plan::BYTES / sizeof(T), UNIT = 16 / sizeof(T),
                  OWN = Plan::LOCAL ? Plan::Rightmost::FETCHED : END - BEGIN;
    int thread = Plan::LOCAL ? threadIdx.x % 32 : threadIdx.x, threads = Plan::LOCAL ? 32 : Plan::THREADS;
    int begin = Plan::LOCAL ? threadIdx.x / 32 * OWN : BEGIN, end = begin + OWN;
    if (Plan::LOCAL && (begin < BEGIN || begin >= END)) return;
    for (int e = begin + thread * W; e < (end + UNIT - 1) / UNIT * UNIT; e += threads * W) {
        const T* from = x + e / Plan::R * Plan::C + e % Plan::R;
        bool in = e < (Plan::WHOLE && rows < Plan::L ? min(rows * (Plan::P * Plan::R), end) : end);
        copy_or_zero<Plan::BYTES>(to + In::at(e), from, in);
    }
}

// Run the steps from S on. The input is at `in`, and from element AHEAD on at `rest`. LEFT and RIGHT are
// those of S. `after` (`late`) is called when the input of the first (last) step has been read.
template <class Plan, bool FIRST, int LEFT, int RIGHT, typename In, typename F, typename T, class After,
          class Late, class S, class... Others>
__device__ __forceinline__ void run4(const In* in, const In* rest, F* tile, const char* matrices,
                                     const Global4<T>& global, const After& after, const Late& late,
                                     Steps4<S, Others...>) {
    constexpr bool LAST = sizeof...(Others) == 0;
    constexpr int Q = FIRST ? Plan::COLUMNS : S::Q, AHEAD = !FIRST       ? 1 << 30
                                                            : Plan::REST ? Plan::AHEAD
                                                                         : LEFT * S::P * RIGHT;
    constexpr bool LOCAL = S::local(LEFT * S::P * RIGHT, RIGHT) && (!FIRST || Plan::LOCAL);
    using Next = typename First<Others..., S>::type;
    using Out = typename Next::In;
    auto have_read = [&] {
        if constexpr (FIRST) after();
        else if constexpr (LAST && Plan::REST) late();
        else if constexpr (LOCAL && (!LAST || S::FETCHED == Plan::Rightmost::FETCHED)) __syncwarp();
        else if constexpr (!LAST || Plan::LOCAL) __syncthreads();
    };
    const auto* w = reinterpret_cast<const matrix_t<Plan, FIRST, T, S>*>(matrices);
    if constexpr (Plan::TENSOR)
        multiply4_tensor<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    else multiply4<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    if constexpr (!LAST) {
        constexpr int NEXT = LEFT / Next::P;
        if constexpr (FIRST && !Plan::LOCAL) cp_async_wait<1>();  // for the matrices of the other steps
        if constexpr (LOCAL && Next::local(NEXT * Next::P * RIGHT * Q, RIGHT * Q) &&
                      Next::FETCHED == S::FETCHED)
            __syncwarp();
        else __syncthreads();
        run4<Plan, false, NEXT, RIGHT * Q>(tile, tile, tile, matrices + matrix_bytes<Plan, FIRST, T, S>(),
                                           global, after, late, Steps4<Others...>());
    }
}
