"""Shared by several tests: comparisons, memory that shows stray writes, fresh processes and threads, a count
of compilations."""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import cukern
from cukern.ops.kron_linear.plan import Problem
from cukern.runtime.compile import cache, compiler
from cukern.runtime.device import KNOWN, Device, device_of
from cukern.runtime.launch import backend
from cukern.runtime.registry import CASES, Case

gpu = pytest.mark.gpu
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
kernels = pytest.mark.kernels  # runs kernels: on the GPU where there is one, else in the simulator
# where, and on which tensors
PLACE, DEVICE = ("cuda", "cuda") if torch.cuda.is_available() else ("sim", "cpu")
ROOT = Path(cukern.__file__).resolve().parents[1]  # of the source tree, or site-packages
TREE = Path(__file__).resolve().parents[1]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

SCALE = 'extern "C" __global__ void scale(float* x, float s) { x[threadIdx.x] *= s; }\n'
# The kernel of PyTorch's load_inline tutorial, https://docs.pytorch.org/docs/stable/cpp_extension.html,
# wrapped as users paste it.
SQUARE_MATRIX = r"""
__global__ void square_matrix_kernel(const float* matrix, float* result, int width, int height) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;

    if (row < height && col < width) {
        int idx = row * width + col;
        result[idx] = matrix[idx] * matrix[idx];
    }
}

torch::Tensor square_matrix(torch::Tensor matrix) {
    const auto height = matrix.size(0);
    const auto width = matrix.size(1);

    auto result = torch::empty_like(matrix);

    dim3 threads_per_block(16, 16);
    dim3 number_of_blocks((width + threads_per_block.x - 1) / threads_per_block.x,
                          (height + threads_per_block.y - 1) / threads_per_block.y);

    square_matrix_kernel<<<number_of_blocks, threads_per_block>>>(
        matrix.data_ptr<float>(), result.data_ptr<float>(), width, height);

    return result;
}
"""


def problem(
    itemsize: int,
    sms: int = 132,
    shared: int = 226 << 10,
    tensor: bool = False,
    aligned: int = 16,
    wgmma: bool = False,
) -> Problem:
    """What kron_linear plans for on an H200 with `sms` SMs and `shared` bytes of shared memory per block;
    without wgmma, on sm_80."""
    device = KNOWN["h200"]._replace(sms=sms, shared_bytes=shared + 1024, capability=90 if wgmma else 80)
    return Problem(device, itemsize, tensor, aligned)


def with_sms(sms: int) -> Callable[[int], Device]:
    """A replacement for device_of() whose GPUs have this number of SMs."""
    return lambda index: device_of(index)._replace(sms=sms)


def untraceable_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the simulator, torch.compile cannot trace device_of(), as it cannot where that asks a GPU."""

    @functools.wraps(device_of)
    def untraceable(index: int) -> Device:
        os.stat(".")
        return device_of(index)

    for name, module in list(sys.modules.items()):
        if name.startswith("cukern.") and getattr(module, "device_of", None) is device_of:
            monkeypatch.setattr(module, "device_of", untraceable)


def places(name: str) -> list:
    """(device, version) pairs of an op: the reference on the CPU, and each version on the GPU or in the
    simulator."""
    versions = [pytest.param(DEVICE, v, marks=kernels, id=f"{PLACE}-{v}") for v in CASES[name].op.versions]
    return [pytest.param("cpu", None, id="cpu"), *versions]


def dims_of(case: Case) -> tuple[tuple[int, ...], ...]:
    return case.check_dims if PLACE == "cuda" else case.sim_dims


def simulated(*tensors: torch.Tensor | None) -> contextlib.AbstractContextManager:
    """In the simulator, kernels inside the block may access these tensors and no other memory. With tensors
    on a GPU, nothing changes."""
    return (
        contextlib.nullcontext()
        if any(t is not None and t.is_cuda for t in tensors)
        else backend.simulated_memory(tensors)
    )


def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """The result of function(*args), or its error, in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def own_names() -> list[str]:
    """The cases that have the name of a public function; "rope_packed" and "linear_gelu" are ways to call
    rope and linear."""
    return [
        name
        for name, case in CASES.items()
        if name in cukern.__all__ and not name.startswith(f"{case.op.name}_")
    ]


def functions() -> dict[Callable[..., Any], str]:
    """Each public function that the registry calls, and one case of it: the first."""
    return {getattr(case.call, "func", case.call): name for name, case in reversed(CASES.items())}


