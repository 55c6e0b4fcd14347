"""What the tools know of kron_linear: its inputs by DIMS, its cost, and the two stacked layers that `cukern check` compares.

DIMS are the rows of x, then the sizes of square factors, the one that acts on the fastest index first: see kron_linear.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from cukern.ops.kron_linear import VERSIONS, kron_linear
from cukern.ops.kron_torch import movedim_product
from cukern.runtime import checks
from cukern.runtime.registry import Cost, Op, register


def one_layer(x: Tensor, *factors: Tensor, version: str | None = None) -> Tensor:
    return kron_linear(x, factors, version=version)


def two_layers(x: Tensor, *factors: Tensor, version: str | None = None) -> Tensor:
    """Two layers of as many factors each."""
    half = len(factors) // 2
    return kron_linear(kron_linear(x, factors[:half], version=version), factors[half:], version=version)


def _reference(x: Tensor, *factors: Tensor) -> Tensor:
    return movedim_product(x, factors)


def _two_references(x: Tensor, *factors: Tensor) -> Tensor:
    half = len(factors) // 2
    return movedim_product(movedim_product(x, factors[:half]), factors[half:])


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    rows, *sizes = dims
    x = torch.randn(rows, prod(sizes), dtype=dtype, device=device)
    return x, *_factors(sizes, dtype, device)


def _make_two(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """The numbers of the program that the command line is compared with: its seed, and its draws in its order."""
    torch.manual_seed(0)
    return *_make(dims, dtype, device), *_factors(dims[1:], dtype, device)


def _factors(sizes: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """Factors scaled by f^-1/2, views of one draw."""
    flat = torch.randn(sum(f * f for f in sizes), dtype=dtype, device=device).split([f * f for f in sizes])
    return tuple(reversed([(w * f**-0.5).view(f, f) for w, f in zip(flat, sizes, strict=True)]))


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """Forward: x and the factors in, y out. Backward: x, the factors and dy in, dx and the factors' gradients out; a product for each."""
    rows, *sizes = dims
    state, matrices = rows * prod(sizes) * itemsize, sum(f * f for f in sizes) * itemsize
    flops = 2 * rows * prod(sizes) * sum(sizes)
    return {
        "fwd": Cost(2 * state + matrices, flops),
        "bwd": Cost(3 * state + 2 * matrices, 2 * flops),
        "bwd:x": Cost(2 * state + matrices, flops),
    }


def _note(dims: Sequence[int], itemsize: int) -> str:
    rows, *sizes = dims
    cost = _cost(dims, itemsize)["fwd"]
    intensity = cost.flops / cost.bytes
    return f"state size {prod(sizes)} ({' x '.join(map(str, sizes))}), {rows} rows; arithmetic intensity {intensity:.1f} flop/byte forward"


_ONE = Op(
    name="kron_linear",
    stem="kron_linear",
    function=kron_linear,
    spread=one_layer,
    reference=_reference,
    versions=VERSIONS,
    dtypes=checks.FLOATS,
    dims="ROWS F1 F2...",
    check_dims=((1, 1), (16, 32, 32), (33, 5, 3, 7), (5, 2, 2, 2, 2, 2), (64, 8, 8, 8), (7, 70, 9)),
    sim_dims=((1, 1), (5, 3, 9, 2), (3, 8, 16), (2, 2, 2, 2, 2)),
    bench_dims=((32, 128, 128), (1024, 8, 8, 8, 8, 8), (1024, 32, 32, 32), (16, 64, 64, 64), (1024, 64, 64), (4096, 32, 32)),
    make=_make,
    inputs=("x", "factor..."),
    cost=_cost,
    bound="memory",
    note=_note,
    roundings=6,  # a chain of additions for each factor
)
register(replace(_ONE, as_checked=replace(_ONE, spread=two_layers, reference=_two_references, make=_make_two)))
