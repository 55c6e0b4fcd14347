"""What a model has learned: its validation loss, its accuracy on llm.c's HellaSwag file, and its text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

import cukern
from cukern.gpt2.data import DataLoader, Tokenizer
from cukern.gpt2.files import PathLike, check_size, expect, read
from cukern.gpt2.model import GPT2

MAGIC, VERSION = 20240522, 1
START, CHOICES = 65535, 4  # the first word of an example, and its number of completions


@torch.no_grad()
def validation_loss(model: GPT2, loader: DataLoader, num_batches: int | None = None) -> float:
    """The mean loss of the first batches of the loader. None: num_tokens // (num_processes * B * T) batches,
    as in llm.c. After its last batch the loader starts again, as in llm.c: 20 batches of a file with 7 count
    its batches two or three times. Of 0 batches it is NaN."""
    expect(num_batches is None or num_batches >= 0, "at least 0 batches", num_batches)
    loader.reset()
    count = (
        loader.num_tokens // (loader.num_processes * loader.B * loader.T)
        if num_batches is None
        else num_batches
    )
    if count == 0:
        return math.nan
    losses = [model(*(part.to(model.wte.device) for part in loader.next_batch())) for _ in range(count)]
    return torch.stack(losses).double().mean().item()


@dataclass(frozen=True)
class Example:
    """The tokens of a context and of its four completions. `label` is the index of the right completion."""

    label: int
    context: np.ndarray
    completions: tuple[np.ndarray, ...]


def read_hellaswag(path: PathLike, vocab_size: int = START) -> list[Example]:
    """The examples of llm.c's hellaswag_val.bin. Raises ValueError for a malformed file and for tokens that
    are not below vocab_size."""
    examples = []
    with read(path, MAGIC, (VERSION,), "HellaSwag") as (file, header):
        count, longest = header[2:4]
        data = file.read()
        expect(len(data) % 2 == 0, "a file of 16-bit words", f"{file.tell()} bytes")
        words = np.frombuffer(data, "<u2")
        for i in range(count):
            where = f"example {i}, byte {file.tell() - 2 * len(words)}"
            head = words[:5].tolist()
            expect(len(head) == 5, f"{count} examples", "the end of the file", where)
            size, label = head[1], head[3]
            known = head == [START, size, i, label, CHOICES] and label < CHOICES
            expect(known, f"{START}, a size, {i}, a label below {CHOICES}, {CHOICES}", head, where)
            example, words = words[5 : size // 2], words[size // 2 :]
            complete = 10 < size <= min(longest, 2 * len(example) + 10)
            expect(complete, f"a size from 12 to {longest}, that of the longest, in the file", size, where)
            parts = []
            for _ in range(1 + CHOICES):  # the context and the completions: a length and as many tokens
                length = int(example[0]) if len(example) else 0
                part, example = example[1 : 1 + length], example[1 + length :]
                expect(
                    0 < length == len(part),
                    "a part of at least 1 token",
                    f"{len(part)} tokens of {length}",
                    where,
                )
                expect(
                    part.max() < vocab_size,
                    f"tokens below the vocabulary size {vocab_size}",
                    part.max(),
                    where,
                )
                parts.append(part.astype(np.int64))
            expect(
                not len(example),
                "the end of the example after its parts",
                f"{2 * len(example)} more bytes",
                where,
            )
            examples.append(Example(label, parts[0], tuple(parts[1:])))
        check_size(file, file.tell() - 2 * len(words), f"{count} examples")
        return examples


@torch.no_grad()
def hellaswag_accuracy(model: GPT2, examples: Sequence[Example], batch: int = 4) -> tuple[int, int]:
    """How many examples are right, of how many: the right completion has the least mean loss of its tokens.
    `batch` is the number of rows, at least 4; each example has 4. Raises ValueError for an example longer
    than max_seq_len."""
    expect(batch >= CHOICES, f"a batch of at least {CHOICES} rows", batch)
    right, step, device = 0, batch // CHOICES, model.wte.device
    for some in (examples[i : i + step] for i in range(0, len(examples), step)):
        rows = [
            (torch.from_numpy(example.context), torch.from_numpy(part))
            for example in some
            for part in example.completions
        ]
        tokens = pad_sequence([torch.cat(row) for row in rows], batch_first=True)
        # -100: ignored
        goals = [pad(completion, (len(context) - 1, 1), value=-100) for context, completion in rows]
        targets = pad_sequence(goals, batch_first=True, padding_value=-100).to(device)
        logits = model(tokens.to(device))
        losses = cukern.cross_entropy(logits, targets, reduction="none", vocab_size=model.config.vocab_size)
        best = (losses.sum(1) / (targets >= 0).sum(1)).view(-1, CHOICES).argmin(1).tolist()
        right += sum(choice == example.label for choice, example in zip(best, some, strict=True))
    return right, len(examples)


# ---- text, by llm.c's sampler: the same tokens from the same logits


class Xorshift:
    """llm.c's random numbers, xorshift64* (Vigna, arXiv 1402.6246). `state` is its 64 bits, not all 0; llm.c
    samples from 1337 on."""

    def __init__(self, state: int = 1337) -> None:
        expect(isinstance(state, int) and 0 < state < 2**64, "a state from 1 to 2^64 - 1", state)
        self.state = state

    def uniform(self) -> float:
        """The next number: from 0 to 1 - 2^-24, a multiple of 2^-24."""
        self.state ^= self.state >> 12
        self.state ^= (self.state << 25) % 2**64
        self.state ^= self.state >> 27
        return ((self.state * 0x2545F4914F6CDD1D) % 2**64 >> 40) / 2**24


def draw(logits: Tensor, coin: float, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> int:
    """The token of softmax(logits) at which the running sum of the probabilities exceeds `coin`, as llm.c
    computes it.

    Args:
        logits: (vocabulary,), without the padding. coin: a random number, at least 0 and less than 1.
        temperature: divides the logits; 0 takes the largest. llm.c has none.
        top_k: draw among the k largest; 0: among all. top_p: draw among the fewest whose probabilities add up
            to at least top_p.

    The exponentials, without subtraction of the maximum, and their running sum are float32, and their sum is
    float64. Logits above 88 overflow, and the last token is drawn. Raises ValueError for NaN logits, another
    shape, and numbers outside their range.
    """
    expect(logits.ndim == 1 and len(logits) > 0, "logits of shape (vocabulary,)", tuple(logits.shape))
    expect(0 <= coin < 1, "a coin in [0, 1)", coin)
    expect(0 <= temperature < float("inf"), "a finite temperature of at least 0", temperature)
    expect(top_k >= 0, "top_k of at least 0", top_k)
    expect(0 < top_p <= 1, "top_p above 0 and at most 1", top_p)
    logits = logits.float().cpu()
    expect(not logits.isnan().any(), "logits that are not NaN", "NaN")
    if temperature == 0:
        return int(logits.argmax())
    keep: Tensor | None = None  # of the logits in descending order
    if 0 < top_k < len(logits) or top_p < 1:
        largest, order = logits.sort(descending=True, stable=True)
        # the sum of the probabilities of those before
        before = (largest / temperature).softmax(0).cumsum(0).roll(1)
        before[0] = 0
        keep = (before < top_p) & (
            torch.arange(len(logits), dtype=torch.int64, device="cpu") < (top_k or len(logits))
        )
        logits = logits.masked_fill(torch.ones_like(keep).scatter(0, order[keep], False), -math.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        # as expf of the C library
        exponentials = np.exp((logits / temperature).numpy().astype(np.float64)).astype(np.float32)
        cdf = np.cumsum(exponentials)  # one after the other, as a loop adds
        above = np.float32(coin * np.cumsum(exponentials, dtype=np.float64)[-1]) < cdf
    if above.any():
        return int(above.argmax())
    return len(cdf) - 1 if keep is None else int(order[keep][-1])


@torch.no_grad()
def generate(
    model: GPT2,
    tokenizer: Tokenizer,
    length: int,
    rng: Xorshift | None = None,
    *,
    prompt: Sequence[int] = (),
    **options: Any,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, each as soon as it is drawn: `for token in generate(model,
    tokenizer, 64): ...`

    Args:
        length: the tokens of prompt and text together, as llm.c's -g. After max_seq_len tokens the text goes
            on from its last half of max_seq_len; llm.c has no such texts.
        rng: None: from 1337 on, as llm.c's bfloat16 program at each call; its float32 program goes on with
            one Xorshift.
        prompt: at most max_seq_len tokens; without any, the tokenizer's EOT. options: of `draw`.

    Only new tokens are computed, one row of them; so logits differ from llm.c's by rounding. Raises
    ValueError for a bad length or prompt.
    """
    rng, new, cache = rng or Xorshift(), list(prompt) or [tokenizer.eot], model.make_cache(1)
    tokens, most = list(new), model.config.max_seq_len
    expect(len(new) <= most, f"a prompt of at most max_seq_len = {most} tokens", len(new))
    expect(len(new) <= length, f"a length of at least the prompt's {len(new)} tokens", length)
    for _ in range(length - len(new)):
        if cache.length == most:
            new, cache = tokens[-max(1, most // 2) :], model.make_cache(1)
        logits = model(torch.tensor([new], dtype=torch.int64, device=model.wte.device), cache=cache)[
            0, -1, : model.config.vocab_size
        ]
        new = [draw(logits, rng.uniform(), **options)]
        tokens += new
        yield new[0]


def sample_text(
    model: GPT2,
    tokenizer: Tokenizer,
    count: int,
    rng: Xorshift | None = None,
    *,
    prompt: Sequence[int] = (),
    **options: Any,
) -> str:
    """The text of `generate`, with its prompt. If it is longer than max_seq_len, it ends with its last whole
    word."""
    length = max(len(prompt), count)
    text = tokenizer.decode([*prompt, *generate(model, tokenizer, length, rng, prompt=prompt, **options)])
    return text.rpartition(" ")[0] or text if length > model.config.max_seq_len else text
