"""cp.async: the copies that are in flight."""

from typing import NamedTuple

import numpy as np

from cukern.sim.machine.batch import Batch


class _Flight(NamedTuple):
    numbers: np.ndarray  # of the commit group, by lane
    lanes: np.ndarray
    positions: np.ndarray
    size: int
    pc: int


class Copies:
    """The data is in shared memory at once; the shadow memory knows that nobody may read it yet."""

    def __init__(self, m: Batch):
        self.m = m
        self.flights: list[_Flight] = []
        self.committed = np.zeros(m.lanes, np.int64)

    def start(self, pc: int, lanes: np.ndarray, positions: np.ndarray, size: int) -> None:
        self.flights.append(_Flight(self.committed[lanes], lanes, positions, size, pc))

    def wait(self, lanes: np.ndarray, newest: int | None) -> None:
        """These lanes wait until at most their `newest` last groups are in flight; None: until none is."""
        limit = np.full(self.m.lanes, -1)
        limit[lanes] = 1 << 62 if newest is None else self.committed[lanes] - newest
        left = []
        for flight in self.flights:
            landed = flight.numbers < limit[flight.lanes]
            if landed.any():
                self.m.order.clock.tick(flight.pc)
                self.m.shared.shadow.arrived(self.m.order, flight.positions[landed], flight.size, flight.lanes[landed])
            if not landed.all():
                up = ~landed
                left.append(flight._replace(numbers=flight.numbers[up], lanes=flight.lanes[up], positions=flight.positions[up]))
        self.flights = left
