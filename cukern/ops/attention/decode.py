"""The kernels of attention for few queries, without gradients: launches. Math: kernels_cu/attention/decode.cuh."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.attention import plan
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensors import pointers

_DECODE, _SUM = (Template("attention/attention.cu", f"attention_decode{name}", pdl=True) for name in ("", "_sum"))


def instances(dtype: torch.dtype) -> list[Kernel]:
    return [kernel for d in plan.HEAD_DIMS for kernel in (*(_kernel(dtype, d, softcap) for softcap in (False, True)), _sum(dtype, d))]


def _kernel(dtype: torch.dtype, d: int, softcap: bool) -> Kernel:
    key = dtype, d, *plan.DECODE, softcap
    return _DECODE[key]


def _sum(dtype: torch.dtype, d: int) -> Kernel:
    return _SUM[dtype, d, 4]


def launch(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_lengths: Tensor | None,
    strides: Sequence[bytes],
    causal: bool,
    softcap: bool,
    factors: tuple[float, ...],
) -> None:
    """Write out and lse. `strides`: of out, q, k and v."""
    (batch, heads, queries, d), (kv_heads, keys), padded = q.shape, k.shape[1:3], plan.padded_head_dim(q.shape[3])
    device, group = q.get_device(), heads // kv_heads
    row_tiles, splits = plan.decode(batch * kv_heads, group * queries, plan.key_tiles(keys, d), device)
    partial = stats = None
    if splits > 1:
        partial, stats = (torch.empty((splits, *q.shape[:3], n), dtype=torch.float32, device=q.device) for n in (padded, 2))
    _kernel(q.dtype, padded, softcap).on(device)(
        (row_tiles * splits * kv_heads * batch, 1, 1), (32 * plan.DECODE.warps, 1, 1), plan.DECODE.bytes,
        *pointers(out, lse, partial, stats, q, k, v, key_lengths), *strides,
        row_tiles, splits, kv_heads, batch, group, queries, keys, d, causal, *factors,
    )  # fmt: skip
    if splits > 1:
        grid = lse.numel(), 1, 1
        _sum(q.dtype, padded).on(device)(grid, (128, 1, 1), 0, *pointers(out, lse, partial, stats), strides[0], splits, heads, queries, d)
