"""The options, inputs and geometry of a call of rope, from which a version plans its launch."""

from typing import Any, NamedTuple

import torch

from cukern.runtime.launch import driver, limits

# The dimensions of batch, sequence, heads and head_dim. Each permutation is its own inverse.
AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2)}

Strides = tuple[int, ...]


class Options(NamedTuple):
    """The raw ops' arguments after their tensors. `transpose`: the inverse rotation. `contiguous`: the output
    is always contiguous; else it has the input's strides if these are dense."""

    rotary_dim: int
    rotary_offset: int
    interleaved: bool
    transpose: bool
    scale: float
    layout: str
    contiguous: bool = False
    version: str = ""


class Inputs(NamedTuple):
    """The tensors of a call, the mrope sections, and the context-parallel size and rank."""

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
        """True if a token's row of the tables is not simply its index in the sequence."""
        given = (
            self.position_ids is not None or self.cu_seqlens is not None or self.start_positions is not None
        )
        return given or self.cp_size > 1


class Layout(NamedTuple):
    """The shape and strides of a tensor as (batch, sequence, heads, head_dim). Dimensions of size 1 have
    stride 0, head_dim stride 1."""

    shape: tuple[int, ...]
    strides: Strides

    @staticmethod
    def of(shape: Any, strides: Any, layout: str) -> "Layout":
        axes = AXES[layout]
        sizes = tuple(shape[a] for a in axes)
        steps = (*(strides[a] if shape[a] > 1 else 0 for a in axes[:-1]), strides[-1] if shape[-1] > 1 else 1)
        return Layout(sizes, steps) if len(axes) == 4 else Layout((1, *sizes), (0, *steps))


class Table(NamedTuple):
    """The dtype of cos and sin; shape and strides as (batch, rows, width). The batch stride is 0 if all
    sequences share a table."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Strides

    @staticmethod
    def of(dtype: torch.dtype, shape: Any, strides: Any) -> "Table":
        batch_stride = strides[0] if len(shape) == 3 and shape[0] > 1 else 0
        return Table(dtype, (1, *shape)[-3:], (batch_stride, *strides[-2:]))


class Call(NamedTuple):
    """Everything that a launch depends on.

    `positions`: True if there is a tensor of positions; `positions_b`: its batch stride. `alignment`: the low
    bits of the addresses of x, k and the outputs, ORed; `table_alignment`: those of cos and sin.
    """

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
        """Elements per head that are copied."""
        return 0 if self.in_place else self.x.shape[3] - self.options.rotary_dim


class Plan(NamedTuple):
    """A launch without its pointers. `launch` is None if there is nothing to do."""

    launch: driver.Launch | None
    grid: limits.Dim
    block: limits.Dim
    numbers: tuple[Any, ...]


def tokens_of(shape: Any, layout: str) -> tuple[int, int]:
    """(batch, sequence) of a tensor's shape. Packed sequences are a batch of one."""
    axes = AXES[layout]
    return (1, shape[0]) if len(axes) == 3 else (shape[axes[0]], shape[axes[1]])


NO_K = Layout((0, 0, 0, 0), (0, 0, 0, 0))


def compute_dtype(dtype: torch.dtype, table: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype of the computation: float32 for 16-bit types, else the wider of x's and the table's."""
    return torch.float32 if dtype.itemsize == 2 else torch.promote_types(dtype, table)


def angle_maths(dtype: torch.dtype, angles: torch.dtype) -> torch.dtype:
    """The dtype of tables made of float32 or float64 angles. Rounding to float32 would be visible in all
    results except 16-bit ones."""
    return torch.float32 if dtype.itemsize == 2 and angles == torch.float32 else torch.float64


def table_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of tables that the kernels of a dtype read. Others are first converted to compute_dtype."""
    if dtype.itemsize == 2:
        return [torch.float32, dtype]
    return [torch.float64] if dtype == torch.float64 else [torch.float32, torch.float64]
