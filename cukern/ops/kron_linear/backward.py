"""v4 of kron_linear, backward. A launch computes the gradients of one or two neighbouring factors, and that
of its input, where planner.py plans it so. Other factors have separate launches for the two gradients."""

import struct
from collections.abc import Sequence
from math import ceil, gcd

import torch
from torch import Tensor

from cukern.ops.kron_linear import cublas, planner, wgmma
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear.forward import KERNELS, on_tensor_cores, target_of
from cukern.ops.kron_linear.plan import MOST, Launch, Step, blocks_of, planned_rows, steps_of
from cukern.ops.kron_linear.reference import PLAIN, Epilogue, Factors, Found, Maybe, Wanted, seen
from cukern.ops.kron_linear.tile_backward import gradient, gradient_of
from cukern.runtime.device import device_of
from cukern.runtime.launch import backend, driver
from cukern.runtime.launch.kernel import Kernel, planning
from cukern.runtime.recording import packed
from cukern.runtime.tensors import pointers

COMMON = (8, 3), (64, 2)  # factors' size and number, of plans to be compiled where no input is known

_PACK_PARTS = struct.Struct(f"{2 * MOST}Q{2 * MOST}i").pack  # Parts4 of kron_linear.cu


def boundary(problem: kron_forward.Key) -> int:
    """The number of steps after which the forward of a problem keeps an array for the backward, -1 if it is
    that of cublas.layer_forward, or 0 if there is none."""
    launches = _keeping(problem)
    return 0 if not launches else -1 if len(launches) == 1 else len(launches[0].group.steps)


def _keeping(problem: kron_forward.Key) -> tuple[kron_forward.Prepared, ...]:
    return kron_forward.plan_of_layer(*problem, count=0)[1]


def forward_keeping(x: Tensor, factors: Factors, epilogue: Epilogue, at: int) -> tuple[Tensor, Tensor]:
    """The forward of a layer with a boundary, and the array that is kept there."""
    if at < 0:
        return cublas.layer_forward(x, factors, epilogue)
    launches = _keeping(kron_forward.problem(x, factors, kron_forward.adds(epilogue)))
    if not launches or len(launches[0].group.steps) != at:  # a compiled graph planned with other settings
        return kron_forward.forward(x, factors, epilogue), kron_forward.forward(x, factors, PLAIN, at)
    return kron_forward.through(launches, x, factors, epilogue)


def backward(
    x: Tensor, g: Tensor, factors: Factors, wanted: Wanted, scale: float, kept: Maybe = None, at: int = 0
) -> Found:
    """The gradients of x and of the factors, None where not wanted. dx alone is the layer of the transposed
    factors. With gradients of factors it is the algorithm of cublas.v3_backward, but the input of each launch
    is computed again from x, in few launches, unless it was kept after `at` steps. Besides dx, at most one
    array of the size of x or y exists at a time, or two if a launch does not write over its input."""
    if not any(wanted[1:]):
        return [kron_forward.forward(g, [w.mT for w in factors], (scale, None, None)), *[None] * len(factors)]
    if any(w.ndim == 3 for w in factors):
        return cublas.v3_backward(x, g, factors, wanted, scale)
    plan = plan_of(x, g, factors)
    gradients = Gradients(x, factors, wanted, scale, kept, at)
    if at < 0 or plan[0].kernel == "cublas":  # `at`: plans may have changed since the forward
        return cublas.layer_backward(x, g, factors, wanted, scale, kept if at < 0 else None)
    gradients.through(plan, g)
    return gradients.found


def plan_of(x: Tensor, g: Tensor, factors: Factors) -> tuple[Launch, ...]:
    aligned = gcd(x.data_ptr(), g.data_ptr(), 16)
    target = target_of(x.dtype, x.get_device(), on_tensor_cores(x.dtype), aligned, x.shape[0])
    return planner.backward(tuple([tuple(w.shape) for w in factors]), planned_rows(x.shape[0]), target)


