"""The state spaces: the position of an address, the check of an access, and the access itself.

Global memory is this process's memory: a pointer argument is the address of a tensor. Shared and local memory
are arrays in which each block or each lane has one part. The top byte of a generic address names its
space."""

import bisect
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukern.runtime.launch.limits import Dim
from cukern.sim.faults import BarrierFault, Fault, Misaligned, OutOfBounds, Race, Uninitialized
from cukern.sim.memory.history import Conflict
from cukern.sim.memory.order import IN_FLIGHT, STRONG, Order
from cukern.sim.memory.order import TIME_BITS as TIME_BITS
from cukern.sim.memory.regions import CARRIERS, FIRST_ADDRESS, Region, all_memory
from cukern.sim.memory.shadow import SHIFTS, Shadow
from cukern.sim.numerics.integers import SIGNED, Array, count_nonzero

WINDOW = 56  # the first bit of the space in a generic address: 1 for shared, 2 for local memory
RANK = 24  # the first bit of the block's rank plus 1 in a shared::cluster address; 0 stands for the own block
WINDOWS = {"global": 0, "const": 0, "param": 0, "shared": 1, "local": 2}


class Accessor(Protocol):
    """The batch of blocks whose lanes access a space: how their accesses are ordered, and how to report a
    fault."""

    order: Order
    first_block: int
    pc: int
    poison: Any  # the uninitialized bits of registers

    @property
    def compares(self) -> bool: ...  # True if the kernel has a compare-and-swap

    @property
    def replicated(self) -> bool: ...  # True if lanes of a block may hold copies of one value, as Triton's do

    def divergence(self, lane: int) -> str | None: ...

    def mutes(self, kind: type[Fault]) -> bool: ...

    def suspect(self, reader: int, position: int, stamp: int | None, fault: Callable[[], Fault]) -> None: ...

    def block_and_thread(self, lane: int) -> tuple[Dim, Dim]: ...

    def who(self, stamp: int) -> tuple[Dim, Dim, str]: ...

    def fault(
        self, kind: type[Fault], lane: int, what: str, pc: int | None = None, lanes: Array | None = None
    ) -> Fault: ...


class Part(NamedTuple):
    """The rows of an access that lie in one region: their positions from its origin, and their lanes."""

    region: Region
    shadow: Shadow | None
    at: Array
    lanes: Array
    rows: Any = slice(None)


def each(values: Array, lanes: Array) -> Array:
    """`values` with one element per lane; it may have a single one for all."""
    return values if len(values) == len(lanes) else values.repeat(len(lanes))


def first_row(flags: Array) -> int:
    """The first row whose flag is set."""
    return int(np.flatnonzero(flags)[0])


