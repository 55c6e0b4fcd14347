"""Thread block clusters: the barrier of a cluster, and the distributed shared memory that its blocks access.

A block may access the memory of another block of its cluster only after a cluster barrier shows that the
other has started. The other must not exit before it knows of the access: through barrier.cluster, or because
its strong read saw the strong write. Strong accesses with .cluster do not race. Only barrier.cluster and
mbarriers order other accesses. PTX ISA, barrier.cluster and mapa."""

import numpy as np

from cukern.sim.faults import BarrierFault, Fault, OutOfBounds, Race
from cukern.sim.machine.batch import Batch, Group
from cukern.sim.memory.spaces import RANK, Accessor, Array, Part, Region, Space, each, first_row

_NOT_STARTED = "which may not have started yet: no cluster barrier is before the access"
# offsets start at -_HALF: an address below the start still belongs to the block it was computed from
_HALF = 1 << RANK - 1


class Clusters:
    """The lanes that have arrived at the cluster barrier and those that wait there, in all clusters of the
    batch. Unlike a GPU, the simulator waits for threads that exit without having arrived, as it does at a
    block's barrier."""

    def __init__(self, m: Batch):
        self.m = m
        self.count = m.blocks // m.order.blocks_a_cluster
        self.arrived = np.zeros(m.lanes, bool)  # since the barrier last opened
        self.must_wait = np.zeros(m.lanes, bool)  # has arrived and must wait next
        # the barrier tells other lanes of this lane's accesses before this time
        self.since = np.zeros(m.lanes, np.int64)
        self.arrived_at = np.full(m.lanes, -1)  # the instruction, if it is .aligned
        self.waits = np.zeros(m.lanes, bool)
        # what the arrived warps knew of other warps
        self.told = np.zeros((self.count, m.order.warps_a_cluster), np.int64)
        self.learned = self.told.copy()  # what waiting warps learn: `told` when the barrier last opened
        # blocks that have waited: they know that their neighbours have started
        self.has_synced = np.zeros(m.blocks, bool)
        self.exited = np.zeros(m.blocks, bool)

    def arrive(self, group: Group, releases: bool, aligned: bool) -> None:
        m, lanes, order = self.m, group.lanes, self.m.order
        if self.must_wait[lanes].any():
            lane = lanes[self.must_wait[lanes]][0]
            raise m.fault(
                BarrierFault,
                lane,
                "arrives at the cluster barrier again, and has not waited since it arrived there",
            )
        self.must_wait[lanes] = self.arrived[lanes] = True
        self.arrived_at[lanes] = m.pc if aligned else -1
        self.since[lanes] = (
            order.clock.now + 1
            if releases
            else order.fenced.reshape(m.blocks, -1).max(axis=1)[order.block_of[lanes]]
        )
        warps = np.unique(order.warp_of[lanes[self.since[lanes] > 0]])
        np.maximum.at(self.told, warps // order.warps_a_cluster, order.known[warps])
        m.go(m.pc + 1, group)
        self._open()

    def wait(self, group: Group) -> None:
        m, lanes = self.m, group.lanes
        if not self.must_wait[lanes].all():
            raise m.fault(
                BarrierFault,
                lanes[~self.must_wait[lanes]][0],
                "waits at the cluster barrier, at which it has not arrived",
            )
        m.waits_at[lanes], self.waits[lanes] = m.pc, True
        self._pass(lanes[~self.arrived[lanes]])

    def _open(self) -> None:
        """Open the barrier of each cluster of which all threads have arrived."""
        m, order = self.m, self.m.order
        full = self.arrived.reshape(self.count, -1).sum(axis=1) == m.launched.threads * order.blocks_a_cluster
        if not full.any():
            return
        exists = m.thread_of < m.launched.threads
        self._check_alignment(exists & full[order.cluster_of])
        since = np.where(exists, self.since, np.iinfo(np.int64).max).reshape(-1, 32).min(axis=1)
        self.learned[full] = np.maximum(self.told, since.reshape(self.told.shape))[full]
        self.arrived.reshape(self.count, -1)[full] = False
        self._pass(np.flatnonzero(self.waits & full[order.cluster_of]))

    def _pass(self, lanes: Array) -> None:
        """These lanes, which wait at an open barrier, continue."""
        m, order = self.m, self.m.order
        if not len(lanes):
            return
        warps = np.unique(order.warp_of[lanes])
        order.learn(warps, self.learned[warps // order.warps_a_cluster])
        self.has_synced[order.block_of[lanes]] = True
        self.must_wait[lanes] = self.waits[lanes] = False
        m.resume(lanes)

    def _check_alignment(self, lanes: Array) -> None:
        """An .aligned arrive must be the same instruction for all lanes of a warp."""
        m = self.m
        at = np.where(lanes, self.arrived_at, -1).reshape(-1, 32)
        first = np.broadcast_to(at[:, :1], at.shape)
        apart = np.flatnonzero((at != first) & lanes.reshape(-1, 32))
        if len(apart):
            lane = int(apart[0])
            other = (
                f"thread {m.block_and_thread(lane // 32 * 32)[1]} arrives at "
                f"{m.program.location(int(first.flat[lane]))}"
            )
            what = f"arrives at an .aligned cluster barrier, while of its warp {other}"
            raise m.fault(BarrierFault, lane, what, int(self.arrived_at[lane]))

    def stuck(self) -> Fault:
        """The fault if lanes wait for others that never arrive."""
        m, order = self.m, self.m.order
        lane = first_row(self.waits)
        mine = (order.cluster_of == order.cluster_of[lane]) & (m.thread_of < m.launched.threads)
        missing = first_row(mine & ~self.arrived)
        where = (
            f"block {m.block_and_thread(missing)[0]}, "
            if order.block_of[missing] != order.block_of[lane]
            else ""
        )
        what = (
            f"waits at the cluster barrier for all threads of the cluster, but "
            f"{where}{m.whereabouts(missing)}"
        )
        return m.fault(BarrierFault, lane, what, m.waits_at[lane])

    # ---- blocks that start and exit

    def check_running(self, lanes: Array, owners: Array, where: str, verb: str) -> None:
        """These lanes access the shared memory of these blocks, which must have started, and must not have
        exited."""
        m, order = self.m, self.m.order
        remote = owners != order.block_of[lanes]
        early, late = remote & ~self.has_synced[order.block_of[lanes]], remote & self.exited[owners]
        for bad, why in (
            (late, "which has exited: no cluster barrier after the access keeps it"),
            (early, _NOT_STARTED),
        ):
            if bad.any() and not m.mutes(Race):
                row = first_row(bad)
                block = m.block_index(int(owners[row]) + m.first_block)
                raise m.fault(
                    Race, lanes[row], f"{verb} {where} of the shared memory of block {block}, {why}"
                )

    def lanes_left(self, group: Group) -> None:
        """When the last thread of a block exits, the block must know of all accesses of other blocks to its
        memory."""
        m = self.m
        if m.order.blocks_a_cluster > 1:
            blocks = np.unique(m.order.block_of[group.lanes])
            for block in blocks[~m.alive.reshape(m.blocks, -1)[blocks].any(axis=1)]:
                self.exited[block] = True
                self._check_exit(int(block))

    def _check_exit(self, block: int) -> None:
        m, order, shared = self.m, self.m.order, self.m.shared
        start = block * shared.stride
        for did, granules, stamps in shared.shadow.accesses(order, start, start + shared.stride):
            foreign = order.by_block(stamps) != block + m.first_block
            granules, stamps = granules[foreign], stamps[foreign]
            known = np.zeros(len(stamps), bool)
            for warp in range(block * m.warps, (block + 1) * m.warps):
                known |= order.ordered(stamps, np.full(len(stamps), warp * 32))
            if not known.all() and not m.mutes(Race):
                i = first_row(~known)
                lane, pc = order.unpack(stamps[i])
                where = shared.describe(shared.region, int(granules[i]) << shared.shadow.bits)
                what = (
                    f"{did} {where} of block {m.block_index(block + m.first_block)}, which has exited, or "
                    f"may have, by then"
                )
                raise m.fault(
                    Race, lane - order.base, f"{what}: no cluster barrier after the access keeps it", pc
                )


class Distributed(Space):
    """Distributed shared memory: that of all blocks of the cluster, for shared::cluster and generic
    addresses."""

    name = "shared"

    def __init__(self, m: Batch, clusters: Clusters):
        super().__init__(m.shared.arrays)
        self.m, self.own, self.clusters = m, m.shared, clusters

    def place(
        self, m: Accessor, lanes: Array, addresses: Array, size: int, verb: str
    ) -> tuple[Array, list[Part]]:
        ranks, offsets = split_address(addresses)
        if not ranks.any():
            return self.own.place(m, lanes, offsets, size, verb)
        self.check_aligned(m, lanes, offsets, size, verb)
        ranks, offsets = each(ranks, lanes), each(offsets, lanes)
        own, blocks = m.order.block_of[lanes], m.order.blocks_a_cluster
        if (ranks > blocks).any():
            what = (
                f"{verb} {size} bytes of the shared memory of a block rank that is not in 0..{blocks - 1}, "
                f"the cluster's"
            )
            raise m.fault(OutOfBounds, lanes[first_row(ranks > blocks)], what)
        owners = np.where(ranks > 0, own // blocks * blocks + ranks - 1, own)
        outside = (offsets < 0) | (offsets > self.own.size - size)
        if outside.any():
            row = first_row(outside)
            whose = f"of the shared memory of block {self.m.block_index(int(owners[row]) + m.first_block)}"
            what = (
                f"{verb} {size} bytes at offset {offsets[row]} {whose}, which has {self.own.size} bytes of it"
            )
            raise m.fault(OutOfBounds, lanes[row], what)
        self.clusters.check_running(lanes, owners, f"{size} bytes", verb)
        at = owners * self.own.stride + offsets
        return at, [Part(self.own.region, self.own.shadow, at, lanes)]

    def describe(self, region: Region, position: int) -> str:
        block = self.m.block_index(position // self.own.stride + self.m.first_block)
        return f"{self.own.describe(region, position)} of block {block}"


def split_address(addresses: Array) -> tuple[Array, Array]:
    """The ranks plus 1, and the offsets, of shared::cluster addresses."""
    shifted = (addresses.astype(np.uint64) + np.uint64(_HALF)).view(np.int64)
    return shifted >> RANK & 0xFF, (shifted & (1 << RANK) - 1) - _HALF
