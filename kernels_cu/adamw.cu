// adamw: one step of AdamW for a list of tensors, in place: param, exp_avg (m) and exp_avg_sq (v) are updated
// from the gradient g.
//     g *= factor;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//     param = (1 - lr weight_decay) param - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
// factor is 1 / grad_scale, times max_norm / norm if the norm of all gradients is larger, times -1 with
// maximize. With amsgrad the root is that of the largest v so far. (Loshchilov and Hutter, arXiv 1711.05101)
//
// Layout     Each tensor is dense: its elements fill numel consecutive addresses. rows[t] describes tensor t,
//            grads[t] is the address of its gradient. Both tables are in device memory. adamw_write updates
//            them, so that a CUDA graph can contain the update.
// Types      m and v are float, or double for double parameters. 16-bit parameters may have float masters,
//            which are then updated, and rounded to the parameter. bfloat16 parameters may be rounded
//            stochastically. A parameter that is not its rounded master was written by something else: the
//            master takes its value first. EXTRAS: instances for masters and amsgrad. M: the type of m and v
//            in memory. bfloat16 is rounded stochastically, not with amsgrad.
// Launch     adamw_norm (only with max_norm) and adamw_v2 have one launch per dtype, and one block per chunk
//            of CHUNK elements or per PART of a chunk. Between them adamw_prepare (one block) adds the
//            partial sums of the norm in a fixed order, increments the steps, and computes the numbers of
//            each tensor in double. It is not needed if the host knows them. If *found_inf is not 0, all
//            tensors are skipped. adamw_v2 starts while adamw_prepare runs (PDL).
//
// version  idea                                                                         of a copy
// v1       one thread per element, one launch per tensor                               H200: 0.66 to 0.91
// v2       one launch per dtype, vectors of 4 elements, one block per PART of a chunk  H100: 0.98 to 0.99
//
// v2: a thread has a vector of grad, exp_avg, exp_avg_sq, and param or master: four independent loads of 16
// bytes, or 8 for 16-bit types. Experiments: docs/notes/adamw.md.
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/philox.cuh"
#include "common/reduce.cuh"

constexpr long long CHUNK = 8192;  // as in cukern/ops/adamw/op.py
constexpr int THREADS = 256;
struct Row {
    void *param, *exp_avg, *exp_avg_sq;
    void* max_exp_avg_sq;  // of amsgrad; may be null, as master and step
    float *master, *step;
    long long numel, first_chunk;
    unsigned index, group;  // index: of the tensor among the parameters of the optimizer
};

struct Group {
    const void* lr_tensor;  // replaces lr if it is not null
    double lr, beta1, beta2, eps, weight_decay;
    unsigned long long flags;
};
enum { MAXIMIZE = 1, LR_IS_DOUBLE = 2 };  // flags

// The numbers of a tensor, which adamw_prepare computes. WEIGHT1 and WEIGHT2 are 1 - beta; STEP is -1 if the
// tensor is skipped.
enum { STEP_SIZE, RSQRT_CORRECTION, EPS, DECAY, WEIGHT1, BETA2, WEIGHT2, FACTOR, STEP, NUMBERS };

using Word = unsigned long long;
// What a step has in common for all tensors. Without `numbers`, each tensor has those that are `given`.
struct Step {
    const Row* rows;
    const Word* grads;
    const double* numbers;
    double given[NUMBERS];
    Word seed;
    bool randomly;
};

template <int N>
struct Words {
    Word words[N];
};

// Writes `count` words, which are passed by value. One block of N threads.
template <int N>
__global__ void adamw_write(Word* to, int count, Words<N> from) {
    if (threadIdx.x < count) to[threadIdx.x] = from.words[threadIdx.x];
}

// The tensor of a chunk: the last one with first_chunk <= chunk, which skips empty tensors. A warp reads up
// to 32 rows at a time.
__device__ __forceinline__ int tensor_of(const Row* rows, int tensors, long long chunk) {
    int low = 0;
    for (int count = tensors; count > 1;) {
        int step = (count + 31) / 32, mine = threadIdx.x % 32 * step;
        int last = __popc(__ballot_sync(~0u, mine < count && rows[low + mine].first_chunk <= chunk)) - 1;
        low += last * step;
        count = min(step, count - last * step);
    }
    return low;
}

// The sum of squares of a chunk. The grid begins at `first_chunk`, as that of adamw_v2.
template <typename T>
__global__ void adamw_norm(double* partials, const void* table, const Word* grads, long long first_chunk,
                           int tensors) {
    __shared__ double sums[32];
    const Row* rows = static_cast<const Row*>(table);
    long long chunk = first_chunk + blockIdx.x;
    int t = tensor_of(rows, tensors, chunk);
    long long begin = (chunk - rows[t].first_chunk) * CHUNK, end = min(begin + CHUNK, rows[t].numel);
    double sum = 0;
#pragma unroll 16
    for (long long i = begin + threadIdx.x; i < end; i += THREADS) {
        double x = load_as(reinterpret_cast<const T*>(grads[t])[i]);
        sum += x * x;
    }
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) partials[chunk] = sum;
}

