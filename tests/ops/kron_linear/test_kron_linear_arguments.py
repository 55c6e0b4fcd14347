"""kron_linear, lokr_linear, KronLinear, matmul, linear and square with arguments that make no sense, and lokr_linear under transforms."""

import re
import warnings

import numpy
import pytest
import torch
from helpers import kernels, random_like
from test_kron_linear import close, draw

import cukern

PLACES = [pytest.param("gpu", id="cpu"), pytest.param("sim", marks=kernels, id="kernels")]
X, W, W1, W2 = torch.zeros(2, 6), torch.zeros(6, 3), torch.zeros(3, 3), torch.zeros(1, 2)
with warnings.catch_warnings():  # torch's own, of prototypes
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(2, 6), torch.zeros(3, 6)])
    OTHER_LAYOUTS = NESTED, torch.nested.nested_tensor([X, X], layout=torch.jagged), X.to_mkldnn(), X.to_sparse(), X.to_sparse_csr()
    QUANTIZED = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
NO_ARRAY = [1.0], "a", b"a", 3, 2.5, True, object(), {}, {1}, [], [W, None], [W, "a"], (w for w in [W]), numpy.array("a")
BAD = (*NO_ARRAY, *OTHER_LAYOUTS, QUANTIZED, X.long(), X > 0)  # for all
NO_TENSOR = (*BAD, X.half(), X.to("meta"), torch.zeros(1, 1, 1, 2, 7))  # beside X, W, W1 and W2
NO_VERSION = "v9", "", "V1", ["v1"], ("v1", "v1"), {}, 1, 1.5, True, b"v1", X, NESTED
NO_NUMBER = (
    None,
    "2",
    [1.0],
    1j,
    True,
    numpy.bool_(True),
    10**400,
    float("inf"),
    float("nan"),
    1e39,
    -(10**39),
    X,
    torch.tensor(2.0),
    NESTED,
)
NO_SIZES = None, 3, "23", b"23", [2.0, 3.0], [-2, 3], [0, 3], ["2", "3"], [True, 3], [2, None], [], (2,), numpy.ones(2), {2: 3}, NESTED

