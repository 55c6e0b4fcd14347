"""Times a step of cukern's and torch's optimizers, as a training loop calls it: AdamW on all parameters of
GPT-2, Muon on its matrices. `step`: device time; `host step`: time until the call returns."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table, name_of

SHAPES = (12, 768), (24, 1024)  # layers and channels
VOCABULARY, POSITIONS = 50304, 1024
ADAMW = "adamw_optimizer"  # in rows; the op adamw is a function of lists

Key = tuple[str, str]  # provider and version


def matrices(layers: int, channels: int) -> list[tuple[int, ...]]:
    """Shapes of the matrices of attention and of the multi-layer perceptron."""
    c = channels
    return [(3 * c, c), (c, c), (4 * c, c), (c, 4 * c)] * layers


def parameters(layers: int, channels: int) -> list[tuple[int, ...]]:
    """Shapes of all parameters: 148 tensors of 12 layers."""
    c = channels
    vectors = [(3 * c,), (c,), (4 * c,), (c,), *[(c,)] * 4] * layers
    return [*matrices(layers, c), *vectors, (VOCABULARY, c), (POSITIONS, c), (c,), (c,)]


def adamw(layers: int, channels: int, dtype: torch.dtype) -> dict[Key, Optimizer]:
    """torch's keeps moments of the parameter's dtype, cukern's by default in float32."""
    kinds: dict[Key, Callable[..., Optimizer]] = {
        ("cukern", ""): cukern.AdamW,
        ("torch", ""): partial(torch.optim.AdamW, fused=True),
    }
    if dtype == torch.bfloat16:
        kinds["cukern", "state_dtype=bfloat16"] = partial(cukern.AdamW, state_dtype=torch.bfloat16)
    return _optimizers(kinds, parameters(layers, channels), dtype)


def muon(layers: int, channels: int, dtype: torch.dtype) -> dict[Key, Optimizer]:
    kinds: dict[Key, Callable[..., Optimizer]] = {
        ("cukern", ""): cukern.Muon,
        ("torch", ""): torch.optim.Muon,
    }
    return _optimizers(kinds, matrices(layers, channels), dtype)


def _optimizers(
    kinds: dict[Key, Callable[..., Optimizer]], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> dict[Key, Optimizer]:
    """An optimizer of each kind, with parameters and gradients of its own."""
    made = {}
    for key, kind in kinds.items():
        params = [
            torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=environment.device()) * 0.02)
            for shape in shapes
        ]
        for p in params:
            p.grad = torch.randn_like(p)
        made[key] = kind(params, lr=1e-3)
    return made


def measure_optimizers(seconds: float, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Table]:
    """Yield the times of all, in alternation, for about `seconds` per shape and dtype."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    for name, make, dtype in ((ADAMW, adamw, float32), (ADAMW, adamw, bfloat16), ("muon", muon, float32)):
        for shape in shapes:
            yield from _measure(name, make(*shape, dtype), shape, dtype, seconds)


def _measure(
    name: str, made: dict[Key, Optimizer], shape: tuple[int, int], dtype: torch.dtype, seconds: float
) -> Iterator[Table]:
    device = environment.device()
    with timing.side_stream(device):
        times, failed = timing.device_times(
            {key: [optimizer.step] for key, optimizer in made.items()}, device, seconds
        )
    for error in failed.values():
        raise error
    found = {"step": times}
    if name == ADAMW:  # a step of Muon is long
        found["host step"] = timing.host_times(
            {key: o.step for key, o in made.items()}, device, rounds=min(60, max(5, round(20 * seconds)))
        )
    for pass_, times in found.items():
        rows = [
            Row(name, version, pass_, shape, name_of(dtype), provider, t.median_us, t.iqr_us)
            for (provider, version), t in times.items()
        ]
        yield Table(rows, {})
