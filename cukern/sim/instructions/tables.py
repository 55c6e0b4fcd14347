"""The maker that decodes each instruction."""

from cukern.sim.instructions import access, addresses, arithmetic, atomics, barriers, bulk, calls, copies, matrix, warp, wmma
from cukern.sim.instructions.decode import Maker, Table

_STEPS: dict[str, Maker] = {
    "mov": arithmetic.move,
    "createpolicy": arithmetic.create_policy,
    "cvta": addresses.convert_address,
    "isspacep": addresses.is_space,
    "mapa": addresses.map_address,
    "getctarank": addresses.rank_of_address,
    "ld": access.load,
    "ldu": access.load,
    "st": access.store,
    "atom": atomics.atomic,
    "red": atomics.atomic,
    "cp": copies.copy,
    "fence": access.fence,
    "membar": access.fence,
    "activemask": warp.active_mask,
    **dict.fromkeys(("prefetch", "prefetchu", "nanosleep", "griddepcontrol", "pmevent", "setmaxnreg", "applypriority"), access.nothing),
}
_JUMPS: dict[str, Maker] = {
    "bra": calls.branch,
    "brx": calls.branch_indexed,
    "ret": calls.leave,
    "exit": calls.leave,
    "trap": calls.trap,
    "brkpt": calls.trap,
    "call": calls.call,
    "bar": barriers.barrier,
    "barrier": barriers.barrier,
    "mbarrier": barriers.mbarrier,
    "st.async": barriers.store_async,
    "cp.async.bulk": bulk.copy,
    "cp.async.mbarrier": barriers.copies_arrive,
    "cp.reduce.async": bulk.copy,
    "shfl": warp.shuffle,
    "vote": warp.vote,
    "match": warp.match,
    "redux": warp.reduce_,
    "elect": warp.elect,
    "mma": matrix.mma,
    "ldmatrix": matrix.load_matrix,
    "stmatrix": matrix.store_matrix,
    "movmatrix": matrix.move_matrix,
    "wgmma": matrix.warpgroup,
    "wmma.load": wmma.load,
    "wmma.store": wmma.store,
    "wmma.mma": wmma.multiply,
}
INSTRUCTIONS = Table(_STEPS, _JUMPS, other=arithmetic.arithmetic)
