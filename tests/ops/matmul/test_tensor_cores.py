"""matmul and linear on tensor cores: every tile, layout and copy width, split-K, batches, precision,
epilogues and their gradients."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers import DEVICE, PLACE, Guarded, exact_gradients, gpu, kernels, same_bits
from torch.nn import functional

import cukern
from cukern.bench import environment
from cukern.ops.matmul import plan as tensor_plan
from cukern.ops.matmul import tensor_cores
from cukern.ops.matmul.product import run
from cukern.ops.matmul.tensor_cores import ACTIVATIONS, V7, Epilogue
from cukern.runtime.device import KNOWN, device_of, restricted, setting
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import collecting

F, H, B = torch.float32, torch.float16, torch.bfloat16
TILES = [("v7" if t.wgmma else "v6", t) for t in tensor_plan.TILES if t.stages]
LAYOUTS = list(itertools.product((False, True), repeat=2))
# in the simulator; 4 floats are 16 bytes, as 0 are
PADS = [*((B, pad) for pad in (0, 1, 2, 4)), *((F, pad) for pad in (0, 1, 2))]
# The relative error of an operand. "": of 3xTF32, whose products have an error of 2^-21 and a rounding: 5 *
# 2^-23 with three roundings.
EPS = {"tf32": 2.0**-11, "": 2.0**-23}
ACTIVATE = {
    None: lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def need(version: str) -> None:
    if device_of(0 if PLACE == "cuda" else backend.SIMULATED).capability < (90 if version == "v7" else 80):
        pytest.skip(f"this GPU is too old for {version}")


def matrix(
    rows: int, columns: int, transposed: bool, dtype: torch.dtype, device: str, pad: int = 0
) -> torch.Tensor:
    """A random matrix with contiguous rows, or columns if `transposed`, with a gap of `pad` elements between
    them."""
    x = torch.randn(*((columns, rows + pad) if transposed else (rows, columns + pad)), device=device).to(
        dtype
    )
    return x[:, :rows].t() if transposed else x[:, :columns]


def assert_right(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, what: object, precision: str = ""
) -> None:
    """The error relative to the sum of |a b| is at most twice torch's, plus three roundings, plus the
    rounding of two operands."""
    exact, scale = a.cpu().double() @ b.cpu().double(), a.cpu().double().abs() @ b.cpu().double().abs()
    peer = ((a @ b).cpu().double() - exact).abs()
    error = ((out.cpu().double() - exact).abs() / scale).nan_to_num(nan=math.inf).max()
    allowed = 2 * (peer / scale).max() + 3 * torch.finfo(out.dtype).eps + 2 * EPS[precision]
    assert error <= allowed, f"{what}: {error:.2e}, allowed {allowed:.2e}"


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    version: str,
    tile: str = "",
    precision: str | None = None,
    without: str = "",
) -> torch.Tensor:
    """The product in a guarded output, by one tile."""
    out = Guarded((*a.shape[:-1], b.shape[-1]), a.dtype, a.device.type)
    with restricted(tile), backend.simulated_memory([a, b, out.memory]):
        run(out.tensor, a, b, Epilogue(), precision, version)
    out.check(f"{version} {tile}")
    return out.tensor


@kernels
@pytest.mark.parametrize("version, tile", TILES, ids=lambda x: getattr(x, "name", x))
def test_every_tile_and_layout(device, version, tile):
    """One row of tiles and a part of the next, in both directions, and a K that does not fill the last k
    tile."""
    need(version)
    M, N = tile.rows * tile.share + 8, tile.columns + 8
    split = tile.split
    cases = list(zip(LAYOUTS, (F, F, F, F) if split else (B, H, B, H), strict=True))
    for (ta, tb), dtype in cases if PLACE == "cuda" else cases[TILES.index((version, tile)) % 2 :: 2]:
        a, b = matrix(M, 72, ta, dtype, device), matrix(72, N, tb, dtype, device)
        assert_right(multiply(a, b, version, tile.name), a, b, (tile.name, ta, tb, dtype))
    if not split:
        a, b = matrix(M, 72, False, F, device), matrix(72, N, True, F, device)
        assert_right(multiply(a, b, version, tile.name, "tf32"), a, b, (tile.name, "tf32"), "tf32")


@kernels
@pytest.mark.parametrize("version, tile", TILES, ids=lambda x: getattr(x, "name", x))
def test_more_k_tiles_than_stages(device, version, tile):
    """Stages of the ring buffer are filled again, also by the next tile of a persistent block."""
    need(version)
    dtype = F if tile.split else B
    a = matrix(8, 1040 // dtype.itemsize, False, dtype, device)
    b = matrix(1040 // dtype.itemsize, 5 * tile.columns, True, dtype, device)
    assert_right(multiply(a, b, version, tile.name), a, b, tile.name)


@kernels
@pytest.mark.parametrize(
    "dtype, pad", list(itertools.product((B, H, F), (0, 1, 2, 4))) if PLACE == "cuda" else PADS
)
@pytest.mark.parametrize("version", ("v6", "v7"))
def test_every_alignment(device, dtype, pad, version):
    """Operands that are copied first. The sizes are not multiples of a copy. Copies start as NaN."""
    need(version)
    for (ta, tb), (M, N, K) in zip(
        LAYOUTS, ((7, 33, 65), (66, 9, 34), (17, 70, 68), (1, 3, 131)), strict=True
    ):
        a, b = matrix(M, K, ta, dtype, device, pad), matrix(K, N, tb, dtype, device, 4 - pad)
        for x, y in ((a, b), (a[1:], b), (a, b[:, 1:])):
            if x.shape[0]:
                assert_right(multiply(x, y, version), x, y, (M, N, K, ta, tb))
        if dtype == F:
            assert_right(multiply(a, b, version, precision="tf32"), a, b, (M, N, K, ta, tb, "tf32"), "tf32")


@kernels
@pytest.mark.parametrize("dtype", (B, H) if PLACE == "cuda" else (H,))
def test_the_large_tile_of_v6(device, dtype):
    """Long sums in all layouts, with edges, an odd K, and a bias and a residual."""
    need("v6")
    for (ta, tb), (M, N, K) in zip(
        LAYOUTS, ((130, 264, 2048), (8, 257, 2120), (129, 24, 2056), (5, 7, 2051)), strict=True
    ):
        a, b = matrix(M, K, ta, dtype, device), matrix(K, N, tb, dtype, device)
        bias, residual = torch.randn(N, device=device).to(dtype), torch.randn(M, N, device=device).to(dtype)
        with restricted("Mma128x256"):
            assert_right(multiply(a, b, "v6"), a, b, (M, N, K, ta, tb))
            ours = cukern.linear(a, b.t(), bias, residual=residual, version="v6").double()
        exact = a.double() @ b.double() + bias.double() + residual.double()
        assert float((ours - exact).norm() / exact.norm()) < 2**-8


@kernels
def test_unaligned_batches_and_results(device):
    """The copies of batches, one of which is broadcast, odd rows of results with a bias and a residual, and a
    stride of 0."""
    need("v7")
    for version in ("v6", "v7"):
        a = torch.randn(1, 64, device=device).to(B).expand(70, 64)
        b = torch.randn(64, 24, device=device).to(B)
        assert_right(multiply(a, b, version), a, b, "a stride of 0")
    a, b = torch.randn(3, 20, 27, device=device).to(B), torch.randn(27, 35, device=device).to(B)
    bias, residual = torch.randn(36, device=device).to(B)[1:], torch.randn(60, 35, device=device).to(B)
    for version, tile in (("v6", "Mma64x64"), ("v7", "Wgmma128x128"), ("v7", "Wgmma128x192")):
        with restricted(tile):
            ours = cukern.matmul(a, b.expand(3, 27, 35), version=version)
            fused = cukern.linear(a.flatten(0, 1), b.t(), bias, residual=residual, version=version)
        exact = a.double() @ b.double()
        assert float((ours.double() - exact).norm() / exact.norm()) < 2**-8
        exact = exact.flatten(0, 1) + bias.double() + residual.double()
        assert float((fused.double() - exact).norm() / exact.norm()) < 2**-8


@kernels
def test_3xtf32_by_wgmma(device):
    """The operands are split in any layout and alignment, with a bias, split-K, and as batches of which one
    is broadcast."""
    need("v7")
    for (ta, tb), (M, N, K) in zip(
        LAYOUTS, ((33, 70, 65), (130, 9, 34), (17, 68, 300), (1, 3, 131)), strict=True
    ):
        a, b = matrix(M, K, ta, F, device, 1), matrix(K, N, tb, F, device, 2)
        with restricted("WgmmaSplit128x128"):
            assert_right(multiply(a, b, "v7"), a, b, (M, N, K, ta, tb))
            bias, residual = torch.randn(N, device=device), torch.randn(M, N, device=device)
            ours = cukern.linear(a, b.t(), bias, residual=residual, precision="3xtf32", version="v7").double()
            assert (
                float((ours - a.double() @ b.double() - bias.double() - residual.double()).abs().max()) < 1e-4
            )
    a, b = torch.randn(3, 20, 24, device=device), torch.randn(24, 16, device=device)
    with restricted("WgmmaSplit128x128"):
        ours = cukern.matmul(a, b.expand(3, 24, 16), precision="3xtf32", version="v7")
    assert float((ours.double() - a.double() @ b.double()).abs().max()) < 1e-4


@kernels
@pytest.mark.parametrize(
    "version, tile",
    [x for x in TILES if x[1].split_k or x[1].cluster_k > 1],
    ids=lambda x: getattr(x, "name", x),
)
def test_split_k(device, version, tile, monkeypatch):
    """Partial sums are added in a fixed order, and the bias, activation and residual are applied once, at the
    end. The parts of K are not equal."""
    need(version)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr("cukern.ops.matmul.tensor_cores._deterministic", lambda: False)
    monkeypatch.setattr(tensor_plan, "SPLITS", (3,))
    reduce, reductions = tensor_cores._reduce, list[object]()
    monkeypatch.setattr(tensor_cores, "_reduce", lambda *arguments: reductions.append(reduce(*arguments)))
    dtype, allowed = (F, 1e-5) if tile.split else (B, 2**-8)
    K = 13 * 128 // dtype.itemsize + 8
    for N, ta in ((40, False), (41, True)):
        a, b = matrix(24, K, ta, dtype, device), matrix(K, N, True, dtype, device)
        once = multiply(a, b, version, tile.name)
        assert_right(once, a, b, N)
        assert PLACE == "sim" or same_bits(multiply(a, b, version, tile.name), once)
        bias, residual = matrix(1, N, False, dtype, device)[0], matrix(24, N, False, dtype, device)
        into = residual.to(F, copy=True)
        with restricted(tile.name):
            ours = cukern.linear(a, b.t(), bias, activation="relu", residual=residual, version=version)
            both = cukern.matmul(torch.stack((a, -a)), b, version=version)
            torch.ops.cukern._add_product(into, a, b, None, version)
        assert bool(reductions) == tile.split_k
        product = a.double() @ b.double()
        exact = (product + bias.double()).relu() + residual.double()
        assert float((ours.double() - exact).norm() / exact.norm()) < allowed
        assert float((both[0].double() - product).norm() / product.norm()) < allowed and same_bits(
            both[0], -both[1]
        )
        exact = product + residual.double()
        assert float((into.double() - exact).norm() / exact.norm()) < 1e-5


@kernels
@pytest.mark.parametrize("dtype", (B, H, F), ids=str)
def test_few_rows(device, dtype, monkeypatch):
    """Operands are read in place: any address, stride and layout, with an epilogue and as a batch."""
    need("v6")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr("cukern.ops.matmul.tensor_cores._deterministic", lambda: False)
    cases = (
        ("Direct1k", False, True),
        ("Direct4k", False, True),
        ("Direct1", False, False),
        ("Direct4", False, False),
    )
    for (tile, ta, tb), pad, (N, K) in itertools.product(cases, (0, 1), ((37, 601), (130, 77), (1, 1))):
        M = 3 if "4" in tile else 1
        a, b = matrix(M, K, ta, dtype, device, pad), matrix(K, N, tb, dtype, device, pad)
        with restricted(tile), collecting() as found:
            cukern.matmul(a, b, version="v6")
        assert N == 1 or device == "cuda" or [name.split()[-1].strip(">") for name in found] == [tile]
        assert_right(multiply(a, b, "v6", tile), a, b, (M, N, K, ta, tb, pad))
        bias, residual = torch.randn(N, device=device).to(dtype), torch.randn(M, N, device=device).to(dtype)
        with restricted(tile):
            ours = cukern.linear(a, b.t(), bias, activation="relu", residual=residual, version="v6")
        exact = (a.double() @ b.double() + bias.double()).relu() + residual.double()
        assert float((ours.double() - exact).norm() / exact.norm()) < 4 * torch.finfo(dtype).eps
    x = torch.randn(3, 1, 27, device=device).to(dtype)
    weight = torch.randn(3, 35, 27, device=device).to(dtype)
    for a, b in (
        (x, weight.mT),
        (x.expand(3, 1, 27), weight[:1].mT.expand(3, 27, 35)),
        (x, weight.mT.contiguous()),
    ):
        with restricted("Direct1k" if b.stride(-2) == 1 else "Direct1"):
            ours = cukern.matmul(a, b, version="v6").double()
        assert float((ours - a.double() @ b.double()).norm() / ours.norm()) < 4 * torch.finfo(dtype).eps


@kernels
@pytest.mark.parametrize("version", ("v4", "v5", "v6", "v7"))
def test_batches(device, version):
    """Leading dimensions broadcast; gradients are those of torch."""
    need(version)
    for lead_a, lead_b in (((3,), (3,)), ((2, 1), (3,)), ((3,), (1,)), ((), (2,)), ((0,), (1,))):
        a = torch.randn(*lead_a, 9, 24, device=device).to(B)
        b = torch.randn(*lead_b, 24, 16, device=device).to(B)
        dout = torch.randn(*torch.broadcast_shapes(lead_a, lead_b), 9, 16, device=device)
        ours = exact_gradients(partial(cukern.matmul, version=version), (a, b), dout.to(B))
        for x, y in zip(
            ours, exact_gradients(torch.matmul, (a.double(), b.double()), dout.to(B).double()), strict=True
        ):
            assert x.shape == y.shape and float((x.double() - y).norm()) <= 2**-8 * float(y.norm())


@kernels
@pytest.mark.parametrize(
    "dtype, version",
    [(B, None), (H, "v6"), (F, "v6"), (F, None), (torch.float64, None), (B, "v2"), (H, "cublas"), (B, "v7")],
)
def test_epilogues_and_their_gradients(device, dtype, version):
    """Bias, activation, pre-activation and residual, in all combinations that the kernels know, against
    float64."""
    need(version or "v6")
    N = 80 if version == "v7" else 27  # v7 stores rows of whole 16 bytes by TMA
    tolerance = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-5 if dtype == F else 1e-12
    x, weight, bias, residual = (
        torch.randn(s, device=device).to(dtype) for s in ((2, 19, 40), (N, 40), (N,), (2, 19, N))
    )
    for activation, (with_bias, with_residual) in zip(ACTIVATE, (*LAYOUTS, (True, True)), strict=True):
        inputs = [x, weight, *[bias] * with_bias, *[residual] * with_residual]
        douts = [torch.randn(2, 19, N, device=device).to(dtype) for _ in range(2)]

        def ours(x, weight, *rest, activation=activation, with_bias=with_bias, with_residual=with_residual):
            options = {
                "bias": rest[0] if with_bias else None,
                "residual": rest[-1] if with_residual else None,
            }
            return cukern.linear(
                x, weight, **options, activation=activation, return_pre_activation=True, version=version
            )

        def exact(x, weight, *rest, activation=activation, with_bias=with_bias, with_residual=with_residual):
            pre = functional.linear(x, weight, rest[0] if with_bias else None)
            return ACTIVATE[activation](pre) + (rest[-1] if with_residual else 0), pre

        results = []
        for function, kind in ((ours, dtype), (exact, torch.float64)):
            leaves = [t.detach().to(kind).requires_grad_() for t in inputs]
            with restricted("Wgmma128x128" if version == "v7" else ""):
                outs = function(*leaves)
            results.append(
                [*(y.detach() for y in outs), *torch.autograd.grad(outs, leaves, [d.to(kind) for d in douts])]
            )
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            assert a.dtype == dtype and float((a.double() - b).norm() / b.norm()) < tolerance, (activation, i)


@kernels
def test_activations_of_extreme_values(device):
    """As torch's in float64: zeros, large numbers of both signs, infinities and NaN."""
    x = torch.tensor(
        [0.0, -0.0, 1e-30, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38, math.inf, -math.inf, math.nan],
        device=device,
    )
    one = torch.eye(len(x), device=device)
    for activation in ACTIVATIONS[1:]:
        ours = cukern.linear(
            one[:1], torch.zeros(len(x), len(x), device=device), x, activation=activation, version="v6"
        )[0]
        exact = ACTIVATE[activation](x.double()).float()
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-36, equal_nan=True)


