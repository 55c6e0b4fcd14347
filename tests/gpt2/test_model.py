"""The model against a plain torch GPT-2: logits, loss, every gradient, each kernel of the fork of llm.c,
tests A and B, and refusals."""

import gc
import itertools
from dataclasses import replace

import pytest
import torch
from gpt2_plain import NAMES, random_weights, reference, step
from helpers import DEVICE, PLACE, gpu, kernels, same_bits

import cukern
from cukern.cli.gpt2_check import TESTS, compare
from cukern.gpt2.checkpoint import Config, read_debug_state, write_debug_state
from cukern.gpt2.model import GPT2, config_of, use_kernels
from cukern.runtime.launch.kernel import collecting

TINY = Config(max_seq_len=16, vocab_size=60, num_layers=1, num_heads=4, channels=32)
SMALL = Config(max_seq_len=24, vocab_size=130, num_layers=2, num_heads=2, channels=32)
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]
FORK = [(1, None, None), (None, 1, None), (None, None, 1)]
EACH_KERNEL = [tuple(n if chosen else None for chosen in one) for one in FORK for n in range(1, 6)]


@pytest.fixture(autouse=True)
def place(request):
    """Without a GPU, tests marked `kernels` run in the simulator."""
    marked = request.node.get_closest_marker("kernels") and DEVICE == "cpu"
    with cukern.backend("sim" if marked else "gpu"):
        yield


def made(config=TINY, device="cpu", **options):
    model = GPT2(config, device=device, **options)
    model.initialize()
    return model


def batch(config, B=2, T=16, device="cpu"):
    return torch.randint(config.vocab_size, (2, B, T), generator=torch.Generator().manual_seed(0)).to(device)


def gradient_errors(model, state):
    """The relative L2 error of each gradient."""
    found = model.gradients_by_name()
    assert list(found) == NAMES
    return {
        name: ((g.cpu() - state.gradients[name]).norm() / state.gradients[name].norm()).item()
        for name, g in found.items()
    }


# ---- weights


def test_weights_are_those_of_seed_42():
    expected, found = random_weights(SMALL), made(SMALL).parameters_by_name()
    assert list(found) == NAMES
    for name in NAMES:
        assert same_bits(found[name], expected[name]), name
    assert not found["wte"][SMALL.vocab_size :].any() and found["wte"][SMALL.vocab_size - 1].all()
    other = GPT2(SMALL)
    other.initialize(seed=43)
    assert not torch.equal(other.wte, found["wte"])


def test_matrices_that_end_a_branch_are_smaller():
    w = made(
        Config(max_seq_len=8, vocab_size=100, num_layers=8, num_heads=2, channels=64)
    ).parameters_by_name()
    stds = {name: w[name].std().item() for name in ("qkvw", "fcw", "attprojw", "fcprojw")}
    assert stds == pytest.approx({"qkvw": 0.02, "fcw": 0.02, "attprojw": 0.005, "fcprojw": 0.005}, rel=0.02)


def test_parameters_by_name_are_loaded_back():
    one, two = made(SMALL), GPT2(SMALL, dtype=torch.bfloat16)
    parameters = {name: torch.randn(shape) for name, shape in SMALL.shapes.items()}
    one.load_parameters(parameters)
    two.load_parameters(parameters)
    for name in NAMES:
        assert same_bits(one.parameters_by_name()[name], parameters[name])
        assert same_bits(two.parameters_by_name()[name], parameters[name].bfloat16())
    assert sum(p.numel() for p in one.parameters()) == SMALL.num_parameters
    assert all(
        g.shape == parameters[name].shape and not g.any() for name, g in one.gradients_by_name().items()
    )


@pytest.mark.parametrize(
    "spoil",
    [lambda w: w.pop("fcb"), lambda w: w.update(more=w["fcb"]), lambda w: w.update(wpe=w["wpe"][:-1])],
)
def test_other_parameters_are_refused_before_any_is_written(spoil):
    model, parameters = made(), {name: torch.ones(shape) for name, shape in TINY.shapes.items()}
    before = model.parameters_by_name()
    spoil(parameters)
    with pytest.raises(ValueError, match=r"expected (fcb|more|wpe) of shape .*; found"):
        model.load_parameters(parameters)
    assert all(same_bits(before[name], w) for name, w in model.parameters_by_name().items())


