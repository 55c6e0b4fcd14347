"""The fused kernels of attention, without the matrix of scores: raw ops and autograd. Math: kernels_cu/attention/attention.cu."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import decode, plan, wgmma
from cukern.ops.attention.reference import Options, reference
from cukern.runtime.higher import gradients, tangents
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Differentiable, apply_of, each, raw_op, save, watched
from cukern.runtime.tensors import pointers

_FORWARD, _BACKWARD, _PREPROCESS = (Template("attention/attention.cu", f"attention_v3{name}") for name in ("", "_bwd", "_preprocess"))
DTYPES = torch.bfloat16, torch.float16
_LEAST_SCALE = 1e-30  # a smaller factor of scores counts as this one: 0 times -infinity, a hidden key, would be NaN


def supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernels take these dtypes and head dimensions."""
    d = q.shape[-1]
    return q.dtype in DTYPES and d == v.shape[-1] and 0 < d <= plan.MOST_HEAD_DIM and d % 8 == 0


def instances(dtype: torch.dtype) -> list[Kernel]:
    dims = (64, plan.MOST_HEAD_DIM) if dtype in DTYPES else ()
    kernels = [make(dtype, d, softcap) for make in (_forward_kernel, _backward_kernel) for d in dims for softcap in (False, True)]
    return kernels + [_PREPROCESS[dtype, d] for d in dims] + (decode.instances(dtype) if dims else [])


def wgmma_instances(dtype: torch.dtype) -> list[Kernel]:
    return instances(dtype) + wgmma.instances(dtype) if dtype in DTYPES else []


def _forward_kernel(dtype: torch.dtype, d: int, softcap: bool) -> Kernel:
    tile = plan.FORWARD[d][softcap]
    return _FORWARD[dtype, d, tile.rows, tile.columns, tile.warps, tile.per_sm, softcap]


def _backward_kernel(dtype: torch.dtype, d: int, softcap: bool) -> Kernel:
    tile = plan.BACKWARD[d][softcap]
    key = dtype, d, *tile.keys[:2], *tile.queries, softcap
    return _BACKWARD[key]


# ---- launches: q (batch, heads, queries, D), k and v (batch, kv heads, keys, D)


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
    fits = not options.window or wgmma.supported(x)
    return x if fits and d == 1 and (b | h | t) % 8 == 0 and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _factors(options: Options) -> tuple[float, float]:
    """What scores are multiplied by before tanh, and what the exponent of 2 is a multiple of."""
    scale, softcap = options.scale, options.softcap
    return (scale / softcap, softcap / math.log(2)) if softcap else (1.0, max(scale / math.log(2), _LEAST_SCALE))