@kernels
@pytest.mark.parametrize("dtype", (B, F), ids=str)
def test_weight_gradients_accumulate_in_float32(device, dtype):
    x = torch.randn(33, 24, device=device).to(dtype)
    weight = torch.randn(16, 24, device=device).to(dtype).requires_grad_()
    into = torch.randn(16, 24, device=device)
    before, dout = into.clone(), torch.randn(33, 16, device=device).to(dtype)
    for _ in range(2):
        y = cukern.linear(x, weight, activation="relu", accumulate_into=into)
        y.backward(dout)
    assert weight.grad is None
    dpre = dout.double() * (functional.linear(x.double(), weight.detach().double()) > 0)
    exact = 2 * dpre.t() @ x.double()
    assert float((into.double() - before.double() - exact).norm() / exact.norm()) < 1e-5
    with pytest.raises(NotImplementedError, match="accumulate_into"):
        torch.autograd.grad(cukern.linear(x, weight, accumulate_into=into).sum(), weight, create_graph=True)


@kernels
def test_second_derivatives_of_an_epilogue(device):
    inputs = [
        torch.randn(s, device=device, dtype=torch.float64, requires_grad=True)
        for s in ((3, 4), (5, 4), (5,), (3, 5))
    ]

    def function(x, weight, bias, residual):
        return cukern.linear(
            x, weight, bias, activation="gelu_tanh", residual=residual, return_pre_activation=True
        )

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@kernels
def test_gradients_per_sample_of_an_epilogue(device):
    weight, x, residual = (
        torch.randn(s, device=device, dtype=torch.float64) for s in ((5, 3), (2, 4, 3), (2, 4, 5))
    )

    def gradients(function):
        def loss(weight, x, residual):
            return function(x, weight, residual).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, x, residual)

    ours = gradients(
        lambda x, weight, residual: cukern.linear(x, weight, activation="silu", residual=residual)
    )
    torch.testing.assert_close(
        ours, gradients(lambda x, weight, residual: functional.silu(x @ weight.t()) + residual)
    )