class Space:
    """Checked loads and stores of scalars and vectors."""

    name = ""
    first = 0  # the position of element 0 of the arrays, which hold the whole space

    def __init__(self, arrays: dict[int, Array]):
        self.arrays = arrays

    def place(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str
    ) -> tuple[Array, list[Part]]:
        """The positions of an access in the arrays, and its parts. Raises a Fault if the access is misaligned
        or out of bounds."""
        raise NotImplementedError

    def describe(self, region: Region, position: int) -> str:
        raise NotImplementedError

    def array(self, at: Array, size: int) -> tuple[Array, Array]:
        return self.arrays[size], (at - self.first) >> (size.bit_length() - 1)

    def elements(self, part: Part, size: int) -> tuple[Array, Array]:
        """The memory of a part's region as an array of elements of this size, and the index of each row."""
        return self.of(part.region, size), part.at >> SHIFTS[size.bit_length() - 1]

    def of(self, region: Region, size: int) -> Array:
        """The memory of a region, from its origin on, as an array of elements of this size."""
        if size not in region.views:
            region.views[size] = self.arrays[size][(region.origin - self.first) // size :]
        return region.views[size]

    # ---- accesses

    def load(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, strong: bool = False,
        poison: bool = False, flags: int | None = 0,
    ) -> Array:  # fmt: skip
        """`poison`: uninitialized bytes are no fault, but the batch is told of them. `flags`: of the stamp;
        None: it is recorded later."""
        parts = self.place(m, lanes, addresses, size, "reads")[1]
        for part in parts:
            if part.shadow is not None:
                if part.shadow.before is not None or part.shadow.poisoned is not None:
                    self.check_written(m, part, size, poison)
                conflict = part.shadow.read(m.order, part.at, size, part.lanes, strong, flags)
                if conflict is not None:
                    self._report(m, part, size, "reads", conflict, "wrote")
        if len(parts) == 1:
            array, index = self.elements(parts[0], size)
            return array[index]
        values = np.empty(len(lanes), self.arrays[size].dtype)
        for part in parts:
            array, index = self.elements(part, size)
            values[part.rows] = array[index]
        return values

    def unwritten(self, m: Accessor, lanes: Array, addresses: Array, size: int) -> Array:
        """For each row, its uninitialized bytes as bits."""
        codes = np.zeros(len(lanes), np.int64)
        for part in self.place(m, lanes, addresses, size, "reads")[1]:
            missing = part.shadow.unwritten(part.at, size) if part.shadow is not None else None
            if missing is not None:
                codes[part.rows] = (missing * (1 << np.arange(size))).sum(axis=1)
        return codes

    def check_unchanged(self, m: Accessor, lanes: Array, addresses: Array, size: int) -> None:
        """A load through the read-only cache, which does not see what the launch writes."""
        for part in self.place(m, lanes, addresses, size, "reads")[1]:
            found = part.shadow.written_before(part.at, size) if part.shadow is not None else None
            if found is not None and not m.mutes(Race):
                row, stamp = found
                block, thread, line = m.who(stamp)
                where = self.describe(part.region, int(part.at[row]))
                what = (
                    f"reads {size} bytes, {where}, through the read-only cache (__ldg, or const and "
                    f"__restrict__), though block {block}, thread {thread} wrote it in this launch, at {line}"
                )
                raise m.fault(Race, part.lanes[row], f"{what}: load it without __ldg or __restrict__")

    def store(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, values: Array, flags: int = 0,
        poison: Array | None = None,
    ) -> Array:  # fmt: skip
        """Returns the positions. `poison`: bit i of a row is set if byte i of its value is uninitialized."""
        at, parts = self.place(m, lanes, addresses, size, "writes")
        values = each(values, lanes)
        overwritten = [self.note_write(m, part, size, values[part.rows], flags) for part in parts]
        for part in parts:
            array, index = self.elements(part, size)
            array[index] = values[part.rows]
            if part.shadow is not None and (
                part.shadow.poisoned is not None or (poison is not None and count_nonzero(poison))
            ):
                codes = np.zeros(1, np.int64) if poison is None else poison
                if len(codes) > 1:
                    codes = each(codes, lanes)[part.rows]
                part.shadow.poison(part.at, size, codes)
        for part, lost in zip(parts, overwritten, strict=True):
            if lost is not None:
                self.check_agreement(m, part, size, values[part.rows], lost)
        return at

    def note_write(
        self, m: Accessor, part: Part, size: int, values: Array | None, flags: int, narrow: bool = False
    ) -> Array | None:
        """Check a write for races and record it. Two writes of equal values are allowed. Returns the rows
        that other rows overwrite."""
        if part.shadow is None:
            return None
        over_writes, over_reads, lost = part.shadow.write(m.order, part.at, size, part.lanes, flags, narrow)
        if over_writes is not None and values is not None:
            rows, stamps = over_writes
            wrong = self._differs(part, rows, size, values) | ((stamps & IN_FLIGHT) != 0)
            over_writes = Conflict(rows[wrong], stamps[wrong]) if wrong.any() else None
        for conflict, did in ((over_writes, "wrote"), (over_reads, "read")):
            if conflict is not None:
                self._report(m, part, size, "writes", conflict, did, strong=bool(flags & STRONG))
        return lost

    def check_written(self, m: Accessor, part: Part, size: int, poison: bool = False) -> None:
        missing = part.shadow.unwritten(part.at, size) if part.shadow is not None else None
        if missing is not None and poison:
            m.poison.loaded(self, part, size, missing)
        elif missing is not None and not m.mutes(Uninitialized):
            row = first_row(np.asarray(missing.any(axis=1)))
            what = f"reads {size} bytes that nobody wrote, {self.describe(part.region, int(part.at[row]))}"
            raise m.fault(Uninitialized, part.lanes[row], what)

    def _differs(self, part: Part, rows: Array, size: int, values: Array) -> Array:
        """True for each of these rows where the memory does not have the bits of `values`."""
        array, index = self.elements(part, size)
        dtype = np.uint64 if size == 16 else array.dtype  # so that == compares bits
        here, there = (
            np.ascontiguousarray(x).view(dtype).reshape(len(rows), -1)
            for x in (array[index[rows]], values[rows])
        )
        return (here != there).any(axis=1)

    def check_agreement(self, m: Accessor, part: Part, size: int, values: Array, lost: Array) -> None:
        """Lanes of one store that write to the same address must write the same value."""
        rows = lost
        if m.replicated and self.name == "shared":
            # In Triton's kernels all copies of a sum are stored to one place. Within a warp their last bits
            # may differ, because they depend on the order of the terms. So compare one lane of each warp.
            places = list(zip(part.at.tolist(), (part.lanes // 32).tolist(), strict=True))
            last = {place: row for row, place in enumerate(places)}
            rows = np.array([last[places[row]] for row in lost.tolist()], np.int64)
        differs = self._differs(part, rows, size, values)
        if differs.any() and not m.mutes(Race):
            row = lost[differs][0]
            block, thread = m.block_and_thread(part.lanes[np.flatnonzero(part.at == part.at[row])[-1]])
            where = self.describe(part.region, int(part.at[row]))
            what = f"writes {size} bytes, {where}, where block {block}, thread {thread} writes another value"
            raise m.fault(Race, part.lanes[row], what)

    def _report(
        self, m: Accessor, part: Part, size: int, verb: str, conflict: Conflict, did: str,
        strong: bool = False,
    ) -> None:  # fmt: skip
        """Raise the Race for a conflict. `verb`: what the lane does now; `did`: what the other lane did;
        `strong`: it changes by an atomic.

        A plain read beside atomics is forgiven if its lane then executes a compare-and-swap there, as the
        first read of a loop does."""
        if m.mutes(Race):
            return
        forgivable = ((conflict.stamps & STRONG) != 0).all() if verb == "reads" else strong and did == "read"
        if not (forgivable and m.compares and self.name == "global"):
            raise self._race(m, part, size, verb, conflict, did)
        for i, row in enumerate(conflict.rows.tolist()):
            one = Conflict(conflict.rows[i : i + 1], conflict.stamps[i : i + 1])
            fault = functools.partial(self._race, m, part, size, verb, one, did, m.pc)
            reader = (
                int(part.lanes[row]) + m.order.base
                if verb == "reads"
                else int(m.order.by_lane(conflict.stamps[i]))
            )
            m.suspect(
                reader,
                int(part.at[row]) + part.region.origin,
                None if verb == "reads" else int(conflict.stamps[i]),
                fault,
            )

    def _race(
        self, m: Accessor, part: Part, size: int, verb: str, conflict: Conflict, did: str,
        pc: int | None = None,
    ) -> Fault:  # fmt: skip
        mine = (part.lanes[conflict.rows] + m.order.base) // 32
        # prefer a race between two warps: __syncwarp() repairs the others
        i = np.argmax(m.order.by_lane(conflict.stamps) // 32 != mine)
        row = conflict.rows[i]
        stamp = int(conflict.stamps[i])
        lane = part.lanes[row]
        where = self.describe(part.region, int(part.at[row]))
        block, thread, line = m.who(stamp)
        here = m.fault(Race, lane, "", pc).where.location
        in_place = "; if several threads change it at this line, it must be an atomic" if line == here else ""
        if stamp & IN_FLIGHT:
            verb += f" {size} bytes, {where}, into which an asynchronous copy still writes:"
            return m.fault(
                Race,
                lane,
                f"{verb} a cp.async.wait, or one at the mbarrier, is missing after the copy at {line}",
                pc,
            )
        if block != m.block_and_thread(lane)[0]:
            other = f"block {block}, thread {thread}"
            remedy = "nothing orders two blocks of one launch" + in_place
            if (
                stamp & STRONG
                and did == "wrote"
                and part.shadow is not None
                and part.shadow.narrow is not None
            ):
                remedy = "an atomic of .cta scope (atomicAdd_block) does not order blocks"
            if (
                m.order.cluster_of[lane]
                == (m.order.by_block(stamp) - m.first_block) // m.order.blocks_a_cluster
            ):
                remedy = "no cluster barrier is between the two, or its arrive is .relaxed"
        elif did == "wrote" and part.shadow is not None and part.shadow.was_copied(int(part.at[row])):
            other = f"the asynchronous copy of thread {thread}"
            remedy = "a wait at its mbarrier is missing"
        else:
            other = f"thread {thread}"
            apart = m.divergence(lane)
            if apart is not None:
                return m.fault(
                    BarrierFault,
                    lane,
                    f"{verb} {size} bytes, {where}, that {other} {did} at {line}: {apart}",
                    pc,
                )
            same_warp = m.order.unpack(stamp)[0] // 32 == mine[i]
            remedy = (
                "a __syncwarp() is missing between the two (__syncthreads() orders them, too)"
                if same_warp
                else "no barrier is between the two"
            )
            remedy += in_place
        return m.fault(
            Race, lane, f"{verb} {size} bytes, {where}, that {other} {did} at {line}: {remedy}", pc
        )

    def check_aligned(self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str) -> None:
        low = addresses & addresses.dtype.type(size - 1)
        if low.any():
            row = first_row(low)
            address = int(addresses[row])
            where = f"the address {address:#x}" if self.name == "global" else f"the offset {address}"
            what = f"{verb} {size} bytes of {self.name} memory, but {where} is not a multiple of {size}"
            raise m.fault(Misaligned, lanes[row], what, None, lanes[each(low, lanes) != 0])


class Private(Space):
    """Shared or local memory: each lane accesses one part of an array."""

    def __init__(self, name: str, pieces: int, size: int, piece_of: Array, names: list[tuple[int, str]]):
        self.name = name
        self.size = size
        self.names = names
        self.stride = size + -size % 16
        whole = np.zeros(pieces * self.stride // 16, np.complex128)
        super().__init__({n: whole.view(carrier) for n, carrier in CARRIERS.items()})
        self.bases = piece_of * self.stride
        self.region = Region(0, pieces * self.stride)
        self.spots: dict[tuple[int, int], Any] = {}  # as in Global
        self.shadow = Shadow(
            pieces * self.stride,
            np.zeros(pieces * self.stride, bool),
            reach="cluster" if name == "shared" else "lane",
        )

    def check_proxy(self, m: Accessor, lanes: Array, at: Array, size: int) -> None:
        """These lanes read shared memory asynchronously. After a plain write or cp.async, a fence.proxy.async
        is needed."""
        found = self.shadow.unfenced(m.order, at, size, lanes)
        if found is not None and not m.mutes(Race):
            row, stamp = found
            _, thread, line = m.who(stamp)
            where = self.describe(self.region, int(at[row]))
            what = f"reads {size} bytes asynchronously, {where}, that thread {thread} wrote at {line}"
            raise m.fault(
                Race,
                lanes[row],
                f"{what}: a fence.proxy.async is missing between the two, after the write has ended",
            )

    def place(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str
    ) -> tuple[Array, list[Part]]:
        if addresses.dtype == np.int64:
            addresses = addresses.view(np.uint64)
        if count_nonzero(addresses & addresses.dtype.type(size - 1)):
            self.check_aligned(m, lanes, addresses, size, verb)
        if size > self.size or count_nonzero(addresses > addresses.dtype.type(self.size - size)):
            self._check_inside(m, lanes, addresses, size, verb)
        at = each(addresses.astype(np.int64), lanes)
        if self.stride < len(self.arrays[1]):  # several pieces
            at = at + (self.bases if lanes is m.order.every else self.bases[lanes])
        return at, [Part(self.region, self.shadow, at, lanes)]

    def _check_inside(self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str) -> None:
        """Raise OutOfBounds, for the first lane outside of its piece."""
        room = self.size - size
        outside = each((addresses > addresses.dtype.type(room)) if room >= 0 else np.ones(1, bool), lanes)
        row = first_row(outside)
        offset = int(each(addresses.view(SIGNED[8 * addresses.itemsize]), lanes)[row])
        owner = "the block" if self.name == "shared" else "the thread"
        what = f"{verb} {size} bytes at offset {offset} of {self.name} memory,"
        what += f" but {owner} has {self.size} bytes of it"
        if self.name == "shared" and offset >> RANK > 0:
            what += ": that is an address of shared::cluster, which is another space"
        raise m.fault(OutOfBounds, lanes[row], what, None, lanes[outside])

    def describe(self, region: Region, position: int) -> str:
        offset = position % self.stride
        start, name = max((v for v in self.names if v[0] <= offset), default=(0, ""))
        return f"offset {offset} of {self.name} memory" + (f" ({name} + {offset - start})" if name else "")


class _Near(NamedTuple):
    region: Region | None
    shadow: Shadow | None
    start: Array  # the region's
    room: Array  # the last offset from there at which an access lies inside


# the bits of an address that are 0 if it is aligned
LOW = {size: np.array(size - 1, np.uint64) for size in CARRIERS}
_NOWHERE = _Near(None, None, LOW[1], LOW[1])


class Global(Space):
    """Global and constant memory: the tensors that a launch may access, and the module's variables."""

    name = "global"
    first = FIRST_ADDRESS

    def __init__(self, regions: list[Region], replicated: bool = False):
        super().__init__(all_memory())
        self.regions = regions
        self.starts = [r.start for r in regions]
        self.shadows = [Shadow(r.end - r.origin, r.written) if r.writable else None for r in regions]
        for shadow in self.shadows:
            if shadow is not None:
                shadow.replicated = replicated
        self.bounds = np.array(self.starts, np.uint64), np.array([r.end for r in regions], np.uint64)
        # instruction and size -> the region that it accessed last
        self.near: dict[tuple[int, int], _Near] = {}
        self.spots: dict[tuple[int, int], Any] = {}  # register and size -> see instructions/quick.py

    def place(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str
    ) -> tuple[Array, list[Part]]:
        if count_nonzero(addresses & LOW[size]):
            self.check_aligned(m, lanes, addresses, size, verb)
        at = addresses.view(np.int64)
        near, inside = self.nearest(m.pc, size, addresses)
        if inside is not None and near.region is not None:
            positions = (
                inside.view(np.int64) + near.region.offset if near.region.offset else inside.view(np.int64)
            )
            parts = [Part(near.region, near.shadow, each(positions, lanes), lanes)]
        else:
            at = each(at, lanes)
            parts = []
            for i, some in self._rows(m, lanes, each(addresses, lanes), size, verb).items():
                parts.append(
                    Part(
                        self.regions[i], self.shadows[i], at[some] - self.regions[i].origin, lanes[some], some
                    )
                )
        for part in parts:
            if part.region.inside is not None:
                self._check_inside(m, part, size, verb)
            if verb != "reads" and not part.region.writable:
                where = self.describe(part.region, int(part.at.min()))
                raise m.fault(OutOfBounds, lanes[0], f"{verb} {where}, which is constant memory")
        return at, parts

    def nearest(self, pc: int, size: int, addresses: Array) -> "tuple[_Near, Array | None]":
        """The region in which all accesses of an instruction lie, which it remembers, and their offsets; None
        if they lie in none."""
        near = self.near.get((pc, size), _NOWHERE)
        inside = addresses - near.start
        # perhaps all lanes are in another region now
        if near is _NOWHERE or count_nonzero(inside > near.room):
            i = bisect.bisect_right(self.starts, int(addresses[0])) - 1
            room = self.regions[i].end - self.starts[i] - size if i >= 0 else -1
            if room < 0:
                return _NOWHERE, None
            near = _Near(
                self.regions[i],
                self.shadows[i],
                np.array(self.starts[i], np.uint64),
                np.array(room, np.uint64),
            )
            self.near[pc, size] = near
            inside = addresses - near.start
            if count_nonzero(inside > near.room):
                return _NOWHERE, None
        return near, inside

    def load(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, strong: bool = False,
        poison: bool = False, flags: int | None = 0,
    ) -> Array:  # fmt: skip
        if len(addresses) == 1 and len(lanes) > 1:
            i = bisect.bisect_right(self.starts, int(addresses[0])) - 1
            shadow = self.shadows[i] if i >= 0 else None
            # only read so far: a lane stands for its warp
            if shadow is None or (shadow.writers is None and shadow.before is None):
                some = np.append(lanes[::32], lanes[-1]) if lanes is m.order.every else lanes
                return super().load(m, some, addresses, size, strong)[:1]
        return super().load(m, lanes, addresses, size, strong, poison, flags)

    def _check_inside(self, m: Accessor, part: Part, size: int, verb: str) -> None:
        """An access to a view must not reach the memory between its rows."""
        assert part.region.inside is not None
        outside = ~np.asarray(
            part.region.inside[(part.at - part.region.offset)[:, None] + np.arange(size)].all(axis=1)
        )
        if outside.any():
            row = first_row(outside)
            where = self.describe(part.region, int(part.at[row]))
            what = f"{verb} {size} bytes of global memory, {where},"
            what += " which is between the rows or columns of a view"
            raise m.fault(OutOfBounds, part.lanes[row], what, None, part.lanes[outside])

    def text(self, address: int) -> str:
        """A string in the module's memory, for a message."""
        end = next((r.end for r in self.regions if r.start <= address < r.end), None)
        if end is None:
            return "?"
        return (
            bytes(self.arrays[1][address - self.first : end - self.first])
            .split(b"\0")[0]
            .decode(errors="replace")
        )

    def _rows(self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str) -> dict[int, Array]:
        """The rows of an access to several regions, by region. Raises OutOfBounds for the first lane outside
        all regions."""
        starts, ends = self.bounds
        which = np.searchsorted(starts, addresses, side="right") - 1
        inside = which >= 0
        if len(ends):
            inside &= (addresses <= ends[which] - np.uint64(size)) & (
                ends[which] - starts[which] >= np.uint64(size)
            )
        if not inside.all():
            row = first_row(~inside)
            what = f"{verb} {size} bytes of global memory {self._distance(int(addresses[row]), size)}"
            raise m.fault(OutOfBounds, lanes[row], what, None, lanes[~inside])
        return {int(i): np.flatnonzero(which == i) for i in np.unique(which)}

    def _distance(self, address: int, size: int) -> str:
        if address < 4096:
            return f"through a null pointer (address {address})"

        def distance(region: Region) -> int:
            return region.start - address if address < region.start else address + size - region.end

        region = min(self.regions, key=distance, default=None)
        if region is None or distance(region) > 1 << 30:
            return f"at {address:#x}, which belongs to no argument"
        length = region.end - region.start
        if address < region.start:
            return (
                f"{region.start - address} bytes before the start of {region.name}, which has {length} bytes"
            )
        if address >= region.end:
            return f"{address - region.end} bytes after the end of {region.name}, which has {length} bytes"
        return f"across the end of {region.name}, which has {length} bytes"

    def describe(self, region: Region, position: int) -> str:
        return f"byte {position - region.offset} of {region.name}"

    def finish(self) -> None:
        """Record in the regions what the launch has written, for the next launch."""
        for region, shadow in zip(self.regions, self.shadows, strict=True):
            written = shadow.written() if shadow is not None else None
            if region.written is not None and written is not None:
                region.written |= written[: len(region.written)]
