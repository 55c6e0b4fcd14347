"""cukern.patch_lycoris on LoKr networks: outputs, gradients, losses, state dict, undo, refusals. Against the
same network without the patch."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import DEVICE, PLACE, kernels
from torch import nn

import cukern
from cukern.integrations import attention

lycoris = pytest.importorskip("lycoris", reason="needs lycoris-lora, of the extra integrations")
import cukern.integrations.lycoris as integration  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

FULL, LOW, BOTH = {"full_matrix": True}, {"linear_dim": 2}, {"linear_dim": 1, "decompose_both": True}
WIDE = {  # w1 is low-rank, and w2 is full
    "linear_dim": 6, "conv_dim": 3, "factor": 2, "decompose_both": True, "unbalanced_factorization": True
}  # fmt: skip
FORMS = {
    "full": FULL, "w2 low-rank": LOW, "both low-rank": BOTH, "w1 low-rank": WIDE,
    "alpha": {**LOW, "linear_alpha": 3}, "multiplier": {**LOW, "multiplier": 0.7},
    "scalar": {**LOW, "use_scalar": True}, "bypass": {**LOW, "bypass_mode": True},
    "bypass, dropout": {**LOW, "bypass_mode": True, "dropout": 0.4, "use_scalar": True},
    "dropout": {**LOW, "dropout": 0.4}, "rank dropout": {**LOW, "rank_dropout": 0.4},
    "bypass, rank dropout": {**LOW, "bypass_mode": True, "rank_dropout": 0.4},
    "module dropout": {**LOW, "module_dropout": 0.4},
}  # fmt: skip


class Convolutions(nn.Module):
    """Down, 1 x 1, up, as in a UNet."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 24, (3, 2), stride=2, padding=1, dilation=(1, 2), bias=False)
        self.point, self.up = nn.Conv2d(24, 16, 1), nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1)
        self.time, self.last = nn.Linear(8, 16), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        t = self.time(x[:, 0, 0])[:, :, None, None]
        return self.last(nn.functional.silu(self.up(self.point(self.down(self.norm(self.first(x)) + t)))))


def linears():
    return nn.Sequential(nn.Linear(24, 36), nn.SiLU(), nn.Linear(36, 24, bias=False))


KINDS = {"linears": (linears, (3, 5, 24)), "convolutions": (Convolutions, (2, 8, 8, 8))}
EVERY = pytest.mark.parametrize("kind", KINDS)


def made(kind, dtype=torch.float32, **options):
    """A frozen model, its network with random factors, and an input."""
    torch.manual_seed(0)
    build, shape = KINDS[kind]
    model = build().requires_grad_(False).to(dtype)
    options = {"factor": 4, "conv_dim": options.get("linear_dim", 4), **options}
    network = lycoris.create_lycoris(model, algo="lokr", **options)
    network.apply_to()
    network.to(dtype)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model.train(), network.train(), torch.randn(shape, dtype=dtype, requires_grad=True)


def results(model, network, x):
    torch.manual_seed(1)  # of dropout
    y = model(x)
    inputs = x, *network.parameters()
    return y, *torch.autograd.grad((y * y.detach().cos()).sum(), inputs, allow_unused=True)


def same(found, expected, error=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs is None
        else:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=error, atol=error * float(theirs.abs().max()))


