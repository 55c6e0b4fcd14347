// kron_linear v4: the products of two factors (pages, see pages.cuh) and of three factors (piles of pages, see Piles4 below).
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mma.cuh"
#include "pages.cuh"

template <typename T>
__device__ __forceinline__ void mma_page(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (sizeof(T) == 2) {
        unsigned b[2] = {b0, b1};
        mma_16_bit(d, a, b, T());
    } else {
        float floats[4] = {__uint_as_float(a[0]), __uint_as_float(a[1]), __uint_as_float(a[2]), __uint_as_float(a[3])};
        float b[2] = {__uint_as_float(b0), __uint_as_float(b1)};
        mma_tf32(d, floats, b);
    }
}

// z += 16 MT rows of w1^T times COLUMNS columns of x, from `column` on. In TF32 a lane loads a vector of V neighbours, one for each of V
// products.
template <class Plan, typename T>
__device__ __forceinline__ void multiply_left(float (&z)[Plan::MT][Plan::COLUMNS / 8][4], const T* x, int column,
                                              const LeftOperand<Plan, T>& left) {
    constexpr int K = 32 / sizeof(T), V = Plan::COLUMNS / 8;
    int lane = threadIdx.x % 32;
    unsigned tiles_at = tile_address<false>(x + column, Plan::LDX);
    const T* rows = x + lane % 4 * Plan::LDX + column + lane / 4 * V;
#pragma unroll
    for (int k = 0; k < Plan::P1; k += K) {
        unsigned b[V][2];
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int n = 0; n < V; n += 2) {
                unsigned tiles[4];
                load_tiles<true>(tiles, tiles_at + (k * Plan::LDX + n * 8) * 2);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[n + i / 2][i % 2] = tiles[i];
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Vec<float, V> v = load_vec<float, V>(rows + (k + h * 4) * Plan::LDX);
#pragma unroll
                for (int n = 0; n < V; ++n) b[n][h] = __float_as_uint(to_tf32(v.v[n]));
            }
        }
#pragma unroll
        for (int m = 0; m < Plan::MT; ++m)
#pragma unroll
            for (int n = 0; n < V; ++n) mma_page<T>(z[m][n], left.held[k / K][m], b[n][0], b[n][1]);
    }
}

// Split two floats: x = big + small, in bfloat16. For an infinity, small is finite and has its sign, so that the sum of products is not
// NaN. A NaN stays in big (min returns the operand that is not NaN).
__device__ __forceinline__ void split_pair(float one, float two, unsigned& big, unsigned& small) {
    big = __byte_perm(__float_as_uint(one), __float_as_uint(two), 0x7632);
    __nv_bfloat162 rest, most;
    reinterpret_cast<unsigned&>(most) = 0x7f7f7f7f;
    narrow(rest, make_float2(one - __uint_as_float(big << 16), two - __uint_as_float(big & 0xffff0000)));
    rest = __hmin2(rest, most);
    small = reinterpret_cast<unsigned&>(rest) & 0x7fff7fff | big & 0x80008000;
}

