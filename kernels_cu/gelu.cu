// gelu: out = f(x + bias) * up, where f(v) = v * gate(v), and its gradients. bias (one per column) and up may
// be null.
//     dx = dout * up * f'(x + bias)   dup = dout * f(x + bias)   dbias = column sums of dx
//     f'(v) = gate(v) + v * gate'(v)
// FUNCTION   GELU: gate(v) = Phi(v) = (1 + erf(v / sqrt(2))) / 2.  SILU: gate(v) = sigmoid(v).
//            GELU_TANH: gate(v) = sigmoid(2 u) = (1 + tanh(u)) / 2, where u = sqrt(2 / pi) * (v + 0.044715
//            v^3).
// Math       With e = exp(-|v|), which does not overflow, sigmoid is p = 1 / (1 + e) or q = e * p = 1 - p;
//            its slope is p * q. float and double use erf, exp and division of CUDA's library. 16-bit types
//            are computed in float with approximate instructions and Phi(-|v|) = exp(-v^2 / 2) * polynomial(1
//            / (1 + c |v|)) (Abramowitz and Stegun, 26.2.17; error below 3e-7).
// Layout     out, dx and dup are (rows, cols), contiguous. x, up and dout have column stride 1 and any row
//            stride: the two halves of a tensor are read in place. The launcher passes contiguous tensors
//            without a bias as one row.
// Launch     gelu and gelu_bwd: one thread per N elements of out: one (v1, or if rows are shorter than a
//            vector) or 16 bytes (v2). ALIGNED: all pointers, row strides and rows are multiples of 16 bytes.
//            gelu_bias_bwd: grid (tiles of columns, chunks of rows).
//
// version  idea (experiments: docs/notes/gelu.md)
// v1       one thread per element; dbias is torch's sum of dx
// v2       one thread per 16-byte vector; dbias from partial sums. H200, gelu of 32768 x 3072, of a copy:
//          0.92 (bfloat16), 0.97 (float32)
#include "common/pack.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/math.cuh"

// THREADS: of a block of gelu_bias_bwd
constexpr int GELU = 0, GELU_TANH = 1, SILU = 2, SUM = 3, THREADS = 256;

template <typename C>
struct Value {
    C value, slope;  // of a function
};

template <typename T>
__device__ __forceinline__ Value<compute_t<T>> sigmoid(compute_t<T> x) {
    compute_t<T> e = sizeof(T) == 2 ? exp2_approx(-fabs(x) * LOG2E) : exp(-fabs(x));
    compute_t<T> p = sizeof(T) == 2 ? reciprocal_approx(1 + e) : 1 / (1 + e), q = e * p;
    return {x < 0 ? q : p, p * q};
}

// Phi and its derivative, the density of the normal distribution.
template <typename T>
__device__ __forceinline__ Value<compute_t<T>> normal(compute_t<T> x) {
    using C = compute_t<T>;
    // before erf: then fewer registers are needed
    C e = sizeof(T) == 2 ? exp2_approx(x * x * (-0.5f * LOG2E)) : exp(x * x * C(-0.5));
    C density = e * C(0.3989422804014327);  // 1 / sqrt(2 pi)
    if constexpr (sizeof(T) > 2) return {C(0.5) + C(0.5) * erf(x * C(0.7071067811865476)), density};
    C t = reciprocal_approx(fmaf(fabs(x), 0.23164190f, 1.0f));
    C below = fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f);
    below = fmaf(t, below, 0.127414796f) * t * e;
    return {x < 0 ? below : 1 - below, density};
}

// f(v) and f'(v).
template <typename T, int FUNCTION>
__device__ __forceinline__ Value<compute_t<T>> f(compute_t<T> v) {
    using C = compute_t<T>;
    constexpr C A = C(1.5957691216057308), B = C(0.07135481627260025);  // 2 sqrt(2 / pi), and times 0.044715
    // beyond, the gate is 0 or 1; its slope must not be 0 * infinity
    C square = min(v * v, C(1600));
    Value<C> gate = FUNCTION == GELU ? normal<T>(v) : sigmoid<T>(FUNCTION == SILU ? v : v * (A + B * square));
    if (FUNCTION == GELU_TANH) gate.slope *= A + 3 * B * square;
    return {v * gate.value, gate.value + v * gate.slope};
}

// Offsets of this thread's N elements in each tensor, the column of the first one, and the elements from it
// to the end of out.
struct Place {
    long long out, x, up, dout, col, left;
};

// The place is past the last element if nothing is left. No division for one row; a 32-bit one if i and cols
// fit.
template <int N>
__device__ __forceinline__ Place locate(long long rows, long long cols, long long x_row, long long up_row,
                                        long long dout_row = 0) {
    wait_for_previous();
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * N, left = rows * cols - i;
    if (rows == 1) return {i, i, i, i, i, left};
    long long row = (i | cols) >> 32 ? i / cols : (unsigned)i / (unsigned)cols, col = i - row * cols;
    return {i, row * x_row + col, row * up_row + col, row * dout_row + col, col, left};
}

// The N elements from `from` on. If they are not ALIGNED, they may continue in the next row, or end before N.
template <int N, bool ALIGNED, typename T>
__device__ __forceinline__ Vec<T, N> load(const T* from, long long row_stride, const Place& at,
                                          long long cols) {
    long long to_end = cols - at.col, gap = row_stride - cols;
    bool is_vector = at.left >= N && (gap == 0 || to_end >= N) && (size_t)from % sizeof(Vec<T, N>) == 0;
    if (ALIGNED || is_vector) return load_vec<T, N>(from);
    Vec<T, N> to;
#pragma unroll
    for (int j = 0; j < N; j++) to.v[j] = j < at.left ? from[j < to_end ? j : j + gap] : T(0);
    return to;
}

