// Teams: the threads that share a row, and how they combine its largest u and its sum of exponentials (or
// another sum). First the lanes of a warp combine theirs (lanes_max, lanes_sum), then the whole team
// (combine, reduce_sum). Every thread of a block must take part. thread() is the thread's index in its block,
// or in its group of lanes. block_rank() is the block's index among the num_blocks() of the row. rounds(n) is
// n divided by the number of threads of the team, rounded down.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/reduce.cuh"
#include "exponential.cuh"

// Each of `width` neighbouring lanes holds the largest u and the sum of a part; every group of lanes holds
// the same. All get the total.
template <typename T>
__device__ __forceinline__ void merge_lanes(const Exponential<T>& exponential, compute_t<T>& largest,
                                            sum_t<T>& sum, int width = 32) {
    compute_t<T> own = largest;
    largest = warp_max(own);
    sum = warp_reduce<Sum>(sum * exponential.rescale(own, exponential.base(largest)), width);
}

// The results of each warp of a block.
template <typename T>
struct WarpPartials {
    sum_t<T> sums[32];
    compute_t<T> largest[32];
    // Each warp combines the first `count`, a power of 2.
    __device__ __forceinline__ void merge(const Exponential<T>& exponential, int count, compute_t<T>& all,
                                          sum_t<T>& sum) const {
        all = largest[threadIdx.x % count];
        sum = sums[threadIdx.x % count];
        merge_lanes(exponential, all, sum, count);
    }
};

// Neighbouring lanes of a warp; `width` is a power of 2.
struct WarpTeam {
    int width;
    __device__ __forceinline__ explicit WarpTeam(int width) : width(width) {}
    static __device__ __forceinline__ int block_rank() { return 0; }
    static __device__ __forceinline__ int num_blocks() { return 1; }
    __device__ __forceinline__ int rounds(int count) const { return count >> (31 - __clz(width)); }
    __device__ __forceinline__ int thread() const { return threadIdx.x % width; }
    __device__ __forceinline__ bool is_leader() const { return thread() == 0; }
    template <typename C>
    __device__ __forceinline__ C lanes_max(C value) const {
        return width == 32 ? warp_max(value) : warp_reduce<Max>(value, width);
    }
    template <typename C>
    __device__ __forceinline__ C lanes_sum(C value) const {
        return warp_reduce<Sum>(value, width);
    }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>&, compute_t<T>&, sum_t<T>&) const {}
    template <typename C>
    __device__ __forceinline__ C reduce_sum(C value) const {
        return lanes_sum(value);
    }
};

// A block of THREADS threads: whole warps, a power of 2. With ROWS > 1 the block has ROWS times as many
// threads, for as many rows.
template <typename T, int THREADS, int ROWS = 1>
struct BlockTeam {
    using C = compute_t<T>;
    static constexpr int width = THREADS;
    WarpPartials<T>& partials;
    __device__ __forceinline__ explicit BlockTeam(WarpPartials<T>& partials) : partials(partials) {}
    static __device__ __forceinline__ int block_rank() { return 0; }
    static __device__ __forceinline__ int num_blocks() { return 1; }
    static __device__ __forceinline__ int rounds(int count) { return count / width; }
    __device__ __forceinline__ int thread() const { return ROWS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
    __device__ __forceinline__ bool is_leader() const { return thread() == 0; }
    __device__ __forceinline__ C lanes_max(C value) const { return warp_max(value); }
    template <typename S>
    __device__ __forceinline__ S lanes_sum(S value) const {
        return warp_reduce<Sum>(value);
    }
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, C& largest,
                                            sum_t<T>& sum) const {
        int warp = thread() / 32;
        if (threadIdx.x % 32 == 0) {
            partials.largest[warp] = largest;
            partials.sums[warp] = sum;
        }
        __syncthreads();
        partials.merge(exponential, THREADS / 32, largest, sum);
    }
    __device__ __forceinline__ C reduce_sum(C value) const {
        return block_reduce<Sum>(value, partials.largest);
    }
};

constexpr int LOOP_THREADS = 256;  // of blocks that loop over a row

// Combines the results of the LOOP_THREADS threads of a block.
template <typename T>
__device__ __forceinline__ void merge_block(const Exponential<T>& exponential, WarpPartials<T>& partials,
                                            compute_t<T>& largest, sum_t<T>& sum) {
    merge_lanes(exponential, largest, sum);
    BlockTeam<T, LOOP_THREADS>(partials).combine(exponential, largest, sum);
}

