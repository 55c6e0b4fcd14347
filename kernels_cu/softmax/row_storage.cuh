// Where a team of threads holds a row: which vectors are whose, in registers and in shared memory.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "row_vectors.cuh"

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

// Which vectors a thread of a team has: the k-th is vector `first + k * step` of the row, for k < own. The blocks of a row take turns, of
// `width` vectors each, so that together they go over the row from its beginning to its end: memory is faster so. rounds: the most that a
// thread of the block has.
struct Share {
    int first, width, step, own, rounds, vectors;
    template <class Team>
    __device__ __forceinline__ Share(const Team& team, int vectors)
        : first(team.rank() * team.width + team.lane()), width(team.width), step(team.width * team.size()), vectors(vectors) {
        own = team.turns(vectors - first + step - 1);
        rounds = team.turns(vectors - team.rank() * width + step - 1);
    }
    __device__ __forceinline__ bool has(int k) const { return k < own; }
    // Whether no other lane of the warp has what follows the k-th.
    __device__ __forceinline__ bool ends_warp(int k) const { return has(k) && (threadIdx.x % 32 == 31 || first + k * step == vectors - 1); }
    // How many a thread has at most beyond those in registers.
    __device__ __forceinline__ int slots(int registers) const { return max(rounds - registers, 0); }
};

// At a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_vector(T* p, const compute_t<T> (&r)[WIDTH<T>]) {
    Words<T> v;
    pack(v, r);
    *reinterpret_cast<Words<T>*>(p) = v;
}

constexpr int GROUP = 4;  // rounds of vectors in slots that are fetched, and waited for, together

// The 16 bytes that begin `bytes` behind the beginning of `own`, which `next` follows.
template <typename T>
__device__ __forceinline__ Words<T> shifted(const Words<T>& own, const Words<T>& next, int bytes) {
    unsigned w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < 4 ? own.w[i] : next.w[i - 4];
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    Words<T> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = __funnelshift_r(w[i], w[i + 1], bytes % 4 * 8);
    return v;
}

template <typename T, int VECTORS, bool SLOTS>
struct Held {
    static constexpr bool HALVES = sizeof(T) == 2;
    Words<T> registers[VECTORS], *slots, *tails;  // slots: the thread's own, so that they need no barrier
    compute_t<T> edge;
    __device__ __forceinline__ Words<T>& slot(int k, const Share& share) const { return slots[(k - VECTORS) * share.width]; }
    // `from`: the thread's first vector; unless `apart`, at a multiple of 16 bytes. All loads are issued before the first is used, so that
    // their latencies overlap.
    __device__ __forceinline__ void load(const T* from, bool apart, const Share& share, compute_t<T> missing) {
        if (apart) {
            each([&](Words<T>& v, int) { v = filled<T>(missing); });
            load_apart(registers, from, share.step * WIDTH<T>, [&](int k) { return share.has(k); });
        } else {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
                registers[k] = share.has(k) ? *reinterpret_cast<const Words<T>*>(from + k * share.step * WIDTH<T>) : filled<T>(missing);
        }
    }
    // A group's, of which round `first` is the first. Those that lie apart are copied by words; since 16-bit elements may begin in the middle
    // of one, these are copied as the vectors of 16 bytes that they begin in, which are to be put together.
    __device__ __forceinline__ void fetch(int first, const T* from, bool apart, const Share& share, compute_t<T> missing) {
        const char* at = reinterpret_cast<const char*>(from);
        int past = HALVES && apart ? bytes_past_16(from) : 0;
#pragma unroll
        for (int k = first; k < first + GROUP; ++k) {
            if (share.has(k)) copy(slot(k, share), at - past + k * share.step * 16LL, apart && !HALVES);
            else if (k < share.rounds) slot(k, share) = filled<T>(missing);
        }
        if (!HALVES || !apart) return;
#pragma unroll 1
        for (int k = first; k < first + GROUP; ++k)
            if (share.ends_warp(k)) cp_async_16(shared_address(&tail(k, share)), at - past + k * share.step * 16LL + 16, past);
    }
    static __device__ __forceinline__ void copy(Words<T>& to, const char* from, bool by_words) {
        unsigned shared = shared_address(&to);
        if (!by_words) return cp_async_16(shared, from);
#pragma unroll
        for (int i = 0; i < 16; i += 4) cp_async<4>(shared + i, from + i, true);
    }
    // What begins in a lane's vector ends in the next one's, or in the tail.
    __device__ __forceinline__ void put_together(const T* from, const Share& share) {
        if (!HALVES) return;
        cp_async_wait<0>();
#pragma unroll 1
        for (int k = VECTORS; k < share.rounds; ++k) {
            Words<T>& v = slot(k, share);
            Words<T> next;
#pragma unroll
            for (int i = 0; i < 4; ++i) next.w[i] = __shfl_down_sync(~0u, v.w[i], 1);
            if (share.ends_warp(k)) next = tail(k, share);
            if (share.has(k)) v = shifted(v, next, bytes_past_16(from));
        }
    }
    __device__ __forceinline__ Words<T>& tail(int k, const Share& share) const { return tails[(k - VECTORS) * (share.width / 32)]; }
    // f(vector, k) for each of a thread's vectors in registers.
    template <typename F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) f(registers[k], k);
    }
    // The same of those in slots, from round `first` to before `end`, of which the compiler has AT_A_TIME in registers.
    template <int AT_A_TIME = 4, typename F>
    __device__ __forceinline__ void each(const Share& share, int first, int end, F f) {
#pragma unroll AT_A_TIME
        for (int k = first; k < end; ++k) f(slot(k, share), k);
    }
    // All of it up to slots' round `end`.
    __device__ __forceinline__ void multiply(const Share& share, int end, compute_t<T> factor) {
        auto product = [&](Words<T>& v, int) {
            compute_t<T> r[WIDTH<T>];
            unpack(v, r);
#pragma unroll
            for (int j = 0; j < WIDTH<T>; ++j) r[j] *= factor;
            pack(v, r);
        };
        edge *= factor;
        each(product);
        each(share, VECTORS, end, product);
    }
    // Between two passes over 16-bit values: let the compiler forget what it made of them, floats that need twice the registers. `own` is
    // never negative, so this changes nothing; but the compiler cannot know that.
    __device__ __forceinline__ void keep_packed(int own) {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) registers[k].w[j] ^= own >> 31;
        }
    }
};

// fetch(first) for each group of slots.
template <typename F>
__device__ __forceinline__ void fetch_groups(int vectors, int rounds, F fetch) {
    for (int first = vectors; first < rounds; first += GROUP) {
        fetch(first);
        cp_async_commit();
    }
}
// arrived(first, end) for each of them, as soon as it is there: the next are still on their way then.
template <typename F>
__device__ __forceinline__ void take_groups(int vectors, int rounds, F arrived) {
    for (int first = vectors; first < rounds; first += GROUP) {
        int left = rounds - first;  // rounds that are not known to have come
        if (left > 3 * GROUP) cp_async_wait<3>();
        else if (left > 2 * GROUP) cp_async_wait<2>();
        else if (left > GROUP) cp_async_wait<1>();
        else cp_async_wait<0>();
        arrived(first, min(first + GROUP, rounds));
    }
}
