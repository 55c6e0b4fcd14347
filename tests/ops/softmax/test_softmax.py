"""softmax and log_softmax beyond test_ops.py: all lengths, layouts and alignments, scales, extreme values,
long rows, errors.

Results are compared with the formulas in float64. See test_causal_softmax.py for the scores of attention.
"""

import contextlib
import itertools
import math

import pytest
import torch
from helpers import FLOATS, PLACE, gpu, kernels, same_bits, with_sms

import cukern
from cukern.ops.softmax import plan, row_storage
from cukern.ops.softmax.versions import LAUNCHES, LOG_VERSIONS, VERSIONS
from cukern.runtime.launch.kernel import collecting

inf, nan = float("inf"), float("nan")
FUNCTIONS = {
    "softmax": (cukern.softmax, torch.softmax),
    "log_softmax": (cukern.log_softmax, torch.log_softmax),
}
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 65, 127, 129, 257, 513, 1000, 1025, 2049, 4097)
# In half epsilons. 16 bits: one for a correctly rounded result, and a little for the float32 before it.
# float64: the truth has this error.
ROUNDINGS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 6, torch.float64: 40}
EVERY_OP = pytest.mark.parametrize("name", FUNCTIONS)
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)


def exact(
    name: str, x: torch.Tensor, g: torch.Tensor, dim: int = -1, scale: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """y, dx, and the magnitudes that their errors are relative to, from the formulas in float64."""
    x, g = x.double(), g.double()
    if not x.numel():
        return x, x, x, x
    z = (scale * x).movedim(dim, -1)
    d = z - z.amax(-1, keepdim=True)
    s = d.exp().sum(-1, keepdim=True)
    p, g = d.exp() / s, g.movedim(dim, -1)
    if name == "log_softmax":
        y = d - s.log()
        dx = scale * (g - p * g.sum(-1, keepdim=True))
        size = abs(scale) * (g.abs() + p * g.abs().sum(-1, keepdim=True))
        found = y, dx, y.abs().clamp(min=1), size  # 1: log(s) for s near 1 is no more accurate than s
    else:
        dx = scale * p * (g - (p * g).sum(-1, keepdim=True))
        found = p, dx, p, abs(scale) * p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))
    return tuple(t.movedim(-1, dim) for t in found)


def error(actual: torch.Tensor, truth: torch.Tensor, size: torch.Tensor) -> float:
    """The largest error in half epsilons of the size. Subnormal bfloat16 results may become 0."""
    info = torch.finfo(actual.dtype)
    least = info.smallest_normal * (2 / info.eps if actual.dtype == torch.bfloat16 else 4)
    unit, difference = info.eps / 2 * size.clamp(min=least), (actual.double() - truth).abs()
    right = actual == truth.to(actual.dtype)  # also infinities, if the truth overflows the dtype
    return (
        float(torch.where(right, 0.0, difference / unit).nan_to_num(nan=inf).max()) if actual.numel() else 0.0
    )


def check(
    name: str, x: torch.Tensor, version=None, dim: int = -1, scale: float = 1.0, g: torch.Tensor | None = None
) -> None:
    """Forward and backward. 16-bit results are rounded float32 results: one half epsilon. dx also contains
    the rounding of y."""
    leaf = x.detach().requires_grad_()
    g = torch.randn_like(x) if g is None else g
    before = x.detach().clone(), g.clone()
    y = FUNCTIONS[name][0](leaf, dim, scale=scale, version=version)
    (dx,) = torch.autograd.grad(y, leaf, g)
    true_y, true_dx, y_size, dx_size = exact(name, x.detach(), g, dim, scale)
    what = f"{name} of {tuple(x.shape)} {x.stride()} {x.dtype} {dim} {scale} {version}"
    assert y.shape == dx.shape == x.shape and y.dtype == dx.dtype == x.dtype
    y = y.detach()
    assert error(y, true_y, y_size) <= ROUNDINGS[x.dtype], what
    # exp(y) multiplies y's rounding by y
    log_sizes = 1 + true_y.abs().max() if name == "log_softmax" and x.numel() else 0
    assert error(dx, true_dx, dx_size) <= 2 * ROUNDINGS[x.dtype] + 2 + 2 * float(log_sizes), what
    assert same_bits(x.detach(), before[0]) and same_bits(g, before[1]), "an input was changed"


