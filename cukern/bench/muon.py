"""Times a step of cukern.Muon and of torch.optim.Muon on the matrices of GPT-2, from Python, as a training
loop calls it."""

from collections.abc import Iterator, Sequence

import torch

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table

NAME = "muon"  # of this benchmark, in place of an op
SHAPES = (12, 768), (24, 1024)  # layers and channels


def optimizers(layers: int, channels: int) -> dict[str, torch.optim.Optimizer]:
    """By provider, an optimizer of float32 matrices of its own: those of attention and of the multi-layer
    perceptron."""
    device = environment.device()
    sizes = [
        (3 * channels, channels),
        (channels, channels),
        (4 * channels, channels),
        (channels, 4 * channels),
    ] * layers
    made: dict[str, torch.optim.Optimizer] = {}
    for name, kind in (("cukern", cukern.Muon), ("torch", torch.optim.Muon)):
        params = [
            torch.nn.Parameter(torch.randn(size, dtype=torch.float32, device=device) * 0.02) for size in sizes
        ]
        for p in params:
            p.grad = torch.randn_like(p)
        made[name] = kind(params, lr=0.02)
    return made


def measure_muon(seconds: float, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[Table]:
    """Yield the times of both, in alternation, for about `seconds` per shape."""
    device = environment.device()
    for shape in shapes:
        with timing.side_stream(device):
            steps = {name: [optimizer.step] for name, optimizer in optimizers(*shape).items()}
            times, failed = timing.device_times(steps, device, seconds)
        for error in failed.values():
            raise error
        yield Table(
            [
                Row(NAME, "", "step", shape, "float32", name, t.median_us, t.iqr_us)
                for name, t in times.items()
            ],
            {},
        )
