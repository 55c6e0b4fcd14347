// my_op: out = x transposed. The gradient is the transpose of dout, by the same kernel.
//
// Layout  x is (rows, cols), out is (cols, rows), both contiguous.
// Launch  one thread block of (32, 8) threads per 32x32 tile. The tile goes through shared memory, so that
//         reads and writes are coalesced.
#include "common/math.cuh"  // of cukern: includes the 16-bit types

constexpr int TILE = 32;
constexpr int ROWS = 8;  // of threads; each moves TILE / ROWS elements

template <typename T>
__global__ void my_op_fwd(T* out, const T* x, int rows, int cols) {
    __shared__ T tile[TILE][TILE + 1];  // padding: the columns of a tile lie in different banks
    int top = blockIdx.y * TILE, left = blockIdx.x * TILE;
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        int row = top + i, col = left + threadIdx.x;
        if (row < rows && col < cols) tile[i][threadIdx.x] = x[row * (long long)cols + col];
    }
    __syncthreads();
    for (int i = threadIdx.y; i < TILE; i += ROWS) {
        int row = left + i, col = top + threadIdx.x;
        if (row < cols && col < rows) out[row * (long long)rows + col] = tile[threadIdx.x][i];
    }
}
