"""What the blocks of a launch have told each other: the happens-before relation across blocks.

Release: access, fence, strong store. Acquire: strong load of the same address, fence. Everything before the
release happens before everything after the acquire. Other lanes may change the address by atomics in between.
An atomic is both a strong load and a strong store. One that changes its location needs no fence after it, as
code that counts blocks expects; one that does not is a load, as in a loop around atomicAdd(p, 0). st.release
and ld.acquire include the fence. Fences are cumulative over barriers. A load sees all earlier releases at its
address, because the simulator executes one instruction after the other. Missed races: a warp acquires as a
whole, and a warp that releases at more than 64 addresses in one instruction releases to all blocks."""

import bisect

import numpy as np

from cukern.sim.numerics.integers import Array

_MOST_ADDRESSES = 64
_ANYWHERE = -1  # the address of releases that everyone learns of

Knowledge = dict[int, int]  # address -> the number of its releases that are known


class Releases:
    """The releases of a launch. What a warp knows of them is the number of a Knowledge; 0: nothing."""

    def __init__(self) -> None:
        self.counts: Knowledge = {}
        self.knew: dict[int, int] = {}  # address -> what those who released there knew
        self.known: list[Knowledge] = [{}]
        self.numbers: dict[frozenset, int] = {frozenset(): 0}
        # Cluster of blocks -> address -> the numbers of its releases there, and after each, for plain and
        # strong accesses of all its lanes: released until this time
        self.of: dict[int, dict[int, tuple[list[int], list[Array]]]] = {}

    @property
    def any(self) -> bool:
        return bool(self.counts)

    def add(self, cluster: int, addresses: set[int], until: Array, knowledge: int) -> None:
        """Lanes of a cluster release at these addresses: `until` has two times for each lane of the
        cluster."""
        for address in addresses if len(addresses) <= _MOST_ADDRESSES else {_ANYWHERE}:
            number = self.counts[address] = self.counts.get(address, 0) + 1
            numbers, times = self.of.setdefault(cluster, {}).setdefault(address, ([], []))
            numbers.append(number)
            times.append(np.maximum(until, times[-1]) if times else until)
            self.knew[address] = self.joined([self.knew.get(address, 0), knowledge])

    def at(self, address: int) -> int:
        """The number of the Knowledge that a strong load of an address gives."""
        found: Knowledge = {}
        told = []
        for place in (address, _ANYWHERE):
            if place in self.counts:
                found[place] = self.counts[place]
                told.append(self.knew[place])
        return self.joined([self._number(found), *told]) if found else 0

    def joined(self, numbers: list[int]) -> int:
        """The number of the union of these Knowledges."""
        different = set(numbers) - {0}
        if len(different) <= 1:
            return different.pop() if different else 0
        both: Knowledge = {}
        for number in different:
            for address, count in self.known[number].items():
                both[address] = max(both.get(address, 0), count)
        return self._number(both)

    def _number(self, knowledge: Knowledge) -> int:
        number = self.numbers.setdefault(frozenset(knowledge.items()), len(self.known))
        if number == len(self.known):
            self.known.append(knowledge)
        return number

    def until(self, cluster: int, knowledge: int) -> Array | None:
        """Two times for each lane of a cluster: this knowledge covers its plain, and its strong, accesses
        before them. None: none."""
        result = None
        there = self.of.get(cluster, {})
        for address, count in self.known[knowledge].items():
            numbers, times = there.get(address, ([], []))
            last = bisect.bisect_right(numbers, count) - 1
            if last >= 0:
                result = times[last] if result is None else np.maximum(result, times[last])
        return result
