"""`cukern sim` of Triton kernels."""

import contextlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cukern.cli.sim_arguments import argument
from cukern.cli.sim_report import Dims, run_kernel
from cukern.runtime.compile.signature import Param
from cukern.sim import triton


def run_triton(
    file: Path, name: str, arch: str, words: Sequence[str], dims: Dims, seed: int, covered: bool
) -> None:
    """Run a Triton kernel of a Python file. Raises ValueError and FileNotFoundError."""
    with triton(arch):
        kernel = _kernel(file, name)
        options = [word for word in words if re.match(r"[A-Za-z_]\w*=", word)]
        named = {option: _value(value) for option, _, value in (word.partition("=") for word in options)}
        taken = [p for p in kernel.arg_names if p not in named]
        plain = [word for word in words if word not in options]
        if len(plain) > len(taken):
            raise ValueError(
                f"{name} takes {len(taken)} more arguments ({', '.join(taken)}), got {len(plain)} in --args"
            )
        params = [
            Param(p, "void", pointer=":" in word, const=True) for p, word in zip(taken, plain, strict=False)
        ]
        run_kernel(
            name,
            params,
            plain,
            lambda values: kernel[dims[0]](*values, **named),
            dims[:1],
            seed,
            [file] if covered else [],
        )


def _kernel(file: Path, name: str) -> Any:
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, name, None)
    if not hasattr(kernel, "arg_names"):
        known = ", ".join(n for n, x in vars(module).items() if hasattr(x, "arg_names")) or "none"
        raise ValueError(f"{file} has no Triton kernel {name!r}; its @triton.jit functions: {known}")
    return kernel


def _value(text: str) -> Any:
    """The value of NAME=VALUE: a number, true, false, null or a string."""
    with contextlib.suppress(ValueError):
        return argument(Param("", "int", pointer=False), text, torch.Generator())
    return text
