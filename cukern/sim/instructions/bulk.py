"""Bulk copies (TMA): cp.async.bulk, cp.async.bulk.tensor and cp.reduce.async.bulk. PTX ISA,
cp.async.bulk.tensor and tensors.

A copy to shared memory reports its bytes to an mbarrier, and is in flight until the phase has ended. A copy
to global memory is executed at once, and counts as reading shared memory until its thread waits. A read of
its result before the wait is not reported. A copy is executed in units: the largest power of 2, of at most 16
bytes, that divides the rows of the tensor. A swizzle exchanges units of 16 bytes by their address in shared
memory."""

import math
from typing import NamedTuple

import numpy as np

from cukern.runtime.launch import tensor_map
from cukern.sim.faults import Fault, Misaligned, OutOfBounds
from cukern.sim.instructions import atomics
from cukern.sim.instructions.access import address_of
from cukern.sim.instructions.decode import UNSIGNED, Array, Context, Group, Machine, Step
from cukern.sim.memory.spaces import CARRIERS, IN_FLIGHT, RANK, WINDOW, each
from cukern.sim.ptx.module import WIDTHS, Address, Immediate, immediate_value

_UNIT = 16
_HINTS = {
    "cp", "reduce", "async", "bulk", "tensor", "tile", "shared::cluster", "shared::cta", "global",
    "bulk_group", "L2::cache_hint",
}  # fmt: skip
_HINTS |= {"mbarrier::complete_tx::bytes", "multicast::cluster", *(f"{n}d" for n in range(1, 6))}
_OPERATIONS = {"add", "min", "max", "and", "or", "xor", "inc", "dec"}
_ALIGNMENT = 128  # of a box in shared memory
_NAN = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}
# of a tensor map, for reductions
_CODES = {1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 9: "bf16"}


class Units(NamedTuple):
    """The units of the copies of some lanes: row of the group, address in global and offset in shared memory,
    and which of them exist."""

    rows: Array
    outside: Array  # addresses in global memory
    inside: Array  # offsets from the start of the box in shared memory
    exists: Array
    size: int
    fill: bytes  # of those that do not


def copy(c: Context) -> Step:
    if c.parts[-1] == "commit_group":
        return _then_go(lambda m, group: m.bulk.commit(group.lanes))
    if "wait_group" in c.parts and isinstance(c.operands[0], Immediate):
        newest = int(immediate_value(c.operands[0]))
        return _then_go(lambda m, group: m.bulk.wait(group.lanes, newest))
    unknown = set(c.parts) - _HINTS
    operation, types = unknown & _OPERATIONS, [t for t in c.types if t in unknown]
    loads = "mbarrier::complete_tx::bytes" in c.parts and "global" in c.parts
    stores = "bulk_group" in c.parts and "global" in c.parts
    c.refuse(
        unknown - operation - set(types) - {"noftz"}
        or not (loads or stores)
        or (loads and operation)
        or len(operation) > 1
    )
    return _Copy(c, loads, next(iter(operation), ""), types[0] if types else "").run


def _then_go(act: Step) -> Step:
    def run(m: Machine, group: Group) -> None:
        act(m, group)
        m.go(m.pc + 1, group)

    return run


