// The position of each token in its packed sequence, by a search for the sequence.
__global__ void rope_positions(float* positions, const int* cu_seqlens, int tokens, int sequences) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    int first = 0,
        last = sequences;  // the boundaries [first, last) are the ones that may be the first beyond t
    while (first < last) {
        int middle = (first + last) / 2;
        if (cu_seqlens[middle] <= t) first = middle + 1;
        else last = middle;
    }
    positions[t] = t - cu_seqlens[first > 0 ? first - 1 : 0];
}
