"""The speedrun: cukern's ops against plain torch, windows and rates over a run, the command, refusals."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import cukern
from cukern.cli import app
from cukern.gpt2 import speedrun
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import write_shards
from cukern.gpt2.settings import Settings
from cukern.gpt2.speedrun import Recipe, Speedrun, SpeedrunModel

CONFIG = Config(16, 60, num_layers=2, num_heads=2, channels=32, padded_vocab_size=64)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(folder, plain=False, tied=False, **changes):
    steps = (np.random.default_rng(0).integers(0, 3, 6000)).cumsum() % 60
    val, train = write_shards(folder, "steps", steps)
    options = dict(batch=4, seq_len=16, steps=20, lr=0.3, val_every=10, val_batches=2, sample_every=0)
    model = SpeedrunModel(CONFIG, Recipe(tied=tied), plain=plain)
    return Speedrun(model, Settings(train, val, **(options | changes)), say=lambda line: None)


@pytest.mark.parametrize("tied", [False, True])
def test_losses_are_those_of_plain_torch(tmp_path, one_thread, tied):
    """To 1e-5 of the loss. More at ten times the rates: the optimizers orthogonalize in bfloat16, in another
    order."""
    ours, plain = (make(tmp_path, p, tied) for p in (False, True))
    for trainer in (ours, plain):
        trainer.run(lambda step: None)
    assert ours.losses[-1][1] < ours.losses[0][1] - 0.05
    for name in ("losses", "validations"):
        found, expected = (torch.tensor(getattr(trainer, name)) for trainer in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_windows_grow_and_rates_fall(tmp_path):
    trainer, seen = make(tmp_path, steps=6, val_every=0, out=tmp_path / "out"), []
    trainer.run(lambda step: seen.append((trainer.model.windows, step.lr)))
    assert [w for w, _ in seen] == [[2, 4], [2, 4], [4, 8], [4, 8], [8, 16], [8, 16]]
    assert [lr for _, lr in seen] == pytest.approx([0.3] * 5 + [0.3 / 1.8])
    lines = (tmp_path / "out/main.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    assert [group["lr"] for group in trainer.optimizer.groups] == pytest.approx(
        [0.02 / 6, 0.002 / 6, 0.3 / 6]
    )


@pytest.mark.parametrize("plain", [False, True])
def test_a_token_sees_only_its_window(plain):
    """Of one layer: the loss of the last token depends on the last `window` tokens."""
    model = SpeedrunModel(Config(16, 60, 1, 2, 32), Recipe(), plain=plain)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.set_windows(16, 0.5)
    assert model.windows == [4]
    tokens = torch.randint(60, (1, 16), generator=torch.Generator().manual_seed(0))
    targets = torch.full((1, 16), -100)
    targets[0, -1] = 7
    base = model(tokens, targets)
    others = [torch.where(torch.arange(16) == i, (tokens + 1) % 60, tokens) for i in range(16)]
    assert [bool(model(other, targets) != base) for other in others] == [False] * 12 + [True] * 4


def test_muon_reads_a_rate_on_the_device():
    both = [torch.nn.Parameter(torch.arange(12.0).view(3, 4)) for _ in range(2)]
    rate = torch.tensor(0.1)
    ours = [cukern.Muon([p], lr=lr, weight_decay=0.1) for p, lr in zip(both, (rate, 0.1), strict=True)]
    for now in (0.1, 0.05):
        rate.fill_(now)
        ours[1].param_groups[0]["lr"] = now
        for p, optimizer in zip(both, ours, strict=True):
            p.grad = torch.cos(p.detach())
            optimizer.step()
    torch.testing.assert_close(*both, rtol=0, atol=1e-6)


def test_the_target_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr(speedrun, "TARGET", 100.0)
    lines = []
    trainer = make(tmp_path, steps=2, val_every=1)
    trainer.say = lines.append
    trainer.run(lambda step: None)
    assert (
        sum("at most 100.0 after 0 updates" in line for line in lines)
        == 1
        == sum("at most" in x for x in lines)
    )


def call(*arguments):
    return CliRunner().invoke(app, ["gpt2", "speedrun", "--device", "cpu", *map(str, arguments)])


def test_the_command(tmp_path):
    out = call("-x", 2, "-b", 2, "-m", 1, "-v", 1, "-o", tmp_path, "--plain", "--compile", "no").output
    assert "2 updates, by torch" in out and out.count("val loss") == 3 and (tmp_path / "main.log").exists()
    out = call("--bench", "-e", "small", "-b", 2, "-t", 16, "-d", 64, "-x", 2, "--compile", "no").output
    assert out.count(", computed from an assumed 2.5e+09 tokens, not run") == 2 and "B=4 T=16" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-i a.bin", "both of -i and -j"),
        ("-e d13", "one of d6, d12"),
        ("-b 0", "batch more than 0"),
        ("--tokens 0", "--tokens above 0"),
        ("--record", "--bench with --record"),
        ("--bench --plain", "--bench without"),
        ("--bench -x 0", "-x of at least 1"),
        ("--compile fast", "--compile default"),
        ("-i no.bin -j no.bin -e d6", "files that match 'no.bin'"),
        ("-e small -d 100", "total_batch a multiple of"),
    ],
)
def test_bad_input_is_one_line(flags, message):
    found = call(*flags.split())
    assert found.exit_code == 2 and message in found.output and found.output.count("\n") == 1


def test_bad_recipes():
    for wrong in ({"softcap": 0}, {"warmdown": 0}, {"warmdown": 1.5}, {"windows": ()}, {"windows": (2.0,)}):
        with pytest.raises(ValueError, match="expected"):
            Recipe(**wrong)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        SpeedrunModel(CONFIG, dtype=torch.float16)
