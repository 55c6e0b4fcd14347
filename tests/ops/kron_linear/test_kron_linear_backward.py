"""kron_linear v4's fused backward: its plans cover every factor and fit a block, and in every tiling the
numbers hold."""

import gc
import itertools
from math import prod

import pytest
import torch
from helpers import kernels, problem, same_bits, simulated
from test_kron_linear import draw, error
from test_kron_linear_tile import LAYERS

import cukern
from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import cublas, planner, tile_backward
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear.plan import Launch, steps
from cukern.ops.kron_linear.tile_backward import gradient, gradient_of
from cukern.runtime.device import restricted


@pytest.mark.parametrize("limit", (226 << 10, 63 << 10))
@pytest.mark.parametrize("itemsize, tensor", ((2, True), (4, True), (4, False), (8, False)))
def test_plans_cover_every_step_and_fit_a_block(itemsize, tensor, limit):
    for sizes, rows in itertools.product(LAYERS, (1, 33, 4096)):
        plan = planner.backward(sizes, rows, problem(itemsize, 132, limit, tensor))
        assert [s for launch in plan for s in launch.steps] == list(steps(sizes))
        for launch in plan:
            if not launch.threads:
                whole = (
                    launch.kernel == "cublas"
                    and itemsize == 4
                    and max(max(size) for size in sizes) > cublas.LARGE
                )
                assert len(launch.steps) == 1 or (whole and len(launch.steps) == len(sizes) == 2)
                continue
            assert itemsize <= 4, "there is no double on these tensor cores"
            assert 0 < launch.shared <= limit and launch.threads in (128, 256, 512) and launch.blocks > 0
            assert all(a.factor == b.factor + 1 for a, b in itertools.pairwise(launch.steps))
    plan = planner.backward(((2, 2),) * 16, 16, problem(itemsize, 132, limit, tensor))
    assert len(plan) <= 3 or itemsize == 8, "tiny factors are merged"


def variants(sizes, first, count, rows, dtype) -> list[Launch]:
    """Launches of `count` steps from `first` on, one of each kind: what a kernel does differently for
    them."""
    kinds: dict[object, Launch] = {}
    assert planner.end_of_run(steps(sizes), first) >= first + count
    for pieces in tile_backward._pieces(steps(sizes)[first : first + count], dtype == torch.float32):
        for launch in tile_backward._tilings(
            pieces, rows, problem(dtype.itemsize, 2, 226 << 10, dtype.itemsize == 2)
        ):
            stages = launch.plan[5]
            kinds.setdefault((len(pieces[0]), launch.threads, stages, launch.L > 1, launch.R % 16), launch)
    return list(kinds.values())


