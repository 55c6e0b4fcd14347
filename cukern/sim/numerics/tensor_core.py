"""mma.sync, wgmma and ldmatrix: which lane of a warp holds which element of a tile, and the product of tiles.

The layouts are those of the PTX ISA. Let group = lane // 4 and quad = lane % 4. A register holds two 16-bit
elements that are neighbours along k (columns 2*quad and 2*quad + 1 of an eight-wide part of the tile) or one
tf32 (column quad of a four-wide part). The registers of A go down the rows first (group, group + 8), then
along k; those of B go along k, in column `group` of C.

The products are exact; they and c are added in float64, and the total is rounded once, to nearest. A GPU
aligns all terms to the largest and truncates. So its float32 results differ from these by at most (k + 2) *
2^-23 times the largest term (of the k products and c), and its float16 results by one more rounding."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import floats, fp8
from cukern.sim.numerics.floats import FORMATS, Array, Format

Registers = Sequence[Array]
_LANE = np.arange(32)
_GROUP = _LANE // 4
_QUAD = _LANE % 4
_CARRIERS: dict[str, Any] = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "tf32": np.uint32}
_NAMES = {"s8": "i1", "u8": "u1"}
_SHAPES = {"m16n8k16": ("f16", "bf16"), "m16n8k8": ("f16", "bf16", "tf32"), "m16n8k4": ("tf32",)}
_SHAPES_64 = ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")


@functools.cache
def mma(opcode: str) -> Callable[[Registers, Registers, Registers], list[Array]]:
    """The function of an mma.sync: registers of A, B and C, each (warps, 32) uint32, to those of D. Raises
    NotSimulated.

    For example "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"."""
    base, *parts = opcode.split(".")
    other = _other_mma(opcode)
    if other is not None:
        return other
    if base != "mma" or parts[:2] != ["sync", "aligned"] or parts[3:5] != ["row", "col"] or len(parts) != 9:
        raise NotSimulated(opcode)
    shape = parts[2]
    d, a, b, c = parts[5:]
    if a != b or a not in _SHAPES.get(shape, ()) or {d, c} - ({"f32", "f16"} if a == "f16" else {"f32"}):
        raise NotSimulated(opcode)
    return functools.partial(_mma, a, c, d)


def _mma(factors: str, sums: str, results: str, a: Registers, b: Registers, c: Registers) -> list[Array]:
    return _rounded(FORMATS[results], _product(factors, factors, a, b) + _elements(sums, c))


def _product(name_a: str, name_b: str, a: Registers, b: Registers) -> Array:
    """The products of tiles, in float64: (elements of a lane, warps, 32)."""
    warps = len(a[0])
    rows = _raw(name_a, a).reshape(len(a) // 2, 2, warps, 8, -1).transpose(2, 1, 3, 0, 4)
    columns = _raw(name_b, b).reshape(len(b), warps, 8, -1).transpose(1, 0, 3, 2)
    tiles = _values(name_a, rows).reshape(warps, 16, -1) @ _values(name_b, columns).reshape(warps, -1, 8)
    return tiles.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, warps, 32)


def _raw(name: str, registers: Registers) -> Array:
    """The bits of the elements: (registers, warps * 32 * elements of a register)."""
    raw = np.ascontiguousarray(np.concatenate(registers))
    if name == "tf32":
        raw &= np.uint32(0xFFFFE000)  # the tensor cores ignore the other bits
    return raw.view(_CARRIERS.get(name, np.uint8)).reshape(len(registers), -1)


def _values(name: str, bits: Array) -> Array:
    bits = np.ascontiguousarray(bits)
    if name in FORMATS:
        return FORMATS[name].values(bits).astype(np.float64)
    return fp8.decode(name, bits) if name in fp8.FINITE else bits.view(name).astype(np.float64)


def _elements(name: str, registers: Registers) -> Array:
    """The values of C, in float64: (elements of a lane, warps, 32)."""
    raw = _raw(name, registers).reshape(len(registers), -1, 32, 4 // len(registers))
    return _values(name, raw.transpose(0, 3, 1, 2)).reshape(4, -1, 32)


def _rounded(fmt: Format, total: Array) -> list[Array]:
    """The registers of a result; two f16 share one."""
    d = floats.round_to(fmt, total)
    return list(d if d.dtype == np.uint32 else d[::2].astype(np.uint32) | d[1::2].astype(np.uint32) << 16)


def _other_mma(opcode: str) -> Callable[[Registers, Registers, Registers], list[Array]] | None:
    """The function of an mma.sync of 8-bit integers, 8-bit floats or f64; None for another."""
    match = re.fullmatch(
        r"mma\.sync\.aligned\.(m\d+n8k\d+)\.row\.col(\.satfinite)?\.(s32|f32|f16|f64)\.(\w+)\.(\w+)\.(\w+)",
        opcode,
    )
    if match is None:
        return None
    shape, saturate, d, a, b, c = match.groups()
    narrow = {"s8", "u8"} if d == "s32" else {"f64"} if d == "f64" else {"e4m3", "e5m2"}
    if d != c or {a, b} - narrow or shape not in (_SHAPES_64 if d == "f64" else ("m16n8k16", "m16n8k32")):
        return None
    if d == "f64":
        return functools.partial(_mma64, int(shape[1 : shape.index("n")]), int(shape.partition("k")[2]))

    def function(a_: Registers, b_: Registers, c_: Registers) -> list[Array]:
        product = _product(_NAMES.get(a, a), _NAMES.get(b, b), a_, b_)
        if d != "s32":
            return _rounded(FORMATS[d], product + _elements(d, c_))
        # the sum of k products is exact in float64
        total = product.astype(np.int64) + np.stack(c_).view(np.int32)
        total = np.clip(total, -(1 << 31), (1 << 31) - 1) if saturate else total
        return list(total.astype(np.int32).view(np.uint32))

    return function


def _mma64(rows: int, k: int, a: Registers, b: Registers, c: Registers) -> list[Array]:
    """f64: one element in each register, rows first. A GPU chains fused multiply-adds along k for m8n8k4; so
    do all shapes here."""
    warps = len(a[0])
    halves = range(rows // 8)
    tile_a = (
        np.stack(a, axis=1)
        .view(np.float64)
        .reshape(warps, k // 4, rows // 8, 8, 4)
        .transpose(0, 2, 3, 1, 4)
        .reshape(warps, rows, k)
    )
    tile_b = (
        np.stack(b, axis=1).view(np.float64).reshape(warps, k // 4, 8, 4).swapaxes(2, 3).reshape(warps, k, 8)
    )
    total = np.concatenate(
        [np.stack(c[2 * i : 2 * i + 2], axis=2).view(np.float64).reshape(warps, 8, 8) for i in halves], axis=1
    )
    fma = floats.arithmetic("fma", FORMATS["f64"])
    for i in range(k):
        factors = np.broadcast_arrays(tile_a[:, :, i, None], tile_b[:, None, i], total)
        total = fma(*[np.ascontiguousarray(x).view(np.uint64) for x in factors]).view(np.float64)
    d = np.ascontiguousarray(total).view(np.uint64).reshape(warps, rows // 8, 32, 2)
    return [np.ascontiguousarray(d[:, half, :, i]) for half in halves for i in (0, 1)]


def wgmma(opcode: str) -> tuple[int, Callable[[Registers, Array, Registers, Array], list[Array]]]:
    """A wgmma: the number of columns, and a function. Its arguments are the registers of a, b as (warps,
    columns, 32 bytes along k), the registers of c, and a flag per warp: c is added. It returns the registers
    of d. Each warp computes the mma.sync of its 16 rows. Example:
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"."""
    match = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(k(?:8|16|32))\.(\w+)\.(\w+\.\w+)(\.satfinite)?", opcode
    )
    if match is None or int(match[1]) % 8:
        raise NotSimulated(opcode)
    # a tile has 8 columns
    tiles = int(match[1]) // 8
    k, sums, factors, saturate = match.groups("")[1:]
    if k != {"tf32.tf32": "k8", "bf16.bf16": "k16", "f16.f16": "k16"}.get(factors, "k32"):
        raise NotSimulated(opcode)
    try:
        product = mma(f"mma.sync.aligned.m16n8{k}.row.col{saturate}.{sums}.{factors}.{sums}")
    except NotSimulated:
        raise NotSimulated(opcode) from None

    def function(a: Registers, b: Array, c: Registers, kept: Array) -> list[Array]:
        # [tile of a warp][column][word along k]
        words = np.ascontiguousarray(b).view(np.uint32).reshape(-1, 8, 8)
        before = np.where(kept[:, None], np.stack(c, axis=1), np.uint32(0)).reshape(len(words), -1, 32)
        held = [np.repeat(r, tiles, axis=0) for r in a]
        tile = [words[:, _GROUP, _QUAD + 4 * i] for i in (0, 1)]
        d = product(held, tile, list(np.moveaxis(before, 1, 0)))
        return _apart(np.stack(d, axis=1).reshape(len(b), -1, 32))

    return 8 * tiles, function


