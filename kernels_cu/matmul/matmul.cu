// matmul on tensor cores: out = activation(A . B + bias) + residual. v6 (mma.cuh), v7 (wgmma.cuh), their
// epilogue (epilogue.cuh), and matmul_direct for few rows (direct.cuh). v1 to v5, which use the FMA units,
// are in ladder.cu; v5 may use matmul_direct, too.
//
// Layout     C is (M, N), row-major and contiguous. A is (M, K), B is (K, N), bias is (N) or a null pointer.
//            One stride of A and of B is 1; lda and ldb are the others. A transposed matrix is not copied.
//            matmul_pad copies unaligned operands.
// Types      16-bit types, and float in TF32 or 3xTF32.
// Launch     Grid and block: above each kernel. Grids are 1-D, because y and z are limited to 65535.
//            Offsets are 64-bit: a matrix may have more than 2^31 elements.
//
// version  idea                                                             4096^3, H200, TFLOP/s
// v6       tensor cores: mma.sync, ldmatrix, cp.async, split-K (sm_80)      3xTF32 56, TF32 177 (cuBLAS 394)
//                                                                           bfloat16 415 (cuBLAS 765)
// v7       wgmma, TMA with multicast, producer and consumers, persistent;   bfloat16 775 (cuBLAS 765)
//          results are stored while the next tile is multiplied (sm_90a)    H100: 3xTF32 112, TF32 383 (387)
// Experiments and dead ends: docs/notes/matmul.md.
#include "direct.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
