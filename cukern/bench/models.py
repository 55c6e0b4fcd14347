"""Times updates and the decoding of a token of transformers' models with random weights: as they are, with
cukern.patch, and with Liger's patch; eager, and under torch.compile."""

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table, name_of
from cukern.runtime import checks

# By the name of the benchmark: the model's type, sizes of its config, and sequences and tokens of a batch.
MODELS: dict[str, tuple[str, dict[str, int], tuple[int, int]]] = {
    "llama": (
        "Llama",
        dict(num_hidden_layers=16, hidden_size=2048, vocab_size=128256, intermediate_size=8192)
        | dict(num_attention_heads=32, num_key_value_heads=8, head_dim=64),
        (4, 2048),
    ),
    "qwen3": (
        "Qwen3",
        dict(num_hidden_layers=28, hidden_size=1024, vocab_size=151936, intermediate_size=3072)
        | dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128),
        (8, 2048),
    ),
    "gemma2": (
        "Gemma2",
        dict(num_hidden_layers=26, hidden_size=2304, vocab_size=256000, intermediate_size=9216)
        | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=256),
        (2, 4096),
    ),
}
PROVIDERS = "torch compiled", "torch", "cukern", "cukern compiled", "liger"  # Liger's patch stays: it is last
WARMUP = 3
UPDATE, DECODE = "update", "decode"
CACHED, DECODED = (1, 32), 4096  # sequences of a batch, and tokens in the cache, when a token is decoded


def _build(kind: str, sizes: dict[str, int]) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **sizes, tie_word_embeddings=True, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    device = environment.device()
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def _patch(model: Any, provider: str) -> Callable[[], None]:
    """Patch the model for the provider. Returns what takes the patch back."""
    if provider.startswith("cukern"):
        return cukern.patch(model).undo
    if provider == "liger":
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model)
    return lambda: None


def _row(
    op: str, provider: str, steps: int, sizes: dict[str, int], batch: tuple[int, int], pass_: str
) -> Row:
    """Time `steps` updates, or decoded tokens, and the peak memory of the tensors."""
    device, cuda = environment.device(), environment.device().type == "cuda"
    model = _build(MODELS[op][0], sizes)
    undo = _patch(model, provider)
    tokens = torch.randint(sizes["vocab_size"], batch, dtype=torch.int64, device=device)
    compiled = provider.endswith("compiled")
    network = torch.compile(model, backend="inductor" if cuda else "aot_eager") if compiled else model
    step = _decode(model, network, tokens, steps) if pass_ == DECODE else _update(model, network, tokens)
    try:
        times, peak = timing.times_and_peak(step, steps, device, WARMUP)
    finally:
        undo()
        torch.compiler.reset()
    dtype = name_of(next(model.parameters()).dtype)
    shape = (sizes["num_hidden_layers"], sizes["hidden_size"], sizes["vocab_size"], *batch)
    return Row(op, "", pass_, shape, dtype, provider, times.median_us, times.iqr_us, peak_mib=peak)


def _update(model: Any, network: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """A function of forward, loss, backward and update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        network(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _decode(model: Any, network: Any, tokens: torch.Tensor, steps: int) -> Callable[[], None]:
    """A function that decodes one token after `tokens`, which fill the cache: a static one if it is compiled,
    as `generate` has it."""
    from transformers import Cache, DynamicCache, StaticCache

    model.eval()
    cache: Cache = DynamicCache(config=model.config)
    if network is not model:
        cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + 2 * (WARMUP + steps))
    known = inspect.signature(type(model).forward).parameters
    options = {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        for part in tokens.split(1024, dim=1):
            model(input_ids=part, logits_to_keep=1, **options)
    last = tokens[:, -1:].contiguous()

    def step() -> None:
        with torch.no_grad():
            network(input_ids=last, **options)

    return step


def _chosen(op: str, only: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The providers, and the reasons why others cannot be measured."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{op} is a model of transformers: pip install transformers")
    wanted = [checks.choice("--only", name, PROVIDERS) for name in only or PROVIDERS]
    chosen = [name for name in PROVIDERS if name in wanted]  # Liger last
    if "liger" not in chosen or importlib.util.find_spec("liger_kernel") is not None:
        return chosen, {}
    return chosen[:-1], {"liger": "liger_kernel is not installed"}


def measure_model(
    op: str,
    only: Sequence[str] | None,
    steps: int = 10,
    sizes: dict[str, int] | None = None,
    batch: tuple[int, int] | None = None,
    passes: Sequence[str] | None = None,
) -> Iterator[Table]:
    """Yield the times, from Python, of an update (forward, loss, backward and torch's fused AdamW) and of a
    decoded token, or of these `passes` only, a table for each time. `sizes` and `batch` replace those in
    MODELS."""
    chosen, missing = _chosen(op, only)
    sizes = MODELS[op][1] | (sizes or {})
    wanted = [checks.choice("--pass", name, (UPDATE, DECODE)) for name in passes or (UPDATE, DECODE)]
    work = [(UPDATE, batch or MODELS[op][2]), *((DECODE, (sequences, DECODED)) for sequences in CACHED)]
    for provider, (pass_, tokens) in itertools.product(chosen, (one for one in work if one[0] in wanted)):
        rows = list[Row]()
        if (provider, pass_) == ("liger", DECODE):
            missing.setdefault(provider, "only its updates are timed")
        else:
            try:
                rows.append(_row(op, provider, steps, sizes, tokens, pass_))
            except (torch.OutOfMemoryError, torch._dynamo.exc.TorchDynamoException) as error:
                missing[provider] = str(error).partition("\n")[0]
        yield Table(rows, missing)
        if environment.device().type == "cuda":
            torch.cuda.empty_cache()
