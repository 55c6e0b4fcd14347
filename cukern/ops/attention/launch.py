"""Launches of the fused kernels of attention, but those for Hopper (wgmma.py). Math:
kernels_cu/attention/attention.cu.

q is (batch, heads, queries, D), k and v (batch, kv heads, keys, D). Packed sequences have batch 1, and
Bounds. In the kernels a float32 is a sum of bfloat16 numbers, its pieces, but for decoding. Few queries
without gradients take the decoding kernels.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import plan, wgmma
from cukern.ops.attention.reference import Options, reference, reference_of_pages
from cukern.ops.attention.wgmma import Bounds
from cukern.runtime.device import device_of
from cukern.runtime.dispatch.products import tf32_allowed
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.tensors import pointers

_FORWARD, _BACKWARD, _PREPROCESS, _SPLIT = (
    Template("attention/attention.cu", f"attention_v3{name}")
    for name in ("", "_bwd", "_preprocess", "_split")
)
_DECODE, _SUM = (
    Template("attention/attention.cu", f"attention_decode{name}", pdl=True) for name in ("", "_sum")
)
_WHOLE = Bounds()


def instances(dtype: torch.dtype) -> list[Kernel]:
    """The kernels of v3."""
    dims = [d for d in (64, 128, 256) if d <= plan.most_head_dim(dtype)] if dtype in plan.DTYPES else []
    pieces, flags = (2, 3) if dtype == torch.float32 else (1,), (False, True)
    made: tuple[Callable[..., Kernel], ...] = _forward_kernel, _backward_kernel
    options = itertools.product(made, pieces, dims, flags, flags)
    kernels = [make(dtype, n, d, softcap, packed) for make, n, d, softcap, packed in options]
    kernels += [_PREPROCESS[dtype, _operand(dtype), n, d] for n in pieces for d in dims]
    if dtype == torch.float32:
        kernels += [_SPLIT[_operand(dtype), n, d] for n in pieces for d in dims]
    return (
        kernels
        + [_decode_kernel(dtype, d, *which) for d in dims for which in itertools.product(flags, flags)]
        + [_sum_kernel(dtype, d) for d in dims]
    )


def wgmma_instances(dtype: torch.dtype) -> list[Kernel]:
    """The kernels of v4, and those of v3, which it falls back to."""
    return instances(dtype) + (wgmma.instances(dtype) if dtype in plan.DTYPES and dtype.itemsize == 2 else [])


def _forward_kernel(
    dtype: torch.dtype, pieces: int, d: int, softcap: bool, packed: bool, extra: tuple[str, ...] = ()
) -> Kernel:
    tile = plan.forward_tile(pieces, d, softcap or extra != (), packed)
    tiles = tile.rows, tile.columns, tile.warps, tile.stages, tile.per_sm
    key = dtype, _operand(dtype), pieces, d, *tiles, softcap, packed, *extra
    return _FORWARD[key]


def _backward_kernel(
    dtype: torch.dtype, pieces: int, d: int, softcap: bool, packed: bool, tiles: plan.Tiles | None = None,
    extra: tuple[str, ...] = (),
) -> Kernel:  # fmt: skip
    keys, queries = tiles or plan.backward_tile(pieces, d, softcap or extra != (), packed)
    of_tiles = *keys[:2], *queries[:3], queries.stages, queries.per_sm
    key = dtype, _operand(dtype), pieces, d, *of_tiles, softcap, packed, *extra
    return _BACKWARD[key]


def _decode_kernel(
    dtype: torch.dtype, d: int, softcap: bool, paged: bool, tile: plan.DecodeTile | None = None
) -> Kernel:
    tile = tile or plan.decode_tile(-1, d)
    types = ("const int*", "int", "int") if paged else ()  # of PageTable's members
    key = dtype, d, tile.warps, tile.stages, tile.per_sm, softcap, *types
    return _DECODE[key]


def _sum_kernel(dtype: torch.dtype, d: int) -> Kernel:
    return _SUM[dtype, d, _sum_warps(d)]


def _sum_warps(d: int) -> int:
    """At least a thread for each column."""
    return max(4, d // 32)


def outputs(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """out and lse, empty."""
    return like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def like(x: Tensor) -> Tensor:
    """An empty dense tensor of x's shape, in memory (batch, rows, heads, D) if x is, else (batch, heads,
    rows, D)."""
    return (
        x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)
        if x.stride(1) < x.stride(2)
        else x.new_empty(x.shape)
    )


def _aligned(x: Tensor, options: Options) -> Tensor:
    """A tensor that the kernels can read: rows are contiguous and begin at multiples of 16 bytes. Copied if
    necessary. With a window only v4 has kernels, and TMA reads no expanded tensor."""
    x = x.resolve_neg()
    b, h, t, d = x.stride()
    aligned = d == 1 and (b | h | t) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return (
        x
        if aligned and (not options.window or wgmma.supported(x))
        else x.clone(memory_format=torch.contiguous_format)
    )


def _plain(extra: Tensor | None) -> Tensor | None:
    """The same tensor if the kernels can read it, which take strides of 32 bits."""
    if extra is None:
        return None
    extra = extra.resolve_neg()
    return extra if max(extra.stride()[-2:]) < 1 << 31 else extra.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any, bounds: Bounds = _WHOLE, lengths: Tensor | None = None,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse. `rest`: Options. `lengths`: the number of keys of each sequence. `extra`: as in
    `reference`."""
    options, (out, lse), sequences = Options(*rest).of(q), outputs(q), bounds.sequences
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    _check_rows(queries, keys)
    if not lse.numel():
        return out, lse
    pieces, packed = pieces_of(q.dtype), sequences >= 0
    decodes = not (options.window or packed or extra is not None) and plan.decodes(queries, keys, d)
    if lengths is not None and not decodes:
        found = reference(q, k, v, options, lengths)
        return out.copy_(found[0]), lse.copy_(found[1])
    q, k, v = (_aligned(x, options) for x in (q, k, v))
    extra = _plain(extra)
    if decodes:
        _decode(out, lse, q, k, v, lengths, options)
    elif options.wgmma and keys and wgmma.supported(q, k, v):
        wgmma.forward(out, lse, q, k, v, options, bounds, extra)
    else:
        padded, softcap, (k, v) = plan.padded_head_dim(d), options.softcap != 0, _split(pieces, k, v)
        tile = plan.forward_tile(pieces, padded, softcap or extra is not None, packed)
        blocks = plan.tiles(queries, tile.rows, sequences)
        types = wgmma.extra_types(extra)
        _forward_kernel(q.dtype, pieces, padded, softcap, packed, types).on(q.get_device())(
            (blocks * batch * heads, 1, 1), (32 * tile.warps, 1, 1), tile.forward_bytes(padded, pieces),
            *pointers(out, lse, q, k, v, *bounds), *wgmma.strides(out, q, k, v), blocks, heads, batch, group,
            plan.section(keys, d, group, batch * heads, options.causal), queries, keys, sequences, d,
            options.causal, *options.factors, *wgmma.extra_arguments(options, extra),
        )  # fmt: skip
    return out, lse


