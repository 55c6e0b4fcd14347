// What softmax.cu and causal_softmax.cu do with a row that a team of threads holds on chip, so that it is read once.
//
// Of the columns that a row shows, all or a window of them, those that fill whole vectors, of 16 bytes at multiples of 16, are held as
// such: thread t of a team of `width` has the t-th, the (t + width)-th, ..., in turns with the row's other blocks, if any; the first
// VECTORS of them in registers, the others, with SLOTS, in shared memory. Those before the first such vector and behind the last, the edges,
// are one element each for a few threads. Multiples of 16 bytes are those of what is written; what is read and begins elsewhere is read to
// registers by words (load_apart), to shared memory by words, or in 16-bit types by vectors that are shifted there.
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "exponential.cuh"
#include "row_reduction.cuh"
#include "row_storage.cuh"

// Registers are kept free for BLOCKS blocks on a multiprocessor of an H100 or H200: there it was measured.
#define ON_SM_90(BLOCKS) (__CUDA_ARCH__ == 900 ? BLOCKS : 1)

// A block's part of the columns from `begin` on. The line that an unaligned row ends in may be left out.
template <class Team, typename T>
__device__ __forceinline__ void prefetch_row(const Team& team, const T* row, int begin, int columns) {
    constexpr int LINE = 128 / sizeof(T);
    int at = begin + (team.rank() * team.width + team.lane()) * LINE;
    for (; at < columns; at += team.width * team.size() * LINE) prefetch(row + at);
}

// What a block reads that comes so much later as there are blocks with FETCHED_AHEAD bytes, unless it is among the first, which come at once,
// `blocks` to a multiprocessor. Where each of `rows` rows is a block's,
template <class Team, typename T>
__device__ __forceinline__ void prefetch_later_row(unsigned blocks, const Team& team, long long row, long long rows, int columns,
                                                   const T* x, long long x_row) {
    asm volatile("" : "+l"(x), "+r"(columns));  // else the compiler keeps for the loads what it needs here
    long long later = row + unsigned(FETCHED_AHEAD / (columns * sizeof(T)));
    if (later >= blocks * MULTIPROCESSORS && later < rows) prefetch_row(team, x + later * x_row, 0, columns);
}
// and where several share one, in turns.
template <class Team, typename T>
__device__ __forceinline__ void prefetch_later_turns(unsigned blocks, const Team& team, int columns, const T* x, long long x_row) {
    asm volatile("" : "+l"(x), "+r"(columns));
    unsigned size = team.size(), later = blockIdx.x + unsigned(FETCHED_AHEAD * size / (columns * sizeof(T)));
    if (later < blocks * MULTIPROCESSORS || later >= gridDim.x) return;
    int turn = team.width * WIDTH<T>, first = (team.lane() * size + later % size) * turn;
    if (first < columns) prefetch(x + later / size * x_row + first, min(columns - first, turn) * sizeof(T));
}

// take_over() of a block with its part of a row, of one or two tensors.
template <class Team, typename... T>
__device__ __forceinline__ void take_over_row(unsigned threads, const Team& team, int columns, const T*... rows) {
    take_over(columns * unsigned((sizeof(T) + ...)) / team.size(), threads, [&] { (prefetch_row(team, rows, 0, columns), ...); });
}

// 0 in the columns that the row does not show; of those in vectors that it cuts, EXACT leaves to the edges.
template <typename T, bool EXACT, class Team>
__device__ __forceinline__ void write_hidden(T* out, const Cut<T, EXACT, 16>& cut, int columns, const Team& team) {
    if constexpr (EXACT) {
        int before = cut.begin / WIDTH<T>, after = (cut.end + WIDTH<T> - 1) / WIDTH<T> - before;
        Words<T>* vectors = reinterpret_cast<Words<T>*>(out);
        for (int i = team.lane(); i < columns / WIDTH<T> - after; i += team.width) vectors[i < before ? i : i + after] = Words<T>{};
    } else {
        for (int i = team.lane(); i < columns - (cut.end - cut.begin); i += team.width)
            out[i < cut.begin ? i : i + cut.end - cut.begin] = T(0.0f);
    }
}

struct Nothing {
    __device__ __forceinline__ void operator()() const {}
};

// In pairs, so that there are few roundings, and few that wait for one another.
template <typename C, int N>
__device__ __forceinline__ C sum_of(const C (&r)[N]) {
    C half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half[i] = r[i] + r[i + N / 2];
    if constexpr (N == 2) return half[0];
    else return sum_of(half);
}

