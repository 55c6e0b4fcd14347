"""Times attention over shapes of training and over caches of decoding, next to cuDNN and FlashAttention-4;
the caches also in pages, and next to a copy of their bytes."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cukern
from cukern.bench import environment, timing
from cukern.bench.calls import backward
from cukern.bench.measure import Row, Table, copies, holding, input_sets, name_of, note_failure
from cukern.bench.peers import sdpa
from cukern.runtime import checks

WINDOW = 1024
# Sequences, query heads, KV heads, tokens, head_dim, mask.
Shape = tuple[int, int, int, int, int, str]
SHAPES: tuple[Shape, ...] = (
    (32, 16, 16, 512, 64, "causal"), (16, 16, 16, 1024, 64, "causal"), (16, 64, 8, 1024, 64, "causal"),
    (8, 16, 16, 2048, 64, "full"), (4, 16, 16, 4096, 64, "causal"), (4, 20, 4, 4096, 64, "full"),
    (2, 16, 16, 8192, 64, "window"), (1, 16, 16, 16384, 64, "causal"),
    (32, 16, 16, 512, 128, "causal"), (16, 16, 16, 1024, 128, "causal"), (16, 16, 16, 1024, 128, "full"),
    (8, 16, 16, 2048, 128, "causal"), (8, 64, 8, 2048, 128, "full"), (4, 16, 16, 4096, 128, "causal"),
    (4, 16, 16, 4096, 128, "full"), (4, 20, 4, 4096, 128, "window"), (2, 64, 8, 8192, 128, "causal"),
    (2, 64, 8, 8192, 128, "window"), (1, 16, 16, 16384, 128, "causal"), (1, 16, 16, 16384, 128, "full"),
    (5, 20, 4, 3001, 128, "causal"),
    (16, 16, 16, 1024, 256, "causal"), (4, 16, 16, 4096, 256, "full"), (2, 16, 16, 8192, 256, "causal"),
)  # fmt: skip
HALF = 6  # each such shape is also timed in float16
# Sequences, query heads, KV heads, tokens in the cache, head_dim: 67 MB to 4.3 GB in 16 bits.
CACHES = (
    (1, 32, 8, 16384, 128), (16, 64, 8, 4096, 128), (64, 16, 1, 8192, 128), (1, 32, 8, 131072, 128),
    (4, 64, 8, 32768, 128), (32, 64, 8, 4096, 128), (128, 32, 8, 2048, 128), (128, 32, 8, 8192, 128),
)  # fmt: skip
PAGES = 16, 256
PROVIDERS = "cukern", "cudnn", "fa4", "fa4 deterministic", "copy"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _cukern(mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cukern.attention(q, k, v, causal=mask != "full", window=WINDOW if mask == "window" else None)


def _cudnn(mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if mask == "window":
        raise ValueError("torch's cuDNN attention has no window")
    return sdpa(q, k, v, cudnn=True, causal=mask == "causal")


def _fa4(deterministic: bool, mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-4; its tensors are (sequences, tokens, heads, head_dim)."""
    from flash_attn.cute import flash_attn_func

    window = (WINDOW - 1, 0) if mask == "window" else (None, None)
    causal = mask != "full"
    return flash_attn_func(q, k, v, causal=causal, window_size=window, deterministic=deterministic)[0]


def _attentions(device: torch.device) -> tuple[dict[str, Callable[..., Tensor]], dict[str, str]]:
    """The providers by name, and the reasons why others cannot run."""
    found: dict[str, Callable[..., Tensor]] = {"cukern": _cukern}
    if device.type != "cuda":
        return found, dict.fromkeys(PROVIDERS[1:], "there is no GPU")
    found["cudnn"] = _cudnn
    if importlib.util.find_spec("flash_attn") is None or not importlib.util.find_spec("flash_attn.cute"):
        return found, {"fa4": "flash_attn.cute is not installed: pip install 'flash-attn-4[cu13]'"}
    return found | {"fa4": partial(_fa4, False), "fa4 deterministic": partial(_fa4, True)}, {}


def _visible(tokens: int, mask: str) -> int:
    """The pairs of a query and a key that it sees."""
    width = min(WINDOW, tokens) if mask == "window" else tokens
    return tokens**2 if mask == "full" else width * (width + 1) // 2 + (tokens - width) * width


