"""`cukern.op`: makes a differentiable op from the kernels of a user's own .cu file."""

import inspect
import keyword
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.dispatch.error_scale import measured
from cukern.runtime.dispatch.own_kernels import Config, checked_configs
from cukern.runtime.dispatch.own_launch import Own, Pair, Scalar, as_tuple, is_own
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.registry import CASES, Case, Cost, Op, Tensors, Version, register


def op(
    name: str, source: str | Path | None, reference: Callable[..., Tensor | Tensors],
    versions: Mapping[str, Any], *, make: Callable[..., Any] | None = None,
    cases: Sequence[Sequence[int]] | None = None, bench: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = checks.FLOATS, outputs: int = 1,
    constants: Collection[str] = (), flops: Callable[..., int] | None = None, roundings: int = 1,
    magnitude: Callable[[Tensors, Tensors], Tensors] | None = None, configs: Sequence[Config] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Make a differentiable op from kernels of a .cu file or of Triton. See docs/guide/own_op.md.

    Args:
        name: an identifier, for `cukern check` and `cukern.use`. A second definition replaces the first.
        source: the .cu file, such as `Path(__file__).with_name("scale.cu")`. None: kernels of Triton.
        reference: the math in plain torch, for CPU tensors and checks. Parameters without a default are
            inputs, all tensors; those with one are scalars. It returns a tensor or a tuple.
        versions: by name, such as "v1", the pair (forward, backward), or forward alone. The last is the
            default. They return new tensors that share no memory.
        make: `make(*sizes, dtype=, device=)` draws the inputs. None: torch.randn(*sizes).
        cases, bench: the sizes for `cukern check` and `cukern bench`.
        dtypes: of floating-point inputs.
        outputs: the number of results.
        constants: the names of inputs without a gradient, such as integers.
        flops: `flops(*sizes)`, the floating-point operations of the forward.
        roundings: of a result to its dtype.
        magnitude: `magnitude(inputs, douts)`, the scale of errors. None: measured.
        configs: dicts of macros, such as [{"BLOCK": 128}, {"BLOCK": 256}], of which `cukern.tune` chooses
            one.

    Returns a function `f(*inputs, *scalars, version=None)`, under autograd, torch.compile(fullgraph=True),
    CUDA graphs and in the simulator. There is no double backward.

    Raises TypeError and ValueError for a wrong argument, FileNotFoundError for a missing .cu. The function
    raises TypeError for a wrong number or dtype of inputs and ValueError for an unknown version or several
    devices.

    Example, for `template <typename T> __global__ void square(T* out, const T* x, long long n)` and
    square_bwd in square.cu:

        def forward(kernels, x):
            out = torch.empty_like(x)
            kernels("square", x.dtype)(out, x, x.numel(), grid=-(-x.numel() // 256), block=256)
            return out

        def backward(kernels, x, _out, dout):
            dx = torch.empty_like(x)
            kernels("square_bwd", x.dtype)(dx, x, dout, x.numel(), grid=-(-x.numel() // 256), block=256)
            return dx

        square = cukern.op("my_square", "square.cu", lambda x: x * x, {"v1": (forward, backward)})
    """
    _check_name(name)
    inputs, scalars = _inputs(reference)
    pairs = _pairs(versions)
    outputs, roundings = checks.integer("outputs", outputs, 1), checks.integer("roundings", roundings, 0)
    constants, dtypes = _constants(constants, inputs), _dtypes(dtypes)
    if make is None:
        cases, bench = cases or ((1,), (1023,), (64, 100)), bench or ((1 << 26,),)
    elif not callable(make):
        raise TypeError(f"make must be a function, got {checks.brief(make)}")
    drawn = _maker(make, len(inputs))
    check_dims = _sizes("cases", cases)
    bench_dims = _sizes("bench", bench if bench is not None else check_dims[-1:])
    _check_source(source, configs)
    own = Own(
        name,
        inputs,
        constants,
        outputs,
        None if source is None else Path(source),
        dtypes,
        reference,
        pairs,
        scalars,
        checked_configs(configs),
    )
    wanted = [i for i, one in enumerate(inputs) if own.differentiable and one not in constants]
    function = own.function()

    def instances(version: str) -> Callable[[torch.dtype], list[Kernel]]:
        return lambda dtype: own.instances(
            version, [drawn(dims, dtype, "meta") for dims in (*check_dims, *bench_dims)]
        )

    def cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
        kind = next((d for d in dtypes if d.itemsize == itemsize), dtypes[0])
        tensors = drawn(dims, kind, "meta")
        moved = sum(t.nbytes for t in (*tensors, *as_tuple(reference(*tensors))))
        work = int(flops(*dims)) if flops else 0
        costs = {"fwd": Cost(moved, work)}
        if own.differentiable:
            costs["bwd"] = Cost(moved + sum(tensors[i].nbytes for i in wanted), 2 * work)
        return costs

    table = {v: Version(_idea(pair.forward), instances(v), pair.requires) for v, pair in pairs.items()}
    register(
        Case(
            name=name,
            op=Op(name, name, table, dtypes),
            call=function,
            reference=reference,
            dims=_dims(make),
            check_dims=check_dims,
            sim_dims=check_dims,
            bench_dims=bench_dims,
            make=drawn,
            inputs=inputs,
            cost=cost,
            bound="compute" if flops else "memory",
            roundings=roundings,
            magnitude=magnitude or measured(reference, wanted),
            constants=constants,
            differentiable=own.differentiable,
        )
    )
    return function


def _check_source(source: Any, configs: Any) -> None:
    if source is None:
        if configs is not None:
            raise ValueError("configs must be None with source=None: Triton has an autotuner of its own")
        return
    if not isinstance(source, str | Path):
        raise TypeError(f"source must be a path, or None for kernels of Triton, got {checks.brief(source)}")
    if not Path(source).is_file():
        raise FileNotFoundError(f"source: there is no file {str(source)!r}")


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {checks.brief(name)}")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"name must be an identifier of Python, got {name!r}")
    if name in CASES and not is_own(name):
        raise ValueError(f"name must not be that of an op of cukern, got {name!r}")


def _inputs(reference: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Scalar]]:
    """The parameters of the reference without a default, and the scalars: those with a default, which it is
    returned with."""
    if not callable(reference):
        raise TypeError(f"reference must be a function, got {checks.brief(reference)}")
    parameters = inspect.signature(reference).parameters.values()
    inputs = tuple(p.name for p in parameters if p.default is p.empty)
    if not inputs or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise ValueError(f"reference must name each input as a parameter, got {inspect.signature(reference)}")
    scalars = {p.name: p.default for p in parameters if p.default is not p.empty}
    for name, value in scalars.items():
        if not isinstance(value, int | float | None):
            raise TypeError(
                f"{name} of reference: a default must be an int, a float, a bool or None, got "
                f"{checks.brief(value)}"
            )
        if name == "version":
            raise ValueError(
                "reference must not have a scalar called version, which names a version of the kernels"
            )
    return inputs, scalars


def _pairs(versions: Mapping[str, Any]) -> dict[str, Pair]:
    rule = "versions must be a dict such as {'v1': (forward, backward)}"
    if not isinstance(versions, Mapping) or not versions:
        raise TypeError(f"{rule}, got {checks.brief(versions)}")
    pairs = {}
    for version, value in versions.items():
        functions = value if isinstance(value, tuple) else (value,)
        if (
            not isinstance(version, str)
            or not 1 <= len(functions) <= 3
            or not all(f is None or callable(f) for f in functions[:2])
        ):
            raise TypeError(f"{rule}, got {version!r}: {checks.brief(value)}")
        pairs[version] = Pair(*functions)
        checks.integer(f"the compute capability of version {version!r}", pairs[version].requires, 75)
    if len({pair.backward is None for pair in pairs.values()}) > 1:
        raise ValueError(
            f"versions must all have a backward or none, got "
            f"{', '.join(v for v, p in pairs.items() if p.backward)} with one"
        )
    return pairs


def _constants(constants: Collection[str], inputs: Sequence[str]) -> tuple[str, ...]:
    names = (constants,) if isinstance(constants, str) else tuple(constants)
    for name in names:
        checks.choice("a name in constants", name, inputs)
    return names


def _dtypes(dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
    found = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if not found or not all(d in checks.FLOATS for d in found):
        raise ValueError(
            f"dtypes must be some of {', '.join(map(str, checks.FLOATS))}, got {checks.brief(dtypes)}"
        )
    return found


def _sizes(name: str, cases: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    if not cases:
        raise ValueError(f"{name} must be sizes for make, such as [(3, 1000), (64, 768)], got {cases!r}")
    return tuple(
        tuple(checks.integer(f"a size in {name}", n, 0) for n in (c if isinstance(c, Sequence) else (c,)))
        for c in cases
    )


def _maker(
    make: Callable[..., Any] | None, inputs: int
) -> Callable[[Sequence[int], torch.dtype, torch.device | str], Tensors]:
    def drawn(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensors:
        if make is None:
            return tuple(torch.randn(*dims, dtype=dtype, device=device) for _ in range(inputs))
        found = as_tuple(make(*dims, dtype=dtype, device=device))
        if len(found) != inputs:
            raise ValueError(f"make must return the {inputs} inputs, got {len(found)}")
        return found

    return drawn


def _dims(make: Callable[..., Any] | None) -> str:
    """The names of DIMS: the parameters of make, without dtype and device."""
    if make is None:
        return "SHAPE..."
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    sizes = [
        p
        for p in inspect.signature(make).parameters.values()
        if p.kind in kinds and p.name not in ("dtype", "device")
    ]
    return " ".join(p.name.upper() + ("..." if p.kind == p.VAR_POSITIONAL else "") for p in sizes)


def _idea(forward: Callable[..., Any]) -> str:
    return (inspect.getdoc(forward) or "").partition("\n")[0] or getattr(forward, "__name__", "forward")