def _check_rows(queries: int, keys: int) -> None:
    if queries + keys >= plan.MOST_ROWS:
        rule = f"the kernels take fewer than {plan.MOST_ROWS} queries and keys together"
        raise ValueError(f"{rule}, got {queries} and {keys}")


def paged(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """`forward` with k and v in pages, (pages, kv heads, page size, D)."""
    options, (out, lse), keys = Options(*rest).of(q), outputs(q), block_table.shape[1] * k.shape[2]
    _check_rows(q.shape[2], keys)
    if not lse.numel():
        return out, lse
    if not plan.decodes(q.shape[2], keys, q.shape[3]):
        found = reference_of_pages(q, k, v, options, block_table, lengths)
        return out.copy_(found[0]), lse.copy_(found[1])
    q, k, v = (_aligned(x, options._replace(window=0)) for x in (q, k, v))
    _decode(out, lse, q, k, v, lengths, options, block_table.contiguous())
    return out, lse


def _decode(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, options: Options,
    table: Tensor | None = None,
) -> None:  # fmt: skip
    """Write out and lse by the kernels for few queries. Math: kernels_cu/attention/decode.cuh."""
    (batch, heads, queries, d), (kv_heads, keys), padded = (
        q.shape,
        k.shape[1:3],
        plan.padded_head_dim(q.shape[3]),
    )
    pages: tuple[int, ...] = ()
    if table is not None:
        pages = *pointers(table), keys.bit_length() - 1, options.window
        keys *= table.shape[1]
    device, group, lengths = (
        q.get_device(),
        heads // kv_heads,
        None if lengths is None else lengths.contiguous(),
    )
    seen = min(keys, options.window + queries) if options.window else keys
    tiles, tile = plan.key_tiles(seen, d, q.element_size()), plan.decode_tile(device, d)
    row_tiles, splits = plan.decode(batch * kv_heads, group * queries, tiles, device, tile)
    splits = min(options.splits, max(1, tiles)) if options.splits else splits
    partial, stats = (lse.new_empty((splits, *q.shape[:3], n)) if splits > 1 else None for n in (padded, 2))
    strides = wgmma.strides(out, q, k, v)
    _decode_kernel(q.dtype, padded, options.softcap != 0, bool(pages), tile).on(device)(
        (row_tiles * splits * kv_heads * batch, 1, 1), (32 * tile.warps, 1, 1), tile.bytes,
        *pointers(out, lse, partial, stats, q, k, v, lengths), *strides, row_tiles, splits, kv_heads, batch,
        group, queries, keys, d, options.causal, *options.factors, *pages,
    )  # fmt: skip
    if splits > 1:
        add, threads = _sum_kernel(q.dtype, padded).on(device), 32 * _sum_warps(padded)
        of_all = strides[0], splits, heads, queries, d
        add((lse.numel(), 1, 1), (threads, 1, 1), 0, *pointers(out, lse, partial, stats), *of_all)


def backward(
    grads: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    dlse: Tensor | None, *rest: Any, bounds: Bounds = _WHOLE, extra: Tensor | None = None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write `grads`, dq, dk and dv, and return them. `rest`: Options. `extra`: as in `forward`. `dbias`: gets
    the gradient of a bias without broadcasting, where a query sees the key."""
    options, sequences = Options(*rest).of(q), bounds.sequences
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    if not (lse.numel() and k.numel()):
        return tuple(x.zero_() for x in grads)
    q, k, v, out, dout = (_aligned(x, options) for x in (q, k, v, out, dout))
    padded = plan.padded_head_dim(d)
    dtype = q.dtype
    pieces = pieces_of(q.dtype)
    softcap = options.softcap != 0
    packed = sequences >= 0
    extra = _plain(extra)
    of_keys, of_queries = tiles = plan.backward_tile(
        pieces, padded, softcap or extra is not None, packed, device_of(q.get_device()).shared_bytes
    )
    by_wgmma = options.wgmma and wgmma.supported(q, k, v, dout)
    columns = wgmma.stats_tile(d, options, bounds, extra) if by_wgmma else of_keys.columns
    stats, dout = _stats(out, dout, lse, dlse, columns, pieces, bounds)
    if by_wgmma:
        wgmma.backward(grads, q, k, v, dout, stats, options, bounds, extra, dbias)
        return grads
    k, v, q = _split(pieces, k, v, q)
    key_blocks = plan.tiles(keys, of_keys.rows, sequences)
    query_blocks = plan.tiles(queries, of_queries.rows, sequences)
    grid, (tanh_factor, c) = batch * (key_blocks * (heads // group) + query_blocks * heads), options.factors
    types = wgmma.extra_types(extra)
    _backward_kernel(dtype, pieces, padded, softcap, packed, tiles, types).on(q.get_device())(
        (grid, 1, 1), (32 * of_keys.warps, 1, 1), max(x.backward_bytes(padded, pieces) for x in tiles),
        *pointers(*grads, q, k, v, dout, stats[0], stats[1], *bounds), *wgmma.strides(*grads, q, k, v, dout),
        key_blocks, query_blocks, heads, batch, group,
        plan.section(keys, d, group, batch * heads, options.causal), queries, keys, stats.shape[2], columns,
        sequences, d, options.causal, tanh_factor, c * math.log(2) if pieces > 1 else c, options.scale,
        *wgmma.extra_arguments(options, extra, dbias),
    )  # fmt: skip
    return grads


def _stats(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, columns: int, pieces: int, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """The backward's numbers per query: lse and delta, (2, batch * heads, queries padded to tiles of
    `columns`); and dout or its pieces."""
    (batch, heads, queries, d), lse, dlse = (
        out.shape,
        lse.contiguous(),
        None if dlse is None else dlse.resolve_neg().contiguous(),
    )
    padded, padded_d = plan.tiles(queries, columns, bounds.sequences) * columns, plan.padded_head_dim(d)
    stats = torch.empty((2, batch * heads, padded), dtype=torch.float32, device=out.device)
    per_block = 256 // (padded_d // 8)  # rows
    dout_pieces = _empty_pieces(dout, pieces) if pieces > 1 else None
    _PREPROCESS[out.dtype, _operand(out.dtype), pieces, padded_d].on(out.get_device())(
        (batch * heads * -(-padded // per_block), 1, 1), (256, 1, 1), 0,
        *pointers(stats[0], stats[1], dout_pieces, out, dout, lse, dlse, bounds.queries),
        *wgmma.strides(out, dout), heads, queries, padded, columns, bounds.sequences, d,
    )  # fmt: skip
    return stats, dout if dout_pieces is None else dout_pieces[:, :, :, 0]


# ---- float32, see kernels_cu/attention/tile.cuh


def _operand(dtype: torch.dtype) -> torch.dtype:
    """The type of the products' operands."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def pieces_of(dtype: torch.dtype) -> int:
    """The number of 16-bit numbers whose sum an element is: of a float32 two if torch's switches allow TF32,
    else three."""
    return 1 if dtype != torch.float32 else 2 if tf32_allowed() else 3


def _empty_pieces(x: Tensor, pieces: int) -> Tensor:
    """A tensor for the pieces of x, (batch, heads, rows, pieces, D)."""
    return x.new_empty((*x.shape[:3], pieces, plan.padded_head_dim(x.shape[3])), dtype=_operand(x.dtype))


def _split(pieces: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> list[Tensor]:
    """The first pieces of float32 tensors, which the others follow in a row. 16-bit tensors as they are."""
    tensors = [k, v] if q is None else [k, v, q]
    if pieces == 1 or not k.numel():
        return tensors
    (batch, kv_heads, keys, d), (heads, queries) = k.shape, (0, 0) if q is None else q.shape[1:3]
    padded, found = plan.padded_head_dim(d), [_empty_pieces(x, pieces) for x in tensors]
    grid = -(-batch * max(heads * queries, kv_heads * keys) * padded // 2048), len(tensors), 1
    _SPLIT[_operand(k.dtype), pieces, padded].on(k.get_device())(
        grid, (256, 1, 1), 0, *pointers(*[*found, None][:3], *[*tensors, None][:3]),
        *wgmma.strides(*tensors, k)[:3], batch, kv_heads, heads, keys, queries, d,
    )  # fmt: skip
    return [x[:, :, :, 0] for x in found]
