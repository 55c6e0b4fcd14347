// C = A . B (+ bias): a ladder from one thread an output to cuBLAS's speed, on the plain FMA units.
//
// C is (M x N), row-major and contiguous; A is (M x K), B is (K x N), bias is (N) or a null pointer. A and B are
// views: a_m is the distance in elements between A's rows, a_k between its columns, and so on, so that a transposed
// matrix needs no copy. T is float or double; float means float: no TF32. K = 0 gives zeros (plus bias).
//
//  version  idea                                                           TFLOP/s (float, 4096^3, one H200; cuBLAS 51)
//  v1       one thread an output; neighbours in a warp compute different rows                                      0.5
//  v2       neighbours in a warp are neighbours in a row of C, so loads coalesce                                   5.4
//  v3       32x32 tiles of A and B go through shared memory: each is read 32 times less                            6.5
//  v4       8x8 outputs a thread: a value read from shared memory serves 8 FMAs                                   32
//  v5       8x16 outputs a thread; cp.async fills a ring of tiles in the background; registers placed for the
//           two register banks; the last, partly filled wave of tiles is shared out evenly (stream-K); a long
//           sum is cut into chains, for its error's sake. sm_80                                                    52
//
// Every grid is 1-D (y and z stop at 65535 blocks). Offsets are 64-bit: a matrix may have more than 2^31 elements.

#include "common/ptx/async_copy.cuh"
#include "common/vec.cuh"

template <typename T>
__device__ __forceinline__ T bias_or_zero(const T* bias, int n) {
    return bias ? bias[n] : T(0);
}

// v1: grid ceil(M * N / 256), block 256.
template <typename T>
__global__ void matmul_v1(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m, long long a_k, long long b_k,
                          long long b_n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)M * N) return;
    int m = i % M, n = i / M;  // a warp's 32 threads write 32 rows: 32 separate pieces of memory
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + bias_or_zero(bias, n);
}

// v2: grid ceil(M / 16) * ceil(N / 16), block (16, 16).
template <typename T>
__global__ void matmul_v2(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m, long long a_k, long long b_k,
                          long long b_n) {
    int tiles_n = (N + 15) / 16;
    int m = blockIdx.x / tiles_n * 16 + threadIdx.y;
    int n = blockIdx.x % tiles_n * 16 + threadIdx.x;  // x is the fastest index in a warp, and n in a row of C
    if (m >= M || n >= N) return;
    T sum = 0;
    for (int k = 0; k < K; ++k) sum += a[m * a_m + k * a_k] * b[k * b_k + n * b_n];
    out[m * (long long)N + n] = sum + bias_or_zero(bias, n);
}

// v3: grid ceil(M / 32) * ceil(N / 32), block (32, 32).
template <typename T>
__global__ void __launch_bounds__(1024) matmul_v3(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long a_m,
                                                  long long a_k, long long b_k, long long b_n) {
    __shared__ T as[32][33], bs[32][33];  // as[m][k], bs[k][n]; the 33rd column keeps a column's words in 32 banks
    int tiles_n = (N + 31) / 32;
    int m0 = blockIdx.x / tiles_n * 32, n0 = blockIdx.x % tiles_n * 32;
    int x = threadIdx.x, y = threadIdx.y;
    // A warp is one y and 32 values of x: x must run along whichever dimension is contiguous in memory.
    int am = a_k == 1 ? y : x, ak = a_k == 1 ? x : y;
    int bk = b_n == 1 ? y : x, bn = b_n == 1 ? x : y;
    T sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        bool in_a = m0 + am < M && k0 + ak < K, in_b = k0 + bk < K && n0 + bn < N;
        as[am][ak] = in_a ? a[(m0 + am) * a_m + (k0 + ak) * a_k] : T(0);
        bs[bk][bn] = in_b ? b[(k0 + bk) * b_k + (n0 + bn) * b_n] : T(0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 32; ++k) sum += as[y][k] * bs[k][x];
        __syncthreads();  // nobody may overwrite the tiles while somebody still reads them
    }
    int m = m0 + y, n = n0 + x;
    if (m < M && n < N) out[m * (long long)N + n] = sum + bias_or_zero(bias, n);
}

