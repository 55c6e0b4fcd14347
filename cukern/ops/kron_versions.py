"""The ladder of kron_linear: for each version how its kernels are launched, and the table that the tools and the public function use.

Here an array is 4-D, (S, A, p, C), contiguous, and a factor (S, p, q) of any strides: see kernels_cu/kron_linear.cu. Each launch makes its
own output.
"""

import functools
from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops import kron_backward, kron_chain, kron_groups
from cukern.ops.kron_gradients import gradient
from cukern.ops.kron_plan import Sizes, Step
from cukern.ops.kron_torch import PRODUCTS
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version

_V3, _V3_BWD = Template("kron_linear.cu", "kron_linear_v3"), Template("kron_linear.cu", "kron_linear_v3_bwd")
_V3_SUM, _V4, _V4_BWD, _V4_GROUP_BWD, _V4_SUM = (
    Template("kron_linear.cu", f"kron_linear_{name}", pdl=True) for name in ("v3_sum", "v4", "v4_bwd", "v4_group_bwd", "v4_sum")
)
_BLOCK = (256, 1, 1)
_COMMON = (8, 3), (64, 2)  # factors' size and number, of plans to be compiled where no input is known
_WIDTHS = 8, 64  # columns of a block's tile: the least that is enough, else the last
_PIECES = 512  # of a sum over fibers, at most: enough to fill every GPU
_PIECE = 256  # fibers in a piece, at least

Epilogue = tuple[float, Tensor | None, Tensor | None]  # scale, bias, residual
PLAIN: Epilogue = (1.0, None, None)


