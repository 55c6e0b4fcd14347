"""causal_softmax: the softmax of attention scores, where each query sees the keys up to its own, and its
gradient.

    y_j = exp(scale x_j) / (sum over seen keys of exp(scale x) + exp(sink)), or 0 for keys that are not seen
    dx = scale y (g - sum(y g))
    dsink = -sum over rows of p sum(y g), where p = exp(sink) / (the same sum) is the sink's share

The sink is one more column of every row whose share is not written, as in gpt-oss; with logit 0 it is
"softmax off by one".
"""

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.softmax import (
    LEAST_SCALE,
    MOST_SCALE,
    Versions,
    checked_scale,
    plan,
    row_storage,
    two_versions,
)
from cukern.runtime import checks
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, batched, save, watched
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, Version, register
from cukern.runtime.tensors import wide

NO_WINDOW = 1 << 62
_autocast = torch.is_autocast_enabled  # of a GPU


@planned("x", "sink")
def causal_softmax(
    x: Any, *, scale: float = 1.0, window: int | None = None, sink: Any = None, version: Versions = None
) -> Tensor:
    """softmax(scale x) of each query over the keys that it sees, and 0 for the others. Differentiable any
    number of times.

        x = torch.randn(2, 16, 512, 512, device="cuda", requires_grad=True)  # (batch, heads, queries, keys)
        y = cukern.causal_softmax(x, scale=64**-0.5, sink=torch.zeros(16, device="cuda"))
        y.square().sum().backward()

    Args:
        x: (..., queries, keys), float16, bfloat16, float32 or float64: a tensor, or an array that supports
            DLPack. Query i sees key j if j <= i + keys - queries: the last query sees all keys.
        scale: a finite number, at least 0, such as 1 / sqrt(head_dim). With scale 0, all finite keys count
            equally.
        window: the most keys that a query sees, the last of which is its own; None: no limit.
        sink: an unscaled logit that takes a share of each row's sum. A number, or a tensor on x's device that
            broadcasts to x's leading dimensions, such as (heads,). It has a gradient. -inf means no sink; NaN
            and +inf make the keys that a row sees NaN.
        version: "v1" or "v2", or a pair of versions for forward and backward; default: the fastest.

    Returns a new contiguous tensor of x's shape and dtype. A row that sees no key, or only -inf, is 0. NaN or
    +inf among the keys that a row sees make all of these NaN. Autocast: as in `softmax`.

    Raises TypeError for another dtype or an option of another type; ValueError for fewer than two dimensions
    or an option outside its range.
    Sinks: Xiao et al., arXiv 2309.17453.
    """
    x = interop.to_torch("x", x)
    checks.dtype("x", x, checks.FLOATS)
    if x.is_cuda and _autocast() and x.dtype.itemsize == 2:
        x = x.float()
    forward, backward = two_versions(VERSIONS, "causal_softmax", x, version)
    if x.ndim < 2:
        raise ValueError(f"x must be (..., queries, keys), got {tuple(x.shape)}")
    scale = checked_scale(x, scale)
    if scale < 0:
        raise ValueError(f"scale must not be negative, got {scale!r}")
    if window is not None:
        window = min(checks.integer("window", window, 1), NO_WINDOW)
    sink = None if sink is None else checked_sink(x, sink)
    if not x.is_cuda and not backend.simulates(x):
        return reference(x, scale, window, sink)
    matrices = math.prod(x.shape[:-2])
    sinks = None if sink is None else sink.double().expand(x.shape[:-2]).reshape(matrices)
    scores = _unit_key_stride(x if x.ndim == 3 else x.reshape(matrices, *x.shape[-2:]))
    if watched(scores, sinks):
        y, _ = _apply(scores, sinks, scale, window or NO_WINDOW, forward, backward)
    else:
        y, _ = raw_forward(scores, sinks, scale, window or NO_WINDOW, forward)
    return y.view(x.shape)


def checked_sink(x: Tensor, sink: Any) -> Tensor:
    """The sink as a tensor that broadcasts to x's leading dimensions."""
    if not isinstance(sink, Tensor) and isinstance(sink, numbers.Real):
        if isinstance(sink, bool) or (sink == sink and abs(sink) != math.inf):
            sink = checks.number("sink", sink)
        sink = torch.full((), sink, dtype=torch.float64, device=x.device)
    sink = interop.to_torch("sink", sink)
    checks.dtype("sink", sink, checks.FLOATS)
    checks.one_device(x=x, sink=sink)
    leading = x.shape[:-2]
    if sink.ndim > len(leading) or any(
        s not in (1, n) for s, n in zip(reversed(sink.shape), reversed(leading), strict=False)
    ):
        raise ValueError(
            f"sink has shape {tuple(sink.shape)}, it must broadcast to x's leading dimensions, "
            f"{tuple(leading)}"
        )
    return sink


