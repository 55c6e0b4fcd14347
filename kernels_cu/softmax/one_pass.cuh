// softmax.cu and causal_softmax.cu: a team of threads keeps a row on chip, so that it is read once.
//
// A row shows all of its columns or a window of them. Those that fill whole 16-byte vectors are kept as
// vectors: thread t of a team of `width` owns the vectors t, t + width, ... ; if several blocks share the
// row, they alternate. The first VECTORS of a thread are in registers, the others in shared memory
// (USE_SHARED). The columns before the first whole vector and after the last one are the edges: a few threads
// hold one element each. Vectors are aligned in the output. An input with another alignment is loaded to
// registers by 4-byte words (load_unaligned). It is copied to shared memory by words, or for 16-bit types by
// vectors that are shifted there (RowPart::realign).
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "exponential.cuh"
#include "row_reduction.cuh"
#include "row_storage.cuh"

// __launch_bounds__ limits the registers for BLOCKS blocks per SM only on H100 and H200, where that was
// measured.
#define ON_SM_90(BLOCKS) (__CUDA_ARCH__ == 900 ? BLOCKS : 1)

// Prefetch a block's part of the columns from `begin` on. The last line of an unaligned row may be left out.
template <class Team, typename T>
__device__ __forceinline__ void prefetch_row(const Team& team, const T* row, int begin, int columns) {
    constexpr int LINE = 128 / sizeof(T);
    int at = begin + (team.block_rank() * team.width + team.thread()) * LINE;
    for (; at < columns; at += team.width * team.num_blocks() * LINE) prefetch(row + at);
}

// Prefetch into L2 what a block reads FETCHED_AHEAD bytes later, in the order of the blocks. The first wave,
// `blocks` per SM, is left out: its blocks start at once. Here each row belongs to one block.
template <class Team, typename T>
__device__ __forceinline__ void prefetch_later_row(unsigned blocks, const Team& team, long long row,
                                                   long long rows, int columns, const T* x, long long x_row) {
    asm volatile("" : "+l"(x), "+r"(columns));  // else the compiler keeps registers alive for the loads
    long long later = row + unsigned(FETCHED_AHEAD / (columns * sizeof(T)));
    if (later >= blocks * MULTIPROCESSORS && later < rows) prefetch_row(team, x + later * x_row, 0, columns);
}
// The same where several blocks share a row and alternate.
template <class Team, typename T>
__device__ __forceinline__ void prefetch_later_chunk(unsigned blocks, const Team& team, int columns,
                                                     const T* x, long long x_row) {
    asm volatile("" : "+l"(x), "+r"(columns));
    unsigned size = team.num_blocks(),
             later = blockIdx.x + unsigned(FETCHED_AHEAD * size / (columns * sizeof(T)));
    if (later < blocks * MULTIPROCESSORS || later >= gridDim.x) return;
    int chunk = team.width * ELEMENTS<T>, first = (team.thread() * size + later % size) * chunk;
    if (first < columns) prefetch(x + later / size * x_row + first, min(columns - first, chunk) * sizeof(T));
}

// take_over() for a block with its part of a row of one or two tensors.
template <class Team, typename... T>
__device__ __forceinline__ void prefetch_and_wait(unsigned threads, const Team& team, int columns,
                                                  const T*... rows) {
    take_over(columns * unsigned((sizeof(T) + ...)) / team.num_blocks(), threads,
              [&] { (prefetch_row(team, rows, 0, columns), ...); });
}

// Write 0 to the columns that the row does not show. With EXACT, vectors that are partly shown are left to
// the edges.
template <typename T, bool EXACT, class Team>
__device__ __forceinline__ void write_masked(T* out, const VectorRange<T, EXACT, 16>& range, int columns,
                                             const Team& team) {
    if constexpr (EXACT) {
        int before = range.begin / ELEMENTS<T>, after = (range.end + ELEMENTS<T> - 1) / ELEMENTS<T> - before;
        Vector<T>* vectors = reinterpret_cast<Vector<T>*>(out);
        for (int i = team.thread(); i < columns / ELEMENTS<T> - after; i += team.width)
            vectors[i < before ? i : i + after] = Vector<T>{};
    } else {
        for (int i = team.thread(); i < columns - (range.end - range.begin); i += team.width)
            out[i < range.begin ? i : i + range.end - range.begin] = T(0.0f);
    }
}

