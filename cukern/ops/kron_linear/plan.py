"""Order of the mode products, and the (left, p, right) view of each."""

import functools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from cukern.runtime.device import Device

MOST = 8  # factors in a launch, as in tile.cuh
LAUNCH_US = 2.5
L2_BYTES = 24 << 20  # inputs and outputs of up to this size stay in the L2 cache
ADDED = "added"  # in Launch.plan: whether there is a bias or a residual
Sizes = tuple[tuple[int, int], ...]  # (p, q) of each factor, in torch.kron's order


class Problem(NamedTuple):
    """What a plan depends on besides the factors and the rows."""

    device: Device
    itemsize: int  # bytes of a number
    tensor: bool = False  # tensor cores may multiply in TF32, which represents 16-bit numbers exactly
    aligned: int = 16  # addresses are multiples of this
    whole: bool = True  # the number of rows is a multiple of 32
    bfloat: bool = False  # bfloat16

    @property
    def shared(self) -> int:
        """Shared memory of a thread block, without what the driver reserves."""
        return self.device.shared_bytes - 1024

    @property
    def strict(self) -> bool:
        """Strict float32: tensor cores multiply split numbers only."""
        return self.itemsize == 4 and not self.tensor


class Step(NamedTuple):
    """One mode product: a row is an array [left][p][right], and becomes [left][q][right]. Its text is C++."""

    factor: int  # its number
    left: int
    p: int
    q: int
    right: int

    def __str__(self) -> str:
        return instance("Factor", self.p, self.q)


class Launch(NamedTuple):
    """One kernel launch for neighbouring steps, forward or backward. Without threads: cuBLAS, for one step or
    a layer of two, or in the backward separate launches."""

    kernel: str  # the candidate's name
    steps: tuple[Step, ...]
    us: float  # predicted
    # the kernel's template argument, or the name of a C++ template and its arguments
    plan: tuple[object, ...] = ()
    threads: int = 0
    shared: int = 0  # bytes
    L: int = 1  # fibers of a tile
    R: int = 1  # columns of a tile
    blocks: int = 1  # per SM
    slices: int = 1  # blocks that share a tile
    products: int = 0  # on tensor cores for each product of two numbers
    handicap: float = 1.0  # a factor of `us` when plans are compared

    def template(self, added: bool = False) -> str:
        """The kernel's template argument; `added`: with a bias or a residual."""
        known = [added if a is ADDED else a for a in self.plan]
        return instance(*known) if len(known) > 1 else str(*known)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The tile kernel's steps: they are among the template's arguments."""
        return tuple(a for a in self.plan if isinstance(a, tuple))

    @property
    def in_place(self) -> bool:
        """True if dx may overwrite the input: a tile has the same place in both, and one block reads it."""
        return self.kernel not in ("few_rows", "separate") and all(s.p == s.q for s in self.steps)


def blocks_of(tiles: int, most: int, input_bytes: int, sums: int, sms: int) -> int:
    """Thread blocks of a backward launch, `most` at a time. Each has partial sums of all elements of the
    gradients. The partial sums take no more memory than the input, but each SM has a block."""
    return min(tiles, most, max(sms, input_bytes // (4 * sums)))


def planned_rows(rows: int, forward: bool = False) -> int:
    """The number of rows that a plan is made for, so that a new batch size compiles nothing.

    The forward has more of them: with few rows, the tile decides how many SMs have work. Plans for the exact
    number would be a few percent faster (docs/notes/kron_linear.md).
    """
    if forward and (rows <= 16 or 32 < rows <= 64):
        return 16 if rows <= 16 else 64
    return 32 if rows <= 64 else 256 if rows < 1024 else 4096


def least_us(run: Sequence[Step], rows: int, target: Problem) -> float:
    """The time to read the input and write the output of some steps, if they do not fit the L2 cache."""
    first = run[0]
    last = run[-1]
    moved = rows * (first.left * first.p * first.right + last.left * last.q * last.right) * target.itemsize
    return moved / (target.device.sms * target.device.sm_bytes_us) if moved > L2_BYTES else 0.0


def cost_order(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """The factors, by index, in the order with the fewest multiply-adds: by 1/p - 1/q, those that shrink
    first.

    Swapping two neighbours that handle N numbers changes their cost from N (q1 + q1 q2 / p1) to N (q2 + q1 q2
    / p2), so the first is the better where 1/q2 + 1/p1 < 1/q1 + 1/p2. Of equal ones the last index is first.
    """
    return sorted(reversed(range(len(sizes))), key=lambda i: 1 / sizes[i][0] - 1 / sizes[i][1])


@functools.lru_cache(1024)
def steps(sizes: Sizes, order: tuple[int, ...] = ()) -> tuple[Step, ...]:
    """The mode products of a layer, in the order in which they are done: `order`, or cost_order."""
    now = [p for p, _ in sizes]
    found = []
    for i in order or cost_order(sizes):
        p, q = sizes[i]
        found.append(Step(i, prod(now[:i]), p, q, prod(now[i + 1 :])))
        now[i] = q
    return tuple(found)


def steps_of(factors: Sequence[Tensor]) -> tuple[Step, ...]:
    return steps(tuple((w.shape[-2], w.shape[-1]) for w in factors))


def up(n: int, to: int) -> int:
    """n, rounded up to a multiple of `to`."""
    return -(-n // to) * to


def instance(name: object, *arguments: object) -> str:
    """The C++ type name<arguments>."""
    return f"{name}<{', '.join([str(a).lower() if isinstance(a, bool) else str(a) for a in arguments])}>"
