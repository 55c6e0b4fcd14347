"""The ladder of rope: for each version how its kernel is launched, and the table that the tools and the public functions use."""

import itertools
from collections.abc import Iterable

import torch

from cukern.ops.rope.gather import ANGLES, ID_TYPES, POSITIONS, SECTIONS
from cukern.ops.rope.plan import Call, Layout, Plan, angle_maths, table_dtypes
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version

THREADS = 256
VECTOR_BYTES = 16
V2_THREADS = 64  # of a block; 128 is as fast, more is slower
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
        call.tokens, sequence, heads, k_heads, o.rotary_dim, o.rotary_offset, call.rest, rows, width, *call.table.strides[:2],
        call.positions_b, *call.out.strides, *call.k_out.strides, *call.x.strides, *call.k.strides, o.interleaved, o.transpose, o.scale,
    )  # fmt: skip
    return Plan(_V1[call.dtype, call.table.dtype].on(call.device), (-(-items // THREADS), 1, 1), (THREADS, 1, 1), numbers)


def _v2(call: Call) -> Plan:
    """One thread two vectors of the widest that fit, or v1 where none does."""
    o, vector = call.options, _vector(call, _layouts(call))
    if not vector or not _fits(call, vector):
        return _v1(call)
    threads = o.rotary_dim // 2 // vector + (call.rest // vector + 1) // 2  # a head: those that rotate two vectors, those that copy two
    if threads > MOST_V2_THREADS:
        return _v1(call)
    kernel = _V2[call.dtype, call.table.dtype, vector, o.interleaved, call.table.shape[2] == o.rotary_dim]
    return _plan(call, kernel, vector, threads, max(1, V2_THREADS // threads), 1)


def _v3(call: Call) -> Plan:
    """One thread a vector of two heads, or v2 where heads are no pairs, or where tokens look up their rows, since it has more under way."""
    o, vector = call.options, VECTOR_BYTES // call.dtype.itemsize
    threads = o.rotary_dim // vector
    pairs = threads in (2, 4, 8, 16, 32) and not (call.x.shape[2] | call.k.shape[2]) % 2 and not call.rest
    looked_up = call.positions and call.table.shape[2] < o.rotary_dim
    if call.dtype.itemsize == 8 or not pairs or looked_up or _vector(call, _layouts(call)) != vector or not _fits(call, vector):
        return _v2(call)
    kernel = _V3[call.dtype, call.table.dtype, vector, o.interleaved, call.table.shape[2] == o.rotary_dim]
    return _plan(call, kernel, vector, threads, V3_THREADS // threads, 2)


def _layouts(call: Call) -> tuple[Layout, ...]:
    return (call.out, call.k_out, call.x, call.k) if call.k.shape[2] else (call.out, call.x)


def _fits(call: Call, vector: int) -> bool:
    """Whether 31 bits count heads, and 32 vectors."""
    items = call.tokens * (call.x.shape[2] + call.k.shape[2])
    return items < 1 << 31 and call.table.shape[1] > 0 and _extent(call, _layouts(call)) <= vector << 32


def _plan(call: Call, kernel: Kernel, vector: int, threads: int, items_a_block: int, together: int) -> Plan:
    """The launch of v2 or v3, where `threads` take `together` heads."""
    o, (batch, sequence, *_), (_, rows, _) = call.options, call.x.shape, call.table.shape
    heads, k_heads = call.x.shape[2] // together, call.k.shape[2] // together
    items = call.tokens * (heads + k_heads)
    batch_inner = batch > 1 and call.x.strides[0] < call.x.strides[1]
    inner = batch if batch_inner else sequence
    lengths = (o.rotary_dim, o.rotary_offset, call.rest) if together == 1 else (o.rotary_dim, o.rotary_offset)
    strides = [s // vector for layout in (call.out, call.k_out, call.x, call.k) for s in layout.strides[:3]]
    numbers = (
        items, inner, *_divisor(inner), heads, k_heads, *_divisor(heads + k_heads), *(n // vector for n in lengths), rows,
        *(s // vector for s in call.table.strides[:2]), call.positions_b, *strides, batch_inner, o.transpose, o.scale,
    )  # fmt: skip
    return Plan(kernel.on(call.device), (-(-items // items_a_block), 1, 1), (threads, items_a_block, 1), numbers)


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
    for vector in _vectors(call.dtype, call.table.dtype) if all(layout.strides[3] == 1 for layout in layouts) else ():
        table_bytes = min(VECTOR_BYTES, vector * call.table.dtype.itemsize)
        aligned = call.alignment % (vector * call.dtype.itemsize) == 0 == call.table_alignment % table_bytes
        if aligned and not any(step % vector for step in steps):
            return vector
    return 0


def _vectors(dtype: torch.dtype, table: torch.dtype) -> list[int]:
    """Elements of v2's vectors: 16 bytes, 8 of 16-bit types, or a pair; but no pairs of float32 by a table of float64: too rare."""
    widest = VECTOR_BYTES // dtype.itemsize
    return [widest] if (dtype, table) == (torch.float32, torch.float64) else [n for n in (8, 4, 2) if n <= widest]


def _helpers(dtype: torch.dtype) -> Iterable[Kernel]:
    """What any version may need beside its own kernels."""
    return itertools.chain(
        (POSITIONS[name] for name in ID_TYPES.values()),
        (ANGLES[a, angle_maths(dtype, a)] for a in (torch.float32, torch.float64)),
        (SECTIONS[t] for t in table_dtypes(dtype)),
    )


def _v1_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    return [*_helpers(dtype), *(_V1[dtype, table] for table in table_dtypes(dtype))]


def _v2_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    vectors = ((table, vector) for table in table_dtypes(dtype) for vector in _vectors(dtype, table))
    keys = ((dtype, *which, *flags) for which in vectors for flags in itertools.product((False, True), repeat=2))
    return [*_v1_instances(dtype), *(_V2[key] for key in keys)]


def _v3_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    keys = itertools.product([dtype], table_dtypes(dtype), [VECTOR_BYTES // dtype.itemsize], (False, True), (False, True))
    return [*_v2_instances(dtype), *(_V3[key] for key in keys if dtype.itemsize < 8)]


VERSIONS = {
    "v1": Version("one thread a pair", _v1, instances=_v1_instances),
    "v2": Version("one thread a 16-byte vector of each half", _v2, instances=_v2_instances),
    "v3": Version("one thread a vector of two heads", _v3, instances=_v3_instances),
}
