"""Replays a recorded call: its steps become the source of a Python function."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.runtime.recording import (
    FIELDS,
    Allocation,
    Call,
    Constant,
    Launch,
    Launcher,
    Pointer,
    Program,
    Ref,
    Struct,
)

STALE = object()  # what a replay returns if a setting has changed


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """A function of size, stride and dtype that allocates, in the least host time."""
    # as torch.compile's code does; 2 us less than torch.empty
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    # which fills new memory
    if fast is not None and device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


# A view in the least host time, outside of autograd: tensor, size, stride, elements between the first of both
_reinterpret: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards,
    "_reinterpret_tensor",
    lambda t, size, stride, more: t.as_strided(size, stride, t.storage_offset() + more),
)


class _Writer:
    """The source of a function that replays a program."""

    def __init__(self, program: Program, inputs: int | Sequence[bool]):
        self.program, self.of_function = program, not isinstance(inputs, int)
        tensors = inputs if isinstance(inputs, Sequence) else (True,) * inputs
        self.inputs, count = sum(tensors), itertools.count()
        self.names = ["ctx"] * self.of_function + [
            f"t{next(count)}" if t else f"_{i}" for i, t in enumerate(tensors)
        ]
        self.space: dict[str, Any] = {}
        self.lines: list[str] = []
        self.with_address: set[int] = set()
        self.growth = 0  # the last line that may allocate
        self.folded: set[int] = set()
        self.objects = self._objects()

    def _objects(self) -> set[int]:
        """The tensors that are needed as objects: results of the call, and arguments of operations. Where
        autograd is off, an argument that is a view of a view is made as one view (`folded`)."""
        results = set(_numbers(self.program.result))
        needed = set(results)
        for step in reversed(self.program.steps):
            if not isinstance(step, Call):
                continue
            used = needed.intersection(_numbers(step.results))
            if step.view and not used & results and all(map(self._foldable, used)):
                self.folded |= used
                needed.update(self.program.roots[n][0] for n in used)
            elif used or not step.view:
                needed.update(_numbers((step.args, step.kwargs)))
        return needed

    def _foldable(self, n: int) -> bool:
        root, dtype = self.program.roots[n][0], self.program.geometries[n][2]
        same = n != root and dtype == self.program.geometries[root][2] and not dtype.is_complex
        return same and not self.program.grad

    def constant(self, value: Any) -> str:
        """A literal, or the name of a value."""
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"c{len(self.space)}"
        self.space[name] = value
        return name

    def tree(self, value: Any) -> str:
        """An expression for arguments or results."""
        if isinstance(value, Ref):
            return f"t{value.number}"
        if isinstance(value, Constant):
            return self.constant(value.tensor)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {self.tree(v)}" for name, v in value.items()) + "}"
        if type(value) is tuple:
            return "(" + "".join(f"{self.tree(v)}, " for v in value) + ")"
        return "[" + ", ".join(map(self.tree, value)) + "]" if type(value) is list else self.constant(value)

    def argument(self, value: Any) -> str:
        """An expression for an argument of a launch."""
        if isinstance(value, Struct):
            return f"{self.constant(value.make)}({', '.join(map(self.argument, value.arguments))})"
        if not isinstance(value, Pointer):
            return self.constant(value)
        root, offset = value
        if root not in self.with_address:
            self.with_address.add(root)
            self.lines.append(f"p{root} = t{root}.data_ptr()")
        return f"p{root} + {offset}" if offset else f"p{root}"

    def write(self) -> str:
        for guard in self.program.guards:
            self.lines.append(
                f"if {self.constant(guard.ask)}() != {self.constant(guard.value)}: return "
                f"{self.constant(STALE)}"
            )
        final = self._final_geometries()
        for step in self.program.steps:
            if isinstance(step, Allocation):
                self._allocate(step, final)
            elif isinstance(step, Launch):
                last = (
                    max((i for i, a in enumerate(step.args) if isinstance(a, Pointer | Struct)), default=-1)
                    + 1
                )
                first = [self.argument(a) for a in step.args[:last]]
                launch = self.constant(
                    _bound(step.launch, step.grid, step.block, step.shared, *step.args[last:])
                )
                self.lines.append(f"{launch}({', '.join(first)})")
            elif not step.view or self.objects.intersection(_numbers(step.results)) - self.folded:
                self._call(step)
            else:
                for n in self.folded.intersection(_numbers(step.results)):
                    self._view(n)
        result = _map_refs(self.program.result, lambda n: final.get(n, (n,))[0])
        if self.of_function:
            result, fields = result
            self.lines += [
                f"ctx.{n} = {self.tree(v)}" for n, v in zip(FIELDS, fields, strict=True) if v is not None
            ]
        self.lines.append(f"return {self.tree(result)}")
        body = "\n        ".join(self._freeing())
        return (
            f"def make({', '.join(self.space)}):\n    def replay({', '.join(self.names)}):\n        "
            f"{body}\n    return replay\n"
        )

    def _freeing(self) -> Iterator[str]:
        """The lines. Before memory is allocated, that of tensors without another use is freed, as in the
        recorded call."""
        used = [{int(n) for n in re.findall(r"\b[tp](\d+)\b", line)} for line in self.lines]
        last = {n: i for i, numbers in enumerate(used) for n in numbers}
        for i, line in enumerate(self.lines):
            yield line
            unused = [f"t{n}" for n in sorted(used[i]) if n >= self.inputs and last[n] == i]
            if unused and i < self.growth:
                yield f"del {', '.join(unused)}"

    def _final_geometries(self) -> dict[int, tuple[int, Any]]:
        """Results that are views of a whole allocation are allocated as such: by their number, the allocation
        and the geometry."""
        roots, geometries = self.program.roots, self.program.geometries
        allocated, uses = {s.number for s in self.program.steps if isinstance(s, Allocation)}, self._uses()
        found: dict[int, tuple[int, Any]] = {}
        for n in set(_numbers(self.program.result)):
            root, offset = roots[n]
            whole = not offset and _nbytes(geometries[n]) == _nbytes(geometries[root])
            if n != root and root in allocated and whole and uses.count(root) == 1:
                found[n] = root, geometries[n]
                self.objects -= {m for m in self.objects if roots[m][0] == root}
        return found

    def _uses(self) -> list[int]:
        """The roots of the results and of the arguments of operations, each as often as it is used."""
        calls = [s for s in self.program.steps if isinstance(s, Call) and not s.view]
        return [
            self.program.roots[n][0]
            for n in _numbers([self.program.result, *((s.args, s.kwargs) for s in calls)])
        ]

    def _allocate(self, step: Allocation, final: dict[int, tuple[int, Any]]) -> None:
        n = step.number
        referred = any(p.root == n for s in self.program.steps if isinstance(s, Launch) for p in s.pointers)
        of_result = next((geometry for root, geometry in final.values() if root == n), None)
        if n in self.objects or referred or of_result:
            size, stride, dtype = of_result or (step.size, step.stride, step.dtype)
            make, *rest = map(self.constant, (_empty_on(step.device), size, stride, dtype))
            self.growth = len(self.lines)
            self.lines.append(f"t{n} = {make}({', '.join(rest)})")

    def _view(self, n: int) -> None:
        (root, offset), (size, stride, dtype) = self.program.roots[n], self.program.geometries[n]
        make, *rest = map(self.constant, (_reinterpret, size, stride, offset // dtype.itemsize))
        self.lines.append(f"t{n} = {make}(t{root}, {', '.join(rest)})")

    def _call(self, step: Call) -> None:
        names = [
            *map(self.tree, step.args),
            *(f"{name}={self.tree(value)}" for name, value in step.kwargs.items()),
        ]
        function = step.function
        if step.forward is not None:
            make, program, attributes = step.forward
            outputs, (saved, *_) = program.result
            counts = len(saved or ()), 1 if isinstance(outputs, Ref) else len(outputs)
            function = make(compiled(program, [isinstance(a, Ref) for a in step.args]), attributes, *counts)
        call = f"{self.constant(function)}({', '.join(names)})"
        refs = _numbers(step.results)
        new = refs and all(n >= self.inputs for n in refs) and len(set(refs)) == len(refs)
        self.growth = len(self.lines)
        self.lines.append(f"{self.tree(step.results)} = {call}" if new else call)


def _bound(launch: Launcher, grid: Any, block: Any, shared: int, *last: Any) -> Launcher:
    """The launch as a function of its first arguments. The last ones are packed once, if the launch can do
    so."""
    bound = getattr(launch, "bound", None)
    return (
        bound(grid, block, shared, *last)
        if bound
        else lambda *first: launch(grid, block, shared, *first, *last)
    )


def compiled(program: Program, inputs: int | Sequence[bool]) -> Callable[..., Any]:
    """A function of the inputs that does what was recorded. It returns STALE, and does nothing, if a setting
    has changed. `inputs`: their number; for the forward of an autograd Function, which of its arguments they
    are."""
    writer = _Writer(program, inputs)
    return _factory(writer.write())(*writer.space.values())


@functools.lru_cache(1024)
def _factory(source: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(compile(source, "<cukern replay>", "exec"), space)
    return space["make"]


def _numbers(tree: Any) -> list[int]:
    """The numbers of the Refs in a tree."""
    if isinstance(tree, Ref):
        return [tree.number]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [n for branch in tree for n in _numbers(branch)] if type(tree) in (tuple, list) else []


def _map_refs(tree: Any, change: Callable[[int], int]) -> Any:
    if isinstance(tree, Ref):
        return Ref(change(tree.number))
    return type(tree)(_map_refs(branch, change) for branch in tree) if type(tree) in (tuple, list) else tree


def _nbytes(geometry: Any) -> int:
    """From the first to behind the last element."""
    size, stride, dtype = geometry
    return (
        0
        if 0 in size
        else (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * dtype.itemsize
    )
