// rope: rotary position embedding. Pairs of elements of each head are rotated by angles that depend on the
// token's position.
//
//   out_a = scale * (x_a cos_a - x_b sin_a)
//   out_b = scale * (x_b cos_b + x_a sin_b)
//
// Pairing    half: a = i, b = i + rotary_dim / 2. Interleaved: a = 2 i, b = 2 i + 1. Both count from
//            rotary_offset. Elements outside of the rotated slice are copied. The transpose, which is the
//            gradient and the rotation by minus the angles, is the same with sin_a and sin_b exchanged and
//            negated.
// Layout     x is (batch, sequence, heads, head_dim) with any strides; k is the same with another number of
//            heads. cos and sin are tables of `rows` positions. A table of `width` rotary_dim / 2 has one
//            angle per pair, one of rotary_dim an angle per element. positions[b * positions_b + s] is a
//            token's row of the table; with a null pointer the row is s.
// Launch     1-D grids; the comment of each kernel gives grid and block. Up to three small kernels run first
//            where they are needed: rope_positions, rope_angles, rope_sections.
//
// H200, q and k of 168 MB in total (float 336 MB), half pairing, speed relative to a copy of the same bytes:
//
// version  idea                                                        bf16, heads of 64 128    256    float
// v1       one thread per pair of one head                             0.19                            0.38
// v2       one thread per two vectors of up to 16 bytes, one in each half                 0.984  0.992  0.994
//          of the rotated slice; other shapes use v1
// v3       one thread per vector of two neighbouring heads; in half    1.00              1.01   1.013  1.000
//          pairing shuffles exchange the elements; other shapes use v2
//
// 42 MB: v2 1.00, v3 1.07. v3 interleaved: bfloat16 1.002, 1.007, 1.006, float heads of 64 0.996.
// Experiments and dead ends: docs/notes/rope.md
#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/pdl.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/vec.cuh"

constexpr int UNROTATED = -1;             // in positions: the token belongs to no sequence and is copied
constexpr int OUT_OF_RANGE = 0x7fffffff;  // in positions: beyond the table; the token becomes NaN

template <typename A>
struct Angles {
    A cos_a, sin_a, cos_b, sin_b;
};

// The angles of a pair. Its first element takes column `a` of the table's row, its second takes column `b`.
template <typename A, typename C>
__device__ __forceinline__ Angles<A> load_angles(const C* cos, const C* sin, int a, int b, bool transpose,
                                                 A scale) {
    Angles<A> t = {scale * A(cos[a]), scale * A(sin[a]), scale * A(cos[b]), scale * A(sin[b])};
    if (transpose) t = {t.cos_a, -t.sin_b, t.cos_b, -t.sin_a};
    return t;
}

// x cos + y sin, computed in A for a result in T. If both are float, the rounding error of y sin would be
// visible where the two terms cancel: a second FMA computes that error and the result is corrected (Kahan's
// method). An infinite y would turn the correction into NaN.
template <typename T, typename A>
__device__ __forceinline__ A sum_of_products(A x, A cos, A y, A sin) {
    A product = y * sin, sum = fma(x, cos, product);
    if constexpr (sizeof(T) == sizeof(float) && sizeof(A) == sizeof(float)) {
        A compensated = sum + fma(y, sin, -product);
        if (!isnan(compensated)) return compensated;
    }
    return sum;
}

// The type in which x and the table's values are multiplied: the wider of the two, at least float. Float x
// and a double table give double, which is slow on GPUs with few double units. Only the angles of float x and
// users' own double tables lead to it.
template <typename T, typename C>
using math_t = decltype(compute_t<T>() * compute_t<C>());

template <typename T, typename A>
__device__ __forceinline__ void rotate(A& a, A& b, Angles<A> t) {
    A first = a;
    a = sum_of_products<T>(first, t.cos_a, b, -t.sin_a);
    b = sum_of_products<T>(b, t.cos_b, first, t.sin_b);
}