// `partials` may be null: no clipping. grad_scale and found_inf may be null.
template <int BLOCK>
__global__ void adamw_prepare(double* numbers, float* norm_to, const void* table, const void* group_table,
                              const double* partials, const float* grad_scale, const float* found_inf,
                              long long chunks, int tensors, double max_norm) {
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
        double lr = group.lr;
        if (group.lr_tensor)
            lr = group.flags & LR_IS_DOUBLE ? *static_cast<const double*>(group.lr_tensor)
                                            : *static_cast<const float*>(group.lr_tensor);
        double signed_factor = group.flags & MAXIMIZE ? -factor : factor;
        float step = *rows[t].step + 1;
        double decay = 1 - lr * group.weight_decay, beta1 = group.beta1, beta2 = group.beta2,
               size = lr / (1 - pow(beta1, double(step)));
        double k[] = {size,      1 / sqrt(1 - pow(beta2, double(step))),
                      group.eps, decay,
                      1 - beta1, beta2,
                      1 - beta2, signed_factor,
                      -1};
        if (!skip) *rows[t].step = k[STEP] = step;
        for (int j = 0; j < NUMBERS; j++) numbers[t * NUMBERS + j] = k[j];
    }
}

// One of the two neighbours in bfloat16, the upper one with the probability of the discarded bits / 2^16.
__device__ __forceinline__ float round_randomly(float x, unsigned random) {
    if (!(fabsf(x) < __int_as_float(0x7f800000))) return x;
    return __uint_as_float((__float_as_uint(x) + (random & 0xffff)) & 0xffff0000);
}

// The random words of elements i / 4 * 4 to i / 4 * 4 + 3 of tensor `index`. `high`: counter bits.
__device__ __forceinline__ void random_words(unsigned (&to)[4], Word seed, unsigned index, unsigned t,
                                             long long i, unsigned high) {
    uint4 random = philox(make_uint4(i / 4, i / 4 >> 32 | high, index, t), make_uint2(seed, seed >> 32));
    to[0] = random.x, to[1] = random.y, to[2] = random.z, to[3] = random.w;
}

// True if `x` is what a step made of this master. Else it was written since, and the master follows it.
template <typename T>
__device__ __forceinline__ bool is_rounded(float x, float master, bool randomly) {
    if (x == load_as(T(master))) return true;
    // a neighbour
    return IS_BF16<T> && randomly && (__float_as_uint(x) - (__float_as_uint(master) & 0xffff0000)) >> 16 <= 1;
}

// K vectors of N elements of a tensor, THREADS apart, from element i on, those before the end: `left`
// elements further.
template <typename T, int N, int K, bool EXTRAS, typename M>
__device__ __forceinline__ void update(const Step& step, int t, long long i, int left) {
    using C = compute_t<T>;
    Row row = step.rows[t];
    C k[NUMBERS], p[K][N], g[K][N];
    M *m_at = static_cast<M*>(row.exp_avg) + i, *v_at = static_cast<M*>(row.exp_avg_sq) + i;
    for (int j = 0; j < NUMBERS; j++) k[j] = C(step.numbers ? step.numbers[t * NUMBERS + j] : step.given[j]);
    const T* grad = reinterpret_cast<const T*>(step.grads[t]) + i;
    T* to = static_cast<T*>(row.param) + i;
    bool master = EXTRAS && sizeof(T) == 2 && row.master;
    C* max_at = EXTRAS && row.max_exp_avg_sq ? static_cast<C*>(row.max_exp_avg_sq) + i : nullptr;
    Vec<C, N> m[K], v[K], most[K];
    Vec<T, N> written[K];
#pragma unroll
    for (int e = 0, at = 0; e < K && at < left; e++, at += THREADS) {  // all loads before the first store
        unpack(m[e].v, load_vec<M, N>(m_at + at));
        unpack(v[e].v, load_vec<M, N>(v_at + at));
        unpack(g[e], load_vec<T, N>(grad + at));
        written[e] = load_vec<T, N>(to + at);
        if (EXTRAS && max_at) most[e] = load_vec<C, N>(max_at + at);
        if (master) unpack(p[e], load_vec<float, N>(row.master + i + at));
        else unpack(p[e], written[e]);
    }
    if (k[STEP] < 0) return;
#pragma unroll
    for (int e = 0, at = 0; e < K && at < left; e++, at += THREADS) {
        if (master) {
            for (int j = 0; j < N; j++) {
                float x = load_as(written[e].v[j]);
                if (!is_rounded<T>(x, p[e][j], step.randomly)) p[e][j] = x;
            }
        }
        for (int j = 0; j < N; j++) {
            C scaled = g[e][j] * k[FACTOR];
            // added to the nearer of the two, so that beta1 = 0 gives the gradient
            C change = scaled - m[e].v[j];
            m[e].v[j] =
                k[WEIGHT1] < C(0.5) ? m[e].v[j] + k[WEIGHT1] * change : scaled - (1 - k[WEIGHT1]) * change;
            v[e].v[j] = k[BETA2] * v[e].v[j] + k[WEIGHT2] * scaled * scaled;
            C square = v[e].v[j];
            if (EXTRAS && max_at)
                square = most[e].v[j] = most[e].v[j] < square || square != square ? square : most[e].v[j];
            p[e][j] = p[e][j] * k[DECAY] -
                      k[STEP_SIZE] * (m[e].v[j] / (sqrt(square) * k[RSQRT_CORRECTION] + k[EPS]));
        }
        if constexpr (sizeof(M) == 2) {  // counters of their own; m and v have different halves of a word
            unsigned words[4];
            random_words(words, step.seed, row.index, k[STEP], i + at, 1u << 31);
            for (int j = 0; j < 4; j++) {
                if (N == 4 || j == i % 4) {
                    m[e].v[j % N] = round_randomly(m[e].v[j % N], words[j]);
                    v[e].v[j % N] = round_randomly(v[e].v[j % N], words[j] >> 16);
                }
            }
        }
        store_vec(m_at + at, pack<M, N>(m[e].v));
        store_vec(v_at + at, pack<M, N>(v[e].v));
        if (EXTRAS && max_at) store_vec(max_at + at, most[e]);
        if (master) store_vec(row.master + i + at, pack<float, N>(p[e]));
        if (IS_BF16<T> && step.randomly) {  // element i has word i % 4 of counter i / 4, whatever N is
            unsigned words[4];
            random_words(words, step.seed, row.index, k[STEP], i + at, 0);
            for (int j = 0; j < 4; j++)
                if (N == 4 || j == i % 4) p[e][j % N] = round_randomly(p[e][j % N], words[j]);
        }
        store_vec(to + at, pack<T, N>(p[e]));
    }
}

