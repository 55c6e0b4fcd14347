"""How kron_linear v4 takes a layer of two or three factors in one launch on tensor cores: see Pages4 in pages.cuh,
Wide4 in wide.cuh, and Piles4 in page_products.cuh.

Sizes are multiples of 16, but for Wide4, and numbers 16-bit: in TF32 the other launches are as fast.
"""

from math import ceil, gcd, prod
from typing import NamedTuple

from cukern.ops.kron_linear import groups
from cukern.ops.kron_linear.groups import BARRIER_CYCLES, LAUNCH_US, START_US, text
from cukern.ops.kron_linear.plan import Problem, Sizes, Step, least_us, steps
from cukern.runtime.device import eligible

IN_FLIGHT = 32 << 10  # bytes on their way to a multiprocessor that keep device memory busy
PRODUCT_CYCLES = 7  # of 16 x 8 x 16, beside all else that a warp issues
MOST_COLUMNS = 160  # that warpgroups take
COPY_CYCLES, PACKED_CYCLES = 0.3, 0.065  # of a multiprocessor, of a copy of few bytes and of a number that is stored packed
WAITING = 2  # how much longer all takes, over the number of warps that a multiprocessor has


class Pages(NamedTuple):
    """One launch of two factors: pages are rows. The right factor's step comes first."""

    steps: tuple[Step, ...]
    blocks: int  # that a multiprocessor holds
    teams: int  # of a block
    stages: int
    tiles: int  # of 16 rows of y, for each warp
    split: bool  # of bfloat16: what lies between the factors is multiplied as two numbers of it, and not in TF32
    us: float = 0.0
    R: int = 1  # as in Group
    slices: int = 1

    @property
    def L(self) -> int:
        """Rows of a tile, as in Group: a team has one."""
        return self.teams

    @property
    def team(self) -> int:
        """Warps that have a page together."""
        return ceil(self.steps[1].q / (16 * self.tiles))

    @property
    def threads(self) -> int:
        return 32 * self.team * self.teams

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        right, left = self.steps
        return _bytes(left, True) + _bytes(right, self.split) + self.teams * self.stages * left.p * (right.p + 8) * 2

    def template(self, added: bool = False) -> str:
        """The plan as the kernel's template argument; `added`: with a bias or a residual."""
        plan = self.blocks, self.teams, self.stages, self.tiles, False, self.split, added
        return f"Pages4<{text(*plan, *_factors(self.steps))}>"


class Wide(NamedTuple):
    """The same by warpgroups, with wgmma: each has pages of its own. See Wide4 in wide.cuh."""

    steps: tuple[Step, ...]
    teams: int  # warpgroups of a block
    stages: int
    split: bool
    us: float = 0.0
    L: int = 1  # as in Group
    R: int = 1
    blocks: int = 1
    slices: int = 1

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
        """Whether the left factor stays in registers: HELD in wide.cuh."""
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
        return f"Wide4<{text(self.teams, self.stages, added, *_factors(self.steps))}>"


class Piles(NamedTuple):
    """One launch of three factors: a block has a row. The rightmost factor's step comes first."""

    steps: tuple[Step, ...]
    warps: int
    held: bool  # the rightmost factor stays in registers
    us: float = 0.0
    L: int = 1  # as in Group
    R: int = 1
    blocks: int = 1
    slices: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared(self) -> int:
        right, left, top = self.steps
        pages, z = top.p * left.p * (right.p + 8) * 2, top.p * (left.q * right.q + 8) * 4
        return _bytes(right, False) + _bytes(left, True) + _bytes(top, False) + pages + z

    def template(self, added: bool = False) -> str:
        return f"Piles4<{text(self.warps, self.held, added, *_factors(self.steps))}>"


Launch = groups.Launch | Pages | Wide | Piles