class Gradients:
    """The gradients of a layer's inputs as they are found, that of x first. Partial sums of the factors'
    gradients wait until one launch adds those of several launches. `kept`: the input of step `at`, if the
    forward kept it."""

    def __init__(self, x: Tensor, factors: Factors, wanted: Wanted, scale: float, kept: Maybe, at: int):
        self.x = x
        self.factors = factors
        self.wanted = wanted
        self.scale = scale
        self.kept = kept
        self.at = at
        self.found: Found = [None] * len(wanted)
        # launches, their partial sums, gradients and numbers of fibers
        self.waiting: list[tuple[Launch, Tensor, Factors, int]] = []

    def through(self, plan: Sequence[Launch], g: Tensor) -> None:
        """Make all launches, the last one first. g is the gradient of the output. A launch makes the
        gradients of all its factors, if one is wanted."""
        order = steps_of(self.factors)
        n = len(self.factors)
        h = g
        x = self.x
        wanted = self.wanted
        for launch in reversed(plan):
            n -= len(launch.steps)
            if launch.threads and any(wanted[s.factor + 1] for s in launch.steps):
                self._make_room(launch)
                z = self._input_of(n)
                free = z is not x and z is not self.kept
                over = h is not g and launch.in_place
                out = z if free else h.view_as(z) if over else None
                h = self.fused(launch, z, h, out, 1.0 if n else self.scale)
                del z, out
            else:
                h = self._in_steps(launch.steps, n, h)
            if not any((wanted[0], *(wanted[s.factor + 1] for s in order[:n]))):
                break
        self.found[0] = h.reshape(x.shape) if wanted[0] else None
        self.add_up()
        self.found = [grad if w else None for grad, w in zip(self.found, wanted, strict=True)]

    def fused(self, launch: Launch, z: Tensor, h: Tensor, out: Tensor | None, scale: float) -> Tensor:
        """Put the gradients of the launch's factors into `found`; add_up() completes them. Returns scale
        times the gradient of z, in `out`, which may be z or h, or in a new tensor."""
        out = torch.empty_like(z) if out is None else out
        ws = [self.factors[s.factor] for s in launch.steps]
        device = z.get_device()
        grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in ws]
        blocks, sums = _blocks(launch, z)
        partials = torch.empty((sums, _elements(launch)), dtype=torch.float32, device=z.device)
        fibers = z.shape[0] * launch.steps[-1].left
        values = kron_forward.by_value(ws)
        run = KERNELS[f"{launch.kernel}_bwd"][z.dtype, launch.template()].on(device)
        if launch.kernel == "few_rows":
            first = wgmma.few_first_rows(fibers, z.itemsize)
            rows = [t.view(fibers, -1) for t in (out, z, h)]
            for second, own in enumerate((slice(first), slice(first, fibers))):
                if own.start != fibers:
                    geometry = kron_forward.geometry(wgmma.FEW_BLOCKS * len(rows[0][own]), launch, device)
                    run(*geometry, *pointers(partials, *[t[own] for t in rows]), values, second, scale)
            fibers = first
        else:
            geometry = kron_forward.geometry(blocks, launch, device)
            run(*geometry, *pointers(partials, out, z, h), values, fibers, scale)
        self.waiting.append((launch, partials, grads, fibers))
        for s, grad in zip(launch.steps, grads, strict=True):
            self.found[s.factor + 1] = grad
        return out

    def add_up(self) -> None:
        """Set the factors' gradients to scale times the sums of all waiting partial sums."""
        # By the number of partial sums: gradient, address of its first partial sum, distance to the next.
        parts: dict[int, list[tuple[Tensor, int, int]]] = {}
        for launch, partials, grads, fibers in self.waiting:
            if launch.kernel == "few_rows":
                run = KERNELS["few_rows_sum"][grads[0].dtype, launch.template()]
                device = partials.get_device()
                values = *pointers(*grads), partials.data_ptr(), fibers, self.scale
                run.on(device)((256, 1, 1), (32, 16, 1), driver.spread(0, 256, device), *values)
                continue
            at = partials.data_ptr()
            for grad in grads:
                parts.setdefault(len(partials), []).append((grad, at, partials.shape[1]))
                at += 4 * grad.numel()
        for pieces, those in parts.items():
            for first in range(0, len(those), MOST):
                _sum_of_pieces(pieces, those[first : first + MOST], self.scale)
        self.waiting.clear()

    def _make_room(self, launch: Launch) -> None:
        """Add up the waiting partial sums if, with those of the next launch, they would take more than half
        of the memory of x. For few rows those of one launch may take as much as x."""
        more = _blocks(launch, self.x)[1] * 4 * _elements(launch)
        if sum(partials.nbytes for _, partials, _, _ in self.waiting) + more > self.x.nbytes // 2:
            self.add_up()

    def _input_of(self, n: int) -> Tensor:
        """The input of step n."""
        if not n:
            return self.x
        # Planning includes calls with too many rows to keep it.
        if self.kept is not None and n == self.at and not planning():
            return self.kept
        return kron_forward.forward(self.x, self.factors, PLAIN, n)

    def _in_steps(self, run: Sequence[Step], n: int, h: Tensor) -> Tensor:
        """As `fused`, by launches for each step and each wanted gradient. n: the number of the first step."""
        for at, s in reversed(list(enumerate(run, n))):
            w = self.factors[s.factor][None]
            rows = h.numel() // (s.left * s.q * s.right)
            h = seen(h, w, s.q, s.right)
            if self.wanted[s.factor + 1]:
                z = seen(self._input_of(at), w, s.p, s.right)
                self.found[s.factor + 1] = contraction(z, h, self.scale, rows)
            h = kron_forward.mode(h, w.mT, 1.0 if at else self.scale, rows)
        return h