template <bool ALIGNED, typename T, int N>
__device__ __forceinline__ void store(T* to, const compute_t<T> (&v)[N], const Place& at) {
    Vec<T, N> packed = pack<T, N>(v);
    if (ALIGNED || at.left >= N) return store_vec(to, packed);
#pragma unroll
    for (int j = 0; j < N - 1; j++)
        if (j < at.left) to[j] = packed.v[j];
}

template <typename T, typename B, int FUNCTION, int N, bool ALIGNED = true>
__global__ void gelu(T* out, const T* x, const T* up, const B* bias, long long rows, long long cols,
                     long long x_row, long long up_row) {
    Place at = locate<N>(rows, cols, x_row, up_row);
    if (at.left <= 0) return;
    compute_t<T> v[N], u[N];
    unpack(v, load<N, ALIGNED>(x + at.x, x_row, at, cols));
    if (bias) add_to(v, load<N, ALIGNED>(bias + at.col, 0, at, cols));
    if (up) unpack(u, load<N, ALIGNED>(up + at.up, up_row, at, cols));
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = f<T, FUNCTION>(v[j]).value * (up ? u[j] : 1);
    store<ALIGNED>(out + at.out, v, at);
}

template <typename T, typename B, int FUNCTION, int N, bool ALIGNED = true>
__global__ void gelu_bwd(T* dx, T* dup, const T* x, const T* up, const B* bias, const T* dout, long long rows,
                         long long cols, long long x_row, long long up_row, long long dout_row) {
    Place at = locate<N>(rows, cols, x_row, up_row, dout_row);
    if (at.left <= 0) return;
    compute_t<T> v[N], u[N], d[N];
    unpack(v, load<N, ALIGNED>(x + at.x, x_row, at, cols));
    if (bias) add_to(v, load<N, ALIGNED>(bias + at.col, 0, at, cols));
    unpack(d, load<N, ALIGNED>(dout + at.dout, dout_row, at, cols));
    if (up) {
        unpack(u, load<N, ALIGNED>(up + at.up, up_row, at, cols));
#pragma unroll
        for (int j = 0; j < N; j++) {
            Value<compute_t<T>> y = f<T, FUNCTION>(v[j]);
            v[j] = y.value * d[j];
            d[j] = d[j] * u[j] * y.slope;  // the order of torch's derivative: slope * u may overflow
        }
        store<ALIGNED>(dup + at.out, v, at);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) d[j] *= f<T, FUNCTION>(v[j]).slope;
    }
    store<ALIGNED>(dx + at.out, d, at);
}

// dx, and the sums of its columns. With FUNCTION SUM only the sums, those of dout; the pointers to other
// inputs are null.
template <typename T, typename B, int FUNCTION, bool ALIGNED = true>
__global__ void __launch_bounds__(THREADS)
    gelu_bias_bwd(T* dx, compute_t<T>* partials, B* dbias, const T* x, const B* bias, const T* dout,
                  long long rows, long long cols, long long x_row, long long dout_row,
                  long long rows_per_block) {
    constexpr int N = ALIGNED ? 16 / sizeof(T) : 1, LANES = ALIGNED ? 8 : 32, HEIGHT = THREADS / LANES,
                  TILE = LANES * N;
    constexpr int ROWS = FUNCTION == SUM ? 8 : ALIGNED ? 1 : 16 / sizeof(T);  // that a thread loads at a time
    __shared__ compute_t<T> sums[HEIGHT][TILE];
    long long tile = (long long)blockIdx.x * TILE, col = tile + threadIdx.x * N;
    long long row = blockIdx.y * rows_per_block + threadIdx.y,
              end = col < cols ? min((blockIdx.y + 1) * rows_per_block, rows) : 0;
    compute_t<T> v[N], d[N], sum[N] = {};
    wait_for_previous();
    let_next_start();
    Vec<B, N> b = FUNCTION != SUM && col < cols ? load_vec<B, N>(bias + col) : Vec<B, N>{};
    for (; row < end; row += ROWS * HEIGHT) {
        Vec<T, N> loaded_x[ROWS], loaded_dout[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            long long from = min(row + k * HEIGHT, end - 1);
            if (FUNCTION != SUM) loaded_x[k] = load_vec<T, N>(x + from * x_row + col);
            loaded_dout[k] = load_vec<T, N>(dout + from * dout_row + col);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            bool inside = row + k * HEIGHT < end;
            unpack(d, loaded_dout[k]);
            unpack(v, loaded_x[k]);
            add_to(v, b);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (FUNCTION != SUM) d[j] *= f<T, FUNCTION>(v[j]).slope;
                sum[j] += inside ? d[j] : 0;
            }
            if (FUNCTION != SUM && inside)
                store_vec_past_l1(dx + (row + k * HEIGHT) * cols + col, pack<T, N>(d));
        }
    }
    for (int j = 0; j < N; j++) sums[threadIdx.y][threadIdx.x * N + j] = sum[j];
    __syncthreads();
    int i = threadIdx.y * LANES + threadIdx.x;
    if (i >= TILE || tile + i >= cols) return;
    compute_t<T> total = sums[0][i];
    for (int k = 1; k < HEIGHT; k++) total += sums[k][i];
    if (rows_per_block < rows) partials[blockIdx.y * cols + tile + i] = total;
    else dbias[tile + i] = B(total);
}
