"""The training loop: schedules, printed lines, main.log, checkpoints, resume bit for bit, kills, full disks,
NaN, refusals."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from gpt2_files import full_disk
from helpers import ROOT, gpu

from cukern.gpt2 import checkpoint
from cukern.gpt2.checkpoint import Config, latest_step, read_model
from cukern.gpt2.data import DataLoader, byte_tokenizer, write_shard
from cukern.gpt2.evaluate import generate, sample_text
from cukern.gpt2.model import GPT2
from cukern.gpt2.settings import SCHEDULES, Outliers, Settings, Step, learning_rate
from cukern.gpt2.train import Trainer

TINY = Config(max_seq_len=8, vocab_size=256, num_layers=2, num_heads=2, channels=8)
STEP = re.compile(
    r"step +\d+/\d+ \| loss \d+\.\d{6} \([+-](nan|\d+\.\d\d)z\)\| norm \d+\.\d{4} \([+-](nan|\d+\.\d\d)z\)"
    r"\| lr \d\.\d\de[+-]\d\d \| \d+\.\d\d ms \| (n/a|-?\d+\.\d%) bf16 MFU \| \d+ tok/s"
)


@pytest.fixture
def data(tmp_path):
    """Two shards for training, one for validation."""
    rng = np.random.default_rng(0)
    for name, length in (("train_1", 200), ("train_2", 150), ("val_0", 100)):
        write_shard(tmp_path / f"{name}.bin", rng.integers(97, 107, length))
    return tmp_path


def settings(data, **changes):
    defaults = dict(batch=2, seq_len=8, steps=12, lr=1e-2, warmup=2, final_fraction=0.1, weight_decay=0.1)
    defaults |= dict(val_every=5, val_batches=3, sample_every=7, sample_tokens=20)
    return Settings(data / "train_*.bin", data / "val_*.bin", **(defaults | changes))


def make(data, say=print, config=TINY, device="cpu", dropout=0.0, **changes):
    model = GPT2(config, device=device, dropout=dropout)
    model.initialize()
    return Trainer(model, settings(data, **changes), byte_tokenizer(), say)


def trained(data, **changes):
    """The trainer after its run, and what it printed."""
    lines = []
    trainer = make(data, lines.append, **changes)
    trainer.run(lambda step: lines.append(str(step)))
    return trainer, lines


def untimed(lines):
    """Without the fields that differ from run to run."""
    return [re.sub(r"[\d.]+ ms \|.*", "", line) for line in lines if not line.startswith("total average")]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))


# ---- learning rates and z-scores


def reference_rate(step, total, lr, schedule, warmup, fraction):
    """Section 4 of the specification, one formula per schedule."""
    low = lr * fraction
    if schedule == "constant":
        return lr
    if step < warmup:
        return lr * (step + 1) / warmup
    ratio = (step - warmup) / (total - warmup)
    if schedule == "cosine":
        return low + 0.5 * (1 + math.cos(math.pi * ratio)) * (lr - low)
    if schedule == "linear":
        return lr - ratio * (lr - low)
    decay = int(0.8 * total)
    return lr if step < decay else low + (1 - math.sqrt((step - decay) / (total - decay))) * (lr - low)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("warmup", "fraction"), [(0, 1.0), (10, 0.1), (7, 0.0)])
def test_schedules(schedule, warmup, fraction):
    for step in range(50):
        found = learning_rate(step, 50, 3e-4, schedule, warmup, fraction)
        assert found == pytest.approx(
            reference_rate(step, 50, 3e-4, schedule, warmup, fraction), rel=4e-7, abs=1e-10
        )
        assert found == np.float32(found)


def test_known_rates():
    assert learning_rate(9, 100, 1.0, "cosine", 10) == 1.0 and learning_rate(4, 100, 1.0, "cosine", 10) == 0.5
    assert learning_rate(55, 100, 1.0, "cosine", 10, 0.0) == pytest.approx(0.5)
    assert learning_rate(95, 100, 1.0, "wsd", 10, 0.0) == pytest.approx(1 - math.sqrt(0.75))


@pytest.mark.parametrize(
    ("schedule", "lr", "warmup", "total", "fraction", "step", "printed"),
    [
        ("cosine", 3e-4, 0, 619, 0.0, 617, "7.72e-09"),
        ("cosine", 3e-4, 7, 100, 0.1, 38, "2.33e-04"),
        ("cosine", 3e-4, 60, 1250, 0.0, 1249, "5.19e-10"),
        ("cosine", 1e-3, 60, 619, 0.1, 283, "6.91e-04"),
        ("linear", 3e-4, 7, 619, 0.1, 24, "2.93e-04"),
        ("linear", 1e-3, 7, 1250, 0.0, 1249, "8.04e-07"),
    ],
)
def test_rates_print_as_in_c(schedule, lr, warmup, total, fraction, step, printed):
    """Lines of a C program with llm.c's float32 expressions, compiled by gcc, where float64 prints another
    digit."""
    assert f"{learning_rate(step, total, lr, schedule, warmup, fraction):.2e}" == printed


def test_z_scores():
    """The first 128 values have none: llm.c fills its window before it looks for outliers."""
    detector, values = Outliers(), np.random.default_rng(1).normal(size=300).tolist()
    for i, value in enumerate(values):
        found, last = detector.z_score(value), values[max(0, i - 127) : i + 1]
        assert (
            math.isnan(found) if i < 128 else found == pytest.approx((value - np.mean(last)) / np.std(last))
        )
    equal = Outliers(4)
    assert [equal.z_score(2.0) for _ in range(5)][-1] == 0


# ---- one run


def test_printed_lines_and_log(data):
    trainer, lines = trained(data, out=data / "run")
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 12 and all(STEP.fullmatch(line) for line in steps)
    assert (
        steps[0].startswith("step    1/12 | loss 5.")
        and "(+nanz)" in steps[0]
        and "| lr 5.00e-03 |" in steps[0]
    )
    losses = [re.fullmatch(r"val loss (\d\.\d{6})", line) for line in lines if line.startswith("val")]
    assert len(losses) == 4  # before updates 1, 6, 11, and at the end
    generated = [line for line in lines if line.startswith("generating:\n---\n")]
    assert len(generated) == 2 and all(text.endswith("\n---") for text in generated)
    assert re.fullmatch(r"total average iteration time: \d+\.\d{6} ms", lines[-1])
    log = (data / "run/main.log").read_text().splitlines()
    assert [line.split()[0] for line in log if "tel" in line] == ["s:0", "s:5", "s:10", "s:12"]
    trl = [
        re.fullmatch(r"s:(\d+) trl:(\d\.\d{4}) lr:(\d\.\d{6}) norm:(\d+\.\d\d)", line)
        for line in log
        if "trl" in line
    ]
    assert [int(match[1]) for match in trl] == list(range(12))
    assert [float(match[2]) for match in trl] == pytest.approx([loss for _, loss in trainer.losses], abs=5e-5)
    assert [float(match[3]) for match in trl] == pytest.approx(
        [learning_rate(i, 12, 1e-2, "cosine", 2, 0.1) for i in range(12)], abs=5e-7
    )
    assert [step for step, _ in trainer.validations] == [0, 5, 10, 12]


def test_mfu():
    step = Step(3, 10, 1.0, math.nan, 2.0, -1.5, 3e-4, 12.345, 0.471, 12345.6)
    assert str(step) == (
        "step    3/10 | loss 1.000000 (+nanz)| norm 2.0000 (-1.50z)| lr 3.00e-04 | 12.35 ms | 47.1% bf16 MFU "
        "| 12346 tok/s"
    ).replace("12.35", f"{12.345:.2f}")
    assert Trainer.flops_per_token(Stub(Config(), 1024)) == 803_478_528  # of the specification


class Stub:
    def __init__(self, config, seq_len):
        self.model, self.settings = type("", (), {"config": config}), type("", (), {"seq_len": seq_len})


def test_against_plain_torch(data):
    """The losses of a loop in plain torch on the same model: batches, accumulation, clipping, schedule and
    decay groups."""
    trainer, _ = trained(data, total_batch=48, max_norm=0.5, steps=6)
    other = make(data, total_batch=48, steps=6)
    loader = DataLoader(data / "train_*.bin", 2, 8, shuffle=True)
    adamw = torch.optim.AdamW(other.model.decay_groups(0.1), lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    for i, (step, found) in enumerate(trainer.losses):
        adamw.zero_grad()
        losses = [other.model(*loader.next_batch()) for _ in range(3)]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = reference_rate(i, 6, 1e-2, "cosine", 2, 0.1)
        adamw.step()
        assert step == i + 1 and found == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_overfit_one_batch(data):
    trainer, _ = trained(data, overfit=True, steps=60, val_every=0, sample_every=0, warmup=0, lr=3e-2)
    assert trainer.losses[-1][1] < 0.7 * trainer.losses[20][1]
    trainer.train_data.reset()
    assert torch.equal(
        trainer.train_data.next_batch()[0], DataLoader(data / "val_0.bin", 2, 8).next_batch()[0]
    )


def test_an_epoch_by_default(data):
    assert make(data, steps=-1).total == 350 // 16
    assert make(data, steps=-1, val_batches=-1).val_batches == 100 // 16


def test_long_samples_are_several_texts(data):
    trainer, _ = trained(data, steps=3)
    text = sample_text(trainer.model, trainer.tokenizer, 20)
    whole = trainer.tokenizer.decode(generate(trainer.model, trainer.tokenizer, 20))
    assert text and whole.startswith(text) and text == sample_text(trainer.model, trainer.tokenizer, 20)
    eight = trainer.tokenizer.decode(generate(trainer.model, trainer.tokenizer, 8))
    assert sample_text(trainer.model, trainer.tokenizer, 8) == eight
    assert sample_text(trainer.model, trainer.tokenizer, 20, prompt=tuple(b"abc")).startswith("abc")
    assert sample_text(trainer.model, trainer.tokenizer, 8, temperature=0.1) != eight


# ---- two runs, resume, checkpoints


@pytest.mark.parametrize(
    "changes",
    [{}, {"total_batch": 32}, {"overfit": True}, {"dropout": 0.5}],
    ids=["plain", "accumulated", "overfit", "dropout"],
)
def test_two_runs_and_a_resumed_run_have_equal_bits(data, changes):
    full, lines = trained(data, out=data / "full", checkpoint_every=4, **changes)
    again, other = trained(data, out=data / "again", checkpoint_every=4, **changes)
    assert same(full, again) and untimed(lines) == untimed(other)
    for step in (4, 8, 12):
        for a, b in zip(
            checkpoint.paths(data / "full", step), checkpoint.paths(data / "again", step), strict=True
        ):
            assert a.read_bytes() == b.read_bytes()
    checkpoint.delete(data / "again", 12)
    checkpoint.delete(data / "again", 8)
    resumed, rest = trained(data, out=data / "again", checkpoint_every=4, resume=True, **changes)
    assert resumed.losses == full.losses[4:] and same(full, resumed)
    assert untimed(rest) == untimed(lines)[-len(untimed(rest)) :]
    for a, b in zip(checkpoint.paths(data / "full", 12), checkpoint.paths(data / "again", 12), strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert (data / "full/main.log").read_bytes() == (data / "again/main.log").read_bytes()
    kept = [
        [{**line, "ms": 0, "tokens_per_s": 0} for line in json_lines(data / name)]
        for name in ("full", "again")
    ]
    assert kept[0] == kept[1] and kept[0][1]["loss"] == full.losses[0][1]


def json_lines(folder):
    return [json.loads(line) for line in (folder / "main.jsonl").read_text().splitlines()]


def test_metrics_as_json(data):
    trainer, _ = trained(data, out=data / "run", val_batches=0)
    lines = json_lines(data / "run")
    updates = [line for line in lines if "loss" in line]
    assert [line["step"] for line in updates] == list(range(12)) and updates[0].keys() == {
        *("step", "loss", "norm", "lr", "ms", "tokens_per_s", "mfu")
    }
    assert [line["loss"] for line in updates] == [loss for _, loss in trainer.losses] and updates[3][
        "mfu"
    ] is None
    assert [line for line in lines if "val_loss" in line] == [
        {"step": step, "val_loss": None} for step in (0, 5, 10, 12)
    ], "NaN is no JSON"


def test_no_updates_and_no_validation(data):
    """-x 0 evaluates and saves the first weights; -m 0 divides by 0 batches."""
    trainer, lines = trained(data, steps=0, out=data / "run", checkpoint_every=1)
    assert (
        trainer.losses == []
        and [line.split()[0] for line in lines] == ["val", "generating:"]
        and latest_step(data / "run") == 0
    )
    resumed, _ = trained(data, out=data / "run", checkpoint_every=12, resume=True)
    assert same(resumed, trained(data)[0])
    assert "val loss nan" in trained(data, steps=0, val_batches=0)[1]


def test_a_checkpoint_beyond_the_end_says_so(data):
    trained(data, out=data / "run", checkpoint_every=12)
    for steps in (12, 3):
        _, lines = trained(data, out=data / "run", checkpoint_every=12, steps=steps, resume=True)
        assert f"no updates: the checkpoint has 12, and the run ends after {steps}" in lines


def test_what_a_kill_left_of_a_deletion_is_removed(data):
    """A kill after DONE, before or in the deletion of the old checkpoint: the next resume deletes the rest.
    Major ones stay."""
    changes = dict(out=data / "run", checkpoint_every=2, major_every=8)
    trained(data, **changes)
    checkpoint.paths(data / "run", 4)[2].unlink()  # a deletion had begun
    make(data, **changes, keep=2, resume=True)
    assert sorted({int(path.stem.split("_")[1]) for path in (data / "run").glob("*_*")}) == [8, 10, 12]
    trained(data, **changes, steps=16, resume=True)
    trained(data, **changes, keep=1, steps=18, resume=True)
    assert sorted({int(path.stem.split("_")[1]) for path in (data / "run").glob("*_*")}) == [8, 16, 18]


def test_dropout_changes_updates_but_no_evaluation(data):
    plain, dropped = make(data), make(data, dropout=0.5)
    x, y = plain.val_data.next_batch()
    with torch.no_grad():
        assert torch.equal(plain.model(x, y), dropped.model(x, y))
    assert plain.update()[0][0] != dropped.update()[0][0]
    nothing = GPT2(TINY, dropout=1.0)
    nothing.initialize()
    assert nothing(x)[..., :256].abs().max() < 1e-6, "the normalized residual stream is 0"
    with pytest.raises(ValueError, match=r"dropout from 0 to 1; found 1\.5"):
        GPT2(TINY, dropout=1.5)


def test_an_unclipped_gradient(data):
    """max_norm 0 is a limit that no gradient reaches."""
    a, b, c = (trained(data, max_norm=norm, val_every=0, sample_every=0)[0] for norm in (0.0, 1e6, 1e-3))
    assert same(a, b) and not same(a, c)


@gpu
@pytest.mark.parametrize(
    "changes",
    [{}, {"total_batch": 48}, {"skip_norm": 100.0}, {"overfit": True}],
    ids=lambda x: "".join(x) or "plain",
)
def test_a_graph_gives_the_bits_of_separate_launches(data, changes):
    changes = changes | {"out": data / "run", "checkpoint_every": 4, "device": "cuda"}
    graphed, lines = trained(data, **changes)
    assert graphed.eager_updates == 2  # the others were replays
    (data / "run").rename(data / "full")
    eager, others = trained(data, graph=False, **changes)
    assert (
        eager.eager_updates == 0
        and untimed(lines) == untimed(others)
        and graphed.losses == eager.losses
        and same(graphed, eager)
    )
    for step in (8, 12):
        checkpoint.delete(data / "run", step)
    resumed, _ = trained(data, resume=True, **changes)
    assert resumed.eager_updates == 2 and resumed.losses == graphed.losses[4:] and same(graphed, resumed)


@gpu
def test_a_graph_has_its_own_workspaces(data):
    """torch.compile frees cuBLAS's workspaces; what a graph uses must not be freed with them."""
    junk = []

    def report(_):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        junk.append(torch.full((1 << 24,), math.nan, device="cuda"))

    graphed, eager = make(data, device="cuda"), make(data, device="cuda", graph=False)
    graphed.run(report)
    eager.run()
    assert graphed.eager_updates == 2 and graphed.losses == eager.losses and same(graphed, eager)


