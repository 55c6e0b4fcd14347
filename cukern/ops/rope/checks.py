"""The checks of rope's arguments. `resolve` depends only on shapes, dtypes and options, so its result is
cached."""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from cukern.ops.rope.gather import ID_TYPES
from cukern.ops.rope.memory import unwrapped
from cukern.ops.rope.plan import AXES, Inputs, Options, tokens_of
from cukern.ops.rope.reference import positions_of
from cukern.ops.rope.versions import VERSIONS
from cukern.runtime import checks

MOST_SECTIONS = 3


class Shape(NamedTuple):
    """The properties of a tensor that are checked."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    negative: bool  # True if the negative bit is set


def shapes_of(names: Iterable[str], tensors: Iterable[Tensor | None]) -> list[Shape | None]:
    """The Shape of each tensor. Raises TypeError for nested tensors, which have none."""
    eager = not torch.compiler.is_compiling()
    try:
        return [
            t if t is None else Shape(t.shape, t.dtype, t.device, t.layout, eager and t.is_neg())
            for t in tensors
        ]
    except RuntimeError:
        for name, t in zip(names, tensors, strict=False):
            if t is not None and t.is_nested:
                raise TypeError(f"{name} must be a strided tensor, got a nested one") from None
        raise


class Request(NamedTuple):
    """The Shapes of a call's tensors, and the mrope sections."""

    x: Shape
    k: Shape | None
    cos: Shape
    sin: Shape | None
    position_ids: Shape | None
    cu_seqlens: Shape | None
    start_positions: Shape | None
    mrope_section: tuple[int, ...] | None


def sections(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"mrope_section must be a tuple of ints, got {checks.brief(value)}")
    return tuple(checks.integer(f"mrope_section[{i}]", n) for i, n in enumerate(value))


def resolve(request: Request, *options: Any) -> Options:
    """The Options of rotary_dim, rotary_offset, interleaved, layout, inverse, scale, version, checked. Raises
    TypeError and ValueError."""
    if not torch.compiler.is_compiling():
        try:
            return _resolve_cached(request, *options)
        except TypeError:  # also raised for an option that cannot be hashed, and for a SymInt
            pass
    return _resolve(request, *options)


def _resolve(
    r: Request, rotary_dim: Any, rotary_offset: Any, interleaved: Any, layout: Any, inverse: Any, scale: Any,
    version: Any,
) -> Options:  # fmt: skip
    checks.choice("layout", layout, AXES)
    checks.version("rope", version, VERSIONS)
    _check_x(r, layout)
    head_dim = r.x.shape[-1]
    rotary_dim = head_dim if rotary_dim is None else checks.integer("rotary_dim", rotary_dim)
    rotary_offset = checks.integer("rotary_offset", rotary_offset)
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, it is {rotary_dim}")
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim is {rotary_dim}, it must not be larger than head_dim, {head_dim}")
    if rotary_offset < 0 or rotary_offset + rotary_dim > head_dim:
        raise ValueError(
            f"rotary_offset is {rotary_offset}: with rotary_dim {rotary_dim} it must be in "
            f"0..{head_dim - rotary_dim}"
        )
    most = math.inf if r.x.dtype == torch.float64 else checks.FLOAT32_MAX
    scale = 1.0 if scale is None else checks.number("scale", scale, most)
    interleaved, inverse = checks.flag("interleaved", interleaved), checks.flag("inverse", inverse)
    _check_tables(r, layout, rotary_dim)
    _check_positions(r, layout, rotary_dim)
    return Options(rotary_dim, rotary_offset, interleaved, inverse, scale, layout, False, version or "")


# typed: 8.0 and True must not match ints
_resolve_cached = functools.lru_cache(maxsize=4096, typed=True)(_resolve)


