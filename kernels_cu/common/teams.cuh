// The threads that share a row, and what they tell one another: first the lanes that are near, by shuffles, then all, each with the
// largest u and the sum of the exponentials that it and its near ones found. Every thread of a block must take part. Vectors [begin, end)
// of the row are the block's part; end matters only where not all of it is held on chip.
#pragma once
#include "exponential.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

// Each lane holds a part's largest u and sum. All get those of the whole.
template <typename T, typename C>
__device__ __forceinline__ void merge_lanes(const Exponential<T>& exponential, C& largest, C& sum) {
    C own = largest;
    largest = warp_reduce<Max>(own);
    sum = warp_reduce<Sum>(sum * exponential.rescale(own, exponential.base(largest)));
}

// Neighbouring lanes of a warp, a power of 2.
struct Lanes {
    static constexpr int begin = 0, end = 0;
    int width;
    __device__ __forceinline__ explicit Lanes(int width) : width(width) {}
    __device__ __forceinline__ int lane() const { return threadIdx.x % width; }
    __device__ __forceinline__ bool leads() const { return threadIdx.x % width == 0; }
    template <class Op, typename C>
    __device__ __forceinline__ C near(C value) const {
        return warp_reduce<Op>(value, width);
    }
    template <typename T, typename C>
    __device__ __forceinline__ void combine(const Exponential<T>&, C&, C&) const {}
    template <typename C>
    __device__ __forceinline__ C add(C value) const {
        return near<Sum>(value);
    }
};

// A block. `shared` has room for 64.
template <typename C>
struct Block {
    static constexpr int begin = 0;
    int width, end;
    C* shared;
    __device__ __forceinline__ explicit Block(C* shared, int end = 0, int width = blockDim.x) : width(width), end(end), shared(shared) {}
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return threadIdx.x == 0; }
    template <class Op>
    __device__ __forceinline__ C near(C value) const {
        return warp_reduce<Op>(value);
    }
    template <typename T>
    __device__ __forceinline__ void combine(const Exponential<T>& exponential, C& largest, C& sum) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (lane == 0) {
            shared[warp] = largest;
            shared[32 + warp] = sum;
        }
        __syncthreads();
        bool is_one = lane < blockDim.x / 32;
        largest = is_one ? shared[lane] : minus_infinity<C>();
        sum = is_one ? shared[32 + lane] : C(0);
        merge_lanes(exponential, largest, sum);
    }
    __device__ __forceinline__ C add(C value) const { return block_reduce<Sum>(value, shared); }
};

// The same of what each thread found by itself, over the block.
template <typename T, typename C>
__device__ __forceinline__ void merge_block(const Exponential<T>& exponential, C* shared, C& largest, C& sum) {
    merge_lanes(exponential, largest, sum);
    Block<C>(shared).combine(exponential, largest, sum);
}

#if __CUDA_ARCH__ >= 900
// The SIZE blocks of a cluster, of which each has `part` of the row's vectors. `shared` has room for 64, `from_peers` for 2 * SIZE. The
// kernel calls cluster_arrive_relaxed() when it starts. Nobody writes to a peer after the second barrier, so that none is needed at the end.
template <typename C, int SIZE>
struct Cluster {
    Block<C> block;
    C* from_peers;
    int width, begin, end;
    __device__ __forceinline__ Cluster(C* shared, C* from_peers, int part)
        : block(shared), from_peers(from_peers), width(block.width), begin(cluster_rank() * part), end(begin + part) {}
    __device__ __forceinline__ int lane() const { return threadIdx.x; }
    __device__ __forceinline__ bool leads() const { return cluster_rank() == 0 && threadIdx.x == 0; }
    template <class Op>
    __device__ __forceinline__ C near(C value) const {
        return warp_reduce<Op>(value);
    }
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