def gradients(inputs, h, inside) -> list[torch.Tensor]:
    """Those of x and of the factors `inside`, by torch, of half of the layer."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    y = cukern.kron_linear(leaves[0], leaves[1:], scale=0.5, version="v2")
    return list(torch.autograd.grad(y, [leaves[0], *[leaves[i + 1] for i in inside]], h))


CASES = [
    (((16, 24), (24, 8)), 0, 2, 5, torch.float32),  # rows that do not fill the last tile; half of 16 rows
    (((16, 24), (24, 8)), 0, 2, 5, torch.bfloat16),
    # with an array to the right, which tiles hold whole or not
    (((8, 8), (16, 16), (8, 8)), 1, 2, 3, torch.float32),
    (((8, 8), (16, 16), (24, 24)), 1, 2, 3, torch.float16),
    (((2, 4), (4, 4), (4, 4), (4, 2)), 0, 4, 7, torch.float32),  # merged, not square
    (((2, 4), (4, 4), (4, 4), (4, 2)), 0, 4, 7, torch.bfloat16),
    (((40, 24),), 0, 1, 19, torch.float32),  # one factor, the rightmost
    (((40, 24), (8, 8)), 1, 1, 3, torch.bfloat16),  # one factor, with an array to the right
    (((13, 10), (21, 7)), 0, 2, 5, torch.float32),  # sizes with zeros beyond them in shared memory
    (((13, 20), (20, 6)), 0, 2, 5, torch.bfloat16),
    (((4, 4), (6, 5), (13, 9)), 1, 2, 3, torch.float32),
    (((11, 11), (26, 26)), 1, 1, 3, torch.bfloat16),  # tiles whose last columns are beyond those of the array
    (((5, 5),) * 4, 0, 4, 3, torch.bfloat16),
    (((88, 104),), 0, 1, 9, torch.bfloat16),  # sums that no number of warps can share evenly
]


@kernels
@pytest.mark.parametrize("sizes, first, count, rows, dtype", CASES)
def test_every_tiling_gives_the_same(device, sizes, first, count, rows, dtype):
    check(variants(sizes, first, count, rows, dtype), device, sizes, first, count, rows, dtype)


def check(found, device, sizes, first, count, rows, dtype, bound=0.0):
    """`bound`: an error that is allowed, though torch's were less."""
    run, order = steps(sizes)[first : first + count], steps(sizes)
    before, inside = {s.factor for s in order[:first]}, [s.factor for s in run]
    now = [q if i in before else p for i, (p, q) in enumerate(sizes)]
    _, ws = draw(0, [(q, p) if p == 8 or p < q else (p, q) for p, q in sizes], device, dtype)
    ws = [w.mT if p == 8 or p < q else w for w, (p, q) in zip(ws, sizes, strict=True)]
    every = [
        w if i in inside else torch.eye(n, dtype=dtype, device=device)
        for i, (w, n) in enumerate(zip(ws, now, strict=True))
    ]
    z = torch.randn(rows, prod(now), dtype=dtype, device=device)
    h = torch.randn(rows, prod(w.shape[1] for w in every), dtype=dtype, device=device)
    exact, torchs = [
        gradients([t.to(kind) for t in (z, *every)], h.to(kind), inside) for kind in (torch.float64, dtype)
    ]
    assert found
    for launch in found:
        results = []
        for _ in range(1 if device == "cpu" else 2):
            grads = kron_backward.Gradients(z, ws, [True] * (len(ws) + 1), 0.5, None, 0)
            with simulated(z, h, *ws):
                back = grads.fused(launch, z, h, None, 0.5)
                grads.add_up()
            results.append([back, *[grads.found[i + 1] for i in inside]])
        for a, again, right, other in zip(results[0], results[-1], exact, torchs, strict=True):
            assert same_bits(a, again), launch
            assert error(a, right) <= 2 * error(other, right) + max(bound, torch.finfo(dtype).eps), launch


@kernels
def test_a_fused_launch_returns_only_wanted_gradients(device):
    x, ws = draw(3, ((16, 24), (24, 8)), device, torch.float32)
    g = torch.randn(3, 24 * 8, device=device)
    assert [launch.kernel for launch in kron_backward.plan_of(x, g, ws)] == ["tile"]
    with simulated(x, g, *ws):
        every = kron_backward.backward(x, g, ws, [True] * 3, 0.5)
        for wanted in ((True, True, False), (False, False, True), (False, True, True)):
            found = kron_backward.backward(x, g, ws, wanted, 0.5)
            assert all(
                a is None if not w else same_bits(a, b) for w, a, b in zip(wanted, found, every, strict=True)
            ), wanted


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_layers_of_several_launches(device, dtype):
    """What went into each launch is multiplied anew; some factors have no place in a fused launch, and some
    are views."""
    for sizes in (((8, 8),) * 4, ((3, 5), (8, 16), (24, 8), (16, 16)), ((16, 16), (8, 24), (7, 7))):
        x, ws = draw(3, sizes, device, dtype)
        ws = [
            torch.randn(2 * p, 3 * q, dtype=dtype, device=device)[1::2, ::3].mul_(p**-0.5) for p, q in sizes
        ]
        assert any(launch.threads for launch in kron_backward.plan_of(x, x, ws))
        check_layer(x, ws)


