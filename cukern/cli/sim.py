"""`cukern sim`: runs one kernel of any .cu file in the simulator, on random inputs, and prints the faults that it finds."""

import contextlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cukern.bench import environment
from cukern.cli import own_file
from cukern.cli.check import check
from cukern.cli.common import say
from cukern.runtime import checks
from cukern.runtime.compile.signature import Param
from cukern.runtime.compile.sources import Source
from cukern.runtime.launch.backend import backend
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.launch.load import load
from cukern.sim import collect, coverage, memory
from cukern.sim.faults import Fault
from cukern.sim.machine.options import Coverage

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64, "bool": torch.bool}
TYPES |= {f"i{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)} | {f"u{n}": getattr(torch, f"uint{n}") for n in (8, 16, 32, 64)}
TYPES |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FILLS = ("rand", "iota", "empty")
_GRAMMAR = "TYPE:SHAPE such as f32:64x64, TYPE:SHAPE=FILL, a number, true, false, null, or numbers separated by commas for a vector"


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .cu file; host code in it is skipped. Or a my_op.py.")],
    kernel: Annotated[
        str | None, typer.Argument(metavar="KERNEL", help='Its kernel, such as "scale<float, 4>"; may be left out if it has one.')
    ] = None,
    args: Annotated[
        list[str] | None, typer.Option(metavar="'ARG ...'", help=f"The arguments, separated by spaces. Each is {_GRAMMAR}.")
    ] = None,
    grid: Annotated[str, typer.Option(metavar="X,Y,Z", help="Thread blocks.")] = "1",
    block: Annotated[str, typer.Option(metavar="X,Y,Z", help="Threads of a block.")] = "32",
    shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    covered: Annotated[bool, typer.Option("--coverage", help="Print the lines that no thread executed.")] = False,
) -> None:
    """Run a kernel of any .cu file in the simulator, and print its faults. Exits with 1 if there are any.

    A tensor is TYPE:SHAPE, with the types f16 bf16 f32 f64 e4m3 e5m2 i8 to i64 u8 to u64 bool. A tensor that the kernel takes as a pointer
    to const is filled at random: floats are N(0, 1), integers 0 to 9. Another is an output: NaN (integers: the largest), and a read before
    a write is a fault. FILL says otherwise: rand, iota (0, 1, 2, ...), empty (uninitialized), or a number for all elements. Example:

        cukern sim row_max.cu --args "f32:3 f32:3x200 200" --grid 3 --block 256 --coverage

    A Python file that makes an op is checked as `cukern check FILE --sim` does.
    """
    if own_file.is_file(str(file)):
        return _check(str(file), kernel, args)
    dims = _dims("--grid", grid), _dims("--block", block)
    checks.integer("--shared", shared, 0)
    words = [word for text in args or () for word in text.split()]
    made = load(file, kernel)
    with backend("sim"):
        params = made.params
    if len(words) != len(params):
        raise ValueError(f"{made.name} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(words)} in --args")
    random = torch.Generator().manual_seed(checks.integer("--seed", seed, 0, (1 << 63) - 1))
    values = [_argument(p, word, random) for p, word in zip(params, words, strict=True)]
    unwritten = [v for p, word, v in zip(params, words, values, strict=True) if isinstance(v, torch.Tensor) and _fill(p, word) == "empty"]
    with memory.scope() as scope:
        for tensor in unwritten:
            scope.add(tensor, written=False)
        with backend("sim"), collect() as faults, coverage() as record:
            made(*values, grid=dims[0], block=dims[1], shared=shared)
    for param, tensor in zip(params, values, strict=True):
        if isinstance(tensor, torch.Tensor) and not param.const:
            _print_output(param, tensor, scope.unwritten(tensor))
    if covered:
        _print_coverage(made.source, record)
    _print_faults(made, dims, faults)


def _check(file: str, *others: object) -> None:
    """Check an op in the simulator. Raises ValueError if there are arguments of a kernel."""
    if any(others):
        raise ValueError(f"{file} makes an op, whose kernels run on its own cases: leave out KERNEL and --args")
    check(file, sim=True)


def _dims(option: str, text: str) -> tuple[int, ...]:
    """One to three positive sizes, such as "4,2"."""
    if not re.fullmatch(r"[0-9]+(?:[,x][0-9]+){0,2}", text) or 0 in (found := tuple(map(int, re.split("[,x]", text)))):
        raise ValueError(f"{option} must be one to three positive sizes such as 4,2, got {text!r}")
    return found


