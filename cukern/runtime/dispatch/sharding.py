"""Raw ops on DTensors: each runs on the local parts of its arguments.

A rule names the dimensions along which an op may be split, as einsum does: "br, r -> br" for the arguments'
tensors and the outputs. Each dimension of the mesh splits along one letter: the first one along which an
argument is already sharded, if all sizes divide by the number of processes. Everything else is replicated:
other tensors, "." dimensions, and plain tensors, which must be the same on all processes. "*" stands for all
dimensions of a tensor that have no letter. An output without the letter is the sum over the processes; "=" is
an output that is the same on all. The last output's letters hold for all that follow. A rule may be a
function of the op's arguments that returns a string.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cukern.runtime import checks

Rule = str | Callable[..., str] | None  # None: everything is replicated
_waiting: list[tuple[Any, Rule]] = []  # ops whose rule torch does not know yet


def add(op: Any, rule: Rule) -> None:
    """Keep the rule of a raw op until DTensors are used."""
    _waiting.append((op, rule))


@checks.constant
def register() -> None:
    """Register the waiting rules, if torch.distributed.tensor is imported."""
    if _waiting and (tensor := sys.modules.get("torch.distributed.tensor")) is not None:
        while _waiting:
            op, rule = _waiting.pop()
            torch.library.register_torch_dispatch(op, tensor.DTensor, _dispatch(op, rule))


def _dispatch(op: Any, rule: Rule) -> Callable[..., Any]:
    writes = [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]

    def run(mode: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        with torch.no_grad():
            return _run(op, rule(*args) if callable(rule) else rule or "", writes, args)

    return run


def _run(op: Any, rule: str, writes: Sequence[bool], args: Sequence[Any]) -> Any:
    names, outs = _names(op, rule, args)
    every = [(t, _letters(letters, t.ndim)) for i, letters in names.items() for t in _tensors(args[i])]
    mesh = next(t.device_mesh for t, _ in every if hasattr(t, "device_mesh"))
    chosen, parts = _chosen(mesh, every), list(args)
    for i, letters in names.items():
        each = [_local(op, mesh, chosen, t, letters, writes[i]) for t in _tensors(args[i])]
        parts[i] = each if isinstance(args[i], list | tuple) else each[0]
    found = op(*parts)
    whole = [_whole(mesh, chosen, t, outs[min(i, len(outs) - 1)]) for i, t in enumerate(_tensors(found))]
    return whole[0] if isinstance(found, torch.Tensor) else found if found is None else type(found)(whole)


def _names(op: Any, rule: str, args: Sequence[Any]) -> tuple[dict[int, str], list[str]]:
    """The rule's letters for each argument that has tensors, and for the outputs."""
    ins, outs = ([one.strip() for one in part.split(",")] for part in rule.partition("->")[::2])
    slots = [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    return {i: ins[n] if rule else "" for n, i in enumerate(slots) if _tensors(args[i])}, outs


def _placed(chosen: Sequence[str], letters: str, ndim: int, absent: Any) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    absent, letters = Replicate() if letters == "=" else absent, _letters(letters, ndim)
    return [Shard(letters.index(c)) if c and c in letters else absent if c else Replicate() for c in chosen]


def _local(op: Any, mesh: Any, chosen: Sequence[str], t: Any, letters: str, written: bool) -> torch.Tensor:
    """The part of an argument that this process needs."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    want = _placed(chosen, letters, t.ndim, Replicate())
    if t.device_mesh != mesh or (written and list(t.placements) != want):
        rule = "on one mesh" if t.device_mesh != mesh else f"placed as {want}, because it is written in place"
        raise ValueError(
            f"{op.name()}: a DTensor on {t.device_mesh} with {list(t.placements)} must be {rule}"
        )
    return t.redistribute(mesh, want).to_local()


def _whole(mesh: Any, chosen: Sequence[str], t: torch.Tensor, letters: str) -> Any:
    """The DTensor of an output, with sums added."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    given = DTensor.from_local(t, mesh, _placed(chosen, letters, t.ndim, Partial()), run_check=False)
    return given.redistribute(mesh, [Replicate() if p.is_partial() else p for p in given.placements])


def _tensors(a: Any) -> list[torch.Tensor]:
    return [t for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)]


def _letters(letters: str, ndim: int) -> str:
    """One letter per dimension: "*" becomes digits. Dimensions that no letter names are not split."""
    return letters if letters == "=" else letters.replace("*", "0123456789"[: ndim - len(letters) + 1])[:ndim]


def _chosen(mesh: Any, every: Sequence[tuple[Any, str]]) -> list[str]:
    """The letter along which each dimension of the mesh splits the tensors; "": none."""
    chosen: list[str] = []
    for m in range(mesh.ndim):
        placements = [(t.placements[m], letters) for t, letters in every if hasattr(t, "placements")]
        named = [letters[p.dim] for p, letters in placements if p.is_shard() and p.dim < len(letters)]
        fitting = [c for c in named if c != "." and _divides([*chosen, c], mesh, every)]
        chosen.append(fitting[0] if fitting else "")
    return chosen


def _divides(chosen: Sequence[str], mesh: Any, every: Sequence[tuple[Any, str]]) -> bool:
    """True if all tensors split evenly along the last letter."""
    parts = math.prod(mesh.size(m) for m, c in enumerate(chosen) if c == chosen[-1])
    return all(
        t.shape[letters.index(chosen[-1])] % parts == 0 for t, letters in every if chosen[-1] in letters
    )
