// What softmax.cu and causal_softmax.cu do with a row, or a part of one: in a loop of a block's threads, which reads it twice, or held on
// chip by a team of threads, which read it once.
#pragma once
#include "exponential.cuh"
#include "rows.cuh"
#include "teams.cuh"

// Columns [begin, end) of a row, the only ones that are read. Results are written to [from, to). With MASKED those outside of
// [begin, end) are 0.
struct Span {
    long long begin, end, from, to;
    __device__ __forceinline__ Span(long long begin, long long end) : begin(begin), end(end), from(begin), to(end) {}
    __device__ __forceinline__ Span(long long begin, long long end, long long columns) : begin(begin), end(end), from(0), to(columns) {}
    template <bool MASKED>
    __device__ __forceinline__ bool hides(long long column) const {
        return MASKED && (column < begin || column >= end);
    }
};

// ---- in a loop

// The vectors that a thread takes in turn: first, first + step, ... below end.
struct Turns {
    long long first, end;
    int step;
};

// Those of a block that takes columns [from, to).
template <typename T>
__device__ __forceinline__ Turns block_turns(const T* row, long long from, long long to) {
    int shift = shift_of(row);
    return {(from + shift) / WIDTH<T> + threadIdx.x, vectors_to<T>(to, shift), int(blockDim.x)};
}

// Largest u and sum of exponentials of a thread's vectors, in one pass: where a larger u turns up, the sum so far is scaled down.
template <typename T>
__device__ __forceinline__ void scan_columns(const T* row, const Span& span, Turns turns, const Exponential<T>& exponential,
                                             compute_t<T>& largest, compute_t<T>& sum) {
    using C = compute_t<T>;
    int shift = shift_of(row);
    largest = minus_infinity<C>();
    sum = 0;
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        C r[WIDTH<T>], before = largest, here = 0;
        unpack(load_columns(row, i * WIDTH<T> - shift, span.begin, span.end, true, exponential.sign * minus_infinity<C>()), r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) largest = max(largest, exponential.lift(r[j]));
        auto base = exponential.base(largest);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += exponential(exponential.lift(r[j]), base);
        sum = sum * exponential.rescale(before, base) + here;
    }
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_columns(T* out, const T* row, const Span& span, Turns turns, const End<T>& end) {
    int shift = shift_of(row);
    bool aligned = shift_of(out) == shift;
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        long long first = i * WIDTH<T> - shift;
        compute_t<T> r[WIDTH<T>];
        unpack(load_columns(row, first, span.begin, span.end, true, compute_t<T>(0)), r);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) r[j] = span.hides<MASKED>(first + j) ? compute_t<T>(0) : end.of(r[j]);
        store_rounded(out, first, span.from, span.to, aligned, r);
    }
}

// y and g of a vector.
template <typename T>
__device__ __forceinline__ void load_both(const T* y, const T* g, long long first, const Span& span, bool g_aligned,
                                          compute_t<T> (&a)[WIDTH<T>], compute_t<T> (&b)[WIDTH<T>]) {
    unpack(load_columns(y, first, span.begin, span.end, true, compute_t<T>(0)), a);
    unpack(load_columns(g, first, span.begin, span.end, g_aligned, compute_t<T>(0)), b);
}

template <typename T>
__device__ __forceinline__ compute_t<T> sum_terms(const T* y, const T* g, const Span& span, Turns turns,
                                                  const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool aligned = shift_of(g) == shift;
    compute_t<T> sum = 0, a[WIDTH<T>], b[WIDTH<T>];
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        load_both(y, g, i * WIDTH<T> - shift, span, aligned, a, b);
        compute_t<T> here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.term(a[j], b[j]);
        sum += here;
    }
    return sum;
}

