// attention v4: see wgmma_forward.cuh.
#include "wgmma_forward.cuh"
