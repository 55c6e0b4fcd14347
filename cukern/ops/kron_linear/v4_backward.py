"""v4 of kron_linear, backward: one or two neighbouring factors a launch where kron_backward.py plans it so; else a launch for each."""

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import cublas, derivatives, groups, quarter, v3
from cukern.ops.kron_linear import v4 as kron_v4
from cukern.ops.kron_linear.gradients import gradient
from cukern.ops.kron_linear.plan import Problem, Sizes, Step, planned_rows
from cukern.ops.kron_linear.v3 import PLAIN, Epilogue
from cukern.ops.kron_linear.v4 import COMMON, on_tensor_cores, target_of
from cukern.runtime import backend
from cukern.runtime.device import cached, device_of
from cukern.runtime.kernel import Kernel, Template, planning
from cukern.runtime.tensors import pointers, wide

_V4_BWD, _V4_SUM, _QUARTER_SUM = (
    Template("kron_linear/kron_linear.cu", f"kron_linear_v4_{name}", pdl=True) for name in ("bwd", "sum", "quarter_sum")
)
_FUSED = {
    kernel: Template("kron_linear/kron_linear.cu", f"kron_linear_v4_{kernel}_bwd", pdl=True)
    for kernel in ("group", "split", "split_one", "quarter")
}


class _Waiting(NamedTuple):
    """A launch's partial sums, which are of so many fibers, and the factors' gradients, which they are to become."""

    launch: kron_backward.Backward
    partials: Tensor
    grads: Sequence[Tensor]
    fibers: int


def boundary(x: Tensor, factors: Sequence[Tensor], added: bool) -> int:
    """After how many steps the forward shall keep what it has for the backward, or 0. `added`: with a bias or a residual."""
    launches = () if any(w.ndim == 3 for w in factors) else _keeping(*kron_v4.problem(x, factors, added))
    return len(launches[0].group.steps) if launches else 0


@cached(2048)
def _keeping(
    sizes: Sizes, rows: int, dtype: torch.dtype, device: int, tensor: bool, aligned: int, added: bool
) -> tuple[kron_v4.Prepared, ...]:
    """The forward cut where the backward is, if that is in two parts, so that nothing is multiplied anew; none where it were slower, or
    where the last part is in steps whose result the first cannot turn into dx where it is: with what is kept more than x and y."""
    target, planned = target_of(dtype, device, tensor, aligned, rows), planned_rows(rows)
    plan = kron_backward.backwards(sizes, planned, target)
    if len(plan) != 2 or kron_backward.better_swapped(plan):
        return ()
    if not plan[1].template and not (plan[0].template and plan[0].in_place):
        return ()
    if groups.rows_at_once([b.steps for b in plan], rows, dtype.itemsize) < rows:
        return ()
    first, last = (groups.fastest(b.steps, planned, t) for b, t in zip(plan, (target, target._replace(aligned=16)), strict=True))
    if first is None or last is None:
        return ()
    whole = kron_v4.of_layer(sizes, planned, target, dtype)
    anew = sum(group.us for group in groups.groups(sizes, planned, target, len(plan[0].steps)))
    two = first.us + last.us
    if two + (groups.between(two) if len(whole) == 1 else 0.0) > sum(group.us for group in whole) + anew:
        return ()
    return kron_v4.prepare(first, rows, dtype, device), kron_v4.prepare(last, rows, dtype, device, added)