@kernels
def test_precision_follows_torchs_switches(device):
    """float32 is strict by default, TF32 if torch allows it, and 3xTF32 if the caller names it or a
    tensor-core version."""
    a, b = torch.randn(40, 260, device=device), torch.randn(260, 24, device=device)
    name = "v7" if device_of(a.get_device()).capability >= 90 else "v6"
    strict = cukern.matmul(a, b)
    assert same_bits(strict, cukern.matmul(a, b, version="v5")) and same_bits(
        strict, cukern.matmul(a, b, precision="ieee")
    )
    tf32, three = cukern.matmul(a, b, precision="tf32"), cukern.matmul(a, b, precision="3xtf32")
    exact = a.double() @ b.double()
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (strict, three, tf32)]
    assert errors[0] < 5e-7 and errors[1] < 5e-7 and 5e-5 < errors[2] < 1e-3, errors
    assert not same_bits(strict, three)
    with environment.float32_products(True):
        assert same_bits(cukern.matmul(a, b, version=name), tf32) and same_bits(
            cukern.matmul(a, b, precision="ieee"), strict
        )
        assert same_bits(cukern.matmul(a, b, version=name, precision="3xtf32"), three)
    with cukern.use("matmul", name):
        assert same_bits(cukern.matmul(a, b), three)


