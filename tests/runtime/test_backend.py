"""Launches that the driver refuses, kernels that fail, forked processes, graph captures, and the features of
each kind of GPU."""

import asyncio
import contextvars
import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers import OLD_TORCH, gpu, in_thread, kernels, no_gpu, own_names, run_python, simulated

import cukern
from cukern.bench.calls import arguments, backward, draw_douts, leaves_of, wanted_inputs
from cukern.runtime import replay
from cukern.runtime.compile import bindings
from cukern.runtime.compile.sources import Source
from cukern.runtime.launch import backend, extended_launch
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.registry import CASES

NOTHING = 'extern "C" __global__ void nothing() {}'
TILE = """
extern "C" __global__ void reverse(float* x) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < 25600; i += blockDim.x) tile[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 25600; i += blockDim.x) x[i] = tile[25599 - i];
}
"""


@gpu
@pytest.mark.parametrize(
    "grid, block, shared, words",
    [
        ((1, 70_000, 1), 1, 0, ("grid y = 70000", "65535")),
        ((1, 1, 70_000), 1, 0, ("grid z = 70000", "65535")),
        (1, 2000, 0, ("block x = 2000", "1024")),
        (1, (64, 64), 0, ("4096 threads", "1024")),
        (1, (1, 1, 65), 0, ("block z = 65", "64")),
        (1, 1, 1 << 20, ("1048576 bytes", "shared")),
    ],
    ids=str,
)
def test_a_launch_that_is_too_large_names_kernel_geometry_and_limit(grid, block, shared, words):
    kernel = cukern.compile(NOTHING)
    with pytest.raises(cukern.LaunchError) as caught:
        kernel(grid=grid, block=block, shared=shared)
    assert all(word in str(caught.value) for word in ("nothing", *words)), caught.value
    kernel(grid=1, block=1)
    torch.cuda.synchronize()


@gpu
def test_a_block_larger_than_the_kernels_own_bound_is_named():
    kernel = cukern.compile('extern "C" __global__ void __launch_bounds__(64) narrow() {}')
    kernel(grid=1, block=64)
    with pytest.raises(
        cukern.LaunchError, match=r"narrow .*128 threads per block exceed this kernel.s limit of 64"
    ):
        kernel(grid=1, block=128)


@gpu
def test_dynamic_shared_memory_over_48_kib():
    x = torch.randn(25_600, device="cuda")
    expected = x.flip(0)
    kernel = cukern.compile(TILE)
    for _ in range(2):
        kernel(x, grid=1, block=256, shared=4 * 25_600)
        assert torch.equal(x, expected)
        expected = x.flip(0)


@kernels
@pytest.mark.parametrize(
    "static, dynamic", [(40 << 10, 12 << 10), (1 << 10, 48 << 10), (16, (48 << 10) - 16)]
)
def test_static_and_dynamic_shared_memory_over_48_kib_together(device, static, dynamic):
    kernel = cukern.compile(f"""
    __global__ void both(int* out, int words) {{
        __shared__ int fixed[{static // 4}];
        extern __shared__ int more[];
        if (threadIdx.x == 0) fixed[{static // 4 - 1}] = 3, more[words - 1] = 4;
        __syncthreads();
        out[threadIdx.x] = fixed[{static // 4 - 1}] + more[words - 1];
    }}""")
    out = torch.empty(32, dtype=torch.int32, device=device)
    kernel(out, dynamic // 4, grid=1, block=32, shared=dynamic)
    assert (out == 7).all()


@gpu
# CuPy 14 calls ExternalStream, which 13 needs, deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_raw_kernel_of_cupy():
    """Kernel.raw has the kernel's attributes, and CuPy can launch it on torch's stream and memory."""
    cupy = pytest.importorskip("cupy")
    kernel = cukern.compile('extern "C" __global__ void add(float* x, float a) { x[threadIdx.x] += a; }')
    assert kernel.raw.name == "add" and kernel.raw.num_regs > 0 and kernel.raw is kernel.raw
    x = torch.zeros(32, device="cuda")
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream),
    ):
        kernel.raw((1,), (32,), (cupy.from_dlpack(x), cupy.float32(2)))
        kernel(x, 0.5, grid=1, block=32)
        torch.cuda.current_stream().synchronize()
    assert (x == 2.5).all()


