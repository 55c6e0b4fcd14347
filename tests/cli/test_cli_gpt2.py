"""`cukern gpt2`: every flag, the newcomer's run, evaluation, samples, checks, shares, data, downloads, and
errors without a traceback."""

import http.server
import math
import re
import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import no_gpu, run
from test_cli import call, refused

import cukern
from cukern.cli import gpt2_data, gpt2_study, gpt2_train
from cukern.cli.gpt2_check import is_published
from cukern.gpt2 import checkpoint, data
from cukern.gpt2.checkpoint import Config, DebugState, write_debug_state, write_model
from cukern.gpt2.data import (
    byte_tokenizer,
    read_shard,
    read_tokenizer,
    tokenize,
    write_shard,
    write_tokenizer,
)
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings

TINY = Config(max_seq_len=16, vocab_size=256, num_layers=1, num_heads=2, channels=8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with shards and the weights of a tiny model."""
    rng = np.random.default_rng(0)
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", rng.integers(97, 107, 300))
    model = GPT2(TINY)
    model.initialize()
    write_model(tmp_path / "tiny.bin", TINY, model.parameters_by_name())
    monkeypatch.chdir(tmp_path)
    return tmp_path


DATA = ("-i", "train.bin", "-j", "val.bin", "-e", "tiny.bin", "-b", 2, "-t", 16, "--device", "cpu")
FLAGS = """-o run -d 64 -x 4 -k wsd -l 0.001 -u 1 -q 0.1 -c 0.1 -v 2 -m 1 -s 2 -g 8 -h 0 -a 0 -f 0 -w 1
-n 2 -nk 1 -nm 4 -y 1 -sl 3 -sg 3
-r 0 -z 0 -ge 0 --temperature 0.5"""
LONG = """--out run --total-batch 64 --steps 4 --schedule wsd --lr 0.001 --warmup 1 --final-fraction 0.1
--weight-decay 0.1 --val-every 2
--val-batches 1 --sample-every 2 --sample-tokens 8 --run-hellaswag 0 --overfit 0 --tf32 0 --master 1
--checkpoint-every 2 --keep 1
--major-every 4 --resume 1 --skip-loss 3 --skip-norm 3 --recompute 0 --zero 0 --gelu-fusion 0
--temperature 0.5"""


@pytest.mark.parametrize("flags", [FLAGS, LONG], ids=["short", "long"])
def test_every_flag_arrives(folder, monkeypatch, flags):
    seen = []

    def stop(model, settings, tokenizer, say):
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "Trainer", stop)
    assert refused("gpt2", "train", *DATA, *flags.split()) == "error: enough\n"
    (found,) = seen
    expected = Settings(
        "train.bin", "val.bin", out=found.out, batch=2, seq_len=16, total_batch=64, steps=4, schedule="wsd",
        lr=0.001, warmup=1, final_fraction=0.1, weight_decay=0.1, val_every=2, val_batches=1, sample_every=2,
        sample_tokens=8, checkpoint_every=2, keep=1, major_every=4, resume=True, skip_loss=3.0, skip_norm=3.0,
        temperature=0.5,
    )  # fmt: skip
    assert found == expected and str(found.out) == "run"
    help_text = call("gpt2", "train", "--help").stdout
    assert all(flag in help_text for flag in re.findall(r"(?<!\S)-\w+", FLAGS))


def test_llmc_defaults(folder, monkeypatch):
    seen = []

    def stop(model, settings, tokenizer, say):
        seen.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "Trainer", stop)
    refused("gpt2", "train", "-i", "train.bin", "-j", "val.bin", "-e", "tiny.bin", "--device", "cpu")
    assert seen == [Settings("train.bin", "val.bin")]


# llm.c's flags: a value, and what it must lead to: a setting, an option of the model, or a printed line
LLMC = {
    "-i": ("train.bin", {"train_data": "train.bin"}),
    "-j": ("val.bin", {"val_data": "val.bin"}),
    "-e": ("tiny.bin", {}),
    "-o": ("run", {"out": Path("run")}),
    "-lg": ("5", "-lg 5 has no effect: nvidia-smi dmon shows the state of a GPU"),
    "-n": ("3", {"checkpoint_every": 3}),
    "-nk": ("2", {"keep": 2}),
    "-nm": ("4", {"major_every": 4}),
    "-y": ("1", {"resume": True}),
    "-b": ("2", {"batch": 2}),
    "-t": ("16", {"seq_len": 16}),
    "-d": ("-1", {"total_batch": -1}),
    "-x": ("0", {"steps": 0}),
    "-k": ("wsd", {"schedule": "wsd"}),
    "-l": ("0.001", {"lr": 0.001}),
    "-u": ("5", {"warmup": 5}),
    "-q": ("0.5", {"final_fraction": 0.5}),
    "-c": ("0.25", {"weight_decay": 0.25}),
    "-sl": ("3", {"skip_loss": 3.0}),
    "-sg": ("3", {"skip_norm": 3.0}),
    "-v": ("7", {"val_every": 7}),
    "-m": ("0", {"val_batches": 0}),
    "-s": ("8", {"sample_every": 8}),
    "-g": ("9", {"sample_tokens": 9}),
    "-h": ("1", {"hellaswag": gpt2_train.HELLASWAG}),
    "-a": ("1", {"overfit": True}),
    "-f": ("0", {}),  # of GPUs
    "-w": ("0", {"master": False}),
    "-ge": ("2", "-ge 2 has no effect: gelu is not fused into the product"),
    "-z": ("2", "| Disabling Zero Optimization, Zero Stage2 and Stage3 are not yet supported  |"),
    "-r": ("2", {"recompute": 2}),
    "-pn": ("2", "-pn 2 has no effect with -pi mpi: torchrun starts the processes"),
    "-pr": ("1", "-pr 1 has no effect with -pi mpi: torchrun starts the processes"),
    "-pg": ("4", "-pg 4 has no effect with -pi mpi: torchrun starts the processes"),
    "-pi": ("mpi", {}),  # tcp and fs: tests/gpt2/test_parallel.py
    "-ps": ("10.0.0.1", "-ps 10.0.0.1 has no effect with -pi mpi: torchrun starts the processes"),
    "-pf": ("/tmp", "-pf /tmp has no effect with -pi mpi: torchrun starts the processes"),
}


def test_every_flag_of_llmc(folder, monkeypatch):
    """Each has an effect, or a line that says that it has none, and is in the help."""
    seen = []

    def stop(model, settings, tokenizer, say):
        seen.append({**vars(settings), "recompute": model.recompute})
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "Trainer", stop)
    needed = {flag: LLMC[flag][0] for flag in ("-i", "-j", "-e", "-o")}
    for flag, (value, effect) in LLMC.items():
        arguments = [part for pair in (needed | {flag: value}).items() for part in pair]
        out = call("gpt2", "train", *arguments, "--device", "cpu", status=2).output
        assert out.endswith("error: enough\n"), (flag, out)
        if isinstance(effect, str):
            assert effect in out.splitlines(), (flag, out)
        else:
            assert effect.items() <= seen[-1].items() and len(out.splitlines()) == 1, (flag, out)
    for flag in ("-ge", "-lg"):
        assert call("gpt2", "train", *DATA, flag, -1, status=2).output == "error: enough\n"
    help_text = call("gpt2", "train", "--help").stdout
    assert all(re.search(rf"(?<!\S){flag}\b", help_text) for flag in LLMC)


def test_processes_that_find_each_other_need_a_place(folder):
    assert "-ps, the address of process 0, for -pi tcp; found None" in refused(
        "gpt2", "train", *DATA, "-pi", "tcp", "-pn", 2
    )
    assert "-pi mpi, tcp or fs; found 'nccl'" in refused("gpt2", "train", *DATA, "-pi", "nccl")
    assert "0 <= rank < processes; found 2 and 2" in refused(
        "gpt2", "train", *DATA, "-pi", "fs", "-pn", 2, "-pr", 2
    )


def test_the_default_model(folder, monkeypatch):
    """Without -e: llm.c's file if it is in this folder, else random weights; a line says which."""
    seen = []

    def made(name, *arguments, **options):
        seen.append(name)
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "make_model", made)
    arguments = ("gpt2", "train", "-i", "train.bin", "-j", "val.bin", "--device", "cpu")
    assert (
        "model: d12, random weights, because gpt2_124M_bf16.bin is not in this folder"
        in call(*arguments, status=2).output
    )
    (folder / "tiny.bin").rename("gpt2_124M_bf16.bin")
    assert "model: gpt2_124M_bf16.bin, which is in this folder" in call(*arguments, status=2).output
    assert seen == ["d12", "gpt2_124M_bf16.bin"]
    help_text = re.sub(r"[│\s]", "", call("gpt2", "train", "--help").stdout)
    assert "elsed12;smallrun:small" in help_text


