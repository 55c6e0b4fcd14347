"""llm.c's sampler: the same tokens from the same logits; and text from a model, with a cache of keys and values."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cukern.gpt2.data import Tokenizer
from cukern.gpt2.files import expect
from cukern.gpt2.model import GPT2


class Xorshift:
    """llm.c's random numbers, xorshift64* (Vigna, arXiv 1402.6246). `state` is its 64 bits, not all 0; llm.c samples from 1337 on."""

    def __init__(self, state: int = 1337) -> None:
        expect(isinstance(state, int) and 0 < state < 2**64, "a state from 1 to 2^64 - 1", state)
        self.state = state

    def uint32(self) -> int:
        self.state ^= self.state >> 12
        self.state ^= (self.state << 25) % 2**64
        self.state ^= self.state >> 27
        return (self.state * 0x2545F4914F6CDD1D) % 2**64 >> 32

    def uniform(self) -> float:
        """From 0 to 1 - 2^-24, a multiple of 2^-24."""
        return (self.uint32() >> 8) / 2**24


def draw(logits: Tensor, coin: float, *, temperature: float = 1.0) -> int:
    """The token of softmax(logits) at which the running sum of the probabilities exceeds `coin`, as llm.c computes it.

    Args:
        logits: (vocabulary,), without the padding. coin: a random number, at least 0 and less than 1.
        temperature: divides the logits; 0 takes the largest. llm.c has none.

    The exponentials, without subtraction of the maximum, and their running sum are float32, and their sum is float64. Logits above 88
    overflow, and the last token is drawn. Raises ValueError for NaN logits, another shape, and numbers outside their range.
    """
    expect(logits.ndim == 1 and len(logits) > 0, "logits of shape (vocabulary,)", tuple(logits.shape))
    expect(0 <= coin < 1, "a coin in [0, 1)", coin)
    expect(0 <= temperature < float("inf"), "a finite temperature of at least 0", temperature)
    logits = logits.float().cpu()
    expect(not logits.isnan().any(), "logits that are not NaN", "NaN")
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", invalid="ignore"):
        exponentials = np.exp((logits / temperature).numpy().astype(np.float64)).astype(np.float32)  # as expf of the C library
        cdf = np.cumsum(exponentials)  # one after the other, as a loop adds
        above = np.float32(coin * np.cumsum(exponentials, dtype=np.float64)[-1]) < cdf
    return int(above.argmax()) if above.any() else len(cdf) - 1


@torch.no_grad()
def generate(
    model: GPT2, tokenizer: Tokenizer, length: int, rng: Xorshift | None = None, *, prompt: Sequence[int] = (), temperature: float = 1.0
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, each as soon as it is drawn: `for token in generate(model, tokenizer, 64): ...`

    Args:
        length: the tokens of prompt and text together, as llm.c's -g: at most max_seq_len.
        rng: None: from 1337 on, as llm.c's bfloat16 program at each call; its float32 program goes on with one Xorshift.
        prompt: tokens; without any, the tokenizer's EOT. temperature: as in `draw`.

    Only new tokens are computed, one row of them; so logits differ from llm.c's by rounding. Raises ValueError for a bad length or prompt.
    """
    rng, new = rng or Xorshift(), list(prompt) or [tokenizer.eot]
    least, most, cache = len(new), model.config.max_seq_len, model.make_cache(1)
    expect(least <= length <= most, f"a length from the prompt's {least} tokens to max_seq_len = {most}", length)
    for _ in range(length - least):
        logits = model(torch.tensor([new], device=model.wte.device), cache=cache)[0, -1, : model.config.vocab_size]
        new = [draw(logits, rng.uniform(), temperature=temperature)]
        yield new[0]


def sample_text(model: GPT2, tokenizer: Tokenizer, count: int, temperature: float = 1.0, prompt: Sequence[int] = ()) -> str:
    """Text from llm.c's sampler with its first seed. `count` includes the prompt, or the EOT that replaces it. A count above max_seq_len
    gives several texts."""
    rng, most = Xorshift(), model.config.max_seq_len
    lengths = [max(len(prompt), min(most, count - start)) for start in range(0, count, most)]
    texts = ([*prompt, *generate(model, tokenizer, n, rng, prompt=prompt, temperature=temperature)] for n in lengths)
    return "\n".join(map(tokenizer.decode, texts))
