"""`cukern gpt2 study`: a training step with each version of softmax forward, softmax backward and matmul, one
changed at a time."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import cukern
from cukern.bench import environment, record
from cukern.bench.measure import Row
from cukern.bench.timing import summary
from cukern.cli import common
from cukern.cli.bench import check_plot, record_file
from cukern.cli.common import say
from cukern.cli.gpt2_train import Device, Length, Rows, make_model, pick_device
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.files import expect
from cukern.gpt2.model import GPT2, use_kernels

# The argument of use_kernels, and the op whose time is that of the kernel
KINDS = {
    "softmax forward": ("softmax_forward", "cukern::_softmax"),
    "softmax backward": ("softmax_backward", "cukern::_softmax_backward"),
    "matmul": ("matmul_forward", "cukern::_product"),
}
TOLERANCE = 1e-3  # of losses: the kernels add in different orders
SIMULATED = Config(max_seq_len=8, vocab_size=61, num_layers=1, num_heads=2, channels=16, padded_vocab_size=64)


@dataclass(frozen=True)
class Choice:
    """One row. Times in microseconds: of `steps` updates, and of the kernel in an update. `share`: the
    kernel's part of the device time."""

    kind: str  # "" for the default kernels
    number: int
    losses: tuple[float, float]  # before and after the first update
    times_us: list[float]
    kernel_us: float
    share: float

    @property
    def name(self) -> str:
        return f"{self.kind} v{self.number}" if self.kind else "default"


def study(
    model: Annotated[
        str | None, typer.Option("-e", "--model", help="As in train (d12; in the simulator a tiny model).")
    ] = None,
    batch: Rows = None,
    seq_len: Length = None,
    steps: Annotated[
        int, typer.Option("-x", "--steps", min=1, help="Measured updates of each choice, for at most 4 s.")
    ] = 10,
    device: Device = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the times of an update and of the kernels.")
    ] = None,
    record_it: Annotated[
        bool, typer.Option("--record", help="Append to benchmarks/results/<gpu>.jsonl; on a GPU only.")
    ] = False,
) -> None:
    """Train with every choice of softmax forward 1 to 5, softmax backward 1 to 5 and matmul 1 to 5, against
    the default, in float32. The table has the time of an update, the share of the kernel, its speed next to
    version 1, and the loss after an update. Exits with 1 if a loss differs. On a CPU the simulator runs a
    tiny model, to compare the losses."""
    place = pick_device(device)
    check_plot(plot)
    expect(place == "cuda" or not record_it, "a GPU for --record: the simulator has no times", place)
    file = record_file(record_it)
    simulated, name = place == "cpu", model or ("d12" if place == "cuda" else "tiny model")
    B, T = batch or (1 if simulated else 4), seq_len or (8 if simulated else 1024)
    if simulated:
        say("no GPU: the simulator runs the kernels, so times and shares mean nothing; the losses do")
    with cukern.backend("sim" if simulated else "gpu"), environment.float32_products(False):
        rows = _rows(_made(model, T, place), B, T, 1 if simulated else steps)
    title = f"gpt2 {name}, B={B} T={T} float32 on {environment.gpu_name() or place}"
    wrong = _show(rows, title)
    if plot is not None:
        _plot(rows, title, plot)
        say(f"drawn to {plot}")
    _record(rows, name, (B, T), file)
    if wrong:
        raise typer.Exit(1)


def _record(rows: list[Choice], name: str, shape: tuple[int, int], file: Path | None) -> None:
    if file:
        record.append(
            [Row("gpt2", r.name, f"study {name}", shape, "float32", "cukern", *_median(r)) for r in rows],
            file,
        )
        say(f"appended to {file}", to=common.errors)


def _made(model: str | None, T: int, place: str) -> GPT2:
    if model or place == "cuda":
        return make_model(model or "d12", T, place)
    made = GPT2(SIMULATED)
    made.initialize()
    return made


def _rows(model: GPT2, B: int, T: int, steps: int) -> list[Choice]:
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(
        model.config.vocab_size, (2, B, T), dtype=torch.int64, device="cpu", generator=generator
    ).to(model.wte.device)
    wanted = [("", 0), *((kind, number) for kind in KINDS for number in range(1, 6))]
    with common.progress() as bar:
        return [_measure(model, batches, *one, steps) for one in bar.track(wanted, description="measuring")]


