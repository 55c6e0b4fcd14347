"""llm.c's tokenizer file: the bytes of each token. It decodes tokens; it does not encode text."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from cukern.gpt2.files import PathLike, check_size, expect, read, replace, write_header

MAGIC = 20240328
GPT2_VOCAB, GPT2_EOT = 50257, 50256
FILE = "gpt2_tokenizer.bin"  # the name of the published one


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
        return b"".join(map(self._bytes, tokens)).decode(errors="replace")

    def printed(self, token: int) -> bytes:
        """What llm.c prints for a token: nothing from a NUL on, and no single byte that is neither printable nor white space."""
        text = self._bytes(token).partition(b"\0")[0]
        return b"" if len(text) == 1 and not (32 <= text[0] < 127 or text.isspace()) else text

    def _bytes(self, token: int) -> bytes:
        expect(0 <= token < len(self.tokens), f"a token from 0 to {len(self.tokens) - 1}", token)
        return self.tokens[int(token)]


def byte_tokenizer() -> Tokenizer:
    """One token per byte. EOT is byte 0, which ordinary text does not contain."""
    return Tokenizer(tuple(bytes([i]) for i in range(256)), eot=0)


def read_tokenizer(path: PathLike) -> Tokenizer:
    """Read gpt2_tokenizer.bin. Version 1 has no slot for EOT; it is GPT-2's, 50256."""
    tokens = []
    with read(path, MAGIC, (1, 2), "a tokenizer") as (file, header):
        version, count, eot = header[1:4]
        if version == 1:
            expect(count == GPT2_VOCAB, f"{GPT2_VOCAB} tokens in version 1", count)
            eot = GPT2_EOT
        expect(0 <= eot < count, f"an EOT token from 0 to {count - 1}", eot)
        for i in range(count):
            length = file.read(1)
            expect(length, f"{count} tokens", f"the end of the file after {i} tokens")
            tokens.append(file.read(length[0]))
            expect(0 < length[0] == len(tokens[i]), f"1 to 255 bytes for token {i}", f"{len(tokens[i])} bytes of {length[0]}")
        check_size(file, file.tell(), f"{count} tokens")
        return Tokenizer(tuple(tokens), eot)


def write_tokenizer(path: PathLike, tokenizer: Tokenizer) -> None:
    """Write version 2 of the file."""
    with replace(path) as file:
        write_header(file, MAGIC, 2, len(tokenizer.tokens), tokenizer.eot)
        file.write(b"".join(bytes([len(token)]) + token for token in tokenizer.tokens))


def tokenizer_for(vocab_size: int, path: PathLike | None = None) -> Tokenizer | None:
    """The tokenizer of a model: of the file, else bytes for 256 tokens, else gpt2_tokenizer.bin in the current folder, if it is there."""
    if path is None and vocab_size == 256:
        return byte_tokenizer()
    if path is None and not os.path.exists(FILE):
        return None
    tokenizer = read_tokenizer(path or FILE)
    expect(len(tokenizer.tokens) == vocab_size, f"the model's {vocab_size} tokens", len(tokenizer.tokens), path or FILE)
    return tokenizer