def test_only_matrices_decay():
    model = made(SMALL)
    decayed, others = model.decay_groups(0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in others["params"]} == {1}
    assert {id(p) for g in (decayed, others) for p in g["params"]} == {id(p) for p in model.parameters()}


def test_sizes_of_descriptors():
    assert (
        config_of("d12") == config_of("gpt2:d12") == Config()
        and config_of("d12").num_parameters == 124_475_904
    )
    assert config_of("d48").sizes == (1024, 50257, 48, 25, 1600, 50304)
    assert config_of("gpt3:c768").sizes == (2048, 50257, 12, 12, 768, 50304)
    assert config_of("gpt3:c2560").sizes == (2048, 50257, 32, 32, 2560, 50304)
    for name in ("d13", "12", "gpt3:c5140", "", "gpt3:d12"):
        with pytest.raises(ValueError, match=f"expected one of d6, d12, .*gpt3:c12288; found '{name}'"):
            config_of(name)


# ---- forward and backward


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"attention": "v1"}, {"attention": "sdpa"}, {"attention": "v2", "matmul": "cublas"}],
    ids=str,
)
def test_logits_loss_and_gradients_are_those_of_plain_torch(device, options):
    weights = random_weights(SMALL)
    x, y = batch(SMALL, 2, 9)
    w = {name: weights[name].requires_grad_() for name in NAMES}
    logits, loss = step(w, x, y, SMALL)
    model = made(SMALL, device, **options)
    found = model(x.to(device).int())
    assert found.shape == (2, 9, SMALL.padded_vocab_size)
    torch.testing.assert_close(found[..., : SMALL.vocab_size].cpu(), logits, rtol=1e-4, atol=1e-5)
    mine = model(x.to(device), y.to(device))
    assert mine.dtype == torch.float32 and mine.shape == () and mine.item() == pytest.approx(loss, abs=1e-5)
    mine.backward()
    for name, g in model.gradients_by_name().items():
        assert (g.cpu() - w[name].grad).norm() <= 1e-5 * w[name].grad.norm(), name
    assert not model.wte.grad[SMALL.vocab_size :].any() and not model.wpe.grad[9:].any()


@kernels
def test_two_runs_give_the_same_bits_and_gradients_add_up():
    x, y = batch(TINY, device=DEVICE)
    found = []
    for _ in range(2):
        model = made(device=DEVICE)
        model(x, y).backward()
        found.append(model.gradients_by_name())
    assert all(map(same_bits, found[0].values(), found[1].values()))
    model(x, y).backward()
    for name, g in model.gradients_by_name().items():
        torch.testing.assert_close(g, 2 * found[0][name], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "device, dtype", [("cpu", torch.float16), pytest.param(DEVICE, torch.bfloat16, marks=kernels)]
)
def test_half_precision(device, dtype):
    x, y = batch(TINY, device=device)
    exact, model = made(device=device), made(device=device, dtype=dtype)
    expected, found = exact(x, y), model(x, y)
    found.backward()
    expected.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-2)
    for name, g in model.gradients_by_name().items():
        truth = exact.gradients_by_name()[name].flatten()
        assert (
            g.dtype == dtype and torch.nn.functional.cosine_similarity(g.float().flatten(), truth, 0) >= 0.99
        ), name
        assert g.float().norm().item() == pytest.approx(truth.norm().item(), rel=0.05), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [(1,) * 9, (4, 1, 4), (9,)], ids=str)
@pytest.mark.parametrize("attention", [None, "v1", "sdpa"])
def test_a_cache_changes_no_logits(device, parts, attention):
    model, (x, _) = made(SMALL, device, attention=attention), batch(SMALL, 2, 9, device)
    with torch.no_grad():
        cache = model.make_cache(2)
        found = torch.cat([model(part, cache=cache) for part in x.split(parts, 1)], 1)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-6)
    assert cache.length == 9