template <typename T, bool EXTRAS, typename M = compute_t<T>>
__global__ void adamw_v1(Step step, int t) {
    long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
    update<T, 1, 1, EXTRAS, M>(step, t, i, i < step.rows[t].numel);
}

// 48 registers for 5 blocks. 16-bit types with masters and amsgrad, and moments in bfloat16, need more.
template <typename T, bool EXTRAS, typename M>
constexpr int BLOCKS_PER_SM = sizeof(T) == 8                                 ? 1
                              : sizeof(M) == 2 || (EXTRAS && sizeof(T) == 2) ? 4
                                                                             : 5;

// Short blocks, so that the last ones end at about the same time. The chunks of the grid begin at
// `first_chunk`, the first of this dtype. A block has PART elements from the first aligned place on. The
// first block of a tensor also has the `lead` elements before it.
template <typename T, bool EXTRAS, typename M = compute_t<T>>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM<T, EXTRAS, M>)
    adamw_v2(Step step, long long first_chunk, int tensors) {
    using C = compute_t<T>;
    constexpr int N = sizeof(T) == 8 ? 2 : 4, PART = THREADS * N, PARTS = CHUNK / PART;
    take_over(PART * sizeof(T), THREADS * 5, [&] {  // waits for the previous kernel
        if (threadIdx.x < tensors) prefetch(step.rows + threadIdx.x), prefetch(step.grads + threadIdx.x);
    });
    long long chunk = first_chunk + blockIdx.x / PARTS;
    int t = tensor_of(step.rows, tensors, chunk);
    Row row = step.rows[t];
    // The tensors of a row have vectors at the same places if their addresses, counted in elements, are equal
    // modulo N.
    Word place = Word(row.param) / sizeof(T), others = Word(row.exp_avg) / sizeof(M) ^ place;
    others |= Word(row.exp_avg_sq) / sizeof(M) ^ place;
    others |= step.grads[t] / sizeof(T) ^ place;
    if (EXTRAS && row.master) others |= Word(row.master) / sizeof(C) ^ place;
    if (EXTRAS && row.max_exp_avg_sq) others |= Word(row.max_exp_avg_sq) / sizeof(C) ^ place;
    bool vectors = others % N == 0 && !(place % N && (step.randomly || sizeof(M) == 2));
    int lead = vectors ? -place % 64 : 0;  // to a whole cache line
    long long part = (chunk - row.first_chunk) * CHUNK + blockIdx.x % PARTS * PART,
              begin = part ? part + lead : 0;
    int count = min(part + PART + lead, row.numel) - begin, head = part ? 0 : min(lead, count),
        body = vectors ? (count - head) / N * N : 0;
    int i = threadIdx.x * N, j = THREADS - 1 - threadIdx.x;  // j: of those before and after the body
    if (i < body) update<T, N, 1, EXTRAS, M>(step, t, begin + head + i, 1);
    if (j < count - body)
        update<T, 1, N, EXTRAS, M>(step, t, begin + (j < head ? j : body + j),
                                   j < head ? 1 : count - body - j);
}
