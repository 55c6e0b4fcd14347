// How a team of threads keeps a row on chip: which vectors each thread owns, in registers and in shared
// memory.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "row_vectors.cuh"

// Columns [begin, end) of a row, divided into whole vectors that begin and end at multiples of BYTES, and
// edges. With BYTES = 128 each warp touches cache lines of its own. EXACT: all rows begin at multiples of 16
// bytes and are a whole number of vectors.
template <typename T, bool EXACT, int BYTES>
struct VectorRange {
    static constexpr int UNIT = BYTES / sizeof(T), NO_COLUMN = -UNIT;
    int begin, end, first, count;  // of the whole vectors: the first column and the number of vectors
    // the first columns of the units that `begin` and `end` lie inside, or NO_COLUMN
    int head, tail;
    __device__ __forceinline__ VectorRange(const T* row, int begin, int end) : begin(begin), end(end) {
        int shift = EXACT && BYTES == 16 ? 0 : reinterpret_cast<unsigned long long>(row) / sizeof(T) % UNIT;
        int before = (begin + shift) & (UNIT - 1), after = (end + shift) & (UNIT - 1);
        head = before ? begin - before : NO_COLUMN;
        tail = after && end - after > begin - (before ? before : 1) ? end - after : NO_COLUMN;
        first = before ? begin - before + UNIT : begin;
        count = max(end - after - first, 0) / ELEMENTS<T>;
    }
    // The column of a thread's edge element, or NO_COLUMN. 2 UNIT threads have one; it may lie outside of
    // [begin, end).
    __device__ __forceinline__ int edge_column(int thread) const {
        int from = thread < UNIT ? head : thread < 2 * UNIT ? tail : NO_COLUMN;
        return from == NO_COLUMN ? NO_COLUMN : from + (thread & (UNIT - 1));
    }
    __device__ __forceinline__ bool contains(int column) const { return column >= begin && column < end; }
};

// The vectors that a thread of a team owns: the k-th is vector `first + k * step` of the row, for k < count.
// Blocks of a row alternate, `width` vectors each, so that together they read the row from start to end,
// which is faster. rounds: the most vectors of any thread of the block.
struct OwnedVectors {
    int first, width, step, count, rounds, total;
    template <class Team>
    __device__ __forceinline__ OwnedVectors(const Team& team, int total)
        : first(team.block_rank() * team.width + team.thread()),
          width(team.width),
          step(team.width * team.num_blocks()),
          total(total) {
        count = team.rounds(total - first + step - 1);
        rounds = team.rounds(total - team.block_rank() * width + step - 1);
    }
    __device__ __forceinline__ bool contains(int k) const { return k < count; }
    // True if no other lane of the warp owns the vector after the k-th.
    __device__ __forceinline__ bool is_last_of_warp(int k) const {
        return contains(k) && (threadIdx.x % 32 == 31 || first + k * step == total - 1);
    }
    // How many vectors per thread are in shared memory, if `registers` are in registers.
    __device__ __forceinline__ int in_shared(int registers) const { return max(rounds - registers, 0); }
};

// p is a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void store_vector(T* p, const compute_t<T> (&r)[ELEMENTS<T>]) {
    Vector<T> v;
    pack(v, r);
    *reinterpret_cast<Vector<T>*>(p) = v;
}

constexpr int ROUNDS_PER_GROUP = 4;  // rounds per cp.async group

