// gelu: out = f(x + bias) * up, where f(v) = v * gate(v), and its gradients. bias (one per column) and up may be null.
//     dx = dout * up * f'(x + bias)      dup = dout * f(x + bias)      dbias = column sums of dx      f'(v) = gate(v) + v * gate'(v)
//
// FUNCTION   GELU: gate(v) = Phi(v) = (1 + erf(v / sqrt(2))) / 2.  SILU: gate(v) = sigmoid(v).
//            GELU_TANH: gate(v) = sigmoid(2 u) = (1 + tanh(u)) / 2, where u = sqrt(2 / pi) * (v + 0.044715 v^3).
// Math       With e = exp(-|v|), which does not overflow, sigmoid is p = 1 / (1 + e) or q = e * p = 1 - p; its slope is p * q.
//            float and double use erf, exp and division of CUDA's library. 16-bit types are computed in float with approximate
//            instructions and Phi(-|v|) = exp(-v^2 / 2) * polynomial(1 / (1 + c |v|)) (Abramowitz and Stegun, 26.2.17; error below 3e-7).
// Layout     out, dx and dup are (rows, cols), contiguous. x, up and dout have column stride 1 and any row stride: the two halves of a
//            tensor are read in place. The launcher passes contiguous tensors without a bias as one row.
// Launch     gelu and gelu_bwd: 1-D grid and block, one thread per N elements: one (v1) or a 16-byte vector (v2). v2 needs aligned pointers,
//            and cols and row strides that are multiples of the vector; else the launcher uses v1.
//            gelu_bias_bwd: a block (32, 8) has rows_per_block rows of 32 vectors of columns; 1-D grid, column tiles first. A warp adds
//            every eighth row in registers, then the block adds its warps in order and writes a row of `partials`.
//
// version  idea                                                                                  (experiments: docs/notes/gelu.md)
// v1       one thread per element; dbias is torch's sum of dx
// v2       one thread per 16-byte vector; dbias from partial sums, without reading dx again. H200, gelu of 32768 x 3072 with erf: 0.92
//          (bfloat16) and 0.97 (float32) of a copy of the same bytes, backward 1.02
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/math.cuh"

constexpr int GELU = 0, GELU_TANH = 1, SILU = 2;
constexpr int WARPS = 8, ROWS = 2;  // of gelu_bias_bwd: warps of a block, and rows that a warp loads at a time

template <typename C>
struct Gate {
    C value, slope;
};

template <typename T>
__device__ __forceinline__ Gate<compute_t<T>> sigmoid(compute_t<T> x) {
    compute_t<T> e = sizeof(T) == 2 ? exp2_approx(-fabs(x) * LOG2E) : exp(-fabs(x));
    compute_t<T> p = sizeof(T) == 2 ? reciprocal_approx(1 + e) : 1 / (1 + e), q = e * p;
    return {x < 0 ? q : p, p * q};
}

// Phi and its derivative, the density of the normal distribution.
template <typename T>
__device__ __forceinline__ Gate<compute_t<T>> normal(compute_t<T> x) {
    using C = compute_t<T>;
    constexpr C DENSITY = C(0.3989422804014327);  // 1 / sqrt(2 pi)
    if constexpr (sizeof(T) == 2) {
        C e = exp2_approx(x * x * (-0.5f * LOG2E)), t = reciprocal_approx(fmaf(fabs(x), 0.23164190f, 1.0f));
        C below = fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f);
        below = fmaf(t, below, 0.127414796f) * t * e;
        return {x < 0 ? below : 1 - below, e * DENSITY};
    } else {
        C e = exp(x * x * C(-0.5));  // before erf: the compiler then needs fewer registers
        return {C(0.5) + C(0.5) * erf(x * C(0.7071067811865476)), e * DENSITY};
    }
}

template <typename T, int FUNCTION>
__device__ __forceinline__ Gate<compute_t<T>> gate(compute_t<T> x) {
    using C = compute_t<T>;
    if constexpr (FUNCTION == GELU) return normal<T>(x);
    if constexpr (FUNCTION == SILU) return sigmoid<T>(x);
    constexpr C A = C(1.5957691216057308), B = C(0.07135481627260025);  // 2 sqrt(2 / pi), and times 0.044715
    C square = min(x * x, C(1600));                                     // beyond, the gate is 0 or 1; its slope must not be 0 * infinity
    Gate<C> g = sigmoid<T>(x * (A + B * square));
    return {g.value, g.slope * (A + 3 * B * square)};
}

template <typename T, typename B, int N>
__device__ __forceinline__ void load_sum(compute_t<T> (&v)[N], const T* x, const B* bias) {
    unpack(v, load_vec<T, N>(x));
    if (bias) add_to(v, load_vec<B, N>(bias));
}

// Offsets of this thread's N elements of a row, and their column.
struct Place {
    long long out, x, up, dout, col;
};

