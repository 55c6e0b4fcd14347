"""llm.c's model, debug-state and optimizer-state files against bytes from the specification; refusals; full
disks, kills; Hugging Face."""

import builtins
import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpt2_files import (
    CONFIG,
    SHAPES,
    C,
    Killed,
    L,
    T,
    V,
    full_disk,
    header,
    kill_before_rename,
    raw,
    raws,
    tensors,
)
from helpers import ROOT, TREE

from cukern.gpt2 import checkpoint
from cukern.gpt2.checkpoint import (
    Config,
    DebugState,
    State,
    latest_step,
    read_debug_state,
    read_model,
    read_state,
    write_debug_state,
    write_model,
    write_state,
)
from cukern.gpt2.data import DataLoader, LoaderState, Mt19937, write_shard
from cukern.gpt2.hugging_face import read_hugging_face, write_hugging_face


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def refused(path, data, message, read):
    path.write_bytes(data)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {message}"), error.value


# ---- sizes


def test_shapes_and_sizes_of_124m():
    config = Config()
    assert config.padded_vocab_size == 50304 and config.num_parameters == 124_475_904
    offset, offsets = 1024, {}
    for name, shape in config.shapes.items():
        offsets[name] = offset
        offset += 4 * int(np.prod(shape))
    assert offset == 497_904_640
    assert offsets == {  # section 2.1
        "wte": 1024,
        "wpe": 154_534_912,
        "ln1w": 157_680_640,
        "ln1b": 157_717_504,
        "qkvw": 157_754_368,
        "qkvb": 242_689_024,
        "attprojw": 242_799_616,
        "attprojb": 271_111_168,
        "ln2w": 271_148_032,
        "ln2b": 271_184_896,
        "fcw": 271_221_760,
        "fcb": 384_467_968,
        "fcprojw": 384_615_424,
        "fcprojb": 497_861_632,
        "lnfw": 497_898_496,
        "lnfb": 497_901_568,
    }
    assert tuple(CONFIG.shapes.items()) == SHAPES


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0}, "expected sizes of at least 1"),
        ({"vocab_size": -5}, "expected sizes of at least 1"),
        ({"channels": 770}, "expected channels that are a multiple of num_heads"),
        ({"padded_vocab_size": 50256}, "expected a padded_vocab_size of at least vocab_size"),
    ],
)
def test_refused_sizes(sizes, message):
    with pytest.raises(
        ValueError, match=f"{message}; found Config.*{next(iter(sizes))}={next(iter(sizes.values()))}"
    ):
        Config(**sizes)


# ---- model

SLOTS = (T, V, L, 2, C, 256)


@pytest.mark.parametrize(("dtype", "version"), [(torch.float32, 3), (torch.bfloat16, 5)])
def test_the_bytes_of_a_model(tmp_path, dtype, version):
    parameters = tensors(dtype)
    data = header(20240326, version, *SLOTS) + raws(parameters)
    # the order of the dict does not matter
    write_model(tmp_path / "a", CONFIG, dict(reversed(parameters.items())))
    assert (tmp_path / "a").read_bytes() == data
    config, read = read_model(tmp_path / "a", CONFIG)
    assert config == CONFIG and list(read) == [name for name, _ in SHAPES] and same(read, parameters)
    write_model(tmp_path / "b", config, read)
    assert (tmp_path / "b").read_bytes() == data


def test_strided_tensors_and_parameters(tmp_path):
    parameters = tensors()
    write_model(tmp_path / "a", CONFIG, parameters)
    strided = {
        name: t.mT.contiguous().mT if t.ndim > 1 else torch.stack([t, t], 1)[:, 0]
        for name, t in parameters.items()
    }
    strided = {name: torch.nn.Parameter(tensor) for name, tensor in strided.items()}
    write_model(tmp_path / "b", CONFIG, strided)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