def test_resume_without_a_checkpoint_starts_anew(data):
    full, _ = trained(data, out=data / "a")
    other, _ = trained(data, out=data / "b", resume=True)
    assert same(full, other)


def test_resume_after_the_end_trains_no_more(data):
    full, _ = trained(data, out=data / "a", checkpoint_every=12)
    log = (data / "a/main.log").read_bytes()
    again, _ = trained(data, out=data / "a", checkpoint_every=12, resume=True)
    assert again.losses == [] and same(full, again) and (data / "a/main.log").read_bytes() == log


def test_checkpoints_that_are_kept(data):
    trained(data, out=data / "run", checkpoint_every=2, keep=2, major_every=4)
    assert sorted(int(path.name[5:]) for path in (data / "run").glob("DONE_*")) == [4, 8, 10, 12]
    assert not checkpoint.paths(data / "run", 6)[0].exists()


def test_master_weights_are_optional(data):
    for master in (True, False):
        trained(data, out=data / f"{master}", checkpoint_every=12, master=master)
    sizes = [checkpoint.paths(data / f"{master}", 12)[1].stat().st_size for master in (True, False)]
    assert sizes[0] - sizes[1] == 4 * TINY.num_parameters
    assert make(data, out=data / "False", resume=True).step == 12


CHILD = """
import sys
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings, Trainer
data, out = sys.argv[1:]
tiny = Config(max_seq_len=8, vocab_size=256, num_layers=2, num_heads=2, channels=8)
files = dict(train_data=f"{data}/train_*.bin", val_data=f"{data}/val_*.bin", out=out, checkpoint_every=3,
    keep=2, resume=True)
s = Settings(**files, batch=2, seq_len=8, steps=60, lr=1e-2, val_every=7, val_batches=2, sample_every=0)
print("ready", flush=True)
model = GPT2(tiny)
model.initialize()
Trainer(model, s).run()
"""


