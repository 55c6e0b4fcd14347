"""One batch of blocks that run at once: a lane is a thread, a register is an array with one element per lane.

Lanes at the same instruction form a group. A register with one value for all lanes, such as a loop counter or
an argument, is an array of one element. Barriers and warp-wide instructions are in the files beside this one;
machine.py assembles them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cukern.runtime.launch.limits import Dim
from cukern.sim.faults import Fault, NotSimulated, Where
from cukern.sim.machine.options import Options
from cukern.sim.machine.program import Program
from cukern.sim.memory.order import TIME_BITS, Clock, Order
from cukern.sim.memory.spaces import Array, Global, Private, Shadow, Space, count_nonzero
from cukern.sim.ptx.module import Register

# Blocks are numbered cluster by cluster, and within a cluster by rank, so that the blocks of a cluster have
# consecutive numbers. Without clusters, each cluster is one block, and blocks are numbered in the order of
# blockIdx.


def xyz(i: Any, dims: Dim) -> tuple[Any, Any, Any]:
    """The x, y and z of linear index i, x varying fastest. i is a number or an array."""
    return i % dims[0], i // dims[0] % dims[1], i // (dims[0] * dims[1])


def block_index(number: Any, grid: Dim, cluster: Dim) -> tuple[Any, Any, Any]:
    """blockIdx of the block with that number."""
    outer, inner = divmod(number, cluster[0] * cluster[1] * cluster[2])
    of_cluster, in_cluster = xyz(outer, clusters(grid, cluster)), xyz(inner, cluster)
    x, y, z = (c * n + i for c, n, i in zip(of_cluster, cluster, in_cluster, strict=True))
    return x, y, z


def clusters(grid: Dim, cluster: Dim) -> Dim:
    """How many clusters the grid has along each axis."""
    return grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2]


class Group:
    """Lanes at the same instruction. `index` selects them from a register; `whole`: they are all lanes that
    have not exited."""

    __slots__ = ("index", "lanes", "whole")

    def __init__(self, lanes: Array, all_lanes: int, live: int):
        self.lanes = lanes
        self.index: Any = slice(None) if len(lanes) == all_lanes else lanes
        self.whole = len(lanes) == live


class Launched:
    """The data that all batches of a launch share."""

    def __init__(
        self, name: str, program: Program, grid: Dim, block: Dim, shared: int, params: Array, memory: Global,
        options: Options, workspace: int, replicated: bool = False,
    ):  # fmt: skip
        self.name, self.program, self.grid, self.block = name, program, grid, block
        self.shared, self.params, self.memory = shared, params, memory
        self.workspace = workspace  # the address of the memory of grid.sync()
        self.replicated = replicated  # several lanes of a block may hold copies of one value, as Triton's do
        # of the shared memory that CUDA reserves, if the kernel uses it
        self.reserved_start = shared + -shared % 16
        self.all_shared = (
            self.reserved_start + RESERVED_BYTES if RESERVED_SHARED in program.specials else shared
        )
        self.threads = math.prod(block)
        self.warps = -(-self.threads // 32)
        self.cluster = program.kernel.cluster
        self.clock = Clock(math.prod(grid))
        self.steps = 0
        self.options = options
        # Uninitialized values in global memory: shadow memory, positions, the bytes of each, and the fault of
        # a row
        self.stored: list[tuple[Shadow, Array, Array, Callable[[int], Fault]]] = []
        # For each instruction HELD and FAILED of options.py, if that is recorded
        self.seen = np.zeros(len(program.kernel.code), np.uint8) if options.coverage is not None else None
        # kinds of faults that have been collected, by instruction
        self.muted: set[tuple[type[Fault], int]] = set()
        self.compares = any(i.opcode.startswith("atom") and ".cas" in i.opcode for i in program.kernel.code)
        # lane of the launch and address -> time of its last compare-and-swap
        self.compared: dict[tuple[int, int], int] = {}
        # races of plain reads that a compare-and-swap would forgive
        self.suspects: dict[tuple[int, int], Callable[[], Fault]] = {}


RESERVED_SHARED = "%reserved_smem_offset_1"
RESERVED_BYTES = 288  # cooperative groups of several warps use no more


class Batch:
    """The state of the lanes: groups that wait for their turn, registers, memory, and the order of
    accesses."""

    regs: list[Array]
    poison: Any  # see poison.py

    def __init__(self, launched: Launched, first_block: int, blocks: int):
        self.launched, self.program = launched, launched.program
        self.first_block, self.blocks, self.warps = first_block, blocks, launched.warps
        self.lanes_a_block = self.warps * 32
        self.lanes = blocks * self.lanes_a_block
        self.order = Order(launched.clock, first_block, blocks, self.warps, math.prod(launched.cluster))
        self.thread_of = np.arange(self.lanes) % self.lanes_a_block
        self.alive = self.thread_of < launched.threads
        self.live = int(self.alive.sum())
        self.ended = np.zeros(self.lanes, np.int64)  # the instruction at which a lane exited
        self.pc = 0
        self.poisoned: dict[int, Array] = {}  # register -> its uninitialized bits, by lane; see poison.py
        self.waiting: dict[int, Group] = {}  # program counter -> the lanes that continue there
        # the instruction at which a lane waits for other lanes, or -1
        self.waits_at = np.full(self.lanes, -1)
        self.spaces: dict[str, Space] = {"global": launched.memory, "const": launched.memory}
        names = self.program.shared_names
        self.spaces["shared"] = self.shared = Private(
            "shared", blocks, launched.all_shared, self.order.block_of, names
        )
        # the reserved part has zeros
        if launched.all_shared > launched.shared and self.shared.shadow.before is not None:
            self.shared.shadow.before.reshape(blocks, -1)[:, launched.reserved_start :] = True
        if self.program.local_size:
            lanes = np.arange(self.lanes)
            self.spaces["local"] = Private(
                "local", self.lanes, self.program.local_size, lanes, self.program.local_names
            )

    def go(self, pc: int, group: Group) -> None:
        """These lanes continue at `pc`."""
        other = self.waiting.get(pc)
        if other is not None:
            group = self.group(np.sort(np.concatenate((group.lanes, other.lanes))))
        self.waiting[pc] = group

    def group(self, lanes: Array) -> Group:
        return Group(self.order.every if len(lanes) == self.lanes else lanes, self.lanes, self.live)

    def groups(self, lanes: Array, pcs: Array) -> list[tuple[int, Group]]:
        """These lanes, by their instruction."""
        return [(pc, self.group(lanes[pcs == pc])) for pc in np.unique(pcs).tolist()]

    def resume(self, lanes: Array) -> list[tuple[int, Group]]:
        """These lanes stop waiting and continue. Returns them by the instruction at which they waited."""
        groups = self.groups(lanes, self.waits_at[lanes])
        self.waits_at[lanes] = -1
        for pc, group in groups:
            self.go(pc + 1, group)
        return groups

    def whereabouts(self, lane: int) -> str:
        """The state of a lane for which others wait forever."""
        thread = self.block_and_thread(lane)[1]
        if not self.alive[lane]:
            return f"thread {thread} has ended at {self.program.location(int(self.ended[lane]))}"
        return f"thread {thread} waits at {self.program.location(max(0, int(self.waits_at[lane])))}"

    # ---- registers

    def get(self, group: Group, register: int) -> Array:
        """A register of the group's lanes: one element each, or one for all."""
        values = self.regs[register]
        return values if len(values) == 1 else values[group.index]

    def spread(self, group: Group, register: int) -> Array:
        """A register of the group's lanes, one element each."""
        values = self.regs[register]
        if len(values) > 1:
            return values[group.index]
        # a view with a stride of 0, as np.broadcast_to makes it in ten times the time
        return np.ndarray(group.lanes.shape, values.dtype, values, 0, (0,))

    def clean(self, group: Group, register: int) -> None:
        """The register of these lanes is initialized."""
        mask = self.poisoned.get(register)
        if mask is not None:
            mask = mask.copy()
            mask[group.index] = 0
            self.poisoned[register] = mask
            if group.whole or not mask.any():
                del self.poisoned[register]

    def put(self, group: Group, register: int, values: Array) -> None:
        if self.poisoned:
            self.clean(group, register)
        if group.whole and (len(values) == 1 or len(values) == self.lanes):
            self.regs[register] = values
            return
        old = self.regs[register]
        new = old.repeat(self.lanes) if len(old) == 1 else old.copy()
        new[group.index] = values
        self.regs[register] = new

    def select(self, group: Group, guard: Register) -> Group | None:
        """The lanes whose predicate holds; None if it holds for none."""
        values = self.regs[guard.number]
        if len(values) == 1:
            return group if bool(values[0]) != guard.negated else None
        chosen = values[group.index]
        if guard.negated:
            chosen = ~chosen
        count = count_nonzero(chosen)
        if count == len(chosen):
            return group
        return self.group(group.lanes[chosen]) if count else None

    # ---- faults

    @property
    def compares(self) -> bool:
        return self.launched.compares

    @property
    def replicated(self) -> bool:
        return self.launched.replicated

    def suspect(self, reader: int, position: int, stamp: int | None, fault: Callable[[], Fault]) -> None:
        """A lane of the launch reads beside atomics, now or at `stamp`: a race, unless it executes a
        compare-and-swap since or later."""
        time = self.launched.compared.get((reader, position), -1)
        if stamp is None or time < stamp >> TIME_BITS:
            self.launched.suspects.setdefault((reader, position), fault)

    def compare(self, lanes: Array, positions: Array) -> None:
        """These lanes execute a compare-and-swap."""
        for key in zip((lanes + self.order.base).tolist(), positions.tolist(), strict=True):
            self.launched.compared[key] = self.order.clock.now
            self.launched.suspects.pop(key, None)

    def block_and_thread(self, lane: int) -> tuple[Dim, Dim]:
        """blockIdx and threadIdx of a lane of the batch."""
        block, thread = divmod(int(lane) + self.order.base, self.lanes_a_block)
        return self.block_index(block), xyz(thread, self.launched.block)

    def block_index(self, block: int) -> Dim:
        """blockIdx of a block of the launch, by its number."""
        return block_index(block, self.launched.grid, self.launched.cluster)

    def who(self, stamp: int) -> tuple[Dim, Dim, str]:
        """Block, thread and line of an access."""
        lane, pc = self.order.unpack(stamp)
        return *self.block_and_thread(lane - self.order.base), self.program.location(pc)

    def divergence(self, lane: int) -> str | None:
        """How threads of the lane's block have missed each other at a barrier, if they have."""
        return None

    def mutes(self, kind: type[Fault]) -> bool:
        """True if such a fault is not reported at this instruction."""
        return kind in self.launched.options.off or (kind, self.pc) in self.launched.muted

    def not_simulated(self, what: str, pc: int | None = None) -> NotSimulated:
        return NotSimulated(
            f"{what}, in {self.launched.name}, {self.program.location(self.pc if pc is None else pc)}"
        )

    def fault(
        self, kind: type[Fault], lane: int, what: str, pc: int | None = None, lanes: Array | None = None
    ) -> Fault:
        """`lanes`: all that run into the fault, if they are known."""
        block, thread = self.block_and_thread(lane)
        everyone = np.array([lane]) if lanes is None else lanes
        return kind(
            what,
            Where(self.launched.name, block, thread, self.program.location(self.pc if pc is None else pc)),
            everyone,
        )
