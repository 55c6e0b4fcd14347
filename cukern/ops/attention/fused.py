"""The fused kernels of attention, without the matrix of scores: raw ops and autograd. Math: kernels_cu/attention/attention.cu."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import decode, plan, wgmma
from cukern.ops.attention.pieces import SPLIT, empty_pieces, operand, pieces_of, split
from cukern.ops.attention.reference import Options, reference
from cukern.ops.attention.wgmma import Bounds
from cukern.runtime.device import device_of
from cukern.runtime.higher import gradients, tangents
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Differentiable, apply_of, each, raw_op, save, watched
from cukern.runtime.tensors import pointers

_FORWARD, _BACKWARD, _PREPROCESS = (Template("attention/attention.cu", f"attention_v3{name}") for name in ("", "_bwd", "_preprocess"))
DTYPES = torch.bfloat16, torch.float16, torch.float32
_LEAST_SCALE = 1e-30  # a smaller factor of scores counts as this one: 0 times -infinity, a hidden key, would be NaN


def supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernels take these dtypes and head dimensions."""
    d = q.shape[-1]
    return q.dtype in DTYPES and d == v.shape[-1] and 0 < d <= most_head_dim(q.dtype) and d % 8 == 0


def most_head_dim(dtype: torch.dtype) -> int:
    return plan.MOST_FLOAT_HEAD_DIM if dtype == torch.float32 else plan.MOST_HEAD_DIM


def instances(dtype: torch.dtype) -> list[Kernel]:
    dims = [d for d in (64, 128, 256) if d <= most_head_dim(dtype)] if dtype in DTYPES else []
    pieces = (2, 3) if dtype == torch.float32 else (1,)
    makers = _forward_kernel, _backward_kernel
    options = itertools.product(makers, pieces, dims, (False, True), (False, True))
    kernels = [make(dtype, n, d, softcap, packed) for make, n, d, softcap, packed in options]
    kernels += [_preprocess_kernel(dtype, n, d) for n in pieces for d in dims]
    if dtype == torch.float32:
        return kernels + [SPLIT[operand(dtype), n, d] for n in pieces for d in dims]
    return kernels + (decode.instances(dtype) if dims else [])


def wgmma_instances(dtype: torch.dtype) -> list[Kernel]:
    return instances(dtype) + (wgmma.instances(dtype) if dtype in DTYPES and dtype.itemsize == 2 else [])


def _forward_kernel(dtype: torch.dtype, pieces: int, d: int, softcap: bool, packed: bool) -> Kernel:
    tile = plan.forward_tile(pieces, d, softcap, packed)
    return _FORWARD[dtype, operand(dtype), pieces, d, tile.rows, tile.columns, tile.warps, tile.stages, tile.per_sm, softcap, packed]


def _backward_kernel(dtype: torch.dtype, pieces: int, d: int, softcap: bool, packed: bool, tile: plan.BackwardTile | None = None) -> Kernel:
    tile = tile or plan.backward_tile(pieces, d, softcap, packed)
    queries = tile.queries
    key = dtype, operand(dtype), pieces, d, *tile.keys[:2], *queries[:3], queries.stages, queries.per_sm, softcap, packed
    return _BACKWARD[key]


def _preprocess_kernel(dtype: torch.dtype, pieces: int, d: int) -> Kernel:
    return _PREPROCESS[dtype, operand(dtype), pieces, d]


# ---- launches: q (batch, heads, queries, D), k and v (batch, kv heads, keys, D). Packed sequences have batch 1, and Bounds

_WHOLE = Bounds()


def _like(x: Tensor) -> Tensor:
    """An empty tensor of x's shape, dense, with heads inside of rows where x has them so."""
    batch, heads, rows, d = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, rows, heads, d)).transpose(1, 2)
    return x.new_empty((batch, heads, rows, d))