// 16 bytes: the widest load and store there is. 4 floats or 2 doubles.
template <typename T>
constexpr int WIDE = 16 / sizeof(T);
template <typename T>
using Vec16 = Vec<T, WIDE<T>>;

// Read COUNT vectors, `stride` elements apart, into consecutive registers.
template <typename T, int COUNT>
__device__ __forceinline__ void load_fragment(T* fragment, const T* shared, int stride) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        Vec16<T> x = load_vec<T, WIDE<T>>(shared + i * stride);
#pragma unroll
        for (int j = 0; j < WIDE<T>; ++j) fragment[i * WIDE<T> + j] = x.v[j];
    }
}

// v4 copies 128 rows (of m or n) x 8 k of an operand into tile[k][row]. `ld` is the stride that is not 1.
// `ALONG_K`: the operand is contiguous along k, so neighbouring threads read neighbouring k.
template <typename T, bool ALONG_K>
__device__ __forceinline__ void load_tile_v4(T (*tile)[132], const T* x, int row0, int rows, int k0, int K, long long ld) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int e = threadIdx.x + i * 256;
        int r = ALONG_K ? e / 8 : e % 128, k = ALONG_K ? e % 8 : e / 128;
        bool in = row0 + r < rows && k0 + k < K;
        tile[k][r] = in ? (ALONG_K ? x[(row0 + r) * ld + k0 + k] : x[(k0 + k) * ld + row0 + r]) : T(0);
    }
}

// v4: A_K: A is contiguous along k (else along m); B_N: B is contiguous along n (else along k). lda and ldb are the
// other stride of each. Grid ceil(M / 128) * ceil(N / 128), block 256.
template <typename T, bool A_K, bool B_N>
__global__ void __launch_bounds__(256)
    matmul_v4(T* out, const T* a, const T* b, const T* bias, int M, int N, int K, long long lda, long long ldb) {
    __shared__ alignas(16) T as[8][132], bs[8][132];  // 132: the transposing stores then hit 32 different banks
    constexpr int V = WIDE<T>;
    int tiles_n = (N + 127) / 128;
    int m0 = blockIdx.x / tiles_n * 128, n0 = blockIdx.x % tiles_n * 128;
    // The thread's rows are ty * V + {0..V-1} + 16 V * {0, 1, ..}: in pieces, so that a warp's loads stay contiguous.
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    T acc[8][8] = {}, column[8], row[8];
    for (int k0 = 0; k0 < K; k0 += 8) {
        load_tile_v4<T, A_K>(as, a, m0, M, k0, K, lda);
        load_tile_v4<T, !B_N>(bs, b, n0, N, k0, K, ldb);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            load_fragment<T, 8 / V>(column, &as[k][ty * V], 16 * V);
            load_fragment<T, 8 / V>(row, &bs[k][tx * V], 16 * V);
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) acc[i][j] += column[i] * row[j];  // 64 FMAs for 16 values read
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            int m = m0 + ty * V + i / V * 16 * V + i % V, n = n0 + tx * V + j / V * 16 * V + j % V;
            if (m < M && n < N) out[m * (long long)N + n] = acc[i][j] + bias_or_zero(bias, n);
        }
}

// Column sums of x (M x N): out[chunk][n] = the sum of x[m][n] over the chunk's rows. Launched twice for the bias
// gradient: once over dY into a (chunks x N) workspace, once over that with a single chunk. Always the same order
// of additions, so always the same bits. Grid ceil(N / 32) * ceil(M / rows_per_chunk), block (32, 8).
template <typename T>
__global__ void matmul_bias_grad(T* out, const T* x, int M, int N, int rows_per_chunk, long long x_m, long long x_n) {
    __shared__ T sums[8][32];
    int tiles_n = (N + 31) / 32;
    int chunk = blockIdx.x / tiles_n, n = blockIdx.x % tiles_n * 32 + threadIdx.x;
    long long first = (long long)chunk * rows_per_chunk;
    int end = first + rows_per_chunk < M ? int(first + rows_per_chunk) : M;
    T sum = 0;
    if (n < N)
        for (int m = int(first) + threadIdx.y; m < end; m += 8) sum += x[m * x_m + n * x_n];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && n < N) {
#pragma unroll
        for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
        out[chunk * (long long)N + n] = sum;
    }
}

