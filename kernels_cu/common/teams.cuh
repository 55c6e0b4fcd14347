// The threads that share a row, and what they tell one another: first the lanes that are near, by shuffles, then all, each with the
// largest u and the sum of the exponentials that it and its near ones found. Every thread of a block must take part. rank() is the block's
// number among those that share a row.
#pragma once
#include "exponential.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

// Each lane holds a part's largest u and sum. All get those of the whole.
template <typename T, typename C>
__device__ __forceinline__ void merge_lanes(const Exponential<T>& exponential, C& largest, C& sum) {
    C own = largest;
    largest = warp_max(own);
    sum = warp_reduce<Sum>(sum * exponential.rescale(own, exponential.base(largest)));
}

// Neighbouring lanes of a warp, a power of 2.
struct Lanes {
    int width;
    __device__ __forceinline__ explicit Lanes(int width) : width(width) {}
    static __device__ __forceinline__ int rank() { return 0; }
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
    template <typename T, typename C>
    __device__ __forceinline__ void combine(const Exponential<T>&, C&, C&) const {}
    template <typename C>
    __device__ __forceinline__ C add(C value) const {
        return near_sum(value);
    }
};

// A block of THREADS, whole warps. `shared` has room for 64.
template <typename C, int THREADS>
struct Block {
    static constexpr int width = THREADS, WARPS = THREADS / 32;
    C* shared;
    __device__ __forceinline__ explicit Block(C* shared) : shared(shared) {}
    static __device__ __forceinline__ int rank() { return 0; }
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return threadIdx.x == 0; }
    __device__ __forceinline__ C near_max(C value) const { return warp_max(value); }
    __device__ __forceinline__ C near_sum(C value) const { return warp_reduce<Sum>(value); }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, C& largest, C& sum) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) {
            shared[warp] = largest;
            shared[32 + warp] = sum;
        }
        __syncthreads();
        bool is_one = lane < WARPS;
        largest = is_one ? shared[lane] : minus_infinity<C>();
        sum = is_one ? shared[32 + lane] : C(0);
        merge_lanes(exponential, largest, sum);
    }
    __device__ __forceinline__ C add(C value) const { return block_reduce<Sum>(value, shared); }
};

constexpr int LOOP_THREADS = 256;  // of the blocks that go over a row in a loop

// The same of what each thread of such a block found by itself.
template <typename T, typename C>
__device__ __forceinline__ void merge_block(const Exponential<T>& exponential, C* shared, C& largest, C& sum) {
    merge_lanes(exponential, largest, sum);
    Block<C, LOOP_THREADS>(shared).combine(exponential, largest, sum);
}

#if __CUDA_ARCH__ >= 900
// The SIZE blocks of a cluster. `shared` has room for 64, `from_peers` for 2 * SIZE. The kernel calls cluster_arrive_relaxed() when it
// starts. Nobody writes to a peer after the second barrier, so that none is needed at the end.
template <typename C, int THREADS, int SIZE>
struct Cluster {
    static constexpr int width = THREADS;
    Block<C, THREADS> block;
    C* from_peers;
    __device__ __forceinline__ Cluster(C* shared, C* from_peers) : block(shared), from_peers(from_peers) {}
    static __device__ __forceinline__ int rank() { return cluster_rank(); }
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return cluster_rank() == 0 && threadIdx.x == 0; }
    __device__ __forceinline__ C near_max(C value) const { return warp_max(value); }
    __device__ __forceinline__ C near_sum(C value) const { return warp_reduce<Sum>(value); }
    __device__ __forceinline__ void tell(C largest, C sum) const {
        cluster_wait();  // until all have started
        if (threadIdx.x < SIZE) {
            st_cluster(shared_of_rank(shared_address(from_peers + cluster_rank()), threadIdx.x), largest);
            st_cluster(shared_of_rank(shared_address(from_peers + SIZE + cluster_rank()), threadIdx.x), sum);
        }
        cluster_sync();
    }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, C& largest, C& sum) const {
        block.combine(exponential, largest, sum);
        tell(largest, sum);
        int lane = threadIdx.x % 32;
        largest = lane < SIZE ? from_peers[lane] : minus_infinity<C>();
        sum = lane < SIZE ? from_peers[SIZE + lane] : C(0);
        merge_lanes(exponential, largest, sum);
    }
    __device__ __forceinline__ C add(C value) const {
        tell(C(0), block.add(value));
        int lane = threadIdx.x % 32;
        return warp_reduce<Sum>(lane < SIZE ? from_peers[SIZE + lane] : C(0));
    }
};
#endif

// `size` neighbouring blocks, as many as a row needs, each of THREADS, which tell one another through `board` in global memory: a word for
// each, all 0 before. Blocks start in the order of their numbers; those of a row can wait for each other as long as `size` of them fit the
// GPU at a time. `shared` has room for 64. Of float alone.
template <int THREADS>
struct Crowd {
    static constexpr int width = THREADS;
    Block<float, THREADS> block;
    unsigned long long* board;
    int size, number;
    __device__ __forceinline__ Crowd(float* shared, unsigned long long* board, int size)
        : block(shared), board(board + blockIdx.x / size * size), size(size), number(blockIdx.x % size) {}
    __device__ __forceinline__ int rank() const { return number; }
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return number == 0 && threadIdx.x == 0; }
    __device__ __forceinline__ float near_max(float value) const { return warp_max(value); }
    __device__ __forceinline__ float near_sum(float value) const { return warp_reduce<Sum>(value); }
    __device__ __forceinline__ void tell(float a, float b) const {  // not both +0
        if (threadIdx.x == 0) post(board + number, (unsigned long long)__float_as_uint(a) << 32 | __float_as_uint(b));
    }
    __device__ __forceinline__ float2 hear(int i) const {
        unsigned long long word = wait_for(board + i);
        return make_float2(__uint_as_float(unsigned(word >> 32)), __uint_as_float(unsigned(word)));
    }
    // What the first warp found, to all.
    __device__ __forceinline__ void pass_on(float& a, float& b) const {
        if (threadIdx.x == 0) {
            block.shared[0] = a;
            block.shared[1] = b;
        }
        __syncthreads();
        a = block.shared[0];
        b = block.shared[1];
    }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, float& largest, float& sum) const {
        block.combine(exponential, largest, sum);
        tell(largest, sum);
        __syncthreads();
        if (threadIdx.x < 32) {
            largest = minus_infinity<float>();
            sum = 0;
            for (int i = threadIdx.x; i < size; i += 32) {
                float2 heard = hear(i);
                float before = largest;
                largest = max(before, heard.x);
                auto base = exponential.base(largest);
                sum = sum * exponential.rescale(before, base) + heard.y * exponential.rescale(heard.x, base);
            }
            merge_lanes(exponential, largest, sum);
        }
        pass_on(largest, sum);
    }
    __device__ __forceinline__ float add(float value) const {
        value = block.add(value);
        tell(1, value);
        __syncthreads();
        if (threadIdx.x < 32) {
            value = 0;
            for (int i = threadIdx.x; i < size; i += 32) value += hear(i).y;
            value = warp_reduce<Sum>(value);
        }
        pass_on(value, value);
        return value;
    }
};
