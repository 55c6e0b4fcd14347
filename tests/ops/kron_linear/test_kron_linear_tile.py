"""kron_linear v4: its plans cover every factor and fit a block, and whatever tiling a plan may choose, the
numbers are the same."""

import itertools
from math import prod

import pytest
import torch
from helpers import gpu, kernels, problem, same_bits, simulated
from test_kron_linear import FORWARD_MODE, close, dense, draw, error, launch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import cukern
from cukern.bench import environment
from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear import planner
from cukern.ops.kron_linear import tile as kron_tile
from cukern.ops.kron_linear.plan import MOST, Launch, steps
from cukern.ops.kron_linear.tile import FMA, SPLIT, TENSOR
from cukern.runtime.device import device_of, forget_plans, restricted
from cukern.runtime.launch import backend

LAYERS = (
    ((128, 128),) * 2,
    ((8, 8),) * 5,
    ((64, 64),) * 3,
    ((2, 2),) * 16,
    ((16, 16), (240, 240)),
    ((128, 8), (8, 128)),
    ((3, 5), (7, 2), (1, 1), (12, 28)),
    ((600, 600), (4, 4)),
)


@pytest.mark.parametrize("limit", (226 << 10, 63 << 10))
@pytest.mark.parametrize("itemsize, tensor", ((2, True), (4, False), (8, False)))
def test_plans_cover_every_step_and_fit_a_block(itemsize, tensor, limit):
    for sizes, rows in itertools.product(LAYERS, (1, 33, 4096) if limit > 64 << 10 else (33,)):
        plan = planner.forward(sizes, rows, problem(itemsize, 132, limit, tensor))
        assert [s for g in plan for s in g.steps] == list(steps(sizes))
        for group in plan:
            if not group.threads:
                assert len(group.steps) == 1 or (itemsize == 4 and len(sizes) == 2), (
                    "torch's matmul takes one factor, or a layer of two"
                )
                continue
            assert len(group.steps) <= MOST and all(
                a.factor == b.factor + 1 and a.left == b.left * b.p
                for a, b in itertools.pairwise(group.steps)
            )
            assert group.shared <= limit and 32 <= group.threads <= 1024 and group.blocks >= 1
            if group.kernel != "tile":
                continue
            assert [s for part in group.parts for s in part.factors] == list(group.steps)
            C, numbers = group.steps[0].right, group.L * group.R * prod(s.p for s in group.steps)
            assert C % group.R == 0 and (group.L == 1 or group.R == C) and 0 <= group.plan[7] <= numbers
            for n, part in enumerate(group.parts):
                p = prod(s.p for s in part.factors)
                q = prod(s.q for s in part.factors) // (1 if n else group.slices)
                assert q <= part.padded < q + part.wide and part.padded % part.wide == 0
                fibers = part.fibers * part.lanes
                assert -(-numbers // p // fibers) * (part.padded // part.wide) * 32 <= group.threads, (
                    "each warp has one piece of work"
                )
                numbers = numbers // p * q
    last = planner.forward(((2000, 2000), (4, 4)), 8, problem(itemsize, 132, limit, tensor))[-1]
    assert last.steps[0].p == 2000 and not last.threads, "a factor that no block can hold is torch's"


@pytest.mark.parametrize("itemsize, kind", ((2, TENSOR[0]), *((4, kind) for kind in (*TENSOR, *SPLIT))))
def test_a_warps_columns_are_a_power_of_two_where_a_layout_moves_units(itemsize, kind):
    run, target = steps(((128, 128),) * 2), problem(itemsize, 132, 226 << 10, kind in TENSOR)
    parts = [part for group in kron_tile.tilings(run, 32, target, kind) for part in group.parts]
    assert parts and all(part.columns & (part.columns - 1) == 0 for part in parts), (
        "else the places of two warps' sums are the same"
    )


def test_sums_of_few_numbers_are_not_split():
    for sizes in (((16, 16),) * 3, ((2, 2),) * 16, ((128, 128), (16, 16))):
        assert all(not g.products for g in planner.forward(sizes, 1024, problem(4, 132, 226 << 10)))
    for sizes in (((128, 128),) * 2, ((32, 32),) * 3, ((64, 64),) * 3):
        assert all(g.products == 3 for g in planner.forward(sizes, 1024, problem(4, 132, 226 << 10)))


def test_tiny_factors_are_merged():
    (group,) = planner.forward(((2, 2),) * 8, 4096, problem(4, 132, 99 << 10))
    assert len(group.parts) < len(group.steps) == 8


