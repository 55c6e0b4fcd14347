"""matmul and linear beyond test_ops.py: all layouts, edges, batches, no copies, higher derivatives,
errors."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers import PLACE, exact_gradients, gpu, kernels, places, same_bits

import cukern
from cukern.bench import environment, verify
from cukern.ops.matmul import tensor_cores, versions
from cukern.ops.matmul.plan import BK, CHAIN, FMA_TILES, MAX_CHAIN, MIN_FMA_K_TILES, fma_plan
from cukern.runtime.device import KNOWN, SIMULATED, assumed
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import collecting
from cukern.runtime.registry import CASES

SIZES = (1, 3, 8, 33, 130)
PLACES = pytest.mark.parametrize("device, version", places("matmul"))


def matrix(rows: int, columns: int, layout: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A random matrix with this memory layout."""
    if layout == "rows":
        return torch.randn(rows, columns, device=device, dtype=dtype)
    if layout == "columns":
        return torch.randn(columns, rows, device=device, dtype=dtype).t()
    if layout == "misaligned":
        return torch.randn(rows * (columns + 3) + 1, device=device, dtype=dtype)[1:].view(rows, columns + 3)[
            :, 1 : columns + 1
        ]
    if layout == "strided":
        return torch.randn(2 * rows, 3 * columns, device=device, dtype=dtype)[::2, ::3]
    assert layout == "expanded"
    return torch.randn(1, columns, device=device, dtype=dtype).expand(rows, columns)


def check(a: torch.Tensor, b: torch.Tensor, version: str | None, what: str) -> None:
    """The largest error, relative to the sum of |a b|, is at most twice torch's, plus the op's own
    roundings."""
    exact, scale = a.cpu().double() @ b.cpu().double(), (a.abs().double() @ b.abs().double()).cpu()

    def error(y: torch.Tensor) -> float:
        relative = torch.where(scale == 0, 0.0, (y.cpu().double() - exact).abs() / scale)
        return float(relative.nan_to_num(nan=math.inf).max())

    # A product of 3xTF32 has an error of up to 2^-21, that is 4 epsilons, and a rounding.
    roundings = 5 if a.dtype == torch.float32 and version in ("v6", "v7") else CASES["matmul"].roundings
    ours = cukern.matmul(a, b, version=version)
    assert ours.shape == exact.shape and ours.dtype == a.dtype and ours.is_contiguous()
    assert error(ours) <= 2 * error(a @ b) + roundings * torch.finfo(a.dtype).eps, what


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@PLACES
def test_every_pair_of_layouts(device, version, dtype):
    layouts = ("rows", "columns", "misaligned", "strided", "expanded")
    sizes = ((37, 70, 45), (1, 5, 9), (128, 256, 64), (9, 1, 5), (7, 3, 1))[: 5 if PLACE == "cuda" else 1]
    pairs = list(itertools.product(layouts, layouts))
    # in the simulator a half, which has each on both sides
    for left, right in pairs if PLACE == "cuda" else pairs[::2]:
        for m, n, k in sizes:
            a, b = matrix(m, k, left, device, dtype), matrix(k, n, right, device, dtype)
            check(a, b, version, f"{left} x {right}, {m} {n} {k}")


@PLACES
def test_every_small_size(device, version):
    """In the simulator all pairs of sizes for any two of m, n and k, but not all triples."""
    every = itertools.product(SIZES, SIZES, SIZES)
    pairs = (
        (m, n, SIZES[(i + j + 1) % len(SIZES)])
        for (i, m), (j, n) in itertools.product(enumerate(SIZES), enumerate(SIZES))
    )
    for m, n, k in every if PLACE == "cuda" else pairs:
        check(
            matrix(m, k, "rows", device, torch.float32),
            matrix(k, n, "rows", device, torch.float32),
            version,
            f"{m} {n} {k}",
        )


