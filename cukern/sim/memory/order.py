"""The happens-before relation between the memory accesses of a launch. Two accesses that it does not order
may race.

Time counts the memory instructions of the launch. A stamp records an access: its time, its lane, whether it
is strong (an atomic), and whether it is an asynchronous copy still in flight, or a read by a whole warpgroup
(wgmma), which any of its four warps may report to others. A lane knows its own accesses, those of its block
before the last barrier, and those of its warp before the last `__syncwarp()`; a named barrier tells it all
that the participating warps knew. Shuffles and votes order nothing.

A .release atomic in shared memory tells what its warp knows to those who .acquire at the same address,
whatever atomics come between; so does an arrival at an mbarrier, hence a missing `__syncwarp()` before it is
not seen. A cluster barrier and mbarriers order the blocks of a cluster. Other blocks are ordered by strong
accesses (atomics, volatile and the like) with fences, see between_blocks.py."""

from typing import Any

import numpy as np

from cukern.sim.memory.between_blocks import Releases
from cukern.sim.numerics.integers import Array

IN_FLIGHT = 1 << 62
STRONG = 1
TIME_BITS = 29
WARPGROUP = 1 << TIME_BITS - 1
_LANES = (1 << TIME_BITS - 2) - 1
# the bits of a stamp that name its lane. numpy is quickest with constants that have no dimensions.
BY_LANE = np.array(_LANES << 1)
_FOREIGN = BY_LANE | np.array(IN_FLIGHT)


