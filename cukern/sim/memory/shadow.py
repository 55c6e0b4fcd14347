"""Shadow memory: for each granule of a memory region the last writer, the last readers, and whether it is initialized.

A granule has the size of the shortest access so far, so a tile of vectors costs one entry per vector. Reads are only logged; the log is
processed at the next write, and dropped at a barrier of the whole batch. So a tensor that is only read costs almost nothing.
"""

from typing import NamedTuple

import numpy as np

from cukern.sim.memory.order import IN_FLIGHT, STRONG, TIME_BITS, Order

_COUNT = np.arange(16)  # an access has at most 16 bytes
_LONGEST_LOG = 1 << 21  # reads that are logged before the log is processed


class Conflict(NamedTuple):
    """Unordered accesses: which rows of the current access, and for each the stamp of the other access."""

    rows: np.ndarray
    stamps: np.ndarray


class Shadow:
    """`positions` are byte offsets from the start, `lanes` are lanes of the batch; both have one row per lane."""

    def __init__(self, size: int, written: np.ndarray | None = None, reach: str = "grid"):
        """written: True for each byte that was initialized before the launch; None: all were. reach: the lanes that can access the same
        position: those of the "grid", of one "cluster" (shared memory), or a single "lane" (local memory)."""
        self.size, self.before, self.reach = size + -size % 16, written, reach
        if written is not None:
            self.before = np.pad(written, (0, -size % 16))
        self.bits = 4  # log2 of a granule's bytes
        self.writers: np.ndarray | None = None
        self.readers: list[np.ndarray] = []  # the last one, the last by another lane, and in clusters the last by another block
        self.heard: np.ndarray | None = None  # in shared memory: time of the last strong read
        self.log: list[tuple[np.ndarray, int, np.ndarray]] = []
        self.logged = 0

    def read(self, order: Order, positions: np.ndarray, size: int, lanes: np.ndarray, strong: bool = False) -> Conflict | None:
        """Record a read. Returns the writes that race with it, if any."""
        if not strong and self.reach != "lane":
            self._log(order, positions, size, lanes)
        if self.writers is None:
            return None
        granules = self._granules(positions, size)
        if strong and self.reach == "cluster":
            if self.heard is None:
                self.heard = np.zeros(self.size >> self.bits, np.int64)
            self.heard[granules] = order.clock.now << TIME_BITS
        return self._unordered(order, self.writers[granules], lanes, strong)

    def unwritten(self, positions: np.ndarray, size: int) -> np.ndarray | None:
        """The rows that read uninitialized memory, if any."""
        if self.before is None:
            return None
        if self.writers is None:
            missing = ~self.before[positions[:, None] + _COUNT[:size]].all(axis=1)
        else:
            granules = self._granules(positions, size)
            missing = self.writers[granules] == 0
            if missing.any() and self.before.any():
                missing &= ~self.before.reshape(-1, 1 << self.bits)[granules].all(axis=-1)
            if missing.ndim > 1:
                missing = missing.any(axis=-1)
        return np.flatnonzero(missing) if missing.any() else None

    def write(
        self, order: Order, positions: np.ndarray, size: int, lanes: np.ndarray, flags: int = 0
    ) -> tuple[Conflict | None, Conflict | None, np.ndarray | None]:
        """Record a write. Returns the writes and the reads that race with it, and the rows that other rows overwrite."""
        granules = self._granules(positions, size)
        if self.writers is None:
            self.writers = np.zeros(self.size >> self.bits, np.int64)
        strong = bool(flags & STRONG)
        over_writes = self._unordered(order, self.writers[granules], lanes, strong)
        over_reads = None
        self._sort_log(order)
        for stamps in self.readers:
            over_reads = over_reads or self._unordered(order, stamps[granules], lanes, False)
        stamps = order.stamps(lanes, flags)
        stamps = stamps if granules.ndim == 1 else stamps[:, None]
        self.writers[granules] = stamps
        lost = self.writers[granules] != stamps
        if not lost.any():
            return over_writes, over_reads, None
        return over_writes, over_reads, np.flatnonzero(lost if lost.ndim == 1 else lost.any(axis=1))

    def arrived(self, order: Order, positions: np.ndarray, size: int, lanes: np.ndarray) -> None:
        """Asynchronous copies have completed: record them as writes of their lanes now."""
        assert self.writers is not None
        granules = self._granules(positions, size)
        stamps = order.stamps(lanes)
        self.writers[granules] = stamps if granules.ndim == 1 else stamps[:, None]

    def accesses(self, order: Order, start: int, end: int) -> list[tuple[str, np.ndarray]]:
        """The stamps of the last reads and writes of each granule from byte `start` to `end`, each array with its verb. Strong writes that
        a strong read has seen are left out."""
        self._sort_log(order)
        found = [("reads", stamps) for stamps in self.readers]
        if self.writers is not None:
            seen = (self.writers & STRONG != 0) & (self.heard > self.writers) if self.heard is not None else False
            found.append(("writes", np.where(seen, 0, self.writers)))
        return [(did, stamps[start >> self.bits : end >> self.bits]) for did, stamps in found]

    def written(self) -> np.ndarray | None:
        """True for each byte that is initialized now; None: all are."""
        if self.before is None or self.writers is None:
            return self.before
        return self.before | np.repeat(self.writers != 0, 1 << self.bits)

    def _granules(self, positions: np.ndarray, size: int) -> np.ndarray:
        """The granules of each row: of shape (rows,), or (rows, granules) if an access spans several."""
        if size < 1 << self.bits:
            finer = (1 << self.bits) // size
            self.bits = size.bit_length() - 1
            self.writers, self.heard = (None if x is None else np.repeat(x, finer) for x in (self.writers, self.heard))
            self.readers = [np.repeat(stamps, finer) for stamps in self.readers]
        first = positions >> self.bits
        count = size >> self.bits
        return first if count == 1 else first[:, None] + _COUNT[:count]

    def _unordered(self, order: Order, stamps: np.ndarray, lanes: np.ndarray, strong: bool) -> Conflict | None:
        if self.reach == "lane":
            return None
        suspect = stamps != 0
        if self.reach == "cluster":
            floor = order.floor[lanes]
            suspect &= stamps >= (floor if stamps.ndim == 1 else floor[:, None])
        if strong:
            suspect &= ((stamps & STRONG) == 0) | ((stamps & IN_FLIGHT) != 0)
        if not suspect.any():
            return None
        rows = np.nonzero(suspect)[0]
        stamps = stamps[suspect]
        bad = ~order.ordered(stamps, lanes[rows])
        return Conflict(rows[bad], stamps[bad]) if bad.any() else None

    # ---- reads

    def _log(self, order: Order, positions: np.ndarray, size: int, lanes: np.ndarray) -> None:
        self.log.append((positions, size, order.stamps(lanes)))
        self.logged += len(positions)
        if self.logged > _LONGEST_LOG:
            self._sort_log(order)

    def forget_reads(self) -> None:
        """Drop the log: a barrier of the whole batch came after these reads."""
        self.log.clear()
        self.logged = 0

    def _sort_log(self, order: Order) -> None:
        """Process the log: the last read of each granule, and the last by another lane and by another block."""
        apart = [order.by_lane] if order.blocks_a_cluster == 1 else [order.by_lane, order.by_block]
        for _, size, _ in self.log:
            self._granules(np.zeros(1, np.int64), size)
        if self.log and not self.readers:
            self.readers = [np.zeros(self.size >> self.bits, np.int64) for _ in range(len(apart) + 1)]
        for positions, size, stamps in self.log:
            last, *others = self.readers
            granules = self._granules(positions, size)
            stamps = stamps if granules.ndim == 1 else np.broadcast_to(stamps[:, None], granules.shape)
            before = last[granules]
            last[granules] = stamps
            for other, who in zip(others, apart, strict=True):
                newest = who(last[granules])
                for candidates in (before, stamps):
                    differs = (who(candidates) != newest) & (candidates != 0)
                    other[granules[differs]] = candidates[differs]
        self.forget_reads()
