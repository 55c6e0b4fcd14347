"""The kernels of attention for Hopper's tensor cores: launches. Math:
kernels_cu/attention/wgmma_forward.cuh."""

import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.ops.attention import plan
from cukern.ops.attention.reference import Options
from cukern.runtime.compile.signature import CTYPES
from cukern.runtime.device import device_of
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.launch.tensor_map import encoder
from cukern.runtime.tensors import pointers

_FORWARD, _BACKWARD = (
    Template("attention/attention.cu", f"attention_v4{name}", pdl=True) for name in ("", "_bwd")
)
_ORDERED, _ROUND_DQ = (
    Template("attention/attention.cu", f"attention_v4_{name}", pdl=True)
    for name in ("bwd_ordered", "round_dq")
)
_MOST_STRIDE = 1 << 38  # elements; strides in a tensor map must be below 2^40 bytes


class Bounds(NamedTuple):
    """Packed sequences: cu_seqlens of the queries and of the keys, int32."""

    queries: Tensor | None = None
    keys: Tensor | None = None

    @property
    def sequences(self) -> int:
        """The number of packed sequences; -1 if there are none."""
        return -1 if self.queries is None else len(self.queries) - 1


def available(q: Tensor) -> bool:
    """True if the dtype and the GPU have kernels."""
    return q.element_size() == 2 and device_of(q.get_device()).wgmma


def supported(*tensors: Tensor) -> bool:
    """True if there are v4 kernels, and TMA can read the tensors. They must be readable by v3's kernels
    (_aligned in launch.py)."""
    fits = all(
        0 < step < _MOST_STRIDE for x in tensors for n, step in zip(x.shape, x.stride(), strict=True) if n > 1
    )
    return fits and available(tensors[0])


def _map(x: Tensor, rows: int, packed: bool) -> bytes:
    """The tensor map of x (batch, heads, T, D) for boxes of `rows` rows of 64 columns. For packed sequences,
    (1, heads, T, D), it has the dimensions (T + 1, heads, rows, D): element (y, h, x, d) is that of token x +
    y - rows. A box from x = rows - n on ends after n rows."""
    if not packed:
        return encoder(x.get_device(), x.dtype, tuple(x.shape), x.stride(), (1, 1, rows, 64), 128)(
            x.data_ptr()
        )
    _, heads, tokens, d = x.shape
    step = x.stride(2) if tokens > 1 else d
    address = x.data_ptr() - rows * step * x.element_size()
    sizes = (tokens + 1, heads, rows, d)
    steps = (step, x.stride(1), step, 1)
    return encoder(x.get_device(), x.dtype, sizes, steps, (1, 1, rows, 64), 128)(address)


def strides(*tensors: Tensor) -> list[bytes]:
    """The struct Strides of tile.cuh for each tensor."""
    return [struct.pack("3q", *x.stride()[:3]) for x in tensors]


def instances(dtype: torch.dtype) -> list[Kernel]:
    kernels: list[Kernel] = []
    for d, softcap, packed in itertools.product(plan.WGMMA_FORWARD, (False, True), (False, True)):
        tiles = plan.WGMMA_FORWARD[d][: 2 if softcap else 3]
        kernels += dict.fromkeys(_forward_kernel(dtype, d, softcap, packed, tile) for tile in tiles)
        if d != 128 or softcap or packed:  # else `ordered`
            kernels += [_backward_kernel(keys, dtype, d, softcap, packed) for keys in (True, False)]
    return [*kernels, *_ordered_kernels(dtype)]


def extra_types(extra: Tensor | None) -> tuple[str, ...]:
    """The types of a kernel's last parameters, see bias.cuh. `extra`: as in `reference`."""
    if extra is None:
        return ()
    if extra.ndim == 1:
        return "const unsigned long long*", "unsigned", "float"
    number = CTYPES[extra.dtype]
    return ("const float*", "int") if extra.ndim == 2 else (f"const {number}*", "BiasLayout", f"{number}*")