struct NoOp {
    __device__ __forceinline__ void operator()() const {}
};

// Pairwise sum: few roundings, and a short chain of dependent additions.
template <typename C, int N>
__device__ __forceinline__ C pairwise_sum(const C (&r)[N]) {
    C half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half[i] = r[i] + r[i + N / 2];
    if constexpr (N == 2) return half[0];
    else return pairwise_sum(half);
}

// Softmax of a row's columns [begin, end). With MASKED the other columns are set to 0. EXACT
// (row_storage.cuh) includes `out`. 16-bit values in registers are kept as float exponentials, computed once,
// except where registers are scarce. scale is not negative. after_loads() is called once all loads are
// issued.
template <int VECTORS, bool USE_SHARED, bool MASKED, bool EXACT, bool LOG, class Team, typename T,
          class F = NoOp>
__device__ __forceinline__ void team_softmax(T* out, const T* row, int begin, int end, int columns,
                                             Team& team, double scale, const Sink& sink,
                                             void* shared = nullptr, F after_loads = {}) {
    using C = compute_t<T>;
    using E = Exponential<T>;
    // three blocks of 512 threads per SM: 40 registers
    constexpr bool FEW_REGISTERS = USE_SHARED && VECTORS == 2 && !EXACT;
    constexpr bool EDGES = MASKED || !EXACT, STORED = E::STORES_EXPONENTIALS && !LOG,
                   AS_FLOATS = sizeof(T) == 2 && !MASKED && !LOG && !FEW_REGISTERS;
    VectorRange<T, EXACT, USE_SHARED && !EXACT ? 128 : 16> range(out, begin, end);
    OwnedVectors owned(team, range.count);
    int column = EDGES && team.block_rank() == 0 ? range.edge_column(team.thread()) : range.NO_COLUMN,
        at = range.first + owned.first * ELEMENTS<T>;
    bool has_edge = EDGES && range.contains(column);
    RowPart<T, VECTORS, USE_SHARED> part;
    part.shared = static_cast<Vector<T>*>(shared) + team.thread();
    part.trailing =
        static_cast<Vector<T>*>(shared) + owned.in_shared(VECTORS) * owned.width + team.thread() / 32;
    // a sink's logit may be far above the columns
    auto make_exponential = [&] { return E(scale, LOG, 1, !sink.logit); };
    auto read = [&](bool unaligned) {
        part.load(row + at, unaligned, owned, minus_infinity<C>());
        if constexpr (USE_SHARED) {
            copy_groups(VECTORS, owned.rounds, [&](int first) {
                part.copy_async(first, row + at, unaligned, owned, minus_infinity<C>());
            });
            if (unaligned) part.realign(row + at, owned);
        }
        part.edge = has_edge ? load_as(row[column]) : minus_infinity<C>();
        if constexpr (USE_SHARED || MASKED) return 0;  // later, to save registers
        else
            // in each branch: where branches join, the compiler may wait for the loads
            return make_exponential();
    };
    auto early = !EXACT && bytes_past_16(row + at) ? read(true) : read(false);
    after_loads();
    if constexpr (MASKED) write_masked(out, range, columns, team);
    E exponential = [&] {
        if constexpr (USE_SHARED || MASKED) return make_exponential();
        else return early;
    }();
    C local_max = part.edge;
    part.for_registers([&](const Vector<T>& v, int) { local_max = max(local_max, max_element(v)); });
    local_max = team.lanes_max(local_max);
    part.keep_packed(owned.count);
    C first_max = local_max;
    auto base = exponential.base(local_max);
    // Rows in registers have few columns per thread: float is enough for the sum of a thread and a warp, and
    // double has a longer latency.
    conditional_t<USE_SHARED, sum_t<T>, C> thread_sum = 0;
    if (EDGES) {
        C e = exponential(part.edge, base);
        if (has_edge) thread_sum = e;
        if (STORED) part.edge = e;
    }
    auto add = [&](const Vector<T>& v, C(&e)[ELEMENTS<T>]) {
        unpack(v, e);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) e[j] = exponential(e[j], base);
        thread_sum += pairwise_sum(e);
    };
    auto replace = [&](Vector<T>& v, int k) {
        if (MASKED && !owned.contains(k)) return;
        C e[ELEMENTS<T>];
        add(v, e);
        if (STORED) pack(v, e);
    };
    C floats[AS_FLOATS ? VECTORS : 1][ELEMENTS<T>];
    part.for_registers([&](Vector<T>& v, int k) {
        if constexpr (AS_FLOATS) add(v, floats[k]);
        else replace(v, k);
    });
    if constexpr (USE_SHARED) {
        process_groups(VECTORS, owned.rounds, [&](int first, int end) {
            C group_max = local_max;
            part.for_shared(owned, first, end,
                            [&](const Vector<T>& v, int) { group_max = max(group_max, max_element(v)); });
            group_max = team.lanes_max(group_max);
            if (group_max > exponential.rescale_limit(local_max)) {
                base = exponential.base(group_max);
                C factor = exponential.rescale(local_max, base);
                local_max = group_max;
                thread_sum *= factor;
                if constexpr (STORED) part.multiply(owned, first, factor);
            }
            part.for_shared(owned, first, end, replace);
        });
    }
    sum_t<T> sum = team.lanes_sum(thread_sum);
    C row_max = local_max;
    team.combine(exponential, row_max, sum);
    C largest = sink.combined_max(row_max);
    if (sink.logit) sum *= exponential.rescale(row_max, exponential.base(largest));
    sum = sink.add_to<MASKED>(sum, largest, exponential, team.is_leader());
    if constexpr (STORED && sizeof(T) == 4) {  // keeps the factor of Normalizer above 2^-126
        if (largest > exponential.rescale_limit(local_max)) {
            part.multiply(owned, USE_SHARED ? owned.rounds : VECTORS,
                          exponential.rescale(local_max, exponential.base(largest)));
            local_max = largest;
        }
    }
    Normalizer<T> normalizer(exponential, largest, sum, LOG, local_max);
    if constexpr (AS_FLOATS) {
        C factor = exponential.rescale(first_max, exponential.base(largest)) * reciprocal_approx(sum);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
            for (int j = 0; j < ELEMENTS<T>; ++j) floats[k][j] *= factor;
            if (owned.contains(k)) store_vector(out + at + k * owned.step * ELEMENTS<T>, floats[k]);
        }
    }
    part.keep_packed(owned.count);
    auto write = [&](const Vector<T>& v, int k) {
        if (!owned.contains(k)) return;
        C r[ELEMENTS<T>];
        unpack(v, r);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) r[j] = normalizer.template from_stored<LOG>(r[j]);
        store_vector(out + at + k * owned.step * ELEMENTS<T>, r);
    };
    if constexpr (!AS_FLOATS) part.for_registers(write);
    if constexpr (USE_SHARED) part.for_shared(owned, VECTORS, owned.rounds, write);
    if (has_edge || (MASKED && EXACT && column != range.NO_COLUMN))
        out[column] = has_edge ? T(normalizer.template from_stored<LOG>(part.edge)) : T(0.0f);
}

