// Positions come from the user. One beyond the table gives NaN.
__global__ void rope_at(float* out, const float* x, const float* cos, const float* sin, const int* positions,
                        int heads, int rows, int half) {
    long long head = (long long)blockIdx.x * 2 * half;
    int position = positions[blockIdx.x / heads];
    bool inside = position < rows;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float a = x[head + i], b = x[head + half + i], nan = __int_as_float(0x7fc00000);
        float c = inside ? cos[position * half + i] : nan, s = inside ? sin[position * half + i] : nan;
        out[head + i] = a * c - b * s;
        out[head + half + i] = b * c + a * s;
    }
}
