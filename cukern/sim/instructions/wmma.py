"""wmma.load, wmma.store and wmma.mma, the instructions of nvcuda::wmma, for tiles of 16 x 16 x 16, 8 x 32 x
16 and 32 x 8 x 16 (tf32: 16 x 16 x 8; f64: 8 x 8 x 4).

PTX does not say which lane has which element of a fragment. Here, as on GPUs since sm_80, a fragment is made
of those of mma.sync, side by side. A warp accesses memory in units of 16 bytes, unit i by lane i % 32, line
by line: by rows of a row-major matrix, else by columns."""

import functools
import itertools
from typing import Any

import numpy as np

from cukern.sim.faults import BarrierFault, Misaligned
from cukern.sim.instructions.access import address_of, through
from cukern.sim.instructions.decode import Array, Context, Group, Machine, Step
from cukern.sim.instructions.matrix import EVERY_LANE, check_whole_warps, poison_of_product, put_all
from cukern.sim.instructions.warp import together
from cukern.sim.memory.spaces import CARRIERS, WINDOW, Space
from cukern.sim.numerics import tensor_core

_UNIT = 16  # bytes of an access, if a line is not shorter
_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "f64": 8, "f32": 4, "s32": 4}
_SHAPES = {
    "m16n16k16": (16, 16, 16),
    "m8n32k16": (8, 32, 16),
    "m32n8k16": (32, 8, 16),
    "m16n16k8": (16, 16, 8),
    "m8n8k4": (8, 8, 4),
}
_GROUP, _QUAD = np.arange(32) // 4, np.arange(32) % 4