// ------------------------------------------------------------------------------------------------------------ v5
//
// Which tile of C is best depends on the shape; ops/matmul_plan.py chooses. WARPS_M x WARPS_N warps compute a tile, a
// warp is 8 x 4 threads, a thread computes TM x TN outputs. For double only Tile64x64 and the two narrow ones fit.
template <int TM_, int TN_, int WARPS_M, int WARPS_N_, int BLOCKS_PER_SM>
struct Tile {
    static constexpr int TM = TM_, TN = TN_, WARPS_N = WARPS_N_, BLOCKS = BLOCKS_PER_SM;
    static constexpr int BM = 8 * TM * WARPS_M, BN = 4 * TN * WARPS_N;
};
using Tile128x128 = Tile<8, 16, 2, 2, 2>;
using Tile64x64 = Tile<4, 8, 2, 2, 4>;
using Tile128x32 = Tile<4, 8, 4, 1, 4>;
using Tile32x128 = Tile<4, 8, 1, 4, 4>;
constexpr int THREADS = 128;
constexpr int BK = 8;    // k's in a tile of shared memory. With 16 the unrolled loop outgrows the instruction cache
constexpr int BAND = 8;  // see tile_origin

// How an operand is copied to shared memory. "mn" is m for A and n for B.
constexpr int ALONG_K = 0;       // contiguous along k: element by element, transposed on the way
constexpr int ALONG_MN = 1;      // contiguous along mn: element by element
constexpr int ALONG_MN_16B = 2;  // contiguous along mn: 16 bytes at a time. Base, ld and extent must be multiples of 16

// One thread's share of copying an operand's tiles to shared memory as [k][mn], tile after tile along k.
template <typename T, int COPY, int EXTENT>
struct TileCopy {
    static constexpr int WIDTH = COPY == ALONG_MN_16B ? WIDE<T> : 1;
    // ALONG_K, 8 neighbouring threads take 8 k's, a 32-byte sector of floats, and a warp takes 4 rows. In shared memory
    // rows are 4 elements longer than needed: then bank(k, mn) = 4 k + mn, and the warp's 32 words hit 32 banks.
    static constexpr int LD = EXTENT + (COPY == ALONG_K ? 4 : 0);
    static constexpr int LANES = COPY == ALONG_K ? 8 : EXTENT / WIDTH;
    static constexpr int STEP = THREADS / LANES;  // a thread's copies are this far apart in the other dimension
    static constexpr int COUNT = ((COPY == ALONG_K ? EXTENT : BK) + STEP - 1) / STEP;
    static constexpr int BYTES = BK * LD * sizeof(T);
    static constexpr int OUTSIDE = 0x7ffffff0;  // a k that no matrix has

    const char* source;      // this thread's first element of the next tile
    unsigned offset[COUNT];  // from there to its others, in bytes
    unsigned target;         // where the first goes in stage 0 of the ring
    int k;                   // its k in the tile
    long long advance;       // bytes from one tile to the next

