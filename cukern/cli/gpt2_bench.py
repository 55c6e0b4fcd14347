"""`cukern gpt2 bench`: the time of a training step, next to the same step in torch and with torch.compile."""

import tempfile
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear, scaled_dot_product_attention

from cukern.bench import environment, record
from cukern.bench.measure import Row
from cukern.bench.timing import summary
from cukern.cli import common
from cukern.cli.bench import record_file
from cukern.cli.common import say
from cukern.cli.gpt2_train import Device, Length, Rows, make_model, pick_device
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import write_shards
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings, Step, Trainer

WARMUP = 8  # first steps that are not counted: they compile kernels and capture the CUDA graph


class Plain(torch.nn.Module):
    """A model's loss in torch's operations, on copies of its parameters."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.config: Config = model.config
        self.weights = torch.nn.ParameterDict({name.replace(".", "_"): p.detach().clone() for name, p in model.named_parameters()})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        w, c, (B, T) = self.weights, self.config, tokens.shape
        x = embedding(tokens, w["wte"]) + w["wpe"][:T]
        for i in range(c.num_layers):
            y = layer_norm(x, (c.channels,), w[f"ln1w_{i}"], w[f"ln1b_{i}"])
            qkv = linear(y, w[f"qkvw_{i}"], w[f"qkvb_{i}"]).view(B, T, 3, c.num_heads, -1)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
            x = x + linear(attended, w[f"attprojw_{i}"], w[f"attprojb_{i}"])
            y = layer_norm(x, (c.channels,), w[f"ln2w_{i}"], w[f"ln2b_{i}"])
            x = x + linear(gelu(linear(y, w[f"fcw_{i}"], w[f"fcb_{i}"]), approximate="tanh"), w[f"fcprojw_{i}"], w[f"fcprojb_{i}"])
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
    model: Annotated[str, typer.Option("-e", "--model", help="A model file, or sizes: d12, gpt3:c768, small.")] = "d12",
    batch: Rows = None,
    seq_len: Length = None,
    tf32: Annotated[int, typer.Option("-f", "--tf32", min=0, max=1, help="0: strict float32 matrix products.")] = 1,
    steps: Annotated[int, typer.Option("-x", "--steps", min=1, help="Measured steps.")] = 20,
    compile: Annotated[bool, typer.Option(help="Measure torch.compile too.")] = True,
    device: Device = None,
    record_it: Annotated[bool, typer.Option("--record", help="Append to benchmarks/results/<gpu>.jsonl.")] = False,
) -> None:
    """Time a training step of cukern, torch and torch.compile in turn, with random tokens and all that an update does."""
    file = record_file(record_it)
    B, T, place = 4 if batch is None else batch, 1024 if seq_len is None else seq_len, pick_device(device)
    with environment.float32_products(bool(tf32)), tempfile.TemporaryDirectory() as folder:
        ours = make_model(model, T, place)
        vocabulary = ours.config.vocab_size
        tokens = torch.randint(vocabulary, (4 * B * T + 1,)).numpy()
        val, train = write_shards(folder, "random", tokens, val_first=B * T + 1)
        settings = Settings(train, val, batch=B, seq_len=T, steps=WARMUP + steps, val_every=0, sample_every=0)
        trainer = Trainer(ours, settings, say=lambda line: None)
        peers = _peers(ours, torch.randint(vocabulary, (2, B, T), device=place), compile)
        times: dict[str, list[float]] = {"cukern": [], **{name: [] for name in peers}}

        def report(step: Step) -> None:
            times["cukern"].append(1e3 * step.ms)
            for name, peer in peers.items():
                start = time.perf_counter()
                peer()
                times[name].append(1e6 * (time.perf_counter() - start))

        trainer.run(report)
        flops = trainer.flops_per_token() * settings.tokens
    kind = "tf32" if tf32 and place == "cuda" else "float32"
    rows = []
    for name, us in times.items():
        timing = summary(us[WARMUP:])
        rows.append(Row("gpt2", "", f"step {model}", (B, T), kind, name, timing.median_us, timing.iqr_us, 0, flops))
    _show(rows, (place == "cuda" and environment.gpu_name()) or place)
    if file:
        record.append(rows, file)
        say(f"appended to {file}", to=common.errors)


def _peers(ours: GPT2, batch: Tensor, compile: bool) -> dict[str, Callable[[], float]]:
    plain = Plain(ours)
    peers = {"torch": _step(plain, plain, batch)}
    if compile:
        other = Plain(ours)
        peers["torch.compile"] = _step(torch.compile(other), other, batch)
    return peers


def _show(rows: list[Row], where: str) -> None:
    first, torch_us = rows[0], next(r.median_us for r in rows if r.provider == "torch")
    title = f"gpt2 {first.pass_}, B={first.shape[0]} T={first.shape[1]} {first.dtype} on {where}"
    table = common.table(title, "provider", "ms", "+- ms", "tokens/s", "TFLOP/s", "x torch")
    for r in rows:
        numbers = r.median_us * 1e-3, r.iqr_us * 1e-3
        rate, speed = r.shape[0] * r.shape[1] / r.median_us * 1e6, torch_us / r.median_us
        table.add_row(r.provider, *(f"{n:.2f}" for n in numbers), f"{rate:.0f}", f"{r.tflops:.1f}", f"{speed:.2f}")
    common.console.print(table)