template <bool MASKED, typename T>
__device__ __forceinline__ void write_gradients(T* dx, const T* y, const T* g, const Span& span, Turns turns, compute_t<T> total,
                                                const Gradient<T>& gradient) {
    int shift = shift_of(y);
    bool g_aligned = shift_of(g) == shift, dx_aligned = shift_of(dx) == shift;
    compute_t<T> a[WIDTH<T>], b[WIDTH<T>];
    for (long long i = turns.first; i < turns.end; i += turns.step) {
        long long first = i * WIDTH<T> - shift;
        load_both(y, g, first, span, g_aligned, a, b);
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[j] = span.hides<MASKED>(first + j) ? compute_t<T>(0) : gradient(a[j], b[j], total);
        store_rounded(dx, first, span.from, span.to, dx_aligned, a);
    }
}

// ---- held on chip

// A span of a row that is held, whose columns are counted in 31 bits.
template <bool MASKED>
struct Window {
    int begin, end, from, to;
    __device__ __forceinline__ explicit Window(const Span& span) : begin(span.begin), end(span.end), from(span.from), to(span.to) {}
    // All columns of the vector that begins at `first`, or some.
    __device__ __forceinline__ bool hides_all(int first, int width) const { return MASKED && (first + width <= begin || first >= end); }
    __device__ __forceinline__ bool hides_some(int first, int width) const { return MASKED && (first < begin || first + width > end); }
    template <int N, typename C>
    __device__ __forceinline__ void hide(C (&r)[N], int first, C value) const {
        if (hides_some(first, N)) {
#pragma unroll
            for (int j = 0; j < N; ++j) r[j] = first + j < begin || first + j >= end ? value : r[j];
        }
    }
};

// How a row lies in memory. EXACT: all rows begin at multiples of 16 bytes, and are whole numbers of vectors, so that there are only whole
// vectors; nor is then a logarithm wanted, which only the other kernels know. Else the vectors that are partly the row's go element by element, which takes many instructions and registers.
template <bool EXACT>
struct Access {
    // `aligned`: whether column `first` is at a multiple of 16 bytes. EXACT: of a vector that is hidden in part, all is loaded.
    template <typename T, bool MASKED>
    static __device__ __forceinline__ Words<T> load(const T* row, int first, const Window<MASKED>& window, bool aligned, compute_t<T> missing) {
        if constexpr (EXACT) {
            if (window.hides_all(first, WIDTH<T>) || first >= window.to) return filled<T>(missing);
            return *reinterpret_cast<const Words<T>*>(row + first);
        } else {
            return load_columns(row, first, window.begin, window.end, aligned, missing);
        }
    }
    template <typename T, bool MASKED>
    static __device__ __forceinline__ void store(T* row, int first, const Window<MASKED>& window, bool aligned, const Words<T>& v) {
        if constexpr (EXACT) {
            if (first < window.to) *reinterpret_cast<Words<T>*>(row + first) = v;
        } else {
            store_columns(row, first, window.from, window.to, aligned, v);
        }
    }
};

