"""The state spaces: where an address lies, whether it may be accessed, and the access itself.

Global memory is this process's memory: a pointer argument is the address of a tensor. Shared and local memory are arrays in which each
block or each lane has its part. A generic address has its space in the top byte.
"""

import bisect
from typing import NamedTuple, Protocol

import numpy as np

from cukern.runtime.limits import Dim
from cukern.sim.faults import Fault, Misaligned, OutOfBounds, Race, Uninitialized
from cukern.sim.memory.order import IN_FLIGHT, Order
from cukern.sim.memory.regions import CARRIERS, FIRST_ADDRESS, Region, all_memory
from cukern.sim.memory.shadow import Conflict, Shadow

WINDOW = 56  # the bits of a generic address from this one on: 1 for shared, 2 for local memory
RANK = 24  # bits of a shared::cluster address from this one on: the block's rank plus 1, or 0 for the own block
WINDOWS = {"global": 0, "const": 0, "shared": 1, "local": 2}


class Accessor(Protocol):
    """The batch of blocks whose lanes access a space: how their accesses are ordered, and how to report a fault."""

    order: Order
    first_block: int

    def block_and_thread(self, lane: int) -> tuple[Dim, Dim]: ...

    def who(self, stamp: int) -> tuple[Dim, Dim, str]: ...

    def fault(self, kind: type[Fault], lane: int, what: str, pc: int | None = None) -> Fault: ...


class Place(NamedTuple):
    """Where an access goes: positions in the space's arrays, and the regions there."""

    at: np.ndarray
    parts: list[tuple[Region, Shadow | None, np.ndarray | None]]  # region, shadow, rows of the access (None: all)


def each(values: np.ndarray, lanes: np.ndarray) -> np.ndarray:
    """`values` with one element per lane; it may have a single one for all."""
    return values if len(values) == len(lanes) else np.broadcast_to(values, lanes.shape)


def raw(values: np.ndarray) -> np.ndarray:
    """Elements of any size as integers, one row each, so that == compares bits."""
    return values.view(np.uint64).reshape(-1, 2) if values.dtype.itemsize == 16 else values