// y += z w2, for the rows of w2 from `column` on.
template <class Plan, typename T>
__device__ __forceinline__ void multiply_right(float (&y)[Plan::MT][Plan::Q2 / 8][4], const float (&z)[Plan::MT][Plan::COLUMNS / 8][4],
                                               int column, const RightOperand<Plan, T>& right) {
    constexpr bool SPLIT = Plan::SPLIT;
    using U = conditional_t<SPLIT, T, float>;
    constexpr int K = SPLIT ? 16 : 8;
#pragma unroll
    for (int k = 0; k < Plan::COLUMNS; k += K) {
        unsigned a[Plan::MT][4], small[Plan::MT][4];
#pragma unroll
        for (int m = 0; m < Plan::MT; ++m)
#pragma unroll
            for (int i = 0; i < (SPLIT ? 4 : 2); ++i) {
                float one = z[m][k / 8 + i / 2][i % 2 * 2], two = z[m][k / 8 + i / 2][i % 2 * 2 + 1];
                if constexpr (SPLIT) {
                    split_pair(one, two, a[m][i], small[m][i]);
                } else {
                    a[m][i] = __float_as_uint(to_tf32(one));
                    a[m][i + 2] = __float_as_uint(to_tf32(two));
                }
            }
#pragma unroll
        for (int n = 0; n < Plan::Q2 / 8; n += 2) {
            unsigned b[4];
            right(b, column + k, n * 8);
            if constexpr (SPLIT)
#pragma unroll
                for (int i = 0; i < 2 * Plan::MT; ++i) mma_page<U>(y[i / 2][n + i % 2], small[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
#pragma unroll
            for (int i = 0; i < 2 * Plan::MT; ++i) mma_page<U>(y[i / 2][n + i % 2], a[i / 2], b[i % 2 * 2], b[i % 2 * 2 + 1]);
        }
    }
}

// y += w1^T x w2 for a page, by mma.
template <class Plan, typename T>
__device__ __forceinline__ void multiply_page(float (&y)[Plan::MT][Plan::Q2 / 8][4], const T* x, const LeftOperand<Plan, T>& left,
                                              const RightOperand<Plan, T>& right) {
#pragma unroll(Plan::HELD ? Plan::P2 / Plan::COLUMNS : 1)
    for (int column = 0; column < Plan::P2; column += Plan::COLUMNS) {
        float z[Plan::MT][Plan::COLUMNS / 8][4] = {};
        multiply_left<Plan, T>(z, x, column, left);
        multiply_right<Plan, T>(y, z, column, right);
    }
}

// Store COLUMNS columns of a warp's rows of an array [..][Q2]. place_of_column says which columns a lane has.
template <class Plan, int COLUMNS, typename T>
__device__ __forceinline__ void store_rows(T* out, const T* bias, const T* residual, float (&y)[Plan::MT][COLUMNS / 8][4], int first,
                                           int column, float scale) {
    constexpr int N = NEIGHBOURS<COLUMNS>;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, lane = (first + g) * Plan::Q2 + column + t * 2 * N;
    out += lane;
    if (scale != 1.0f)
#pragma unroll
        for (int i = 0; i < Plan::MT * (COLUMNS / 8) * 4; ++i) y[i / (COLUMNS / 2)][i / 4 % (COLUMNS / 8)][i % 4] *= scale;
#pragma unroll
    for (int m = 0; m < 2 * Plan::MT; ++m) {
        if (Plan::ROWS > Plan::Q1 && first + m * 8 + (Plan::Q1 % 8 ? g : 0) >= Plan::Q1) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += N) {
            float part[2 * N];
            int at = m * 8 * Plan::Q2 + n * 8;
#pragma unroll
            for (int e = 0; e < 2 * N; ++e) {
                part[e] = y[m / 2][n + e / 2][m % 2 * 2 + e % 2];
                if (Plan::ADDED && bias) part[e] += load_as(bias[lane + at + e]);
                if (Plan::ADDED && residual) part[e] += load_as(residual[lane + at + e]);
            }
            store_vec_past_l1(out + at, pack<T, 2 * N>(part));  // the compiler splits other stores
        }
    }
}

// Three factors. A row of x is a pile of P0 pages [P1][P2]. First each page is multiplied as above, by one warp, and its result z goes to
// shared memory as floats. Then each warp multiplies some columns of z, an array [P0][Q1 Q2], by the leftmost factor, in TF32. A warp
// copies a page of the next row over the page that it has read.
template <int WARPS_, bool HELD, bool ADDED_, class Top_, class Left, class Right>
struct Piles4 {
    static constexpr int WARPS = WARPS_, THREADS = 32 * WARPS, P0 = Top_::P, Q0 = Top_::Q, WIDTH = Left::Q * Right::Q;
    static constexpr bool ADDED = ADDED_;
    using Page = Pages4<1, WARPS, 1, Left::Q / 16, HELD, false, false, Left, Right>;
    using Top = Pages4<1, WARPS, 1, Q0 / 16, false, false, ADDED, Top_, Factor<WIDTH, WIDTH>>;
};

// Store the z of a page, [Q1][Q2]. A lane's 8 neighbours are permuted to the order in which it later has them in y: element n % 4 * 2 + e,
// of product n % 4, at e * 4 + n % 4.
template <class Plan>
__device__ __forceinline__ void keep_page(float* z, const float (&y)[Plan::MT][Plan::Q2 / 8][4]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < 2 * Plan::MT; ++m)
#pragma unroll
        for (int n = 0; n < Plan::Q2 / 8; n += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                Vec<float, 4> part;
#pragma unroll
                for (int i = 0; i < 4; ++i) part.v[i] = y[m / 2][n + i][m % 2 * 2 + e];
                store_vec(z + (m * 8 + g) * Plan::Q2 + n * 8 + t * 8 + e * 4, part);
            }
}