def test_killed_at_any_moment(data):
    """SIGKILL again and again, then the end: the same weights and main.log as without a kill."""
    rng = np.random.default_rng(os.getpid())
    command = [sys.executable, "-c", CHILD, str(data)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [*command, str(data / "full")], check=True, env=environment, stdout=subprocess.DEVNULL, timeout=120
    )
    kills = 0
    for _ in range(2):
        child = subprocess.Popen([*command, str(data / "killed")], env=environment, stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.8))
        child.send_signal(signal.SIGKILL)
        kills += child.wait() == -signal.SIGKILL
        child.stdout.close()
    assert kills
    subprocess.run(
        [*command, str(data / "killed")], check=True, env=environment, stdout=subprocess.DEVNULL, timeout=120
    )
    for a, b in zip(checkpoint.paths(data / "full", 60), checkpoint.paths(data / "killed", 60), strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert (data / "full/main.log").read_bytes() == (data / "killed/main.log").read_bytes()


@pytest.mark.parametrize("room", [0, 5000, 20000])
def test_full_disk(data, monkeypatch, room):
    """The last good checkpoint survives, and training goes on from it."""
    full, _ = trained(data, out=data / "full", checkpoint_every=12)
    trained(data, out=data / "run", checkpoint_every=4, steps=12)
    for step in (8, 12):
        checkpoint.delete(data / "run", step)
    with monkeypatch.context() as patch:
        trainer = make(data, out=data / "run", checkpoint_every=4, resume=True)
        full_disk(patch, room)
        with pytest.raises(OSError) as error:
            trainer.run()
    path = re.escape(str(data / "run")) + r"/(main|model|state)\w*\.\w+"
    assert re.fullmatch(
        rf"{path}: No space left on device: (needs \d+ bytes, )?\d+ bytes are free; the last checkpoint, of "
        rf"step 4, is whole",
        str(error.value),
    )
    assert latest_step(data / "run") == 4 and read_model(checkpoint.paths(data / "run", 4)[0])[0] == TINY
    resumed, _ = trained(data, out=data / "run", checkpoint_every=4, resume=True)
    assert same(full, resumed)


# ---- skipped updates, NaN


def test_skipped_updates(data, monkeypatch):
    """A loss far above the window's is not learned from; the bias correction counts its step, as in llm.c."""
    trainer = make(data, (lines := []).append, skip_loss=1.95, steps=20, val_every=0, sample_every=0, lr=1e-4)
    trainer.outliers = Outliers(5), Outliers(5)
    true, calls = trainer._backward, []

    def backward(batches):
        calls.append([p.clone() for p in trainer.model.parameters()])
        return true(batches) + (100 if len(calls) == 9 else 0)

    monkeypatch.setattr(trainer, "_backward", backward)
    trainer.run()
    assert [line for line in lines if line.startswith("skipping")] == [
        "skipping update due to loss z-score of 2.000000"
    ]
    assert all(torch.equal(a, b) for a, b in zip(calls[8], calls[9], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(calls[7], calls[8], strict=True))
    assert {float(slot["step"]) for slot in trainer.optimizer.state.values()} == {20}


def test_skipped_by_the_norm(data, monkeypatch):
    monkeypatch.setattr("cukern.gpt2.train.Outliers", lambda: Outliers(4))
    lines = trained(data, skip_norm=1e-9, steps=9, val_every=0, sample_every=0)[1]
    assert any(line.startswith("skipping update due to grad z-score of ") for line in lines)


@pytest.mark.parametrize("skip", [0.0, 3.0])
@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda model: model.ln2w[1].fill_(math.nan), r"step 1: loss nan, .* not finite: parameter ln2w"),
        (lambda model: model.wpe[0].fill_(math.inf), r"step 1: loss nan, .* not finite: parameter wpe"),
        (
            lambda model: model.wpe.requires_grad_().register_hook(lambda g: g * math.inf),
            r"loss 5\.\d+, .*: gradient of wpe",
        ),
    ],
    ids=["nan", "inf", "gradient"],
)
def test_not_finite(data, break_it, says, skip):
    trainer = make(data, skip_loss=skip, val_every=0)
    with torch.no_grad():
        break_it(trainer.model)
    with pytest.raises(FloatingPointError, match=says):
        trainer.run()


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, "expected batch more than 0; found 0"),
        ({"lr": math.nan}, "expected lr at least 0; found nan"),
        ({"warmup": -1}, "expected warmup at least 0; found -1"),
        ({"steps": -2}, "expected steps at least 0, or -1; found -2"),
        ({"total_batch": -2}, "expected total_batch at least 0, or -1; found -2"),
        ({"schedule": "step"}, "expected a schedule of cosine, linear, constant, wsd; found 'step'"),
        ({"total_batch": 17}, "expected total_batch a multiple of batch . seq_len = 16; found 17"),
        ({"resume": True}, "expected out, a folder, for resume; found None"),
        ({"checkpoint_every": 2}, "expected out, a folder, for checkpoint_every; found None"),
        ({"batch": 19}, "at least num_processes . B . T . 1 = 153 tokens; found 150"),
        ({"seq_len": 9}, "expected seq_len of at most the model's max_seq_len = 8; found 9"),
        ({"total_batch": 1600, "steps": -1}, "expected at least one update's 1600 tokens; found 350"),
    ],
)
def test_refused_settings(data, changes, says):
    with pytest.raises(ValueError, match=says):
        make(data, **changes)
    assert not (data / "run").exists()


def test_a_checkpoint_of_another_shape(data):
    trained(data, out=data / "run", checkpoint_every=12)
    log = (data / "run/main.log").read_bytes()
    other = Config(max_seq_len=8, vocab_size=256, num_layers=1, num_heads=2, channels=8)
    with pytest.raises(ValueError, match=r"expected Config.*num_layers=1.*found Config.*num_layers=2"):
        make(data, out=data / "run", resume=True, config=other)
    with pytest.raises(ValueError, match="expected a loader state of "):
        make(data, out=data / "run", resume=True, batch=3)
    assert (data / "run/main.log").read_bytes() == log


def test_tokens_outside_the_vocabulary(data):
    with pytest.raises(ValueError, match="expected tokens below the vocabulary size 100; found 10"):
        trained(
            data,
            config=Config(max_seq_len=8, vocab_size=100, num_layers=1, num_heads=2, channels=8),
            sample_every=0,
        )
