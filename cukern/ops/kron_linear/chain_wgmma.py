"""The candidate for two factors of 16-bit types by warpgroups, with what is between them in registers. See chain_wgmma.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil, gcd
from typing import NamedTuple

from cukern.ops.kron_linear.plan import LAUNCH_US, START_US, Problem, Step, text

IN_FLIGHT = 32 << 10  # bytes on their way to a multiprocessor that keep device memory busy
MOST_COLUMNS, LEAST_ROWS = 160, 32  # that warpgroups take; of 64 rows of y, which they multiply at once
COPY_CYCLES, PACKED_CYCLES = 0.3, 0.065  # of a multiprocessor, of a copy of few bytes and of a number that is stored packed


class ChainWgmma(NamedTuple):
    """One launch: each warpgroup has rows of x of its own. See Chain4 in chain_wgmma.cuh. The right factor's step comes first."""

    steps: tuple[Step, ...]
    teams: int  # warpgroups of a block
    stages: int
    split: bool
    us: float = 0.0
    L: int = 1
    R: int = 1
    blocks: int = 1
    slices: int = 1
    products: int = 1
    kernel: str = "chain_wgmma"
    handicap: float = 1.0

    @property
    def threads(self) -> int:
        return 128 * self.teams

    @property
    def shared(self) -> int:
        right, left = self.steps
        high, deep, across = _sixteens(left.p), _sixteens(right.p), _sixteens(right.q)
        factor = _panels(deep, across) if self.split else deep * across * 4
        matrix, room = high * (_sixteens(left.q) + 8) * 2, 128 * self.teams * right.q if right.q % 16 else 0
        return factor + self.teams * self.stages * _panels(high, deep) + (max(matrix, room) if self.held else matrix + room)

    @property
    def held(self) -> bool:
        """Whether the left factor stays in registers: HELD in chain_wgmma.cuh."""
        right, left = self.steps
        return left.q <= 128 and (_sixteens(right.p) + _sixteens(right.q)) // 2 + _of_left(left) <= 192

    @property
    def registers(self) -> int:
        """About how many a thread needs, as compiled."""
        right, left = self.steps
        rest = 48 + (32 if right.q % 2 or left.p % 2 else 0)
        if not self.held:
            rest += 24 if self.split or right.q % 16 == 0 else 48
        return (_sixteens(right.p) + _sixteens(right.q)) // 2 + (_of_left(left) if self.held else _sixteens(left.p) // 4) + rest

    def template(self, added: bool = False) -> str:
        return f"Chain4<{text(self.teams, self.stages, added, *[f'Factor<{s.p}, {s.q}>' for s in reversed(self.steps)])}>"


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[ChainWgmma]:
    """The launches of a run of two factors with nothing to their right, with as many warpgroups as registers and shared memory allow."""
    if len(run) != 2 or run[0].right > 1 or target.itemsize != 2 or target.aligned < 16 or not target.device.wgmma:
        return
    right, left = run
    if left.q < LEAST_ROWS or not 16 <= right.p <= MOST_COLUMNS or right.p % 2 or right.q > MOST_COLUMNS:
        return
    for teams in (4, 3, 2, 1):
        for stages in (max(2, 1 + ceil(IN_FLIGHT / (teams * left.p * right.p * 2))), 1):
            plan = ChainWgmma(tuple(run), teams, stages, target.bfloat)
            if plan.registers <= min(240, 512 // teams) and plan.shared <= target.shared:
                yield plan._replace(us=_us(plan, rows * left.left, target))


def _us(plan: ChainWgmma, pages: int, target: Problem) -> float:
    """A model of a launch's time: tensor cores, which seldom wait, multiply while device memory moves what goes in and out."""
    right, left = plan.steps
    cycles = ceil(left.q / 64) * _sixteens(right.p) * (_sixteens(left.p) + 2 * _sixteens(right.q)) / 32
    copies = left.p * right.p * (2 / gcd(16, 2 * right.p) - 1 / 8)  # that there are besides those of 16 bytes
    cycles += copies * COPY_CYCLES + (left.q * right.q * PACKED_CYCLES if right.q % 16 else 0)
    cycles *= (1.15 if plan.stages == 1 else 1.0) * (1.0 if plan.held else 1.2)
    multiplied = max(1.0, pages / target.sms) * cycles / target.cycles_us
    moved = pages * (left.p * right.p + left.q * right.q) * 2 / target.sms / target.sm_bytes_us
    return LAUNCH_US + START_US + (left.p * left.q + right.p * right.q) / target.sm_bytes_us + (multiplied**4 + moved**4) ** 0.25


def _sixteens(n: int) -> int:
    """Rows or columns in shared memory, with those that stay 0: HIGH, DEEP and ACROSS in chain_wgmma.cuh."""
    return ceil(n / 16) * 16


def _of_left(left: Step) -> int:
    """Registers for all of a left factor."""
    return ceil(left.q / 64) * _sixteens(left.p) // 4


def _panels(rows: int, columns: int) -> int:
    """Bytes of a matrix of 16-bit numbers in panels of 64 columns: Panels in chain_wgmma.cuh."""
    return rows * ceil(columns / 64) * 128
