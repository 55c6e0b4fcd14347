// What softmax.cu and causal_softmax.cu do with a row that a team of threads holds on chip, so that it is read once.
//
// Of the columns that a row shows, all or a window of them, those that fill whole vectors, of 16 bytes at multiples of 16, are held as
// such: thread t of a team of `width` has the t-th, the (t + width)-th, ..., the first VECTORS of them in registers, the others, with
// SLOTS, in shared memory. Those before the first such vector and behind the last, the edges, are one element each for a few threads. All
// tensors' rows begin as far past a multiple of 16 bytes, so that what is a vector in one is in the others.
#pragma once
#include "exponential.cuh"
#include "rows.cuh"
#include "teams.cuh"

// Columns [begin, end) of a row, cut at multiples of BYTES. EXACT: all rows begin at multiples of 16 bytes and are whole numbers of vectors.
// A warp whose vectors begin at a multiple of 128 bytes touches no line that another one touches.
template <typename T, bool EXACT, int BYTES>
struct Cut {
    static constexpr int LINE = BYTES / sizeof(T), NOWHERE = -LINE;
    int begin, end, first, count;  // of the whole vectors: the column of the first, and how many there are
    int head, tail;                // the first column of the line that `begin` cuts, and of that which `end` cuts; or NOWHERE
    __device__ __forceinline__ Cut(const T* row, int begin, int end) : begin(begin), end(end) {
        int shift = EXACT && BYTES == 16 ? 0 : reinterpret_cast<unsigned long long>(row) / sizeof(T) % LINE;
        int before = (begin + shift) & (LINE - 1), after = (end + shift) & (LINE - 1);
        head = before ? begin - before : NOWHERE;
        tail = after && end - after > begin - (before ? before : 1) ? end - after : NOWHERE;
        first = before ? begin - before + LINE : begin;
        count = max(end - after - first, 0) / WIDTH<T>;
    }
    // The column of a team's thread among the edges, of which 2 LINE threads have one each. A column that is not the row's, of many threads.
    __device__ __forceinline__ int edge(int lane) const {
        int from = lane < LINE ? head : lane < 2 * LINE ? tail : NOWHERE;
        return from == NOWHERE ? NOWHERE : from + (lane & (LINE - 1));
    }
    __device__ __forceinline__ bool shows(int column) const { return column >= begin && column < end; }
};

// Where a block holds its part of a row, by default in registers alone. `slots`: shared memory; `part`: how many of the row's vectors a block
// has; `most`: those that there is room for, whole rounds of its threads.
struct Room {
    void* slots = nullptr;
    int part = 0x7fffffff, most = 0;
};

// Which vectors a thread of a team has: the k-th is vector `begin + lane + k * step` of the row, if it is one of the block's `count`.
struct Share {
    int begin, lane, step, count, rounds;  // rounds: more k than any thread of the block has
    template <class Team>
    __device__ __forceinline__ Share(const Team& team, int vectors, const Room& room)
        : begin(team.rank() * room.part), lane(team.lane()), step(team.width), count(max(min(vectors - begin, room.part), 0)) {
        rounds = (count + step - 1) / step;
    }
    __device__ __forceinline__ bool has(int k) const { return lane + k * step < count; }
};

// At a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_vector(T* p, const compute_t<T> (&r)[WIDTH<T>]) {
    Words<T> v;
    pack(v, r);
    *reinterpret_cast<Words<T>*>(p) = v;
}

template <typename T, int VECTORS, bool SLOTS>
struct Held {
    Words<T> registers[VECTORS], *slots;  // slots: the thread's own, so that they need no barrier
    compute_t<T> edge;
    __device__ __forceinline__ Words<T>& slot(int k, int step) const { return slots[(k - VECTORS) * step]; }
    // `from`: the thread's first vector. All loads are issued before the first is used, so that their latencies overlap.
    __device__ __forceinline__ void load(const T* from, const Share& share, compute_t<T> missing) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            registers[k] = share.has(k) ? *reinterpret_cast<const Words<T>*>(from + k * share.step * WIDTH<T>) : filled<T>(missing);
        if constexpr (SLOTS) {
#pragma unroll 4
            for (int k = VECTORS; k < share.rounds; ++k) {
                if (share.has(k)) cp_async_16(shared_address(&slot(k, share.step)), from + k * share.step * WIDTH<T>);
                else slot(k, share.step) = filled<T>(missing);
            }
            cp_async_commit();
        }
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (SLOTS) cp_async_wait<0>();
    }
    // f(vector, k) for each of a thread's vectors, with ELSEWHERE for those in slots alone.
    template <bool ELSEWHERE = false, typename F>
    __device__ __forceinline__ void each(const Share& share, F f) {
        if constexpr (!ELSEWHERE) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) f(registers[k], k);
        }
        if constexpr (SLOTS) {
#pragma unroll 4
            for (int k = VECTORS; k < share.rounds; ++k) f(slot(k, share.step), k);
        }
    }
    // Between two passes over 16-bit values: let the compiler forget what it made of them, floats that need twice the registers. `count` is
    // never negative, so this changes nothing; but the compiler cannot know that.
    __device__ __forceinline__ void keep_packed(int count) {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) registers[k].w[j] ^= count >> 31;
        }
    }
};

