"""Which maker decodes which instruction; the rest is the ALU's. Makers in JUMPS give steps that send their lanes on by themselves."""

from cukern.sim import access, atomics, collective, copies, decode

STEPS: dict[str, decode.Maker] = {
    "mov": decode.move,
    "cvta": decode.convert_address,
    "isspacep": decode.is_space,
    "ld": access.load,
    "ldu": access.load,
    "st": access.store,
    "atom": atomics.atomic,
    "red": atomics.atomic,
    "cp": copies.copy,
    "fence": access.fence,
    "membar": access.fence,
    "activemask": collective.active_mask,
    "prefetch": decode.nothing,
    "prefetchu": decode.nothing,
    "nanosleep": decode.nothing,
    "pmevent": decode.nothing,
}
JUMPS: dict[str, decode.Maker] = {
    "bra": decode.branch,
    "brx": decode.branch_indexed,
    "ret": decode.leave,
    "exit": decode.leave,
    "trap": decode.trap,
    "brkpt": decode.trap,
    "call": decode.call,
    "bar": collective.barrier,
    "barrier": collective.barrier,
    "shfl": collective.shuffle,
    "vote": collective.vote,
    "match": collective.match,
    "redux": collective.reduce_,
    "elect": collective.elect,
    "mma": collective.mma,
    "ldmatrix": collective.load_matrix,
}