// The 16 bytes that begin `bytes` after the start of `current`; `next` follows `current` in memory.
template <typename T>
__device__ __forceinline__ Vector<T> shifted(const Vector<T>& current, const Vector<T>& next, int bytes) {
    unsigned w[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = i < 4 ? current.w[i] : next.w[i - 4];
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = __funnelshift_r(w[i], w[i + 1], bytes % 4 * 8);
    return v;
}

template <typename T, int VECTORS, bool USE_SHARED>
struct RowPart {
    static constexpr bool IS_16_BIT = sizeof(T) == 2;
    // shared: the thread's own vectors, so no barrier is needed
    Vector<T> registers[VECTORS], *shared, *trailing;
    compute_t<T> edge;
    __device__ __forceinline__ Vector<T>& shared_vector(int k, const OwnedVectors& owned) const {
        return shared[(k - VECTORS) * owned.width];
    }
    // `from`: the thread's first vector, a multiple of 16 bytes if not `unaligned`. All loads are issued
    // before the first result is used, so that their latencies overlap.
    __device__ __forceinline__ void load(const T* from, bool unaligned, const OwnedVectors& owned,
                                         compute_t<T> fill) {
        if (unaligned) {
            for_registers([&](Vector<T>& v, int) { v = filled<T>(fill); });
            load_unaligned(registers, from, owned.step * ELEMENTS<T>,
                           [&](int k) { return owned.contains(k); });
        } else {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
                registers[k] = owned.contains(k)
                                   ? *reinterpret_cast<const Vector<T>*>(from + k * owned.step * ELEMENTS<T>)
                                   : filled<T>(fill);
        }
    }
    // Starts the copies of the group whose first round is `first`. Unaligned rows are copied by words. 16-bit
    // elements may begin inside a word: then the aligned 16-byte vectors that contain them are copied, and
    // realign() shifts them.
    __device__ __forceinline__ void copy_async(int first, const T* from, bool unaligned,
                                               const OwnedVectors& owned, compute_t<T> fill) {
        const char* at = reinterpret_cast<const char*>(from);
        int past = IS_16_BIT && unaligned ? bytes_past_16(from) : 0;
#pragma unroll
        for (int k = first; k < first + ROUNDS_PER_GROUP; ++k) {
            if (owned.contains(k))
                copy(shared_vector(k, owned), at - past + k * owned.step * 16LL, unaligned && !IS_16_BIT);
            else if (k < owned.rounds) shared_vector(k, owned) = filled<T>(fill);
        }
        if (!IS_16_BIT || !unaligned) return;
#pragma unroll 1
        for (int k = first; k < first + ROUNDS_PER_GROUP; ++k)
            if (owned.is_last_of_warp(k))
                cp_async_16(shared_address(&trailing_vector(k, owned)),
                            at - past + k * owned.step * 16LL + 16, past);
    }
    static __device__ __forceinline__ void copy(Vector<T>& to, const char* from, bool by_words) {
        unsigned address = shared_address(&to);
        if (!by_words) return cp_async_16(address, from);
#pragma unroll
        for (int i = 0; i < 16; i += 4) cp_async<4>(address + i, from + i, true);
    }
    // The end of an unaligned vector lies in the next lane's copy, or in the trailing vector.
    __device__ __forceinline__ void realign(const T* from, const OwnedVectors& owned) {
        if (!IS_16_BIT) return;
        cp_async_wait<0>();
#pragma unroll 1
        for (int k = VECTORS; k < owned.rounds; ++k) {
            Vector<T>& v = shared_vector(k, owned);
            Vector<T> next;
#pragma unroll
            for (int i = 0; i < 4; ++i) next.w[i] = __shfl_down_sync(~0u, v.w[i], 1);
            if (owned.is_last_of_warp(k)) next = trailing_vector(k, owned);
            if (owned.contains(k)) v = shifted(v, next, bytes_past_16(from));
        }
    }
    __device__ __forceinline__ Vector<T>& trailing_vector(int k, const OwnedVectors& owned) const {
        return trailing[(k - VECTORS) * (owned.width / 32)];
    }
    // f(vector, k) for each of the thread's vectors in registers.
    template <typename F>
    __device__ __forceinline__ void for_registers(F f) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k) f(registers[k], k);
    }
    // f(vector, k) for each in shared memory, from round `first` to before `end`. The compiler keeps UNROLL
    // of them in registers.
    template <int UNROLL = 4, typename F>
    __device__ __forceinline__ void for_shared(const OwnedVectors& owned, int first, int end, F f) {
#pragma unroll UNROLL
        for (int k = first; k < end; ++k) f(shared_vector(k, owned), k);
    }
    // Multiplies all stored values, in shared memory up to round `end`.
    __device__ __forceinline__ void multiply(const OwnedVectors& owned, int end, compute_t<T> factor) {
        auto product = [&](Vector<T>& v, int) {
            compute_t<T> r[ELEMENTS<T>];
            unpack(v, r);
#pragma unroll
            for (int j = 0; j < ELEMENTS<T>; ++j) r[j] *= factor;
            pack(v, r);
        };
        edge *= factor;
        for_registers(product);
        for_shared(owned, VECTORS, end, product);
    }
    // Between two passes over 16-bit values: makes the compiler discard the unpacked floats, which need twice
    // the registers. `count` is never negative, so the values do not change, but the compiler cannot know
    // that.
    __device__ __forceinline__ void keep_packed(int count) {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) registers[k].w[j] ^= count >> 31;
        }
    }
};

// copy(first) for each group of rounds in shared memory.
template <typename F>
__device__ __forceinline__ void copy_groups(int vectors, int rounds, F copy) {
    for (int first = vectors; first < rounds; first += ROUNDS_PER_GROUP) {
        copy(first);
        cp_async_commit();
    }
}
// process(first, end) for each group as soon as it has arrived; the next groups are still in flight.
template <typename F>
__device__ __forceinline__ void process_groups(int vectors, int rounds, F process) {
    for (int first = vectors; first < rounds; first += ROUNDS_PER_GROUP) {
        int left = rounds - first;  // rounds that may still be in flight
        if (left > 3 * ROUNDS_PER_GROUP) cp_async_wait<3>();
        else if (left > 2 * ROUNDS_PER_GROUP) cp_async_wait<2>();
        else if (left > ROUNDS_PER_GROUP) cp_async_wait<1>();
        else cp_async_wait<0>();
        process(first, min(first + ROUNDS_PER_GROUP, rounds));
    }
}
