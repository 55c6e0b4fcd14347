template <typename T>
__global__ void weighted_sum(T* out, const T* x, const T* w, int rows, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float sum = 0;
    for (int i = 0; i < columns; ++i) sum += x[row * columns + i] * w[i];
    out[row] = sum;
}
