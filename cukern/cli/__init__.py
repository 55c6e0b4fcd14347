"""The command line; one file per command."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import cukern
from cukern.cli import own_file
from cukern.cli.common import Dtype, errors, say
from cukern.cli.names import NAMES

# Command: its module, and its line of `cukern --help`. A module is imported when its command is called, since
# most import torch, which takes 3 s. The others are those below.
_COMMANDS = {
    "check": ("check", "Compare every version with float64 and with the others."),
    "bench": ("bench", "Time every version and peer of OP."),
    "watch": ("watch", "Check and time OP now and at each save of its files."),
    "plot": ("plot", "Draw recorded results of OP over size or over commits."),
    "compare": ("plot", "Compare recorded results of two GPUs or two commits."),
    "report": ("report", "Write one HTML page of recorded results."),
    "profile": ("profile", "Print the profiler's table of OP, and write a trace."),
    "compile": ("compile", "Compile kernels without a GPU; print their registers and spills."),
    "judge": ("judge", "Judge a generated kernel against a reference in plain torch."),
    "ledger": ("ledger", "List every launch that ops make."),
    "sass": ("sass", "Count machine instructions by kind and source line, without a GPU."),
    "new": ("new", "Write a differentiable op into the current folder."),
    "tune": ("tune", "Measure and store this GPU's bandwidth and clock, which plans use."),
    "doctor": ("doctor", "Report what is installed and missing, and how to fix it."),
    "sim": ("sim", "Run a kernel in the simulator, and print its faults."),
    "gpt2": ("gpt2", "GPT-2 with llm.c's file formats, on cukern's kernels."),
}
_WITHOUT_TORCH = ("new", "sass", "doctor")  # until they need it; only then is CUKERN_BACKEND checked


class _Group(TyperGroup):
    """Exits with status 2 for errors that a user can fix, and prints only their message, with the line of an
    own op's file. Exits with 130 for Ctrl-C."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _imported(str(name)), rest

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                _flush()
        except BrokenPipeError:  # for example by `| head -1`
            raise SystemExit(1) from None
        except Exception as error:
            place, users = own_file.place(error), _is_users(error)
            if not place and not users:
                raise
            text = str(error) or "out of memory"
            if isinstance(error, OSError) and error.filename:
                text = f"{error.strerror}: {error.filename!r}"  # without "[Errno 2]"
            text = f"{place}{'' if users else f'{type(error).__name__}: '}{text}"
            with contextlib.suppress(OSError):  # stderr may be full too
                say(f"error: {text}", "red", errors)
            raise SystemExit(2) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _is_users(error: Exception) -> bool:
    """True for an error that a user can fix."""
    if isinstance(error, (ValueError, TypeError, OSError, MemoryError, FloatingPointError)):
        return True
    import torch

    from cukern.sim import Fault, NotSimulated

    ours = (cukern.CompileError, cukern.SetupError, cukern.LaunchError, Fault, NotSimulated)
    # torch has no class for a CPU without memory
    return isinstance(error, (*ours, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


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
    help=f"CUDA kernels for PyTorch with nothing to build. OP is one of {', '.join(NAMES)}, or a file that "
    f"makes one: my_op.py."
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    dtype: Dtype = None,
) -> None:
    if context.invoked_subcommand not in _WITHOUT_TORCH:
        from cukern.runtime.launch.backend import simulating

        simulating()  # reports a wrong CUKERN_BACKEND
    if dtype is not None:
        context.default_map = {
            command: {"dtype": dtype} for command in ("check", "bench", "profile", "watch")
        }


def _help(command: Callable[..., None]) -> str:
    """The docstring with one line per paragraph, since typer keeps the ends of lines. Indented examples
    stay."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


def _imported(name: str) -> Any:
    """The command of this name, with its arguments and options."""
    module = importlib.import_module(f"{__name__}.{_COMMANDS[name][0]}")
    if hasattr(module, "app"):  # a group of commands
        return get_command(module.app)
    command, made = getattr(module, name), typer.Typer(add_completion=False)
    made.command(name, help=_help(command))(command)
    return get_command(made)


for _name, (_, _line) in _COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)  # see _Group.resolve_command


def main() -> None:
    app()
