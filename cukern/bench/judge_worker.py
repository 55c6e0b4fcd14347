"""The process that forks a child for each submission of `cukern judge`. FD, its argument, is a pipe to it."""

import contextlib
import io
import os
import re
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import cukern
from cukern.bench import timing
from cukern.bench.environment import device
from cukern.bench.measure import holding, input_sets
from cukern.bench.verify import poisoned

SIZE = re.compile(r"^(\w+) *= *(\(*\d[\d_ ()*+<-]*)(?= *(?:#.*)?$)", re.MULTILINE)  # NAME = INTEGER
_ON_CPU = (r"""(["'])cuda(:\d+)?\1""", "'cpu'"), (r"\.cuda\(\w*\)", ".cpu()"), (r"\bis_cuda\b", "is_cpu")
BUDGET_S = 2.0  # of the timing
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}  # one operation
_MOVES = re.compile(r"(new_)?(empty|zeros|ones|full)\w*|clone|copy|_to_copy|fill|zero|arange|cat")  # no math
# what checks and clocks rely on
_OWNERS: tuple[Any, ...] = (torch, torch.Tensor, torch.cuda, torch.cuda.Event, torch.testing, time, timing)


def execute(path: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The names that a Python file defines if its integers at the top level have the values `sizes`. Without
    a GPU, "cuda", x.cuda() and x.is_cuda mean the CPU."""
    text = SIZE.sub(lambda line: f"{line[1]} = {sizes.get(line[1], line[2])}", path.read_text())
    for gpu, cpu in () if torch.cuda.is_available() else _ON_CPU:
        text = re.sub(gpu, cpu, text)
    module = types.ModuleType(f"judged_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and Triton look there
    exec(compile(text, str(path), "exec"), vars(module))
    return vars(module)


class Operations(TorchDispatchMode):
    """Records torch's operations, with the numbers of elements that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if func.namespace == "aten" and not view and not _MOVES.fullmatch(name):
            counts = [x.numel() for x in tensors(args)]
            if name in _PRODUCTS:
                name, counts = "a matrix product", counts[-2:]  # without the summand of addmm
            self.seen.add((name, tuple(sorted(counts))))
        return func(*args, **(kwargs or {}))


def shares(x: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """True if x is in the memory of another tensor."""
    start = x.untyped_storage().data_ptr()
    return bool(x.numel()) and any(start == y.untyped_storage().data_ptr() for y in others)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def filled(tree: Any, given: Sequence[torch.Tensor]) -> Any:
    """The tree with other tensors."""
    own = iter(given)
    return pytree.tree_map_only(torch.Tensor, lambda _: next(own), tree)


def send(to: Connection, message: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    to.send_bytes(buffer.getvalue())


def receive(origin: Connection, trusted: bool) -> dict[str, Any]:
    return torch.load(io.BytesIO(origin.recv_bytes()), weights_only=not trusted)


class _Submission:
    """One submission. Each public method answers one request."""

    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []
        self.inputs, self.results = list[torch.Tensor](), list[torch.Tensor]()

    def _noting(self, owner: Any, name: str, kind: str = "", text: str = "") -> None:
        """Note each call of a function, or each fault that it raises, even if the submission catches it."""
        function: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if kind and "stream_id" not in kwargs:  # of torch's current stream
                self.reasons.append((kind, text))
            try:
                return function(*args, **kwargs)
            except cukern.sim.Fault as fault:
                self.reasons.append(("fault", f"{type(fault).__name__}: {fault}"))
                raise

        setattr(owner, name, noted)

    def load(self, path: str, reference: str, entry: str) -> dict[str, Any]:
        self.path, known = Path(path), Path(reference)
        cached = known.parent / "__pycache__" / known.stem

        def opened(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and os.path.abspath(str(args[0])).startswith((reference, f"{cached}.")):
                self.reasons.append(("reference", f"opens {known.name}"))

        sys.addaudithook(opened)
        if torch.cuda.is_available():  # the streams of the timing exist before new ones are noted
            with timing.side_stream(device()):
                torch.cuda.graph(torch.cuda.CUDAGraph())
        self._noting(torch.cuda.Stream, "__new__", "stream", "makes a stream of its own")
        self._noting(cukern.sim.launch, "run")
        for name in ("checks", "collect"):
            self._noting(cukern.sim, name, "checks", f"calls cukern.sim.{name}")
        self.before = [dict(vars(owner)) for owner in _OWNERS]
        if not torch.cuda.is_available() and "triton" in self.path.read_text():
            self.block = cukern.sim.triton()
            self.block.__enter__()  # until this process ends
        sys.path.insert(0, str(self.path.parent))  # as Python does for a script
        self.entry = execute(self.path, {})[entry]
        return {}

    def call(
        self, tree: Any, again: bool, writes: Sequence[int], init: Sequence[Any] | None, seed: int
    ) -> dict[str, Any]:
        """One call on new tensors; `again`: on those of the last call, with new values. In the simulator, a
        first call knows which memory is uninitialized, and a second one may access only its arguments."""
        if again:
            for old, new in zip(self.inputs, tensors(tree), strict=True):
                old.data.copy_(new)
        else:
            self.inputs, self.results = [x.to(device()) for x in tensors(tree)], []
            torch.manual_seed(seed)  # as the weights of the reference
            self.function = self.entry if init is None else self.entry(*init).to(device())
        before, operations, gpu = [x.clone() for x in self.inputs], Operations(), torch.cuda.is_available()
        scope: Any = contextlib.nullcontext() if gpu or again else cukern.sim.memory.scope(self.inputs)
        kernels = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        with torch.no_grad(), poisoned(), scope, kernels if gpu else contextlib.nullcontext():
            with operations:
                outs = tensors(self.function(*filled(tree, self.inputs)))
            mine = [x.detach().cpu().clone() for x in outs]  # on torch's current stream
        events: Any = kernels.events() if gpu else ()
        if len({e.device_resource_id for e in events if e.device_type.name == "CUDA"}) > 1:
            self.reasons.append(("stream", "works on another stream than torch's current one"))
        self._compare(before, outs, writes)
        return {"outs": mine, "operations": list(operations.seen)}

    def _compare(self, before: list[torch.Tensor], outs: list[torch.Tensor], writes: Sequence[int]) -> None:
        """Look at the memory. `writes`: the inputs that the reference writes or returns."""
        for i, (x, old) in enumerate(zip(self.inputs, before, strict=True)):
            if i not in writes and not torch.equal(x.nan_to_num(), old.nan_to_num()):
                self.reasons.append(("mutation", f"writes into input {i}"))
            if i not in writes and shares(x, outs):
                self.reasons.append(("alias", f"an output is in the memory of input {i}"))
        buffers = [self.inputs[i] for i in writes]
        if any(shares(out, self.results) and not shares(out, buffers) for out in outs):
            self.reasons.append(("kept", "an output is in the memory of an output of the call before"))
        self.results += outs
        for owner, known in zip(_OWNERS, self.before, strict=True):
            changed = [name for name, x in known.items() if callable(x) and vars(owner).get(name) is not x]
            self.reasons += [("patch", f"replaces {owner.__name__}.{name}") for name in changed]

    def time(self, tree: Any) -> dict[str, Any]:
        """The time of a call on inputs that are not in the L2 cache, and the last result."""
        place, given = device(), tensors(tree)
        with torch.no_grad(), timing.side_stream(place):
            count = input_sets(sum(x.nbytes for x in given), place)
            sets = [filled(tree, [x.to(place, copy=True) for x in given]) for _ in range(count)]
            results: deque[Any] = deque(maxlen=count)
            calls = holding([partial(self.function, *one) for one in sets], results)
            times, failed = timing.device_times({"": calls}, place, BUDGET_S)
            for error in failed.values():
                raise error
            outs = [x.detach().cpu().clone() for x in tensors(results[-1])]
        return {"outs": outs, "time": vars(times[""])}

    def answer(self, do: str, **options: Any) -> dict[str, Any]:
        try:
            reply = getattr(self, do)(**options)
        except BaseException as error:  # also SystemExit
            reply, frames = {"failed": True}, traceback.extract_tb(error.__traceback__)
            line = max((f.lineno or 0 for f in frames if f.filename == str(self.path)), default="?")
            kind = "not_simulated" if isinstance(error, cukern.sim.NotSimulated) else "error"
            if not isinstance(error, cukern.sim.Fault):  # noted already
                self.reasons.append((kind, f"line {line}: {type(error).__name__}: {str(error).strip()}"))
        return {**reply, "reasons": self.reasons}


def main(judge: Connection) -> None:
    with poisoned():  # torch imports what this needs
        pass
    while True:
        request = receive(judge, trusted=True)
        child = os.fork()
        if not child:
            one = _Submission()
            while request["do"] != "end":
                send(judge, one.answer(**request))
                request = receive(judge, trusted=True)
            os._exit(0)
        send(judge, {"ended": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the judge has ended
        main(Connection(int(sys.argv[1])))
