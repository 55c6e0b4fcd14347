"""The kernels of attention for Hopper's tensor cores: launches. Math: kernels_cu/attention/wgmma_forward.cuh."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.attention import plan
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensor_map import encode
from cukern.runtime.tensors import pointers

_FORWARD = Template("attention/attention_wgmma.cu", "attention_v4")
_MOST_STRIDE = 1 << 38  # elements; that of a tensor map is below 2^40 bytes


def supported(*tensors: Tensor) -> bool:
    """True if the GPU has wgmma, and TMA can read the tensors, which the kernels of v3 can read."""
    fits = all(0 < step < _MOST_STRIDE for x in tensors for n, step in zip(x.shape, x.stride(), strict=True) if n > 1)
    return fits and device_of(tensors[0].get_device()).wgmma


def _map(x: Tensor, rows: int) -> bytes:
    """The tensor map of x (batch, heads, T, D) for boxes of `rows` rows of 64 columns."""
    return encode(x.get_device(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), (1, 1, rows, 64), 128)


def instances(dtype: torch.dtype) -> list[Kernel]:
    return [forward_kernel(dtype, d, softcap, tile) for d, tile in plan.WGMMA_FORWARD.items() for softcap in (False, True)]


def forward_kernel(dtype: torch.dtype, d: int, softcap: bool, tile: plan.WgmmaTile) -> Kernel:
    return _FORWARD[dtype, d, *tile, softcap]


def forward(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, strides: Sequence[bytes], causal: bool, softcap: bool,
    factors: tuple[float, ...],
) -> None:  # fmt: skip
    """Write out and lse. `strides`: of out."""
    (batch, heads, queries, d), (kv_heads, keys), padded = q.shape, k.shape[1:3], plan.padded_head_dim(q.shape[3])
    tile, group = plan.wgmma_forward(padded, queries, keys, batch * heads), heads // kv_heads
    blocks = -(-queries // tile.rows)
    forward_kernel(q.dtype, padded, softcap, tile).on(q.get_device())(
        (blocks * batch * heads, 1, 1), (tile.threads, 1, 1), tile.forward_bytes(padded),
        *pointers(out, lse), _map(q, tile.rows), _map(k, tile.columns), _map(v, tile.columns), strides[0],
        blocks, heads, batch, group, plan.section(keys, d, group, batch * heads), queries, keys, d, causal, *factors,
    )  # fmt: skip
