"""The kernels of attention for Hopper's tensor cores: launches. Math: kernels_cu/attention/wgmma_forward.cuh."""

import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.attention import plan
from cukern.ops.attention.reference import Options
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensor_map import encode
from cukern.runtime.tensors import pointers

_FORWARD, _BACKWARD = (Template("attention/attention.cu", f"attention_v4{name}") for name in ("", "_bwd"))
_NO_WINDOW = 1 << 30
_MOST_STRIDE = 1 << 38  # elements; that of a tensor map is below 2^40 bytes


def available(q: Tensor) -> bool:
    """True if the dtype and the GPU have kernels."""
    return q.element_size() == 2 and device_of(q.get_device()).wgmma


def supported(*tensors: Tensor) -> bool:
    """True if there are kernels, and TMA can read the tensors, which the kernels of v3 can read."""
    fits = all(0 < step < _MOST_STRIDE for x in tensors for n, step in zip(x.shape, x.stride(), strict=True) if n > 1)
    return fits and available(tensors[0])


def _map(x: Tensor, rows: int) -> bytes:
    """The tensor map of x (batch, heads, T, D) for boxes of `rows` rows of 64 columns."""
    return encode(x.get_device(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), (1, 1, rows, 64), 128)


def strides(*tensors: Tensor) -> list[bytes]:
    """struct Strides in tile.cuh, of each."""
    return [struct.pack("3q", *x.stride()[:3]) for x in tensors]


def instances(dtype: torch.dtype) -> list[Kernel]:
    kernels = []
    for d, softcap in itertools.product(plan.WGMMA_FORWARD, (False, True)):
        tiles = dict.fromkeys(plan.wgmma_forward(d, keys, softcap) for keys in (0, plan.LONG))
        kernels += [_forward_kernel(dtype, d, softcap, tile) for tile in tiles]
        kernels += [_backward_kernel(keys, dtype, d, softcap) for keys in (True, False)]
    return kernels


def _forward_kernel(dtype: torch.dtype, d: int, softcap: bool, tile: plan.WgmmaTile) -> Kernel:
    key = dtype, d, *tile, softcap
    return _FORWARD[key]


def _backward_kernel(keys: bool, dtype: torch.dtype, d: int, softcap: bool) -> Kernel:
    key = keys, dtype, d, *plan.WGMMA_BACKWARD[d][not keys], softcap
    return _BACKWARD[key]


def forward(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, factors: tuple[float, ...]) -> None:
    """Write out and lse."""
    (batch, heads, queries, d), (kv_heads, keys), padded = q.shape, k.shape[1:3], plan.wgmma_head_dim(q.shape[3])
    tile, group = plan.wgmma_forward(padded, keys, options.softcap != 0), heads // kv_heads
    blocks = -(-queries // tile.rows)
    _forward_kernel(q.dtype, padded, options.softcap != 0, tile).on(q.get_device())(
        (blocks * batch * heads, 1, 1), (tile.threads, 1, 1), tile.forward_bytes(padded),
        *pointers(out, lse), _map(q, tile.rows), _map(k, tile.columns), _map(v, tile.columns), *strides(out),
        blocks, heads, batch, group, plan.section(keys, d, group, batch * heads),
        queries, keys, options.window or _NO_WINDOW, d, options.causal, *factors,
    )  # fmt: skip


def backward(
    grads: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, options: Options, factors: tuple[float, ...]
) -> None:
    """Write dq, dk and dv. `stats`: lse and delta, (2, batch * heads, padded queries)."""
    (batch, heads, queries, d), (kv_heads, keys), padded = q.shape, k.shape[1:3], plan.wgmma_head_dim(q.shape[3])
    group, (dq, dk, dv) = heads // kv_heads, grads
    section, window = plan.section(keys, d, group, batch * heads), options.window or _NO_WINDOW
    numbers = heads, batch, group, section, queries, keys, stats.shape[2], window, d, options.causal
    for of_keys, tile in zip((True, False), plan.WGMMA_BACKWARD[padded], strict=True):
        fixed, moving, (dx, dy) = ((k, v), (q, dout), (dk, dv)) if of_keys else ((q, dout), (k, v), (dq, dq))
        blocks = -(-fixed[0].shape[2] // tile.rows)
        maps = *(_map(x, tile.rows) for x in fixed), *(_map(x, tile.columns) for x in moving)
        _backward_kernel(of_keys, q.dtype, padded, options.softcap != 0).on(q.get_device())(
            (blocks * fixed[0].shape[1] * batch, 1, 1), (tile.threads, 1, 1), tile.backward_bytes(padded),
            *pointers(dx, dy), *maps, *pointers(stats[0], stats[1]), *strides(dx, dy), blocks, *numbers, *factors, options.scale,
        )  # fmt: skip
