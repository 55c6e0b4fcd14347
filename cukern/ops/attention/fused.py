"""The fused kernels of attention, without the matrix of scores: raw ops and autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import launch, plan
from cukern.ops.attention.reference import Options, reference, reference_of_pages
from cukern.ops.attention.wgmma import Bounds
from cukern.runtime.dispatch.autocast import off
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, save, watched
from cukern.runtime.dispatch.higher import gradients, tangents
from cukern.runtime.dispatch.raw_ops import raw_op


def supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the kernels take these dtypes and head dimensions."""
    d = q.shape[-1]
    return q.dtype in plan.DTYPES and d == v.shape[-1] and 0 < d <= plan.most_head_dim(q.dtype) and d % 8 == 0


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (batch, heads, T, D), of packed qkv (batch, T, 3, heads, D)."""
    q, k, v = (qkv.select(2, i).transpose(1, 2) for i in range(3))
    return q, k, v


class Parts(torch.autograd.Function):
    """`parts`. The gradient is one copy: that of select is three copies and two sums, and that of unbind
    fails in a 16-bit type under an autocast to the other one."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> tuple[Tensor, ...]:
        return parts(qkv)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with off(grads[0]):
            return torch.stack([x.transpose(1, 2) for x in grads], 2)


def _separate(inputs: Sequence[Any]) -> Sequence[Any]:
    return inputs if len(inputs) > 1 else parts(inputs[0])


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return launch.like(q), launch.like(k), launch.like(v)


