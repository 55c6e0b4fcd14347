"""Uninitialized bits of registers. They travel with the values and are judged where they matter.

Moves, bit operations, shuffles, and stores to shared or local memory propagate them bit by bit. Other
arithmetic makes the whole result uninitialized; packed 16-bit arithmetic, only the affected half. A store to
a tensor, an address, a branch, a predicate or an atomic that depends on them is a fault. The message names
where they came from."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from cukern.sim.faults import Fault, Race, Uninitialized
from cukern.sim.machine.batch import Batch, Group
from cukern.sim.memory.spaces import Part, Space, first_row
from cukern.sim.numerics.integers import UNSIGNED, Array

Step = Callable[[Any, Group], None]


class _Origin(NamedTuple):
    pc: int | None  # None: the place where the value is used
    describe: Callable[[int], str]  # of a lane


class Flow(NamedTuple):
    """How an instruction that only computes passes uninitialized bits on.

    `kind`: "move": it does to the bits what it does to the values, if its `control` registers are
    initialized; "and", "or", "mix": bit operations; "all": each result depends on all bits; "halves": each
    half of a result on the same halves of the sources; "": it does not compute, and its step takes care of
    that itself."""

    kind: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    control: tuple[int, ...] = ()


class Poison:
    def __init__(self, m: Batch, undefined: Iterable[int]):
        """`undefined`: the registers that the kernel may read before it writes them."""
        self.m = m
        # register -> array by lane: index of the origin * lanes + lane of the origin
        self.origins = {r: np.arange(m.lanes) for r in undefined}
        self.sources = [_Origin(None, lambda lane: "uses a variable that no statement has set")]
        # lanes, uninitialized bytes, origins; of the current load
        self.fresh: list[tuple[Array, Array, Array]] = []
        # origin that is a wgmma in flight -> its commit group by lane, or -1
        self.flying: dict[int, Array] = {}
        self.off = Uninitialized in m.launched.options.off
        for r in () if self.off else self.origins:
            m.poisoned[r] = self._ones(r, m.lanes)

    # ---- where it comes from

    def loaded(self, space: Space, part: Part, size: int, missing: Array) -> None:
        """A load of uninitialized bytes; `missing`: (rows, size)."""
        if self.off:
            return
        rows = np.flatnonzero(missing.any(axis=1))
        lanes, at = part.lanes[rows], part.at[rows]

        assert part.shadow is not None
        known = part.shadow.poison_origins(at, size)

        def describe(lane: int) -> str:
            row = (*np.flatnonzero(lanes == lane), 0)[0]
            what = "hold an uninitialized value" if known[row] else "nobody wrote"
            return f"reads {size} bytes that {what}, {space.describe(part.region, int(at[row]))}"

        self.sources.append(_Origin(self.m.pc, describe))
        here = (len(self.sources) - 1) * self.m.lanes + lanes
        self.fresh.append((lanes, missing[rows], np.where(known > 1, known - 2, here)))

    def fetched(self, group: Group, size: int) -> tuple[Array, Array] | None:
        """The uninitialized bytes that the last loads read for each lane of the group, and their origins."""
        if not self.fresh:
            return None
        lanes_, fresh, self.fresh = self.m.lanes, self.fresh, []
        flags, origins = np.zeros((lanes_, size), bool), np.zeros(lanes_, np.int64)
        for lanes, missing, origin in fresh:
            flags[lanes], origins[lanes] = missing, origin
        return flags[group.lanes], origins[group.lanes]

    def shuffled(self, describe: Callable[[int], str]) -> int:
        """A new origin: a register of a lane that is not there."""
        self.sources.append(_Origin(self.m.pc, describe))
        return (len(self.sources) - 1) * self.m.lanes

    # ---- results of wgmma in flight

    def start(self, group: Group, registers: Iterable[int], numbers: Array) -> None:
        """These registers are results in flight of these commit groups."""
        m = self.m
        self.sources.append(_Origin(m.pc, lambda lane: "uses the result of a wgmma"))
        number, flight = len(self.sources) - 1, np.full(m.lanes, -1)
        flight[group.lanes] = numbers
        self.flying[number] = flight
        origins = number * m.lanes + np.arange(m.lanes)
        shared: dict[int, Array] = {}
        for r in registers:
            if group.whole:
                width = m.program.widths[r]
                shared[width] = shared[width] if width in shared else self._ones(r, m.lanes)
                m.poisoned[r], self.origins[r] = shared[width], origins
            else:
                self.put(group, r, self._ones(r, len(group.lanes)), origins[group.lanes])

    def land(self, lanes: Array, limits: Array) -> None:
        """The commit groups of these lanes with lower numbers than their limits have ended."""
        ended = {}
        for number, flight in list(self.flying.items()):
            rows = lanes[(flight[lanes] >= 0) & (flight[lanes] < limits)]
            if len(rows):
                flight[rows], ended[number] = -1, rows
                if flight.max() < 0:
                    del self.flying[number]
        m, cleared = self.m, {}
        for r, mask in list(m.poisoned.items()) if ended else []:
            origins = self.origins[r]
            key = id(mask), id(origins)  # registers may share both
            if key not in cleared:
                new = mask.copy()
                for number, rows in ended.items():
                    new[rows[origins[rows] // m.lanes == number]] = 0
                cleared[key] = new, mask, bool(new.any())
            m.poisoned[r] = cleared[key][0]
            if not cleared[key][2]:
                del m.poisoned[r]

    def _check_landed(self, group: Group, flags: Array, origins: Array) -> None:
        m = self.m
        early = flags & np.isin(origins // m.lanes, list(self.flying))
        if early.any() and not m.mutes(Race):
            row = first_row(early)
            line = m.program.location(self.sources[int(origins[row]) // m.lanes].pc or 0)
            what = (
                f"uses a result of the wgmma at {line}, which may still be written: a wgmma.wait_group "
                f"(after a wgmma.commit_group)"
            )
            raise m.fault(Race, group.lanes[row], f"{what} is missing between the two")

    # ---- where it goes

    def _ones(self, register: int, count: int) -> Array:
        dtype = UNSIGNED[self.m.program.widths[register]]
        return np.full(count, True if dtype == np.bool_ else np.iinfo(dtype).max, dtype)

    def put(self, group: Group, register: int, bits: Array, origins: Array) -> None:
        """Set the uninitialized bits of a register of the group's lanes."""
        m, dtype = self.m, UNSIGNED[self.m.program.widths[register]]
        if not bits.any():
            m.clean(group, register)
            return
        mask = m.poisoned.get(register)
        mask = np.zeros(m.lanes, dtype) if mask is None else mask.copy()
        mask[group.index] = bits
        origin = self.origins.get(register)
        origin = np.zeros(m.lanes, np.int64) if origin is None else origin.copy()
        origin[group.index] = origins
        m.poisoned[register], self.origins[register] = mask, origin

    def of(self, group: Group, registers: Iterable[int], moves: bool = False) -> tuple[Array, Array]:
        """Which lanes of the group have uninitialized bits in one of these registers, and their origins.
        Raises Race for results of a wgmma in flight, unless the instruction only `moves` them."""
        flags, origins = np.zeros(len(group.lanes), bool), np.zeros(len(group.lanes), np.int64)
        for r in registers:
            mask = self.m.poisoned.get(r)
            if mask is not None:
                mine = mask[group.index] != 0
                origins = np.where(mine & ~flags, self.origins[r][group.index], origins)
                flags |= mine
        if self.flying and not moves:
            self._check_landed(group, flags, origins)
        return flags, origins

    def check(self, group: Group, registers: Iterable[int], use: str, sums: bool = False) -> None:
        """Raise Uninitialized if one of these registers has uninitialized bits. `sums`: it may be the result
        of a wgmma in flight."""
        if any(r in self.m.poisoned for r in registers):
            flags, origins = self.of(group, registers, moves=sums)
            flags &= ~np.isin(origins // self.m.lanes, list(self.flying)) if self.flying else flags
            if flags.any() and not self.m.mutes(Uninitialized):
                raise self.fault(int(group.lanes[first_row(flags)]), int(origins[first_row(flags)]), use)

    def fault(self, lane: int, origin: int, use: str) -> Fault:
        m = self.m
        number, source = divmod(origin, m.lanes)
        pc, describe = self.sources[number]
        if pc is None:
            return m.fault(Uninitialized, lane, f"{describe(lane)}, for {use}")
        where = (
            "" if m.program.location(pc) == m.program.location(m.pc) else f" at {m.program.location(m.pc)}"
        )
        return m.fault(Uninitialized, source, f"{describe(source)}; the value is used for {use}{where}", pc)

    def bytes_of(self, group: Group, sources: list[int], size: int) -> tuple[Array, Array] | None:
        """The uninitialized bytes of vectors of these registers, of `size` bytes each: (rows, bytes), and
        their origins."""
        if not any(s in self.m.poisoned for s in sources):
            return None
        flags, origins = self.of(group, sources)
        if not flags.any():
            return None
        parts = np.zeros((len(group.lanes), len(sources), size), bool)
        for i, s in enumerate(sources):
            if s in self.m.poisoned:
                mask = np.ascontiguousarray(self.m.poisoned[s][group.index])
                parts[:, i] = mask.view(np.uint8).reshape(len(mask), -1)[:, :size] != 0
        return parts.reshape(len(group.lanes), -1), origins

    # ---- instructions that compute

    def compute(self, step: Step, flow: Flow, group: Group) -> None:
        """Execute an instruction, and pass on the uninitialized bits of its sources."""
        m = self.m
        results = {}
        if any(r in m.poisoned for r in flow.reads):
            flags, origins = self.of(group, flow.reads, moves=flow.kind == "move")
            if flags.any():
                results = self._results(step, flow, group, flags)
                # the first use of a variable that no statement has set
                if flow.kind != "move" and (flags & (origins < m.lanes)).any():
                    self.sources.append(_Origin(m.pc, self.sources[0].describe))
                    origins = np.where(
                        origins < m.lanes, (len(self.sources) - 1) * m.lanes + group.lanes, origins
                    )
        step(m, group)
        for register in flow.writes:
            if register in results:
                self.put(group, register, results[register], origins)
            else:
                m.clean(group, register)

    def _results(self, step: Step, flow: Flow, group: Group, flags: Array) -> dict[int, Array]:
        """The uninitialized bits of each result."""
        kind = flow.kind
        if kind == "move" and not self.of(group, flow.control)[0].any():
            return self._moved(step, flow, group)
        if kind in ("and", "or", "mix"):
            return {flow.writes[0]: self._bitwise(kind, flow, group)}
        results = {r: np.where(flags, self._ones(r, len(flags)), 0) for r in flow.writes}
        if kind == "halves":
            widths = self.m.program.widths
            width = max(widths[r] for r in (*flow.reads, *flow.writes))
            half, halves = UNSIGNED[width // 2], np.zeros((len(flags), 2), bool)
            for r in flow.reads:
                if r in self.m.poisoned:
                    mask = np.ascontiguousarray(self.m.poisoned[r][group.index])
                    parts = mask.view(half).reshape(len(mask), -1)
                    halves |= (parts if parts.shape[1] == 2 else parts[:, :1]) != 0
            both = np.where(halves, ~half(0), half(0)).view(UNSIGNED[width])[:, 0]
            results = {r: both for r in flow.writes if widths[r] == width} or results
        return results

    def _moved(self, step: Step, flow: Flow, group: Group) -> dict[int, Array]:
        m = self.m
        values, poisoned = m.regs, m.poisoned
        masks = _Masks(m, values, poisoned, flow.control)
        m.regs, m.poisoned = masks, {}  # type: ignore[assignment]
        try:
            step(m, group)
        finally:
            m.regs, m.poisoned = values, poisoned
        return {
            r: np.broadcast_to(mask, (m.lanes,))[group.index] if len(mask) == 1 else mask[group.index]
            for r, mask in masks.new.items()
        }

    def _bitwise(self, kind: str, flow: Flow, group: Group) -> Array:
        m = self.m
        zero = UNSIGNED[m.program.widths[flow.writes[0]]](0)
        masks = [m.poisoned[r][group.index] if r in m.poisoned else zero for r in flow.reads]
        result = masks[0]
        for mask in masks[1:]:
            result = result | mask
        if kind != "mix":  # a 0 of one operand of `and`, or a 1 of `or`, decides
            for r, mask in zip(flow.reads, masks, strict=True):
                value = m.get(group, r)
                result = result & ((value if kind == "and" else ~value) | mask)
        return np.broadcast_to(result, group.lanes.shape)


class _Masks:
    """Stands for the registers while a move is applied to their uninitialized bits. `control`: registers with
    their values."""

    def __init__(self, m: Batch, values: list[Array], poisoned: dict[int, Array], control: tuple[int, ...]):
        self.m, self.values, self.poisoned, self.control = m, values, poisoned, control
        self.new: dict[int, Array] = {}

    def __getitem__(self, register: int) -> Array:
        if register in self.control:
            return self.values[register]
        found = self.new.get(register, self.poisoned.get(register))
        return np.zeros(1, UNSIGNED[self.m.program.widths[register]]) if found is None else found

    def __setitem__(self, register: int, mask: Array) -> None:
        self.new[register] = mask
