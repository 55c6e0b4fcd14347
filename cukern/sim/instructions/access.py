"""Loads, stores, fences and asynchronous copies."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cukern.sim.faults import Fault, Uninitialized
from cukern.sim.instructions.decode import Context, Group, Machine, Step
from cukern.sim.instructions.quick import Quick
from cukern.sim.memory.spaces import CARRIERS, STRONG, WINDOW, Part, Space, each
from cukern.sim.numerics.integers import SIGNED, UNSIGNED, Array, count_nonzero
from cukern.sim.ptx.module import WIDTHS, Address, Operand, Register, Symbol

_SPACES = ("global", "shared", "local", "const", "param", "generic")
_IGNORED = {
    "weak", "relaxed", "acquire", "release", "volatile", "mmio", "cta", "cluster", "gpu", "sys", "v2", "v4",
    *_SPACES,
}  # fmt: skip
_IGNORED |= {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "shared::cta", "shared::cluster", "param::entry"}
_IGNORED |= {
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
}
_IGNORED |= {
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
}
_WINDOW = np.array(WINDOW, np.uint64)
_STRONG = {"relaxed", "acquire", "release", "volatile", "mmio"}


def space_of(c: Context) -> str:
    """The state space of an opcode: "generic" if it names none, "cluster" for shared::cluster. NotSimulated
    for unknown modifiers."""
    modifiers = [p for p in c.parts[1:] if p not in WIDTHS]
    c.refuse(set(modifiers) - _IGNORED)
    if "shared::cluster" in modifiers:
        return "cluster"
    return next((p.split("::")[0] for p in modifiers if p.split("::")[0] in _SPACES), "generic")


def _is_strong(c: Context, space: str) -> bool:
    """True if the access does not race with other strong accesses. In shared memory, only accesses with
    .cluster are strong."""
    return bool(_STRONG & set(c.parts)) and ("cluster" in c.parts or space not in ("shared", "cluster"))


def _quick(c: Context, space: str, size: int, strong: bool) -> Quick | None:
    """The common case of this load or store, if there is one."""
    address = next(x for x in c.operands if isinstance(x, Address))
    if strong or space not in ("global", "shared"):
        return None
    return Quick(c.program, *c.address(address), size, space == "shared")


def load(c: Context) -> Step:
    space, type_ = space_of(c), c.types[-1]
    targets = [c.target(x) for x in c.items(c.operands[0])]
    if space == "param":
        if isinstance(c.operands[1], Address) and isinstance(c.operands[1].base, Symbol):
            return _load_param(c, targets, type_)
        space = "const"  # by its address: parameters are in memory that the launch cannot change
    base, offset = c.address(c.operands[1])
    width, signed = WIDTHS[type_], type_[0] == "s"
    size, count, pc = width // 8, len(targets), c.pc
    c.refuse(size * count > 16 or width > 64)
    strong = _is_strong(c, space) and space != "cluster"  # lanes poll only in their own block's memory
    constant, acquires, cached = space == "const", "acquire" in c.parts, "nc" in c.parts
    quick = _quick(c, space, size * count, strong or acquires)

    def access(m: Machine, where: Space, lanes: Array, at: Array) -> Array:
        if cached:
            where.check_unchanged(m, lanes, at, size * count)
        values = where.load(m, lanes, at, size * count, strong, poison=True)
        if acquires and where.name == "shared":
            m.order.acquire_shared(lanes, where.place(m, lanes, at, size * count, "reads")[0])
        return values

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        if not constant:
            m.order.clock.tick(pc)
        values = quick.load(m, group, cached) if quick is not None and not m.poisoned else None
        if values is None:
            addresses = address_of(m, group, base, offset)
            values = through(m, space, group.lanes, addresses, functools.partial(access, m))
        if strong and space != "shared":
            m.order.observe(group.lanes, addresses, acquires)
            m.polled(len(group.lanes))
        if count == 1:
            put(m, group, targets[0], values, signed)
        else:
            parts = values.view(UNSIGNED[width]).reshape(-1, count)
            for i, target in enumerate(targets):
                put(m, group, target, np.ascontiguousarray(parts[:, i]), signed)
        if m.poison.fresh:
            _put_poison(m, group, targets, size, signed)

    return run


def _put_poison(m: Machine, group: Group, targets: list[Register], size: int, signed: bool) -> None:
    """Mark the bits of loaded registers that come from uninitialized bytes."""
    fetched = m.poison.fetched(group, size * len(targets))
    if fetched is not None:
        flags, origins = fetched
        for i, target in enumerate(targets):
            bytes_ = np.ascontiguousarray(flags[:, i * size : (i + 1) * size]).view(np.uint8) * np.uint8(0xFF)
            m.poison.put(
                group, target.number, extended(bytes_.view(UNSIGNED[8 * size])[:, 0], target, signed), origins
            )


def put(m: Machine, group: Group, target: Register, values: Array, signed: bool) -> None:
    """Write loaded bits to a register, which may be wider."""
    m.put(group, target.number, extended(values, target, signed))


def extended(values: Array, target: Register, signed: bool) -> Array:
    """Loaded bits in the width of a register."""
    bits = values.dtype.itemsize * 8
    if bits < target.width:
        values = (values.view(SIGNED[bits]) if signed else values).astype(UNSIGNED[target.width])
    return values


def address_of(m: Machine, group: Group, register: int, offset: int) -> Array:
    """An address register plus an offset, modulo 2^64."""
    if m.poisoned:
        m.poison.check(group, (register,), "an address")
    base = m.get(group, register)
    if base.itemsize < 8:
        base = base.astype(np.uint64)
    return base + np.array(offset & 0xFFFFFFFFFFFFFFFF, np.uint64) if offset else base


def through(
    m: Machine, space: str, lanes: Array, addresses: Array, access: Callable[..., Array], *values: Array
) -> Array:
    """Call `access(space, lanes, addresses, *values)`; for generic addresses, once for each space in which
    some of them lie."""
    if space != "generic":
        return access(m.spaces[space], lanes, addresses, *values)
    windows = addresses >> _WINDOW
    found, result = np.unique(windows) if count_nonzero(windows ^ windows[:1]) else windows[:1], None
    for window in found:
        name = {1: "cluster", 2: "local"}.get(int(window), "global")
        offsets = addresses if name == "global" else addresses & np.uint64((1 << WINDOW) - 1)
        if name not in m.spaces:
            name, offsets = "global", addresses
        if len(found) == 1:
            return access(m.spaces[name], lanes, offsets, *values)
        rows = np.flatnonzero(windows == window)
        part = access(
            m.spaces[name],
            lanes[rows],
            offsets[rows],
            *(np.broadcast_to(v, lanes.shape)[rows] for v in values),
        )
        result = np.resize(part, len(lanes)) if result is None else result
        result[rows] = part
    assert result is not None
    return result


def _load_param(c: Context, targets: list[Register], type_: str) -> Step:
    """A parameter of the kernel, the same for all lanes; or, in a function or after a call, a parameter or
    result."""
    address = c.operands[1]
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    dtype, signed, name = UNSIGNED[WIDTHS[type_]], type_[0] == "s", address.base.name
    if name in c.program.slots:
        return _load_slot(*c.program.slots[name], address.offset, targets, dtype, signed)
    at = c.program.params[name] + address.offset

    def run(m: Machine, group: Group) -> None:
        values = np.frombuffer(m.launched.params, dtype, len(targets), at)
        for i, target in enumerate(targets):
            put(m, group, target, values[i : i + 1], signed)

    return run


def _load_slot(area: str, start: int, offset: int, targets: list[Register], dtype: Any, signed: bool) -> Step:
    size, first = np.dtype(dtype).itemsize, start + offset

    def run(m: Machine, group: Group) -> None:
        for i, target in enumerate(targets):
            at = first + i * size
            bytes_ = m.calls.area(area)[group.lanes, at : at + size]
            put(m, group, target, np.ascontiguousarray(bytes_).view(dtype)[:, 0], signed)

    return run


def store(c: Context) -> Step:
    space, type_ = space_of(c), c.types[-1]
    address, value = c.operands[:2]  # a cache hint may follow
    if space == "param":
        return _store_param(c, address, value, type_)
    base, offset = c.address(address)
    width = WIDTHS[type_]
    sources = [c.source(x, type_) for x in c.items(value)]
    size, count, pc = width // 8, len(sources), c.pc
    c.refuse(size * count > 16 or width > 64 or space == "const")
    strong, releases, dtype = _is_strong(c, space), "release" in c.parts, UNSIGNED[width]
    flags = STRONG if strong else 0
    quick = _quick(c, space, size * count, strong)

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        m.order.clock.tick(pc)
        values = vectors(m, group, sources, dtype)
        if quick is not None and not m.poisoned and quick.store(m, group, values):
            return
        addresses = address_of(m, group, base, offset)
        codes = (
            _poison_codes(m, group, sources, width // 8, space, addresses)
            if m.poisoned
            else np.zeros(1, np.int64)
        )

        def access(where: Space, lanes: Array, at: Array, v: Array, codes: Array) -> Array:
            return where.store(m, lanes, at, size * count, v, flags, codes)

        through(m, space, group.lanes, addresses, access, values, codes)
        if strong and space not in ("shared", "cluster"):
            m.order.publish(group.lanes, addresses, releases)

    return run


def _poison_codes(
    m: Machine, group: Group, sources: list[int], size: int, space: str, addresses: Array
) -> Array:
    """For each lane, the uninitialized bytes of what it stores, as in Shadow.poison. An uninitialized element
    of a tensor is a fault only if it is still there at the end of the launch: the compiler may store a vector
    first, and then the element that it lacked."""
    found = m.poison.bytes_of(group, sources, size)
    if found is None:
        return np.zeros(1, np.int64)
    flags, origins = found
    outside = each(
        addresses >> np.uint64(WINDOW) == 0 if space == "generic" else np.full(1, space == "global"),
        group.lanes,
    )
    bad = outside & np.asarray(flags.reshape(len(flags), -1, size).all(axis=2)).any(axis=1)
    if bad.any() and not m.mutes(Uninitialized):
        pc, rows = m.pc, np.flatnonzero(bad)
        memory, lanes = m.launched.memory, group.lanes[rows]
        for part in memory.place(m, lanes, each(addresses, group.lanes)[rows], size * len(sources), "writes")[
            1
        ]:
            chosen = rows[part.rows]

            def fault(row: int, part: Part = part, chosen: Array = chosen) -> Fault:
                m.pc = pc
                where = memory.describe(part.region, int(part.at[row]))
                return m.poison.fault(
                    int(group.lanes[chosen[row]]), int(origins[chosen[row]]), f"a store to {where}"
                )

            assert part.shadow is not None
            m.launched.stored.append((part.shadow, part.at, flags[chosen], fault))
    return (flags * (1 << np.arange(flags.shape[1]))).sum(axis=1) | origins + 2 << 16


def vectors(m: Machine, group: Group, sources: list[int], dtype: Any) -> Array:
    """The values that the lanes store: one element or one vector per lane."""
    if len(sources) == 1:
        values = m.get(group, sources[0])
        return values if values.dtype == dtype else values.astype(dtype)
    rows = np.empty((len(group.lanes), len(sources)), dtype)
    for i, s in enumerate(sources):
        rows[:, i] = m.get(group, s)
    return rows.view(CARRIERS[rows.itemsize * len(sources)])[:, 0]


def _store_param(c: Context, address: Operand, value: Operand, type_: str) -> Step:
    """st.param: an argument of a call, or the result of a function."""
    if not isinstance(address, Address) or not isinstance(address.base, Symbol):
        raise c.unknown()
    area, start = c.program.slots[address.base.name]
    sources, dtype = [c.source(x, type_) for x in c.items(value)], UNSIGNED[WIDTHS[type_]]
    size, first = np.dtype(dtype).itemsize, start + address.offset

    def run(m: Machine, group: Group) -> None:
        for i, source in enumerate(sources):
            values = np.ascontiguousarray(m.spread(group, source).astype(dtype))
            at = first + i * size
            m.calls.area(area)[group.lanes, at : at + size] = values.view(np.uint8).reshape(-1, size)

    return run


def fence(c: Context) -> Step:
    proxies = c.opcode in ("fence.proxy.async.shared::cta", "fence.proxy.async.global", "fence.proxy.async")
    known = {"cta", "cluster", "gl", "gpu", "sys", "sc", "acq_rel", "acquire", "release", "mbarrier_init"}
    maps = (
        {"proxy", "tensormap::generic"} if c.opcode.startswith("fence.proxy.tensormap::generic.") else set()
    )
    c.refuse(not proxies and not set(c.parts[1:]) <= known | maps)
    local = proxies or "cta" in c.parts

    def run(m: Machine, group: Group) -> None:
        if not local:
            m.order.fence(group.lanes)
        elif proxies:
            m.order.proxy_fenced[group.lanes] = m.order.clock.now + 1

    return run


def nothing(c: Context) -> Step:
    return lambda m, group: None