def _aligned(x: Tensor, options: Options) -> Tensor:
    """A tensor that the kernels can read: rows are contiguous and begin at multiples of 16 bytes. Copied if necessary. With a window only
    v4 has kernels, and TMA reads no expanded tensor."""
    x = x.resolve_neg()
    b, h, t, d = x.stride()
    aligned = d == 1 and (b | h | t) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    fits = not options.window or wgmma.supported(x)
    return x if fits and aligned else x.clone(memory_format=torch.contiguous_format)


def _factors(options: Options) -> tuple[float, float]:
    """What scores are multiplied by before tanh, and what the exponent of 2 is a multiple of."""
    scale, softcap = options.scale, options.softcap
    return (scale / softcap, softcap / math.log(2)) if softcap else (1.0, max(scale / math.log(2), _LEAST_SCALE))


def _launch(q: Tensor, k: Tensor, v: Tensor, *rest: Any, bounds: Bounds = _WHOLE) -> tuple[Tensor, Tensor]:
    options, (out, lse), sequences = Options(*rest), _fake(q, k, v), bounds.sequences
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    if not lse.numel():
        return out, lse
    q, k, v = (_aligned(x, options) for x in (q, k, v))
    device, padded, pieces = q.get_device(), plan.padded_head_dim(d), pieces_of(q.dtype)
    softcap, packed = options.softcap != 0, sequences >= 0
    if not (options.window or packed) and plan.decodes(queries, keys, d):
        if pieces > 1:
            found = reference(q, k, v, options)
            return out.copy_(found[0]), lse.copy_(found[1])
        decode.launch(out, lse, q, k, v, None, wgmma.strides(out, q, k, v), options.causal, softcap, _factors(options))
        return out, lse
    if options.wgmma and keys and wgmma.supported(q, k, v):
        wgmma.forward(out, lse, q, k, v, options, _factors(options), bounds)
        return out, lse
    (k, v), tile = split(pieces, k, v), plan.forward_tile(pieces, padded, softcap, packed)
    blocks = plan.tiles(queries, tile.rows, sequences)
    numbers = blocks, heads, batch, group, plan.section(keys, d, group, batch * heads), queries, keys, sequences, d, options.causal
    launch = _forward_kernel(q.dtype, pieces, padded, softcap, packed).on(device)
    grid, shared = (blocks * batch * heads, 1, 1), tile.forward_bytes(padded, pieces)
    addresses = pointers(out, lse, q, k, v, *bounds)
    launch(grid, (32 * tile.warps, 1, 1), shared, *addresses, *wgmma.strides(out, q, k, v), *numbers, *_factors(options))
    return out, lse


def _launch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _launch(q, k, v, *rest, bounds=Bounds(cu_seqlens, cu_seqlens_k))


