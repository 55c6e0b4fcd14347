"""Token shards against bytes from the specification; the loader against a model of llm.c's in plain Python;
tokenisation; refusals."""

import itertools
import struct
import sys

import numpy as np
import pytest
import torch
from gpt2_files import Killed, full_disk, header, kill_before_rename

from cukern.gpt2.data import (
    DataLoader,
    LoaderState,
    Mt19937,
    read_shard,
    shard_length,
    tokenize,
    write_shard,
    write_shards,
)

# ---- shards


def shard_bytes(tokens):
    return header(20240520, 1, len(tokens)) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_the_bytes_of_a_shard(tmp_path):
    tokens = [0, 1, 50256, 65535, 256]
    write_shard(tmp_path / "a", np.array(tokens))
    assert (tmp_path / "a").read_bytes() == shard_bytes(tokens)
    assert shard_length(tmp_path / "a") == 5
    read = read_shard(tmp_path / "a")
    assert read.dtype == np.uint16 and read.tolist() == tokens
    write_shard(tmp_path / "b", read)
    assert (tmp_path / "b").read_bytes() == shard_bytes(tokens)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (shard_bytes([1, 2])[:-1], "expected 1028 bytes, for 2 tokens; found 1027 bytes"),
        (shard_bytes([1, 2]) + b"\0", "expected 1028 bytes, for 2 tokens; found 1029 bytes"),
        (shard_bytes([1, 2])[:1023], "expected a header of 1024 bytes; found a file of 1023 bytes"),
        (header(20240521, 1, 0), "expected magic number 20240520, of a token shard; found 20240521"),
        (header(20240801, 7, 0), "expected magic number 20240520, of a token shard; found 20240801"),
        (header(20240520, 2, 0), "expected version 1 of a token shard; found version 2"),
        (header(20240520, 1, -1), "expected 1022 bytes, for -1 tokens; found 1024 bytes"),
    ],
)
@pytest.mark.parametrize("read", [read_shard, shard_length, lambda path: DataLoader(path, 1, 1)])
def test_refused_shards(tmp_path, content, message, read):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read(tmp_path / "file")
    assert str(error.value) == f"{tmp_path / 'file'}: {message}"


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.array([0, 65536]), ValueError, "expected tokens from 0 to 65535; found 0 to 65536"),
        (np.array([-1, 5]), ValueError, "expected tokens from 0 to 65535; found -1 to 5"),
        (np.array([0.5]), TypeError, "expected tokens of an integer dtype; found float64"),
        (np.array([], np.uint16), ValueError, "expected 1 to 1073741311 tokens .*; found 0"),
        (
            np.broadcast_to(np.uint16(1), 1073741312),
            ValueError,
            "expected 1 to 1073741311 tokens .*; found 1073741312",
        ),
    ],
)
def test_refused_tokens(tmp_path, tokens, error, message):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(error, match=message):
        write_shard(tmp_path / "file", tokens)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_full_disk_keeps_the_old_shard(tmp_path, monkeypatch):
    write_shard(tmp_path / "a", np.arange(100))
    full_disk(monkeypatch, 1100)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "a", np.arange(50, 150))
    assert read_shard(tmp_path / "a").tolist() == list(range(100))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_kill_keeps_the_old_shard_and_the_next_write_succeeds(tmp_path, monkeypatch):
    write_shard(tmp_path / "a", np.arange(100))
    with monkeypatch.context() as killed, pytest.raises(Killed):
        kill_before_rename(killed)
        write_shard(tmp_path / "a", np.arange(50, 150))
    assert read_shard(tmp_path / "a").tolist() == list(range(100))
    write_shard(tmp_path / "a", np.arange(50, 150))
    assert read_shard(tmp_path / "a").tolist() == list(range(50, 150))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# ---- random numbers


