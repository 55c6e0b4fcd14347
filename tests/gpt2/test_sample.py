"""llm.c's sampler against a slow one that follows the specification number by number; text from a model."""

import math
import struct

import pytest
import torch

from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import byte_tokenizer
from cukern.gpt2.evaluate import Xorshift, draw, generate, sample_text
from cukern.gpt2.model import GPT2

CONFIG = Config(max_seq_len=32, vocab_size=256, num_layers=2, num_heads=2, channels=16)


def float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def slow_coins(state, count):
    """xorshift64* bit by bit: bits[i] is bit i of the state."""
    bits, coins = [state >> i & 1 for i in range(64)], []
    for _ in range(count):
        for shift in (-12, 25, -27):
            bits = [bits[i] ^ (bits[i - shift] if 0 <= i - shift < 64 else 0) for i in range(64)]
        product = sum(b << i for i, b in enumerate(bits)) * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF
        coins.append((product >> 40) / 16777216)
    return coins


def slow_draw(logits, coin):
    exponentials = [float32(math.exp(x)) for x in logits]
    norm = 0.0
    for e in exponentials:
        norm += e
    target, cdf = float32(float32(coin) * norm), 0.0
    for token, e in enumerate(exponentials):
        cdf = float32(cdf + e)
        if target < cdf:
            return token
    return len(logits) - 1


def model():
    made = GPT2(CONFIG)
    made.initialize()
    # so that logits differ
    made.load_parameters({name: 5 * w for name, w in made.parameters_by_name().items()})
    return made


def test_random_numbers():
    rng = Xorshift()
    found = [rng.uniform() for _ in range(200)]
    assert found == slow_coins(1337, 200) and 0.4 < sum(found) / 200 < 0.6 and all(0 <= x < 1 for x in found)
    state = rng.state
    assert Xorshift(state).uniform() == rng.uniform(), "goes on from its state"
    for bad in (0, -1, 2**64, 1.5, "1"):
        with pytest.raises(ValueError, match="a state from 1"):
            Xorshift(bad)


@pytest.mark.parametrize("spread", [0.1, 3.0, 15.0])
def test_tokens_are_those_of_the_slow_sampler(spread):
    generator, coins = torch.Generator().manual_seed(0), slow_coins(99, 40)
    for coin in (*coins, 0.0, 1 - 2**-24):
        logits = torch.randn(5000, generator=generator) * spread
        assert draw(logits, coin) == slow_draw(logits.tolist(), coin)
        half = logits.bfloat16()
        assert draw(half, coin) == slow_draw(half.tolist(), coin)


def test_the_last_token_where_the_exponentials_overflow():
    assert draw(torch.tensor([1.0, 200.0, 3.0]), 0.5) == 2
    assert draw(torch.tensor([200.0, 1.0]), 0.0) == 1, "0 times infinity"
    assert draw(torch.tensor([-200.0, -200.0]), 0.5) == 1, "all underflow"


def test_temperature():
    logits, coins = torch.tensor([0.0, 2.0, 1.0, -1.0]), slow_coins(7, 300)
    assert {draw(logits, c) for c in coins} == {0, 1, 2, 3}
    assert {draw(logits, c, temperature=0) for c in coins} == {1}
    assert [draw(logits, c, temperature=0.5) for c in coins] == [draw(2 * logits, c) for c in coins]


@pytest.mark.parametrize(
    "logits, coin, options, message",
    [
        (torch.zeros(2, 3), 0.5, {}, r"\(vocabulary,\); found \(2, 3\)"),
        (torch.zeros(0), 0.5, {}, r"\(vocabulary,\); found \(0,\)"),
        (torch.tensor([0.0, math.nan]), 0.5, {}, "not NaN"),
        (torch.zeros(3), 1.0, {}, r"a coin in \[0, 1\); found 1.0"),
        (torch.zeros(3), math.nan, {}, "a coin"),
        (torch.zeros(3), 0.5, {"temperature": -1.0}, "temperature of at least 0; found -1.0"),
        (torch.zeros(3), 0.5, {"temperature": math.inf}, "temperature"),
        (torch.zeros(3), 0.5, {"top_k": -1}, "top_k of at least 0; found -1"),
        (torch.zeros(3), 0.5, {"top_p": 0.0}, "top_p above 0 and at most 1; found 0.0"),
    ],
)
def test_bad_arguments_are_refused(logits, coin, options, message):
    with pytest.raises(ValueError, match=message):
        draw(logits, coin, **options)