@functools.cache
def places(role: str, shape: str, size: int) -> tuple[Array, Array]:
    """The row and the column of each element of a fragment, (elements of a lane, 32), in the order of the
    registers."""
    m, n, k = _SHAPES[shape]
    along = 2 if role in "cd" else max(1, 4 // size)  # neighbours in a lane
    width = 8 if role in "cd" else k
    parts = [[_QUAD * along + start + e for e in range(along)] for start in range(0, width, 4 * along)]
    inner, rows, tiles = [x for part in parts for x in part], range(0, m, 8), range(0, n, 8)
    if role == "a":
        found = [(_GROUP + row, x) for part, row in itertools.product(parts, rows) for x in part]
    elif role == "b":
        found = [(x, _GROUP + tile) for tile, x in itertools.product(tiles, inner)]
    else:
        found = [(_GROUP + row, x + tile) for tile, row, x in itertools.product(tiles, rows, inner)]
    return np.stack([row for row, _ in found]), np.stack([column for _, column in found])


class _Tile:
    """The matrix of a wmma.load or wmma.store: its addresses, and the way between its bytes and the registers
    of a fragment."""

    def __init__(self, c: Context):
        self.role, layout, shape, type_ = c.parts[2], c.parts[5], c.parts[6], c.parts[-1]
        modifiers, place = c.parts[7:-1], c.operands[c.parts[1] == "load"]
        self.space = modifiers[0].split("::")[0] if modifiers else "generic"
        plain = c.parts[3:5] == ["sync", "aligned"] and layout in ("row", "col") and len(modifiers) <= 1
        c.refuse(
            not plain
            or self.space not in ("generic", "global", "shared")
            or shape not in _SHAPES
            or type_ not in _BYTES
        )
        m, n, k = _SHAPES[shape]
        self.size, self.across = _BYTES[type_], layout == "col"
        self.rows, self.columns = {"a": (m, k), "b": (k, n)}.get(self.role, (m, n))
        self.at = places(self.role, shape, self.size)
        self.lines, self.length = (self.columns, self.rows) if self.across else (self.rows, self.columns)
        self.unit = min(_UNIT, self.length * self.size)
        self.units = self.lines * self.length * self.size // self.unit
        self.base, self.offset = c.address(place)
        rest = c.operands[2:]
        self.stride = c.source(rest[0], "u32") if rest else c.program.constant(self.length, 32)

    def addresses(self, m: Machine, group: Group) -> list[tuple[Array, Array, Array]]:
        """For each access of the warps: its rows of the group, its lanes and their addresses. Raises a Fault
        for wrong operands."""
        starts = np.broadcast_to(address_of(m, group, self.base, self.offset), group.lanes.shape)
        strides = m.spread(group, self.stride).astype(np.int64) * self.size
        m.poison.check(group, (self.stride,), "a stride")
        for values, what in ((starts, "address"), (strides, "stride")):
            apart = (values.reshape(-1, 32) != values.reshape(-1, 32)[:, :1]).reshape(-1)
            if apart.any():
                raise m.fault(
                    BarrierFault,
                    group.lanes[apart][0],
                    f"has another {what} than lane 0; all of a warp must give the same",
                )
        for bad, what in (
            (starts % np.uint64(32) != 0, "address is not a multiple of 32"),
            (strides % 16 != 0, "stride is not one of 16"),
        ):
            if bad.any():
                raise m.fault(
                    Misaligned,
                    group.lanes[bad][0],
                    f"accesses a matrix whose {what} bytes",
                    None,
                    group.lanes[bad],
                )
        found, a_line = [], self.length * self.size // self.unit
        for first in range(0, self.units, 32):
            unit = first + group.lanes % 32
            some = np.flatnonzero(unit < self.units)
            to = (unit // a_line * strides + unit % a_line * self.unit)[some]
            found.append((some, group.lanes[some], starts[some] + to.astype(np.uint64)))
        return found

    def registers(self, units: list[Array]) -> list[Array]:
        """The registers of a fragment, each (warps, 32), from the bytes of each access, (lanes, 16)."""
        bytes_ = np.concatenate([u.reshape(-1, min(32, self.units), self.unit) for u in units], axis=1)
        matrix = (
            np.ascontiguousarray(bytes_)
            .reshape(len(bytes_), -1)
            .view(f"u{self.size}")
            .reshape(-1, self.lines, self.length)
        )
        matrix = matrix.swapaxes(1, 2) if self.across else matrix
        width = max(4, self.size)
        elements = (
            matrix[:, self.at[0], self.at[1]].reshape(len(matrix), -1, width // self.size, 32).swapaxes(2, 3)
        )
        return [np.ascontiguousarray(r).view(f"u{width}")[..., 0] for r in np.moveaxis(elements, 1, 0)]

    def bytes_of(self, registers: list[Array]) -> list[Array]:
        """The inverse of `registers`."""
        parts = np.stack(registers, axis=1)
        elements = parts[..., None].view(f"u{self.size}").swapaxes(2, 3).reshape(len(parts), -1, 32)
        matrix = np.zeros((len(parts), self.rows, self.columns), elements.dtype)
        matrix[:, self.at[0], self.at[1]] = elements
        matrix = np.ascontiguousarray(matrix.swapaxes(1, 2) if self.across else matrix)
        units = matrix.view(np.uint8).reshape(len(parts), -1, self.unit)
        return [
            np.ascontiguousarray(units[:, i : i + 32]).reshape(-1, self.unit)
            for i in range(0, self.units, 32)
        ]


def load(c: Context) -> Step:
    """wmma.load: a fragment of half has 8 registers. Those of a smaller matrix have each element several
    times."""
    tile = _Tile(c)
    targets = [c.target(x) for x in c.items(c.operands[0])]

    def access(m: Machine, where: Space, lanes: Array, at: Array) -> Array:
        return where.load(m, lanes, at, tile.unit, poison=True)

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        m.order.clock.tick(m.pc)
        units, poison, origins = [], [], np.zeros(len(group.lanes), np.int64)
        for rows, lanes, at in tile.addresses(m, group):
            units.append(
                np.ascontiguousarray(through(m, tile.space, lanes, at, functools.partial(access, m))).view(
                    np.uint8
                )
            )
            fetched = m.poison.fetched(group, tile.unit)
            poison.append(
                np.zeros((len(rows), tile.unit), np.uint8)
                if fetched is None
                else fetched[0][rows] * np.uint8(0xFF)
            )
            origins = origins if fetched is None else np.maximum(origins, fetched[1])
        fragment = tile.registers(units)
        times = len(targets) // len(fragment)
        put_all(m, group, targets, fragment * times)
        if any(p.any() for p in poison):
            origins = np.repeat(origins.reshape(-1, 32).max(axis=1), 32)
            for target, bits in zip(targets, tile.registers(poison) * times, strict=True):
                m.poison.put(group, target.number, bits.reshape(-1), origins)

    return together(c, EVERY_LANE, act)


def store(c: Context) -> Step:
    """wmma.store. Uninitialized elements may go to shared memory, which remembers them, but not to a
    tensor."""
    tile = _Tile(c)
    sources = [c.source(x, "b64" if tile.size == 8 else "b32") for x in c.items(c.operands[1])]

    def access(m: Machine, where: Space, lanes: Array, at: Array, values: Array, codes: Array) -> Array:
        return where.store(m, lanes, at, tile.unit, values, 0, codes)

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        m.order.clock.tick(m.pc)
        units = tile.bytes_of([m.spread(group, r).reshape(-1, 32) for r in sources])
        codes = [np.zeros(len(unit), np.int64) for unit in units]
        parts = tile.addresses(m, group)
        if any(r in m.poisoned for r in sources):
            if any(
                tile.space == "global" or (tile.space == "generic" and not (at >> np.uint64(WINDOW)).all())
                for _, _, at in parts
            ):
                m.poison.check(group, sources, "a wmma.store to global memory")
            zeros = np.zeros(len(group.lanes), np.uint64 if tile.size == 8 else np.uint32)
            found = [m.poisoned[r][group.index] if r in m.poisoned else zeros for r in sources]
            bits = tile.bytes_of([mask.reshape(-1, 32) for mask in found])
            origin = int(m.poison.of(group, sources)[1].max())  # one of them
            codes = [
                ((unit != 0) * (1 << np.arange(tile.unit))).sum(axis=1) | origin + 2 << 16 for unit in bits
            ]
        for (_, lanes, at), unit, code in zip(parts, units, codes, strict=True):
            values: Any = unit.view(CARRIERS[tile.unit])[:, 0]
            through(m, tile.space, lanes, at, functools.partial(access, m), values, code)

    return together(c, EVERY_LANE, act)


def multiply(c: Context) -> Step:
    """wmma.mma: an mma.sync for each 8 columns and each 16 rows. The layouts in its name matter to wmma.load
    alone."""
    shape, *types = [p for p in c.parts[6:] if p not in ("rn", "satfinite")]
    saturate = ["satfinite"] if "satfinite" in c.parts else []
    c.refuse(c.parts[2:4] != ["sync", "aligned"] or shape not in _SHAPES)
    if len(types) == 2:  # of d and c; a and b are f16
        types = [types[0], "f16", "f16", types[1]]
    rows, n, k = _SHAPES[shape]
    wide = types[0] == "f64"
    height = 8 if wide else 16  # of a product
    function = tensor_core.mma(
        ".".join(["mma.sync.aligned", f"m{height}n8k{k}", "row.col", *saturate, *types])
    )
    d, *from_ = c.operands
    targets = [c.target(x) for x in c.items(d)]
    used = max(4, _BYTES[types[1]])  # bytes of a register
    a, b, old = ([c.source(x, "b64" if wide else "b32") for x in c.items(operand)] for operand in from_)
    a, b = a[: rows * k * _BYTES[types[1]] // used // 32], b[: n * k * _BYTES[types[1]] // used // 32]
    products = _products(a, b, old, rows, n, 0 if wide else c.program.constant(0, 32))

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        results, poison = [], []
        for mine in products:
            count = len(targets) // len(products)
            results += function(
                *([m.spread(group, r).reshape(-1, 32) for r in registers] for registers in mine)
            )[:count]
            poison.append(poison_of_product(m, group, mine, len(mine[2]), height) if m.poisoned else None)
        put_all(m, group, targets, results)
        each = len(targets) // len(products)
        for i, found in enumerate(poison):
            for target, bits in zip(targets[i * each :], found[0][:each] if found else (), strict=False):
                m.poison.put(group, target.number, bits.reshape(-1), found[1] if found else bits)

    return together(c, EVERY_LANE, act)


def _products(
    a: list[int], b: list[int], old: list[int], rows: int, columns: int, zero: int
) -> list[list[list[int]]]:
    """The registers of A, B and C of each mma.sync, in the order of C. `zero`: a register for the missing 8
    rows, if there are only 8."""
    blocks, tiles = rows // 8, columns // 8
    found = []
    for tile in range(tiles):
        mine = [x[tile * len(x) // tiles : (tile + 1) * len(x) // tiles] for x in (b, old)]
        for block in range(0, blocks, 2):
            some = [r for i in range(0, len(a), blocks) for r in a[i + block : i + min(block + 2, blocks)]]
            sums = mine[1][block * len(mine[1]) // blocks : (block + 2) * len(mine[1]) // blocks]
            if blocks == 1 and zero:
                some, sums = [x for r in some for x in (r, zero)], sums + [zero] * len(sums)
            found.append([some, mine[0], sums])
    return found
