"""`cukern gpt2 data` and `convert`: token shards from text, llm.c's published files, and models to and from
Hugging Face."""

import hashlib
import importlib.util
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from cukern.cli import common
from cukern.cli.common import say, torch_dtype
from cukern.gpt2 import data
from cukern.gpt2.checkpoint import read_model, write_model
from cukern.gpt2.data import read_tokenizer, write_tokenizer
from cukern.gpt2.evaluate import read_hellaswag
from cukern.gpt2.files import expect, replace
from cukern.gpt2.hugging_face import read_hugging_face, write_hugging_face

STARTER_PACK = "https://huggingface.co/datasets/karpathy/llmc-starter-pack/resolve/main/"
# file -> folder, and its size or a function that reads and checks it
PACK: dict[str, tuple[str, int | Callable[[str], object]]] = {
    "gpt2_124M.bin": (".", 497_904_640),
    "gpt2_124M_bf16.bin": (".", 248_952_832),
    "gpt2_124M_debug_state.bin": (".", 549_369_860),
    "gpt2_tokenizer.bin": (".", read_tokenizer),
    "tiny_shakespeare_train.bin": ("dev/data/tinyshakespeare", 611_544),
    "tiny_shakespeare_val.bin": ("dev/data/tinyshakespeare", 66_560),
    "hellaswag_val.bin": ("dev/data/hellaswag", read_hellaswag),
}


def make_data(
    texts: Annotated[list[Path] | None, typer.Argument(metavar="TEXT...", help="Text files, UTF-8.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to.")] = Path("."),
    name: Annotated[
        str, typer.Option(help="The shards are NAME_val_000000.bin, NAME_train_000001.bin, ...")
    ] = "text",
    encoding: Annotated[
        str,
        typer.Option(
            metavar="auto|gpt2|bytes", help="auto: gpt2 if tiktoken has its vocabulary, else bytes."
        ),
    ] = "auto",
    split: Annotated[
        bool,
        typer.Option(
            "--sections", help="A new document after each blank line, as in llm.c's tinyshakespeare."
        ),
    ] = False,
    val_tokens: Annotated[
        int | None, typer.Option(help="Validate on the first tokens; by default on the last 10 %.")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a training shard.")] = 10**8,
    starter_pack: Annotated[
        bool, typer.Option("--starter-pack", help="Download llm.c's published files: 1.3 GB.")
    ] = False,
) -> None:
    """Write token shards and a tokenizer from text files, or download llm.c's published files."""
    expect(bool(texts) != starter_pack, "text files or --starter-pack", "both" if texts else "neither")
    if starter_pack:
        for file, (folder, size) in PACK.items():
            _download(file, out / folder / file, size)
        return
    expect(encoding in ("auto", "gpt2", "bytes"), "the encoding 'auto', 'gpt2' or 'bytes'", repr(encoding))
    encoding = encoding if encoding != "auto" else "gpt2" if _tiktoken_at_hand() else "bytes"
    documents = [_read(path) for path in texts or ()]
    try:
        tokens, tokenizer = data.tokenize(
            [part for text in documents for part in (_sections(text) if split else [text])], encoding
        )
    except ImportError as error:
        raise ValueError(str(error)) from None
    for path in data.write_shards(out, name, tokens, val_first=val_tokens, shard_tokens=shard_tokens):
        say(f"{path}: {data.shard_length(path)} tokens")
    write_tokenizer(out / f"{name}_tokenizer.bin", tokenizer)
    say(f"{out / name}_tokenizer.bin: {len(tokenizer.tokens)} tokens")


def _sections(text: str) -> list[str]:
    """The parts of a text between blank lines, as llm.c cuts tiny_shakespeare: all but the last keep the
    blank line."""
    *parts, last = text.split("\n\n")
    return [part + "\n\n" for part in parts] + [last]


def _tiktoken_at_hand() -> bool:
    """True if tiktoken is installed and has GPT-2's vocabulary in its cache, so that it downloads nothing."""
    if importlib.util.find_spec("tiktoken") is None:
        return False
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    names = (hashlib.sha1((url + name).encode()).hexdigest() for name in ("vocab.bpe", "encoder.json"))
    return all(os.path.isfile(os.path.join(folder, name)) for name in names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8; found the byte {error.object[error.start]:#x} at {error.start}"
        ) from None


def _download(name: str, path: Path, size: int | Callable[[str], object]) -> None:
    """Download a file of the starter pack, unless it is there. Raises OSError without a network, ValueError
    for another size or content."""
    if path.exists():
        say(f"{path}: is there")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            urllib.request.urlopen(STARTER_PACK + name, timeout=30) as source,
            replace(path) as file,
            common.progress() as bar,
        ):
            task = bar.add_task(name, total=int(source.headers.get("Content-Length") or 0) or None)
            while block := source.read(1 << 20):
                file.write(block)
                bar.advance(task, len(block))
            file.flush()
            if callable(size):
                size(file.name)
            else:
                expect(file.tell() == size, f"{size} bytes", f"{file.tell()} bytes", STARTER_PACK + name)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise OSError(f"{STARTER_PACK}{name} cannot be downloaded: {error}") from None
    say(f"{path}: {path.stat().st_size} bytes")


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A model file NAME.bin, or a folder of Hugging Face.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The other one of the two.")],
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="f|b", help="float32 or bfloat16; by default the source's."),
    ] = None,
) -> None:
    """Convert a GPT-2 from llm.c's file to a folder of Hugging Face (config.json, model.safetensors) or back.
    float16 becomes float32."""
    expect(dtype in (None, "f", "b"), "--dtype f or b", repr(dtype))
    names = f"{source} and {target}"
    expect(
        (source.suffix == ".bin") != (target.suffix == ".bin"),
        "one model file NAME.bin and one folder",
        names,
    )
    try:
        config, parameters = read_model(source) if source.suffix == ".bin" else read_hugging_face(source)
        own = parameters["wte"].dtype
        wanted = torch_dtype(dtype) if dtype else torch.float32 if own == torch.float16 else own
        parameters = {name: tensor.to(wanted) for name, tensor in parameters.items()}
        if target.suffix == ".bin":
            write_model(target, config, parameters)
        else:
            write_hugging_face(target, config, parameters)
    except ImportError as error:
        raise ValueError(str(error)) from None
    say(f"{target}: {config.num_layers} layers, {config.channels} channels, {wanted}")
