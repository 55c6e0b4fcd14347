// The gradient of a factor: partials[piece][k][j] = sum over the fibers of a piece of z[a][k][c] * h[a][j][c]; z is [A][P][C], h is
// [A][Q][C].
//
// Layout     A block computes K x J outputs from chunks of fibers, [L][K][R] and [L][J][R]. A fiber is the elements along k (j) for one a
//            and c. All sizes are allowed: tiles are padded with zeros beyond P and Q, and the last chunk of a row beyond C.
// Algorithm  A chunk is copied asynchronously while the previous one is multiplied. If there are more threads than a K x J tile needs,
//            groups of threads compute the same outputs for different fibers of a chunk, and their sums are added at the end in a fixed
//            order. FMA units: a thread has KW x JW accumulators. Tensor cores (TF32): a warp has them, and a lane has two of each 8 x 8.
// For more than 128 rows or columns torch computes the gradient if it is faster: cukern/ops/kron_linear/cublas.py.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/mma.cuh"
#include "tile.cuh"

template <int THREADS_, int L_, int R_, bool WHOLE_, int BYTES_, bool TENSOR_, int P_, int Q_, int K_, int J_, int KW_, int JW_, class Z_,
          class H_>
struct Gradient4 {
    static constexpr int THREADS = THREADS_, L = L_, R = R_, BYTES = BYTES_, P = P_, Q = Q_, K = K_, J = J_, KW = KW_, JW = JW_;
    static constexpr bool WHOLE = WHOLE_, TENSOR = TENSOR_;
    static constexpr int BLOCKS = THREADS <= 256 ? 2 : 1;  // minimum per SM
    static constexpr int FIBERS = L * R, ACROSS = (K + KW - 1) / KW, DOWN = (J + JW - 1) / JW;
    static constexpr int WORKERS = THREADS / (TENSOR ? 32 : 1), TIMES = WORKERS / (ACROSS * DOWN);
    using Z = Z_;
    using H = H_;
};

// Copy elements k0 to k0 + K (of N) of the fibers of a chunk, with zeros beyond N, beyond `rows` and beyond `columns`.
template <class Plan, class In, int K, int N, typename T>
__device__ __forceinline__ void load_chunk(T* to, const T* from, int k0, int rows, long long columns, long long C) {
    constexpr int W = Plan::BYTES / sizeof(T), R = Plan::R;
    for (int e = threadIdx.x * W; e < Plan::L * K * R; e += Plan::THREADS * W) {
        int l = e / (K * R), k = e / R % K + k0, r = e % R;
        bool in = l < rows && k < N && (Plan::WHOLE || r < columns);
        const T* x = from + (Plan::WHOLE ? (l * N + k) * R + r : k * C + r);
        if constexpr (Plan::BYTES == 16) cp_async_16(shared_address(to + In::at(e)), x, in);
        else if constexpr (Plan::BYTES >= 4) cp_async<Plan::BYTES>(shared_address(to + In::at(e)), x, in);
        else to[In::at(e)] = in ? *x : T(0.0f);
    }
}

template <class Plan, typename T, typename Acc>
__device__ __forceinline__ void contract(Acc (&sums)[Plan::KW][Plan::JW], const T* zs, const T* hs) {
    using Z = typename Plan::Z;
    using H = typename Plan::H;
    constexpr int K = Plan::K, J = Plan::J, KW = Plan::KW, JW = Plan::JW, R = Plan::R, V = 16 / sizeof(Acc);
    constexpr int FV = gcd(R, V), KV = R == 1 ? gcd(gcd(K, KW), V) : 1, JV = R == 1 ? gcd(gcd(J, JW), V) : 1;
    constexpr int HALF = R > 1 && JW % 2 == 0 ? JW / 2 : JW;
    int tj = threadIdx.x % Plan::DOWN, tk = threadIdx.x / Plan::DOWN % Plan::ACROSS, time = threadIdx.x / (Plan::DOWN * Plan::ACROSS);
#pragma unroll(R == 1 ? 2 : 1)
    for (int f = time * FV; f < (time < Plan::TIMES ? Plan::FIBERS : 0); f += Plan::TIMES * FV) {
        int l = f / R, r = f % R;
#pragma unroll
        for (int part = 0; part < JW; part += HALF) {  // in halves if h is loaded as vectors of FV elements: all would not fit in registers
            Acc h[HALF][FV];
#pragma unroll
            for (int j = 0; j < HALF; j += JV) {
                int at = min(((part + j) / JV * Plan::DOWN + tj) * JV, J - JV);
                Vec<T, FV * JV> v = load_vec<T, FV * JV>(hs + H::join(H::at((l * J) * R + r), H::at(at * R)));
#pragma unroll
                for (int e = 0; e < FV * JV; ++e) h[j + e / FV][e % FV] = load_as(v.v[e]);
            }
#pragma unroll
            for (int k = 0; k < KW; k += KV) {
                int at = min((k / KV * Plan::ACROSS + tk) * KV, K - KV);
                Vec<T, FV * KV> v = load_vec<T, FV * KV>(zs + Z::join(Z::at((l * K) * R + r), Z::at(at * R)));
#pragma unroll
                for (int e = 0; e < FV * KV; ++e)
#pragma unroll
                    for (int n = 0; n < HALF; ++n) {
                        int j = (k + e) % 2 ? HALF - 1 - n : n;  // back and forth, as above
                        sums[k + e / FV][part + j] += load_as(v.v[e]) * h[j][e % FV];
                    }
            }
        }
    }
}

