"""Two to four CPU processes (gloo) against one: losses, shards, resume bit for bit and on another number, a
process that dies."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, TREE, gpu

from cukern.gpt2 import checkpoint
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import DataLoader, write_shard
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings, Trainer

TINY = Config(max_seq_len=8, vocab_size=256, num_layers=2, num_heads=2, channels=8)
# -z and the dtype
KINDS = {"ddp": (0, torch.float32), "fsdp": (1, torch.float32), "fsdp_bf16": (1, torch.bfloat16)}
# The batches of an update of one validation batch are the same for 1, 2 and 4 processes, so that the losses
# are too.
ONE_BATCH = {f"{kind}_one_batch": KINDS[kind] for kind in ("ddp", "fsdp")}
ALL = KINDS | ONE_BATCH
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
    "--nproc-per-node", "2",
]  # fmt: skip
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(TREE / "tests")]),
    "OMP_NUM_THREADS": "1",
}
ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def make(folder, kind, out=None, device="cpu", **changes):
    zero, dtype = ALL[kind]
    model = GPT2(TINY, dtype=dtype, device=device)
    model.initialize()
    defaults = dict(
        batch=2,
        seq_len=8,
        total_batch=64,
        steps=8,
        lr=1e-2,
        weight_decay=0.1,
        max_norm=0.5,
        zero=zero,
        resume=bool(out),
    )
    defaults |= dict(val_every=4, val_batches=3, sample_every=0, checkpoint_every=4 if out else 0)
    defaults |= dict(overfit="one_batch" in kind)
    files = Settings(folder / "train_*.bin", folder / "val_*.bin", out, **(defaults | changes))
    return Trainer(model, files, say=said.append)


said = []


def main(folder):
    """Each process of torchrun. Train each kind; train it again from its checkpoint of step 4. Rank 0 writes
    the losses. Three processes train one kind. Four go on from the checkpoints of two."""
    from cukern.gpt2.parallel import barrier, processes

    found = {}
    if sys.argv[2:] == ["cuda"]:
        with processes("cuda") as (rank, count):
            for kind, graph in itertools.product(KINDS, (True, False)):
                trainer = make(folder, kind, device="cuda", rank=rank, num_processes=count, graph=graph)
                trainer.run(lambda step: None)
                found[f"{kind} {graph}"] = trainer.losses, trainer.eager_updates
            if rank == 0:
                (folder / "losses_cuda.json").write_text(json.dumps(found))
        return
    with processes("cpu") as (rank, count):
        if count == 3:
            trainer = make(
                folder, "fsdp_one_batch", folder / "of_3", rank=rank, num_processes=3, total_batch=48
            )
            trainer.run(lambda step: None)
            found["of_3"] = trainer.losses, trainer.validations
        for kind in ONE_BATCH if count == 4 else ():
            if rank == 0:
                copy_checkpoint(folder / f"{kind}_moved", folder / f"{kind}_on_4")
            barrier()
            trainer = make(folder, kind, folder / f"{kind}_on_4", rank=rank, num_processes=4)
            trainer.run(lambda step: None)
            found[f"{kind}_on_4"] = trainer.losses, trainer.validations
        for kind in ALL if count == 2 else ():
            for run in ("full", "again"):
                if run == "again" and rank == 0:
                    (folder / f"{kind}_full").rename(folder / f"{kind}_moved")
                    copy_checkpoint(folder / f"{kind}_moved", folder / f"{kind}_again")
                barrier()
                trainer = make(folder, kind, folder / f"{kind}_{run}", rank=rank, num_processes=count)
                trainer.run(lambda step: None)
                found[f"{kind}_{run}"] = trainer.losses, trainer.validations
        if rank == 0:
            (folder / f"losses_{count}.json").write_text(json.dumps(found))


def copy_checkpoint(source, target):
    """That of step 4."""
    target.mkdir()
    for path in source.glob("*_00000004*"):
        os.link(path, target / path.name)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, length in (("train_1", 400), ("train_2", 350), ("val_0", 200)):
        write_shard(folder / f"{name}.bin", rng.integers(97, 107, length))
    return folder


@pytest.fixture(scope="module")
def losses(data):
    """By kind and run, what two processes found."""
    return launched(data, 2)


def launched(data, count, *more):
    command = [*TORCHRUN[:-1], str(count), __file__, str(data), *more]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((data / f"losses_{'_'.join(more) or count}.json").read_text())


@gpu
def test_a_graph_on_two_gpus_gives_the_bits_of_separate_launches(data):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = launched(data, 2, "cuda")
    for kind in KINDS:
        (graphed, first), (eager, none) = found[f"{kind} True"], found[f"{kind} False"]
        assert (first, none) == (2, 0) and graphed == eager and len(eager) == 8


class OfTwo:
    """The batches of two processes' loaders in turn, for one process."""

    def __init__(self, pattern):
        self.loaders = [
            DataLoader(pattern, 2, 8, shuffle=True, rank=rank, num_processes=2) for rank in (0, 1)
        ]
        self.count, self.num_tokens = 0, 0

    def state(self):
        return None

    def next_batch(self):
        self.count += 1
        return self.loaders[(self.count - 1) % 2].next_batch()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(data, losses, kind):
    trainer = make(data, kind, val_batches=6)
    trainer.train_data = OfTwo(data / "train_*.bin")
    trainer.run(lambda step: None)
    found, validations = losses[f"{kind}_full"]
    tolerance = 1e-5 if trainer.model.wte.dtype == torch.float32 else 5e-3
    assert [step for step, _ in found] == list(range(1, 9)) and [step for step, _ in validations] == [0, 4, 8]
    for ours, theirs in ((found, trainer.losses), (validations, trainer.validations)):
        assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], abs=tolerance)
    assert trainer.losses[-1][1] < trainer.losses[0][1] - 0.5


