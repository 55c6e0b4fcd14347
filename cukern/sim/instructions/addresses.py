"""Address arithmetic: cvta, isspacep, mapa and getctarank."""

import numpy as np

from cukern.sim.instructions.decode import UNSIGNED, Array, Context, Step, compute
from cukern.sim.machine.clusters import split_address
from cukern.sim.machine.program import PARAMETER
from cukern.sim.memory.spaces import RANK, WINDOW, WINDOWS

_NO_RANK = 254  # stands for every rank that no cluster has


def convert_address(c: Context) -> Step:
    """cvta: between the addresses of a space and generic ones."""
    space = next(p for p in c.parts[1:] if p not in ("to", *c.types)).split("::")[0]
    c.refuse(space not in WINDOWS)
    register = c.target(c.operands[0])
    if space == "param":  # whose address may have been moved to 32 bits
        start, low = c.program.special(f"{PARAMETER}0"), np.uint64(0xFFFFFFFF)
        return compute(lambda x, of: of + (x - of & low), register, [c.source(c.operands[1], "b64"), start])
    window = np.array([WINDOWS[space] << WINDOW if register.width == 64 else 0], UNSIGNED[register.width])
    function = (lambda x: x - window) if "to" in c.parts else (lambda x: x + window)
    return compute(function, register, [c.source(c.operands[1], c.types[0])])


def is_space(c: Context) -> Step:
    """isspacep.space p, address."""
    space, register, address = c.parts[1], c.target(c.operands[0]), c.source(c.operands[1], "b64")
    if space in ("global", "local", "shared::cluster"):
        window = WINDOWS[space.split("::")[0]]
        return compute(lambda x: x >> np.uint64(WINDOW) == window, register, [address])
    c.refuse(space not in ("shared", "shared::cta"))

    def function(address: Array, own: Array) -> Array:
        rank = split_address(address)[0]
        return (address >> np.uint64(WINDOW) == 1) & ((rank == 0) | (rank - 1 == own))

    return compute(function, register, [address, c.program.special("%cluster_ctarank")])


def map_address(c: Context) -> Step:
    """mapa d, address, rank."""
    register, width = c.target(c.operands[0]), 64 if c.types[-1] == "u64" else 32
    c.refuse(c.parts[1:-1] not in ([], ["shared::cluster"]) or c.types[-1] not in ("u32", "u64"))
    dtype = UNSIGNED[width]
    low = dtype(~(0xFF << RANK) & (1 << width) - 1)

    def function(address: Array, rank: Array) -> Array:
        above = np.minimum(rank.astype(np.int64) + 1, _NO_RANK).astype(dtype) << dtype(RANK)
        return (address & low) | above

    return compute(function, register, [c.source(c.operands[1], c.types[-1]), c.source(c.operands[2], "u32")])


def rank_of_address(c: Context) -> Step:
    """getctarank d, address."""
    register = c.target(c.operands[0])
    c.refuse(c.parts[1:-1] not in ([], ["shared::cluster"]))

    def function(address: Array, own: Array) -> Array:
        rank = split_address(address)[0]
        return np.where(rank > 0, rank - 1, own).astype(np.uint32)

    return compute(
        function, register, [c.source(c.operands[1], c.types[-1]), c.program.special("%cluster_ctarank")]
    )