    __device__ __forceinline__ TileCopy(const T* x, long long ld, int mn0, int extent, int k0, unsigned ring) {
        int fast = threadIdx.x % LANES, slow = threadIdx.x / LANES;
        int last = extent - mn0 - WIDTH;  // the last place in the tile that is inside the matrix
        unsigned pitch = ld * sizeof(T);
        k = COPY == ALONG_K ? fast : slow;
        int mn = COPY == ALONG_K ? slow : fast * WIDTH;
        target = ring + (k * LD + mn) * sizeof(T);
        int inside = min(mn, last);
        const T* first = COPY == ALONG_K ? x + (mn0 + inside) * ld + k0 + k : x + (k0 + k) * ld + mn0 + inside;
        source = reinterpret_cast<const char*>(first);
        advance = BK * sizeof(T) * (COPY == ALONG_K ? 1 : ld);
        // Past the matrix's edge copy its last row again, which takes no test in the loop: nobody stores the results.
#pragma unroll
        for (int i = 0; i < COUNT; ++i) offset[i] = (COPY == ALONG_K ? min(mn + i * STEP, last) - inside : i * STEP) * pitch;
        if (mn > last) k = OUTSIDE;  // nothing inside at all: zeros. (Lanes that copy one address take turns: slow.)
    }

    // Start copying the next tile into the ring at byte `stage`. From its k_left-th k on it is filled with zeros.
    __device__ __forceinline__ void start(unsigned stage, int k_left) {
        if (COPY != ALONG_K && LANES * BK < THREADS && threadIdx.x >= LANES * BK) return;  // a narrow tile
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            unsigned step = COPY == ALONG_K ? i * STEP : i * STEP * LD;
            bool valid = (COPY == ALONG_K ? k : k + i * STEP) < k_left;
            cp_async<WIDTH * sizeof(T)>(target + stage + step * sizeof(T), source + offset[i], valid);
        }
        source += advance;
    }
};

// Where a thread's outputs lie in the tile: rows m + row(i), columns n + column(j). 16 bytes go together and the next
// 16 lie 8 or 4 threads further, so that a warp's loads from shared memory are contiguous. The hardware serves a
// 16-byte load a half-warp at a time if lanes i and i ^ 1, or i and i ^ 2, want the same address: hence bit 0 of the
// lane goes to m and bit 1 to n, and a load takes two steps, not four.
template <typename T, typename S>
struct Place {
    static constexpr int V = WIDE<T>;
    int m, n;
    __device__ __forceinline__ Place() {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int lane_m = (lane & 1) | (lane >> 1 & 6), lane_n = (lane >> 1 & 1) | (lane >> 3 & 2);
        m = warp / S::WARPS_N * 8 * S::TM + lane_m * V;
        n = warp % S::WARPS_N * 4 * S::TN + lane_n * V;
    }
    __device__ __forceinline__ static int row(int i) { return i / V * 8 * V + i % V; }
    __device__ __forceinline__ static int column(int j) { return j / V * 4 * V + j % V; }
};

// The tile of C with number t: BAND tiles down, then one to the right, and so on, so that the tiles under way at one
// time form a compact patch of C and find their rows of A and columns of B in the L2 cache.
template <typename S>
__device__ __forceinline__ void tile_origin(int t, int M, int N, int& m0, int& n0) {
    int tiles_m = (M + S::BM - 1) / S::BM, tiles_n = (N + S::BN - 1) / S::BN;
    int band = t / (BAND * tiles_n), in_band = t % (BAND * tiles_n);
    int height = min(BAND, tiles_m - band * BAND);
    m0 = (band * BAND + in_band % height) * S::BM;
    n0 = in_band / height * S::BN;
}

// acc += column . row, down one column of acc and up the next, so that one operand always stays and can be read from
// the FMA unit's operand cache. See get_vector for the other half of the trick.
template <typename T, int TM, int TN>
__device__ __forceinline__ void outer_product(T (&acc)[TM][TN], const T* column, const T* row) {
#pragma unroll
    for (int j = 0; j < TN; ++j)
#pragma unroll
        for (int s = 0; s < TM; ++s) {
            int i = j % 2 ? TM - 1 - s : s;
            acc[i][j] += column[i] * row[j];
        }
}