def test_seed_betas_and_dropout(folder, monkeypatch):
    seen = []

    def stop(model, settings, *_):
        seen.append((model.wte[0, 0].item(), model.dropout, settings.seed, settings.betas, settings.max_norm))
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "Trainer", stop)
    of_random = (*DATA[:4], "-e", "small", *DATA[6:])
    refused("gpt2", "train", *of_random)
    refused(
        "gpt2",
        "train",
        *of_random,
        *["--seed", "7", "--beta1", "0.8", "--beta2", "0.99", "--grad-clip", "0", "--dropout", "0.25"],
    )
    assert (
        seen[0][1:] == (0.0, 42, (0.9, 0.95), 1.0)
        and seen[1][1:] == (0.25, 7, (0.8, 0.99), 0.0)
        and seen[0][0] != seen[1][0]
    )
    assert "dropout from 0 to 1; found 1.5" in refused("gpt2", "train", *DATA, "--dropout", 1.5)


def test_kernels_without_effect(folder, monkeypatch):
    """On a CPU without the simulator one line says that the choice of kernels does nothing."""
    line = (
        "no effect of the choice of softmax forward, matmul forward: torch computes on a CPU without the "
        "simulator (CUKERN_BACKEND=sim)"
    )
    flags = ("--softmax-forward-kernel", 2, "--matmul-forward-kernel", 3)
    small = ("-e", "tiny.bin", "-b", 1, "-t", 8, "--device", "cpu")
    assert line in call("gpt2", "eval", "-j", "val.bin", *small, *flags, "-m", 1).stdout.splitlines()
    out = call("gpt2", "bench", *small, *flags, "-x", 1, "--compile", "no", "--no-eager").stdout
    assert line in out.splitlines() and "cukern softmax forward v2, matmul" in out
    monkeypatch.setenv("SOFTMAX_BACKWARD_KERNEL", "4")
    with cukern.backend("sim"):
        assert not lines_of_kernels(monkeypatch, "cpu", None)
        assert "no effect of the choice of softmax backward: --attention v3 comes first" in lines_of_kernels(
            monkeypatch, "cpu", "v3"
        )