@pytest.mark.parametrize("kind", ALL)
def test_resume_gives_the_same_bits(data, losses, kind):
    assert losses[f"{kind}_again"][0] == losses[f"{kind}_full"][0][4:]
    for rank in (0, 1):
        for a, b in zip(
            *(checkpoint.paths(data / f"{kind}_{run}", 8, rank) for run in ("moved", "again")), strict=True
        ):
            assert a.read_bytes() == b.read_bytes()


def test_shards_are_those_of_llmc(data, losses):
    """-z 1: rank r holds the r-th part of each layer of a tensor. Together they are what each rank holds
    without."""
    ranks = [checkpoint.paths(data / "fsdp_moved", 8, rank)[1] for rank in (0, 1)]
    states = [
        checkpoint.read_state(path, TINY, rank=r, num_processes=2, parts=2) for r, path in enumerate(ranks)
    ]
    whole = checkpoint.read_state(
        checkpoint.paths(data / "ddp_moved", 8, 1)[1], TINY, rank=1, num_processes=2
    )
    for name in ("m", "v", "master"):
        for key, tensor in getattr(whole, name).items():
            layers = (
                tensor.flatten(1) if checkpoint.PARAMETERS[key][0].startswith("L") else tensor.view(1, -1)
            )
            parts = [getattr(state, name)[key].reshape(len(layers), -1) for state in states]
            torch.testing.assert_close(
                torch.cat(parts, 1), layers, rtol=1e-3, atol=1e-5, msg=f"{name} of {key}"
            )
    assert ranks[0].stat().st_size == 1024 + 3 * 4 * TINY.num_parameters // 2 + len(_shuffle(ranks[0]))


def _shuffle(path):
    """What follows the arrays."""
    return path.read_bytes()[1024 + 3 * 4 * TINY.num_parameters // 2 :]


def close(found, expected):
    """Steps and losses."""
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-5)


def test_four_processes_go_on_from_two(data, losses):
    found = launched(data, 4)
    for kind in ONE_BATCH:
        close(found[f"{kind}_on_4"][0], losses[f"{kind}_full"][0][4:])


@pytest.mark.parametrize("kind", ONE_BATCH)
def test_one_process_goes_on_from_two(data, losses, kind):
    copy_checkpoint(data / f"{kind}_moved", data / f"{kind}_on_1")
    trainer = make(data, kind, data / f"{kind}_on_1")
    trainer.run(lambda step: None)
    close(trainer.losses, losses[f"{kind}_full"][0][4:])
    states = [
        checkpoint.read_any_state(data / f"{kind}_moved", 8, TINY, 0, count, parts)
        for count, parts in ((1, 1), (2, 1))
    ]
    own = checkpoint.read_state(checkpoint.paths(data / f"{kind}_on_1", 8)[1], TINY)
    for state in states:
        for name in ("m", "v", "master"):
            for key, tensor in getattr(own, name).items():
                torch.testing.assert_close(
                    getattr(state, name)[key], tensor, rtol=1e-3, atol=1e-5, msg=f"{name} of {key}"
                )


def test_the_position_in_the_data_is_converted_and_said(data, losses):
    """With shuffled data: where a run with this number of processes is after as many updates."""
    copy_checkpoint(data / "ddp_moved", data / "position")
    said.clear()
    trainer = make(data, "ddp", data / "position")
    assert said == [
        "the checkpoint is of 2 processes; optimizer state divided anew; "
        "the position in the data is that of a run with 1 process after 4 updates"
    ]
    loader = DataLoader(data / "train_*.bin", 2, 8, shuffle=True)
    for _ in range(4 * trainer.settings.micro_steps):
        loader.next_batch()
    assert all(map(torch.equal, loader.next_batch(), trainer.train_data.next_batch()))