// Mailbox in global memory: the blocks that share a row exchange one word each. A word is 0 until it is sent;
// all are 0 at the launch. A row has num_blocks neighbouring blocks. Blocks start in the order of their
// indices, so those of a row can wait for each other if num_blocks blocks fit on the GPU at the same time.
// What a block waits for: docs/notes/softmax.md
struct GlobalMailbox {
    unsigned long long* words;
    int num_blocks, index;
    __device__ __forceinline__ GlobalMailbox(unsigned long long* words, int num_blocks)
        : words(words), num_blocks(num_blocks), index(blockIdx.x % num_blocks) {}
    __device__ __forceinline__ int block_rank() const { return index; }
    __device__ __forceinline__ void send(unsigned long long word) const {
        if (threadIdx.x == 0) post(words + blockIdx.x, word);
    }
    __device__ __forceinline__ unsigned long long receive(int i) const {
        return wait_for(words + (blockIdx.x - index + i));
    }
    static __device__ __forceinline__ void received_all() {}
};

#if __CUDA_ARCH__ >= 900
// Mailbox in the shared memory of each block of a cluster. Sending uses no barrier: its release would wait
// for all memory accesses in flight on the SM, 3 us on a busy H200. The kernel calls wait_before_exit() at
// its end: no block exits before all have received.
template <int SIZE>
struct ClusterMailbox {
    static constexpr int num_blocks = SIZE;
    unsigned long long* words;
    // Construct it before anything else in the kernel: then the fence has little to wait for, and the other
    // warps need none.
    __device__ __forceinline__ explicit ClusterMailbox(unsigned long long (&words)[SIZE]) : words(words) {
        if (threadIdx.x < SIZE) {
            words[threadIdx.x] = 0;
            cluster_fence();
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    static __device__ __forceinline__ int block_rank() { return cluster_rank(); }
    __device__ __forceinline__ void send(unsigned long long word) const {
        cluster_wait();  // until all blocks have cleared their words
        if (threadIdx.x < SIZE)
            post_cluster(shared_of_rank(shared_address(words + block_rank()), threadIdx.x), word);
    }
    __device__ __forceinline__ unsigned long long receive(int i) const {
        return wait_for_shared(shared_address(words + i));
    }
    static __device__ __forceinline__ void received_all() { cluster_arrive_relaxed(); }
    static __device__ __forceinline__ void wait_before_exit() { cluster_wait(); }
};
#endif

// Several blocks of THREADS threads, which exchange results through a mailbox. Not available for double.
template <typename T, int THREADS, class Mailbox>
struct MultiBlockTeam {
    static constexpr int width = THREADS;
    BlockTeam<T, THREADS> block;
    const Mailbox& mailbox;
    __device__ __forceinline__ MultiBlockTeam(WarpPartials<T>& partials, const Mailbox& mailbox)
        : block(partials), mailbox(mailbox) {}
    __device__ __forceinline__ int block_rank() const { return mailbox.block_rank(); }
    __device__ __forceinline__ int num_blocks() const { return mailbox.num_blocks; }
    __device__ __forceinline__ int rounds(int count) const { return count / (width * mailbox.num_blocks); }
    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ bool is_leader() const { return block_rank() == 0 && threadIdx.x == 0; }
    __device__ __forceinline__ float lanes_max(float value) const { return warp_max(value); }
    template <typename S>
    __device__ __forceinline__ S lanes_sum(S value) const {
        return warp_reduce<Sum>(value);
    }
    // not both +0, since a word of 0 means empty
    __device__ __forceinline__ void send(float a, float b) const {
        mailbox.send((unsigned long long)__float_as_uint(a) << 32 | __float_as_uint(b));
    }
    __device__ __forceinline__ float2 receive(int i) const {
        unsigned long long word = mailbox.receive(i);
        return make_float2(__uint_as_float(unsigned(word >> 32)), __uint_as_float(unsigned(word)));
    }
    // The first warp's results, to the whole block.
    __device__ __forceinline__ void broadcast(float& largest, sum_t<T>& sum) const {
        if (threadIdx.x == 0) {
            block.partials.largest[0] = largest;
            block.partials.sums[0] = sum;
        }
        __syncthreads();
        mailbox.received_all();
        largest = block.partials.largest[0];
        sum = block.partials.sums[0];
    }
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, float& largest,
                                            sum_t<T>& sum) const {
        block.combine(exponential, largest, sum);
        send(largest, sum);
        __syncthreads();
        if (threadIdx.x < 32) {
            largest = minus_infinity<float>();
            sum = 0;
            for (int i = threadIdx.x; i < mailbox.num_blocks; i += 32) {
                float2 received = receive(i);
                float before = largest;
                largest = max(before, received.x);
                auto base = exponential.base(largest);
                sum = sum * exponential.rescale(before, base) +
                      sum_t<T>(received.y) * exponential.rescale(received.x, base);
            }
            merge_lanes(exponential, largest, sum);
        }
        broadcast(largest, sum);
    }
    __device__ __forceinline__ float reduce_sum(float value) const {
        float block_sum = block.reduce_sum(value), unused = 0;
        send(1, block_sum);
        __syncthreads();
        sum_t<T> sum = 0;
        if (threadIdx.x < 32) {
            for (int i = threadIdx.x; i < mailbox.num_blocks; i += 32) sum += receive(i).y;
            sum = warp_reduce<Sum>(sum);
        }
        broadcast(unused, sum);
        return sum;
    }
};
