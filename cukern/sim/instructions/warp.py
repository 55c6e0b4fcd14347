"""Warp-wide instructions: __syncwarp, shuffles, votes, matches and reductions."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cukern.sim.instructions.decode import Context, Group, Machine, Step
from cukern.sim.machine.barriers import SYNC, bits, bits_of
from cukern.sim.numerics import alu
from cukern.sim.numerics.floats import F32
from cukern.sim.numerics.integers import SIGNED, UNSIGNED, Array
from cukern.sim.ptx.module import Operand, Register

Act = Callable[[Machine, Group, Array], None]


def together(c: Context, mask: Operand, act: Act, warpgroups: bool = False) -> Step:
    """A step that calls act(m, group, masks) when all lanes of `mask` have come, and all warps of their
    warpgroups if that is given."""
    register = c.source(mask, "u32")

    def run(m: Machine, group: Group) -> None:
        ready = m.warp_wide.meet(group, m.get(group, register), m.pc, warpgroups)
        if ready is not None:
            act(m, ready, m.spread(ready, register))
            m.go(m.pc + 1, ready)

    return run


def sync(c: Context) -> Step:
    register = c.source(c.operands[0], "u32")

    def run(m: Machine, group: Group) -> None:
        ready = m.warp_wide.meet(group, m.get(group, register), SYNC)
        if ready is None:
            return
        lanes, order = ready.lanes, m.order
        whole = bits_of(lanes, m.lanes) == bits(m.alive)
        masks = m.spread(ready, register) if ready is group else m.warp_wide.masks[lanes]
        alive = bits(m.alive)[order.warp_of[lanes]]
        full = whole[order.warp_of[lanes]] & (masks & alive == alive)
        order.sync_warps(np.unique(order.warp_of[lanes[full]]))
        rest = lanes[~full]
        pairs = np.unique(np.stack((order.warp_of[rest], masks[~full].astype(np.int64))), axis=1)
        for warp, mask in pairs.T:
            order.sync_lanes(rest[(order.warp_of[rest] == warp) & (masks[~full] == mask)])
        for pc, here in [(m.pc, group)] if ready is group else m.groups(lanes, m.warp_wide.at[lanes]):
            m.go(pc + 1, here)

    return run


def active_mask(c: Context) -> Step:
    register = c.target(c.operands[0])
    return lambda m, group: m.put(group, register.number, m.warp_wide.ballot(group.lanes))


def shuffle(c: Context) -> Step:
    """shfl.sync.mode.b32 d|p, a, b, c, mask. PTX ISA, shfl.sync."""
    c.refuse(c.parts[1] != "sync" or len(c.parts) != 4 or c.parts[3] != "b32")
    mode = c.parts[2]
    target, holds = c.targets(c.operands[0])
    value, distance, clamp = (c.source(x, "b32") for x in c.operands[1:4])

    def act(m: Machine, group: Group, masks: Array) -> None:
        lanes = group.lanes
        lane, step, ends = (
            lanes % 32,
            m.get(group, distance).astype(np.int64) & 31,
            m.get(group, clamp).astype(np.int64),
        )
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
        poison = _poison_of(m, group, masks, source, value, (distance, clamp))
        values = m.regs[value]
        m.put(group, holds.number, valid)
        m.put(group, target.number, values if len(values) == 1 else values[lanes - lane + source])
        if poison is not None:
            m.poison.put(group, target.number, *poison)

    return together(c, c.operands[4], act)


def _poison_of(
    m: Machine, group: Group, masks: Array, source: Array, value: int, control: tuple
) -> tuple[Array, Array] | None:
    """The uninitialized bits of what a shuffle reads, and their origins. Registers of lanes that do not take
    part are uninitialized."""
    lanes = group.lanes
    bad = (m.warp_wide.ballot(lanes) & masks) >> source.astype(np.uint32) & 1 == 0
    if not m.poisoned and not bad.any():
        return None
    m.poison.check(group, control, "the lane of a shuffle")
    dtype, from_ = UNSIGNED[m.program.widths[value]], lanes - lanes % 32 + source
    mask = m.poisoned.get(value)
    bits_, origins = np.zeros(len(lanes), dtype), np.zeros(len(lanes), np.int64)
    if mask is not None:
        bits_, origins = mask[from_], m.poison.origins[value][from_]
    if bad.any():

        def describe(lane: int) -> str:
            row = int(np.flatnonzero(lanes == lane)[0])
            named = masks[row] >> np.uint32(source[row]) & 1
            why = "is not there" if named else f"is not in the mask {masks[row]:#010x}"
            return f"reads a register of lane {source[row]} of its warp, which {why}"

        bits_, origins = bits_.copy(), np.where(bad, m.poison.shuffled(describe) + lanes, origins)
        bits_[bad] = 0 if m.poison.off else np.iinfo(dtype).max
    return bits_, origins


def vote(c: Context) -> Step:
    c.refuse(c.parts[1] != "sync" or c.parts[2] not in ("all", "any", "uni", "ballot"))
    mode, register, operand = c.parts[2], c.target(c.operands[0]), c.operands[1]
    predicate, negated = c.source(operand, "pred"), isinstance(operand, Register) and operand.negated

    def act(m: Machine, group: Group, masks: Array) -> None:
        m.poison.check(group, (predicate,), "the predicate of a vote")
        here = m.warp_wide.ballot(group.lanes) & masks
        hold = m.warp_wide.ballot(group.lanes, group.lanes[m.spread(group, predicate) ^ negated]) & masks
        result = {
            "all": lambda: hold == here,
            "any": lambda: hold != 0,
            "uni": lambda: (hold == 0) | (hold == here),
            "ballot": lambda: hold,
        }
        m.put(group, register.number, result[mode]())

    return together(c, c.operands[2], act)


def _members(m: Machine, lanes: Array, masks: Array) -> Array:
    """members[i, j]: True if lane j of the warp takes part, and lane i's mask names it."""
    here = m.warp_wide.ballot(lanes) & masks
    return (here[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool)


def _of_warp(m: Machine, lanes: Array, register: int) -> Array:
    """For each lane, the values of all 32 lanes of its warp."""
    values = np.broadcast_to(m.regs[register], (m.lanes,)).reshape(-1, 32)
    return values[m.order.warp_of[lanes]]


def match(c: Context) -> Step:
    mode, type_ = c.parts[1], c.types[0]
    target, holds = c.targets(c.operands[0])
    value = c.source(c.operands[1], type_)

    def act(m: Machine, group: Group, masks: Array) -> None:
        m.poison.check(group, (value,), "a match")
        members = _members(m, group.lanes, masks)
        equal = members & (_of_warp(m, group.lanes, value) == m.spread(group, value)[:, None])
        result = bits(equal)
        if mode == "all":
            same = (equal == members).all(axis=1)
            result = np.where(same, result, np.uint32(0))
            m.put(group, holds.number, same)
        m.put(group, target.number, result)

    return together(c, c.operands[2], act)


def reduce_(c: Context) -> Step:
    """redux.sync."""
    operation, type_ = c.parts[2], c.types[-1]
    if type_ == "f32":
        return _reduce_floats(c, operation)
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
    c.refuse(operation not in functions or type_ not in ("u32", "s32", "b32") or len(c.parts) != 4)
    function, neutral = functions[operation]
    target, value = c.target(c.operands[0]), c.source(c.operands[1], type_)

    def act(m: Machine, group: Group, masks: Array) -> None:
        m.poison.check(group, (value,), "a reduction of a warp")
        values = _of_warp(m, group.lanes, value).view(dtype)
        result = function.reduce(
            np.where(_members(m, group.lanes, masks), values, dtype(neutral)), axis=1, dtype=dtype
        )
        m.put(group, target.number, result.view(np.uint32))

    return together(c, c.operands[2], act)


def _reduce_floats(c: Context, operation: str) -> Step:
    """redux.sync.min and .max of float32, of sm_100: NaN is left out, or with .NaN decides."""
    flags = set(c.parts[3:-1])
    c.refuse(operation not in ("min", "max") or flags - {"abs", "NaN"})
    function = alu.find(".".join((operation, *(flags & {"NaN"}), "f32")))
    infinity = np.float32(np.inf if operation == "min" else -np.inf).view(np.uint32)
    neutral = infinity if "NaN" in flags else F32.nan
    target, value = c.target(c.operands[0]), c.source(c.operands[1], "f32")

    def act(m: Machine, group: Group, masks: Array) -> None:
        m.poison.check(group, (value,), "a reduction of a warp")
        values = _of_warp(m, group.lanes, value)
        values = values & np.uint32(0x7FFFFFFF) if "abs" in flags else values
        columns = np.where(_members(m, group.lanes, masks), values, np.uint32(neutral)).T
        result = functools.reduce(function, np.ascontiguousarray(columns))
        m.put(group, target.number, result)

    return together(c, c.operands[2], act)


def elect(c: Context) -> Step:
    """elect.sync d|p, mask: the first lane of the mask leads."""
    first, holds = c.targets(c.operands[0])

    def act(m: Machine, group: Group, masks: Array) -> None:
        leader = _members(m, group.lanes, masks).argmax(axis=1)
        m.put(group, first.number, leader.astype(np.uint32))
        m.put(group, holds.number, leader == group.lanes % 32)

    return together(c, c.operands[1], act)