MODEL = header(20240326, 3, *SLOTS) + raws(tensors())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            MODEL[:-1],
            f"expected {len(MODEL)} bytes, for {len(MODEL) // 4 - 256} parameters of torch.float32; found "
            f"{len(MODEL) - 1} bytes",
        ),
        (
            MODEL + b"\0",
            f"expected {len(MODEL)} bytes, for {len(MODEL) // 4 - 256} parameters of torch.float32; found "
            f"{len(MODEL) + 1} bytes",
        ),
        (MODEL[:1024], f"expected {len(MODEL)} bytes"),
        (MODEL[:77], "expected a header of 1024 bytes; found a file of 77 bytes"),
        (b"", "expected a header of 1024 bytes; found a file of 0 bytes"),
        (header(20240327, 3, *SLOTS), "expected magic number 20240326, of a model; found 20240327"),
        (header(20240326, 1, *SLOTS), "expected version 3 or 5 of a model; found version 1"),
        (header(20240326, 5, *SLOTS) + MODEL[1024:], f"expected {len(MODEL) // 2 + 512} bytes"),
        (
            header(20240326, 3, T, V, 2**31 - 1, 2, 2**31 - 2, 256),
            "expected 475368974218589056871463648088 bytes",
        ),  # before memory is allocated
        (
            header(20240326, 3, T, V, 0, 2, C, 256),
            "expected sizes of at least 1 in slots 2 to 7; found [8, 130, 0, 2, 4, 256]",
        ),
        (
            header(20240326, 3, T, V, L, 2, C, 0),
            "expected sizes of at least 1 in slots 2 to 7; found [8, 130, 2, 2, 4, 0]",
        ),
        (
            header(20240326, 3, T, V, L, 3, C, 256),
            "expected channels that are a multiple of num_heads; found Config(",
        ),
    ],
)
def test_refused_models(tmp_path, data, message):
    refused(tmp_path / "file", data, message, read_model)


def test_a_model_of_another_shape(tmp_path):
    other = Config(max_seq_len=8, vocab_size=130, num_layers=3, num_heads=2, channels=4)
    refused(
        tmp_path / "file", MODEL, f"expected {other}; found {CONFIG}", lambda path: read_model(path, other)
    )


def change(name, tensor):
    return {**tensors(), name: tensor}


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (
            change("wpe", torch.zeros(7, C)),
            ValueError,
            r"expected parameter wpe of shape \(8, 4\); found \(7, 4\)",
        ),
        (
            {k: t for k, t in tensors().items() if k != "fcb"},
            ValueError,
            r"expected parameter fcb of shape \(2, 16\); found None",
        ),
        (change("head", torch.zeros(1)), ValueError, r"expected parameter head of shape None; found \(1,\)"),
        (
            change("lnfb", torch.zeros(C, dtype=torch.bfloat16)),
            TypeError,
            "parameter lnfb of torch.float32; found torch.bfloat16",
        ),
        (
            tensors(torch.float16),
            TypeError,
            "parameter wte of torch.float32 or torch.bfloat16; found torch.float16",
        ),
        (
            change("wte", torch.ones(256, C)),
            ValueError,
            "expected zeros in wte from row 130 on; found other values",
        ),
    ],
)
def test_refused_parameters(tmp_path, parameters, error, message):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(error, match=message):
        write_model(tmp_path / "file", CONFIG, parameters)
    assert (tmp_path / "file").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


# ---- debug state


def debug_state():
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, V, (3, 5), generator=generator) for _ in range(2))
    return DebugState(x, y, torch.randn(3, 5, V, generator=generator), 5.25, tensors(seed=2))


def debug_bytes(state):
    return (
        header(20240327, 2, 3, 5)
        + raw(state.x)
        + raw(state.y)
        + raw(state.logits)
        + struct.pack("<f", 5.25)
        + raws(state.gradients)
    )


def test_the_bytes_of_a_debug_state(tmp_path):
    state = debug_state()
    write_debug_state(tmp_path / "a", CONFIG, state)
    assert (tmp_path / "a").read_bytes() == debug_bytes(state)
    read = read_debug_state(tmp_path / "a", CONFIG)
    assert (
        read.x.dtype == read.y.dtype == torch.int64
        and torch.equal(read.x, state.x)
        and torch.equal(read.y, state.y)
    )
    assert (
        torch.equal(read.logits, state.logits) and read.loss == 5.25 and same(read.gradients, state.gradients)
    )
    write_debug_state(tmp_path / "b", CONFIG, read)
    assert (tmp_path / "b").read_bytes() == debug_bytes(state)