class Clock:
    """The time of one launch, and what its blocks know of each other by strong accesses."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.pcs: list[int] = [0]  # time -> the instruction that accessed memory
        self.looked = False  # True after a strong load, until the scheduler resets it
        self.releases = Releases()

    @property
    def now(self) -> int:
        return len(self.pcs) - 1

    def tick(self, pc: int) -> None:
        self.pcs.append(pc)


class Order:
    """What each lane of a batch knows about the accesses of others."""

    def __init__(self, clock: Clock, first_block: int, blocks: int, warps: int, blocks_a_cluster: int):
        self.clock = clock
        self.first_block = first_block
        self.blocks = blocks
        self.warps_a_block = warps
        self.blocks_a_cluster = blocks_a_cluster
        self.warps_a_cluster = blocks_a_cluster * warps
        self.lanes_a_block = warps * 32
        self.lanes = blocks * self.lanes_a_block
        self.base = first_block * self.lanes_a_block
        self.every = np.arange(self.lanes)
        self.own = (self.every + self.base) * 2  # the bits of a stamp that name its lane
        self.block_of = self.every // self.lanes_a_block
        self.warp_of = self.every // 32
        self.cluster_of = self.block_of // blocks_a_cluster
        # known[w, v]: warp w of the batch knows what warp v of its cluster did before this time
        self.known = np.zeros((blocks * warps, self.warps_a_cluster), np.int64)
        # a lane knows every access of its cluster with a lower stamp
        self.floor = np.zeros(self.lanes, np.int64)
        self.lowest: int | None = None  # the least floor, if it is known
        # [lane, lane of its warp]: times; after a __syncwarp of part of a warp
        self.lane_known: Array | None = None
        self.fenced = np.zeros(self.lanes, np.int64)  # time of a lane's last fence
        self.proxy_fenced = self.fenced.copy()  # time of a lane's last fence.proxy.async
        self.fence_knew: Array | None = None  # `known` of a warp at its last fence
        # by warp: what it knows of other blocks, as a number of Releases
        self.learned = np.zeros(blocks * warps, np.int64)
        self.seen = self.learned.copy()  # by warp: what it will know of other blocks after a fence
        # position in shared memory -> what was known to the warps that released there
        self.released: dict[int, Array] = {}

    # ---- stamps

    def stamps(self, lanes: Array, flags: int = 0) -> Array:
        return self.own_of(lanes) + np.array(self.clock.now << TIME_BITS | flags)

    def own_of(self, lanes: Array) -> Array:
        """The bits of a stamp that name these lanes."""
        return self.own if lanes is self.every else self.own[lanes]

    @property
    def lowest_floor(self) -> int:
        """All lanes know every access of their cluster with a lower stamp."""
        if self.lowest is None:
            self.lowest = int(self.floor.min())
        return self.lowest

    def unpack(self, stamp: int) -> tuple[int, int]:
        """The lane (numbered through the launch) and the instruction of a stamp."""
        stamp = int(stamp) & ~IN_FLIGHT
        return (stamp >> 1) & _LANES, self.clock.pcs[stamp >> TIME_BITS]

    def by_lane(self, stamps: Array) -> Array:
        return (stamps >> 1) & _LANES

    def by_block(self, stamps: Any) -> Any:
        return self.by_lane(stamps) // self.lanes_a_block

    def foreign(self, stamps: Array, lanes: Array) -> Array:
        """Not 0 for the accesses of other lanes, and for those in flight."""
        return (stamps ^ self.own_of(lanes)) & _FOREIGN

    def ordered(self, stamps: Array, lanes: Array) -> Array:
        """For each stamp: True if that access happened before the current access of the lane in `lanes`."""
        in_flight = (stamps & IN_FLIGHT) != 0
        times = stamps >> TIME_BITS
        lane = self.by_lane(stamps) - self.base
        inside = (lane >= 0) & (lane < self.lanes)
        lane = np.where(inside, lane, 0)
        known = times < self.known[self.warp_of[lanes], self.warp_of[lane] % self.warps_a_cluster]
        if self.lane_known is not None:
            known |= (self.warp_of[lane] == self.warp_of[lanes]) & (times < self.lane_known[lanes, lane % 32])
        of_warpgroups = np.flatnonzero(stamps & WARPGROUP)
        if len(of_warpgroups):
            warps = self.warp_of[lane[of_warpgroups]]
            mine = self.warp_of[lanes[of_warpgroups]]
            first = warps % self.warps_a_cluster - warps % self.warps_a_block % 4
            for i in range(4):
                known[of_warpgroups] |= (
                    times[of_warpgroups] < self.known[mine, np.minimum(first + i, self.warps_a_cluster - 1)]
                )
            known[of_warpgroups] |= self.warpgroup_of(warps) == self.warpgroup_of(mine)
        result = inside & (self.cluster_of[lane] == self.cluster_of[lanes]) & (known | (lane == lanes))
        if self.learned.any():
            result |= self._released(stamps, lanes)
        return result & ~in_flight

    def _released(self, stamps: Array, lanes: Array) -> Array:
        """For each stamp: True if its block has released it, and the warp of the lane in `lanes` knows of
        that."""
        times = (stamps & ~IN_FLIGHT) >> TIME_BITS
        lane = self.by_lane(stamps)
        writer, offset = np.divmod(lane, self.lanes_a_block * self.blocks_a_cluster)
        pairs, which = np.unique(
            np.stack((writer, self.learned[self.warp_of[lanes]])), axis=1, return_inverse=True
        )
        result = np.zeros(len(stamps), bool)
        for i, (cluster, knowledge) in enumerate(pairs.T.tolist()):
            until = self.clock.releases.until(cluster, knowledge)
            if until is not None:
                rows = np.flatnonzero(which.reshape(-1) == i)
                result[rows] = times[rows] < until[stamps[rows] & STRONG, offset[rows]]
        return result

    def warpgroup_of(self, warps: Array) -> Array:
        """The number of the first warp of the warpgroup of each warp."""
        return warps - warps % self.warps_a_block % 4

    # ---- what establishes order

    def barrier(self, blocks: Array) -> None:
        """All threads of these blocks have met at a barrier."""
        now = self.clock.now + 1
        warps = self.warps_a_block
        if self.blocks_a_cluster == 1 and len(blocks) == self.blocks:
            self.known[:] = now
            self.lowest = now << TIME_BITS
            self.floor[:] = self.lowest
            self._share_in_blocks(blocks)
            return
        if self.blocks_a_cluster == 1:
            self.known.reshape(self.blocks, -1)[blocks] = now
            self.floor.reshape(self.blocks, -1)[blocks] = now << TIME_BITS
            self.lowest = None
            self._share_in_blocks(blocks)
            return
        self._share_in_blocks(blocks)
        for block in blocks:  # all warps of the block learn what one of them knew about the cluster
            mine = np.arange(block * warps, (block + 1) * warps)
            own = block % self.blocks_a_cluster * warps
            knowledge = self.known[mine].max(axis=0)
            knowledge[own : own + warps] = now
            self.learn(mine, knowledge)

    def knowledge(self, warp: int) -> Array:
        """What a warp knows now, including its own accesses."""
        known = self.known[warp].copy()
        known[warp % self.warps_a_cluster] = self.clock.now + 1
        return known

    def learn(self, warps: Array, knowledge: Array) -> None:
        """These warps know at least `knowledge` from now on: one row for all, or one row each."""
        self.known[warps] = np.maximum(self.known[warps], knowledge)
        self._lower_floor(warps)
        if self.learned.any():
            self._share(np.unique(warps // self.warps_a_cluster), self.warps_a_cluster)

    def _share_in_blocks(self, blocks: Array) -> None:
        if self.learned.any():
            self._share(blocks, self.warps_a_block)

    def _share(self, groups: Array, warps: int) -> None:
        """All warps of each group, of that many warps, learn what one of them knows of other blocks."""
        for group in groups.tolist():
            row = slice(group * warps, (group + 1) * warps)
            if (self.learned[row] != self.learned[row.start]).any():
                self.learned[row] = self.clock.releases.joined(self.learned[row].tolist())

    def sync_warps(self, warps: Array) -> None:
        """All lanes of these warps have met at a __syncwarp."""
        self.known[warps, warps % self.warps_a_cluster] = self.clock.now + 1
        if self.warps_a_cluster == 1:
            self._lower_floor(warps)

    def sync_lanes(self, lanes: Array) -> None:
        """These lanes of one warp have met at a __syncwarp."""
        if self.lane_known is None:
            self.lane_known = np.zeros((self.lanes, 32), np.int64)
        knowledge = self.lane_known[lanes].max(axis=0)
        knowledge[lanes % 32] = self.clock.now + 1
        self.lane_known[lanes] = knowledge

    def _lower_floor(self, warps: Array) -> None:
        self.floor.reshape(-1, 32)[warps] = (self.known[warps].min(axis=1) << TIME_BITS)[:, None]
        self.lowest = None

    def release_shared(self, lanes: Array, positions: Array) -> None:
        """These lanes execute a .release atomic in shared memory."""
        for position in np.unique(positions).tolist():
            for warp in np.unique(self.warp_of[lanes[positions == position]]).tolist():
                self.released[position] = np.maximum(self.released.get(position, 0), self.knowledge(warp))

    def acquire_shared(self, lanes: Array, positions: Array) -> None:
        """These lanes execute an .acquire load or atomic in shared memory."""
        for position in set(np.unique(positions).tolist()) & self.released.keys():
            self.learn(np.unique(self.warp_of[lanes[positions == position]]), self.released[position])

    # ---- between blocks

    def fence(self, lanes: Array) -> None:
        self.fenced[lanes] = self.clock.now + 1
        warps = np.unique(self.warp_of[lanes])
        if self.fence_knew is None:
            self.fence_knew = np.zeros_like(self.known)
        self.fence_knew[warps] = self.known[warps]
        if self.seen[warps].any():
            for warp in warps.tolist():
                self.learned[warp] = self.clock.releases.joined(
                    [int(self.learned[warp]), int(self.seen[warp])]
                )

    def publish(self, lanes: Array, addresses: Array, releases: bool = False) -> None:
        """These lanes execute a strong store to global memory."""
        if releases:
            self.fence(lanes)
        if self.fence_knew is None:
            return
        addresses = np.broadcast_to(addresses, lanes.shape)
        for warp in np.unique(self.warp_of[lanes]).tolist():
            rows = self.warp_of[lanes] == warp
            until = self._published(warp, lanes[rows])
            if until.any():
                cluster = (self.first_block + warp // self.warps_a_block) // self.blocks_a_cluster
                self.clock.releases.add(
                    cluster, set(addresses[rows].tolist()), until, int(self.learned[warp])
                )

    def _published(self, warp: int, lanes: Array) -> Array:
        """A time for each lane of the cluster: its earlier accesses are ordered before what these lanes of
        the warp store now: the accesses that the lanes knew at their last fence, and those that they know now
        if the accessing lane had a fence afterwards. Row 0: plain accesses; row 1: strong accesses, to which
        the store itself belongs."""
        assert self.fence_knew is not None
        first = warp // self.warps_a_cluster * self.warps_a_cluster * 32
        own = warp % self.warps_a_cluster * 32
        knows = np.repeat(self.known[warp], 32)
        if self.lane_known is not None:
            knows[own : own + 32] = np.maximum(knows[own : own + 32], self.lane_known[lanes].max(axis=0))
        knows[lanes - first] = self.clock.now + 1
        until = np.minimum(knows, self.fenced[first : first + len(knows)])
        if self.fenced[lanes].any():
            until = np.maximum(until, np.repeat(self.fence_knew[warp], 32))
        strong = until.copy()
        strong[lanes[self.fenced[lanes] > 0] - first] = self.clock.now + 1
        return np.stack((until, strong))

    def exchange(self, lanes: Array, addresses: Array, releases: bool, acquires: Array) -> None:
        """These lanes execute an atomic in global memory, one warp after the other: each sees what those
        before it have released, after a fence or if one of its lanes `acquires`."""
        if releases:
            self.fence(lanes)
        if self.fence_knew is None and not self.clock.releases.any:
            self.clock.looked = True
            return
        for warp in np.unique(self.warp_of[lanes]).tolist():
            rows = self.warp_of[lanes] == warp
            self.publish(lanes[rows], addresses[rows])
            self.observe(lanes[rows], addresses[rows], bool(acquires[rows].any()))

    def observe(self, lanes: Array, addresses: Array, acquires: bool) -> None:
        """These lanes execute a strong load from global memory."""
        releases = self.clock.releases
        self.clock.looked = True
        if not releases.any:
            return
        addresses = np.broadcast_to(addresses, lanes.shape)
        warps = self.warp_of[lanes]
        for warp in np.unique(warps).tolist():
            saw = [releases.at(address) for address in set(addresses[warps == warp].tolist())]
            for knowledge in (self.seen, self.learned) if acquires else (self.seen,):
                knowledge[warp] = releases.joined([int(knowledge[warp]), *saw])