def _median(row: Choice) -> tuple[float, float]:
    timing = summary(row.times_us)
    return timing.median_us, timing.iqr_us


def _measure(model: GPT2, batch: Tensor, kind: str, number: int, steps: int) -> Choice:
    """Train the model from the same weights with one kernel, then give it these weights again."""
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = cukern.AdamW(model.decay_groups(0.1), lr=1e-3, max_norm=1.0)
    losses, times_us = list[float](), list[float]()

    def update() -> None:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        with cukern.backend("gpu"):  # of CPU tensors: the optimizer is not simulated
            optimizer.step()
        losses.append(loss.item())  # waits for the GPU

    with use_kernels(**{KINDS[kind][0]: number} if kind else {}):
        kernel_us, all_us = _profiled(update, KINDS[kind][1] if kind else "", model.wte.is_cuda)
        if model.wte.is_cuda:
            update()
            begin = time.perf_counter()
            while len(times_us) < steps and time.perf_counter() - begin < 4:
                times_us.append(_timed(update))
        else:
            times_us.append(all_us)
            with torch.no_grad(), cukern.backend("gpu"):
                losses.append(model(*batch).item())
    with torch.no_grad():
        for p, was in zip(model.parameters(), start, strict=True):
            p.copy_(was)
    return Choice(kind, number, (losses[0], losses[1]), times_us, kernel_us, kernel_us / all_us)


def _timed(update: Any) -> float:
    start = time.perf_counter()
    update()
    return 1e6 * (time.perf_counter() - start)


def _profiled(update: Any, op: str, on_gpu: bool) -> tuple[float, float]:
    """Microseconds of an op and of all in one update: device time, or in the simulator CPU time. On a GPU an
    update before compiles."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        update()
        if on_gpu:
            torch.cuda.synchronize()
    took_us = 1e6 * (time.perf_counter() - start)
    events = profiler.key_averages()
    if not on_gpu:
        return sum(e.cpu_time_total for e in events if e.key == op), took_us
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time_total for e in events if e.key == op), sum(
        e.self_device_time_total for e in kernels
    )


def _show(rows: list[Choice], title: str) -> int:
    """The table; returns the number of rows whose losses differ from the default's."""
    table = common.table(title, "choice", "ms", "of default", "% of step", "kernel ms", "speed", "loss", "")
    first, wrong = rows[0], 0
    base = _median(first)[0]
    for r in rows:
        us = _median(r)[0]
        one = next(x for x in rows if x.kind == r.kind)
        speed = f"{one.kernel_us / r.kernel_us:.2f}" if r.kernel_us else ""
        part = (f"{100 * r.share:.1f}", f"{r.kernel_us * 1e-3:.4g}", speed) if r.kind else ("", "", "")
        ok = all(abs(x - y) <= TOLERANCE * abs(y) for x, y in zip(r.losses, first.losses, strict=True))
        wrong += not ok
        table.add_row(
            r.name, f"{us * 1e-3:.4g}", f"{us / base:.2f}", *part, f"{r.losses[1]:.6f}", "" if ok else "WRONG"
        )
    common.console.print(table)
    say(
        "each loss is the default's" if not wrong else f"{wrong} choices have another loss than the default",
        "red" if wrong else None,
    )
    return wrong


def _plot(rows: list[Choice], title: str, file: Path) -> None:
    """Bars: the time of an update of each choice, and within it that of the kernel."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(rows)), layout="constrained")
    updates = [_median(r)[0] * 1e-3 for r in rows]
    bars = panel.barh([r.name for r in rows], updates, color="tab:blue", label="update")
    panel.barh(
        [r.name for r in rows],
        [t * r.share for t, r in zip(updates, rows, strict=True)],
        color="tab:orange",
        label="its kernel",
    )
    panel.bar_label(bars, fmt="%.4g", padding=3)
    panel.axvline(updates[0], color="gray", linewidth=1)
    panel.invert_yaxis()
    panel.set(xlabel="ms", title=title)
    panel.legend()
    figure.savefig(file)
    pyplot.close(figure)