class PlainMt:
    """The textbook MT19937, with llm.c's fields left and next."""

    def __init__(self, seed):
        self.state = [seed]
        for j in range(1, 624):
            last = self.state[-1]
            self.state.append((1812433253 * (last ^ (last >> 30)) + j) & 0xFFFFFFFF)
        self.left, self.next = 1, 0

    def draw(self):
        self.left -= 1
        if self.left <= 0:
            for k in range(624):
                y = (self.state[k] & 0x80000000) | (self.state[(k + 1) % 624] & 0x7FFFFFFF)
                self.state[k] = self.state[(k + 397) % 624] ^ (y >> 1) ^ (0x9908B0DF if y & 1 else 0)
            self.left, self.next = 624, 0
        y = self.state[self.next]
        self.next += 1
        y ^= y >> 11
        y ^= (y << 7) & 0x9D2C5680
        y ^= (y << 15) & 0xEFC60000
        return y ^ (y >> 18)

    def permute(self, array):
        for i in range(len(array) - 1, 0, -1):
            j = self.draw() % (i + 1)
            array[i], array[j] = array[j], array[i]

    def struct(self):
        return struct.pack("<QiI624I2I", 0, self.left, self.next, *self.state, 0, 0x9908B0DF)


def test_plain_mt_is_the_published_one():
    rng = PlainMt(137)
    assert [rng.draw() for _ in range(3)] == [4053805790, 2173880614, 380293709]


@pytest.mark.parametrize(
    "counts", [(), (1,), (2,), (75, 2, 1, 300), (624,), (625,), (626,), (1249,), (3000, 7)]
)
def test_permutations_and_struct_of_mt19937(counts):
    ours, plain = Mt19937(42), PlainMt(42)
    for count in counts:
        a, b = np.arange(count, dtype=np.int32), list(range(count))
        ours.permute(a)
        plain.permute(b)
        assert a.tolist() == b
    assert ours.to_bytes() == plain.struct() and len(plain.struct()) == 2520
    restored = Mt19937.from_bytes(plain.struct())
    assert restored.to_bytes() == plain.struct()
    a, b = np.arange(700), list(range(700))
    restored.permute(a)
    plain.permute(b)
    assert a.tolist() == b and restored.to_bytes() == plain.struct()


def test_refused_mt19937():
    for fields, message in (
        ((5, 7, *[1] * 624, 0, 0x9908B0DF), "left \\+ next = 625 .* 5 \\+ 7"),
        ((625, 0, *[1] * 624, 0, 0x9908B0DF), "left \\+ next = 625 .* 625 \\+ 0"),
        ((1, 0, *[1] * 624, 0, 1), "constants"),
    ):
        with pytest.raises(ValueError, match=message):
            Mt19937.from_bytes(struct.pack("<QiI624I2I", 0, *fields))


# ---- the loader


def llmc_batches(shards, B, T, rank, W, shuffle):
    """Section 3 of the specification as a generator: the token lists of x and y, for ever."""
    order, rng = list(range(len(shards))), PlainMt(42 + rank)
    while True:
        if shuffle:
            rng.permute(order)
        for shard in order:
            tokens = shards[shard]
            samples = list(range((2 * len(tokens) - 2) // (2 * W * B * T)))
            if shuffle:
                rng.permute(samples)
            for i in samples:
                start = i * W * B * T + rank * B * T
                yield tokens[start : start + B * T], tokens[start + 1 : start + B * T + 1]


def write_files(folder, lengths, seed=0):
    """Shards of random tokens, written in an order that is not the sorted one."""
    rng = np.random.default_rng(seed)
    shards = [rng.integers(0, 60000, length).tolist() for length in lengths]
    for i in reversed(range(len(shards))):
        (folder / f"text_{i:06}.bin").write_bytes(shard_bytes(shards[i]))
    return shards, folder / "text_*.bin"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rank", "W"), [(0, 1), (0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("lengths", [(100,), (73, 200, 97, 310), (37, 37), (36 * 7 + 1, 36 * 7)])
def test_order_of_batches(tmp_path, shuffle, rank, W, lengths):
    shards, pattern = write_files(tmp_path, [max(n, 12 * W + 1) for n in lengths])
    loader = DataLoader(pattern, 3, 4, rank=rank, num_processes=W, shuffle=shuffle)
    assert loader.num_tokens == sum(map(len, shards))
    for x, y in itertools.islice(llmc_batches(shards, 3, 4, rank, W, shuffle), 120):
        bx, by = loader.next_batch()
        assert bx.dtype == by.dtype == torch.int64 and bx.shape == by.shape == (3, 4)
        assert (bx.flatten().tolist(), by.flatten().tolist()) == (x, y)


def test_sizes_of_tiny_shakespeare(tmp_path):
    """An epoch has 74 training samples. Validation has 7 samples, and its eighth batch repeats the first."""
    _, pattern = write_files(tmp_path, [305_260])
    assert DataLoader(pattern, 4, 1024, shuffle=True).num_samples == 74
    (tmp_path / "text_000000.bin").unlink()
    _, pattern = write_files(tmp_path, [32_768])
    loader = DataLoader(pattern, 4, 1024)
    assert loader.num_samples == 7
    batches = [loader.next_batch()[0] for _ in range(8)]
    assert torch.equal(batches[7], batches[0])
    assert not any(torch.equal(batches[0], other) for other in batches[1:7])


def test_reset_goes_on_with_the_permutation(tmp_path):
    """reset() in the middle of an epoch permutes the permuted list of shards, with the next draws."""
    shards, pattern = write_files(tmp_path, [30, 30, 30, 30, 30])
    loader = DataLoader(pattern, 1, 7, shuffle=True)
    for _ in range(3):
        loader.next_batch()
    loader.reset()
    order, rng = list(range(5)), PlainMt(42)
    rng.permute(order)
    rng.permute(list(range(4)))
    rng.permute(order)
    samples = list(range(4))
    rng.permute(samples)
    assert loader.next_batch()[0].flatten().tolist() == shards[order[0]][samples[0] * 7 : samples[0] * 7 + 7]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 11, 12, 13, 40])
