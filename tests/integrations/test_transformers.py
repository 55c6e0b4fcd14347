"""cukern.patch on tiny models of each family: losses, gradients, generation, masks, fallbacks, undo,
refusals. Against the same model without the patch."""

import contextlib
import copy
import importlib.util
import inspect
import types
import warnings

import pytest
import torch
from functorch.compile import make_boxed_func
from helpers import kernels
from torch._dynamo.backends.common import aot_autograd

import cukern
from cukern.integrations import attention

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra integrations")
from cukern.integrations.transformers import CACHE, FAMILIES  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"head_dim": 16, "sliding_window": 5}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
# sdpa of 5.17 ignores it
SOFTCAP = {"attn_logit_softcapping": 0.2, "final_logit_softcapping": 0.5, "attn_implementation": "eager"}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**GEMMA, **SOFTCAP}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 5}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def made(name, dtype=torch.float32, **changed):
    """A model of the family in training mode, with weights whose attention is not uniform."""
    config, model, options = MODELS[name]
    sizes = SIZES
    if name == "gpt2":
        sizes = {
            "vocab_size": 97,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        sizes.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **options, **changed}))
    with torch.no_grad():
        for key, p in made.named_parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (p.ndim == 1 and "norm" in key and "gemma" not in name))
    if name == "gpt_oss":
        made.set_experts_implementation("eager")  # the default has no float64
    return made.to(dtype).train()


def cached(model, cache):
    """The cache under the name of the argument that the model has."""
    known = inspect.signature(type(model).forward).parameters
    return {next(name for name in CACHE if name in known): cache}


@pytest.fixture
def tokens():
    return torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def step(model, *args, **options):
    """The loss and all gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model(*args, **options).loss
    return loss.detach(), *torch.autograd.grad(loss, parameters)


def assert_same(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3), (
            (a - b).abs().max(),
            b.abs().max(),
        )


@contextlib.contextmanager
def patched(model, **flags):
    record = cukern.patch(model, **flags)
    try:
        yield record
    finally:
        record.undo()


@contextlib.contextmanager
def without_fallback():
    """An error if the model's own attention runs."""
    attention._warned.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "cukern: ")
        yield


@EVERY
def test_losses_and_gradients(name, tokens):
    """Three steps of SGD, each from the same parameters."""
    model = made(name)
    ours = copy.deepcopy(model)
    with patched(ours) as record, without_fallback():
        assert set(record.replaced) | set(record.kept) == {"attention", "norms", "mlp", "rope", "loss"}
        for _ in range(3):
            expected, found = step(model, tokens, labels=tokens), step(ours, tokens, labels=tokens)
            assert_same(found, expected)
            with torch.no_grad():
                for p, q, g in zip(model.parameters(), ours.parameters(), expected[1:], strict=True):
                    q.copy_(p.sub_(0.05 * g))


@EVERY
def test_bfloat16(name, tokens):
    """Errors against float64 of at most twice those of the model without the patch. Dividing by the norm of
    all gradients."""
    truth = made(name, torch.float64)
    logits = truth(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    right = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(truth.parameters()))])
    model = made(name, torch.bfloat16)
    theirs = step(model, tokens, labels=tokens)
    with patched(model):
        ours = step(model, tokens, labels=tokens)
    errors = [
        (torch.cat([g.flatten() for g in found[1:]]).double() - right).norm() for found in (ours, theirs)
    ]
    assert errors[0] <= 2 * errors[1] and errors[1] < 0.2 * right.norm()
    assert abs(ours[0] - loss) <= 2 * abs(theirs[0] - loss) + 2**-7 * loss


