// Attention of packed sequences: the keys behind a sequence's end are hidden.
#include "attention/softmax.cuh"
#include "attention/tile.cuh"

// out = softmax2(q k^T) v in powers of 2, rows of 64, in packed sequences. A block of 4 warps owns 64 queries
// of a sequence, a warp 16.
template <typename T>
__global__ void __launch_bounds__(128)
    packed_rows(T* out, const T* q, const T* k, const T* v, const int* bounds, int rows, int sequences) {
    extern __shared__ __align__(128) unsigned char shared[];  // Q, K and V, 64 rows each
    unsigned tile = shared_address(shared);
    Work work = {int(blockIdx.x), 0, 0};
    Sequence of = sequence_of<true, false, 64>(work, bounds, bounds, sequences, rows, rows);
    int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, begin = of.first_query * 64,
        mine = work.block * 64;
    if (mine >= of.queries) return;
    float s[1][8][4], sums[1][8][4] = {}, total[1][2] = {}, most[1][2] = {{-1e30f, -1e30f}}, shrink[1][2];
    copy_tile<64, 64, 128>(tile, q + begin, 64, mine, of.queries, 64);
    for (int first = 0; first < of.keys; first += 64) {
        copy_tile<64, 64, 128>(tile + 8192, k + begin, 64, first, of.keys, 64);
        copy_tile<64, 64, 128>(tile + 16384, v + begin, 64, first, of.keys, 64);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        multiply_transposed<T, 64, 64>(s, tile + warp_row * ROW_BYTES + down_rows(lane),
                                       tile + 8192 + along_columns(lane));
        auto hidden = [&](int row, int n) { return first + lane % 4 * 2 + n >= of.keys; };
        softmax_weights<1, 8, false>(s, most, total, shrink, [&] { hide(s, hidden); }, 1, 1);
        multiply_rows(sums, shrink);
        multiply<T, 64>(sums, s, tile + 16384 + down_rows(lane));
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) total[0][i] = 1 / warp_reduce<Sum>(total[0][i], 4);
    mine += warp_row;
    store_rows<T, 64, 64>(out + begin + mine * 64, 64, of.queries - mine, 64, sums, total,
                          shared + warp_row * ROW_BYTES);
}