// ---- before the rotation

// positions[t] of the tokens t = b * sequence + s: a row of the table, UNROTATED or OUT_OF_RANGE. With ids
// the row is ids[t]. Otherwise it is s, or in a packed sequence the distance from its first token; plus
// starts[sequence] if given. Packed sequences begin at the tokens cu_seqlens / cp_size. Under context
// parallelism a sequence has 2 cp_size chunks, and this GPU has the chunks cp_rank and 2 cp_size
// - 1 - cp_rank.
template <typename ID>
__global__ void rope_positions(int* positions, const ID* ids, const ID* cu_seqlens, const ID* starts,
                               long long tokens, int sequence, int sequences, int rows, int cp_size,
                               int cp_rank) {
    wait_for_previous();
    long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    long long b = t / sequence, p = t % sequence, length = sequence;
    if (ids) {
        p = ids[t];
    } else {
        if (cu_seqlens) {
            int first = 0, last = sequences + 1;  // the first boundary beyond t is in [first, last]
            while (first < last) {
                int middle = (first + last) / 2;
                if (cu_seqlens[middle] / cp_size <= t) first = middle + 1;
                else last = middle;
            }
            b = first - 1;
            if (b < 0 || b >= sequences) {
                positions[t] = UNROTATED;
                return;
            }
            p = t - cu_seqlens[b] / cp_size;
            length = cu_seqlens[b + 1] / cp_size - cu_seqlens[b] / cp_size;
        }
        if (cp_size > 1) {
            if (p < length / 2) p += cp_rank * length / 2;
            else p += length * cp_size - (cp_rank + 1) * length / 2 - length / 2;
        }
        if (starts) p += starts[b];
    }
    positions[t] = 0 <= p && p < rows ? int(p) : OUT_OF_RANGE;
}

// The cosine and the sine of n angles of any size, in M. In float the error is up to 1.5 ulp: 16-bit results
// do not show it, float results do, so float x takes double.
__device__ __forceinline__ void sine_and_cosine(float angle, float* sine, float* cosine) {
    sincosf(angle, sine, cosine);
}
__device__ __forceinline__ void sine_and_cosine(double angle, double* sine, double* cosine) {
    sincos(angle, sine, cosine);
}

template <typename A, typename M>
__global__ void rope_angles(M* cos, M* sin, const A* angles, long long n) {
    wait_for_previous();
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    sine_and_cosine(M(angles[i]), &sin[i], &cos[i]);
}

// Tables with one row per token, for tokens with several positions, such as (time, height, width). The first
// end0 pairs take the row positions[0][t], those up to end1 positions[1][t], and the rest positions[2][t].
template <typename C>
__global__ void rope_sections(C* cos_out, C* sin_out, const C* cos, const C* sin, const int* positions,
                              long long tokens, int width, int pairs, bool interleaved, int end0, int end1,
                              int rows, long long row_stride) {
    wait_for_previous();
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, t = i / width;
    if (t >= tokens) return;
    int column = i % width;
    int pair = width == pairs ? column : interleaved ? column / 2 : column % pairs;
    int position = positions[((pair >= end0) + (pair >= end1)) * tokens + t];
    bool inside = unsigned(position) < unsigned(rows);
    cos_out[i] = inside ? cos[position * row_stride + column] : C(__int_as_float(0x7fc00000));
    sin_out[i] = inside ? sin[position * row_stride + column] : C(__int_as_float(0x7fc00000));
}

// ---- the rotation. `rest`: the number of elements of a head to copy, 0 in place. scale * cos and scale *
// sin are rounded once more.

