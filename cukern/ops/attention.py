"""attention: softmax(scale q k^T) v, where each query sees the keys up to its own. The products of matrices are torch's."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.causal_softmax import NO_WINDOW, causal_softmax, raw_backward, raw_forward
from cukern.ops.matmul import torch_matmul
from cukern.ops.softmax import checked_scale, softmax
from cukern.runtime import autocast, backend, checks, interop
from cukern.runtime.registry import Cost, Op, Version, choose, register, transformed

BLOCK = 512  # queries of a block of v2, at least


def attention(q: Any, k: Any, v: Any, *, scale: float | None = None, version: str | None = None) -> Tensor:
    """softmax(scale q k^T) v, where each query sees the keys up to its own, as in GPT-2. Differentiable.

        q, k, v = (torch.randn(4, 12, 1024, 64, device="cuda", requires_grad=True) for _ in range(3))  # (batch, heads, time, head_dim)
        cukern.attention(q, k, v).square().sum().backward()

    Args:
        q: (..., queries, head_dim), float16, bfloat16, float32 or float64: a tensor, or an array that supports DLPack.
        k: (..., keys, head_dim), with q's leading dimensions. The last query belongs to the last key: there are at most as many queries
            as keys. v: (..., keys, value_dim). All have one dtype and device.
        scale: a finite number, at least 0; None: 1 / sqrt(head_dim).
        version: default: "v2", or that of `cukern.use`.
            "v1": scores are scaled and masked by torch, then cukern.softmax, whose version `cukern.use("softmax", ...)` chooses.
            "v2": cukern.causal_softmax.
            "sdpa": torch's scaled_dot_product_attention, which writes no scores. It has no second derivative, and on a GPU its gradients
            may differ from run to run.

    v1 and v2 keep the scores, (..., queries, keys) of q's dtype, for the backward, and need memory for up to three more such tensors.
    From 1024 queries on, v2's kernels process blocks of 512 to 768 queries and skip the scores behind a block's last query. CPU tensors,
    torch.compile and torch.func transforms use one block.
    Inputs whose leading dimensions do not flatten to one are copied. torch computes the products, with TF32 where its setting allows it.
    Autocast changes nothing. CPU tensors use torch's operations, or the simulator.

    Returns a new tensor (..., queries, value_dim). Raises TypeError for other dtypes; ValueError for shapes or devices that do not fit,
    more queries than keys, a scale that is negative or not finite, or an unknown version.
    Source: Vaswani et al., https://arxiv.org/abs/1706.03762.
    """
    checks.version("attention", version, (*VERSIONS, "sdpa"))
    q, k, v = _checked(q, k, v)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else checked_scale(q, scale)
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale!r}")
    if version == "sdpa":
        return _by_sdpa(q, k, v, scale)
    if version is None:
        version = _default(q.get_device()) if q.is_cuda or backend.simulates(q) else "v1"
    matrices = (x.flatten(0, -3) if x.ndim > 3 else x for x in (q, k, v))
    return VERSIONS[version].forward(*matrices, scale).view(*q.shape[:-1], v.shape[-1])


def _checked(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensors = {name: interop.to_torch(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in tensors.items():
        checks.dtype(name, x, checks.FLOATS)
    checks.same(**tensors)
    q, k, v = tensors.values()
    if q.ndim < 2 or q.shape[:-2] != k.shape[:-2] or q.shape[-1:] != k.shape[-1:] or k.shape[:-1] != v.shape[:-1]:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k and v must be (..., queries, D), (..., keys, D) and (..., keys, E), got {shapes}")
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} queries, more than the {k.shape[-2]} keys")
    return q, k, v


def _default(device: int) -> str:
    chosen = choose("attention", "", device).forward
    return next(name for name, version in VERSIONS.items() if version.forward is chosen)


_default._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result, which imports dynamo


def _by_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    scores = torch_matmul(q * scale, k.mT)  # scores of float16 may overflow before they are scaled
    return torch_matmul(softmax(scores.masked_fill(_hidden(q, k), -math.inf)), v)


def _by_causal_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    kernels = q.is_cuda or backend.simulates(q)
    if kernels and q.shape[1] >= 2 * BLOCK and not torch.compiler.is_compiling() and not transformed():
        return _InBlocks.apply(q, k, v, scale)
    return _at_once(q, k, v, scale)


class _InBlocks(torch.autograd.Function):
    """`_at_once` for blocks of queries, the last first. A block computes no scores for keys behind its last query. Two blocks take 3/4 of
    the memory and FLOP of one; many approach 1/2."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, weights = q.new_empty(*q.shape[:2], v.shape[-1]), []
        with autocast.off(q):
            for a, b, keys in _blocks(q, k):
                scores = torch.baddbmm(q.new_empty(()), q[:, a:b], k[:, :keys].mT, beta=0, alpha=scale)
                weights.append(raw_forward(scores, None, 1.0, NO_WINDOW, "")[0])
                torch.bmm(weights[-1], v[:, :keys], out=out[:, a:b])
        ctx.save_for_backward(q, k, v, *weights)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a gradient that will be differentiated again
            wanted = [x for x in (q, k, v) if x.requires_grad]
            found = iter(torch.autograd.grad(_at_once(q, k, v, ctx.scale), wanted, dout, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in (q, k, v)), None
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        with autocast.off(q):
            for beta, (a, b, keys), p in zip((0, *[1] * len(weights)), _blocks(q, k), weights, strict=False):
                dy, dk_seen, dv_seen = dout[:, a:b], dk[:, :keys], dv[:, :keys]  # the first block sees all keys
                dscores = raw_backward(p, torch.bmm(dy, v[:, :keys].mT), None, None, 1.0, NO_WINDOW, "")[0]
                torch.baddbmm(dv_seen, p.mT, dy, beta=beta, out=dv_seen)
                torch.baddbmm(dk_seen, dscores.mT, q[:, a:b], beta=beta, alpha=ctx.scale, out=dk_seen)
                torch.baddbmm(dq[:, a:b], dscores, k[:, :keys], beta=0, alpha=ctx.scale, out=dq[:, a:b])
        return dq, dk, dv, None


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    """First and last query, and number of keys, of each block, from the last block to the first."""
    queries, count = q.shape[1], q.shape[1] // BLOCK
    edges = [queries * i // count for i in range(count + 1)]
    return [(a, b, b + k.shape[1] - queries) for a, b in reversed(list(itertools.pairwise(edges)))]


def _at_once(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if q.dtype == torch.float16:
        q, scale = q * scale, 1.0
    return torch_matmul(causal_softmax(torch_matmul(q, k.mT), scale=scale), v)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    seen = None if q.shape[-2] == k.shape[-2] else ~_hidden(q, k)
    with autocast.off(q):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale)


def _hidden(q: Tensor, k: Tensor) -> Tensor:
    """True where a query (row) does not see a key (column)."""
    queries, keys = q.shape[-2], k.shape[-2]
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)


VERSIONS = {
    "v1": Version("scores in memory, cukern.softmax", _by_softmax),
    "v2": Version("scores in memory, cukern.causal_softmax", _by_causal_softmax),
}

# ---- for the tools


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    matrices, T, D = dims
    return tuple(torch.randn(matrices, T, D, dtype=dtype, device=device) for _ in range(3))


def _weights(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(_hidden(q, k), -math.inf), -1)


def _magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The sums of the absolute values of all terms. The error of an exponent is one of its whole row."""
    q, k, v, g = (x.abs() for x in (*inputs, *douts))
    scale = q.shape[-1] ** -0.5
    p = _weights(*inputs[:2]) * (1 + scale * (q @ k.mT).sum(-1, keepdim=True))
    dp = g @ v.mT
    ds = scale * p * (dp + (p * dp).sum(-1, keepdim=True))
    return p @ v, ds @ k, ds.mT @ q, p.mT @ g


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """Of a fused kernel, which does half of the T x T products."""
    matrices, T, D = dims
    size, flops = matrices * T * D * itemsize, 2 * matrices * T * (T + 1) * D
    backward = Cost(8 * size, 5 * flops // 2)
    return {"fwd": Cost(4 * size, flops), "bwd": backward, **{f"bwd:{name}": backward for name in "qkv"}}


register(
    Op(
        name="attention", stem="attention", function=attention, reference=lambda q, k, v: _weights(q, k) @ v, versions=VERSIONS,
        dtypes=checks.FLOATS, dims="MATRICES T D", make=_make, inputs=("q", "k", "v"), cost=_cost, bound="compute", magnitude=_magnitude,
        check_dims=((1, 1, 1), (2, 65, 16), (3, 100, 64), (1, 300, 40)),
        sim_dims=((1, 1, 1), (2, 19, 8), (1, 70, 4)),
        bench_dims=((48, 1024, 64),),
    )
)  # fmt: skip