def launch_rows_by(monkeypatch, way: row_storage.Method) -> list[row_storage.Problem]:
    """From now on, `way` launches every row. Returns a list to which each problem is appended."""
    problems: list[row_storage.Problem] = []
    monkeypatch.setattr(row_storage, "first", lambda _, problem: problems.append(problem) or way(problem))
    return problems


@EVERY_OP
@kernels
def test_every_length(device, name):
    for columns, dtype in itertools.product(LENGTHS, FLOATS):
        rows = 3 if columns > 300 or PLACE == "sim" else 70
        check(name, 3 * torch.randn(rows, columns, dtype=dtype, device=device))


@kernels
def test_rows_of_whole_vectors(device):
    """All shapes of the kernels, full and partly full: a warp, blocks, shared memory, clusters. A vector is 8
    bfloat16 or 4 float32."""
    lengths = {
        2: (136, 520, 1024, 1032, 4096, 4104, 8200, 16_384, 16_392, 40_000, 140_000),
        4: (128, 132, 260, 516, 1028, 4096, 4100, 8196, 16_388, 70_000),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns in lengths[dtype.itemsize]:
            if columns < 50_000 or dtype != torch.float16:
                check(
                    "softmax",
                    3 * torch.randn(2 if PLACE == "sim" else 9, columns, dtype=dtype, device=device),
                )
        for version in ("v8", "v9"):
            x = torch.randn(3, 20_000, dtype=dtype, device=device)
            x[0, 7], x[1] = -inf, -inf
            y, truth = cukern.softmax(x, version=version), torch.softmax(x.double(), -1)
            assert bool(y[1].isnan().all()) and error(y[::2], truth[::2], truth[::2]) <= ROUNDINGS[dtype]


@kernels
@EVERY_VERSION
def test_scales(device, version):
    for scale, dtype in itertools.product(
        (-0.7, 0.0, 0.125, 8.0), (torch.bfloat16, torch.float32, torch.float64)
    ):
        check("softmax", torch.randn(2, 67, dtype=dtype, device=device), version, scale=scale)
    check("softmax", 1e4 * torch.randn(2, 67, device=device), version, scale=0.1 / 3)


@kernels
def test_scales_of_logarithms(device):
    for scale, columns in itertools.product((-0.7, 0.0, 0.125), (67, 4500)):
        check("log_softmax", torch.randn(2, columns, device=device), scale=scale)


def layouts(device: str, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, int]]:
    x = torch.randn(8, 83, dtype=dtype, device=device)
    cube = torch.randn(3, 5, 34, dtype=dtype, device=device)
    return {
        "one row": (x[0], 0),
        "a number": (x[0, 0], 0),
        "gaps": (x[:, :80], 1),
        "misaligned": (x[:, 1:], -1),
        "offset rows": (x[1:, 3:60], 1),
        "every third row": (x[::3], 1),
        "columns apart": (x[:, ::2], 1),
        "first dimension": (x, 0),
        "transposed, its last": (x.t(), 1),
        "transposed, its first": (x.t(), 0),
        "middle": (cube, 1),
        "few long ones side by side": (torch.randn(2, 70, 3, dtype=dtype, device=device), 1),
        "many long ones side by side": (torch.randn(2, 150, 67, dtype=dtype, device=device), 1),
        "middle of a view": (cube[:, :, 1:], -2),
        "leading dimensions": (cube, 2),
        "permuted": (cube.permute(2, 0, 1), 1),
        "permuted, side by side": (cube.permute(2, 0, 1), 0),
        "one row for all": (x[:1].expand(5, 83), 1),
        "stride 0": (x[0, 0].expand(5, 6), 1),
        "no rows": (x[:0], 1),
        "no columns": (x[:, :0], 1),
        "none of 3": (cube[:, :0], 2),
        "one column": (x[:, :1], 1),
    }


@EVERY_OP
@kernels
def test_every_layout(device, name):
    for dtype in (torch.bfloat16, torch.float32):
        for what, (x, dim) in layouts(device, dtype).items():
            check(name, x, dim=dim)
            y = FUNCTIONS[name][0](x, dim)
            assert not x.is_contiguous() or y.is_contiguous(), what