// Computes this thread's offsets. Returns false past the last element. No division for one row; a 32-bit one if i and cols fit.
template <int N>
__device__ __forceinline__ bool locate(Place& at, long long rows, long long cols, long long x_row, long long up_row,
                                       long long dout_row = 0) {
    wait_for_previous();
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N;
    at = {i, i, i, i, i};
    if (rows == 1) return i < cols;
    long long row = (i | cols) >> 32 ? i / cols : (unsigned)i / (unsigned)cols, col = i - row * cols;
    at = {i, row * x_row + col, row * up_row + col, row * dout_row + col, col};
    return row < rows;
}

// v becomes f(v). Returns f'(v).
template <int FUNCTION, typename T>
__device__ __forceinline__ compute_t<T> slope(compute_t<T>& v) {
    Gate<compute_t<T>> g = gate<T, FUNCTION>(v);
    compute_t<T> result = g.value + v * g.slope;
    v *= g.value;
    return result;
}

template <typename T, typename B, int FUNCTION, int N>
__global__ void gelu(T* out, const T* x, const T* up, const B* bias, long long rows, long long cols, long long x_row, long long up_row) {
    Place at;
    if (!locate<N>(at, rows, cols, x_row, up_row)) return;
    compute_t<T> v[N], u[N];
    load_sum(v, x + at.x, bias ? bias + at.col : bias);
    if (up) unpack(u, load_vec<T, N>(up + at.up));
#pragma unroll
    for (int j = 0; j < N; j++) v[j] *= gate<T, FUNCTION>(v[j]).value * (up ? u[j] : 1);
    store_vec(out + at.out, pack<T, N>(v));
}

template <typename T, typename B, int FUNCTION, int N>
__global__ void gelu_bwd(T* dx, T* dup, const T* x, const T* up, const B* bias, const T* dout, long long rows, long long cols,
                         long long x_row, long long up_row, long long dout_row) {
    Place at;
    if (!locate<N>(at, rows, cols, x_row, up_row, dout_row)) return;
    compute_t<T> v[N], u[N], d[N];
    load_sum(v, x + at.x, bias ? bias + at.col : bias);
    unpack(d, load_vec<T, N>(dout + at.dout));
    if (up) {
        unpack(u, load_vec<T, N>(up + at.up));
#pragma unroll
        for (int j = 0; j < N; j++) {
            u[j] *= slope<FUNCTION, T>(v[j]);
            v[j] *= d[j];
            d[j] *= u[j];
        }
        store_vec(dup + at.out, pack<T, N>(v));
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) d[j] *= slope<FUNCTION, T>(v[j]);
    }
    store_vec(dx + at.out, pack<T, N>(d));
}

template <typename T, typename B, int FUNCTION>
__global__ void __launch_bounds__(32 * WARPS)
    gelu_bias_bwd(T* dx, compute_t<T>* partials, const T* x, const B* bias, const T* dout, long long rows, long long cols, long long x_row,
                  long long dout_row, long long rows_per_block) {
    constexpr int N = 16 / sizeof(T), TILE = 32 * N;
    __shared__ compute_t<T> sums[WARPS][TILE];
    unsigned tiles = (cols + TILE - 1) / TILE, chunk = blockIdx.x / tiles;
    long long tile = (long long)(blockIdx.x % tiles) * TILE, col = tile + threadIdx.x * N;
    long long row = chunk * rows_per_block, end = min(row + rows_per_block, rows);
    compute_t<T> b[N], v[N], d[N], sum[N] = {};
    wait_for_previous();
    if (col < cols) unpack(b, load_vec<B, N>(bias + col));
    for (row += threadIdx.y; row < end && col < cols; row += ROWS * WARPS) {
        Vec<T, N> loaded_x[ROWS], loaded_dout[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            long long from = min(row + k * WARPS, end - 1);
            loaded_x[k] = load_vec<T, N>(x + from * x_row + col);
            loaded_dout[k] = load_vec<T, N>(dout + from * dout_row + col);
        }
#pragma unroll
        for (int k = 0; k < ROWS && row + k * WARPS < end; k++) {
            unpack(v, loaded_x[k]);
            unpack(d, loaded_dout[k]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                v[j] += b[j];
                d[j] *= slope<FUNCTION, T>(v[j]);
                sum[j] += d[j];
            }
            store_vec(dx + (row + k * WARPS) * cols + col, pack<T, N>(d));
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) sums[threadIdx.y][threadIdx.x * N + j] = sum[j];
    __syncthreads();
    for (int i = threadIdx.y * 32 + threadIdx.x; i < TILE && tile + i < cols; i += 32 * WARPS) {
        compute_t<T> total = sums[0][i];
        for (int warp = 1; warp < WARPS; warp++) total += sums[warp][i];
        partials[chunk * cols + tile + i] = total;
    }
}
