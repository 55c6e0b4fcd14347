"""Two CPU processes (gloo) against one: losses, shards and checkpoints, resume bit for bit, another world size, a process that dies."""

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
from helpers import ROOT, TREE

from cukern.gpt2 import checkpoint
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import DataLoader, write_shard
from cukern.gpt2.model import GPT2
from cukern.gpt2.train import Settings, Trainer

TINY = Config(max_seq_len=8, vocab_size=256, num_layers=2, num_heads=2, channels=8)
KINDS = {"ddp": (0, torch.float32), "fsdp": (1, torch.float32), "fsdp_bf16": (1, torch.bfloat16)}  # -z and the dtype
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TREE / "tests")]), "OMP_NUM_THREADS": "1"}
ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def make(folder, kind, out=None, **changes):
    zero, dtype = KINDS[kind]
    model = GPT2(TINY, dtype=dtype)
    model.initialize()
    defaults = dict(batch=2, seq_len=8, total_batch=64, steps=8, lr=1e-2, weight_decay=0.1, max_norm=0.5, zero=zero, resume=bool(out))
    defaults |= dict(val_every=4, val_batches=3, sample_every=0, checkpoint_every=4 if out else 0)
    files = Settings(folder / "train_*.bin", folder / "val_*.bin", out, **(defaults | changes))
    return Trainer(model, files, say=lambda line: None)


def main(folder):
    """Each process of torchrun. Train each kind; train it again from its checkpoint of step 4. Rank 0 writes the losses."""
    from cukern.gpt2.parallel import barrier, processes

    found = {}
    with processes("cpu") as (rank, count):
        for kind in KINDS:
            for run in ("full", "again"):
                if run == "again" and rank == 0:
                    (folder / f"{kind}_full").rename(folder / f"{kind}_moved")
                    again = folder / f"{kind}_again"
                    again.mkdir()
                    for path in (folder / f"{kind}_moved").glob("*_00000004*"):
                        os.link(path, again / path.name)
                barrier()
                trainer = make(folder, kind, folder / f"{kind}_{run}", rank=rank, num_processes=count)
                trainer.run(lambda step: None)
                found[f"{kind}_{run}"] = trainer.losses, trainer.validations
        if rank == 0:
            (folder / "losses.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, length in (("train_1", 400), ("train_2", 350), ("val_0", 200)):
        write_shard(folder / f"{name}.bin", rng.integers(97, 107, length))
    return folder


@pytest.fixture(scope="module")
def losses(data):
    """By kind and run, what two processes found."""
    done = subprocess.run([*TORCHRUN, __file__, str(data)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((data / "losses.json").read_text())


class OfTwo:
    """The batches of two processes' loaders in turn, for one process."""

    def __init__(self, pattern):
        self.loaders = [DataLoader(pattern, 2, 8, shuffle=True, rank=rank, num_processes=2) for rank in (0, 1)]
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


@pytest.mark.parametrize("kind", KINDS)
def test_resume_gives_the_same_bits(data, losses, kind):
    assert losses[f"{kind}_again"][0] == losses[f"{kind}_full"][0][4:]
    for rank in (0, 1):
        for a, b in zip(*(checkpoint.paths(data / f"{kind}_{run}", 8, rank) for run in ("moved", "again")), strict=True):
            assert a.read_bytes() == b.read_bytes()


def test_shards_are_those_of_llmc(data, losses):
    """-z 1: rank r holds the r-th part of each layer of a tensor. Together they are what each rank holds without."""
    ranks = [checkpoint.paths(data / "fsdp_moved", 8, rank)[1] for rank in (0, 1)]
    states = [checkpoint.read_state(path, TINY, rank=r, num_processes=2, parts=2) for r, path in enumerate(ranks)]
    whole = checkpoint.read_state(checkpoint.paths(data / "ddp_moved", 8, 1)[1], TINY, rank=1, num_processes=2)
    for name in ("m", "v", "master"):
        for key, tensor in getattr(whole, name).items():
            layers = tensor.flatten(1) if checkpoint.PARAMETERS[key][0].startswith("L") else tensor.view(1, -1)
            parts = [getattr(state, name)[key].reshape(len(layers), -1) for state in states]
            torch.testing.assert_close(torch.cat(parts, 1), layers, rtol=1e-3, atol=1e-5, msg=f"{name} of {key}")
    assert ranks[0].stat().st_size == 1024 + 3 * 4 * TINY.num_parameters // 2 + len(_shuffle(ranks[0]))


def _shuffle(path):
    """What follows the arrays."""
    return path.read_bytes()[1024 + 3 * 4 * TINY.num_parameters // 2 :]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_checkpoint_of_another_world_size_is_refused(data, losses, kind):
    with pytest.raises(ValueError, match=r"expected rank 0 of 1 processes; found rank 0 of 2"):
        make(data, kind, data / f"{kind}_moved")


def test_a_process_that_dies_ends_the_others(data):
    command = [
        *TORCHRUN,
        "-m",
        "cukern",
        "gpt2",
        "train",
        "--device",
        "cpu",
        "-e",
        "small",
        "-b",
        "2",
        "-t",
        "8",
        "-x",
        "100000",
        "-v",
        "0",
    ]
    command += ["-s", "0", "-i", str(data / "train_*.bin"), "-j", str(data / "val_*.bin")]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            while not (line := run.stdout.readline()).startswith("step "):
                assert line, "ended before the first step"
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            (victim,) = [pid for pid in children if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()]
            start = time.perf_counter()
            os.kill(int(victim), signal.SIGKILL)
            rest, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode != 0 and time.perf_counter() - start < 60
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", rest), rest[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))


def test_a_step_of_two_processes_is_timed():
    sizes = ["-e", "small", "-b", "2", "-t", "16", "-x", "2"]
    command = [*TORCHRUN, "-m", "cukern", "gpt2", "bench", *sizes, "--compile", "no", "--device", "cpu"]
    done = subprocess.run([*command, "--no-eager"], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "B=4 T=16" in done.stdout and done.stdout.count("cukern 2 processes") == 1
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert refused.returncode and "expected --compile no and --no-eager under torchrun; found ['torch']" in refused.stderr
