"""Tensor maps that a kernel makes: tensormap.replace changes a field, tensormap.cp_fenceproxy copies a map
from shared to global memory.

PTX ISA, tensormap.replace. The format is the simulator's, see runtime/launch/tensor_map.py."""

import numpy as np

from cukern.runtime.launch import tensor_map
from cukern.sim.instructions.access import address_of
from cukern.sim.instructions.decode import Array, Context, Group, Machine, Step
from cukern.sim.ptx.module import Immediate, immediate_value

# elemtype of tensormap.replace -> the code of a tensor map on the host; its bytes
_ELEMENTS = {
    0: (0, 1),
    1: (1, 2),
    2: (2, 4),
    3: (3, 4),
    4: (4, 8),
    5: (5, 8),
    6: (6, 2),
    7: (7, 4),
    9: (8, 8),
    10: (9, 2),
    11: (11, 4),
}


def replace(c: Context) -> Step:
    """tensormap.replace.tile.FIELD.SPACE.b1024.TYPE [map], (index,) value."""
    _, _, mode, field, space, *types = c.parts
    spaces = {"shared::cta": "shared", "global": "global"}
    c.refuse(mode != "tile" or space not in spaces or types[:1] != ["b1024"])
    (base, offset), index = c.address(c.operands[0]), 0
    if len(c.operands) == 3:
        number = c.operands[1]
        if not isinstance(number, Immediate):
            raise c.unknown()
        index = int(immediate_value(number))
    value, pc = c.source(c.operands[-1], types[1]), c.pc
    c.refuse(field not in tensor_map.FIELDS and field not in ("element_stride", "interleave_layout"))

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        m.poison.check(group, (value,), "a field of a tensor map")
        addresses, values = address_of(m, group, base, offset), m.spread(group, value).astype(np.int64)
        if field in ("element_stride", "interleave_layout"):
            if (values != (field == "element_stride")).any():
                raise m.not_simulated(f"a tensor map with the {field} {int(values[0])}")
            return
        for name, numbers in _fields(m, field, values):
            at, dtype = tensor_map.FIELDS[name]
            m.order.clock.tick(pc)
            places = addresses + addresses.dtype.type(at + dtype.itemsize * index)
            m.spaces[spaces[space]].store(m, group.lanes, places, dtype.itemsize, numbers.astype(dtype))

    return run


def _fields(m: Machine, field: str, values: Array) -> list[tuple[str, Array]]:
    """The fields that an instruction writes, with their values."""
    if field == "global_address":
        return [(field, values), ("magic", np.full(len(values), tensor_map.MAGIC_NUMBER))]
    if field == "elemtype":
        if not set(values.tolist()) <= _ELEMENTS.keys():
            raise m.not_simulated(f"a tensor map with the elemtype {int(values[0])}")
        codes = np.array([_ELEMENTS[v] for v in values.tolist()])
        return [("elemtype", codes[:, 0]), ("itemsize", codes[:, 1])]
    # rank is one less in the instruction, global_dim in memory
    less = {"rank": -1, "global_dim": 1}.get(field, 0)
    return [(field, values - less)]


def copy_and_fence(c: Context) -> Step:
    """tensormap.cp_fenceproxy.global.shared::cta...: [to], [from], 128. One lane of each warp copies."""
    known = {
        "tensormap", "cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "release", "cta",
        "cluster", "gpu", "sys",
    }  # fmt: skip
    c.refuse(set(c.parts) - known - {"sync", "aligned"})
    to, from_, pc = c.address(c.operands[0]), c.address(c.operands[1]), c.pc

    def run(m: Machine, group: Group) -> None:
        m.pc = pc
        first = np.unique(group.lanes // 32, return_index=True)[1]
        one = m.group(group.lanes[first])
        source, target = address_of(m, one, *from_), address_of(m, one, *to)
        for at in range(0, tensor_map.BYTES, 16):
            m.order.clock.tick(pc)
            values = m.shared.load(m, one.lanes, source + source.dtype.type(at), 16)
            m.order.clock.tick(pc)
            m.launched.memory.store(m, one.lanes, target + target.dtype.type(at), 16, values)
        m.order.fence(group.lanes)

    return run
