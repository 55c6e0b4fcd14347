"""Records the work of a call, and replays it for other tensors of the same layout.

An op's Python code checks its arguments, chooses kernels, allocates, and launches. All of it depends only on the layouts of the tensors
and on the options, not on values or addresses. So it runs once. A `Recorder` notes which torch operations and launches it makes, and
`compiled` turns the notes into a function that makes the same ones with other tensors.

A recorded address is an `Address`: an int that knows its tensor. A call is not replayed if anything in it depends on more than the
layouts: an address that is compared, a value that is read from a tensor, or an argument of a launch whose origin is not known.
"""

import contextlib
import functools
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ALIGNMENT = 64  # bytes: the part of an address that a layout holds
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_QUERIES = {
    "__len__", "data_ptr", "dim", "dim_order", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_neg", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
}  # fmt: skip  # methods whose results depend on the layout only
_VIEWS = {
    "__get__", "__getitem__", "as_strided", "contiguous", "detach", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
    "reshape", "resolve_conj", "resolve_neg", "select", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
}  # fmt: skip  # without effect if the result shares the argument's memory and is not used

_FIELDS = "to_save", "non_differentiable", "materialize_grads"  # of the context of an autograd Function

STALE = object()
Launcher = Callable[..., None]


class _Local(threading.local):
    recorder: "Recorder | None" = None  # of this thread


local = _Local()


class Address(int):
    """The address of an element of the tensor number `root`, `offset` bytes from its first."""

    root: int
    offset: int
    recorder: "Recorder"

    @staticmethod
    def of(value: int, root: int, offset: int, recorder: "Recorder") -> "Address":
        made = Address(value)
        made.root, made.offset, made.recorder = root, offset, recorder
        return made

    def __add__(self, n: int) -> int:
        return Address.of(int(self) + int(n), self.root, self.offset + int(n), self.recorder)

    def __sub__(self, n: int) -> int:
        return Address.of(int(self) - int(n), self.root, self.offset - int(n), self.recorder)

    def __mod__(self, n: int) -> int:
        return self.recorder.low_bits(n) and int(self) % n

    def __and__(self, n: int) -> int:
        return self.recorder.low_bits(n + 1) and int(self) & n

    def _compare(self, other: Any, compare: Callable[[int, Any], bool]) -> bool:
        self.recorder.fail("an address was compared")
        return compare(int(self), other)

    def __lt__(self, other: int) -> bool:
        return self._compare(other, int.__lt__)

    def __le__(self, other: int) -> bool:
        return self._compare(other, int.__le__)

    def __gt__(self, other: int) -> bool:
        return self._compare(other, int.__gt__)

    def __ge__(self, other: int) -> bool:
        return self._compare(other, int.__ge__)

    def __eq__(self, other: object) -> bool:
        return self._compare(other, int.__eq__)

    __radd__ = __add__
    __hash__ = int.__hash__


class Packed(bytes):
    """A struct that holds addresses, such as a tensor map: `make(*arguments)`."""

    make: Callable[..., bytes]
    arguments: tuple[Any, ...]


def packed(make: Callable[..., bytes], *arguments: Any) -> bytes:
    """make(*arguments), the bytes of a struct. A replay makes it again from its own addresses, so `make` must be the same function in each
    call."""
    if not any(type(a) is Address for a in arguments):
        return make(*arguments)
    made = Packed(make(*(int(a) if type(a) is Address else a for a in arguments)))
    made.make, made.arguments = make, arguments
    return made


class Ref(NamedTuple):
    """A recorded tensor, by its number."""

    number: int


