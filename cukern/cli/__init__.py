"""The command line: `cukern check`, `bench`, `profile`, `compile`, `doctor`; one file a verb."""

import importlib.metadata
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from cukern.cli import bench, check, compile, doctor, profile
from cukern.cli.common import console, errors
from cukern.runtime.compiler import CompileError, SetupError
from cukern.runtime.limits import LaunchError
from cukern.sim.faults import Fault, NotSimulated

_USERS_ERRORS = (ValueError, TypeError, CompileError, SetupError, LaunchError, Fault, NotSimulated, torch.OutOfMemoryError)


class _Group(TyperGroup):
    """Ends with status 2 and the message alone for an error that the user can mend."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _USERS_ERRORS as error:
            errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            number = importlib.metadata.version("cukern")
        except importlib.metadata.PackageNotFoundError:
            number = "from a source tree that is not installed"
        console.print(f"cukern {number}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    """CUDA kernels for PyTorch with nothing to build."""


app.command()(check.check)
app.command()(bench.bench)
app.command()(profile.profile)
app.command()(compile.compile)
app.command()(doctor.doctor)


def main() -> None:
    app()
