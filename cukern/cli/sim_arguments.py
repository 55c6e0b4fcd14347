"""The words of `cukern sim --args`, and the arguments that they stand for."""

import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from cukern.bench import environment
from cukern.runtime import checks
from cukern.runtime.compile.signature import Param

TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "bool": torch.bool,
}
TYPES |= {f"i{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)} | {
    f"u{n}": getattr(torch, f"uint{n}") for n in (8, 16, 32, 64)
}
TYPES |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FILLS = ("rand", "iota", "empty")
GRAMMAR = (
    "TYPE:SHAPE such as f32:64x64, TYPE:SHAPE=FILL, a number, true, false, null, or numbers separated by "
    "commas for a vector"
)


def fill_of(param: Param, word: str) -> str:
    return word.partition("=")[2] or ("rand" if param.const else "empty")


def argument(param: Param, word: str, random: torch.Generator) -> Any:
    """The value of one word of --args. Raises ValueError."""
    if param.pointer and word != "null" and (":" in word or not param.untyped):
        return tensor(param, word, random)
    if word in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[word]
    numbers = tuple(parsed(part) for part in word.split(","))
    if None in numbers:
        raise ValueError(f"--args: {word!r} for {param} is no number: an argument is {GRAMMAR}")
    return numbers[0] if len(numbers) == 1 else numbers


def parsed(text: str) -> int | float | None:
    with contextlib.suppress(ValueError):
        return int(text, 0)
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def tensor(param: Param, word: str, random: torch.Generator) -> torch.Tensor:
    match = re.fullmatch(r"(\w+):([0-9]+(?:x[0-9]+)*)(?:=(.+))?", word)
    if match is None:
        raise ValueError(
            f"--args: {word!r} for {param} must be a tensor, TYPE:SHAPE such as f32:64x64, or null"
        )
    checks.choice(f"--args: the type of {word!r}", match[1], TYPES)
    dtype, shape, fill = TYPES[match[1]], [int(n) for n in match[2].split("x")], fill_of(param, word)
    need, has = math.prod(shape) * dtype.itemsize, environment.memory()
    if need > has:
        raise ValueError(f"--args: {word!r} takes {need / 2**30:.1f} GiB, there are {has / 2**30:.1f}")
    try:
        return _filled(shape, dtype, fill, random)
    except ValueError as error:
        raise ValueError(f"--args: {word!r}: {error}") from None


def _filled(shape: Sequence[int], dtype: torch.dtype, fill: str, random: torch.Generator) -> torch.Tensor:
    """A tensor with what `fill` says. Raises ValueError."""
    floating = dtype.is_floating_point
    if fill == "rand":
        numbers = torch.empty(shape, dtype=torch.float32 if floating else torch.int64, device="cpu")
        drawn = numbers.normal_(generator=random) if floating else numbers.random_(0, 10, generator=random)
        return drawn.to(dtype) if dtype != torch.bool else drawn % 2 == 0
    if fill == "iota":
        return torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").reshape(shape).to(dtype)
    if fill == "empty":
        number: int | float | None = (
            torch.nan if floating else 1 if dtype == torch.bool else torch.iinfo(dtype).max
        )
    else:
        number = parsed(fill)
    if number is None:
        raise ValueError(f"it must end in a number or one of {', '.join(FILLS)}, got {fill!r}")
    if not floating and (isinstance(number, float) or not _fits(number, dtype)):
        raise ValueError(f"{number} does not fit its elements")
    whole = torch.full(
        shape, number, dtype=torch.float32 if floating and dtype.itemsize == 1 else dtype, device="cpu"
    )
    return whole.to(dtype)  # torch fills no 8-bit floats


def _fits(number: int, dtype: torch.dtype) -> bool:
    return (
        number in (0, 1)
        if dtype == torch.bool
        else torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
    )
