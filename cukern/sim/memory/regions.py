"""The memory that a launch may access: the tensors of the open scopes, and which of their bytes are
initialized.

A raw op runs inside `scope(tensors)`, which records these tensors and every tensor that a torch op creates
meanwhile."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cukern.sim.numerics.integers import Array

GRAIN = 16  # a region's shadow memory begins at a multiple of this address
FIRST_ADDRESS = 4096  # numpy refuses a null pointer; no process has memory below this address
_ADDRESS_BITS = 48

# Bytes per element -> dtype. numpy has no 16-byte integer; complex128 copies bits unchanged.
CARRIERS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def all_memory() -> dict[int, Array]:
    """This process's address space as arrays of elements of 1, 2, 4, 8 and 16 bytes; element i of the last is
    at address 4096 + 16 i."""
    shape = ((1 << _ADDRESS_BITS) - FIRST_ADDRESS,)
    interface = {"data": (FIRST_ADDRESS, False), "shape": shape, "typestr": "|u1", "version": 3}
    whole: Array = np.asarray(SimpleNamespace(__array_interface__=interface))
    return {size: whole.view(carrier) for size, carrier in CARRIERS.items()}


@dataclass
class Region:
    """Addresses from `start` up to `end`. `written`: True for each byte from `origin` on that is initialized;
    None: all are. `inside`: True for each byte from `start` on that belongs to a tensor, and not between the
    rows of a view; None: all do."""

    start: int
    end: int
    name: str = ""
    written: Array | None = None
    writable: bool = True
    inside: Array | None = None

    def __post_init__(self) -> None:
        self.offset = self.start % GRAIN
        self.origin = self.start - self.offset
        self.views: dict[int, Array] = {}


@dataclass
class _Storage:
    """One allocation: which parts of it a launch may access, and which of its bytes are initialized."""

    start: int
    keep: list[torch.Tensor]
    extents: list[tuple[int, int]] = field(default_factory=list)
    written: Array | None = None

    def regions(self) -> list[Region]:
        merged: list[list[int]] = []
        for start, end in sorted(self.extents):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        found = [Region(start, end, inside=self._inside(start, end)) for start, end in merged]
        if self.written is not None:
            for region in found:
                region.written = self.written[region.origin - self.start : region.end - self.start]
        return found

    def _inside(self, start: int, end: int) -> Array | None:
        """Which bytes of a region belong to a tensor; None: all do."""
        here = [t for t in self.keep if start <= t.data_ptr() < end]
        if not here or any(
            _extent(t) == (start, end) and t.numel() * t.itemsize == end - start for t in here
        ):
            return None
        flags = np.zeros(end - start, bool)  # no torch op: an open scope would add its result
        for t in here:
            strides = (*(step * t.itemsize for step in t.stride()), 1)
            np.lib.stride_tricks.as_strided(flags[t.data_ptr() - start :], (*t.shape, t.itemsize), strides)[
                ...
            ] = True
        return None if flags.all() else flags


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of nested lists, tuples and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first element and of the end of its last."""
    start = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[Scope] = []  # innermost last


_scopes = _Scopes()


class Scope(TorchDispatchMode):
    """The tensors that launches may access while it is open; see `scope`."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, _Storage] = {}

    def add(self, tensor: torch.Tensor, written: bool = True) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        start = tensor.untyped_storage().data_ptr()
        storage = self.find(start)
        if storage is None:
            storage = self.storages[start] = _Storage(start, [])
            if not written:
                storage.written = np.zeros(tensor.untyped_storage().nbytes(), bool)
        storage.keep.append(tensor)  # while it lives, no other tensor gets its address
        extent = _extent(tensor)
        if extent not in storage.extents:
            storage.extents.append(extent)

    def find(self, start: int) -> _Storage | None:
        return next((s.storages[start] for s in (self, *reversed(_scopes.open)) if start in s.storages), None)

    def mark_written(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu" and tensor.numel():
            storage = self.find(tensor.untyped_storage().data_ptr())
            if storage is not None and storage.written is not None:
                start, end = _extent(tensor)
                storage.written[start - storage.start : end - storage.start] = True

    def unwritten(self, tensor: torch.Tensor) -> int:
        """How many bytes from the first to the last element of a tensor are uninitialized."""
        storage = self.find(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if storage is None or storage.written is None:
            return 0
        start, end = _extent(tensor)
        return int((~storage.written[start - storage.start : end - storage.start]).sum())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(args[i] if i < len(args) else kwargs.get(argument.name)):
                    self.mark_written(tensor)
        empty = "empty" in schema.name.removeprefix("aten::").split("_")
        # A result that may be a view of an argument (contiguous() in inference mode) is added only if it is
        # none.
        fresh = all(r.alias_info is None for r in schema.returns)
        given = () if fresh else {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if fresh or tensor.untyped_storage().data_ptr() not in given:
                self.add(tensor, written=not empty)
        return result


@contextlib.contextmanager
def scope(tensors: Iterable[torch.Tensor] = ()) -> Iterator[Scope]:
    """While it is open, launches of this thread may access `tensors`, first to last element of each, and what
    torch ops create.

    A tensor made by `torch.empty` or the like is uninitialized until a kernel or an in-place op writes it.
    Scopes nest."""
    one = Scope()
    for tensor in tensors:
        one.add(tensor)
    with one:
        _scopes.open.append(one)
        try:
            yield one
        finally:
            _scopes.open.pop()
            if _scopes.open:  # what is uninitialized here stays so in the outer scope
                for start, storage in one.storages.items():
                    _scopes.open[-1].storages.setdefault(start, storage)


def regions() -> list[Region]:
    """What a launch of this thread may access now, sorted by address."""
    found = [r for one in _scopes.open for storage in one.storages.values() for r in storage.regions()]
    return sorted(found, key=lambda r: r.start)
