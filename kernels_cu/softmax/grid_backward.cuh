// The gradient of rows so long that the whole GPU shares each (softmax v11). The kernel is persistent: every SM holds BLOCKS blocks until
// the end, and they go through the rows together. No block is more than three rows ahead of another, so that the reads of all SMs are
// adjacent in memory, and so are the writes.
//
// A word is a partial sum in the mailbox. In iteration i a block
//   - waits until its part of row i has arrived in shared memory;
//   - waits for the missing words of row i - 3 and adds all words of that row;
//   - reads the words of row i - 2 that have already arrived, without waiting;
//   - sums its part of row i, and sends the partial sum to the other blocks;
//   - writes row i - 3 from registers;
//   - moves row i - 1 to registers, and starts the copies of row i + 2.
//
// An SM issues memory accesses in order, so words are read and sent only while no load waits to be issued. H200, 512 rows of 1M columns,
// speed relative to a copy: float 1.004, bfloat16 1.003. Experiments and dead ends: docs/notes/softmax.md
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/memory.cuh"
#include "common/reduce.cuh"
#include "exponential.cuh"
#include "row_storage.cuh"

// A partial sum as a word that is never 0.
__device__ __forceinline__ unsigned long long to_word(float part) { return 1ull << 32 | __float_as_uint(part); }

template <typename T, int THREADS, int BLOCKS>
struct GridBackward {
    static constexpr int VECTORS = 4, STAGES = 3, LAG = 3, WARPS = THREADS / 32;
    using C = compute_t<T>;
    struct WarpSums {           // one value per warp
        float local[WARPS];     // partial sum of the block's own row
        float received[WARPS];  // sum of the words received for an earlier row
    };

    template <class F>
    static __device__ __forceinline__ void for_owned(int owned, F f) {
#pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            if (k < owned) f(k);
    }

    // `mailbox`: a word for each row and SM, all 0. `shared`: STAGES * VECTORS * 2 vectors per thread.
    static __device__ __forceinline__ void run(T* dx, const T* y, const T* g, unsigned long long* mailbox, int rows, int columns,
                                               long long g_row, const Gradient<T>& gradient, Vector<T>* shared, WarpSums (&warp_sums)[2]) {
        int rank = blockIdx.x / BLOCKS, ranks = gridDim.x / BLOCKS, first = blockIdx.x % BLOCKS,
            count = (rows - first + BLOCKS - 1) / BLOCKS;
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = rank * THREADS + threadIdx.x, step = ranks * THREADS;
        int owned = (columns / ELEMENTS<T> - index + step - 1) / step;
        step *= ELEMENTS<T>;
        y += first * (long long)columns + index * ELEMENTS<T>;
        g += first * g_row + index * ELEMENTS<T>;
        dx += first * (long long)columns + index * ELEMENTS<T>;
        mailbox += first * (long long)ranks;
        shared += threadIdx.x;
        auto shared_vector = [&](int i, int k) { return shared + (i % STAGES * VECTORS + k) * 2 * THREADS; };
        auto fetch = [&](int i) {
            if (i < count) {
                for_owned(owned, [&](int k) {
                    cp_async_16(shared_address(shared_vector(i, k)), y + k * step);
                    cp_async_16(shared_address(shared_vector(i, k) + THREADS), g + k * step);
                });
                y += BLOCKS * (long long)columns;
                g += BLOCKS * g_row;
            }
            cp_async_commit();
        };
        auto partial_sum = [&](int i) {
            C part = 0;
            for_owned(owned, [&](int k) {
                C a[ELEMENTS<T>], b[ELEMENTS<T>], partial = 0;
                unpack(*shared_vector(i, k), a);
                unpack(*(shared_vector(i, k) + THREADS), b);
#pragma unroll
                for (int j = 0; j < ELEMENTS<T>; ++j) partial += gradient.template term<false>(a[j], b[j]);
                part += partial;
            });
            return warp_reduce<Sum>(part);
        };
        auto mailbox_of = [&](int i) { return mailbox + i * (BLOCKS * (long long)ranks); };
        auto receive_sum = [&](int i, unsigned long long word) {  // `word`: the thread's first word, or 0 if it has not arrived
            float sum = 0;
            for (int at = threadIdx.x; at < ranks; at += THREADS) {
                if (at != threadIdx.x || !word) word = wait_for(mailbox_of(i) + at);
                sum += __uint_as_float(unsigned(word));
            }
            return warp_reduce<Sum>(sum);
        };
        auto write = [&](float sum, const Vector<T>(&ys)[VECTORS], const Vector<T>(&gs)[VECTORS]) {
            for_owned(owned, [&](int k) {
                C a[ELEMENTS<T>], b[ELEMENTS<T>];
                unpack(ys[k], a);
                unpack(gs[k], b);
#pragma unroll
                for (int j = 0; j < ELEMENTS<T>; ++j) a[j] = gradient.template dx<false>(a[j], b[j], sum);
                store_vector(dx + k * step, a);
            });
            dx += BLOCKS * (long long)columns;
        };
        Vector<T> ys[2][VECTORS], gs[2][VECTORS];
        unsigned long long word = 0;
        fetch(0);
        fetch(1);
        for (int iteration = 0; iteration < count + LAG; iteration += 2) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                int i = iteration + p;
                if (i >= count + LAG) break;
                cp_async_wait<1>();
                // Words are fast now, because no load waits to be issued: row i has arrived, and the loads of row i + 1 are issued.
                float received = i >= LAG ? receive_sum(i - LAG, word) : 0.0f;
                if (i >= 2 && i - 2 < count && threadIdx.x < ranks) word = look(mailbox_of(i - 2) + threadIdx.x);
                float part = i < count ? partial_sum(i) : 0.0f;
                if (lane == 0) {
                    warp_sums[p].local[warp] = part;
                    warp_sums[p].received[warp] = received;
                }
                __syncthreads();
                if (warp == 0 && i < count) {
                    part = warp_reduce<Sum>(lane < WARPS ? warp_sums[p].local[lane] : 0.0f);
                    if (lane == 0) post(mailbox_of(i) + rank, to_word(part));
                }
                __syncthreads();  // send the word before other warps store
                if (i >= LAG) write(warp_reduce<Sum>(lane < WARPS ? warp_sums[p].received[lane] : 0.0f), ys[1 - p], gs[1 - p]);
                if (i > 0 && i <= count) {
                    for_owned(owned, [&](int k) {
                        ys[1 - p][k] = *shared_vector(i - 1, k);
                        gs[1 - p][k] = *(shared_vector(i - 1, k) + THREADS);
                    });
                }
                fetch(i + 2);
            }
        }
    }
};