class Constant:
    """A tensor that is the same in all calls."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.tensor is self.tensor

    __hash__ = None  # type: ignore[assignment]


class Pointer(NamedTuple):
    """An address as an argument of a launch."""

    root: int
    offset: int


class Struct(NamedTuple):
    """A struct as an argument of a launch: `make(*arguments)`, some of which are Pointers."""

    make: Callable[..., bytes]
    arguments: tuple[Any, ...]


class Allocation(NamedTuple):
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Forward(NamedTuple):
    """What the forward of an autograd Function did. `result` of the program: the outputs and the context's `_FIELDS`.
    `make(forward(ctx, *args), attributes, saved, outputs)` gives `apply` of a Function that does the same. Its context has the attributes.
    `saved`, `outputs`: the numbers of saved tensors and of outputs."""

    make: Callable[..., Any]
    program: "Program"
    attributes: dict[str, Any]


class Call(NamedTuple):
    """A torch operation, or an autograd Function. `results`: a Ref, or a nested tuple of them. `view`: it has no effect but its results,
    which share the memory of an argument."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Any
    view: bool
    forward: Forward | None = None


class Launch(NamedTuple):
    launch: Launcher
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    args: tuple[Any, ...]  # Pointer, Struct, or the value

    @property
    def pointers(self) -> list[Pointer]:
        return [p for a in self.args for p in (a.arguments if isinstance(a, Struct) else (a,)) if isinstance(p, Pointer)]


class Guard(NamedTuple):
    """A setting that the call asked for, and its value then."""

    ask: Callable[[], Any]
    value: Any


class Program(NamedTuple):
    """A recorded call. `roots`: for each tensor the one whose memory it shares, and the offset of its first element in bytes."""

    steps: tuple[Any, ...]
    guards: tuple[Guard, ...]
    result: Any
    roots: tuple[tuple[int, int], ...]
    geometries: tuple[Any, ...]  # of each tensor: size, stride, dtype


class _Context(torch.autograd.function.FunctionCtx):
    """Keeps what a forward gives to its context."""

    def __init__(self, needs_input_grad: Sequence[bool]):
        self.needs_input_grad = needs_input_grad