@kernels
def test_a_token_after_many_is_decoded():
    """By the kernel for few queries, in a 16-bit type."""
    model = made(
        Config(max_seq_len=160, vocab_size=60, num_layers=1, num_heads=2, channels=32),
        DEVICE,
        dtype=torch.bfloat16,
    )
    x = batch(model.config, 1, 141, DEVICE)[0]
    with torch.no_grad():
        cache = model.make_cache(1)
        model(x[:, :140], cache=cache)
        found, expected = model(x[:, 140:], cache=cache)[0, 0], model(x)[0, -1]
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.01 * expected.abs().max().item())
        if DEVICE == "cpu":
            cache.length = 140
            with collecting() as kernels_found:
                model(x[:, 140:], cache=cache)
            assert any(name.startswith("attention_decode<") for name in kernels_found)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(16), r"tokens of shape \(B, T\); found \(16,\)"),
        (torch.zeros(1, 17), "at most max_seq_len = 16 tokens; found 17"),
        (torch.full((1, 2), 60), "tokens from 0 to 59; found 60"),
        (torch.full((1, 2), -1), "tokens from 0 to 59; found -1"),
    ],
)
def test_bad_tokens_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        made()(tokens.long())


def test_bad_arguments_are_refused():
    x, y = batch(TINY)
    model = made()
    with pytest.raises(TypeError, match="tokens"):
        model(x.float())
    with pytest.raises(ValueError, match="targets"):
        model(x, y[:, :-1])
    with pytest.raises(ValueError, match="target"):
        model(x, torch.full_like(y, 60))
    with pytest.raises(ValueError, match="attention v1, v2, v3, v4, sdpa or None; found 'v9'"):
        GPT2(TINY, attention="v9")
    with pytest.raises(ValueError, match=r"matmul cublas, v1, .* or None; found 'v6'"):
        GPT2(TINY, matmul="v6")
    with pytest.raises(ValueError, match="fused_loss True, False or None; found 'no'"):
        GPT2(TINY, fused_loss="no")
    with pytest.raises(TypeError, match="expected a Config; found dict"):
        GPT2({})
    with pytest.raises(ValueError, match="batch of at least 1; found 0"):
        model.make_cache(0)
    with pytest.raises(ValueError, match="a cache for as many rows as tokens has; found 3"):
        model(x, cache=model.make_cache(3))
    cache = model.make_cache(2)
    with torch.no_grad(), pytest.raises(ValueError, match="at most max_seq_len = 16 tokens; found 17"):
        model(x, cache=cache)
        model(x[:, :1], cache=cache)


@gpu
def test_tokens_outside_the_vocabulary_become_nan_on_a_gpu():
    model = made(device="cuda")
    logits = model(torch.tensor([[1, 2], [60, 2], [-1, 2], [128, 2]], device="cuda"))
    assert logits[:, 0, 0].isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("device, fused_loss", [("cpu", False), pytest.param(DEVICE, True, marks=kernels)])
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
def test_torch_compile_without_a_graph_break(device, fused_loss):
    model, (x, y) = made(device=device, fused_loss=fused_loss), batch(TINY, device=device)
    eager = model(x, y)
    eager.backward()
    expected = model.gradients_by_name()
    model.zero_grad()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)
    loss.backward()
    assert loss.item() == pytest.approx(eager.item(), rel=1e-6)
    for name, gradient in model.gradients_by_name().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "device, dtype", [("cpu", torch.float32), pytest.param(DEVICE, torch.bfloat16, marks=kernels)]
)
def test_recomputation_gives_the_same_bits(device, dtype):
    gradients = []
    for recompute in (0, 1, 2):
        model, (x, y) = made(device=device, dtype=dtype, recompute=recompute), batch(TINY, device=device)
        model(x, y).backward()
        gradients.append(model.gradients_by_name())
    assert all(same_bits(gradients[0][name], other[name]) for other in gradients[1:] for name in NAMES)