def check_layer(x, ws):
    leaves = [t.detach().requires_grad_() for t in (x, *ws)]
    wide = [t.double().requires_grad_() for t in (x, *ws)]
    y, exact = (
        cukern.kron_linear(z, vs, scale=0.5, version=v) for (z, *vs), v in ((leaves, "v4"), (wide, "v2"))
    )
    dy = torch.randn_like(y)
    for a, right in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(exact, wide, dy.double()), strict=True
    ):
        assert error(a, right) < 8 * torch.finfo(x.dtype).eps


@kernels
@pytest.mark.parametrize("dtype", (pytest.param(torch.float32, marks=pytest.mark.gpu), torch.bfloat16))
def test_intermediate_between_two_launches_is_saved(device, dtype):
    """The same gradients as of what is multiplied anew, and again; where no factor has one nothing is
    kept."""
    x, ws = draw(1, ((64, 64),) * 3, device, dtype)
    bias, residual = torch.randn(2, 64**3, device=device).to(dtype)
    at = kron_backward.boundary(kron_forward.problem(x, ws, True))
    assert at == len(kron_backward.plan_of(x, x, ws)[0].steps) == 2
    leaves = [t.requires_grad_() for t in (x, *ws)]
    y = cukern.kron_linear(x, ws, scale=0.5, bias=bias, residual=residual[None])
    assert y.grad_fn.at == at and same_bits(
        y, cukern.kron_linear(x.detach(), ws, scale=0.5, bias=bias, residual=residual[None], version="v4")
    )
    g = torch.randn_like(y)
    first, again = (torch.autograd.grad(y, leaves, g, retain_graph=True) for _ in range(2))
    with torch.no_grad(), simulated(*leaves, g):
        anew = kron_backward.backward(x, g, ws, [True] * 4, 0.5)
    exact, torchs = (
        gradients([t.to(kind) for t in leaves], g.to(kind), (0, 1, 2)) for kind in (torch.float64, dtype)
    )
    for a, b, c, right, other in zip(first, again, anew, exact, torchs, strict=True):
        assert same_bits(a, b)
        assert max(error(a, right), error(c, right)) <= 2 * error(other, right) + torch.finfo(dtype).eps
    assert cukern.kron_linear(x, [w.detach() for w in ws]).grad_fn.at == 0


@kernels
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiled_layers_save_the_intermediate_of_static_sizes(device, dynamic, monkeypatch):
    x, ws = draw(1, ((64, 64),) * 3, device, torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, *ws)]
    g = torch.randn_like(x)
    eager = torch.autograd.grad(cukern.kron_linear(x, ws, scale=0.5), leaves, g)
    kept = []
    keeping = kron_backward.forward_keeping
    monkeypatch.setattr(kron_backward, "forward_keeping", lambda *a: kept.append(a[-1]) or keeping(*a))

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def layer(x, *ws):
        return cukern.kron_linear(x, ws, scale=0.5)

    compiled = torch.autograd.grad(layer(*leaves), leaves, g)
    assert kept == ([] if dynamic else [2])
    assert all(same_bits(a, b) for a, b in zip(compiled, eager, strict=True))


@kernels
def test_intermediate_without_a_plan_that_keeps_one(device, monkeypatch):
    """A compiled graph asks for it. The plan may have changed since, with the switch for TF32 for example."""
    x, ws = draw(1, ((64, 64),) * 3, device, torch.bfloat16)
    with torch.no_grad(), simulated(x, *ws):
        y, kept = kron_backward.forward_keeping(x, ws, (0.5, None, None), 2)
        monkeypatch.setattr(kron_backward, "_keeping", lambda problem: ())
        anew, again = kron_backward.forward_keeping(x, ws, (0.5, None, None), 2)
    assert max(error(anew, y.double()), error(again, kept.double())) <= torch.finfo(x.dtype).eps


