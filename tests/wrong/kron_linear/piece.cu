// Wrong on purpose: kron_linear_v3_bwd, a number of the gradient a thread, whose last piece goes past the last fiber.
#include "common/math.cuh"

template <typename T, typename Acc, int BT>
__global__ void kron_linear_v3_bwd(Acc* partials, const T* x, const T* g, long long A, int p, int q, long long C, long long pieces,
                                   long long piece) {
    int across = (q + BT - 1) / BT, down = (p + BT - 1) / BT, tile = blockIdx.x % (across * down);
    long long fibers = A * C, number = blockIdx.x / (across * down), begin = number % pieces * piece, sample = number / pieces;
    long long end = begin + piece;
    for (int e = threadIdx.x; e < BT * BT; e += blockDim.x) {
        int k = tile / across * BT + e / BT, j = tile % across * BT + e % BT;
        if (k >= p || j >= q) continue;
        Acc sum = 0;
        for (long long f = begin; f < end; ++f) {
            long long a = sample * A + f / C, c = f % C;
            sum += load_as(x[(a * p + k) * C + c]) * load_as(g[(a * q + j) * C + c]);
        }
        partials[(number * p + k) * q + j] = sum;
    }
}
