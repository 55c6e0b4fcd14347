// y = x (W1 (x) W2 (x) .. (x) Wn), a linear layer whose matrix is a Kronecker product that nobody ever forms.
//
// A row of x is an n-dimensional array of p_1 x .. x p_n numbers, the last index fastest, and factor i multiplies along
// index i: a "mode product". Mode products of different indices commute, so a layer is n of them in any order. Each sees
// the array as [A][p][C]: A is everything before the index (the rows of x too), C everything after it, and a "fiber" is
// the p numbers x[a][.][c], C apart:
//     out[a][j][c] = sum over k of x[a][k][c] * w[k][j].
// No array is ever transposed. 16-bit types are multiplied and added in float.
//
//  version  idea
//  v3       a factor a launch: a GEMM whose rows are fibers, read from and written to their places
//  v4       a group of neighbouring factors a launch: a tile of the array stays in shared memory from the first to the last
//
// What kron_groups.py's model expects of v4, forward, float, on an H200 (nothing of it is measured yet):
//     rows x factors        us  launches         rows x factors        us  launches
//     32 x (128, 128)       14  1, 4 slices      1024 x (64, 64)       30  1, 2 slices
//     1024 x 8^5           128  1                1024 x (128, 128)    194  2 for each 512 rows
//     16 x 8^7             140  2 for 4 rows     4096 x (32, 32)       17  1
//     1024 x 16^4          265  2 for 128 rows   16 x 2^16             13  2
//     1024 x 32^3          166  2 for 256 rows   16 x 64^3             47  2
// It takes no account of the cache between two launches, nor of the loads that run while the stores of the tile before drain.
//
// (v1 and v2 are torch's own operations.) A factor is a view of any strides: its transpose, for the backward, is the
// same memory. With S samples that have a factor each, A is the same for all of them. Offsets are 64-bit.

#include "common/math.cuh"
#include "common/vec.cuh"

constexpr int THREADS = 256;

// Where fiber f begins in an array [A][n][C], for f = a * C + c.
__device__ __forceinline__ long long fiber_offset(long long f, int n, long long C) {
    return C == 1 ? f * n : f / C * n * C + f % C;
}

// y = scale * product + bias + residual, rounded once, at out[i]. bias and residual may be null pointers.
template <typename T>
__device__ __forceinline__ void store_result(T* out, const T* bias, const T* residual, long long i, compute_t<T> sum,
                                             compute_t<T> scale) {
    sum *= scale;
    if (bias) sum += load_as(bias[i]);
    if (residual) sum += load_as(residual[i]);
    out[i] = T(sum);
}

// ------------------------------------------------------------------------------------------------------------ v3
//
// A block computes BN columns j of 4096 / BN fibers, a thread 4 x 4 of them. Neighbouring threads are neighbours in
// memory: along c, or along k and j where C is 1.
template <int BN>
struct Tile3 {
    static constexpr int BM = 4096 / BN, BK = BN < 16 ? 8 : 16, TN = BN / 4, TM = BM / 4;
};

