"""The common case of an access to global memory: all lanes access one tensor, and no other thread has
accessed these elements.

The addresses of a base register are checked once for all instructions that use it: from the lowest to the
highest of their offsets. Whatever is not the common case is left to memory/spaces.py."""

import numpy as np

from cukern.runtime.compile.forks import cached_property
from cukern.sim.machine.machine import Group, Machine
from cukern.sim.machine.program import Program
from cukern.sim.memory.spaces import LOW, SHIFTS, TIME_BITS, Array, Part, Region, Shadow, count_nonzero

# the region, its shadow memory, and the element of each lane
_Found = tuple[Region, Shadow | None, Array] | None


class Quick:
    """A load or store of `size` bytes at register + offset."""

    def __init__(self, program: Program, register: int, offset: int, size: int):
        self.offset, self.size, self.bits, self.key = offset, size, size.bit_length() - 1, (register, size)
        self.offsets: set[int] = program.offsets.setdefault(self.key, set())
        self.offsets.add(offset)  # those of other instructions follow

    @cached_property
    def layout(self) -> tuple[Array, int, Array | None]:
        """The lowest offset, the bytes from there to the end of the highest, and the elements from the lowest
        to this one, if any."""
        lowest = min(self.offsets)
        above = np.array((self.offset - lowest) // self.size) if self.offset > lowest else None
        return np.array(lowest & 0xFFFFFFFFFFFFFFFF, np.uint64), max(self.offsets) - lowest + self.size, above

    def _check(self, m: Machine, group: Group, base: Array) -> _Found:
        if (
            base.itemsize < 8
            or len(base) < m.lanes
            or any((x - self.offset) % self.size for x in self.offsets)
        ):
            return None
        addresses = base[group.index] + self.layout[0]
        near, inside = m.launched.memory.nearest(-1 - self.key[0], self.layout[1], addresses)
        region = near.region
        if (
            inside is None
            or region is None
            or region.inside is not None
            or region.offset
            or count_nonzero(inside & LOW[self.size])
        ):
            return None
        return region, near.shadow, inside.view(np.int64) >> SHIFTS[self.bits]

    def _find(self, m: Machine, group: Group) -> _Found:
        base, spots, above = m.regs[self.key[0]], m.launched.memory.spots, self.layout[2]
        spot = spots.get(self.key)
        if spot is None or spot[0] is not base or spot[1] is not group.lanes:
            spot = spots[self.key] = base, group.lanes, self._check(m, group, base)
        found: _Found = spot[2]
        return found if found is None or above is None else (found[0], found[1], found[2] + above)

    def load(self, m: Machine, group: Group, cached: bool) -> Array | None:
        """`cached`: through the read-only cache. Returns None if it is not the common case."""
        found = self._find(m, group)
        if found is None:
            return None
        region, shadow, index = found
        if shadow is not None:
            fresh, writes = shadow.before is None or shadow.complete, shadow.writes
            if shadow.poisoned is not None or (writes is None and not fresh):
                return None
            if writes is not None:
                stamps = (
                    writes.private(m.order, index, group.lanes)
                    if shadow.bits == self.bits and not cached
                    else None
                )
                if stamps is None or not (fresh or count_nonzero(stamps) == len(stamps)):
                    return None
            shadow.log_read(m.order, index, self.size, self.size, group.lanes, 0)
        return m.launched.memory.of(region, self.size)[index]

    def store(self, m: Machine, group: Group, values: Array) -> bool:
        """Returns False if it is not the common case."""
        found = self._find(m, group)
        if found is None:
            return False
        region, shadow, index = found
        if shadow is None:
            return False
        order, lanes, memory = m.order, group.lanes, m.launched.memory
        shadow.process_log(order)
        writes, reads = shadow.writes, shadow.reads
        if (
            writes is None
            or shadow.bits != self.bits
            or shadow.poisoned is not None
            or shadow.narrow is not None
        ):
            return False
        if writes.private(order, index, lanes) is None or (
            reads is not None and reads.private(order, index, lanes) is None
        ):
            return False
        if reads is not None:
            reads.last[index] = 0
        stamps = order.stamps(lanes)
        lost = writes.record(order, index, stamps, order.clock.now << TIME_BITS, keep=False) ^ stamps
        memory.of(region, self.size)[index] = values
        if count_nonzero(lost):
            part = Part(region, shadow, index << SHIFTS[self.bits], lanes)
            memory.check_agreement(
                m, part, self.size, np.broadcast_to(values, lanes.shape), np.flatnonzero(lost)
            )
        return True
