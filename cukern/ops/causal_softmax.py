"""causal_softmax: the softmax of attention scores, each query over the keys up to its own, and its gradient.

    y_j = exp(scale x_j) / (sum_seen exp(scale x) + exp(sink)),  0 for keys that are not seen
    dx = scale y (g - sum(y g)),  dsink = -sum over rows of p sum(y g), where p = exp(sink) / (the same sum) is the sink's share

The sink is one more column of every row, whose share is written nowhere, as in gpt-oss; with logit 0 it is softmax's "off by one".
"""

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.softmax import LEAST_SCALE, MOST_SCALE, plan, row_storage, scale_of, two_versions, wide
from cukern.runtime import backend, checks, interop
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import (
    Cost,
    Differentiable,
    Op,
    Version,
    apply_of,
    batched,
    choose,
    raw_op,
    register,
    save,
    watched,
)


def causal_softmax(
    x: Any, *, scale: float = 1.0, window: int | None = None, sink: Any = None, version: str | tuple[str | None, str | None] | None = None
) -> Tensor:
    """softmax(scale x) of each query over the keys that it may see; 0 for the others, whatever they are.

    Args:
        x: (..., queries, keys), float16, bfloat16, float32 or float64: a tensor, or an array that speaks DLPack. Aligned at the last query
            and key: query i sees key j if j <= i + keys - queries. Rows whose columns lie side by side are read in place, if the leading
            dimensions can be flattened to one; anything else is copied once. 16-bit types are computed in float32 and rounded once.
        scale: a finite number that is not negative, such as 1 / sqrt(head_dim). The products scale x are those of real numbers, as in
            `softmax`: with a scale of 0 all keys that are finite count alike, and infinite ones are NaN.
        window: how many keys a query sees at most, the last being its own; None: no limit.
        sink: a logit that joins each row's sum and takes its share, not scaled: a number, or a tensor of a floating-point dtype that
            broadcasts to x's leading dimensions, as (heads,) for x (batch, heads, queries, keys), on x's device. It has a gradient.
            -inf is no sink; NaN and +inf make the keys that a row sees NaN.
        version: "v1" or "v2", or two of them, for forward and backward; by default the fastest.

    Returns a new contiguous tensor of x's shape and dtype. A row that sees no key, or none but -inf, is 0. NaN and +inf among the keys that
    a row sees make all of these NaN, as in torch.
    Autocast does not change the dtype: the op computes as if it were off.

    Raises TypeError for another dtype, and for an option of another type; ValueError for an x of less than two dimensions, a scale that is
    negative, not finite or too large, a window less than 1, a sink that does not fit, or an unknown version.
    """
    x = interop.to_torch("x", x)
    checks.dtype("x", x, checks.FLOATS)
    forward, backward = two_versions(VERSIONS, "causal_softmax", x, version)
    if x.ndim < 2:
        raise ValueError(f"x must be (..., queries, keys), got {tuple(x.shape)}")
    scale = scale_of(x, scale)
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale!r}")
    if window is not None:
        window = min(checks.integer("window", window, 1), 1 << 62)
    sink = None if sink is None else _sinks(x, sink)
    if not x.is_cuda and not backend.simulates(x):
        return reference(x, scale, window, sink)
    matrices = math.prod(x.shape[:-2])
    sinks = None if sink is None else sink.double().expand(x.shape[:-2]).reshape(matrices)
    scores = _side_by_side(x if x.ndim == 3 else x.reshape(matrices, *x.shape[-2:]))
    y = _run(scores, sinks, scale, window or 1 << 62, forward, backward)
    return y.view(x.shape)


def _sinks(x: Tensor, sink: Any) -> Tensor:
    """The sink as a tensor, once it is known to broadcast to x's leading dimensions."""
    if not isinstance(sink, Tensor) and isinstance(sink, numbers.Real):
        if isinstance(sink, bool) or (sink == sink and abs(sink) != math.inf):
            sink = checks.number("sink", sink)
        sink = torch.full((), sink, dtype=torch.float64, device=x.device)
    sink = interop.to_torch("sink", sink)
    checks.dtype("sink", sink, checks.FLOATS)
    if sink.device != x.device:
        raise ValueError(f"sink is on {sink.device}, x is on {x.device}: they must be on one device")
    leading = x.shape[:-2]
    if sink.ndim > len(leading) or any(s not in (1, n) for s, n in zip(reversed(sink.shape), reversed(leading), strict=False)):
        raise ValueError(f"sink has shape {tuple(sink.shape)}, it must broadcast to x's leading dimensions, {tuple(leading)}")
    return sink


