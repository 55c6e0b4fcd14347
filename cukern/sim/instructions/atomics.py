"""atom and red: read, change and write. Lanes that address the same location execute one after the other."""

from collections.abc import Callable

import numpy as np

from cukern.sim.instructions.access import address_of, put, through
from cukern.sim.instructions.decode import Context, Group, Machine, Step
from cukern.sim.memory.spaces import STRONG, Space, each
from cukern.sim.numerics import alu
from cukern.sim.numerics.integers import UNSIGNED, Array, where
from cukern.sim.ptx.module import WIDTHS

_MODIFIERS = {
    "relaxed", "acquire", "release", "acq_rel", "cta", "gpu", "sys", "global", "shared", "shared::cta",
    "noftz",
}  # fmt: skip
_MODIFIERS |= {"cluster", "shared::cluster", "v2", "v4", "v8"}
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
Change = Callable[..., Array]  # (old value, operands) -> new value


def atomic(c: Context) -> Step:
    operation = next((p for p in c.parts[1:] if p not in _MODIFIERS and p not in WIDTHS), "")
    c.refuse(len(c.types) != 1 or set(c.parts[1:]) - _MODIFIERS - set(c.types) - {operation})
    spaces = {"global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "cluster"}
    space = next((spaces[p] for p in c.parts if p in spaces), "generic")
    returns = c.parts[0] == "atom"
    address, *operands = c.operands[1:] if returns else c.operands
    count = len(c.items(operands[0]))  # of a vector, whose elements change one after the other
    targets = [c.target(x) for x in c.items(c.operands[0])] if returns else [c.program.sink] * count
    base, offset = c.address(address)
    sources = [[c.source(c.items(x)[i], c.types[0]) for x in operands] for i in range(count)]
    width, signed, pc = WIDTHS[c.types[0]], c.types[0][0] == "s", c.pc
    narrow, compares = "cta" in c.parts, operation == "cas"
    releases, acquires = (bool({kind, "acq_rel"} & set(c.parts)) for kind in ("release", "acquire"))
    changes = {name: _change(c, operation, name) for name in ("global", "shared")}

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        m.order.clock.tick(pc)
        addresses = each(address_of(m, group, base, offset), group.lanes)
        m.poison.check(group, [s for row in sources for s in row], "an atomic")
        if count > 1:
            m.launched.memory.check_aligned(m, group.lanes, addresses, width // 8 * count, "changes")

        def access(space: Space, lanes: Array, at: Array, *values: Array) -> Array:
            if compares and space.name == "global":
                m.compare(lanes, at.view(np.int64))
            change = changes.get(space.name, changes["shared"])
            old, changed = _serially(m, space, lanes, at, width // 8, change, values, narrow)
            if space.name == "global":
                m.order.exchange(lanes, at, releases and not narrow, changed | acquires)
            elif space.name == "shared" and (releases or acquires):
                positions = space.place(m, lanes, at, width // 8, "changes")[0]
                if releases:
                    m.order.release_shared(lanes, positions)
                if acquires:
                    m.order.acquire_shared(lanes, positions)
            return old

        for i, target in enumerate(targets):
            values = [m.spread(group, s).astype(UNSIGNED[width]) for s in sources[i]]
            at = addresses + np.uint64(width // 8 * i) if i else addresses
            put(m, group, target, through(m, space, group.lanes, at, access, *values), signed)

    return run


def reduce(
    m: Machine, c: Context, operation: str, type_: str, lanes: Array, addresses: Array, values: Array
) -> None:
    """Change global memory by the values of lanes, as cp.reduce.async.bulk does."""
    _serially(
        m,
        m.launched.memory,
        lanes,
        addresses,
        WIDTHS[type_] // 8,
        _change(c, operation, "global", type_),
        (values,),
        False,
    )


def _change(c: Context, operation: str, space: str, type_: str = "") -> Change:
    type_ = type_ or c.types[0]
    if operation == "add" and type_ in _FLOATS:
        # PTX ISA, atom: only global memory flushes subnormals
        flush = ".ftz" if type_ == "f32" and space == "global" else ""
        return alu.find(f"add.rn{flush}.{type_}")
    if operation in ("add", "min", "max", "and", "or", "xor"):
        return alu.find(f"{operation}.{type_}")
    one = UNSIGNED[WIDTHS[type_]](1)
    others: dict[str, Change] = {
        "exch": lambda old, new: new,
        "cas": lambda old, expected, new: where(old == expected, new, old),
        "inc": lambda old, last: np.where(old >= last, 0 * old, old + one),
        "dec": lambda old, last: np.where((old == 0) | (old > last), last, old - one),
    }
    c.refuse(operation not in others)
    return others[operation]


def _serially(
    m: Machine, space: Space, lanes: Array, addresses: Array, size: int, change: Change, values: tuple,
    narrow: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the old values, and True for each lane that changed its own. Lanes with the same address
    execute in the order of their numbers. `narrow`: for the own block only."""
    at, parts = space.place(m, lanes, addresses, size, "changes")
    for part in parts:
        space.check_written(m, part, size)
        space.note_write(m, part, size, None, STRONG, narrow and space.name == "global")
    array, index = space.array(at, size)
    old, changed = np.empty(len(lanes), array.dtype), np.empty(len(lanes), bool)
    order = np.argsort(index, kind="stable")
    first = np.flatnonzero(np.diff(index[order], prepend=-1))
    turn = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    m.polled(len(lanes), int(turn.max()))
    for rows in np.split(order[np.argsort(turn, kind="stable")], np.cumsum(np.bincount(turn))[:-1]):
        old[rows] = array[index[rows]]
        new = change(old[rows], *(v[rows] for v in values))
        array[index[rows]], changed[rows] = new, new != old[rows]
    return old, changed
