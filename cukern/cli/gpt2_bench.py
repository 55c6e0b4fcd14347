"""`cukern gpt2 bench`: the time of a training step, next to the same step in torch and with torch.compile."""

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor
from torch.nn.functional import (
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear,
    scaled_dot_product_attention,
)

from cukern.bench import environment, record
from cukern.bench.measure import Row
from cukern.bench.timing import summary
from cukern.cli import common
from cukern.cli.bench import record_file
from cukern.cli.common import say
from cukern.cli.gpt2_train import (
    Device,
    Dtype,
    FusedLoss,
    Length,
    MatmulForward,
    Recompute,
    Rows,
    SoftmaxBackward,
    SoftmaxForward,
    kernels,
    make_model,
    pick_device,
)
from cukern.gpt2 import parallel
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import write_shards
from cukern.gpt2.files import expect
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings, Trainer

WARMUP = 8  # first steps that are not counted: they compile kernels and capture the CUDA graph
MODES = "default", "reduce-overhead", "max-autotune", "no"  # of torch.compile
Made = TypeVar("Made")
Key = tuple[str, str]  # provider, version


class Plain(torch.nn.Module):
    """A model's loss in torch's operations, on float32 copies of its parameters. For a bfloat16 model under
    autocast to bfloat16."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.config: Config = model.config
        self.autocast = model.wte.dtype == torch.bfloat16
        self.weights = torch.nn.ParameterDict(
            {name.replace(".", "_"): p.detach().float() for name, p in model.named_parameters()}
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            return self._loss(tokens, targets)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        w, c, (B, T) = self.weights, self.config, tokens.shape
        x = embedding(tokens, w["wte"]) + w["wpe"][:T]
        for i in range(c.num_layers):
            y = layer_norm(x, (c.channels,), w[f"ln1w_{i}"], w[f"ln1b_{i}"])
            qkv = linear(y, w[f"qkvw_{i}"], w[f"qkvb_{i}"]).view(B, T, 3, c.num_heads, -1)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
            x = x + linear(attended, w[f"attprojw_{i}"], w[f"attprojb_{i}"])
            y = layer_norm(x, (c.channels,), w[f"ln2w_{i}"], w[f"ln2b_{i}"])
            x = x + linear(
                gelu(linear(y, w[f"fcw_{i}"], w[f"fcb_{i}"]), approximate="tanh"),
                w[f"fcprojw_{i}"],
                w[f"fcprojb_{i}"],
            )
        logits = linear(layer_norm(x, (c.channels,), w["lnfw"], w["lnfb"]), w["wte"])
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _step(loss_of: Callable[[Tensor, Tensor], Tensor], plain: Plain, batch: Tensor) -> Callable[[], float]:
    """An update as llm.c's, with torch's fused AdamW. Reads the loss from the device."""
    fused = batch.is_cuda
    adamw = torch.optim.AdamW(plain.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step() -> float:
        adamw.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        return loss.item()

    return step


def bench(
    model: Annotated[
        str, typer.Option("-e", "--model", help="A model file, or sizes: d12, gpt3:c768, small.")
    ] = "d12",
    batch: Rows = None,
    seq_len: Length = None,
    tf32: Annotated[
        int, typer.Option("-f", "--tf32", min=0, max=1, help="0: strict float32 matrix products.")
    ] = 1,
    dtype: Dtype = None,
    attention: Annotated[
        list[str] | None, typer.Option("--attention", help="As in train. Repeatable: each is timed in turn.")
    ] = None,
    fused_loss: FusedLoss = None,
    recompute: Recompute = 0,
    zero: Annotated[
        int,
        typer.Option("-z", "--zero", min=0, max=1, help="1: divide weights and state over the processes."),
    ] = 0,
    steps: Annotated[int, typer.Option("-x", "--steps", min=1, help="Measured steps.")] = 20,
    compile: Annotated[
        str, typer.Option(metavar="default|reduce-overhead|no", help="torch.compile's mode.")
    ] = "default",
    eager: Annotated[bool, typer.Option(help="Also time torch without torch.compile.")] = True,
    device: Device = None,
    softmax_forward_kernel: SoftmaxForward = None,
    softmax_backward_kernel: SoftmaxBackward = None,
    matmul_forward_kernel: MatmulForward = None,
    record_it: Annotated[
        bool, typer.Option("--record", help="Append to benchmarks/results/<gpu>.jsonl.")
    ] = False,
) -> None:
    """Time a training step of cukern, torch and torch.compile in turn, with random tokens and all that an
    update does. With --dtype b the peers have float32 weights and compute under autocast. The memory is the
    most that tensors take, from the first step on. Several GPUs, -b rows on each: torchrun --nproc-per-node N
    -m cukern gpt2 bench --compile no --no-eager ..."""
    file = record_file(record_it)
    expect(compile in MODES, f"--compile {', '.join(MODES)}", repr(compile))
    B, T, place = 4 if batch is None else batch, 1024 if seq_len is None else seq_len, pick_device(device)
    peaks, updates = dict[Key, float](), dict[Key, Callable[[], object]]()
    chosen = softmax_forward_kernel, softmax_backward_kernel, matmul_forward_kernel
    versions: list[str | None] = [*(attention or (None,))]
    loaded = kernels(place, *chosen, versions[0], parallel.started()[0] == 0)
    ranks, exact = parallel.processes(place), environment.float32_products(bool(tf32))
    with (
        ranks as (rank, count),
        loaded,
        exact,
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as at_end,
    ):
        peers = [("torch", "")] * eager + [("torch.compile", compile)] * (compile != "no")
        expect(
            count == 1 or not peers, "--compile no and --no-eager under torchrun", [name for name, _ in peers]
        )
        for version in versions:
            ours = partial(
                make_model,
                model,
                T,
                place,
                dtype,
                attention=version,
                fused_loss=fused_loss,
                recompute=recompute,
            )
            trainer, peak = _warm(
                partial(_trainer, ours, B, T, steps, folder, rank, count, zero), Trainer.update
            )
            key = "cukern", _label(version, fused_loss, recompute, count, zero, chosen)
            updates[key], peaks[key] = trainer.update, peak
            at_end.callback(trainer.close)
        made = trainer.model
        data = torch.randint(made.config.vocab_size, (2, B, T), dtype=torch.int64, device=place)
        for key in peers:
            updates[key], peaks[key] = _warm(partial(_peer, made, data, key[1]), lambda update: update())
        times = _times(updates, steps)
    kind = (
        "bfloat16" if made.wte.dtype == torch.bfloat16 else "tf32" if tf32 and place == "cuda" else "float32"
    )
    what = f"step {model}", (count * B, T), kind
    rows = _rows(times, peaks, what, trainer.flops_per_token() * count * B * T)
    if rank == 0:
        _show(rows, (place == "cuda" and environment.gpu_name()) or place)
        if file:
            record.append(rows, file)
            say(f"appended to {file}", to=common.errors)


def _rows(
    times: dict[Key, list[float]], peaks: dict[Key, float], what: tuple[str, tuple[int, int], str], flops: int
) -> list[Row]:
    """The rows of a table or record. `what`: pass, shape and dtype; `flops`: of an update."""
    rows = []
    for (name, version), us in times.items():
        timing, most = summary(us), peaks[name, version] or None
        rows.append(
            Row("gpt2", version, *what, name, timing.median_us, timing.iqr_us, flops=flops, peak_mib=most)
        )
    return rows


def _trainer(
    make: Callable[[], GPT2], B: int, T: int, steps: int, folder: str, rank: int, count: int, zero: int
) -> Trainer:
    """A Trainer that reads random tokens from files in `folder`."""
    model = make()
    tokens = torch.randint(
        model.config.vocab_size, (4 * count * B * T + 1,), dtype=torch.int64, device="cpu"
    ).numpy()
    val, train = write_shards(folder, "random", tokens, val_first=count * B * T + 1)
    updates: dict[str, Any] = {"steps": WARMUP + steps, "val_every": 0, "sample_every": 0}
    settings = Settings(train, val, batch=B, seq_len=T, **updates, rank=rank, num_processes=count, zero=zero)
    return Trainer(model, settings, say=lambda line: None)


def _times(updates: dict[Key, Callable[[], object]], steps: int) -> dict[Key, list[float]]:
    """Microseconds of `steps` updates of each, in turn."""
    times: dict[Key, list[float]] = {key: [] for key in updates}
    for _ in range(steps):
        for key, update in updates.items():
            start = time.perf_counter()
            update()
            times[key].append(1e6 * (time.perf_counter() - start))
    return times


def _label(
    attention: str | None, fused_loss: bool | None, recompute: int, processes: int, zero: int,
    numbers: tuple[str | None, str | None, str | None],
) -> str:  # fmt: skip
    """The options of a model that differ from the default, as the version of a record."""
    options = {
        attention or "": attention,
        "fused loss": fused_loss,
        "all logits": fused_loss is False,
        f"recompute {recompute}": recompute,
    }
    options |= {f"{processes} processes": processes > 1, "-z 1": processes > 1 and zero}
    names = zip(("softmax forward", "softmax backward", "matmul"), numbers, strict=True)
    options |= {f"{name} {'' if number == 'cublas' else 'v'}{number}": number for name, number in names}
    return ", ".join(name for name, chosen in options.items() if chosen)


def _warm(make: Callable[[], Made], update: Callable[[Made], object]) -> tuple[Made, float]:
    """Make what trains, and run its first updates, which compile kernels and capture CUDA graphs. Returns it
    and its peak memory in MiB."""
    gc.collect()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    made = make()
    for _ in range(WARMUP):
        update(made)
    return made, ((torch.cuda.max_memory_allocated() - before) / 2**20 if torch.cuda.is_available() else 0.0)


def _peer(ours: GPT2, batch: Tensor, mode: str) -> Callable[[], float]:
    plain = Plain(ours)
    return _step(torch.compile(plain, mode=mode) if mode else plain, plain, batch)


def _show(rows: list[Row], where: str) -> None:
    first, base = rows[0], next((r for r in rows if r.provider != "cukern"), rows[0])
    title = (
        f"gpt2 {first.pass_}, B={first.shape[0]} T={first.shape[1]} {first.dtype} on {where}; speed of "
        f"{base.provider}: 1"
    )
    table = common.table(title, "provider", "ms", "+- ms", "tokens/s", "TFLOP/s", "speed", "peak MiB")
    for r in rows:
        numbers = r.median_us * 1e-3, r.iqr_us * 1e-3
        rate, speed = r.shape[0] * r.shape[1] / r.median_us * 1e6, base.median_us / r.median_us
        peak = f"{r.peak_mib:.0f}" if r.peak_mib else "n/a"
        table.add_row(
            r.name, *(f"{n:.2f}" for n in numbers), f"{rate:.0f}", f"{r.tflops:.1f}", f"{speed:.2f}", peak
        )
    common.console.print(table)
