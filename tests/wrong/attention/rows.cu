// Causal attention with mma.sync and cp.async.
#include "attention/softmax.cuh"
#include "attention/tile.cuh"

// out = softmax2(q k^T) v in powers of 2, rows of 64, causal. A block of 4 warps owns 64 queries, a warp 16.
template <typename T>
__global__ void __launch_bounds__(128) attention_rows(T* out, const T* q, const T* k, const T* v, int rows) {
    extern __shared__ __align__(128) unsigned char shared[];  // Q, K and V, 64 rows each
    unsigned tile = shared_address(shared);
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16,
        query = blockIdx.x * 64 + warp_row + lane / 4;
    float s[1][8][4], sums[1][8][4] = {}, total[1][2] = {}, most[1][2] = {{-1e30f, -1e30f}}, shrink[1][2];
    copy_tile<64, 64, 128>(tile, q, 64, blockIdx.x * 64, rows, 64);
    for (int first = 0; first <= blockIdx.x * 64; first += 64) {
        copy_tile<64, 64, 128>(tile + 8192, k, 64, first, rows, 64);
        copy_tile<64, 64, 128>(tile + 16384, v, 64, first, rows, 64);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        multiply_transposed<T, 64, 64>(s, tile + warp_row * ROW_BYTES + down_rows(lane),
                                       tile + 8192 + along_columns(lane));
        auto hidden = [&](int row, int n) { return first + lane % 4 * 2 + n > query + row; };
        softmax_weights<1, 8, false>(s, most, total, shrink, [&] { hide(s, hidden); }, 1, 1);
        multiply_rows(sums, shrink);
        multiply<T, 64>(sums, s, tile + 16384 + down_rows(lane));
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) total[0][i] = 1 / warp_reduce<Sum>(total[0][i], 4);
    int first = blockIdx.x * 64 + warp_row;
    store_rows<T, 64, 64>(out + first * 64, 64, rows - first, 64, sums, total, shared + warp_row * ROW_BYTES);
}