// v1: grid ceil(tokens * (heads + k_heads) * (rotary_dim / 2 + rest) / 256), block 256.
template <typename T, typename C>
__global__ void rope_v1(T* out, T* k_out, const T* x, const T* k, const C* cos, const C* sin,
                        const int* positions, long long tokens, int sequence, int heads, int k_heads,
                        int rotary_dim, int rotary_offset, int rest, int rows, int width, long long cos_b,
                        long long cos_s, long long positions_b, long long out_b, long long out_s,
                        long long out_h, long long out_d, long long k_out_b, long long k_out_s,
                        long long k_out_h, long long k_out_d, long long x_b, long long x_s, long long x_h,
                        long long x_d, long long k_b, long long k_s, long long k_h, long long k_d,
                        bool interleaved, bool transpose, double scale) {
    using A = math_t<T, C>;
    int pairs = rotary_dim / 2;
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    int item = i % (pairs + rest);  // a pair, or an element to copy
    i /= pairs + rest;
    int h = i % (heads + k_heads);
    long long token = i / (heads + k_heads);
    if (token >= tokens) return;
    long long b = token / sequence, s = token % sequence;
    if (h < heads) {
        out += b * out_b + s * out_s + h * out_h;
        x += b * x_b + s * x_s + h * x_h;
    } else {
        out = k_out + b * k_out_b + s * k_out_s + (h - heads) * k_out_h;
        x = k + b * k_b + s * k_s + (h - heads) * k_h;
        out_d = k_out_d;
        x_d = k_d;
    }
    if (item >= pairs) {
        int d = item - pairs;
        if (d >= rotary_offset) d += rotary_dim;
        out[d * out_d] = x[d * x_d];
        return;
    }
    int a = interleaved ? 2 * item : item, c = interleaved ? a + 1 : a + pairs;
    T x_a = x[(rotary_offset + a) * x_d], x_c = x[(rotary_offset + c) * x_d];
    int position = positions ? positions[b * positions_b + s] : int(s);
    if (position != UNROTATED) {
        A nan = __int_as_float(0x7fc00000);
        Angles<A> angles = {nan, nan, nan, nan};
        if (unsigned(position) < unsigned(rows)) {
            long long row = b * cos_b + position * cos_s;
            bool full = width == rotary_dim;
            angles =
                load_angles<A>(cos + row, sin + row, full ? a : item, full ? c : item, transpose, A(scale));
        }
        A y_a = load_as(x_a), y_c = load_as(x_c);
        rotate<T>(y_a, y_c, angles);
        x_a = T(y_a);
        x_c = T(y_c);
    }
    out[(rotary_offset + a) * out_d] = x_a;
    out[(rotary_offset + c) * out_d] = x_c;
}

// N values of a table's row, in loads of at most 16 bytes.
template <int N, typename A, typename C>
__device__ __forceinline__ void load_table(A (&to)[N], const C* row) {
    constexpr int CHUNK = N * sizeof(C) <= 16 ? N : 16 / sizeof(C);
#pragma unroll
    for (int i = 0; i < N; i += CHUNK) {
        Vec<C, CHUNK> chunk = load_vec_kept<C, CHUNK>(row + i);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) to[i + j] = A(chunk.v[j]);
    }
}

// Multiplies by `factor` unless it is 1, as in most calls. The branch is uniform and costs less than the
// multiplications.
template <int N, typename A>
__device__ __forceinline__ void multiply(A (&v)[N], A factor) {
    if (factor != A(1)) {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] *= factor;
    }
}

// Half pairing: rotates a[e] with b[e]. With a FULL table cos_b and sin_b point to b's own angles.
template <typename T, bool FULL, typename A, typename C, int E>
__device__ __forceinline__ void rotate_halves(A (&a)[E], A (&b)[E], const C* cos_a, const C* sin_a,
                                              const C* cos_b, const C* sin_b, A factor) {
    A ca[E], sa[E];
    load_table(ca, cos_a);
    load_table(sa, sin_a);
    multiply(ca, factor);
    multiply(sa, factor);
    if constexpr (FULL) {
        A cb[E], sb[E];
        load_table(cb, cos_b);
        load_table(sb, sin_b);
        multiply(cb, factor);
        multiply(sb, factor);
#pragma unroll
        for (int e = 0; e < E; e++) rotate<T, A>(a[e], b[e], {ca[e], sa[e], cb[e], sb[e]});
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) rotate<T, A>(a[e], b[e], {ca[e], sa[e], ca[e], sa[e]});
    }
}