// out [S][A][q][C], x [S][A][p][C], w [S][p][q]. Grid S * ceil(A * C / BM) * ceil(q / BN), block 256.
template <typename T, int BN>
__global__ void __launch_bounds__(THREADS)
kron_linear_v3(T* out, const T* x, const T* w, const T* bias, const T* residual, long long A, int p, int q, long long C,
               long long w_s, long long w_p, long long w_q, double scale, long long features) {
    using S = Tile3<BN>;
    using F = compute_t<T>;
    __shared__ F xs[S::BK][S::BM + 1], ws[S::BK][BN + 1];
    __shared__ long long places[S::BM];
    long long fibers = A * C, tiles_m = (fibers + S::BM - 1) / S::BM, block = blockIdx.x;
    int tiles_n = (q + BN - 1) / BN, n0 = block % tiles_n * BN;
    long long m0 = block / tiles_n % tiles_m * S::BM, sample = block / tiles_n / tiles_m;
    x += sample * fibers * p;
    w += sample * w_s;
    bool along_k = C == 1;
    int t = threadIdx.x, tn = along_k ? t % S::TN : t / S::TM, tm = along_k ? t / S::TN : t % S::TM;
    for (int i = t; i < S::BM; i += THREADS) places[i] = m0 + i < fibers ? fiber_offset(m0 + i, p, C) : -1;
    __syncthreads();

    F sums[4][4] = {};
    for (int k0 = 0; k0 < p; k0 += S::BK) {
        for (int e = t; e < S::BM * S::BK; e += THREADS) {
            int m = along_k ? e / S::BK : e % S::BM, k = along_k ? e % S::BK : e / S::BM;
            bool in = places[m] >= 0 && k0 + k < p;
            xs[k][m] = in ? load_as(x[places[m] + (k0 + k) * C]) : F(0);
        }
        for (int e = t; e < BN * S::BK; e += THREADS) {
            int n = e % BN, k = e / BN;
            bool in = n0 + n < q && k0 + k < p;
            ws[k][n] = in ? load_as(w[(k0 + k) * w_p + (n0 + n) * w_q]) : F(0);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < S::BK; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += xs[k][tm + S::TM * i] * ws[k][tn + S::TN * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        long long f = m0 + tm + S::TM * i;
        if (f >= fibers) continue;
        long long first = sample * fibers * q + fiber_offset(f, q, C);
        const T* b = bias ? bias + first % features : nullptr;  // bias has `features` elements, one for each output of a row
        const T* r = residual ? residual + first : nullptr;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = n0 + tn + S::TN * j;
            if (n < q) store_result(out + first, b, r, n * C, sums[i][j], F(scale));
        }
    }
}

// The gradient of a factor: partials[sample][piece][k][j] = sum over the piece's fibers of x[a][k][c] * g[a][j][c],
// where g is [S][A][q][C]. The block of a piece computes BT x BT of them; (BT / 4)^2 threads, of 4 x 4 each, go over
// every GROUPS-th fiber of a chunk, and the groups' sums are added at the end, always in the same order.
// Acc is compute_t<T>. Grid S * pieces * ceil(p / BT) * ceil(q / BT), block 256.
template <typename T, typename Acc, int BT>
__global__ void __launch_bounds__(THREADS, 1)
kron_linear_v3_bwd(Acc* partials, const T* x, const T* g, long long A, int p, int q, long long C, long long pieces,
                   long long piece) {
    constexpr int SIDE = BT / 4, GROUP = SIDE * SIDE, GROUPS = THREADS / GROUP, CHUNK = GROUPS < 16 ? 16 : GROUPS;
    constexpr int LD = BT + 1, TILES = 2 * CHUNK * LD, SUMS = GROUPS > 1 ? THREADS * 16 : 0;
    __shared__ Acc shared[TILES > SUMS ? TILES : SUMS];
    __shared__ long long x_places[CHUNK], g_places[CHUNK];
    Acc *xs = shared, *gs = shared + CHUNK * LD;
    int tiles_p = (p + BT - 1) / BT, tiles_q = (q + BT - 1) / BT;
    long long block = blockIdx.x, fibers = A * C;
    int j0 = block % tiles_q * BT, k0 = block / tiles_q % tiles_p * BT;
    long long number = block / tiles_q / tiles_p % pieces, sample = block / tiles_q / tiles_p / pieces;
    long long begin = number * piece, end = begin + piece < fibers ? begin + piece : fibers;
    x += sample * fibers * p;
    g += sample * fibers * q;
    int t = threadIdx.x, group = t / GROUP, tk = t % GROUP / SIDE, tj = t % SIDE;

    Acc sums[4][4] = {};
    for (long long f0 = begin; f0 < end; f0 += CHUNK) {
        for (int i = t; i < CHUNK; i += THREADS) {
            bool in = f0 + i < end;
            x_places[i] = in ? fiber_offset(f0 + i, p, C) : -1;
            g_places[i] = in ? fiber_offset(f0 + i, q, C) : -1;
        }
        __syncthreads();
        for (int e = t; e < CHUNK * BT; e += THREADS) {
            int i = C == 1 ? e / BT : e % CHUNK, n = C == 1 ? e % BT : e / CHUNK;
            bool in = x_places[i] >= 0;
            xs[i * LD + n] = in && k0 + n < p ? load_as(x[x_places[i] + (k0 + n) * C]) : Acc(0);
            gs[i * LD + n] = in && j0 + n < q ? load_as(g[g_places[i] + (j0 + n) * C]) : Acc(0);
        }
        __syncthreads();
#pragma unroll 2
        for (int i = group; i < CHUNK; i += GROUPS)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[k][j] += xs[i * LD + tk + SIDE * k] * gs[i * LD + tj + SIDE * j];
        __syncthreads();
    }
    partials += (sample * pieces + number) * p * q;
    if (GROUPS > 1) {
#pragma unroll
        for (int e = 0; e < 16; ++e) shared[group * BT * BT + (tk + SIDE * (e / 4)) * BT + tj + SIDE * (e % 4)] = sums[e / 4][e % 4];
        __syncthreads();
        for (int e = t; e < BT * BT; e += THREADS) {
            Acc sum = 0;
            for (int i = 0; i < GROUPS; ++i) sum += shared[i * BT * BT + e];
            int k = k0 + e / BT, j = j0 + e % BT;
            if (k < p && j < q) partials[(long long)k * q + j] = sum;
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 16; ++e) {
        int k = k0 + tk + SIDE * (e / 4), j = j0 + tj + SIDE * (e % 4);
        if (k < p && j < q) partials[(long long)k * q + j] = sums[e / 4][e % 4];
    }
}

// out[sample][i] = scale * sum over the pieces of partials[sample][piece][i], i < n, always in the same order.
// Grid S * ceil(n / 32), block (32, 8).
template <typename T, typename Acc>
__global__ void kron_linear_v3_sum(T* out, const Acc* partials, int n, long long pieces, double scale) {
    __shared__ Acc sums[8][32];
    int tiles = (n + 31) / 32, i = blockIdx.x % tiles * 32 + threadIdx.x;
    long long sample = blockIdx.x / tiles;
    Acc sum = 0;
    if (i < n)
        for (long long piece = threadIdx.y; piece < pieces; piece += 8) sum += partials[(sample * pieces + piece) * n + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || i >= n) return;
#pragma unroll
    for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
    out[sample * n + i] = T(sum * Acc(scale));
}

// ------------------------------------------------------------------------------------------------------------ v4
//
// Up to MOST factors that are neighbours, from the right to the left: factor 0 is the rightmost. For them the array is
// [A][P][C], P = p_0 * p_1 * .., and a tile [L][P][R]: L of the A where C is 1, else one of the A and R, a power of two, of
// the C. A block keeps the factors, and tile after tile, in shared memory. The tile's input and output lie in one place:
// a step holds all of its sums in registers until every thread has read. The rightmost factor may be cut into `slices` of
// its columns, so that several blocks share the work of a tile and none does any of it twice.
//
// A step sees the tile as [left][p][right], and number [l][k][r] lies at l * pitch + k * stride + r. Where a dimension is
// shorter than a warp, its distance is an odd multiple of what a warp's other lanes cover, so that the lanes, which read
// fibers that are neighbours and write them where the next step wants them, meet 32 different banks.
//
// Wavefronts of shared memory and FMA instructions of a warp, for each k of a step: FIBERS + COLUMNS / 4 and FIBERS *
// COLUMNS; 4 warps multiply at once, one is served by shared memory, so 8 x 8 needs 40 wavefronts in 64 cycles.
constexpr int MOST = 8;
constexpr int MOST_THREADS4 = 512;

// Division of numbers below 2^16 by one of them that is not known at compile time: a multiplication.
struct Divisor {
    int by;
    unsigned reciprocal;  // 2^32 / by, rounded up; 0 for 1

    __device__ __forceinline__ void set(int d) {
        by = d;
        reciprocal = d > 1 ? 0xffffffffu / d + 1 : 0;
    }
    __device__ __forceinline__ int divide(int n) const { return reciprocal ? __umulhi(n, reciprocal) : n; }
};

struct Step {
    Divisor p, right;
    int q, padded, config, stride, pitch, place;  // padded: q, rounded up to a thread's columns; place: of the factor
};

// Where the outputs of a tile go.
template <typename T>
struct Target {
    T* out;
    const T *bias, *residual;
    long long first, row_stride, column_stride, C, features;
    int bits, rows, valid_c, slice, all;  // R is 1 << bits; of the rightmost factor's columns: the slice's first, all
    Divisor columns;                      // of the rightmost factor in the slice
    compute_t<T> scale;

    // Number r of a row: [columns of the steps before, those of the rightmost only in the slice][R].
    __device__ __forceinline__ long long place(int l, int r) const {
        int rest = r >> bits, others = columns.divide(rest);
        return first + l * row_stride + ((long long)others * (all - columns.by) + slice + rest) * C + (r & ((1 << bits) - 1));
    }
    __device__ __forceinline__ bool holds(int l, int r) const { return l < rows && (r & ((1 << bits) - 1)) < valid_c; }
};

// One step: FIBERS x COLUMNS sums a thread. A warp has 32 * FIBERS fibers and COLUMNS columns.
template <typename T, int FIBERS, int COLUMNS>
__device__ __forceinline__ void multiply4(compute_t<T>* tile, const compute_t<T>* w, const Step& s, const Step& next,
                                          bool last, int fibers, const Target<T>& target) {
    using F = compute_t<T>;
    constexpr int V = COLUMNS * sizeof(F) < 16 ? COLUMNS : 16 / sizeof(F);
    int groups = s.padded / COLUMNS, warp = threadIdx.x / 32, right = s.right.by;
    int j0 = warp % groups * COLUMNS, f0 = warp / groups * (32 * FIBERS) + threadIdx.x % 32;
    int from[FIBERS];
#pragma unroll
    for (int i = 0; i < FIBERS; ++i) {
        int f = min(f0 + 32 * i, fibers - 1), l = s.right.divide(f);  // without work: reads somebody's fiber, writes nothing
        from[i] = l * s.pitch + f - l * right;
    }
    F sums[FIBERS][COLUMNS] = {};
    w += j0;
#pragma unroll 2
    for (int k = 0; k < s.p.by; ++k) {
        F x[FIBERS], c[COLUMNS];
#pragma unroll
        for (int i = 0; i < FIBERS; ++i) x[i] = tile[from[i] + k * s.stride];
#pragma unroll
        for (int j = 0; j < COLUMNS; j += V) {
            Vec<F, V> v = load_vec<F, V>(w + k * s.padded + j);
#pragma unroll
            for (int e = 0; e < V; ++e) c[j + e] = v.v[e];
        }
#pragma unroll
        for (int i = 0; i < FIBERS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) sums[i][j] += x[i] * c[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < FIBERS; ++i) {
        int f = f0 + 32 * i, l = s.right.divide(f), r = f - l * right;
        if (f >= fibers) continue;
        if (last) {
            if (!target.holds(l, r)) continue;
            long long at = target.place(l, r) + j0 * target.column_stride;
            const T* bias = target.bias ? target.bias + at % target.features : nullptr;
            const T* residual = target.residual ? target.residual + at : nullptr;
            T* out = target.out + at;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (j0 + j < s.q) store_result(out, bias, residual, j * target.column_stride, sums[i][j], target.scale);
        } else {
            int block = next.p.divide(l);
            F* to = tile + block * next.pitch + (l - block * next.p.by) * next.stride + r;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j)
                if (j0 + j < s.q) to[(j0 + j) * right] = sums[i][j];
        }
    }
    __syncthreads();
}

// Copy a factor, q columns from the first at w, to shared memory, with zeros up to `padded`.
template <typename T>
__device__ __forceinline__ void load_factor(compute_t<T>* to, const T* w, int p, int q, int padded, long long w_p, long long w_q) {
    for (int e = threadIdx.x; e < p * padded; e += blockDim.x) {
        int k = e / padded, j = e % padded;
        to[e] = j < q ? load_as(w[k * w_p + j * w_q]) : compute_t<T>(0);
    }
}

// Copy a tile of `total` numbers as step 0 lays it out: pieces of `piece` numbers, `pitch` apart. x has its [R] at a distance
// C; from number `inside` on, and from valid_c in each R, are zeros. A batch of loads is under way before any is stored.
template <typename T>
__device__ __forceinline__ void load_tile4(compute_t<T>* tile, const T* x, int total, int inside, int R, int valid_c,
                                           long long C, int piece, int pitch) {
    constexpr int BATCH = 8;
    int threads = blockDim.x, i = threadIdx.x, l = i / piece, rest = i % piece, dl = threads / piece, dr = threads % piece;
    int bits = 31 - __clz(R);
    while (i < total) {
        T batch[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            int e = i + b * threads, r = e & (R - 1);
            batch[b] = e < inside && r < valid_c ? x[(long long)(e >> bits) * C + r] : T(0.0f);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (i < total) tile[l * pitch + rest] = load_as(batch[b]);
            i += threads;
            l += dl;
            rest += dr;
            if (rest >= piece) {
                rest -= piece;
                ++l;
            }
        }
    }
}

// A thread's fibers, if floats would have n: doubles take twice the registers.
template <typename F>
__device__ constexpr int many(int n) {
    return sizeof(F) == 8 ? n / 2 : n;
}

// wN: factor N, with the distances wN_p and wN_q between its rows and columns. sN: p + (q << 16) + (padded << 32) +
// (config << 48); padded is that of a slice for factor 0, which has `columns` of the q. Grid slices * (the tiles, or
// fewer), block 32 * the warps of the step that has most; dynamic shared memory: the factors, then the tile, as large as any
// step sees it.
template <typename T>
__global__ void __launch_bounds__(sizeof(T) == 8 ? MOST_THREADS4 / 2 : MOST_THREADS4, 1)
kron_linear_v4(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
               const T* w7, const T* bias, const T* residual, long long A, long long C, int count, int L, int R,
               int slices, int columns, long long s0, long long s1, long long s2, long long s3, long long s4, long long s5,
               long long s6, long long s7, long long w0_p, long long w0_q, long long w1_p, long long w1_q,
               long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
               long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
               long long features) {
    using F = compute_t<T>;
    extern __shared__ double dynamic[];
    __shared__ Step steps[MOST + 1];
    F* shared = reinterpret_cast<F*>(dynamic);
    const T* const ws[MOST] = {w0, w1, w2, w3, w4, w5, w6, w7};
    const long long sizes[MOST] = {s0, s1, s2, s3, s4, s5, s6, s7};
    const long long ps[MOST] = {w0_p, w1_p, w2_p, w3_p, w4_p, w5_p, w6_p, w7_p};
    const long long qs[MOST] = {w0_q, w1_q, w2_q, w3_q, w4_q, w5_q, w6_q, w7_q};
    int slice = blockIdx.x % slices * columns, all = s0 >> 16 & 0xffff, P = 1, place = 0, right = R, stride = R;
    long long before = C, Q = C;  // outputs of all factors but the last, of all
#pragma unroll
    for (int n = 0; n < MOST; ++n) {  // unrolled, so that the parameters need not be an array in memory
        if (n >= count) break;
        int p = sizes[n] & 0xffff, q = sizes[n] >> 16 & 0xffff, padded = sizes[n] >> 32 & 0xffff;
        P *= p;
        before = Q;
        Q *= q;
        if (n == 0) q = min(columns, all - slice);
        load_factor(shared + place, ws[n] + (n == 0 ? slice * w0_q : 0), p, q, padded, ps[n], qs[n]);
        if (threadIdx.x == 0) {
            int pitch = (p * stride + right - 1) / right;  // in units of `right`
            if (right < 32) pitch |= 1;
            steps[n].p.set(p);
            steps[n].right.set(right);
            steps[n].q = q;
            steps[n].padded = padded;
            steps[n].config = int(sizes[n] >> 48);
            steps[n].stride = stride;
            steps[n].pitch = right < 32 ? pitch * right : p * stride;
            steps[n].place = place;
        }
        place += (p * padded + 3) / 4 * 4;
        stride = right * (right < 32 ? q | 1 : q);
        right *= q;
    }
    __syncthreads();
    F* tile = shared + place;
    int bits = 31 - __clz(R);
    long long across = (C + R - 1) / R, tiles = (A + L - 1) / L * across, step = gridDim.x / slices;
    for (long long number = blockIdx.x / slices; number < tiles; number += step) {
        long long a = number / across * L, c = number % across * R;
        int rows = int(A - a < L ? A - a : L), valid_c = int(C - c < R ? C - c : R);
        load_tile4(tile, x + a * P * C + c, L * P * R, rows * P * R, R, valid_c, C, steps[0].p.by * R, steps[0].pitch);
        __syncthreads();
        Target<T> target = {out, bias, residual, a * Q + c, Q, before, C, features, bits, rows, valid_c, slice, all, {}, F(scale)};
        target.columns.set(steps[0].q);
        int numbers = L * P * R;
        for (int n = 0; n < count; ++n) {
            const Step &s = steps[n], &next = steps[n + 1];
            int fibers = numbers / s.p.by;
            bool last = n == count - 1;
            const F* w = shared + s.place;
            switch (s.config) {
                case 0: multiply4<T, many<F>(8), 8>(tile, w, s, next, last, fibers, target); break;
                case 1: multiply4<T, many<F>(4), 16>(tile, w, s, next, last, fibers, target); break;
                case 2: multiply4<T, many<F>(4), 8>(tile, w, s, next, last, fibers, target); break;
                case 3: multiply4<T, many<F>(4), 4>(tile, w, s, next, last, fibers, target); break;
                case 4: multiply4<T, 1, 8>(tile, w, s, next, last, fibers, target); break;
                default: multiply4<T, many<F>(8), 2>(tile, w, s, next, last, fibers, target);
            }
            numbers = fibers * s.q;
        }
    }
}

// Copy numbers first, first + 1, .. of a chunk of fibers, `count` long, to shared memory, with zeros beyond.
template <typename T, int BT, int CHUNK, int LD>
__device__ __forceinline__ void load_fibers(compute_t<T>* to, const T* x, const long long* places, int first, int count,
                                            long long C) {
    constexpr int COUNT = CHUNK * BT / THREADS;
    bool along = C == 1;  // neighbouring threads take neighbours in memory: along the fiber, or across the fibers
    int i = along ? threadIdx.x / BT : threadIdx.x % CHUNK, di = along ? THREADS / BT : 0;
    int m = along ? threadIdx.x % BT : threadIdx.x / CHUNK, dm = along ? 0 : THREADS / CHUNK;
    T values[COUNT];  // all on their way before one is stored
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        long long place = places[i + n * di];
        int number = first + m + n * dm;
        values[n] = place >= 0 && number < count ? x[place + number * C] : T(0.0f);
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) to[(i + n * di) * LD + m + n * dm] = load_as(values[n]);
}

// The gradient of a factor as in kron_linear_v3_bwd, of 64 x 64 numbers a block; 64 threads, of 8 x 8 each, go over every
// fourth fiber of a chunk. For each fiber a warp fetches 4 x 16 bytes a lane in 4 wavefronts, for 64 FMA instructions.
// Not for doubles, whose sums do not fit in registers. Acc is compute_t<T>. Grid S * pieces * ceil(p / 64) * ceil(q / 64), block 256.
template <typename T, typename Acc>
__global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 1000 ? 2 : 1)
kron_linear_v4_bwd(Acc* partials, const T* x, const T* g, long long A, int p, int q, long long C, long long pieces,
                   long long piece) {
    constexpr int BT = 64, GROUPS = 4, CHUNK = 32, LD = BT + 4, V = 16 / sizeof(Acc);
    __shared__ alignas(16) Acc xs[2 * CHUNK * LD];  // at the end the block's sums, BT x (BT + 1)
    Acc* gs = xs + CHUNK * LD;
    __shared__ long long x_places[CHUNK], g_places[CHUNK];
    int tiles_p = (p + BT - 1) / BT, tiles_q = (q + BT - 1) / BT;
    long long block = blockIdx.x, fibers = A * C;
    int j0 = block % tiles_q * BT, k0 = block / tiles_q % tiles_p * BT;
    long long number = block / tiles_q / tiles_p % pieces, sample = block / tiles_q / tiles_p / pieces;
    long long begin = number * piece, end = begin + piece < fibers ? begin + piece : fibers;
    x += sample * fibers * p;
    g += sample * fibers * q;
    int t = threadIdx.x, group = t / 64, tk = t % 64 / 8, tj = t % 8;

    Acc sums[8][8] = {};
    for (long long f0 = begin; f0 < end; f0 += CHUNK) {
        if (t < CHUNK) {
            bool in = f0 + t < end;
            x_places[t] = in ? fiber_offset(f0 + t, p, C) : -1;
            g_places[t] = in ? fiber_offset(f0 + t, q, C) : -1;
        }
        __syncthreads();
        load_fibers<T, BT, CHUNK, LD>(xs, x, x_places, k0, p, C);
        load_fibers<T, BT, CHUNK, LD>(gs, g, g_places, j0, q, C);
        __syncthreads();
#pragma unroll 1
        for (int i = group; i < CHUNK; i += GROUPS) {
            Acc a[8], b[8];  // of k = tk * V + {0 .. V-1} + 8 V * {0, ..}, so that a warp's lanes read 16 bytes side by side
#pragma unroll
            for (int n = 0; n < 8; n += V) {
                Vec<Acc, V> va = load_vec<Acc, V>(xs + i * LD + tk * V + n * 8), vb = load_vec<Acc, V>(gs + i * LD + tj * V + n * 8);
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    a[n + v] = va.v[v];
                    b[n + v] = vb.v[v];
                }
            }
#pragma unroll
            for (int k = 0; k < 8; ++k)
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[k][j] += a[k] * b[j];
        }
        __syncthreads();
    }
    // The groups add theirs to the block's, one after another.
#pragma unroll 1
    for (int turn = 0; turn < GROUPS; ++turn) {
        if (group == turn)
#pragma unroll
            for (int k = 0; k < 8; ++k)
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    Acc& sum = xs[(tk * V + k / V * 8 * V + k % V) * (BT + 1) + tj * V + j / V * 8 * V + j % V];
                    sum = turn ? sum + sums[k][j] : sums[k][j];
                }
        __syncthreads();
    }
    partials += (sample * pieces + number) * p * q;
    for (int e = t; e < BT * BT; e += THREADS) {
        int k = k0 + e / BT, j = j0 + e % BT;
        if (k < p && j < q) partials[(long long)k * q + j] = xs[e / BT * (BT + 1) + e % BT];
    }
}