@EVERY
def test_greedy_tokens(name, tokens):
    """Prefill and decode with the model's cache; a window of 5 is shorter than the prompt."""
    model = made(name).eval()
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False)
    with patched(model), without_fallback():
        assert torch.equal(model.generate(tokens, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("name", ("llama", "gemma2", "gpt_oss"))
def test_greedy_tokens_with_padding_on_the_left(name, tokens):
    """Decoding with padding takes the model's own attention."""
    model, mask = made(name).eval(), torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    attention._warned.clear()
    with patched(model), pytest.warns(UserWarning, match="mask"):
        assert torch.equal(
            model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False), expected
        )


@pytest.mark.parametrize("name", ("llama", "mistral", "gemma2", "gpt_oss"))
@pytest.mark.parametrize("window", (5, 15))
def test_greedy_tokens_with_a_static_cache(name, window, tokens):
    """A window that ends before the prompt, and one that ends while tokens are decoded."""
    model = made(name, **({} if name == "llama" else {"sliding_window": window})).eval()
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    expected = model.generate(tokens, **options)
    with patched(model), without_fallback():
        assert torch.equal(model.generate(tokens, **options), expected)


def test_attention_in_chunks():
    """Llama 4's layers attend within chunks of 5 tokens; one with all tokens."""
    attention.register()
    sizes = SIZES | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=5, no_rope_layers=[1, 0])
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def outputs(kind):
        model.set_attn_implementation(kind)
        static = transformers.StaticCache(config=config, max_cache_len=16)
        caches = static, transformers.DynamicCache(config=config)
        parts = tokens.split((3, *[1] * 9), 1)
        decoded = [model(part, **cached(model, cache)).logits for cache in caches for part in parts]
        return model(tokens, use_cache=False).logits, model(tokens[:, :4]).logits, *decoded

    assert_same(outputs("cukern"), outputs("eager"))


def test_a_part_of_a_prompt_in_a_static_cache_takes_the_kernel_of_many_queries():
    """12 tokens after 5, in a cache of 64: no key_lengths, which only kernels of few queries have."""
    given = {"batch_size": 2, "q_length": 12, "kv_length": 64, "q_offset": torch.tensor(5)}
    assert attention.attention_mask(**given).shape == (0, 0, 0, 17)
    one = attention.attention_mask(**given | {"q_length": 1})
    assert one.shape == (2, 1, 1, 1) and (one == 6).all()


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_a_cache_without_a_mask(name, tokens):
    """Three calls of the base model with one cache of fixed length, under each name of the argument."""
    model = made(name).eval()
    base = model.base_model
    names = {"past_key_values", *CACHE} & {"past_key_values", *inspect.signature(base.forward).parameters}

    @torch.no_grad()
    def outputs(argument):
        cache = transformers.StaticCache(config=base.config, max_cache_len=16)
        return [base(part, **{argument: cache}).last_hidden_state for part in tokens.split((5, 6, 1), 1)]

    for argument in names:
        expected = outputs(argument)
        with patched(model):
            assert_same(outputs(argument), expected)


@pytest.mark.parametrize("name", ("llama", "mistral", "gemma2", "gpt_oss", "gpt2"))
@pytest.mark.parametrize("side", ("left", "right"))
def test_padded(name, side, tokens):
    model, mask = made(name), torch.ones_like(tokens)
    mask[0, :3] = 0
    mask[1, :5] = 0
    mask = mask.flip(1) if side == "right" else mask
    labels = tokens.masked_fill(mask == 0, -100)
    labels[0, 3] = labels[1, 5] = -100  # on the left, padding predicts the first token
    of = {"attention_mask": mask, "labels": labels}
    expected = step(model, tokens, **of)
    with patched(model), without_fallback():
        assert_same(step(model, tokens, **of), expected)


@pytest.mark.parametrize("name", ("llama", "mistral", "gemma3_text"))
def test_packed(name, tokens):
    """position_ids that begin again. With cu_seq_lens, as of DataCollatorWithFlattening, too."""
    model, positions = made(name), torch.cat((torch.arange(5), torch.arange(7)))[None]
    of = {"position_ids": positions, "labels": tokens[:1], "use_cache": False}
    expected = step(model, tokens[:1], **of)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    with patched(model), without_fallback():
        assert_same(step(model, tokens[:1], **of), expected)
        of.update(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=7, max_length_k=7)
        assert_same(step(model, tokens[:1], **of), expected)
        assert (step(model, tokens[:1], labels=tokens[:1])[0] - expected[0]).abs() > 1e-3


