"""The tensor-core instructions mma.sync, wgmma and ldmatrix, which need whole warps."""

import functools

import numpy as np

from cukern.sim.faults import BarrierFault, NotSimulated
from cukern.sim.instructions.access import address_of, through
from cukern.sim.instructions.decode import Array, Context, Group, Machine, Step
from cukern.sim.instructions.quick import Quick
from cukern.sim.instructions.warp import together
from cukern.sim.memory.spaces import Space
from cukern.sim.numerics import tensor_core
from cukern.sim.ptx.module import Immediate, Register, Vector, immediate_value

EVERY_LANE = Immediate("0xFFFFFFFF")
_MOST_TILES = 512  # of mma instructions that are executed at once
_Operands = tuple[list[Register], list[list[int]]]


def check_whole_warps(m: Machine, lanes: Array) -> None:
    if len(lanes) == m.lanes:
        return
    apart = m.warp_wide.ballot(lanes) != 0xFFFFFFFF
    if apart.any():
        raise m.fault(BarrierFault, lanes[apart][0], "wants all 32 lanes of its warp, and some are not there")


def check_whole_warpgroups(m: Machine, lanes: Array) -> None:
    groups, counts = np.unique(m.order.warpgroup_of(m.order.warp_of[lanes]), return_counts=True)
    if (counts != 128).any():
        raise m.fault(
            BarrierFault,
            groups[counts != 128][0] * 32,
            "wants the four warps of its warpgroup, and some are not there",
        )


def put_all(m: Machine, group: Group, targets: list[Register], values: list[Array]) -> None:
    for target, fragment in zip(targets, values, strict=True):
        m.put(group, target.number, fragment.reshape(-1))


