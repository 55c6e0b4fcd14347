"""Records the work of a call, which replay.py does again for other tensors of the same layout.

An op's Python code checks its arguments, chooses kernels, allocates, and launches. All of it depends only on
the layouts of the tensors and on the options, not on values or addresses. So it runs once. A `Recorder` notes
which torch operations and launches it makes, and `replay.compiled` turns the notes into a function that makes
the same ones with other tensors.

A recorded address is an `Address`: an int that knows its tensor. A call is not replayed if anything in it
depends on more than the layouts: an address that is compared, a value that is read from a tensor, or an
argument of a launch whose origin is not known.
"""

import contextlib
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
    "__len__", "data_ptr", "dim", "dim_order", "element_size", "get_device", "is_complex", "is_conj",
    "is_contiguous",
    "is_floating_point", "is_neg", "ndimension", "nelement", "numel", "size", "storage_offset", "stride",
}  # fmt: skip  # methods whose results depend on the layout only
_VIEWS = {
    "__get__", "__getitem__", "as_strided", "chunk", "contiguous", "detach", "expand", "expand_as", "flatten",
    "movedim", "narrow", "permute",
    "reshape", "resolve_conj", "resolve_neg", "select", "squeeze", "t", "transpose", "unbind", "unflatten",
    "unsqueeze", "view",
    "view_as",
}  # fmt: skip  # without effect if the result shares the argument's memory and is not used

FIELDS = "to_save", "non_differentiable", "materialize_grads"  # of the context of an autograd Function

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
    """make(*arguments), the bytes of a struct. A replay makes it again from its own addresses, so `make` must
    be the same function in each call."""
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
    """What the forward of an autograd Function did. `result` of the program: the outputs and the context's
    `FIELDS`. `make(forward(ctx, *args), attributes, saved, outputs)` gives `apply` of a Function that does
    the same. Its context has the attributes. `saved`, `outputs`: the numbers of saved tensors and of
    outputs."""

    make: Callable[..., Any]
    program: "Program"
    attributes: dict[str, Any]


class Call(NamedTuple):
    """A torch operation, or an autograd Function. `results`: a Ref, or a nested tuple of them. `view`: it has
    no effect but its results, which share the memory of an argument."""

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
        return [
            p
            for a in self.args
            for p in (a.arguments if isinstance(a, Struct) else (a,))
            if isinstance(p, Pointer)
        ]


class Guard(NamedTuple):
    """A setting that the call asked for, and its value then."""

    ask: Callable[[], Any]
    value: Any


class Program(NamedTuple):
    """A recorded call. `roots`: for each tensor the one whose memory it shares, and the offset of its first
    element in bytes."""

    steps: tuple[Any, ...]
    guards: tuple[Guard, ...]
    result: Any
    roots: tuple[tuple[int, int], ...]
    geometries: tuple[Any, ...]  # of each tensor: size, stride, dtype
    grad: bool  # autograd was on


class _Context(torch.autograd.function.FunctionCtx):
    """Keeps what a forward gives to its context."""

    def __init__(self, needs_input_grad: Sequence[bool]):
        self.needs_input_grad = needs_input_grad


class Recorder(TorchFunctionMode):
    """Notes what a call does, while it is open."""

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()
        # by the ids of the tensors that exist; memory is freed when the call frees it
        self.numbers: dict[int, int] = {}
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
        if name == "_set_grad_enabled":  # all operations are in one mode
            return result
        self._check_grad_mode()
        if name in _ALLOCATIONS and len(tensors) == 1 and result.layout is torch.strided:
            number = self._add(result, None)
            self.steps.append(
                Allocation(number, tuple(result.shape), result.stride(), result.dtype, result.device)
            )
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

    def differentiable(
        self,
        apply: Callable[..., Any],
        make: Callable[..., Any],
        forward: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        """Calls an autograd Function, and notes what its forward does. `apply` is noted if that cannot be
        replayed. `make`: see Forward."""
        inner, noted = Recorder([a for a in args if isinstance(a, Tensor)]), list[Forward]()

        def run(ctx: Any, *args: Any) -> Any:
            context = _Context(ctx.needs_input_grad)
            with inner:
                outputs = forward(context, *args)
            given = {name: value for name, value in vars(context).items() if name != "needs_input_grad"}
            for name, value in given.items():
                setattr(ctx, name, value)
            fields = tuple(given.pop(name, None) for name in FIELDS)
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
            self.steps[-1] = self.steps[-1]._replace(
                forward=noted[0]._replace(program=noted[0].program._replace(guards=()))
            )
        return result

    def launch(
        self, launch: Launcher, params: Sequence[Any], grid: Any, block: Any, shared: int, args: Sequence[Any]
    ) -> None:
        """Notes `launch(grid, block, shared, *args)`."""
        self._check_grad_mode()
        found: list[Any] = []
        for param, a in zip(params, args, strict=True):
            if isinstance(a, Address):
                found.append(Pointer(a.root, a.offset))
            elif isinstance(a, Packed):
                found.append(
                    Struct(
                        a.make,
                        tuple(Pointer(v.root, v.offset) if type(v) is Address else v for v in a.arguments),
                    )
                )
            elif (param.pointer and a) or (isinstance(a, bytes) and self._has_address(a)):
                self.fail(f"the origin of the address for {param} is not known")
            else:
                found.append(a)
        self.steps.append(Launch(launch, grid, block, shared, tuple(found)))

    def program(self, result: Any) -> Program:
        """What was recorded of a call with this result."""
        return Program(
            tuple(self.steps),
            tuple(self.guards),
            self._refs(result),
            tuple(self.roots),
            tuple(self.geometries),
            self.grad,
        )

    def _check_grad_mode(self) -> None:
        """A replay would make the operation in the grad mode of the call: it would be part of the graph, or
        of none."""
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
        self.geometries.append(
            None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        )
        if tensor is not None:
            key = id(tensor)
            self.numbers[key] = number
            # the id may be used again
            self.alive[number] = weakref.ref(tensor, lambda _: self.numbers.pop(key, None))
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
        # a named tuple of results becomes a plain one
        if isinstance(tree, list) or (isinstance(tree, tuple) and _tensors(tree)):
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
