"""cp.async: copies from global to shared memory, in flight until their thread waits for them. PTX ISA,
cp.async."""

import numpy as np

from cukern.sim.instructions.access import address_of, nothing
from cukern.sim.instructions.decode import Array, Context, Group, Machine, Step
from cukern.sim.memory.spaces import CARRIERS, IN_FLIGHT, each
from cukern.sim.ptx.module import Immediate, Register, immediate_value

_HINTS = {
    "cp", "async", "ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B",
    "L2::cache_hint",
}  # fmt: skip


def copy(c: Context) -> Step:
    c.refuse(c.parts[:2] != ["cp", "async"])
    if c.opcode.startswith(("cp.async.bulk.prefetch.L2.global", "cp.async.bulk.prefetch.tensor.")):
        return nothing(c)
    if c.opcode == "cp.async.commit_group":
        return lambda m, group: m.copies.commit(group.lanes)
    if c.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        newest = (
            int(immediate_value(c.operands[0]))
            if c.operands and isinstance(c.operands[0], Immediate)
            else None
        )
        return lambda m, group: m.copies.wait(group.lanes, newest)
    c.refuse(not set(c.parts) <= _HINTS or len(c.operands) < 3 or "global" not in c.parts)
    return _start_copy(c)


def _start_copy(c: Context) -> Step:
    """cp.async [to], [from], bytes {, bytes to read | predicate to ignore the source} {, cache hint}."""
    to, from_, bytes_, *rest = c.operands[:-1] if "L2::cache_hint" in c.parts else c.operands
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
        codes = (
            np.zeros(1, np.int64)
            if fetched is None
            else (fetched[0] * (1 << np.arange(size))).sum(axis=1) | fetched[1] + 2 << 16
        )
        m.order.clock.tick(pc)
        positions = m.shared.store(
            m, lanes, address_of(m, group, target, target_offset), size, values, IN_FLIGHT, codes
        )
        m.copies.start(pc, lanes, positions, size)

    return run


def _fetch(m: Machine, lanes: Array, addresses: Array, size: int, count: Array) -> Array:
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
