"""What rope refuses, and why. `resolve` looks at shapes and dtypes alone, so that its verdict is kept for the next call like it."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.rope_plan import AXES, Inputs, Options, tokens_of
from cukern.ops.rope_reference import UNROTATED, positions_of
from cukern.ops.rope_rows import ID_TYPES
from cukern.runtime import checks

MOST_SECTIONS = 3


class Shape(NamedTuple):
    """What is checked of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    negative: bool  # whether the elements lie in memory negated


def shape_of(t: Tensor | None) -> Shape | None:
    if t is None:
        return None
    return Shape(t.shape, t.dtype, t.device, t.layout, not torch.compiler.is_compiling() and t.is_neg())


class Request(NamedTuple):
    """A call of rope, of tensors their Shapes alone."""

    x: Shape
    k: Shape | None
    cos: Shape
    sin: Shape | None
    position_ids: Shape | None
    cu_seqlens: Shape | None
    start_positions: Shape | None
    mrope_section: tuple[int, ...] | None
    rotary_dim: int | None
    rotary_offset: int
    interleaved: bool
    layout: str
    inverse: bool
    scale: float | None


def resolve(request: Request, version: str) -> Options:
    """The options of a call that is allowed. Raises TypeError and ValueError for one that is not."""
    r = request
    if r.layout not in AXES:
        raise ValueError(f"layout must be {', '.join(AXES)}, got {r.layout!r}")
    for name, t in zip(r._fields[:7], r[:7], strict=True):
        if t is not None and t.negative:
            checks.negative_bit(name)
    _check_x(r)
    head_dim = r.x.shape[-1]
    rotary_dim = head_dim if r.rotary_dim is None else r.rotary_dim
    for name, number in (("rotary_dim", rotary_dim), ("rotary_offset", r.rotary_offset)):
        if not isinstance(number, int | torch.SymInt) or isinstance(number, bool):
            raise TypeError(f"{name} must be an int, got {number!r}")
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, it is {rotary_dim}")
    if rotary_dim > head_dim:
        raise ValueError(f"rotary_dim is {rotary_dim}, it must not be larger than head_dim, {head_dim}")
    if r.rotary_offset < 0 or r.rotary_offset + rotary_dim > head_dim:
        raise ValueError(f"rotary_offset is {r.rotary_offset}: with rotary_dim {rotary_dim} it must be in 0..{head_dim - rotary_dim}")
    scale = 1.0 if r.scale is None else float(r.scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, it is {scale}")
    _check_tables(r, rotary_dim)
    _check_positions(r, rotary_dim)
    return Options(rotary_dim, r.rotary_offset, bool(r.interleaved), bool(r.inverse), scale, r.layout, False, version)


resolve_cached = functools.lru_cache(maxsize=4096)(resolve)


def _check_x(r: Request) -> None:
    for name, t in (("x", r.x), ("k", r.k)):
        if t is None:
            continue
        checks.one_of(name, t.dtype, checks.FLOATS)
        if t.layout is not torch.strided:
            raise TypeError(f"{name} must be a strided tensor, got layout {t.layout}")
        if len(t.shape) != len(r.layout):
            raise ValueError(f"{name} must have {len(r.layout)} dimensions in layout {r.layout!r}, its shape is {tuple(t.shape)}")
    if r.k is not None:
        checks.same(x=r.x, k=r.k)  # type: ignore[arg-type]
        heads = r.layout.index("h")
        expected = (*r.x.shape[:heads], r.k.shape[heads], *r.x.shape[heads + 1 :])
        if tuple(r.k.shape) != expected:
            raise ValueError(f"k has shape {tuple(r.k.shape)}, x {tuple(r.x.shape)}: they may differ in the number of heads alone")


def _check_tables(r: Request, rotary_dim: int) -> None:
    batch, sequence = tokens_of(r.x.shape, r.layout)
    checks.one_of("cos", r.cos.dtype, dict.fromkeys((torch.float32, torch.float64, r.x.dtype)))
    _on_device("cos", r.cos, r.x)
    shape = tuple(r.cos.shape)
    if len(shape) not in (2, 3) or shape[-1] not in (rotary_dim // 2, rotary_dim):
        raise ValueError(f"cos has shape {shape}, it must be (positions, {rotary_dim // 2}), rotary_dim / 2, or (positions, {rotary_dim})")
    if r.sin is not None:
        _on_device("sin", r.sin, r.x)
        if r.sin.dtype != r.cos.dtype or tuple(r.sin.shape) != shape:
            raise ValueError(f"sin is {tuple(r.sin.shape)} of {r.sin.dtype}, it must be as cos, {shape} of {r.cos.dtype}")
    if len(shape) == 3:
        if r.layout == "thd" or shape[0] not in (1, batch) or shape[1] != sequence:
            raise ValueError(f"cos has shape {shape}: with 3 dimensions it must be (batch or 1, sequence, ...) of a layout with both")
        if r.position_ids or r.cu_seqlens or r.start_positions:
            raise ValueError(f"cos has shape {shape}, one row for each token: positions cannot be given too")


def _check_positions(r: Request, rotary_dim: int) -> None:
    (batch, sequence), rows = tokens_of(r.x.shape, r.layout), r.cos.shape[-2]
    for name, t in (("position_ids", r.position_ids), ("cu_seqlens", r.cu_seqlens), ("start_positions", r.start_positions)):
        if t is not None:
            checks.one_of(name, t.dtype, ID_TYPES)
            _on_device(name, t, r.x)
    if r.cu_seqlens is not None and (r.layout != "thd" or len(r.cu_seqlens.shape) != 1 or not r.cu_seqlens.shape[0]):
        raise ValueError(f"cu_seqlens has shape {tuple(r.cu_seqlens.shape)}: it must be (sequences + 1,), and the layout 'thd'")
    if r.layout == "thd" and r.position_ids is None and r.cu_seqlens is None:
        raise ValueError("layout 'thd' needs cu_seqlens or position_ids")
    if r.position_ids is not None:
        if r.cu_seqlens is not None or r.start_positions is not None:
            raise ValueError("position_ids are positions already: cu_seqlens and start_positions cannot be given too")
        _check_ids(r, tuple(r.position_ids.shape), batch, sequence, rotary_dim // 2)
    elif r.mrope_section is not None:
        raise ValueError("mrope_section needs position_ids of shape (sections, batch, sequence)")
    if r.start_positions is not None:
        count = batch if r.cu_seqlens is None else r.cu_seqlens.shape[0] - 1
        if tuple(r.start_positions.shape) != (count,):
            raise ValueError(f"start_positions has shape {tuple(r.start_positions.shape)}, it must be ({count},): one for each sequence")
    if r.position_ids is None and r.cu_seqlens is None and sequence > rows:
        raise ValueError(f"the sequence is {sequence} long, the table ends after {rows} positions")


def _check_ids(r: Request, shape: tuple[int, ...], batch: int, sequence: int, pairs: int) -> None:
    section = r.mrope_section
    if section is None:
        if shape not in ((sequence,), (batch, sequence), (1, sequence)):
            raise ValueError(f"position_ids has shape {shape}, it must be ({sequence},) or ({batch}, {sequence})")
        return
    if not 2 <= len(section) <= MOST_SECTIONS or sum(section) != pairs or min(section) < 0:
        raise ValueError(f"mrope_section is {section}: it must be 2 or 3 numbers of pairs, together rotary_dim / 2 = {pairs}")
    if shape not in ((len(section), batch, sequence), (len(section), 1, sequence)):
        raise ValueError(f"position_ids has shape {shape}, with mrope_section {section} it must be ({len(section)}, {batch}, {sequence})")


def _on_device(name: str, t: Shape, x: Shape) -> None:
    if t.device != x.device:
        raise ValueError(f"{name} is on {t.device}, x is on {x.device}: they must be on one device")


# ---- what depends on more than shapes: values and gradients


def values(inputs: Inputs, options: Options) -> None:
    """Positions are in the table and cu_seqlens do not decrease: for CPU tensors, whose values can be seen without waiting."""
    if not inputs.has_positions or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return
    cu_seqlens, rows = inputs.cu_seqlens, inputs.cos.shape[-2]
    if cu_seqlens is not None and ((cu_seqlens.diff() < 0).any() or cu_seqlens[0] < 0):
        raise ValueError(f"cu_seqlens must not decrease, and begin at 0 or above, got {cu_seqlens.tolist()}")
    positions = positions_of(inputs, options)
    unrotated = (positions == UNROTATED) & (cu_seqlens is not None)
    wrong = positions[((positions < 0) | (positions >= rows)) & ~unrotated]
    if wrong.numel():
        raise ValueError(f"position {wrong[0].item()} is beyond the table, which has {rows} positions")


def tables_have_no_gradient(cos: Tensor, sin: Tensor | None) -> None:
    for name, t in (("cos", cos), ("sin", sin)):
        if t is not None and t.requires_grad:
            raise ValueError(f"{name} requires grad, and rope gives it none: pass {name}.detach()")


def not_a_leaf(name: str, x: Tensor | None) -> None:
    """Autograd lets nobody write a leaf that requires grad."""
    if x is not None and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise ValueError(f"{name} is a leaf that requires grad: it cannot be rotated in place, use cukern.rope, or torch.no_grad()")
