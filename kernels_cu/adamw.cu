// adamw: one step of AdamW for a list of tensors, in place: param, exp_avg (m) and exp_avg_sq (v) are updated from the gradient g.
//     g *= factor;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//     param = (1 - lr weight_decay) param - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
// factor is 1 / grad_scale, times max_norm / norm if the norm of all gradients is larger than max_norm.
// (Loshchilov and Hutter, arXiv 1711.05101)
//
// Layout     All tensors are lists of elements without gaps. rows[t] describes tensor t, grads[t] is the address of its gradient. Rows, grads
//            and groups lie in device memory, and a launch of adamw_write changes them, so that a CUDA graph may do so too.
// Types      m and v are float, or double for double parameters. 16-bit parameters may have float masters, which are then updated, and
//            rounded to the parameter. bfloat16 parameters may be rounded stochastically.
// Launch     adamw_norm (only with max_norm) and adamw_v2: one block per chunk of CHUNK elements of a tensor, all tensors in one launch.
//            adamw_prepare: one block. It adds the partial sums of the norm in a fixed order, increments the steps, and computes the
//            Numbers of each tensor in double. If *found_inf is not 0, it marks all tensors as skipped.
//            adamw_v1: one launch per tensor.
//
// version  idea                                                                     of copy
// v1       one thread per element, one launch per tensor                            -
// v2       one launch per dtype, chunks of 8192 elements, vectors of 4 elements     -
//
// v2: a thread has four or five independent loads of 16 bytes (float) in flight. A block finds its tensor by bisection: 8 loads of 8 bytes
// for 148 tensors, which stay in L1. Predictions: docs/notes/adamw.md.
#include "common/pack.cuh"
#include "common/reduce.cuh"

constexpr long long CHUNK = 8192;  // as in cukern/ops/adamw/launch.py
constexpr int THREADS = 256;

struct Row {
    void *param, *exp_avg, *exp_avg_sq;
    float *master, *step;  // master may be null
    long long numel, first_chunk;
    unsigned index;  // of the tensor among the parameters of the optimizer
    unsigned short group, type;
};

struct Group {
    const float* lr_tensor;  // replaces lr if it is not null
    double lr, beta1, beta2, eps, weight_decay;
};

struct Numbers {
    double step_size, rsqrt_correction, eps, decay, beta1, beta2, factor, step;  // step is -1 if the tensor is skipped
};

using Word = unsigned long long;

// to[0..count): the words, passed by value.
template <int WORDS>
__global__ void adamw_write(Word* to, int count, Word w0, Word w1, Word w2, Word w3, Word w4, Word w5, Word w6, Word w7, Word w8, Word w9,
                            Word w10, Word w11, Word w12, Word w13, Word w14, Word w15, Word w16, Word w17, Word w18, Word w19, Word w20,
                            Word w21, Word w22, Word w23, Word w24, Word w25, Word w26, Word w27, Word w28, Word w29, Word w30, Word w31) {
    Word words[WORDS] = {w0,  w1,  w2,  w3,  w4,  w5,  w6,  w7,  w8,  w9,  w10, w11, w12, w13, w14, w15,
                         w16, w17, w18, w19, w20, w21, w22, w23, w24, w25, w26, w27, w28, w29, w30, w31};
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        if (i < count) to[i] = words[i];
    }
}

// The tensor of a chunk: the last whose first chunk is not larger.
__device__ __forceinline__ int tensor_of(const Row* rows, int tensors, long long chunk) {
    int low = 0, high = tensors;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (rows[middle].first_chunk <= chunk ? low : high) = middle;
    }
    return low;
}

// ---- the norm and the numbers of each tensor

