// The threads that share a row, and what they tell one another: first the lanes that are near, by shuffles, then all, each with the
// largest u and the sum of the exponentials that it and its near ones found. Every thread of a block must take part. rank() is the block's
// number among the size() that share a row; turns() is how often they all together go into a count.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/memory.cuh"
#include "common/reduce.cuh"
#include "exponential.cuh"

// Each of `width` neighbouring lanes holds a part's largest u and sum, and every group of them the same. All get those of the whole.
template <typename T>
__device__ __forceinline__ void merge_lanes(const Exponential<T>& exponential, compute_t<T>& largest, sum_t<T>& sum, int width = 32) {
    compute_t<T> own = largest;
    largest = warp_max(own);
    sum = warp_reduce<Sum>(sum * exponential.rescale(own, exponential.base(largest)), width);
}

// What each of a block's warps found.
template <typename T>
struct Found {
    sum_t<T> sums[32];
    compute_t<T> largest[32];
    // The first `count` of them, a power of 2, put together by each warp.
    __device__ __forceinline__ void merge(const Exponential<T>& exponential, int count, compute_t<T>& all, sum_t<T>& sum) const {
        all = largest[threadIdx.x % count];
        sum = sums[threadIdx.x % count];
        merge_lanes(exponential, all, sum, count);
    }
};

// Neighbouring lanes of a warp, a power of 2.
struct Lanes {
    int width;
    __device__ __forceinline__ explicit Lanes(int width) : width(width) {}
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int size() { return 1; }
    __device__ __forceinline__ int turns(int count) const { return count >> (31 - __clz(width)); }
    __device__ __forceinline__ int lane() const { return threadIdx.x % width; }
    __device__ __forceinline__ bool leads() const { return lane() == 0; }
    template <typename C>
    __device__ __forceinline__ C near_max(C value) const {
        return width == 32 ? warp_max(value) : warp_reduce<Max>(value, width);
    }
    template <typename C>
    __device__ __forceinline__ C near_sum(C value) const {
        return warp_reduce<Sum>(value, width);
    }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>&, compute_t<T>&, sum_t<T>&) const {}
    template <typename C>
    __device__ __forceinline__ C add(C value) const {
        return near_sum(value);
    }
};

// A block of THREADS, a power of 2 of whole warps; or of ROWS times as many, where so many rows lie side by side.
template <typename T, int THREADS, int ROWS = 1>
struct Block {
    using C = compute_t<T>;
    static constexpr int width = THREADS;
    Found<T>& found;  // of the row
    __device__ __forceinline__ explicit Block(Found<T>& found) : found(found) {}
    static __device__ __forceinline__ int rank() { return 0; }
    static __device__ __forceinline__ int size() { return 1; }
    static __device__ __forceinline__ int turns(int count) { return count / width; }
    __device__ __forceinline__ int lane() const { return ROWS == 1 ? threadIdx.x : threadIdx.x % THREADS; }
    __device__ __forceinline__ bool leads() const { return lane() == 0; }
    __device__ __forceinline__ C near_max(C value) const { return warp_max(value); }
    template <typename S>
    __device__ __forceinline__ S near_sum(S value) const {
        return warp_reduce<Sum>(value);
    }
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, C& largest, sum_t<T>& sum) const {
        int warp = lane() / 32;
        if (threadIdx.x % 32 == 0) {
            found.largest[warp] = largest;
            found.sums[warp] = sum;
        }
        __syncthreads();
        found.merge(exponential, THREADS / 32, largest, sum);
    }
    __device__ __forceinline__ C add(C value) const { return block_reduce<Sum>(value, found.largest); }
};

constexpr int LOOP_THREADS = 256;  // of the blocks that go over a row in a loop

// The same of what each thread of such a block found by itself.
template <typename T>
__device__ __forceinline__ void merge_block(const Exponential<T>& exponential, Found<T>& found, compute_t<T>& largest, sum_t<T>& sum) {
    merge_lanes(exponential, largest, sum);
    Block<T, LOOP_THREADS>(found).combine(exponential, largest, sum);
}

// Where the blocks that share a row tell one another: a word for each, 0 until it has told. Here in global memory, where all are 0 before,
// and a row has `size` neighbouring blocks, as many as it needs. Blocks start in the order of their numbers; those of a row can wait for
// each other as long as `size` of them fit the GPU at a time.
//
// One H200 with 512 rows of 1M: a block lives 17 us (float forward 21), of which its loads are on their way for 8 (11), it waits 3.5
// for the last of its row and 2.9 for words, and stores for 2 to 3.5. Backward, rows move in step: of 264 blocks from 20 to 250 load at a
// time, up and down in 16 us. What a block loads comes at 22 KB/us whether 80 or 160 do, so few that load are too few. Therefore slower:
// blocks that load only when the row four to nine before, or the block 48 to 224 before, has told (backward 0.92 to 0.61 to 0.916), though
// words then take 1.7 us, and copies to shared memory asked for before loads to registers (0.924 to 0.904, forward 0.926 to 0.903). As
// fast: first blocks that start 15 to 60 ns after one another (0.934 to 0.942), loads to registers that leave no line in L1, a least time of
// 6 to 8 us from a block's start to its word. Slower: bulk copies to shared memory beside loads to registers (0.885), three looks at words
// under way at a time (0.908), each warp for itself (0.867).
struct GlobalBoard {
    unsigned long long* all;
    int size, number;
    __device__ __forceinline__ GlobalBoard(unsigned long long* all, int size) : all(all), size(size), number(blockIdx.x % size) {}
    __device__ __forceinline__ int rank() const { return number; }
    __device__ __forceinline__ void tell(unsigned long long word) const {
        if (threadIdx.x == 0) post(all + blockIdx.x, word);
    }
    __device__ __forceinline__ unsigned long long hear(int i) const { return wait_for(all + (blockIdx.x - number + i)); }
    static __device__ __forceinline__ void heard_all() {}
};