// kron_linear_v4 for layers of two factors. w0 is the right factor; w2 to w7 are unused. Any grid, block THREADS. Dynamic shared memory:
// w1, w0, the pages of the teams.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
    kron_linear_v4_pages(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                         const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                         long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                         long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                         long long features) {
    using Memory = PageMemory<Plan, T>;
    constexpr bool ONE = Plan::STAGES == 1;
    extern __shared__ uint4 dynamic[];
    char *left = reinterpret_cast<char*>(dynamic), *right = left + Memory::W1;
    int warp = threadIdx.x / 32, team = warp / Plan::TEAM, tile = warp % Plan::TEAM * Plan::MT;
    T* pages = reinterpret_cast<T*>(right + Memory::W2) + team * Plan::STAGES * Memory::PAGE;
    long long page = (long long)blockIdx.x * Plan::TEAMS + team, step = (long long)gridDim.x * Plan::TEAMS, next = page;
    auto load = [&](int stage) {
        if (next < A) load_page<Plan>(pages + stage * Memory::PAGE, x + next * (Plan::P1 * Plan::P2), threadIdx.x - team * Plan::TEAM * 32);
        cp_async_commit();
        next += step;
    };
    auto meet = [&] {
        if constexpr (Plan::TEAM == 1) __syncwarp();
        else if constexpr (Plan::TEAMS == 1) __syncthreads();
        else barrier_of(team + 1, Plan::TEAM * 32);
    };
    prefetch_factor(w0, Plan::P2, Plan::Q2, w0_p, w0_q);
    prefetch_factor(w1, Plan::P1, Plan::Q1, w1_p, w1_q);
    long long all = A - (page - team);  // pages from the block's first page on
    int own = all < Plan::TEAMS ? int(all) : Plan::TEAMS;
    if (own > 0) prefetch_tile<Plan::P1 * Plan::P2, 1>(x + (page - team) * (Plan::P1 * Plan::P2), own, 1);
    wait_for_previous();
    each_number<Plan::P1, Plan::Q1, Plan::THREADS>(w1, w1_p, w1_q, PutLeft<Plan, T>{left}, [&] {
        each_number<Plan::P2, Plan::Q2, Plan::THREADS>(w0, w0_p, w0_q, PutRight<Plan, T>{right}, [&] {
            for (int stage = 0; stage < (ONE ? 1 : Plan::STAGES - 1); ++stage) load(stage);
        });
    });
    let_next_come();
    __syncthreads();
    const LeftOperand<Plan, T> w1_operand(left, tile);
    const RightOperand<Plan, T> w0_operand(right);
    for (int stage = 0; page < A; page += step) {
        cp_async_wait<ONE ? 0 : Plan::STAGES - 2>();
        meet();
        if (!ONE) load(stage ? stage - 1 : Plan::STAGES - 1);
        const T* in = pages + stage * Memory::PAGE;
        stage = stage + 1 < Plan::STAGES ? stage + 1 : 0;
        float y[Plan::MT][Plan::Q2 / 8][4] = {};
        multiply_page<Plan>(y, in, w1_operand, w0_operand);
        if constexpr (ONE) {
            meet();
            load(0);
        }
        long long row = page * (Plan::Q1 * Plan::Q2);
        store_rows<Plan, Plan::Q2>(out + row, bias, residual ? residual + row : nullptr, y, tile * 16, 0, float(scale));
    }
}