def lines_of_kernels(monkeypatch, place, attention):
    lines = []
    with monkeypatch.context() as patch:
        patch.setattr(gpt2_train, "say", lines.append)
        gpt2_train.kernels(place, None, None, "3", attention)
    return "\n".join(lines)


def test_options_of_the_model_arrive(folder, monkeypatch):
    seen = []

    def stop(model, *_):
        seen.append((model.wte.dtype, model.attention, model.fused_loss, model.recompute))
        raise ValueError("enough")

    monkeypatch.setattr(gpt2_train, "Trainer", stop)
    refused("gpt2", "train", *DATA)
    refused("gpt2", "train", *DATA, "--dtype", "b", "--attention", "sdpa", "--fused-loss", "-r", 2)
    refused("gpt2", "train", *DATA, "--dtype", "b", "--no-fused-loss")
    expected = [
        (torch.float32, None, None, 0),
        (torch.bfloat16, "sdpa", True, 2),
        (torch.bfloat16, None, False, 0),
    ]
    assert seen == expected


def test_a_bfloat16_checkpoint_resumes_in_bfloat16(folder):
    call("gpt2", "train", *DATA, "--dtype", "b", "-o", "run", "-x", 2, "-n", 2, "-v", 0, "-s", 0)
    assert checkpoint.read_model(checkpoint.paths("run", 2)[0])[1]["wte"].dtype == torch.bfloat16
    resumed = (*DATA[:4], *DATA[6:], "-o", "run", "-x", 4, "-n", 2, "-v", 0, "-s", 0, "-y", 1)
    assert "device: CPU, 1 threads, float32 |" in re.sub(
        r"\d+ threads", "1 threads", call("gpt2", "train", *DATA, "-x", 0).stdout
    )
    assert "device: CPU, 1 threads, bfloat16" in re.sub(
        r"\d+ threads", "1 threads", call("gpt2", "train", *resumed).stdout
    )
    assert checkpoint.latest_step("run") == 4