// A row's columns [begin, end), the others are 0 with MASKED. EXACT also of `out`. 16-bit values in registers become floats, so
// that no exponential is computed twice, but where the registers are worth more. scale is not negative. meanwhile() is called once all loads
// are asked for.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, bool LOG, class Team, typename T, class F = Nothing>
__device__ __forceinline__ void team_softmax(T* out, const T* row, int begin, int end, int columns, Team& team, double scale,
                                             const Sink& sink, void* slots = nullptr, F meanwhile = {}) {
    using C = compute_t<T>;
    using E = Exponential<T>;
    constexpr bool FULL = SLOTS && VECTORS == 2 && !EXACT;  // three blocks of 512 threads: 40 registers
    constexpr bool EDGES = MASKED || !EXACT, KEPT = E::KEPT && !LOG, FLOATS = sizeof(T) == 2 && !MASKED && !LOG && !FULL;
    Cut<T, EXACT, SLOTS && !EXACT ? 128 : 16> cut(out, begin, end);
    Share share(team, cut.count);
    int column = EDGES && team.rank() == 0 ? cut.edge(team.lane()) : cut.NOWHERE, at = cut.first + share.first * WIDTH<T>;
    bool shown = EDGES && cut.shows(column);
    Held<T, VECTORS, SLOTS> held;
    held.slots = static_cast<Words<T>*>(slots) + team.lane();
    held.tails = static_cast<Words<T>*>(slots) + share.slots(VECTORS) * share.width + team.lane() / 32;
    auto constants = [&] { return E(scale, LOG, 1, !sink.logit); };  // a logit may be far above the columns
    auto read = [&](bool apart) {
        held.load(row + at, apart, share, minus_infinity<C>());
        if constexpr (SLOTS) {
            fetch_groups(VECTORS, share.rounds, [&](int first) { held.fetch(first, row + at, apart, share, minus_infinity<C>()); });
            if (apart) held.put_together(row + at, share);
        }
        held.edge = shown ? load_as(row[column]) : minus_infinity<C>();
        if constexpr (SLOTS || MASKED) return 0;  // for want of registers
        else return constants();                  // before the ways join, where loads may be waited for
    };
    auto early = !EXACT && bytes_past_16(row + at) ? read(true) : read(false);
    meanwhile();
    if constexpr (MASKED) write_hidden(out, cut, columns, team);
    E exponential = [&] {
        if constexpr (SLOTS || MASKED) return constants();
        else return early;
    }();
    C own = held.edge;
    held.each([&](const Words<T>& v, int) { own = max(own, largest_of(v)); });
    own = team.near_max(own);
    held.keep_packed(share.own);
    C first_own = own;
    auto base = exponential.base(own);
    // Rows in registers have few columns a thread: float does for its sum, and for its warp's, and a double would be some cycles late.
    conditional_t<SLOTS, sum_t<T>, C> near = 0;
    if (EDGES) {
        C e = exponential(held.edge, base);
        if (shown) near = e;
        if (KEPT) held.edge = e;
    }
    auto add = [&](const Words<T>& v, C(&e)[WIDTH<T>]) {
        unpack(v, e);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) e[j] = exponential(e[j], base);
        near += sum_of(e);
    };
    auto take = [&](Words<T>& v, int k) {
        if (MASKED && !share.has(k)) return;
        C e[WIDTH<T>];
        add(v, e);
        if (KEPT) pack(v, e);
    };
    C floats[FLOATS ? VECTORS : 1][WIDTH<T>];
    held.each([&](Words<T>& v, int k) {
        if constexpr (FLOATS) add(v, floats[k]);
        else take(v, k);
    });
    if constexpr (SLOTS) {
        take_groups(VECTORS, share.rounds, [&](int first, int end) {
            C here = own;
            held.each(share, first, end, [&](const Words<T>& v, int) { here = max(here, largest_of(v)); });
            here = team.near_max(here);
            if (here > exponential.reach(own)) {
                base = exponential.base(here);
                C factor = exponential.rescale(own, base);
                own = here;
                near *= factor;
                if constexpr (KEPT) held.multiply(share, first, factor);
            }
            held.each(share, first, end, take);
        });
    }
    sum_t<T> sum = team.near_sum(near);
    C found = own;
    team.combine(exponential, found, sum);
    C largest = sink.largest(found);
    if (sink.logit) sum *= exponential.rescale(found, exponential.base(largest));
    sum = sink.add_to<MASKED>(sum, largest, exponential, team.leads());
    if constexpr (KEPT && sizeof(T) == 4) {  // so that no factor of End is below 2^-126
        if (largest > exponential.reach(own)) {
            held.multiply(share, SLOTS ? share.rounds : VECTORS, exponential.rescale(own, exponential.base(largest)));
            own = largest;
        }
    }
    End<T> ending(exponential, largest, sum, LOG, own);
    if constexpr (FLOATS) {
        C factor = exponential.rescale(first_own, exponential.base(largest)) * reciprocal_approx(sum);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
            for (int j = 0; j < WIDTH<T>; ++j) floats[k][j] *= factor;
            if (share.has(k)) store_vector(out + at + k * share.step * WIDTH<T>, floats[k]);
        }
    }
    held.keep_packed(share.own);
    auto write = [&](const Words<T>& v, int k) {
        if (!share.has(k)) return;
        C r[WIDTH<T>];
        unpack(v, r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) r[j] = ending.template from<LOG>(r[j]);
        store_vector(out + at + k * share.step * WIDTH<T>, r);
    };
    if constexpr (!FLOATS) held.each(write);
    if constexpr (SLOTS) held.each(share, VECTORS, share.rounds, write);
    if (shown || (MASKED && EXACT && column != cut.NOWHERE)) out[column] = shown ? T(ending.template from<LOG>(held.edge)) : T(0.0f);
}