// The gradient of a row. `shared` holds the vectors of y, then those of g, then the trailing vectors of both.
template <int VECTORS, bool USE_SHARED, bool MASKED, bool EXACT, bool LOG, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, int begin, int end, int columns,
                                              Team& team, double scale, const SinkGradient& sink,
                                              void* shared = nullptr) {
    using C = compute_t<T>;
    constexpr bool EDGES = MASKED || !EXACT, LOAD_G_LAST = USE_SHARED && LOG;  // to save registers
    VectorRange<T, EXACT, USE_SHARED && !EXACT ? 128 : 16> range(dx, begin, end);
    OwnedVectors owned(team, range.count);
    int column = EDGES && team.block_rank() == 0 ? range.edge_column(team.thread()) : range.NO_COLUMN,
        at = range.first + owned.first * ELEMENTS<T>;
    bool has_edge = EDGES && range.contains(column);
    RowPart<T, VECTORS, USE_SHARED> ys, gs;
    ys.shared = static_cast<Vector<T>*>(shared) + team.thread();
    gs.shared = ys.shared + owned.in_shared(VECTORS) * owned.width;
    ys.trailing =
        static_cast<Vector<T>*>(shared) + 2 * owned.in_shared(VECTORS) * owned.width + team.thread() / 32;
    gs.trailing = ys.trailing + owned.in_shared(VECTORS) * (owned.width / 32);
    auto read = [&](bool unaligned) {
        ys.load(y + at, unaligned, owned, C(0));
        if (!LOAD_G_LAST || !unaligned) gs.load(g + at, unaligned, owned, C(0));
        if constexpr (USE_SHARED) {
            copy_groups(VECTORS, owned.rounds, [&](int first) {
                ys.copy_async(first, y + at, unaligned, owned, C(0));
                gs.copy_async(first, g + at, unaligned, owned, C(0));
            });
            if (unaligned) {
                ys.realign(y + at, owned);
                gs.realign(g + at, owned);
            }
        }
        if (LOAD_G_LAST && unaligned) gs.load(g + at, unaligned, owned, C(0));
        ys.edge = has_edge ? load_as(y[column]) : C(0);
        gs.edge = has_edge ? load_as(g[column]) : C(0);
    };
    if (!EXACT && (bytes_past_16(y + at) | bytes_past_16(g + at))) read(true);
    else read(false);
    if constexpr (MASKED) write_masked(dx, range, columns, team);
    Gradient<T> gradient(scale, LOG);
    C total = gradient.template term<LOG>(ys.edge, gs.edge);
    auto add = [&](const Vector<T>& v, const Vector<T>& w) {
        C a[ELEMENTS<T>], b[ELEMENTS<T>], partial = 0;
        unpack(v, a);
        unpack(w, b);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) partial += gradient.template term<LOG>(a[j], b[j]);
        total += partial;
    };
    auto write = [&](const Vector<T>& v, const Vector<T>& w, T* to) {
        C a[ELEMENTS<T>], b[ELEMENTS<T>];
        unpack(v, a);
        unpack(w, b);
#pragma unroll
        for (int j = 0; j < ELEMENTS<T>; ++j) a[j] = gradient.template dx<LOG>(a[j], b[j], total);
        store_vector(to, a);
    };
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (!MASKED || owned.contains(k)) add(ys.registers[k], gs.registers[k]);
    if constexpr (USE_SHARED) {
        process_groups(VECTORS, owned.rounds, [&](int first, int end) {
            ys.template for_shared<(VECTORS > 4 ? 1 : 2)>(
                owned, first, end, [&](const Vector<T>& v, int k) { add(v, gs.shared_vector(k, owned)); });
        });
    }
    total = sink.add_to(team.reduce_sum(total), team.is_leader());
    ys.keep_packed(owned.count);
    gs.keep_packed(owned.count);
    ys.for_registers([&](const Vector<T>& v, int k) {
        if (owned.contains(k)) write(v, gs.registers[k], dx + at + k * owned.step * ELEMENTS<T>);
    });
    if constexpr (USE_SHARED) {
        ys.for_shared(owned, VECTORS, owned.rounds, [&](const Vector<T>& v, int k) {
            if (owned.contains(k))
                write(v, gs.shared_vector(k, owned), dx + at + k * owned.step * ELEMENTS<T>);
        });
    }
    if (has_edge || (MASKED && EXACT && column != range.NO_COLUMN))
        dx[column] = has_edge ? T(gradient.template dx<LOG>(ys.edge, gs.edge, total)) : T(0.0f);
}