def test_train_resume_and_plot(folder):
    out = call("gpt2", "train", *DATA, *FLAGS.split(), "--plot", "loss.svg").stdout
    assert (
        "=> setting grad_accum_steps=2" in out
        and "step    4/4 | loss " in out
        and "val loss " in out
        and "generating:\n---" in out
    )
    assert (folder / "loss.svg").read_bytes().startswith(b"<?xml") and checkpoint.latest_step("run") == 4
    assert "step    4/4" not in call("gpt2", "train", *DATA, *FLAGS.split()).stdout


@pytest.mark.parametrize("given", ["option", "environment"])
def test_kernels_of_the_fork(folder, monkeypatch, given):
    """Only the names of what there is: that each computes the right thing is tested with the model."""
    for name, numbers in (("softmax_forward", "1, 2, 3, 4, 5"), ("matmul_forward", "1, 2, 3, 4, 5, cublas")):
        option = [f"--{name.replace('_', '-')}-kernel", "7"] if given == "option" else []
        with monkeypatch.context() as patch:
            if not option:
                patch.setenv(f"{name.upper()}_KERNEL", "7")
            assert f"one of {numbers}; found '7'" in refused("gpt2", "train", *DATA, "-x", 1, *option)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "-i", "train.bin"), "-i and -j go together: give both or neither, got only -i"),
        (("train", *DATA, "-b", 20), "expected at least num_processes * B * T + 1 = 321 tokens; found 300"),
        (("train", *DATA, "-t", 17), "expected seq_len of at most the model's max_seq_len = 16; found 17"),
        (("train", *DATA, "-i", "none*.bin"), "expected files that match 'none*.bin'; found none"),
        (("train", *DATA, "-l", "nan"), "expected lr at least 0; found nan"),
        (("train", *DATA, "-l", "1e30", "-x", 9, "-v", 0), "step 2: loss nan"),
        (("train", *DATA, "--dtype", "h"), "expected --dtype f or b; found 'h'"),
        (("train", *DATA, "--attention", "v9"), "found 'v9'"),
        (
            ("bench", "-e", "tiny.bin", "--compile", "fast"),
            "--compile default, reduce-overhead, max-autotune, no; found 'fast'",
        ),
        (("train", *DATA, "--device", "tpu"), "--device must be cpu"),
        (("train", *DATA, "--plot", "a.doc"), "--plot must name a file that ends with"),
        (("train", *DATA, "-y", 1), "expected out, a folder, for resume; found None"),
        (("train", *DATA, "-h", 1), "No such file or directory: 'dev/data/hellaswag/hellaswag_val.bin'"),
        (("train", *DATA, "-o", "tiny.bin"), "File exists: 'tiny.bin'"),
        (("eval", "-e", "tiny.bin"), "expected -j or --hellaswag; found neither"),
        (
            ("eval", "-e", "val.bin", "-j", "val.bin"),
            "expected magic number 20240326, of a model; found 20240520",
        ),
        (("eval", "-e", "tiny.bin", "-j", "val.bin", "-m", 0), "expected -m of at least 1, or -1; found 0"),
        (("eval", "-e", "d5", "-j", "val.bin"), "found 'd5'"),
        (
            ("sample",),
            "expected gpt2_124M.bin in the current folder (`cukern gpt2 data --starter-pack` downloads it); "
            "found no such file",
        ),
        (("sample", "-e", "none.bin"), "No such file or directory: 'none.bin'"),
        (
            ("sample", "-e", "tiny.bin", "--tokenizer", "small.bin"),
            "expected the model's 256 tokens; found 2",
        ),
        (
            ("check", "-e", "tiny.bin", "--debug-state", "tiny.bin"),
            "expected magic number 20240327, of a debug state; found 20240326",
        ),
        (
            ("profile", "-e", "tiny.bin", "-t", 17),
            "expected -b of at least 1 and -t from 1 to 16; found 4 and 17",
        ),
        (("profile",), "-e d12 needs a GPU, and torch.cuda sees none: use -e small -t 64"),
        (("data",), "expected text files or --starter-pack; found neither"),
        (("data", "tiny.bin", "--starter-pack"), "expected text files or --starter-pack; found both"),
        (("data", "none.txt"), "No such file or directory: 'none.txt'"),
        (("data", "latin.txt"), "latin.txt: expected UTF-8; found the byte 0xe9 at 1"),
        (
            ("data", "good.txt", "--encoding", "words"),
            "expected the encoding 'auto', 'gpt2' or 'bytes'; found 'words'",
        ),
    ],
)
@no_gpu
def test_errors(folder, arguments, says):
    (folder / "latin.txt").write_bytes(b"h\xe9llo")
    (folder / "good.txt").write_text("some text, long enough")
    write_tokenizer("small.bin", type(byte_tokenizer())((b"a", b"b"), 0))
    before = sorted(path.name for path in folder.iterdir())
    assert says in refused("gpt2", *arguments)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_wrong_flags_are_usage_errors(folder):
    for arguments in (("-xx", 3), ("-a", 2), ("-b", "many")):
        result = call("gpt2", "train", *DATA, *arguments, status=2)
        assert "Traceback" not in result.output and "Usage" in result.stderr


