"""The tokenizer file against bytes from the specification; decoding; every refusal."""

import struct
from pydoc_data.topics import topics

import pytest
from gpt2_files import header

from cukern.gpt2.data import Tokenizer, byte_tokenizer, read_tokenizer, write_tokenizer

TOKENS = (b"a", b" the", b"\0", b"\xc3", b"\xa9", b"x" * 255, b"\n", b"<|endoftext|>", b"\x1b")
BYTES = header(20240328, 2, 9, 7) + b"".join(struct.pack("B", len(t)) + t for t in TOKENS)


def test_the_bytes_of_the_file(tmp_path):
    write_tokenizer(tmp_path / "a", Tokenizer(TOKENS, 7))
    assert (tmp_path / "a").read_bytes() == BYTES
    read = read_tokenizer(tmp_path / "a")
    assert read == Tokenizer(TOKENS, 7)
    write_tokenizer(tmp_path / "b", read)
    assert (tmp_path / "b").read_bytes() == BYTES


def test_version_1_has_gpt2s_eot(tmp_path):
    (tmp_path / "a").write_bytes(header(20240328, 1, 50257) + b"\1z" * 50257)
    assert read_tokenizer(tmp_path / "a") == Tokenizer((b"z",) * 50257, 50256)


def test_decode():
    tokenizer = Tokenizer(TOKENS, 7)
    assert tokenizer.decode([0, 1, 3, 4, 6]) == "a the\u00e9\n"
    assert tokenizer.decode([3, 0]) == "\ufffda"
    assert byte_tokenizer().decode("Größe".encode()) == "Größe"
    for token in (-1, 9):
        with pytest.raises(ValueError, match=f"expected a token from 0 to 8; found {token}"):
            tokenizer.decode([token])


def test_encode():
    """Against the byte pair encoding of the package tokenizers, whose vocabulary is learned from this text
    and more."""
    pytest.importorskip("tiktoken", reason="tiktoken, of the extra gpt2, is not installed")
    library = pytest.importorskip(
        "tokenizers", reason="tokenizers, of the extra integrations, is not installed"
    )
    text = (
        "It's they'll  we'd\n\n\tGröße 2½ Ⅷ x_1 日本語 don't! <|endoftext|> 'tis 1234 a\u0301  \n end "
        + topics["assignment"]
    )
    peer = library.Tokenizer(library.models.BPE())
    peer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    peer.train_from_iterator([text], trainer)
    to_byte = {char: byte for byte in range(256) for char in ([chr(byte)] if chr(byte) in alphabet else [])}
    rest = [byte for byte in range(256) if byte not in to_byte.values()]
    to_byte |= {chr(256 + i): byte for i, byte in enumerate(rest)}
    names = sorted(peer.get_vocab().items(), key=lambda item: item[1])
    tokenizer = Tokenizer(
        (*(bytes(to_byte[char] for char in name) for name, _ in names), b"<|endoftext|>"), len(names)
    )
    found = tokenizer.encode(text)
    assert found == peer.encode(text).ids and len(found) < len(text) / 2 and tokenizer.decode(found) == text
    assert byte_tokenizer().encode("Größe") == list("Größe".encode()) and tokenizer.encode("") == []
    with pytest.raises(ValueError, match="a token for each byte; found none for b'b'"):
        Tokenizer((b"a", b"<|endoftext|>"), 1).encode("ab")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BYTES[:1000], "expected a header of 1024 bytes; found a file of 1000 bytes"),
        (b"", "expected a header of 1024 bytes; found a file of 0 bytes"),
        (header(20240326, 2, 9, 7), "expected magic number 20240328, of a tokenizer; found 20240326"),
        (header(20240328, 3, 9, 7), "expected version 1 or 2 of a tokenizer; found version 3"),
        (header(20240328, 1, 9, 0) + BYTES[1024:], "expected 50257 tokens in version 1; found 9"),
        (header(20240328, 2, 9, 9) + BYTES[1024:], "expected an EOT token from 0 to 8; found 9"),
        (header(20240328, 2, -9, 7), "expected an EOT token from 0 to -1; found 7"),
        (BYTES[:-1], "expected 1 to 255 bytes for token 8; found 0 bytes of 1"),
        (BYTES[:-2], "expected 9 tokens; found the end of the file after 8 tokens"),
        (BYTES + b"a", f"expected {len(BYTES)} bytes, for 9 tokens; found {len(BYTES) + 1} bytes"),
        (header(20240328, 2, 2, 1) + b"\1a\0", "expected 1 to 255 bytes for token 1; found 0 bytes of 0"),
    ],
)
def test_refused_files(tmp_path, data, message):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError) as error:
        read_tokenizer(tmp_path / "file")
    assert str(error.value) == f"{tmp_path / 'file'}: {message}"


@pytest.mark.parametrize(
    ("tokens", "eot", "message"),
    [
        ((b"a", b""), 0, "expected 1 to 255 bytes for token 1; found 0"),
        ((b"a" * 256,), 0, "expected 1 to 255 bytes for token 0; found 256"),
        ((b"a",), 1, "expected an EOT token from 0 to 0; found 1"),
        ((b"a",), -1, "expected an EOT token from 0 to 0; found -1"),
    ],
)
def test_refused_tokenizers(tokens, eot, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(tokens, eot)