// f(vector of one row, of the other, k) for each of a thread's vectors.
template <typename T, int VECTORS, bool SLOTS, typename F>
__device__ __forceinline__ void each(Held<T, VECTORS, SLOTS>& one, Held<T, VECTORS, SLOTS>& other, const Share& share, F f) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) f(one.registers[k], other.registers[k], k);
    if constexpr (SLOTS) {
#pragma unroll 4
        for (int k = VECTORS; k < share.rounds; ++k) f(one.slot(k, share.step), other.slot(k, share.step), k);
    }
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
// that no exponential is computed twice, but with MASKED, where the registers are worth more. scale is not negative.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, bool LOG, class Team, typename T>
__device__ __forceinline__ void team_softmax(T* out, const T* row, int begin, int end, int columns, Team& team, double scale,
                                             const Sink& sink, const Room& room) {
    using C = compute_t<T>;
    using E = Exponential<T>;
    constexpr bool EDGES = MASKED || !EXACT, KEPT = E::KEPT && !LOG, FLOATS = sizeof(T) == 2 && !MASKED && !LOG;
    Cut<T, EXACT, SLOTS && !EXACT ? 128 : 16> cut(row, begin, end);
    Share share(team, cut.count, room);
    int column = EDGES && team.rank() == 0 ? cut.edge(team.lane()) : cut.NOWHERE, at = cut.first + (share.begin + share.lane) * WIDTH<T>;
    bool shown = EDGES && cut.shows(column);
    Held<T, VECTORS, SLOTS> held;
    held.slots = static_cast<Words<T>*>(room.slots) + team.lane();
    held.load(row + at, share, minus_infinity<C>());
    held.edge = shown ? load_as(row[column]) : minus_infinity<C>();
    if constexpr (MASKED) write_hidden(out, cut, columns, team);
    E exponential(scale, LOG, 1, !sink.logit);  // a logit may be far above the columns
    C own = held.edge;
    // Rows in registers have few columns a thread: float does for its sum, and for its warp's, and a double would be some cycles late.
    conditional_t<SLOTS, sum_t<T>, C> near = 0;
    held.wait();
    held.each(share, [&](const Words<T>& v, int) { own = max(own, largest_of(v)); });
    own = team.near_max(own);
    held.keep_packed(share.count);
    auto base = exponential.base(own);
    if (EDGES) {
        C e = exponential(held.edge, base);
        if (shown) near = e;
        if (KEPT) held.edge = e;
    }
    auto add = [&](const Words<T>& v, C (&e)[WIDTH<T>]) {
        unpack(v, e);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) e[j] = exponential(e[j], base);
        near += sum_of(e);
    };
    C floats[FLOATS ? VECTORS : 1][WIDTH<T>];
    if constexpr (FLOATS) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) add(held.registers[k], floats[k]);
    }
    held.template each<FLOATS>(share, [&](Words<T>& v, int k) {
        if (MASKED && !share.has(k)) return;
        C e[WIDTH<T>];
        add(v, e);
        if (KEPT) pack(v, e);
    });
    sum_t<T> sum = team.near_sum(near);
    C found = own;
    team.combine(exponential, found, sum);
    C largest = sink.largest(found);
    if (sink.logit) sum *= exponential.rescale(found, exponential.base(largest));
    sum = sink.add_to<MASKED>(sum, largest, exponential, team.leads());
    End<T> ending(exponential, largest, sum, LOG, own);
    if constexpr (FLOATS) {
        C factor = exponential.rescale(own, exponential.base(largest)) * reciprocal_approx(sum);
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
            for (int j = 0; j < WIDTH<T>; ++j) floats[k][j] *= factor;
            if (share.has(k)) store_vector(out + at + k * share.step * WIDTH<T>, floats[k]);
        }
    }
    held.keep_packed(share.count);
    held.template each<FLOATS>(share, [&](const Words<T>& v, int k) {
        if (!share.has(k)) return;
        C r[WIDTH<T>];
        unpack(v, r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) r[j] = ending.template from<LOG>(r[j]);
        store_vector(out + at + k * share.step * WIDTH<T>, r);
    });
    if (shown || (MASKED && EXACT && column != cut.NOWHERE)) out[column] = shown ? T(ending.template from<LOG>(held.edge)) : T(0.0f);
}

// `room.slots` has as much room for g behind that for y.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, bool LOG, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, int begin, int end, int columns, Team& team, double scale,
                                              const SinkGradient& sink, const Room& room) {
    using C = compute_t<T>;
    constexpr bool EDGES = MASKED || !EXACT;
    Cut<T, EXACT, SLOTS && !EXACT ? 128 : 16> cut(y, begin, end);
    Share share(team, cut.count, room);
    int column = EDGES && team.rank() == 0 ? cut.edge(team.lane()) : cut.NOWHERE, at = cut.first + (share.begin + share.lane) * WIDTH<T>;
    bool shown = EDGES && cut.shows(column);
    Held<T, VECTORS, SLOTS> ys, gs;
    ys.slots = static_cast<Words<T>*>(room.slots) + team.lane();
    gs.slots = ys.slots + (room.most - VECTORS * team.width);
    ys.load(y + at, share, C(0));
    gs.load(g + at, share, C(0));
    ys.edge = shown ? load_as(y[column]) : C(0);
    gs.edge = shown ? load_as(g[column]) : C(0);
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
    ys.wait();
    each(ys, gs, share, [&](const Words<T>& v, const Words<T>& w, int k) {
        if (!MASKED || share.has(k)) add(v, w);
    });
    total = sink.add_to(team.add(total), team.leads());
    ys.keep_packed(share.count);
    gs.keep_packed(share.count);
    each(ys, gs, share, [&](const Words<T>& v, const Words<T>& w, int k) {
        if (share.has(k)) write(v, w, dx + at + k * share.step * WIDTH<T>);
    });
    if (shown || (MASKED && EXACT && column != cut.NOWHERE)) dx[column] = shown ? T(gradient.template of<LOG>(ys.edge, gs.edge, total)) : T(0.0f);
}
