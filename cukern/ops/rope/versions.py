"""The versions of rope: how each launches its kernel, and the table that the tools and the public functions
use."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from cukern.ops.rope.gather import ANGLES, ID_TYPES, POSITIONS, SECTIONS
from cukern.ops.rope.memory import written_extent
from cukern.ops.rope.plan import NO_K, Call, Layout, Options, Plan, Table, angle_maths, table_dtypes
from cukern.runtime.device import cached
from cukern.runtime.dispatch.versions import choose
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.registry import Version

THREADS = 256
VECTOR_BYTES = 16
V2_THREADS = 64  # per block; 128 is as fast, more is slower
MOST_V2_THREADS = 256
V3_THREADS = 128
_V1, _V2, _V3 = (
    Template("rope/rope.cu", "rope_v1"),
    Template("rope/rope.cu", "rope_v2", pdl=True),
    Template("rope/rope.cu", "rope_v3", pdl=True),
)


def _v1(call: Call) -> Plan:
    o, (_, sequence, heads, _), k_heads = call.options, call.x.shape, call.k.shape[2]
    items = call.tokens * (heads + k_heads) * (o.rotary_dim // 2 + call.rest)
    _, rows, width = call.table.shape
    numbers = (
        call.tokens, sequence, heads, k_heads, o.rotary_dim, o.rotary_offset, call.rest, rows, width,
        *call.table.strides[:2], call.positions_b, *call.out.strides, *call.k_out.strides, *call.x.strides,
        *call.k.strides, o.interleaved, o.transpose, o.scale,
    )  # fmt: skip
    return Plan(
        _V1[call.dtype, call.table.dtype].on(call.device),
        (-(-items // THREADS), 1, 1),
        (THREADS, 1, 1),
        numbers,
    )


def _v2(call: Call) -> Plan:
    """Each thread takes two of the widest vectors that fit. v1 if none fits."""
    o, vector = call.options, _vector(call, _layouts(call))
    if not vector or not _fits(call, vector):
        return _v1(call)
    threads = o.rotary_dim // 2 // vector + (call.rest // vector + 1) // 2  # per head: rotating, copying
    if threads > MOST_V2_THREADS:
        return _v1(call)
    return _plan(call, _V2, vector, threads, max(1, V2_THREADS // threads), 1)


def _v3(call: Call) -> Plan:
    """Each thread takes one vector of two heads. v2 if heads cannot be paired, or if tokens look up their
    rows: v2 has more in flight."""
    o, vector = call.options, VECTOR_BYTES // call.dtype.itemsize
    threads = o.rotary_dim // vector
    pairs = threads in (2, 4, 8, 16, 32) and not (call.x.shape[2] | call.k.shape[2]) % 2 and not call.rest
    looked_up = call.positions and call.table.shape[2] < o.rotary_dim
    if (
        call.dtype.itemsize == 8
        or not pairs
        or looked_up
        or _vector(call, _layouts(call)) != vector
        or not _fits(call, vector)
    ):
        return _v2(call)
    return _plan(call, _V3, vector, threads, V3_THREADS // threads, 2)


def _layouts(call: Call) -> tuple[Layout, ...]:
    return (call.out, call.k_out, call.x, call.k) if call.k.shape[2] else (call.out, call.x)


def _fits(call: Call, vector: int) -> bool:
    """True if 31 bits can count the heads and 32 bits can index the vectors of the largest tensor."""
    items = call.tokens * (call.x.shape[2] + call.k.shape[2])
    shapes = [(t.shape, t.strides) for t in _layouts(call)] + [(call.table.shape, call.table.strides)]
    elements = max(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) for shape, strides in shapes)
    positions = call.x.shape[0] * max(1, call.positions_b)
    return items < 1 << 31 and call.table.shape[1] > 0 and max(positions, elements) <= vector << 32


def _plan(
    call: Call, template: Template, vector: int, threads: int, items_per_block: int, heads_per_item: int
) -> Plan:
    """The launch of v2 or v3, where `threads` threads take an item of `heads_per_item` heads."""
    o, (batch, sequence, *_), (_, rows, _) = call.options, call.x.shape, call.table.shape
    heads, k_heads = call.x.shape[2] // heads_per_item, call.k.shape[2] // heads_per_item
    items = call.tokens * (heads + k_heads)
    batch_inner = batch > 1 and call.x.strides[0] < call.x.strides[1]
    inner = batch if batch_inner else sequence
    lengths = (
        (o.rotary_dim, o.rotary_offset, call.rest) if heads_per_item == 1 else (o.rotary_dim, o.rotary_offset)
    )
    strides = [s // vector for layout in (call.out, call.k_out, call.x, call.k) for s in layout.strides[:3]]
    numbers = (
        items, inner, *_divisor(inner), heads, k_heads, *_divisor(heads + k_heads),
        *(n // vector for n in lengths), rows, *(s // vector for s in call.table.strides[:2]),
        call.positions_b, *strides, batch_inner, o.transpose, o.scale,
    )  # fmt: skip
    kernel = template[
        call.dtype, call.table.dtype, vector, o.interleaved, call.table.shape[2] == o.rotary_dim
    ]
    return Plan(
        kernel.on(call.device), (-(-items // items_per_block), 1, 1), (threads, items_per_block, 1), numbers
    )


def _divisor(d: int) -> tuple[int, int]:
    """(magic, shift) such that n // d == (n * magic // 2^32 + n) >> shift for every n < 2^31."""
    shift = (d - 1).bit_length()
    return (((1 << shift) - d) << 32) // d + 1, shift


