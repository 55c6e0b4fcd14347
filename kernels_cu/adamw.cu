// adamw: one step of AdamW for a list of tensors, in place: param, exp_avg (m) and exp_avg_sq (v) are updated from the gradient g.
//     g *= factor;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//     param = (1 - lr weight_decay) param - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
// factor is 1 / grad_scale, times max_norm / norm if the norm of all gradients is larger. (Loshchilov and Hutter, arXiv 1711.05101)
//
// Layout     Each tensor is dense: its elements fill numel consecutive addresses. rows[t] describes tensor t, grads[t] is the address of its
//            gradient. Rows, grads and groups are tables in device memory. adamw_write updates them, so that a CUDA graph can contain the
//            update.
// Types      m and v are float, or double for double parameters. 16-bit parameters may have float masters, which are then updated, and
//            rounded to the parameter. bfloat16 parameters may be rounded stochastically.
// Launch     In order: adamw_norm (only with max_norm), adamw_prepare (one block), adamw_v2. The first and the last have one launch per dtype,
//            and one block per chunk of CHUNK elements or per PART of a chunk. adamw_prepare adds the partial sums of the norm in a fixed
//            order, increments the steps, and computes the coefficients of each tensor in double. If *found_inf is not 0, all tensors are
//            skipped. adamw_v2 starts while adamw_prepare runs (PDL).
//
// version  idea                                                                                     of a copy
// v1       one thread per element, one launch per tensor                                            0.66 to 0.91 (H200, float32)
// v2       one launch per dtype, vectors of 4 elements, one block per PART of a chunk               0.96 to 0.98 (H100)
//
// v2: each thread has four independent loads in flight: grad, exp_avg, exp_avg_sq, and param or master. They have 16 bytes each, or 8 for
// a 16-bit grad or param. A block finds its tensor by bisection: 8 loads of 8 bytes for 148 tensors, which stay in L1.
// Experiments: docs/notes/adamw.md.
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/reduce.cuh"

constexpr long long CHUNK = 8192;  // as in cukern/ops/adamw/op.py
constexpr int THREADS = 256;
struct Row {
    void *param, *exp_avg, *exp_avg_sq;
    float *master, *step;  // may be null
    long long numel, first_chunk;
    unsigned index, group;  // index: of the tensor among the parameters of the optimizer
};

struct Group {
    const float* lr_tensor;  // replaces lr if it is not null
    double lr, beta1, beta2, eps, weight_decay;
};

// The coefficients of a tensor, which adamw_prepare computes. WEIGHT1 and WEIGHT2 are 1 - beta; STEP is -1 if the tensor is skipped.
enum { STEP_SIZE, RSQRT_CORRECTION, EPS, DECAY, WEIGHT1, BETA2, WEIGHT2, FACTOR, STEP, NUMBERS };

using Word = unsigned long long;
template <int N>
struct Words {
    Word words[N];
};

// Writes `count` words, which are passed by value. One block of N threads.
template <int N>
__global__ void adamw_write(Word* to, int count, Words<N> from) {
    if (threadIdx.x < count) to[threadIdx.x] = from.words[threadIdx.x];
}

// The tensor of a chunk. Binary search: the last tensor with first_chunk <= chunk, which skips empty tensors.
__device__ __forceinline__ int tensor_of(const Row* rows, int tensors, long long chunk) {
    int low = 0, high = tensors;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (rows[middle].first_chunk <= chunk ? low : high) = middle;
    }
    return low;
}

// ---- the norm, and the coefficients of each tensor (`numbers`)

// The sum of squares of a chunk. The grid begins at `first_chunk`, as that of adamw_v2.
template <typename T>
__global__ void adamw_norm(double* partials, const void* table, const Word* grads, long long first_chunk, int tensors) {
    constexpr int N = 16 / sizeof(T);
    __shared__ double sums[32];
    long long chunk = first_chunk + blockIdx.x;
    int t = tensor_of(static_cast<const Row*>(table), tensors, chunk);
    Row row = static_cast<const Row*>(table)[t];
    const T* g = reinterpret_cast<const T*>(grads[t]);
    long long begin = (chunk - row.first_chunk) * CHUNK, end = min(begin + CHUNK, row.numel), tail = grads[t] % 16 ? begin : end - end % N;
    double sum = 0, x[N];
    for (long long i = begin + threadIdx.x * N; i < tail; i += THREADS * N) {
        unpack(x, load_vec<T, N>(g + i));
#pragma unroll
        for (int j = 0; j < N; j++) sum += x[j] * x[j];
    }
    for (long long i = tail + threadIdx.x; i < end; i += THREADS) sum += double(load_as(g[i])) * double(load_as(g[i]));
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) partials[chunk] = sum;
}