@pytest.mark.parametrize("name", ("llama", "gemma2", "gpt_oss"))
def test_masks_with_holes_take_the_models_attention(name, tokens):
    model, mask = made(name), torch.ones_like(tokens)
    mask[:, 4] = 0
    four = torch.ones(2, 1, 12, 12).tril() * mask[:, None, None]
    attention._warned.clear()
    for given in (mask, torch.where(four > 0, 0.0, torch.finfo(torch.float32).min)):
        of = {"attention_mask": given, "labels": tokens.masked_fill(mask == 0, -100)}
        expected = step(model, tokens, **of)
        with patched(model), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same(step(model, tokens, **of), expected)
            step(model, tokens, **of)
        # once per reason
        assert len([w for w in caught if "own attention" in str(w.message)]) == (given is mask)


@pytest.mark.parametrize("name", ("llama", "gpt_oss"))
def test_attention_dropout(name, tokens):
    """By the op; padded batches take the model's attention."""
    model, padding = made(name, attention_dropout=0.5), torch.ones_like(tokens)
    padding[:, :3] = 0
    attention._warned.clear()
    with patched(model):
        for given in (None, padding):
            torch.manual_seed(3)
            warned = contextlib.nullcontext() if given is None else pytest.warns(match="attention dropout in")
            with warned:
                one = model(tokens, labels=tokens, attention_mask=given).loss
            assert one != model(tokens, labels=tokens, attention_mask=given).loss
            torch.manual_seed(3)
            assert one == model(tokens, labels=tokens, attention_mask=given).loss
    with patched(model.eval()), without_fallback():
        model(tokens)


@pytest.mark.parametrize("name", ("llama", "gemma2"))
def test_output_attentions(name, tokens):
    model = made(name, attn_implementation="eager").eval()
    expected = model(tokens, output_attentions=True).attentions
    attention._warned.clear()
    with patched(model), pytest.warns(UserWarning, match="output_attentions"):
        assert_same(model(tokens, output_attentions=True).attentions, expected)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_gradient_checkpointing(name, tokens):
    model = made(name)
    expected = step(model, tokens, labels=tokens)
    model.gradient_checkpointing_enable()
    with patched(model), without_fallback():
        assert_same(step(model, tokens, labels=tokens), expected)