def forward_keeping(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> tuple[Tensor, Tensor]:
    """The forward where there is a boundary, and what is there."""
    return kron_v4.through(_keeping(*kron_v4.problem(x, factors, kron_v4.adds(epilogue))), x, factors, epilogue)


def backward(
    x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float, kept: Tensor | None = None, at: int = 0
) -> list[Tensor | None]:
    """dx alone is the layer of the transposed factors. With a factor's gradient it is kron_chain's, but what went into each launch is
    multiplied anew from x, in few launches, unless it was kept after that many steps. Besides dx no more than one array of the layer's
    inputs and outputs exists at one time, two where a launch does not write over what it takes."""
    if not any(wanted[1:]):
        return [kron_v4.forward(g, [w.mT for w in factors], (scale, None, None)), *[None] * len(factors)]
    if any(w.ndim == 3 for w in factors):
        return v3.backward(x, g, factors, wanted, scale)
    order, h = derivatives.plan(factors), g
    found: list[Tensor | None] = [None] * len(wanted)
    n, plan = len(order), plan_of(x, g, factors)
    waiting: list[_Waiting] = []

    def came(n: int) -> Tensor:
        """What went into step n."""
        if planning() and n:  # calls that keep it and calls with too many rows to keep it
            kron_v4.forward(x, factors, PLAIN, n)
        return x if not n else kept if kept is not None and n == at else kron_v4.forward(x, factors, PLAIN, n)

    if kept is None and all(wanted) and kron_backward.better_swapped(plan):
        return _swapped(plan, x, g, factors, scale, found)
    for launch in reversed(plan):
        n -= len(launch.steps)
        own = [s.factor for s in launch.steps]
        if launch.template and all(wanted[i + 1] for i in own):
            more = _blocks(launch, x)[1] * 4 * sum(factors[i].numel() for i in own)
            if sum(w.partials.nbytes for w in waiting) + more > x.nbytes // 2:  # of few rows: one launch's alone may be as many as x
                _sum(waiting, scale)
            z = came(n)
            out = z if z is not x and z is not kept else h.view_as(z) if h is not g and launch.in_place else None
            h = _launched(launch, z, h, out, factors, found, 1.0 if n else scale, waiting)
            del z, out
        else:
            h = _in_steps(launch.steps, n, came, h, factors, wanted, scale, found)
        if not wanted[0] and not any(wanted[earlier.factor + 1] for earlier in order[:n]):
            break
    else:
        found[0] = h.reshape(x.shape)
    _sum(waiting, scale)
    return found


def _swapped(
    plan: Sequence[kron_backward.Backward], x: Tensor, g: Tensor, factors: Sequence[Tensor], scale: float, found: list[Tensor | None]
) -> list[Tensor | None]:
    """The backward of two factors whose second has a fused launch. Mode products commute, so g goes back through the first one first: that
    makes what the fused launch takes, and it is the small second one that g is multiplied by anew."""
    (first,), (second,) = (launch.steps for launch in plan)
    large, small = factors[first.factor][None], factors[second.factor][None]
    h = kron_v4.mode(derivatives.seen(g, large, first.q, first.right), large.mT, 1.0, len(x))
    found[0] = fused(plan[1], x, h, None, factors, found, scale, scale)
    del h
    h = kron_v4.mode(derivatives.seen(g, small, second.q, second.right), small.mT, 1.0, len(x))
    z, h = derivatives.seen(x, large, first.p, first.right), derivatives.seen(h, large, first.q, first.right)
    found[first.factor + 1] = contraction(z, h, scale, len(x))[0]
    return found


def plan_of(x: Tensor, g: Tensor, factors: Sequence[Tensor]) -> tuple[kron_backward.Backward, ...]:
    return kron_backward.backwards(tuple([tuple(w.shape) for w in factors]), planned_rows(x.shape[0]), _target(x, g))


def _target(x: Tensor, g: Tensor) -> Problem:
    return target_of(x.dtype, x.get_device(), on_tensor_cores(x.dtype), gcd(x.data_ptr(), g.data_ptr(), 16), x.shape[0])


def fused(
    launch: kron_backward.Backward, z: Tensor, h: Tensor, out: Tensor | None, factors: Sequence[Tensor], found: list[Tensor | None],
    scale: float, factors_scale: float,
) -> Tensor:  # fmt: skip
    """The gradients of a launch's factors, put into `found`, and scale times what goes back, in `out`, perhaps z or h, or a new tensor."""
    waiting: list[_Waiting] = []
    back = _launched(launch, z, h, out, factors, found, scale, waiting)
    _sum(waiting, factors_scale)
    return back


def _launched(
    launch: kron_backward.Backward, z: Tensor, h: Tensor, out: Tensor | None, factors: Sequence[Tensor], found: list[Tensor | None],
    scale: float, waiting: list[_Waiting],
) -> Tensor:  # fmt: skip
    """The same, but its partial sums wait to be added up, with other launches' at once."""
    out = torch.empty_like(z) if out is None else out
    ws = [factors[s.factor] for s in launch.steps]
    grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in ws]
    device, (blocks, sums) = z.get_device(), _blocks(launch, z)
    partials = torch.empty((sums, sum(w.numel() for w in ws)), dtype=torch.float32, device=z.device)
    strides = [n for w in ws for n in w.stride()]
    none = (0,) * (groups.MOST - len(ws)) if launch.kernel == "group" else ()
    fibers = z.shape[0] * launch.steps[-1].left
    run = _FUSED[launch.kernel][z.dtype, launch.template].on(device)
    geometry, shared = ((blocks, 1, 1), (launch.threads, 1, 1)), backend.spread(launch.shared, blocks, device)
    if launch.kernel == "quarter":
        first, rows = quarter.first_rows(fibers, z.itemsize), [t.view(fibers, -1) for t in (out, z, h)]
        run(*geometry, shared, *pointers(partials, *rows, *ws), 0, *strides, scale)
        if first < fibers:
            grid = quarter.BLOCKS * (fibers - first), 1, 1
            run(grid, geometry[1], shared, *pointers(partials, *[t[first:] for t in rows], *ws), 1, *strides, scale)
        fibers = first
    else:
        run(*geometry, shared, *pointers(partials, out, z, h, *ws), *none, fibers, *strides, *none, *none, scale)
    waiting.append(_Waiting(launch, partials, grads, fibers))
    for s, grad in zip(launch.steps, grads, strict=True):
        found[s.factor + 1] = grad
    return out


