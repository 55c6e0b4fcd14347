"""The candidate chain_wgmma: two factors of 16-bit types by warpgroups. What is between the factors stays in
registers (chain_wgmma.cuh)."""

from collections.abc import Iterator, Sequence
from math import ceil, gcd

from cukern.ops.kron_linear.plan import ADDED, LAUNCH_US, Launch, Problem, Step, up
from cukern.ops.kron_linear.tile import START_US

IN_FLIGHT = 32 << 10  # bytes in flight per SM that keep device memory busy
MOST_COLUMNS = 160  # of x and of y
LEAST_ROWS = 32  # of y, of the 64 that wgmma multiplies
COPY_CYCLES = 0.3  # per SM, for a copy of less than 16 bytes
PACKED_CYCLES = 0.065  # per SM, for an element of store_packed


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run of two factors with nothing to their right, with as many warpgroups as registers
    and shared memory allow."""
    fits = target.itemsize == 2 and target.aligned >= 16 and target.device.wgmma
    if not fits or len(run) != 2 or run[0].right > 1:
        return
    right, left = run
    columns = 16 <= right.p <= MOST_COLUMNS and right.p % 2 == 0 and right.q <= MOST_COLUMNS
    if left.q < LEAST_ROWS or not columns:
        return
    for teams in (4, 3, 2, 1):
        tiles_bytes = teams * _matrices(right, left) * left.p * right.p * 2
        for stages in (max(2, 1 + ceil(IN_FLIGHT / tiles_bytes)), 1):
            launch = launch_of(right, left, rows, teams, stages, target)
            enough = _registers(right, left, target.bfloat) <= min(240, 512 // teams)
            if enough and launch.shared <= target.shared:
                yield launch


def launch_of(right: Step, left: Step, rows: int, teams: int, stages: int, target: Problem) -> Launch:
    """One launch: each warpgroup has rows of x of its own. See Chain4 in chain_wgmma.cuh."""
    matrices = _matrices(right, left)
    p1, p2, q2 = up(left.p, 16), up(right.p, 16), up(right.q, 16)
    of_right = _panels(p2, q2) if target.bfloat else p2 * q2 * 4
    of_left = p1 * (up(left.q, 16) + 8) * 2
    room = 128 * teams * right.q if right.q % 16 else 0
    ends = max(of_left, room) if _in_registers(right, left) else of_left + room
    shared = of_right + teams * stages * _panels(p1, matrices * p2) + ends
    us = _us(right, left, stages, rows * left.left, target)
    plan = "Chain4", teams, stages, ADDED, left, right
    return Launch("chain_wgmma", (right, left), us, plan, 128 * teams, shared, matrices, products=1)


def _in_registers(right: Step, left: Step) -> bool:
    """True if all of the left factor stays in registers: IN_REGISTERS in chain_wgmma.cuh."""
    return left.q <= 128 and (up(right.p, 16) + up(right.q, 16)) // 2 + _of_left(left) <= 192


def _registers(right: Step, left: Step, bfloat: bool) -> int:
    """Registers per thread, as seen in compiled kernels."""
    rest = 48 + (32 if right.q % 2 or left.p % 2 else 0)
    if not _in_registers(right, left):
        rest += 24 if bfloat or right.q % 16 == 0 else 48
    sums = (_matrices(right, left) * up(right.p, 16) + up(right.q, 16)) // 2
    return sums + (_of_left(left) if _in_registers(right, left) else up(left.p, 16) // 4) + rest


def _us(right: Step, left: Step, stages: int, A: int, target: Problem) -> float:
    """The predicted time of a launch on A matrices x: compute and memory traffic overlap."""
    p1, p2, q2 = up(left.p, 16), up(right.p, 16), up(right.q, 16)
    cycles = ceil(left.q / 64) * p2 * (p1 + 2 / _matrices(right, left) * q2) / 32
    copies = left.p * right.p * (2 / gcd(16, 2 * right.p) - 1 / 8)  # more copies than with 16 bytes each
    cycles += copies * COPY_CYCLES + (left.q * right.q * PACKED_CYCLES if right.q % 16 else 0)
    cycles *= (1.15 if stages == 1 else 1.0) * (1.0 if _in_registers(right, left) else 1.2)
    device = target.device
    multiplied = max(1.0, A / device.sms) * cycles / device.cycles_us
    moved = A * (left.p * right.p + left.q * right.q) * 2 / device.sms / device.sm_bytes_us
    factors = (left.p * left.q + right.p * right.q) / device.sm_bytes_us
    return LAUNCH_US + START_US + factors + (multiplied**4 + moved**4) ** 0.25


def _matrices(right: Step, left: Step) -> int:
    """Matrices x of a tile: two if wgmma's 64 rows and the 128 bytes of a row of a panel hold both."""
    return 2 if left.q <= 32 and right.p <= 32 else 1


def _of_left(left: Step) -> int:
    """Registers for all of a left factor."""
    return ceil(left.q / 64) * up(left.p, 16) // 4


def _panels(rows: int, columns: int) -> int:
    """Bytes of a matrix of 16-bit numbers in panels of 64 columns: Panels in chain_wgmma.cuh."""
    return rows * ceil(columns / 64) * 128