def test_rows_are_chunked_when_the_intermediate_is_large():
    plan = planner.forward(((16, 16),) * 5, 64, problem(4, 132, 226 << 10))
    part = planner.rows_at_once(plan, 64, 4)
    assert len(plan) > 1 and 0 < part < 64 and part * 4 * 16**5 <= planner.BETWEEN
    assert planner.rows_at_once(plan, 10, 4) == 10 and planner.rows_at_once(plan[:1], 1 << 20, 4) == 1 << 20


def tilings(sizes, first, count, rows, target, kind) -> list[Launch]:
    """Tilings of `count` steps from `first` on, one of each kind: what a kernel does differently for them."""
    run = steps(sizes)[first : first + count]
    assert planner.end_of_run(steps(sizes), first) >= first + count
    kinds: dict[object, Launch] = {}
    for g in kron_tile.tilings(run, rows, target, kind):
        numbers, ahead = g.L * g.R * prod(s.p for s in run), g.plan[7]
        merged = max(len(part.factors) for part in g.parts) > 1
        groups = any(part.padded > part.wide for part in g.parts)
        kinds.setdefault(
            (g.slices > 1, run[0].right == g.R, g.L > 1, (ahead > 0) + (ahead < numbers), merged, groups), g
        )
    return list(kinds.values())


def largest_error(y, exact) -> float:
    return float((y.double() - exact).abs().max() / exact.abs().max())


TENSORS = *((torch.float32, kind) for kind in (*TENSOR, *SPLIT)), (torch.bfloat16, TENSOR[0])
CASES = [  # sizes, first step, count, rows, dtype, kind
    (((3, 5), (16, 24)), 0, 2, 5, torch.float32, FMA),  # slices; rows that do not fill the last tile
    # an array [..][21], which no power of two divides
    (((2, 2), (5, 4), (21, 40)), 0, 2, 3, torch.float32, FMA),
    # merged; steps that need no barrier of the block
    (((8, 8), (8, 8), (2, 2)), 0, 3, 9, torch.float32, FMA),
    *((((8, 8), (8, 8), (2, 2)), 0, 3, 9, dtype, kind) for dtype, kind in TENSORS),
    # matrices with zeros beyond their rows
    *((((12, 12), (36, 20)), 0, 2, 3, dtype, kind) for dtype, kind in TENSORS),
    *((((12, 20), (24, 24)), 1, 1, 3, dtype, kind) for dtype, kind in TENSORS[:-1]),
    *((((16, 16), (32, 32)), 0, 2, 3, dtype, kind) for dtype, kind in TENSORS[-1:]),
    # a tile of some of the numbers to the right
    *((((16, 16), (32, 32)), 1, 1, 3, dtype, kind) for dtype, kind in TENSORS),
    (((3, 3), (33, 17), (5, 5)), 1, 1, 2, torch.float16, FMA),  # one factor in the middle
]


@kernels
@pytest.mark.parametrize("sizes, first, count, rows, dtype, kind", CASES)
def test_every_tiling_gives_the_same(device, sizes, first, count, rows, dtype, kind):
    order = steps(sizes)
    before = {s.factor for s in order[:first]}
    now = [q if i in before else p for i, (p, q) in enumerate(sizes)]
    x = torch.randn(rows, prod(now), dtype=dtype, device=device)
    ws = [
        torch.randn(q, p, dtype=dtype, device=device).mT
        if p == 16
        else torch.randn(p, q, dtype=dtype, device=device)
        for p, q in sizes
    ]
    inside = {s.factor for s in order[first : first + count]}
    wide = [
        w.double() if i in inside else torch.eye(n, device=device).double()
        for i, (w, n) in enumerate(zip(ws, now, strict=True))
    ]
    exact = dense(x.double(), wide)
    found = tilings(sizes, first, count, rows, problem(dtype.itemsize, 132, 226 << 10), kind)
    assert found
    for y in [launch(group, x, ws) for group in found]:
        assert largest_error(y, exact) < (
            2.0**-10 if kind in TENSOR and dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        )


