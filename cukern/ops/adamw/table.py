"""The tables of a step of adamw in device memory, and its launches.

A kernel writes the tables, not a copy from the host: that needs no synchronization and may be captured in a
CUDA graph."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.registry import Version
from cukern.runtime.tensors import pointers, wide

CHUNK, THREADS, PREPARING = 8192, 256, 1024  # as in adamw.cu; PREPARING: threads of adamw_prepare
WORDS = 480  # that adamw_write writes: a kernel has at most 4096 bytes of arguments
WRITE, NORM = (Template("adamw.cu", f"adamw_{name}") for name in ("write", "norm"))
_V1, _V2 = Template("adamw.cu", "adamw_v1"), Template("adamw.cu", "adamw_v2", pdl=True)
PREPARE = Template("adamw.cu", "adamw_prepare", pdl=True)
ROW_WORDS, GROUP_WORDS = 9, 7  # of 8 bytes, in the structs Row and Group of adamw.cu
MAXIMIZE, LR_IS_DOUBLE = 1, 2  # flags of a group
Scaling = tuple[float | None, Tensor | None, Tensor | None]  # max_norm, grad_scale, found_inf


class Row(NamedTuple):
    """A tensor of a step. `number`: its place among the parameters of the optimizer."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None  # with amsgrad
    master: Tensor | None
    step: Any  # a tensor, or None if the numbers are given
    group: int
    number: int