template <typename T>
__device__ __forceinline__ double sum_of_squares(const T* g, long long begin, long long end) {
    constexpr int N = 16 / sizeof(T);
    double sum = 0;
    bool aligned = reinterpret_cast<Word>(g) % 16 == 0;
    long long vectors = aligned ? (end - begin) / N : 0;
    for (long long i = threadIdx.x; i < vectors; i += THREADS) {
        Vec<T, N> v = load_vec<T, N>(g + begin + i * N);
#pragma unroll
        for (int j = 0; j < N; j++) sum += double(load_as(v.v[j])) * double(load_as(v.v[j]));
    }
    for (long long i = begin + vectors * N + threadIdx.x; i < end; i += THREADS) sum += double(load_as(g[i])) * double(load_as(g[i]));
    return sum;
}

template <int BLOCK>
__global__ void adamw_norm(double* partials, const void* table, const Word* grads, int tensors) {
    __shared__ double sums[32];
    const Row* rows = static_cast<const Row*>(table);
    int t = tensor_of(rows, tensors, blockIdx.x);
    long long begin = (blockIdx.x - rows[t].first_chunk) * CHUNK, end = min(begin + CHUNK, rows[t].numel);
    const void* g = reinterpret_cast<const void*>(grads[t]);
    double sum = rows[t].type == 0   ? sum_of_squares(static_cast<const __half*>(g), begin, end)
                 : rows[t].type == 1 ? sum_of_squares(static_cast<const __nv_bfloat16*>(g), begin, end)
                 : rows[t].type == 2 ? sum_of_squares(static_cast<const float*>(g), begin, end)
                                     : sum_of_squares(static_cast<const double*>(g), begin, end);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__device__ __forceinline__ double power(double x, long long n) {
    double result = 1;
    for (; n > 0; n /= 2, x *= x) {
        if (n % 2) result *= x;
    }
    return result;
}

// `partials` may be null: no clipping. grad_scale and found_inf may be null.
template <int BLOCK>
__global__ void adamw_prepare(void* to, float* norm_to, const void* table, const void* group_table, const double* partials,
                              const float* grad_scale, const float* found_inf, long long chunks, int tensors, double max_norm) {
    __shared__ double sums[32];
    const Row* rows = static_cast<const Row*>(table);
    double factor = grad_scale ? 1 / double(*grad_scale) : 1, sum = 0;
    if (partials) {
        for (long long i = threadIdx.x; i < chunks; i += BLOCK) sum += partials[i];
        double norm = sqrt(block_reduce<Sum>(sum, sums)) * fabs(factor);
        if (threadIdx.x == 0) *norm_to = norm;
        if (norm > max_norm) factor *= max_norm / norm;
    }
    bool skip = found_inf && *found_inf != 0;
    for (int t = threadIdx.x; t < tensors; t += BLOCK) {
        Group group = static_cast<const Group*>(group_table)[rows[t].group];
        double lr = group.lr_tensor ? *group.lr_tensor : group.lr;
        float step = *rows[t].step + 1;
        if (!skip) *rows[t].step = step;
        double correction1 = 1 - power(group.beta1, step), correction2 = 1 - power(group.beta2, step);
        Numbers k = {lr / correction1, 1 / sqrt(correction2), group.eps, 1 - lr * group.weight_decay, group.beta1, group.beta2, factor};
        k.step = skip ? -1. : step;
        static_cast<Numbers*>(to)[t] = k;
    }
}

// ---- the update

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random words for a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c.x), high2 = __umulhi(0xCD9E8D57u, c.z);
        c = make_uint4(high2 ^ c.y ^ key.x, 0xCD9E8D57u * c.z, high0 ^ c.w ^ key.y, 0xD2511F53u * c.x);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}

// One of the two neighbours in bfloat16, the upper one with the probability of the discarded bits / 2^16.
__device__ __forceinline__ __nv_bfloat16 round_randomly(float x, unsigned random) {
    if (!(fabsf(x) < __int_as_float(0x7f800000))) return __nv_bfloat16(x);
    return __ushort_as_bfloat16((__float_as_uint(x) + (random & 0xffff)) >> 16);
}