@kernels
@pytest.mark.parametrize("sizes", (((16, 16), (32, 32)), ((12, 12), (20, 20))))
@pytest.mark.parametrize("special", (None, float("inf"), float("nan")))
def test_split_numbers_that_are_not_finite_or_at_the_ends_of_the_range(device, special, sizes):
    """As on the FMA units: no difference of infinities, and nothing that TF32 would round to infinity. Below
    2^-112 bits are lost."""
    largest = torch.finfo(torch.float32).max
    x, ws = draw(7, sizes, device, torch.float32)
    for row, value in enumerate((largest, -largest, float("inf"), float("-inf"), float("nan"))):
        x[row, 7 * row] = value
    x[5:] *= torch.tensor([2.0**-108, 2.0**-124], device=device)[:, None]
    ws = [w / w.abs().sum(0) for w in ws]  # so that the largest stay finite
    if special is not None:
        ws[1][3, 5] = special
    for count in (1, 2):
        run = [
            next(kron_tile.tilings(steps(sizes)[:count], 7, problem(4, 132, 226 << 10), kind))
            for kind in (FMA, *SPLIT)
        ]
        fma, *split = (launch(group, x, ws) for group in run)
        for y in split:
            for a, b in zip(fma, y, strict=True):
                most = float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0
                assert torch.allclose(a, b, rtol=1e-6, atol=1e-6 * most + 2.0**-134, equal_nan=True)


@kernels
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_parts_of_the_rows_and_several_launches(device, dtype, monkeypatch):
    monkeypatch.setattr(planner, "end_of_run", lambda order, first: min(first + 2, len(order)))
    monkeypatch.setattr(planner, "BETWEEN", 2 * 81 * dtype.itemsize)
    forget_plans()
    x, ws = draw(5, ((3, 3),) * 4, device, dtype)
    bias = torch.randn(81, dtype=dtype, device=device)
    residual = torch.randn(5, 81, dtype=dtype, device=device)
    y = cukern.kron_linear(x, ws, bias=bias, residual=residual, scale=0.5, version="v4")
    exact = 0.5 * dense(x.double(), [w.double() for w in ws]) + bias + residual
    assert torch.allclose(
        y.double(), exact, rtol=0, atol=float(20 * torch.finfo(dtype).eps * exact.abs().max())
    )
    forget_plans()


@kernels
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("sizes", (((17, 19), (2, 3)), ((2, 3), (19, 17), (4, 4)), ((2, 2), (19, 17))))
def test_factors_too_large_for_shared_memory_use_torch_matmul(device, dtype, sizes, monkeypatch):
    """The left one, the middle one, the right one; with all that is added, if it is the last; of any
    strides."""
    facts = device_of(backend.SIMULATED if device == "cpu" else 0)._replace(shared_bytes=800 + 1024)
    monkeypatch.setattr(kron_forward, "device_of", lambda _: facts)
    forget_plans()
    x, ws = draw(3, sizes, device, dtype)
    ws = [torch.stack((w, w), -1)[..., 0] for w in ws]
    y = prod(q for _, q in sizes)
    bias, residual = torch.randn(y, device=device).to(dtype), torch.randn(3, y, device=device).to(dtype)
    launches = kron_forward.plan_of_layer(sizes, 3, dtype, x.get_device(), dtype == torch.bfloat16, 16, True)[
        1
    ]
    assert max(sizes) in [sizes[made.indices[0]] for made in launches if made.launch is None]
    ours, theirs = (
        cukern.kron_linear(x, ws, bias=bias, scale=0.5, residual=residual, version=v).double()
        for v in ("v4", "v2")
    )
    exact = 0.5 * dense(x.double(), [w.double() for w in ws]) + bias + residual
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + torch.finfo(dtype).eps * exact.norm()
    forget_plans()


@kernels
def test_scale_prevents_overflow(device):
    x = torch.full((2, 304), 20.0, device=device).half()
    w = torch.full((304, 304), 20.0, device=device).half()
    assert not planner.forward((w.shape,), 2, problem(2, device_of(x.get_device()).sms, 226 << 10, True))[
        0
    ].threads
    assert (cukern.kron_linear(x, [w], scale=0.01, version="v4") == 1216).all()


def test_large_factors_use_torch_matmul():
    """And those that a kernel multiplies faster do not."""
    for itemsize, tensor, sizes, theirs in (
        (2, True, ((168, 168), (176, 176)), True),
        (4, False, ((168, 168), (176, 176)), True),
        (4, False, ((128, 128), (64, 64)), False),
        (4, False, ((160, 160), (8, 8)), False),
        (2, True, ((64, 64), (64, 64)), False),
    ):
        plan = planner.forward(sizes, 64, problem(itemsize, 132, 226 << 10, tensor, 16, True))
        assert all(not group.threads for group in plan) == theirs, sizes