@kernels
def test_gradients_of_any_strides(device):
    x, g = torch.randn(6, 40, device=device), torch.randn(40, 90, device=device)
    for grad in (
        g.t()[:6],
        g[:6, 1:41],
        g[:1, :40].expand(6, 40),
        g[0, :6, None].expand(6, 40),
        g[0, 0].expand(6, 40),
    ):
        check("softmax", x, g=grad)
    leaf = x.clone().requires_grad_()
    (torch.softmax(leaf, -1).sum() + cukern.softmax(leaf).sum()).backward()
    assert float(leaf.grad.abs().max()) < 1e-5


@kernels
def test_every_kernel_on_rows_of_any_alignment(device):
    """Rows may begin at any address, with different alignments of x and out."""
    for rows, columns, dtype in (
        (3, 100, torch.float32),
        (2, 1030, torch.float64),
        (1, 9_000, torch.float64),
        (1, 17_000, torch.bfloat16),
    ):
        x = torch.randn(rows, columns + 3, dtype=dtype, device=device)
        for shift, name in zip((0, 1, 3), itertools.cycle(FUNCTIONS), strict=False):
            check(name, x[:, shift : columns + shift])


def test_v5_loads_vectors_of_aligned_rows_only():
    for shift, row, elements in ((0, 104, 4), (1, 104, 1), (0, 103, 1)):
        x = torch.randn(3, row)[:, shift : shift + 100]
        with cukern.backend("sim"):
            with collecting() as found:
                cukern.softmax(x, version="v5")
            check("softmax", x, "v5")
        assert set(found) == {f"softmax_v5<float, {elements}>"}


@kernels
def test_rows_of_padded_inputs(device, monkeypatch):
    """Slices of padded rows as inputs and gradients, by each method. Blocks with few threads make many rounds
    over a short row; the last warp is full or partly full. NaN surrounds the slices."""
    small = [{size: (plan.Shape(vectors, 128, 2),) for size in (2, 4, 8)} for vectors in (4, 2)]
    for name in ("BLOCKS", "CLUSTERS", "MANY_BLOCKS"):
        monkeypatch.setattr(plan, name, tuple(small))
    monkeypatch.setattr(plan, "LEAST_PART", 300)
    ways: dict[str, tuple[row_storage.Method, tuple[int, ...]]] = {
        "a few lanes": (row_storage.in_a_warp, (21, 101)),
        "a block": (row_storage.in_a_block, (1030,)),
        "shared memory": (row_storage.in_shared_memory, (8 * 128 * 10 + 249,)),
        "a cluster": (row_storage.in_a_cluster, (8 * 128 * 7 + 301,)),
        "many blocks": (row_storage.in_many_blocks, (8 * 128 * 7 + 75,)),
    }
    for what, (way, lengths) in ways.items():
        problems = launch_rows_by(monkeypatch, way)
        cases = list(itertools.product(lengths, (torch.bfloat16, torch.float32), ((0, 1), (3, 0), (1, 6))))
        for (columns, dtype, (before, after)), name in zip(
            cases[:: 1 if PLACE == "cuda" else 4], itertools.cycle(FUNCTIONS), strict=False
        ):
            rows = 264 if what == "a cluster" and PLACE == "cuda" else 2
            padded = torch.full((2, rows, before + columns + after), nan, dtype=dtype, device=device)
            x, g = padded[:, :, before : before + columns].normal_()
            check(name, x, "v10", g=g)
            check(name, torch.randn(rows, columns, dtype=dtype, device=device), "v10", g=g)
        assert None not in map(way, problems)


@kernels
def test_long_rows(device):
    """Several blocks in two launches, one block with shared memory, and clusters."""
    for columns, dtype, versions in (
        (20_001, torch.float32, ("v5", "v7", "v8")),
        (33_000, torch.bfloat16, ("v5", "v7", "v8")),
        (66_001, torch.float32, ("v9",)),
        (300_001, torch.bfloat16, ("v9",)),
    ):
        for version in versions:
            check("softmax", 2 * torch.randn(1, columns, dtype=dtype, device=device), version)