def test_text_is_that_of_full_forwards():
    made, tokenizer = model(), byte_tokenizer()
    for prompt in ([], [5, 200, 17]):
        tokens = prompt or [tokenizer.eot]
        for coin in slow_coins(1337, 20 - len(tokens)):
            logits = made(torch.tensor([tokens]))[0, -1, :256].tolist()
            tokens = [*tokens, slow_draw(logits, coin)]
        found = list(generate(made, tokenizer, 20, prompt=prompt))
        assert (prompt or [0]) + found == tokens and len(set(found)) > 5
    rng = Xorshift()
    first, second = (list(generate(made, tokenizer, 20, rng)) for _ in range(2))
    assert first == list(generate(made, tokenizer, 20)) != second, "one generator goes on"
    assert list(generate(made, tokenizer, 1)) == [] and len(list(generate(made, tokenizer, 32))) == 31
    greedy = list(generate(made, tokenizer, 8, temperature=0))
    assert greedy[0] == made(torch.tensor([[0]]))[0, 0, :256].argmax()


@pytest.mark.parametrize(
    "length, prompt, message",
    [
        (0, [], "a length of at least the prompt's 1 tokens; found 0"),
        (2, [1, 2, 3], "a length of at least the prompt's 3 tokens; found 2"),
        (40, [1] * 33, "a prompt of at most max_seq_len = 32 tokens; found 33"),
    ],
)
def test_bad_lengths_are_refused(length, prompt, message):
    with pytest.raises(ValueError, match=message):
        next(generate(model(), byte_tokenizer(), length, prompt=prompt))


def test_a_text_longer_than_the_context_goes_on_from_its_last_half():
    made, tokenizer, coins = model(), byte_tokenizer(), slow_coins(1337, 60)
    tokens, kept = [0], [0]  # all, and those that the model sees
    for coin in coins:
        kept = tokens[-16:] if len(kept) == 33 else kept
        kept = [*kept, slow_draw(made(torch.tensor([kept]))[0, -1, :256].tolist(), coin)]
        tokens = [*tokens, kept[-1]]
    assert list(generate(made, tokenizer, 61)) == tokens[1:]
    text = sample_text(made, tokenizer, 61, prompt=list(b"a b"))
    whole = bytes([*b"a b", *generate(made, tokenizer, 61, prompt=list(b"a b"))]).decode(errors="replace")
    assert text and whole.startswith(text) and whole[len(text)] == " " and " " not in whole[len(text) + 1 :]
    assert len(sample_text(made, tokenizer, 32).encode()) >= 32, "a text that fits is not cut"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_top_k_and_top_p(temperature):
    """Against a filter that is written as the definition, one token after the other."""
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p in ((1, 1.0), (5, 1.0), (0, 0.5), (0, 1e-9), (7, 0.8), (300, 0.9), (0, 0.999)):
        logits = torch.randn(50, generator=generator) * 2
        probabilities = (logits.double() / temperature).softmax(0).tolist()
        allowed, total = [], 0.0
        for token in sorted(range(50), key=lambda i: -probabilities[i]):
            if total >= top_p or (top_k and len(allowed) == top_k):
                break
            allowed.append(token)
            total += probabilities[token]
        left = torch.full((50,), -math.inf)
        left[allowed] = logits[allowed]
        coins = [*slow_coins(5, 100), 0.0]
        found = [draw(logits, c, temperature=temperature, top_k=top_k, top_p=top_p) for c in coins]
        assert found == [draw(left, c, temperature=temperature) for c in coins] and set(found) <= set(allowed)
        assert draw(logits, 1 - 2**-24, temperature=temperature, top_k=top_k, top_p=top_p) in allowed
    assert draw(torch.tensor([1.0, 500.0, 400.0]), 0.5, top_k=2) in (1, 2), "the exponentials overflow"