@no_gpu
@pytest.mark.parametrize(
    "words, use", [(r"no cupy\.RawKernel", lambda: cukern.compile(NOTHING).raw), ("GPU", cukern.warmup)]
)
def test_setup_error_without_a_gpu(words, use):
    with pytest.raises(cukern.SetupError, match=words):
        use()


@pytest.mark.parametrize("attribute", [extended_launch.EARLY, extended_launch.TOGETHER])
def test_extended_launch_packs_what_the_driver_reads(monkeypatch, attribute):
    """CUlaunchConfig and its one CUlaunchAttribute, byte by byte, in each thread its own; an error is CuPy's;
    old GPUs and drivers do without."""
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime")
    driver = pytest.importorskip("cupy_backends.cuda.api.driver")
    calls, status = [], [0]

    def launch(config, function, params, extra):
        parts = struct.unpack("7I4xQQI4x", ctypes.string_at(config, 56))
        calls.append(
            (
                *parts[:8],
                *struct.unpack("I4xI60x", ctypes.string_at(parts[8], 72)),
                parts[9],
                function,
                params,
                extra,
            )
        )
        return status[0]

    monkeypatch.setattr(bindings, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: 13000)
    monkeypatch.setattr(driver, "CUDADriverError", KeyError)  # its own constructor asks the driver for words
    extended_launch.launcher.cache_clear()
    run = extended_launch.launcher(90, attribute)
    for start in (run, lambda *args: in_thread(run, *args)):
        start(7, 1, 2, 3, 4, 5, 6, 99, 0xABC, 0, 0xDEF)
        assert calls.pop() == (1, 2, 3, 4, 5, 6, 99, 0xABC, attribute, 1, 1, 7, 0, 0xDEF)
    status[0] = 1
    with pytest.raises(KeyError, match="1"):
        run(7, 1, 2, 3, 4, 5, 6, 99, 0xABC, 0, 0xDEF)
    without = attribute == extended_launch.EARLY
    assert (extended_launch.launcher(80, attribute) is None) == without
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: 12020)
    extended_launch.launcher.cache_clear()
    assert (extended_launch.launcher(90, attribute) is None) == without
    extended_launch.launcher.cache_clear()


NEXT = """
#include "common/ptx/launch.cuh"
extern "C" __global__ void next(float* out, const float* x, int n) {
    wait_for_previous();
    if (blockIdx.x == 0) __nanosleep(20000);
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[(i + blockDim.x) % n] + 1;
}
"""


@gpu
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_programmatic_dependent_launch_waits_for_what_is_ahead(captured):
    """Each launch reads what other blocks of the previous launch wrote late. Before some launches there is a
    fill, a copy, or a wait for another stream."""
    kernel, n = Kernel(Source.from_text(NEXT), "next", pdl=True), 64 * 256
    a, b, start = (torch.zeros(n, device="cuda") for _ in range(3))
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    kernel(a, b, n, grid=64, block=256)

    def run():
        a.zero_()
        for _ in range(10):
            kernel(b, a, n, grid=64, block=256)
            kernel(a, b, n, grid=64, block=256)
        b.copy_(a)
        kernel(a, b, n, grid=64, block=256)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            kernel(b, a, n, grid=64, block=256)
        torch.cuda.current_stream().wait_stream(other)
        kernel(a, b, n, grid=64, block=256)
        a.add_(start)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=first) if captured else torch.cuda.stream(first):
        run()
    for value in (0, 5):
        start.fill_(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            graph.replay() if captured else run()
        torch.cuda.synchronize()
        assert (a == 23 + value).all()


@gpu
def test_static_clusters():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    kernel = cukern.compile("""
    extern "C" __global__ void __cluster_dims__(2, 1, 1) rank(int* out) {
        unsigned rank, size;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
        out[blockIdx.x] = rank + 10 * size;
    }
    """)
    out = torch.zeros(6, dtype=torch.int32, device="cuda")
    kernel(out, grid=6, block=1)
    assert out.tolist() == [20, 21] * 3
    with pytest.raises(
        cukern.LaunchError, match=r"rank .* grid x = 5 is not a multiple of the cluster size along x, 2"
    ):
        kernel(out, grid=5, block=1)


@gpu
def test_clusters_of_more_than_eight_blocks():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("clusters of 16 blocks are for compute capability 9.0")
    kernel = cukern.compile("""
    extern "C" __global__ void __cluster_dims__(16, 1, 1) rank(int* out) {
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(out[blockIdx.x]));
    }
    """)
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    kernel(out, grid=32, block=32)
    assert out.tolist() == [*range(16)] * 2


@gpu
def test_an_unloaded_kernel_in_a_graph_capture_says_warmup():
    kernel = cukern.compile('extern "C" __global__ void add_one(float* x) { *x += 1; }')
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(1)  # a graph of nothing makes torch warn
        with pytest.raises(RuntimeError, match=r"add_one is not loaded.*cukern\.warmup"):
            kernel(x, grid=1, block=1)
    kernel(x, grid=1, block=1)
    assert x.item() == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, grid=1, block=1)
    for _ in range(3):
        graph.replay()
    assert x.item() == 4