def _blocks(launch: kron_backward.Backward, z: Tensor) -> tuple[int, int]:
    """The thread blocks and the partial sums of a launch whose input is z."""
    fibers = z.shape[0] * launch.steps[-1].left
    if launch.kernel == "quarter":
        return quarter.BLOCKS * quarter.first_rows(fibers, z.itemsize), quarter.partial_sums(fibers, z.itemsize)
    blocks = launch.blocks(fibers, z.nbytes, device_of(z.get_device()).sms)
    return blocks, blocks


def _sum(waiting: list[_Waiting], scale: float) -> None:
    """scale times the sums of all partial sums, to the factors' gradients; nothing waits any more."""
    parts: dict[int, list[tuple[Tensor, int, int]]] = {}  # a gradient, where its first partial sum is, and how far the next one is
    for launch, partials, grads, fibers in waiting:
        if launch.kernel == "quarter":
            run = _QUARTER_SUM[grads[0].dtype, launch.template].on(partials.get_device())
            shared = backend.spread(0, 256, partials.get_device())
            run((256, 1, 1), (32, 16, 1), shared, *pointers(*grads), partials.data_ptr(), fibers, scale)
            continue
        at = 0
        for grad in grads:
            parts.setdefault(len(partials), []).append((grad, partials.data_ptr() + 4 * at, partials.shape[1]))
            at += grad.numel()
    for pieces, those in parts.items():
        for first in range(0, len(those), groups.MOST):
            _sum_of_pieces(pieces, those[first : first + groups.MOST], scale)
    waiting.clear()


def _sum_of_pieces(pieces: int, parts: Sequence[tuple[Tensor, int, int]], scale: float) -> None:
    grads, places, rows = zip(*parts, strict=True)
    device, counts, unused = grads[0].get_device(), [grad.numel() for grad in grads], (0,) * (groups.MOST - len(grads))
    blocks = -(-sum(counts) // 32)
    warps = 8 if blocks > 2 * device_of(device).sms else 32
    if planning():
        _V4_SUM[grads[0].dtype, 40 - warps].on(device)
    _V4_SUM[grads[0].dtype, warps].on(device)(
        (blocks, 1, 1), (32, warps, 1), backend.spread(0, blocks, device), *pointers(*grads), *unused, *places, *unused, *counts,
        *unused, *rows, *unused, pieces, scale,
    )  # fmt: skip


def _in_steps(
    run: Sequence[Step], n: int, came: Callable[[int], Tensor], h: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool],
    scale: float, found: list[Tensor | None],
) -> Tensor:  # fmt: skip
    """The same by launches for each thing and for each of the steps, of which the first is step n, and for the wanted gradients alone."""
    rows = h.numel() // (run[-1].left * run[-1].q * run[-1].right)
    for at, s in reversed(list(enumerate(run, n))):
        w = factors[s.factor][None]
        h = derivatives.seen(h, w, s.q, s.right)
        if wanted[s.factor + 1]:
            found[s.factor + 1] = contraction(derivatives.seen(came(at), w, s.p, s.right), h, scale, rows)[0]
        h = kron_v4.mode(h, w.mT, 1.0 if at else scale, rows)
    return h


def contraction(z: Tensor, h: Tensor, scale: float, rows: int | None = None) -> Tensor:
    """contraction by v4's kernel, of one sample. `rows`: of the layer, if z has more for the factors to the left."""
    _, A, p, C = z.shape
    if not A * C:
        return v3.contraction(z, h, scale)
    device, kind = z.get_device(), wide(z.dtype)
    target = target_of(z.dtype, device, on_tensor_cores(z.dtype), gcd(z.data_ptr(), h.data_ptr(), 16))
    planned = A // (rows or A) * planned_rows(rows or A)
    plan = gradient(planned, p, h.shape[2], C, target)
    if cublas.better_gradient(planned, p, h.shape[2], C, target, plan.us):
        return cublas.contraction(z[0], h[0], scale)[None]
    pieces = plan.pieces(A, C)
    partials = torch.empty((1, pieces, p, h.shape[2]), dtype=kind, device=z.device)
    launch = _V4_BWD[z.dtype, kind, plan.template].on(device)
    geometry = (pieces * plan.tiles, 1, 1), (plan.threads, 1, 1), backend.spread(plan.shared, pieces * plan.tiles, device)
    launch(*geometry, *pointers(partials, z, h), A, C, pieces)
    return v3.sum_pieces(partials, z.dtype, scale)


def instances(dtype: torch.dtype) -> list[Kernel]:
    target = target_of(dtype, backend.SIMULATED, on_tensor_cores(dtype), 16)
    gradients = [gradient(64, f, f, C, target).template for f, C in ((8, 64), (64, 1))]
    made = [_V4_BWD[dtype, wide(dtype), one] for one in gradients]
    if dtype.itemsize <= 4:
        older = target._replace(device=target.device._replace(capability=80, shared_bytes=161 << 10))  # without features of sm_90 alone
        launches = [launch for f, n in COMMON for launch in kron_backward.backwards(((f, f),) * n, 64, older)]
        made += [
            *[_FUSED["group"][dtype, launch.template] for launch in launches if launch.template],
            *[_V4_SUM[dtype, warps] for warps in (8, 32)],
        ]
    return made