def mode_product(z: Tensor, w: Tensor, epilogue: Epilogue = PLAIN, out: Tensor | None = None) -> Tensor:
    """out[s, a, j, c] = scale * sum over k of z[s, a, k, c] w[s, k, j], plus bias and residual: one launch."""
    samples, A, p, C = z.shape
    q, (scale, bias, residual) = w.shape[2], epilogue
    out = torch.empty((samples, A, q, C), dtype=z.dtype, device=z.device) if out is None else out
    if out.numel():
        columns = _tile(q)
        grid = samples * -(-A * C // (4096 // columns)) * -(-q // columns)
        pointers = (0 if t is None else t.data_ptr() for t in (out, z, w, bias, residual))
        launch = _V3[z.dtype, columns].on(z.get_device())
        launch((grid, 1, 1), _BLOCK, 0, *pointers, A, p, q, C, *w.stride(), scale, 1 if bias is None else bias.numel())
    return out


def contraction(z: Tensor, h: Tensor, scale: float = 1.0) -> Tensor:
    """out[s, k, j] = scale * sum over a and c of z[s, a, k, c] h[s, a, j, c], in pieces, always added in the same order."""
    samples, A, p, C = z.shape
    q, device = h.shape[2], z.get_device()
    if not A * C or not samples:
        return torch.zeros((samples, p, q), dtype=z.dtype, device=z.device)
    kind, side = _sum_dtype(z.dtype), _tile(max(p, q))
    tiles = -(-p // side) * -(-q // side)
    piece = max(_PIECE, -(-A * C * tiles * samples // _PIECES))
    pieces = -(-A * C // piece)
    partials = torch.empty((samples, pieces, p, q), dtype=kind, device=z.device)
    grid = (samples * pieces * tiles, 1, 1)
    _V3_BWD[z.dtype, kind, side].on(device)(grid, _BLOCK, 0, *_pointers(partials, z, h), A, p, q, C, pieces, piece)
    return _sum(partials, z.dtype, scale)


def _sum(partials: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """scale times the sum of the second index of partials, (samples, pieces, p, q)."""
    samples, pieces, p, q = partials.shape
    out = torch.empty((samples, p, q), dtype=dtype, device=partials.device)
    launch = _V3_SUM[dtype, partials.dtype].on(partials.get_device())
    launch((samples * -(-p * q // 32), 1, 1), (32, 8, 1), 0, *_pointers(out, partials), p * q, pieces, scale)
    return out


def _v3(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> Tensor:
    """x (rows, prod p) times the factors, one launch each."""
    z, order = x, kron_chain.plan(factors)
    for step in order:
        w = factors[step.factor]
        w = w if w.ndim == 3 else w[None]
        z = mode_product(kron_chain.seen(z, w, step.p, step.right), w, epilogue if step is order[-1] else PLAIN)
    return z.view(x.shape[0], -1)


class _Prepared(NamedTuple):
    """A launch of v4, as far as it does not depend on the tensors: a call pays for one look-up."""

    group: kron_groups.Group
    launch: backend.Launch
    geometry: tuple[backend.Dim, backend.Dim, int]
    indices: tuple[int, ...]  # of the factors
    unused: tuple[int, ...]  # zeros for those that the kernel could take besides
    features: int  # of the output


@functools.lru_cache(512)
def _plan(
    sizes: Sizes, count: int | None, rows: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int, added: bool
) -> tuple[int, tuple[_Prepared, ...]]:
    """How many rows go through all launches at once, and the launches."""
    plan = kron_groups.groups(sizes, rows, _target(dtype, device, tensor, aligned), count)
    part = kron_groups.rows_at_once(plan, rows, dtype.itemsize)
    return part, tuple(prepare(group, part, dtype, device, added and group is plan[-1]) for group in plan)


def _target(dtype: torch.dtype, device: int, tensor: bool, aligned: int) -> kron_groups.Target:
    shared = backend.shared_memory(device) - 1024  # what the driver keeps of it
    return kron_groups.Target(dtype.itemsize, backend.multiprocessors(device), shared, tensor, aligned)


def prepare(group: kron_groups.Group, rows: int, dtype: torch.dtype, device: int, added: bool = False) -> _Prepared:
    """The launch of a group for at most so many rows; `added`: with a bias or a residual."""
    first, last = group.steps[0], group.steps[-1]
    indices, features = tuple(s.factor for s in group.steps), last.left * last.q * last.right
    unused = (0,) * (kron_groups.MOST - len(group.steps))
    if not group.parts:
        return _Prepared(group, _V3[dtype, _tile(first.q)].on(device), ((1, 1, 1), _BLOCK, 0), indices, unused, features)
    tiles = -(-rows * last.left // group.L) * (first.right // group.R)
    blocks = min(tiles, max(1, backend.multiprocessors(device) * group.blocks // group.slices)) * group.slices
    geometry = (blocks, 1, 1), (group.threads, 1, 1), group.shared
    return _Prepared(group, _V4[dtype, group.template(added)].on(device), geometry, indices, unused, features)


def launch_group(made: _Prepared, z: Tensor, factors: Sequence[Tensor], epilogue: Epilogue, out: Tensor | None = None) -> Tensor:
    """z (rows, numbers), contiguous, through the factors of a group."""
    group, rows = made.group, z.shape[0]
    step = group.steps[0]
    if not group.parts:
        w = factors[step.factor][None]
        return mode_product(kron_chain.seen(z, w, step.p, step.right), w, epilogue, out).view(rows, -1)
    out = torch.empty((rows, made.features), dtype=z.dtype, device=z.device) if out is None else out
    scale, bias, residual = epilogue
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


def _v4(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue, count: int | None = None) -> Tensor:
    """A group of factors a launch, all of them or those of the first `count` steps; rows in parts, where what lies between two launches
    would take much memory."""
    for w in factors:
        if w.ndim == 3:
            return _v3(x, factors, epilogue)
    rows, sizes = x.shape[0], tuple([tuple(w.shape) for w in factors])
    scale, bias, residual = epilogue
    added = bias is not None or residual is not None
    part, launches = _plan(sizes, count, rows, x.dtype, x.get_device(), _on_tensor_cores(x.dtype), gcd(x.data_ptr(), 16), added)
    if len(launches) == 1:
        return launch_group(launches[0], x, factors, epilogue)
    out = torch.empty((rows, launches[-1].features), dtype=x.dtype, device=x.device)
    for first in range(0, rows, part):
        whole = part >= rows
        z, end = (x, out) if whole else (x[first : first + part], out[first : first + part])
        for made in launches[:-1]:
            z = launch_group(made, z, factors, PLAIN)
        added_here = residual if whole or residual is None else residual[first : first + part]
        launch_group(launches[-1], z, factors, (scale, bias, added_here), end)
    return out


def single_launch(x: Tensor, factors: Sequence[Tensor], scale: float) -> Callable[[Tensor, Sequence[Tensor]], Tensor] | None:
    """_v4 for tensors of these shapes and strides, if one launch of its kernel does all: nothing is left to do but to make the launch."""
    rows, sizes = x.numel() // x.shape[-1], tuple([tuple(w.shape) for w in factors])
    aligned = gcd(x.data_ptr(), 16)
    _, launches = _plan(sizes, None, rows, x.dtype, x.get_device(), _on_tensor_cores(x.dtype), aligned, False)
    made = launches[0]
    if len(launches) > 1 or not made.group.parts:
        return None
    launch, (grid, block, shared), shape = made.launch, made.geometry, (*x.shape[:-1], made.features)
    strides = [n for i in made.indices for n in factors[i].stride()]
    numbers = rows * made.group.steps[-1].left, *strides, *made.unused, *made.unused, scale, made.features
    tail = (*made.unused, 0, 0, *numbers)

    def call(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
        out = x.new_empty(shape)
        launch(grid, block, shared, out.data_ptr(), x.data_ptr(), *[factors[i].data_ptr() for i in made.indices], *tail)
        return out

    return call


def tf32() -> bool:
    """Whether torch's switches let float32 products be made in TF32."""
    return _precision("cuda", "matmul") == "tf32" if _precision else torch.backends.cuda.matmul.allow_tf32


# Since torch 2.9, which refuses to read the older switch once the newer has been set.
_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def _on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products are made in TF32, which holds 16-bit numbers as they are."""
    return dtype.itemsize == 2 or (dtype == torch.float32 and tf32())


def _v3_backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float) -> list[Tensor | None]:
    return kron_chain.gradients(x, g, factors, wanted, scale, lambda z, w, s: mode_product(z, w, (s, None, None)), contraction)


def _v4_backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float) -> list[Tensor | None]:
    """dx alone is the layer of the transposed factors. With a factor's gradient it is kron_chain's, but what went into each launch is
    multiplied anew from x, in few launches: no more than two arrays of the layer's inputs and outputs exist at one time."""
    if not any(wanted[1:]):
        return [_v4(g, [w.mT for w in factors], (scale, None, None)), *[None] * len(factors)]
    if any(w.ndim == 3 for w in factors):
        return _v3_backward(x, g, factors, wanted, scale)
    order, h = kron_chain.plan(factors), g
    found: list[Tensor | None] = [None] * len(wanted)
    n, plan = len(order), _backward_plan(x, g, factors)
    if all(wanted) and kron_backward.better_swapped(plan):
        return _swapped_backward(plan, x, g, factors, scale, found)
    for launch in reversed(plan):
        n -= len(launch.steps)
        own = [s.factor for s in launch.steps]
        if launch.template and all(wanted[i + 1] for i in own):
            z = _v4(x, factors, PLAIN, n) if n else x
            h = _fused_backward(launch, z, h, z if n else None, factors, found, 1.0 if n else scale, scale)
            del z
        else:
            h = _backward_in_steps(launch.steps, n, x, h, factors, wanted, scale, found)
        if not wanted[0] and not any(wanted[earlier.factor + 1] for earlier in order[:n]):
            return found
    found[0] = h.reshape(x.shape)
    return found


def _swapped_backward(
    plan: Sequence[kron_backward.Backward], x: Tensor, g: Tensor, factors: Sequence[Tensor], scale: float, found: list[Tensor | None]
) -> list[Tensor | None]:
    """The backward of two factors whose second has a fused launch. Mode products commute, so g goes back through the first one first: that
    makes what the fused launch takes, and it is the small second one that g is multiplied by anew."""
    (first,), (second,) = (launch.steps for launch in plan)
    large, small = factors[first.factor][None], factors[second.factor][None]
    h = _v4_mode(kron_chain.seen(g, large, first.q, first.right), large.mT, 1.0)
    found[0] = _fused_backward(plan[1], x, h, None, factors, found, scale, scale)
    del h
    h = _v4_mode(kron_chain.seen(g, small, second.q, second.right), small.mT, 1.0)
    z, h = kron_chain.seen(x, large, first.p, first.right), kron_chain.seen(h, large, first.q, first.right)
    found[first.factor + 1] = _v4_contraction(z, h, scale)[0]
    return found


def _backward_plan(x: Tensor, g: Tensor, factors: Sequence[Tensor]) -> tuple[kron_backward.Backward, ...]:
    target = _target(x.dtype, x.get_device(), _on_tensor_cores(x.dtype), gcd(x.data_ptr(), g.data_ptr(), 16))
    return kron_backward.backwards(tuple([tuple(w.shape) for w in factors]), x.shape[0], target)


def _fused_backward(
    launch: kron_backward.Backward, z: Tensor, h: Tensor, out: Tensor | None, factors: Sequence[Tensor], found: list[Tensor | None],
    scale: float, factors_scale: float,
) -> Tensor:  # fmt: skip
    """The gradients of a launch's factors, put into `found`, and scale times what goes back, in `out` or a new tensor."""
    out = torch.empty_like(z) if out is None else out
    ws = [factors[s.factor] for s in launch.steps]
    grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in ws]
    counts = [w.numel() for w in ws]
    unused = (0,) * (kron_groups.MOST - len(ws))
    device, partials = z.get_device(), torch.empty((launch.blocks, sum(counts)), dtype=torch.float32, device=z.device)
    strides = [n for w in ws for n in w.stride()]
    _V4_GROUP_BWD[z.dtype, launch.template].on(device)(
        (launch.blocks, 1, 1), (launch.threads, 1, 1), launch.shared, *_pointers(partials, out, z, h, *ws), *unused,
        z.shape[0] * launch.steps[-1].left, *strides, *unused, *unused, scale,
    )  # fmt: skip
    _V4_SUM[z.dtype].on(device)(
        (-(-sum(counts) // 32), 1, 1), (32, 32, 1), 0, *_pointers(*grads), *unused, partials.data_ptr(), *counts, *unused,
        launch.blocks, factors_scale,
    )  # fmt: skip
    for s, grad in zip(launch.steps, grads, strict=True):
        found[s.factor + 1] = grad
    return out


def _backward_in_steps(
    run: Sequence[Step], n: int, x: Tensor, h: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float,
    found: list[Tensor | None],
) -> Tensor:  # fmt: skip
    """The same by launches for each thing and for each of the steps, of which the first is step n, and for the wanted gradients alone."""
    for at, s in reversed(list(enumerate(run, n))):
        w = factors[s.factor][None]
        h = kron_chain.seen(h, w, s.q, s.right)
        if wanted[s.factor + 1]:
            z = _v4(x, factors, PLAIN, at) if at else x
            found[s.factor + 1] = _v4_contraction(kron_chain.seen(z, w, s.p, s.right), h, scale)[0]
            del z
        h = _v4_mode(h, w.mT, 1.0 if at else scale)
    return h


def _v4_mode(z: Tensor, w: Tensor, scale: float) -> Tensor:
    """mode_product by v4's kernel."""
    samples, A, p, C = z.shape
    if samples != 1:
        return mode_product(z, w, (scale, None, None))
    made = _plan_one(A, p, w.shape[2], C, z.dtype, z.get_device(), _on_tensor_cores(z.dtype), gcd(z.data_ptr(), 16))
    return launch_group(made, z.reshape(A, p * C), [w[0]], (scale, None, None)).view(1, A, w.shape[2], C)


def _v4_contraction(z: Tensor, h: Tensor, scale: float) -> Tensor:
    """contraction by v4's kernel."""
    samples, A, p, C = z.shape
    if samples != 1 or not A * C:
        return contraction(z, h, scale)
    device, kind = z.get_device(), _sum_dtype(z.dtype)
    target = _target(z.dtype, device, _on_tensor_cores(z.dtype), gcd(z.data_ptr(), h.data_ptr(), 16))
    plan = gradient(A, p, h.shape[2], C, target)
    partials = torch.empty((1, plan.pieces, p, h.shape[2]), dtype=kind, device=z.device)
    launch = _V4_BWD[z.dtype, kind, plan.template].on(device)
    launch((plan.blocks, 1, 1), (plan.threads, 1, 1), plan.shared, *_pointers(partials, z, h), A, C, plan.pieces)
    return _sum(partials, z.dtype, scale)


@functools.lru_cache(512)
def _plan_one(A: int, p: int, q: int, C: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int) -> _Prepared:
    group = kron_groups.fastest((Step(0, 1, p, q, C),), A, _target(dtype, device, tensor, aligned))
    assert group
    return prepare(group, A, dtype, device)


def _tile(n: int) -> int:
    return next((width for width in _WIDTHS if n <= width), _WIDTHS[-1])


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a kernel adds: compute_t of common/math.cuh."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


def _v3_instances(dtype: torch.dtype) -> list[Kernel]:
    kind = _sum_dtype(dtype)
    widths = [template for width in _WIDTHS for template in (_V3[dtype, width], _V3_BWD[dtype, kind, width])]
    return [*widths, _V3_SUM[dtype, kind]]


def _v4_instances(dtype: torch.dtype) -> list[Kernel]:
    target = _target(dtype, backend.SIMULATED, _on_tensor_cores(dtype), 16)
    groups = [group for f, n in _COMMON for group in kron_groups.groups(((f, f),) * n, 64, target)]
    gradients = [gradient(64, f, f, C, target).template for f, C in ((8, 64), (64, 1))]
    made = [*[_V4[dtype, group.template()] for group in groups], *[_V4_BWD[dtype, _sum_dtype(dtype), one] for one in gradients]]
    if dtype.itemsize <= 4:
        launches = [launch for f, n in _COMMON for launch in kron_backward.backwards(((f, f),) * n, 64, target)]
        made += [*[_V4_GROUP_BWD[dtype, launch.template] for launch in launches if launch.template], _V4_SUM[dtype]]
    return [*made, *_v3_instances(dtype)]


def _in_torch(version: str) -> Callable[[Tensor, Sequence[Tensor], Epilogue], Tensor]:
    def forward(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> Tensor:
        return with_epilogue(PRODUCTS[version](x, factors), epilogue)

    return forward


def with_epilogue(product: Tensor, epilogue: Epilogue) -> Tensor:
    scale, bias, residual = epilogue
    y = product if scale == 1.0 else product * scale
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


# v1 and v2 are torch, and torch differentiates them.
VERSIONS = {
    "v1": Version("x @ w and movedim, in torch", _in_torch("v1")),
    "v2": Version("w^T @ x^T and reshape, in torch", _in_torch("v2")),
    "v3": Version("one GEMM a factor, read and written in place", _v3, _v3_backward, _v3_instances),
    "v4": Version("a group of factors a launch, in shared memory, compiled for their sizes", _v4, _v4_backward, _v4_instances, requires=80),
}