@pytest.mark.parametrize("name, v7", (("h200", True), ("b200", False), ("a100", False)))
def test_the_default_of_an_activation_is_v7_only_with_wgmma(name, v7):
    x = torch.ones(512, 512, dtype=B)
    with cukern.backend("sim"), setting(simulated=KNOWN[name]), collecting() as found:
        cukern.linear(x, x, activation="relu")
    assert [kernel.partition("<")[0] for kernel in found] == ["matmul_v7"] * v7


@kernels
@pytest.mark.parametrize("version", ("v6", "v7"))
def test_rows_do_not_depend_on_the_number_of_rows(device, version):
    """In torch's deterministic mode, which the tests of kernels turn on."""
    need(version)
    assert torch.are_deterministic_algorithms_enabled()
    a = torch.randn(300 if PLACE == "cuda" else 150, 520, device=device).to(B)
    b = torch.randn(520, 48, device=device).to(B)
    whole = cukern.matmul(a, b, version=version)
    assert all(same_bits(cukern.matmul(a[:n], b, version=version), whole[:n]) for n in (1, 16, 65, 130))


@pytest.mark.parametrize("name", ("h200", "a100", "rtx4090", "l40s"))
def test_plans_fit_the_gpu(name):
    device = KNOWN[name]
    for M, N, K, batch in itertools.product(
        (1, 16, 100, 4096, 50257), (8, 768, 50304), (1, 64, 768, 16384), (1, 64)
    ):
        for (itemsize, terms), wgmma in itertools.product(((2, 1), (4, 1), (4, 3)), (False, True)):
            problem = tensor_plan.Problem(M, N, K, batch, itemsize, terms, wgmma)
            plan = tensor_plan.plan(problem, device, True)
            assert plan.tile.shared <= device.shared_bytes and 1 <= plan.splits <= max(1, K * itemsize // 128)
            assert plan.grid % plan.tile.cluster == 0 and ((wgmma and device.wgmma) or not plan.tile.wgmma)
            always = tensor_plan.plan(problem, device, False)
            assert always.splits == always.tile.cluster_k == 1 and always.tile.wgmma == (
                wgmma and name == "h200"
            )


@pytest.mark.parametrize("tile", [t for t in tensor_plan.TILES if t.wgmma], ids=lambda t: t.name)
def test_blocks_of_wgmma_fit_an_sm(tile):
    """Registers of all threads, before and after setmaxnreg, and shared memory."""
    dtype = F if tile.split else B
    report = V7[dtype, dtype, True, True, 0, tile.name].compile("sm_90a").report
    assert (
        report.spill_stores == 0
        and report.registers * 32 * tile.warps <= 1 << 16
        and 2 * 128 * 232 + 128 * 40 <= 1 << 16
    )
    assert report.shared + tile.shared <= KNOWN["h200"].shared_bytes


@gpu
def test_random_shapes():
    for _ in range(60):
        M, N, K = (int(2 ** (torch.rand(()) * 11)) for _ in range(3))
        (ta, tb), pad = LAYOUTS[int(torch.randint(4, ()))], int(torch.randint(3, ())) * 4
        for dtype, version in itertools.product((B, F), ("v6", "v7")):
            need(version)
            a, b = matrix(M, K, ta, dtype, DEVICE, pad), matrix(K, N, tb, dtype, DEVICE, pad)
            assert_right(multiply(a, b, version), a, b, (M, N, K, ta, tb, pad, dtype, version))


X, W = torch.ones(2, 3), torch.ones(5, 3)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (
            {"activation": "tanh"},
            ValueError,
            "activation must be one of gelu, gelu_tanh, relu, silu, got 'tanh'",
        ),
        ({"activation": 3}, TypeError, "activation must be a str"),
        ({"residual": torch.ones(2, 4)}, ValueError, r"residual has shape \(2, 4\), it must be \(2, 5\)"),
        ({"residual": torch.ones(2, 5).half()}, TypeError, "residual is torch.float16"),
        ({"return_pre_activation": 1}, TypeError, "return_pre_activation must be a bool"),
        ({"precision": "fp32"}, ValueError, "precision must be one of ieee, tf32, 3xtf32, got 'fp32'"),
        ({"accumulate_into": torch.ones(3, 5)}, ValueError, r"accumulate_into has shape \(3, 5\)"),
        ({"accumulate_into": torch.ones(5, 3).half()}, TypeError, "accumulate_into must be torch.float32"),
        ({"accumulate_into": torch.ones(3, 5).t()}, ValueError, "accumulate_into must be contiguous"),
        ({"accumulate_into": torch.ones(5, 3)}, ValueError, "needs kernels"),
    ],
)
def test_wrong_options_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        cukern.linear(X, W, **arguments)
