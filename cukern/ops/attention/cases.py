"""The cases of attention: of matrices, grouped (with every option), packed, varlen and decode."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import plan
from cukern.ops.attention.fused import parts
from cukern.ops.attention.op import VERSIONS, attention, attention_packed, attention_varlen
from cukern.ops.attention.reference import Lengths, Options, hidden_keys, reference, repeated
from cukern.runtime.registry import Case, Cost, Op, Tensors, register

_SOFTCAP, _GROUP = 3.0, 2


def _options(head_dim: int, softcap: float = 0.0) -> Options:
    return Options(True, head_dim**-0.5, softcap)


def _drawn(
    shapes: Callable[..., Any], dims: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    """Random tensors of the shapes that belong to DIMS."""
    return tuple(torch.randn(*shape, dtype=dtype, device=device) for shape in shapes(*dims))


def varlen_bounds(tokens: int, sequences: int) -> list[int]:
    """cu_seqlens of attention_varlen: sequences whose lengths grow."""
    return [tokens * i * i // sequences**2 for i in range(sequences + 1)]


def _make_varlen(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    bounds = torch.tensor(varlen_bounds(*dims[:2]), dtype=torch.int32, device=device)
    return *_drawn(lambda tokens, _, heads, D: [(tokens, heads, D)] * 3, dims, dtype, device), bounds


def _sizes(
    softcap: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor, lengths: Lengths = None
) -> tuple[Tensor, ...]:
    """For tensors (batch, heads, rows, D): the sums of the absolute values of all terms of out, dq, dk and
    dv. A score's error changes the weights of its whole row. The softcap's slope, which is at most 1, is left
    out."""
    heads, kv_heads, scale = q.shape[1], k.shape[1], q.shape[-1] ** -0.5
    k, v = repeated(k, heads), repeated(v, heads)
    scores, hidden = q @ k.mT * scale, hidden_keys(q, k, lengths)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    q, k, v, g = (x.abs() for x in (q, k, v, g))
    # a row without a visible key is 0
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num()
    p = weights * (1 + scale * (q @ k.mT).sum(-1, keepdim=True))
    dp = g @ v.mT
    ds = scale * p * (dp + (p * dp).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (ds.mT @ q, p.mT @ g))
    return p @ v, ds @ k, dk, dv


def _rules(
    into: Callable[..., Tensor], back: Callable[..., Tensor], softcap: float = 0.0, results: int = 4
) -> dict[str, Callable[..., Any]]:
    """The reference and the magnitude of a case. `into` gives its tensors the shape (batch, heads, rows, D),
    and `back` reverses that. `results`: the number of outputs and gradients."""

    def lengths(cu_seqlens: Tensor | None = None) -> Lengths:
        return None if cu_seqlens is None else (cu_seqlens, cu_seqlens)

    def expected(*inputs: Tensor) -> Tensor:
        q, k, v = map(into, inputs[:3])
        return back(reference(q, k, v, _options(q.shape[-1], softcap), lengths(*inputs[3:]))[0])

    def magnitude(inputs: Tensors, douts: Tensors) -> Tensors:
        q, k, v, g = map(into, (*inputs[:3], *douts))
        return tuple(back(x) for x in _sizes(softcap, q, k, v, g, lengths(*inputs[3:]))[:results])

    return {"reference": expected, "magnitude": magnitude}


def _packed_magnitude(inputs: Tensors, douts: Tensors) -> Tensors:
    out, *grads = _sizes(0.0, *parts(inputs[0]), douts[0].transpose(1, 2))
    return out.transpose(1, 2), torch.stack([x.transpose(1, 2) for x in grads], 2)


def _decode_cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    batch, kv_heads, group, T, D = dims
    return {
        "fwd": Cost(2 * batch * kv_heads * (T + group) * D * itemsize, 4 * batch * kv_heads * group * T * D)
    }


def _cost(names: str, group: int, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """The cost of a fused causal kernel, which computes half of the T x T scores."""
    heads, T, D = dims
    size, flops = heads * T * D * itemsize, 2 * group * heads * T * (T + 1) * D
    backward = Cost((4 * group + 4) * size, 5 * flops // 2)
    every = {f"bwd:{name}": backward for name in names} if len(names) > 1 else {}
    return {"fwd": Cost((2 * group + 2) * size, flops), "bwd": backward, **every}


def _varlen_cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    tokens, sequences, heads, D = dims
    bounds = varlen_bounds(tokens, sequences)
    size = heads * tokens * D * itemsize
    flops = 2 * heads * D * sum((b - a) * (b - a + 1) for a, b in itertools.pairwise(bounds))
    backward = Cost(8 * size, 5 * flops // 2)
    return {"fwd": Cost(4 * size, flops), "bwd": backward, **{f"bwd:{name}": backward for name in "qkv"}}


_OP = Op("attention", "attention", VERSIONS)


def _register(name: str, call: Callable[..., Any], names: tuple[str, ...], group: int, **others: Any) -> None:
    common: dict[str, Any] = {
        "dims": "MATRICES T D",
        "cost": partial(_cost, "qkv" if len(names) > 1 else "", group),
        "bound": "compute",
    }
    register(Case(name=name, op=_OP, call=call, inputs=names, **common | others))


_register(
    "attention", attention, ("q", "k", "v"), 1, **_rules(lambda x: x[None], lambda x: x[0]),
    make=partial(_drawn, lambda *shape: [shape] * 3), bench_dims=((48, 1024, 64), (64, 4096, 128)),
    check_dims=((1, 1, 8), (3, 100, 64), (2, 333, 128), (2, 130, 72), (1, 300, 40), (2, 65, 16)),
    sim_dims=((1, 1, 8), (1, 70, 64), (2, 19, 72)),
)  # fmt: skip
_register(
    "attention_grouped", partial(attention, softcap=_SOFTCAP), ("q", "k", "v"), _GROUP,
    **_rules(lambda x: x[None], lambda x: x[0], _SOFTCAP),
    # the first two queries see no key
    make=partial(_drawn, lambda n, T, D: [(_GROUP * n, T + 2, D), (n, T, D), (n, T, D)]),
    check_dims=((1, 1, 8), (2, 200, 64), (1, 130, 128)), sim_dims=((1, 40, 16), (1, 9, 8)),
    bench_dims=((24, 1024, 64), (8, 2048, 128)),
)  # fmt: skip
_register(
    "attention_packed", attention_packed, ("qkv",), 1, magnitude=_packed_magnitude,
    reference=lambda qkv: reference(*parts(qkv), _options(qkv.shape[-1]))[0].transpose(1, 2),
    make=partial(_drawn, lambda heads, T, D: [(1, T, 3, heads, D)]),
    check_dims=((1, 1, 8), (3, 200, 64), (2, 130, 128)), sim_dims=((1, 1, 8), (2, 20, 8)),
    bench_dims=((48, 1024, 64), (16, 1024, 128)),
)  # fmt: skip
_register(
    "attention_varlen", attention_varlen, ("q", "k", "v", "cu_seqlens"), 1, make=_make_varlen,
    **_rules(lambda x: x.transpose(0, 1)[None], lambda x: x[0].transpose(0, 1)),
    dims="TOKENS SEQUENCES HEADS D", cost=_varlen_cost,
    check_dims=((9, 4, 2, 8), (1000, 7, 3, 64), (700, 3, 2, 128), (300, 40, 2, 72)),
    sim_dims=((9, 4, 2, 8), (150, 3, 1, 16)),
    bench_dims=((8192, 8, 12, 64), (8192, 4, 16, 128)),  # v1 and the check hold tokens x tokens scores
)  # fmt: skip
_register(
    "attention_decode", attention, ("q", "k", "v"), 1, **_rules(lambda x: x, lambda x: x, results=1),
    make=partial(_drawn, lambda batch, kv, group, T, D: [(batch, kv * group, 1, D), (batch, kv, T, D),
                                                         (batch, kv, T, D)]),
    dims="BATCH KV_HEADS GROUP T D", cost=_decode_cost, bound="memory", differentiable=False,
    candidates=plan.CANDIDATES,
    check_dims=((1, 1, 1, 1, 8), (2, 3, 4, 1000, 128), (1, 2, 8, 333, 64), (3, 1, 20, 130, 72)),
    sim_dims=((1, 1, 3, 150, 16), (1, 2, 4, 70, 72)),
    bench_dims=((1, 8, 4, 16384, 128), (4, 8, 4, 16384, 128), (16, 8, 4, 4096, 128), (64, 8, 4, 4096, 128)),
)  # fmt: skip