def _launch_with_lengths(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options, (out, lse) = Options(*rest), _fake(q, k, v)
    if not (lse.numel() and pieces_of(q.dtype) == 1 and plan.decodes(q.shape[2], k.shape[2], q.shape[3])):
        found = reference(q, k, v, options, key_lengths)
        return out.copy_(found[0]), lse.copy_(found[1])
    q, k, v = (_aligned(x, options) for x in (q, k, v))
    lengths, softcap = key_lengths.contiguous(), options.softcap != 0
    decode.launch(out, lse, q, k, v, lengths, wgmma.strides(out, q, k, v), options.causal, softcap, _factors(options))
    return out, lse


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _write_gradients(
    grads: tuple[Tensor, ...], inputs: tuple[Tensor, ...], dout: Tensor, lse: Tensor, dlse: Tensor | None, options: Options,
    bounds: Bounds = _WHOLE,
) -> None:  # fmt: skip
    """Write dq, dk and dv. `inputs`: q, k, v and out."""
    q, k, v, out = (_aligned(x, options) for x in inputs)
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    if not (lse.numel() and k.numel()):
        for x in grads:
            x.zero_()
        return
    dout, padded_d, pieces, sequences = _aligned(dout, options), plan.padded_head_dim(d), pieces_of(q.dtype), bounds.sequences
    softcap, packed = options.softcap != 0, sequences >= 0
    tile = plan.backward_tile(pieces, padded_d, softcap, packed, device_of(q.get_device()).shared_bytes)
    by_wgmma = options.wgmma and wgmma.supported(q, k, v, dout)
    columns = (plan.WGMMA_BACKWARD[plan.wgmma_head_dim(d)] if by_wgmma else tile).keys.columns
    stats, dout_pieces = _stats(out, dout, lse, dlse, columns, pieces, bounds)
    if by_wgmma:
        return wgmma.backward(grads, q, k, v, dout, stats, options, _factors(options), bounds)
    dtype, (k, v, q) = q.dtype, split(pieces, k, v, q)
    dout = dout if dout_pieces is None else dout_pieces[:, :, :, 0]
    key_blocks, query_blocks = plan.tiles(keys, tile.keys.rows, sequences), plan.tiles(queries, tile.queries.rows, sequences)
    section = plan.section(keys, d, group, batch * heads)
    numbers = key_blocks, query_blocks, heads, batch, group, section, queries, keys, stats.shape[2], columns, sequences, d, options.causal
    grid = batch * (key_blocks * (heads // group) + query_blocks * heads), 1, 1
    before, c = _factors(options)
    _backward_kernel(dtype, pieces, padded_d, softcap, packed, tile).on(q.get_device())(
        grid, (32 * tile.keys.warps, 1, 1), tile.backward_bytes(padded_d, pieces),
        *pointers(*grads, q, k, v, dout, stats[0], stats[1], *bounds), *wgmma.strides(*grads, q, k, v, dout),
        *numbers, before, c * math.log(2) if pieces > 1 else c, options.scale,
    )  # fmt: skip


def _stats(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, columns: int, pieces: int, bounds: Bounds
) -> tuple[Tensor, Tensor | None]:
    """What the backward needs of each query: lse and delta, (2, batch * heads, queries padded to tiles of `columns`), and dout's pieces."""
    (batch, heads, queries, d), lse, dlse = out.shape, lse.contiguous(), None if dlse is None else dlse.resolve_neg().contiguous()
    padded, padded_d = plan.tiles(queries, columns, bounds.sequences) * columns, plan.padded_head_dim(d)
    stats = torch.empty((2, batch * heads, padded), dtype=torch.float32, device=out.device)
    per_block = 256 // (padded_d // 8)  # rows
    dout_pieces = empty_pieces(dout, pieces) if pieces > 1 else None
    _preprocess_kernel(out.dtype, pieces, padded_d).on(out.get_device())(
        (batch * heads * -(-padded // per_block), 1, 1), (256, 1, 1), 0,
        *pointers(stats[0], stats[1], dout_pieces, out, dout, lse, dlse, bounds.queries), *wgmma.strides(out, dout),
        heads, queries, padded, columns, bounds.sequences, d,
    )  # fmt: skip
    return stats, dout_pieces


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    grads = _fake_backward(q, k, v)
    _write_gradients(grads, (q, k, v, out), dout, lse, dlse, Options(*rest))
    return grads


def _launch_varlen_backward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor,
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = _fake_backward(q, k, v)
    _write_gradients(grads, (q, k, v, out), dout, lse, dlse, Options(*rest), Bounds(cu_seqlens, cu_seqlens_k))
    return grads


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(q), _like(k), _like(v)


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (batch, heads, T, D), of packed qkv (batch, T, 3, heads, D)."""
    # The gradient of unbind is one copy, that of select three. The former fails in a 16-bit type under an autocast to the other one.
    found = qkv.unbind(2) if qkv.element_size() > 2 else [qkv.select(2, i) for i in range(3)]
    q, k, v = (x.transpose(1, 2) for x in found)
    return q, k, v


def _launch_packed_backward(qkv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any) -> Tensor:
    dqkv = _fake_packed_backward(qkv)
    _write_gradients(parts(dqkv), (*parts(qkv), out), dout, lse, dlse, Options(*rest))
    return dqkv


def _fake_packed_backward(qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


_SCALARS = "bool causal, float scale, float softcap, bool wgmma=False, int window=0"
_GRADS = f"Tensor out, Tensor dout, Tensor lse, Tensor? dlse, {_SCALARS}"
_forward = raw_op(f"_attention(Tensor q, Tensor k, Tensor v, {_SCALARS}) -> (Tensor, Tensor)", 3, _launch, _fake)
_with_lengths = raw_op(
    f"_attention_with_lengths(Tensor q, Tensor k, Tensor v, Tensor key_lengths, {_SCALARS}) -> (Tensor, Tensor)",
    4, _launch_with_lengths, _fake,
)  # fmt: skip
_backward = raw_op(
    f"_attention_backward(Tensor q, Tensor k, Tensor v, {_GRADS}) -> (Tensor, Tensor, Tensor)", 7, _launch_backward, _fake_backward
)
_VARLEN = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k"
_varlen = raw_op(f"_attention_varlen({_VARLEN}, {_SCALARS}) -> (Tensor, Tensor)", 5, _launch_varlen, _fake)
_varlen_backward = raw_op(
    f"_attention_varlen_backward({_VARLEN}, {_GRADS}) -> (Tensor, Tensor, Tensor)", 9, _launch_varlen_backward, _fake_backward
)
_packed_backward = raw_op(f"_attention_packed_backward(Tensor qkv, {_GRADS}) -> Tensor", 5, _launch_packed_backward, _fake_packed_backward)

# ---- autograd: the outputs are out and lse

_OPTIONS = len(Options._fields)


class _Attention(Differentiable):
    """(q, k, v, *Options), (q, k, v, cu_seqlens, cu_seqlens_k, *Options) or (qkv, *Options) -> out, lse. The gradient of qkv is one tensor,
    without copies of its parts."""

    @staticmethod
    def forward(*args):
        return _raw(args[:-_OPTIONS])(*_separate(args[:-_OPTIONS]), *args[-_OPTIONS:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options = Options(*inputs[-_OPTIONS:])
        ctx.set_materialize_grads(False)
        save(ctx, *inputs[:-_OPTIONS], *output)

    @staticmethod
    def backward(ctx, dout, dlse):
        *inputs, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (len(inputs) + _OPTIONS)
        if watched(*inputs, dout, dlse) and not torch.compiler.is_compiling():
            return *gradients(_reference, (*inputs, ctx.options), (dout, dlse))[:-1], *(None,) * _OPTIONS
        dout = torch.zeros_like(out) if dout is None else dout
        kernels = {1: _packed_backward, 3: _backward, 5: _varlen_backward}[len(inputs)]
        grads = kernels(*inputs, out, dout, lse, dlse, *ctx.options)
        grads = (grads,) if len(inputs) == 1 else grads
        return *grads, *(None,) * (len(inputs) - len(grads) + _OPTIONS)

    @staticmethod
    def tangent(ctx, *tangents_in):
        *inputs, _, _ = ctx.saved_tensors
        return tangents(_reference, (*inputs, ctx.options), (*tangents_in[:-_OPTIONS], None), outputs=2)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


def _separate(inputs: Sequence[Any]) -> Sequence[Any]:
    return inputs if len(inputs) > 1 else parts(inputs[0])


def _raw(inputs: Sequence[Any]) -> Any:
    return _varlen if len(inputs) == 5 else _forward


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *bounds = _separate(args[:-1])
    return reference(q, k, v, args[-1], tuple(bounds) or None)


_apply = apply_of(_Attention)


def fused(inputs: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, queries, D) and lse of (q, k, v), (q, k, v, cu_seqlens, cu_seqlens_k) or (qkv,)."""
    return _apply(*inputs, *options) if watched(*inputs) else _raw(inputs)(*_separate(inputs), *options)


def with_lengths(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The same where each sequence has its own number of keys. Derivatives are those of torch's operations."""
    return reference(q, k, v, options, key_lengths) if watched(q, k, v) else _with_lengths(q, k, v, key_lengths, *options)