def _inputs(shape: Shape, name: str, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Random q, k, v and dout, in the order of dimensions in which the provider has them contiguous."""
    batch, heads, kv_heads, tokens, head_dim, _ = shape
    swap = name.startswith("fa4")
    sizes = [
        (batch, tokens, h, head_dim) if swap else (batch, h, tokens, head_dim)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    return [torch.randn(size, dtype=dtype, device=device) for size in sizes]


def _call(function: Attention, pass_: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> timing.Call:
    if pass_ == "fwd":
        return partial(function, q, k, v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return backward(function(*leaves), leaves, (dout,))


def _training(
    shape: Shape, pass_: str, dtype: torch.dtype, chosen: dict[str, Callable[..., Tensor]], seconds: float,
    missing: dict[str, str],
) -> list[Row]:  # fmt: skip
    batch, heads, kv_heads, tokens, head_dim, mask = shape
    device = environment.device()
    elements = batch * tokens * head_dim * (heads + kv_heads) * 2 * (1 if pass_ == "fwd" else 2)
    bytes_ = elements * dtype.itemsize
    flops = (4 if pass_ == "fwd" else 10) * batch * heads * head_dim * _visible(tokens, mask)
    calls, sets = dict[str, list[timing.Call]](), range(input_sets(bytes_, device))
    with timing.side_stream(device):
        for name, function in chosen.items():
            own = partial(function, mask)
            try:
                inputs = [_inputs(shape, name, dtype, device) for _ in sets]
                calls[name] = holding([_call(own, pass_, *x) for x in inputs])
            except Exception as error:  # a peer that fails must not end the measurement
                note_failure(name, error, missing)
        times, failed = timing.device_times(calls, device, seconds)
        calls.clear()
    for name, failure in failed.items():
        note_failure(name, failure, missing)
    peak, size = environment.peak_flops(device, dtype, False), shape[:-1]
    return [
        Row(
            "attention_shapes", mask, pass_, size, name_of(dtype), name, t.median_us, t.iqr_us, bytes_, flops,
            flops / t.median_us * 1e6 / peak if peak else None,
        )
        for name, t in times.items()
    ]  # fmt: skip


def _decoding(cache: tuple[int, ...], dtype: torch.dtype, seconds: float) -> list[Row]:
    """One query per sequence: the cache in one piece, and in pages whose order is random."""
    batch, heads, kv_heads, tokens, head_dim = cache
    device = environment.device()
    bytes_ = 2 * batch * (kv_heads * tokens + heads) * head_dim * dtype.itemsize
    calls, sets = dict[str, list[timing.Call]](), input_sets(bytes_, device)
    with timing.side_stream(device):
        for page in (0, *PAGES):
            calls[f"cukern pages of {page}" if page else "cukern"] = holding(
                [_decode(cache, page, dtype, device) for _ in range(sets)]
            )
        if device.type == "cuda":
            calls["copy"] = copies(bytes_, sets, device)
        times, failed = timing.device_times(calls, device, seconds)
        calls.clear()
    for name, error in failed.items():
        note_failure(name.partition(" ")[0], error, {})
    copy_us = times["copy"].median_us if "copy" in times else None
    rows = []
    for name, t in times.items():
        provider, _, version = name.partition(" ")
        share = copy_us / t.median_us if copy_us else None
        us = t.median_us, t.iqr_us
        rows.append(
            Row("attention_shapes", version, "decode", cache, name_of(dtype), provider, *us, bytes_, 0, share)
        )
    return rows


def _decode(cache: tuple[int, ...], page: int, dtype: torch.dtype, device: torch.device) -> timing.Call:
    batch, heads, kv_heads, tokens, head_dim = cache
    new = partial(torch.randn, dtype=dtype, device=device)
    q = new(batch, heads, 1, head_dim)
    if not page:
        k, v = (new(batch, kv_heads, tokens, head_dim) for _ in "kv")
        return partial(cukern.attention, q, k, v)
    pages = batch * tokens // page
    k, v = (new(pages, page, kv_heads, head_dim) for _ in "kv")
    table = torch.randperm(pages, dtype=torch.int32, device=device).view(batch, -1)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"block_table": table, "key_lengths": lengths}
    return partial(cukern.attention, q, k, v, **options)


def measure_attention_shapes(
    only: Sequence[str] | None, seconds: float, shapes: Sequence[Shape] = SHAPES,
    caches: Sequence[tuple[int, ...]] = CACHES,
) -> Iterator[Table]:  # fmt: skip
    """Yield a table for each pass of each shape, and for each cache: in bfloat16, and some shapes also in
    float16."""
    found, missing = _attentions(environment.device())
    wanted = [checks.choice("--only", name, PROVIDERS) for name in only or PROVIDERS]
    chosen = {name: function for name, function in found.items() if name in wanted}
    for index, shape in enumerate(shapes):
        for dtype in (torch.bfloat16, torch.float16)[: 2 if index % HALF == HALF - 1 else 1]:
            for pass_ in ("fwd", "bwd"):
                lacking = dict(missing)
                # FlashAttention-4's forward is the same
                own = {name: f for name, f in chosen.items() if (pass_, name) != ("fwd", "fa4 deterministic")}
                yield Table(_training(shape, pass_, dtype, own, seconds, lacking), lacking)
    if "cukern" in wanted:
        for cache in caches:
            yield Table(_decoding(cache, torch.bfloat16, seconds), {})
