"""Times forward and backward of a linear layer with a LoKr module of LyCORIS, from Python: LyCORIS's own
kernels, as a weight that is rebuilt and as a bypass; torch.compile; cukern.patch_lycoris."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table, name_of
from cukern.runtime import checks

# Output and input features, the factor, and the rank of w2; 0: w2 is a whole matrix.
LAYERS = (
    (4096, 4096, 8, 0), (4096, 4096, 4, 0), (4096, 4096, 64, 0), (1536, 1536, 16, 0), (3840, 3840, 3, 0),
    (32768, 8192, 16, 0), (10240, 1280, 8, 16), (3072, 3072, 16, 16), (12288, 3072, 16, 64),
    (14336, 4096, 8, 32),
)  # fmt: skip
ROWS = 512, 8192
PROVIDERS = "lycoris", "lycoris bypass", "torch.compile", "cukern", "cukern compiled"
WARMUP = 5


def _module(layer: tuple[int, int, int, int], provider: str, dtype: torch.dtype) -> nn.Module:
    from lycoris.modules.lokr import LokrModule

    outputs, inputs, factor, rank = layer
    torch.manual_seed(0)
    device = environment.device()
    linear = nn.Linear(inputs, outputs, device=device, dtype=dtype).requires_grad_(False)
    form: dict[str, Any] = {"lora_dim": rank} if rank else {"full_matrix": True}
    bypass = provider == "lycoris bypass"
    module = LokrModule("layer", linear, alpha=4, factor=factor, bypass_mode=bypass, **form)
    module.to(device, dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.1)
    return module


def _step(module: nn.Module, provider: str, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], object]:
    """A function of both passes."""
    if provider.startswith("cukern"):
        cukern.patch_lycoris(module)
    parameters = [x, *(p for p in module.parameters() if p.requires_grad)]
    forward: Callable[[torch.Tensor], torch.Tensor] = module
    if provider.endswith(("compile", "compiled")):
        backend = "inductor" if x.is_cuda else "aot_eager"
        forward = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    return lambda: torch.autograd.grad(forward(x), parameters, dy)


def _row(layer: tuple[int, int, int, int], rows: int, provider: str, dtype: torch.dtype, steps: int) -> Row:
    device = environment.device()
    module = _module(layer, provider, dtype)
    x = torch.randn(rows, layer[1], device=device, dtype=dtype, requires_grad=True)
    step = _step(module, provider, x, torch.randn(rows, layer[0], device=device, dtype=dtype))
    try:
        times, peak = timing.times_and_peak(step, steps, device, WARMUP)
    finally:
        torch.compiler.reset()
    shape, name = (*layer, rows), name_of(dtype)
    us = times.median_us, times.iqr_us
    return Row("lokr_layer", "", "fwd+bwd", shape, name, provider, *us, peak_mib=peak)


def measure_lokr(
    only: Sequence[str] | None, steps: int = 30, layers: Sequence[tuple[int, int, int, int]] = LAYERS,
    rows: Sequence[int] = ROWS,
) -> Iterator[Table]:  # fmt: skip
    """Yield a table for each layer and number of rows."""
    if importlib.util.find_spec("lycoris") is None:
        raise ValueError("lokr_layer times layers of LyCORIS: pip install lycoris-lora")
    chosen = [checks.choice("--only", name, PROVIDERS) for name in only or PROVIDERS]
    dtype = torch.bfloat16 if environment.device().type == "cuda" else torch.float32
    for layer in layers:
        for count in rows:
            found, missing = list[Row](), dict[str, str]()
            for provider in chosen:
                try:
                    found.append(_row(layer, count, provider, dtype, steps))
                except Exception as error:  # a peer that fails must not end the measurement
                    if provider.startswith("cukern"):
                        raise
                    missing[provider] = str(error).partition("\n")[0]
            yield Table(found, missing)
