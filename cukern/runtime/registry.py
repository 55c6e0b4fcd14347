"""The tables of ops, versions and cases that the commands and tests iterate over. Data, no behaviour."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from cukern.runtime import checks
from cukern.runtime.device import forget_plans
from cukern.runtime.launch.kernel import Kernel

Tensors = tuple[torch.Tensor, ...]
Make = Callable[[Sequence[int], torch.dtype, torch.device | str], Tensors]


def _no_kernels(dtype: torch.dtype) -> Iterable[Kernel]:
    return ()


@dataclass(frozen=True)
class Version:
    """One version of an op's kernels. How they are launched is the op's matter; it has a function for each
    version's name.

    `instances` returns the kernels of a dtype for `cukern compile` and `warmup`. `requires` is the minimum
    compute capability, 80 for 8.0. `sequential`: one thread adds a row's numbers one after the other. In
    float64, n of them err by about sqrt(n) epsilons.
    """

    idea: str
    instances: Callable[[torch.dtype], Iterable[Kernel]] = _no_kernels
    requires: int = 75
    sequential: bool = False

    @property
    def in_torch(self) -> bool:
        """True if the version has no kernels, so that it runs on a CPU too."""
        return self.instances is _no_kernels


@dataclass(frozen=True)
class Cost:
    """The least work of one pass: bytes of device memory traffic, with each input read and each output
    written once, and operations."""

    bytes: int
    flops: int


def normal(whole: int = 1, columns: int = 0) -> Make:
    """The `make` of a Case: `whole` tensors of shape `dims`, then `columns` of shape `dims[1:]`, with
    normally distributed elements."""

    def make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensors:
        shapes = *[dims] * whole, *[dims[1:]] * columns
        return tuple(torch.randn(*shape, dtype=dtype, device=device) for shape in shapes)

    return make


_ONE = normal()


@dataclass(frozen=True)
class Op:
    """Kernels with one table of versions. `stem` is the name of its files. `cukern.use` and CUKERN_<NAME>
    choose the version."""

    name: str
    stem: str
    versions: dict[str, Version]
    dtypes: tuple[torch.dtype, ...] = checks.FLOATS

    def kernels(
        self, capability: int = 1 << 30, dtypes: Collection[torch.dtype] | None = None
    ) -> dict[str, Kernel]:
        """Kernel instances by name: those of the dtypes (None: all) and of the versions that a GPU of this
        capability (90 for 9.0) runs."""
        versions = [v for v in self.versions.values() if v.requires <= capability]
        return {
            k.name: k
            for v in versions
            for d in self.dtypes
            if dtypes is None or d in dtypes
            for k in v.instances(d)
        }


@dataclass(frozen=True)
class Case:
    """A way of calling an op that the tools check and measure, under its own name; an op has a case of the
    op's name.

    `call(*inputs, version=)` calls the public function, `reference(*inputs)` is the same math in plain torch;
    each returns a tensor or a tuple.

    `dims` describes the command line's DIMS. `check_dims`, `sim_dims` and `bench_dims` are the default sizes
    for checks on a GPU, checks in the simulator, and timing. `make` draws random inputs, by default one of
    shape `dims`. `inputs` are their names. A last name that ends with "..." stands for any number of inputs,
    which are numbered. `constants` are floating-point inputs without a gradient. `in_place` are inputs that
    the call writes and returns; the reference does not write them. A case that is not `differentiable`, such
    as that of an optimizer, has no gradients at all.

    `cost(dims, itemsize)` gives the Cost of "fwd", of "bwd" (all gradients) and, if there are several, of
    "bwd:<input>" (one gradient). `bound` is the limit that the bench reports, "memory" or "compute".
    `roundings` and `magnitude(inputs, douts)`, the scales of outputs and gradients, define the allowed error;
    see bench/verify.py. `as_checked` is the case that `cukern check` uses instead. `note(dims, itemsize)` is
    a line that `cukern bench` prints above its tables.

    `candidates`: the kernels among which plans of the newest version choose, by their names for --kernel and
    --without. `variants(dims)`: a list of dims; calls with these launch every kernel that `dims` may need
    with any number of rows.
    """

    name: str
    op: Op
    call: Callable[..., torch.Tensor | Tensors]
    reference: Callable[..., torch.Tensor | Tensors]
    dims: str
    check_dims: tuple[tuple[int, ...], ...]
    sim_dims: tuple[tuple[int, ...], ...]
    bench_dims: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    cost: Callable[[Sequence[int], int], dict[str, Cost]]
    make: Make = _ONE
    bound: str = "memory"
    roundings: int = 1
    magnitude: Callable[[Tensors, Tensors], Tensors] | None = None
    constants: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    differentiable: bool = True
    as_checked: "Case | None" = None
    note: Callable[[Sequence[int], int], str] | None = None
    candidates: tuple[str, ...] = ()
    variants: Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]] = lambda dims: (dims,)

    def names(self, inputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The name of each input."""
        *first, last = self.inputs
        if not last.endswith("..."):
            return self.inputs
        return *first, *(f"{last[:-3]}{i}" for i in range(len(inputs) - len(first)))

    def check_count(self, dims: Sequence[int]) -> None:
        """Raise ValueError if the case takes another number of sizes."""
        names = self.dims.split()
        if len(dims) != len(names) and not self.dims.endswith("..."):
            raise ValueError(
                f"{self.name} takes {len(names)} sizes, {self.dims}, got {' '.join(map(str, dims))}"
            )

    def has_gradient(self, name: str, x: torch.Tensor) -> bool:
        """True if the input of this name has a gradient."""
        return self.differentiable and x.is_floating_point() and name not in self.constants


def row_counts(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`variants` of a case whose first size is the number of rows: dims around each threshold, with odd and
    even numbers of rows."""
    counts = {n + extra for k in range(12) for n in (1 << k, 3 << k) for extra in (0, 1)}
    return [dims, *((n, *dims[1:]) for n in sorted(counts))]


CASES: dict[str, Case] = {}


def ops() -> dict[str, Op]:
    """The ops of all cases, by name."""
    return {case.op.name: case.op for case in CASES.values()}


def register(case: Case) -> None:
    CASES[case.name] = case
    forget_plans()  # such as the version of an op that this one replaces