def _fake_extra_backward(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
    dlse: Tensor | None, wanted: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dq, dk, dv, and the gradient of a bias, if it is wanted, without broadcasting."""
    shape = (*q.shape[:3], k.shape[2]) if wanted else (0, 0, 0, 0)
    return *_fake_backward(q, k, v), extra.new_empty(shape)


def _launch_extra_backward(*args: Any) -> tuple[Tensor, ...]:
    (q, k, v, extra, *grads, wanted), options = args[:9], args[9:]
    dq, dk, dv, dbias = _fake_extra_backward(*args)
    if wanted and Options(*options).causal:  # the kernels skip what no query sees
        dbias.zero_()
    of_bias = dbias if wanted else None
    launch.backward((dq, dk, dv), q, k, v, *grads, *options, extra=extra, dbias=of_bias)
    return dq, dk, dv, dbias


def _letters(extra: Tensor) -> str:
    """The dimensions of `extra` that are split: batch and heads, unless they have size 1."""
    return (
        "".join(c if n > 1 else "." for c, n in zip("bh..", extra.shape, strict=False))
        if extra.ndim > 1
        else "."
    )


def _fake_packed_backward(qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _launch_packed_backward(qkv: Tensor, *rest: Any) -> Tensor:
    dqkv = _fake_packed_backward(qkv)
    launch.backward(parts(dqkv), *parts(qkv), *rest)
    return dqkv


_HEADS = "bh.., bh.., bh.."  # q, k and v: batch and heads are split
_INPUTS, _SCALARS = (
    "Tensor q, Tensor k, Tensor v",
    "bool causal, float? scale, float softcap, bool wgmma=False, int window=0, int splits=0, "
    "float dropout=0.0",
)
_OF_OUT = "Tensor out, Tensor dout, Tensor lse, Tensor? dlse"
_GRADS = f"{_OF_OUT}, {_SCALARS}"
_VARLEN = f"{_INPUTS}, Tensor cu_seqlens, Tensor cu_seqlens_k"
_forward = raw_op(
    f"_attention({_INPUTS}, {_SCALARS}) -> (Tensor, Tensor)",
    3,
    launch.forward,
    launch.outputs,
    sharding=f"{_HEADS} -> bh.., bh.",
)
_extra = raw_op(
    f"_attention_extra({_INPUTS}, Tensor extra, {_SCALARS}) -> (Tensor, Tensor)", 4,
    lambda q, k, v, extra, *rest: launch.forward(q, k, v, *rest, extra=extra), launch.outputs,
    sharding=lambda q, k, v, extra, *_: f"{_HEADS}, {_letters(extra)} -> bh.., bh.",
)  # fmt: skip
_with_lengths = raw_op(
    f"_attention_with_lengths({_INPUTS}, Tensor key_lengths, {_SCALARS}) -> (Tensor, Tensor)", 4, lambda q, k,
    v, lengths, *rest: launch.forward(q, k, v, *rest, lengths=lengths), launch.outputs,
    sharding=f"{_HEADS}, b -> bh.., bh.",
)  # fmt: skip
_paged = raw_op(
    f"_attention_paged({_INPUTS}, Tensor block_table, Tensor key_lengths, {_SCALARS}) -> (Tensor, Tensor)", 5,
    launch.paged, launch.outputs, sharding="bh.., .h.., .h.., b., b -> bh.., bh.",
)  # fmt: skip
_varlen = raw_op(
    f"_attention_varlen({_VARLEN}, {_SCALARS}) -> (Tensor, Tensor)", 5, lambda q, k, v, one, two,
    *rest: launch.forward(q, k, v, *rest, bounds=Bounds(one, two)), launch.outputs,
    sharding=".h.., .h.., .h.., ., . -> .h.., .h.",
)  # fmt: skip
_backward = raw_op(
    f"_attention_backward({_INPUTS}, {_GRADS}) -> (Tensor, Tensor, Tensor)", 7,
    lambda *inputs: launch.backward(_fake_backward(*inputs), *inputs), _fake_backward,
    sharding=f"{_HEADS}, bh.., bh.., bh., bh. -> {_HEADS}",
)  # fmt: skip
_extra_backward = raw_op(
    f"_attention_extra_backward({_INPUTS}, Tensor extra, {_OF_OUT}, bool wanted, {_SCALARS}) -> (Tensor, "
    "Tensor, Tensor, Tensor)", 8, _launch_extra_backward, _fake_extra_backward,
    sharding=lambda q, k, v, x, *_: f"{_HEADS}, {_letters(x)}, bh.., bh.., bh., bh. -> {_HEADS}, bh..",
)  # fmt: skip
_varlen_backward = raw_op(
    f"_attention_varlen_backward({_VARLEN}, {_GRADS}) -> (Tensor, Tensor, Tensor)", 9,
    lambda q, k, v, one, two, *rest: launch.backward(_fake_backward(q, k, v), q, k, v, *rest,
                                                     bounds=Bounds(one, two)), _fake_backward,
    sharding=".h.., .h.., .h.., ., ., .h.., .h.., .h., .h. -> .h.., .h.., .h..",
)  # fmt: skip
_packed_backward = raw_op(
    f"_attention_packed_backward(Tensor qkv, {_GRADS}) -> Tensor", 5, _launch_packed_backward,
    _fake_packed_backward, sharding="b..h., bh.., bh.., bh., bh. -> b..h.",
)  # fmt: skip

# ---- autograd: the outputs are out and lse

_OPTIONS = len(Options._fields)


class _Attention(Differentiable):
    """(q, k, v, *Options), (q, k, v, extra, *Options), (q, k, v, cu_seqlens, cu_seqlens_k, *Options) or (qkv,
    *Options) -> out, lse. The gradient of qkv is one tensor, without copies of its parts."""

    @staticmethod
    def forward(*args):
        return _raw(args[:-_OPTIONS], args[-_OPTIONS:])

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
        kernels = {1: _packed_backward, 3: _backward, 4: _extra_backward, 5: _varlen_backward}[len(inputs)]
        wanted = (inputs[3].ndim == 4 and ctx.needs_input_grad[3],) if len(inputs) == 4 else ()
        grads = kernels(*inputs, out, dout, lse, dlse, *wanted, *ctx.options)
        if wanted:
            grads = *grads[:3], _sum_to(inputs[3], grads[3]) if wanted[0] else None
        grads = (grads,) if len(inputs) == 1 else grads
        return *grads, *(None,) * (len(inputs) - len(grads) + _OPTIONS)

    @staticmethod
    def tangent(ctx, *tangents_in):
        *inputs, _, _ = ctx.saved_tensors
        return tangents(_reference, (*inputs, ctx.options), (*tangents_in[:-_OPTIONS], None), outputs=2)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


def _raw(inputs: Sequence[Any], options: Sequence[Any]) -> Any:
    return {4: _extra, 5: _varlen}.get(len(inputs), _forward)(*_separate(inputs), *options)


def _reference(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *more = _separate(args[:-1])
    if len(more) == 1:
        return reference(q, k, v, args[-1], extra=more[0])
    return reference(q, k, v, args[-1], tuple(more) or None)


def _sum_to(bias: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a bias, summed in float32 over the dimensions along which it was broadcast."""
    dims = [i for i, n in enumerate(bias.shape) if n == 1]
    return gradient.sum(dims, keepdim=True, dtype=torch.float32).to(bias.dtype) if dims else gradient


_apply = apply_of(_Attention)


def fused(inputs: Sequence[Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, queries, D) and lse of (q, k, v), (q, k, v, extra), (q, k, v, cu_seqlens,
    cu_seqlens_k) or (qkv,). `extra`: as in `reference`."""
    return _apply(*inputs, *options) if watched(*inputs) else _raw(inputs, options)


def backward(
    inputs: Sequence[Tensor], out: Tensor, dout: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, ...]:
    """dq, dk and dv of (q, k, v) or (q, k, v, seed), where out and lse were saved by the caller."""
    args = *inputs, out, dout, lse, None
    return _backward(*args, *options) if len(inputs) == 3 else _extra_backward(*args, False, *options)[:3]


def with_lengths(
    q: Tensor, k: Tensor, v: Tensor, options: Options, key_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where each sequence has its own number of keys. Derivatives are those of torch's
    operations."""
    return (
        reference(q, k, v, options, key_lengths)
        if watched(q, k, v)
        else _with_lengths(q, k, v, key_lengths, *options)
    )


def with_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, block_table: Tensor, key_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """`with_lengths` for k and v in pages, (pages, kv heads, page size, D)."""
    if not watched(q, k, v):
        return _paged(q, k, v, block_table, key_lengths, *options)
    return reference_of_pages(q, k, v, options, block_table, key_lengths)
