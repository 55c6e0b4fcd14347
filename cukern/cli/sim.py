"""`cukern sim`: runs one kernel of any .cu file in the simulator, on random inputs, and prints the faults
that it finds."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from cukern.cli import own_file, sim_foreign
from cukern.cli.check import check
from cukern.cli.sim_arguments import GRAMMAR
from cukern.cli.sim_report import Dims, run_kernel
from cukern.runtime import checks
from cukern.runtime.launch.backend import backend
from cukern.runtime.launch.load import load


def sim(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .cu file, whose host code is skipped; a .ptx file; a .py file."
        ),
    ],
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL", help='Its kernel, such as "scale<float, 4>"; may be left out if it has one.'
        ),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="'ARG ...'", help=f"The arguments, separated by spaces. Each is {GRAMMAR}."),
    ] = None,
    grid: Annotated[str, typer.Option(metavar="X,Y,Z", help="Thread blocks.")] = "1",
    block: Annotated[str, typer.Option(metavar="X,Y,Z", help="Threads of a block.")] = "32",
    shared: Annotated[int, typer.Option(help="Bytes of dynamic shared memory.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    covered: Annotated[
        bool, typer.Option("--coverage", help="Print the lines that no thread executed.")
    ] = False,
    triton: Annotated[
        str | None, typer.Option(metavar="KERNEL", help="A Triton kernel of a .py file.")
    ] = None,
    arch: Annotated[str, typer.Option(help="What a Triton kernel is compiled for.")] = "sm_90",
) -> None:
    """Run a kernel of a .cu or .ptx file, or a Triton kernel, in the simulator, and print its faults. Exits
    with 1 if there are any.

    A tensor is TYPE:SHAPE, with the types f16 bf16 f32 f64 e4m3 e5m2 i8 to i64 u8 to u64 bool. A tensor that
    the kernel takes as a pointer to const is filled at random: floats are N(0, 1), integers 0 to 9. Another
    is an output: NaN (integers: the largest), and a read before a write is a fault. FILL says otherwise:
    rand, iota (0, 1, 2, ...), empty (uninitialized), or a number for all elements. Example:

        cukern sim row_max.cu --args "f32:3 f32:3x200 200" --grid 3 --block 256 --coverage

    Tensors of a Triton kernel or of PTX are filled at random, unless FILL says otherwise. NAME=VALUE is a
    tl.constexpr or an option of a Triton kernel, such as num_warps=8. KERNEL of a .ptx file is its entry:

        cukern sim my_kernels.py --triton add --grid 4 --args "f32:999 f32:999 f32:999=empty 999 BLOCK=256"

        cukern sim k.ptx ENTRY --args "f32:64 f32:64=empty 64" --block 64

    A Python file that makes an op is checked as `cukern check FILE --sim` does.
    """
    words = [word for text in args or () for word in text.split()]
    if triton is None and own_file.is_file(str(file)):
        return _check(str(file), kernel, args)
    dims = (_dims("--grid", grid), _dims("--block", block))
    start = checks.integer("--seed", seed, 0, (1 << 63) - 1)
    if triton is not None:
        return sim_foreign.run_triton(file, triton, arch, words, dims, start, covered)
    checks.integer("--shared", shared, 0)
    return _run(file, kernel, words, dims, shared, start, covered)


def _run(
    file: Path, kernel: str | None, words: list[str], dims: Dims, shared: int, seed: int, covered: bool
) -> None:
    """Run a kernel of a .cu or .ptx file. Raises ValueError for wrong arguments."""
    made = load(file, kernel)
    with backend("sim"):
        params = made.params
    if len(words) != len(params):
        raise ValueError(
            f"{made.name} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(words)} in "
            f"--args"
        )

    def launch(values: list[Any]) -> None:
        with backend("sim"):
            made(*values, grid=dims[0], block=dims[1], shared=shared)

    own = [made.source.path, *made.source.files] if covered else []
    run_kernel(made.name, params, words, launch, dims, seed, own)


def _check(file: str, *others: object) -> None:
    """Check an op in the simulator. Raises ValueError if there are arguments of a kernel."""
    if any(others):
        raise ValueError(
            f"{file} makes an op, whose kernels run on its own cases: leave out KERNEL and --args"
        )
    check(file, sim=True)


def _dims(option: str, text: str) -> tuple[int, ...]:
    """One to three positive sizes, such as "4,2"."""
    if not re.fullmatch(r"[0-9]+(?:[,x][0-9]+){0,2}", text) or 0 in (
        found := tuple(map(int, re.split("[,x]", text)))
    ):
        raise ValueError(f"{option} must be one to three positive sizes such as 4,2, got {text!r}")
    return found