@pytest.mark.parametrize("itemsize", (4, 8))
@assumed(KNOWN["h200"])
def test_plan_assigns_every_tile(itemsize):
    sizes = (1, 31, 128, 129, 1000, 4096, 50257)
    for m, n, k in itertools.product(sizes, sizes, (0, *sizes)):
        tile, grid, shared_blocks, shared_tiles, chain, room = fma_plan(
            m, n, k, 1, itemsize, True, False, SIMULATED
        )
        if tile.name.startswith("Direct"):
            assert m <= 8 and grid == -(-m // tile.rows) * -(-n * chain // 128) and chain in (8, 16, 32)
            continue
        tiles, k_tiles = -(-m // tile.rows) * -(-n // tile.columns), max(1, -(-k // BK))
        assert tile in FMA_TILES[itemsize] and 0 <= shared_tiles <= tiles
        assert shared_blocks <= grid == min(132 * tile.per_sm, shared_blocks + tiles - shared_tiles)
        assert chain == k_tiles <= MAX_CHAIN or (k_tiles > MAX_CHAIN and CHAIN / 2 < chain <= CHAIN)
        assert room == 2 * shared_blocks + (grid if k_tiles > chain else 0)
        if shared_blocks:
            assert (
                shared_blocks * MIN_FMA_K_TILES <= shared_tiles * k_tiles
                and shared_blocks <= 132 * tile.per_sm
            )
        else:
            assert shared_tiles == 0


@kernels
def test_shapes_that_split_the_last_wave_of_tiles(device):
    """Also with K so long that sums are split into chains, and in tiles that several blocks share."""
    large = (
        (257, 129, 5000),
        (3000, 1000, 777),
        (4097, 769, 300),
        (64, 64, 30011),
        (16, 20000, 40),
        (20000, 16, 40),
        (1, 1, 100003),
    )
    small = (150, 70, 100), (20, 500, 40), (200, 50, 1000), (1, 1, 10003)
    for m, n, k in large if PLACE == "cuda" else small:
        check(
            matrix(m, k, "rows", device, torch.float32),
            matrix(k, n, "columns", device, torch.float32),
            None,
            f"{m} {n} {k}",
        )


@gpu
@pytest.mark.parametrize(
    "m, n, k", [(4096, 4096, 4096), (4096, 3072, 768), (8192, 8192, 8192), (1000, 999, 10007)]
)
def test_largest_error_is_at_most_twice_that_of_cublas(m, n, k):
    """Also where cuBLAS splits K into several sums, as for the gradients of a linear layer."""
    for case, name in itertools.product((CASES["matmul"], CASES["linear"]), ("fwd", "bwd")):
        inputs = case.make((m, n, k), torch.float32, "cuda")
        with environment.float32_products():
            for one in [name] if name == "fwd" else [f"bwd:{x}" for x in case.inputs[:2]]:
                error = verify.errors(case, inputs, {"ours": case.call, "cuBLAS": case.reference}, one)
                assert error["ours"] <= 2 * error["cuBLAS"], f"{case.name} {one}: {error}"


@PLACES
def test_zero_sizes(device, version):
    for m, n, k in ((0, 4, 5), (4, 0, 5), (4, 5, 0), (0, 0, 0)):
        a = torch.randn(m, k, device=device, requires_grad=True)
        weight = torch.randn(n, k, device=device, requires_grad=True)
        bias = torch.randn(n, device=device, requires_grad=True)
        out = cukern.linear(a, weight, bias, version=version)
        assert same_bits(out, bias.expand(m, n))
        gradients = torch.autograd.grad(out, (a, weight, bias), torch.ones_like(out))
        assert [g.shape for g in gradients] == [a.shape, weight.shape, bias.shape]
        assert bool((gradients[0] == weight.sum(0)).all()) or n > 0
        assert bool((gradients[2] == m).all()) and (m > 0 or bool((gradients[1] == 0).all()))


@PLACES
def test_zero_sizes_with_leading_dimensions(device, version):
    """Shapes, gradients and tangents of matmul and linear are torch's."""
    for *lead, n, k in (
        (2, 3, 4, 0),
        (2, 3, 0, 0),
        (2, 3, 0, 5),
        (0, 3, 4, 5),
        (2, 0, 4, 5),
        (0, 3, 0, 0),
        (0, 4, 5),
        (2, 4, 0),
        (4, 0),
    ):
        x, weight, bias = [torch.randn(s, device=device) for s in ((*lead, k), (n, k), (n,))]
        pairs = [
            ((x, weight, bias), lambda *t: cukern.linear(*t, version=version), torch.nn.functional.linear)
        ]
        if len(lead) > 1:
            pairs.append(
                ((x, weight.t().contiguous()), lambda *t: cukern.matmul(*t, version=version), torch.matmul)
            )
        for inputs, ours, theirs in pairs:
            a, b = (exact_gradients(f, inputs, torch.ones(*lead, n, device=device)) for f in (ours, theirs))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            tangents = tuple(torch.randn_like(t) for t in inputs)
            a, b = (torch.func.jvp(f, tuple(inputs), tangents)[1] for f in (ours, theirs))
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@PLACES
def test_leading_dimensions(device, version):
    a, b = torch.randn(2, 3, 4, 5, device=device), torch.randn(5, 6, device=device)
    weight, bias = b.t().contiguous(), torch.randn(6, device=device)
    for x in (a, a.transpose(0, 1), a.transpose(1, 2), a[:, :0], a[0], a[:, 1]):
        assert torch.allclose(cukern.matmul(x, b, version=version), x @ b, atol=1e-5)
        assert cukern.linear(x, weight, bias, version=version).shape == (*x.shape[:-1], 6)
    one = a[0, 0, 0]
    assert torch.allclose(cukern.linear(one, weight, bias, version=version), one @ b + bias, atol=1e-5)


@PLACES
def test_gradients_of_every_input_alone(device, version):
    x, weight, bias = (
        torch.randn(s, device=device, dtype=torch.float64) for s in ((19, 33), (21, 33), (21,))
    )
    dout = torch.randn(19, 21, device=device, dtype=torch.float64)
    expected = exact_gradients(torch.nn.functional.linear, (x, weight, bias), dout)[1:]
    for wanted in range(3):
        inputs = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, weight, bias))]
        (ours,) = torch.autograd.grad(cukern.linear(*inputs, version=version), inputs[wanted], dout)
        assert torch.allclose(ours, expected[wanted], atol=1e-12)


