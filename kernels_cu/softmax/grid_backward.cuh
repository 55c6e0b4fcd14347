// The gradient of rows so long that all of the GPU shares each. As many blocks as the multiprocessors hold stay to the end, and go over the
// rows in step: none is more than three rows ahead of another. So what is read lies side by side in memory, and so does what is written.
//
// In turn i a block tells the others what it found of row i, which has come to shared memory; looks at what they told of row i - 2; writes
// row i - 3, of which it now knows all, from registers; takes row i - 1 there; and asks for row i + 2.
//
// H200, 512 rows of 1M, of a copy's speed: float 0.907 to 1.004, bfloat16 0.934 to 1.003; v10's rows are each at another place. Copies of the
// same accesses, in which all wait for the slowest of a row, had predicted 1.01; if nobody waits they are at 0.98, since blocks drift apart.
// (Forward, of which half is written, they are at 0.95: v10 is as fast.) What it takes:
// * Words are for moments at which no load waits to be sent. A multiprocessor sends in order, and a row's loads keep it busy for most of
//   a turn: words that came behind them took 6 us (0.42 to 0.50); those of a warp of their own 3, which is more than a turn (0.81, 0.88).
// * Two turns from when a block tells to when it looks: with one 0.90, 0.87; another until it uses what it then sees: 0.967, 0.970 without.
// * The word is sent before others store: bfloat16 0.995 to 1.001.
// The turn itself takes 2 us, of which memory is busy for all where rows are long enough: float 1M 2.9 us; of 600 K, which memory would need
// 1.8 for, 0.93 where v10 is at 0.95. As fast: three rows under way, not two. Slower: four blocks of 128 threads (bfloat16 512K 0.89, v10
// 0.97), streaming stores, fetches of 256 bytes. Sums by atomics are not the same in each run, and a count beside the words costs a fence (0.83).
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/memory.cuh"
#include "common/reduce.cuh"
#include "exponential.cuh"
#include "row_storage.cuh"

// Never 0.
__device__ __forceinline__ unsigned long long told(float part) { return 1ull << 32 | __float_as_uint(part); }

template <typename T, int THREADS, int BLOCKS>
struct Steps {
    static constexpr int VECTORS = 4, STAGES = 3, LAG = 3, WARPS = THREADS / 32;
    using C = compute_t<T>;
    struct Found {           // by each warp:
        float parts[WARPS];  // of a row, what its threads found;
        float words[WARPS];  // of another, what the words add up to that it looked at
    };

    template <class F>
    static __device__ __forceinline__ void each(int own, F f) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            if (k < own) f(k);
    }

    // `board`: a word for each row and multiprocessor. `slots`: STAGES * VECTORS * 2 for each thread.
    static __device__ __forceinline__ void run(T* dx, const T* y, const T* g, unsigned long long* board, int rows, int columns,
                                               long long g_row, const Gradient<T>& gradient, Words<T>* slots, Found (&found)[2]) {
        int rank = blockIdx.x / BLOCKS, ranks = gridDim.x / BLOCKS, first = blockIdx.x % BLOCKS,
            count = (rows - first + BLOCKS - 1) / BLOCKS;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = rank * THREADS + threadIdx.x, step = ranks * THREADS;
        int own = (columns / WIDTH<T> - mine + step - 1) / step;
        step *= WIDTH<T>;
        y += first * (long long)columns + mine * WIDTH<T>;
        g += first * g_row + mine * WIDTH<T>;
        dx += first * (long long)columns + mine * WIDTH<T>;
        board += first * (long long)ranks;
        slots += threadIdx.x;
        auto slot = [&](int i, int k) { return slots + (i % STAGES * VECTORS + k) * 2 * THREADS; };
        auto fetch = [&](int i) {
            if (i < count) {
                each(own, [&](int k) {
                    cp_async_16(shared_address(slot(i, k)), y + k * step);
                    cp_async_16(shared_address(slot(i, k) + THREADS), g + k * step);
                });
                y += BLOCKS * (long long)columns;
                g += BLOCKS * g_row;
            }
            cp_async_commit();
        };
        auto part_of = [&](int i) {
            C part = 0;
            each(own, [&](int k) {
                C a[WIDTH<T>], b[WIDTH<T>], here = 0;
                unpack(*slot(i, k), a);
                unpack(*(slot(i, k) + THREADS), b);
#pragma unroll
                for (int j = 0; j < WIDTH<T>; ++j) here += gradient.template term<false>(a[j], b[j]);
                part += here;
            });
            return warp_reduce<Sum>(part);
        };
        auto words_of = [&](int i) { return board + i * (BLOCKS * (long long)ranks); };
        auto hear = [&](int i, unsigned long long word) {  // `word`: the thread's first, if it has come
            float sum = 0;
            for (int at = threadIdx.x; at < ranks; at += THREADS) {
                if (at != threadIdx.x || !word) word = wait_for(words_of(i) + at);
                sum += __uint_as_float(unsigned(word));
            }
            return warp_reduce<Sum>(sum);
        };
        auto write = [&](float sum, const Words<T>(&ys)[VECTORS], const Words<T>(&gs)[VECTORS]) {
            each(own, [&](int k) {
                C a[WIDTH<T>], b[WIDTH<T>];
                unpack(ys[k], a);
                unpack(gs[k], b);
#pragma unroll
                for (int j = 0; j < WIDTH<T>; ++j) a[j] = gradient.template of<false>(a[j], b[j], sum);
                store_vector(dx + k * step, a);
            });
            dx += BLOCKS * (long long)columns;
        };
        Words<T> ys[2][VECTORS], gs[2][VECTORS];
        unsigned long long word = 0;
        fetch(0);
        fetch(1);
        for (int turn = 0; turn < count + LAG; turn += 2) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                int i = turn + p;
                if (i >= count + LAG) break;
                cp_async_wait<1>();
                // Now no load of rows waits to be sent, so that words are fast: those of the turn before have come, the next are asked for.
                float heard = i >= LAG ? hear(i - LAG, word) : 0.0f;
                if (i >= 2 && i - 2 < count && threadIdx.x < ranks) word = look(words_of(i - 2) + threadIdx.x);
                float part = i < count ? part_of(i) : 0.0f;
                if (lane == 0) {
                    found[p].parts[warp] = part;
                    found[p].words[warp] = heard;
                }
                __syncthreads();
                if (warp == 0 && i < count) {
                    part = warp_reduce<Sum>(lane < WARPS ? found[p].parts[lane] : 0.0f);
                    if (lane == 0) post(words_of(i) + rank, told(part));
                }
                __syncthreads();  // before others store
                if (i >= LAG) write(warp_reduce<Sum>(lane < WARPS ? found[p].words[lane] : 0.0f), ys[1 - p], gs[1 - p]);
                if (i > 0 && i <= count) {
                    each(own, [&](int k) {
                        ys[1 - p][k] = *slot(i - 1, k);
                        gs[1 - p][k] = *(slot(i - 1, k) + THREADS);
                    });
                }
                fetch(i + 2);
            }
        }
    }
};
