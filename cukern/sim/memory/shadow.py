"""Shadow memory: for each granule of a memory region its writers, its readers, and whether it is initialized.

A granule has the size of the shortest access so far, so a tile of vectors costs one entry per vector. Reads
are only logged; the log is processed at the next write, and dropped at a barrier of the whole batch. So a
tensor that is only read costs almost nothing."""

import numpy as np

from cukern.sim.memory.history import Conflict, History
from cukern.sim.memory.order import IN_FLIGHT, STRONG, TIME_BITS, Order
from cukern.sim.numerics.integers import Array, count_nonzero

_OFFSETS = np.arange(16)  # of the bytes of an access, which has at most 16
SHIFTS = tuple(map(np.array, range(5)))
BY_GENERIC_PROXY = 1  # cp.async
BY_ASYNC_PROXY = 2  # bulk copies and st.async
_LONGEST_LOG = 1 << 21  # reads that are logged before the log is processed


class Shadow:
    """`positions` are byte offsets from the start, `lanes` are lanes of the batch; both have one row per
    lane."""

    def __init__(self, size: int, written: Array | None = None, reach: str = "grid"):
        """written: True for each byte that was initialized before the launch; None: all were. reach: the
        lanes that can access the same position: those of the "grid", of one "cluster" (shared memory), or a
        single "lane" (local memory)."""
        self.size = size + -size % 16
        self.before = written
        self.reach = reach
        if written is not None:
            self.before = np.pad(written, (0, -size % 16))
        self.complete = False  # True if all bytes are known to be initialized
        self.bits = 4  # log2 of a granule's bytes
        self.writes: History | None = None
        self.reads: History | None = None
        self.heard: Array | None = None  # in shared memory: time of the last strong read
        self.narrow: Array | None = None  # bytes changed by an atomic that is atomic only for its own block
        # granules last written by an asynchronous copy of an mbarrier: of which proxy
        self.copied: Array | None = None
        # For each byte: 0, or for a value computed from uninitialized ones 2 + their origin in poison.py (1:
        # unknown origin)
        self.poisoned: Array | None = None
        # places, their unit, size; stamps: the part of the lanes, the rest
        self.log: list[tuple[Array, int, int, Array, int]] = []
        self.logged = 0  # reads in the log, counted by lane
        self.shortest = 16  # bytes of the shortest read in the log
        # True: lanes of a block that read one place in one instruction are copies of the first of them
        self.replicated = False

    @property
    def writers(self) -> Array | None:
        """The stamp of the last write of each granule; 0 if there was none."""
        return None if self.writes is None else self.writes.last

    def read(
        self, order: Order, positions: Array, size: int, lanes: Array, strong: bool = False,
        flags: int | None = 0,
    ) -> Conflict | None:  # fmt: skip
        """Record a read, whose stamp has these flags; None: it is recorded later. Returns the writes that
        race with it, if any."""
        if self.reach == "grid" or (not strong and self.reach != "lane" and flags is not None):
            self.log_read(order, positions, 1, size, lanes, (flags or 0) | STRONG * strong)
        if self.writes is None:
            return None
        granules = self._granules(positions, size)
        if strong and self.reach == "cluster":
            if self.heard is None:
                self.heard = np.zeros(self.size >> self.bits, np.int64)
            self.heard[granules] = order.clock.now << TIME_BITS
        conflict = self._unordered(self.writes, order, granules, lanes, strong)
        if conflict is None or not self.replicated:
            return conflict
        first = _firsts(order, positions, lanes)[conflict.rows]
        return Conflict(conflict.rows[first], conflict.stamps[first]) if first.any() else None

    def written_before(self, positions: Array, size: int) -> tuple[int, int] | None:
        """The first row whose memory this launch has written, and the stamp of the write."""
        if self.writes is None:
            return None
        stamps = self.writes.last[self._granules(positions, size)].reshape(len(positions), -1).max(axis=1)
        row = int((stamps != 0).argmax())
        return (row, int(stamps[row])) if stamps[row] else None

    def written_since(self, positions: Array, size: int, time: int) -> tuple[int, int] | None:
        """The first row that was written after this time, and the stamp of the write."""
        if self.writes is None:
            return None
        stamps = (
            self.writes.last[self._granules(positions, size)].reshape(len(positions), -1).max(axis=1)
            & ~IN_FLIGHT
        )
        late = stamps >> TIME_BITS > time
        row = int(late.argmax())
        return (row, int(stamps[row])) if late[row] else None

    def unfenced(self, order: Order, positions: Array, size: int, lanes: Array) -> tuple[int, int] | None:
        """The first row with a plain write, or a cp.async, after which neither its writer nor the reader had
        a fence.proxy.async."""
        if self.writes is None:
            return None
        granules = self._granules(positions, size).reshape(len(positions), -1)
        stamps = self.writes.last[granules]
        if self.copied is not None:
            stamps = np.where(self.copied[granules] == BY_ASYNC_PROXY, 0, stamps)
        stamps = stamps.max(axis=1)
        writers = np.clip(order.by_lane(stamps) - order.base, 0, order.lanes - 1)
        late = (stamps != 0) & (
            stamps >> TIME_BITS >= np.maximum(order.proxy_fenced[writers], order.proxy_fenced[lanes])
        )
        row = int(late.argmax())
        return (row, int(stamps[row])) if late[row] else None

    def unwritten(self, positions: Array, size: int) -> Array | None:
        """For each row, which of its bytes are uninitialized; None if none is."""
        missing = None
        if self.before is not None and not self.complete:
            if self.writes is None:
                missing = ~self.before[positions[:, None] + _OFFSETS[:size]]
            else:
                granules = self._granules(positions, size)
                missing = self.writes.last[granules] == 0
                if missing.any():
                    missing = np.repeat(missing.reshape(len(positions), -1), 1 << self.bits, axis=1)
                    missing = missing & ~self.before[positions[:, None] + _OFFSETS[:size]]
        if self.poisoned is not None:
            poisoned = self.poisoned[positions[:, None] + _OFFSETS[:size]] != 0
            missing = poisoned if missing is None or not missing.any() else missing | poisoned
        return missing if missing is not None and missing.any() else None

    def poison(self, positions: Array, size: int, codes: Array) -> None:
        """Byte i of what was written to a row is uninitialized if bit i of its code is set. The code >> 16 is
        2 + the origin, or 0."""
        if self.poisoned is None:
            self.poisoned = np.zeros(self.size, np.int64)
        origins = np.maximum(codes >> 16, 1) if self.reach != "grid" else np.ones(1, np.int64)
        self.poisoned[positions[:, None] + _OFFSETS[:size]] = (
            codes[:, None] >> _OFFSETS[:size] & 1
        ) * origins[:, None]

    def poisoned_bytes(self, positions: Array, size: int) -> Array:
        """Which bytes of each row hold uninitialized values."""
        if self.poisoned is None:
            return np.zeros((len(positions), size), bool)
        return self.poisoned[positions[:, None] + _OFFSETS[:size]] != 0

    def poison_origins(self, positions: Array, size: int) -> Array:
        """For each row: 0 if no byte holds an uninitialized value, 1 if one does, or 2 + the origin of
        one."""
        if self.poisoned is None:
            return np.zeros(len(positions), np.int64)
        return self.poisoned[positions[:, None] + _OFFSETS[:size]].max(axis=1)

    def write(
        self, order: Order, positions: Array, size: int, lanes: Array, flags: int = 0, narrow: bool = False
    ) -> tuple[Conflict | None, Conflict | None, Array | None]:
        """Record a write. Returns the earlier writes and the earlier reads that race with it, and the rows
        whose bytes another row of this write overwrites; None for each of the three if there are none.
        `narrow`: the write is an atomic of .cta scope (atomicAdd_block), which is not atomic for other
        blocks."""
        if self.log:
            self.process_log(order)
        granules = self._granules(positions, size)
        if self.writes is None:
            self.writes = History(self.size >> self.bits)
        if self.copied is not None:
            self._mark_copied(granules, 0)
        strong = bool(flags & STRONG)
        over_writes, over_reads = self._before_write(self.writes, order, granules, lanes, strong)
        if strong and (narrow or self.narrow is not None):
            over_writes = over_writes or self._too_narrow(order, positions, granules, lanes, narrow)
        stamps = order.stamps(lanes, flags)
        stamps = stamps if granules.ndim == 1 else np.broadcast_to(stamps[:, None], granules.shape)
        newest = self.writes.record(
            order,
            granules,
            stamps,
            order.clock.now << TIME_BITS | flags,
            keep=strong and self.reach != "lane",
        )
        if narrow:
            newest_of_row = newest.reshape(len(lanes), -1)[:, 0]
            other_block = np.flatnonzero(
                order.by_block(newest_of_row) != order.block_of[lanes] + order.first_block
            )
            if over_writes is None and len(other_block):
                over_writes = Conflict(other_block, newest_of_row[other_block])
        lost = newest != stamps
        if not count_nonzero(lost):
            return over_writes, over_reads, None
        return over_writes, over_reads, np.flatnonzero(lost if lost.ndim == 1 else lost.any(axis=1))

    def _before_write(
        self, writes: History, order: Order, granules: Array, lanes: Array, strong: bool
    ) -> list[Conflict | None]:
        """The earlier writes and reads that race with a write, which replaces them."""
        over_writes = self._unordered(writes, order, granules, lanes, strong)
        over_reads = None
        now = order.clock.now << TIME_BITS
        if self.reads is not None:
            over_reads = self._unordered(self.reads, order, granules, lanes, strong)
            self.reads.clear(granules, now)
        if writes.several and not strong:
            writes.clear(granules, now)
        return [over_writes, over_reads]

    def _too_narrow(
        self, order: Order, positions: Array, granules: Array, lanes: Array, narrow: bool
    ) -> Conflict | None:
        """Atomics of several blocks on one location. One of them is atomic only within its own block."""
        assert self.writes is not None
        if self.narrow is None:
            self.narrow = np.zeros(self.size, bool)
        before = self.writes.last[granules].reshape(len(positions), -1)[:, 0]
        other = (
            (before != 0)
            & (order.by_block(before) != order.block_of[lanes] + order.first_block)
            & (narrow | self.narrow[positions])
        )
        rows = np.flatnonzero(other)
        rows = rows[~order.ordered(before[rows], lanes[rows])]
        self.narrow[positions] |= narrow
        return Conflict(rows, before[rows]) if len(rows) else None

    def arrived(self, order: Order, positions: Array, size: int, lanes: Array, copied: int = 0) -> None:
        """Asynchronous copies have completed: record them as writes of their lanes now. `copied`: of which
        proxy, if an mbarrier tells."""
        assert self.writes is not None
        granules = self._granules(positions, size)
        stamps = order.stamps(lanes)
        self.writes.last[granules] = stamps if granules.ndim == 1 else stamps[:, None]
        self._mark_copied(granules, copied)

    def accesses(self, order: Order, start: int, end: int) -> list[tuple[str, Array, Array]]:
        """The reads and writes of these bytes, each with its verb: granules and stamps; not strong writes
        that a strong read has seen."""
        self.process_log(order)
        found = []
        for did, history in (("reads", self.reads), ("writes", self.writes)):
            if history is not None:
                granules = np.arange(start >> self.bits, end >> self.bits)
                rows, older = history.kept(granules)
                stamps = np.concatenate((history.last[granules], older))
                granules = np.concatenate((granules, granules[rows]))
                if did == "writes" and self.heard is not None:
                    stamps = np.where((stamps & STRONG != 0) & (self.heard[granules] > stamps), 0, stamps)
                found.append((did, granules[stamps != 0], stamps[stamps != 0]))
        return found

    def written(self) -> Array | None:
        """True for each byte that is initialized now; None: all are."""
        if self.before is None or self.writes is None:
            return self.before
        now = self.before | np.repeat(self.writes.last != 0, 1 << self.bits)
        return now if self.poisoned is None else now & (self.poisoned == 0)

    def _mark_copied(self, granules: Array, copied: int) -> None:
        if copied or self.copied is not None:
            self.copied = np.zeros(self.size >> self.bits, np.uint8) if self.copied is None else self.copied
            self.copied[granules] = copied

    def was_copied(self, position: int) -> bool:
        """True if an asynchronous copy wrote there last."""
        return self.copied is not None and bool(self.copied[position >> self.bits])

    def _granules(self, positions: Array, size: int) -> Array:
        """The granules of each row: of shape (rows,), or (rows, granules) if an access spans several."""
        if size < 1 << self.bits:
            self._refine(size)
        first = positions >> SHIFTS[self.bits]
        count = size >> self.bits
        return first if count == 1 else first[:, None] + _OFFSETS[:count]

    def _refine(self, size: int) -> None:
        """Make granules at most `size` bytes long."""
        if size < 1 << self.bits:
            finer = (1 << self.bits) // size
            self.bits = size.bit_length() - 1
            self.heard = None if self.heard is None else np.repeat(self.heard, finer)
            self.copied = None if self.copied is None else np.repeat(self.copied, finer)
            for history in (self.writes, self.reads):
                if history is not None:
                    history.refine(finer)

    def _unordered(
        self, history: History, order: Order, granules: Array, lanes: Array, strong: bool
    ) -> Conflict | None:
        if self.reach == "lane":
            return None
        return history.conflicts(order, granules, lanes, self.reach == "cluster", strong)

    # ---- reads

    def log_read(self, order: Order, places: Array, unit: int, size: int, lanes: Array, flags: int) -> None:
        """`places`: positions in multiples of the unit."""
        self.log.append((places, unit, size, order.own_of(lanes), order.clock.now << TIME_BITS | flags))
        self.logged += len(places)
        self.shortest = min(self.shortest, size)
        if self.logged > _LONGEST_LOG:
            self.process_log(order)

    def forget_accesses(self) -> None:
        """A barrier of all lanes that can access this memory came after the accesses so far."""
        self._drop_log()
        for history in (self.reads, self.writes):
            if history is not None:
                history.forget_kept()
        if self.before is not None and self.writes is not None and not self.complete:
            self.complete = bool(self.writes.last.all())

    def _drop_log(self) -> None:
        self.log.clear()
        self.logged = 0
        self.shortest = 16

    def process_log(self, order: Order) -> None:
        if not self.log:
            return
        self._refine(self.shortest)
        if self.reads is None:
            self.reads = History(self.size >> self.bits)
        for places, unit, size, own, rest in self.log:
            if self.replicated and len(places) > 1:
                first = _firsts(order, places, order.by_lane(own) - order.base)
                places = places[first]
                own = own[first]
            granules = places
            stamps = own + np.array(rest)
            if unit != size or size != 1 << self.bits:
                granules = self._granules(places * unit, size)
            stamps = stamps if granules.ndim == 1 else np.broadcast_to(stamps[:, None], granules.shape)
            self.reads.record(order, granules, stamps, rest)
        self._drop_log()


def _firsts(order: Order, places: Array, lanes: Array) -> Array:
    """True for each row that is the first of its block at its place."""
    by = np.lexsort((lanes, places, order.block_of[lanes]))
    first = np.ones(len(by), bool)
    first[by[1:]] = (np.diff(places[by]) != 0) | (np.diff(order.block_of[lanes[by]]) != 0)
    return first