def test_three_processes_divide_what_three_does_not(data):
    """-z 1: 8 positions, 256 rows, 8 and 32 channels. The losses are those of one process, which also goes on
    from the checkpoint."""
    losses = launched(data, 3)["of_3"][0]
    one = make(data, "ddp_one_batch", total_batch=48)
    one.run(lambda step: None)
    close(one.losses, losses)
    sizes = [checkpoint.paths(data / "of_3", 8, rank)[1].stat().st_size for rank in range(3)]
    assert len(set(sizes)) == 1 and sizes[0] > 1024 + 3 * 4 * TINY.num_parameters / 3
    copy_checkpoint(data / "of_3", data / "of_3_on_1")
    after = make(data, "ddp_one_batch", data / "of_3_on_1", total_batch=48)
    after.run(lambda step: None)
    close(after.losses, losses[4:])


TRAIN = [
    "-m", "cukern", "gpt2", "train", "--device", "cpu", "-e", "small", "-b", "2", "-t", "8", "-v", "0", "-s",
    "0",
]  # fmt: skip


def start_without_torchrun(folder, data, rank, *more):
    """One of two processes that find each other by a file: llm.c's -pi fs."""
    command = [sys.executable, *TRAIN, "-x", 3, "-i", data / "train_*.bin", "-j", data / "val_*.bin"]
    command += ["-pi", "fs", "-pf", folder, "-pn", 2, "-pr", rank, *more]
    return subprocess.Popen(
        map(str, command), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_find_each_other_by_a_file(data, tmp_path):
    runs = [start_without_torchrun(tmp_path, data, rank) for rank in (0, 1)]
    outputs = [run.communicate(timeout=200) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert "num_processes=2" in outputs[0][0] and "step    3/3" in outputs[0][0] and outputs[1][0] == ""


def test_a_process_that_fails_names_itself_and_ends_the_other(data, tmp_path):
    runs = [
        start_without_torchrun(tmp_path, data, rank, *more)
        for rank, more in ((0, ()), (1, ("-e", "none.bin")))
    ]
    failed = runs[1].communicate(timeout=200)[1]
    runs[0].communicate(timeout=200)  # no torchrun ends it: watch.py does
    assert runs[0].returncode and runs[1].returncode
    assert "rank 1 of 2 ends: " in failed


def test_a_process_that_dies_ends_the_others(data):
    command = [
        *TORCHRUN,
        *TRAIN,
        "-x",
        "100000",
        "-i",
        str(data / "train_*.bin"),
        "-j",
        str(data / "val_*.bin"),
    ]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            while not (line := run.stdout.readline()).startswith("step "):
                assert line, "ended before the first step"
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            (victim,) = [
                pid for pid in children if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            ]
            start = time.perf_counter()
            os.kill(int(victim), signal.SIGKILL)
            rest, _ = run.communicate(timeout=60)
            seconds = time.perf_counter() - start
        finally:
            run.kill()
    assert run.returncode != 0 and seconds < 10
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", rest), rest[-3000:]


SLEEPER = """
import sys, time
from cukern.gpt2.parallel import Start, processes
with processes("cpu", Start("file://" + sys.argv[1], int(sys.argv[2]), 3, 0)):
    print("connected", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("dead", (0, 1))
def test_a_process_that_dies_without_torchrun_ends_the_others(tmp_path, dead):
    commands = [[sys.executable, "-c", SLEEPER, str(tmp_path / "store"), str(rank)] for rank in range(3)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    runs = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        assert [run.stdout.readline() for run in runs] == ["connected\n"] * 3
        start = time.perf_counter()
        runs[dead].kill()
        texts = [run.communicate(timeout=30)[1] for run in runs]
        seconds = time.perf_counter() - start
    finally:
        for run in runs:
            run.kill()
    assert seconds < 10
    for rank, (run, text) in enumerate(zip(runs, texts, strict=True)):
        if rank != dead:
            assert run.returncode == 1 and f"rank {dead} of 3 has ended, and so does rank {rank}" in text


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_a_step_of_two_processes_is_timed():
    sizes = ["-e", "small", "-b", "2", "-t", "16", "-x", "2"]
    command = [*TORCHRUN, "-m", "cukern", "gpt2", "bench", *sizes, "--compile", "no", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--no-eager"], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "B=4 T=16" in done.stdout and done.stdout.count("cukern 2 processes") == 1
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert (
        refused.returncode
        and "expected --compile no and --no-eager under torchrun; found ['torch']" in refused.stderr
    )
