"""The launches of a step: tables of pointers in device memory, written by a kernel, and the versions of the update.

A launch writes the tables, not a copy from the host: it needs no synchronization and may be captured in a CUDA graph.
"""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.kernel import Template
from cukern.runtime.registry import Version, choose
from cukern.runtime.tensors import pointers

CHUNK, THREADS, WORDS, PREPARING = 8192, 256, 32, 1024  # as in adamw.cu; PREPARING: threads of adamw_prepare
PART = 2048  # elements of a block of adamw_v2, a power of 2 up to CHUNK
_V1, _WRITE, _NORM = (Template("adamw.cu", f"adamw_{name}") for name in ("v1", "write", "norm"))
_V2, _PREPARE = (Template("adamw.cu", f"adamw_{name}", pdl=True) for name in ("v2", "prepare"))


class Row(NamedTuple):
    """A tensor of a step. `number`: its place among the parameters of the optimizer."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    step: Any  # a tensor, or None: the number is an argument of the launch
    group: int
    number: int


class Table:
    """Rows in device memory, sorted by dtype, with scratch memory for a step. order[i]: the index in `rows` of entry i."""

    def __init__(self, rows: Sequence[Row]):
        self.order = sorted(range(len(rows)), key=lambda i: checks.FLOATS.index(rows[i].param.dtype))
        self.tensors = [(rows[i].param.dtype, rows[i].param.numel()) for i in self.order]
        self.device = rows[0].param.get_device()
        self.runs: dict[torch.dtype, list[int]] = {}  # the first chunk of a dtype, and the number of its chunks
        self.chunks, words = 0, bytearray()
        for i, (dtype, n) in zip(self.order, self.tensors, strict=True):
            row, count = rows[i], -(-n // CHUNK)
            words += struct.pack("7QIHH", *pointers(*row[:5]), n, self.chunks, row.number, row.group, checks.FLOATS.index(dtype))
            self.runs.setdefault(dtype, [self.chunks, 0])[1] += count
            self.chunks += count
        self.rows, self.grads, numbers, partials = (
            rows[0].exp_avg.new_empty(size, dtype=torch.int64) for size in (8 * len(rows), len(rows), 9 * len(rows), self.chunks)
        )
        self.places: tuple[int, ...] = ()  # the addresses that are in self.grads
        self.memory = self.rows, self.grads, numbers, partials
        self.numbers, self.partials = pointers(numbers, partials)
        write(self.rows, struct.unpack(f"{len(words) // 8}Q", words))

    def launch(
        self, grads: Sequence[Tensor], groups: Tensor, version: str, *, max_norm: float | None = None, norm: Tensor | None = None,
        grad_scale: Tensor | None = None, found_inf: Tensor | None = None, seed: int = 0, randomly: bool = False, capturing: bool = False,
        first_step: int = 0,
    ) -> None:  # fmt: skip
        """A step. `norm` gets the norm of the gradients if there is a max_norm. `first_step`: that of rows without a step."""
        places = tuple(grads[i].data_ptr() for i in self.order)
        addresses = torch.empty_like(self.grads) if capturing else self.grads  # a replay must not change those of other steps
        if capturing or places != self.places:
            write(addresses, places)
        if not capturing:
            self.places = places
        rows, at, count = self.rows.data_ptr(), addresses.data_ptr(), len(self.tensors)
        partials = 0 if max_norm is None else self.partials
        if partials and self.chunks:
            _NORM[THREADS].on(self.device)((self.chunks, 1, 1), (THREADS, 1, 1), 0, partials, rows, at, count)
        norm_at, scale_at, inf_at = pointers(norm, grad_scale, found_inf)
        _PREPARE[PREPARING].on(self.device)(
            (1, 1, 1), (PREPARING, 1, 1), 0, self.numbers, norm_at, rows, groups.data_ptr(), partials, scale_at, inf_at, self.chunks, count,
            first_step, max_norm or 0.0,
        )  # fmt: skip
        choose("adamw", version, self.device).forward(self, rows, at, seed, randomly)


def write(to: Tensor, words: Sequence[int]) -> None:
    """Write 8-byte words to device memory, passed by value."""
    kernel = _WRITE[WORDS].on(to.get_device())
    for i in range(0, len(words), WORDS):
        part = words[i : i + WORDS]
        kernel((1, 1, 1), (WORDS, 1, 1), 0, to.data_ptr() + 8 * i, len(part), struct.pack(f"{WORDS}Q", *part, *[0] * (WORDS - len(part))))


def group_words(lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[int, ...]:
    """The struct Group of adamw.cu. A learning rate in device memory is passed by its address."""
    at, value = (lr.data_ptr(), 0.0) if isinstance(lr, Tensor) else (0, lr)
    return struct.unpack("6Q", struct.pack("Q5d", at, value, beta1, beta2, eps, weight_decay))


# ---- the versions: forward(table, rows, grads, seed, randomly) updates the tensors


def _forward_v1(table: Table, rows: int, grads: int, *random: Any) -> None:
    for t, (dtype, n) in enumerate(table.tensors):
        if n:
            grid = -(-n // THREADS), 1, 1
            _V1[dtype].on(table.device)(grid, (THREADS, 1, 1), 0, rows, grads, table.numbers, t, *random)


def _forward_v2(table: Table, rows: int, grads: int, *random: Any) -> None:
    for dtype, (first, count) in table.runs.items():
        if count:
            tensors = len(table.tensors)
            grid = count * (CHUNK // PART), 1, 1
            _V2[dtype, PART].on(table.device)(grid, (THREADS, 1, 1), 0, rows, grads, table.numbers, first, tensors, *random)


_EACH = _WRITE[WORDS], _NORM[THREADS], _PREPARE[PREPARING]
VERSIONS = {
    "v1": Version("one launch per tensor", _forward_v1, instances=lambda dtype: (_V1[dtype], *_EACH)),
    "v2": Version("one launch per dtype, vectors", _forward_v2, instances=lambda dtype: (_V2[dtype, PART], *_EACH)),
}