def reference(x: Tensor, scale: float = 1.0, window: int | None = None, sink: Tensor | None = None) -> Tensor:
    """`causal_softmax` in torch's operations."""
    scores, sink_column, hidden = _logits(x, scale, window, sink)
    if sink_column is not None:
        scores = torch.cat((scores, sink_column), -1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    y = torch.softmax(scores.masked_fill(empty, 0.0), -1)[..., : x.shape[-1]]
    return y.masked_fill(hidden | empty, 0.0).to(x.dtype)


def _logits(
    x: Tensor, scale: float, window: int | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(scale * x, sink, hidden). Each row's largest scale * x is subtracted from the first two, and keys that
    are hidden are -inf. Computed in float64 unless x's own precision gives the same. Halves are subtracted
    before they are scaled, so that nothing overflows."""
    queries, keys = x.shape[-2:]
    last = torch.arange(queries, dtype=torch.int64, device=x.device)[:, None] + keys - queries
    key = torch.arange(keys, dtype=torch.int64, device=x.device)
    hidden = key > last if window is None else (key > last) | (key <= last - window)
    half = (x.to(wide(x.dtype) if scale == 1 and sink is None else torch.float64) * 0.5).masked_fill(
        hidden, -math.inf
    )
    top = half.detach().amax(-1, keepdim=True) if keys else half.new_zeros(*x.shape[:-1], 1)
    top = top.masked_fill(top == -math.inf, 0.0)
    scores = ((half - top) * scale * 2).masked_fill(hidden, -math.inf)
    most = torch.finfo(torch.float64).max
    return (
        scores,
        None if sink is None else sink.double()[..., None, None] - (top * scale * 2).clamp(-most, most),
        hidden,
    )


# ---- the raw ops: x is (matrices, queries, keys), sinks (matrices) in float64; `share` is the sink's share
# of each row


def _launch(
    x: Tensor, sinks: Tensor | None, scale: float, window: int, version: str
) -> tuple[Tensor, Tensor]:
    out, share = _fake(x, sinks)
    if not LEAST_SCALE <= scale <= MOST_SCALE and out.numel():
        scores, column, hidden = _logits(x, scale, window, sinks)  # each row becomes a matrix with one query
        column = None if column is None else column.view(-1)
        out, share = _launch(scores.view(-1, 1, x.shape[2]), column, 1.0, NO_WINDOW, version)
        out = out.view(x.shape).masked_fill_(hidden, 0.0)  # NaN if a key that the row sees is NaN
        return out.to(x.dtype), share.view(x.shape[:2]) if sinks is not None else share
    if out.numel():
        x = _unit_key_stride(x)
        sinks = None if sinks is None else sinks.contiguous()
        launch = _FORWARD[choose("causal_softmax", version, x.get_device()).forward]
        launch(x, _pointers(out, share, x, sinks), (*x.stride()[:2], window, scale))
    elif sinks is not None:
        share.fill_(1.0)  # rows without keys
    return out, share


def _launch_backward(
    y: Tensor, g: Tensor, share: Tensor | None, share_grad: Tensor | None, scale: float, window: int,
    version: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dsink = _fake(y, share)
    if not LEAST_SCALE <= scale <= MOST_SCALE and dx.numel() and y.dtype != torch.float64:
        dx, dsink = _launch_backward(y.double(), g.double(), share, share_grad, scale, window, version)
        return dx.to(y.dtype), dsink
    if dx.numel():
        y, g = y.contiguous(), _unit_key_stride(g.resolve_neg())
        share, share_grad = (None if t is None else t.contiguous() for t in (share, share_grad))
        pointers = _pointers(dx, dsink, y, g, share, share_grad)
        _BACKWARD[choose("causal_softmax", version, y.get_device()).backward](
            y, pointers, (*g.stride()[:2], window, scale)
        )
    else:
        dsink.zero_()
    return dx, dsink


def _unit_key_stride(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple([0 if x is None or not x.numel() else x.data_ptr() for x in tensors])


def _fake(x: Tensor, sinks: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    """The result, and one number for each row if there are sinks."""
    rows = x.shape[:2] if sinks is not None else (0, 0)
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(
        rows, dtype=torch.float64, device=x.device
    )


raw_forward = raw_op(
    "_causal_softmax(Tensor x, Tensor? sinks, float scale, int window, str version) -> (Tensor, Tensor)",
    2,
    _launch,
    _fake,
    sharding="b.., b -> b.., b.",
)
raw_backward = raw_op(
    "_causal_softmax_backward(Tensor y, Tensor g, Tensor? share, Tensor? share_grad, float scale, int "
    "window, str version) "
    "-> (Tensor, Tensor)",
    4,
    _launch_backward,
    lambda y, g, share, *_: _fake(y, share),
    sharding="b.., b.., b., b. -> b.., b.",
)

# ---- autograd


class _CausalSoftmax(Differentiable):
    @staticmethod
    def forward(x, sinks, scale, window, forward, backward):
        return raw_forward(x, sinks, scale, window, forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, sinks, scale, window, _, backward = inputs
        ctx.options, ctx.sinks = (scale, window, backward), sinks is not None
        save(ctx, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g, share_grad):
        y, share = ctx.saved_tensors
        g = torch.zeros_like(y) if g is None else g
        dx, dsink = _gradient(
            y, g, share if ctx.sinks else None, share_grad if ctx.sinks else None, *ctx.options
        )
        return dx, dsink.sum(1) if ctx.sinks else None, None, None, None, None

    @staticmethod
    def tangent(ctx, dx, dsinks, *_):
        """The Jacobian of a row and its sink's share is symmetric except for the scale, so the product with
        dx is that with a gradient."""
        y, share = ctx.saved_tensors
        dx = torch.zeros_like(y) if dx is None else dx
        out, dshare = _gradient(y, dx, share if ctx.sinks else None, None, *ctx.options)
        dshare = ctx.options[0] * dshare
        if dsinks is not None:
            change = share * dsinks[:, None]
            out = (out.to(wide(y.dtype)) - y * change[..., None].to(wide(y.dtype))).to(y.dtype)
            dshare = dshare + (1 - share) * change
        return out, dshare

    @staticmethod
    def batch(info, in_dims, x, sinks, *rest):
        return _batch(_apply, sinks is not None, rest, info, in_dims, x, sinks)


class _CausalSoftmaxBackward(Differentiable):
    @staticmethod
    def forward(y, g, share, share_grad, scale, window, version):
        return raw_backward(y, g, share, share_grad, scale, window, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[4]
        save(ctx, *inputs[:4])

    @staticmethod
    def backward(ctx, d, e):
        """In torch's operations, so that the result can be differentiated again. d, e: the gradients of dx
        and of the sinks' gradients."""
        (y, g, share, share_grad), scale = ctx.saved_tensors, ctx.scale
        wide_y, wide_g, wide_d = (t.to(wide(t.dtype)) for t in (y, g, d))
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
        wide_y, wide_g, dy, dg = (t.to(wide(y.dtype)) for t in (y, g, dy, dg))
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
        return _batch(_apply_backward, share is not None, rest, info, in_dims, y, g, share, share_grad)


def _batch(
    apply: Callable[..., Any],
    sinks: bool,
    rest: Sequence[Any],
    info: Any,
    in_dims: Sequence[int | None],
    *tensors: Any,
) -> tuple[Any, Any]:
    """The vmap rule of both Functions: the batch is merged into the first dimension. The second result is
    empty if there are no sinks."""
    full: list[Any] = [
        t if t is None else batched(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims, strict=False)
    ]
    shape = full[0].shape[:2]
    out, rows = apply(*(t if t is None else t.flatten(0, 1) for t in full), *rest)
    return (out.unflatten(0, shape), rows.unflatten(0, shape) if sinks else rows), (0, 0 if sinks else None)


def _gradient(
    y: Tensor, g: Tensor, share: Tensor | None, share_grad: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    apply = _apply_backward if watched(y, g, share, share_grad) else raw_backward
    return apply(y, g, share, share_grad, *options)


_apply, _apply_backward = apply_of(_CausalSoftmax), apply_of(_CausalSoftmaxBackward)

# ---- the versions: launch(x or y, the kernel's pointers, its numbers after the three sizes: two strides, the
# window and the scale)

WARP_BLOCK = 64  # threads per block of v2 where lanes of a warp share a row
Launch = Callable[[Tensor, tuple[int, ...], tuple[float, ...]], None]


def _block_per_row(template: Template) -> Launch:
    def launch(x: Tensor, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        grid = (min(x.shape[0] * x.shape[1], plan.MOST_BLOCKS), 1, 1)
        template[x.dtype].on(x.get_device())(
            grid, (plan.LOOP_THREADS, 1, 1), 0, *pointers, *x.shape, *numbers
        )

    return launch


def _in_registers(warp: Template, block: Template, otherwise: Launch, backward: bool) -> Launch:
    def launch(x: Tensor, pointers: tuple[int, ...], numbers: tuple[float, ...]) -> None:
        (matrices, queries, keys), device, size = x.shape, x.get_device(), x.itemsize
        vectors, rows = plan.vectors_of(keys, size), matrices * queries
        # of y, g and dx; of x and out
        addresses = (*pointers[2:4], pointers[0]) if backward else (pointers[2], pointers[0])
        # of contiguous rows; of x's or g's
        strides = keys, (matrices > 1) * int(numbers[0]), (queries > 1) * int(numbers[1])
        exact = (
            math.gcd(plan.VECTOR_BYTES, *addresses, *[size * stride for stride in strides])
            == plan.VECTOR_BYTES
        )
        # The diagonal cuts vectors, so there are always edges.
        group = plan.warp_group(vectors, size, False, plan.WARP_VECTORS_CAUSAL[backward][size])
        if group and (blocks := -(-rows // (WARP_BLOCK // group.width))) <= plan.MOST_BLOCKS:
            arguments = (x.dtype, *row_storage.warp_key(group), WARP_BLOCK, exact)
            warp[arguments].on(device)(
                (blocks, 1, 1), (WARP_BLOCK, 1, 1), 0, *pointers, *x.shape, *numbers, group.width
            )
        elif (
            shape := plan.block_shape(vectors, plan.SHAPES_CAUSAL[backward][size])
        ) and rows <= plan.MOST_BLOCKS:
            arguments = (x.dtype, *shape, exact)
            block[arguments].on(device)((rows, 1, 1), (shape.threads, 1, 1), 0, *pointers, *x.shape, *numbers)
        else:
            otherwise(x, pointers, numbers)

    return launch


_V1, _V1_BWD = (Template("softmax/causal_softmax.cu", f"causal_softmax_{name}") for name in ("v1", "v1_bwd"))
_V2, _V2_BWD, _V2_WARP, _V2_WARP_BWD = (
    Template("softmax/causal_softmax.cu", f"causal_softmax_{name}", pdl=True)
    for name in ("v2", "v2_bwd", "v2_warp", "v2_warp_bwd")
)
_v1, _v1_bwd = _block_per_row(_V1), _block_per_row(_V1_BWD)


def _v2_instances(dtype: torch.dtype) -> list[Kernel]:
    kernels = [_V1[dtype], _V1_BWD[dtype]]
    for backward, exact in itertools.product((False, True), repeat=2):
        warp, block = (_V2_WARP_BWD, _V2_BWD) if backward else (_V2_WARP, _V2)
        keys = row_storage.warp_keys(plan.WARP_VECTORS_CAUSAL[backward][dtype.itemsize])
        warp_arguments = [(dtype, *key, WARP_BLOCK, exact) for key in keys]
        block_arguments = [(dtype, *shape, exact) for shape in plan.SHAPES_CAUSAL[backward][dtype.itemsize]]
        kernels += [*(warp[a] for a in warp_arguments), *(block[a] for a in block_arguments)]
    return kernels


VERSIONS = {
    "v1": Version("one block per row, which is read twice", lambda dtype: [_V1[dtype], _V1_BWD[dtype]]),
    "v2": Version("rows in registers", _v2_instances),
}
_FORWARD = {"v1": _v1, "v2": _in_registers(_V2_WARP, _V2, _v1, False)}
_BACKWARD = {"v1": _v1_bwd, "v2": _in_registers(_V2_WARP_BWD, _V2_BWD, _v1_bwd, True)}

# ---- for the tools


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    matrices, t = dims
    return (torch.randn(matrices, t, t, dtype=dtype, device=device),)


def _lengths(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Lengths up to T around each threshold where another kernel is chosen, with and without rows of whole
    vectors."""
    return [dims, *[(1, t) for k in range(14) for n in (0, 1, 32, 33) if (t := (1 << k) + n) <= dims[1]]]


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    matrices, t = dims
    seen, every = matrices * t * (t + 1) // 2, matrices * t * t
    return {
        "fwd": Cost((seen + every) * itemsize, 4 * seen),
        "bwd": Cost((2 * seen + every) * itemsize, 4 * seen),
    }


def _masked_softmax(x: Tensor) -> Tensor:
    """The usual code in torch. No row is fully masked here."""
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax(x.masked_fill(hidden, -math.inf), -1)


def _magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y, g = _masked_softmax(*inputs), douts[0].abs()
    return y, y * (g + (y * g).sum(-1, keepdim=True))


register(
    Case(
        name="causal_softmax", op=Op("causal_softmax", "causal_softmax", VERSIONS), variants=_lengths,
        call=causal_softmax,
        reference=_masked_softmax, dims="MATRICES T", make=_make, inputs=("x",), cost=_cost,
        magnitude=_magnitude,
        check_dims=((1, 1), (3, 65), (2, 1000), (1, 4099), (5, 1024)),
        sim_dims=((1, 1), (2, 19), (1, 70)),
        bench_dims=((48, 1024), (48, 4096)),
    )
)  # fmt: skip