// Vector number q of a thread's sums: 4 rows of one column, in the order 1 0 3 2, for the sake of the loop in
// `multiply`: the compiler keeps in consecutive registers there what is stored as one vector. column[0..3] are
// consecutive too, so acc[i][j] and column[i] then have one odd and one even number. The register file has two banks,
// odd and even, which deliver one value each a cycle: an FMA that wants two from one bank waits. (8 % faster than 0 1 2 3.)
template <typename T, int TM, int TN>
__device__ __forceinline__ Vec16<T> get_vector(const T (&acc)[TM][TN], int q) {
    constexpr int V = WIDE<T>;
    Vec16<T> x;
#pragma unroll
    for (int v = 0; v < V; ++v) x.v[v] = acc[q / TN * V + (v ^ 1)][q % TN];
    return x;
}

template <typename T, int TM, int TN>
__device__ __forceinline__ void set_vector(T (&acc)[TM][TN], int q, Vec16<T> x) {
    constexpr int V = WIDE<T>;
#pragma unroll
    for (int v = 0; v < V; ++v) acc[q / TN * V + (v ^ 1)][q % TN] = x.v[v];
}

template <typename T>
__device__ __forceinline__ Vec16<T> sum_of(Vec16<T> a, Vec16<T> b) {
#pragma unroll
    for (int v = 0; v < WIDE<T>; ++v) a.v[v] += b.v[v];
    return a;
}

// Add a thread's sums to those in the workspace, or put them there first. They go through `scratch`, in shared memory:
// an addition to `acc` itself would free the compiler from what get_vector says of registers (4 % slower).
template <typename T, int TM, int TN>
__device__ __forceinline__ void add_to(T* sums, T* scratch, const T (&acc)[TM][TN], bool first) {
    constexpr int NEXT = WIDE<T> * THREADS, COUNT = TM * TN / WIDE<T>;
    constexpr int AHEAD = COUNT / 4;  // loads under way at one time: all would not find registers
#pragma unroll
    for (int q = 0; q < COUNT; q += AHEAD) {
        Vec16<T> earlier[AHEAD] = {};
        if (!first) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) earlier[i] = load_vec<T, WIDE<T>>(sums + (q + i) * NEXT);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i += 2) {
            store_vec(scratch, get_vector(acc, q + i));
            store_vec(scratch + NEXT, get_vector(acc, q + i + 1));
            asm volatile("" ::: "memory");  // or the compiler would take the values from acc
            store_vec(sums + (q + i) * NEXT, sum_of<T>(earlier[i], load_vec<T, WIDE<T>>(scratch)));
            store_vec(sums + (q + i + 1) * NEXT, sum_of<T>(earlier[i + 1], load_vec<T, WIDE<T>>(scratch + NEXT)));
        }
    }
}