def test_resume(tmp_path, shuffle, taken):
    _, pattern = write_files(tmp_path, [30, 44, 37])
    first, second = (DataLoader(pattern, 1, 8, shuffle=shuffle) for _ in range(2))
    for _ in range(taken):
        first.next_batch()
    state = first.state()
    expected = [first.next_batch() for _ in range(40)]
    second.next_batch()
    second.resume(state)
    assert second.num_samples == second._num_samples[second._shard_order[state.shard]]
    for (x, y), (rx, ry) in zip(expected, (second.next_batch() for _ in range(40)), strict=True):
        assert torch.equal(x, rx) and torch.equal(y, ry)
    assert (state.shuffle is not None) == shuffle


def test_a_state_does_not_change_with_its_loader(tmp_path):
    _, pattern = write_files(tmp_path, [90, 90])
    loader = DataLoader(pattern, 1, 8, shuffle=True)
    state = loader.state()
    before = [part.copy() for part in state.shuffle[:2]]
    other = DataLoader(pattern, 1, 8, shuffle=True)
    other.resume(state)
    for _ in range(60):
        loader.next_batch()
        other.next_batch()
    assert all(np.array_equal(a, b) for a, b in zip(before, state.shuffle, strict=False))


def test_refused_states(tmp_path):
    _, pattern = write_files(tmp_path, [30, 44])
    loader, plain = DataLoader(pattern, 1, 8, shuffle=True), DataLoader(pattern, 1, 8)
    good = loader.state()
    order, samples, rng = good.shuffle
    wrong = (
        (plain, good, "shuffle=False; found shuffle=True"),
        (loader, plain.state(), "shuffle=True; found shuffle=False"),
        (loader, LoaderState(0, 0, (np.arange(3), samples, rng)), "a loader state of 2 shards; found 3"),
        (loader, LoaderState(2, 0, good.shuffle), "a shard from 0 to 1; found 2"),
        (
            loader,
            LoaderState(0, 0, (order, np.arange(9), rng)),
            f"a loader state of {len(samples)} samples; found 9",
        ),
        (loader, LoaderState(0, 9, good.shuffle), f"a sample from 0 to {len(samples)}; found 9"),
        (plain, LoaderState(0, 4), "a sample from 0 to 3; found 4"),
        (loader, LoaderState(0, 0, (order, samples, bytes(2520))), "constants"),
    )
    for target, state, message in wrong:
        before = target.state()
        with pytest.raises(ValueError, match=message):
            target.resume(state)
        assert repr(target.state()) == repr(before)


def test_refused_loaders(tmp_path):
    _, pattern = write_files(tmp_path, [24, 25])
    with pytest.raises(
        ValueError,
        match=r"text_000000.bin: expected at least num_processes \* B \* T \+ 1 = 25 tokens; found 24",
    ):
        DataLoader(pattern, 3, 4, num_processes=2)
    assert DataLoader(tmp_path / "text_000001.bin", 3, 4, num_processes=2).num_samples == 1
    with pytest.raises(FileNotFoundError, match=r"expected files that match '.*nothing.*'; found none"):
        DataLoader(tmp_path / "nothing*", 3, 4)
    for sizes in ((0, 4), (3, 0), (-1, 4)):
        with pytest.raises(ValueError, match="expected B and T of at least 1"):
            DataLoader(pattern, *sizes)
    for rank, processes in ((1, 1), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="expected 0 <= rank < num_processes"):
            DataLoader(pattern, 3, 4, rank=rank, num_processes=processes)


