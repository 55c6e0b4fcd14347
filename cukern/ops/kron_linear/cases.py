"""What the tools know of kron_linear: its inputs by DIMS, its cost, and the two stacked layers that `cukern
check` compares.

DIMS are the rows of x, then the sizes of square factors, the one that acts on the fastest index first: see
op.py. Those of kron_linear_rectangular have two numbers for each factor, its rows and its columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from cukern.ops.kron_linear.op import VERSIONS, kron_linear
from cukern.ops.kron_linear.plan import Sizes, steps
from cukern.ops.kron_linear.reference import movedim_product
from cukern.runtime.registry import Case, Cost, Op, register

Where = torch.device | str


def _layers(
    x: Tensor,
    *factors: Tensor,
    count: int = 1,
    layer: Callable[..., Tensor] = kron_linear,
    **version: str | None,
) -> Tensor:
    """`count` layers of as many factors each."""
    each = len(factors) // count
    for first in range(0, len(factors), each):
        x = layer(x, factors[first : first + each], **version)
    return x


def _square(dims: Sequence[int]) -> Sizes:
    """The factors' sizes, in torch.kron's order."""
    if len(dims) < 2:
        raise ValueError(f"DIMS must be ROWS, then the size of each factor, got {len(dims)} numbers")
    return tuple((f, f) for f in reversed(dims[1:]))


def _rectangular(dims: Sequence[int]) -> Sizes:
    if len(dims) % 2 == 0 or len(dims) < 3:
        rule = "DIMS must be ROWS, then the rows and the columns of each factor"
        raise ValueError(f"{rule}, got {len(dims)} numbers")
    return tuple(zip(dims[1::2], dims[2::2], strict=True))[::-1]


def _make(dims: Sequence[int], sizes: Sizes, dtype: torch.dtype, device: Where) -> tuple[Tensor, ...]:
    x = torch.randn(dims[0], prod(p for p, _ in sizes), dtype=dtype, device=device)
    return x, *_factors(sizes, dtype, device)


def _make_two(dims: Sequence[int], dtype: torch.dtype, device: Where) -> tuple[Tensor, ...]:
    """Inputs of a fixed seed, drawn in the order of the original command-line program, with whose output that
    of `cukern check` is compared."""
    torch.manual_seed(0)
    return *_make(dims, _square(dims), dtype, device), *_factors(_square(dims), dtype, device)


def _factors(sizes: Sizes, dtype: torch.dtype, device: Where) -> tuple[Tensor, ...]:
    """Factors scaled by p^-1/2, views of one draw, which begins with the last one's."""
    counts = [p * q for p, q in reversed(sizes)]
    flat = torch.randn(sum(counts), dtype=dtype, device=device).split(counts)
    return tuple((w * p**-0.5).view(p, q) for w, (p, q) in zip(reversed(flat), sizes, strict=True))


def _cost(dims: Sequence[int], sizes: Sizes, itemsize: int) -> dict[str, Cost]:
    """Forward: x and the factors in, y out. Backward: x, the factors and dy in, dx and the factors' gradients
    out, a product for each."""
    x, y = (dims[0] * prod(size[i] for size in sizes) * itemsize for i in (0, 1))
    matrices = sum(p * q for p, q in sizes) * itemsize
    flops = 2 * dims[0] * sum(s.left * s.p * s.q * s.right for s in steps(sizes))
    return {
        "fwd": Cost(x + y + matrices, flops),
        "bwd": Cost(2 * x + y + 2 * matrices, 2 * flops),
        "bwd:x": Cost(x + y + matrices, flops),
    }


def _note(dims: Sequence[int], itemsize: int) -> str:
    rows, *sizes = dims
    cost = _cost(dims, _square(dims), itemsize)["fwd"]
    intensity = cost.flops / cost.bytes
    state = f"state size {prod(sizes)} ({' x '.join(map(str, sizes))}), {rows} rows"
    return f"{state}; arithmetic intensity {intensity:.1f} flop/byte forward"


CANDIDATES = ("tile", "chain_wgmma", "split_wgmma", "split_wgmma_one", "few_rows")


def _buckets(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rows for each plan of these factors. With few rows the backward keeps more. 32 does not divide some."""
    return [(rows, *dims[1:]) for rows in (16, 31, 32, 33, 64, 96, 65, 1024, 1025)]


_OP = Op("kron_linear", "kron_linear", VERSIONS)


def _case(sizes_of: Callable[[Sequence[int]], Sizes], **rest: Any) -> Case:
    return Case(
        op=_OP,
        call=_layers,
        reference=partial(_layers, layer=movedim_product),
        make=lambda dims, dtype, device: _make(dims, sizes_of(dims), dtype, device),
        inputs=("x", "factor..."),
        cost=lambda dims, itemsize: _cost(dims, sizes_of(dims), itemsize),
        roundings=6,  # a chain of additions for each factor
        variants=_buckets,
        candidates=(*CANDIDATES, "cublas"),
        **rest,
    )


_ONE = _case(
    _square,
    name="kron_linear",
    dims="ROWS F1 F2...",
    check_dims=((1, 1), (16, 32, 32), (33, 5, 3, 7), (5, 2, 2, 2, 2, 2), (64, 8, 8, 8), (7, 70, 9)),
    sim_dims=((1, 1), (5, 3, 9, 2), (3, 8, 16), (2, 2, 2, 2, 2)),
    bench_dims=(
        (32, 128, 128),
        (1024, 8, 8, 8, 8, 8),
        (1024, 32, 32, 32),
        (16, 64, 64, 64),
        (1024, 64, 64),
        (4096, 32, 32),
    ),
    note=_note,
)
_TWO = partial(_layers, count=2)
_CHECKED = replace(_ONE, call=_TWO, reference=partial(_TWO, layer=movedim_product), make=_make_two)
register(replace(_ONE, as_checked=_CHECKED))
register(
    _case(
        _rectangular,
        name="kron_linear_rectangular",
        dims="ROWS P1 Q1 P2 Q2...",
        check_dims=((33, 5, 12, 7, 3), (64, 8, 128, 128, 8)),
        sim_dims=((3, 2, 5, 8, 3),),
        # The fastest index's factor widens the array: to take it first is 16 times the work.
        bench_dims=((4096, 8, 128, 128, 8),),
    )
)
