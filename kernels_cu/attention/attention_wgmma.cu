// attention v4: see wgmma_forward.cuh and wgmma_backward.cuh.
#include "wgmma_backward.cuh"
#include "wgmma_forward.cuh"