# ---- arguments


def _fill(param: Param, word: str) -> str:
    return word.partition("=")[2] or ("rand" if param.const else "empty")


def _argument(param: Param, word: str, random: torch.Generator) -> Any:
    """The value of one word of --args. Raises ValueError."""
    if param.pointer and word != "null":
        return _tensor(param, word, random)
    if word in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[word]
    numbers = tuple(_number(part) for part in word.split(","))
    if None in numbers:
        raise ValueError(f"--args: {word!r} for {param} is no number: an argument is {_GRAMMAR}")
    return numbers[0] if len(numbers) == 1 else numbers


def _number(text: str) -> int | float | None:
    with contextlib.suppress(ValueError):
        return int(text, 0)
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _tensor(param: Param, word: str, random: torch.Generator) -> torch.Tensor:
    match = re.fullmatch(r"(\w+):([0-9]+(?:x[0-9]+)*)(?:=(.+))?", word)
    if match is None:
        raise ValueError(f"--args: {word!r} for {param} must be a tensor, TYPE:SHAPE such as f32:64x64, or null")
    checks.choice(f"--args: the type of {word!r}", match[1], TYPES)
    dtype, shape, fill = TYPES[match[1]], [int(n) for n in match[2].split("x")], _fill(param, word)
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
        number: int | float | None = torch.nan if floating else 1 if dtype == torch.bool else torch.iinfo(dtype).max
    else:
        number = _number(fill)
    if number is None:
        raise ValueError(f"it must end in a number or one of {', '.join(FILLS)}, got {fill!r}")
    if not floating and (isinstance(number, float) or not _fits(number, dtype)):
        raise ValueError(f"{number} does not fit its elements")
    whole = torch.full(shape, number, dtype=torch.float32 if floating and dtype.itemsize == 1 else dtype, device="cpu")
    return whole.to(dtype)  # torch fills no 8-bit floats


def _fits(number: int, dtype: torch.dtype) -> bool:
    return number in (0, 1) if dtype == torch.bool else torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


# ---- the report


def _print_output(param: Param, tensor: torch.Tensor, unwritten: int) -> None:
    """What a launch left in a tensor that it may write."""
    shape = "x".join(map(str, tensor.shape))
    left = f", {unwritten} of {tensor.nbytes} bytes not written" if unwritten else ""
    values = tensor.double() if tensor.dtype.is_floating_point or tensor.dtype == torch.bool else tensor.to(torch.int64)
    numbers = values[~values.isnan()]
    extremes = f"{numbers.min().item():g} to {numbers.max().item():g}" if len(numbers) else "no numbers"
    say(f"{param.name}  {str(tensor.dtype).removeprefix('torch.')} {shape}: {extremes}, {values.isnan().sum().item()} NaN{left}")


def _print_coverage(source: Source, record: Coverage) -> None:
    """The lines of the file, and of what it includes from its folder or cukern's, that were not executed."""
    own = {path.name: path for path in (source.path, *source.program.files)}  # by name: compiled code may come from a copy of the file
    texts = {name: path.read_text(errors="replace").split("\n") for name, path in own.items()}
    for title, places in (("not executed", record.missed), ("a branch went one way", record.one_way)):
        for file, line in (place.rsplit(":", 1) for place in places):
            if (name := Path(file).name) in own:
                say(f"{title}: {own[name]}:{line}  {texts[name][int(line) - 1].strip()}", "yellow")
    counted, missed = ([p for p in places if Path(p.rsplit(":", 1)[0]).name in own] for places in (record.lines, record.missed))
    say(f"{len(counted) - len(missed)} of {len(counted)} lines executed")


def _print_faults(kernel: Kernel, dims: Sequence[tuple[int, ...]], faults: Sequence[Fault]) -> None:
    distinct: dict[tuple[type[Fault], str], list[Fault]] = {}
    for fault in faults:
        distinct.setdefault((type(fault), fault.where.location), []).append(fault)
    for kind, same in distinct.items():
        more = f" ({len(same) - 1} more at this line)" if len(same) > 1 else ""
        say(f"{kind[0].__name__}: {same[0]}{more}", "red")
    count = f"{len(distinct)} fault{'s' * (len(distinct) > 1)}" if faults else "no faults"
    grid, block = (" x ".join(map(str, d)) for d in dims)
    say(f"{kernel.name} <<<grid {grid}, block {block}>>>: {count}", "red" if faults else "green")
    if faults:
        raise typer.Exit(1)