def rows_of_a(rows: Array) -> list[Array]:
    """The registers of operand a, each (warps, 32), from the rows (warps, 16, 32 bytes along k)."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    return [words[:, _GROUP + 8 * (i % 2), _QUAD + 4 * (i // 2)] for i in range(4)]


def described(words: Array, number: Array, down: bool) -> Array:
    """The address of 16 bytes of a wgmma operand, from its matrix descriptor. K-major: half `number` % 2
    along k of row (of b: column) `number` // 2. MN-major (`down`): eight rows from `number` // 16 * 8 on, at
    index `number` % 16 along k. Raises NotSimulated for a base offset, or several swizzles at once."""
    kinds = set((words >> np.uint64(62)).tolist())
    offsets = words >> np.uint64(49) & np.uint64(7)
    if len(kinds) > 1 or offsets.any():
        raise NotSimulated(
            "wgmma with a base offset in its matrix descriptor"
            if offsets.any()
            else "wgmma with several swizzles"
        )
    start, first, second = (
        (words >> np.uint64(bit) & np.uint64(0x3FFF)) << np.uint64(4) for bit in (0, 16, 32)
    )
    number = number.astype(np.uint64)
    units = np.uint64((1, 8, 4, 2)[kinds.pop()])
    unit = np.uint64(16)
    eight, in_eight, half = (
        (number // 16, number % 8, number // 8 % 2) if down else (number // 16, number // 2 % 8, number % 2)
    )
    if units == 1:
        return start + eight * second + in_eight * unit + half * first
    if down:
        place = (
            start + eight // units * first + eight % units * unit + half * second + in_eight * units * unit
        )
    else:
        place = start + eight * second + in_eight * units * unit + half * unit
    return place ^ (place >> np.uint64(7) & units - np.uint64(1)) << np.uint64(4)


def by_rows(parts: Array, down: bool) -> Array:
    """16-byte parts (warps, count, 8 elements) in the order of `described`, as (warps, rows, 32 bytes along
    k)."""
    if not down:
        return parts.reshape(len(parts), -1, 16)
    return np.ascontiguousarray(parts.reshape(len(parts), -1, 16, 8).swapaxes(2, 3)).reshape(
        len(parts), -1, 16
    )


def _apart(registers: Array) -> list[Array]:
    """(warps, registers, 32) as one array per register."""
    return [np.ascontiguousarray(r) for r in np.moveaxis(registers, 1, 0)]


def stmatrix(registers: Registers, transposed: bool = False) -> Array:
    """stmatrix: the inverse of ldmatrix, as (warps, 8 * tiles, 16 bytes)."""
    tiles = np.stack(registers, axis=1).astype(np.uint32).view(np.uint16).reshape(len(registers[0]), -1, 8, 8)
    if transposed:
        tiles = tiles.swapaxes(2, 3)
    return np.ascontiguousarray(tiles).view(np.uint8).reshape(len(tiles), -1, 16)


def ldmatrix(rows: Array, transposed: bool = False) -> list[Array]:
    """ldmatrix .x1, .x2 or .x4: rows (warps, 8 * tiles, 16 bytes) of tiles of 8 x 8 16-bit elements, to one
    (warps, 32) register per tile.

    A lane gets elements 2*quad and 2*quad + 1 of row `group`; of column `group`, if `transposed` (.trans)."""
    tiles = np.ascontiguousarray(rows).view(np.uint16).reshape(len(rows), -1, 8, 8)
    if transposed:
        tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
    return list(tiles.view(np.uint32).reshape(*tiles.shape[:2], 32).swapaxes(0, 1))