// Interleaved pairing: the elements of a pair are neighbours. A table has N = E / 2 columns for E elements of
// x, or E with an angle per element. For the transpose `s` is negated.
template <typename T, typename A, int E, int N>
__device__ __forceinline__ void rotate_neighbours(A (&a)[E], const A (&c)[N], const A (&s)[N],
                                                  bool transpose) {
    constexpr int ANGLES_PER_PAIR = N / (E / 2);
#pragma unroll
    for (int i = 0; i < E / 2; i++) {
        int p = i * ANGLES_PER_PAIR, q = p + ANGLES_PER_PAIR - 1;
        if (ANGLES_PER_PAIR == 2 && transpose) rotate<T, A>(a[2 * i], a[2 * i + 1], {c[p], s[q], c[q], s[p]});
        else rotate<T, A>(a[2 * i], a[2 * i + 1], {c[p], s[p], c[q], s[q]});
    }
}

// n / d for n < 2^31 by constants of d (cukern/ops/rope/versions.py). A division takes 20 instructions.
__device__ __forceinline__ unsigned divide(unsigned n, unsigned magic, unsigned shift) {
    return (__umulhi(n, magic) + n) >> shift;
}

// v2: block (x, y): x threads per head, y heads. x is rotary_dim / 2 / E, plus half the number of vectors to
// copy. The order of items: the heads of a token, those of k after those of x; then the tokens in the order
// of memory: `inner` of them follow each other in the sequence, or in the batch if batch_inner. Strides,
// rotary_dim, rotary_offset and rest are in vectors of E elements; head_dim has stride 1.
template <typename T, typename C, bool INTERLEAVED, bool FULL>
constexpr int V2_BLOCKS_PER_SM = FULL || (sizeof(T) == 4 && sizeof(C) == 8) ? 4
                                 : INTERLEAVED ? 8
                                               // blocks of 256 threads per SM that the registers allow
                                               : 6;