def _launch(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options, (out, lse) = Options(*rest), _fake(q, k, v)
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    if not lse.numel():
        return out, lse
    q, k, v = (_aligned(x, options) for x in (q, k, v))
    device, padded = q.get_device(), plan.padded_head_dim(d)
    softcap, strides = options.softcap != 0, wgmma.strides(out, q, k, v)
    if not options.window and plan.decodes(queries, keys, d):
        decode.launch(out, lse, q, k, v, None, strides, options.causal, softcap, _factors(options))
        return out, lse
    if options.wgmma and keys and wgmma.supported(q, k, v):
        wgmma.forward(out, lse, q, k, v, options, _factors(options))
        return out, lse
    tile = plan.FORWARD[padded][softcap]
    blocks = -(-queries // tile.rows)
    numbers = blocks, heads, batch, group, plan.section(keys, d, group, batch * heads), queries, keys, d, options.causal
    launch = _forward_kernel(q.dtype, padded, softcap).on(device)
    grid, shared = (blocks * batch * heads, 1, 1), tile.forward_bytes(padded)
    launch(grid, (32 * tile.warps, 1, 1), shared, *pointers(out, lse, q, k, v), *strides, *numbers, *_factors(options))
    return out, lse


def _launch_with_lengths(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options, (out, lse) = Options(*rest), _fake(q, k, v)
    if not (lse.numel() and plan.decodes(q.shape[2], k.shape[2], q.shape[3])):
        found = reference(q, k, v, options, key_lengths)
        return out.copy_(found[0]), lse.copy_(found[1])
    q, k, v = (_aligned(x, options) for x in (q, k, v))
    strides, lengths = wgmma.strides(out, q, k, v), key_lengths.contiguous()
    decode.launch(out, lse, q, k, v, lengths, strides, options.causal, options.softcap != 0, _factors(options))
    return out, lse


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _write_gradients(
    grads: tuple[Tensor, ...], inputs: tuple[Tensor, ...], dout: Tensor, lse: Tensor, dlse: Tensor | None, options: Options
) -> None:
    """Write dq, dk and dv. `inputs`: q, k, v and out."""
    q, k, v, out = (_aligned(x, options) for x in inputs)
    (batch, heads, queries, d), keys, group = q.shape, k.shape[2], q.shape[1] // max(1, k.shape[1])
    if not (lse.numel() and k.numel()):
        for x in grads:
            x.zero_()
        return
    dout, lse, dlse = _aligned(dout, options), lse.contiguous(), None if dlse is None else dlse.resolve_neg().contiguous()
    device, padded_d = q.get_device(), plan.padded_head_dim(d)
    softcap = options.softcap != 0
    tile, by_wgmma = plan.BACKWARD[padded_d][softcap], options.wgmma and wgmma.supported(q, k, v, dout)
    columns = (plan.WGMMA_BACKWARD[plan.wgmma_head_dim(d)] if by_wgmma else tile).keys.columns
    padded = -(-queries // columns) * columns  # as many queries as are copied together
    stats = torch.empty((2, batch * heads, padded), dtype=torch.float32, device=q.device)
    per_block = 256 // (padded_d // 8)  # rows
    _PREPROCESS[q.dtype, padded_d].on(device)(
        (batch * heads * -(-padded // per_block), 1, 1), (256, 1, 1), 0,
        *pointers(stats[0], stats[1], out, dout, lse, dlse), *wgmma.strides(out, dout), heads, queries, padded, d,
    )  # fmt: skip
    if by_wgmma:
        return wgmma.backward(grads, q, k, v, dout, stats, options, _factors(options))
    key_blocks, query_blocks = -(-keys // tile.keys.rows), -(-queries // tile.queries.rows)
    section = plan.section(keys, d, group, batch * heads)
    numbers = key_blocks, query_blocks, heads, batch, group, section, queries, keys, padded, d, options.causal
    grid = batch * (key_blocks * (heads // group) + query_blocks * heads), 1, 1
    _backward_kernel(q.dtype, padded_d, softcap).on(device)(
        grid, (32 * tile.keys.warps, 1, 1), tile.backward_bytes(padded_d),
        *pointers(*grads, q, k, v, dout, stats[0], stats[1]), *wgmma.strides(*grads, q, k, v, dout),
        *numbers, *_factors(options), options.scale,
    )  # fmt: skip


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    grads = _fake_backward(q, k, v)
    _write_gradients(grads, (q, k, v, out), dout, lse, dlse, Options(*rest))
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
_packed_backward = raw_op(f"_attention_packed_backward(Tensor qkv, {_GRADS}) -> Tensor", 5, _launch_packed_backward, _fake_packed_backward)

# ---- autograd: the outputs are out and lse

_OPTIONS = len(Options._fields)


class _Attention(Differentiable):
    """(q, k, v, *Options) or (qkv, *Options) -> out, lse. The gradient of qkv is one tensor, without copies of its parts."""

    @staticmethod
    def forward(*args):
        return _forward(*_separate(args[:-_OPTIONS]), *args[-_OPTIONS:])

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
        kernels = _backward if len(inputs) == 3 else _packed_backward
        grads = kernels(*inputs, out, dout, lse, dlse, *ctx.options)
        return *(grads if len(inputs) == 3 else (grads,)), *(None,) * _OPTIONS

    @staticmethod
    def tangent(ctx, *tangents_in):
        *inputs, _, _ = ctx.saved_tensors
        return tangents(_reference, (*inputs, ctx.options), (*tangents_in[:-_OPTIONS], None), outputs=2)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


def _separate(inputs: Sequence[Any]) -> Sequence[Any]:
    return inputs if len(inputs) == 3 else parts(inputs[0])


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v = _separate(args[:-1])
    return reference(q, k, v, args[-1])


_apply = apply_of(_Attention)


def fused(inputs: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, queries, D) and lse of (q, k, v) or (qkv,)."""
    return _apply(*inputs, *options) if watched(*inputs) else _forward(*_separate(inputs), *options)


def with_lengths(q: Tensor, k: Tensor, v: Tensor, key_lengths: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The same where each sequence has its own number of keys. Derivatives are those of torch's operations."""
    return reference(q, k, v, options, key_lengths) if watched(q, k, v) else _with_lengths(q, k, v, key_lengths, *options)
