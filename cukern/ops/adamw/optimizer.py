"""AdamW as a torch.optim.Optimizer: state, parameter groups, clipping and loss scaling around the launches of a step."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import adamw as torch_adamw
from torch.utils._pytree import tree_leaves

from cukern.ops.adamw.op import VERSIONS, Numbers, Row, Scaling, Table, check_numbers, check_param, group_bytes, write
from cukern.runtime import backend, checks
from cukern.runtime.tensors import wide

_MOST_TABLES = 64  # each has 8 bytes for 8192 elements of the parameters
_Found = tuple[int, Tensor, int]  # the number of a parameter, the parameter, its group


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one launch per dtype, with clipping of the gradients, float32 masters and stochastic rounding.

        optimizer = cukern.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
        model(x).sum().backward()
        optimizer.step()
        print(optimizer.grad_norm)  # a tensor on the device

    Args:
        params: tensors, or groups with their own lr, betas, eps and weight_decay. float16, bfloat16, float32 or float64, on one device,
            with dense strides. Parameters without a gradient are skipped.
        lr: a number, or a float32 tensor of shape () on the device of the parameters, which is read there at each step.
        betas, eps, weight_decay: as in torch.optim.AdamW (decoupled weight decay, bias correction).
        max_norm: None, or the largest 2-norm of all gradients together. If their norm is larger, they are scaled by max_norm / norm, as
            llm.c does; `grad_norm` is the norm before that. Kernels do not write the gradients; on a CPU float32 and float64 ones are
            scaled in place. If the norm is inf, finite gradients become 0 and infinite ones NaN. If it is NaN, nothing is scaled: the NaN
            reaches its parameters.
        master_weights: keep a float32 copy of each 16-bit parameter in the state ("master"), and round it to the parameter.
        stochastic_rounding: round bfloat16 parameters to one of the two neighbours, so that the expectation is exact. The random numbers
            are Philox4x32-10 of (seed, step, number of the parameter, number of the element), whatever the launch. Not on CPUs.
        seed: from 0 to 2^64 - 1.
        version: "v1" or "v2"; default: the fastest.

    Parameters may be DTensors, such as FSDP2's, that are divided along dimensions: a process updates its part, the state has DTensors, and
    the norm is that of all parts. Not in the simulator.
    Moments are float32 for 16-bit parameters. On a GPU a step does not synchronize. Steps, learning rates and the norm are in device
    memory. A step captured in a CUDA graph, after one outside of it, follows a learning rate in a tensor; if a number in a group changed,
    call `update_groups()` before the replay. torch.amp.GradScaler works as with torch's fused optimizers: if it found inf, nothing changes.
    CPU tensors use torch's fused AdamW, or the simulator. `state_dict` and `load_state_dict` exchange with torch.optim.AdamW.

    Raises TypeError and ValueError for parameters, gradients or numbers that do not fit, before anything is written; RuntimeError for a
    capture without a step before it. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf
    grad_norm: Tensor | None = None
    _captured: tuple[Any, ...] = ()  # memory that CUDA graphs use
    _groups: Tensor | None = None  # numbers of the parameter groups, in device memory

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, max_norm: float | None = None, master_weights: bool = False, stochastic_rounding: bool = False,
        seed: int = 0, version: str | None = None,
    ) -> None:  # fmt: skip
        if max_norm is not None and checks.number("max_norm", max_norm) <= 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        checks.version("adamw", version, VERSIONS)
        self._options = SimpleNamespace(
            master_weights=checks.flag("master_weights", master_weights), max_norm=max_norm, version=version or "",
            stochastic_rounding=checks.flag("stochastic_rounding", stochastic_rounding), seed=checks.integer("seed", seed, 0, 2**64 - 1),
        )  # fmt: skip
        check_numbers(lr, betas, eps, weight_decay)
        self._forget()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises TypeError and ValueError, and adds nothing, for tensors or numbers that do not fit."""
        super().add_param_group(param_group)
        try:
            self._numbers(self.param_groups[-1])
            for i, p in enumerate(self.param_groups[-1]["params"]):
                name = f"parameter {i} of group {len(self.param_groups) - 1}"
                check_param(name, p)
                places = getattr(p, "placements", None)
                divided = places is not None and all(place.is_shard() for place in places)
                if type(p).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not divided:
                    kind = type(p).__name__ + (f" with placements {places}" if places else "")
                    raise TypeError(f"{name} must be a plain tensor, or a DTensor that is divided along dimensions, got {kind}")
                checks.one_device(**{"the first parameter": self.param_groups[0]["params"][0], name: p})
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, also of a torch.optim.AdamW. The tensors are copied. Raises ValueError for amsgrad or maximize."""
        for name in ("amsgrad", "maximize"):
            if any(group.get(name) for group in state_dict["param_groups"]):
                raise ValueError(f"the state has {name}=True, which cukern.AdamW does not have")
        super().load_state_dict(state_dict)
        # torch's casts moments to the dtype of the parameter
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name == "step":
                    self.state[p][name] = torch.tensor(float(value), dtype=torch.float32, device=p.device)
                elif name in ("exp_avg", "exp_avg_sq", "master"):
                    self.state[p][name] = _like_parameter(f"{name} of parameter {i}", value, p, wide(p.dtype))

    def _forget(self) -> None:
        """Forget the tables in device memory, whose tensors have changed. The groups keep their memory, which CUDA graphs may read."""
        self._tables: dict[tuple[tuple[int, ...], ...], Table] = {}
        self._written = b""  # what is in _groups
        if self._groups is not None and self._groups.numel() != 6 * len(self.param_groups):
            self._groups = None

    def _numbers(self, group: dict[str, Any]) -> Any:
        lr, *rest = check_numbers(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if isinstance(lr, Tensor):
            checks.one_device(**{"the first parameter": self.param_groups[0]["params"][0], "lr": lr})
        return lr, *rest

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Returns what `closure`, which computes the loss and the gradients, returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        every = ((p, g) for g, group in enumerate(self.param_groups) for p in group["params"])
        found = [(i, p, g) for i, (p, g) in enumerate(every) if p.grad is not None]
        if not found:
            return loss
        numbers, grads = [self._numbers(group) for group in self.param_groups], [_gradient(i, p) for i, p, _ in found]
        max_norm, grad_scale, found_inf = self._options.max_norm, getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if max_norm is not None and any(hasattr(p, "to_local") for _, p, _ in found):
            grad_scale, max_norm = self._clip(found, grads, grad_scale), None
        scaling = max_norm, grad_scale, found_inf
        if found[0][1].is_cuda:
            self._launch(found, grads, scaling)
        elif backend.simulating():
            state = self._groups, self.grad_norm, [table.memory for table in self._tables.values()], list(map(dict, self.state.values()))
            with backend.simulated_memory(tree_leaves([found, grads, scaling, numbers, *state])):
                self._launch(found, grads, scaling)
        else:
            self._step_on_cpu(found, grads, numbers, scaling)
        return loss

    def _clip(self, found: Sequence[_Found], grads: Sequence[Tensor], grad_scale: Tensor | None) -> Tensor:
        """The number that divides the gradients, so that those of all processes together have at most max_norm. Sets grad_norm."""
        parts: dict[Any, list[Tensor]] = {}
        for (_, p, _), grad in zip(found, grads, strict=True):
            parts.setdefault(getattr(p, "device_mesh", None), []).append(grad)
        total = grads[0].new_zeros((), dtype=torch.float64)
        for mesh, some in parts.items():
            square = torch.stack([norm.double() for norm in torch._foreach_norm(some, 2, dtype=wide(some[0].dtype))]).square().sum()
            if mesh is not None:
                from torch.distributed.tensor import DTensor, Partial

                square = DTensor.from_local(square, mesh, [Partial()] * mesh.ndim).full_tensor()  # the sum over the processes
            total += square
        scale = torch.ones_like(total) if grad_scale is None else grad_scale.double()
        norm = total.sqrt() / scale.abs()
        self.grad_norm = norm.float()
        return torch.where(norm > self._options.max_norm, scale * norm / self._options.max_norm, scale).float()

    def update_groups(self) -> None:
        """Copy changed numbers of the groups to the device, as step() does outside of a capture, for the next replay of a CUDA graph."""
        data = b"".join(group_bytes(*self._numbers(group)) for group in self.param_groups)
        if data == self._written or self._groups is None:
            return
        if self._groups.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a number in a group changed before the capture of a CUDA graph: call update_groups() before the capture")
        write(self._groups, data)
        self._written = data

    def _row(self, index: int, p: Tensor, group: int) -> Row:
        """The tensors of a parameter. Creates its state."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=wide(p.dtype)) for _ in range(2))
        if self._options.master_weights and p.dtype.itemsize == 2 and "master" not in state:
            state["master"] = p.detach().float()
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state and state[name].stride() != p.stride():  # the parameter has another memory format than before
                state[name] = _like_parameter(f"{name} of parameter {index}", state[name], p, state[name].dtype)
        master = _local(state["master"]) if "master" in state else None
        return Row(_local(p), _local(state["exp_avg"]), _local(state["exp_avg_sq"]), master, state["step"], group, index)

    def _key(self, found: Sequence[_Found]) -> tuple[tuple[int, ...], ...]:
        """The addresses in a table."""
        states = ((i, p, (t for t in self.state[p].values() if isinstance(t, Tensor))) for i, p, _ in found)
        return tuple((i, _local(p).data_ptr(), *(_local(t).data_ptr() for t in tensors)) for i, p, tensors in states)

    def _launch(self, found: Sequence[_Found], grads: Sequence[Tensor], scaling: Scaling) -> None:
        first = _local(found[0][1])
        capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(self._tables) > _MOST_TABLES:  # other parameters have gradients each time
            self._forget()
        key = self._key(found)
        if key not in self._tables:
            if capturing:
                raise RuntimeError("before the capture of step() in a CUDA graph, call it once with gradients of the same parameters")
            table = Table([self._row(*one) for one in found])
            key = self._key(found)  # creating the rows may have created the state
            self._tables[key] = table
        if self._groups is None:
            self._groups = first.new_empty(6 * len(self.param_groups), dtype=torch.int64)
            self.grad_norm = first.new_zeros((), dtype=torch.float32) if scaling[0] is not None else self.grad_norm
        self.update_groups()
        if capturing:
            self._captured += ((self._tables[key], self._groups, self.grad_norm),)
        self._tables[key].launch(grads, self._groups, self.grad_norm, self._options, scaling, capturing)

    def _step_on_cpu(self, found: list[_Found], grads: list[Tensor], numbers: list[Numbers], scaling: Scaling) -> None:
        """torch's fused AdamW on the masters, or on float32 copies of 16-bit parameters."""
        if self._options.stochastic_rounding:
            raise ValueError(f"stochastic_rounding needs a GPU, the parameters are on the CPU: {checks.SIMULATOR}")
        rows, (max_norm, grad_scale, found_inf) = [self._row(*one) for one in found], scaling
        grad_scale = grad_scale if max_norm is None else self._clip(found, grads, grad_scale)
        grads = [g.to(row.exp_avg.dtype) for g, row in zip(grads, rows, strict=True)]
        targets = [row.param.to(row.exp_avg.dtype) if row.master is None else row.master for row in rows]
        for group, (lr, beta1, beta2, eps, weight_decay) in enumerate(numbers):
            tensors = [(t, g, r.exp_avg, r.exp_avg_sq, r.step) for t, g, r in zip(targets, grads, rows, strict=True) if r.group == group]
            params, gradients, exp_avgs, exp_avg_sqs, steps = ([each[i] for each in tensors] for i in range(5))
            torch_adamw.adamw(
                params, gradients, exp_avgs, exp_avg_sqs, [], steps, fused=True, amsgrad=False, maximize=False, lr=float(lr), beta1=beta1,
                beta2=beta2, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf,
            )  # fmt: skip
        torch._foreach_copy_([row.param for row in rows], targets)


def _like_parameter(name: str, value: Any, p: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor of the state with the parameter's strides, which the kernels expect."""
    value = torch.as_tensor(value)
    if value.shape != p.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, it must be that of the parameter, {tuple(p.shape)}")
    return torch.empty_like(p, dtype=dtype).copy_(value)


def _local(x: Any) -> Tensor:
    """This process's part of a DTensor; another tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def _gradient(index: int, p: Tensor) -> Tensor:
    """The gradient of a parameter, with its strides."""
    grad, name, p = _local(p.grad), f"the gradient of parameter {index}", _local(p)
    checks.dtype(name, grad, (p.dtype,))
    if grad.device != p.device:
        raise ValueError(f"{name} is on {grad.device}, the parameter is on {p.device}: they must be on one device")
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