def test_a_checkpoint_of_another_shape(folder):
    call("gpt2", "train", *DATA, "-o", "run", "-x", 2, "-n", 2, "-v", 0, "-s", 0)
    assert "num_layers=12" in refused(
        "gpt2", "train", *DATA[:4], "-e", "d12", *DATA[6:], "-o", "run", "-y", 1, "-n", 2
    )


def test_eval_and_sample(folder):
    out = call(
        "gpt2", "eval", "-e", "tiny.bin", "-j", "val.bin", "-b", 2, "-t", 16, "-m", -1, "--device", "cpu"
    ).stdout
    assert re.fullmatch(r"val loss 5\.\d{6}\n", out)
    model = GPT2(TINY)
    model.load_parameters({name: math.nan * w for name, w in checkpoint.read_model("tiny.bin")[1].items()})
    write_model("nan.bin", TINY, model.parameters_by_name())
    assert "the validation loss of nan.bin is not finite" in refused(
        "gpt2", "eval", "-e", "nan.bin", "-j", "val.bin", "-b", 2, "-t", 16
    )


def test_sample(folder):
    arguments = ("gpt2", "sample", "-e", "tiny.bin", "-g", 12, "--device", "cpu")
    plain = call(*arguments).stdout
    assert plain and plain == call(*arguments, "--seed", 1337).stdout != call(*arguments, "--seed", 7).stdout
    out = call(
        *arguments, "--prompt", "ab c", "--samples", 3, "--top-k", 3, "--top-p", 0.9, "--temperature", 0.7
    ).stdout
    texts = out.removesuffix("\n").split("\n---\n")
    assert len(texts) == 3 and all(text.startswith("ab c") for text in texts) and len(set(texts)) == 3
    greedy = [call(*arguments, "--prompt", "ab c", "--seed", seed, "--top-k", 1).stdout for seed in (1, 2)]
    assert greedy[0] == greedy[1] == call(*arguments, "--prompt", "ab c", "--temperature", 0).stdout
    assert "a prompt of at most max_seq_len = 16 tokens; found 17" in refused(
        *arguments, "--prompt", 17 * "a"
    )
    assert "top_p above 0 and at most 1; found 2.0" in refused(*arguments, "--top-p", 2)