def test_forward_uses_two_launches_if_the_backward_does():
    """Where it would be one: else the backward would make the first of them again."""
    sizes, target = ((8, 8),) * 5, problem(2, tensor=True, wgmma=True)
    assert len(planner.forward(sizes, 1024, target)) == 1
    plan = planner.backward(sizes, 1024, target)
    assert [launch.steps for launch in planner.keeping(sizes, 1024, target)] == [
        launch.steps for launch in plan
    ]
    assert len(plan) == 2 and len(plan[0].steps) == 3


@pytest.mark.parametrize("limit", (226 << 10, 98 << 10))
@pytest.mark.parametrize("itemsize, tensor", ((2, True), (4, True), (4, False), (8, False)))
def test_launches_of_one_gradient_fit_a_block(itemsize, tensor, limit):
    target = problem(itemsize, 132, limit, tensor)
    for p, q, C in itertools.product(
        (3, 8, 86, 148, 256), (12, 100, 136), (1, 2, 16, 37, 86, 100, 128, 148, 172, 257, 1000)
    ):
        plan = gradient(64, p, q, C, target)
        if not plan:
            assert not tensor or p < 8 or C % 4
            continue
        assert plan.shared <= target.shared and 32 <= plan.threads <= 1024 and plan.blocks >= 1, (p, q, C)


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_in_several_tiles(device, dtype):
    """By our kernel, and by torch's products of parts of the rows: the same sums."""
    z = torch.randn(5, 136, 24, dtype=dtype, device=device)
    h = torch.randn(5, 150, 24, dtype=dtype, device=device)
    exact, torchs = (
        0.5 * torch.einsum("akc,ajc->kj", z.to(kind), h.to(kind)) for kind in (torch.float64, dtype)
    )
    allowed = 2 * error(torchs, exact) + torch.finfo(dtype).eps
    with simulated(z, h):
        ours = kron_backward.contraction(z[None], h[None], 0.5)
    assert error(ours, exact) <= allowed
    assert error(cublas.contraction(z[None], h[None], 0.5)[0], exact) <= allowed


def test_autocast_does_not_change_cublas_gradients():
    for right in (1, 24):
        z, h = torch.randn(50, 20, right), torch.randn(50, 12, right)
        exact = torch.einsum("akc,ajc->kj", z.double(), h.double())
        with torch.autocast("cpu", torch.bfloat16):
            found = cublas.contraction(z[None], h[None], 1.0)[0]
        assert found.dtype == torch.float32 and error(found, exact) < 1e-6


@pytest.mark.parametrize("itemsize, tensor", ((4, True), (4, False), (2, True)))
def test_torch_computes_gradients_where_it_is_faster(itemsize, tensor):
    target = problem(itemsize, 132, 226 << 10, tensor)
    for (A, p, C), torchs in (
        ((1 << 18, 100, 1), False),
        ((1 << 18, 200, 1), True),
        ((4096, 100, 100), False),
    ):
        assert (gradient_of(A, p, p, C, target).kernel == "cublas") == (torchs or not tensor)
        with restricted(without=["cublas"]):
            assert (gradient_of(A, p, p, C, target).kernel == "cublas") == (
                gradient(A, p, p, C, target) is None
            )


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_large_factors_of_unlike_sizes(device, dtype):
    """Those that wgmma.py leaves to tile_backward.py: 96 columns, and few numbers in one of two factors."""
    for sizes in (((64, 64), (32, 32)), ((128, 96), (64, 32))):
        check_layer(*draw(2, sizes, device, dtype))


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_factor_is_too_large_for_a_fused_launch(device, dtype):
    x, ws = draw(3, ((8, 8), (160, 160)), device, dtype)
    with restricted(without=["cublas"]):  # it would take the whole layer in float32
        assert [bool(launch.threads) for launch in kron_backward.plan_of(x, x, ws)] == [False, True]
        check_layer(x, ws)