def test_a_loss_that_is_rounded_to_float32(tmp_path):
    write_debug_state(tmp_path / "a", CONFIG, replace(debug_state(), loss=5.270007133483887))
    read = read_debug_state(tmp_path / "a", CONFIG)
    assert read.loss == np.float32(5.270007133483887)
    write_debug_state(tmp_path / "b", CONFIG, read)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


DEBUG = debug_bytes(debug_state())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DEBUG[:-4], f"expected {len(DEBUG)} bytes, for B=3, T=5 and Config("),
        (DEBUG + b"\0" * 4, f"expected {len(DEBUG)} bytes, for B=3, T=5 and Config("),
        (DEBUG[:1000], "expected a header of 1024 bytes; found a file of 1000 bytes"),
        (header(20240327, 2, 4, 5) + DEBUG[1024:], "expected "),
        (
            header(20240326, 2, 3, 5) + DEBUG[1024:],
            "expected magic number 20240327, of a debug state; found 20240326",
        ),
        (header(20240327, 1, 3, 5) + DEBUG[1024:], "expected version 2 of a debug state; found version 1"),
        (header(20240327, 2, 0, 5) + DEBUG[1024:], "expected B and T of at least 1; found B=0, T=5"),
        (header(20240327, 2, 3, -5) + DEBUG[1024:], "expected B and T of at least 1; found B=3, T=-5"),
    ],
)
def test_refused_debug_states(tmp_path, data, message):
    refused(tmp_path / "file", data, message, lambda path: read_debug_state(path, CONFIG))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"y": torch.zeros(3, 4)},
            ValueError,
            r"y and logits of shapes \(3, 5\) and \(3, 5, 130\); found \(3, 4\)",
        ),
        ({"logits": torch.zeros(3, 5, 256)}, ValueError, r"found \(3, 5\) and \(3, 5, 256\)"),
        (
            {"logits": torch.zeros(3, 5, V).double()},
            TypeError,
            "logits of torch.float32; found torch.float64",
        ),
        (
            {"gradients": tensors(torch.bfloat16)},
            TypeError,
            "gradient wte of torch.float32; found torch.bfloat16",
        ),
    ],
)
def test_refused_parts_of_a_debug_state(tmp_path, changed, error, message):
    with pytest.raises(error, match=message):
        write_debug_state(tmp_path / "file", CONFIG, replace(debug_state(), **changed))
    assert list(tmp_path.iterdir()) == []


# ---- optimizer state

ORDERS = (np.array([1, 0], np.int32), np.array([2, 0, 3, 1], np.int32))


def make_state(master=True, shuffle=True, **changed):
    loader = LoaderState(1, 3, (*ORDERS, Mt19937(42).to_bytes()) if shuffle else None)
    values = dict(
        step=20,
        m=tensors(seed=3),
        v=tensors(seed=4),
        loader=loader,
        master=tensors(seed=5) if master else None,
    )
    return State(**{**values, "rng_state": 2**64 - 3, "rng_state_last_update": 1337, **changed})


def state_bytes(master, shuffle, rank=0, processes=1):
    """Section 2.6, one field at its byte after the other."""
    head = bytearray(1024)
    for byte, code, value in (
        (0, "i", 20240527),
        (4, "i", 1),
        (8, "i", processes),
        (12, "i", rank),
        (16, "i", master),
        (20, "i", shuffle),
        (40, "i", 20),
        (80, "Q", 2**64 - 3),
        (88, "Q", 1337),
        (120, "Q", 1),
        (128, "Q", 3),
    ):
        struct.pack_into(f"<{code}", head, byte, value)
    data = (
        bytes(head)
        + raws(tensors(seed=3))
        + raws(tensors(seed=4))
        + (raws(tensors(seed=5)) if master else b"")
    )
    return data + (tail() if shuffle else b"")