// A thread's vectors of a row: the first VECTORS in registers; with SLOTS others in slots of shared memory that are its own, so that no
// barrier is needed, and that fill in the background. What is beyond `most` vectors of a block is not held.
template <typename T, int VECTORS, bool SLOTS, bool EXACT>
struct Held {
    using Memory = Access<EXACT>;
    Words<T> registers[VECTORS], *slots;
    int first, end, step, shift;  // in vectors: the thread's first, the end of what the block holds, from one to the next
    template <class Team>
    __device__ __forceinline__ Held(const Team& team, int shift, void* slots, int most)
        : slots(static_cast<Words<T>*>(slots) + threadIdx.x), first(team.begin + team.lane()), end(team.begin + most), step(team.width),
          shift(shift) {}
    static constexpr int NOWHERE = 2147483000;  // a column that no row has
    __device__ __forceinline__ int column(int k) const {
        int i = first + k * step;
        return i < end ? i * WIDTH<T> - shift : NOWHERE;
    }
    __device__ __forceinline__ bool has(int k) const { return first + k * step < end; }
    __device__ __forceinline__ Words<T>& slot(int k) const { return slots[(k - VECTORS) * step]; }
    // All loads are issued before the first is used, so that their latencies overlap.
    template <bool MASKED>
    __device__ __forceinline__ void load(const T* row, const Window<MASKED>& window, bool aligned, compute_t<T> missing) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) registers[k] = Memory::load(row, column(k), window, aligned, missing);
        if constexpr (SLOTS) {
            for (int k = VECTORS; has(k); ++k) {
                bool whole = EXACT ? column(k) < window.to : aligned && column(k) >= window.begin && column(k) + WIDTH<T> <= window.end;
                if (whole) cp_async_16(shared_address(&slot(k)), row + column(k));
                else slot(k) = EXACT ? filled<T>(missing) : Memory::load(row, column(k), window, false, missing);
            }
            cp_async_commit();
        }
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (SLOTS) cp_async_wait<0>();
    }
    // Once all loads are issued, since to look at one vector before the next is loaded would be to wait for each.
    template <bool MASKED>
    __device__ __forceinline__ void hide_cut(const Window<MASKED>& window, compute_t<T> missing) {
        if constexpr (MASKED && EXACT) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                int first = column(k);
                if (window.hides_some(first, WIDTH<T>) && !window.hides_all(first, WIDTH<T>)) {
                    compute_t<T> r[WIDTH<T>];
                    unpack(registers[k], r);
                    window.hide(r, first, missing);
                    pack(registers[k], r);
                }
            }
        }
    }
    // Between two passes over 16-bit values: let the compiler forget what it made of them, floats that need twice the registers. `to` is
    // never negative, so this changes nothing; but the compiler cannot know that.
    __device__ __forceinline__ void keep_packed(int to) {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) registers[k].w[j] ^= to >> 31;
        }
    }
};

// The largest of a thread's columns. Vectors that `skip(first column)` names are passed over.
template <typename T, int VECTORS, bool SLOTS, bool EXACT, typename F>
__device__ __forceinline__ compute_t<T> largest_held(const Held<T, VECTORS, SLOTS, EXACT>& held, F skip) {
    compute_t<T> largest = minus_infinity<compute_t<T>>();
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (!skip(held.column(k))) largest = max(largest, largest_of(held.registers[k]));
    if constexpr (SLOTS) {
#pragma unroll EXACT ? 4 : 1
        for (int k = VECTORS; held.has(k); ++k)
            if (!skip(held.column(k))) largest = max(largest, largest_of(held.slot(k)));
    }
    return largest;
}

// f(columns, which is the first) for each of a thread's vectors; with CHANGE what f makes of them is held from then on.
template <bool CHANGE, typename T, int VECTORS, bool SLOTS, bool EXACT, typename F>
__device__ __forceinline__ void each(Held<T, VECTORS, SLOTS, EXACT>& held, F f) {
    compute_t<T> r[WIDTH<T>];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        unpack(held.registers[k], r);
        f(r, held.column(k));
        if (CHANGE) pack(held.registers[k], r);
    }
    if constexpr (SLOTS) {
#pragma unroll EXACT ? 4 : 1
        for (int k = VECTORS; held.has(k); ++k) {
            unpack(held.slot(k), r);
            f(r, held.column(k));
            if (CHANGE) pack(held.slot(k), r);
        }
    }
}

// The same with the columns of two rows.
template <typename T, int VECTORS, bool SLOTS, bool EXACT, typename F>
__device__ __forceinline__ void each(const Held<T, VECTORS, SLOTS, EXACT>& one, const Held<T, VECTORS, SLOTS, EXACT>& other, F f) {
    compute_t<T> a[WIDTH<T>], b[WIDTH<T>];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        unpack(one.registers[k], a);
        unpack(other.registers[k], b);
        f(a, b, one.column(k));
    }
    if constexpr (SLOTS) {
#pragma unroll EXACT ? 4 : 1
        for (int k = VECTORS; one.has(k); ++k) {
            unpack(one.slot(k), a);
            unpack(other.slot(k), b);
            f(a, b, one.column(k));
        }
    }
}