// Elements i..i + N of a tensor. All loads are issued first.
template <typename T, int N>
__device__ __forceinline__ void update(const Row& row, const T* grad, const Numbers& k, long long i, Word seed, bool randomly) {
    using C = compute_t<T>;
    C *m_at = static_cast<C*>(row.exp_avg) + i, *v_at = static_cast<C*>(row.exp_avg_sq) + i, p[N], g[N];
    T* to = static_cast<T*>(row.param) + i;
    Vec<C, N> m = load_vec<C, N>(m_at), v = load_vec<C, N>(v_at);
    unpack(g, load_vec<T, N>(grad + i));
    if (sizeof(T) == 2 && row.master) unpack(p, load_vec<float, N>(row.master + i));
    else unpack(p, load_vec<T, N>(to));
    C weight1 = C(1 - k.beta1), beta2 = C(k.beta2), weight2 = C(1 - k.beta2);
#pragma unroll
    for (int j = 0; j < N; j++) {
        C scaled = g[j] * C(k.factor);
        m.v[j] += weight1 * (scaled - m.v[j]);
        v.v[j] = beta2 * v.v[j] + weight2 * scaled * scaled;
        p[j] = p[j] * C(k.decay) - C(k.step_size) * (m.v[j] / (sqrt(v.v[j]) * C(k.rsqrt_correction) + C(k.eps)));
    }
    store_vec(m_at, m);
    store_vec(v_at, v);
    Vec<T, N> rounded = pack<T, N>(p);
    if constexpr (sizeof(T) == 2) {
        if (row.master) store_vec(row.master + i, pack<float, N>(p));
        if (randomly && row.type == 1) {  // element i has word i % 4 of counter i / 4, whatever N is
            uint4 random = philox(make_uint4(i / 4, i / 4 >> 32, row.index, unsigned(k.step)), make_uint2(seed, seed >> 32));
            unsigned words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
            for (int j = 0; j < N; j++) {
                unsigned word = N == 4 ? words[j] : i % 4 == 0 ? words[0] : i % 4 == 1 ? words[1] : i % 4 == 2 ? words[2] : words[3];
                reinterpret_cast<__nv_bfloat16&>(rounded.v[j]) = round_randomly(p[j], word);
            }
        }
    }
    store_vec(to, rounded);
}

template <typename T>
__global__ void adamw_v1(const void* table, const Word* grads, const void* numbers, int t, Word seed, bool randomly) {
    Row row = static_cast<const Row*>(table)[t];
    Numbers k = static_cast<const Numbers*>(numbers)[t];
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < row.numel && k.step > 0) update<T, 1>(row, reinterpret_cast<const T*>(grads[t]), k, i, seed, randomly);
}

// The chunks of the grid begin at `first_chunk`, the first of this dtype.
template <typename T>
__global__ void adamw_v2(const void* table, const Word* grads, const void* numbers, long long first_chunk, int tensors, Word seed,
                         bool randomly) {
    constexpr int N = sizeof(T) == 8 ? 2 : 4;
    long long chunk = first_chunk + blockIdx.x;
    int t = tensor_of(static_cast<const Row*>(table), tensors, chunk);
    Row row = static_cast<const Row*>(table)[t];
    Numbers k = static_cast<const Numbers*>(numbers)[t];
    if (k.step < 0) return;
    const T* grad = reinterpret_cast<const T*>(grads[t]);
    auto misaligned = [](const void* p, unsigned bytes) { return reinterpret_cast<Word>(p) % bytes != 0; };
    bool scalar = misaligned(row.param, N * sizeof(T)) || misaligned(grad, N * sizeof(T)) || misaligned(row.exp_avg, 16) ||
                  misaligned(row.exp_avg_sq, 16) || misaligned(row.master, 16);
    long long begin = (chunk - row.first_chunk) * CHUNK, end = min(begin + CHUNK, row.numel), tail = scalar ? begin : end - end % N;
    for (long long i = begin + threadIdx.x * N; i < tail; i += THREADS * N) update<T, N>(row, grad, k, i, seed, randomly);
    for (long long i = tail + threadIdx.x; i < end; i += THREADS) update<T, 1>(row, grad, k, i, seed, randomly);
}
