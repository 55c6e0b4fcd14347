"""Kernels that run before rope's rotation where needed: each token's row of the tables, tables from angles,
and tables from sections.

They are separate so that the rotation handles only one kind of positions and of tables. Their outputs are
small compared with x.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope.plan import Inputs, Options, tokens_of
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, transformed
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.launch.kernel import Kernel, Template

THREADS = 256
POSITIONS, ANGLES, SECTIONS = (
    Template("rope/rope.cu", f"rope_{name}", pdl=True) for name in ("positions", "angles", "sections")
)
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}


def _launch(kernel: Kernel, tensors: Iterable[Tensor | None], device: int, n: int, *numbers: int) -> None:
    """Launch `n` threads with the tensors' addresses and `numbers` as arguments."""
    if n:
        pointers = (0 if t is None else t.data_ptr() for t in tensors)
        kernel.on(device)((-(-n // THREADS), 1, 1), (THREADS, 1, 1), 0, *pointers, *numbers)


def _launch_positions(
    table: Tensor, ids: Tensor | None, cu_seqlens: Tensor | None, starts: Tensor | None, batch: int,
    sequence: int, size: int, rank: int,
) -> Tensor:  # fmt: skip
    out = _fake_positions(table, ids, cu_seqlens, starts, batch, sequence)
    given = [t for t in (ids, cu_seqlens, starts) if t is not None]
    dtype = torch.int64 if any(t.dtype == torch.int64 for t in given) or not given else torch.int32
    ids, cu_seqlens, starts = (
        None if t is None else t.to(dtype).contiguous() for t in (ids, cu_seqlens, starts)
    )
    sequences, n = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, out.numel()
    tensors, numbers = (out, ids, cu_seqlens, starts), (n, sequence, sequences, table.shape[-2], size, rank)
    _launch(POSITIONS[ID_TYPES[dtype]], tensors, table.get_device(), n, *numbers)
    return out


def _fake_positions(
    table: Tensor, ids: Any, cu_seqlens: Any, starts: Any, batch: int, sequence: int, *_: Any
) -> Tensor:
    return torch.empty((batch, sequence), dtype=torch.int32, device=table.device)


def _launch_angles(angles: Tensor, in_double: bool) -> tuple[Tensor, Tensor]:
    outs, n = _fake_angles(angles, in_double), angles.numel()
    _launch(ANGLES[angles.dtype, outs[0].dtype], (*outs, angles.contiguous()), angles.get_device(), n, n)
    return outs


def _fake_angles(angles: Tensor, in_double: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if in_double else torch.float32
    return angles.new_empty(angles.shape, dtype=dtype), angles.new_empty(angles.shape, dtype=dtype)


def _launch_sections(
    cos: Tensor, sin: Tensor, positions: Tensor, batch: int, sequence: int, pairs: int, interleaved: bool,
    end0: int, end1: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outs, (rows, width) = _fake_sections(cos, sin, positions, batch, sequence), cos.shape
    tensors = (*outs, cos.contiguous(), sin.contiguous(), positions)
    numbers = batch * sequence, width, pairs, interleaved, end0, end1, rows, width
    _launch(SECTIONS[cos.dtype], tensors, cos.get_device(), outs[0].numel(), *numbers)
    return outs


def _fake_sections(
    cos: Tensor, sin: Tensor, positions: Tensor, batch: int, sequence: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return cos.new_empty((batch, sequence, cos.shape[1])), cos.new_empty((batch, sequence, cos.shape[1]))


def rows(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """cos, sin and the positions for the rotation: (batch or 1, sequence) rows of the tables. With mrope
    sections, where a token has several positions, cos and sin have one row for each token, and positions is
    None."""
    _, _, cos, sin, ids, cu_seqlens, starts, section, cp_size, cp_rank = inputs
    assert sin is not None
    batch, sequence = tokens_of(inputs.x.shape, options.layout)
    if ids is not None:
        ids = ids[None] if ids.ndim == 1 else ids.flatten(0, -2)
        batch = ids.shape[0]  # 1 if the sequences share them; with sections, sections * batch
    elif starts is None:
        batch = 1
    positions = _call(_positions, cos, ids, cu_seqlens, starts, batch, sequence, cp_size, cp_rank)
    if section is None:
        return cos, sin, positions
    end1 = section[0] + section[1]
    shape = batch // len(section), sequence, options.rotary_dim // 2, options.interleaved
    return *_call(_sections, cos, sin, positions, *shape, section[0], end1), None


def tables_of(angles: Tensor, in_double: bool) -> tuple[Tensor, Tensor]:
    """cos and sin of angles, in float64 or float32."""
    return _call(_angles, angles, in_double)


class _NonDifferentiable(Differentiable):
    """These kernels under torch.func's transforms: no derivatives; under vmap one call for each element of
    the batch."""

    @staticmethod
    def forward(op, *args):
        return op(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *_):
        raise ValueError("cos and sin have no gradient")

    @staticmethod
    def tangent(ctx, *tangents):
        if any(t is not None for t in tangents):
            raise ValueError("cos and sin have no derivative: pass them without a tangent")

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


_apply = apply_of(_NonDifferentiable)


def _call(op: Any, *args: Any) -> Any:
    return _apply(op, *args) if transformed() and not torch.compiler.is_dynamo_compiling() else op(*args)


_positions = raw_op(
    "_rope_positions(Tensor table, Tensor? ids, Tensor? cu_seqlens, Tensor? starts, SymInt batch, SymInt "
    "sequence, SymInt cp_size, "
    "SymInt cp_rank) -> Tensor",
    4,
    _launch_positions,
    _fake_positions,
)
_angles = raw_op(
    "_rope_angles(Tensor angles, bool in_double) -> (Tensor, Tensor)", 1, _launch_angles, _fake_angles
)
_sections = raw_op(
    "_rope_sections(Tensor cos, Tensor sin, Tensor positions, SymInt batch, SymInt sequence, SymInt pairs, "
    "bool interleaved, SymInt end0, "
    "SymInt end1) -> (Tensor, Tensor)",
    3,
    _launch_sections,
    _fake_sections,
)