// The row of lane g in group `group` of 8 rows of a warp's WIDTH. If fibers are contiguous, a lane has up to 4 neighbouring rows (float).
template <class Plan, typename T, int WIDTH>
__device__ __forceinline__ int row_of(int group, int g) {
    constexpr int N = Plan::R == 1 && sizeof(T) == 4 ? gcd(WIDTH / 8, 4) : 1;
    return group / N * (8 * N) + g * N + group % N;
}

// A lane's fragment of an operand for 8 fibers (16 if neighbouring fibers are contiguous): x[group][i], where i counts fibers t, t + 4, ...
template <class Plan, class In, int WIDTH, int N, typename T, int FIBERS>
__device__ __forceinline__ void fetch_rows(float (&x)[WIDTH / 8][FIBERS], const T* from, int first, int f0) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto number = [](T v) { return sizeof(T) == 4 ? to_tf32(load_as(v)) : load_as(v); };
    if constexpr (Plan::R == 1) {
        constexpr int WIDE = gcd(WIDTH / 8, 4);
#pragma unroll
        for (int group = 0; group < WIDTH / 8; group += WIDE)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Vec<T, WIDE> v =
                    load_vec<T, WIDE>(from + In::join(In::at((f0 + t + 4 * i) * N), In::at(first + row_of<Plan, T, WIDTH>(group, g))));
#pragma unroll
                for (int e = 0; e < WIDE; ++e) x[group + e][i] = number(v.v[e]);
            }
    } else {
        int f = f0 + 4 * t, l = f / Plan::R, r = f % Plan::R;
#pragma unroll
        for (int group = 0; group < WIDTH / 8; ++group) {
            Vec<T, 4> v = load_vec<T, 4>(from + In::join(In::at(l * N * Plan::R + r), In::at((first + group * 8 + g) * Plan::R)));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[group][e] = number(v.v[e]);
        }
    }
}

// The same for 16-bit types and 16 fibers, without conversion, two fibers per register.
template <class Plan, class In, int WIDTH, int N, typename T>
__device__ __forceinline__ void fetch_pairs(unsigned (&x)[WIDTH / 8][2], const T* from, int first, int f0) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (Plan::R == 1) {
        int f = f0 + threadIdx.x % 16, second = threadIdx.x % 32 / 16;  // 8x8: 8 fibers, the next 8 fibers; then the next group
#pragma unroll
        for (int group = 0; group < WIDTH / 8; group += 2) {
            int next = group + 1 < WIDTH / 8 ? second : 0;
            unsigned tiles[4];
            load_tiles<true>(tiles, shared_address(from + In::join(In::at(f * N), In::at(first + 8 * (group + next)))));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (group + i / 2 < WIDTH / 8) x[group + i / 2][i % 2] = tiles[i];
        }
    } else {
        int f = f0 + 4 * t, l = f / Plan::R, r = f % Plan::R;
#pragma unroll
        for (int group = 0; group < WIDTH / 8; ++group) {
            Vec<T, 4> v = load_vec<T, 4>(from + In::join(In::at(l * N * Plan::R + r), In::at((first + group * 8 + g) * Plan::R)));
            x[group][0] = pair_of(v.v[0], v.v[1]);
            x[group][1] = pair_of(v.v[2], v.v[3]);
        }
    }
}

template <class Plan, typename T>
__device__ __forceinline__ void contract_tensor(float (&sums)[(Plan::KW + 15) / 16][Plan::JW / 8][4], const T* zs, const T* hs) {
    constexpr int AT_ONCE = sizeof(T) == 4 && Plan::R == 1 ? 8 : 16, LAST = Plan::KW / 8 - 1;
    int warp = threadIdx.x / 32, j0 = warp % Plan::DOWN * Plan::JW, k0 = warp / Plan::DOWN % Plan::ACROSS * Plan::KW;
    int time = warp / (Plan::DOWN * Plan::ACROSS);
#pragma unroll 2
    for (int f = time * AT_ONCE; f < Plan::FIBERS; f += Plan::TIMES * AT_ONCE) {
        if constexpr (sizeof(T) == 2) {
            unsigned z[Plan::KW / 8][2], h[Plan::JW / 8][2];
            fetch_pairs<Plan, typename Plan::Z, Plan::KW, Plan::K>(z, zs, k0, f);
            fetch_pairs<Plan, typename Plan::H, Plan::JW, Plan::J>(h, hs, j0, f);
#pragma unroll
            for (int m = 0; m < (Plan::KW + 15) / 16; ++m) {
                int high = 2 * m + 1 < LAST ? 2 * m + 1 : LAST;
                unsigned a[4] = {z[2 * m][0], z[high][0], z[2 * m][1], z[high][1]};
#pragma unroll
                for (int n = 0; n < Plan::JW / 8; ++n) mma_16_bit(sums[m][n], a, h[n], T());
            }
        } else {
            float z[Plan::KW / 8][AT_ONCE / 4], h[Plan::JW / 8][AT_ONCE / 4];
            fetch_rows<Plan, typename Plan::Z, Plan::KW, Plan::K>(z, zs, k0, f);
            fetch_rows<Plan, typename Plan::H, Plan::JW, Plan::J>(h, hs, j0, f);
#pragma unroll
            for (int s = 0; s < AT_ONCE / 4; s += 2)
#pragma unroll
                for (int m = 0; m < (Plan::KW + 15) / 16; ++m) {
                    int high = 2 * m + 1 < LAST ? 2 * m + 1 : LAST;
                    float a[4] = {z[2 * m][s], z[high][s], z[2 * m][s + 1], z[high][s + 1]};
#pragma unroll
                    for (int n = 0; n < Plan::JW / 8; ++n) {
                        float b[2] = {h[n][s], h[n][s + 1]};
                        mma_tf32(sums[m][n], a, b);
                    }
                }
        }
    }
}