@kernels
def test_rows_that_many_blocks_hold(device, monkeypatch):
    """More blocks than a cluster has, and more than a warp has lanes. The first block takes the edges of the
    row."""
    launched = launch_rows_by(monkeypatch, row_storage.in_many_blocks)
    monkeypatch.setattr(row_storage, "device_of", with_sms(132))
    monkeypatch.setattr(plan, "LEAST_PART", 1024 if PLACE == "cuda" else 64)
    for name, vectors, edges, dtype in (
        ("softmax", 34, 1, torch.float32),
        ("log_softmax", 35, 3, torch.bfloat16),
        ("softmax", 36, 0, torch.bfloat16),
    ):
        x = torch.randn(
            2 if PLACE == "cuda" else 1,
            vectors * plan.LEAST_PART * 16 // dtype.itemsize + edges,
            dtype=dtype,
            device=device,
        )
        x[-1, 7] = 9.0
        check(name, x, "v10")
    assert len(launched) == 6 and all(
        plan.many_blocks_storage(*row_storage.numbers(p)).size > 32 for p in launched
    )


@kernels
def test_shapes_of_rows_that_fill_the_gpu(device, monkeypatch):
    """Forward by a cluster, backward by many blocks. The shapes differ from those for few rows."""
    monkeypatch.setattr(row_storage, "device_of", with_sms(2))
    for way, hold, columns, backward in (
        (row_storage.in_a_cluster, plan.cluster_storage, 100_001, False),
        (row_storage.in_many_blocks, plan.many_blocks_storage, 40_003, True),
    ):
        launched = launch_rows_by(monkeypatch, way)
        check("softmax", torch.randn(4, columns, device=device), "v10")
        shapes = (plan.MANY_BLOCKS if backward else plan.CLUSTERS)[backward][4]
        assert len(shapes) > 1 and hold(*row_storage.numbers(launched[backward])).shape == shapes[0]


@kernels
def test_rows_of_whole_vectors_that_several_blocks_hold(device, monkeypatch):
    """These have more vectors in registers. The rest is in shared memory."""
    monkeypatch.setattr(row_storage, "device_of", with_sms(2))
    for way, hold, columns, dtype in (
        (row_storage.in_a_cluster, plan.cluster_storage, 36_864, torch.float32),
        (row_storage.in_many_blocks, plan.many_blocks_storage, 40_000, torch.float32),
        (row_storage.in_many_blocks, plan.many_blocks_storage, 72_000, torch.bfloat16),
    ):
        launched = launch_rows_by(monkeypatch, way)
        check("softmax", torch.randn(4, columns, dtype=dtype, device=device), "v10")
        for backward, problem in enumerate(launched):
            found = hold(*row_storage.numbers(problem))
            assert found.shape == plan.Shape(plan.EXACT_VECTORS[backward][dtype.itemsize], 512, 2)
            assert found.size > 1 and found.shared, "some vectors are in shared memory"


def assert_near_torch(name: str, x: torch.Tensor, version, rtol: float = 1e-6, atol: float = 1e-38) -> None:
    exact = FUNCTIONS.get(name, FUNCTIONS["softmax"])[1](x.double(), -1)
    torch.testing.assert_close(
        getattr(cukern, name)(x, version=version).double(), exact, rtol=rtol, atol=atol
    )