template <typename T, typename C, int E, bool INTERLEAVED, bool FULL>
__global__ void __launch_bounds__(256, V2_BLOCKS_PER_SM<T, C, INTERLEAVED, FULL>)
    rope_v2(T* out, T* k_out, const T* x, const T* k, const C* cos, const C* sin, const int* positions,
            unsigned items, unsigned inner, unsigned inner_magic, unsigned inner_shift, unsigned heads,
            unsigned k_heads, unsigned heads_magic, unsigned heads_shift, unsigned rotary_dim,
            unsigned rotary_offset, unsigned rest, unsigned rows, unsigned cos_b, unsigned cos_s,
            unsigned positions_b, unsigned out_b, unsigned out_s, unsigned out_h, unsigned k_out_b,
            unsigned k_out_s, unsigned k_out_h, unsigned x_b, unsigned x_s, unsigned x_h, unsigned k_b,
            unsigned k_s, unsigned k_h, bool batch_inner, bool transpose, double scale) {
    using A = math_t<T, C>;
    using Vector = Vec<T, E>;
    unsigned item = blockIdx.x * blockDim.y + threadIdx.y;
    if (item >= items) return;
    unsigned token = divide(item, heads_magic, heads_shift), h = item - token * (heads + k_heads);
    unsigned outer_index = divide(token, inner_magic, inner_shift), inner_index = token - outer_index * inner;
    unsigned b = batch_inner ? inner_index : outer_index, s = batch_inner ? outer_index : inner_index;
    const Vector* from = reinterpret_cast<const Vector*>(x);
    Vector* to = reinterpret_cast<Vector*>(out);
    if (h < heads) {
        from += b * x_b + s * x_s + h * x_h;
        to += b * out_b + s * out_s + h * out_h;
    } else {
        h -= heads;
        from = reinterpret_cast<const Vector*>(k) + (b * k_b + s * k_s + h * k_h);
        to = reinterpret_cast<Vector*>(k_out) + (b * k_out_b + s * k_out_s + h * k_out_h);
    }
    unsigned half = rotary_dim / 2, first = threadIdx.x;
    take_over(blockDim.x * blockDim.y * 2 * sizeof(Vector), 256 * V2_BLOCKS_PER_SM<T, C, INTERLEAVED, FULL>,
              [&] {
                  if (first >= half) return;
                  prefetch(&from[rotary_offset + first]);
                  prefetch(&from[rotary_offset + first + half]);
              });
    int position = positions ? positions[b * positions_b + s] : int(s);
    if (first >= half) {  // this thread copies two vectors outside of the rotated slice
        for (unsigned v = first - half; v < rest; v += (rest + 1) / 2) {
            unsigned at = v < rotary_offset ? v : v + rotary_dim;
            store_vec(&to[at].v[0], load_vec<T, E>(from[at].v));
        }
        return;
    }
    // In half pairing the transpose is the rotation of (b, a) instead of (a, b), which exchanges the cosines
    // but not the sines.
    bool exchange = transpose && !INTERLEAVED;
    unsigned first_a = exchange ? half : 0, first_b = half - first_a;
    from += rotary_offset + first;
    to += rotary_offset + first;
    Vector a = load_vec<T, E>(from[first_a].v), c = load_vec<T, E>(from[first_b].v);
    if (position == UNROTATED) {
        store_vec(to[first_a].v, a);
        store_vec(to[first_b].v, c);
        return;
    }
    bool inside = unsigned(position) < rows;
    unsigned long long row = (b * cos_b + (inside ? position : 0) * cos_s) * (unsigned long long)E;
    A factor = inside ? A(scale) : A(__int_as_float(0x7fc00000)), y_a[E], y_c[E];
    unpack(y_a, a);
    unpack(y_c, c);
    if constexpr (INTERLEAVED) {
        constexpr int N = FULL ? E : E / 2;
        cos += row + first * N;
        sin += row + first * N;
        A ca[N], sa[N], cb[N], sb[N];
        load_table(ca, cos);
        load_table(sa, sin);
        load_table(cb, cos + half * N);
        load_table(sb, sin + half * N);
        multiply(ca, factor);
        multiply(cb, factor);
        multiply(sa, transpose ? -factor : factor);
        multiply(sb, transpose ? -factor : factor);
        rotate_neighbours<T>(y_a, ca, sa, transpose);
        rotate_neighbours<T>(y_c, cb, sb, transpose);
    } else {
        cos += row + first * E;
        sin += row + first * E;
        rotate_halves<T, FULL>(y_a, y_c, cos + (FULL ? first_a * E : 0), sin, cos + first_b * E,
                               sin + half * E, factor);
    }
    a = pack<T>(y_a);
    c = pack<T>(y_c);
    if constexpr (INTERLEAVED) {  // plain stores need one register too many on sm_80
        store_vec_past_l1(to[first_a].v, a);
        store_vec_past_l1(to[first_b].v, c);
    } else {
        store_vec(to[first_a].v, a);
        store_vec(to[first_b].v, c);
    }
}

// v3: one thread rotates the same vector of two neighbouring heads. So a warp accesses whole cache lines
// where half a head is less than a line, and with a FULL table each vector of the table is read once for both
// heads. In half pairing the pairs' other elements come from lane `half` away. Block (x, y): x = rotary_dim /
// E threads, a power of 2 of at most 32; y pairs of heads; whole warps. Arguments as in v2, but items, heads
// and k_heads count pairs of heads, and nothing is copied.
template <typename C>
constexpr int V3_BLOCKS_PER_SM = sizeof(C) == 8 ? 4 : 5;

