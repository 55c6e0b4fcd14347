"""A call of rope as its launch sees it: options, inputs, and the geometry, from which a version makes the launch."""

from typing import Any, NamedTuple

import torch

from cukern.ops.rope.memory import written_extent
from cukern.runtime import backend
from cukern.runtime.device import cached
from cukern.runtime.registry import choose

# Where batch, sequence, heads and head_dim stand in the shape.
AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2)}

Strides = tuple[int, ...]


class Options(NamedTuple):
    """What the raw ops take after their tensors. `transpose` is the inverse rotation; `contiguous` says that an output is, whatever the
    strides of its input."""

    rotary_dim: int
    rotary_offset: int
    interleaved: bool
    transpose: bool
    scale: float
    layout: str
    contiguous: bool = False
    version: str = ""


class Inputs(NamedTuple):
    """The tensors of a call; `section` and context parallelism say how positions come about."""

    x: torch.Tensor
    k: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    start_positions: torch.Tensor | None
    section: tuple[int, ...] | None = None
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def has_positions(self) -> bool:
        """Whether a token's row of the tables is another than its place in the sequence."""
        given = self.position_ids is not None or self.cu_seqlens is not None or self.start_positions is not None
        return given or self.cp_size > 1


class Layout(NamedTuple):
    """A tensor: its shape and strides as (batch, sequence, heads, head_dim)."""

    shape: tuple[int, ...]
    strides: Strides

    @staticmethod
    def of(shape: Any, strides: Any, layout: str) -> "Layout":
        axes = AXES[layout]
        sizes = tuple(shape[a] for a in axes)
        steps = (*(strides[a] if shape[a] > 1 else 0 for a in axes[:-1]), strides[-1] if shape[-1] > 1 else 1)
        return Layout(sizes, steps) if len(axes) == 4 else Layout((1, *sizes), (0, *steps))


class Table(NamedTuple):
    """cos and sin: their dtype, and their shape and strides as (batch, rows, width); of a table for all sequences batch's stride is 0."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Strides


class Call(NamedTuple):
    """All that decides how a call is launched. `positions`: whether each token looks up which row of the table is its own. `alignment`,
    `table_alignment`: the low bits of the addresses of x, k and the outputs, and of cos and sin, or-ed together."""

    dtype: torch.dtype
    device: int
    out: Layout
    k_out: Layout
    x: Layout
    k: Layout
    table: Table
    positions: bool
    positions_b: int
    in_place: bool
    alignment: int
    table_alignment: int
    options: Options

    @property
    def tokens(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    @property
    def rest(self) -> int:
        """Elements of a head to be copied."""
        return 0 if self.in_place else self.x.shape[3] - self.options.rotary_dim


class Plan(NamedTuple):
    """A launch but for its pointers; `launch` is None where there is nothing to do."""

    launch: backend.Launch | None
    grid: backend.Dim
    block: backend.Dim
    numbers: tuple[Any, ...]


def tokens_of(shape: Any, layout: str) -> tuple[int, int]:
    """(batch, sequence) of a tensor's shape; packed sequences are a batch of one."""
    axes = AXES[layout]
    return (1, shape[0]) if len(axes) == 3 else (shape[axes[0]], shape[axes[1]])


NO_K = Layout((0, 0, 0, 0), (0, 0, 0, 0))


@cached(4096)
def plan(
    dtype: torch.dtype, device: int, outs: Any, ins: Any, cos: Any, positions: Any, alignment: int, table_alignment: int,
    options: tuple[Any, ...],
) -> Plan:  # fmt: skip
    """The launch for tensors of these shapes and strides. Cached, so that a call pays for one look-up. Raises ValueError for an
    input that shares memory with itself and would be written.

    Args:
        outs: the strides of each output.  ins: (shape, strides) of each input; in place these are the outputs' too.
        cos: (dtype, shape, strides).  positions: the shape, or None.
    """
    o = Options(*options)
    if not outs:
        for name, (shape, strides) in zip("xk", ins, strict=False):
            written_extent(name, shape, strides, dtype.itemsize)
    xs = [Layout.of(shape, strides, o.layout) for shape, strides in ins]
    outputs = [Layout.of(shape, out, o.layout) for (shape, _), out in zip(ins, outs or [s for _, s in ins], strict=True)]
    table_dtype, shape, strides = cos
    per_token = len(shape) == 3 and shape[0] > 1
    table = Table(table_dtype, (1, *shape)[-3:], (strides[0] if per_token else 0, *strides[-2:]))
    shared = positions is None or positions[0] == 1  # a row of positions for all sequences
    call = Call(
        dtype, device, outputs[0], outputs[1] if len(xs) > 1 else NO_K, xs[0], xs[1] if len(xs) > 1 else NO_K, table,
        positions is not None, 0 if shared else positions[1], not outs, alignment, table_alignment, o,
    )  # fmt: skip
    if not call.tokens or not call.x.shape[3] or not call.x.shape[2] + call.k.shape[2]:
        return Plan(None, (0, 0, 0), (0, 0, 0), ())
    return choose("rope", o.version, device).forward(call)


def compute_dtype(dtype: torch.dtype, table: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of the maths: float32 for 16-bit types, else the wider of x's and the table's."""
    return torch.float32 if dtype.itemsize == 2 else torch.promote_types(dtype, table)


def angle_maths(dtype: torch.dtype, angles: torch.dtype) -> torch.dtype:
    """The dtype of the tables made of float32 or float64 angles: float32's rounding would be seen in all results but 16-bit ones."""
    return torch.float32 if dtype.itemsize == 2 and angles == torch.float32 else torch.float64


def table_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of tables that the kernels of a dtype read; another one is converted to compute_dtype first."""
    return _TABLE_DTYPES[dtype]


_TABLE_DTYPES = {
    torch.float16: [torch.float32, torch.float16],
    torch.bfloat16: [torch.float32, torch.bfloat16],
    torch.float32: [torch.float32, torch.float64],
    torch.float64: [torch.float64],
}
