"""v1 and v2: scores in memory, products by torch, and a softmax that can be chosen. sdpa: torch's own
attention.

Each takes q (batch, heads, queries, D), k and v (batch, kv heads, keys, D or E), Options and whether lse is
wanted. It returns out and lse.
"""

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention.reference import Options, bias_of, by_scores, hidden_keys
from cukern.ops.causal_softmax import NO_WINDOW, causal_softmax, raw_backward, raw_forward
from cukern.ops.softmax import softmax
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.launch import backend

BLOCK = 512  # queries of a block of v2, at least
Outputs = tuple[Tensor, Tensor | None]

by_softmax = partial(by_scores, softmax)


def by_causal_softmax(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, extra: Tensor | None = None
) -> Outputs:
    plain = options.causal and extra is None and not (options.softcap or options.window or return_lse)
    if not plain or not all(
        checks.known(n)
        for n in (q.shape[0] == k.shape[0], q.shape[1] == k.shape[1], q.shape[2] <= k.shape[2])
    ):
        return by_softmax(q, k, v, options, return_lse, extra=extra)
    leading = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    kernels = q.is_cuda or backend.simulates(q)
    if kernels and q.shape[1] >= 2 * BLOCK and not torch.compiler.is_compiling() and not transformed():
        return _InBlocks.apply(q, k, v, options).unflatten(0, leading), None
    return _at_once(q, k, v, options).unflatten(0, leading), None


class _InBlocks(torch.autograd.Function):
    """`_at_once` for blocks of queries, the last first. A block computes no scores for keys behind its last
    query. Two blocks take 3/4 of the memory and FLOP of one; many approach 1/2."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        out, weights, scale = q.new_empty(*q.shape[:2], v.shape[-1]), [], options.scale_of(q)
        with autocast.off(q):
            for a, b, keys in _blocks(q, k):
                scores = torch.baddbmm(q.new_empty(()), q[:, a:b], k[:, :keys].mT, beta=0, alpha=scale)
                weights.append(raw_forward(scores, None, 1.0, NO_WINDOW, "")[0])
                torch.bmm(weights[-1], v[:, :keys], out=out[:, a:b])
        ctx.save_for_backward(q, k, v, *weights)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a gradient that will be differentiated again
            wanted = [x for x in (q, k, v) if x.requires_grad]
            found = iter(torch.autograd.grad(_at_once(q, k, v, ctx.options), wanted, dout, create_graph=True))
            return *(next(found) if x.requires_grad else None for x in (q, k, v)), None
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        with autocast.off(q):
            for beta, (a, b, keys), p in zip((0, *[1] * len(weights)), _blocks(q, k), weights, strict=False):
                # the first block sees all keys
                dy, dk_seen, dv_seen = dout[:, a:b], dk[:, :keys], dv[:, :keys]
                dscores = raw_backward(p, torch.bmm(dy, v[:, :keys].mT), None, None, 1.0, NO_WINDOW, "")[0]
                torch.baddbmm(dv_seen, p.mT, dy, beta=beta, out=dv_seen)
                torch.baddbmm(dk_seen, dscores.mT, q[:, a:b], beta=beta, alpha=ctx.options.scale, out=dk_seen)
                torch.baddbmm(
                    dq[:, a:b], dscores, k[:, :keys], beta=0, alpha=ctx.options.scale, out=dq[:, a:b]
                )
        return dq, dk, dv, None


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int, int]]:
    """First and last query, and number of keys, of each block, from the last block to the first."""
    queries, count = q.shape[1], q.shape[1] // BLOCK
    edges = [queries * i // count for i in range(count + 1)]
    return [(a, b, b + k.shape[1] - queries) for a, b in reversed(list(itertools.pairwise(edges)))]


def _at_once(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    scale = options.scale
    if scale is None or q.dtype == torch.float16:
        q, scale = q * options.scale_of(q), 1.0
    with autocast.off(q):
        return torch_matmul(causal_softmax(torch_matmul(q, k.mT), scale=scale), v)


def by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, extra: Tensor | None = None
) -> Outputs:
    if options.softcap or return_lse:
        raise ValueError(
            f"version 'sdpa' has no softcap and no return_lse, got softcap={options.softcap!r} and "
            f"return_lse={return_lse}"
        )
    same_heads, square = checks.known(q.shape[1] == k.shape[1]), checks.known(q.shape[2] == k.shape[2])
    bias = bias_of(extra, q, k)
    masked = options.causal and (not square or options.window > 0 or bias is not None)
    seen = ~hidden_keys(q, k, window=options.window) if masked else None
    if bias is not None:
        seen = bias if seen is None else bias.masked_fill(~seen, -math.inf)
        seen = seen.expand(*q.shape[:3], k.shape[2])
    is_causal = options.causal and not masked
    with autocast.off(q):
        attend = partial(
            torch.nn.functional.scaled_dot_product_attention, scale=options.scale, enable_gqa=not same_heads
        )
        return attend(q, k, v, seen, options.dropout, is_causal), None