@gpu
def test_a_gradient_that_is_one_number_for_all():
    """The gradient of sum() is an expanded scalar, with stride 0."""
    x, weight, bias = (
        torch.randn(s, device="cuda", requires_grad=True) for s in ((300, 40), (50, 40), (50,))
    )
    ours = torch.autograd.grad(cukern.linear(x, weight, bias).sum(), (x, weight, bias))
    theirs = torch.autograd.grad(torch.nn.functional.linear(x, weight, bias).sum(), (x, weight, bias))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


@gpu
def test_transposes_are_not_copied():
    x, weight = (
        torch.randn(1024, 512, device="cuda", requires_grad=True),
        torch.randn(768, 512, device="cuda", requires_grad=True),
    )
    dout = torch.randn(1024, 768, device="cuda")

    def peak(function) -> int:
        function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before

    assert peak(lambda: cukern.linear(x.detach(), weight.detach(), version="v4")) <= 4 * 1024 * 768
    out = cukern.linear(x, weight.detach(), version="v4")
    assert peak(lambda: torch.autograd.grad(out, x, dout, retain_graph=True)) <= 4 * 1024 * 512
    out = cukern.linear(x.detach(), weight, version="v4")
    assert peak(lambda: torch.autograd.grad(out, weight, dout, retain_graph=True)) <= 4 * 768 * 512


@gpu
def test_nan_and_infinity_stay_in_their_rows():
    a, b = torch.randn(200, 60, device="cuda"), torch.randn(60, 300, device="cuda")
    a[7, 3], a[150, 59] = float("nan"), float("inf")
    for version in (*CASES["matmul"].op.versions, None):
        out = cukern.matmul(a, b, version=version)
        assert bool(out[7].isnan().all()) and not bool(out[150].isfinite().any())
        rest = torch.ones(200, dtype=torch.bool, device="cuda")
        rest[[7, 150]] = False
        assert bool(out[rest].isfinite().all())