template <typename T, typename C, int E, bool INTERLEAVED, bool FULL>
__global__ void __launch_bounds__(256, V3_BLOCKS_PER_SM<C>)
    rope_v3(T* out, T* k_out, const T* x, const T* k, const C* cos, const C* sin, const int* positions,
            unsigned items, unsigned inner, unsigned inner_magic, unsigned inner_shift, unsigned heads,
            unsigned k_heads, unsigned heads_magic, unsigned heads_shift, unsigned rotary_dim,
            unsigned rotary_offset, unsigned rows, unsigned cos_b, unsigned cos_s, unsigned positions_b,
            unsigned out_b, unsigned out_s, unsigned out_h, unsigned k_out_b, unsigned k_out_s,
            unsigned k_out_h, unsigned x_b, unsigned x_s, unsigned x_h, unsigned k_b, unsigned k_s,
            unsigned k_h, bool batch_inner, bool transpose, double scale) {
    using A = math_t<T, C>;
    using Vector = Vec<T, E>;
    // clamped: all lanes take part in the shuffles
    unsigned number = blockIdx.x * blockDim.y + threadIdx.y, item = min(number, items - 1);
    unsigned token = divide(item, heads_magic, heads_shift), h = item - token * (heads + k_heads);
    unsigned outer_index = divide(token, inner_magic, inner_shift), inner_index = token - outer_index * inner;
    unsigned b = batch_inner ? inner_index : outer_index, s = batch_inner ? outer_index : inner_index;
    const Vector* from = reinterpret_cast<const Vector*>(x);
    Vector* to = reinterpret_cast<Vector*>(out);
    if (h < heads) {
        from += b * x_b + s * x_s + 2 * h * x_h;
        to += b * out_b + s * out_s + 2 * h * out_h;
    } else {
        h -= heads;
        from = reinterpret_cast<const Vector*>(k) + (b * k_b + s * k_s + 2 * h * k_h);
        to = reinterpret_cast<Vector*>(k_out) + (b * k_out_b + s * k_out_s + 2 * h * k_out_h);
        x_h = k_h;
        out_h = k_out_h;
    }
    unsigned half = rotary_dim / 2, first = threadIdx.x;
    from += rotary_offset + first;
    to += rotary_offset + first;
    take_over(blockDim.x * blockDim.y * 2 * sizeof(Vector), 256 * V3_BLOCKS_PER_SM<C>, [&] {
        prefetch(&from[0]);
        prefetch(&from[x_h]);
    });
    int position = positions ? positions[b * positions_b + s] : int(s);
    Vector v[2] = {};
    if (number < items) {
        v[0] = load_vec<T, E>(from[0].v);
        v[1] = load_vec<T, E>(from[x_h].v);
    }
    bool inside = unsigned(position) < rows, low = first < half;
    unsigned long long row = (b * cos_b + (inside ? position : 0) * cos_s) * (unsigned long long)E;
    constexpr int N = INTERLEAVED && !FULL ? E / 2 : E;
    unsigned column = FULL || INTERLEAVED || low ? first : first - half;
    A factor = inside ? A(scale) : A(__int_as_float(0x7fc00000)), c[N], d[N];
    load_table(c, cos + row + column * N);
    load_table(d, sin + row + (FULL && !INTERLEAVED && transpose ? first ^ half : column) * N);
    multiply(c, factor);
    multiply(d, (!INTERLEAVED && low) != transpose ? -factor : factor);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        A a[E];
        unpack(a, v[i]);
        if constexpr (INTERLEAVED) {
            rotate_neighbours<T>(a, c, d, transpose);
        } else {
            A o[E];
            unpack(o, shuffled_xor(v[i], half));
#pragma unroll
            for (int e = 0; e < E; e++) a[e] = sum_of_products<T>(a[e], c[e], o[e], d[e]);
        }
        if (position != UNROTATED) v[i] = pack<T>(a);
    }
    if (number >= items) return;
    store_vec(to[0].v, v[0]);
    store_vec(to[out_h].v, v[1]);
}
