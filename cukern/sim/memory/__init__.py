"""The memory of a launch: what it may access, and which accesses race."""

from cukern.sim.memory.regions import scope as scope
