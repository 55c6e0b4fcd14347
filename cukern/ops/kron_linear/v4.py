"""v4 of kron_linear, forward: a group of factors a launch, compiled for their sizes. groups.py plans the launches, pages.py those
of a whole layer on tensor cores."""

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.kron_linear import cublas, groups, pages, registers, v3
from cukern.ops.kron_linear.lanes import Lanes
from cukern.ops.kron_linear.plan import Problem, Sizes, Step, planned_rows, planned_rows_forward
from cukern.ops.kron_linear.quarter import Slice
from cukern.ops.kron_linear.registers import Registers
from cukern.ops.kron_linear.sixteen import Sixteen
from cukern.ops.kron_linear.split import Both, Split
from cukern.ops.kron_linear.v3 import PLAIN, Epilogue
from cukern.runtime import backend
from cukern.runtime.device import cached, device_of, eligible
from cukern.runtime.kernel import Kernel, Template, planning

_V4: dict[type, Template] = {
    kind: Template("kron_linear/kron_linear.cu", f"kron_linear_v4{name}", pdl=True)
    for kind, name in (
        (groups.Group, ""),
        (Lanes, "_lanes"),
        (Registers, "_registers"),
        (Sixteen, "_sixteen"),
        (pages.Pages, "_pages"),
        (pages.Wide, "_wide"),
        (Split, "_split"),
        (Both, "_both"),
        (Slice, "_slice"),
        (pages.Piles, "_piles"),
    )
}
COMMON = (8, 3), (64, 2)  # factors' size and number, of plans to be compiled where no input is known


Key = tuple[tuple[tuple[int, ...], ...], int, torch.dtype, int, bool, int, bool]  # the arguments of plan_of_layer


class Prepared(NamedTuple):
    """A launch of v4, as far as it does not depend on the tensors: a call pays for one look-up."""

    group: pages.Launch
    launch: backend.Launch | None  # None: torch's matmul
    geometry: tuple[backend.Dim, backend.Dim, int]
    indices: tuple[int, ...]  # of the factors
    unused: tuple[int, ...]  # zeros for those that the kernel could take besides
    features: int  # of the output


@cached(2048)
def plan_of_layer(
    sizes: Sizes, rows: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int, added: bool, count: int | None = None
) -> tuple[int, tuple[Prepared, ...]]:
    """How many rows go through all launches at once, and the launches, of all factors or of the first `count` steps."""
    target, planned = target_of(dtype, device, tensor, aligned), planned_rows(rows) if count else planned_rows_forward(rows)
    plan: tuple[pages.Launch, ...] = groups.groups(sizes, planned, target, count) if count else of_layer(sizes, planned, target, dtype)
    part = groups.rows_at_once([group.steps for group in plan], rows, dtype.itemsize)
    return part, tuple(prepare(group, part, dtype, device, added and group is plan[-1]) for group in plan)


def of_layer(sizes: Sizes, rows: int, target: Problem, dtype: torch.dtype) -> tuple[pages.Launch, ...]:
    """The plan of a whole layer."""
    one, several = pages.fastest(sizes, rows, target, dtype is torch.bfloat16), groups.groups(sizes, rows, target)
    chosen = eligible([(one,), several] if one else [several], lambda plan: groups.kernel_of(plan[0]))
    return min(chosen or [several], key=lambda plan: sum(group.us for group in plan))


def target_of(dtype: torch.dtype, device: int, tensor: bool, aligned: int, rows: int = 0) -> Problem:
    return Problem(device_of(device), dtype.itemsize, tensor, aligned, rows % 32 == 0)