KRON, LOKR = {"x": X, "factors": [W]}, {"x": X, "w1": W1, "w2": W2}
LAYER = {"in_factors": (2, 3), "out_factors": (3, 2)}
LINEAR = {"x": X, "weight": W.t(), "bias": W[0]}
EPILOGUE = {"bias": NO_TENSOR, "residual": NO_TENSOR, "scale": NO_NUMBER, "version": NO_VERSION}
PAIRS = [pair for v in (None, *NO_TENSOR) for pair in ((v, W2), [W[:1, :1], v])]
NONSENSE = [
    *(
        (cukern.kron_linear, KRON, name, values)
        for name, values in {**EPILOGUE, "x": (None, *NO_TENSOR), "factors": (None, *NO_TENSOR)}.items()
    ),
    *((cukern.lokr_linear, LOKR, name, values) for name, values in {**EPILOGUE, **dict.fromkeys(LOKR, (None, *NO_TENSOR))}.items()),
    (cukern.lokr_linear, LOKR, "w2", [*PAIRS, (W,), (W, W, W), (W[:2], W[:3])]),
    *((cukern.KronLinear, LAYER, name, NO_SIZES) for name in LAYER),
    (cukern.KronLinear, LAYER, "bias", (None, 1, "no", X, NESTED)),
    (cukern.KronLinear, LAYER, "version", NO_VERSION),
    (cukern.KronLinear, LAYER, "dtype", ("float32", torch.int32, [torch.float32], 1, X)),
    *((cukern.matmul, {"a": X, "b": W}, name, (None, *NO_TENSOR)) for name in ("a", "b")),
    *((cukern.linear, LINEAR, name, NO_TENSOR) for name in LINEAR),
    (cukern.square, {"x": X}, "x", (None, *BAD)),
    *((function, good, "version", NO_VERSION) for function, good in ((cukern.matmul, {"a": X, "b": W}), (cukern.linear, LINEAR))),
    (cukern.square, {"x": X}, "version", NO_VERSION),
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function, good, name, values", NONSENSE, ids=[f"{f.__name__}-{name}" for f, _, name, _ in NONSENSE])
def test_nonsense_is_refused_by_name(place, function, good, name, values):
    with cukern.backend(place):
        function(**good)
        for value in values:
            with pytest.raises((TypeError, ValueError), match=rf"\b({name}|factors)\b") as error:
                function(**{**good, name: value})
            assert "/cukern/" in str(error.traceback[-1].path), "raised by cukern itself"


@pytest.mark.parametrize("place", PLACES)
def test_scale(place):
    x, ws = draw(3, ((3, 2), (2, 4)), dtype=torch.float32)
    with cukern.backend(place):
        for scale in (2, 2.0, numpy.float32(2), numpy.int64(2)):
            close(cukern.kron_linear(x, ws, scale=scale), 2 * cukern.kron_linear(x, ws))
        with pytest.raises(
            TypeError, match=re.escape("scale must be a number, got a tensor of shape (): multiply the result by it instead")
        ):
            cukern.kron_linear(x, ws, scale=torch.tensor(2.0, requires_grad=True))
        with pytest.raises(ValueError, match=r"scale is 1e\+39: its magnitude must be at most 3.40282e\+38"):
            cukern.kron_linear(x, ws, scale=1e39)
        x, ws = draw(3, ((3, 2), (2, 4)))
        close(cukern.kron_linear(x, ws, scale=1e39), 1e39 * cukern.kron_linear(x, ws))


@pytest.mark.parametrize("place", PLACES)
def test_lokr_takes_arrays_and_samples(place):
    x, w1, a, b = (torch.randn(s, dtype=torch.float64) for s in ((2, 3, 6), (4, 2), (2, 5, 2), (2, 3)))
    exact = torch.stack([t @ torch.kron(w1, part @ b).t() for t, part in zip(x, a, strict=True)])
    with cukern.backend(place):
        close(cukern.lokr_linear(x, w1, (a, b)), exact)
        close(cukern.lokr_linear(x.numpy(), w1.numpy(), [a.numpy(), b.numpy()]), exact)
        for bad in (b.float(), b.to("meta"), b.t(), b[None].expand(3, -1, -1)):
            with pytest.raises((TypeError, ValueError), match="b"):
                cukern.lokr_linear(x, w1, (a, bad))


@pytest.mark.parametrize("place", PLACES)
def test_lokr_under_transforms(place):
    inputs = tuple(torch.randn(s, dtype=torch.float64) for s in ((3, 10), (2, 2), (3, 2), (2, 5), (6,), (3, 6)))
    tangents, many, every = random_like(inputs), tuple(torch.stack(random_like([x] * 3), -1) for x in inputs), tuple(range(6))

    def ours(x, w1, a, b, bias, residual):
        return cukern.lokr_linear(x, w1, (a, b), scale=0.5, bias=bias, residual=residual)

    def exact(x, w1, a, b, bias, residual):
        return residual + 0.5 * x @ torch.kron(w1, a @ b).t() + bias

    gs = torch.randn(2, 3, 6, dtype=torch.float64)

    def results(f):
        cube = lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = f(*leaves)
        return (
            *torch.func.jvp(f, inputs, tangents),
            *torch.func.jacrev(f, every)(*inputs),
            *torch.func.jacfwd(f, every)(*inputs),
            *[block for row in torch.func.hessian(cube, every)(*inputs) for block in row],
            torch.func.vmap(f, -1)(*many),
            *torch.func.vmap(torch.func.grad(cube, every), -1)(*many),
            *torch.func.vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True))(gs),
        )

    with cukern.backend(place):
        for a, b in zip(results(ours), results(exact), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