class _Copy:
    def __init__(self, c: Context, loads: bool, operation: str, type_: str):
        self.c, self.loads, self.operation, self.type = c, loads, operation, type_
        self.rounds = False  # float32 to TF32
        self.tensor, operands = "tensor" in c.parts, list(c.operands)
        outside, inside = operands[:2] if not loads else operands[1::-1]
        self.outside, self.inside = c.address(outside), c.address(inside)
        assert isinstance(outside, Address)
        self.at = [c.source(x, "s32") for x in outside.coordinates]
        c.refuse(self.tensor != bool(self.at) or (self.tensor and f"{len(self.at)}d" not in c.parts))
        rest = operands[2:]
        self.count = c.program.constant(0, 32) if self.tensor else c.source(rest.pop(0), "u32")
        self.barrier = c.address(rest.pop(0)) if loads else (0, 0)
        self.ranks = c.source(rest.pop(0), "u16") if "multicast::cluster" in c.parts else None

    def run(self, m: Machine, group: Group) -> None:
        m.pc = self.c.pc
        m.poison.check(
            group, (self.count, *self.at, *([self.ranks] if self.ranks is not None else [])), "a copy"
        )
        inside = each(address_of(m, group, *self.inside), group.lanes)
        units = self._boxes(m, group, inside) if self.tensor else self._contiguous(m, group, inside)
        (self._load if self.loads else self._store)(m, group, inside, units)
        m.go(m.pc + 1, group)

    # ---- what is copied

    def _contiguous(self, m: Machine, group: Group, inside: Array) -> Units:
        outside = each(address_of(m, group, *self.outside), group.lanes)
        sizes = m.spread(group, self.count).astype(np.int64)
        target, source = ("the destination", "the source")[:: 1 if self.loads else -1]
        for what, values in (("the size", sizes), (target, inside), (source, outside)):
            bad = values.astype(np.int64) % _UNIT != 0
            if bad.any():
                row = int(bad.argmax())
                number = int(values[row]) if what == "the size" else hex(int(values[row]))
                whole = f"{what} of a cp.async.bulk is {number}, which is not a multiple of {_UNIT}"
                raise m.fault(Fault if what == "the size" else Misaligned, group.lanes[row], whole)
        size = min(_UNIT, WIDTHS[self.type] // 8) if self.operation else _UNIT
        times = sizes // size
        rows = np.repeat(np.arange(len(sizes)), times)
        steps = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)) * size
        return Units(
            rows, outside[rows] + steps.astype(np.uint64), steps, np.ones(len(rows), bool), size, b""
        )

    def _boxes(self, m: Machine, group: Group, inside: Array) -> Units:
        maps = each(address_of(m, group, *self.outside), group.lanes)
        bad = inside.astype(np.int64) % _ALIGNMENT != 0
        if bad.any():
            row = int(bad.argmax())
            what = (
                f"copies a box at the offset {int(inside[row])} of shared memory, which is not a multiple "
                f"of {_ALIGNMENT}"
            )
            raise m.fault(Misaligned, group.lanes[row], what)
        at = np.stack([m.spread(group, x).view(np.int32).astype(np.int64) for x in self.at])
        found = []
        for address in np.unique(maps).tolist():
            rows = np.flatnonzero(maps == address)
            box = self._box(m, group.lanes[rows[:1]], address)
            self._check_start(m, box, group.lanes[rows], at[:, rows])
            found.append(self._units(m, box, rows, at[:, rows], inside))
        if len({(u.size, u.fill) for u in found}) > 1:
            raise m.not_simulated(f"one {self.c.opcode} with several tensor maps")
        rows, outside, within, exists = (np.concatenate([u[i] for u in found]) for i in range(4))
        return Units(rows, outside, within, exists, found[0].size, found[0].fill)

    def _box(self, m: Machine, lanes: Array, address: int) -> tensor_map.Box:
        """The tensor map at an address."""
        if address >> WINDOW:
            what = (
                "copies a box, but the tensor map is in another memory than the parameters: is it a `const "
                "__grid_constant__` parameter?"
            )
            raise m.fault(Fault, lanes[0], what)
        parts = np.uint64(address) + np.arange(0, tensor_map.BYTES, 8, dtype=np.uint64)
        data = m.launched.memory.load(m, np.repeat(lanes, len(parts)), parts, 8).tobytes()
        box = tensor_map.decode(data)
        if box is None or len(box.sizes) != len(self.at):
            is_ = (
                "is no tensor map (see cukern.tensor_map)"
                if box is None
                else f"is one of a tensor with {len(box.sizes)} dimensions"
            )
            raise m.fault(
                Fault,
                lanes[0],
                f"copies a box of {len(self.at)} dimensions, but what is at its address {is_}",
            )
        if box.swizzle and box.box[0] * box.itemsize != box.swizzle:
            what = (
                f"a box whose rows have {box.box[0] * box.itemsize} bytes, less than the swizzle of "
                f"{box.swizzle}"
            )
            raise m.not_simulated(what)
        if self.operation:
            self.type = _CODES.get(box.code, "")
        self.rounds = box.code == tensor_map.TF32
        return box

    def _check_start(self, m: Machine, box: tensor_map.Box, lanes: Array, at: Array) -> None:
        """Where a GPU stops with an illegal instruction (measured on an H100). `at`: (dimensions, lanes), the
        coordinates."""
        multiple = f"must be a multiple of {_UNIT // box.itemsize} elements ({_UNIT} bytes)"
        rules: list[tuple[int, Array, type[Fault], str]] = [
            (0, at[0] * box.itemsize % _UNIT != 0, Misaligned, multiple)
        ]
        if not self.loads:
            negative = "must not be negative in a store: only a load may begin before the tensor"
            rules += [(i, x < 0, OutOfBounds, negative) for i, x in enumerate(at)]
        for i, bad, kind, rule in rules:
            if bad.any():
                row = int(bad.argmax())
                which = "innermost coordinate" if i == 0 else f"coordinate {i} (the innermost is 0)"
                raise m.fault(
                    kind,
                    lanes[row],
                    f"copies a box whose {which} is {int(at[i, row])}, but it {rule}",
                    None,
                    lanes[bad],
                )

    def _units(self, m: Machine, box: tensor_map.Box, rows: Array, at: Array, inside: Array) -> Units:
        """`at`: (dimensions, rows), the coordinates."""
        row_bytes, first = box.box[0] * box.itemsize, at[0] * box.itemsize
        size = math.gcd(_UNIT, box.sizes[0] * box.itemsize)
        size = min(size, box.itemsize) if self.operation else size
        axes = [np.arange(0, row_bytes, size), *(np.arange(n) for n in box.box[1:])]
        # (dimensions, units)
        index = np.stack([x.reshape(-1) for x in np.meshgrid(*axes[::-1], indexing="ij")][::-1])
        place = index[:, None] + np.concatenate((first[None], at[1:]))[:, :, None]
        ends = np.array([box.sizes[0] * box.itemsize, *box.sizes[1:]])
        exists = ((place >= 0) & (place < ends[:, None, None])).all(axis=0)
        steps = np.array([1, *box.strides])
        outside = (
            np.uint64(box.address) + (place * steps[:, None, None]).sum(axis=0).astype(np.uint64)
        ).reshape(-1)
        offsets = np.arange(index.shape[1]) * size
        start = inside[rows].astype(np.int64)[:, None]
        swizzled = start + offsets
        if box.swizzle:
            swizzled = swizzled ^ (swizzled >> 7 & box.swizzle // 16 - 1) << 4
        fill = (
            np.array([_NAN[box.itemsize]], UNSIGNED[8 * box.itemsize]).tobytes()
            if box.fill == "nan"
            else b"\0"
        )
        every = np.repeat(rows, index.shape[1])
        return Units(
            every,
            outside,
            (swizzled - start).reshape(-1),
            exists.reshape(-1),
            size,
            fill * (size // len(fill)),
        )

    # ---- the copy

    def _load(self, m: Machine, group: Group, inside: Array, units: Units) -> None:
        lanes, size = group.lanes[units.rows], units.size
        values = np.repeat(np.frombuffer(units.fill or bytes(size), CARRIERS[size]), len(lanes))
        codes = np.zeros(len(lanes), np.int64)
        some = np.flatnonzero(units.exists)
        if len(some):
            m.order.clock.tick(m.pc)
            memory = m.launched.memory
            values[some] = memory.load(m, lanes[some], units.outside[some], size, poison=True)
            codes[some] = memory.unwritten(m, lanes[some], units.outside[some], size)
            m.poison.fresh.clear()
        if self.rounds:  # to nearest, ties to even
            bits = values.view(np.uint32)
            bits[:] = np.where(
                bits >> 23 & 255 == 255, bits, bits + 0xFFF + (bits >> 13 & 1) & ~np.uint32(0x1FFF)
            )
        barrier = each(address_of(m, group, *self.barrier), group.lanes)
        for targets, barriers, rows in self._receivers(m, group, inside, barrier):
            mine = np.isin(units.rows, rows)
            every = units.rows[mine]
            m.order.clock.tick(m.pc)
            positions = m.mbarriers.find(m.group(group.lanes[rows]), "cluster", barriers[rows])
            to = targets[every] + units.inside[mine].astype(np.uint64)
            at = m.spaces["cluster"].store(m, lanes[mine], to, size, values[mine], IN_FLIGHT, codes[mine])
            of_row = np.full(len(group.lanes), -1)
            of_row[rows] = positions
            m.mbarriers.bring(lanes[mine], of_row[every], at, size)

    def _receivers(
        self, m: Machine, group: Group, inside: Array, barrier: Array
    ) -> list[tuple[Array, Array, Array]]:
        """The addresses in shared memory and of the mbarriers, and the rows of the group that copy there;
        several for a multicast."""
        if self.ranks is None:
            return [(inside, barrier, np.arange(len(group.lanes)))]
        masks, low = m.spread(group, self.ranks).astype(np.int64), np.uint64((1 << RANK) - 1)
        found = []
        for rank in range(16):
            rows = np.flatnonzero(masks >> rank & 1)
            if len(rows):
                found.append(
                    (
                        inside & low | np.uint64(rank + 1 << RANK),
                        barrier & low | np.uint64(rank + 1 << RANK),
                        rows,
                    )
                )
        return found

    def _store(self, m: Machine, group: Group, inside: Array, units: Units) -> None:
        some = np.flatnonzero(units.exists)
        if not len(some):
            return
        rows, size = units.rows[some], units.size
        lanes, from_ = group.lanes[rows], inside[rows] + units.inside[some].astype(np.uint64)
        m.order.clock.tick(m.pc)
        positions = m.shared.place(m, lanes, from_, size, "reads")[0]
        m.shared.check_proxy(m, lanes, positions, size)
        values = m.shared.load(m, lanes, from_, size)
        m.bulk.start(m.pc, lanes, positions, size, read=True)
        m.order.clock.tick(m.pc)
        if self.operation:
            atomics.reduce(m, self.c, self.operation, self.type, lanes, units.outside[some], values)
        else:
            m.launched.memory.store(m, lanes, units.outside[some], size, values)
