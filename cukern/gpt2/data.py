"""From text to tokens to batches: llm.c's tokenizer file and token shards, and its data loader, with the same
batches in the same order."""

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cukern.gpt2.files import (
    HEADER_BYTES,
    PathLike,
    check_size,
    expect,
    optional,
    read,
    replace,
    write_header,
)

SHARD, TOKENIZER = 20240520, 20240328  # magic numbers
MAX_TOKENS = (2**31 - HEADER_BYTES - 1) // 2  # of a shard: llm.c's loader holds offsets in bytes as int32
GPT2_EOT = 50256
# GPT-2's, within which bytes are joined
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Tokenizer:
    """The bytes of each token (1 to 255 bytes), and the token that separates texts (EOT)."""

    tokens: tuple[bytes, ...]
    eot: int

    def __post_init__(self) -> None:
        expect(0 <= self.eot < len(self.tokens), f"an EOT token from 0 to {len(self.tokens) - 1}", self.eot)
        for i, token in enumerate(self.tokens):
            expect(0 < len(token) < 256, f"1 to 255 bytes for token {i}", len(token))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text. Bytes that are not UTF-8, such as a part of a character, become U+FFFD."""
        tokens = list(tokens)
        for token in tokens:
            expect(0 <= token < len(self.tokens), f"a token from 0 to {len(self.tokens) - 1}", token)
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, by the package tiktoken's byte pair encoding unless each token is one byte.
        The file has no merges: its tokens are in their order. EOT is not made. Raises ValueError for a byte
        without a token, ImportError without tiktoken."""
        ranks = {token: i for i, token in enumerate(self.tokens) if i != self.eot}
        parts = [bytes([byte]) for byte in text.encode()]
        for part in parts:
            expect(part in ranks, "a token for each byte", f"none for {part!r}")
        if max(map(len, ranks)) == 1:
            return [ranks[part] for part in parts]
        library = optional("tiktoken", "tiktoken", "the tokens of a text need")
        return library.Encoding(
            "own", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary(text)


def byte_tokenizer() -> Tokenizer:
    """One token per byte. EOT is byte 0, which ordinary text does not contain."""
    return Tokenizer(tuple(bytes([i]) for i in range(256)), eot=0)


def read_tokenizer(path: PathLike) -> Tokenizer:
    """Read gpt2_tokenizer.bin. Version 1 has no slot for EOT; it is GPT-2's, 50256."""
    tokens = []
    with read(path, TOKENIZER, (1, 2), "a tokenizer") as (file, header):
        version, count, eot = header[1:4]
        if version == 1:
            expect(count == 50257, "50257 tokens in version 1", count)
            eot = GPT2_EOT
        for i in range(count):
            length = file.read(1)
            expect(length, f"{count} tokens", f"the end of the file after {i} tokens")
            tokens.append(file.read(length[0]))
            expect(
                0 < length[0] == len(tokens[i]),
                f"1 to 255 bytes for token {i}",
                f"{len(tokens[i])} bytes of {length[0]}",
            )
        check_size(file, file.tell(), f"{count} tokens")
        return Tokenizer(tuple(tokens), eot)


def write_tokenizer(path: PathLike, tokenizer: Tokenizer) -> None:
    """Write version 2 of the file."""
    with replace(path) as file:
        write_header(file, TOKENIZER, 2, len(tokenizer.tokens), tokenizer.eot)
        file.write(b"".join(bytes([len(token)]) + token for token in tokenizer.tokens))


# ---- token shards


def write_shard(path: PathLike, tokens: np.ndarray) -> None:
    """Write tokens, integers from 0 to 65535, as one shard: header, then uint16."""
    tokens = np.asarray(tokens)
    expect(tokens.dtype.kind in "iu", "tokens of an integer dtype", tokens.dtype, path, TypeError)
    expect(
        0 < tokens.size <= MAX_TOKENS,
        f"1 to {MAX_TOKENS} tokens (llm.c reads shards below 2 GiB)",
        tokens.size,
        path,
    )
    expect(
        tokens.min() >= 0 and tokens.max() < 65536,
        "tokens from 0 to 65535",
        f"{tokens.min()} to {tokens.max()}",
        path,
    )
    with replace(path) as file:
        write_header(file, SHARD, 1, tokens.size)
        file.write(tokens.astype("<u2").tobytes())


def shard_length(path: PathLike) -> int:
    """The number of tokens in a shard, after checks of the header and of the size of the file."""
    with read(path, SHARD, (1,), "a token shard") as (file, header):
        count = header[2]
        check_size(file, HEADER_BYTES + 2 * count, f"{count} tokens")
        return count


def read_shard(path: PathLike) -> np.ndarray:
    """All tokens of a shard, uint16."""
    return np.fromfile(path, "<u2", shard_length(path), offset=HEADER_BYTES)


def tokenize(texts: Iterable[str], encoding: str) -> tuple[np.ndarray, Tokenizer]:
    """The tokens of documents as uint16, EOT before each document, and the tokenizer that decodes them.
    `encoding` is "gpt2" (by the package tiktoken, which downloads its vocabulary once) or "bytes" (the bytes
    of UTF-8; EOT is 0). "<|endoftext|>" in a text is ordinary text."""
    expect(encoding in ("gpt2", "bytes"), "the encoding 'gpt2' or 'bytes'", repr(encoding))
    if encoding == "bytes":
        return np.frombuffer(b"".join(b"\0" + text.encode() for text in texts), np.uint8).astype(
            np.uint16
        ), byte_tokenizer()
    gpt2 = optional("tiktoken", "tiktoken", "the encoding 'gpt2' needs").get_encoding("gpt2")
    parts = [np.array([GPT2_EOT, *gpt2.encode_ordinary(text)], np.uint16) for text in texts]
    tokenizer = Tokenizer(tuple(gpt2.decode_single_token_bytes(i) for i in range(gpt2.n_vocab)), GPT2_EOT)
    return np.concatenate([np.empty(0, np.uint16), *parts]), tokenizer


def write_shards(
    folder: PathLike,
    name: str,
    tokens: np.ndarray,
    *,
    val_first: int | None = None,
    shard_tokens: int = 10**8,
) -> list[Path]:
    """Write NAME_val_000000.bin and NAME_train_000001.bin, NAME_train_000002.bin, ... and return their paths,
    validation first. The last 10 % of the tokens are for validation; with `val_first` the first `val_first`
    tokens, as in llm.c's tiny_shakespeare (32768). A training shard has `shard_tokens` tokens; the remainder
    joins the last one, unless that could exceed MAX_TOKENS."""
    expect(
        val_first is None or 0 < val_first < len(tokens), f"val_first from 1 to {len(tokens) - 1}", val_first
    )
    expect(len(tokens) >= 10 or val_first, "at least 10 tokens", len(tokens))
    expect(shard_tokens > 0, "at least 1 token in a shard", f"{shard_tokens=}")
    train, val = (
        np.split(tokens, [len(tokens) - len(tokens) // 10])
        if val_first is None
        else (tokens[val_first:], tokens[:val_first])
    )
    least = shard_tokens if 2 * shard_tokens <= MAX_TOKENS else 1  # of the last shard
    parts = [val, *np.split(train, range(shard_tokens, len(train) - least + 1, shard_tokens))]
    paths = [Path(folder, f"{name}_{'train' if i else 'val'}_{i:06}.bin") for i in range(len(parts))]
    others = set(Path(folder).glob(f"{glob.escape(name)}_train_*.bin")) - set(paths)
    expect(
        not others,
        f"no shards in the folder that would stay, beside the {len(parts)} new ones",
        ", ".join(map(str, sorted(others))),
    )
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path, part in zip(paths, parts, strict=True):
        write_shard(path, part)
    return paths


class Mt19937:
    """llm.c's random numbers: the standard MT19937, as numpy's RandomState(seed) and torch's CPU generator
    draw them."""

    # left = 1 means that the state is renewed before the next draw; after the first draw left + next = 625
    STRUCT = np.dtype(
        [("seed", "<u8"), ("left", "<i4"), ("next", "<u4"), ("state", "<u4", 624), ("matrix", "<u4", 2)]
    )
    MATRIX = (0, 0x9908B0DF)

    def __init__(self, seed: int) -> None:
        self._rng, self._unused = np.random.RandomState(seed), True

    def permute(self, array: np.ndarray) -> None:
        """Shuffle in place: for i = n-1 down to 1, swap elements i and draw % (i + 1)."""
        i = np.arange(len(array) - 1, 0, -1)
        self._unused = self._unused and len(i) == 0
        for a, b in zip(i, self._rng.randint(0, 2**32, len(i), np.uint32) % (i + 1), strict=True):
            array[a], array[b] = array[b], array[a]

    def to_bytes(self) -> bytes:
        """llm.c's struct of 2520 bytes. Its field `seed` is never set in llm.c; here it is 0."""
        state = self._rng.get_state(legacy=False)["state"]
        left, position = (1, 0) if self._unused else (625 - state["pos"], state["pos"])
        return np.array((0, left, position, state["key"], self.MATRIX), self.STRUCT).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Mt19937":
        _, left, position, key, matrix = np.frombuffer(data, cls.STRUCT, 1)[0].tolist()
        unused = (left, position) == (1, 0)
        expect(tuple(matrix) == cls.MATRIX, f"the constants {cls.MATRIX} of MT19937", tuple(matrix))
        expect(
            unused or 0 < position == 625 - left < 625,
            "left + next = 625 in the state of MT19937",
            f"{left} + {position}",
        )
        rng = cls(0)
        rng._unused = unused
        rng._rng.set_state(("MT19937", np.array(key, np.uint32), 624 if unused else position, 0, 0.0))
        return rng


@dataclass(frozen=True)
class LoaderState:
    """Where a loader is, and with shuffling the order of the shards, that of the samples (both int32), and
    Mt19937.to_bytes()."""

    shard: int  # index into the order of the shards
    sample: int  # the next one, an index into the order of the samples
    shuffle: tuple[np.ndarray, np.ndarray, bytes] | None = None


class DataLoader:
    """Batches of token shards in llm.c's order.

        loader = DataLoader("data/tiny_shakespeare_train.bin", 4, 1024, shuffle=True, vocab_size=50257)
        x, y = loader.next_batch()  # int64 CPU tensors (4, 1024); y is x shifted by one token

    Args:
        pattern: the shards, a glob pattern; they are sorted by name.
        B, T: rows per batch, tokens per row.
        rank, num_processes: which process of how many reads. Sample i of rank r starts at token (i *
            num_processes + r) * B * T.
        shuffle: permute the shards and the samples of each shard with MT19937, seeded by 42 + rank: each rank
            has its own order. llm.c shuffles for training only.
        vocab_size: `next_batch` refuses tokens that are not below it.

    After the last shard the loader starts again, also for validation: with 7 samples in the file, the eighth
    batch is the first one. Raises FileNotFoundError if nothing matches the pattern; ValueError for a bad
    shard, or one shorter than num_processes * B * T + 1.
    """

    def __init__(
        self, pattern: PathLike, B: int, T: int, *, rank: int = 0, num_processes: int = 1,
        shuffle: bool = False, vocab_size: int = 65536,
    ) -> None:  # fmt: skip
        expect(B > 0 and T > 0, "B and T of at least 1", f"{B=}, {T=}")
        expect(0 <= rank < num_processes, "0 <= rank < num_processes", f"{rank=}, {num_processes=}")
        self.paths = sorted(glob.glob(os.fspath(pattern)))
        expect(self.paths, f"files that match {os.fspath(pattern)!r}", "none", error=FileNotFoundError)
        self.B, self.T, self.rank, self.num_processes = B, T, rank, num_processes
        self.shuffle, self.vocab_size = shuffle, vocab_size
        lengths = [shard_length(path) for path in self.paths]
        self.num_tokens = sum(lengths)  # of all shards
        least = num_processes * B * T + 1
        for path, length in zip(self.paths, lengths, strict=True):
            expect(length >= least, f"at least num_processes * B * T + 1 = {least} tokens", length, path)
        self._num_samples = [(length - 1) // (least - 1) for length in lengths]
        self._rng = Mt19937(42 + rank)
        self._shard_order = np.arange(len(self.paths), dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Start an epoch. The shards are permuted from their order in the last epoch, not from the sorted
        order."""
        if self.shuffle:
            self._rng.permute(self._shard_order)
        self._start_shard(0)

    def _start_shard(self, shard: int) -> None:
        self._shard, self._sample = shard, 0
        self._sample_order = np.arange(self.num_samples, dtype=np.int32)
        if self.shuffle:
            self._rng.permute(self._sample_order)

    @property
    def num_samples(self) -> int:  # of the current shard
        return self._num_samples[self._shard_order[self._shard]]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """x and y, int64 CPU tensors of shape (B, T). A new shard or epoch begins with the call after the
        last sample."""
        self._start_next_shard()
        count = self.B * self.T
        start = (int(self._sample_order[self._sample]) * self.num_processes + self.rank) * count
        path = self.paths[self._shard_order[self._shard]]
        tokens = torch.from_numpy(
            np.fromfile(path, "<u2", count + 1, offset=HEADER_BYTES + 2 * start).astype(np.int64)
        )
        expect(
            len(tokens) == count + 1,
            f"{count + 1} tokens from token {start} on",
            f"{len(tokens)}: the file was cut",
            path,
        )
        top, where = int(tokens.max()), start + int(tokens.argmax())
        expect(
            top < self.vocab_size,
            f"tokens below the vocabulary size {self.vocab_size}",
            f"{top} at token {where}",
            path,
        )
        self._sample += 1
        return tokens[:-1].view(self.B, self.T), tokens[1:].view(self.B, self.T)

    def _start_next_shard(self) -> None:
        """After the last sample of a shard, go to the next one; after the last shard start an epoch."""
        if self._sample >= self.num_samples:
            if self._shard == len(self.paths) - 1:
                self.reset()
            else:
                self._start_shard(self._shard + 1)

    def skip(self, batches: int) -> None:
        """Go to where `batches` calls of next_batch lead, without reading."""
        while batches:
            self._start_next_shard()
            some = min(batches, self.num_samples - self._sample)
            self._sample += some
            batches -= some

    def state(self) -> LoaderState:
        shuffle = (
            (self._shard_order.copy(), self._sample_order.copy(), self._rng.to_bytes())
            if self.shuffle
            else None
        )
        return LoaderState(self._shard, self._sample, shuffle)

    def resume(self, state: LoaderState) -> None:
        """Go to a saved state, of a loader with the same shards, sizes and choice of shuffling."""
        expect(
            (state.shuffle is not None) == self.shuffle,
            f"a loader state with shuffle={self.shuffle}",
            f"shuffle={not self.shuffle}",
        )
        order, sample_order, rng = state.shuffle or (self._shard_order, None, b"")
        expect(len(order) == len(self.paths), f"a loader state of {len(self.paths)} shards", len(order))
        expect(0 <= state.shard < len(order), f"a shard from 0 to {len(order) - 1}", state.shard)
        samples = self._num_samples[order[state.shard]]
        sample_order = np.arange(samples, dtype=np.int32) if sample_order is None else sample_order
        expect(len(sample_order) == samples, f"a loader state of {samples} samples", len(sample_order))
        expect(0 <= state.sample <= samples, f"a sample from 0 to {samples}", state.sample)
        if self.shuffle:
            self._rng = Mt19937.from_bytes(rng)
        self._shard, self._sample, self._shard_order, self._sample_order = (
            state.shard,
            state.sample,
            order.copy(),
            sample_order.copy(),
        )