def prepare(group: pages.Launch, rows: int, dtype: torch.dtype, device: int, added: bool = False) -> Prepared:
    """The launch of a group for at most so many rows; `added`: with a bias or a residual."""
    first, last = group.steps[0], group.steps[-1]
    indices, features = tuple(s.factor for s in group.steps), last.left * last.q * last.right
    unused = (0,) * (groups.MOST - len(group.steps))
    if not group.threads:
        return Prepared(group, None, ((1, 1, 1), (1, 1, 1), 0), indices, unused, features)
    tiles = -(-rows * last.left // group.L) * (first.right // group.R)
    blocks = min(tiles, max(1, device_of(device).sms * group.blocks // group.slices)) * group.slices
    geometry = (blocks, 1, 1), (group.threads, 1, 1), backend.spread(group.shared, blocks, device)
    if planning():  # calls with a bias and calls without one
        _V4[type(group)][dtype, group.template(not added)].on(device)
    return Prepared(group, _V4[type(group)][dtype, group.template(added)].on(device), geometry, indices, unused, features)


def launch_group(made: Prepared, z: Tensor, factors: Sequence[Tensor], epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
    """z (rows, numbers), contiguous, through the factors of a group."""
    group, rows, (scale, bias, residual) = made.group, z.shape[0], epilogue
    out = torch.empty((rows, made.features), dtype=z.dtype, device=z.device) if out is None else out
    if made.launch is None:
        (step,) = group.steps
        return cublas.mode_product(z, factors[step.factor], step, epilogue, out)
    pointers: list[int] = []
    strides: list[int] = []
    for index in made.indices:
        w = factors[index]
        pointers.append(w.data_ptr())
        strides += w.stride()
    rest = 0 if bias is None else bias.data_ptr(), 0 if residual is None else residual.data_ptr()
    made.launch(
        *made.geometry, out.data_ptr(), z.data_ptr(), *pointers, *made.unused, *rest, rows * group.steps[-1].left, *strides,
        *made.unused, *made.unused, scale, made.features,
    )  # fmt: skip
    return out


def forward(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue, count: int | None = None) -> Tensor:
    """A group of factors a launch, all of them or those of the first `count` steps; rows in parts, where what lies between two launches
    would take much memory."""
    for w in factors:
        if w.ndim == 3:
            return v3.forward(x, factors, epilogue)
    rows, (scale, bias, residual) = x.shape[0], epilogue
    part, launches = plan_of_layer(*problem(x, factors, adds(epilogue)), count)
    if len(launches) == 1:
        return launch_group(launches[0], x, factors, epilogue)
    if part >= rows:
        return through(launches, x, factors, epilogue)[0]
    out = torch.empty((rows, launches[-1].features), dtype=x.dtype, device=x.device)
    for first in range(0, rows, part):
        own = slice(first, first + part)
        through(launches, x[own], factors, (scale, bias, None if residual is None else residual[own]), out[own])
    return out


def adds(epilogue: Epilogue) -> bool:
    """Whether there is a bias or a residual."""
    return epilogue[1] is not None or epilogue[2] is not None


def problem(x: Tensor, factors: Sequence[Tensor], added: bool) -> Key:
    """What a plan for these tensors depends on. `added`: with a bias or a residual."""
    sizes, rows = tuple([tuple(w.shape) for w in factors]), x.numel() // x.shape[-1]
    return sizes, rows, x.dtype, x.get_device(), on_tensor_cores(x.dtype), gcd(x.data_ptr(), 16), added


def through(
    launches: Sequence[Prepared], x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All launches, the last one to `out` or a new tensor; and what that one took."""
    z = x
    for made in launches[:-1]:
        z = launch_group(made, z, factors, PLAIN)
    return launch_group(launches[-1], z, factors, epilogue, out), z


def single_launch(x: Tensor, factors: Sequence[Tensor], scale: float) -> Callable[[Tensor, Sequence[Tensor]], Tensor] | None:
    """_v4 for tensors of these shapes and strides, if one launch of its kernel does all: nothing is left to do but to make the launch."""
    _, launches = plan_of_layer(*problem(x, factors, False))
    made = launches[0]
    if len(launches) > 1 or made.launch is None:
        return None
    shape, order = (*x.shape[:-1], made.features), made.indices
    strides, like = [n for i in order for n in factors[i].stride()], x.shape == shape
    numbers = x.numel() // x.shape[-1] * made.group.steps[-1].left, *strides, *made.unused, *made.unused, scale, made.features
    launch = backend.bind(made.launch, *made.geometry, *made.unused, 0, 0, *numbers)  # no bias, no residual

    def call(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        out = torch.empty_like(x) if like else x.new_empty(shape)  # 0.7 us apart
        launch(out.data_ptr(), x.data_ptr(), *[factors[i].data_ptr() for i in order])
        return out

    return call


def mode(z: Tensor, w: Tensor, scale: float, rows: int | None = None) -> Tensor:
    """mode_product by v4's kernel, of one sample. `rows`: of the layer, if z has more for the factors to the left."""
    _, A, p, C = z.shape
    made = _plan_one(A, rows or A, p, w.shape[2], C, z.dtype, z.get_device(), on_tensor_cores(z.dtype), gcd(z.data_ptr(), 16))
    return launch_group(made, z.reshape(A, p * C), [w[0]], (scale, None, None)).view(1, A, w.shape[2], C)


@cached(2048)
def _plan_one(A: int, rows: int, p: int, q: int, C: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int) -> Prepared:
    group = groups.fastest((Step(0, 1, p, q, C),), A // rows * planned_rows(rows), target_of(dtype, device, tensor, aligned))
    assert group
    return prepare(group, A, dtype, device)


def tf32() -> bool:
    """Whether torch's switches let float32 products be made in TF32."""
    return _precision("cuda", "matmul") == "tf32" if _precision else torch.backends.cuda.matmul.allow_tf32


# Since torch 2.9, which refuses to read the older switch once the newer has been set.
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products are made in TF32, which holds 16-bit numbers as they are."""
    return dtype.itemsize == 2 or (dtype == torch.float32 and tf32())


def instances(dtype: torch.dtype) -> list[Kernel]:
    target = target_of(dtype, backend.SIMULATED, on_tensor_cores(dtype), 16)
    least = target.device._replace(capability=80, shared_bytes=registers.LEAST_SHARED + 1023)  # for every GPU
    target = target._replace(device=least)
    plans = [plan for f, n in COMMON for plan in of_layer(((f, f),) * n, 64, target, dtype)]
    return [_V4[type(plan)][dtype, plan.template()] for plan in plans]