class Recorder(TorchFunctionMode):
    """Notes what a call does, while it is open."""

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()
        self.numbers: dict[int, int] = {}  # by the ids of the tensors that exist; memory is freed when the call frees it
        self.alive: dict[int, weakref.ref[Tensor]] = {}  # by number
        self.roots: list[tuple[int, int]] = []
        self.geometries: list[Any] = []
        self.steps: list[Any] = []
        self.guards: list[Guard] = []
        self.constants: dict[int, Constant] = {}
        self.failed = ""
        for t in inputs:
            self._add(t, None)

    def __enter__(self) -> "Recorder":
        self.outer, local.recorder, self.grad = local.recorder, self, torch.is_grad_enabled()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        local.recorder = self.outer
        super().__exit__(*error)

    def release(self) -> None:
        """Lets go of the references to tensors. The recorder itself is in reference cycles."""
        self.alive.clear()
        self.numbers.clear()

    def fail(self, why: str) -> None:
        self.failed = self.failed or why

    def low_bits(self, n: int) -> bool:
        """Notes that an address is used modulo n."""
        if not 0 < n <= ALIGNMENT or n & (n - 1):
            self.fail(f"an address was used modulo {n}")
        return True

    def asked(self, ask: Callable[[], Any], value: Any) -> None:
        """Notes that the call depends on a setting."""
        self.guards.append(Guard(ask, value))

    def constant(self, tensor: Tensor) -> None:
        """Notes that the call uses a tensor that is the same in all calls."""
        self.constants[id(tensor)] = Constant(tensor)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if local.recorder is not self:
            return function(*args, **kwargs)
        with self.suspended() if isinstance(function, torch._ops.OpOverload) else contextlib.nullcontext():
            result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        tensors = _tensors(result)
        if not tensors and result is not None:
            return self._query(name, args, result)
        self._check_grad_mode()
        if name in _ALLOCATIONS and len(tensors) == 1 and result.layout is torch.strided:
            number = self._add(result, None)
            self.steps.append(Allocation(number, tuple(result.shape), result.stride(), result.dtype, result.device))
        else:
            try:
                self._call(function, name, args, kwargs, result)
            except (RuntimeError, NotImplementedError) as error:  # a tensor without memory
                self.fail(str(error))
        return result

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, nothing is noted."""
        local.recorder = None
        try:
            yield
        finally:
            local.recorder = self

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls a function and notes it as one operation, not what it does."""
        with self.suspended():
            result = function(*args)
            with torch._C.DisableTorchFunction():
                self._call(function, "", tuple(args), {}, result)
        return result

    def differentiable(self, apply: Callable[..., Any], make: Callable[..., Any], forward: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls an autograd Function, and notes what its forward does. `apply` is noted if that cannot be replayed. `make`: see Forward."""
        inner, noted = Recorder([a for a in args if isinstance(a, Tensor)]), list[Forward]()

        def run(ctx: Any, *args: Any) -> Any:
            context = _Context(ctx.needs_input_grad)
            with inner:
                outputs = forward(context, *args)
            given = {name: value for name, value in vars(context).items() if name != "needs_input_grad"}
            for name, value in given.items():
                setattr(ctx, name, value)
            fields = tuple(given.pop(name, None) for name in _FIELDS)
            if "dirty_tensors" in given or _tensors(given):
                inner.fail("the context has tensors besides the saved ones")
            noted.append(Forward(make, inner.program((outputs, fields)), given))
            return outputs

        with self.suspended():
            result = make(run)(*args)
            with torch._C.DisableTorchFunction():
                self._call(apply, "", tuple(args), {}, result)
        inner.release()
        if not inner.failed:
            self.guards += inner.guards
            self.steps[-1] = self.steps[-1]._replace(forward=noted[0]._replace(program=noted[0].program._replace(guards=())))
        return result

    def launch(self, launch: Launcher, params: Sequence[Any], grid: Any, block: Any, shared: int, args: Sequence[Any]) -> None:
        """Notes `launch(grid, block, shared, *args)`."""
        self._check_grad_mode()
        found: list[Any] = []
        for param, a in zip(params, args, strict=True):
            if isinstance(a, Address):
                found.append(Pointer(a.root, a.offset))
            elif isinstance(a, Packed):
                found.append(Struct(a.make, tuple(Pointer(v.root, v.offset) if type(v) is Address else v for v in a.arguments)))
            elif (param.pointer and a) or (isinstance(a, bytes) and self._has_address(a)):
                self.fail(f"the origin of the address for {param} is not known")
            else:
                found.append(a)
        self.steps.append(Launch(launch, grid, block, shared, tuple(found)))

    def program(self, result: Any) -> Program:
        """What was recorded of a call with this result."""
        return Program(tuple(self.steps), tuple(self.guards), self._refs(result), tuple(self.roots), tuple(self.geometries))

    def _check_grad_mode(self) -> None:
        """A replay would make the operation in the grad mode of the call: it would be part of the graph, or of none."""
        if torch.is_grad_enabled() != self.grad:
            self.fail("the grad mode changes inside of the call")

    def _query(self, name: str, args: Any, result: Any) -> Any:
        if name == "data_ptr":
            number = self.numbers.get(id(args[0]))
            if number is not None and result:
                return Address.of(result, *self.roots[number], self)
        elif name not in _QUERIES and name != "__get__" and _tensors(args):
            self.fail(f"{name} reads a tensor")
        return result

    def _call(self, function: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given_args, given_kwargs = self._refs(args), self._refs(kwargs)
        shared = {t.untyped_storage().data_ptr(): t for t in _tensors((args, kwargs)) if _has_memory(t)}
        view = name in _VIEWS
        for t in _tensors(result):
            if id(t) in self.numbers:
                continue
            base = shared.get(t.untyped_storage().data_ptr()) if _has_memory(t) else None
            view = view and base is not None
            self._add(t, base)
        if isinstance(result, Tensor) and any(result is t for t in _tensors((args, kwargs))) and view:
            return  # such as contiguous() of a contiguous tensor
        self.steps.append(Call(function, given_args, given_kwargs, self._refs(result), view))

    def _add(self, tensor: Tensor | None, base: Tensor | None) -> int:
        number = len(self.roots)
        root, offset = number, 0
        if tensor is not None and base is not None and id(base) in self.numbers:
            root, offset = self.roots[self.numbers[id(base)]]
            offset += tensor.data_ptr() - base.data_ptr()
        self.roots.append((root, offset))
        self.geometries.append(None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype))
        if tensor is not None:
            key = id(tensor)
            self.numbers[key] = number
            self.alive[number] = weakref.ref(tensor, lambda _: self.numbers.pop(key, None))  # the id may be used again
        return number

    def _refs(self, tree: Any) -> Any:
        """The tree with a Ref for each tensor."""
        if isinstance(tree, Tensor):
            number = self.numbers.get(id(tree))
            if (constant := self.constants.get(id(tree))) is not None:
                return constant
            if number is None:
                self.fail("a tensor comes from outside of the call")
            return Ref(-1 if number is None else number)
        if isinstance(tree, Address):
            self.fail("a torch operation takes an address")
        if isinstance(tree, dict):
            return {name: self._refs(value) for name, value in tree.items()}
        if isinstance(tree, list) or (isinstance(tree, tuple) and _tensors(tree)):  # a named tuple of results becomes a plain one
            return (list if isinstance(tree, list) else tuple)(self._refs(value) for value in tree)
        return tree

    def _has_address(self, data: bytes) -> bool:
        """True if the bytes of a struct may hold an address of a tensor: then it is not known of which."""
        words = {int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)}
        with torch._C.DisableTorchFunction():
            return any(start <= word <= end for start, end in self._extents() for word in words)

    def _extents(self) -> list[tuple[int, int]]:
        tensors = [alive() for alive in self.alive.values()]
        memory = [t.untyped_storage() for t in tensors if t is not None and _has_memory(t)]
        return [(m.data_ptr(), m.data_ptr() + m.nbytes()) for m in memory if m.nbytes()]


class _Off(Recorder):
    """Notes nothing, and keeps calls from being replayed."""

    def asked(self, ask: Callable[[], Any], value: Any) -> None:
        pass

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return function(*args)

    def launch(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Inside the block, every call of this thread plans anew."""
    before, local.recorder = local.recorder, _Off(())
    try:
        yield
    finally:
        local.recorder = before


def noted(launch: Launcher, params: Sequence[Any]) -> Launcher:
    """The launch, which an active recorder notes. What it does besides is not noted."""

    def run(grid: Any, block: Any, shared: int, *args: Any) -> None:
        recorder = local.recorder
        if recorder is None:
            return launch(grid, block, shared, *args)
        with recorder.suspended():
            launch(grid, block, shared, *(int(a) if type(a) is Address else a for a in args))
        recorder.launch(run, params, grid, block, shared, args)

    return run


def _has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and t.device.type != "meta"


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [t for branch in tree for t in _tensors(branch)] if isinstance(tree, tuple | list) else []


# ---- replay


def _empty_on(device: torch.device) -> Callable[..., Tensor]:
    """A function of size, stride and dtype that allocates, in the least host time."""
    fast = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # as torch.compile's code does; 2 us less than torch.empty
    if fast is not None and device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():  # which fills new memory
        return fast
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Writer:
    """The source of a function that replays a program."""

    def __init__(self, program: Program, inputs: int | Sequence[bool]):
        self.program, self.of_function = program, not isinstance(inputs, int)
        tensors = inputs if isinstance(inputs, Sequence) else (True,) * inputs
        self.inputs, count = sum(tensors), itertools.count()
        self.names = ["ctx"] * self.of_function + [f"t{next(count)}" if t else f"_{i}" for i, t in enumerate(tensors)]
        self.space: dict[str, Any] = {}
        self.lines: list[str] = []
        self.with_address: set[int] = set()
        self.growth = 0  # the last line that may allocate
        self.objects = self._objects()

    def _objects(self) -> set[int]:
        """The tensors that are needed as objects: results of the call, and arguments of operations."""
        needed = set(_numbers(self.program.result))
        for step in reversed(self.program.steps):
            if isinstance(step, Call) and (not step.view or needed.intersection(_numbers(step.results))):
                needed.update(_numbers((step.args, step.kwargs)))
        return needed

    def constant(self, value: Any) -> str:
        """A literal, or the name of a value."""
        if type(value) in (int, bool, type(None)):
            return repr(value)
        name = f"c{len(self.space)}"
        self.space[name] = value
        return name

    def tree(self, value: Any) -> str:
        """An expression for arguments or results."""
        if isinstance(value, Ref):
            return f"t{value.number}"
        if isinstance(value, Constant):
            return self.constant(value.tensor)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {self.tree(v)}" for name, v in value.items()) + "}"
        if type(value) is tuple:
            return "(" + "".join(f"{self.tree(v)}, " for v in value) + ")"
        return "[" + ", ".join(map(self.tree, value)) + "]" if type(value) is list else self.constant(value)

    def argument(self, value: Any) -> str:
        """An expression for an argument of a launch."""
        if isinstance(value, Struct):
            return f"{self.constant(value.make)}({', '.join(map(self.argument, value.arguments))})"
        if not isinstance(value, Pointer):
            return self.constant(value)
        root, offset = value
        if root not in self.with_address:
            self.with_address.add(root)
            self.lines.append(f"p{root} = t{root}.data_ptr()")
        return f"p{root} + {offset}" if offset else f"p{root}"

    def write(self) -> str:
        for guard in self.program.guards:
            self.lines.append(f"if {self.constant(guard.ask)}() != {self.constant(guard.value)}: return {self.constant(STALE)}")
        final = self._final_geometries()
        for step in self.program.steps:
            if isinstance(step, Allocation):
                self._allocate(step, final)
            elif isinstance(step, Launch):
                last = max((i for i, a in enumerate(step.args) if isinstance(a, Pointer | Struct)), default=-1) + 1
                first = [self.argument(a) for a in step.args[:last]]
                launch = self.constant(_bound(step.launch, step.grid, step.block, step.shared, *step.args[last:]))
                self.lines.append(f"{launch}({', '.join(first)})")
            elif not step.view or self.objects.intersection(_numbers(step.results)):
                self._call(step)
        result = _map_refs(self.program.result, lambda n: final.get(n, (n,))[0])
        if self.of_function:
            result, fields = result
            self.lines += [f"ctx.{n} = {self.tree(v)}" for n, v in zip(_FIELDS, fields, strict=True) if v is not None]
        self.lines.append(f"return {self.tree(result)}")
        body = "\n        ".join(self._freeing())
        return f"def make({', '.join(self.space)}):\n    def replay({', '.join(self.names)}):\n        {body}\n    return replay\n"

    def _freeing(self) -> Iterator[str]:
        """The lines. Before memory is allocated, that of tensors without another use is freed, as in the recorded call."""
        used = [{int(n) for n in re.findall(r"\b[tp](\d+)\b", line)} for line in self.lines]
        last = {n: i for i, numbers in enumerate(used) for n in numbers}
        for i, line in enumerate(self.lines):
            yield line
            unused = [f"t{n}" for n in sorted(used[i]) if n >= self.inputs and last[n] == i]
            if unused and i < self.growth:
                yield f"del {', '.join(unused)}"

    def _final_geometries(self) -> dict[int, tuple[int, Any]]:
        """Results that are views of a whole allocation are allocated as such: by their number, the allocation and the geometry."""
        roots, geometries = self.program.roots, self.program.geometries
        allocated, uses = {s.number for s in self.program.steps if isinstance(s, Allocation)}, self._uses()
        found: dict[int, tuple[int, Any]] = {}
        for n in set(_numbers(self.program.result)):
            root, offset = roots[n]
            whole = not offset and _nbytes(geometries[n]) == _nbytes(geometries[root])
            if n != root and root in allocated and whole and uses.count(root) == 1:
                found[n] = root, geometries[n]
                self.objects -= {m for m in self.objects if roots[m][0] == root}
        return found

    def _uses(self) -> list[int]:
        """The roots of the results and of the arguments of operations, each as often as it is used."""
        calls = [s for s in self.program.steps if isinstance(s, Call) and not s.view]
        return [self.program.roots[n][0] for n in _numbers([self.program.result, *((s.args, s.kwargs) for s in calls)])]

    def _allocate(self, step: Allocation, final: dict[int, tuple[int, Any]]) -> None:
        n = step.number
        referred = any(p.root == n for s in self.program.steps if isinstance(s, Launch) for p in s.pointers)
        of_result = next((geometry for root, geometry in final.values() if root == n), None)
        if n in self.objects or referred or of_result:
            size, stride, dtype = of_result or (step.size, step.stride, step.dtype)
            make, *rest = map(self.constant, (_empty_on(step.device), size, stride, dtype))
            self.growth = len(self.lines)
            self.lines.append(f"t{n} = {make}({', '.join(rest)})")

    def _call(self, step: Call) -> None:
        names = [*map(self.tree, step.args), *(f"{name}={self.tree(value)}" for name, value in step.kwargs.items())]
        function = step.function
        if step.forward is not None:
            make, program, attributes = step.forward
            outputs, (saved, *_) = program.result
            counts = len(saved or ()), 1 if isinstance(outputs, Ref) else len(outputs)
            function = make(compiled(program, [isinstance(a, Ref) for a in step.args]), attributes, *counts)
        call = f"{self.constant(function)}({', '.join(names)})"
        refs = _numbers(step.results)
        new = refs and all(n >= self.inputs for n in refs) and len(set(refs)) == len(refs)
        self.growth = len(self.lines)
        self.lines.append(f"{self.tree(step.results)} = {call}" if new else call)