@kernels
def test_recomputation_keeps_less_memory():
    kept = []
    for recompute in (0, 1, 2):
        model, (x, y) = made(TINY, device=DEVICE, recompute=recompute), batch(TINY, device=DEVICE)
        seen = []
        # cuBLAS allocates its workspace in the first; another test's may be freed at any time
        for _ in range(3):
            model.zero_grad()
            gc.collect()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            ) as profiler:
                loss = model(x, y)
            events = profiler.key_averages()
            seen.append(
                sum(
                    e.self_cpu_memory_usage if DEVICE == "cpu" else e.self_device_memory_usage for e in events
                )
            )
            loss.backward()
        kept.append(sorted(seen)[1])
    unit = TINY.num_layers * x.numel() * TINY.channels * 4
    assert [round((a - b) / unit, 1) for a, b in itertools.pairwise(kept)] == [4, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_the_fused_loss_is_that_of_all_logits(device):
    (x, y), models = (
        batch(SMALL, device=device),
        [made(SMALL, device=device, fused_loss=fused) for fused in (False, True)],
    )
    losses = [model(x, y) for model in models]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for name, gradient in models[1].gradients_by_name().items():
        torch.testing.assert_close(
            gradient, models[0].gradients_by_name()[name], rtol=1e-4, atol=1e-6, msg=name
        )


@pytest.mark.parametrize(
    ("rows", "dtype", "fused_loss", "chunk"),
    [(128, torch.bfloat16, None, 1640), (127, torch.bfloat16, None, 0), (128, torch.float32, None, 0),
     (128, torch.bfloat16, False, 0),
     (1, torch.float32, True, 1368)],
)  # fmt: skip
def test_many_tokens_in_bfloat16_have_the_fused_loss(monkeypatch, rows, dtype, fused_loss, chunk):
    chunks, config = [], replace(TINY, max_seq_len=64)
    monkeypatch.setattr(
        cukern, "linear_cross_entropy", lambda y, *_, chunk_rows, **__: chunks.append(chunk_rows)
    )
    model = GPT2(config, dtype=dtype, fused_loss=fused_loss)
    model(*torch.zeros(2, rows, 64, dtype=torch.int64))
    assert chunks == [chunk] * bool(chunk)


# ---- the kernels of the fork


def launched(model, x, y):
    """The names, without template arguments, of the softmax and matmul kernels of a step."""
    with cukern.backend("sim"), collecting() as found:
        model(x, y).backward()
    return {name.partition("<")[0] for name in found if "softmax" in name or "matmul" in name}


@pytest.mark.parametrize("numbers", [(2, 4, 3), ("2", "4", "3")])
def test_use_kernels_chooses(numbers):
    model, (x, y) = made(), batch(TINY)
    with use_kernels(*numbers):
        assert launched(model, x, y) == {"softmax_v2", "softmax_v4_bwd", "matmul_v3"}
    assert not any(name.startswith(("softmax", "matmul")) for name in launched(model, x, y))


def test_one_choice_leaves_the_others_alone():
    model, (x, y) = made(), batch(TINY)
    with cukern.use("attention", "v1"):
        usual = launched(model, x, y)
    (forward,) = (name for name in usual if not name.endswith("_bwd"))
    (backward,) = usual - {forward}
    with use_kernels(softmax_forward=3):
        assert launched(model, x, y) == {"softmax_v3", backward}
    with use_kernels(softmax_backward=3):
        assert launched(model, x, y) == {forward, "softmax_v3_bwd"}
    with use_kernels(matmul_forward=3):
        assert {name for name in launched(model, x, y) if "matmul" in name} == {"matmul_v3"}
        with use_kernels(matmul_forward="cublas"):
            assert not any("matmul" in name for name in launched(model, x, y))
        with use_kernels():
            assert any("matmul" in name for name in launched(model, x, y))
    assert not any("matmul" in name for name in launched(model, x, y))


def test_variables_choose_and_arguments_go_first(monkeypatch):
    model, (x, y) = made(), batch(TINY)
    for name, number in (("SOFTMAX_FORWARD", "2"), ("SOFTMAX_BACKWARD", "4"), ("MATMUL_FORWARD", "3")):
        monkeypatch.setenv(f"{name}_KERNEL", number)
    with use_kernels():
        assert launched(model, x, y) == {"softmax_v2", "softmax_v4_bwd", "matmul_v3"}
    with use_kernels(softmax_forward=1, matmul_forward="cublas"):
        assert launched(model, x, y) == {"softmax_v1", "softmax_v4_bwd"}


@pytest.mark.parametrize("number", [0, 6, "v1", "cuBLAS", True, 1.0])
@pytest.mark.parametrize("name", ["softmax_forward", "softmax_backward", "matmul_forward"])
def test_unknown_numbers_are_refused(name, number, monkeypatch):
    message = (
        rf"expected {name}, or the variable {name.upper()}_KERNEL, to be one of 1, 2, 3, 4, 5(, cublas)?; "
        rf"found '{number}'"
    )
    with pytest.raises(ValueError, match=message), use_kernels(**{name: number}):
        pass
    monkeypatch.setenv(f"{name.upper()}_KERNEL", str(number))
    with pytest.raises(ValueError, match=message), use_kernels():
        pass


def test_the_cpu_keeps_torch():
    model, (x, y) = made(), batch(TINY)
    usual = model(x, y)
    with use_kernels(3, 3, 3):
        assert model(x, y).item() == pytest.approx(usual.item(), abs=1e-6)
    with pytest.raises(ValueError, match=r"version 'v3' of cukern\.linear is a CUDA kernel"):
        made(matmul="v3")(x, y)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Weights, the debug state from its file, and the losses of tests A and B, of plain torch."""
    weights, state, *losses = reference(TINY, 2, 16)
    path = tmp_path_factory.mktemp("tiny") / "debug_state.bin"
    write_debug_state(path, TINY, state)
    return weights, read_debug_state(path, TINY), *losses


def one_step(numbers, tiny):
    weights, state, *_ = tiny
    model = GPT2(TINY, device=DEVICE)
    model.load_parameters(weights)
    with use_kernels(*numbers):
        loss = model(state.x.to(DEVICE), state.y.to(DEVICE))
        loss.backward()
    assert loss.item() == pytest.approx(state.loss, abs=1e-5)
    assert {name: e for name, e in gradient_errors(model, state).items() if not e <= 1e-4} == {}


@kernels
@pytest.mark.parametrize("numbers", EACH_KERNEL, ids=str)
def test_each_kernel_of_the_fork(numbers, tiny):
    one_step(numbers, tiny)


@gpu
def test_all_125_choices_of_the_fork(tiny):
    for numbers in itertools.product(range(1, 6), repeat=3):
        one_step(numbers, tiny)


# ---- tests A and B


def assert_parity(config, reference, device, numbers=()):
    weights, state, *losses = reference
    for test, table in zip(TESTS.values(), losses, strict=True):
        model = GPT2(config, device=device)
        model.load_parameters(weights)
        with use_kernels(*numbers):
            rows = compare(test._replace(losses=table), model, state)
        assert [row for row in rows if not row.ok] == []
        assert (
            len(rows) == 2 + 2 * 16 + 10
            and [row.expected for row in rows if row.what.startswith("loss of step")] == table
        )


@kernels
@pytest.mark.parametrize("numbers", [(1, 1, 1), (5, 5, 5)][: 1 if PLACE == "sim" else 2], ids=str)
def test_ten_steps(numbers, tiny):
    assert_parity(TINY, tiny, DEVICE, numbers)


@gpu
@pytest.mark.parametrize("numbers", [(), (5, 5, 5)], ids=str)
def test_parity_at_124m(numbers):
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        assert_parity(config_of("d12"), reference(config_of("d12"), 4, 64, "cuda"), "cuda", numbers)
    finally:
        torch.set_float32_matmul_precision(precision)


def test_parity_finds_what_is_wrong(tiny):
    weights, state, a, b = tiny
    for test, losses in zip(TESTS.values(), (a, b), strict=True):
        model = GPT2(TINY)
        model.load_parameters({**weights, "fcb": weights["fcb"] + 0.05})
        wrong = {
            row.what.partition(" of ")[0]
            for row in compare(test._replace(losses=losses[:2]), model, state)
            if not row.ok
        }
        assert "gradient" in wrong
        model.load_parameters(weights)
        other = test._replace(losses=[losses[0], losses[1] + 0.1])
        assert [row.what for row in compare(other, model, state) if not row.ok] == ["loss of step 1"]
    for test in TESTS.values():
        with pytest.raises(TypeError, match=r"a float32 model; found torch\.bfloat16"):
            compare(test, GPT2(TINY, dtype=torch.bfloat16), state)
    with pytest.raises(ValueError, match="logits of 130 tokens; found 60"):
        compare(TESTS["B"], GPT2(SMALL), state)


def test_parity_trains_as_llmc(tiny):
    weights, state, *_ = tiny
    seen = []
    for test in TESTS.values():
        model = GPT2(TINY)
        model.load_parameters(weights)
        one = test._replace(losses=[1.0])
        compare(
            one,
            model,
            state,
            lambda parameters, **options: seen.append(options) or torch.optim.AdamW(parameters, **options),
        )
    assert seen == [
        {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
    ]


def test_tf32_is_off_meanwhile(tiny):
    weights, state, *_ = tiny
    before, seen = torch.get_float32_matmul_precision(), []
    model = GPT2(TINY)
    model.load_parameters(weights)
    model.register_forward_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    try:
        compare(TESTS["A"]._replace(losses=[1.0]), model, state)
        assert set(seen) == {"highest"} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
