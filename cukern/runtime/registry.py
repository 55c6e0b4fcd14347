"""The table of ops and versions that the commands and tests iterate over, and the registration of raw ops with torch."""

import contextlib
import contextvars
import json
import operator
import os
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_unflatten

from cukern.runtime import autocast, backend, checks, planning, recording
from cukern.runtime import sharding as split
from cukern.runtime.backend import refuse_fork
from cukern.runtime.device import cached, device_of
from cukern.runtime.device import versions_in_force as _in_force
from cukern.runtime.kernel import Kernel

Tensors = tuple[torch.Tensor, ...]
Make = Callable[[Sequence[int], torch.dtype, torch.device | str], Tensors]

_library = torch.library.Library("cukern", "DEF")
_PLAIN = checks.PLAIN | {type(None)}
_tracing = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


def raw_op(
    schema: str, tensors: int, impl: Callable[..., Any], fake: Callable[..., Any], library: torch.library.Library = _library,
    sharding: split.Rule = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register a launch as `torch.ops.cukern.<name>`. Returns a function that calls it with the least host time.

    Args:
        schema: torch's schema, such as "_square(Tensor x, str version) -> Tensor": first tensors, last the version. The raw op is not
            differentiable; the autograd Function that calls it is.
        tensors: the number of arguments that are tensors or lists of tensors.
        impl, fake: the launch, and its version for fake tensors.
        library: the namespace in torch.ops.
        sharding: how DTensors are split, see sharding.py. None: they are replicated.

    The versions of arguments that the schema marks as written increase, as those of torch's in-place ops do.

    The result skips torch's dispatcher (1.7 us) unless one of these needs it: torch.compile, torch.export, dispatch modes such as
    FakeTensorMode, functorch transforms, tensor subclasses, the simulator.
    """
    short = schema.partition("(")[0]
    if library is _library and "Tensor[] params" not in schema:  # adamw has tables of its own
        impl = planning.planned_launch(impl, _tensor_names(schema, tensors))
    name = f"{library.ns}::{short}"
    library.define(schema)
    writes = [i for i, argument in enumerate(schema.partition("(")[2].partition(" -> ")[0].split(", ")) if "!" in argument]
    lists = "[]" in schema  # for which torch's older vmap has no rule
    if writes:
        impl = _counted(impl, writes)

    def dispatched(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return impl(*args)
        with torch.no_grad():  # graphs of torch.export are called with parameters, which torch's `out=` refuses
            return impl(*args)

    library.impl(short, dispatched, "CUDA")

    def simulate(*args: Any) -> Any:
        if not backend.simulating() and torch._C._current_graph_task_id() < 0:  # a backward pass follows a simulated forward
            raise ValueError(f"{name} runs kernels, and the tensors are on the CPU; {checks.SIMULATOR}")
        with backend.simulated_memory(_flat(args)):
            return dispatched(*args)

    library.impl(short, simulate, "CPU")
    torch.library.register_fake(name, fake, lib=library)
    packet = getattr(getattr(torch.ops, library.ns), short).default
    split.add(packet, sharding)

    def op(*args: Any) -> Any:
        split.register()
        if not _tracing():
            tensors = [x for x in _flat(args) if isinstance(x, torch.Tensor)]
            if _transforms() and any(map(_wrapped, tensors)):
                raise NotImplementedError(f"{name} has no rule for this torch.func transform")
            if lists and not writes and any(map(_batched, tensors)):
                return _batched_call(call, args)
        return packet(*args)

    def call_one(x: torch.Tensor, *rest: Any) -> Any:
        if _tracing() or type(x) not in _PLAIN or _modes() or not x.is_cuda:
            return op(x, *rest)
        try:
            return impl(x, *rest)
        except RuntimeError as error:
            refuse_fork(name, error)
            if not _transforms() and not _batched(x):
                checks.strided("x", x)
                raise
        return op(x, *rest)  # data_ptr() of a wrapper raised before the launch

    def call(*args: Any) -> Any:
        first = args[0][0] if type(args[0]) is list else args[0]
        if _tracing() or _modes() or _transforms() or not first.is_cuda:
            return op(*args)
        if not _PLAIN.issuperset(map(type, args[:tensors])) and not _PLAIN.issuperset(map(type, _flat(args[:tensors]))):
            return op(*args)
        try:
            return impl(*args)
        except RuntimeError as error:
            refuse_fork(name, error)
            if not any(isinstance(x, torch.Tensor) and (_wrapped(x) or _batched(x)) for x in _flat(args)):
                raise
        return op(*args)  # a functorch wrapper that outlived its transform, or `is_grads_batched`: the dispatcher unwraps it

    return call_one if tensors == 1 else call


def _counted(impl: Callable[..., Any], writes: Sequence[int]) -> Callable[..., Any]:
    """`impl`, which then increments the versions of the arguments that it writes."""

    def run(*args: Any) -> Any:
        result, recorder = impl(*args), recording.active()
        written = [x for x in _flat([args[i] for i in writes]) if x is not None]
        increment_version(written) if recorder is None else recorder.call(increment_version, (written,))
        return result

    return run


def _batched_call(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The rule of `torch.autograd.grad(is_grads_batched=True)`, whose vmap is torch's older one: one call per element of the batch."""
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()
    flat, tree = tree_flatten(args)
    whole = [torch._remove_batch_dim(x, level, 1, 0) if isinstance(x, torch.Tensor) and _batched(x) else None for x in flat]
    if any(x is not None and _batched(x) for x in whole):
        raise NotImplementedError("is_grads_batched inside of is_grads_batched has no rule for this op")
    size = next(x.shape[0] for x in whole if x is not None)
    element = [[x if t is None else t[i] for x, t in zip(flat, whole, strict=True)] for i in range(size)]
    outs = [call(*tree_unflatten(one, tree)) for one in element]
    if isinstance(outs[0], torch.Tensor):
        return torch._add_batch_dim(torch.stack(outs), 0, level)
    return [torch._add_batch_dim(torch.stack(parts), 0, level) for parts in zip(*outs, strict=True)]


def _tensor_names(schema: str, count: int) -> list[str]:
    """The names of the first arguments of a schema, with "[]" for lists."""
    arguments = re.findall(r"Tensor(?:\(\w!\))?(\[\])?\??(\[\])? (\w+)", schema.partition("(")[2].rpartition("->")[0])
    return [name + (a or b) for a, b, name in arguments][:count]


def _flat(args: Iterable[Any]) -> list[Any]:
    """The arguments, with lists flattened."""
    return [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]


class Differentiable(torch.autograd.Function):
    """Base class of the ops' autograd Functions; `apply_of` returns the callable.

    Subclasses define static methods: `forward(*args)`, `setup_context(ctx, inputs, output)`, which calls `save`, `backward(ctx, *grads)`,
    `tangent(ctx, *tangents)` (torch's jvp) and `batch(info, in_dims, *args)` (torch's vmap). The last two have their own names, because
    torch.compile does not trace a Function that defines jvp. `recorded(ctx, *args)`, forward and setup_context in one for plain autograd,
    saves 0.8 us per call. A subclass may define a faster one.
    """


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward, and for `tangent` if forward-mode derivatives are active."""
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0 and not _tracing():
        ctx.save_for_forward(*tensors)


def apply_of(function: type[Differentiable]) -> Callable[..., Any]:
    """`function.apply` with forward-mode derivatives and vmap.

    `apply` of a Function with setup_context costs 47 us per call because of its torch.func support. This one skips that support (8 us)
    unless a transform is active.
    """

    def recorded(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    rules = {"jvp": getattr(function, "tangent", None), "vmap": getattr(function, "batch", None)}
    full = type(function.__name__, (function,), {name: staticmethod(rule) for name, rule in rules.items() if rule})
    plain: type = function
    if function.setup_context is not torch.autograd.Function.setup_context:
        members = {"forward": getattr(function, "recorded", recorded), "setup_context": torch.autograd.Function.setup_context}
        plain = type(function.__name__, (function,), {name: staticmethod(member) for name, member in members.items()})
    fast, dual = (super(torch.autograd.Function, one).apply for one in (plain, full))  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if forward_ad._current_level >= 0 or _transforms():
            return eager(*args)
        if _tracing():
            return function.apply(*args)
        recorder = recording.active()
        return fast(*args) if recorder is None else recorder.call(fast, args)

    def transform(*args: Any) -> Any:
        return full.apply(*args) if _transforms() else dual(*args)  # type: ignore[attr-defined]

    # torch.compile breaks its graph here and reports this name. Without the break, forward-mode derivatives would silently be zero.
    transform.__qualname__ = f"{function.__name__}.transform"
    eager = torch._disable_dynamo(transform)
    return apply


def watched(*tensors: torch.Tensor | None) -> bool:
    """True if a call must use the autograd Function: a tensor requires grad, or `transformed()`."""
    for x in tensors:
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled() or transformed()
    return forward_ad._current_level >= 0 or _transforms()


def transformed() -> bool:
    """True if tensors may carry forward-mode tangents or a torch.func transform is active."""
    return forward_ad._current_level >= 0 or _transforms()


def batched(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """A tensor of a vmap rule with the batch dimension first, expanded if it has none."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def each(apply: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """The vmap rule for any op: one call per element of the batch. Returns (outputs, out_dims). One call with zeros gives the shapes of the
    results of an empty batch."""
    if not size:
        one = [a if d is None else a.new_zeros((*a.shape[:d], 1, *a.shape[d + 1 :])) for a, d in zip(args, in_dims, strict=True)]
        outputs, dims = each(apply, 1, in_dims, one)
        return (outputs[:0] if dims == 0 else tuple(o if d is None else o[:0] for o, d in zip(outputs, dims, strict=True))), dims
    calls = [apply(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(size)]
    if isinstance(calls[0], torch.Tensor):
        with autocast.off(calls[0]):
            return torch.stack(calls), 0
    with autocast.off(calls[0][0]):
        outputs = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls, strict=True))
    return outputs, tuple(None if out is None else 0 for out in outputs)


def rows_of_each(
    apply: Callable[..., Any], matrices: int, size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """The vmap rule of an op on rows: one call, with the batch merged into the rows of the first `matrices` arguments. Other arguments
    that have a batch dimension need `each`. Returns (outputs, out_dims)."""
    if any(dim is not None for dim in in_dims[matrices:]):
        return each(apply, size, in_dims, args)
    full = [t if t is None else batched(t, dim, size) for t, dim in zip(args[:matrices], in_dims, strict=False)]
    outs = apply(*(t if t is None else t.flatten(0, 1) for t in full), *args[matrices:])
    shape = next(t.shape[:2] for t in full if t is not None)
    if isinstance(outs, torch.Tensor):
        return outs.unflatten(0, shape), 0
    return tuple(out.unflatten(0, shape) for out in outs), (0,) * len(outs)


def no_backward(*_: Any) -> None:
    raise NotImplementedError("the gradients of this op use its forward kernels")


def _no_kernels(dtype: torch.dtype) -> Iterable[Kernel]:
    return ()


@dataclass(frozen=True)
class Version:
    """One version of an op's kernels.

    The op's raw ops call `forward` and `backward` to launch them. An op whose gradients use its forward has no backward. `instances`
    returns the kernels of a dtype for `cukern compile` and `warmup`. `requires` is the minimum compute capability, 80 for 8.0.
    """

    idea: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] = no_backward
    instances: Callable[[torch.dtype], Iterable[Kernel]] = _no_kernels
    requires: int = 75

    @property
    def in_torch(self) -> bool:
        """True if the version has no kernels, so that it runs on a CPU too."""
        return self.instances is _no_kernels


@dataclass(frozen=True)
class Cost:
    """The least work of one pass: bytes of device memory traffic, with each input read and each output written once, and operations."""

    bytes: int
    flops: int


def normal(whole: int = 1, columns: int = 0) -> Make:
    """The `make` of an Op: `whole` tensors of shape `dims`, then `columns` of shape `dims[1:]`, with normally distributed elements."""

    def make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensors:
        shapes = *[dims] * whole, *[dims[1:]] * columns
        return tuple(torch.randn(*shape, dtype=dtype, device=device) for shape in shapes)

    return make


_ONE = normal()


@dataclass(frozen=True)
class Op:
    """What the tools and tests need to know about an op. `stem` is the name of its files.

    `function(*inputs, version=)` is the public function, `reference(*inputs)` the same math in plain torch; each returns a tensor or a
    tuple. If the public function takes its inputs differently, such as in a list, `spread(*inputs, version=)` calls it.

    `dims` describes the command line's DIMS. `check_dims`, `sim_dims` and `bench_dims` are the default sizes for checks on a GPU, checks in
    the simulator, and timing. `make` draws random inputs, by default one of shape `dims`. `inputs` are their names. A last name that ends
    with "..." stands for any number of inputs, which are numbered. `constants` are floating-point inputs without a gradient. `in_place` are
    inputs that the function writes and returns; the reference does not write them. An op that is not `differentiable`, such as an
    optimizer, has no gradients at all.

    `cost(dims, itemsize)` gives the Cost of "fwd", of "bwd" (all gradients) and, if there are several, of "bwd:<input>" (one gradient).
    `bound` is the limit that the bench reports, "memory" or "compute". `roundings` and `magnitude(inputs, douts)`, the scales of outputs
    and gradients, define the allowed error; see bench/verify.py. `as_checked` is the op that `cukern check` uses instead.
    `note(dims, itemsize)` is a line that `cukern bench` prints above its tables.

    `candidates`: the kernels among which plans of the newest version choose, by their names for --kernel and --without. `variants(dims)`: a
    list of dims; calls with these launch every kernel that `dims` may need with any number of rows.
    """

    name: str
    stem: str
    function: Callable[..., torch.Tensor | Tensors]
    reference: Callable[..., torch.Tensor | Tensors]
    versions: dict[str, Version]
    dims: str
    check_dims: tuple[tuple[int, ...], ...]
    sim_dims: tuple[tuple[int, ...], ...]
    bench_dims: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    cost: Callable[[Sequence[int], int], dict[str, Cost]]
    make: Make = _ONE
    dtypes: tuple[torch.dtype, ...] = checks.FLOATS
    bound: str = "memory"
    roundings: int = 1
    magnitude: Callable[[Tensors, Tensors], Tensors] | None = None
    constants: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    differentiable: bool = True
    spread: Callable[..., torch.Tensor | Tensors] | None = None
    as_checked: "Op | None" = None
    note: Callable[[Sequence[int], int], str] | None = None
    candidates: tuple[str, ...] = ()
    variants: Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]] = lambda dims: (dims,)

    @property
    def call(self) -> Callable[..., torch.Tensor | Tensors]:
        """The public function, as a function of the inputs."""
        return self.spread or self.function

    def names(self, inputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """The name of each input."""
        *first, last = self.inputs
        if not last.endswith("..."):
            return self.inputs
        return *first, *(f"{last[:-3]}{i}" for i in range(len(inputs) - len(first)))

    def check_count(self, dims: Sequence[int]) -> None:
        """Raise ValueError if the op takes another number of sizes."""
        names = self.dims.split()
        if len(dims) != len(names) and not self.dims.endswith("..."):
            raise ValueError(f"{self.name} takes {len(names)} sizes, {self.dims}, got {' '.join(map(str, dims))}")

    def has_gradient(self, name: str, x: torch.Tensor) -> bool:
        """True if the input of this name has a gradient."""
        return self.differentiable and x.is_floating_point() and name not in self.constants

    def kernels(self, capability: int = 1 << 30, dtypes: Collection[torch.dtype] | None = None) -> dict[str, Kernel]:
        """Kernel instances by name: those of the dtypes (None: all) and of the versions that a GPU of this capability (90 for 9.0) runs."""
        versions = [v for v in self.versions.values() if v.requires <= capability]
        return {k.name: k for v in versions for d in self.dtypes if dtypes is None or d in dtypes for k in v.instances(d)}


def row_counts(dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`variants` of an op whose first size is the number of rows: dims around each threshold, with odd and even numbers of rows."""
    counts = {n + extra for k in range(12) for n in (1 << k, 3 << k) for extra in (0, 1)}
    return [dims, *((n, *dims[1:]) for n in sorted(counts))]


OPS: dict[str, Op] = {}
DEFAULT = "default"


def register(op: Op) -> Op:
    OPS[op.name] = op
    choose.cache_clear()  # type: ignore[attr-defined]
    return op


Versions = dict[str, tuple[str, str]]  # by op: the versions of forward and backward
_blocks: contextvars.ContextVar[tuple[Versions, ...]] = contextvars.ContextVar("cukern.use", default=())


class _InForce(types.ModuleType):
    """`now` is the choice of all open `use` blocks in this context, as JSON; "" without a block. Raw ops take it as their version, so that
    plans and backward passes keep it. A module, because torch.compile guards a module's attributes and traces no context variable."""

    read = _in_force.get
    now = property(operator.methodcaller("read"))


in_force: Any = _InForce("cukern.in_force")


def use(op: str, version: str, *, backward: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Choose the version of an op's kernels inside a block, for calls that name no version.

    Args:
        op: a name such as "softmax". Ops that share a table of versions change together, as do matmul, linear and its partial linear_gelu.
        version: of the forward, and of the backward unless that is given: `use("softmax", "v5", backward="v3")`. "default" is the fastest.

    The setting is a context variable. It holds for the thread or asyncio task that opened the block and for tasks started inside it. A
    thread started inside the block does not inherit it, unless it runs in `contextvars.copy_context()`. The backward pass uses the version
    that its forward call used, in whatever thread it runs. But autograd's threads for GPUs do not see the block: what is called first
    there, such as the recomputation of torch.utils.checkpoint or a hook, uses the default. torch.compile compiles again for another choice.

    CPU tensors keep the reference. The environment variable CUKERN_SOFTMAX=v5 does the same for a whole process, for any op.
    Raises TypeError or ValueError for an unknown op or version; a call raises ValueError if its GPU cannot run the version.

    Example:
        >>> with cukern.use("softmax", "v5"):
        ...     y = cukern.softmax(torch.randn(2, 8))
    """
    checks.choice("op", op, OPS)
    names = version, version if backward is None else backward
    for name in names:
        checks.choice(f"version of cukern.{op}", name, (*OPS[op].versions, DEFAULT))
    tables = [OPS[op].versions, *(o.versions for o in OPS.values() if o.function is getattr(OPS[op].function, "func", None))]
    return _using({o.name: names for o in OPS.values() if any(o.versions is table for table in tables)})


@contextlib.contextmanager
def _using(chosen: Versions) -> Iterator[None]:
    _enter((*_blocks.get(), chosen))
    try:
        yield
    finally:  # blocks in generators may end in any order
        _enter(tuple(block for block in _blocks.get() if block is not chosen))


def _enter(blocks: tuple[Versions, ...]) -> None:
    _blocks.set(blocks)
    _in_force.set(json.dumps({op: names for block in blocks for op, names in block.items()}) if blocks else "")


def names_of(op: str, version: str) -> tuple[str, str]:
    """The versions of forward and backward that a call names by `version`, which may be that of `in_force`, or by CUKERN_<OP>; "": none."""
    named = os.environ.get(f"CUKERN_{op.upper()}", "")
    if named and named not in OPS[op].versions:
        raise ValueError(f"CUKERN_{op.upper()}: cukern.{op} has no version {named!r}; it has {', '.join(OPS[op].versions)}")
    chosen = json.loads(version) if version.startswith("{") else {op: (version, version)} if version else {}
    forward, backward = chosen.get(op, (named, named))
    return forward, backward


@cached(4096)
def choose(op: str, version: str, device: int) -> Version:
    """The version that runs on a GPU: that of `names_of`, else the last of the op's table that the GPU can run.

    Raises ValueError for a version that is unknown or that the GPU cannot run.
    """
    versions, capability = OPS[op].versions, device_of(device).capability
    default = ([name for name, v in versions.items() if v.requires <= capability] or list(versions))[-1]
    chosen = [default if name in ("", DEFAULT) else name for name in names_of(op, version)]
    for name in chosen:
        if name not in versions:
            checks.unknown_version(op, name, versions)
        if versions[name].requires > capability:
            checks.unsupported_version(op, name, versions[name].requires, capability)
    forward, backward = (versions[name] for name in chosen)
    return forward if forward is backward else replace(forward, backward=backward.backward)