class Space:
    """Checked loads and stores of scalars and vectors."""

    name = ""
    first = 0  # the position of element 0 of the arrays

    def __init__(self, arrays: dict[int, np.ndarray]):
        self.arrays = arrays

    def place(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, verb: str) -> Place:
        raise NotImplementedError

    def describe(self, region: Region, position: int) -> str:
        raise NotImplementedError

    def array(self, at: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        return self.arrays[size], (at - self.first) >> (size.bit_length() - 1)

    # ---- accesses

    def load(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, strong: bool = False) -> np.ndarray:
        at, parts = self.place(m, lanes, addresses, size, "reads")
        for region, shadow, rows in parts:
            if shadow is not None:
                self._check_read(m, region, shadow, *_rows(at, lanes, rows), size, strong)
        array, index = self.array(at, size)
        return array[index]

    def store(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, values: np.ndarray, flags: int = 0) -> np.ndarray:
        """Returns the positions."""
        at, parts = self.place(m, lanes, addresses, size, "writes")
        at, values = each(at, lanes), each(values, lanes)
        shared_rows = []
        for region, shadow, rows in parts:
            some = slice(None) if rows is None else rows
            shared_rows.append(self.note_write(m, region, shadow, at[some], lanes[some], size, values[some], flags))
        array, index = self.array(at, size)
        array[index] = values
        for (region, _, rows), lost in zip(parts, shared_rows, strict=True):
            if lost is not None:
                lost = lost if rows is None else rows[lost]
                self._check_agreement(m, region, lanes, at, index, array, values, lost, size)
        return at

    def note_write(
        self,
        m: Accessor,
        region: Region,
        shadow: Shadow | None,
        at: np.ndarray,
        lanes: np.ndarray,
        size: int,
        values: np.ndarray | None,
        flags: int,
    ) -> np.ndarray | None:
        """Check a write for races and record it. Two writes of equal values are allowed. Returns the rows that other rows overwrite."""
        if shadow is None:
            return None
        over_writes, over_reads, lost = shadow.write(m.order, at - region.origin, size, lanes, flags)
        if over_writes is not None and values is not None:
            array, index = self.array(at[over_writes.rows], size)
            flying = (over_writes.stamps & IN_FLIGHT) != 0
            differ = (raw(array[index]) != raw(values[over_writes.rows])).reshape(len(index), -1).any(axis=1) | flying
            over_writes = Conflict(over_writes.rows[differ], over_writes.stamps[differ]) if differ.any() else None
        if over_writes is not None:
            raise self.race(m, region, at, lanes, size, "writes", over_writes, "wrote")
        if over_reads is not None:
            raise self.race(m, region, at, lanes, size, "writes", over_reads, "read")
        return lost

    def _check_read(self, m: Accessor, region: Region, shadow: Shadow, at: np.ndarray, lanes: np.ndarray, size: int, strong: bool) -> None:
        self.check_written(m, region, shadow, at, lanes, size)
        conflict = shadow.read(m.order, at - region.origin, size, lanes, strong)
        if conflict is not None:
            raise self.race(m, region, at, lanes, size, "reads", conflict, "wrote")

    def check_written(self, m: Accessor, region: Region, shadow: Shadow | None, at: np.ndarray, lanes: np.ndarray, size: int) -> None:
        missing = shadow.unwritten(at - region.origin, size) if shadow is not None else None
        if missing is not None:
            row = missing[0]
            what = f"reads {size} bytes that nobody wrote, {self.describe(region, int(at[row]))}"
            raise m.fault(Uninitialized, lanes[row], what)

    def _check_agreement(
        self,
        m: Accessor,
        region: Region,
        lanes: np.ndarray,
        at: np.ndarray,
        index: np.ndarray,
        array: np.ndarray,
        values: np.ndarray,
        lost: np.ndarray,
        size: int,
    ) -> None:
        """Lanes of one store that write to the same address must write the same value."""
        differ = (raw(array[index[lost]]) != raw(np.ascontiguousarray(values[lost]))).reshape(len(lost), -1).any(axis=1)
        if differ.any():
            row = lost[differ][0]
            other = m.block_and_thread(lanes[np.flatnonzero(at == at[row])[-1]])
            where = self.describe(region, int(at[row]))
            what = f"writes {size} bytes, {where}, where block {other[0]}, thread {other[1]} writes another value"
            raise m.fault(Race, lanes[row], what)

    def race(
        self, m: Accessor, region: Region, at: np.ndarray, lanes: np.ndarray, size: int, verb: str, conflict: Conflict, did: str
    ) -> Fault:
        """The Race for a conflict. `verb`: what the lane does now; `did`: what the other lane did."""
        mine = (lanes[conflict.rows] + m.order.base) // 32
        i = np.argmax(m.order.by_lane(conflict.stamps) // 32 != mine)  # prefer a race between two warps: __syncwarp() repairs the others
        row, stamp = conflict.rows[i], int(conflict.stamps[i])
        where = self.describe(region, int(at[row]))
        if stamp & IN_FLIGHT:
            verb += f" {size} bytes, {where}, into which an asynchronous copy still writes:"
            _, _, line = m.who(stamp)
            return m.fault(Race, lanes[row], f"{verb} a cp.async.wait, or one at the mbarrier, is missing after the copy at {line}")
        block, thread, line = m.who(stamp)
        if block != m.block_and_thread(lanes[row])[0]:
            other, remedy = f"block {block}, thread {thread}", "nothing orders two blocks of one launch"
            if m.order.cluster_of[lanes[row]] == (m.order.by_block(stamp) - m.first_block) // m.order.blocks_a_cluster:
                remedy = "no cluster barrier is between the two, or its arrive is .relaxed"
        else:
            other = f"thread {thread}"
            same_warp = m.order.unpack(stamp)[0] // 32 == mine[i]
            remedy = "a __syncwarp(), or a barrier, is missing between the two" if same_warp else "no barrier is between the two"
        return m.fault(Race, lanes[row], f"{verb} {size} bytes, {where}, that {other} {did} at {line}: {remedy}")

    def check_aligned(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, verb: str) -> None:
        low = addresses & addresses.dtype.type(size - 1)
        if low.any():
            row = int(np.flatnonzero(np.broadcast_to(low, lanes.shape))[0])
            address = int(np.broadcast_to(addresses, lanes.shape)[row])
            where = f"the address {address:#x}" if self.name == "global" else f"the offset {address}"
            raise m.fault(Misaligned, lanes[row], f"{verb} {size} bytes of {self.name} memory, but {where} is not a multiple of {size}")


def _rows(at: np.ndarray, lanes: np.ndarray, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    return (at, lanes) if rows is None else (at[rows], lanes[rows])


class Private(Space):
    """Shared or local memory: each lane accesses one part of an array."""

    def __init__(self, name: str, pieces: int, size: int, piece_of: np.ndarray, names: list[tuple[int, str]]):
        self.name, self.size, self.names = name, size, names
        self.stride = size + -size % 16
        whole = np.zeros(pieces * self.stride // 16, np.complex128)
        super().__init__({n: whole.view(carrier) for n, carrier in CARRIERS.items()})
        self.bases = piece_of * self.stride
        self.region = Region(0, pieces * self.stride)
        self.shadow = Shadow(pieces * self.stride, np.zeros(pieces * self.stride, bool), reach="cluster" if name == "shared" else "lane")

    def place(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, verb: str) -> Place:
        self.check_aligned(m, lanes, addresses, size, verb)
        offsets = addresses.astype(np.int64)
        if int(offsets.max()) > self.size - size or int(offsets.min()) < 0:
            bad = np.broadcast_to((offsets > self.size - size) | (offsets < 0), lanes.shape)
            row = int(np.flatnonzero(bad)[0])
            offset = int(np.broadcast_to(offsets, lanes.shape)[row])
            owner = "the block" if self.name == "shared" else "the thread"
            what = f"{verb} {size} bytes at offset {offset} of {self.name} memory, but {owner} has {self.size} bytes of it"
            if self.name == "shared" and offset >> RANK:
                what += ": that is an address of shared::cluster, which is another space"
            raise m.fault(OutOfBounds, lanes[row], what)
        return Place(self.bases[lanes] + offsets, [(self.region, self.shadow, None)])

    def describe(self, region: Region, position: int) -> str:
        offset = position % self.stride
        start, name = max((v for v in self.names if v[0] <= offset), default=(0, ""))
        return f"offset {offset} of {self.name} memory" + (f" ({name} + {offset - start})" if name else "")


class Global(Space):
    """Global and constant memory: the tensors that a launch may access, and the module's variables."""

    name = "global"
    first = FIRST_ADDRESS

    def __init__(self, regions: list[Region]):
        super().__init__(all_memory())
        self.regions = regions
        self.starts = [r.start for r in regions]
        self.shadows = [Shadow(r.end - r.origin, r.written) if r.writable else None for r in regions]
        self.bounds = np.array(self.starts, np.uint64), np.array([r.end for r in regions], np.uint64)

    def place(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, verb: str) -> Place:
        self.check_aligned(m, lanes, addresses, size, verb)
        low, high = int(addresses.min()), int(addresses.max())
        i = bisect.bisect_right(self.starts, low) - 1
        at = addresses.view(np.int64)
        one = i >= 0 and high + size <= self.regions[i].end
        parts = [(i, None)] if one else self._several(m, lanes, addresses, size, verb)
        if verb != "reads":
            for i, _ in parts:
                if not self.regions[i].writable:
                    raise m.fault(OutOfBounds, lanes[0], f"{verb} {self.describe(self.regions[i], low)}, which is constant memory")
        return Place(each(at, lanes), [(self.regions[i], self.shadows[i], rows) for i, rows in parts])

    def load(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, strong: bool = False) -> np.ndarray:
        if len(addresses) == 1 and len(lanes) > 1 and self._is_only_read(int(addresses[0])):
            return super().load(m, lanes[[0, -1]], addresses, size, strong)[:1]  # two lanes represent all
        return super().load(m, lanes, addresses, size, strong)

    def _is_only_read(self, address: int) -> bool:
        i = bisect.bisect_right(self.starts, address) - 1
        shadow = self.shadows[i] if i >= 0 else None
        return shadow is None or shadow.writers is None

    def text(self, address: int) -> str:
        """A string in the module's memory, for a message."""
        for region in self.regions:
            if region.start <= address < region.end:
                return bytes(self.arrays[1][address - self.first : region.end - self.first]).split(b"\0")[0].decode(errors="replace")
        return "?"

    def _several(self, m: Accessor, lanes: np.ndarray, addresses: np.ndarray, size: int, verb: str) -> list:
        """The rows of an access to several regions, by region. Raises OutOfBounds for the first lane outside all regions."""
        starts, ends = self.bounds
        addresses = np.broadcast_to(addresses, lanes.shape)
        which = np.searchsorted(starts, addresses, side="right") - 1
        inside = which >= 0
        if len(ends):
            inside &= (addresses <= ends[which] - np.uint64(size)) & (ends[which] - starts[which] >= np.uint64(size))
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            raise m.fault(OutOfBounds, lanes[row], f"{verb} {size} bytes of global memory {self._distance(int(addresses[row]), size)}")
        return [(int(i), np.flatnonzero(which == i)) for i in np.unique(which)]

    def _distance(self, address: int, size: int) -> str:
        if address < 4096:
            return f"through a null pointer (address {address})"
        best = None
        for region in self.regions:
            distance = region.start - address if address < region.start else address + size - region.end
            if best is None or distance < best[0]:
                best = distance, region
        if best is None or best[0] > 1 << 30:
            return f"at {address:#x}, which belongs to no argument"
        region = best[1]
        length = region.end - region.start
        if address < region.start:
            return f"{region.start - address} bytes before the start of {region.name}, which has {length} bytes"
        if address >= region.end:
            return f"{address - region.end} bytes after the end of {region.name}, which has {length} bytes"
        return f"across the end of {region.name}, which has {length} bytes"

    def describe(self, region: Region, position: int) -> str:
        return f"byte {position - region.start} of {region.name}"

    def finish(self) -> None:
        """Record in the regions what the launch has written, for the next launch."""
        for region, shadow in zip(self.regions, self.shadows, strict=True):
            written = shadow.written() if shadow is not None else None
            if region.written is not None and written is not None:
                region.written |= written[: len(region.written)]