def fastest(sizes: Sizes, rows: int, target: Problem, bfloat: bool) -> Pages | Wide | Piles | None:
    """Such a launch of a layer, if there is one, and rows enough for it: none cuts a row for several blocks, but by warpgroups a block is
    fast enough; `bfloat`: of bfloat16."""
    if target.itemsize != 2 or not target.tensor or target.aligned < 16:
        return None
    if len(sizes) not in (2, 3):
        return None
    made: list[Pages | Wide | Piles | None] = [wide(sizes, rows, target, bfloat)] if len(sizes) == 2 else []
    if 2 * rows >= target.sms and not any(n % 16 for size in sizes for n in size):
        made.append(pages(sizes, rows, target, bfloat) if len(sizes) == 2 else piles(sizes, rows, target))
    least, left = least_us(steps(sizes), rows, target), eligible([plan for plan in made if plan], groups.kernel_of)
    return min((plan._replace(us=max(plan.us, least)) for plan in left), key=lambda plan: plan.us, default=None)


def pages(sizes: Sizes, rows: int, target: Problem, split: bool) -> Pages | None:
    """With as many warps as registers allow, and stages as keep device memory busy."""
    steps = right, left = _in_order(sizes)
    tiles = 2 if left.q == 32 else 1  # where one warp has a page, it waits for none
    for warps in (16, 12, 8):
        plan = Pages(steps, 1, 1, 1, tiles, split)
        blocks = 2 if plan.team == 1 else 1  # of such, one starts while the other works
        teams = warps // blocks // plan.team
        if not teams or _registers(left, right, tiles, 0) > min(255, 2048 // warps):
            continue
        page = teams * blocks * left.p * right.p * 2
        for stages in range(min(4, 1 + max(1, round(IN_FLIGHT / page))), 0, -1):
            plan = plan._replace(blocks=blocks, teams=teams, stages=stages)
            if (plan.shared + 1024) * blocks <= target.shared + 1024:
                return plan._replace(us=_us_of_pages(plan, rows, target))
    return None


def wide(sizes: Sizes, rows: int, target: Problem, split: bool) -> Wide | None:
    """With as many warpgroups as registers and shared memory allow."""
    steps = right, left = _in_order(sizes)
    if not target.device.wgmma or left.q < 48 or not 32 <= right.p <= MOST_COLUMNS or right.p % 2 or right.q > MOST_COLUMNS:
        return None
    made = []
    for teams in (4, 3, 2, 1):
        most = max(2, 1 + ceil(IN_FLIGHT / (teams * left.p * right.p * 2)))
        for stages in (most, 1):
            plan = Wide(steps, teams, stages, split)
            if plan.registers <= min(240, 512 // teams) and plan.shared <= target.shared:
                made.append(plan._replace(us=_us_of_wide(plan, rows, target)))
    return min(made, key=lambda plan: plan.us, default=None)


def piles(sizes: Sizes, rows: int, target: Problem) -> Piles | None:
    """The same of three factors."""
    steps = right, left, top = _in_order(sizes)
    if right.q % 32:
        return None
    for warps, held in ((12, True), (8, True), (8, False)):
        plan = Piles(steps, warps, held)
        page = _registers(left, right, left.q // 16, right.p * right.q // 32 if held else 0)
        registers = top.p * top.q // 32 + max(page, top.q + 46) - 22  # what the two parts have in common
        if registers <= min(255, 2048 // warps) and plan.shared <= target.shared:
            return plan._replace(us=_us_of_piles(plan, rows, target))
    return None


def _in_order(sizes: Sizes) -> tuple[Step, ...]:
    """The steps, the rightmost factor's first."""
    n = len(sizes)
    return tuple(Step(i, prod(p for p, _ in sizes[:i]), *sizes[i], prod(q for _, q in sizes[i + 1 :])) for i in reversed(range(n)))


def _registers(left: Step, right: Step, tiles: int, held: int) -> int:
    """About how many a thread needs: sums, what lies between the factors, the factors, and the rest."""
    return tiles * (right.q // 2 + gcd(right.p, 32) // 2 + left.p // 4) + held + 46


def _issued(left: Step, right: Step, tiles: int, split: bool, held: bool) -> float:
    """Cycles in which a warp issues its rows of a page, as measured."""
    z = tiles * right.p / 2  # numbers of a lane between the factors
    products = 16 * tiles * right.p * (left.p / 2048 + right.q / 1024)
    fetches = left.p * right.p / 256 + (0 if held else right.p * right.q / (256 if split else 128))
    return PRODUCT_CYCLES * products + 2 * fetches + z * (4 if split else 1) + tiles * right.q + 60


def _us_of_pages(plan: Pages, rows: int, target: Problem) -> float:
    right, left = plan.steps
    cycles = _issued(left, right, plan.tiles, plan.split, False) * plan.team / 4 * (1 + WAITING / (plan.team * plan.teams * plan.blocks))
    each, together = rows / target.sms, plan.teams * plan.blocks
    multiplied = (each + ceil(each / together) * together) / 2 * cycles / target.cycles_us
    return _us(multiplied + (0.5 if plan.stages == 1 else 0.0) * multiplied, plan.steps, plan.blocks, rows, target)


def _us_of_wide(plan: Wide, rows: int, target: Problem) -> float:
    right, left = plan.steps
    cycles = (
        ceil(left.q / 64) * _sixteens(right.p) * (_sixteens(left.p) + 2 * _sixteens(right.q)) / 32
    )  # of tensor cores, which seldom wait
    copies = left.p * right.p * (2 / gcd(16, 2 * right.p) - 1 / 8)  # that there are besides those of 16 bytes
    cycles += copies * COPY_CYCLES + (left.q * right.q * PACKED_CYCLES if right.q % 16 else 0)
    cycles *= (1.15 if plan.stages == 1 else 1.0) * (1.0 if plan.held else 1.2)
    return _us(max(1.0, rows / target.sms) * cycles / target.cycles_us, plan.steps, 1, rows, target)


def _us_of_piles(plan: Piles, rows: int, target: Problem) -> float:
    right, left, top = plan.steps
    pages = ceil(top.p / plan.warps) * plan.warps * _issued(left, right, left.q // 16, False, plan.held)
    slabs = ceil(left.q * right.q / 32 / plan.warps) * plan.warps * (top.p * top.q / 32 * PRODUCT_CYCLES + top.p * 2 + top.q * 2)
    cycles = (pages + slabs) / 4 * (1 + WAITING / plan.warps) + 2 * BARRIER_CYCLES
    return _us(ceil(rows / target.sms) * cycles / target.cycles_us, plan.steps, 1, rows, target)


def _us(multiplied: float, steps: tuple[Step, ...], blocks: int, rows: int, target: Problem) -> float:
    """Of a launch whose multiprocessors multiply for so long, while device memory moves what goes in and out."""
    moved = rows * (prod(s.p for s in steps) + prod(s.q for s in steps)) * 2 / target.sms / target.sm_bytes_us
    matrices = blocks * sum(s.p * s.q for s in steps) / target.sm_bytes_us
    return LAUNCH_US + START_US + matrices + (multiplied**4 + moved**4) ** 0.25


def _factors(steps: tuple[Step, ...]) -> list[str]:
    return [f"Factor<{s.p}, {s.q}>" for s in reversed(steps)]


def _sixteens(n: int) -> int:
    """Rows or columns in shared memory, with those that stay 0: HIGH, DEEP and ACROSS in wide.cuh."""
    return ceil(n / 16) * 16


def _of_left(left: Step) -> int:
    """Registers for all of a left factor."""
    return ceil(left.q / 64) * _sixteens(left.p) // 4


def _panels(rows: int, columns: int) -> int:
    """Bytes of a matrix of 16-bit numbers in panels of 64 columns: Panels in wide.cuh."""
    return rows * ceil(columns / 64) * 128


def _bytes(s: Step, pairs: bool) -> int:
    """Of a factor in shared memory, as 16-bit numbers or as floats: PageMemory in pages.cuh."""
    return s.p * (s.q + 8) * 2 if pairs else s.p * s.q * 4
