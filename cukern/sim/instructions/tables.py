"""Which maker decodes which instruction; the rest is the ALU's. Makers in JUMPS give steps that send their lanes on by themselves."""

from cukern.sim.instructions import access, arithmetic, atomics, copies, decode, jumps, matrix, warp
from cukern.sim.machine import barriers, clusters, mbarriers

STEPS: dict[str, decode.Maker] = {
    "mov": arithmetic.move,
    "createpolicy": arithmetic.create_policy,
    "cvta": arithmetic.convert_address,
    "isspacep": arithmetic.is_space,
    "mapa": clusters.map_address,
    "getctarank": clusters.rank_of_address,
    "ld": access.load,
    "ldu": access.load,
    "st": access.store,
    "atom": atomics.atomic,
    "red": atomics.atomic,
    "cp": copies.copy,
    "fence": access.fence,
    "membar": access.fence,
    "activemask": warp.active_mask,
    "prefetch": access.nothing,
    "prefetchu": access.nothing,
    "nanosleep": access.nothing,
    "griddepcontrol": access.nothing,
    "pmevent": access.nothing,
    "setmaxnreg": access.nothing,
}
ALU: decode.Maker = arithmetic.arithmetic
JUMPS: dict[str, decode.Maker] = {
    "bra": jumps.branch,
    "brx": jumps.branch_indexed,
    "ret": jumps.leave,
    "exit": jumps.leave,
    "trap": jumps.trap,
    "brkpt": jumps.trap,
    "call": jumps.call,
    "bar": barriers.barrier,
    "barrier": barriers.barrier,
    "mbarrier": mbarriers.mbarrier,
    "st.async": mbarriers.store_async,
    "shfl": warp.shuffle,
    "vote": warp.vote,
    "match": warp.match,
    "redux": warp.reduce_,
    "elect": warp.elect,
    "mma": matrix.mma,
    "ldmatrix": matrix.load_matrix,
    "wgmma": matrix.warpgroup,
}
