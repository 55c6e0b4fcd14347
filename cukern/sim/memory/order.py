"""The happens-before relation between the memory accesses of a launch. Two accesses that it does not order may race.

Time counts the memory instructions of the launch. A stamp records an access: its time, its lane, whether it is strong (an atomic), and
whether it is an asynchronous copy still in flight. A lane knows its own accesses, those of its block before the last barrier, and those of
its warp before the last `__syncwarp()`; a named barrier tells it all that the participating warps knew. Shuffles and votes order nothing.

A cluster barrier and mbarriers (machine/asynchronous.py) order the blocks of a cluster. Other blocks are ordered only by strong accesses
(atomics, volatile and the like) with fences: a block accesses memory, executes a fence, then a strong store; every block that later
executes a strong load and then a fence knows of the access. An atomic is both a strong load and a strong store, and needs no fence after
it; st.release and ld.acquire include the fence. Neither the addresses of the strong accesses nor the fencing threads are compared. So some
races between blocks are missed, but correct kernels are not accused, such as those in which a block waits for the flag of another.
"""

from typing import Any

import numpy as np

IN_FLIGHT = 1 << 62
STRONG = 1
TIME_BITS = 28
_LANES = (1 << TIME_BITS - 1) - 1


class Clock:
    """The time of one launch, and what its blocks have released and acquired by strong accesses."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.pcs: list[int] = [0]  # time -> the instruction that accessed memory
        self.looked = False  # True after a strong load, until the scheduler resets it
        self.ordering = False  # True after the first strong store
        self.released = np.zeros(blocks, np.int64)  # by block: time of the last fence that a strong store followed
        self.acquired = np.zeros(blocks, np.int64)  # by block: time of the last strong load that a fence followed

    @property
    def now(self) -> int:
        return len(self.pcs) - 1

    def tick(self, pc: int) -> None:
        self.pcs.append(pc)


class Order:
    """What each lane of a batch knows about the accesses of others."""

    def __init__(self, clock: Clock, first_block: int, blocks: int, warps: int, blocks_a_cluster: int):
        self.clock, self.first_block, self.blocks, self.warps_a_block = clock, first_block, blocks, warps
        self.blocks_a_cluster, self.warps_a_cluster = blocks_a_cluster, blocks_a_cluster * warps
        self.lanes_a_block = warps * 32
        self.lanes = blocks * self.lanes_a_block
        self.base = first_block * self.lanes_a_block
        self.block_of = np.arange(self.lanes) // self.lanes_a_block
        self.warp_of = np.arange(self.lanes) // 32
        self.cluster_of = self.block_of // blocks_a_cluster
        # known[w, v]: warp w of the batch knows what warp v of its cluster did before this time
        self.known = np.zeros((blocks * warps, self.warps_a_cluster), np.int64)
        self.floor = np.zeros(self.lanes, np.int64)  # a lane knows every access of its cluster with a lower stamp
        self.lane_known: np.ndarray | None = None  # [lane, lane of its warp]: times; after a __syncwarp of part of a warp
        self.fenced = np.zeros(blocks, np.int64)
        self.seen = np.zeros(blocks, np.int64)  # the last strong load

    # ---- stamps

    def stamps(self, lanes: np.ndarray, flags: int = 0) -> np.ndarray:
        return (lanes + self.base) * 2 + (self.clock.now << TIME_BITS | flags)

    def unpack(self, stamp: int) -> tuple[int, int]:
        """The lane (numbered through the launch) and the instruction of a stamp."""
        stamp = int(stamp) & ~IN_FLIGHT
        return (stamp >> 1) & _LANES, self.clock.pcs[stamp >> TIME_BITS]

    def by_lane(self, stamps: np.ndarray) -> np.ndarray:
        return (stamps >> 1) & _LANES

    def by_block(self, stamps: Any) -> Any:
        return self.by_lane(stamps) // self.lanes_a_block

    def ordered(self, stamps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """For each stamp: True if that access happened before the current access of the lane in `lanes`."""
        flying = (stamps & IN_FLIGHT) != 0
        times = stamps >> TIME_BITS
        lane = self.by_lane(stamps) - self.base
        inside = (lane >= 0) & (lane < self.lanes)
        lane = np.where(inside, lane, 0)
        known = times < self.known[self.warp_of[lanes], self.warp_of[lane] % self.warps_a_cluster]
        if self.lane_known is not None:
            known |= (self.warp_of[lane] == self.warp_of[lanes]) & (times < self.lane_known[lanes, lane % 32])
        result = inside & (self.cluster_of[lane] == self.cluster_of[lanes]) & (known | (lane == lanes))
        clock = self.clock
        if clock.ordering:
            writer = np.minimum(self.by_block(stamps), clock.blocks - 1)
            result |= (times < clock.released[writer]) & (times < clock.acquired[self.block_of[lanes] + self.first_block])
        return result & ~flying

    # ---- what establishes order

    def barrier(self, blocks: np.ndarray) -> None:
        """All threads of these blocks have met at a barrier."""
        now, warps = self.clock.now + 1, self.warps_a_block
        if self.blocks_a_cluster == 1:
            self.known.reshape(self.blocks, -1)[blocks] = now
            self.floor.reshape(self.blocks, -1)[blocks] = now << TIME_BITS
            return
        for block in blocks:  # all warps of the block learn what one of them knew about the cluster
            mine, own = np.arange(block * warps, (block + 1) * warps), block % self.blocks_a_cluster * warps
            told = self.known[mine].max(axis=0)
            told[own : own + warps] = now
            self.learn(mine, told)

    def knowledge(self, warp: int) -> np.ndarray:
        """What a warp knows now, including its own accesses."""
        told = self.known[warp].copy()
        told[warp % self.warps_a_cluster] = self.clock.now + 1
        return told

    def learn(self, warps: np.ndarray, told: np.ndarray) -> None:
        """These warps learn `told`: one row for all, or one row each."""
        self.known[warps] = np.maximum(self.known[warps], told)
        self._lower_floor(warps)

    def sync_warps(self, warps: np.ndarray) -> None:
        """All lanes of these warps have met at a __syncwarp."""
        self.known[warps, warps % self.warps_a_cluster] = self.clock.now + 1
        if self.warps_a_cluster == 1:
            self._lower_floor(warps)

    def sync_lanes(self, lanes: np.ndarray) -> None:
        """These lanes of one warp have met at a __syncwarp."""
        if self.lane_known is None:
            self.lane_known = np.zeros((self.lanes, 32), np.int64)
        told = self.lane_known[lanes].max(axis=0)
        told[lanes % 32] = self.clock.now + 1
        self.lane_known[lanes] = told

    def _lower_floor(self, warps: np.ndarray) -> None:
        self.floor.reshape(-1, 32)[warps] = (self.known[warps].min(axis=1) << TIME_BITS)[:, None]

    # ---- between blocks

    def fence(self, lanes: np.ndarray) -> None:
        blocks = np.unique(self.block_of[lanes])
        self.fenced[blocks] = self.clock.now + 1
        there = blocks + self.first_block
        self.clock.acquired[there] = np.maximum(self.clock.acquired[there], self.seen[blocks])

    def publish(self, lanes: np.ndarray, releases: bool = False) -> None:
        """These lanes execute a strong store to global memory."""
        if releases:
            self.fence(lanes)
        blocks = self.block_of[lanes]
        self.clock.ordering = True
        self.clock.released[blocks + self.first_block] = self.fenced[blocks]

    def observe(self, lanes: np.ndarray, acquires: bool) -> None:
        """These lanes execute a strong load from global memory."""
        blocks = self.block_of[lanes]
        self.seen[blocks] = self.clock.now
        self.clock.looked = True
        if acquires:
            self.clock.acquired[blocks + self.first_block] = self.clock.now
