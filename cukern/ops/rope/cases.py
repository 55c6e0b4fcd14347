"""The cases of rope: the ways of calling it that the tools check and time.

Tables are float32 with one column per pair, made by `rope_tables`. Costs count the bytes of x and k, read and
written, and of the tables, read once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope import transformer_engine
from cukern.ops.rope.op import reference, rope, rope_
from cukern.ops.rope.tables import rope_tables
from cukern.ops.rope.versions import VERSIONS
from cukern.runtime.registry import Case, Cost, Op, register

Tensors = tuple[Tensor, ...]
Count = Callable[[Sequence[int]], int]  # of elements, from the dims
BASE = 10000.0


def angles(positions: int, pairs: int, device: torch.device | str) -> Tensor:
    """(positions, pairs) angles in radians, float32."""
    frequencies = BASE ** (-torch.arange(pairs, dtype=torch.float64, device=device) / max(1, pairs))
    return (torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequencies).float()


def _quarter(dims: Sequence[int]) -> int:
    return max(2, dims[3] // 8 * 2)


# ---- inputs, from the dims


def _one(width: Count, dims: Sequence[int], dtype: torch.dtype, device: Any) -> Tensors:
    return torch.randn(*dims, dtype=dtype, device=device), *rope_tables(dims[1], width(dims), device=device)


def _two(dims: Sequence[int], dtype: torch.dtype, device: Any) -> Tensors:
    B, S, H, K, D = dims
    q, k = (torch.randn(B, S, heads, D, dtype=dtype, device=device) for heads in (H, K))
    return q, k, *rope_tables(S, D, device=device)


def _slices(dims: Sequence[int], dtype: torch.dtype, device: Any) -> Tensors:
    """q and k of a packed qkv."""
    B, S, H, K, D = dims
    qkv = torch.randn(B, S, H + 2 * K, D, dtype=dtype, device=device)
    return qkv[:, :, :H], qkv[:, :, H : H + K], *rope_tables(S, D, device=device)


def _packed(dims: Sequence[int], dtype: torch.dtype, device: Any) -> Tensors:
    """Sequences of random lengths, some of them empty."""
    tokens, sequences, H, D = dims
    bounds = (
        torch.randint(tokens + 1, (max(0, sequences - 1),), dtype=torch.int64, device="cpu").sort().values
    )
    cu_seqlens = torch.cat((bounds.new_zeros(1), bounds, bounds.new_full((1,), tokens))).int().to(device)
    return (
        torch.randn(tokens, H, D, dtype=dtype, device=device),
        *rope_tables(tokens, D, device=device),
        cu_seqlens,
    )


def _te(dims: Sequence[int], dtype: torch.dtype, device: Any) -> Tensors:
    S, _, _, D = dims
    return torch.randn(*dims, dtype=dtype, device=device), angles(S, D // 2, device).repeat(1, 2)[
        :, None, None
    ]


# ---- the calls: `function` is rope, rope_ or the reference


def _qk(function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return function(q, cos, sin, k=k, **options)


def _rotate_quarter(function: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return function(x, cos, sin, rotary_dim=2 * cos.shape[1], **options)


def _thd(
    function: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, **options: Any
) -> Any:
    return function(x, cos, sin, cu_seqlens=cu_seqlens, layout="thd", **options)


# ---- the magnitude of a result: |x_a cos| + |x_b sin|, the larger of |x_a cos| +- |x_b sin|


def _magnitude(function: Callable[..., Any], tensors: int, inputs: Tensors, douts: Tensors) -> Tensors:
    """`function(*xs, cos, sin, ...)` is the reference; xs are the first `tensors` inputs."""
    cos, sin, *others = inputs[tensors:]

    def scales(xs: Tensors) -> Tensors:
        signs = (function(*(x.abs() for x in xs), cos.abs(), s, *others) for s in (sin.abs(), -sin.abs()))
        plus, minus = (y if isinstance(y, tuple) else (y,) for y in signs)
        return tuple(torch.maximum(a.abs(), b.abs()) for a, b in zip(plus, minus, strict=True))

    return (*scales(inputs[:tensors]), *scales(douts))


def _te_magnitude(inputs: Tensors, douts: Tensors) -> Tensors:
    a = inputs[1][:, 0, 0]
    return _magnitude(partial(reference, layout="sbhd"), 1, (inputs[0], a.cos(), a.sin()), douts)


# ---- the cases


def _cost(elements: Count, table: Count, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """`elements`: of x and k together; `table`: of both tables together."""
    n = elements(dims)
    return dict.fromkeys(("fwd", "bwd"), Cost(2 * n * itemsize + 4 * table(dims), 3 * n))


_OP = Op("rope", "rope", VERSIONS)


def _register(
    name: str,
    call: Callable[..., Any],
    plain: Callable[..., Any],
    make: Callable[..., Tensors],
    **fields: Any,
) -> None:
    tensors = 1 if fields["inputs"][0] != "q" else 2
    defaults = {
        "magnitude": partial(_magnitude, plain, tensors),
        "check_dims": fields["sim_dims"],
        "constants": ("cos", "sin"),
    }
    register(Case(name=name, op=_OP, call=call, reference=plain, make=make, **{**defaults, **fields}))


def _register_call(
    name: str,
    call: Callable[..., Any],
    function: Callable[..., Any],
    make: Callable[..., Tensors],
    **fields: Any,
) -> None:
    _register(name, partial(call, function), partial(call, reference), make, **fields)


_ONE: dict[str, Any] = {
    "dims": "B S H D",
    "inputs": ("x", "cos", "sin"),
    "bench_dims": ((4, 4096, 32, 128), (8, 4096, 32, 64)),
}
_TWO: dict[str, Any] = {
    "dims": "B S H K D",
    "inputs": ("q", "k", "cos", "sin"),
    "bench_dims": ((4, 4096, 32, 8, 128), (8, 4096, 32, 8, 64), (4, 2048, 32, 8, 256)),
    "cost": partial(_cost, lambda d: d[0] * d[1] * (d[2] + d[3]) * d[4], lambda d: d[1] * d[4]),
    "sim_dims": ((1, 3, 2, 1, 16),),
    "check_dims": ((1, 3, 2, 1, 16), (2, 33, 8, 2, 64)),
}
_X = partial(_cost, lambda d: d[0] * d[1] * d[2] * d[3], lambda d: d[1] * d[3])
_ALL = partial(_one, lambda dims: dims[3])
_QUARTER = partial(_one, _quarter)

_register(
    "rope",
    rope,
    reference,
    _ALL,
    **_ONE,
    cost=_X,
    sim_dims=((1, 1, 1, 2), (2, 5, 3, 32)),
    check_dims=((1, 1, 1, 2), (2, 33, 5, 96)),
)
_register_call("rope_qk", _qk, rope, _two, **_TWO)
_register_call("rope_interleaved", partial(_qk, interleaved=True), rope, _two, **_TWO)
_register_call("rope_in_place", _qk, rope_, _two, in_place=("q", "k"), **_TWO)
_register_call(
    "rope_quarter", _rotate_quarter, rope_, _QUARTER, **_ONE, in_place=("x",), sim_dims=((2, 3, 2, 64),),
    cost=partial(_cost, lambda d: d[0] * d[1] * d[2] * _quarter(d), lambda d: d[1] * _quarter(d)),
    check_dims=((2, 3, 2, 64), (2, 33, 5, 128)),
)  # fmt: skip
_register_call("rope_strided", _qk, rope, _slices, **_TWO)
_register_call(
    "rope_packed", _thd, rope, _packed, dims="TOKENS SEQUENCES H D", inputs=("x", "cos", "sin", "cu_seqlens"),
    cost=partial(_cost, lambda d: d[0] * d[2] * d[3], lambda d: d[0] * d[3]), sim_dims=((9, 4, 2, 16),),
    check_dims=((9, 4, 2, 16), (1000, 70, 3, 64)), bench_dims=((65536, 2401, 16, 128), (65536, 1, 16, 128)),
)  # fmt: skip
_register(
    "rope_te", transformer_engine.apply_rotary_pos_emb, transformer_engine.reference, _te, dims="S B H D",
    inputs=("t", "freqs"), constants=("freqs",), magnitude=_te_magnitude,
    cost=partial(_cost, lambda d: d[0] * d[1] * d[2] * d[3], lambda d: d[0] * d[3]),
    sim_dims=((3, 2, 2, 16),), check_dims=((3, 2, 2, 16), (65, 2, 5, 64)),
    bench_dims=((4096, 1, 128, 128), (8192, 4, 24, 128), (2048, 4, 32, 128)),
)  # fmt: skip