// acc = the product over `tiles` tiles of BK k's, where only k_left k's are left. `as`, `bs`: this thread's first
// values in stage 0 of the ring. While the tile in one stage is used, those of the next STAGES - 1 are on their way,
// and while the FMAs of one k run, the fragments of the next are read from shared memory. After `chain` tiles the sums
// are added to `sums`, this thread's place in the workspace, and start again from zero: the error of one chain of
// additions grows with its length, that of several short ones with its root.
template <int STAGES, typename T, int TM, int TN, typename CopyA, typename CopyB>
__device__ __forceinline__ void multiply(T (&acc)[TM][TN], T* sums, CopyA& copy_a, CopyB& copy_b, const T* as, const T* bs, T* ring,
                                         int tiles, int k_left, int chain) {
    constexpr int V = WIDE<T>, STAGE_BYTES = CopyA::BYTES + CopyB::BYTES, STAGE = STAGE_BYTES / sizeof(T);
    T column[2][TM], row[2][TN];
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        copy_a.start(s * STAGE_BYTES, k_left);
        copy_b.start(s * STAGE_BYTES, k_left);
        cp_async_commit();
        k_left -= BK;
    }
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load_fragment<T, TM / V>(column[0], as, 8 * V);
    load_fragment<T, TN / V>(row[0], bs, 4 * V);
    int use = 0, fill = STAGES - 1;
    for (int t = 0, end; t < tiles; t = end) {
        end = min(tiles, t + chain);
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = 0;
        for (int i = t; i < end; ++i) {
#pragma unroll
            for (int k = 0; k < BK; ++k) {
                if (k == BK - 1) {  // the next fragment is in the next tile: wait for it
                    cp_async_wait<STAGES - 2>();
                    __syncthreads();
                    use = use + 1 == STAGES ? 0 : use + 1;
                }
                load_fragment<T, TM / V>(column[(k + 1) % 2], as + use * STAGE + (k + 1) % BK * CopyA::LD, 8 * V);
                load_fragment<T, TN / V>(row[(k + 1) % 2], bs + use * STAGE + (k + 1) % BK * CopyB::LD, 4 * V);
                // The stage that all threads left at the last barrier is free. Past the end it gets zeros, never used.
                // The two copies are apart so as not to queue up.
                if (k == 1) copy_a.start(fill * STAGE_BYTES, k_left);
                if (k == 4) {
                    copy_b.start(fill * STAGE_BYTES, k_left);
                    cp_async_commit();
                    k_left -= BK;
                    fill = fill + 1 == STAGES ? 0 : fill + 1;
                }
                outer_product(acc, column[k % 2], row[k % 2]);
            }
        }
        if (tiles > chain) {
            add_to(sums, ring + fill * STAGE + threadIdx.x * V, acc, t == 0);
            __syncthreads();  // that stage is filled next
        }
    }
    if (tiles > chain) {
#pragma unroll
        for (int q = 0; q < TM * TN / V; ++q) set_vector(acc, q, load_vec<T, V>(sums + q * THREADS * V));
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring is free again
}

// Whether rows of C, and bias, are whole vectors of 16 bytes.
template <typename T>
__device__ __forceinline__ bool rows_are_vectors(const T* out, const T* bias, int N) {
    unsigned long long addresses = reinterpret_cast<unsigned long long>(out) | reinterpret_cast<unsigned long long>(bias);
    return N % WIDE<T> == 0 && addresses % 16 == 0;
}

// A thread's outputs, plus bias, to C. (m0, n0): the tile's origin.
template <typename T, typename S>
struct Store {
    using P = Place<T, S>;
    static constexpr int V = P::V, ROWS = S::BM / S::TM * V;
    static constexpr int LD = S::BN + 32 / sizeof(T);  // 8 lanes that store together then meet 32 different banks
    static constexpr int BYTES = ROWS * LD * sizeof(T);

    __device__ __forceinline__ static Vec16<T> vector(const T (&acc)[S::TM][S::TN], int i, int j) {
        Vec16<T> x;
#pragma unroll
        for (int v = 0; v < V; ++v) x.v[v] = acc[i][j + v];
        return x;
    }

    // From the registers, where C's rows are vectors.
    __device__ __forceinline__ static void directly(T* out, const T* bias, const T (&acc)[S::TM][S::TN], const P& place, int m0, int n0,
                                                    int M, int N) {
#pragma unroll
        for (int j = 0; j < S::TN; j += V) {
            int n = n0 + place.n + P::column(j);
            if (n >= N) continue;
            Vec16<T> b = {};
            if (bias) b = load_vec<T, V>(bias + n);
#pragma unroll
            for (int i = 0; i < S::TM; ++i) {
                int m = m0 + place.m + P::row(i);
                Vec16<T> x = vector(acc, i, j);
#pragma unroll
                for (int v = 0; v < V; ++v) x.v[v] += b.v[v];
                if (m < M) store_vec(out + m * (long long)N + n, x);
            }
        }
    }

