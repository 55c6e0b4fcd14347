"""HellaSwag's file against bytes from the specification, accuracy against a loop, and the mean loss of
batches that start again."""

import struct

import numpy as np
import pytest
import torch
from gpt2_files import header
from gpt2_plain import forward, random_weights
from torch.nn.functional import cross_entropy

from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import DataLoader, write_shard
from cukern.gpt2.evaluate import hellaswag_accuracy, read_hellaswag, validation_loss
from cukern.gpt2.model import GPT2

CONFIG = Config(max_seq_len=40, vocab_size=100, num_layers=1, num_heads=2, channels=16)


def model():
    made = GPT2(CONFIG)
    made.load_parameters(random_weights(CONFIG))
    return made


def drawn(count, seed=0):
    """(label, context, completions) of random tokens."""
    rng = np.random.default_rng(seed)
    parts = [[rng.integers(0, 100, rng.integers(1, 9)).tolist() for _ in range(5)] for _ in range(count)]
    return [(int(rng.integers(4)), context, completions) for context, *completions in parts]


def words(index, label, context, completions):
    body = [index, label, 4, len(context), *context]
    for completion in completions:
        body += [len(completion), *completion]
    return [65535, 2 * (len(body) + 2), *body]


def file_of(examples, longest=200):
    every = [word for i, example in enumerate(examples) for word in words(i, *example)]
    return header(20240522, 1, len(examples), longest) + struct.pack(f"<{len(every)}H", *every)


def test_hellaswag_is_read(tmp_path):
    (path := tmp_path / "hellaswag_val.bin").write_bytes(file_of(examples := drawn(7)))
    found = read_hellaswag(path, 100)
    assert [(e.label, e.context.tolist(), [c.tolist() for c in e.completions]) for e in found] == examples
    path.write_bytes(file_of([]))
    assert read_hellaswag(path) == []


def changed(position, value, example=0):
    """The file with another word, counted from the start of an example; its parts have 1, 2, 1, 1, 1
    tokens."""
    data = bytearray(file_of([(2, [7], [[8, 9], [1], [2], [3]])] * 2))
    struct.pack_into("<H", data, 1024 + 32 * example + 2 * position, value)
    return bytes(data)


GOOD = file_of([(2, [7], [[8, 9], [1], [2], [3]])] * 2)


@pytest.mark.parametrize(
    "data, message",
    [
        (GOOD[:-1], r"a file of 16-bit words; found 1087 bytes"),
        (
            GOOD[:-2],
            r"example 1, byte 1056: expected a size from 12 to 200, that of the longest, in the file; found "
            r"32",
        ),
        (GOOD[:1056], r"example 1, byte 1056: expected 2 examples; found the end of the file"),
        (GOOD + b"\0\0", "1088 bytes, for 2 examples; found 1090"),
        (file_of(drawn(2), longest=20), "a size from 12 to 20, that of the longest, in the file; found"),
        (
            changed(0, 1),
            r"byte 1024: expected 65535, a size, 0, a label below 4, 4; found \[1, 32, 0, 2, 4\]",
        ),
        (
            changed(2, 0, 1),
            r"byte 1056: expected 65535, a size, 1, a label below 4, 4; found \[65535, 32, 0, 2, 4\]",
        ),
        (changed(3, 4), r"found \[65535, 32, 0, 4, 4\]"),
        (changed(4, 3), r"found \[65535, 32, 0, 2, 3\]"),
        (changed(1, 0), "a size from 12 to 200, that of the longest, in the file; found 0"),
        (changed(1, 30), "byte 1024: expected a part of at least 1 token; found 0 tokens of 1"),
        (changed(1, 34), "byte 1024: expected the end of the example after its parts; found 2 more bytes"),
        (changed(5, 0), "a part of at least 1 token; found 0 tokens of 0"),
        (changed(5, 60000), "a part of at least 1 token; found 10 tokens of 60000"),
        (changed(6, 100), "tokens below the vocabulary size 100; found 100"),
        (header(20240520, 1, 0, 0), "magic number 20240522, of HellaSwag; found 20240520"),
        (header(20240522, 2, 0, 0), "version 1 of HellaSwag; found version 2"),
        (b"", "a header of 1024 bytes; found a file of 0 bytes"),
    ],
)
def test_malformed_files_are_refused(data, message, tmp_path):
    (path := tmp_path / "hellaswag.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        read_hellaswag(path, 100)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("batch", [4, 11, 64])
def test_accuracy_is_that_of_a_loop(batch, tmp_path):
    (path := tmp_path / "hellaswag.bin").write_bytes(file_of(examples := drawn(25)))
    w, right = random_weights(CONFIG), 0
    for label, context, completions in examples:
        losses = []
        for completion in completions:
            logits = forward(w, torch.tensor([context + completion]), 2, 100)[0]
            n = len(context)
            losses.append(
                cross_entropy(logits[n - 1 : n - 1 + len(completion)], torch.tensor(completion)).item()
            )
        right += losses.index(min(losses)) == label
    assert hellaswag_accuracy(model(), read_hellaswag(path), batch) == (right, 25) and 0 < right < 25


def test_accuracy_refuses(tmp_path):
    (path := tmp_path / "hellaswag.bin").write_bytes(file_of([(0, [1] * 35, [[2] * 6] * 4)]))
    with pytest.raises(ValueError, match="at most max_seq_len = 40 tokens; found 41"):
        hellaswag_accuracy(model(), read_hellaswag(path))
    with pytest.raises(ValueError, match="a batch of at least 4 rows; found 3"):
        hellaswag_accuracy(model(), [], 3)
    assert hellaswag_accuracy(model(), []) == (0, 0)


def test_validation_loss_wraps_around(tmp_path):
    write_shard(tmp_path / "val.bin", tokens := np.random.default_rng(0).integers(0, 100, 3 * 2 * 8 + 3))
    loader, w = DataLoader(tmp_path / "val.bin", 2, 8), random_weights(CONFIG)
    losses = []
    for i in range(3):
        part = torch.from_numpy(tokens[16 * i : 16 * i + 17])
        logits = forward(w, part[:-1].view(2, 8), 2, 100)
        losses.append(cross_entropy(logits.flatten(0, 1), part[1:]).item())
    loader.next_batch()  # it starts from the beginning all the same
    assert validation_loss(model(), loader) == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert validation_loss(model(), loader, 1) == pytest.approx(losses[0], abs=1e-6)
    assert validation_loss(model(), loader, 5) == pytest.approx(
        (2 * losses[0] + 2 * losses[1] + losses[2]) / 5, abs=1e-6
    )
    with pytest.raises(ValueError, match="at least 0 batches; found -1"):
        validation_loss(model(), loader, -1)
    assert np.isnan(validation_loss(model(), loader, 0))