def mma(c: Context) -> Step:
    function = tensor_core.mma(c.opcode)
    targets, sources = _operands(c)
    rows = int(c.parts[3][1 : c.parts[3].index("n")])
    run = functools.cache(lambda: _run(c))

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        most = min(len(run()), max(1, _MOST_TILES * 32 // len(group.lanes)))
        products = run()[: m.advance(group, most - 1) + 1]
        poison = poison_of_product(m, group, sources, len(targets), rows) if m.poisoned else None
        fragments = [
            [
                np.concatenate([m.spread(group, r) for r in same]).reshape(-1, 32)
                for same in zip(*some, strict=True)
            ]
            for some in zip(*[registers for _, registers in products], strict=True)
        ]
        results = [d.reshape(len(products), -1) for d in function(*fragments)]
        for i, (registers, _) in enumerate(products):
            put_all(m, group, registers, [d[i] for d in results])
        if poison is not None:
            for target, bits in zip(targets, poison[0], strict=True):
                m.poison.put(group, target.number, bits.reshape(-1), poison[1])

    return together(c, EVERY_LANE, act)


def _operands(c: Context) -> _Operands:
    """The registers of an mma's result, and those of its operands."""
    to, *from_ = c.operands
    type_ = "b64" if "f64" in c.types else "b32"
    return [c.target(x) for x in c.items(to)], [
        [c.source(x, type_) for x in c.items(operand)] for operand in from_
    ]


def _run(c: Context) -> list[_Operands]:
    """The registers of this mma, and of those right after it that are like it and do not read its results."""
    found = [_operands(c)]
    written = {target.number for target in found[0][0]}
    for pc in range(c.pc + 1, len(c.program.kernel.code)):
        one = Context(c.program, pc)
        operands = [x for operand in one.operands for x in one.items(operand)]
        if (
            one.opcode != c.opcode
            or one.instruction.guard
            or not all(isinstance(x, Register) for x in operands)
        ):
            break
        targets, sources = _operands(one)
        if written & {r for registers in sources for r in registers}:
            break
        written |= {target.number for target in targets}
        found.append((targets, sources))
    return found


def poison_of_product(
    m: Machine, group: Group, sources: list[list[int]], results: int, rows: int
) -> tuple[list[Array], Array] | None:
    """The uninitialized bits of an mma's results, and their origins: an uninitialized element of a reaches
    its row of the result, and one of b its column. `rows`: of the tile a. See tensor_core.py for which lane
    has which elements."""
    flags, origins = m.poison.of(group, [r for registers in sources for r in registers])
    if not flags.any():
        return None
    nothing = np.zeros((len(group.lanes) // 32, 32), np.uint32)

    def masks(registers: list[int]) -> list[Array]:
        return [m.poisoned[r][group.index].reshape(-1, 32) if r in m.poisoned else nothing for r in registers]

    def by_quad(some: list[Array]) -> Array:
        found = np.asarray(np.stack([x != 0 for x in (nothing, *some)]).any(axis=0))
        return np.asarray(found.reshape(-1, 8, 4).any(axis=2))

    a, b, c = (masks(registers) for registers in sources[:3])
    halves = [by_quad(a[i::2]) for i in (0, 1)] if rows == 16 else [by_quad(a)]
    columns, lane = by_quad(b), np.arange(32)
    bits = []
    for i in range(results):
        each_half = results // len(halves)
        column = (
            columns[:, lane % 4 * 2 + i % 2]
            if each_half > 1
            else np.asarray(columns.reshape(-1, 4, 2).any(axis=2))[:, lane % 4]
        )
        reached = halves[i // each_half][:, lane // 4] | column
        mask = c[i] if i < len(c) else nothing
        bits.append(np.where(reached, ~mask.dtype.type(0), mask))
    return bits, np.repeat(origins.reshape(-1, 32).max(axis=1), 32)


def load_matrix(c: Context) -> Step:
    """ldmatrix: lane 8 i + j has the address of row j of tile i."""
    # before the shape or after it: NVRTC accepts both
    count = next((n for n in (1, 2, 4) if f"x{n}" in c.parts), 0)
    known = {"ldmatrix", "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    c.refuse(not count or set(c.parts) - known)
    targets = [c.target(x) for x in c.items(c.operands[0])]
    (base, offset), transposed = c.address(c.operands[1]), "trans" in c.parts
    space = "shared" if {"shared", "shared::cta"} & set(c.parts) else "generic"
    quick = Quick(c.program, base, offset, 16, shared=True) if space == "shared" and count == 4 else None

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        m.order.clock.tick(m.pc)
        rows = quick.load(m, group, False) if quick is not None and not m.poisoned else None
        if rows is None:
            addresses = np.broadcast_to(address_of(m, group, base, offset), group.lanes.shape)
            some = group.lanes % 32 < 8 * count

            def access(where: Space, lanes: Array, at: Array) -> Array:
                return where.load(m, lanes, at, 16, poison=True)

            rows = through(m, space, group.lanes[some], addresses[some], access)
        tiles = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, 8 * count, 16)
        put_all(m, group, targets, tensor_core.ldmatrix(tiles, transposed))
        fetched = m.poison.fetched(group, 16)
        if fetched is not None:
            masks = np.ascontiguousarray(fetched[0][some]).view(np.uint8).reshape(
                -1, 8 * count, 16
            ) * np.uint8(0xFF)
            origins = np.repeat(fetched[1].reshape(-1, 32).max(axis=1), 32)
            for target, bits in zip(targets, tensor_core.ldmatrix(masks, transposed), strict=True):
                m.poison.put(group, target.number, bits.reshape(-1), origins)

    return together(c, EVERY_LANE, act)


def store_matrix(c: Context) -> Step:
    """stmatrix: lane 8 i + j has the address of row j of tile i."""
    known = {"stmatrix", "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    c.refuse(set(c.parts) - known)
    (base, offset), transposed = c.address(c.operands[0]), "trans" in c.parts
    sources = [c.source(x, "b32") for x in c.items(c.operands[1])]
    space = "shared" if {"shared", "shared::cta"} & set(c.parts) else "generic"

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        m.poison.check(group, sources, "a stmatrix")
        m.order.clock.tick(m.pc)
        addresses = np.broadcast_to(address_of(m, group, base, offset), group.lanes.shape)
        some = group.lanes % 32 < 8 * len(sources)
        rows = tensor_core.stmatrix([m.spread(group, r).reshape(-1, 32) for r in sources], transposed)
        values = np.ascontiguousarray(rows).view(np.complex128).reshape(-1)
        through(
            m,
            space,
            group.lanes[some],
            addresses[some],
            lambda where, lanes, at, v: where.store(m, lanes, at, 16, v),
            values,
        )

    return together(c, EVERY_LANE, act)


def move_matrix(c: Context) -> Step:
    """movmatrix: transposes a tile of 8 x 8 elements in the registers of a warp."""
    c.refuse(c.opcode != "movmatrix.sync.aligned.m8n8.trans.b16")
    target, source = c.target(c.operands[0]), c.source(c.operands[1], "b32")

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        m.poison.check(group, (source,), "a movmatrix")
        tiles = tensor_core.stmatrix([m.spread(group, source).reshape(-1, 32)])
        put_all(m, group, [target], tensor_core.ldmatrix(tiles, transposed=True))

    return together(c, EVERY_LANE, act)


def warpgroup(c: Context) -> Step:
    """wgmma: operand a is in registers or in shared memory, b in shared memory. See machine/asynchronous.py.
    A missing wgmma.fence is not reported: in PTX a register that is written before has another name."""
    if c.parts[1] in ("fence", "commit_group", "wait_group"):
        return _wait_for_products(c)
    columns, function = tensor_core.wgmma(c.opcode)
    d, a, descriptor, keep, *flags = c.operands
    held = isinstance(a, Vector)
    down = _directions(c, [x.text for x in flags if isinstance(x, Immediate)], held)
    targets, keeps = [c.target(x) for x in c.items(d)], c.source(keep, "pred")
    old, registers = (
        [c.source(x, "b32") for x in c.items(d)],
        [c.source(x, "b32") for x in c.items(a)] if held else [],
    )
    described_a, described_b = None if held else c.source(a, "b64"), c.source(descriptor, "b64")

    def fetch(m: Machine, lanes: Array, words: Array, first: Array, count: int, down: bool) -> Array:
        """Rows of a, or columns of b, loaded in 16-byte parts, one per lane."""
        times, first = np.arange(2 * count), first.reshape(-1, 32)[:, :1]

        def each(values: Array) -> Array:
            return np.asarray(values.reshape(-1, 32)[:, times % 32].reshape(-1))

        try:
            at = tensor_core.described(
                words if len(words) == 1 else each(words), (first + times).reshape(-1), down
            )
        except NotSimulated as error:
            raise m.not_simulated(str(error)) from None
        every = each(lanes)
        parts = m.shared.load(m, every, at, 16, flags=None)
        places = m.shared.place(m, every, at, 16, "reads")[0]
        m.shared.check_proxy(m, every, places, 16)
        # All four warps of a warpgroup read the same b: one of them stands for them.
        one = (
            slice(None)
            if count == 16
            else m.order.warp_of[every] == m.order.warpgroup_of(m.order.warp_of[every])
        )
        m.warpgroups.start(m.pc, every[one], places[one], 16, read=True)
        return tensor_core.by_rows(
            np.ascontiguousarray(parts).view(np.uint16).reshape(-1, 2 * count, 8), down
        )

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        check_whole_warpgroups(m, group.lanes)
        m.order.clock.tick(m.pc)
        b = fetch(m, group.lanes, m.get(group, described_b), np.zeros_like(group.lanes), columns, down[-1])
        before, fragments = ([m.spread(group, r).reshape(-1, 32) for r in rs] for rs in (old, registers))
        if described_a is not None:  # each of the four warps has 16 rows
            first = group.lanes // 32 % 4 * 32
            fragments = tensor_core.rows_of_a(
                fetch(m, group.lanes, m.get(group, described_a), first, 16, down[0])
            )
        kept = m.spread(group, keeps).reshape(-1, 32)[:, :1]
        if m.poisoned:
            m.poison.check(group, (keeps, *registers), "a matrix product")
            m.poison.check(group, old if kept.any() else (), "a matrix product", sums=True)
        put_all(m, group, targets, function(fragments, b, before, kept))
        m.warpgroups.results(group, [t.number for t in targets])

    return together(c, EVERY_LANE, act, warpgroups=True)


def _directions(c: Context, texts: list[str], held: bool) -> list[bool]:
    """Which operands in shared memory are MN-major. `texts`: the operands after the predicate: the signs of a
    and b, but not for integers; then for 16-bit elements a flag for each operand in shared memory."""
    signs, flags = 0 if "s32" in c.parts else 2, (1 if held else 2) * bool({"f16", "bf16"} & set(c.parts[6:]))
    c.refuse(texts[:signs] != ["1"] * signs or len(texts) != signs + flags or set(texts[signs:]) - {"0", "1"})
    return [text == "1" for text in texts[signs:]] or [False, False]


def _wait_for_products(c: Context) -> Step:
    newest = next((int(immediate_value(x)) for x in c.operands if isinstance(x, Immediate)), 0)

    def act(m: Machine, group: Group, masks: Array) -> None:
        check_whole_warps(m, group.lanes)
        if c.parts[1] == "commit_group":
            m.warpgroups.commit(group.lanes)
        elif c.parts[1] == "wait_group":
            m.warpgroups.wait(group.lanes, newest)

    return together(c, EVERY_LANE, act)