def test_refused_tokens_of_a_batch(tmp_path):
    (tmp_path / "a").write_bytes(shard_bytes([1] * 11 + [300] + [1] * 9))
    loader = DataLoader(tmp_path / "a", 1, 5, vocab_size=300)
    loader.next_batch()
    loader.next_batch()
    with pytest.raises(
        ValueError, match="a: expected tokens below the vocabulary size 300; found 300 at token 11"
    ):
        loader.next_batch()
    assert DataLoader(tmp_path / "a", 4, 5, vocab_size=301).next_batch()[0].max() == 300


def test_a_file_cut_while_it_is_read(tmp_path):
    (tmp_path / "a").write_bytes(shard_bytes([1] * 11))
    loader = DataLoader(tmp_path / "a", 1, 5)
    (tmp_path / "a").write_bytes(shard_bytes([1] * 11)[:-4])
    loader.next_batch()
    with pytest.raises(ValueError, match="expected 6 tokens from token 5 on; found 4: the file was cut"):
        loader.next_batch()


# ---- text


def test_byte_tokens():
    tokens, tokenizer = tokenize(["aé", "", "b"], "bytes")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [0, 97, 0xC3, 0xA9, 0, 0, 98]
    assert tokenizer.decode(tokens) == "\0aé\0\0b" and tokenizer.eot == 0


class FakeTiktoken:
    """Words are tokens: enough to see EOT, the vocabulary and the order."""

    n_vocab = 50257

    def get_encoding(self, name):
        assert name == "gpt2"
        return self

    def encode_ordinary(self, text):
        return [ord(c) for c in text]

    def decode_single_token_bytes(self, token):
        return b"%d " % token


def test_gpt2_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", FakeTiktoken())
    tokens, tokenizer = tokenize(["ab", "c"], "gpt2")
    assert tokens.dtype == np.uint16 and tokens.tolist() == [50256, 97, 98, 50256, 99]
    assert (
        len(tokenizer.tokens) == 50257
        and tokenizer.eot == 50256
        and tokenizer.decode([5, 50256]) == "5 50256 "
    )


def test_refused_encodings(monkeypatch):
    with pytest.raises(ValueError, match="expected the encoding 'gpt2' or 'bytes'; found 'gpt3'"):
        tokenize(["a"], "gpt3")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ImportError, match="pip install tiktoken"):
        tokenize(["a"], "gpt2")


def test_write_shards(tmp_path):
    tokens = np.arange(1009, dtype=np.uint16)
    paths = write_shards(tmp_path / "new", "text", tokens, shard_tokens=400)
    assert [p.name for p in paths] == ["text_val_000000.bin"] + [f"text_train_{i:06}.bin" for i in (1, 2)]
    parts = [read_shard(path).tolist() for path in paths]
    assert parts == [list(range(909, 1009)), list(range(400)), list(range(400, 909))]
    exact = write_shards(tmp_path / "exact", "text", tokens[:90], val_first=10, shard_tokens=40)
    assert [len(read_shard(path)) for path in exact] == [10, 40, 40]
    val, train = (read_shard(path).tolist() for path in write_shards(tmp_path, "text", tokens, val_first=32))
    assert (val, train) == (list(range(32)), list(range(32, 1009)))
    for arguments, message in (
        ({"val_first": 0}, "val_first from 1 to 1008; found 0"),
        ({"val_first": 1009}, "val_first from 1 to 1008; found 1009"),
        ({"shard_tokens": 0}, "at least 1 token in a shard; found shard_tokens=0"),
    ):
        with pytest.raises(ValueError, match=message):
            write_shards(tmp_path / "none", "text", tokens, **arguments)
    with pytest.raises(ValueError, match="at least 10 tokens; found 9"):
        write_shards(tmp_path / "none", "text", tokens[:9])
    assert not (tmp_path / "none").exists()