@gpu
def test_warmup_makes_an_op_ready_for_capture():
    out = run_python(
        """
import torch, cukern
x = torch.arange(6., device="cuda", requires_grad=True)
def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x * 1
        y = cukern.square(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return graph, y, dx
try:
    capture()
except RuntimeError as error:
    print("refused:", error)
cukern.warmup("square", dtypes=[torch.float32])
graph, y, dx = capture()
x.data += 1
graph.replay()
print(y.tolist(), dx.tolist())
# autograd's thread may still hold Python functions; std::terminate ends a thread that needs the GIL at exit
torch.ones(1, device="cuda", requires_grad=True).sum().backward()
torch.cuda.synchronize()
"""
    ).stdout
    assert "refused:" in out and "cukern.warmup" in out
    assert out.splitlines()[-1] == "[1.0, 4.0, 9.0, 16.0, 25.0, 36.0] [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]"


@pytest.mark.parametrize(
    "ops, options, error, words",
    [
        (("cube",), {}, ValueError, "op must be one of .*square.*, got 'cube'"),
        ((["square"],), {}, TypeError, "op must be a str, got list"),
        ((), {"dtypes": torch.float32}, TypeError, "dtypes must be a collection .*, got dtype torch.float32"),
        ((), {"dtypes": ("float",)}, TypeError, r"got tuple \('float',\)"),
        (
            ("square",),
            {"dtypes": (torch.float32, torch.int8)},
            ValueError,
            "torch.int8, but square has no kernels",
        ),
        *(
            (("square",), {"device": d}, ValueError, f"must be a GPU, got '{d}'")
            for d in ("cpu", "nonsense", "", "cuda:-1", "cuda:x")
        ),
        ((), {"device": torch.device("cpu")}, ValueError, "must be a GPU, got 'cpu'"),
        ((), {"device": -1}, ValueError, "device must be at least 0, got -1"),
        *(((), {"device": d}, TypeError, "device must be an int, got") for d in (True, 0.0, [0])),
        *(
            pytest.param(
                ("square",),
                {"device": d},
                ValueError,
                f"device must be one of the .* GPUs, got {d!r}",
                marks=gpu,
            )
            for d in (99, 1 << 40, "cuda:99")
        ),
    ],
)
def test_warmup_refuses_unknown_ops_dtypes_and_devices(ops, options, error, words):
    with pytest.raises(error, match=words):
        cukern.warmup(*ops, **options)


@gpu
def test_an_illegal_access_names_the_kernel_when_synchronous():
    out = run_python(
        """
import os, torch, cukern
kernel = cukern.compile('extern "C" __global__ void stray(float* out) { out[1ll << 40] = 1; }')
try:
    kernel(torch.zeros(1, device="cuda"), grid=1, block=1)
except cukern.LaunchError as error:
    print("caught:", error, flush=True)
os._exit(0)  # CUDA is unusable from here on
""",
        CUKERN_SYNC="1",
    ).stdout
    assert "caught: stray" in out and "illegal memory access" in out


@gpu
def test_synchronous_mode_and_nvtx_give_the_same_numbers():
    code = """
import torch, cukern
x = torch.arange(5., device="cuda", requires_grad=True)
cukern.square(x).sum().backward()
print(x.grad.tolist())
"""
    assert run_python(code, CUKERN_SYNC="1", CUKERN_NVTX="1").stdout.strip() == "[0.0, 2.0, 4.0, 6.0, 8.0]"