// `partials` may be null: no clipping. grad_scale and found_inf may be null. first_step: the number of this step where rows[t].step is null.
template <int BLOCK>
__global__ void adamw_prepare(double* numbers, float* norm_to, const void* table, const void* group_table, const double* partials,
                              const float* grad_scale, const float* found_inf, long long chunks, int tensors, int first_step,
                              double max_norm) {
    __shared__ double sums[32];
    wait_for_previous();
    let_next_come();
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
        float step = rows[t].step ? *rows[t].step + 1 : first_step;
        double decay = 1 - lr * group.weight_decay, beta1 = group.beta1, beta2 = group.beta2, size = lr / (1 - pow(beta1, double(step)));
        double k[] = {size, 1 / sqrt(1 - pow(beta2, double(step))), group.eps, decay, 1 - beta1, beta2, 1 - beta2, factor, -1};
        if (!skip) k[STEP] = step;
        if (!skip && rows[t].step) *rows[t].step = step;
        for (int j = 0; j < NUMBERS; j++) numbers[t * NUMBERS + j] = k[j];
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

template <typename C>
__device__ __forceinline__ void read_numbers(C (&to)[NUMBERS], const double* from) {
#pragma unroll
    for (int j = 0; j < NUMBERS; j++) to[j] = C(from[j]);
}

// Elements i..i + N of a tensor.
template <typename T, int N>
__device__ __forceinline__ void update(const Row& row, const T* grad, const compute_t<T> (&k)[NUMBERS], long long i, Word seed,
                                       bool randomly) {
    using C = compute_t<T>;
    C *m_at = static_cast<C*>(row.exp_avg) + i, *v_at = static_cast<C*>(row.exp_avg_sq) + i, p[N], g[N];
    T* to = static_cast<T*>(row.param) + i;
    Vec<C, N> m = load_vec<C, N>(m_at), v = load_vec<C, N>(v_at);
    unpack(g, load_vec<T, N>(grad + i));
    if (sizeof(T) == 2 && row.master) unpack(p, load_vec<float, N>(row.master + i));
    else unpack(p, load_vec<T, N>(to));
#pragma unroll
    for (int j = 0; j < N; j++) {
        C scaled = g[j] * k[FACTOR];
        C change = scaled - m.v[j];  // added to the nearer of the two, so that beta1 = 0 gives the gradient
        m.v[j] = k[WEIGHT1] < C(0.5) ? m.v[j] + k[WEIGHT1] * change : scaled - (1 - k[WEIGHT1]) * change;
        v.v[j] = k[BETA2] * v.v[j] + k[WEIGHT2] * scaled * scaled;
        p[j] = p[j] * k[DECAY] - k[STEP_SIZE] * (m.v[j] / (sqrt(v.v[j]) * k[RSQRT_CORRECTION] + k[EPS]));
    }
    store_vec(m_at, m);
    store_vec(v_at, v);
    Vec<T, N> rounded = pack<T, N>(p);
    if (sizeof(T) == 2 && row.master) store_vec(row.master + i, pack<float, N>(p));
    if constexpr (IS_BF16<T>) {
        if (randomly) {  // element i has word i % 4 of counter i / 4, whatever N is
            uint4 random = philox(make_uint4(i / 4, i / 4 >> 32, row.index, k[STEP]), make_uint2(seed, seed >> 32));
            unsigned words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
            for (int j = 0; j < N; j++) rounded.v[j] = round_randomly(p[j], words[N == 4 ? j : i % 4]);
        }
    }
    store_vec(to, rounded);
}

template <typename T>
__global__ void adamw_v1(const void* table, const Word* grads, const double* numbers, int t, Word seed, bool randomly) {
    Row row = static_cast<const Row*>(table)[t];
    compute_t<T> k[NUMBERS];
    read_numbers(k, numbers + t * NUMBERS);
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < row.numel && k[STEP] > 0) update<T, 1>(row, reinterpret_cast<const T*>(grads[t]), k, i, seed, randomly);
}

// Short blocks, so that the last ones end at about the same time. The chunks of the grid begin at `first_chunk`, the first of this dtype.
template <typename T, int PART>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 8 ? 1 : 3 + sizeof(T) / 2)  // double: 1 block per SM, float: 5, 16-bit types: 4
    adamw_v2(const void* table, const Word* grads, const double* numbers, long long first_chunk, int tensors, Word seed, bool randomly) {
    constexpr int N = sizeof(T) == 8 ? 2 : 4, PARTS = CHUNK / PART;
    wait_for_previous();
    long long chunk = first_chunk + blockIdx.x / PARTS;
    int t = tensor_of(static_cast<const Row*>(table), tensors, chunk);
    Row row = static_cast<const Row*>(table)[t];
    const T* grad = reinterpret_cast<const T*>(grads[t]);
    long long begin = (chunk - row.first_chunk) * CHUNK + blockIdx.x % PARTS * PART, end = min(begin + PART, row.numel);
    if (begin >= end) return;
    compute_t<T> k[NUMBERS];
    read_numbers(k, numbers + t * NUMBERS);
    if (k[STEP] < 0) return;
    Word moments = Word(row.exp_avg) | Word(row.exp_avg_sq) | Word(row.master);
    bool scalar = (Word(row.param) | grads[t]) % (N * sizeof(T)) != 0 || moments % 16 != 0;
    long long tail = scalar ? begin : end - end % N;
#pragma unroll 1
    for (long long i = begin + threadIdx.x * N; i < tail; i += THREADS * N) update<T, N>(row, grad, k, i, seed, randomly);
#pragma unroll 1
    for (long long i = tail + threadIdx.x; i < end; i += THREADS) update<T, 1>(row, grad, k, i, seed, randomly);
}