@kernels
@pytest.mark.parametrize(
    "name, version", [*(("softmax", v) for v in (None, "v1", "v7", "v8")), ("causal_softmax", "v2")]
)
def test_small_results_beside_a_peak(device, name, version):
    """Also in threads whose elements are all far below the peak."""
    for columns, least in itertools.product((100, 1500, 5000), (-86, -70)):
        x = torch.empty(1, columns, device=device).uniform_(least, least + 10)
        x[:, columns // 3] = 0
        assert_near_torch(name, x, version)


@kernels
def test_small_results_in_long_rows_that_rise(device):
    """The later elements of some warps are far above their first, and one warp's are far above the
    others'."""
    step = torch.full((1, 100_000), -22.05, device=device)
    step[:, :20_000], step[:, 20_000:25_000] = 0, 22.1
    peak = torch.full((1, 33_000), -105.9, device=device)
    peak[:, 30_000], peak[:, 31_000] = -85.9, 0
    for x, version in (
        (step[:, :33_000], "v8"),
        (step, "v9"),
        (step, "v10"),
        (peak, "v8"),
        (peak + 200_000, "v8"),
    ):
        assert_near_torch("softmax", x, version, atol=1.2e-38)


@kernels
def test_long_rows_that_rise(device):
    """Later elements are far above the maximum of the first, relative to which the exponentials were
    computed."""
    for columns, dtype, version in (
        (20_001, torch.float32, "v8"),
        (33_000, torch.bfloat16, "v8"),
        (66_001, torch.float32, "v9"),
    ):
        x = torch.linspace(-300, 300, columns, device=device)
        for row in (x, x + 1e6, x.masked_fill(x < 0, -inf)):
            for name in FUNCTIONS:
                assert_near_torch(
                    name, row.to(dtype)[None], version, 1e-6 if dtype == torch.float32 else 2**-8, 1e-37
                )


@kernels
def test_extreme_values_in_long_rows(device):
    x = torch.zeros(1, 200_000, device=device)
    x[0, 150_000] = inf
    assert cukern.softmax(x).isnan().all()
    x[0, :] = -inf
    assert cukern.softmax(x).isnan().all()
    x[0, 77_777] = 3.0
    assert float(cukern.softmax(x)[0, 77_777]) == 1.0 and float(cukern.softmax(x).sum()) == 1.0


@kernels
@pytest.mark.parametrize(
    ("columns", "of_largest", "of_each"), ((1024, 2.5, 4), (5000, 2.5, 4), (16_400, 2, 2.7))
)
def test_errors_of_float32(device, columns, of_largest, of_each):
    """In half epsilons of a row's largest result, as the bench measures, and of each result. exp and the
    division contribute one each; torch's error is 10 for each result. Sums of long rows are computed in
    double."""
    x = 4 * torch.randn(16 if PLACE == "cuda" else 2, columns, device=device)
    y, (truth, *_) = cukern.softmax(x), exact("softmax", x, x)
    largest = truth.amax(-1, keepdim=True)
    assert ((y.double() - truth).abs() / largest).max() <= of_largest * 2**-24
    assert error(y, truth, truth) <= of_each


def extreme_rows(dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    rows = [
        [0.0] * 5, [-inf] * 5, [-inf, 1, 2, -inf, 3], [inf, 1, 2, 3, 4], [inf, -inf, inf, 0, 1],
        [nan, 1, 2, 3, 4], [nan] * 5, [nan, inf, -inf, 1, 2], [-inf, nan, -inf, -inf, -inf],
        [info.max, info.max / 2, 0, 1, info.min], [info.max] * 5, [info.min] * 5,
        [tiny, -tiny, 0, tiny, tiny], [-inf, -inf, -inf, -inf, 7], [0, -80, -85, -95, -101],
        [1e4, 9990, 9995, 0, -1e4],
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


@kernels
@EVERY_VERSION
def test_extreme_values(device, version):
    """Alone, and in rows of 400 columns, where a thread has no other element. NaN and infinities are the same
    as torch's."""
    for dtype, wide, name in itertools.product(FLOATS, (False, True), FUNCTIONS):
        if name == "log_softmax" and version not in LOG_VERSIONS:
            continue
        x = extreme_rows(dtype).to(device)
        if wide:
            x = torch.cat((x, torch.full((len(x), 395), -inf, dtype=dtype, device=device)), 1)
        y, truth = FUNCTIONS[name][0](x, version=version), FUNCTIONS[name][1](x.double(), -1)
        finite = truth.isfinite() & (truth.abs() <= torch.finfo(dtype).max)
        assert torch.equal(y.isnan(), truth.isnan()), f"{name} {dtype} {y} {truth}"
        assert torch.equal(y.double()[truth.isinf()], truth[truth.isinf()])
        size = truth.abs().clamp(min=1) if name == "log_softmax" else truth
        assert error(y[finite], truth[finite], size[finite]) <= ROUNDINGS[dtype], f"{name} {dtype}"


@kernels
def test_small_results_of_float32_are_kept(device):
    y = cukern.softmax(torch.tensor([[0.0, -88.0, -95.0, -103.0, -110.0]], device=device))
    truth = torch.tensor([0.0, -88.0, -95.0, -103.0, -110.0]).double().softmax(-1)
    assert ((y.cpu().double() - truth).abs() <= 2 * truth * 2**-24 + 2.0**-149).all() and float(y[0, 3]) > 0


@kernels
@EVERY_OP
def test_derivatives_of_every_order(device, name):
    function = FUNCTIONS[name][0]
    for shape, dim in (((2, 5), 1), ((2, 4, 2), 1), ((4, 3), 0)):
        x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for scale in (1.0, -0.5):
            assert torch.autograd.gradcheck(
                lambda t, dim=dim, s=scale: function(t, dim, scale=s), x, fast_mode=PLACE == "sim"
            )
        assert torch.autograd.gradgradcheck(
            lambda t, dim=dim: function(t, dim, scale=0.7), x, fast_mode=PLACE == "sim"
        )
    x = torch.randn(2, 3, dtype=torch.float64, device=device, requires_grad=True)

    def first(t):
        return torch.autograd.grad(function(t).square().sum(), t, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(first, x, fast_mode=True), "the third derivative"


@kernels
def test_forward_and_backward_versions_are_independent(device):
    x, g = torch.randn(3, 300, device=device), torch.randn(3, 300, device=device)
    found = {}
    for pair in itertools.product(("v1", "v5"), ("v3", "v6")):
        leaf = x.clone().requires_grad_()
        y = cukern.softmax(leaf, version=pair)
        found[pair] = y.detach(), torch.autograd.grad(y, leaf, g)[0]
    for forward, backward in found:
        y, dx = found[forward, backward]
        assert same_bits(y, cukern.softmax(x, version=forward))
        assert same_bits(dx, torch.ops.cukern._softmax_backward(y, g, 1, 1.0, False, backward))
    assert not same_bits(found["v1", "v3"][1], found["v1", "v6"][1])
    assert same_bits(cukern.softmax(x, version=(None, "v2")), cukern.softmax(x))


@gpu
@pytest.mark.parametrize("captured", (False, True), ids=("stream", "graph"))
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    (
        (8, 1024, torch.float32),
        (8192, 1024, torch.bfloat16),
        (4096, 4096, torch.float32),
        (528, 50_304, torch.bfloat16),
    ),
)
def test_overlapping_launches(rows, columns, dtype, captured):
    """Each launch reads the output of the launch before it. If it read too early, it would see NaN."""
    steps = torch.empty(13, rows, columns, dtype=dtype, device="cuda")
    x, (forward, backward) = torch.randn_like(steps[0]), LAUNCHES["v10"]

    def run(between):
        steps.fill_(nan)
        steps[0] = x
        for i in range(0, 12, 2):
            forward(steps[i + 1], steps[i], 1.0, False)
            between()
            backward(steps[i + 2], steps[i + 1], steps[i], float(columns), False)
            between()

    run(torch.cuda.synchronize)
    expected, graph = steps.clone(), torch.cuda.CUDAGraph()
    assert expected.isfinite().all()
    with torch.cuda.graph(graph) if captured else contextlib.nullcontext():
        run(lambda: None)
    if captured:
        graph.replay()
    assert same_bits(steps, expected)


@gpu
@pytest.mark.parametrize("version", ("v1", "v9"))
def test_opcheck(version, device="cuda"):
    for x in (
        torch.randn(5, 7, device=device),
        torch.randn(5, 9, device=device)[:, 1:8],
        torch.randn(2, 3, 4, device=device),
    ):
        torch.library.opcheck(torch.ops.cukern._softmax.default, (x, 1, 0.5, False, version))
        torch.library.opcheck(
            torch.ops.cukern._softmax_backward.default, (x, torch.randn_like(x), 1, 0.5, False, version)
        )
        torch.library.opcheck(torch.ops.cukern._softmax.default, (x[:0], 1, 0.5, False, version))


@kernels
@pytest.mark.filterwarnings("default")  # torch's compiler emits warnings
def test_torch_compile_along_any_dimension(device):
    x = torch.randn(3, 5, 4, device=device, requires_grad=True)
    for dim, view in ((0, x), (1, x), (1, x.transpose(0, 1)), (2, x)):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda t, dim=dim: 2 * cukern.log_softmax(t, dim, scale=0.5), fullgraph=True, backend="aot_eager"
        )
        y, expected = compiled(view), 2 * cukern.log_softmax(view, dim, scale=0.5)
        assert torch.equal(y, expected)
        g = torch.randn_like(y)
        assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(expected, x, g)[0])


def test_plans_fit_all_rows():
    for itemsize, columns, exact in itertools.product(
        (2, 4, 8), (*range(1, 600), 1023, 1024, 1025, 4096, 16384, 50257), (True, False)
    ):
        vectors = plan.vectors_of(columns, itemsize)
        assert 0 <= columns * itemsize - 16 * vectors < 16
        if warp := plan.warp_group(vectors, itemsize, exact, plan.WARP_VECTORS[itemsize]):
            assert warp.vectors * warp.width >= vectors and warp.width in (1, 2, 4, 8, 16, 32)
            assert exact or warp.width >= 2 * 16 // itemsize, (
                "a lane for each element of the two vectors at the edges of a row"
            )
        for shapes in (*plan.SHAPES, *plan.SHAPES_CAUSAL):
            if found := plan.block_shape(vectors, shapes[itemsize]):
                assert found.vectors * found.threads >= vectors and found.threads % 32 == 0
    for rows, vectors in itertools.product((1, 7, 64, 10_000), (1, 5000, 100_000, 10_000_000)):
        assert 1 <= plan.pieces(rows, vectors, 132) <= plan.LOOP_THREADS