    // Through shared memory, V rows of each thread at a time: from there a warp stores 32 neighbouring elements of a row,
    // whatever the alignment of the rows.
    __device__ __forceinline__ static void staged(T* out, const T* bias, const T (&acc)[S::TM][S::TN], T* stage, const P& place, int m0,
                                                  int n0, int M, int N) {
        int row = place.m / (8 * S::TM) * 8 * V + place.m % (8 * S::TM) / V, n = threadIdx.x % S::BN;
        T b = n0 + n < N ? bias_or_zero(bias, n0 + n) : T(0);
#pragma unroll
        for (int g = 0; g < S::TM; g += V) {
#pragma unroll
            for (int v = 0; v < V; ++v)
#pragma unroll
                for (int j = 0; j < S::TN; j += V) store_vec(stage + (row + v * 8) * LD + place.n + P::column(j), vector(acc, g + v, j));
            __syncthreads();
#pragma unroll 4
            for (int r = threadIdx.x / S::BN; r < ROWS; r += THREADS / S::BN) {
                int m = m0 + r / (8 * V) * 8 * S::TM + g * 8 + r % 8 * V + r / 8 % V;  // r is (warp, v, lane)
                if (m < M && n0 + n < N) out[m * (long long)N + n0 + n] = stage[r * LD + n] + b;
            }
            __syncthreads();
        }
    }
};

// Where this thread's vector number q of the tile in place `p` of the workspace lies: vector by vector, so that a warp
// writes and reads 512 bytes in a row.
template <typename T, typename S>
__device__ __forceinline__ long long partial_offset(long long p, int q) {
    return ((p * (S::TM * S::TN / WIDE<T>)+q) * THREADS + threadIdx.x) * WIDE<T>;
}

template <typename T, typename S>
__device__ __forceinline__ void store_partial(T* partials, long long p, const T (&acc)[S::TM][S::TN]) {
#pragma unroll
    for (int q = 0; q < S::TM * S::TN / WIDE<T>; ++q) store_vec(partials + partial_offset<T, S>(p, q), get_vector(acc, q));
}

// v5. Blocks [0, shared_blocks) share equally the k tiles of the first `shared_tiles` tiles of C: block b takes numbers
// [b * total / shared_blocks, (b + 1) * total / shared_blocks) of the list (tile 0, k tile 0), (tile 0, k tile 1), ...
// What is not a whole tile of C it writes to the workspace, place 2 b, or 2 b + 1 if it begins at k = 0, and
// matmul_v5_fixup adds these up. The other tiles are dealt out to all blocks, whole.
// Grid: as many blocks as run at one time, or fewer; block 128. The workspace has room for 2 * shared_blocks tiles, and
// for one more a block where K is longer than `chain` tiles. lda and ldb: the stride that is not 1, below 2^32 bytes for
// the BM or BN rows of a tile.
template <typename T, int A_COPY, int B_COPY, typename S>
__global__ void __launch_bounds__(THREADS, S::BLOCKS * 4 / sizeof(T))
    matmul_v5(T* out, T* workspace, const T* a, const T* b, const T* bias, int M, int N, int K, long long lda, long long ldb,
              int shared_blocks, int shared_tiles, int chain) {
    using CopyA = TileCopy<T, A_COPY, S::BM>;
    using CopyB = TileCopy<T, B_COPY, S::BN>;
    constexpr int STAGES = 4, RING = STAGES * (CopyA::BYTES + CopyB::BYTES), STAGED = Store<T, S>::BYTES;
    __shared__ alignas(16) char ring[RING > STAGED ? RING : STAGED];
    Place<T, S> place;
    const T* as = reinterpret_cast<const T*>(ring) + place.m;
    const T* bs = reinterpret_cast<const T*>(ring + CopyA::BYTES) + place.n;

    int block = blockIdx.x, k_tiles = max(1, (K + BK - 1) / BK);
    int tiles = ((M + S::BM - 1) / S::BM) * ((N + S::BN - 1) / S::BN), next = shared_tiles + block;
    int tile = 0, first = 0, left = 0;  // k tiles first, first + 1, .. of `tile` are next; `left` are left of the block's share
    if (block < shared_blocks) {
        long long total = (long long)shared_tiles * k_tiles, begin = block * total / shared_blocks;
        left = int((block + 1) * total / shared_blocks - begin);
        tile = int(begin / k_tiles);
        first = int(begin % k_tiles);
    }
    bool vectors = rows_are_vectors(out, bias, N);
    for (;;) {
        if (left == 0) {
            if (next >= tiles) return;
            tile = next;
            first = 0;
            left = k_tiles;
            next += gridDim.x;
        }
        int k0 = first * BK, count = min(k_tiles - first, left), m0, n0;
        bool whole = count == k_tiles;
        int p = whole ? 2 * shared_blocks + block : 2 * block + (first == 0);
        tile_origin<S>(tile, M, N, m0, n0);
        CopyA copy_a(a, lda, m0, M, k0, shared_address(ring));
        CopyB copy_b(b, ldb, n0, N, k0, shared_address(ring) + CopyA::BYTES);
        T acc[S::TM][S::TN];
        multiply<STAGES>(acc, workspace + partial_offset<T, S>(p, 0), copy_a, copy_b, as, bs, reinterpret_cast<T*>(ring), count,
                         min(K - k0, count * BK), chain);
        asm volatile("" : "+r"(tile), "+r"(first));  // compute m0, n0 again: they need not hold registers in the loop
        tile_origin<S>(tile, M, N, m0, n0);
        if (!whole) store_partial<T, S>(workspace, 2 * block + (first == 0), acc);
        else if (vectors) Store<T, S>::directly(out, bias, acc, place, m0, n0, M, N);
        else Store<T, S>::staged(out, bias, acc, reinterpret_cast<T*>(ring), place, m0, n0, M, N);
        ++tile;
        first = 0;
        left -= count;
    }
}