// 0 in the vectors that are wholly hidden, while the loads are under way.
template <typename T, int VECTORS, bool SLOTS, bool EXACT, bool MASKED>
__device__ __forceinline__ void write_hidden(T* out, const Held<T, VECTORS, SLOTS, EXACT>& held, const Window<MASKED>& window, bool aligned) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (window.hides_all(held.column(k), WIDTH<T>)) Access<EXACT>::store(out, held.column(k), window, aligned, Words<T>{});
}

// Where a row is held: `slots` is shared memory for what registers do not hold, `most` the vectors of a block that are held at all.
struct Room {
    void* slots;
    int most;
};
__device__ constexpr Room EVERYTHING{nullptr, 0x7fffffff};  // in registers

// The results of what is held. One loop for each LOG, since the choice within it would cost every column an instruction or two.
template <bool LOG, typename T, int VECTORS, bool SLOTS, bool EXACT, bool MASKED>
__device__ __forceinline__ void write_held(T* out, Held<T, VECTORS, SLOTS, EXACT>& held, const End<T>& end, const Window<MASKED>& window,
                                           bool aligned) {
    held.keep_packed(window.to);
    each<false>(held, [&](compute_t<T>(&r)[WIDTH<T>], int first) {
        if (window.hides_all(first, WIDTH<T>)) return;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) r[j] = end.template from<LOG>(r[j]);
        window.hide(r, first, compute_t<T>(0));
        Words<T> v;
        pack(v, r);
        Access<EXACT>::store(out, first, window, aligned, v);
    });
}

// What a team does not hold is read twice. scale is not negative.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, class Team, typename T>
__device__ __forceinline__ void team_softmax(T* out, const T* row, const Span& span, Team& team, double scale, bool log, const Sink& sink,
                                             Room room) {
    using C = compute_t<T>;
    using Row = C[WIDTH<T>];
    if (EXACT) log = false;
    Window<MASKED> window(span);
    int shift = EXACT ? 0 : shift_of(row);
    bool aligned = EXACT || shift_of(out) == shift;
    Held<T, VECTORS, SLOTS, EXACT> held(team, shift, room.slots, room.most);
    held.load(row, window, true, minus_infinity<C>());
    if (MASKED) write_hidden(out, held, window, aligned);
    Exponential<T> exponential(scale, log, 1);
    C own = minus_infinity<C>(), sum = 0, rest = own, rest_sum = 0;
    Turns beyond{held.end + team.lane(), team.end, team.width};
    if constexpr (SLOTS) scan_columns(row, span, beyond, exponential, rest, rest_sum);
    held.wait();
    held.hide_cut(window, minus_infinity<C>());
    auto hidden = [&](int first) { return window.hides_all(first, WIDTH<T>); };
    own = team.template near<Max>(max(largest_held(held, hidden), rest));
    held.keep_packed(window.to);
    auto base = exponential.base(own);
    each<Exponential<T>::KEPT>(held, [&](Row& r, int first) {
        if (hidden(first)) return;
        C here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) {
            C e = exponential(exponential.lift(r[j]), base);
            here += e;
            if (Exponential<T>::KEPT && !log) r[j] = e;
        }
        sum += here;
    });
    if constexpr (SLOTS) sum += rest_sum * exponential.rescale(rest, base);
    sum = team.template near<Sum>(sum);
    held.keep_packed(window.to);
    C found = own;
    team.combine(exponential, found, sum);
    C largest = sink.largest(found);
    if (sink.logit) sum *= exponential.rescale(found, exponential.base(largest));
    sum = sink.add_to<MASKED>(sum, largest, exponential, team.leads());
    End<T> end(exponential, largest, sum, log, own);
    if (log) write_held<true>(out, held, end, window, aligned);
    else write_held<false>(out, held, end, window, aligned);
    if constexpr (SLOTS) write_columns<MASKED>(out, row, span, beyond, End<T>(exponential, largest, sum, log, largest));
}

