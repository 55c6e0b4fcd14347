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

_LIKE_PARAMETERS = "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"  # of the state: of a parameter's shape, in the dtype of computation
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
        lr: a number, or a float32 tensor of one element on the device of the parameters, which is read there at each step. A float64
            tensor is read on the host.
        betas, eps, weight_decay: as in torch.optim.AdamW (decoupled weight decay, bias correction).
        amsgrad, maximize: as in torch.optim.AdamW. torch's fused AdamW computes such steps.
        foreach, capturable, differentiable, fused: accepted, because recipes for torch.optim.AdamW name them. They change nothing.
            `differentiable` must be False.
        max_norm: None, or the largest 2-norm of all gradients together. If their norm is larger, they are scaled by max_norm / norm, as
            llm.c does; `grad_norm` is the norm before that. The gradients are not written. If the norm is inf, finite gradients become 0
            and infinite ones NaN. If it is NaN, nothing is scaled: the NaN reaches its parameters.
        master_weights: keep a float32 copy of each 16-bit parameter in the state ("master"), and round it to the parameter. If the
            parameter was written in place since the last step, as by `load_state_dict` of the model, the copy follows it. A write
            through `.data` is not noticed.
        stochastic_rounding: round bfloat16 parameters to one of the two neighbours, so that the expectation is exact. The random numbers
            are Philox4x32-10 of (seed, step, number of the parameter, number of the element), whatever the launch. Not on CPUs.
        seed: from 0 to 2^64 - 1.
        version: "v1" or "v2"; default: the fastest.

    Parameters may be DTensors, such as FSDP2's, that are divided along dimensions: a process updates its part, the state has DTensors, and
    the norm is that of all parts. If a parameter gets another dtype or memory format, as by `model.to(...)`, its moments follow.
    A step increases the versions of what it writes, as torch's does, so autograd raises an error where it needs an old parameter.
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
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None, max_norm: float | None = None,
        master_weights: bool = False, stochastic_rounding: bool = False, seed: int = 0, version: str | None = None,
    ) -> None:  # fmt: skip
        if max_norm is not None and checks.number("max_norm", max_norm) <= 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        checks.version("adamw", version, VERSIONS)
        self._options = SimpleNamespace(
            master_weights=checks.flag("master_weights", master_weights), max_norm=max_norm, version=version or "",
            stochastic_rounding=checks.flag("stochastic_rounding", stochastic_rounding), seed=checks.integer("seed", seed, 0, 2**64 - 1),
        )  # fmt: skip
        check_numbers(lr, betas, eps, weight_decay)
        if checks.flag("differentiable", differentiable):
            raise ValueError("differentiable must be False: the kernels of AdamW have no derivatives")
        flags = {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        for name, value in flags.items():
            if value is not None or name not in ("foreach", "fused"):
                checks.flag(name, value)
        self._forget()
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **flags, "differentiable": False})

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
        """As torch's, also of a torch.optim.AdamW. The tensors are copied."""
        given = [state_dict]  # and what hooks make of it, of which ours is the last
        hook = self.register_load_state_dict_pre_hook(lambda _, changed: given.append(changed))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        state_dict = given[-1]
        # torch's casts moments to the dtype of the parameter
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name == "step":
                    self.state[p][name] = torch.tensor(float(value), dtype=torch.float32, device=p.device)
                elif name in _LIKE_PARAMETERS:
                    self.state[p][name] = _like_parameter(f"{name} of parameter {i}", value, p, wide(p.dtype))

    def _forget(self) -> None:
        """Forget the tables in device memory, whose tensors have changed. The groups keep their memory, which CUDA graphs may read."""
        self._tables: dict[tuple[Any, ...], Table] = {}
        self._written = b""  # what is in _groups
        self._versions: dict[int, int] = {}  # of the parameters after the last step, by number
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
        by_torch = any(group.get("amsgrad") or group.get("maximize") for group in self.param_groups)
        kernels = (found[0][1].is_cuda or backend.simulating()) and not by_torch
        if kernels and max_norm is not None and any(hasattr(p, "to_local") for _, p, _ in found):
            grad_scale, max_norm = self._clip(found, grads, grad_scale).float(), None
        scaling = max_norm, grad_scale, found_inf
        if self._options.master_weights:
            self._follow(found)
        if not kernels:
            self._step_by_torch(found, grads, numbers, scaling)
        elif found[0][1].is_cuda:
            self._launch(found, grads, scaling)
        else:
            state = self._groups, self.grad_norm, [table.memory for table in self._tables.values()], list(map(dict, self.state.values()))
            with backend.simulated_memory([_local(t) for t in tree_leaves([found, grads, scaling, numbers, *state])]):
                self._launch(found, grads, scaling)
        if kernels:  # torch's operations do so themselves
            written = [p for _, p, _ in found]
            written += [t for p in written for t in self.state[p].values() if isinstance(t, Tensor)]
            torch.autograd.graph.increment_version(written)
        if self._options.master_weights:
            self._versions = {i: p._version for i, p, _ in found}
        return loss

    def _follow(self, found: Sequence[_Found]) -> None:
        """The masters of parameters that were written since the last step take their values, where they differ."""
        for i, p, _ in found:
            master = self.state[p].get("master")
            if master is None or self._versions.get(i, p._version) == p._version or master.shape != p.shape:
                continue
            same = master.to(p.dtype) == p if not self._options.stochastic_rounding else torch.zeros_like(p, dtype=torch.bool)
            master.copy_(torch.where(same, master, p.to(master.dtype)))

    def _clip(self, found: Sequence[_Found], grads: Sequence[Tensor], grad_scale: Tensor | None) -> Tensor:
        """The number that divides the gradients, so that those of all processes together have at most max_norm. Sets grad_norm."""
        parts: dict[Any, list[Tensor]] = {}
        for (_, p, _), grad in zip(found, grads, strict=True):
            parts.setdefault(getattr(p, "device_mesh", None), []).append(grad)
        total = grads[0].new_zeros((), dtype=torch.float64)
        for mesh, some in parts.items():
            square = torch.stack(list(torch._foreach_norm(some, 2, dtype=torch.float64))).square().sum()
            if mesh is not None:
                from torch.distributed.tensor import DTensor, Partial

                square = DTensor.from_local(square, mesh, [Partial()] * mesh.ndim).full_tensor()  # the sum over the processes
            total += square
        scale = torch.ones_like(total) if grad_scale is None else grad_scale.double()
        norm = total.sqrt() / scale.abs()
        self.grad_norm = norm.float()
        return torch.where(norm > self._options.max_norm, scale * norm / self._options.max_norm, scale)

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
        if p.dtype.itemsize != 2:
            state.pop("master", None)
        if self.param_groups[group].get("amsgrad") and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(p, dtype=wide(p.dtype))
        for name in _LIKE_PARAMETERS:  # the parameter may have another memory format or dtype than before
            if name in state and (state[name].stride() != p.stride() or state[name].dtype != wide(p.dtype)):
                state[name] = _like_parameter(f"{name} of parameter {index}", state[name], p, wide(p.dtype))
        step = state["step"]
        if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.device != p.device:
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
        master = _local(state["master"]) if "master" in state else None
        return Row(_local(p), _local(state["exp_avg"]), _local(state["exp_avg_sq"]), master, state["step"], group, index)

    def _key(self, found: Sequence[_Found]) -> tuple[Any, ...]:
        """What a table holds, and what its rows were made of."""
        key = []
        for i, p, group in found:
            states = [t for t in self.state[p].values() if isinstance(t, Tensor)]
            if type(p) not in checks.PLAIN:
                p, states = _local(p), [_local(t) for t in states]
            addresses = [(t.data_ptr(), t.dtype) for t in states]
            key.append((i, group, p.dtype, p.shape, p.stride(), p.data_ptr(), *addresses))
        return tuple(key)

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

    def _step_by_torch(self, found: list[_Found], grads: list[Tensor], numbers: list[Numbers], scaling: Scaling) -> None:
        """torch's fused AdamW on the masters, or on float32 copies of 16-bit parameters."""
        if self._options.stochastic_rounding:
            what = "amsgrad and maximize have none" if found[0][1].is_cuda else f"the parameters are on the CPU: {checks.SIMULATOR}"
            raise ValueError(f"stochastic_rounding needs a GPU: {what}")
        rows, (max_norm, grad_scale, found_inf) = [self._row(*one) for one in found], scaling
        dtypes = [row.exp_avg.dtype for row in rows]
        if max_norm is None:
            grads = [g.to(dtype, copy=grad_scale is not None) for g, dtype in zip(grads, dtypes, strict=True)]  # it scales them in place
        else:
            scale = self._clip(found, grads, grad_scale)
            grads, grad_scale = [(g.double() / scale).to(dtype) for g, dtype in zip(grads, dtypes, strict=True)], None
        targets = [row.param.to(row.exp_avg.dtype) if row.master is None else row.master for row in rows]
        for i, (lr, beta1, beta2, eps, weight_decay) in enumerate(numbers):
            mine = [j for j, row in enumerate(rows) if row.group == i]
            group = self.param_groups[i]
            most = [_local(self.state[found[j][1]]["max_exp_avg_sq"]) for j in mine] if group.get("amsgrad") else []
            torch_adamw.adamw(
                [targets[j] for j in mine], [grads[j] for j in mine], [rows[j].exp_avg for j in mine], [rows[j].exp_avg_sq for j in mine],
                most, [rows[j].step for j in mine], fused=True, amsgrad=bool(most), maximize=bool(group.get("maximize")), lr=float(lr),
                beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf,
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
    grad, p = _local(p.grad), _local(p)
    plain = type(grad) is Tensor and grad.dtype is p.dtype and grad.layout is torch.strided and grad.device == p.device
    if plain and grad.stride() == p.stride() and not grad.is_neg():
        return grad
    name = f"the gradient of parameter {index}"
    checks.dtype(name, grad, (p.dtype,))
    if grad.device != p.device:
        raise ValueError(f"{name} is on {grad.device}, the parameter is on {p.device}: they must be on one device")
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
