"""cukern.layers against torch's modules: state dicts, outputs, gradients, and the forwards for `kernels`."""

import inspect

import pytest
import torch
from helpers import DEVICE, PLACE, kernels
from torch import nn

from cukern import layers

F = nn.functional
HALF = torch.bfloat16


class Gated(nn.Module):
    """The MLP of Llama and Gemma in torch's operations."""

    def __init__(self, activation, hidden, middle):
        super().__init__()
        self.activation = activation
        self.gate_proj, self.up_proj = (
            nn.Linear(hidden, middle, bias=False),
            nn.Linear(hidden, middle, bias=False),
        )
        self.down_proj = nn.Linear(middle, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


PAIRS = {
    "RMSNorm": (lambda: layers.RMSNorm(24), lambda: nn.RMSNorm(24)),
    "RMSNorm 2-D": (lambda: layers.RMSNorm((3, 8), eps=0.1), lambda: nn.RMSNorm((3, 8), eps=0.1)),
    "RMSNorm plain": (
        lambda: layers.RMSNorm(24, elementwise_affine=False),
        lambda: nn.RMSNorm(24, elementwise_affine=False),
    ),
    "LayerNorm": (lambda: layers.LayerNorm(24), lambda: nn.LayerNorm(24)),
    "LayerNorm 2-D": (lambda: layers.LayerNorm([3, 8], bias=False), lambda: nn.LayerNorm([3, 8], bias=False)),
    "Linear": (lambda: layers.Linear(24, 16), lambda: nn.Linear(24, 16)),
    "SwiGLUMLP": (lambda: layers.SwiGLUMLP(24, 40), lambda: Gated(F.silu, 24, 40)),
    "GeGLUMLP": (lambda: layers.GeGLUMLP(24, 40), lambda: Gated(nn.GELU("tanh"), 24, 40)),
    "GeGLUMLP exact": (lambda: layers.GeGLUMLP(24, 40, approximate="none"), lambda: Gated(F.gelu, 24, 40)),
}


def run(module, x, grad):
    """The output, and the gradients of x and the parameters."""
    x = x.detach().clone().requires_grad_()
    out = module(x)
    wanted = [x, *module.parameters()]
    return [out, *torch.autograd.grad(out, wanted, grad.to(out.dtype))]


@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=kernels, id=PLACE)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("name", PAIRS)
def test_like_torchs(name, dtype, device):
    """State dicts go both ways. The largest error is at most twice torch's plus one rounding."""
    torch.manual_seed(3)
    ours, theirs = (make().to(device, dtype) for make in PAIRS[name])
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p.ndim == 1))
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, *((3, 8) if "2-D" in name else (3, 24)), dtype=dtype, device=device)
    grad = torch.randn_like(theirs(x))
    found, peers = run(ours, x, grad), run(theirs, x, grad)
    if getattr(theirs, "eps", 0) is None:
        theirs.eps = torch.finfo(dtype).eps  # of x, not of the float64 below
    exact = run(theirs.double(), x.double(), grad.double())
    for i, (a, b, c) in enumerate(zip(found, peers, exact, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        limit = 2 * (b - c).abs().max() + torch.finfo(dtype).eps * c.abs().max()
        assert (a - c).abs().max() <= limit, f"{name}, tensor {i}"


@pytest.mark.parametrize("shift", [True, False])
def test_causal_loss(shift):
    torch.manual_seed(0)
    head, plain = layers.CausalLoss(24, 50, shift=shift, softcap=5.0, ignore_index=3), nn.Linear(24, 50)
    head.load_state_dict(plain.state_dict())
    x, labels = torch.randn(2, 9, 24), torch.randint(50, (2, 9))
    labels[0, 4] = 3
    logits = 5 * torch.tanh(plain(x) / 5)
    assert torch.allclose(head(x), logits, atol=1e-6)
    used, targets = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    expected = F.cross_entropy(used.flatten(0, 1), targets.flatten(), ignore_index=3)
    loss = head(x, labels)
    assert torch.allclose(loss, expected, atol=1e-6)
    for a, b in zip(head.parameters(), plain.parameters(), strict=True):
        grads = (
            torch.autograd.grad(loss, a, retain_graph=True),
            torch.autograd.grad(expected, b, retain_graph=True),
        )
        assert torch.allclose(grads[0][0], grads[1][0], atol=1e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rotary_embedding(layout):
    rotary = layers.RotaryEmbedding(8, 32, 100.0, layout=layout)
    q, k = torch.randn(2, 6, 6, 12), torch.randn(2, 6, 6, 12)
    angles = torch.arange(3, 9)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (t[:, None] if layout == "bshd" else t for t in (angles.cos(), angles.sin()))
    first, second, rest = q.split([4, 4, 4], -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
    one, (both, key) = rotary(q, position_ids=torch.arange(3, 9)), rotary(q, k, torch.arange(3, 9))
    assert torch.allclose(one, expected, atol=1e-5) and torch.equal(one, both) and not torch.equal(key, k)
    assert rotary.state_dict() == {}
    before = rotary.cos.clone()
    assert torch.equal(rotary.to(HALF).cos, before)  # the tables keep their precision
    meta = layers.RotaryEmbedding(8, 32, 100.0, device="meta")
    assert torch.equal(meta.to_empty(device="cpu").cos, before)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
def test_compiled_as_one_graph():
    torch.manual_seed(0)
    model = nn.Sequential(layers.RMSNorm(16), layers.SwiGLUMLP(16, 24), layers.Linear(16, 16))
    x = torch.randn(3, 16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, found = (run(m, x, torch.ones(3, 16)) for m in (model, compiled))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: layers.RMSNorm(24)(torch.randn(2, 23)),
            ValueError,
            r"normalized_shape, \(24,\), got \(2, 23\)",
        ),
        (
            lambda: layers.LayerNorm((3, 8))(torch.randn(24)),
            ValueError,
            r"normalized_shape, \(3, 8\), got \(24,\)",
        ),
        (lambda: layers.Linear(24, 3)(torch.randn(2, 23)), ValueError, "23"),
        (lambda: layers.Linear(24, 3)(torch.randn(2, 24).double()), TypeError, "float64"),
        (lambda: layers.GeGLUMLP(4, 4, approximate="erf"), ValueError, "approximate must be .* got 'erf'"),
        (lambda: layers.RotaryEmbedding(7, 9), ValueError, "dim must be even, got 7"),
        (lambda: layers.RotaryEmbedding(8, 9, layout="thd"), ValueError, "layout must be .* got 'thd'"),
        (lambda: layers.RotaryEmbedding(8, 9)(torch.randn(1, 10, 2, 8)), ValueError, "9"),
        (lambda: layers.CausalLoss(4, 4, reduction="none"), ValueError, "reduction must be .* got 'none'"),
        (lambda: layers.CausalLoss(4, 4, shift=1), TypeError, "shift must be a bool, got int 1"),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ---- kernelize


def test_layers_for_kernelize_have_no_state():
    """The rules of `kernels`: nn.Module's constructor, and no members but forward and two flags."""
    known = {name for name, _ in inspect.getmembers(nn.Module)}
    for name, repositories in layers.kernel_mapping().items():
        layer = repositories["cuda"].load()
        assert layer.__init__ is nn.Module.__init__ and layer.__name__ == name
        added = {member for member, _ in inspect.getmembers(layer)} - known
        assert added == {"can_torch_compile", "has_backward"}, name


class Norm(nn.Module):
    """With transformers' names."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(16)), 1e-5

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, (16,), self.weight, self.variance_epsilon)


def test_kernelize():
    """`kernels` binds the forwards to modules of another library; results and parameters stay."""
    hub = pytest.importorskip("kernels", reason="needs kernels, of the extra integrations")
    torch.manual_seed(0)

    class Mlp(Gated):
        pass

    class Projection(nn.Linear):
        pass

    names = {Norm: "RMSNorm", Mlp: "GeGLUMLP", Projection: "Linear"}
    for kind, name in names.items():
        hub.replace_kernel_forward_from_hub(kind, name)
    model = nn.Sequential(Norm(), Mlp(nn.GELU("tanh"), 16, 24), Projection(16, 8))
    x, grad = torch.randn(3, 16), torch.randn(3, 8)
    expected = run(model, x, grad)
    mapping = {name: {"cpu": found["cuda"]} for name, found in layers.kernel_mapping().items()}
    with hub.use_kernel_mapping(mapping, inherit_mapping=False):
        hub.kernelize(model, mode=hub.Mode.TRAINING | hub.Mode.TORCH_COMPILE, device="cpu")
    modules = [m.forward.__func__.__module__ for m in model]
    assert modules == ["cukern.integrations.modules", "cukern.integrations.modules", "cukern.layers"]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(run(model, x, grad), expected, strict=True))


@pytest.mark.parametrize("file", ["llama", "gpt_oss"])
def test_the_rotary_embedding_for_kernelize(file):
    """Of tables with a column per element, and with one per pair."""
    module = pytest.importorskip(f"transformers.models.{file}.modeling_{file}")
    layer = layers.kernel_mapping()["rotary_pos_emb"]["cuda"].load()
    q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.rand(2, 5, 8)
    if file == "llama":
        angles = torch.cat([angles, angles], -1)
    ours, theirs = (f(q, k, angles.cos(), angles.sin()) for f in (layer(), module.apply_rotary_pos_emb))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_the_loss_for_kernelize():
    loss_utils = pytest.importorskip("transformers.loss.loss_utils", reason="needs transformers")
    layer = layers.kernel_mapping()["ForCausalLMLoss"]["cuda"].load()
    logits, labels = torch.randn(2, 9, 50), torch.randint(50, (2, 9))
    labels[0, 3] = -100
    for options in ({}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": labels}):
        expected = loss_utils.ForCausalLMLoss(logits, labels, 50, **options)
        assert torch.allclose(layer()(logits, labels, 50, **options), expected, atol=1e-6)