def reference(x: Tensor, scale: float = 1.0, window: int | None = None, sink: Tensor | None = None) -> Tensor:
    """The same by torch's operations; a sink broadcasts to x's leading dimensions."""
    scores, column, hidden = _logits(x, scale, window, sink)
    if column is not None:
        scores = torch.cat((scores, column), -1)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    y = torch.softmax(scores.masked_fill(nothing, 0.0), -1)[..., : x.shape[-1]]
    return y.masked_fill(hidden | nothing, 0.0).to(x.dtype)


def _logits(x: Tensor, scale: float, window: int | None, sink: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """scale x and the sink, less each row's largest scale x, -inf for the keys that are not seen; and which these are. In float64, unless x
    is as good. The largest is subtracted first, and by halves, so that nothing overflows."""
    queries, keys = x.shape[-2:]
    last = torch.arange(queries, device=x.device)[:, None] + keys - queries
    key = torch.arange(keys, device=x.device)
    hidden = key > last if window is None else (key > last) | (key <= last - window)
    half = (x.to(wide(x) if scale == 1 and sink is None else torch.float64) * 0.5).masked_fill(hidden, -math.inf)
    top = half.detach().amax(-1, keepdim=True) if keys else half.new_zeros(*x.shape[:-1], 1)
    top = top.masked_fill(top == -math.inf, 0.0)
    scores = ((half - top) * scale * 2).masked_fill(hidden, -math.inf)
    most = torch.finfo(torch.float64).max
    return scores, None if sink is None else sink.double()[..., None, None] - (top * scale * 2).clamp(-most, most), hidden


# ---- autograd: x is (matrices, queries, keys), sinks (matrices) in float64; `share` is the sinks' share of each row


def _run(x: Tensor, sinks: Tensor | None, scale: float, window: int, forward: str, backward: str) -> Tensor:
    if watched(x, sinks):
        return _apply(x, sinks, scale, window, forward, backward)[0]
    return _causal_softmax(x, sinks, scale, window, forward)[0]


class _CausalSoftmax(Differentiable):
    @staticmethod
    def forward(x, sinks, scale, window, forward, backward):
        return _causal_softmax(x, sinks, scale, window, forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, sinks, scale, window, _, backward = inputs
        ctx.rest, ctx.sinks = (scale, window, backward), sinks is not None
        save(ctx, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, share_grad):
        y, share = ctx.saved_tensors
        g = torch.zeros_like(y) if g is None else g
        dx, dsink = _gradient(y, g, share if ctx.sinks else None, share_grad if ctx.sinks else None, *ctx.rest)
        return dx, dsink.sum(1) if ctx.sinks else None, None, None, None, None

    @staticmethod
    def tangent(ctx, dx, dsinks, *_):
        """The Jacobian of a row and its sink's share is symmetric, but for the scale: its product with dx is that with a gradient."""
        y, share = ctx.saved_tensors
        dx = torch.zeros_like(y) if dx is None else dx
        out, dshare = _gradient(y, dx, share if ctx.sinks else None, None, *ctx.rest)
        dshare = ctx.rest[0] * dshare
        if dsinks is not None:
            change = share * dsinks[:, None]
            out = (out.to(wide(y)) - y * change[..., None].to(wide(y))).to(y.dtype)
            dshare = dshare + (1 - share) * change
        return out, dshare

    @staticmethod
    def batch(info, in_dims, x, sinks, *rest):
        return _batch(_apply, info.batch_size, in_dims, (x, sinks), sinks is not None, rest)

    @staticmethod
    def recorded(ctx, x, sinks, scale, window, forward, backward):
        y, share = _causal_softmax(x, sinks, scale, window, forward)
        ctx.save_for_backward(y, share)
        ctx.rest, ctx.sinks = (scale, window, backward), sinks is not None
        ctx.set_materialize_grads(False)
        return y, share


class _CausalSoftmaxBackward(Differentiable):
    @staticmethod
    def forward(y, g, share, share_grad, scale, window, version):
        return _causal_softmax_backward(y, g, share, share_grad, scale, window, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[4]
        save(ctx, *inputs[:4])

    @staticmethod
    def backward(ctx, d, e):
        """By torch's operations, so that they can be differentiated again. d, e: the gradients of dx and of the sinks' gradients."""
        (y, g, share, share_grad), scale = ctx.saved_tensors, ctx.scale
        wide_y, wide_g, wide_d = (t.to(wide(t)) for t in (y, g, d))
        total, dot = (wide_y * wide_g).sum(-1, keepdim=True), scale * (wide_d * wide_y).sum(-1, keepdim=True)
        dshare = dshare_grad = None
        if share is not None:
            p, h = share[..., None], 0.0 if share_grad is None else share_grad[..., None]
            total, dot = total + p * h, dot + p * e[..., None]
            dshare = (e[..., None] * (h - total) - dot * h).squeeze(-1)
            dshare_grad = None if share_grad is None else (p * (e[..., None] - dot)).squeeze(-1)
        dy = scale * wide_d * (wide_g - total) - dot * wide_g
        dg = wide_y * (scale * wide_d - dot)
        return dy.to(y.dtype), dg.to(g.dtype), dshare, dshare_grad, None, None, None

    @staticmethod
    def tangent(ctx, dy, dg, dshare, dshare_grad, *_):
        y, g, share, share_grad = ctx.saved_tensors
        wide_y, wide_g, dy, dg = (t.to(wide(y)) for t in (y, g, dy, dg))
        total, change = (wide_y * wide_g).sum(-1), (dy * wide_g + wide_y * dg).sum(-1)
        dsink = y.new_zeros(0, 0, dtype=torch.float64)
        if share is not None:
            h, dh = (0.0, 0.0) if share_grad is None else (share_grad, dshare_grad)
            total, change = total + share * h, change + dshare * h + share * dh
            dsink = dshare * (h - total) + share * (dh - change)
        dx = ctx.scale * (dy * (wide_g - total[..., None]) + wide_y * (dg - change[..., None]))
        return dx.to(y.dtype), dsink

    @staticmethod
    def batch(info, in_dims, y, g, share, share_grad, *rest):
        return _batch(_apply_backward, info.batch_size, in_dims, (y, g, share, share_grad), share is not None, rest)


def _batch(
    apply: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any], sinks: bool, rest: Sequence[Any]
) -> tuple[Any, Any]:
    """The vmap rule of both: the batch joins the matrices. The second result is empty where there are no sinks."""
    every: list[Any] = [None if t is None else batched(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    out, rows = apply(*(None if t is None else t.flatten(0, 1) for t in every), *rest)
    shape = every[0].shape
    return (out.view(shape), rows.view(shape[:-1]) if sinks else rows), (0, 0 if sinks else None)


def _gradient(y: Tensor, g: Tensor, share: Tensor | None, share_grad: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    apply = _apply_backward if watched(y, g, share, share_grad) else _causal_softmax_backward
    return apply(y, g, share, share_grad, *rest)


_apply, _apply_backward = apply_of(_CausalSoftmax), apply_of(_CausalSoftmaxBackward)


def _launch(x: Tensor, sinks: Tensor | None, scale: float, window: int, version: str) -> tuple[Tensor, Tensor]:
    out, share = _fake(x, sinks)
    if not LEAST_SCALE <= scale <= MOST_SCALE and out.numel():
        scores, column, hidden = _logits(x, scale, window, sinks)  # each row as a matrix of its own
        column = None if column is None else column.view(-1)
        out, share = _launch(scores.view(-1, 1, x.shape[2]), column, 1.0, 1 << 62, version)
        out = out.view(x.shape).masked_fill_(hidden, 0.0)  # NaN where a key that is seen is NaN
        return out.to(x.dtype), share.view(x.shape[:2]) if sinks is not None else share
    if out.numel():
        x = _side_by_side(x)
        sinks = None if sinks is None else sinks.contiguous()
        pointers = (out.data_ptr(), _pointer(share), x.data_ptr(), _pointer(sinks))
        choose("causal_softmax", version, x.get_device()).forward(x, pointers, (*x.stride()[:2], window, scale))
    elif sinks is not None:
        share.fill_(1.0)  # rows without a column
    return out, share


def _launch_backward(
    y: Tensor, g: Tensor, share: Tensor | None, share_grad: Tensor | None, scale: float, window: int, version: str
) -> tuple[Tensor, Tensor]:
    dx, dsink = _fake(y, share)
    if not LEAST_SCALE <= scale <= MOST_SCALE and dx.numel() and y.dtype != torch.float64:
        dx, dsink = _launch_backward(y.double(), g.double(), share, share_grad, scale, window, version)
        return dx.to(y.dtype), dsink
    if dx.numel():
        y, g = y.contiguous(), _side_by_side(g.resolve_neg())
        share, share_grad = (None if t is None else t.contiguous() for t in (share, share_grad))
        pointers = (dx.data_ptr(), _pointer(dsink), y.data_ptr(), g.data_ptr(), _pointer(share), _pointer(share_grad))
        choose("causal_softmax", version, y.get_device()).backward(y, pointers, (*g.stride()[:2], window, scale))
    else:
        dsink.zero_()
    return dx, dsink


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None or not x.numel() else x.data_ptr()


def _fake(x: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """The result, and a number for each row where there are sinks."""
    rows = x.shape[:2] if sinks is not None else (0, 0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(rows, dtype=torch.float64, device=x.device)


_causal_softmax = raw_op(
    "_causal_softmax(Tensor x, Tensor? sinks, float scale, int window, str version) -> (Tensor, Tensor)", 2, _launch, _fake
)
_causal_softmax_backward = raw_op(
    "_causal_softmax_backward(Tensor y, Tensor g, Tensor? share, Tensor? share_grad, float scale, int window, str version) "
    "-> (Tensor, Tensor)",
    4,
    _launch_backward,
    lambda y, g, share, share_grad, scale, window, version: _fake(y, share),
)

# ---- the ladder: a rung launches on x's or y's memory with the kernel's pointers, and its numbers after the three sizes

WARP_BLOCK = 64  # threads of v2's blocks, where lanes of a warp share a row
Rung = Callable[[Tensor, tuple[int, ...], tuple[float, ...]], None]


def _block_a_row(template: Template) -> Rung:
    def launch(x: Tensor, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        matrices, queries, _ = x.shape
        grid = (min(matrices * queries, plan.MOST_BLOCKS), 1, 1)
        template[x.dtype].on(x.get_device())(grid, (plan.LOOP_THREADS, 1, 1), 0, *pointers, *x.shape, *numbers)

    return launch


def _held(warp: Template, block: Template, loop: Rung) -> Rung:
    backward = loop is _v1_bwd

    def launch(x: Tensor, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        (matrices, queries, keys), device, size = x.shape, x.get_device(), x.itemsize
        vectors, rows = plan.vectors_of(keys, size), matrices * queries
        begins = (*pointers[2:4], pointers[0]) if backward else (pointers[2], pointers[0])  # of y, g and dx; of x and out
        steps = keys, (matrices > 1) * int(numbers[0]), (queries > 1) * int(numbers[1])  # from row to row; of x's or g's matrices and rows
        exact = not any(n % plan.VECTOR_BYTES for n in (*begins, *(size * step for step in steps)))
        # The diagonal cuts vectors, so that there are edges.
        team = plan.warp_team(vectors, size, False, plan.WARP_VECTORS_CAUSAL[backward][size])
        if team and (blocks := -(-rows // (WARP_BLOCK // team.width))) <= plan.MOST_BLOCKS:
            key = _warp_key(x.dtype, team, exact)
            warp[key].on(device)((blocks, 1, 1), (WARP_BLOCK, 1, 1), 0, *pointers, *x.shape, *numbers, team.width)
        elif (shape := plan.block_shape(vectors, plan.SHAPES_CAUSAL[backward][size])) and rows <= plan.MOST_BLOCKS:
            key = _block_key(x.dtype, shape, exact)
            block[key].on(device)((rows, 1, 1), (shape.threads, 1, 1), 0, *pointers, *x.shape, *numbers)
        else:
            loop(x, pointers, numbers)

    return launch


def _warp_key(dtype: torch.dtype, team: plan.Team, exact: bool) -> tuple[Any, ...]:
    return dtype, *row_storage.warp_key(team), WARP_BLOCK, exact


def _block_key(dtype: torch.dtype, shape: plan.Shape, exact: bool) -> tuple[Any, ...]:
    return dtype, *shape, exact


_V1, _V1_BWD = (Template("softmax/causal_softmax.cu", f"causal_softmax_{name}") for name in ("v1", "v1_bwd"))
_V2, _V2_BWD, _V2_WARP, _V2_WARP_BWD = (
    Template("softmax/causal_softmax.cu", f"causal_softmax_{name}", pdl=True) for name in ("v2", "v2_bwd", "v2_warp", "v2_warp_bwd")
)
_v1, _v1_bwd = _block_a_row(_V1), _block_a_row(_V1_BWD)


def _v2_instances(dtype: torch.dtype) -> list[Kernel]:
    found = [_V1[dtype], _V1_BWD[dtype]]
    for backward, exact in itertools.product((False, True), repeat=2):
        warp, block = (_V2_WARP_BWD, _V2_BWD) if backward else (_V2_WARP, _V2)
        warps = [(dtype, *key, WARP_BLOCK, exact) for key in row_storage.warp_keys(plan.WARP_VECTORS_CAUSAL[backward][dtype.itemsize])]
        blocks = [_block_key(dtype, s, exact) for s in plan.SHAPES_CAUSAL[backward][dtype.itemsize]]
        found += [*(warp[key] for key in warps), *(block[key] for key in blocks)]
    return found


VERSIONS = {
    "v1": Version("a block a row, read twice", _v1, _v1_bwd, lambda dtype: [_V1[dtype], _V1_BWD[dtype]]),
    "v2": Version(
        "rows in registers",
        _held(_V2_WARP, _V2, _v1),
        _held(_V2_WARP_BWD, _V2_BWD, _v1_bwd),
        _v2_instances,
    ),
}

# ---- what the tools know


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    matrices, t = dims
    return (torch.randn(matrices, t, t, dtype=dtype, device=device),)


def _lengths(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lengths up to T around each threshold where another kernel is chosen, with and without rows of whole vectors."""
    return [dims, *[(1, t) for k in range(14) for n in (0, 1, 32, 33) if (t := (1 << k) + n) <= dims[1]]]


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    matrices, t = dims
    seen, all_ = matrices * t * (t + 1) // 2, matrices * t * t
    return {"fwd": Cost((seen + all_) * itemsize, 4 * seen), "bwd": Cost((2 * seen + all_) * itemsize, 4 * seen)}


def _masked_softmax(x: Tensor) -> Tensor:
    """What one writes in torch; here no row is fully masked."""
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax(x.masked_fill(hidden, -math.inf), -1)


def _magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y, g = _masked_softmax(*inputs), douts[0].abs()
    return y, y * (g + (y * g).sum(-1, keepdim=True))


register(
    Op(
        name="causal_softmax",
        stem="causal_softmax",
        variants=_lengths,
        function=causal_softmax,
        reference=_masked_softmax,
        versions=VERSIONS,
        dtypes=checks.FLOATS,
        dims="MATRICES T",
        check_dims=((1, 1), (3, 65), (2, 1000), (1, 4099), (5, 1024)),
        sim_dims=((1, 1), (2, 19), (1, 70)),
        bench_dims=((48, 1024), (48, 4096)),
        make=_make,
        inputs=("x",),
        cost=_cost,
        bound="memory",
        magnitude=_magnitude,
    )
)