def assert_accurate(actual: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor, what: str = "") -> None:
    """Each element errs by at most twice the error of torch's own op of the same dtype, plus one rounding.

    For an op without sums: verify() of cukern.bench judges the others. `exact` is in float64.
    Where torch's result is NaN or infinite, ours is the same, or right: torch may have rounded or overflowed
    on the way.
    """
    assert actual.shape == peer.shape == exact.shape, (
        f"{what}: shape {tuple(actual.shape)}, torch's is {tuple(peer.shape)}"
    )
    assert actual.dtype == peer.dtype, f"{what}: dtype {actual.dtype}, torch's is {peer.dtype}"
    info = torch.finfo(peer.dtype)
    ours, theirs = actual.detach().double(), peer.detach().double()
    error = (ours - exact).abs()
    rounding = info.eps * exact.abs() + info.smallest_normal * info.eps
    same = (ours == theirs) | (ours.isnan() & theirs.isnan()) | (ours == exact) | (error <= rounding)
    # "not within", so that a NaN of ours is wrong
    wrong = torch.where(theirs.isfinite(), ~(error <= 2 * (theirs - exact).abs() + rounding), ~same)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {at}: "
            f"{actual[at].item()!r}, torch has {peer[at].item()!r}, exact is {exact[at].item()!r}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: the sign of zeros counts, NaN equals NaN. A conjugated view counts as its values."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.resolve_conj(), b.resolve_conj()
    return a.shape == b.shape and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


class Guarded:
    """A contiguous tensor of NaN between two margins of a known value, which a kernel must leave alone."""

    # elements: a multiple of every vector, so that `tensor` is aligned as torch's own allocations are to 128
    # bytes
    MARGIN = 64

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: str):
        n = torch.Size(shape).numel()
        self.memory = torch.full((n + 2 * self.MARGIN,), 7.0, dtype=dtype, device=device)
        self.tensor = self.memory[self.MARGIN : self.MARGIN + n].view(*shape)
        self.tensor.fill_(float("nan"))

    def check(self, what: str) -> None:
        margins = torch.cat((self.memory[: self.MARGIN], self.memory[-self.MARGIN :]))
        assert bool((margins == 7).all()), f"{what}: wrote outside of its output"


def write(folder: Path, text: str, name: str = "k.cu") -> Path:
    (folder / name).write_text(text)
    return folder / name


def forget_cache() -> None:
    """Make this process read CUKERN_CACHE_DIR again, and warn again, as a fresh process would."""
    for function in vars(cache).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def before_compiling(monkeypatch: pytest.MonkeyPatch, action: Callable[[object], object]) -> None:
    """action(options) runs just before NVRTC compiles a program."""
    binding = compiler.nvrtc()

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(binding, name)

        def compileProgram(self, program: object, options: object) -> None:
            action(options)
            binding.compileProgram(program, options)

    watched = Watched()
    monkeypatch.setattr(compiler, "nvrtc", lambda: watched)


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list that grows by one with each program that NVRTC compiles."""
    calls: list[object] = []
    before_compiling(monkeypatch, calls.append)
    return calls


def run_python(
    code: str, *args: str, timeout: float = 180, ok: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh Python that finds cukern, with a limit on its time; with `ok`, it must end with
    status 0."""
    return run([sys.executable, "-c", code, *args], timeout=timeout, ok=ok, env=env)


OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


def run_two(test_file: str, folder: Path, timeout: float) -> None:
    """`main(rank, store)` of a test's module in two processes, ranks 0 and 1, and check that both succeed.
    `store`: a path for torch.distributed's FileStore."""
    module = Path(test_file).stem
    code = f"import sys, {module}; {module}.main(int(sys.argv[1]), sys.argv[2])"
    path = os.pathsep.join([str(ROOT), str(Path(test_file).parent), str(TREE / "tests")])
    own = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-c", code, str(rank), str(folder / "store")] for rank in range(2)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pair = [subprocess.Popen(command, env=own, **pipes) for command in commands]
    try:
        texts = [process.communicate(timeout=timeout)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0], "\n".join(texts)


def run(
    command: Sequence[str],
    *,
    timeout: float = 180,
    ok: bool = True,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**inherited, "PYTHONPATH": path, **(env or {})},
    )
    if ok:
        assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def skip_without(package: str | None) -> None:
    """Skip the test if this package of the extra integrations is missing."""
    if package is not None:
        pytest.importorskip(package, reason=f"needs {package}, of the extra integrations")


def exact_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """function's result and its gradients for `grad`, all in the inputs' own dtype, each a fresh tensor."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def random_like(xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn_like(x) for x in xs)