@gpu
@pytest.mark.parametrize("m, n, k", ((2**25 + 3, 70, 65), (65, 2**25 + 3, 70)))
def test_more_than_2_to_the_31_elements(m, n, k, most_memory):
    if torch.cuda.mem_get_info()[0] < 3 * 4 * (m * k + k * n + m * n) // 2:
        pytest.skip("needs more free memory on the GPU")
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda")
    out = cukern.matmul(a, b)
    assert out.numel() > 2**31
    rows = torch.tensor([0, m // 2, m - 1], device="cuda")
    columns = torch.tensor([0, n // 2, n - 1], device="cuda")
    exact = a[rows].double() @ b[:, columns].double()
    assert torch.allclose(out[rows][:, columns].double(), exact, atol=1e-4)


X, B = torch.ones(2, 3), torch.ones(3, 5)


@pytest.mark.parametrize(
    "function, arguments, error, words",
    [
        (cukern.matmul, (X, torch.ones(4, 5)), ValueError, "3.*4"),
        (cukern.matmul, (X[0], B), ValueError, r"\(3,\)"),
        (cukern.matmul, (X, torch.ones(2, 4, 5)), ValueError, r"\(2, 4, 5\)"),
        (cukern.matmul, (torch.ones(3, 2, 3), torch.ones(2, 3, 5)), ValueError, r"broadcast.*\(3, 2, 3\)"),
        (cukern.matmul, (X.int(), B.int()), TypeError, "int32"),
        (cukern.matmul, (X, B.double()), TypeError, "float64.*float32"),
        (cukern.matmul, (X, B.to("meta")), ValueError, "meta.*cpu"),
        (cukern.matmul, (torch._neg_view(X), B), ValueError, "negative bit"),
        (cukern.matmul, (X.to(torch.complex64), B), TypeError, "complex64"),
        (cukern.linear, (X, B.t(), torch.ones(4)), ValueError, r"bias has shape \(4,\), it must be \(5,\)"),
        (
            cukern.linear,
            (X, B),
            ValueError,
            r"x must be \(..., K\) and weight \(N, K\), got \(2, 3\) and \(3, 5\)",
        ),
        (partial(cukern.linear, version="v0"), (X, B.t()), ValueError, "no version 'v0'; it has cublas, v1"),
        (partial(cukern.linear, version="v1"), (X, B.t()), ValueError, r"'v1'.*cpu"),
    ],
)
def test_wrong_arguments_are_refused(function, arguments, error, words):
    with pytest.raises(error, match=words):
        function(*arguments)


Y, V, C = X.bfloat16(), torch.ones(5, 3).bfloat16(), torch.ones(5).bfloat16()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((Y, V[0]), ValueError, r"weight \(N, K\), got \(2, 3\) and \(3,\)"),
        ((Y, V[:, :2]), ValueError, r"weight \(N, K\), got \(2, 3\) and \(5, 2\)"),
        ((Y[0, 0], V), ValueError, r"x must be \(..., K\)"),
        ((Y, V.half()), TypeError, "weight is torch.float16, x is torch.bfloat16"),
        ((Y, V.to("meta")), ValueError, "weight is on meta, x is on cpu"),
        ((Y, V.to_sparse()), TypeError, "weight must be a strided tensor"),
        ((Y.to_sparse(), V), TypeError, "x must be a strided tensor"),
        (([Y, Y], V), TypeError, "x must be a strided tensor, got a nested one"),
        ((Y, [V[0], V[0]]), TypeError, "weight must be a strided tensor, got a nested one"),
        ((Y, V, C[:1]), ValueError, r"bias has shape \(1,\), it must be \(5,\)"),
        ((Y, V, C.float()), TypeError, "bias is torch.float32, x is torch.bfloat16"),
        ((Y, V, C.to("meta")), ValueError, "bias is on meta, x is on cpu"),
        ((Y, V, C.to_sparse()), TypeError, "bias must be a strided tensor"),
        ((Y, None), TypeError, "weight must be a torch.Tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_what_torch_computes_is_refused_by_name(arguments, error, words, monkeypatch):
    """The products of 16-bit types on a GPU, which are cuBLAS's. Here they are on the CPU, where torch has
    the same functions. A list is a nested tensor."""
    arguments = [torch.nested.nested_tensor(t) if isinstance(t, list) else t for t in arguments]
    monkeypatch.setattr(
        "cukern.ops.matmul.op.default_is_cublas", lambda dtype, device, *_: dtype == torch.bfloat16
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: not x.is_meta), raising=False)
    assert same_bits(cukern.linear(Y, V, C), torch.nn.functional.linear(Y, V, C))
    with pytest.raises(error, match=words):
        cukern.linear(*arguments)


@pytest.mark.parametrize("most", (0, 1 << 20))
def test_the_gradient_of_a_bias_where_torch_computes(most, monkeypatch):
    """By torch's autograd, or for many results of 16 bits by a product with ones."""
    monkeypatch.setattr("cukern.ops.matmul.op.SUM_BY_PRODUCT", most)
    monkeypatch.setattr("cukern.ops.matmul.op.default_is_cublas", lambda dtype, *_: dtype == torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: not x.is_meta), raising=False)
    x, weight, bias = (torch.randn(s).bfloat16().requires_grad_() for s in ((2, 8, 16), (24, 16), (24,)))
    out = cukern.linear(x, weight, bias)
    by_torch = type(out.grad_fn.next_functions[0][0]).__name__ == "AddmmBackward0"
    assert by_torch == bool(most)
    found = torch.autograd.grad(out.square().sum(), (x, weight, bias))
    exact = torch.nn.functional.linear(*(t.double() for t in (x, weight, bias)))
    expected = torch.autograd.grad(exact.square().sum(), (x, weight, bias))
    for one, other in zip((out, *found), (exact, *expected), strict=True):
        assert (one.double() - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("name", ("h200", "b200", "a100"))
@pytest.mark.parametrize(
    "m, n, k, odd",
    (
        (1570, 1855, 2520, "y dx dw"),
        (64, 64, 64, ""),
        (1, 65, 65, "dw"),
        (9, 65, 65, "y dx"),
        (640, 256, 250, "y dx dw"),
    ),
)
def test_odd_products_of_16_bits_are_not_cublas_by_default(name, m, n, k, odd):
    x, w, g = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
    found = {}
    with cukern.backend("sim"), assumed(KNOWN[name]):
        for part, a, b in (("y", x, w.t()), ("dx", g, w), ("dw", g.t(), x)):
            with collecting() as kernels:
                cukern.matmul(a, b)
            # v7 has v6's kernel for few tiles
            found[part] = any(kernel.startswith(("matmul_v6<", "matmul_v7<")) for kernel in kernels)
    assert found == {part: part in odd.split() for part in found}


def test_float64_is_cublas_by_default():
    x = torch.ones(64, 64, dtype=torch.float64)
    with cukern.backend("sim"), collecting() as found:
        cukern.linear(x, x, x[0])
    assert not found


@kernels
@pytest.mark.skipif(PLACE != "sim", reason="calls a kernel of the simulator with addresses before its memory")
def test_v5_ends_where_tiles_have_numbers_up_to_2_31():
    """The last tiles of 2^31 - 1 matrices of one element. A block then adds the grid to the number of its
    tile."""
    first, batch = 2**31 - 6, 2**31 - 1
    a, b, out = torch.ones(1, 1), torch.full((1, 1), 3.0), torch.zeros(8)
    kernel = versions._V5[torch.float32, "ALONG_K", "ALONG_K", "Tile64x64"].on(SIMULATED)
    sizes = tensor_cores.SIZES.pack(1, 1, 1, batch, 1, 0, 1, 1, 0, 0)
    with backend.simulated_memory([a, b, out]):
        kernel(
            (3, 1, 1),
            (128, 1, 1),
            0,
            (out.data_ptr() - 4 * first) % 2**64,
            0,
            a.data_ptr(),
            b.data_ptr(),
            0,
            sizes,
            0,
            first,
            1,
        )
    assert out.tolist() == [3.0] * 5 + [0.0] * 3
