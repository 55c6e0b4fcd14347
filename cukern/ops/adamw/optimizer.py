"""AdamW as a torch.optim.Optimizer: state, parameter groups, clipping and loss scaling around the launches of
a step."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import adamw as torch_adamw
from torch.utils._pytree import tree_leaves

from cukern.ops.adamw.op import VERSIONS, Numbers, check_numbers, check_param
from cukern.ops.adamw.rounding import round_moments, wide_moments
from cukern.ops.adamw.state import (
    Found,
    Known,
    Layouts,
    Tensors,
    gradients,
    layouts,
    like_parameter,
    local,
    sum_of_squares,
)
from cukern.ops.adamw.table import GROUP_WORDS, Row, Scaling, Table, group_bytes, write
from cukern.runtime import checks
from cukern.runtime.launch import backend
from cukern.runtime.tensors import wide

_LIKE_PARAMETERS = "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"  # of a parameter's shape
_MOST_TABLES = 64  # each has 8 bytes for 8192 elements of the parameters


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW in one launch per dtype, with clipping of the gradients, float32 masters and
    stochastic rounding.

        optimizer = cukern.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), max_norm=1.0)
        model(x).sum().backward()
        optimizer.step()
        print(optimizer.grad_norm)  # a tensor on the device

    Args:
        params: tensors, or groups. float16, bfloat16, float32 or float64, on one device, with dense strides.
            DTensors may be sharded.
        lr: a number, or a float32 or float64 tensor of one element on the device, read at each step.
        betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, capturable, differentiable, fused: accepted, without effect. `differentiable` must be False.
        max_norm: None, or the largest 2-norm of all gradients together: larger ones count times max_norm /
            norm. `grad_norm` is the norm before that.
        master_weights: keep a float32 copy of each 16-bit parameter. One that something else wrote is read
            first.
        stochastic_rounding: round bfloat16 parameters to a neighbour at random, so that the expectation is
            exact. Not on CPUs.
        state_dtype: of the moments: torch.float32, or torch.bfloat16, rounded stochastically: 4 bytes less
            per element. Not with amsgrad.
        seed: of the random numbers, from 0 to 2^64 - 1.
        version: "v1" or "v2"; default: the fastest.

    A step does not synchronize, and can be captured in a CUDA graph after one outside of it;
    call `update_groups()` before a replay if a number in a group changed. GradScaler works as with torch's
    fused optimizers. `state_dict` and `load_state_dict` exchange with torch.optim.AdamW. CPU tensors use
    torch's fused AdamW, or the simulator.

    Raises TypeError and ValueError for what does not fit, before anything is written; RuntimeError for a
    capture without a step before it. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf
    grad_norm: Tensor | None = None
    _captured: tuple[Any, ...] = ()  # memory that CUDA graphs use
    _groups: Tensor | None = None  # numbers of the parameter groups, in device memory

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
        foreach: bool | None = None, capturable: bool = False, differentiable: bool = False,
        fused: bool | None = None, max_norm: float | None = None, master_weights: bool = False,
        stochastic_rounding: bool = False, seed: int = 0, version: str | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        if max_norm is not None and checks.number("max_norm", max_norm) <= 0:
            raise ValueError(f"max_norm must be positive, got {max_norm!r}")
        checks.version("adamw", version, VERSIONS)
        checks.one_of("state_dtype", state_dtype, (torch.float32, torch.bfloat16))
        self._options = SimpleNamespace(
            state_dtype=state_dtype, master_weights=checks.flag("master_weights", master_weights),
            max_norm=max_norm, version=version or "",
            stochastic_rounding=checks.flag("stochastic_rounding", stochastic_rounding),
            seed=checks.integer("seed", seed, 0, 2**64 - 1),
        )  # fmt: skip
        check_numbers(lr, betas, eps, weight_decay)
        if checks.flag("differentiable", differentiable):
            raise ValueError("differentiable must be False: the kernels of AdamW have no derivatives")
        flags = {
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "fused": fused,
        }
        for name, value in flags.items():
            if value is not None or name not in ("foreach", "fused"):
                checks.flag(name, value)
        self._forget()
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                **flags,
                "differentiable": False,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises TypeError and ValueError, and adds nothing, for tensors or numbers that do not
        fit."""
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
                    raise TypeError(
                        f"{name} must be a plain tensor, or a DTensor that is divided along dimensions, got "
                        f"{kind}"
                    )
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
        # what the hooks make of it: ours is the last before the load, and the first after it
        given: list[dict[str, Any]] = []
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, changed: given.append(changed)),
            self.register_load_state_dict_post_hook(lambda _: self._restore_state(given[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restore_state(self, state_dict: dict[str, Any]) -> None:
        """Copy the state again, because torch's load casts moments to the dtype of the parameter."""
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name == "step":
                    self.state[p][name] = torch.tensor(float(value), dtype=torch.float32, device=p.device)
                elif name in _LIKE_PARAMETERS:
                    what, dtype = f"{name} of parameter {i}", self._dtype(name, p)
                    self.state[p][name] = like_parameter(what, value, p, dtype)

    def _dtype(self, name: str, p: Tensor) -> torch.dtype:
        """Of a tensor in the state of a parameter."""
        narrow = name in ("exp_avg", "exp_avg_sq") and p.dtype != torch.float64
        return self._options.state_dtype if narrow else wide(p.dtype)

    def _forget(self) -> None:
        """Forget the tables in device memory, whose tensors have changed. The groups keep their memory, which
        CUDA graphs may read."""
        self._tables: dict[tuple[Any, ...], Table] = {}
        self._known: Known | None = None  # the tensors and the table of the last step
        self._written = b""  # what is in _groups
        if self._groups is not None and self._groups.numel() != GROUP_WORDS * len(self.param_groups):
            self._groups = None

    def _numbers(self, group: dict[str, Any]) -> Any:
        lr, *rest = check_numbers(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        if isinstance(lr, Tensor):
            checks.one_device(**{"the first parameter": self.param_groups[0]["params"][0], "lr": lr})
        state_dtype = self._options.state_dtype
        if group.get("amsgrad") and state_dtype != torch.float32:
            raise ValueError(f"state_dtype must be torch.float32 with amsgrad, got {state_dtype}")
        return lr, *rest

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Returns what `closure`, which computes the loss and the
        gradients, returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        every = [(p, g) for g, group in enumerate(self.param_groups) for p in group["params"]]
        found = [(i, p, g) for i, (p, g) in enumerate(every) if p.grad is not None]
        if not found:
            return loss
        numbers = [self._numbers(group) for group in self.param_groups]
        max_norm = self._options.max_norm
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        scaling = max_norm, grad_scale, found_inf
        if found[0][1].is_cuda or backend.simulating():
            self._step_by_kernels(found, numbers, scaling)
        else:
            self._step_on_cpu(found, gradients(found, layouts([p for _, p, _ in found])), numbers, scaling)
        return loss

    def _step_by_kernels(self, found: list[Found], numbers: list[Numbers], scaling: Scaling) -> None:
        now, key, rows, squares = self._tensors(found), None, [], None
        grads, written, known = now.grads, now.written, self._known
        table = known.table if known is not None and now.are(known) else None
        capturing = _capturing(now.grads[0])
        if table is None:
            layout = layouts(now.params)
            grads, state = gradients(found, layout), self._state(found)
            squares = None if scaling[0] is None else _squares_of_all(found, grads)
            key = self._key(found, layout, state)
            table = self._tables.get(key)
            if table is None:
                rows = self._rows(found)
                state = self._state(found)  # the rows may have created it
                key = self._key(found, layout, state)
            written = now.params + [t for column in state for t in column if isinstance(t, Tensor)]
            self._known = None if table is None else now.known(table, grads, written)
        if grads[0].is_cuda:
            self._launch(key, table, rows, grads, squares, scaling, capturing)
        else:
            tables = [table.memory for table in self._tables.values()]
            states = list(map(dict, self.state.values()))
            used = [found, grads, scaling, squares, numbers, self._groups, self.grad_norm, tables, states]
            with backend.simulated_memory([local(t) for t in tree_leaves(used)]):
                self._launch(key, table, rows, grads, squares, scaling, capturing)
        torch.autograd.graph.increment_version(written)  # torch's operations do so themselves

    def _rows(self, found: list[Found]) -> list[Row]:
        if _capturing(found[0][1]):
            raise RuntimeError(
                "before the capture of step() in a CUDA graph, call it once with gradients of the same "
                "parameters"
            )
        return [self._row(*one) for one in found]

    def _tensors(self, found: list[Found]) -> Tensors:
        groups = [(len(group["params"]), bool(group.get("amsgrad"))) for group in self.param_groups]
        return Tensors(found, [self.state.get(p, {}) for _, p, _ in found], groups)

    def update_groups(self) -> None:
        """Copy changed numbers of the groups to the device, as step() does outside of a capture, for the next
        replay of a CUDA graph."""
        data = b"".join(
            group_bytes(*self._numbers(g), maximize=bool(g.get("maximize"))) for g in self.param_groups
        )
        if data == self._written or self._groups is None:
            return
        if _capturing(self._groups):
            raise RuntimeError(
                "a number in a group changed before the capture of a CUDA graph: call update_groups() before "
                "the capture"
            )
        write(self._groups, data)
        self._written = data

    def _row(self, index: int, p: Tensor, group: int) -> Row:
        """The tensors of a parameter. Creates its state, or lets it follow the parameter's dtype, device and
        memory format."""
        name, state = f"parameter {index}", self.state[p]
        check_param(name, local(p))
        checks.one_device(**{"the first parameter": self.param_groups[0]["params"][0], name: p})
        needed = ["exp_avg", "exp_avg_sq"]
        if self.param_groups[group].get("amsgrad"):
            needed.append("max_exp_avg_sq")
        for key in needed:
            if key not in state:
                state[key] = torch.zeros_like(p, dtype=self._dtype(key, p))
        if p.dtype.itemsize != 2 or not self._options.master_weights:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = p.detach().float()
        for key in _LIKE_PARAMETERS:
            t, dtype = state.get(key), self._dtype(key, p)
            layout = p.shape, p.stride(), dtype, p.device
            if t is not None and (t.shape, t.stride(), t.dtype, t.device) != layout:
                state[key] = like_parameter(f"{key} of {name}", t, p, dtype)
        step = state.get("step", 0.0)
        if not isinstance(step, Tensor) or (step.shape, step.dtype, step.device) != (
            torch.Size(),
            torch.float32,
            p.device,
        ):
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device=p.device)
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        tensors: list[Any] = [local(state[key]) if key in needed else None for key in moments]
        m, v, largest = tensors
        master: Any = state.get("master")
        return Row(local(p), m, v, largest, local(master), state["step"], group, index)

    def _state(self, found: Sequence[Found]) -> list[list[Any]]:
        """By name, the tensors of the state of each parameter."""
        states = [self.state[p] for _, p, _ in found]
        return [[state.get(name) for state in states] for name in (*_LIKE_PARAMETERS, "step")]

    def _key(
        self, found: Sequence[Found], layout: Layouts | None, state: Sequence[Sequence[Any]]
    ) -> tuple[Any, ...]:
        """All that a table holds, and what its rows were made of."""
        places = tuple([(i, group) for i, _, group in found])
        return (
            places,
            tuple([bool(group.get("amsgrad")) for group in self.param_groups]),
            layout,
            *map(layouts, state),
        )

    def _launch(
        self, key: Any, table: Table | None, rows: list[Row], grads: Sequence[Tensor], squares: Tensor | None,
        scaling: Scaling, capturing: bool,
    ) -> None:  # fmt: skip
        first = grads[0]
        if table is None:
            if len(self._tables) > _MOST_TABLES:  # other parameters have gradients each time
                self._forget()
            table = self._tables[key] = Table(rows)
        if self._groups is None or self._groups.device != first.device:
            self._groups, self._written = (
                first.new_empty(GROUP_WORDS * len(self.param_groups), dtype=torch.int64),
                b"",
            )
        # a step on the CPU has its own
        if scaling[0] is not None and (self.grad_norm is None or self.grad_norm.device != first.device):
            self.grad_norm = first.new_zeros((), dtype=torch.float32)
        self.update_groups()
        if capturing:
            self._captured += ((table, self._groups, self.grad_norm),)
        table.launch(grads, self._groups, self.grad_norm, squares, self._options, scaling, capturing)

    def _scaled(self, found: list[Found], grads: list[Tensor], scaling: Scaling) -> list[Tensor]:
        """The gradients divided by grad_scale and clipped to max_norm, in double. Sets grad_norm."""
        max_norm, grad_scale, _ = scaling
        if max_norm is None and grad_scale is None:
            return grads
        factor = grads[0].new_ones((), dtype=torch.float64) if grad_scale is None else 1 / grad_scale.double()
        if max_norm is not None:
            norm = sum_of_squares(found, grads).sqrt() * factor.abs()
            self.grad_norm = norm.float()
            factor = torch.where(norm > max_norm, factor * (max_norm / norm), factor)
        return [g.double() * factor for g in grads]

    def _step_on_cpu(
        self, found: list[Found], grads: list[Tensor], numbers: list[Numbers], scaling: Scaling
    ) -> None:
        """torch's fused AdamW on the masters, or on float32 copies of 16-bit parameters."""
        if self._options.stochastic_rounding:
            raise ValueError(
                f"stochastic_rounding needs a GPU, the parameters are on the CPU: {checks.SIMULATOR}"
            )
        rows, found_inf = [self._row(*one) for one in found], scaling[2]
        grads = [
            g.to(wide(p.dtype))
            for g, (_, p, _) in zip(self._scaled(found, grads, scaling), found, strict=True)
        ]
        targets = [_target(row) for row in rows]
        for i, (lr, beta1, beta2, eps, weight_decay) in enumerate(numbers):
            group = self.param_groups[i]
            tensors = [one for one in zip(targets, grads, rows, strict=True) if one[2].group == i]
            mine, amsgrad = [row for _, _, row in tensors], bool(group.get("amsgrad"))
            exp_avgs, exp_avg_sqs = wide_moments(mine)
            maxima, steps = ([getattr(row, name) for row in mine] for name in ("max_exp_avg_sq", "step"))
            torch_adamw.adamw(
                [t for t, _, _ in tensors], [g for _, g, _ in tensors], exp_avgs, exp_avg_sqs,
                maxima if amsgrad else [], steps, fused=True, amsgrad=amsgrad,
                maximize=bool(group.get("maximize")), lr=float(lr), beta1=beta1, beta2=beta2, eps=eps,
                weight_decay=weight_decay, found_inf=found_inf,
            )  # fmt: skip
            round_moments(mine, exp_avgs, exp_avg_sqs, self._options.seed)
        torch._foreach_copy_([row.param for row in rows], targets)


def _squares_of_all(found: list[Found], grads: list[Tensor]) -> Tensor | None:
    """The sum of squares over the processes, which share DTensors; None without DTensors."""
    return sum_of_squares(found, grads) if any(hasattr(p, "to_local") for _, p, _ in found) else None


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _target(row: Row) -> Tensor:
    """What a step on the CPU updates: the master, which follows what something else wrote into the parameter,
    or the parameter."""
    param = row.param.to(wide(row.param.dtype))
    if row.master is None:
        return param
    return row.master.copy_(torch.where(row.master.to(row.param.dtype) == row.param, row.master, param))