def tail(shards=(1, 0), samples=(2, 0, 3, 1), seed=0, left=1):
    state = np.random.RandomState(42).get_state()[1].tolist()
    data = struct.pack(f"<Q{len(shards)}i", len(shards), *shards) + struct.pack(
        f"<Q{len(samples)}i", len(samples), *samples
    )
    return data + struct.pack("<QiI624I2I", seed, left, 0, *state, 0, 0x9908B0DF)


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rank", "processes"), [(0, 1), (2, 4)])
def test_the_bytes_of_an_optimizer_state(tmp_path, master, shuffle, rank, processes):
    state = make_state(master, shuffle, rank=rank, num_processes=processes)
    data = state_bytes(master, shuffle, rank, processes)
    write_state(tmp_path / "a", CONFIG, state)
    assert (tmp_path / "a").read_bytes() == data
    read = read_state(tmp_path / "a", CONFIG, rank=rank, num_processes=processes)
    assert (read.step, read.rng_state, read.rng_state_last_update) == (20, 2**64 - 3, 1337)
    assert (read.rank, read.num_processes) == (rank, processes)
    assert (
        same(read.m, state.m)
        and same(read.v, state.v)
        and (same(read.master, state.master) if master else read.master is None)
    )
    assert (read.loader.shard, read.loader.sample) == (1, 3)
    if shuffle:
        assert all(
            np.array_equal(a, b) for a, b in zip(read.loader.shuffle, state.loader.shuffle, strict=True)
        )
    else:
        assert read.loader.shuffle is None
    write_state(tmp_path / "b", CONFIG, read)
    assert (tmp_path / "b").read_bytes() == data


def test_size_of_124m_with_one_shard_of_74_samples():
    """The example of section 2.6, in bytes."""
    assert (
        1024 + 3 * 4 * Config().num_parameters + 8 + 4 + 8 + 4 * 74 + Mt19937.STRUCT.itemsize == 1_493_714_708
    )


def test_the_seed_that_llmc_never_sets_is_ignored(tmp_path):
    (tmp_path / "a").write_bytes(
        state_bytes(False, False)[:20] + b"\1" + state_bytes(False, False)[21:] + tail(seed=2**63 + 12345)
    )
    write_state(tmp_path / "b", CONFIG, read_state(tmp_path / "a", CONFIG))
    assert (tmp_path / "b").read_bytes() == state_bytes(False, True)


def test_a_loader_resumes_from_a_file(tmp_path):
    for i in range(3):
        write_shard(tmp_path / f"text_{i}.bin", np.random.default_rng(i).integers(0, V, 50 + 9 * i))
    loader, other = (DataLoader(tmp_path / "text_*.bin", 1, 8, shuffle=True) for _ in range(2))
    for _ in range(9):
        loader.next_batch()
    write_state(tmp_path / "state", CONFIG, make_state(loader=loader.state()))
    other.resume(read_state(tmp_path / "state", CONFIG).loader)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(loader.next_batch(), other.next_batch(), strict=True))


PLAIN, SHUFFLED = state_bytes(True, False), state_bytes(True, True)
ARRAYS = PLAIN[:20] + b"\1" + PLAIN[21:]  # of a loader that shuffles, without the end


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PLAIN[:-1], f"expected {len(PLAIN)} bytes, for 3 arrays of Config("),
        (PLAIN + b"\0", f"expected {len(PLAIN)} bytes, for 3 arrays of Config("),
        (
            state_bytes(False, False)[:16] + b"\1" + state_bytes(False, False)[17:],
            f"expected {len(PLAIN)} bytes, for 3 arrays",
        ),
        (PLAIN[:500], "expected a header of 1024 bytes; found a file of 500 bytes"),
        (
            header(20240326, 1) + PLAIN[1024:],
            "expected magic number 20240527, of an optimizer state; found 20240326",
        ),
        (header(20240527, 2) + PLAIN[1024:], "expected version 1 of an optimizer state; found version 2"),
        (state_bytes(True, False, 1, 2), "expected rank 0 of 1 processes; found rank 1 of 2"),
        (
            SHUFFLED[:-1],
            f"expected {len(SHUFFLED)} bytes, for 2 shards and 4 samples; found {len(SHUFFLED) - 1} bytes",
        ),
        (
            SHUFFLED + b"\0",
            f"expected {len(SHUFFLED)} bytes, for 2 shards and 4 samples; found {len(SHUFFLED) + 1} bytes",
        ),
        (SHUFFLED[: len(PLAIN) // 2], "expected "),  # in the middle of the arrays
        (ARRAYS, f"expected 8 more bytes at byte {len(ARRAYS)}, for a tensor of shape (); found 0 bytes"),
        (
            ARRAYS + struct.pack("<Q", 2**62),
            f"expected {2**64} more bytes at byte {len(ARRAYS) + 8}, for a tensor of shape ({2**62},)",
        ),
        (
            ARRAYS + struct.pack("<Q", 0) + bytes(3000),
            f"expected a number of shards before byte {len(ARRAYS) + 8}; found 0",
        ),
        (
            ARRAYS + tail(shards=(0, 0)),
            f"expected a permutation of 2 shards before byte {len(ARRAYS) + 16}; found other numbers",
        ),
        (
            ARRAYS + tail(samples=(1, 2)),
            f"expected a permutation of 2 samples before byte {len(ARRAYS) + 32}; found other numbers",
        ),
        (ARRAYS + tail(left=2), "expected left + next = 625 in the state of MT19937; found 2 + 0"),
        (ARRAYS + tail()[:-1] + b"\0", "expected the constants (0, 2567483615) of MT19937"),
    ],
)
def test_refused_optimizer_states(tmp_path, data, message):
    refused(tmp_path / "file", data, message, lambda path: read_state(path, CONFIG))


