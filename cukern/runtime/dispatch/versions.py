"""The version of an op that a call uses: named by the call, by `use`, by CUKERN_<OP>, or the last that the
GPU can run."""

import contextlib
import contextvars
import json
import operator
import os
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from cukern.runtime import checks
from cukern.runtime.device import cached, device_of
from cukern.runtime.device import versions_in_force as _in_force
from cukern.runtime.registry import CASES

DEFAULT = "default"
Versions = dict[str, tuple[str, str]]  # by op: the versions of forward and backward
_blocks: contextvars.ContextVar[tuple[Versions, ...]] = contextvars.ContextVar("cukern.use", default=())


class _InForce(types.ModuleType):
    """`now` is the choice of all open `use` blocks in this context, as JSON; "" without a block. Raw ops take
    it as their version, so that plans and backward passes keep it. A module, because torch.compile guards a
    module's attributes and traces no context variable."""

    read = _in_force.get
    now = property(operator.methodcaller("read"))


in_force: Any = _InForce("cukern.in_force")


def use(op: str, version: str, *, backward: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Choose the version of an op's kernels inside a block, for calls that name no version.

    Args:
        op: a name such as "softmax". The cases of an op change together, such as matmul, linear and
            linear_gelu.
        version: of the forward, and of the backward unless that is given: `use("softmax", "v5",
            backward="v3")`. "default" is the fastest.

    The setting is a context variable. It holds for the thread or asyncio task that opened the block and for
    tasks started inside it. A thread started inside the block does not inherit it, unless it runs in
    `contextvars.copy_context()`. The backward pass uses the version that its forward call used, in whatever
    thread it runs. But autograd's threads for GPUs do not see the block: what is called first there, such as
    the recomputation of torch.utils.checkpoint or a hook, uses the default. torch.compile compiles again for
    another choice.

    CPU tensors keep the reference. The environment variable CUKERN_SOFTMAX=v5 does the same for a whole
    process, for any op. Raises TypeError or ValueError for an unknown op or version; a call raises ValueError
    if its GPU cannot run the version.

    Example:
        >>> with cukern.use("softmax", "v5"):
        ...     y = cukern.softmax(torch.randn(2, 8))
    """
    checks.choice("op", op, CASES)
    names = version, version if backward is None else backward
    for name in names:
        checks.choice(f"version of cukern.{op}", name, (*CASES[op].op.versions, DEFAULT))
    return _using({CASES[op].op.name: names})


@contextlib.contextmanager
def _using(chosen: Versions) -> Iterator[None]:
    _enter((*_blocks.get(), chosen))
    try:
        yield
    finally:  # blocks in generators may end in any order
        _enter(tuple(block for block in _blocks.get() if block is not chosen))


def _enter(blocks: tuple[Versions, ...]) -> None:
    _blocks.set(blocks)
    _in_force.set(
        json.dumps({op: names for block in blocks for op, names in block.items()}) if blocks else ""
    )


@cached(1)
def _variables() -> Versions:
    """What the environment variables CUKERN_<OP> name, read once."""
    found: Versions = {}
    for name, case in CASES.items():
        if named := os.environ.get(variable := f"CUKERN_{name.upper()}"):
            if named not in case.op.versions:
                raise ValueError(
                    f"{variable}: cukern.{name} has no version {named!r}; it has "
                    f"{', '.join(case.op.versions)}"
                )
            found[case.op.name] = named, named
    return found


def names_of(op: str, version: str) -> tuple[str, str]:
    """The versions of forward and backward that a call names by `version`, which may be that of `in_force`,
    or by CUKERN_<OP>; "": none."""
    if version and not version.startswith("{"):
        return version, version
    chosen = json.loads(version) if version else {}
    forward, backward = chosen.get(op) or _variables().get(op, ("", ""))
    return forward, backward


class Chosen(NamedTuple):
    forward: str
    backward: str


@cached(4096)
def choose(op: str, version: str, device: int) -> Chosen:
    """The names of the versions that run on a GPU: those of `names_of`, else the last of the op's table that
    the GPU can run.

    Raises ValueError for a version that is unknown or that the GPU cannot run.
    """
    versions, capability = CASES[op].op.versions, device_of(device).capability
    default = ([name for name, v in versions.items() if v.requires <= capability] or list(versions))[-1]
    chosen = [default if name in ("", DEFAULT) else name for name in names_of(op, version)]
    for name in chosen:
        if name not in versions:
            checks.unknown_version(op, name, versions)
        if versions[name].requires > capability:
            checks.unsupported_version(op, name, versions[name].requires, capability)
    return Chosen(*chosen)