@kernels
def test_torchs_tf32_switch_is_respected(device):
    forget_plans()
    # where TF32 pays on two multiprocessors, and on 132
    x, ws = draw(128, ((128, 128),), device, torch.float32)
    exact, errors = dense(x.double(), [w.double() for w in ws]), []
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        with restricted(without=["cublas"]):
            y = cukern.kron_linear(x, ws, version="v4")
        errors.append(error(y, exact))
    torch.set_float32_matmul_precision(before)
    forget_plans()
    assert errors[0] < 1e-6 and 1e-5 < errors[1] < 1e-3, errors


CHUNKS = (
    (70, 8, 8, 1),
    (9, 8, 8, 64),
    (9, 16, 16, 16),
    (50, 64, 32, 1),
    (3, 32, 64, 32),
    (7, 3, 5, 7),
    (20, 12, 7, 1),
    (6, 40, 144, 1),
)
# of no multiples of 8
CHUNKS += (
    (5, 12, 20, 12),
    (2, 100, 24, 20),
    (2, 20, 12, 148),
    (70, 22, 14, 1),
    (3, 136, 72, 16),
    (2, 12, 9, 6),
)
CHUNKS += (1, 128, 128, 37), (1, 64, 64, 67)  # of no divisor that a chunk has room for


@kernels
@pytest.mark.parametrize(
    "dtype, tf32", ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True))
)
def test_gradients_of_factors_of_many_sizes(device, dtype, tf32):
    """[A][p][C] and [A][q][C]: chunks of whole rows and of pieces, tiles with and without remainders, several
    teams in a block."""
    for A, p, q, C in CHUNKS:
        z, h = (torch.randn(1, A, n, C, dtype=dtype, device=device) for n in (p, q))
        exact = torch.einsum("sakc,sajc->skj", z.double(), h.double())
        with environment.float32_products(tf32), simulated(z, h):
            first, again = (kron_backward.contraction(z, h, 1.0) for _ in range(2))
        assert same_bits(first, again)
        assert largest_error(first, exact) < (1e-3 if tf32 else 4 * torch.finfo(dtype).eps)


@gpu
def test_repeated_calls_of_other_layouts_and_options():
    x, ws = draw((2, 8), ((16, 16), (32, 32)), "cuda", torch.float32)
    first = cukern.kron_linear(x, ws)
    assert same_bits(cukern.kron_linear(x, ws), first)
    columns, wide = [w.t().contiguous().t() for w in ws], [w.double() for w in ws]
    whole = [torch.randn(512, 8, device="cuda")]
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    z, tied = torch.randn(5, 1024, device="cuda"), [torch.randn(32, 32, device="cuda")] * 2
    calls = (
        (x[:1], ws, 1.0),
        (x, columns, 1.0),
        (x, ws, 0.5),
        (x.double(), wide, 1.0),
        (shifted, ws, 1.0),
        (x, whole, 1.0),
        (z, tied, 1.0),
    )
    for x2, ws2, scale in calls:
        for _ in range(5):
            close(cukern.kron_linear(x2, ws2, scale=scale), scale * dense(x2, ws2))
    with pytest.raises(ValueError, match="the last dimension of x"):
        cukern.kron_linear(x[..., 1:], ws)


@gpu
@FORWARD_MODE
def test_recorded_and_traced_calls_are_not_replayed():
    """What records a graph, carries a tangent, is negated lazily, or is traced must be seen."""
    x, ws = draw((2, 8), ((16, 16), (32, 32)), "cuda", torch.float32)
    layer = cukern.KronLinear((16, 32), (16, 32), bias=False, device="cuda")
    for _ in range(2):
        cukern.kron_linear(x, ws)
        with torch.no_grad():
            assert not layer(x).requires_grad
        assert layer(x).requires_grad and cukern.kron_linear(x.clone().requires_grad_(), ws).requires_grad
    lazy = torch._neg_view(-x)
    with pytest.raises(ValueError, match="x has the negative bit set"):
        cukern.kron_linear(lazy, ws)
    close(torch.func.vmap(lambda one: cukern.kron_linear(one, ws))(x), dense(x, ws))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(cukern.kron_linear(forward_ad.make_dual(x, x), ws)).tangent
    close(tangent, dense(x, ws))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(cukern.kron_linear(x, ws), FakeTensor)
    z, vs = (x.to(torch.complex64), [w.to(torch.complex64) for w in ws])
    for _ in range(2):
        close(cukern.kron_linear(z, vs).real, dense(x, ws))