class Table:
    """Rows in device memory, sorted by dtype, with scratch memory for a step. order[i]: the index in `rows`
    of entry i."""

    def __init__(self, rows: Sequence[Row]):
        self.order = sorted(range(len(rows)), key=lambda i: checks.FLOATS.index(rows[i].param.dtype))
        self.tensors = [(rows[i].param.dtype, rows[i].param.numel()) for i in self.order]
        self.device = rows[0].param.get_device()
        # dtypes that need the kernels for masters and amsgrad
        self.extras = {
            row.param.dtype for row in rows if row.master is not None or row.max_exp_avg_sq is not None
        }
        self.moments = {row.param.dtype: row.exp_avg.dtype for row in rows}
        # the first chunk of a dtype, and the number of its chunks
        self.runs: dict[torch.dtype, list[int]] = {}
        self.chunks, data = 0, b""
        for i, (dtype, n) in zip(self.order, self.tensors, strict=True):
            row, count = rows[i], -(-n // CHUNK)
            data += struct.pack("8QII", *pointers(*row[:6]), n, self.chunks, row.number, row.group)
            self.runs.setdefault(dtype, [self.chunks, 0])[1] += count
            self.chunks += count
        # given numbers need none, and have no norm
        scratch = (9 * len(rows), self.chunks) if rows[0].step is not None else (0, 0)
        self.rows, self.grads, numbers, partials = (
            rows[0].exp_avg.new_empty(size, dtype=torch.int64)
            for size in (ROW_WORDS * len(rows), len(rows), *scratch)
        )
        self.places: list[int] = []  # the addresses that are in self.grads
        self.memory = self.rows, self.grads, numbers, partials
        self.numbers, self.partials = pointers(numbers, partials)
        write(self.rows, data)

    def launch(
        self, grads: Sequence[Tensor], groups: Tensor, norm: Tensor | None, squares: Tensor | None,
        options: Any, scaling: Scaling, capturing: bool,
    ) -> None:  # fmt: skip
        """A step of an optimizer with these options. With a max_norm, `norm` gets the norm of the gradients.
        `squares`: the sum of the squares of those of all processes, which is computed here if it is None."""
        max_norm, grad_scale, found_inf = scaling
        rows, at, count = self.rows.data_ptr(), self.write_places(grads, capturing), len(self.tensors)
        partials, sums = (0 if max_norm is None else self.partials), self.chunks
        if squares is not None:
            partials, sums = squares.data_ptr(), 1
        else:
            for dtype, (first, chunks) in self.runs.items():
                if partials and chunks:
                    NORM[dtype].on(self.device)(
                        (chunks, 1, 1), (THREADS, 1, 1), 0, partials, rows, at, first, count
                    )
        norm_at, scale_at, inf_at = pointers(norm, grad_scale, found_inf)
        PREPARE[PREPARING].on(self.device)(
            (1, 1, 1), (PREPARING, 1, 1), 0, self.numbers, norm_at, rows, groups.data_ptr(), partials,
            scale_at, inf_at, sums, count, max_norm or 0.0,
        )  # fmt: skip
        self.update(
            options.version or in_force.now,
            at,
            self.numbers,
            (0.0,) * 9,
            options.seed,
            options.stochastic_rounding,
        )

    def write_places(self, grads: Sequence[Tensor], capturing: bool = False) -> int:
        """The address of a list of the gradients' addresses. A captured step has its own: a replay must not
        change those of other steps."""
        places = [grads[i].data_ptr() for i in self.order]
        addresses = torch.empty_like(self.grads) if capturing else self.grads
        if capturing or places != self.places:
            write(addresses, struct.pack(f"{len(places)}Q", *places))
        if not capturing:
            self.places = places
        return addresses.data_ptr()

    def instance(self, template: Template, dtype: torch.dtype) -> Any:
        """The kernel for the parameters of a dtype."""
        key = dtype, dtype in self.extras
        moments = self.moments[dtype]
        return template[key if moments == wide(dtype) else (*key, moments)].on(self.device)

    def update(
        self, version: str, at: int, numbers: int, given: Sequence[float], seed: int = 0,
        randomly: bool = False,
    ) -> None:  # fmt: skip
        """The last launches of a step. `numbers`: the address of those of each tensor, or 0 for the same
        `given` ones."""
        step = struct.pack("3Q9dQ?7x", self.rows.data_ptr(), at, numbers, *given, seed, randomly)
        UPDATES[choose("adamw", version, self.device).forward](self, step)


def write(to: Tensor, data: bytes) -> None:
    """Write words of 8 bytes to device memory, passed by value."""
    kernel, size = WRITE[WORDS].on(to.get_device()), 8 * WORDS
    for i in range(0, len(data), size):
        part = data[i : i + size]
        kernel((1, 1, 1), (WORDS, 1, 1), 0, to.data_ptr() + i, len(part) // 8, part.ljust(size, b"\0"))


def group_bytes(lr: float | Tensor, *numbers: float, maximize: bool) -> bytes:
    """The struct Group of adamw.cu. A learning rate in device memory is passed by its address. `numbers`:
    those of Numbers after lr."""
    address, value = (lr.data_ptr(), 0.0) if isinstance(lr, Tensor) else (0, lr)
    flags = MAXIMIZE * maximize + LR_IS_DOUBLE * (isinstance(lr, Tensor) and lr.dtype == torch.float64)
    return struct.pack("Q5dQ", address, value, *numbers, flags)


# ---- the versions


def _update_v1(table: Table, step: bytes) -> None:
    for t, (dtype, n) in enumerate(table.tensors):
        if n:
            table.instance(_V1, dtype)((-(-n // THREADS), 1, 1), (THREADS, 1, 1), 0, step, t)


def _update_v2(table: Table, step: bytes) -> None:
    for dtype, (first, count) in table.runs.items():
        if count:
            parts = CHUNK // THREADS // (2 if dtype == torch.float64 else 4)  # a thread has one vector
            grid = count * parts, 1, 1
            table.instance(_V2, dtype)(grid, (THREADS, 1, 1), 0, step, first, len(table.tensors))


def _instances(template: Template) -> Any:
    """The plain kernel, that for masters and amsgrad, those of bfloat16 moments, and those of each step."""

    def instances(dtype: torch.dtype) -> tuple[Kernel, ...]:
        keys: list[tuple[Any, ...]] = [(dtype, False), (dtype, True)]
        of_bf16 = {2: (False, True), 4: (False,), 8: ()}[dtype.itemsize]
        keys += [(dtype, extras, torch.bfloat16) for extras in of_bf16]
        return *(template[key] for key in keys), NORM[dtype], WRITE[WORDS], PREPARE[PREPARING]

    return instances


VERSIONS = {
    "v1": Version("one launch per tensor", _instances(_V1)),
    "v2": Version("one launch per dtype, vectors", _instances(_V2)),
}
UPDATES = {"v1": _update_v1, "v2": _update_v2}  # update(table, step); `step`: the struct Step of adamw.cu