@kernels
def test_infinities_and_large_numbers(device):
    """They go where ordinary products take them: numbers split in two make no NaN of an infinity, and no
    infinity of a large number."""
    for value, sizes in itertools.product(
        (float("inf"), float("-inf"), float("nan"), 3.4e38, 1e-39),
        (((8, 8), (16, 16)), ((6, 6), (13, 13)), ((64, 64),) * 2),
    ):
        x, ws = draw(4, sizes, device, torch.float32)
        x[1, 37] = value
        leaves = [t.detach().requires_grad_() for t in (x, *ws)]
        others = [t.detach().requires_grad_() for t in (x, *ws)]
        y, plain = (cukern.kron_linear(t[0], t[1:], version=v) for t, v in ((leaves, "v4"), (others, "v2")))
        dy = torch.randn_like(y) / 64
        for a, b in zip(
            torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, others, dy), strict=True
        ):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf()), value
            assert torch.allclose(
                a, b, rtol=1e-4, atol=1e-4 * float(b[b.isfinite()].abs().max()), equal_nan=True
            ), value


@kernels
@pytest.mark.parametrize("sizes", (((160, 160), (136, 136)), ((136, 144), (150, 140)), ((200, 200),)))
def test_large_float32_factors_by_products_of_all_rows(device, sizes):
    """What the forward keeps has another layout than x. It is read as such, even if plans change before the
    backward."""
    x, ws = draw(3, sizes, device, torch.float32)
    ws = [torch.randn(2 * p, 3 * q, device=device)[1::2, ::3].mul_(p**-0.5) for p, q in sizes]
    y = prod(q for _, q in sizes)
    bias = torch.randn(y, device=device)
    residual = torch.randn(3, y, device=device)
    g = torch.randn(3, y, device=device)
    leaves = [t.requires_grad_() for t in (x, *ws)]
    wide = [t.detach().double().requires_grad_() for t in (x, *ws)]
    exact_y = cukern.kron_linear(
        wide[0], wide[1:], bias=bias.double(), residual=residual.double(), scale=0.5, version="v1"
    )
    exact = torch.autograd.grad(exact_y, wide, g.double())
    for changes in (False, True):
        with restricted(kernel="cublas"):
            ours = cukern.kron_linear(x, ws, bias=bias, residual=residual, scale=0.5)
        assert ours.is_contiguous() and ours.grad_fn.at == (-1 if len(sizes) == 2 else 0)
        assert error(ours.detach(), exact_y.detach()) < 1e-6
        with restricted(without=["cublas"]) if changes else restricted(kernel="cublas"):
            found = torch.autograd.grad(ours, leaves, g)
        assert all(a.is_contiguous() and error(a, b) < 1e-6 for a, b in zip(found, exact, strict=True))
    for wanted in itertools.product((True, False), repeat=len(leaves)):
        if any(wanted[1:]):
            with torch.no_grad(), simulated(*leaves, g), restricted(kernel="cublas"):
                assert kron_backward.plan_of(x, g, ws)[0].kernel == "cublas"
                found = kron_backward.backward(x, g, ws, wanted, 0.5)
            for w, a, b in zip(wanted, found, exact, strict=True):
                assert (a is None) != w and (not w or error(a, b) < 1e-6)


