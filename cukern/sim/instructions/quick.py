"""The common case of an access to global memory: all lanes access one tensor, and no other thread has
accessed these elements. And of one to shared memory: nothing races with it.

The addresses of a base register are checked once for all instructions that use it: from the lowest to the
highest of their offsets. Whatever is not the common case is left to memory/spaces.py."""

import numpy as np

from cukern.runtime.compile.forks import cached_property
from cukern.sim.machine.machine import Group, Machine
from cukern.sim.machine.program import Program
from cukern.sim.memory.history import History
from cukern.sim.memory.spaces import LOW, SHIFTS, TIME_BITS, Array, Part, Region, Shadow, count_nonzero

# the region, its shadow memory, and the element of each lane
_Found = tuple[Region, Shadow | None, Array] | None


class Quick:
    """A load or store of `size` bytes at register + offset."""

    def __init__(self, program: Program, register: int, offset: int, size: int, shared: bool = False):
        self.shared = shared
        self.offset, self.size, self.bits, self.key = offset, size, size.bit_length() - 1, (register, size)
        self.offsets: set[int] = program.offsets.setdefault(self.key, set())
        self.offsets.add(offset)  # those of other instructions follow

    @cached_property
    def layout(self) -> tuple[Array, int, Array | None]:
        """The lowest offset, the bytes from there to the end of the highest, and the elements from the lowest
        to this one, if any. The second is -1 if the offsets are no multiples of the size apart."""
        lowest = min(self.offsets)
        above = np.array((self.offset - lowest) // self.size) if self.offset > lowest else None
        length = max(self.offsets) - lowest + self.size
        apart = any((x - lowest) % self.size for x in self.offsets)
        return np.array(lowest & 0xFFFFFFFFFFFFFFFF, np.uint64), -1 if apart else length, above

    def _check(self, m: Machine, group: Group, base: Array) -> _Found:
        if (base.itemsize < 8 and not self.shared) or len(base) < m.lanes or self.layout[1] < 0:
            return None
        addresses = base[group.index].astype(np.uint64, copy=False) + self.layout[0]
        if self.shared:
            room = m.shared.size - self.layout[1]
            if room < 0 or count_nonzero(
                (addresses > np.array(room, np.uint64)) | addresses & LOW[self.size]
            ):
                return None
            positions = addresses.view(np.int64)
            if m.blocks > 1:
                positions = positions + m.shared.bases[group.index]
            return m.shared.region, m.shared.shadow, positions >> SHIFTS[self.bits]
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
        base, above = m.regs[self.key[0]], self.layout[2]
        spots = m.shared.spots if self.shared else m.launched.memory.spots
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
        check = self._readable_shared if self.shared else self._readable
        if shadow is not None:
            if not check(m, shadow, index, group.lanes, cached):
                return None
            shadow.log_read(m.order, index, self.size, self.size, group.lanes, 0)
        return (m.shared if self.shared else m.launched.memory).of(region, self.size)[index]

    def _readable(self, m: Machine, shadow: Shadow, index: Array, lanes: Array, cached: bool) -> bool:
        """True if these elements are initialized, and no other thread has written them."""
        fresh, writes = shadow.before is None or shadow.complete, shadow.writes
        if shadow.poisoned is not None or (writes is None and not fresh):
            return False
        if writes is None:
            return True
        stamps = writes.private(m.order, index, lanes) if shadow.bits == self.bits and not cached else None
        return stamps is not None and (fresh or count_nonzero(stamps) == len(stamps))

    def _readable_shared(self, m: Machine, shadow: Shadow, index: Array, lanes: Array, cached: bool) -> bool:
        """True if these elements of shared memory are initialized, and no write races with their reads."""
        writes = shadow.writes
        if writes is None or shadow.poisoned is not None or shadow.bits > self.bits:
            return False
        ordered = writes.newest <= m.order.lowest_floor
        if shadow.bits < self.bits:
            return ordered and shadow.complete
        if not shadow.complete and count_nonzero(writes.last[index]) < len(index):
            return False
        return ordered or writes.conflicts(m.order, index, lanes, True, False) is None

    def store(self, m: Machine, group: Group, values: Array) -> bool:
        """Returns False if it is not the common case."""
        found = self._find(m, group)
        if found is None:
            return False
        region, shadow, index = found
        if shadow is None:
            return False
        order, lanes = m.order, group.lanes
        memory = m.shared if self.shared else m.launched.memory
        shadow.process_log(order)
        writes, reads = shadow.writes, shadow.reads
        if (
            writes is None
            or shadow.bits != self.bits
            or shadow.poisoned is not None
            or shadow.narrow is not None
            or shadow.copied is not None
        ):
            return False
        if not (self._writable(m, writes, index, lanes) and self._writable(m, reads, index, lanes)):
            return False
        if reads is not None:
            reads.clear(index, order.clock.now << TIME_BITS)
        if writes.several:
            writes.clear(index, order.clock.now << TIME_BITS)
        stamps = order.stamps(lanes)
        lost = writes.record(order, index, stamps, order.clock.now << TIME_BITS, keep=False) ^ stamps
        memory.of(region, self.size)[index] = values
        if count_nonzero(lost):
            part = Part(region, shadow, index << SHIFTS[self.bits], lanes)
            memory.check_agreement(
                m, part, self.size, np.broadcast_to(values, lanes.shape), np.flatnonzero(lost)
            )
        return True

    def _writable(self, m: Machine, history: History | None, index: Array, lanes: Array) -> bool:
        """True if none of these earlier accesses races with a store to these elements."""
        if history is None:
            return True
        if self.shared:
            return history.conflicts(m.order, index, lanes, True, False) is None
        return history.private(m.order, index, lanes) is not None
