"""cukern.square: numbers, gradients, shapes, strides, extreme values, and refusals. See
test_square_in_torch.py for the rest of torch."""

import itertools

import numpy
import pytest
import torch
from helpers import FLOATS, assert_accurate, gpu, places, same_bits

import cukern
from cukern.ops.square import _launch_square
from cukern.runtime.registry import CASES

SHAPES = [
    (),
    (0,),
    (3, 0, 5),
    (1,),
    (1, 1),
    (2,),
    (3,),
    (7,),
    (255,),
    (256,),
    (257,),
    (1023,),
    (2049,),
    (31, 33),
    (2, 3, 5, 7),
    (64, 1000),
]
PLACES = pytest.mark.parametrize("device, version", places("square"))
inf, nan = float("inf"), float("nan")


def double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double()


def check(x: torch.Tensor, version: str | None) -> None:
    """Forward, backward and double backward against float64 and against torch.square, of one input."""
    before = x.detach().clone()
    ours, theirs = x.detach().requires_grad_(), x.detach().clone().requires_grad_()
    dout, ddx = torch.randn_like(before), torch.randn_like(before)
    results = []
    for leaf, function in ((ours, lambda t: cukern.square(t, version=version)), (theirs, torch.square)):
        weight = dout.clone().requires_grad_()
        out = function(leaf)
        (dx,) = torch.autograd.grad(out, leaf, weight, create_graph=True)
        results.append([out, dx, *torch.autograd.grad(dx, (leaf, weight), ddx)])
    wide, d, g = double(before), double(dout), double(ddx)
    exact = [wide * wide, 2 * wide * d, 2 * d * g, 2 * wide * g]
    for what, a, b, e in zip(("out", "dx", "d2x", "ddout"), *results, exact, strict=True):
        assert_accurate(a, b, e, f"{what} of {tuple(x.shape)} {x.dtype} {version}")
    assert same_bits(x.detach(), before), "the input was changed"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_every_shape_and_dtype(device, version, dtype):
    for shape in SHAPES:
        check(torch.randn(shape, dtype=dtype, device=device), version)