def test_frozen_weights(tokens):
    model = made("llama")
    model.model.requires_grad_(False)
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(True)
    model.lm_head.weight.requires_grad_(False)
    expected = step(model, tokens, labels=tokens)
    with patched(model):
        assert_same(step(model, tokens, labels=tokens), expected)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_lora(tokens):
    import peft

    model = peft.get_peft_model(
        made("llama"), peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    expected = step(model, input_ids=tokens, labels=tokens)
    with patched(model), without_fallback():
        assert_same(step(model, input_ids=tokens, labels=tokens), expected)


def test_logits_on_request(tokens):
    model = made("gemma2")
    expected = model(tokens, labels=tokens)
    with patched(model):
        assert model(tokens, labels=tokens).logits is None
        for outputs in (
            model(tokens, labels=tokens, return_logits=True),
            model(tokens, labels=tokens, logits_to_keep=12),
            model(tokens),
        ):
            assert_same([outputs.logits], [expected.logits])
        assert isinstance(model(tokens, labels=tokens, return_dict=False), tuple)
        assert model.eval()(tokens, labels=tokens).logits is not None
        assert model.train()(tokens).loss is None


def test_loss_options_of_trainers(tokens):
    """The number of items in the batch, as a number and a tensor, and labels that are shifted already."""
    model = made("llama")
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    for options in (
        {"num_items_in_batch": 30},
        {"num_items_in_batch": torch.tensor(30)},
        {"shift_labels": shifted},
    ):
        expected = step(model, tokens, labels=tokens, **options)
        with patched(model):
            assert_same(step(model, tokens, labels=tokens, **options), expected)


def test_autocast(tokens):
    model = made("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens, labels=tokens).loss
        with patched(model):
            assert (model(tokens, labels=tokens).loss - expected).abs() < 0.02 * expected


@pytest.mark.parametrize("name", ("llama", "gemma2"))
def test_compiled_whole(name, tokens):
    model = (
        made(name, num_hidden_layers=1, layer_types=["full_attention"])
        if name == "gemma2"
        else made(name, num_hidden_layers=1)
    )
    expected = step(model, tokens, labels=tokens)
    torch.compiler.reset()
    with patched(model):
        assert_same(
            step(torch.compile(model, fullgraph=True, backend="aot_eager"), tokens, labels=tokens), expected
        )


@kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", ("qwen3", "gpt2"))
def test_few_tokens_in_a_compiled_graph(name, tokens):
    """The compiler sees the model's own norms, MLP and rope for one token, and cukern's for 80."""
    graphs = []

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    @torch.no_grad()
    def run(model, network):
        cache = transformers.StaticCache(config=model.config, max_cache_len=48)
        options = {**cached(model, cache), "use_cache": True}
        model(tokens, **options)
        return [network(tokens[:, :1], **options).logits, network(tokens.repeat(1, 4)[:, :40]).logits]

    model = made(name, num_hidden_layers=1).eval()
    expected = run(model, model)
    torch.compiler.reset()
    with patched(model), cukern.backend("sim"):
        backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
        network = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        assert_same(run(model, network), expected)
    few, many = (sorted(name for name in graph if name.startswith("cukern")) for graph in graphs)
    assert few == ["cukern._attention_with_lengths.default"]
    assert len(many) == (3 if name == "gpt2" else 4), many


@kernels
def test_in_the_simulator(tokens):
    model = made("llama", num_hidden_layers=1)
    expected = step(model, tokens[:1], labels=tokens[:1])
    with patched(model), cukern.backend("sim"):
        assert_same(step(model, tokens[:1], labels=tokens[:1]), expected)


# ---- what is replaced, undo, types, refusals


def tree(model, file):
    """All attributes of all modules, of the config, and of the functions that may be replaced."""
    return (
        {
            name: {k: v for k, v in vars(m).items() if not k.startswith("__")}
            for name, m in model.named_modules()
        },
        dict(vars(model.config)),
        vars(file).get("apply_rotary_pos_emb"),
        [k for k in vars(file) if "cukern" in k],
        type(model).__init__,
    )


@EVERY
def test_undo_restores_every_attribute(name, tokens):
    model = made(name)
    folder = FAMILIES[name].file or name
    file = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")

    def snapshot():
        modules, config, *rest = tree(model, file)
        return {n: dict(attributes) for n, attributes in modules.items()}, dict(config), *rest

    before, state = snapshot(), {k: id(v) for k, v in model.named_parameters()}
    record = cukern.patch(model)
    assert {k: id(v) for k, v in model.named_parameters()} == state
    assert repr(snapshot()) != repr(before)
    with pytest.raises(ValueError, match="patched already"):
        cukern.patch(model)
    record.undo()
    record.undo()
    assert repr(snapshot()) == repr(before)


def test_what_is_replaced():
    record = cukern.patch(model := made("gpt_oss"), norms=False)
    text = str(record)
    record.undo()
    assert (
        "GptOssForCausalLM" in text
        and "norms      not replaced: not asked for" in text
        and "clamped SwiGLU" in text
    )
    assert 'attn_implementation="cukern", was "eager"' in text
    model = made("llama", hidden_act="relu")
    with patched(model) as record:
        assert record.kept == {"mlp": "there is no op for the activation 'relu'"}
    model.loss_function = lambda **_: None
    with patched(model) as record:
        assert "a loss function of its own" in record.kept["loss"]


def test_rope_stays_until_the_last_undo(tokens):
    file = importlib.import_module("transformers.models.olmo2.modeling_olmo2")
    before, records = file.apply_rotary_pos_emb, [cukern.patch(made("olmo2")) for _ in range(2)]
    assert file.apply_rotary_pos_emb is not before
    records[0].undo()
    assert file.apply_rotary_pos_emb is not before
    records[1].undo()
    assert file.apply_rotary_pos_emb is before


def test_a_copy_of_a_patched_model_is_patched(tokens):
    model = made("llama")
    expected = step(model, tokens, labels=tokens)
    with patched(model):
        other = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.model.norm.weight.zero_()
        assert other(tokens, labels=tokens).logits is None
        assert_same(step(other, tokens, labels=tokens), expected)


def test_a_type(tokens, tmp_path):
    made("qwen3").save_pretrained(tmp_path)
    expected = step(transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).train(), tokens, labels=tokens)
    before = transformers.Qwen3ForCausalLM.__init__
    record = cukern.patch(transformers.Qwen3ForCausalLM)
    try:
        with pytest.raises(ValueError, match="patched already"):
            cukern.patch(transformers.Qwen3ForCausalLM)
        model = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).train()
    finally:
        record.undo()
    assert model.config._attn_implementation == "cukern" and model(tokens, labels=tokens).logits is None
    assert_same(step(model, tokens, labels=tokens), expected)
    assert transformers.Qwen3ForCausalLM.__init__ is before
    assert transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_refused(monkeypatch):
    bert = transformers.BertModel(
        transformers.BertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    )
    for model, text in (
        (bert, "llama, qwen2.*got BertModel of model_type 'bert'"),
        (torch.nn.Linear(1, 1), "llama, qwen2.*got Linear"),
    ):
        with pytest.raises(ValueError, match=text):
            cukern.patch(model)
    with pytest.raises(ValueError, match="got LlamaModel"):
        cukern.patch(made("llama").model)
    with pytest.raises(ValueError, match="got BertModel"):
        cukern.patch(transformers.BertModel)
    for wrong in ("llama", int, None):
        with pytest.raises(TypeError, match="a model of transformers"):
            cukern.patch(wrong)
    with pytest.raises(TypeError, match="attention must be a bool"):
        cukern.patch(made("llama"), attention="sdpa")
    monkeypatch.setattr(importlib.import_module("cukern.integrations.transformers"), "OLDEST", (99, 0))
    with pytest.raises(
        ValueError, match=rf"supports transformers 99\.0 up to 5\.x, got {transformers.__version__}"
    ):
        cukern.patch(made("llama"))