#if __CUDA_ARCH__ >= 900
// In the shared memory of each of a cluster's blocks. There is no barrier where they tell: its release would wait for all that the
// multiprocessor has under way, 3 us on a busy H200. The kernel calls leave() at its end: no block exits before all have heard.
template <int SIZE>
struct ClusterBoard {
    static constexpr int size = SIZE;
    unsigned long long* words;
    // Before the kernel does anything else: then the fence has little to wait for, and the other warps need none.
    __device__ __forceinline__ explicit ClusterBoard(unsigned long long (&words)[SIZE]) : words(words) {
        if (threadIdx.x < SIZE) {
            words[threadIdx.x] = 0;
            cluster_fence();
        }
        __syncwarp();
        cluster_arrive_relaxed();
    }
    static __device__ __forceinline__ int rank() { return cluster_rank(); }
    __device__ __forceinline__ void tell(unsigned long long word) const {
        cluster_wait();  // until all have cleared theirs
        if (threadIdx.x < SIZE) post_cluster(shared_of_rank(shared_address(words + rank()), threadIdx.x), word);
    }
    __device__ __forceinline__ unsigned long long hear(int i) const { return wait_for_shared(shared_address(words + i)); }
    static __device__ __forceinline__ void heard_all() { cluster_arrive_relaxed(); }
    static __device__ __forceinline__ void leave() { cluster_wait(); }
};
#endif

// Several blocks of THREADS, which tell one another through a board. Not of double.
template <typename T, int THREADS, class Board>
struct Crowd {
    static constexpr int width = THREADS;
    Block<T, THREADS> block;
    const Board& board;
    __device__ __forceinline__ Crowd(Found<T>& found, const Board& board) : block(found), board(board) {}
    __device__ __forceinline__ int rank() const { return board.rank(); }
    __device__ __forceinline__ int size() const { return board.size; }
    __device__ __forceinline__ int turns(int count) const { return count / (width * board.size); }
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return rank() == 0 && threadIdx.x == 0; }
    __device__ __forceinline__ float near_max(float value) const { return warp_max(value); }
    template <typename S>
    __device__ __forceinline__ S near_sum(S value) const {
        return warp_reduce<Sum>(value);
    }
    __device__ __forceinline__ void tell(float a, float b) const {  // not both +0
        board.tell((unsigned long long)__float_as_uint(a) << 32 | __float_as_uint(b));
    }
    __device__ __forceinline__ float2 hear(int i) const {
        unsigned long long word = board.hear(i);
        return make_float2(__uint_as_float(unsigned(word >> 32)), __uint_as_float(unsigned(word)));
    }
    // What the first warp found, to all.
    __device__ __forceinline__ void pass_on(float& largest, sum_t<T>& sum) const {
        if (threadIdx.x == 0) {
            block.found.largest[0] = largest;
            block.found.sums[0] = sum;
        }
        __syncthreads();
        board.heard_all();
        largest = block.found.largest[0];
        sum = block.found.sums[0];
    }
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, float& largest, sum_t<T>& sum) const {
        block.combine(exponential, largest, sum);
        tell(largest, sum);
        __syncthreads();
        if (threadIdx.x < 32) {
            largest = minus_infinity<float>();
            sum = 0;
            for (int i = threadIdx.x; i < board.size; i += 32) {
                float2 heard = hear(i);
                float before = largest;
                largest = max(before, heard.x);
                auto base = exponential.base(largest);
                sum = sum * exponential.rescale(before, base) + sum_t<T>(heard.y) * exponential.rescale(heard.x, base);
            }
            merge_lanes(exponential, largest, sum);
        }
        pass_on(largest, sum);
    }
    __device__ __forceinline__ float add(float value) const {
        float told = block.add(value), unused = 0;
        tell(1, told);
        __syncthreads();
        sum_t<T> sum = 0;
        if (threadIdx.x < 32) {
            for (int i = threadIdx.x; i < board.size; i += 32) sum += hear(i).y;
            sum = warp_reduce<Sum>(sum);
        }
        pass_on(unused, sum);
        return sum;
    }
};
