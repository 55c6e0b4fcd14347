"""Patched models in transformers' Trainer, and in DDP and FSDP2 with two processes, against one process
without the patch."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import gpu, run_two
from test_transformers import assert_same, made, patched, transformers

import cukern

STEPS, RATE = 3, 0.05
# Gemma 2's head has the weight of the embedding, so it cannot be a part of its own.
KINDS = [
    ("llama", "ddp"), ("llama", "fsdp"), ("llama", "fsdp_head"), ("llama", "fsdp_checkpointing"),
    ("gemma2", "ddp"), ("gemma2", "fsdp"),
]  # fmt: skip
COMPILED = [("llama", "ddp_compiled"), ("llama", "fsdp_compiled")]  # on GPUs
pytestmark = pytest.mark.filterwarnings("default")


def all_kinds(device):
    return KINDS + (COMPILED if device == "cuda" else [])


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (4, 12), generator=generator) for _ in range(STEPS)]


def train(model, rows=slice(None), device="cpu"):
    """The losses of some steps of SGD."""
    losses = []
    for tokens in batches():
        tokens = tokens[rows].to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(RATE * p.grad)
                p.grad = None
        losses.append(loss.detach())
    return torch.stack(losses)


def divided(model, kind, mesh):
    """The model in DDP or FSDP2."""
    if kind.startswith("ddp"):
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    if kind == "fsdp_checkpointing":
        model.gradient_checkpointing_enable()
    parts = [*model.base_model.layers] + ([model.lm_head] if kind == "fsdp_head" else [])
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(rank, store):
    """Each of two processes trains each kind with its half of the batch, on devices of the kind that names
    the folder. The first writes losses and parameters."""
    folder, found = Path(store).parent, {}
    device = torch.device(folder.name, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh(device.type, (2,))
    for name, kind in all_kinds(device.type):
        model = made(name).to(device)
        with patched(model):
            model = divided(model, kind, mesh)
            model = torch.compile(model) if "compiled" in kind else model
            losses = train(model, slice(2 * rank, 2 * rank + 2), device)
            torch.distributed.all_reduce(losses)
            whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
            found[name, kind] = [x.detach().cpu() for x in (losses / 2, *whole)]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=gpu)))
def test_two_processes(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    (tmp_path / device).mkdir()
    run_two(__file__, tmp_path / device, 300)
    found = torch.load(tmp_path / device / "found.pt")
    assert [*found] == all_kinds(device)
    for (name, _), of_two in found.items():
        model = made(name)
        assert_same(of_two, [train(model), *(p.detach() for p in model.parameters())])


@pytest.mark.parametrize("name", ("llama", "gemma2", "gpt2"))
def test_trainer(name, tmp_path):
    """Gradients over two batches, cukern.AdamW, evaluation, a checkpoint, and training from it."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    rows = [{"input_ids": row, "labels": row} for tokens in batches() for row in tokens]

    def losses(model, folder, optimizer=torch.optim.AdamW):
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
            logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2,
            use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        optimizers = optimizer(model.parameters(), 1e-2, weight_decay=0.1), None
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, eval_dataset=rows[:4], optimizers=optimizers
        )
        trainer.train(resume_from_checkpoint=(folder / "checkpoint-2").exists())
        log = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
        return torch.tensor([x for x in log if x is not None])

    expected = losses(made(name), tmp_path / "plain")
    assert len(expected) == 6  # 4 of training, 2 of evaluation
    ours = made(name)
    again = copy.deepcopy(ours)
    with patched(ours):
        assert_same([losses(ours, tmp_path / "ours", cukern.AdamW)], [expected])
    (tmp_path / "ours" / "checkpoint-4").rename(tmp_path / "last")
    with patched(again):
        assert_same([losses(again, tmp_path / "ours", cukern.AdamW)], [expected])
    assert_same(again.parameters(), ours.parameters())