@EVERY
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_outputs_and_gradients(kind, form, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_warned", set())
    model, network, x = made(kind, dtype, **FORMS[form])
    expected = results(model, network, x)
    calls = []
    monkeypatch.setattr(
        integration, "lokr_linear", lambda *a, **k: calls.append(0) or cukern.lokr_linear(*a, **k)
    )
    record = cukern.patch_lycoris(network)
    with warnings.catch_warnings(record=True) as caught:
        same(results(model, network, x), expected, 1e-10 if dtype == torch.float64 else 1e-5)
    warned = [w for w in caught if "takes its own forward" in str(w.message)]
    assert len(warned) == (form == "rank dropout") and bool(calls) == (form != "rank dropout"), str(record)
    assert not record.kept


@EVERY
def test_each_form_has_its_factors(kind):
    def names(form):
        _, network, _ = made(kind, **FORMS[form])
        return {key.rpartition(".")[2] for key in network.state_dict()} - {"alpha"}

    assert names("full") == {"lokr_w1", "lokr_w2"}
    assert {"lokr_w1", "lokr_w2_a", "lokr_w2_b"} <= names("w2 low-rank")
    assert {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"} <= names("both low-rank")
    assert {"lokr_w1_a", "lokr_w1_b", "lokr_w2"} <= names("w1 low-rank")


def losses(kind, patched, form):
    model, network, _ = made(kind, **FORMS[form])
    if patched:
        cukern.patch_lycoris(network)
    batches = torch.randn(4, *KINDS[kind][1])
    with torch.no_grad():  # half of the adapter is to be learned again
        targets = [model(x) for x in batches]
        for p in network.parameters():
            p.mul_(0.5)
    optimizer, found = torch.optim.AdamW(network.parameters(), lr=3e-3), []
    for step in range(50):
        loss = (model(batches[step % 4]) - targets[step % 4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@EVERY
@pytest.mark.parametrize("form", ("both low-rank", "bypass"))
def test_50_steps_have_the_same_losses(kind, form):
    plain, ours = losses(kind, False, form), losses(kind, True, form)
    assert plain[-1] < 0.9 * plain[0] and not torch.equal(plain, ours)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=0)


def attributes(network):
    """The attributes of all modules, of instances alone."""
    return [(name, dict(vars(m))) for name, m in network.named_modules()]


@EVERY
def test_undo_restores_every_attribute(kind):
    model, network, x = made(kind, **LOW)
    before, state, y = attributes(network), {k: v.clone() for k, v in network.state_dict().items()}, model(x)
    record = cukern.patch_lycoris(network)
    assert {k: v.shape for k, v in network.state_dict().items()} == {k: v.shape for k, v in state.items()}
    same(network.state_dict().values(), state.values(), 0)
    with pytest.raises(ValueError, match=r"LycorisNetwork is patched already: call undo\(\)"):
        cukern.patch_lycoris(network)
    assert "lokr_linear" in str(record) and repr(record) == str(record)
    record.undo()
    record.undo()
    assert attributes(network) == before and torch.equal(model(x), y)
    cukern.patch_lycoris(network).undo()


def test_before_apply_to_and_after_restore():
    torch.manual_seed(0)
    model = linears()
    x, base = torch.randn(2, 24), copy.deepcopy(model)
    network = lycoris.create_lycoris(model, algo="lokr", linear_dim=2, factor=4)
    record = cukern.patch_lycoris(network)
    assert record.replaced == {"Linear": "2 of LoKr: lokr_linear"}
    network.apply_to()
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn_like(p))
    y = model(x)
    assert not torch.allclose(y, base(x))
    record.undo()
    same((model(x),), (y,))
    network.restore()
    assert torch.equal(model(x), base(x))


def test_merging_and_max_norm_work_as_before():
    merged = []
    for patched in (False, True):
        model, network, x = made("convolutions", **LOW)
        if patched:
            cukern.patch_lycoris(network)
        network.apply_max_norm_regularization(1.0, "cpu")
        network.set_multiplier(0.5)
        first = model(x)
        network.restore()
        network.merge_to(0.5)
        merged.append((first, *model.state_dict().values()))
    same(merged[1], merged[0])


@EVERY
def test_compiled_whole(kind):
    model, network, x = made(kind, **LOW)
    expected = results(model, network, x)
    cukern.patch_lycoris(network)
    same(results(torch.compile(model, fullgraph=True, backend="aot_eager"), network, x), expected)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@EVERY
def test_autocast_and_16_bit_models(kind, dtype):
    exact_model, exact_network, x = made(kind, torch.float64, **LOW)
    exact = exact_model(x).float()

    def error(patched, *, autocast):
        model, network, _ = made(kind, torch.float32 if autocast else dtype, **LOW)
        model.load_state_dict(exact_model.state_dict())
        network.load_state_dict(exact_network.state_dict())
        network.float()  # 16-bit models have float32 adapters
        if patched:
            cukern.patch_lycoris(network)
        with torch.autocast("cpu", dtype, enabled=autocast):
            y = model(x.to(torch.float32 if autocast else dtype))
        assert y.dtype == dtype
        return (y.float() - exact).norm()

    for autocast in (True, False):
        assert error(True, autocast=autocast) <= 2 * error(False, autocast=autocast)


@kernels
def test_a_network_in_the_simulator():
    model, network, x = made("linears", **BOTH)
    expected = results(model, network, x)
    cukern.patch_lycoris(network)
    place = "cuda" if PLACE == "cuda" else "cpu"
    model.to(place)
    network.to(place)
    x = x.detach().to(place).requires_grad_()
    with cukern.backend("gpu" if PLACE == "cuda" else "sim"):
        same([t.cpu() for t in results(model, network, x)], expected)


# ---- what is not replaced, and refusals


def test_other_modules_are_left_alone_and_listed():
    model = nn.Sequential(
        nn.Linear(24, 36), nn.LayerNorm(36), nn.Conv1d(3, 6, 3), nn.Conv2d(4, 8, 3, groups=2),
        nn.Conv2d(4, 8, 3, padding="same"), nn.Linear(6, 6), nn.Conv2d(16, 16, 3),
    )  # fmt: skip
    network = nn.ModuleDict()
    lokr, options = lycoris.LokrModule, {"lora_dim": 1, "factor": 4}
    network["lokr"] = lokr("lokr", model[0], **options)
    network["norm"] = lycoris.NormModule("norm", model[1])
    network["line"] = lokr("line", model[2], **options)
    network["groups"] = lokr("groups", model[3], **options)
    network["string"] = lokr("string", model[4], **options)
    network["dora"] = lokr("dora", model[5], **options, weight_decompose=True)
    network["tucker"] = lokr("tucker", model[6], **options, use_tucker=True)
    network["locon"] = lycoris.LoConModule("locon", model[5])
    before = {name: dict(vars(m)) for name, m in network.items() if name != "lokr"}
    record = cukern.patch_lycoris(network)
    assert record.replaced == {"Linear": "1 of LoKr: lokr_linear"}
    assert record.kept == {
        "norm": "NormModule is not LoKr",
        "line": "there is no op for conv1d",
        "groups": "a convolution with groups",
        "string": "the padding of a convolution is a string",
        "dora": "weight decomposition needs the whole weight",
        "tucker": "w2 has the Tucker form",
        "locon": "LoConModule is not LoKr",
    }
    assert {name: dict(vars(m)) for name, m in network.items() if name != "lokr"} == before
    assert all(f"{name:<10} not replaced: {why}" in str(record) for name, why in record.kept.items())


def test_a_tensor_as_multiplier_keeps_its_gradient(monkeypatch):
    monkeypatch.setattr(attention, "_warned", set())
    for bypass in (False, True):
        model, network, x = made("linears", **LOW, bypass_mode=bypass)
        multiplier = torch.tensor(0.7, requires_grad=True)
        network.set_multiplier(multiplier)
        expected = torch.autograd.grad(model(x).sum(), multiplier)
        cukern.patch_lycoris(network)
        with pytest.warns(UserWarning, match="takes its own forward") if not bypass else nullcontext():
            same(torch.autograd.grad(model(x).sum(), multiplier), expected)


def test_refusals(monkeypatch):
    with pytest.raises(TypeError, match=r"network must be a LycorisNetwork, or .* LokrModules, got int 3"):
        cukern.patch_lycoris(3)
    with pytest.raises(ValueError, match="Sequential has no LokrModule: it has no module of LyCORIS"):
        cukern.patch_lycoris(linears())
    loha = lycoris.create_lycoris(linears(), algo="loha", linear_dim=2)
    with pytest.raises(ValueError, match="LycorisNetwork has no LokrModule: it has LohaModule"):
        cukern.patch_lycoris(loha)
    _, network, _ = made("linears")
    for version in ("4.1.2", "3.4.0", "4.2.0rc1", "5.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        match = rf"supports lycoris-lora from 4\.1\.3 to before 4\.2, got {version}"
        with pytest.raises(ValueError, match=match):
            cukern.patch_lycoris(network)


def test_no_half_patch(monkeypatch):
    _, network, _ = made("linears")
    before, calls = attributes(network), []
    kept_set = integration.Patch.set

    def set_three(self, *args):
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("stopped")
        kept_set(self, *args)

    monkeypatch.setattr(integration.Patch, "set", set_three)
    with pytest.raises(RuntimeError, match="stopped"):
        cukern.patch_lycoris(network)
    assert attributes(network) == before


# ---- PEFT


def of_peft(seed=0, **options):
    peft = pytest.importorskip("peft", minversion="0.21", reason="needs peft, of the extra integrations")
    config = peft.LoKrConfig(r=3, alpha=2, target_modules=["0", "2"], **options)
    torch.manual_seed(seed)
    model = peft.get_peft_model(linears(), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lokr" in name:
                p.copy_(torch.randn_like(p) * 0.3)
    return model, torch.randn(3, 5, 24, requires_grad=True)


@pytest.mark.parametrize("place", ("cpu", pytest.param("kernels", marks=kernels)))
@pytest.mark.parametrize(
    "options", ({}, {"decompose_both": True, "decompose_factor": 12}, {"module_dropout": 0.5}), ids=str
)
def test_peft(options, place):
    """Outputs and gradients, two adapters, and undo."""
    model, x = of_peft(**options)
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    before = [dict(vars(m)) for m in model.modules()]
    device = "cpu" if place == "cpu" else DEVICE
    model, x = model.to(device), x.detach().to(device).requires_grad_()

    def results():
        torch.manual_seed(1)  # of dropout
        inputs = x, *(p for n, p in model.named_parameters() if "lokr" in n)
        y = model(x)
        return y, *torch.autograd.grad((y * y.detach().cos()).sum(), inputs, allow_unused=True)

    expected = results()
    record = cukern.patch_lycoris(model)
    assert record.replaced == {"Linear": "2 of LoKr: lokr_linear"}
    same(results(), expected)
    with pytest.raises(ValueError, match="is patched already"):
        cukern.patch_lycoris(model)
    record.undo()
    assert [dict(vars(m)) for m in model.modules()] == before


def test_peft_with_rank_dropout_and_convolutions(monkeypatch):
    peft = pytest.importorskip("peft", minversion="0.21", reason="needs peft, of the extra integrations")
    monkeypatch.setattr(attention, "_warned", set())
    model, x = of_peft(rank_dropout=0.5)
    cukern.patch_lycoris(model)
    with pytest.warns(UserWarning, match="a LoKr layer of PEFT with rank dropout takes its own forward"):
        model(x)
    config = peft.LoKrConfig(target_modules=["first", "time"])
    record = cukern.patch_lycoris(peft.get_peft_model(Convolutions(), config))
    assert "there is no op for Conv2d" in str(record) and record.replaced == {
        "Linear": "1 of LoKr: lokr_linear"
    }
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.20.0")
    with pytest.raises(ValueError, match=r"supports peft from 0\.21 to before 0\.22, got 0\.20\.0"):
        cukern.patch_lycoris(of_peft()[0])
