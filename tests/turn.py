"""A toy op with every feature of the registry: two outputs, in place, constants, integer inputs, and
magnitudes of its own."""

import torch

from cukern.runtime.registry import Case, Cost, Op


def turned(x, cos, sin):
    """Each pair (a, b) of x turned by its angle."""
    a, b = x.unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1)


class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, at):
        ctx.mark_dirty(q, k)
        ctx.save_for_backward(cos[at], sin[at])
        return q.copy_(turned(q, cos[at], sin[at])), k.copy_(turned(k, cos[at], sin[at]))

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return turned(dq, cos, -sin), turned(dk, cos, -sin), None, None, None


def function(*inputs, version=None):
    return Turn.apply(*inputs)


def reference(q, k, cos, sin, at):
    return turned(q, cos[at], sin[at]), turned(k, cos[at], sin[at])


def magnitude(inputs, douts):
    """a cos - b sin rounds relative to |a cos| + |b sin|."""
    cos, sin = (x[inputs[4]].abs()[:, None] for x in inputs[2:4])
    return tuple(x.abs() * cos + x.abs().flip(-1) * sin for x in (*inputs[:2], *douts))


def make(dims, dtype, device):
    (n,) = dims
    angles = torch.rand(2 * n, device=device) * 6
    at = torch.randint(2 * n, (n,), device=device)
    return (
        *torch.randn(2, n, 2, dtype=dtype, device=device),
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        at,
    )


TURN = Case(
    name="turn",
    op=Op("turn", "turn", {}, (torch.float32, torch.bfloat16, torch.float64)),
    call=function,
    reference=reference,
    dims="N",
    check_dims=((100,),),
    sim_dims=((100,),),
    bench_dims=((1000,),),
    make=make,
    inputs=("q", "k", "cos", "sin", "at"),
    cost=lambda dims, itemsize: dict.fromkeys(
        ("fwd", "bwd", "bwd:q"), Cost(8 * dims[0] * itemsize, 12 * dims[0])
    ),
    magnitude=magnitude,
    constants=("cos", "sin"),
    in_place=("q", "k"),
)