// `slots` has as much room for g behind that for y, and so have the tails behind both.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, bool LOG, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, int begin, int end, int columns, Team& team, double scale,
                                              const SinkGradient& sink, void* slots = nullptr) {
    using C = compute_t<T>;
    constexpr bool EDGES = MASKED || !EXACT, LATE = SLOTS && LOG;  // LATE: registers are rare
    Cut<T, EXACT, SLOTS && !EXACT ? 128 : 16> cut(dx, begin, end);
    Share share(team, cut.count);
    int column = EDGES && team.rank() == 0 ? cut.edge(team.lane()) : cut.NOWHERE, at = cut.first + share.first * WIDTH<T>;
    bool shown = EDGES && cut.shows(column);
    Held<T, VECTORS, SLOTS> ys, gs;
    ys.slots = static_cast<Words<T>*>(slots) + team.lane();
    gs.slots = ys.slots + share.slots(VECTORS) * share.width;
    ys.tails = static_cast<Words<T>*>(slots) + 2 * share.slots(VECTORS) * share.width + team.lane() / 32;
    gs.tails = ys.tails + share.slots(VECTORS) * (share.width / 32);
    auto read = [&](bool apart) {
        ys.load(y + at, apart, share, C(0));
        if (!LATE || !apart) gs.load(g + at, apart, share, C(0));
        if constexpr (SLOTS) {
            fetch_groups(VECTORS, share.rounds, [&](int first) {
                ys.fetch(first, y + at, apart, share, C(0));
                gs.fetch(first, g + at, apart, share, C(0));
            });
            if (apart) {
                ys.put_together(y + at, share);
                gs.put_together(g + at, share);
            }
        }
        if (LATE && apart) gs.load(g + at, apart, share, C(0));
        ys.edge = shown ? load_as(y[column]) : C(0);
        gs.edge = shown ? load_as(g[column]) : C(0);
    };
    if (!EXACT && (bytes_past_16(y + at) | bytes_past_16(g + at))) read(true);
    else read(false);
    if constexpr (MASKED) write_hidden(dx, cut, columns, team);
    Gradient<T> gradient(scale, LOG);
    C total = gradient.template term<LOG>(ys.edge, gs.edge);
    auto add = [&](const Words<T>& v, const Words<T>& w) {
        C a[WIDTH<T>], b[WIDTH<T>], here = 0;
        unpack(v, a);
        unpack(w, b);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.template term<LOG>(a[j], b[j]);
        total += here;
    };
    auto write = [&](const Words<T>& v, const Words<T>& w, T* to) {
        C a[WIDTH<T>], b[WIDTH<T>];
        unpack(v, a);
        unpack(w, b);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[j] = gradient.template of<LOG>(a[j], b[j], total);
        store_vector(to, a);
    };
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (!MASKED || share.has(k)) add(ys.registers[k], gs.registers[k]);
    if constexpr (SLOTS) {
        take_groups(VECTORS, share.rounds, [&](int first, int end) {
            ys.template each<(VECTORS > 4 ? 1 : 2)>(share, first, end, [&](const Words<T>& v, int k) { add(v, gs.slot(k, share)); });
        });
    }
    total = sink.add_to(team.add(total), team.leads());
    ys.keep_packed(share.own);
    gs.keep_packed(share.own);
    ys.each([&](const Words<T>& v, int k) {
        if (share.has(k)) write(v, gs.registers[k], dx + at + k * share.step * WIDTH<T>);
    });
    if constexpr (SLOTS) {
        ys.each(share, VECTORS, share.rounds, [&](const Words<T>& v, int k) {
            if (share.has(k)) write(v, gs.slot(k, share), dx + at + k * share.step * WIDTH<T>);
        });
    }
    if (shown || (MASKED && EXACT && column != cut.NOWHERE))
        dx[column] = shown ? T(gradient.template of<LOG>(ys.edge, gs.edge, total)) : T(0.0f);
}