def test_convert(folder):
    """To Hugging Face and back: the same bytes; the logits are those of transformers."""
    pytest.importorskip("safetensors", reason="safetensors, of the extra test, is not installed")
    call("gpt2", "convert", "tiny.bin", "hf")
    call("gpt2", "convert", "hf", "back.bin")
    assert (folder / "back.bin").read_bytes() == (folder / "tiny.bin").read_bytes()
    assert "torch.bfloat16" in call("gpt2", "convert", "hf", "half.bin", "--dtype", "b").stdout
    assert checkpoint.read_model("half.bin")[1]["wte"].dtype == torch.bfloat16
    assert "one model file NAME.bin and one folder; found hf and other" in refused(
        "gpt2", "convert", "hf", "other"
    )
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text('{"model_type": "llama"}')
    assert "config.json: expected model_type 'gpt2'; found 'llama'" in refused(
        "gpt2", "convert", "llama", "new.bin"
    )
    (folder / "llama/config.json").write_text("{")
    assert "llama/config.json" in refused("gpt2", "convert", "llama", "new.bin")
    (folder / "hf/model.safetensors").write_bytes(b"no")
    assert (
        "hf/model.safetensors" in refused("gpt2", "convert", "hf", "new.bin")
        and not (folder / "new.bin").exists()
    )


def test_converted_logits(folder):
    transformers = pytest.importorskip(
        "transformers", reason="transformers, of the extra integrations, is not installed"
    )
    call("gpt2", "convert", "tiny.bin", "hf")
    theirs, ours = transformers.GPT2LMHeadModel.from_pretrained("hf").eval(), GPT2(TINY)
    ours.load_parameters(checkpoint.read_model("tiny.bin")[1])
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens)[..., :256], theirs(tokens).logits, rtol=1e-5, atol=1e-6)
    theirs.save_pretrained("theirs")
    call("gpt2", "convert", "theirs", "theirs.bin")
    assert (folder / "theirs.bin").read_bytes() == (folder / "tiny.bin").read_bytes()


def test_study(folder, monkeypatch):
    """Each choice, simulated on a tiny model: its loss is that of the default. A wrong kernel is seen."""
    out = call("gpt2", "study", "--device", "cpu", "--plot", "study.png").stdout
    assert "times and shares mean nothing" in out and "each loss is the default's" in out
    assert (folder / "study.png").read_bytes().startswith(b"\x89PNG")
    rows = [
        line
        for line in out.splitlines()
        if re.match(r"(default|softmax (for|back)ward v\d|matmul v\d) ", line)
    ]
    assert len(rows) == 16 and len({line.split()[-1] for line in rows}) == 1, out
    assert all(len(re.findall(r"[\d.]+(?:e\+\d+)?(?= |$)", line)) >= 6 for line in rows[1:]), (
        "time, ratio, share, kernel, speed, loss"
    )


def test_study_sees_another_loss(capsys):
    rows = [
        gpt2_study.Choice("", 0, (5.0, 4.0), [1.0], 0.0, 0.0),
        gpt2_study.Choice("matmul", 1, (5.0, 4.1), [2.0], 1.0, 0.5),
    ]
    assert gpt2_study._show(rows, "title") == 1
    assert "WRONG" in (text := capsys.readouterr().out) and "1 choices have another loss" in text
    assert gpt2_study._show(rows[:1], "title") == 0
    assert "a GPU for --record" in refused("gpt2", "study", "--device", "cpu", "--record")


