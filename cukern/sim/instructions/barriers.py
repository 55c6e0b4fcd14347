"""Barriers: bar.sync, bar.arrive, bar.red, barrier.cluster, mbarrier, and st.async, which reports to an
mbarrier."""

import functools
from collections.abc import Callable

import numpy as np

from cukern.sim.faults import BarrierFault
from cukern.sim.instructions import warp
from cukern.sim.instructions.access import address_of, vectors
from cukern.sim.instructions.decode import UNSIGNED, Array, Context, Group, Machine, Step
from cukern.sim.memory.spaces import IN_FLIGHT, WINDOW
from cukern.sim.ptx.module import WIDTHS, Register

_SCOPES = {
    "release", "acquire", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64", "relaxed",
}  # fmt: skip
_ARRIVALS = ("arrive", "arrive_drop")
_SHARED = {"shared", "shared::cta"}


def barrier(c: Context) -> Step:
    if c.parts[:2] == ["bar", "warp"]:
        return warp.sync(c)
    if c.parts[:2] == ["barrier", "cluster"]:
        return _cluster_barrier(c)
    parts = [p for p in c.parts[1:] if p not in ("cta", "aligned")]
    kind = parts[0]
    c.refuse(kind not in ("sync", "arrive", "red") or (kind != "red" and len(parts) > 1))
    operands, predicate = (c.operands[1:-1], c.operands[-1]) if kind == "red" else (c.operands, None)
    number = c.source(operands[0], "u32")
    count = c.source(operands[1], "u32") if len(operands) > 1 else c.program.constant(0, 32)
    holds = c.source(predicate, "pred") if predicate is not None else None
    negated = isinstance(predicate, Register) and predicate.negated
    outcome = _outcome(c, parts[1], c.target(c.operands[0])) if kind == "red" else None

    def run(m: Machine, group: Group) -> None:
        if outcome is not None:
            m.barriers.outcomes[c.pc] = functools.partial(outcome, m)
        if holds is not None:
            m.poison.check(group, (holds,), "the predicate of a barrier")
        numbers, counts = m.get(group, number), m.get(group, count)
        if len(numbers) != len(counts):
            numbers, counts = np.broadcast_arrays(numbers, counts)
        for n, threads in set(zip(numbers.tolist(), counts.tolist(), strict=True)):
            some = group
            if len(numbers) > 1:
                some = m.group(group.lanes[(numbers == n) & (counts == threads)])
            if kind == "arrive":
                m.barriers.arrive(some, n, threads)
            else:
                m.barriers.sync(some, n, threads, None if holds is None else m.spread(some, holds) ^ negated)

    return run


def _outcome(
    c: Context, operation: str, register: Register
) -> Callable[[Machine, Group, Array, Array], None]:
    """Writes the result of a bar.red, from the number of lanes that arrived (`came`) and of those with a true
    predicate (`held`)."""
    results: dict[str, Callable[[Array, Array], Array]] = {
        "and": lambda held, came: held == came,
        "or": lambda held, came: held > 0,
        "popc": lambda held, came: held.astype(np.uint32),
    }
    c.refuse(operation not in results)
    return lambda m, group, held, came: m.put(group, register.number, results[operation](held, came))


def _cluster_barrier(c: Context) -> Step:
    """barrier.cluster.arrive and .wait."""
    kind, rest = c.parts[2], set(c.parts[3:])
    c.refuse(
        kind not in ("arrive", "wait")
        or rest - {"aligned"} - ({"release", "relaxed"} if kind == "arrive" else {"acquire"})
    )
    if kind == "wait":
        return lambda m, group: m.clusters.wait(group)
    return lambda m, group: m.clusters.arrive(group, "relaxed" not in rest, "aligned" in rest)