def extra_arguments(
    options: Options, extra: Tensor | None, gradient: Tensor | None = None
) -> tuple[Any, ...]:
    """The last arguments of a launch. `gradient`: of a bias, without broadcasting."""
    if extra is None:
        return ()
    if extra.ndim == 1:
        return *pointers(extra), options.threshold, options.kept_scale
    steps = [step if n > 1 else 0 for n, step in zip(extra.shape, extra.stride(), strict=True)]
    if extra.ndim == 2:
        return *pointers(extra), steps[0]
    *outer, step = steps
    aligned = extra.data_ptr() % (2 * extra.element_size()) == 0
    pairs = step == 1 and aligned and not any(n % 2 for n in outer)
    return *pointers(extra), struct.pack("2q3i4x", *steps, pairs), *pointers(gradient)


def _forward_kernel(
    dtype: torch.dtype, d: int, softcap: bool, packed: bool, tile: plan.WgmmaTile,
    extra: tuple[str, ...] = (),
) -> Kernel:  # fmt: skip
    key = dtype, d, *tile[:4], softcap, packed, *extra
    return _FORWARD[key]


def _backward_kernel(
    keys: bool, dtype: torch.dtype, d: int, softcap: bool, packed: bool, extra: tuple[str, ...] = ()
) -> Kernel:
    tile = plan.WGMMA_BACKWARD[d][not keys]
    key = keys, dtype, d, *tile[:4], softcap, packed, *extra
    return _BACKWARD[key]