def test_check(folder):
    """A debug state of the model itself passes, with its own loss; a wrong one does not. llm.c's losses are
    for the published state."""
    model = GPT2(TINY)
    model.load_parameters(checkpoint.read_model("tiny.bin")[1])
    x, y = torch.randint(256, (2, 1, 8), generator=torch.Generator().manual_seed(0))
    logits = model(x)[..., :256].detach()
    loss = model(x, y)
    loss.backward()
    write_debug_state("state.bin", TINY, DebugState(x, y, logits, loss.item(), model.gradients_by_name()))
    out = call("gpt2", "check", "-e", "tiny.bin", "--debug-state", "state.bin", "--device", "cpu").stdout
    assert "test A" in out and "test B" in out and "nothing wrong" in out and "loss of step" not in out, out
    assert "the debug state is not the published one: losses are compared with the one in the state" in out
    published = SimpleNamespace(x=torch.zeros(4, 64), loss=5.270007133483887)
    assert is_published(Config(), published) and not is_published(TINY, published)
    assert not is_published(Config(), SimpleNamespace(x=torch.zeros(4, 64), loss=2.86)), (
        "a state from other data"
    )
    assert "loss of the debug state" in out and out.count("relative L2 error") == 32
    bad = {name: g + 1 if name == "fcw" else g for name, g in model.gradients_by_name().items()}
    write_debug_state("state.bin", TINY, DebugState(x, y, logits, loss.item(), bad))
    out = call(
        "gpt2", "check", "-e", "tiny.bin", "--debug-state", "state.bin", "--device", "cpu", status=1
    ).stdout
    assert any("fcw, relative L2" in line and "WRONG" in line for line in out.splitlines()), out