@gpu
def test_a_child_that_was_forked_after_cuda_started_gets_a_clear_error():
    out = run_python(
        """
import multiprocessing, torch, cukern
x = torch.ones(5, device="cuda")
kernel = cukern.compile('extern "C" __global__ void nothing(float* x) {}')
kernel(x, grid=1, block=1)
assert cukern.square(x).sum().item() == 5

def attempt(pipe):
    fresh = lambda: cukern.square(torch.ones(2, device="cuda"))
    for work in (lambda: cukern.square(x), lambda: kernel(x, grid=1, block=1), fresh):
        try:
            work()
            pipe.send("no error")
        except BaseException as error:
            pipe.send(f"{type(error).__name__}: {error}")

context = multiprocessing.get_context("fork")
receive, send = context.Pipe(duplex=False)
child = context.Process(target=attempt, args=(send,), daemon=True)
child.start()
for _ in range(3):
    assert receive.poll(60), "the child hangs"
    print(receive.recv().replace("\\n", " "))
child.join(60)
print("exit", child.exitcode)
""",
        timeout=240,
    ).stdout.splitlines()
    assert len(out) == 4 and out[-1] == "exit 0"
    for line in out[:3]:
        assert "fork" in line and "spawn" in line, line


@gpu
def test_python_compiler_and_driver_agree_on_this_gpu():
    """Kernels are compiled for the architecture of this GPU; a cubin of another architecture does not
    load."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    cukern.compile("__global__ void arch(int* out) { *out = __CUDA_ARCH__; }")(out, grid=1, block=1)
    major, minor = torch.cuda.get_device_capability()
    assert out.item() == major * 100 + minor * 10


@gpu
def test_a_thread_that_has_no_context_yet():
    """Autograd's thread has no CUDA context at its first backward if torch needs no new memory, because its
    cache has enough."""
    kernel, out = (
        cukern.compile("__global__ void one(float* out) { *out = 1; }"),
        torch.zeros(1, device="cuda"),
    )
    kernel(out, grid=1, block=1)
    out.zero_()
    in_thread(lambda: kernel(out, grid=1, block=1))
    assert out.item() == 1


@kernels
def test_a_bound_launch_packs_the_rest_once(device):
    """Two bound launches of one kernel, in two threads. The first call needs more than the default 48 KiB of
    shared memory. Each keeps the values that it was bound to."""
    kernel = cukern.compile("""
    extern "C" __global__ void fill(double* out, const float* x, float f, long long l, int words) {
        extern __shared__ int last[];
        if (threadIdx.x == 0) last[words - 1] = 7;
        __syncthreads();
        out[threadIdx.x] = double(x[threadIdx.x] * f) + l + last[words - 1];
    }""")
    x, outs = (
        torch.randn(32, device=device),
        torch.full((2, 32), torch.nan, dtype=torch.float64, device=device),
    )
    launch, shared = kernel.on(x.get_device()), 60 << 10
    one, other = (
        replay._bound(launch, (1, 1, 1), (32, 1, 1), shared, f, 1 << 20, shared // 4) for f in (0.5, -2.0)
    )

    def call(bound, out):
        with simulated(x, out):
            bound(out.data_ptr(), x.data_ptr())

    for _ in range(2):
        in_thread(call, one, outs[0])
        call(other, outs[1])
    assert torch.equal(outs, torch.stack((x * 0.5, x * -2)).double() + (1 << 20) + 7)


@gpu
def test_a_bound_launch_that_is_refused_says_why():
    launch = replay._bound(
        cukern.compile("__global__ void one(float* out, int n) { out[n] = 1; }").on(0),
        (1, 1, 1),
        (2000, 1, 1),
        0,
        3,
    )
    with pytest.raises(cukern.LaunchError, match=r"one .*block x = 2000"):
        launch(0)


# ---- the choice of a backend


def test_blocks_of_two_threads_that_overlap():
    both, seen = threading.Barrier(2, timeout=20), []

    def work(first):
        with cukern.backend("sim"):
            both.wait()
            seen.append(backend.simulating())
            first or both.wait()  # the first to enter, or not, is the first to leave
        first and both.wait()
        seen.append(backend.simulating())

    thread = threading.Thread(target=work, args=(True,))
    thread.start()
    work(False)
    thread.join()
    assert sorted(seen) == [False, False, True, True]


def test_blocks_that_nest_raise_and_end_in_another_order():
    def hold():
        with cukern.backend("sim"):
            yield

    with cukern.backend("sim"):
        with pytest.raises(KeyError), cukern.backend("gpu"):
            assert not backend.simulating()
            raise KeyError
        assert backend.simulating()
    assert not backend.simulating()
    one, other = hold(), hold()
    next(one)
    next(other)
    one.close()
    assert backend.simulating()
    other.close()
    assert not backend.simulating()


def test_a_thread_inherits_no_block_and_a_copied_context_does():
    with cukern.backend("sim"):
        assert not in_thread(backend.simulating)
        assert in_thread(contextvars.copy_context().run, backend.simulating)


def test_blocks_of_asyncio_tasks():
    async def child():
        return backend.simulating()

    async def work(name, turns):
        with cukern.backend(name):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert backend.simulating() == (name == "sim")
            return await asyncio.create_task(child())

    async def all_three():
        return await asyncio.gather(work("sim", 3), work("gpu", 6), work("sim", 9)), backend.simulating()

    assert asyncio.run(all_three()) == ([True, False, True], False)


@pytest.mark.parametrize("name", [name for name in own_names() if CASES[name].differentiable])
def test_backward_of_a_simulated_forward_is_simulated(name):
    """Inside the block, after it, and in another thread."""
    case, found = CASES[name], []
    inputs = case.make(case.sim_dims[0], torch.float32, "cpu")
    wanted, douts = wanted_inputs(case, "bwd", inputs), draw_douts(case, inputs)
    with cukern.backend("sim"):
        leaves = leaves_of(inputs, wanted)
        again = backward(case.call(*arguments(case, leaves)), [leaves[i] for i in wanted], douts)
        found.append(again())
    found.append(again())
    found.append(in_thread(again))
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_a_compiled_function_follows_the_block_of_its_thread():
    ran, x = [], torch.ones(4)
    compiled = torch.compile(
        lambda t: t * 2 if backend.simulates(t) else t * 3, backend="eager", fullgraph=True
    )
    ran.append(compiled(x))
    with cukern.backend("sim"):
        ran.append(compiled(x))
        ran.append(in_thread(compiled, x))
    assert [int(y[0]) for y in (*ran, compiled(x))] == [3, 2, 3, 3]


UNKNOWN = (
    (5, TypeError, "must be a str, got int 5"),
    ("cpu", ValueError, "no backend 'cpu'; there are gpu, sim"),
)


@pytest.mark.parametrize("name, error, words", UNKNOWN)
def test_unknown_backends_are_refused(name, error, words):
    with pytest.raises(error, match=words), cukern.backend(name):
        pass


def test_a_wrong_environment_variable_is_told_at_the_first_cpu_tensor():
    code = """
