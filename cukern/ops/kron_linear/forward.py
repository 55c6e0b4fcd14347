"""v4 of kron_linear, forward: launches of groups of factors, compiled for their sizes."""

import struct
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.kron_linear import cublas, planner
from cukern.ops.kron_linear.plan import MOST, Launch, Problem, Sizes, Step, planned_rows
from cukern.ops.kron_linear.reference import PLAIN, Epilogue, Factors
from cukern.runtime.device import cached, device_of
from cukern.runtime.dispatch.products import tf32_allowed
from cukern.runtime.launch import driver, limits
from cukern.runtime.launch.kernel import Template, planning
from cukern.runtime.recording import packed
from cukern.runtime.tensors import pointers

KERNELS = {
    name: Template("kron_linear/kron_linear.cu", f"kron_linear_v4_{name}", pdl=True)
    for name in (
        *("tile", "chain_wgmma", "split_wgmma", "tile_bwd", "split_wgmma_bwd", "split_wgmma_one_bwd"),
        *("few_rows_bwd", "few_rows_sum", "gradient", "sum"),
    )
}

Key = tuple[Sizes, int, torch.dtype, int, bool, int, bool]  # the arguments of plan_of_layer
_PACK_FACTORS = struct.Struct(f"{MOST}Q{2 * MOST}q").pack


class Prepared(NamedTuple):
    """A launch, as far as it does not depend on the tensors: a call pays for one look-up."""

    group: Launch
    launch: driver.Launch | None  # None: cuBLAS
    geometry: tuple[limits.Dim, limits.Dim, int]
    indices: tuple[int, ...]  # of the factors
    features: int  # of the output


@cached(2048)
def plan_of_layer(
    sizes: Sizes, rows: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int, added: bool,
    count: int | None = None,
) -> tuple[int, tuple[Prepared, ...]]:  # fmt: skip
    """How many rows go through all launches at once, and the launches, of all factors or of the first `count`
    steps. If `count` is 0, those that keep an array for the backward, if it is worth it."""
    target = target_of(dtype, device, tensor, aligned, rows)
    if count == 0:
        part = rows
        plan = planner.keeping(sizes, rows, target)
    else:
        plan = planner.forward(sizes, planned_rows(rows, not count), target, count)
        part = planner.rows_at_once(plan, rows, dtype.itemsize)
    return part, tuple(prepare(group, part, dtype, device, added and group is plan[-1]) for group in plan)


def target_of(dtype: torch.dtype, device: int, tensor: bool, aligned: int, rows: int = 0) -> Problem:
    bfloat = dtype is torch.bfloat16
    return Problem(device_of(device), dtype.itemsize, tensor, aligned, rows % 32 == 0, bfloat)