def _vector(call: Call, layouts: tuple[Layout, ...]) -> int:
    """The widest vectors, in elements, that divide all strides, sizes and addresses of a call; 0 if there are
    none."""
    o, head_dim = call.options, call.x.shape[3]
    steps = [s for layout in layouts for s in layout.strides[:3]] + [
        o.rotary_dim // 2,
        o.rotary_offset,
        *call.table.strides[:2],
    ]
    if call.rest:
        steps.append(head_dim)
    for vector in (
        _vectors(call.dtype, call.table.dtype) if all(layout.strides[3] == 1 for layout in layouts) else ()
    ):
        table_bytes = min(VECTOR_BYTES, vector * call.table.dtype.itemsize)
        aligned = call.alignment % (vector * call.dtype.itemsize) == 0 == call.table_alignment % table_bytes
        if aligned and not any(step % vector for step in steps):
            return vector
    return 0


def _vectors(dtype: torch.dtype, table: torch.dtype) -> list[int]:
    """Elements of v2's vectors: 16, 8 or 4 bytes and at least 2 elements. Only 16 bytes for float32 with
    float64 tables, which is rare."""
    widest = VECTOR_BYTES // dtype.itemsize
    return (
        [widest]
        if (dtype, table) == (torch.float32, torch.float64)
        else [n for n in (8, 4, 2) if n <= widest]
    )


def _v1_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    """Also the kernels of gather.py, which any version may launch."""
    tables, angles = table_dtypes(dtype), (torch.float32, torch.float64)
    gathering = [
        *(POSITIONS[name] for name in ID_TYPES.values()),
        *(ANGLES[a, angle_maths(dtype, a)] for a in angles),
    ]
    return [*gathering, *(SECTIONS[t] for t in tables), *(_V1[dtype, t] for t in tables)]


def _v2_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    vectors = ((table, vector) for table in table_dtypes(dtype) for vector in _vectors(dtype, table))
    keys = (
        (dtype, *which, *flags) for which in vectors for flags in itertools.product((False, True), repeat=2)
    )
    return [*_v1_instances(dtype), *(_V2[key] for key in keys)]


def _v3_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    keys = itertools.product(
        [dtype], table_dtypes(dtype), [VECTOR_BYTES // dtype.itemsize], (False, True), (False, True)
    )
    return [*_v2_instances(dtype), *(_V3[key] for key in keys if dtype.itemsize < 8)]


VERSIONS = {
    "v1": Version("one thread per pair", _v1_instances),
    "v2": Version("one thread per 16-byte vector of each half", _v2_instances),
    "v3": Version("one thread per vector of two heads", _v3_instances),
}
_PLANS = {"v1": _v1, "v2": _v2, "v3": _v3}


@cached(4096)
def plan(
    dtype: torch.dtype, device: int, outs: Any, ins: Any, cos: Any, positions: Any, alignment: int,
    table_alignment: int, options: tuple[Any, ...],
) -> Plan:  # fmt: skip
    """The launch for tensors of these shapes and strides. Cached, so that a call costs one lookup. Raises
    ValueError if a tensor is to be written whose elements share memory.

    Args:
        outs: the strides of each output; empty for a call in place.  ins: (shape, strides) of each input.
        cos: (dtype, shape, strides).  positions: the shape, or None.
    """
    o = Options(*options)
    in_place = not outs
    if in_place:
        for name, (shape, strides) in zip("xk", ins, strict=False):
            written_extent(name, shape, strides, dtype.itemsize)
    x, k, *_ = *(Layout.of(shape, strides, o.layout) for shape, strides in ins), NO_K
    outs = outs or [strides for _, strides in ins]
    out, k_out, *_ = (
        *(Layout.of(shape, strides, o.layout) for (shape, _), strides in zip(ins, outs, strict=True)),
        NO_K,
    )
    # 0: all sequences share a row of positions
    positions_b = 0 if positions is None or positions[0] == 1 else positions[1]
    call = Call(
        dtype,
        device,
        out,
        k_out,
        x,
        k,
        Table.of(*cos),
        positions is not None,
        positions_b,
        in_place,
        alignment,
        table_alignment,
        o,
    )
    if not call.tokens or not call.x.shape[3] or not call.x.shape[2] + call.k.shape[2]:
        return Plan(None, (0, 0, 0), (0, 0, 0), ())
    return _PLANS[choose("rope", o.version, device).forward](call)