def _elements(launch: Launch) -> int:
    """Elements of the factors of a launch, and of their gradients."""
    return sum(s.p * s.q for s in launch.steps)


def _blocks(launch: Launch, z: Tensor) -> tuple[int, int]:
    """The thread blocks and the partial sums of a launch whose input is z."""
    fibers = z.shape[0] * launch.steps[-1].left
    if launch.kernel == "few_rows":
        first = wgmma.few_first_rows(fibers, z.itemsize)
        return wgmma.FEW_BLOCKS * first, ceil(wgmma.FEW_SUMS * first)
    tiles = ceil(fibers / launch.L) * ceil(launch.steps[0].right / launch.R)
    sms = device_of(z.get_device()).sms
    blocks = blocks_of(tiles, sms * launch.blocks, z.nbytes, _elements(launch), sms)
    return blocks, blocks


def _sum_of_pieces(pieces: int, parts: Sequence[tuple[Tensor, int, int]], scale: float) -> None:
    grads, places, rows = zip(*parts, strict=True)
    device = grads[0].get_device()
    counts = [grad.numel() for grad in grads]
    unused = (0,) * (MOST - len(grads))
    blocks = -(-sum(counts) // 32)
    warps = 8 if blocks > 2 * device_of(device).sms else 32
    kernel = KERNELS["sum"]
    shared = driver.spread(0, blocks, device)
    if planning():
        kernel[grads[0].dtype, 40 - warps].on(device)
    fields = *pointers(*grads), *unused, *places, *unused, *counts, *unused, *rows, *unused
    by_value = packed(_PACK_PARTS, *fields)
    kernel[grads[0].dtype, warps].on(device)((blocks, 1, 1), (32, warps, 1), shared, by_value, pieces, scale)


def contraction(z: Tensor, h: Tensor, scale: float, rows: int | None = None) -> Tensor:
    """As cublas.contraction, by v4's kernel where that is faster, of one sample. `rows`: rows of the layer,
    if z [A][p][C] has more because there are factors to the left."""
    _, A, p, C = z.shape
    if not A * C:
        return cublas.contraction(z, h, scale)[0]
    device = z.get_device()
    q = h.shape[2]
    target = target_of(z.dtype, device, on_tensor_cores(z.dtype), gcd(z.data_ptr(), h.data_ptr(), 16))
    launch = gradient_of(A // (rows or A) * planned_rows(rows or A), p, q, C, target)
    if not launch.threads:
        return cublas.contraction(z, h, scale)[0]
    chunks = ceil(A / launch.L) * ceil(C / launch.R)
    sms = device_of(device).sms
    pieces = min(chunks, max(1, sms * launch.blocks // launch.slices))
    grad = torch.empty((p, q), dtype=z.dtype, device=z.device)
    partials = torch.empty((pieces, p, q), dtype=torch.float32, device=z.device)
    geometry = kron_forward.geometry(pieces * launch.slices, launch, device)
    run = KERNELS["gradient"][z.dtype, launch.template()].on(device)
    run(*geometry, *pointers(partials, z, h), A, C, pieces)
    _sum_of_pieces(pieces, [(grad, partials.data_ptr(), p * q)], scale)
    return grad


def instances(dtype: torch.dtype) -> list[Kernel]:
    """The kernels of the forward and the backward that every GPU has: without features of sm_90 alone."""
    target = target_of(dtype, backend.SIMULATED, on_tensor_cores(dtype), 16)
    target = target._replace(device=target.device._replace(capability=80, shared_bytes=161 << 10))
    layers = [((f, f),) * n for f, n in COMMON]
    found = [(launch.kernel, launch) for sizes in layers for launch in planner.forward(sizes, 64, target)]
    found += [(f"{launch.kernel}_bwd", launch) for s in layers for launch in planner.backward(s, 64, target)]
    gradients = gradient(64, 8, 8, 64, target), gradient(64, 64, 64, 1, target)
    found += [("gradient", one) for one in gradients if one]
    made = [KERNELS[kernel][dtype, launch.template()] for kernel, launch in found if launch.threads]
    return made + [KERNELS["sum"][dtype, warps] for warps in (8, 32) if dtype.itemsize <= 4]
