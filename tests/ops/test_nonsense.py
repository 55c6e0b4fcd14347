"""Arguments that make no sense: every op refuses them in an error of its own that names the argument.
tests/fuzz.py draws more of them."""

import inspect
import re

import numpy
import pytest
import torch
from helpers import kernels
from test_kron_linear import close, draw

import cukern

inf, nan = float("inf"), float("nan")
PLACES = [pytest.param("gpu", id="cpu"), pytest.param("sim", marks=kernels, id="kernels")]
X, W, W1, W2 = torch.zeros(2, 6), torch.zeros(6, 3), torch.zeros(3, 3), torch.zeros(1, 2)
Q, FREQS = torch.randn(2, 5, 3, 8), torch.rand(5, 1, 1, 8)
IDS, STARTS = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
ANY = (TypeError, ValueError)
SOFTMAXES, ROPES = (cukern.softmax, cukern.log_softmax, cukern.causal_softmax), (cukern.rope, cukern.rope_)
GOOD = {
    cukern.kron_linear: {"x": X, "factors": [W]},
    cukern.lokr_linear: {"x": X, "w1": W1, "w2": W2},
    cukern.KronLinear: {"in_factors": (2, 3), "out_factors": (3, 2)},
    cukern.matmul: {"a": X, "b": W},
    cukern.linear: {"x": X, "weight": W.t(), "bias": W[0]},
    cukern.square: {"x": X},
    cukern.gelu: {"x": X, "bias": X[0], "approximate": "tanh"},
    cukern.swiglu: {"gate": X, "up": X},
    cukern.geglu: {"gate": X, "up": X, "approximate": "none"},
    cukern.layernorm: {"x": X, "weight": X[0], "bias": X[0], "residual": X, "eps": 0.1},
    cukern.rmsnorm: {"x": X, "weight": X[0], "residual": X, "eps": 0.1},
    **{f: {"x": X} for f in SOFTMAXES},
    **{
        f: {
            "x": Q,
            "cos": FREQS[:, 0, 0, :4],
            "sin": FREQS[:, 0, 0, 4:],
            "rotary_dim": 8,
            "rotary_offset": 0,
            "scale": 1.0,
        }
        for f in ROPES
    },
    cukern.embedding: {"tokens": IDS, "weight": X, "positions": torch.zeros(5, 6)},
    cukern.apply_rotary_pos_emb: {
        "t": Q,
        "freqs": FREQS,
        "tensor_format": "bshd",
        "cp_size": 1,
        "cp_rank": 0,
    },
}
# all 0, and 0 afterwards
GOOD[cukern.adamw] = {name: [X] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
GOOD[cukern.AdamW] = {"params": [X]}
GOOD[cukern.attention] = {"q": Q, "k": Q, "v": Q, "scale": 0.5}
GOOD[cukern.attention_packed] = {"qkv": X.expand(1, 3, 3, *X.shape), "scale": 0.5}
GOOD[cukern.cross_entropy] = {"logits": X, "targets": IDS[:, 0]}
# what odd values are made of, beside GOOD and X
OTHERS = {"factors": X, "k": Q, "v": Q, "position_ids": IDS, "start_positions": STARTS}
GATED = cukern.swiglu, cukern.geglu
LINEARS = cukern.kron_linear, cukern.lokr_linear, cukern.matmul, cukern.linear
NORMS = cukern.layernorm, cukern.rmsnorm
ADAMWS = cukern.adamw, cukern.AdamW
NO_ARRAY = (
    [1.0],
    "a",
    b"a",
    3,
    2.5,
    True,
    object(),
    {},
    {1},
    [],
    [W, None],
    [W, "a"],
    (w for w in [W]),
    numpy.array("a"),
)
NO_NUMBER = "2", [1.0], 1j, True, numpy.bool_(True), X, torch.tensor(2.0), {}
NO_INT = 8.0, "8", [8], True, torch.tensor(8), numpy.float32(1), {}
NO_FLAG = "abc", 1, [], torch.tensor(True)
NO_STRING = ["v1"], 5, 1.5, True, b"v1", {}, {"v1"}, X
NO_SIZES = (
    None,
    3,
    "23",
    b"23",
    [2.0, 3.0],
    [-2, 3],
    [0, 3],
    ["2", "3"],
    [True, 3],
    [2, None],
    [],
    (2,),
    numpy.ones(2),
    {2: 3},
    X,
)


def odd_tensors(t):
    """What no op takes in place of this tensor, whatever its numbers."""
    yield from (t.to_sparse(), t.to(torch.complex64), torch.nested.nested_tensor([t, t]), t > 0)
    yield from (
        (t.to_mkldnn(), torch.quantize_per_tensor(t, 0.1, 0, torch.quint8), t.long())
        if t.is_floating_point()
        else (t.float(),)
    )
    yield from (t.to_sparse_csr(),) if t.ndim == 2 else ()
    yield from (
        (
            torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
            torch.nested.nested_tensor([t[0], t[0]]),
        )
        if t.ndim > 1
        else ()
    )


def odd(t):
    return *NO_ARRAY, *odd_tensors(t)


def beside(t):
    """What does not go with the other arguments."""
    return t.half(), t.to("meta"), torch.zeros(1, 1, 1, 2, 7)


ROWS = [  # names of arguments, their values, the error, what it says
    (
        "x k cos position_ids start_positions t freqs",
        odd,
        TypeError,
        r"^{name}\b",
        *SOFTMAXES,
        *ROPES,
        cukern.apply_rotary_pos_emb,
    ),
    ("sin", odd, ANY, r"^sin\b"),
    ("tokens weight positions", odd, ANY, r"^{name}\b", cukern.embedding),
    ("tokens weight positions", beside, ANY, r"\b{name}\b", cukern.embedding),
    (
        "tokens",
        (None, IDS.short(), torch.zeros(2, 6, dtype=torch.int64), IDS[0, 0]),
        ANY,
        "^tokens",
        cukern.embedding,
    ),
    (
        "weight positions",
        (X[0], X[None], X[:, :5]),
        ValueError,
        "^(weight|positions) must be",
        cukern.embedding,
    ),
    ("q k v", odd, TypeError, r"^{name}\b", cukern.attention),
    (
        "q k v",
        lambda t: (None, t.half(), t.to("meta"), t[0], t[0, 0, 0], t[:, :4]),
        ANY,
        r"^[qkv]\b",
        cukern.attention,
    ),
    ("q k", lambda t: (t[..., :7],), ValueError, "^q, k and v must be", cukern.attention),
    ("k v", lambda t: (t[:, :, :2],), ValueError, "^q, k and v must be", cukern.attention),
    (
        "q",
        lambda t: (t[:, :3],),
        ValueError,
        "^q has 3 heads, which must be a multiple of the 5",
        cukern.attention,
    ),
    ("qkv", odd, TypeError, "^qkv", cukern.attention_packed),
    ("qkv", lambda t: (t[0], t[:, :, :2]), ValueError, "^qkv must be", cukern.attention_packed),
    (
        "causal return_lse",
        (*NO_FLAG, None),
        TypeError,
        "^{name} must be a bool",
        cukern.attention,
        cukern.attention_packed,
    ),
    ("sink", odd_tensors, TypeError, "^sink must be"),
    (
        "x a b weight bias residual w1 w2 factors",
        odd,
        ANY,
        r"\b({name}|factors)\b",
        cukern.square,
        *LINEARS,
        *NORMS,
    ),
    ("x a b weight bias residual w1 w2 factors", beside, ANY, r"\b({name}|factors)\b", *LINEARS),
    ("x bias gate up", odd, ANY, r"^{name}\b", cukern.gelu, *GATED),
    ("x gate up", (None,), TypeError, r"^{name}\b", cukern.gelu, *GATED),
    ("up", lambda t: (*beside(t), t[0], t[:1], t.t()), ANY, r"^up\b", *GATED),
    ("bias", (X[0].long(), X[0].to("meta"), X, X[0, :1], X[0, 0]), ANY, r"^bias\b", cukern.gelu),
    ("approximate", (*NO_STRING, None), TypeError, "^approximate must be a str, got"),
    ("approximate", ("", "erf", "Tanh"), ValueError, "^approximate must be one of none, tanh, got"),
    ("residual", beside, ANY, r"\b{name}\b", *NORMS),
    ("weight bias", lambda t: beside(t)[1:], ANY, r"\b{name}\b", *NORMS),
    ("eps", (*NO_NUMBER, None), TypeError, "eps must be a number, got"),
    (
        "eps",
        (inf, nan, 10**400, 1e39, -1e-9),
        ValueError,
        "^(eps must be finite|eps is|eps must be at least 0, got)",
        *NORMS,
    ),
    ("x", (None, torch.zeros(())), ANY, r"^x\b", *NORMS),
    ("weight", (None,), ValueError, "bias must be None if weight is None", cukern.layernorm),
    ("x a b cos t freqs w1 w2 factors", (None,), TypeError, r"\b({name}|factors)\b"),
    ("weight", (None,), TypeError, "weight", cukern.linear, cukern.embedding),
    (
        "w2",
        lambda t: [pair for v in (None, *odd(X)) for pair in ((v, W2), [W[:1, :1], v])],
        ANY,
        r"\b(w2|factors)\b",
    ),
    ("w2", ((W,), (W, W, W), (W[:2], W[:3])), ANY, r"\b(w2|factors)\b"),
    ("in_factors out_factors", NO_SIZES, ANY, "{name}"),
    ("bias", (None, 1, "no", X), ANY, "bias", cukern.KronLinear),
    ("dtype", ("float32", torch.int32, [torch.float32], 1, X), ANY, "dtype"),
    ("scale", NO_NUMBER, TypeError, "scale must be a number, got"),
    (
        "scale",
        (None,),
        TypeError,
        "scale must be a number, got",
        *SOFTMAXES,
        cukern.kron_linear,
        cukern.lokr_linear,
    ),
    (
        "scale version in_factors out_factors",
        lambda t: [torch.nested.nested_tensor([X, X])],
        TypeError,
        "{name}",
    ),
    ("scale", (inf, -inf, nan, 10**400), ValueError, "scale must be finite"),
    ("scale", (1e39, -1e39, 10**40, -(10**39)), ValueError, "its magnitude must be at most 3.40282e"),
    ("dim window rotary_dim rotary_offset cp_size cp_rank", NO_INT, TypeError, "{name} must be an int, got"),
    ("dim rotary_offset cp_size cp_rank", (None,), TypeError, "{name} must be an int, got"),
    ("dim", (2, -3, 10**30), ValueError, "dim must be one of x's 2 dimensions, got"),
    ("window", (0, -3), ValueError, "window must be at least 1, got"),
    ("sink", ("1", [1.0], True, 1j), TypeError, "sink must be"),
    ("sink", (10**400,), ValueError, "sink must be finite"),
    (
        "scale",
        (-1,),
        ValueError,
        "scale must not be negative",
        cukern.causal_softmax,
        cukern.attention,
        cukern.attention_packed,
    ),
    ("interleaved inverse", (*NO_FLAG, None), TypeError, "^{name}"),
    ("fused", NO_FLAG, TypeError, "^fused"),
    ("layout tensor_format", (*NO_STRING, None), TypeError, "^{name}"),
    (
        "mrope_section",
        (5, "ab", (1, 1.0, 2), (True, 1, 2), [[1], 1, 2], torch.tensor([1, 1, 2]), {}),
        TypeError,
        "^{name}",
    ),
    ("logits targets", odd, TypeError, r"^{name}\b"),
    ("targets", lambda t: (t[None], t[:1], t[0]), ValueError, "^targets has shape"),
    ("targets", lambda t: (t.to("meta"),), ValueError, "^targets is on meta"),
    ("label_smoothing z_loss softcap", NO_NUMBER, TypeError, "{name} must be a number, got"),
    ("label_smoothing z_loss softcap", (inf, -inf, nan, 10**400), ValueError, "{name} must be finite"),
    (
        "label_smoothing",
        (-0.1, 1.5),
        ValueError,
        "label_smoothing (must be at least 0, got -0.1|is 1.5: its magnitude must be at most 1)",
    ),
    ("softcap", (0, -1.0), ValueError, "softcap must be positive"),
    ("ignore_index vocab_size", NO_INT, TypeError, "{name} must be an int, got"),
    ("vocab_size", (0, 7, -1), ValueError, "vocab_size must be in 1..6, got"),
    ("ignore_index", (10**30,), ValueError, "ignore_index must be in"),
    ("reduction", (*NO_STRING, None), TypeError, "^reduction must be a str"),
    ("reduction", ("avg", ""), ValueError, "^reduction must be one of none, sum, mean, got"),
    ("inplace_backward", (*NO_FLAG, None), TypeError, "^inplace_backward must be a bool"),
    (
        "params grads exp_avgs exp_avg_sqs",
        lambda t: [[v] for v in odd(X)],
        TypeError,
        r"^{name}\[0\]",
        cukern.adamw,
    ),
    (
        "params grads exp_avgs exp_avg_sqs",
        (None, 3, "ab", X, {}, len),
        TypeError,
        "^{name} must be a list of tensors, got",
        cukern.adamw,
    ),
    ("lr eps weight_decay", NO_NUMBER, TypeError, "^{name} must be a number", cukern.adamw),
    ("eps weight_decay max_norm", NO_NUMBER, TypeError, "^{name} must be a number", cukern.AdamW),
    ("lr eps weight_decay", (inf, -inf, nan, 10**400), ValueError, "{name} must be finite", *ADAMWS),
    ("lr eps weight_decay", (-1, -1e-9), ValueError, "{name} must be at least 0, got", *ADAMWS),
    (
        "betas",
        (None, 0.9, "ab", (0.9,), (0.9, 0.9, 0.9), {0.8, 0.9}, X),
        TypeError,
        "betas must be a pair of numbers, got",
        *ADAMWS,
    ),
    (
        "betas",
        ((0.9, 1), (-0.1, 0.9)),
        ValueError,
        r"betas\[\d\] must be at least 0 and less than 1, got",
        *ADAMWS,
    ),
    ("betas", (("a", 0.9), (0.9, None), (0.9, X)), TypeError, r"betas\[\d\] must be a number, got", *ADAMWS),
    ("step seed", NO_INT, TypeError, "{name} must be an int, got", *ADAMWS),
    ("step seed", (-1, 10**30), ValueError, "{name} must be", *ADAMWS),
    (
        "master_weights stochastic_rounding",
        (*NO_FLAG, None),
        TypeError,
        "^{name} must be a bool",
        cukern.AdamW,
    ),
    ("version", (*NO_STRING, (["v5"], None)), TypeError, "must be a str or None, got"),
    ("version", ("", "V1", "v99"), ValueError, "has no version"),
    ("version", ((None, "v0"),), ValueError, "has no version", *SOFTMAXES),
    ("version", ((), ("v5",), ("v5",) * 3), ValueError, "version must be a str, or a pair", *SOFTMAXES),
]
CASES = [
    pytest.param(function, name, *row[1:4], id=f"{function.__name__}-{name}-{i}")
    for i, row in enumerate(ROWS)
    for function in row[4:] or GOOD
    for name in row[0].split()
    if name in inspect.signature(function).parameters
]


@pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function, name, values, kind, says", CASES)
def test_nonsense_is_refused_by_name(place, function, name, values, kind, says):
    """After the same call with the right value: 8.0 and True equal ints, which are remembered."""
    good = dict(GOOD[function], **({"position_ids": IDS.expand(3, 2, 5)} if name == "mrope_section" else {}))
    with cukern.backend(place):
        function(**GOOD[function])
        for value in values(OTHERS.get(name, good.get(name, X))) if callable(values) else values:
            with pytest.raises(kind, match=says.replace("{name}", name)) as error:
                function(**{**good, name: value})
            assert "/cukern/" in str(error.traceback[-1].path), (
                f"{name} = {value!r} is not refused by cukern itself"
            )


@pytest.mark.parametrize("place", PLACES)
def test_scale(place):
    x, ws = draw(3, ((3, 2), (2, 4)), dtype=torch.float32)
    with cukern.backend(place):
        for scale in (2, 2.0, numpy.float32(2), numpy.int64(2)):
            close(cukern.kron_linear(x, ws, scale=scale), 2 * cukern.kron_linear(x, ws))
        with pytest.raises(
            TypeError,
            match=re.escape(
                "scale must be a number, got a tensor of shape (): multiply the result by it instead"
            ),
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
        with pytest.raises(ValueError, match=r"w1's a has shape \(4, 2\), b has \(4, 2\)"):
            cukern.lokr_linear(x, (w1, w1), (a, b))
        for half in (torch.float64, torch.float16):
            t, c, d = (v.to(half) for v in (x, w1, b))
            with pytest.raises(ValueError, match=r"last dimension of x, 6, must equal .* 2 x 6 = 12"):
                cukern.lokr_linear(t, c, (d.mT, d.new_ones(2, 6)))
