"""In which order kron_linear multiplies by its factors, and how each of them sees the array that it is multiplied to."""

import functools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

Sizes = tuple[tuple[int, int], ...]  # (p, q) of each factor, in torch.kron's order


class Step(NamedTuple):
    """One mode product: a row is an array [left][p][right], and becomes [left][q][right]."""

    factor: int  # its number
    left: int
    p: int
    q: int
    right: int


class Backward(NamedTuple):
    """The backward of neighbouring factors in one launch; without a template by one launch for each thing."""

    steps: tuple[Step, ...]
    us: float
    template: str = ""
    blocks: int = 0
    threads: int = 0
    shared: int = 0  # bytes
    sums: int = 0  # partial ones, of each factor's gradient
    kernel: str = "group"  # or "split", "split_one", "quarter"

    @property
    def in_place(self) -> bool:
        """Whether what goes back may be written over what came: a tile lies in the same place, and no other block reads it."""
        return self.kernel != "quarter" and all(s.p == s.q for s in self.steps)


def cost_order(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The factors, by index, in the order that multiplies and adds least: by 1/p - 1/q, those that shrink the array first.

    Swapping two neighbours that handle N numbers changes their cost from N (q1 + q1 q2 / p1) to N (q2 + q1 q2 / p2), so the first is the
    better where 1/q2 + 1/p1 < 1/q1 + 1/p2. Equal ones keep the order in which memory is fastest: the last index first.
    """
    return sorted(reversed(range(len(sizes))), key=lambda i: 1 / sizes[i][0] - 1 / sizes[i][1])


@functools.lru_cache(1024)
def steps(sizes: Sizes) -> tuple[Step, ...]:
    """The mode products of a layer, in the order in which they are done."""
    now, found = [p for p, _ in sizes], []
    for i in cost_order(sizes):
        p, q = sizes[i]
        found.append(Step(i, prod(now[:i]), p, q, prod(now[i + 1 :])))
        now[i] = q
    return tuple(found)


def multiply_adds(order: Sequence[tuple[int, int]], row: int) -> int:
    """Multiply-adds for one row of `row` numbers, if the factors are taken in this order."""
    total = 0
    for p, q in order:
        row = row // p * q
        total += row * p
    return total