def _bound(launch: Launcher, grid: Any, block: Any, shared: int, *last: Any) -> Launcher:
    """The launch as a function of its first arguments. The last ones are packed once, if the launch can do so."""
    bound = getattr(launch, "bound", None)
    return bound(grid, block, shared, *last) if bound else lambda *first: launch(grid, block, shared, *first, *last)


def compiled(program: Program, inputs: int | Sequence[bool]) -> Callable[..., Any]:
    """A function of the inputs that does what was recorded. It returns STALE, and does nothing, if a setting has changed. `inputs`: their
    number; for the forward of an autograd Function, which of its arguments they are."""
    writer = _Writer(program, inputs)
    return _factory(writer.write())(*writer.space.values())


@functools.lru_cache(1024)
def _factory(source: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(compile(source, "<cukern replay>", "exec"), space)
    return space["make"]


def _numbers(tree: Any) -> list[int]:
    """The numbers of the Refs in a tree."""
    if isinstance(tree, Ref):
        return [tree.number]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [n for branch in tree for n in _numbers(branch)] if type(tree) in (tuple, list) else []


def _map_refs(tree: Any, change: Callable[[int], int]) -> Any:
    if isinstance(tree, Ref):
        return Ref(change(tree.number))
    return type(tree)(_map_refs(branch, change) for branch in tree) if type(tree) in (tuple, list) else tree


def _nbytes(geometry: Any) -> int:
    """From the first to behind the last element."""
    size, stride, dtype = geometry
    return 0 if 0 in size else (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * dtype.itemsize