def prepare(group: Launch, rows: int, dtype: torch.dtype, device: int, added: bool = False) -> Prepared:
    """The launch of a group for up to `rows` rows; `added`: with a bias or a residual."""
    first = group.steps[0]
    last = group.steps[-1]
    indices = tuple(s.factor for s in group.steps)
    features = last.left * last.q * last.right
    if not group.threads:
        return Prepared(group, None, ((1, 1, 1), (1, 1, 1), 0), indices, features)
    kernel = KERNELS[group.kernel]
    if planning():  # calls with a bias and calls without one
        kernel[dtype, group.template(not added)].on(device)
    tiles = -(-rows * last.left // group.L) * (first.right // group.R)
    blocks = min(tiles, max(1, device_of(device).sms * group.blocks // group.slices)) * group.slices
    run = kernel[dtype, group.template(added)].on(device)
    return Prepared(group, run, geometry(blocks, group, device), indices, features)


def geometry(blocks: int, launch: Launch, device: int) -> tuple[limits.Dim, limits.Dim, int]:
    return (blocks, 1, 1), (launch.threads, 1, 1), driver.spread(launch.shared, blocks, device)


def by_value(ws: Sequence[Tensor]) -> bytes:
    """The kernels' argument Factors4, see tile.cuh."""
    unused = (0,) * (MOST - len(ws))
    fields = *pointers(*ws), *unused, *[w.stride(0) for w in ws], *unused, *[w.stride(1) for w in ws], *unused
    return packed(_PACK_FACTORS, *fields)


def launch_group(
    made: Prepared, z: Tensor, factors: Factors, epilogue: Epilogue, out: Tensor | None = None
) -> Tensor:
    """z (rows, numbers), contiguous, through the factors of a group."""
    group = made.group
    rows = z.shape[0]
    (scale, bias, residual) = epilogue
    out = torch.empty((rows, made.features), dtype=z.dtype, device=z.device) if out is None else out
    step = group.steps[-1]
    if made.launch is None:
        if len(group.steps) > 1:
            return cublas.layer_forward(z, factors, epilogue, out)[0]
        return cublas.mode_product(z, factors[step.factor], step, epilogue, out)
    ws = by_value([factors[index] for index in made.indices])
    sizes = rows * step.left, scale, made.features
    made.launch(*made.geometry, *pointers(out, z), ws, *pointers(bias, residual), *sizes)
    return out


def forward(x: Tensor, factors: Factors, epilogue: Epilogue, count: int | None = None) -> Tensor:
    """All factors, or those of the first `count` steps. The rows are split if the array between two launches
    would take too much memory."""
    if any([w.ndim == 3 for w in factors]):
        return cublas.v3_forward(x, factors, epilogue)
    rows = x.shape[0]
    (scale, bias, residual) = epilogue
    part, launches = plan_of_layer(*problem(x, factors, adds(epilogue)), count)
    if part >= rows:
        return through(launches, x, factors, epilogue)[0]
    out = torch.empty((rows, launches[-1].features), dtype=x.dtype, device=x.device)
    for first in range(0, rows, part):
        own = slice(first, first + part)
        added = None if residual is None else residual[own]
        through(launches, x[own], factors, (scale, bias, added), out[own])
    return out


def adds(epilogue: Epilogue) -> bool:
    """Whether there is a bias or a residual."""
    return epilogue[1] is not None or epilogue[2] is not None


def problem(x: Tensor, factors: Factors, added: bool) -> Key:
    """What a plan for these tensors depends on. `added`: with a bias or a residual."""
    return key(sizes_of(factors), x.numel() // x.shape[-1], x.dtype, x.get_device(), x.data_ptr(), added)


def sizes_of(factors: Factors) -> Sizes:
    return tuple([(w.shape[0], w.shape[1]) for w in factors])


def key(sizes: Sizes, rows: int, dtype: torch.dtype, device: int, address: int, added: bool) -> Key:
    return sizes, rows, dtype, device, on_tensor_cores(dtype), gcd(address, 16), added


def through(
    launches: Sequence[Prepared], x: Tensor, factors: Factors, epilogue: Epilogue, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All launches, the last one to `out` or a new tensor; and what that one took."""
    z = x
    for made in launches[:-1]:
        z = launch_group(made, z, factors, PLAIN)
    return launch_group(launches[-1], z, factors, epilogue, out), z


def mode(z: Tensor, w: Tensor, scale: float, rows: int | None = None) -> Tensor:
    """mode_product of one sample. `rows`: of the layer, if z has more for the factors to the left."""
    _, A, p, C = z.shape
    step = Step(0, 1, p, w.shape[2], C)
    aligned = gcd(z.data_ptr(), 16)
    made = _plan_one(step, A, rows or A, z.dtype, z.get_device(), on_tensor_cores(z.dtype), aligned)
    return launch_group(made, z.reshape(A, p * C), [w[0]], (scale, None, None)).view(1, A, w.shape[2], C)


@cached(2048)
def _plan_one(
    step: Step, A: int, rows: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int
) -> Prepared:
    target = target_of(dtype, device, tensor, aligned)
    group = planner.fastest((step,), A // rows * planned_rows(rows), target)
    assert group
    return prepare(group, A, dtype, device)


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """True if products may use TF32, which represents 16-bit numbers exactly."""
    return dtype.itemsize == 2 or (dtype == torch.float32 and tf32_allowed())