def test_profile(folder):
    out = call(
        "gpt2",
        "profile",
        "-e",
        "tiny.bin",
        "-b",
        2,
        "-t",
        16,
        "-x",
        2,
        "--device",
        "cpu",
        "--plot",
        "shares.png",
    ).stdout
    assert "time of an update" in out and "% of all" in out and "aten::" in out
    assert (folder / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_bench(folder):
    arguments = (
        "gpt2", "bench", "-e", "tiny.bin", "-b", 1, "-t", 16, "-x", 2, "--compile", "no", "--device", "cpu",
    )  # fmt: skip
    out = call(*arguments).stdout
    assert (
        "B=1 T=16 float32 on cpu" in out
        and re.search(r"cukern +[\d.]+ +[\d.]+ +\d+", out)
        and "torch " in out
    )
    out = call(*arguments, "--attention", "sdpa", "--attention", "v1", "--fused-loss", "--no-eager").stdout
    assert "cukern sdpa, fused loss" in out and "cukern v1, fused loss" in out and "torch " not in out


def test_data(folder):
    (folder / "a.txt").write_text("one\n\ntwo\n\n" * 10)
    out = call(
        "gpt2",
        "data",
        "a.txt",
        "-o",
        "new",
        "--name",
        "mine",
        "--encoding",
        "bytes",
        "--sections",
        "--shard-tokens",
        60,
    ).stdout
    assert "mine_train_000001.bin: 109 tokens" in out, "the remainder of 49 joins the shard before"
    assert "mine_val_000000.bin: 12 tokens" in out and "mine_tokenizer.bin: 256 tokens" in out
    tokens = np.concatenate([read_shard(path) for path in sorted((folder / "new").glob("mine_train_*.bin"))])
    assert (
        bytes(tokens[:12].astype(np.uint8)) == b"\0one\n\n\0two\n\n"
        and len(list((folder / "new").iterdir())) == 3
    )
    assert read_tokenizer("new/mine_tokenizer.bin") == byte_tokenizer()
    call(
        "gpt2",
        "train",
        "-i",
        "new/mine_train*",
        "-j",
        "new/mine_val*",
        "-e",
        "small",
        "-b",
        1,
        "-t",
        8,
        "-x",
        2,
        "--device",
        "cpu",
    )


# ---- the starter pack, from a server on this machine


@pytest.fixture
def server(folder, monkeypatch):
    """Serves the folder; returns the requested names."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path[1:])

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        monkeypatch.setattr(gpt2_data, "STARTER_PACK", f"http://127.0.0.1:{serving.server_port}/")
        yield asked
        serving.shutdown()


def test_starter_pack(folder, server, monkeypatch):
    write_tokenizer("tokens.bin", byte_tokenizer())
    size = (folder / "val.bin").stat().st_size
    pack = {"val.bin": ("sub", size), "tokens.bin": (".", read_tokenizer)}
    monkeypatch.setattr(gpt2_data, "PACK", pack)
    call("gpt2", "data", "--starter-pack", "-o", "new")
    assert (folder / "new/sub/val.bin").read_bytes() == (folder / "val.bin").read_bytes() and (
        folder / "new/tokens.bin"
    ).exists()
    asked = list(server)
    assert "is there" in call("gpt2", "data", "--starter-pack", "-o", "new").stdout and server == asked
    monkeypatch.setattr(gpt2_data, "PACK", {"val.bin": (".", size + 1)})
    assert f"expected {size + 1} bytes; found {size} bytes" in refused(
        "gpt2", "data", "--starter-pack", "-o", "other"
    )
    monkeypatch.setattr(gpt2_data, "PACK", {"val.bin": (".", read_tokenizer)})
    assert "expected magic number 20240328" in refused("gpt2", "data", "--starter-pack", "-o", "other")
    monkeypatch.setattr(gpt2_data, "PACK", {"nothing.bin": (".", 1)})
    assert "nothing.bin cannot be downloaded: HTTP Error 404" in refused(
        "gpt2", "data", "--starter-pack", "-o", "other"
    )
    assert list((folder / "other").iterdir()) == []


def test_no_network(folder, monkeypatch):
    monkeypatch.setattr(gpt2_data, "STARTER_PACK", "http://127.0.0.1:9/")
    assert "http://127.0.0.1:9/gpt2_124M.bin cannot be downloaded: " in refused(
        "gpt2", "data", "--starter-pack"
    )
    assert not (folder / "gpt2_124M.bin").exists()


def test_sections_of_tiny_shakespeare():
    assert gpt2_data._sections("a\nb\n\nc\n\n\nd") == ["a\nb\n\n", "c\n\n", "\nd"]
    assert "".join(gpt2_data._sections("a\n\nb\n")) == "a\n\nb\n"


def test_auto_takes_tiktoken_only_if_its_vocabulary_is_at_hand(monkeypatch, tmp_path):
    monkeypatch.setattr(gpt2_data.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert not gpt2_data._tiktoken_at_hand()
    # sha1 of the two addresses, from sha1sum; tiktoken names the files of its cache so
    names = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    (tmp_path / names[0]).touch()
    assert not gpt2_data._tiktoken_at_hand()
    (tmp_path / names[1]).touch()
    assert gpt2_data._tiktoken_at_hand()
    monkeypatch.setattr(gpt2_data.importlib.util, "find_spec", lambda name: None)
    assert not gpt2_data._tiktoken_at_hand()


@pytest.mark.parametrize("at_hand", [False, True])
def test_the_encoding_without_one(folder, monkeypatch, at_hand):
    """Without --encoding, "gpt2" if its vocabulary is at hand, else "bytes"."""
    (folder / "a.txt").write_text("some words")
    seen, encode = [], data.tokenize
    monkeypatch.setattr(gpt2_data, "_tiktoken_at_hand", lambda: at_hand)
    monkeypatch.setattr(
        gpt2_data.data, "tokenize", lambda texts, encoding: seen.append(encoding) or encode(texts, "bytes")
    )
    call("gpt2", "data", "a.txt")
    call("gpt2", "data", "a.txt", "--encoding", "bytes")
    assert seen == ["gpt2" if at_hand else "bytes", "bytes"]


# ---- the first thing that a newcomer runs


def test_builtin_text():
    text = gpt2_train.builtin_text()
    tokens, tokenizer = tokenize([text], "bytes")
    assert len(text) > 300_000 and "\0" not in text
    assert tokenizer.decode(tokens[1:]) == text


def test_newcomer(tmp_path):
    """In a fresh process, as a user runs it. 60 s on two cores are 120 s of CPU time. The tests share the
    cores: one thread runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run(
        [sys.executable, "-m", "cukern", "gpt2", "train"],
        timeout=900,
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "1"},
    )
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    losses = [float(found) for found in re.findall(r"^val loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert losses[0] > 5 and losses[-1] < 1.8, losses
    assert seconds < 100
    sample = done.stdout.partition("generating:\n---\n")[2].rpartition("\n---\n")[0]
    known, words = set(re.findall("[a-z]{3,}", gpt2_train.builtin_text())), re.findall("[a-z]{3,}", sample)
    assert len(words) > 20 and sum(word in known for word in words) > len(words) / 2, sample
    assert list(tmp_path.iterdir()) == []