@kernels
@pytest.mark.parametrize("sizes", (((160, 160), (136, 136)), ((136, 144), (150, 140))))
def test_large_16_bit_factors_whose_columns_do_not_fill_tiles(device, sizes):
    """The forward is one launch, on the transpose of x. Larger columns of the last factor, or another order,
    are two launches."""
    for pairs, launches in ((sizes, 1), ((sizes[0], (192, 192)), 2), ((sizes[0], (144, 260)), 2)):
        with restricted(kernel="cublas"):
            assert len(planner.forward(pairs, 64, problem(2, 132, 226 << 10, True))) == launches
    x = torch.randn(3, prod(p for p, _ in sizes), dtype=torch.bfloat16, device=device)
    ws = [torch.randn(2 * p, 3 * q, device=device).bfloat16()[1::2, ::3].mul_(p**-0.5) for p, q in sizes]
    bias, residual = (
        torch.randn(*n, prod(q for _, q in sizes), dtype=x.dtype, device=device) for n in ((), (3,))
    )
    with restricted(kernel="cublas"):
        y = cukern.kron_linear(x, ws, bias=bias, residual=residual, scale=0.5)
    wide = [w.double() for w in ws]
    exact = cukern.kron_linear(
        x.double(), wide, bias=bias.double(), residual=residual.double(), scale=0.5, version="v1"
    )
    assert y.is_contiguous() and error(y, exact) < 2.0**-7


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("sizes", (((136, 144), (16, 16)), ((130, 133), (16, 8)), ((133, 150), (8, 8))))
def test_a_small_right_factor_next_to_a_large_one(device, dtype, sizes):
    """The transposing kernel, a product of all rows, and the transposing kernel. A third factor of 1 x 1 is
    not in its way."""
    run = steps(sizes)
    assert [
        g.kernel for g in cublas.small_right(run, 1024, problem(dtype.itemsize, 132, 226 << 10, True))
    ] == ["cublas"]
    x = torch.randn(3, prod(p for p, _ in sizes), dtype=dtype, device=device)
    ws = [torch.randn(2 * p, 3 * q, device=device).to(dtype)[1::2, ::3].mul_(p**-0.5) for p, q in sizes]
    bias, residual = (
        torch.randn(*n, prod(q for _, q in sizes), dtype=dtype, device=device) for n in ((), (3,))
    )
    for scale, added in ((0.5, (None, None)), (2.0, (bias, residual))):
        with simulated(x, *ws, bias, residual):
            y = cublas.layer_forward(x, ws, (scale, *added))[0]
        wide = [None if t is None else t.double() for t in added]
        exact = cukern.kron_linear(
            x.double(), [w.double() for w in ws], bias=wide[0], residual=wide[1], scale=scale, version="v1"
        )
        assert y.is_contiguous() and error(y, exact) < (1e-6 if dtype == torch.float32 else 2.0**-6)
        with restricted(kernel="cublas"):
            y = cukern.kron_linear(x, [*ws, x.new_ones(1, 1)], bias=added[0], residual=added[1], scale=scale)
        assert error(y, exact) < (1e-6 if dtype == torch.float32 else 2.0**-6)


MEMORY = (
    (((64, 64),) * 3, 16),
    (((128, 128),) * 2, 1024),
    (((8, 8),) * 5, 256),
    (((96, 64), (64, 80)), 8192),
    (((160, 160),) * 2, 256),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes, rows, dtype",
    (
        *((*case, t) for case in MEMORY for t in (torch.float32, torch.bfloat16)),
        (((128,) * 2,) * 2, 32, torch.float32),
    ),
)
def test_memory_beside_the_gradients(sizes, rows, dtype):
    """Forward and backward allocate at most the bytes of x and y, besides the results. Partial sums of fewer
    rows may need more."""
    x, ws = draw(rows, sizes, "cuda", dtype)
    leaves = [t.requires_grad_() for t in (x, *ws)]
    g = torch.randn(rows, prod(q for _, q in sizes), device="cuda").to(dtype)
    for turn in range(5):  # loads the kernels; is recorded twice; is replayed
        gc.collect()  # tensors of other tests must not be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        y = cukern.kron_linear(x, ws)
        found = torch.autograd.grad(y, leaves, g)
        memory = torch.cuda.memory_stats()  # requested bytes: blocks of the allocator may be 1 MiB larger
        extra = memory["requested_bytes.all.peak"] - memory["requested_bytes.all.current"]
        del y, found
        assert not turn or extra <= x.nbytes + g.nbytes, (turn, extra, x.nbytes, g.nbytes)
