"""Judges a kernel that somebody else, or a program, wrote: `cukern judge`.

The submission runs in a process of its own. This one draws sizes and inputs, and compares in float64.
"""

import contextlib
import inspect
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cukern.bench import judge_worker
from cukern.bench.environment import device, with_cukern
from cukern.bench.judge_worker import SIZE, Operations, execute, filled, shares, tensors
from cukern.bench.verify import verify
from cukern.runtime.dispatch.error_scale import cast, exact, measured
from cukern.runtime.registry import Case, Op, Tensors

MOST_SIMULATED, MOST = 20_000, 1 << 28  # elements of inputs and weights
MODEL = {"Model", "get_inputs", "get_init_inputs"}  # KernelBench's names
TASK = {"ref_kernel", "generate_input"}  # those of GPU MODE's reference-kernels


class Problem:
    """A reference, at sizes that `draw` chooses. `writes`: inputs that the reference writes or returns."""

    def __init__(self, path: Path):
        self.path, self.names = path, execute(path, {})
        self.most = MOST if torch.cuda.is_available() else MOST_SIMULATED
        self.is_model, self.ranges = self.names.keys() >= MODEL, self.names.get("SIZES", {})
        if self.is_model:
            self.known = {line[1]: self.names[line[1]] for line in SIZE.finditer(path.read_text())}
        elif self.names.keys() >= TASK:
            parameters = inspect.signature(self.names["generate_input"]).parameters.values()
            defaults = {p.name: 64 if p.default is p.empty else p.default for p in parameters}
            self.known = {name: n for name, n in defaults.items() if type(n) is int}
        else:
            raise ValueError(f"{path} must define {', '.join(sorted(MODEL))}, or {', '.join(sorted(TASK))}")
        for name in self.ranges.keys() - self.known.keys():
            raise ValueError(f"{path}: SIZES has {name!r}; the sizes are {', '.join(self.known) or 'none'}")

    def draw(self, rng: random.Random, first: bool) -> None:
        """Choose other sizes than those of the file; at first those. Raises ValueError if none work."""
        problem = "they are too large"
        for attempt in range(200):
            sizes = {name: self._size(name, rng, attempt < 100) for name in self.known}
            if first and not attempt and not self.ranges:
                sizes = self.known
            elif sizes == self.known:
                continue
            try:  # sizes may not fit each other; a tensor of two large ones may not fit into memory
                if math.prod(sorted(sizes.values())[-2:]) <= 4 * self.most and self._make(sizes, rng):
                    return
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{self.path} has no other sizes than {self.known}: {problem}; SIZES may name them")

    def _size(self, name: str, rng: random.Random, vary: bool) -> int:
        now = self.known[name]
        if name in self.ranges:
            return rng.choice(self.ranges[name])
        if now < 8 or name == "seed" or not (vary or rng.random() < 0.5):
            return now
        return rng.randint(1, now * 5 // 4) if rng.random() < 0.5 else int((now * 1.25) ** rng.random())

    def _make(self, sizes: dict[str, int], rng: random.Random) -> bool:
        """Run the reference once at these sizes. Returns False if there are too many elements."""
        self.sizes, self.seed, self.rng, self.state = sizes, rng.getrandbits(31), rng, {}
        self.init: list[Any] | None = None
        if self.is_model:
            self.names = execute(self.path, sizes)
            self.init = init = list(self.names["get_init_inputs"]())
            torch.manual_seed(self.seed)
            self.model = self.names["Model"](*init)
            self.state = {name: x.detach() for name, x in self.model.state_dict().items()}
        given = self.inputs()
        if sum(x.numel() for x in given) > self.most:
            return False
        with Operations() as operations:
            self.outs, used = self._run(given)
        self.reference(*cast(given, torch.float64))  # raises an error if it cannot
        if not self.outs:
            raise ValueError("the reference returns no tensor")
        self.operations, count = operations.seen, len(tensors(self.tree))
        equal = [torch.equal(x.nan_to_num(), old.nan_to_num()) for x, old in zip(used, given, strict=True)]
        self.writes = [i for i in range(count) if not equal[i] or shares(used[i], self.outs)]
        self.dtype = next(x.dtype for x in (*self.outs, *given) if x.is_floating_point())
        return True

    def inputs(self, *_: object) -> Tensors:
        """New inputs, the weights, and a number that is float64 where the truth is computed."""
        seed = self.rng.getrandbits(31)
        torch.manual_seed(seed)
        own = {"seed": seed} if "seed" in self.known else {}
        made = None if self.is_model else (self.names["generate_input"](**self.sizes | own),)
        self.tree: tuple[Any, ...] = made or tuple(self.names["get_inputs"]())
        marker = torch.zeros((), dtype=torch.float32, device=device())
        return tuple(x.to(device()) for x in (*tensors(self.tree), *self.state.values(), marker))

    def _run(self, given: Tensors) -> tuple[Tensors, Tensors]:
        """The outputs of the reference, and its inputs after the call, which are copies."""
        used = tuple(x.clone() for x in given)
        args, weights = filled(self.tree, used), used[len(tensors(self.tree)) :]
        with torch.no_grad():
            if self.is_model:
                state = dict(zip(self.state, weights, strict=False))
                return tuple(tensors(torch.func.functional_call(self.model, state, args))), used
            return tuple(tensors(self.names["ref_kernel"](*args))), used

    def reference(self, *given: torch.Tensor) -> Tensors:
        """The outputs; in float64 if the inputs are, also where the reference casts to another dtype."""
        if given[-1].dtype != torch.float64:
            return self._run(given)[0]
        outs = tuple(x.double() if x.is_floating_point() else x for x in self.outs)
        return exact(lambda *own: self._run(own)[0], outs)(*given)

    def case(self) -> Case:
        """For verify, which has the rule of the allowed error."""
        case: Any = partial(Case, "submission", Op("submission", "", {}), self.reference, self.reference, "")
        scale = measured(self.reference, ())
        return case((), (), (), ("x...",), dict, self.inputs, magnitude=scale, differentiable=False)


class _Failed(Exception):
    """The submission gave no result, or a wrong one."""


class Worker:
    """The process that runs submissions in turn. `reasons`: of the newest one, pairs of a kind and a text."""

    def __init__(self, timeout_s: float = 60.0):
        self.timeout_s, self.reasons = timeout_s, dict[tuple[str, str], None]()
        self.process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ask(self, do: str, **options: Any) -> dict[str, Any]:
        """The answer to a request. Raises _Failed if there is none; `reasons` says why."""
        if self.process is None or self.process.poll() is not None:
            self.connection, other = multiprocessing.Pipe()
            command = [sys.executable, "-m", "cukern.bench.judge_worker", str(other.fileno())]
            own = with_cukern() | ({} if torch.cuda.is_available() else {"CUKERN_BACKEND": "sim"})
            more: dict[str, Any] = {"env": own, "start_new_session": True, "pass_fds": [other.fileno()]}
            more |= dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
            self.process = subprocess.Popen(command, **more)
            other.close()
        timer, end = threading.Timer(self.timeout_s, self.close), time.monotonic() + self.timeout_s
        timer.start()
        try:
            judge_worker.send(self.connection, {"do": do, **options})
            reply = dict(judge_worker.receive(self.connection, trusted=False))
        except Exception:  # its pipe is closed, or it sent bytes that are no reply
            self.close()
            reply = {"ended": "unknown"}
        timer.cancel()
        if time.monotonic() >= end:
            self.reasons["timeout", f"no result after {self.timeout_s:g} s"] = None
        elif "ended" in reply and do != "end":
            self.reasons["crash", f"the process ended with status {reply['ended']}"] = None
        self.reasons |= dict.fromkeys(reply.get("reasons", ()))
        if "ended" in reply or "failed" in reply:
            raise _Failed
        return reply


def judge(submission: Path, reference: Path, worker: Worker, seed: int | None = None) -> dict[str, Any]:
    """Judge a Python file against a reference in plain torch; see docs/guide/judge.md.

    Returns what `cukern judge --json` prints. `seed`: of sizes and inputs; None: drawn after the submission
    was loaded. Raises OSError, and ValueError for a wrong reference or a kernel that is not simulated.
    """
    submission.read_text()  # raises an error that names the file
    problem, gpu = Problem(reference.resolve()), torch.cuda.is_available()
    entry, worker.reasons = "ModelNew" if problem.is_model else "custom_kernel", {}
    found: dict[str, Any] = {"verdict": "", "reasons": [], "shapes": [], "time": None, "seed": seed}
    with torch.random.fork_rng([torch.cuda.current_device()] if gpu else []), contextlib.suppress(_Failed):
        worker.ask("load", path=str(submission.resolve()), reference=str(problem.path), entry=entry)
        found["seed"] = random.SystemRandom().getrandbits(31) if seed is None else seed
        rng = random.Random(found["seed"])
        for i in range(4):
            problem.draw(rng, first=i == 0)
            own = {"writes": problem.writes, "init": problem.init, "seed": problem.seed}
            for again in (False, True):
                reply = _compare(problem, worker, found, "call", again=again, **own)
            if problem.operations and problem.operations <= set(reply["operations"]):
                what = ", ".join(sorted({name for name, _ in problem.operations}))
                worker.reasons["reference", f"calls all operations of the reference: {what}"] = None
            if worker.reasons:
                break
            if gpu and i == 0:
                found["time"] = _compare(problem, worker, found, "time")["time"] | {"sizes": problem.sizes}
    with contextlib.suppress(_Failed):
        worker.ask("end")
    for kind, text in worker.reasons:
        found["reasons"].append({"kind": kind, "text": text})
        if kind == "not_simulated":
            raise ValueError(f"{submission} cannot be judged without a GPU: {text}")
    return found | {"verdict": "fail" if worker.reasons else "pass"}


def _compare(problem: Problem, worker: Worker, found: dict[str, Any], do: str, **own: Any) -> dict[str, Any]:
    """Draw inputs, and compare the submission's results with float64."""
    reply: dict[str, Any] = {}
    what = ", ".join(f"{name}={n}" for name, n in problem.sizes.items())
    what += ", a second call with new values in the same tensors" if own.get("again") else f", a {do}"

    def submitted(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reply.update(worker.ask(do, tree=problem.tree, **own))
        return tuple(x.to(device()) for x in reply["outs"])

    try:
        results = verify(problem.case(), (), problem.dtype, {"submission": submitted}, device()).results
    except ValueError as error:  # another shape or dtype than the reference's
        worker.reasons["output", f"{what}: {error}"] = None
        raise _Failed from None
    worst = max(results, key=lambda r: (not r.ok, r.error / (r.allowed or 1)))
    finite = worst.error if math.isfinite(worst.error) else None
    found["shapes"].append({"sizes": problem.sizes, "error": finite, "allowed": worst.allowed})
    if not worst.ok:
        off = f"{worst.what} is off by {worst.error:.1e} of its scale, allowed {worst.allowed:.1e}"
        worker.reasons["error", f"{what}: {off}"] = None
        raise _Failed
    return reply
