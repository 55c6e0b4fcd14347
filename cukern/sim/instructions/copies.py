"""Asynchronous copies: cp.async, in flight until its thread waits for it, and cp.async.bulk of one dimension. PTX ISA, cp.async.

A bulk copy to shared memory reports its bytes to an mbarrier, and is in flight until the phase has ended. One to global memory is executed
at once: a source that is overwritten before cp.async.bulk.wait_group, or a result that is read before, is not reported.
"""

import numpy as np

from cukern.sim.faults import Fault
from cukern.sim.instructions.access import address_of, nothing
from cukern.sim.instructions.decode import Context
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step
from cukern.sim.memory.order import IN_FLIGHT
from cukern.sim.memory.regions import CARRIERS
from cukern.sim.memory.spaces import each
from cukern.sim.ptx.module import Immediate, Register, immediate_value

_CHUNK = 16  # a copy's bytes and addresses are multiples of it
_BULK_HINTS = {"cp", "async", "bulk", "shared::cluster", "shared::cta", "global", "bulk_group", "L2::cache_hint"}
_BULK_HINTS |= {"mbarrier::complete_tx::bytes"}


def bulk_copy(c: Context) -> Step:
    if c.parts[3] in ("commit_group", "wait_group"):
        return lambda m, group: m.go(m.pc + 1, group)
    loads = c.parts[3] in ("shared::cluster", "shared::cta") and c.parts[4] == "global"
    stores = c.parts[3:5] == ["global", "shared::cta"]
    if not (loads or stores) or set(c.parts) - _BULK_HINTS:
        raise c.unknown()
    (to, to_offset), (from_, from_offset) = c.address(c.operands[0]), c.address(c.operands[1])
    count = c.source(c.operands[2], "u32")
    barrier, barrier_offset = c.address(c.operands[3]) if loads else (c.program.constant(0, 64), 0)

    def run(m: Machine, group: Group) -> None:
        m.pc = c.pc
        m.poison.check(group, (count,), "the size of a copy")
        targets, sources = (each(address_of(m, group, *place), group.lanes) for place in ((to, to_offset), (from_, from_offset)))
        sizes = m.spread(group, count).astype(np.int64)
        _check(m, group, targets, sources, sizes)
        times = sizes // _CHUNK
        rows = np.repeat(np.arange(len(sizes)), times)
        steps = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)).astype(np.uint64) * np.uint64(_CHUNK)
        lanes, places = group.lanes[rows], targets[rows].astype(np.uint64) + steps
        m.order.clock.tick(m.pc)
        values = m.spaces["global" if loads else "shared"].load(m, lanes, sources[rows].astype(np.uint64) + steps, _CHUNK)
        m.order.clock.tick(m.pc)
        if loads:
            at = m.spaces["cluster"].store(m, lanes, places, _CHUNK, values, IN_FLIGHT)
            positions = m.mbarriers.find(group, "cluster", address_of(m, group, barrier, barrier_offset))
            m.mbarriers.bring(lanes, positions[rows], at, _CHUNK)
        else:
            m.launched.memory.store(m, lanes, places, _CHUNK, values)
        m.go(m.pc + 1, group)

    return run


def _check(m: Machine, group: Group, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    for what, values in (("the size", sizes), ("the destination", targets), ("the source", sources)):
        bad = values.astype(np.int64) % _CHUNK != 0
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise m.fault(Fault, group.lanes[row], f"{what} of a cp.async.bulk is {int(values[row])}, which is not a multiple of {_CHUNK}")


# ---- cp.async: copies from global to shared memory, in flight until their thread waits for them

_HINTS = {"cp", "async", "ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B"}


def copy(c: Context) -> Step:
    if c.parts[:2] != ["cp", "async"]:
        raise c.unknown()
    if c.opcode == "cp.async.bulk.prefetch.L2.global":
        return nothing(c)
    if c.opcode == "cp.async.commit_group":
        return lambda m, group: m.copies.commit(group.lanes)
    if c.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        newest = int(immediate_value(c.operands[0])) if c.operands and isinstance(c.operands[0], Immediate) else None
        return lambda m, group: m.copies.wait(group.lanes, newest)
    if not set(c.parts) <= _HINTS or len(c.operands) < 3 or "global" not in c.parts:
        raise c.unknown()
    return _start_copy(c)


def _start_copy(c: Context) -> Step:
    """cp.async [to], [from], bytes {, bytes to read | predicate to ignore the source}."""
    to, from_, bytes_, *rest = c.operands
    (target, target_offset), (source, source_offset) = c.address(to), c.address(from_)
    if not isinstance(bytes_, Immediate):
        raise c.unknown()
    size, pc = int(immediate_value(bytes_)), c.pc
    ignored = isinstance(rest[0], Register) and rest[0].width == 1 if rest else False
    read = c.source(rest[0], "pred" if ignored else "u32") if rest else None
    negated = bool(rest) and isinstance(rest[0], Register) and rest[0].negated

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        m.order.clock.tick(pc)
        lanes, n = group.lanes, len(group.lanes)
        addresses = each(address_of(m, group, source, source_offset), lanes)
        count = np.full(n, size)
        if read is not None:
            values = m.spread(group, read)
            count = np.where(values ^ negated, 0, size) if ignored else values.astype(np.int64)
        if m.poisoned and read is not None:
            m.poison.check(group, (read,), "the size of a copy")
        values = _fetch(m, lanes, addresses, size, count)
        fetched = m.poison.fetched(group, size)
        codes = np.zeros(1, np.int64) if fetched is None else (fetched[0] * (1 << np.arange(size))).sum(axis=1)
        m.order.clock.tick(pc)
        positions = m.shared.store(m, lanes, address_of(m, group, target, target_offset), size, values, IN_FLIGHT, codes)
        m.copies.start(pc, lanes, positions, size)

    return run


def _fetch(m: Machine, lanes: np.ndarray, addresses: np.ndarray, size: int, count: np.ndarray) -> np.ndarray:
    """The first `count` bytes at each address, then zeros."""
    memory, values = m.launched.memory, np.zeros(len(lanes), CARRIERS[size])
    whole = np.flatnonzero(count >= size)
    if len(whole):
        values[whole] = memory.load(m, lanes[whole], addresses[whole], size, poison=True)
    part = np.flatnonzero((count > 0) & (count < size))
    bytes_ = values.view(np.uint8).reshape(-1, size)
    for i in range(int(count[part].max()) if len(part) else 0):
        some = part[count[part] > i]
        bytes_[some, i] = memory.load(m, lanes[some], addresses[some] + np.uint64(i), 1, poison=True)
    return values
