"""adamw: one step of AdamW on lists of tensors, in place; its reference in torch, its raw op, and its case in
the registry."""

from collections.abc import Iterable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from cukern.ops.adamw.table import VERSIONS, Row, Table
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.registry import Case, Cost, Op, register
from cukern.runtime.tensors import wide

Numbers = tuple[Any, float, float, float, float]  # lr, beta1, beta2, eps, weight_decay; lr may be a tensor


def adamw(
    params: Iterable[Tensor], grads: Iterable[Tensor], exp_avgs: Iterable[Tensor],
    exp_avg_sqs: Iterable[Tensor], step: int = 1, *, lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
    version: str | None = None,
) -> None:  # fmt: skip
    """One step of AdamW, in place: the math of `cukern.AdamW`, which most users want, without its state.

        p = torch.randn(768, 768, device="cuda")
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        cukern.adamw([p], [torch.randn_like(p)], [m], [v], step=1, lr=6e-4)

    Args:
        params: float16, bfloat16, float32 or float64, of any shapes and dense strides, all on one device.
            Written.
        grads: of their shapes and dtypes.
        exp_avgs, exp_avg_sqs: the moments; float32 for 16-bit parameters, else of their dtypes. Written.
        step: the number of this step, from 1 to 2^24.
        lr, betas, eps, weight_decay: numbers as in torch.optim.AdamW.
        version: "v1" or "v2"; default: the fastest.

    Parameters of 16 bits are computed in float32 and rounded once. CPU tensors use torch's operations, or the
    simulator. So does torch.compile, which fuses them, whatever the version. Not differentiable.

    Raises TypeError and ValueError for tensors or numbers that do not fit, before anything is written.
    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    lists = _check(params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    numbers = check_numbers(checks.number("lr", lr), betas, eps, weight_decay)
    checks.integer("step", step, 1, 2**24)  # float32 counts exactly up to 2^24
    checks.version("adamw", version, VERSIONS)
    if not lists[0]:
        return
    # Inside of torch.compile: with the raw op, inductor on a GPU gave other values (torch 2.11); the cause is
    # not known.
    if not backend.uses_torch("adamw", version, lists[0][0]) and not torch.compiler.is_dynamo_compiling():
        _adamw(*lists, step, list(numbers), version or in_force.now)
        return
    with torch.no_grad(), autocast.off(lists[0][0]):
        for param, *rest in zip(*lists, strict=True):
            for old, new in zip((param, *rest[1:]), reference(param, *rest, step, *numbers), strict=True):
                old.copy_(new)


def check_numbers(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> Numbers:
    """lr, beta1, beta2, eps and weight_decay. A learning rate in a tensor stays one."""
    if not isinstance(lr, Tensor):
        lr = checks.number("lr", lr, least=0)
    elif lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"lr must be a number, or a float32 or float64 tensor of one element, got {lr.dtype} of shape "
            f"{tuple(lr.shape)}"
        )
    eps, weight_decay = (
        checks.number("eps", eps, least=0),
        checks.number("weight_decay", weight_decay, least=0),
    )
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers, got {checks.brief(betas)}")
    betas = tuple(float(b) if isinstance(b, Tensor) and b.numel() == 1 else b for b in betas)
    for i, beta in enumerate(betas):
        if not 0 <= checks.number(f"betas[{i}]", beta) < 1:
            raise ValueError(f"betas[{i}] must be at least 0 and less than 1, got {beta!r}")
    return lr, float(betas[0]), float(betas[1]), eps, weight_decay


def check_param(name: str, tensor: Tensor) -> None:
    checks.dtype(name, tensor, checks.FLOATS)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its elements must lie "
            f"side by side"
        )


def _check(**given: Any) -> list[list[Tensor]]:
    """The lists as lists of tensors, each of which fits the parameter at its place."""
    lists: dict[str, list[Tensor]] = {}
    for name, values in given.items():
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | dict | Tensor):
            raise TypeError(f"{name} must be a list of tensors, got {checks.brief(values)}")
        lists[name] = tensors = [
            interop.to_torch(f"{name}[{i}]", t, written=name != "grads") for i, t in enumerate(values)
        ]
        params = lists["params"]
        if len(tensors) != len(params):
            raise ValueError(f"{name} has {len(tensors)} tensors, params has {len(params)}")
        for i, (p, t) in enumerate(zip(params, tensors, strict=True)):
            place = f"{name}[{i}]"
            check_param(place, t)
            checks.one_of(place, t.dtype, (p.dtype if name in ("params", "grads") else wide(p.dtype),))
            checks.shape(place, t, tuple(p.shape), f"the shape of params[{i}]")
            checks.one_device(**{"params": params[0], place: t})
            if (
                t.stride() != p.stride()
                and t.numel()
                and any(n > 1 and t.stride(d) != p.stride(d) for d, n in enumerate(t.shape))
            ):
                raise ValueError(
                    f"{place} has strides {t.stride()}, params[{i}] has {p.stride()}: they must be equal"
                )
    return list(lists.values())


def reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int = 1, *numbers: float
) -> tuple[Tensor, ...]:
    """The new param, exp_avg and exp_avg_sq, computed in the dtype of the moments. `numbers`: lr, beta1,
    beta2, eps, weight_decay."""
    lr, beta1, beta2, eps, weight_decay = numbers or (1e-3, 0.9, 0.999, 1e-8, 1e-2)
    p, g = param.to(exp_avg.dtype), grad.to(exp_avg.dtype)
    m, v = exp_avg.lerp(g, 1 - beta1), (exp_avg_sq * beta2).addcmul(g, g, value=1 - beta2)
    root = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    return (p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * (m / root)).to(param.dtype), m, v


# ---- the raw op

MOST_TABLES = 1024  # of the function
_tables: dict[Any, Table] = {}  # of recent calls: the same tensors need no new one
_captured: list[Table] = []  # those that CUDA graphs use


def _launch(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], step: int,
    numbers: list[float], version: str,
) -> None:  # fmt: skip
    stream = torch.cuda.current_stream(params[0].device).cuda_stream if params[0].is_cuda else 0
    key = (
        stream,
        params[0].get_device(),
        *((t.data_ptr(), t.numel(), t.dtype) for t in (*params, *grads, *exp_avgs, *exp_avg_sqs)),
    )
    table = _tables.get(key)
    if table is None:
        tensors = enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True))
        table = Table([Row(p, m, v, None, None, None, 0, i) for i, (p, m, v) in tensors])
    if stream and torch.cuda.is_current_stream_capturing():
        _captured.append(table)
    elif params[0].is_cuda:
        if len(_tables) >= MOST_TABLES:
            _tables.clear()
        _tables[key] = table
    lr, beta1, beta2, eps, weight_decay = numbers  # what adamw_prepare computes of them, computed here
    sizes = lr / (1 - beta1**step), 1 / sqrt(1 - beta2**step), eps, 1 - lr * weight_decay
    table.update(
        version, table.write_places(grads), 0, (*sizes, 1 - beta1, beta2, 1 - beta2, 1.0, float(step))
    )


_adamw = raw_op(
    "_adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, int step, "
    "float[] numbers, str version)"
    " -> ()", 4, _launch, lambda *_: None,
)  # fmt: skip

# ---- for the tools: TENSORS tensors are the rows of one


def _spread(*inputs: Tensor, version: str | None = None) -> tuple[Tensor, ...]:
    adamw(*(x.unbind() for x in inputs), version=version)  # type: ignore[arg-type]
    return inputs[0], *inputs[2:]


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    param, grad, exp_avg = (torch.randn(*dims, dtype=d, device=device) for d in (dtype, dtype, wide(dtype)))
    return param, grad, exp_avg, torch.rand_like(exp_avg)


def _magnitude(inputs: tuple[Tensor, ...], _: Any) -> tuple[Tensor, ...]:
    """|param| plus the magnitude of its change, and of the moments."""
    param, grad, exp_avg, exp_avg_sq = (x.abs() for x in inputs)
    return reference(param, -grad, -exp_avg, exp_avg_sq)


register(
    Case(
        name="adamw", op=Op("adamw", "adamw", VERSIONS), call=_spread, reference=reference,
        dims="TENSORS NUMEL", make=_make, inputs=("param", "grad", "exp_avg", "exp_avg_sq"), bound="memory",
        cost=lambda dims, itemsize: {"fwd": Cost(prod(dims) * (3 * itemsize + 4 * max(itemsize, 4)),
                                                 16 * prod(dims))},
        magnitude=_magnitude, in_place=("param", "exp_avg", "exp_avg_sq"), differentiable=False,
        check_dims=((1, 1), (3, 4097), (2, 8192), (5, 20000)), sim_dims=((1, 1), (3, 67), (2, 8201)),
        bench_dims=((148, 840832), (1, 32768 * 768), (1, 8192 * 4096)),
    )
)  # fmt: skip