template <bool LOG, typename T, int VECTORS, bool SLOTS, bool EXACT, bool MASKED>
__device__ __forceinline__ compute_t<T> sum_held(Held<T, VECTORS, SLOTS, EXACT>& ys, Held<T, VECTORS, SLOTS, EXACT>& gs,
                                                 const Gradient<T>& gradient, const Window<MASKED>& window) {
    using Row = compute_t<T>[WIDTH<T>];
    compute_t<T> sum = 0;
    each(ys, gs, [&](Row& a, Row& b, int first) {
        if (window.hides_all(first, WIDTH<T>)) return;
        compute_t<T> here = 0;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) here += gradient.template term<LOG>(a[j], b[j]);
        sum += here;
    });
    return sum;
}

template <bool LOG, typename T, int VECTORS, bool SLOTS, bool EXACT, bool MASKED>
__device__ __forceinline__ void write_held_gradients(T* dx, Held<T, VECTORS, SLOTS, EXACT>& ys, Held<T, VECTORS, SLOTS, EXACT>& gs,
                                                     compute_t<T> total, const Gradient<T>& gradient, const Window<MASKED>& window,
                                                     bool aligned) {
    using Row = compute_t<T>[WIDTH<T>];
    ys.keep_packed(window.to);
    gs.keep_packed(window.to);
    each(ys, gs, [&](Row& a, Row& b, int first) {
        if (window.hides_all(first, WIDTH<T>)) return;
#pragma unroll
        for (int j = 0; j < WIDTH<T>; ++j) a[j] = gradient.template of<LOG>(a[j], b[j], total);
        window.hide(a, first, compute_t<T>(0));
        Words<T> v;
        pack(v, a);
        Access<EXACT>::store(dx, first, window, aligned, v);
    });
}

// `room.slots` has as much room for g behind that for y.
template <int VECTORS, bool SLOTS, bool MASKED, bool EXACT, class Team, typename T>
__device__ __forceinline__ void team_gradient(T* dx, const T* y, const T* g, const Span& span, Team& team, double scale, bool log,
                                              const SinkGradient& sink, Room room) {
    using C = compute_t<T>;
    if (EXACT) log = false;
    Window<MASKED> window(span);
    int shift = EXACT ? 0 : shift_of(y);
    bool aligned = EXACT || shift_of(dx) == shift;
    void* behind = static_cast<Words<T>*>(room.slots) + max(room.most - VECTORS * team.width, 0);
    Held<T, VECTORS, SLOTS, EXACT> ys(team, shift, room.slots, room.most), gs(team, shift, behind, room.most);
    ys.load(y, window, true, C(0));
    gs.load(g, window, EXACT || shift_of(g) == shift, C(0));
    if (MASKED) write_hidden(dx, ys, window, aligned);
    Gradient<T> gradient(scale, log);
    Turns beyond{ys.end + team.lane(), team.end, team.width};
    C total = 0;
    if constexpr (SLOTS) total = sum_terms(y, g, span, beyond, gradient);
    ys.wait();
    ys.hide_cut(window, C(0));
    gs.hide_cut(window, C(0));
    if (log) total += sum_held<true>(ys, gs, gradient, window);
    else total += sum_held<false>(ys, gs, gradient, window);
    total = sink.add_to(team.add(total), team.leads());
    if (log) write_held_gradients<true>(dx, ys, gs, total, gradient, window, aligned);
    else write_held_gradients<false>(dx, ys, gs, total, gradient, window, aligned);
    if constexpr (SLOTS) write_gradients<MASKED>(dx, y, g, span, beyond, total, gradient);
}
