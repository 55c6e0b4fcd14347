// attention v4: the forward and the backward of v3 (attention.cu) by wgmma and TMA, for sm_90a. See wgmma_forward.cuh and
// wgmma_backward.cuh.
//
// version  H100, causal, bfloat16: forward, backward (of cuDNN)      4,16,16,4096,128            8,16,16,4096,64
// v4       7 products in the backward, deterministic                 469 us, 1572 us (1.02, 0.92)  606 us, 1689 us (1.06, 1.07)
#include "wgmma_backward.cuh"
#include "wgmma_forward.cuh"
