"""What lanes do together: barriers of a block, and the shuffles, votes and tensor-core instructions of a warp.

Lanes that come first wait ("park") for those that they name. When no lane of a batch can go on, those that wait wait for ever: a fault.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cukern.sim import ptx, tensor_core
from cukern.sim.decode import SIGNED, UNSIGNED, Context
from cukern.sim.faults import BarrierFault, Fault, Uninitialized
from cukern.sim.memory import CARRIERS
from cukern.sim.ptx import Operand, Register, Vector

if TYPE_CHECKING:
    from cukern.sim.machine import Group, Machine
    from cukern.sim.program import Step

_WARP_SYNC = -1  # lanes wait at any bar.warp.sync, wherever it stands

# ---- barriers of a block


class _Meeting:
    """One barrier: who waits at it, in all blocks of the batch."""

    def __init__(self, m: "Machine"):
        self.pcs = np.full(m.lanes, -1)  # where a lane waits
        self.count = np.zeros(m.blocks, np.int64)  # of threads; 0: all of the block
        self.holds = np.zeros(m.lanes, bool)  # the predicate of a bar.red
        self.signals: dict[int, np.ndarray] = {}  # by warp that did not wait: what it could tell


class Barriers:
    def __init__(self, m: "Machine"):
        self.m = m
        self.meetings: dict[int, _Meeting] = {}
        self.outcomes: dict[int, Callable[[Group, np.ndarray], None]] = {}  # by instruction: what a bar.red does with the counts

    def sync(self, group: "Group", barrier: int, count: int, holds: np.ndarray | None = None) -> None:
        """These lanes wait."""
        m = self.m
        everybody = len(group.lanes) == m.blocks * m.launched.threads
        if everybody and not count and holds is None and barrier not in self.meetings:
            self._everybody_met()
            m.go(m.pc + 1, group)
            return
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        meeting.pcs[group.lanes] = m.pc
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        meeting.holds[group.lanes] = False if holds is None else holds
        self._complete(barrier, meeting)

    def arrive(self, group: "Group", barrier: int, count: int) -> None:
        """These lanes' warps signal, and go on."""
        m = self.m
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        for warp in np.unique(m.order.warp_of[group.lanes]):
            meeting.signals[int(warp)] = m.order.knowledge(int(warp))
        m.go(m.pc + 1, group)
        self._complete(barrier, meeting)

    def lanes_left(self) -> None:
        for barrier, meeting in list(self.meetings.items()):
            self._complete(barrier, meeting)

    def _everybody_met(self) -> None:
        self.m.order.barrier(np.arange(self.m.blocks))
        self.m.spaces["shared"].shadow.forget_reads()  # type: ignore[attr-defined]

    def _complete(self, barrier: int, meeting: _Meeting) -> None:
        """Let go the blocks in which all have come."""
        m = self.m
        here = meeting.pcs >= 0
        by_warp = here.reshape(-1, 32).sum(axis=1)
        whole_warps = (by_warp > 0) & (by_warp == m.alive.reshape(-1, 32).sum(axis=1))
        for warp in meeting.signals:
            whole_warps[warp] = True
        counted = whole_warps.reshape(m.blocks, -1).sum(axis=1) * 32
        arrived = by_warp.reshape(m.blocks, -1).sum(axis=1)
        done = np.where(meeting.count == 0, arrived == m.launched.threads, (meeting.count > 0) & (counted >= meeting.count)) & (arrived > 0)
        if not done.any():
            return
        released = np.flatnonzero(here & done[m.order.block_of])
        self._check_alignment(released, meeting)
        self._order(np.flatnonzero(done), meeting, here)
        self._go(released, meeting)
        meeting.pcs[released] = -1
        meeting.signals = {w: told for w, told in meeting.signals.items() if not done[w // m.warps]}
        if not (meeting.pcs >= 0).any() and not meeting.signals:
            del self.meetings[barrier]

    def _order(self, blocks: np.ndarray, meeting: _Meeting, here: np.ndarray) -> None:
        m = self.m
        if len(blocks) == m.blocks and not meeting.count.any():
            self._everybody_met()
            return
        for block in blocks:
            warps = np.arange(block * m.warps, (block + 1) * m.warps)
            if not meeting.count[block]:
                m.order.barrier(np.array([block]))
                continue
            waiting = warps[here.reshape(-1, 32)[warps].any(axis=1)]
            told = [m.order.knowledge(int(w)) for w in waiting] + [meeting.signals[int(w)] for w in warps if int(w) in meeting.signals]
            m.order.learn(waiting, np.max(told, axis=0))

    def _go(self, released: np.ndarray, meeting: _Meeting) -> None:
        m = self.m
        blocks = m.order.block_of[released]
        held = np.bincount(blocks[meeting.holds[released]], minlength=m.blocks)
        came = np.bincount(blocks, minlength=m.blocks)
        pcs = meeting.pcs[released]
        for pc in np.unique(pcs):
            group = m.group(released[pcs == pc])
            outcome = self.outcomes.get(int(pc))
            if outcome is not None:
                own = m.order.block_of[group.lanes]
                outcome(group, np.stack((held[own], came[own])))
            m.go(int(pc) + 1, group)

    def _check_alignment(self, lanes: np.ndarray, meeting: _Meeting) -> None:
        """The lanes of one warp must wait at one instruction."""
        m = self.m
        pcs = meeting.pcs[lanes]
        first = np.full(m.lanes // 32, np.iinfo(np.int64).max)
        np.minimum.at(first, m.order.warp_of[lanes], pcs)
        apart = pcs != first[m.order.warp_of[lanes]]
        if apart.any():
            lane, pc = lanes[apart][0], int(pcs[apart][0])
            other = next(x for x in lanes if m.order.warp_of[x] == m.order.warp_of[lane] and meeting.pcs[x] != pc)
            raise m.fault(BarrierFault, lane, f"waits at a barrier, while of its warp {self._waits(other, int(meeting.pcs[other]))}", pc)

    def _waits(self, lane: int, pc: int) -> str:
        m = self.m
        return f"thread {m.block_and_thread(lane)[1]} waits at another, at {m.program.location(pc)}"

    def waits_at(self, lane: int) -> int | None:
        """The instruction at which a lane waits, if it does."""
        return next((int(x.pcs[lane]) for x in self.meetings.values() if x.pcs[lane] >= 0), None)

    def stuck(self) -> Fault:
        """The fault of lanes that wait for those that never come."""
        m = self.m
        barrier, meeting = next((b, x) for b, x in self.meetings.items() if (x.pcs >= 0).any())
        lane = int(np.flatnonzero(meeting.pcs >= 0)[0])
        block = m.order.block_of[lane]
        mine = (m.order.block_of == block) & (m.thread_of < m.launched.threads)
        missing = int(np.flatnonzero(mine & (meeting.pcs < 0))[0]) if (mine & (meeting.pcs < 0)).any() else None
        for_whom = f"{meeting.count[block]} threads" if meeting.count[block] else "all threads of the block"
        what = f"waits at barrier {barrier} for {for_whom}"
        what += f", but {m.whereabouts(missing)}" if missing is not None else ", and the block has no more"
        return m.fault(BarrierFault, lane, what, int(meeting.pcs[lane]))


def barrier(c: Context) -> "Step":
    if c.parts[:2] == ["bar", "warp"]:
        return _warp_sync(c)
    parts = [p for p in c.parts[1:] if p not in ("cta", "aligned")]
    kind = parts[0]
    if kind not in ("sync", "arrive", "red") or (kind != "red" and len(parts) > 1):
        raise c.unknown()
    operands = list(c.operands)
    target = operands.pop(0) if kind == "red" else None
    predicate = operands.pop() if kind == "red" else None
    number = c.source(operands[0], "u32")
    count = c.source(operands[1], "u32") if len(operands) > 1 else c.program.constant(0, 32)
    holds = c.source(predicate, "pred") if predicate is not None else None
    negated = isinstance(predicate, Register) and predicate.negated
    outcome = _outcome(c, parts[1], target) if kind == "red" else None

    def run(m: "Machine", group: "Group") -> None:
        if outcome is not None:
            m.barriers.outcomes[c.pc] = lambda lanes, counts: outcome(m, lanes, counts)
        numbers, counts = m.spread(group, number), m.spread(group, count)
        for n, threads in set(zip(numbers.tolist(), counts.tolist(), strict=True)) if len(m.regs[number]) > 1 else {(numbers[0], counts[0])}:
            chosen = (numbers == n) & (counts == threads)
            some = group if chosen.all() else m.group(group.lanes[chosen])
            if kind == "arrive":
                m.barriers.arrive(some, int(n), int(threads))
            else:
                m.barriers.sync(some, int(n), int(threads), None if holds is None else m.spread(some, holds) ^ negated)

    return run


def _outcome(c: Context, operation: str, target: Operand | None) -> Callable[["Machine", "Group", np.ndarray], None]:
    """Puts the result of a bar.red into its register, from how many lanes held and came."""
    results: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "and": lambda held, came: held == came,
        "or": lambda held, came: held > 0,
        "popc": lambda held, came: held.astype(np.uint32),
    }
    register = c.target(target) if target is not None else None
    if operation not in results or register is None:
        raise c.unknown()
    return lambda m, group, counts: m.put(group, register.index, results[operation](counts[0], counts[1]))


# ---- a warp


class Warps:
    """Lanes that wait for others of their warp."""

    def __init__(self, m: "Machine"):
        self.m = m
        self.parked: dict[int, np.ndarray] = {}  # by instruction, or _WARP_SYNC
        self.at = np.zeros(m.lanes, np.int64)
        self.masks = np.zeros(m.lanes, np.uint32)

    def meet(self, group: "Group", masks: np.ndarray, key: int) -> "Group | None":
        """Those lanes whose partners are all here; the others park."""
        m = self.m
        if key not in self.parked and len(masks) == 1 and masks[0] == 0xFFFFFFFF and group.whole:
            return group
        lanes = group.lanes
        self.masks[lanes], self.at[lanes] = masks, m.pc
        self._check_members(lanes)
        if key in self.parked:
            lanes = np.sort(np.concatenate((lanes, self.parked.pop(key))))
        warps = m.order.warp_of[lanes]
        missing = self.masks[lanes] & bits(m.alive)[warps] & ~bits_of(lanes, m.lanes)[warps]
        if not missing.any():
            return group if len(lanes) == len(group.lanes) else m.group(lanes)
        ready = lanes[missing == 0]
        self.parked[key] = lanes[missing != 0]
        return m.group(ready) if len(ready) else None

    def _check_members(self, lanes: np.ndarray) -> None:
        outside = (self.masks[lanes] >> (lanes % 32).astype(np.uint32) & 1) == 0
        if outside.any():
            lane = lanes[outside][0]
            what = f"names the lanes {self.masks[lane]:#010x} of its warp, but it is lane {lane % 32} itself"
            raise self.m.fault(BarrierFault, lane, what)

    def lanes_left(self) -> None:
        """Nobody waits for lanes that are done: try again."""
        parked, self.parked = self.parked, {}
        for lanes in parked.values():
            for pc in np.unique(self.at[lanes]):
                self.m.go(int(pc), self.m.group(lanes[self.at[lanes] == pc]))

    def waits_at(self, lane: int) -> int | None:
        return int(self.at[lane]) if any(lane in lanes for lanes in self.parked.values()) else None

    def stuck(self) -> Fault | None:
        m = self.m
        for lanes in self.parked.values():
            lane = int(lanes[0])
            warp = m.order.warp_of[lane]
            wanted = np.flatnonzero(self.masks[lane] >> np.arange(32, dtype=np.uint32) & 1) + warp * 32
            missing = next(int(x) for x in wanted if m.alive[x] and x not in lanes)
            what = f"waits for the lanes {self.masks[lane]:#010x} of its warp, but {m.whereabouts(missing)}"
            return m.fault(BarrierFault, lane, what, int(self.at[lane]))
        return None


def bits(flags: np.ndarray) -> np.ndarray:
    """A bool for each lane as 32 bits for each warp."""
    return np.packbits(flags, bitorder="little").view(np.uint32)


def bits_of(lanes: np.ndarray, count: int) -> np.ndarray:
    flags = np.zeros(count, bool)
    flags[lanes] = True
    return bits(flags)


Together = Callable[["Machine", "Group", np.ndarray], None]


def _together(c: Context, mask: Operand, act: Together) -> "Step":
    """A step that acts once all lanes of `mask` are here: act(m, lanes, their masks)."""
    register, pc = c.source(mask, "u32"), c.pc

    def run(m: "Machine", group: "Group") -> None:
        ready = m.warp_wide.meet(group, m.get(group, register), pc)
        if ready is not None:
            act(m, ready, m.spread(ready, register))
            m.go(pc + 1, ready)

    return run


def _warp_sync(c: Context) -> "Step":
    register = c.source(c.operands[0], "u32")

    def run(m: "Machine", group: "Group") -> None:
        before = group
        ready = m.warp_wide.meet(group, m.get(group, register), _WARP_SYNC)
        if ready is None:
            return
        lanes, order = ready.lanes, m.order
        whole = bits_of(lanes, m.lanes) == bits(m.alive)
        masks = m.spread(ready, register) if ready is before else m.warp_wide.masks[lanes]
        alive = bits(m.alive)[order.warp_of[lanes]]
        full = whole[order.warp_of[lanes]] & (masks & alive == alive)
        order.sync_warps(np.unique(order.warp_of[lanes[full]]))
        rest = lanes[~full]
        pairs = np.unique(np.stack((order.warp_of[rest], masks[~full].astype(np.int64))), axis=1)
        for warp, mask in pairs.T:
            order.sync_lanes(rest[(order.warp_of[rest] == warp) & (masks[~full] == mask)])
        if ready is before:
            m.go(m.pc + 1, ready)
            return
        for pc in np.unique(m.warp_wide.at[lanes]):
            m.go(int(pc) + 1, m.group(lanes[m.warp_wide.at[lanes] == pc]))

    return run


def active_mask(c: Context) -> "Step":
    register = c.target(c.operands[0])
    assert register is not None

    def run(m: "Machine", group: "Group") -> None:
        m.put(group, register.index, bits_of(group.lanes, m.lanes)[m.order.warp_of[group.lanes]])

    return run


def shuffle(c: Context) -> "Step":
    """shfl.sync.mode.b32 d|p, a, b, c, mask. PTX ISA, shfl.sync."""
    if c.parts[1] != "sync" or len(c.parts) != 4 or c.parts[3] != "b32":
        raise c.unknown()
    mode, pc = c.parts[2], c.pc
    first, *rest = c.items(c.operands[0])
    target, holds = c.target(first), c.target(rest[0]) if rest else None
    value, distance, clamp = (c.source(x, "b32") for x in c.operands[1:4])

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        m.pc = pc
        lanes = group.lanes
        lane, step, ends = lanes % 32, m.get(group, distance).astype(np.int64) & 31, m.get(group, clamp).astype(np.int64)
        segment, bound = ends >> 8 & 31, ends & 31
        least, largest = lane & segment, (lane & segment) | (bound & ~segment)
        source = {
            "up": lambda: lane - step,
            "down": lambda: lane + step,
            "bfly": lambda: lane ^ step,
            "idx": lambda: least | (step & ~segment),
        }[mode]()
        valid = source >= largest if mode == "up" else source <= largest
        source = np.where(valid, source, lane)
        _check_sources(m, lanes, masks, source)
        if holds is not None:
            m.put(group, holds.index, valid)
        if target is not None:
            values = m.regs[value]
            m.put(group, target.index, values if len(values) == 1 else values[lanes - lane + source])

    return _together(c, c.operands[4], act)


def _check_sources(m: "Machine", lanes: np.ndarray, masks: np.ndarray, source: np.ndarray) -> None:
    """A lane may read a register of those lanes alone that its mask names, and that are here."""
    here = bits_of(lanes, m.lanes)[m.order.warp_of[lanes]]
    bad = (here & masks) >> source.astype(np.uint32) & 1 == 0
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        named = masks[row] >> np.uint32(source[row]) & 1
        why = "is not there" if named else f"is not in the mask {masks[row]:#010x}"
        raise m.fault(Uninitialized, lanes[row], f"reads a register of lane {source[row]} of its warp, which {why}")


def vote(c: Context) -> "Step":
    if c.parts[1] != "sync" or c.parts[2] not in ("all", "any", "uni", "ballot"):
        raise c.unknown()
    mode, register, operand = c.parts[2], c.target(c.operands[0]), c.operands[1]
    predicate, negated = c.source(operand, "pred"), isinstance(operand, Register) and operand.negated

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        warps = m.order.warp_of[group.lanes]
        here = bits_of(group.lanes, m.lanes)[warps] & masks
        hold = bits_of(group.lanes[m.spread(group, predicate) ^ negated], m.lanes)[warps] & masks
        result = {"all": lambda: hold == here, "any": lambda: hold != 0, "uni": lambda: (hold == 0) | (hold == here), "ballot": lambda: hold}
        if register is not None:
            m.put(group, register.index, result[mode]())

    return _together(c, c.operands[2], act)


def _members(m: "Machine", lanes: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """members[i, j]: lane j of the warp is here, and lane i names it."""
    here = (bits_of(lanes, m.lanes)[m.order.warp_of[lanes]] & masks)[:, None]
    return (here >> np.arange(32, dtype=np.uint32) & 1).astype(bool)


def _of_warp(m: "Machine", lanes: np.ndarray, register: int) -> np.ndarray:
    """For each lane the values of all 32 of its warp."""
    values = np.broadcast_to(m.regs[register], (m.lanes,)).reshape(-1, 32)
    return values[m.order.warp_of[lanes]]


def _to_bits(flags: np.ndarray) -> np.ndarray:
    return np.packbits(flags, axis=1, bitorder="little").view(np.uint32)[:, 0]


def match(c: Context) -> "Step":
    mode, type_ = c.parts[1], c.types[0]
    first, *rest = c.items(c.operands[0])
    target, holds = c.target(first), c.target(rest[0]) if rest else None
    value = c.source(c.operands[1], type_)

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        members = _members(m, group.lanes, masks)
        equal = members & (_of_warp(m, group.lanes, value) == m.spread(group, value)[:, None])
        result = _to_bits(equal)
        if mode == "all":
            same = (equal == members).all(axis=1)
            result = np.where(same, result, np.uint32(0))
            if holds is not None:
                m.put(group, holds.index, same)
        if target is not None:
            m.put(group, target.index, result)

    return _together(c, c.operands[2], act)


def reduce_(c: Context) -> "Step":
    """redux.sync, of integers."""
    operation, type_ = c.parts[2], c.types[-1]
    signed = type_ == "s32"
    dtype = SIGNED[32] if signed else UNSIGNED[32]
    functions: dict[str, tuple[Any, Any]] = {
        "add": (np.add, 0),
        "and": (np.bitwise_and, -1 if signed else 0xFFFFFFFF),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
        "min": (np.minimum, np.iinfo(dtype).max),
        "max": (np.maximum, np.iinfo(dtype).min),
    }
    if operation not in functions or type_ not in ("u32", "s32", "b32") or len(c.parts) != 4:
        raise c.unknown()
    function, neutral = functions[operation]
    target, value = c.target(c.operands[0]), c.source(c.operands[1], type_)

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        values = _of_warp(m, group.lanes, value).view(dtype)
        result = function.reduce(np.where(_members(m, group.lanes, masks), values, dtype(neutral)), axis=1, dtype=dtype)
        if target is not None:
            m.put(group, target.index, result.view(np.uint32))

    return _together(c, c.operands[2], act)


def elect(c: Context) -> "Step":
    """elect.sync d|p, mask: the first lane of the mask leads."""
    first, holds = (c.target(x) for x in c.items(c.operands[0]))

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        leader = _members(m, group.lanes, masks).argmax(axis=1)
        if first is not None:
            m.put(group, first.index, leader.astype(np.uint32))
        if holds is not None:
            m.put(group, holds.index, leader == group.lanes % 32)

    return _together(c, c.operands[1], act)


# ---- tensor cores


def _check_whole_warps(m: "Machine", lanes: np.ndarray, pc: int) -> None:
    m.pc = pc
    here = bits_of(lanes, m.lanes)[m.order.warp_of[lanes]]
    if (here != 0xFFFFFFFF).any():
        lane = lanes[here != 0xFFFFFFFF][0]
        raise m.fault(BarrierFault, lane, "wants all 32 lanes of its warp, and some are not there")


def mma(c: Context) -> "Step":
    function, pc = tensor_core.mma(c.opcode), c.pc
    to, *from_ = c.operands
    targets = [c.target(x) for x in c.items(to)]
    sources = [[c.source(x, "b32") for x in c.items(operand)] for operand in from_]

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        _check_whole_warps(m, group.lanes, pc)
        fragments = [[m.spread(group, r).reshape(-1, 32) for r in registers] for registers in sources]
        for target, values in zip(targets, function(*fragments), strict=True):
            if target is not None:
                m.put(group, target.index, values.reshape(-1))

    return _together(c, ptx.Immediate("0xFFFFFFFF"), act)


def load_matrix(c: Context) -> "Step":
    """ldmatrix: lane 8 i + j has the address of row j of tile i."""
    from cukern.sim.access import offset_by, through

    count = {"x1": 1, "x2": 2, "x4": 4}.get(c.parts[4] if len(c.parts) > 4 else "", 0)
    known = {"ldmatrix", "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if not count or set(c.parts) - known:
        raise c.unknown()
    targets = [c.target(x) for x in (c.operands[0].items if isinstance(c.operands[0], Vector) else c.operands[:1])]
    (base, offset), pc, transposed = c.address(c.operands[1]), c.pc, "trans" in c.parts
    space = "shared" if {"shared", "shared::cta"} & set(c.parts) else "generic"

    def act(m: "Machine", group: "Group", masks: np.ndarray) -> None:
        _check_whole_warps(m, group.lanes, pc)
        m.order.clock.tick(pc)
        addresses = np.broadcast_to(offset_by(m.get(group, base), offset), group.lanes.shape)
        some = group.lanes % 32 < 8 * count
        rows = through(m, space, group.lanes[some], addresses[some], lambda where, lanes, at: where.load(m, lanes, at, 16))
        assert rows is not None and rows.dtype == CARRIERS[16]
        tiles = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 8 * count, 16)
        for target, values in zip(targets, tensor_core.ldmatrix(tiles, transposed), strict=True):
            if target is not None:
                m.put(group, target.index, values.reshape(-1))

    return _together(c, ptx.Immediate("0xFFFFFFFF"), act)
