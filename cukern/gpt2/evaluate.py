"""How good a model is: the mean validation loss, and the accuracy on HellaSwag's file of llm.c."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import cukern
from cukern.gpt2.data import DataLoader
from cukern.gpt2.files import HEADER_BYTES, PathLike, expect, read_header
from cukern.gpt2.model import GPT2

MAGIC, VERSION = 20240522, 1
START, CHOICES = 65535, 4  # the first word of an example, and its number of completions


@torch.no_grad()
def validation_loss(model: GPT2, loader: DataLoader, num_batches: int | None = None) -> float:
    """The mean loss over so many batches from the start of the loader; None: all of its current shard once.

    After its last batch the loader starts again, as in llm.c: 20 batches of a file with 7 count its batches two or three times.
    """
    expect(num_batches is None or num_batches > 0, "at least 1 batch", num_batches)
    loader.reset()
    batches = (loader.next_batch() for _ in range(num_batches or loader.num_samples))
    losses = [model(x.to(model.wte.device), y.to(model.wte.device)) for x, y in batches]
    return torch.stack(losses).double().mean().item()


@dataclass(frozen=True)
class Example:
    """The tokens of a text and of four ways to go on, of which `label` is right."""

    label: int
    context: np.ndarray
    completions: tuple[np.ndarray, ...]


def read_hellaswag(path: PathLike, vocab_size: int = START) -> list[Example]:
    """The examples of llm.c's hellaswag_val.bin. Raises ValueError for a malformed file and for tokens that are not below vocab_size."""
    with open(path, "rb") as file:
        _, _, count, longest = read_header(file, MAGIC, (VERSION,), "HellaSwag")[:4]
        data = file.read()
    expect(len(data) % 2 == 0, "a file of 16-bit words", f"{HEADER_BYTES + len(data)} bytes", path)
    words, position, examples = np.frombuffer(data, "<u2"), 0, list[Example]()
    for i in range(count):
        where = f"{path}: example {i}, byte {HEADER_BYTES + 2 * position}"
        size = int(words[position + 1]) if position + 1 < len(words) else 0
        example = words[position : position + size // 2]
        expect(
            12 < size == 2 * len(example) <= longest, f"13 to {longest} bytes of {count} examples", f"{2 * len(example)} of {size}", where
        )
        examples.append(_example(example, i, vocab_size, where))
        position += len(example)
    expect(position == len(words), f"{HEADER_BYTES + 2 * position} bytes, for {count} examples", HEADER_BYTES + len(data), path)
    return examples


def _example(words: np.ndarray, index: int, vocab_size: int, where: str) -> Example:
    start, _, found, label, choices = words[:5].tolist()
    expected = f"{START}, {index}, a label below {CHOICES}, {CHOICES}"
    expect((start, found, choices) == (START, index, CHOICES) and label < CHOICES, expected, f"{start}, {found}, {label}, {choices}", where)
    parts, position = list[np.ndarray](), 5
    for _ in range(1 + CHOICES):
        length = int(words[position]) if position < len(words) else 0
        part = words[position + 1 : position + 1 + length]
        expect(0 < length == len(part), "a part of at least 1 token", f"{len(part)} tokens of {length}", where)
        expect(part.max() < vocab_size, f"tokens below the vocabulary size {vocab_size}", part.max(), where)
        parts.append(part.astype(np.int64))
        position += 1 + length
    expect(position == len(words), f"{2 * position} bytes", 2 * len(words), where)
    return Example(label, parts[0], tuple(parts[1:]))


@torch.no_grad()
def hellaswag_accuracy(model: GPT2, examples: Sequence[Example], batch: int = 4) -> tuple[int, int]:
    """How many examples are right, of how many: the right completion has the least mean loss of its tokens.

    `batch` is the number of rows, at least 4; each example has 4. Raises ValueError for an example longer than max_seq_len.
    """
    expect(batch >= CHOICES, f"a batch of at least {CHOICES} rows", batch)
    right, step, device = 0, batch // CHOICES, model.wte.device
    for some in (examples[i : i + step] for i in range(0, len(examples), step)):
        rows = [(example.context, completion) for example in some for completion in example.completions]
        longest = max(len(context) + len(completion) for context, completion in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        targets = torch.full((len(rows), longest), -100)  # ignored
        for i, (context, completion) in enumerate(rows):
            first, end = len(context), len(context) + len(completion)
            tokens[i, :end] = torch.from_numpy(np.concatenate((context, completion)))
            targets[i, first - 1 : end - 1] = tokens[i, first:end]
        logits, targets = model(tokens.to(device)), targets.to(device)
        losses = cukern.cross_entropy(logits, targets, reduction="none", vocab_size=model.config.vocab_size)
        means = losses.sum(1) / (targets >= 0).sum(1)
        best = means.view(-1, CHOICES).argmin(1).tolist()
        right += sum(choice == example.label for choice, example in zip(best, some, strict=True))
    return right, len(examples)