@pytest.mark.parametrize("name", ["m", "v", "master"])
def test_refused_arrays(tmp_path, name):
    with pytest.raises(ValueError, match=rf"expected {name} lnfb of shape \(4,\); found \(5,\)"):
        write_state(
            tmp_path / "file", CONFIG, replace(make_state(), **{name: change("lnfb", torch.zeros(5))})
        )
    with pytest.raises(TypeError, match=f"expected {name} wte of torch.float32; found torch.bfloat16"):
        write_state(tmp_path / "file", CONFIG, replace(make_state(), **{name: tensors(torch.bfloat16)}))
    assert list(tmp_path.iterdir()) == []


# ---- the last good file survives

WRITERS = {
    "model": lambda path, seed: write_model(path, CONFIG, tensors(seed=seed)),
    "debug": lambda path, seed: write_debug_state(
        path, CONFIG, replace(debug_state(), gradients=tensors(seed=seed))
    ),
    "state": lambda path, seed: write_state(path, CONFIG, make_state(m=tensors(seed=seed))),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("room", [0, 1000, 1024, 5000])
def test_full_disk(tmp_path, monkeypatch, write, room):
    write(tmp_path / "file", 7)
    old = (tmp_path / "file").read_bytes()
    full_disk(monkeypatch, room)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", 8)
    assert (tmp_path / "file").read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_full_disk_that_only_the_flush_reports(tmp_path, monkeypatch):
    """Network file systems report it at fsync; the file must not have been renamed before."""
    write_model(tmp_path / "file", CONFIG, tensors(seed=7))
    old = (tmp_path / "file").read_bytes()

    def fsync(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_model(tmp_path / "file", CONFIG, tensors(seed=8))
    assert (tmp_path / "file").read_bytes() == old and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_kill_between_write_and_rename(tmp_path, monkeypatch, write):
    write(tmp_path / "file", 8)
    new = (tmp_path / "file").read_bytes()
    write(tmp_path / "file", 7)
    old = (tmp_path / "file").read_bytes()
    assert old != new
    with monkeypatch.context() as killed, pytest.raises(Killed):
        kill_before_rename(killed)
        write(tmp_path / "file", 8)
    assert (tmp_path / "file").read_bytes() == old
    assert (tmp_path / "file.tmp").read_bytes() == new  # complete before it is renamed
    write(tmp_path / "file", 8)
    assert (tmp_path / "file").read_bytes() == new and len(list(tmp_path.iterdir())) == 1


REWRITE = """
import sys
sys.path[:0] = sys.argv[2:]
from gpt2_files import CONFIG, tensors
from cukern.gpt2.checkpoint import write_model
choices = tensors(seed=1), tensors(seed=2)
while True:
    for parameters in choices:
        write_model(sys.argv[1], CONFIG, parameters)
        print(flush=True)
"""


def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path):
    path, folders = tmp_path / "model", (ROOT, TREE / "tests/gpt2")
    with subprocess.Popen(
        [sys.executable, "-c", REWRITE, str(path), *map(str, folders)], stdout=subprocess.PIPE
    ) as process:
        for _ in range(20):
            process.stdout.readline()
        process.kill()
    _, parameters = read_model(path)
    assert same(parameters, tensors(seed=1)) or same(parameters, tensors(seed=2))


# ---- the checkpoints of a run


def test_checkpoints_of_a_run(tmp_path):
    folder = tmp_path / "run"
    assert latest_step(folder) is None
    for step in (9, 10, 100000000):
        checkpoint.save(folder, CONFIG, tensors(seed=step % 97), make_state(step=step))
    assert latest_step(folder) == 100000000
    names = sorted(path.name for path in folder.iterdir())
    assert {"model_00000010.bin", "state_00000010_00000.bin", "DONE_00000010"} <= set(names) and len(
        names
    ) == 9
    (folder / "DONE_x").touch()
    checkpoint.delete(folder, 100000000)
    assert latest_step(folder) == 10
    model, state, _ = checkpoint.paths(folder, 10)
    assert same(read_model(model)[1], tensors(seed=10)) and read_state(state, CONFIG).step == 10
    checkpoint.delete(folder, 10)
    assert latest_step(folder) == 9 and len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_checkpoint_that_is_not_complete_does_not_count(tmp_path, monkeypatch, writes):
    """A kill after 0, 1 or 2 of its files, also when a complete checkpoint of the same step is being
    replaced."""
    checkpoint.save(tmp_path, CONFIG, tensors(), make_state(step=10))
    checkpoint.save(tmp_path, CONFIG, tensors(), make_state(step=20))
    left = [writes]

    def opened(path, mode):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return builtins.open(path, mode)

    def touch(_):
        raise Killed

    monkeypatch.setattr("cukern.gpt2.files.open", opened, raising=False)
    monkeypatch.setattr(checkpoint.Path, "touch", touch)
    with pytest.raises(Killed):
        checkpoint.save(tmp_path, CONFIG, tensors(seed=1), make_state(step=20))
    assert latest_step(tmp_path) == 10
    model, state, _ = checkpoint.paths(tmp_path, 10)
    assert same(read_model(model)[1], tensors()) and read_state(state, CONFIG).step == 10


def test_delete_removes_the_mark_first(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, CONFIG, tensors(), make_state(step=10))
    removed = []
    monkeypatch.setattr(checkpoint.Path, "unlink", lambda path, missing_ok: removed.append(path.name))
    checkpoint.delete(tmp_path, 10)
    assert removed[0] == "DONE_00000010" and len(removed) == 3


# ---- Hugging Face


def hf_tensors(parameters):
    """Hugging Face's names and shapes, written out: Conv1D weights are (in, out)."""
    made = {"wte.weight": parameters["wte"][:V], "wpe.weight": parameters["wpe"]}
    for i in range(L):
        made |= {
            f"h.{i}.ln_1.weight": parameters["ln1w"][i],
            f"h.{i}.ln_1.bias": parameters["ln1b"][i],
            f"h.{i}.attn.c_attn.weight": parameters["qkvw"][i].T,
            f"h.{i}.attn.c_attn.bias": parameters["qkvb"][i],
            f"h.{i}.attn.c_proj.weight": parameters["attprojw"][i].T,
            f"h.{i}.attn.c_proj.bias": parameters["attprojb"][i],
            f"h.{i}.ln_2.weight": parameters["ln2w"][i],
            f"h.{i}.ln_2.bias": parameters["ln2b"][i],
            f"h.{i}.mlp.c_fc.weight": parameters["fcw"][i].T,
            f"h.{i}.mlp.c_fc.bias": parameters["fcb"][i],
            f"h.{i}.mlp.c_proj.weight": parameters["fcprojw"][i].T,
            f"h.{i}.mlp.c_proj.bias": parameters["fcprojb"][i],
        }
    made |= {"ln_f.weight": parameters["lnfw"], "ln_f.bias": parameters["lnfb"]}
    return {name: tensor.contiguous() for name, tensor in made.items()}


HF_CONFIG = {
    "model_type": "gpt2",
    "n_positions": T,
    "vocab_size": V,
    "n_layer": L,
    "n_head": 2,
    "n_embd": C,
    "n_ctx": T,
}


def write_folder(folder, made, config=HF_CONFIG):
    library = pytest.importorskip(
        "safetensors.torch", reason="safetensors, of the extra test, is not installed"
    )
    library.save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_read_hugging_face(tmp_path, dtype, prefix):
    """The published file has no prefix and holds the causal masks; files of transformers have a prefix, and
    may hold the tied head."""
    made = hf_tensors(tensors(dtype))
    masks = {"h.0.attn.bias": torch.ones(1, 1, T, T), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    head = {"lm_head.weight": made["wte.weight"].clone()} if prefix else {}
    write_folder(tmp_path, {prefix + name: tensor for name, tensor in (made | masks).items()} | head)
    config, parameters = read_hugging_face(tmp_path)
    assert config == CONFIG and same(parameters, tensors(dtype))
    write_model(tmp_path / "model.bin", config, parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_hugging_face(tmp_path, dtype):
    library = pytest.importorskip(
        "safetensors.torch", reason="safetensors, of the extra test, is not installed"
    )
    write_hugging_face(tmp_path / "new", CONFIG, tensors(dtype))
    found = library.load_file(tmp_path / "new/model.safetensors")
    assert same(found, {f"transformer.{name}": tensor for name, tensor in hf_tensors(tensors(dtype)).items()})
    entries = json.loads((tmp_path / "new/config.json").read_text())
    assert {key: entries[key] for key in HF_CONFIG if key != "n_ctx"} == {
        k: v for k, v in HF_CONFIG.items() if k != "n_ctx"
    }
    assert (
        entries["layer_norm_epsilon"] == 1e-5
        and entries["activation_function"] == "gelu_new"
        and entries["tie_word_embeddings"] is True
    )
    config, parameters = read_hugging_face(tmp_path / "new")
    assert config == CONFIG and same(parameters, tensors(dtype))


@pytest.mark.parametrize(
    ("changed", "config", "message"),
    [
        ({"wpe.weight": None}, {}, r"wpe.weight: \(\(8, 4\), torch.float32\); found None"),
        ({"wte.weight": None}, {}, r"wte.weight: \(\(130, 4\), torch.float32\); found None"),
        (
            {"h.1.mlp.c_fc.weight": torch.zeros(16, 4)},
            {},
            r"h.1.mlp.c_fc.weight: \(\(4, 16\), .*found \(\(16, 4\)",
        ),
        (
            {"ln_f.bias": torch.zeros(4).half()},
            {},
            r"ln_f.bias: \(\(4,\), torch.float32\); found \(\(4,\), torch.float16\)",
        ),
        ({"h.2.ln_1.bias": torch.zeros(4)}, {}, r"h.2.ln_1.bias: None; found"),
        (
            {"lm_head.weight": torch.zeros(130, 4)},
            {},
            "lm_head.weight equal to wte.weight; found other values",
        ),
        ({}, {"activation_function": "relu"}, "activation_function = 'gelu_new'; found 'relu'"),
        ({}, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-05; found 1e-06"),
        (
            {},
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = False; found True",
        ),
        ({}, {"tie_word_embeddings": False}, "tie_word_embeddings = True; found False"),
        ({}, {"model_type": "llama"}, "model_type 'gpt2'; found 'llama'"),
        ({}, {"n_embd": None}, "entries n_positions, vocab_size, n_layer, n_head, n_embd; found "),
    ],
)
def test_refused_hugging_face(tmp_path, changed, config, message):
    drop = lambda entries: {key: value for key, value in entries.items() if value is not None}  # noqa: E731
    write_folder(tmp_path, drop(hf_tensors(tensors()) | changed), drop(HF_CONFIG | config))
    with pytest.raises(ValueError, match=rf"(model.safetensors|config.json): expected {message}"):
        read_hugging_face(tmp_path)


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (
        lambda: read_hugging_face(tmp_path),
        lambda: write_hugging_face(tmp_path, CONFIG, tensors()),
    ):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