import torch, cukern
with cukern.backend("gpu"):
    print(cukern.square(torch.tensor([3.0])).item())
try:
    cukern.square(torch.tensor([3.0]))
except ValueError as error:
    print(error)
"""
    assert (
        run_python(code, CUKERN_BACKEND="zzz").stdout
        == "9.0\nCUKERN_BACKEND: there is no backend 'zzz'; there are gpu, sim\n"
    )


@pytest.mark.skipif(
    OLD_TORCH, reason="torch 2.11 crashes where a second thread compiles a function in a copied context"
)
def test_compiled_functions_in_a_copied_context_and_in_tasks():
    targets, x = [], torch.randn(8)

    def record(graph, _):
        targets.append(any("_square" in str(node.target) for node in graph.graph.nodes))
        return graph

    compiled = torch.compile(lambda x: cukern.square(x), backend=record, fullgraph=True)

    def simulated():
        torch._dynamo.reset()
        compiled(x)
        return targets[-1]

    async def task():
        return simulated()

    async def main():
        with cukern.backend("sim"):
            inside = asyncio.create_task(task())
        return simulated(), await inside

    with cukern.backend("sim"):
        context = contextvars.copy_context()
        assert in_thread(lambda: context.run(simulated)) and not in_thread(simulated)
    assert asyncio.run(main()) == (False, True)