def _check_x(r: Request, layout: str) -> None:
    for name, t in zip(r._fields[:7], r[:7], strict=True):
        if t is None:
            continue
        if name in ("x", "k"):
            checks.one_of(name, t.dtype, checks.FLOATS)
        checks.strided_layout(name, t.layout)
        if t.negative:
            checks.negative_bit(name)
        if name in ("x", "k") and len(t.shape) != len(layout):
            raise ValueError(
                f"{name} must have {len(layout)} dimensions in layout {layout!r}, its shape is "
                f"{tuple(t.shape)}"
            )
    if r.k is not None:
        checks.same(x=r.x, k=r.k)  # type: ignore[arg-type]
        heads = layout.index("h")
        expected = (*r.x.shape[:heads], r.k.shape[heads], *r.x.shape[heads + 1 :])
        if tuple(r.k.shape) != expected:
            raise ValueError(
                f"k has shape {tuple(r.k.shape)}, x {tuple(r.x.shape)}: only the number of heads may differ"
            )


def _check_tables(r: Request, layout: str, rotary_dim: int) -> None:
    batch, sequence = tokens_of(r.x.shape, layout)
    checks.one_of("cos", r.cos.dtype, dict.fromkeys((torch.float32, torch.float64, r.x.dtype)))
    _on_device("cos", r.cos, r.x)
    shape = tuple(r.cos.shape)
    if len(shape) not in (2, 3) or shape[-1] not in (rotary_dim // 2, rotary_dim):
        raise ValueError(
            f"cos has shape {shape}, it must be (positions, rotary_dim / 2 = {rotary_dim // 2}) or "
            f"(positions, rotary_dim = {rotary_dim})"
        )
    if r.sin is not None:
        _on_device("sin", r.sin, r.x)
        if r.sin.dtype != r.cos.dtype or tuple(r.sin.shape) != shape:
            raise ValueError(
                f"sin is {tuple(r.sin.shape)} of {r.sin.dtype}, it must be as cos, {shape} of {r.cos.dtype}"
            )
    if len(shape) == 3:
        if layout == "thd" or shape[0] not in (1, batch) or shape[1] != sequence:
            raise ValueError(
                f"cos has shape {shape}: with 3 dimensions it must be (batch or 1, sequence, ...) of a "
                f"layout with both"
            )
        if r.position_ids or r.cu_seqlens or r.start_positions:
            raise ValueError(f"cos has shape {shape}, one row for each token: positions cannot be given too")


def _check_positions(r: Request, layout: str, rotary_dim: int) -> None:
    (batch, sequence), rows = tokens_of(r.x.shape, layout), r.cos.shape[-2]
    for name, t in (
        ("position_ids", r.position_ids),
        ("cu_seqlens", r.cu_seqlens),
        ("start_positions", r.start_positions),
    ):
        if t is not None:
            checks.one_of(name, t.dtype, ID_TYPES)
            _on_device(name, t, r.x)
    _check_cu_seqlens(r, layout)
    if r.position_ids is not None:
        if r.cu_seqlens is not None or r.start_positions is not None:
            raise ValueError(
                "position_ids give all positions: cu_seqlens and start_positions cannot be given too"
            )
        _check_ids(r, tuple(r.position_ids.shape), batch, sequence, rotary_dim // 2)
    elif r.mrope_section is not None:
        raise ValueError("mrope_section needs position_ids of shape (sections, batch, sequence)")
    if r.start_positions is not None:
        count = batch if r.cu_seqlens is None else r.cu_seqlens.shape[0] - 1
        if tuple(r.start_positions.shape) != (count,):
            raise ValueError(
                f"start_positions has shape {tuple(r.start_positions.shape)}, it must be ({count},): one for "
                f"each sequence"
            )
    if r.position_ids is None and r.cu_seqlens is None and sequence > rows:
        raise ValueError(f"the sequence has {sequence} tokens, the table has only {rows} positions")


def _check_cu_seqlens(r: Request, layout: str) -> None:
    if r.cu_seqlens is not None and (
        layout != "thd" or len(r.cu_seqlens.shape) != 1 or not r.cu_seqlens.shape[0]
    ):
        raise ValueError(
            f"cu_seqlens has shape {tuple(r.cu_seqlens.shape)}: it must be (sequences + 1,), and the layout "
            f"'thd'"
        )
    if layout == "thd" and r.position_ids is None and r.cu_seqlens is None:
        raise ValueError("layout 'thd' needs cu_seqlens or position_ids")


def _check_ids(r: Request, shape: tuple[int, ...], batch: int, sequence: int, pairs: int) -> None:
    section = r.mrope_section
    if section is None:
        if shape not in ((sequence,), (batch, sequence), (1, sequence)):
            raise ValueError(
                f"position_ids has shape {shape}, it must be ({sequence},) or ({batch}, {sequence})"
            )
        return
    if not 2 <= len(section) <= MOST_SECTIONS or sum(section) != pairs or min(section) < 0:
        raise ValueError(
            f"mrope_section is {section}: it must be 2 or 3 numbers of pairs, together rotary_dim / 2 = "
            f"{pairs}"
        )
    if shape not in ((len(section), batch, sequence), (len(section), 1, sequence)):
        raise ValueError(
            f"position_ids has shape {shape}, with mrope_section {section} it must be ({len(section)}, "
            f"{batch}, {sequence})"
        )


def _on_device(name: str, t: Shape, x: Shape) -> None:
    checks.one_device(**{"x": x, name: t})


# ---- checks of values and gradients


def values(inputs: Inputs, options: Options) -> None:
    """For CPU tensors, which can be read without synchronisation, but not DTensors: raises ValueError if a
    position is not in the table or if cu_seqlens decrease."""
    if not inputs.has_positions or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return
    cu_seqlens, rows = inputs.cu_seqlens, inputs.cos.shape[-2]
    if any(
        t is not None and (t.is_meta or isinstance(t, FakeTensor) or hasattr(t, "device_mesh"))
        for t in inputs[:7]
    ):
        return
    if cu_seqlens is not None and (
        unwrapped(cu_seqlens.diff() < 0).any() or unwrapped(cu_seqlens[0] < 0).any()
    ):
        raise ValueError(
            f"cu_seqlens must not decrease, and begin at 0 or above, got {unwrapped(cu_seqlens).tolist()}"
        )
    positions, unrotated = positions_of(inputs, options)
    wrong = (positions < 0) | (positions >= rows)
    wrong = wrong if unrotated is None else wrong & ~unrotated
    if unwrapped(wrong).any():
        found = unwrapped(positions * wrong)
        raise ValueError(
            f"position {(*found[found != 0].tolist(), 0)[0]} is outside of the table, which has {rows} "
            f"positions"
        )


def no_gradient(op: str, **tables: Tensor | None) -> None:
    """Raises ValueError if a table requires a gradient or has a tangent."""
    dual = forward_ad._current_level >= 0
    for name, t in tables.items():
        if t is None:
            continue
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, but {op} computes no gradient for it: pass {name}.detach()"
            )
        if dual and forward_ad.unpack_dual(t).tangent is not None:
            raise ValueError(
                f"{name} has a tangent, but {op} computes no derivative for it: pass only its primal"
            )


_creation = torch._C._autograd._get_creation_meta
_WRITABLE_VIEW = torch._C._autograd.CreationMeta.DEFAULT


def autograd_allows_writing(**tensors: Tensor | None) -> None:
    """Raises ValueError where autograd forbids writing. Autograd itself would raise only after the kernel has
    written."""
    for name, t in tensors.items():
        if t is None or not t.requires_grad:
            continue
        base = t._base
        if base is not None and _creation(t) != _WRITABLE_VIEW:
            raise ValueError(
                f"{name} is a view that autograd does not allow to be written, such as one from split, "
                f"unbind or torch.no_grad(): take a "
                "slice of the whole tensor instead, or use cukern.rope"
            )
        if t.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
            what = "a leaf that requires grad" if t.is_leaf else "a view of a leaf that requires grad"
            raise ValueError(
                f"{name} is {what}: it cannot be rotated in place, use cukern.rope, or torch.no_grad()"
            )