def mbarrier(c: Context) -> Step:
    """mbarrier.init, .inval, .arrive, .arrive_drop, .expect_tx, .complete_tx, .test_wait, and .try_wait,
    which waits until it is true.

    The state that an arrival returns is the number of its phase."""
    kind, rest = c.parts[1], set(c.parts[2:]) - _SCOPES
    space = (
        "cluster" if "shared::cluster" in c.parts else "generic" if not _SHARED & set(c.parts) else "shared"
    )
    operands = list(c.operands)
    target = c.target(operands.pop(0)) if kind in (*_ARRIVALS, "test_wait", "try_wait") else c.program.sink
    arrival = {"expect_tx", "noComplete"}
    known: dict[str, set[str]] = {"init": set(), "inval": set(), "arrive": arrival, "arrive_drop": arrival}
    known |= {"try_wait": {"parity"}, "test_wait": {"parity"}, "expect_tx": set(), "complete_tx": set()}
    c.refuse(kind not in known or rest - known[kind])
    base, offset = c.address(operands[0])
    # the operand is a number of arrivals, else of bytes, or a phase
    counts = kind in _ARRIVALS and "expect_tx" not in rest
    number = c.source(operands[1], "u32") if len(operands) > 1 else c.program.constant(int(counts), 32)

    def run(m: Machine, group: Group) -> None:
        m.order.clock.tick(m.pc)
        addresses = address_of(m, group, base, offset)
        numbers = m.spread(group, number).astype(np.int64)
        where = space
        if space == "generic":
            addresses, where = addresses & np.uint64((1 << WINDOW) - 1), "cluster"
        if kind == "init":
            m.mbarriers.init(group, addresses, numbers)
            m.go(m.pc + 1, group)
            return
        positions = m.mbarriers.find(group, where, addresses)
        if kind in ("try_wait", "test_wait"):
            m.mbarriers.wait(group, positions, numbers % 2, target.number, blocks=kind == "try_wait")
            return
        m.go(m.pc + 1, group)
        if kind in _ARRIVALS:
            if "noComplete" in rest:
                m.mbarriers.check_incomplete(group, positions, numbers)
            m.put(group, target.number, m.mbarriers.phases(positions))
            one = np.ones(len(positions), np.int64)
            arrivals, expected = (numbers, 0 * one) if counts else (one, numbers)
            m.mbarriers.arrive(group, positions, arrivals, expected, drop=kind == "arrive_drop")
        elif kind == "inval":
            m.mbarriers.forget(positions)
        else:
            m.mbarriers.expect(positions, numbers if kind == "expect_tx" else -numbers)

    return run


def copies_arrive(c: Context) -> Step:
    """cp.async.mbarrier.arrive: arrives when the thread's earlier cp.async are complete. Without .noinc, the
    phase waits for it, too."""
    rest = set(c.parts[4:]) - {"b64"}
    space = "generic" if not _SHARED & rest else "shared"
    c.refuse(c.parts[3] != "arrive" or rest - {"noinc", "shared", "shared::cta"})
    base, offset = c.address(c.operands[0])

    def run(m: Machine, group: Group) -> None:
        m.order.clock.tick(m.pc)
        addresses, where = address_of(m, group, base, offset), space
        if space == "generic":
            addresses, where = addresses & np.uint64((1 << WINDOW) - 1), "cluster"
        positions = m.mbarriers.find(group, where, addresses)
        m.mbarriers.follow(m.copies, group.lanes, positions)
        m.go(m.pc + 1, group)
        if "noinc" in rest:
            one = np.ones(len(positions), np.int64)
            m.mbarriers.arrive(group, positions, one, 0 * one)

    return run


def store_async(c: Context) -> Step:
    """st.async [to], values, [mbarrier]."""
    type_ = c.types[-1]
    (to, to_offset), (barrier, barrier_offset) = c.address(c.operands[0]), c.address(c.operands[2])
    sources = [c.source(x, type_) for x in c.items(c.operands[1])]
    width, count = WIDTHS[type_], len(sources)
    known = {"st", "async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", type_}
    c.refuse(set(c.parts) - known or width not in (32, 64))
    size = width // 8 * count

    def run(m: Machine, group: Group) -> None:
        m.order.clock.tick(m.pc)
        values = vectors(m, group, sources, UNSIGNED[width])
        positions = m.mbarriers.find(group, "cluster", address_of(m, group, barrier, barrier_offset))
        addresses = address_of(m, group, to, to_offset)
        m.order.clock.tick(m.pc)
        at = m.spaces["cluster"].store(m, group.lanes, addresses, size, values, IN_FLIGHT)
        if (at // m.shared.stride != positions // m.shared.stride).any():
            raise m.fault(
                BarrierFault,
                group.lanes[0],
                "writes to one block by st.async, and tells the mbarrier of another",
            )
        m.go(m.pc + 1, group)
        m.mbarriers.bring(group.lanes, positions, at, size)

    return run