def test_models_of_other_libraries_are_refused(monkeypatch):
    """A replaced forward, a replaced class, a replaced function: refused before anything changes."""
    model = made("llama")
    forward = types.FunctionType((lambda self, x: x).__code__, {"__name__": "liger_kernel.rms_norm"})
    model.model.norm.forward = types.MethodType(forward, model.model.norm)
    with pytest.raises(ValueError, match=r"forward of model\.norm was replaced"):
        cukern.patch(model)
    assert model.config._attn_implementation == "sdpa"
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(ValueError, match="no LlamaMLP"):
        cukern.patch(model)
    file = importlib.import_module("transformers.models.llama.modeling_llama")
    rope = types.FunctionType((lambda q, k, cos, sin: None).__code__, {"__name__": "liger_kernel.rope"})
    rope.__module__ = "liger_kernel.rope"
    monkeypatch.setattr(file, "apply_rotary_pos_emb", rope)
    with pytest.raises(ValueError, match="replaced by liger_kernel"):
        cukern.patch(made("llama"))


def test_an_error_in_the_middle_restores_the_model(monkeypatch):
    model = made("llama")
    monkeypatch.setattr("cukern.integrations.transformers._patch_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cukern.patch(model)
    assert model.config._attn_implementation == "sdpa" and "forward" not in vars(model.model.norm)