// The same for three factors, see Piles4. w2 is the leftmost. Dynamic shared memory: w0, w1, w2, the pages of a row, z.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, 1)
    kron_linear_v4_piles(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                         const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                         long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                         long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                         long long features) {
    using Page = typename Plan::Page;
    using Top = typename Plan::Top;
    constexpr int P0 = Plan::P0, PAGE = Page::P1 * Page::P2, NUMBERS = P0 * PAGE, STAGE = PageMemory<Page, T>::PAGE, WARPS = Plan::WARPS;
    extern __shared__ uint4 dynamic[];
    char *right = reinterpret_cast<char*>(dynamic), *left = right + PageMemory<Page, T>::W2, *top = left + PageMemory<Page, T>::W1;
    T* pages = reinterpret_cast<T*>(top + PageMemory<Top, float>::W1);
    float* z = reinterpret_cast<float*>(pages + P0 * STAGE);
    int warp = threadIdx.x / 32;
    auto load = [&](long long row, int page) {
        if (row < A) load_page<Page>(pages + page * STAGE, x + row * NUMBERS + page * PAGE, threadIdx.x % 32);
        cp_async_commit();
    };
    prefetch_factor(w0, Page::P2, Page::Q2, w0_p, w0_q);
    prefetch_factor(w1, Page::P1, Page::Q1, w1_p, w1_q);
    prefetch_factor(w2, P0, Plan::Q0, w2_p, w2_q);
    if (blockIdx.x < A) prefetch_tile<NUMBERS, 1>(x + (long long)blockIdx.x * NUMBERS, 1, 1);
    wait_for_previous();
    each_number<Page::P2, Page::Q2, Plan::THREADS>(w0, w0_p, w0_q, PutRight<Page, T>{right}, [&] {
        each_number<Page::P1, Page::Q1, Plan::THREADS>(w1, w1_p, w1_q, PutLeft<Page, T>{left}, [&] {
            each_number<P0, Plan::Q0, Plan::THREADS>(w2, w2_p, w2_q, PutLeft<Top, float>{top}, [&] {
                for (int page = warp; page < P0; page += WARPS) load(blockIdx.x, page);
            });
        });
    });
    let_next_come();
    __syncthreads();
    const LeftOperand<Page, T> w1_operand(left, 0);
    const RightOperand<Page, T> w0_operand(right);
    const LeftOperand<Top, float> w2_operand(top, 0);
    for (long long row = blockIdx.x; row < A; row += gridDim.x) {
        cp_async_wait<0>();
        __syncwarp();
#pragma unroll 1
        for (int page = warp; page < P0; page += WARPS) {
            float y[Page::MT][Page::Q2 / 8][4] = {};
            multiply_page<Page>(y, pages + page * STAGE, w1_operand, w0_operand);
            __syncwarp();
            load(row + gridDim.x, page);
            keep_page<Page>(z + page * Top::LDX, y);
        }
        __syncthreads();
        long long first = row * (Plan::Q0 * Plan::WIDTH);
#pragma unroll 1
        for (int column = warp * 32; column < Plan::WIDTH; column += WARPS * 32) {
            float y[Top::MT][4][4] = {};
            multiply_left<Top, float>(y, z, column, w2_operand);
            store_rows<Top, 32>(out + first, bias, residual ? residual + first : nullptr, y, 0, column, float(scale));
        }
        __syncthreads();
    }
}
