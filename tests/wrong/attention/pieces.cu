// Products of floats as sums of three bfloat16 numbers.
#include "attention/tile.cuh"

// out = a b^T for floats, each the sum of three bfloat16 numbers. A block of 4 warps owns 64 rows of a; b has
// 64 rows. Both have 64 columns.
template <typename T>
__global__ void __launch_bounds__(128) float_products(float* out, const float* a, const float* b, int rows) {
    extern __shared__ __align__(128) unsigned char shared[];  // the pieces of a, then those of b
    constexpr int TILE = 64 * 64 * sizeof(T);
    T* tiles = reinterpret_cast<T*>(shared);
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, first = blockIdx.x * 64;
    split_tile<64, 64, 128, 3>(tiles, a, 64, first, rows, 64);
    split_tile<64, 64, 128, 3>(tiles + 3 * 64 * 64, b, 64, 0, 64, 64);
    __syncthreads();
    unsigned left = shared_address(shared) + warp_row * ROW_BYTES + down_rows(lane);
    unsigned right = shared_address(shared) + 3 * TILE + along_columns(lane);
    float sums[1][8][4] = {};
    for (int k = 0; k < 4; k++) {
        unsigned x[3][1][4], y[3][4];
        for (int p = 0; p < 3; p++) load_tiles<false>(x[p][0], columns_at<64>(left, k) + p * TILE);
        for (int n = 0; n < 4; n++) {
            for (int p = 0; p < 3; p++)
                load_tiles<false>(y[p], columns_at<64>(right, k) + p * TILE + n * 16 * ROW_BYTES);
            for (int sum = 2; sum >= 0; sum--)
                for (int i = 0; i <= sum; i++) multiply_blocks<T>(sums, x[i], y[sum - i], n);
        }
    }
    float one[1][2] = {{1, 1}};
    __syncthreads();
    store_rows<float, 64, 64>(out + (first + warp_row) * 64, 64, rows - first - warp_row, 64, sums, one,
                              shared + warp_row * ROW_BYTES);
}
