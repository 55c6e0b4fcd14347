"""The accesses of one kind, reads or writes, to each granule of a region: those that a later access must be
ordered after.

An access replaces the older ones of its own lane. Those of other lanes are kept until a write that is ordered
after them, because order with the newest access does not imply order with the others. Most granules have one
reader and one writer: two dense arrays are enough."""

from typing import NamedTuple

import numpy as np

from cukern.sim.memory.order import BY_LANE, IN_FLIGHT, STRONG, TIME_BITS, Order
from cukern.sim.numerics.integers import Array, count_nonzero

_SEVERAL_LANES = 1
_SEVERAL_BLOCKS = 2
_MOST_KEPT = 1 << 9  # older accesses; beyond, those that a newer one of the same lane replaces are dropped


class Conflict(NamedTuple):
    """Unordered accesses: which rows of the current access, and for each the stamp of the other access."""

    rows: Array
    stamps: Array


def _weak(stamps: Array) -> Array:
    """True for accesses that race with strong ones."""
    return ((stamps & STRONG) == 0) | ((stamps & IN_FLIGHT) != 0)


class History:
    def __init__(self, granules: int):
        self.last = np.zeros(granules, np.int64)  # the stamp of the newest access
        self.newest = 0  # no stamp so far is this high
        self.several = False  # False: `many` is 0 everywhere
        # flags: older accesses of other lanes (1), of other blocks (2) are in granules, stamps
        self.many = np.zeros(granules, np.uint8)
        self.since: Array | None = None  # kept accesses with a lower stamp do not count any more
        self.weak = False  # False: no kept access races with strong ones
        # kept accesses, by granule
        self.granules = np.zeros(0, np.int64)
        self.stamps = np.zeros(0, np.int64)
        self.added: list[tuple[Array, Array]] = []  # those not yet merged into the two arrays
        self.limit = _MOST_KEPT

    def refine(self, finer: int) -> None:
        """Each granule becomes `finer` granules."""
        self._merge()
        self.last = np.repeat(self.last, finer)
        self.many = np.repeat(self.many, finer)
        self.since = None if self.since is None else np.repeat(self.since, finer)
        granules = (self.granules[:, None] * finer + np.arange(finer)).reshape(-1)
        by_granule = np.argsort(granules, kind="stable")  # a granule with several accesses
        self.granules = granules[by_granule]
        self.stamps = np.repeat(self.stamps, finer)[by_granule]

    def record(self, order: Order, granules: Array, stamps: Array, rest: int, keep: bool = True) -> Array:
        """Record an access. granules, stamps: (lanes,), or (lanes, granules of a lane); rest: of a stamp,
        without its lane. keep: also keep earlier accesses of other lanes. Returns the stamps that are now the
        newest."""
        before = self.last[granules] if keep else None
        self.last[granules] = stamps
        self.newest = max(self.newest, (rest >> TIME_BITS) + 1 << TIME_BITS)
        now = self.last[granules]
        if before is not None:
            for old in (before, stamps):  # `stamps`: of several lanes in this access, one is the newest
                if count_nonzero(old) and count_nonzero((old ^ now) & BY_LANE):
                    apart = (old != 0) & ((old ^ now) & BY_LANE != 0)
                    if count_nonzero(apart):
                        self._keep(order, granules[apart], old[apart], now[apart])
        return now

    def _keep(self, order: Order, granules: Array, stamps: Array, newer: Array) -> None:
        self.several = True
        self.weak |= bool(_weak(stamps).any())
        self.many[granules] |= _SEVERAL_LANES
        self.many[granules[order.by_block(stamps) != order.by_block(newer)]] |= _SEVERAL_BLOCKS
        self.added.append((granules, stamps))
        if len(self.granules) + sum(len(g) for g, _ in self.added) > self.limit:
            self._merge()
            by = np.lexsort((self.stamps, order.by_lane(self.stamps), self.granules))
            granules = self.granules[by]
            stamps = self.stamps[by]
            newest = np.ones(len(by), bool)
            newest[:-1] = (np.diff(granules) != 0) | (np.diff(order.by_lane(stamps)) != 0)
            self.granules = granules[newest]
            self.stamps = stamps[newest]
            self.limit = max(_MOST_KEPT, 2 * len(self.granules))

    def clear(self, granules: Array, now: int) -> None:
        """A write is ordered after all accesses to these granules."""
        if self.several and self.many[granules].any():
            if self.since is None:
                self.since = np.zeros_like(self.last)
            self.since[granules] = now
            self.many[granules] = 0
        self.last[granules] = 0

    def forget_kept(self) -> None:
        """All lanes that can access these granules are ordered after the accesses so far."""
        if len(self.granules):
            self.granules = np.zeros(0, np.int64)
            self.stamps = np.zeros(0, np.int64)
        self.added.clear()

    def _merge(self) -> None:
        if self.added:
            granules = np.concatenate([self.granules, *(g for g, _ in self.added)])
            stamps = np.concatenate([self.stamps, *(s for _, s in self.added)])
            by = np.argsort(granules, kind="stable")
            self.granules = granules[by]
            self.stamps = stamps[by]
            self.added.clear()

    def kept(self, granules: Array) -> tuple[Array, Array]:
        """The kept accesses of these granules: indices into `granules`, and stamps."""
        self._merge()
        first = np.searchsorted(self.granules, granules)
        count = np.searchsorted(self.granules, granules, side="right") - first
        rows = np.repeat(np.arange(len(granules)), count)
        stamps = self.stamps[np.arange(len(rows)) + np.repeat(first - np.cumsum(count) + count, count)]
        if self.since is not None:
            counts = stamps >= self.since[granules][rows]
            rows = rows[counts]
            stamps = stamps[counts]
        return rows, stamps

    def _suspects(
        self, order: Order, granules: Array, stamps: Array, lanes: Array, inside: bool
    ) -> Array | None:
        """Which granules another lane has accessed, as far as the newest stamps show; None if none."""
        lanes = lanes if stamps.ndim == 1 else lanes[:, None]
        foreign = order.foreign(stamps, lanes)
        if self.several:
            foreign |= self.many[granules]
        if not count_nonzero(foreign):
            return None
        suspect = (foreign != 0) & (stamps != 0)
        # floor: a lane knows all that its cluster did before
        return suspect & (stamps >= order.floor[lanes]) if inside else suspect

    def private(self, order: Order, granules: Array, lanes: Array) -> Array | None:
        """The stamps of these granules, one for each lane; None if other lanes may have accessed them."""
        stamps = self.last[granules]
        others = self.several or (
            count_nonzero(stamps) and count_nonzero((stamps != 0) & (order.foreign(stamps, lanes) != 0))
        )
        return None if others else stamps

    def conflicts(
        self, order: Order, granules: Array, lanes: Array, inside: bool, strong: bool
    ) -> Conflict | None:
        """The accesses that the current one, by these lanes, is not ordered after. `granules`: (rows,), or
        (rows, granules of a row). `inside`: only the lanes of one cluster access a granule. A `strong` access
        does not race with strong ones."""
        if inside and self.newest <= order.lowest_floor:
            return None
        stamps = self.last[granules]
        suspect = self._suspects(order, granules, stamps, lanes, inside) if count_nonzero(stamps) else None
        if suspect is None or not count_nonzero(suspect):
            return None
        rows = np.nonzero(suspect)[0]
        stamps = stamps[suspect]
        granules = granules[suspect]
        many = self.many[granules] if self.several and (self.weak or not strong) else np.zeros(0)
        if many.any():
            if not inside:
                known = (many == _SEVERAL_LANES) & (
                    order.by_block(stamps) == order.block_of[lanes[rows]] + order.first_block
                )
                many = np.where(known & (stamps < order.floor[lanes[rows]]), 0, many)
            several = np.flatnonzero(many)
            more, others = self.kept(granules[several])
            rows = np.concatenate((rows, rows[several[more]]))
            stamps = np.concatenate((stamps, others))
        if strong:
            weak = _weak(stamps)
            rows = rows[weak]
            stamps = stamps[weak]
        bad = ~order.ordered(stamps, lanes[rows])
        return Conflict(rows[bad], stamps[bad]) if bad.any() else None