def forward(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: Options, bounds: Bounds,
    extra: Tensor | None = None,
) -> None:  # fmt: skip
    """Write out and lse. `extra`: as in `reference`; not together with a softcap."""
    (batch, heads, queries, d), (kv_heads, keys), padded = (
        q.shape,
        k.shape[1:3],
        plan.wgmma_head_dim(q.shape[3]),
    )
    sequences, packed, group = bounds.sequences, bounds.sequences >= 0, heads // kv_heads
    biased = extra is not None and extra.ndim > 1
    tile = plan.wgmma_forward(d, keys // max(1, sequences), options.softcap != 0 or biased, options.causal)
    blocks = plan.tiles(queries, tile.rows, sequences)
    maps = _map(q, tile.rows, packed), _map(k, tile.columns, packed), _map(v, tile.columns, packed)
    grid = tile.forward_grid(
        blocks * batch * heads, packed, options.causal, keys, device_of(q.get_device()).sms
    )
    kernel = _forward_kernel(q.dtype, padded, options.softcap != 0, packed, tile, extra_types(extra))
    # 12 bytes at the end of a Block may be read as 16
    shared = tile.forward_bytes(padded) + 4 * (extra is not None)
    kernel.on(q.get_device())(
        (grid, 1, 1), (tile.threads, 1, 1), shared, *pointers(out, lse), *maps,
        *pointers(*bounds), *strides(out), blocks, heads, batch, group,
        plan.section(keys, d, group, batch * heads, options.causal), queries, keys, sequences,
        options.window or plan.MOST_ROWS - options.causal * queries, d, options.causal, *options.factors,
        *extra_arguments(options, extra),
    )  # fmt: skip


def backward(
    grads: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, options: Options,
    bounds: Bounds, extra: Tensor | None = None, dbias: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv, and dbias where a query sees the key. `stats`: lse and delta, (2, batch * heads,
    padded queries). `extra`: as in `forward`."""
    (batch, heads, queries, d), (kv_heads, keys), padded = (
        q.shape,
        k.shape[1:3],
        plan.wgmma_head_dim(q.shape[3]),
    )
    if ordered(d, options, bounds, extra):
        return _backward_ordered(grads, q, k, v, dout, stats, options)
    group, (dq, dk, dv), section = (
        heads // kv_heads,
        grads,
        plan.section(keys, d, heads // kv_heads, batch * heads, options.causal),
    )
    window = options.window or plan.MOST_ROWS - options.causal * queries
    sequences = bounds.sequences
    packed = bounds.sequences >= 0
    columns = plan.WGMMA_BACKWARD[padded][0].columns
    numbers = (
        heads,
        batch,
        group,
        section,
        queries,
        keys,
        stats.shape[2],
        columns,
        sequences,
        window,
        d,
        options.causal,
    )
    for of_keys, tile in zip((True, False), plan.WGMMA_BACKWARD[padded], strict=True):
        fixed, moving, (dx, dy) = ((k, v), (q, dout), (dk, dv)) if of_keys else ((q, dout), (k, v), (dq, dq))
        blocks = plan.tiles(fixed[0].shape[2], tile.rows, sequences)
        maps = *(_map(x, tile.rows, packed) for x in fixed), *(_map(x, tile.columns, packed) for x in moving)
        types = extra_types(extra)
        _backward_kernel(of_keys, q.dtype, padded, options.softcap != 0, packed, types).on(q.get_device())(
            (blocks * fixed[0].shape[1] * batch, 1, 1), (tile.threads, 1, 1), tile.backward_bytes(padded),
            *pointers(dx, dy), *maps, *pointers(stats[0], stats[1], *bounds), *strides(dx, dy), blocks,
            *numbers, *options.factors, options.scale, *extra_arguments(options, extra, dbias),
        )  # fmt: skip


def ordered(head_dim: int, options: Options, bounds: Bounds, extra: Tensor | None) -> bool:
    """True if the backward is one launch, see kernels_cu/attention/wgmma_ordered.cuh."""
    plain = not options.softcap and bounds.sequences < 0 and extra is None
    return plain and plan.wgmma_head_dim(head_dim) == 128


def stats_tile(head_dim: int, options: Options, bounds: Bounds, extra: Tensor | None) -> int:
    """The number of queries in a tile of the backward's lse and delta."""
    tile = plan.WGMMA_BACKWARD[plan.wgmma_head_dim(head_dim)][0]
    return (plan.ORDERED if ordered(head_dim, options, bounds, extra) else tile).columns


def _ordered_kernels(dtype: torch.dtype) -> tuple[Kernel, Kernel]:
    key = dtype, 128, plan.ORDERED.columns
    return _ORDERED[key], _ROUND_DQ[key]


def _backward_ordered(
    grads: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, stats: Tensor, options: Options
) -> None:
    """`backward` in one launch, and one that rounds dq, whose sums take 4 bytes an element."""
    (batch, heads, queries, d), (kv_heads, keys), (dq, dk, dv) = q.shape, k.shape[1:3], grads
    tile, padded, group = plan.ORDERED, stats.shape[2], heads // kv_heads
    sums = q.new_empty((batch * heads, padded, 128), dtype=torch.float32)
    turns = q.new_zeros((batch * heads, padded // tile.columns), dtype=torch.int32)
    blocks = -(-keys // tile.rows)
    section = plan.section(keys, d, group, batch * heads, True, plan.ORDERED_SECTION_BYTES)
    window = options.window or plan.MOST_ROWS - options.causal * queries
    add, round_dq = (kernel.on(q.get_device()) for kernel in _ordered_kernels(q.dtype))
    add(
        (blocks * kv_heads * batch, 1, 1), (tile.threads, 1, 1), tile.ordered_bytes(128),
        *pointers(dk, dv, sums, turns), *(_map(x, tile.rows, False) for x in (k, v)),
        *(_map(x, tile.columns, False) for x in (q, dout)), *pointers(stats[0], stats[1]), *strides(dk, dv),
        blocks, heads, batch, group, section, queries, keys, padded, window, d, options.causal,
        options.factors[1], options.scale,
    )  # fmt: skip
    offset = keys - queries if options.causal else keys
    round_dq(
        (turns.numel(), 1, 1), (256, 1, 1), 0, *pointers(dq, sums), *strides(dq), heads, queries, padded, d,
        offset, options.scale,
    )  # fmt: skip