// Those tiles of C that several blocks of matmul_v5 shared: the partial sums are added in the order of k, always the
// same, so that the bits are always the same. A thread takes V x V of its outputs in matmul_v5.
// Grid shared_tiles * (TM / V) * (TN / V), where V elements make 16 bytes; block 128.
template <typename T, typename S>
__global__ void __launch_bounds__(THREADS)
    matmul_v5_fixup(T* out, const T* partials, const T* bias, int M, int N, int K, int shared_blocks, int shared_tiles) {
    using P = Place<T, S>;
    constexpr int V = P::V, ACROSS = S::TN / V, PARTS = S::TM / V * ACROSS;
    int tile = blockIdx.x / PARTS, i = blockIdx.x % PARTS / ACROSS * V, j = blockIdx.x % ACROSS * V;
    int k_tiles = max(1, (K + BK - 1) / BK);
    long long total = (long long)shared_tiles * k_tiles, begin = (long long)tile * k_tiles;
    // Block b begins at number b * total / shared_blocks: solved for the blocks with this tile's first and last number.
    int first = int(((begin + 1) * shared_blocks - 1) / total);
    int last = int(((begin + k_tiles) * shared_blocks - 1) / total);
    if (first == last) return;  // one block did it all, and stored it
    Vec16<T> sum[V] = {};
#pragma unroll 4
    for (int b = first; b <= last; ++b)
#pragma unroll
        for (int c = 0; c < V; ++c) {
            long long p = partial_offset<T, S>(2ll * b + (b == first), i / V * S::TN + j + c);
            Vec16<T> x = load_vec<T, V>(partials + p);
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v ^ 1].v[c] += x.v[v];
        }
    P place;
    int m0, n0;
    tile_origin<S>(tile, M, N, m0, n0);
    int m = m0 + place.m + P::row(i), n = n0 + place.n + P::column(j);
    bool vectors = rows_are_vectors(out, bias, N);
    if (n >= N) return;
    Vec16<T> b = {};
#pragma unroll
    for (int c = 0; c < V; ++c)
        if (n + c < N) b.v[c] = bias_or_zero(bias, n + c);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        if (m + v >= M) return;
        T* row = out + (m + v) * (long long)N + n;
#pragma unroll
        for (int c = 0; c < V; ++c) sum[v].v[c] += b.v[c];
        if (vectors) {
            store_vec(row, sum[v]);
        } else {
#pragma unroll
            for (int c = 0; c < V; ++c)
                if (n + c < N) row[c] = sum[v].v[c];
        }
    }
}
