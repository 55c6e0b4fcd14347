"""How rope's kernels are launched: the geometry of a call, and the table of versions, each of which makes a launch of it."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from cukern.ops.rope_memory import check_apart
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version, choose

THREADS = 256
POSITIONS, ANGLES, SECTIONS = (Template("rope.cu", f"rope_{name}") for name in ("positions", "angles", "sections"))
VECTOR_BYTES = 16
V2_THREADS = 64  # of a block; 128 is as fast, more is slower
MOST_V2_THREADS = 256
_V1, _V2 = Template("rope.cu", "rope_v1"), Template("rope.cu", "rope_v2")
ID_TYPES = {torch.int32: "int", torch.int64: "long long"}

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
    """All that decides how a call is launched. `alignment`, `table_alignment`: the low bits of the addresses of x, k and the outputs, and
    of cos and sin, or-ed together."""

    dtype: torch.dtype
    device: int
    out: Layout
    k_out: Layout
    x: Layout
    k: Layout
    table: Table
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


@functools.lru_cache(maxsize=4096)
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
            check_apart(name, shape, strides)
    xs = [Layout.of(shape, strides, o.layout) for shape, strides in ins]
    outputs = [Layout.of(shape, out, o.layout) for (shape, _), out in zip(ins, outs or [s for _, s in ins], strict=True)]
    table_dtype, shape, strides = cos
    per_token = len(shape) == 3 and shape[0] > 1
    table = Table(table_dtype, (1, *shape)[-3:], (strides[0] if per_token else 0, *strides[-2:]))
    shared = positions is None or positions[0] == 1  # a row of positions for all sequences
    call = Call(
        dtype, device, outputs[0], outputs[1] if len(xs) > 1 else NO_K, xs[0], xs[1] if len(xs) > 1 else NO_K, table,
        0 if shared else positions[1], not outs, alignment, table_alignment, o,
    )  # fmt: skip
    if not call.tokens or not call.x.shape[3] or not call.x.shape[2] + call.k.shape[2]:
        return Plan(None, (0, 0, 0), (0, 0, 0), ())
    return choose("rope", o.version, device).forward(call)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the maths: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def angle_maths(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the sine and cosine of angles are computed, to be rounded to the compute dtype."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def table_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of tables that the kernels of a dtype read; another one is converted first."""
    return list(dict.fromkeys((compute_dtype(dtype), dtype)))


def _v1(call: Call) -> Plan:
    o, (_, sequence, heads, _), k_heads = call.options, call.x.shape, call.k.shape[2]
    items = call.tokens * (heads + k_heads) * (o.rotary_dim // 2 + call.rest)
    _, rows, width = call.table.shape
    numbers = (
        call.tokens, sequence, heads, k_heads, o.rotary_dim, o.rotary_offset, call.rest, rows, width, *call.table.strides[:2],
        call.positions_b, *call.out.strides, *call.k_out.strides, *call.x.strides, *call.k.strides, o.interleaved, o.transpose, o.scale,
    )  # fmt: skip
    return Plan(_V1[call.dtype, call.table.dtype].on(call.device), (-(-items // THREADS), 1, 1), (THREADS, 1, 1), numbers)


def _v2(call: Call) -> Plan:
    """One thread two vectors of the widest that fit, or v1 where none does."""
    o, (batch, sequence, heads, _), k_heads = call.options, call.x.shape, call.k.shape[2]
    layouts = (call.out, call.k_out, call.x, call.k) if k_heads else (call.out, call.x)
    vector = _vector(call, layouts)
    items, rows, width = call.tokens * (heads + k_heads), *call.table.shape[1:]
    threads = (o.rotary_dim // 2 + (call.rest // (vector or 1) + 1) // 2 * vector) // (vector or 1)
    if not vector or threads > MOST_V2_THREADS or items >= 1 << 31 or not rows or _extent(call, layouts) > vector << 32:
        return _v1(call)
    batch_inner = batch > 1 and call.x.strides[0] < call.x.strides[1]
    inner, heads_a_block = batch if batch_inner else sequence, max(1, V2_THREADS // threads)
    lengths = (o.rotary_dim, o.rotary_offset, call.rest)
    strides = [s // vector for layout in (call.out, call.k_out, call.x, call.k) for s in layout.strides[:3]]
    numbers = (
        items, inner, *_divisor(inner), heads, k_heads, *_divisor(heads + k_heads), *(n // vector for n in lengths), rows,
        *(s // vector for s in call.table.strides[:2]), call.positions_b, *strides, batch_inner, call.in_place, o.transpose, o.scale,
    )  # fmt: skip
    kernel = _V2[call.dtype, call.table.dtype, vector, o.interleaved, width == o.rotary_dim]
    return Plan(kernel.on(call.device), (-(-items // heads_a_block), 1, 1), (threads, heads_a_block, 1), numbers)


def _divisor(d: int) -> tuple[int, int]:
    """(magic, shift) such that n // d == (n * magic // 2^32 + n) >> shift for every n < 2^31."""
    shift = (d - 1).bit_length()
    return (((1 << shift) - d) << 32) // d + 1, shift


def _extent(call: Call, layouts: tuple[Layout, ...]) -> int:
    """Elements between the first and the last of the largest tensor or table, or of the position ids."""
    shapes = [(layout.shape, layout.strides) for layout in layouts] + [(call.table.shape, call.table.strides)]
    positions = call.x.shape[0] * max(1, call.positions_b)
    return max(positions, *(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) for shape, strides in shapes))


def _vector(call: Call, layouts: tuple[Layout, ...]) -> int:
    """The widest vectors, in elements, that all of a call is a multiple of; 0 if none."""
    o, head_dim = call.options, call.x.shape[3]
    steps = [s for layout in layouts for s in layout.strides[:3]] + [o.rotary_dim // 2, o.rotary_offset, *call.table.strides[:2]]
    if call.rest:
        steps.append(head_dim)
    for vector in _vectors(call.dtype) if all(layout.strides[3] == 1 for layout in layouts) else ():
        table_bytes = min(VECTOR_BYTES, vector * call.table.dtype.itemsize)
        aligned = call.alignment % (vector * call.dtype.itemsize) == 0 == call.table_alignment % table_bytes
        if aligned and not any(step % vector for step in steps):
            return vector
    return 0


def _vectors(dtype: torch.dtype) -> list[int]:
    """Elements of v2's vectors: 16 bytes, or a pair."""
    return list(dict.fromkeys((VECTOR_BYTES // dtype.itemsize, 2)))


def _helpers(dtype: torch.dtype) -> Iterable[Kernel]:
    """What any version may need beside its own kernels."""
    return itertools.chain(
        (POSITIONS[name] for name in ID_TYPES.values()),
        (ANGLES[compute_dtype(dtype), angle_maths(dtype)],),
        (SECTIONS[t] for t in table_dtypes(dtype)),
    )


def _v1_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    return [*_helpers(dtype), *(_V1[dtype, table] for table in table_dtypes(dtype))]


def _v2_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    flags = (False, True)
    return [*_v1_instances(dtype), *(_V2[key] for key in itertools.product([dtype], table_dtypes(dtype), _vectors(dtype), flags, flags))]


VERSIONS = {
    "v1": Version("one thread a pair", _v1, instances=_v1_instances),
    "v2": Version("one thread a 16-byte vector of each half", _v2, instances=_v2_instances),
}
