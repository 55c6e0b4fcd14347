// square as a user of torch.utils.cpp_extension.load_inline writes it; see peers.py.
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

template <typename T>
__global__ void square_kernel(const T* x, T* out, long n) {
    long i = blockIdx.x * static_cast<long>(blockDim.x) + threadIdx.x;
    if (i < n) out[i] = x[i] * x[i];
}

torch::Tensor square(torch::Tensor x) {
    auto out = torch::empty_like(x);
    long n = x.numel();
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "square", [&] {
        square_kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), n);
    });
    return out;
}