def views(device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x = torch.randn(24, 35, dtype=dtype, device=device)
    image = torch.randn(2, 3, 5, 7, dtype=dtype, device=device)
    return {
        "transposed": x.t(),
        "permuted": image.permute(2, 0, 3, 1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "column": x[:, 3],
        "every third": x.view(-1)[::3],
        "gaps": x[:, :32],
        "offset": x[1:, 1:],
        "expanded": x[:1].expand(9, 35),
        "stride 0": x[0, 0].expand(5, 6),
        "overlapping": x.view(-1).as_strided((10, 8), (2, 1)),
        "reversed in memory": x.flip(0).t(),
        "empty view": x[5:5],
        **{f"misaligned by {k}": x.view(-1)[k:] for k in (1, 2, 3, 4, 5)},
        **{
            f"misaligned by {k}, {n} long": x.view(-1)[k : k + n]
            for k, n in itertools.product((1, 2, 3), (1, 3, 7, 8, 9, 17))
        },
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_every_stride_and_alignment(device, version, dtype):
    for name, x in views(device, dtype).items():
        check(x, version)
        y = cukern.square(x, version=version)
        assert y.data_ptr() != x.data_ptr() or not x.numel(), name
        if torch.empty_like(x).stride() == x.stride():
            assert y.stride() == x.stride(), f"{name}: dense strides are kept"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_gradient_with_other_strides_than_the_input(device, version, dtype):
    x = torch.randn(6, 8, dtype=dtype, device=device, requires_grad=True)
    d = torch.randn(8, 8, dtype=dtype, device=device)
    douts = {
        "transposed": d[:, :6].t(),
        "row": d[:1].expand(6, 8),
        "column": d[:6, :1].expand(6, 8),
        "one number": d[0, 0].expand(6, 8),
    }
    for name, dout in douts.items():
        (dx,) = torch.autograd.grad(cukern.square(x, version=version), x, dout)
        (peer,) = torch.autograd.grad(torch.square(x), x, dout)
        assert_accurate(dx, peer, 2 * double(x) * double(dout), name)


@PLACES
def test_gradcheck_and_gradgradcheck(device, version):
    for x in (
        torch.randn(3, 5, dtype=torch.float64, device=device),
        torch.randn(5, 4, dtype=torch.float64, device=device).t()[1:],
    ):
        for numeric_check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert numeric_check(lambda t: cukern.square(t, version=version), x.detach().requires_grad_())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_extreme_values(device, version, dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    denormal, root = tiny * info.eps, tiny**0.5
    special = [
        0.0,
        -0.0,
        inf,
        -inf,
        nan,
        info.max,
        info.min,
        tiny,
        denormal,
        -3 * denormal,
        root / 4,
        -root / 3,
        1.5 * root,
    ]
    # 40 values: whole vectors, in every lane
    x = torch.tensor(special * 3 + [1.0], dtype=torch.float64).to(dtype).to(device)
    y = cukern.square(x, version=version)
    assert_accurate(y, torch.square(x), double(x) ** 2)
    assert not y.signbit()[~y.isnan()].any(), "the square of -0.0 is 0.0"
    assert ((y > 0) & (y.double() < tiny)).any(), "denormal results are kept"
    dout = torch.tensor([1.0, -1.0, 0.5, inf, 0.0], dtype=dtype, device=device).repeat(8)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(cukern.square(ours, version=version), ours, dout)
    (peer,) = torch.autograd.grad(torch.square(theirs), theirs, dout)
    assert_accurate(dx, peer, double(x) * (2 * double(dout)), "dx")
    large = torch.full((9,), info.max, dtype=dtype, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(cukern.square(large, version=version), large, torch.full_like(large, 0.25))
    assert torch.equal(dx, large.detach() / 2), "2 * x overflows, 2 * x * dout does not"


@gpu
def test_versions_agree_bit_for_bit():
    """Both versions use the same arithmetic. Only the memory accesses differ."""
    for dtype in FLOATS:
        x = torch.randn(12_345, dtype=dtype, device="cuda")
        outs = [cukern.square(x, version=v) for v in CASES["square"].op.versions]
        assert all(same_bits(outs[0], other) for other in outs)


@gpu
@pytest.mark.parametrize("version", CASES["square"].op.versions)
def test_more_than_2_to_31_elements(version, most_memory):
    n = 2**31 + 5
    free, _ = torch.cuda.mem_get_info()
    if free < 9 * n:
        pytest.skip(f"needs {9 * n / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}")
    x = torch.randn(n, dtype=torch.float16, device="cuda")
    y = cukern.square(x, version=version)
    parts = [slice(start, min(start + (1 << 28), n)) for start in range(0, n, 1 << 28)]
    for part in parts:
        assert same_bits(y[part], torch.square(x[part])), part
    del y
    dout = torch.randn(n, dtype=torch.float16, device="cuda")
    dx = torch.ops.cukern._square_backward(x, dout, version)
    for part in parts:
        exact = 2 * x[part].float() * dout[part].float()
        assert same_bits(dx[part], exact.half()), f"gradient, {part}"
    del x, dout, dx, exact
    torch.cuda.empty_cache()


# ---- what it refuses


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


@DEVICES
@pytest.mark.parametrize(
    "dtype",
    [torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_another_dtype_is_refused(device, dtype):
    with pytest.raises(TypeError, match=rf"x must be .*torch.float16.*, got {dtype}"):
        cukern.square(torch.zeros(3, device=device).to(dtype))


@DEVICES
def test_negative_bit_is_refused_with_the_way_out(device):
    x = torch._neg_view(torch.randn(4, device=device))
    with pytest.raises(ValueError, match=r"x has the negative bit.*x\.resolve_neg\(\)"):
        cukern.square(x)
    assert torch.equal(cukern.square(x.resolve_neg()), torch.square(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_one_number_is_refused():
    """Other nested tensors have no strides, which raises an error too. On a GPU nothing is checked before the
    launch."""
    with pytest.raises(TypeError, match="x must be a strided tensor, got a nested one"):
        _launch_square(torch.nested.nested_tensor([torch.tensor(2.0)]), "")


@DEVICES
def test_unknown_version_is_refused(device):
    with pytest.raises(ValueError, match=r"square has no version 'v99'; it has v1, v2"):
        cukern.square(torch.randn(3, device=device), version="v99")


def test_a_kernel_is_refused_for_a_cpu_tensor():
    with pytest.raises(
        ValueError, match=r"version 'v2' of cukern\.square is a CUDA kernel, the tensor is on cpu"
    ):
        cukern.square(torch.randn(3), version="v2")


def test_numpy_array_comes_in_by_dlpack():
    x = numpy.linspace(-2, 2, 11, dtype=numpy.float32)
    assert numpy.array_equal(cukern.square(x).numpy(), x * x)
    with pytest.raises(TypeError, match=r"x must be .*, got torch\.int64"):
        cukern.square(numpy.arange(3))
