"""The command line; one file per command."""

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

import cukern
from cukern.cli import (
    bench,
    check,
    compile,
    doctor,
    gpt2,
    ledger,
    new,
    own_file,
    plot,
    profile,
    report,
    sass,
    sim,
    tune,
    watch,
)
from cukern.cli.common import Dtype, errors, say
from cukern.runtime.compile.compiler import CompileError, SetupError
from cukern.runtime.launch.backend import simulating
from cukern.runtime.launch.limits import LaunchError
from cukern.runtime.registry import CASES
from cukern.sim.faults import Fault, NotSimulated

_OURS = (CompileError, SetupError, LaunchError, Fault, NotSimulated)
_USERS_ERRORS = (
    *_OURS,
    ValueError,
    TypeError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    FloatingPointError,
)


class _Group(TyperGroup):
    """Exits with status 2 for errors that a user can fix, and prints only their message, with the line of an
    own op's file. Exits with 130 for Ctrl-C."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                _flush()
        except BrokenPipeError:  # for example by `| head -1`
            raise SystemExit(1) from None
        except Exception as error:
            place = own_file.place(error)
            # torch's MemoryError
            if not place and not isinstance(error, _USERS_ERRORS) and "DefaultCPUAllocator" not in str(error):
                raise
            text = str(error) or "out of memory"
            if isinstance(error, OSError) and error.filename:
                text = f"{error.strerror}: {error.filename!r}"  # without "[Errno 2]"
            text = f"{place}{'' if isinstance(error, _USERS_ERRORS) else f'{type(error).__name__}: '}{text}"
            with contextlib.suppress(OSError):  # stderr may be full too
                say(f"error: {text}", "red", errors)
            raise SystemExit(2) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _flush() -> None:
    """Flush stdout. If that fails, redirect it to the null device, or Python would report the error again at
    exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"cukern {cukern.__version__}")
        raise typer.Exit


@app.callback(
    help=f"CUDA kernels for PyTorch with nothing to build. OP is one of {', '.join(CASES)}, or a file that "
    f"makes one: my_op.py."
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    dtype: Dtype = None,
) -> None:
    simulating()  # every command reports a wrong CUKERN_BACKEND
    if dtype is not None:
        context.default_map = {
            command: {"dtype": dtype} for command in ("check", "bench", "profile", "watch")
        }


def _help(command: Callable[..., None]) -> str:
    """The docstring with one line per paragraph, since typer keeps the ends of lines. Indented examples
    stay."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


for _command in (
    *(check.check, bench.bench, watch.watch, plot.plot, plot.compare, report.report, profile.profile),
    *(compile.compile, ledger.ledger, sass.sass, new.new, tune.tune, doctor.doctor),
):
    app.command(help=_help(_command))(_command)
app.command("sim", help=_help(sim.simulate))(sim.simulate)
app.add_typer(gpt2.app, name="gpt2")


def main() -> None:
    app()
