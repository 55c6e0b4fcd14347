// Causal attention with mma.sync and cp.async.
#include "attention/tile.cuh"
#include "common/ptx/math.cuh"
#include "common/reduce.cuh"

// out = softmax2(q k^T) v in powers of 2, rows of 64, causal. A block of 4 warps owns 64 queries, a warp 16.
template <typename T>
__global__ void __launch_bounds__(128) attention_rows(T* out, const T* q, const T* k, const T* v, int rows) {
    extern __shared__ __align__(128) unsigned char shared[];  // Q, K and V, 64 rows each
    unsigned tile = shared_address(shared);
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16,
        query = blockIdx.x * 64 + warp_row + lane / 4;
    float sums[1][8][4] = {}, total[1][2] = {}, most[2] = {-1e30f, -1e30f};
    copy_tile<64, 64, 128>(tile, q, 64, blockIdx.x * 64, rows, 64);
    for (int first = 0; first <= blockIdx.x * 64; first += 64) {
        copy_tile<64, 64, 128>(tile + 8192, k, 64, first, rows, 64);
        copy_tile<64, 64, 128>(tile + 16384, v, 64, first, rows, 64);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        float s[1][8][4];
        multiply_transposed<T, 64, 64>(s, tile + warp_row * ROW_BYTES + down_rows(lane),
                                       tile + 8192 + along_columns(lane));
        for (int i = 0; i < 2; i++) {
            float top = most[i];
            for (int n = 0; n < 16; n++) {
                float& x = s[0][n / 2][2 * i + n % 2];
                if (first + n / 2 * 8 + lane % 4 * 2 + n % 2 > query + 8 * i) x = -1e30f;
                top = fmaxf(top, x);
            }
            top = warp_reduce<Max>(top, 4);
            float shrink = exp2_approx(most[i] - top);
            most[i] = top, total[0][i] *= shrink;
            for (int n = 0; n < 16; n++) {
                float& x = s[0][n / 2][2 * i + n % 2];
                x = exp2_approx(x - top), total[0][i] += x;
                sums[0][n / 2][2 * i + n % 2] *= shrink;
            }
        }
        multiply<T, 64>(sums, s, tile + 16384 + down_rows(lane));
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) total[0][i] = 1 / warp_reduce<Sum>(total[0][i], 4);
    int first = blockIdx.x * 64 + warp_row;
    store_rows<T, 64, 64>(out + first * 64, 64, rows - first, 64, sums, total, shared + warp_row * ROW_BYTES);
}