@pytest.mark.parametrize("backward", (False, True))
def test_the_plan_of_rows_in_shared_memory(backward):
    """Shared memory holds all vectors. An SM of an H200 holds shape.blocks blocks: it has 228 KiB, and each
    block reserves 1 KiB."""
    shared, sms, sizes = 227 << 10, 132, set()
    lengths = 16_385, 50_257, 131_072, 1 << 20, 1 << 23
    for rows, columns, itemsize, exact in itertools.product(
        (1, 16, 64, 1024), lengths, (2, 4), (False, True)
    ):
        vectors = plan.vectors_of(columns, itemsize)
        block = plan.block_storage(vectors, itemsize, shared, backward)
        numbers = rows, vectors, itemsize, shared, sms, backward, exact
        cluster, many = plan.cluster_storage(*numbers), plan.many_blocks_storage(*numbers)
        assert cluster or many or columns == 1 << 23
        for found in filter(None, (block, cluster, many)):
            shape = found.shape
            round_bytes = shape.threads * 16 * (2 if backward else 1)
            assert found.size * (shape.vectors + found.shared // round_bytes) * shape.threads >= vectors
            assert found.shared % round_bytes == 0 and found.shared <= shared
            assert shape.threads * 16 % 128 == 0, "blocks begin at cache lines"
            assert shape.blocks * (found.shared + 2048) <= 228 << 10
        if cluster:
            assert rows * cluster.size >= sms // 2
            sizes.add(cluster.size)
        if many:
            assert many.size <= sms * many.shape.blocks // 2, "the blocks of a row must run at the same time"
    assert sizes == {2, 4, 8}


def test_refusals():
    x = torch.randn(3, 4)
    with pytest.raises(TypeError, match=r"x must be .* got torch.int64"):
        cukern.softmax(torch.arange(3))
    with pytest.raises(ValueError, match="the tensor is on cpu"):
        cukern.softmax(x, version="v3")
    for version in ("v0", ("v1", "v99")):
        with (
            cukern.backend("sim"),
            pytest.raises(ValueError, match=r"cukern.softmax has no version .* it has v1, v2"),
        ):
            cukern.softmax(x, version=version)
    with pytest.raises(ValueError, match=r"log_softmax has no version 'v1'; it has v5"):
        cukern.log_softmax(x, version="v1")
    assert list(VERSIONS) == [f"v{i}" for i in range(1, len(VERSIONS) + 1)]


def test_on_the_cpu_it_is_torch():
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    assert torch.equal(cukern.softmax(x, 0), torch.softmax(x.float(), 0).bfloat16())
    assert torch.equal(cukern.softmax(x, scale=0.3), torch.softmax(x.float() * 0.3, -1).bfloat16())
    assert math.isclose(float(cukern.log_softmax(torch.zeros(4))[0]), -math.log(4), rel_tol=1e-6)
