"""The simulator against a GPU: the same kernels, the same inputs, the same bits; for approximate functions
and mma, a stated distance.

One test for each group of instructions; a failure lists every instruction that differs, with operands and
both results. Where there is no GPU, the same kernels run in the simulator alone, which shows that it knows
them all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sim_probes
import torch
from helpers import gpu
from sim_oracle import edges

import cukern

FOLDER = Path(__file__).parent
N = sim_probes.N
Run = Callable[..., None]

needs_simulator = pytest.mark.skipif(
    not callable(getattr(cukern, "backend", None)), reason="this cukern has no simulator to switch to"
)
pytestmark = needs_simulator


def in_simulator(kernel: Any, out: torch.Tensor, *args: Any, **geometry: Any) -> list[torch.Tensor]:
    """The tensors, after a launch in the simulator on copies of them."""
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in (out, *args)]
    with cukern.backend("sim"):
        kernel(*copies, **geometry)
    return [x for x in copies if isinstance(x, torch.Tensor)]


def on_gpu(kernel: Any, out: torch.Tensor, *args: Any, **geometry: Any) -> list[torch.Tensor]:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("some of these instructions need compute capability 9.0")
    copies = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (out, *args)]
    kernel(*copies, **geometry)
    return [x.cpu() for x in copies if isinstance(x, torch.Tensor)]


def probe(group: str) -> tuple[Any, ...]:
    """The kernel of a group and its arguments."""
    probes = sim_probes.GROUPS[group]
    kernel = cukern.compile(sim_probes.source_of(probes, "probe"), "probe")
    inputs = torch.from_numpy(sim_probes.inputs_of(probes))
    return kernel, torch.zeros(len(probes), N, dtype=torch.int64), inputs, N


GEOMETRY = {"grid": N // 256, "block": 256}


@pytest.mark.parametrize("group", sim_probes.GROUPS)
def test_the_simulator_knows(group):
    in_simulator(*probe(group), **GEOMETRY)


@gpu
@pytest.mark.parametrize("group", sim_probes.GROUPS)
def test_instructions(group):
    kernel, out, inputs, n = probe(group)
    theirs = on_gpu(kernel, out, inputs, n, **GEOMETRY)[0]
    ours = in_simulator(kernel, out, inputs, n, **GEOMETRY)[0]
    lines = sim_probes.differences(sim_probes.GROUPS[group], inputs.numpy(), ours.numpy(), theirs.numpy())
    assert not lines, (
        f"{group}: {len(lines)} of {len(sim_probes.GROUPS[group])} instructions differ\n" + "\n".join(lines)
    )


# ---- warps, atomics, tiles, clusters: whole results, bit for bit


def bits(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, shape, dtype=np.int32))


def warp_case(name: str) -> tuple[tuple[Any, ...], dict[str, int]]:
    n = 256
    if name == "atomics":
        totals = torch.zeros(16 + 2 * 8, dtype=torch.int32)
        totals[[2, 4, 6]] = torch.tensor([0x7FFFFFFF, -1, -1], dtype=torch.int32)
        wide = torch.tensor([0, -(1 << 62), -1])
        return (totals, wide, torch.zeros(1), torch.zeros(1, dtype=torch.float64), bits(1, n)), {
            "grid": 2,
            "block": 128,
        }
    if name == "exchanges":
        return (torch.zeros(9, n, dtype=torch.int32), bits(2, n), bits(3, n), n), {"grid": 2, "block": 128}
    return (torch.zeros(16, n, dtype=torch.int32), bits(4, n), n), {"grid": 2, "block": 128}


def tile_case(name: str) -> tuple[tuple[Any, ...], dict[str, int]]:
    if name == "ldmatrix":
        return (torch.zeros(3, 14, 64, dtype=torch.int32), bits(5, 3, 2, 128)), {"grid": 3, "block": 64}
    return (torch.zeros(2, 64, 11, dtype=torch.int32), bits(6, 2 * 64 * 4)), {"grid": 2, "block": 64}


def case(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if name == "clusters":
        n = 16 * 64
        return (
            cukern.load(FOLDER / "clusters.cu", name),
            (torch.zeros(11, n, dtype=torch.int32), bits(7, n), n),
            {"grid": (4, 4), "block": 64},
        )
    in_tiles = name in ("ldmatrix", "async_copies")
    kernel = cukern.load(FOLDER / ("tiles.cu" if in_tiles else "warp.cu"), name)
    return kernel, *(tile_case if in_tiles else warp_case)(name)


TOGETHER = ["shuffles", "votes", "reductions", "atomics", "exchanges", "ldmatrix", "async_copies", "clusters"]


@pytest.mark.parametrize("name", TOGETHER)
def test_the_simulator_knows_what_threads_do_together(name):
    kernel, args, geometry = case(name)
    in_simulator(kernel, *args, **geometry)


@gpu
@pytest.mark.parametrize("name", TOGETHER)
def test_threads_together(name):
    kernel, args, geometry = case(name)
    lines = []
    for k, (theirs, ours) in enumerate(
        zip(on_gpu(kernel, *args, **geometry), in_simulator(kernel, *args, **geometry), strict=True)
    ):
        places = [tuple(at) for at in (theirs != ours).nonzero()[:20].tolist()]
        lines += [f"tensor {k}{at}: GPU {theirs[at].item()}, simulator {ours[at].item()}" for at in places]
    assert not lines, f"{name}:\n" + "\n".join(lines)


# ---- tensor cores

MMA = {  # shape, factors and sums: registers of A, B and C (and D)
    ("m16n8k16", "f16", "f32"): (4, 2, 4),
    ("m16n8k16", "bf16", "f32"): (4, 2, 4),
    ("m16n8k16", "f16", "f16"): (4, 2, 2),
    ("m16n8k8", "f16", "f32"): (2, 1, 4),
    ("m16n8k8", "f16", "f16"): (2, 1, 2),
    ("m16n8k8", "bf16", "f32"): (2, 1, 4),
    ("m16n8k8", "tf32", "f32"): (4, 2, 4),
    ("m16n8k4", "tf32", "f32"): (2, 1, 4),
}


def mma_source(case: tuple[str, str, str]) -> str:
    """A kernel of one warp a block: the registers of A, B and C lie in `in` as [block][register][lane], those
    of D in `out`."""
    shape, factor, total = case
    na, nb, nc = MMA[case]
    places = iter(range(2 * nc + na + nb))
    lists = ", ".join("{" + ", ".join(f"%{next(places)}" for _ in range(n)) + "}" for n in (nc, na, nb, nc))
    opcode = f"mma.sync.aligned.{shape}.row.col.{total}.{factor}.{factor}.{total}"
    outputs = ", ".join(f'"=r"(d[{i}])' for i in range(nc))
    inputs = ", ".join(f'"r"(p[{i} * 32])' for i in range(na + nb + nc))
    return f"""
extern "C" __global__ void tile(int* out, const int* in) {{
    int d[{nc}];
    const int* p = in + blockIdx.x * {na + nb + nc} * 32 + threadIdx.x;
    asm volatile("{opcode} {lists};" : {outputs} : {inputs});
    for (int i = 0; i < {nc}; ++i) out[(blockIdx.x * {nc} + i) * 32 + threadIdx.x] = d[i];
}}"""


_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32}


def registers(values: torch.Tensor, type_: str) -> torch.Tensor:
    """(tiles, registers, 32 lanes, elements of a register) to the registers' bits."""
    return values.to(_DTYPES[type_]).contiguous().view(torch.int32).squeeze(-1)


def mma_case(case: tuple[str, str, str], exact: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Small integers, whose sums are exact and show the layout alone; or numbers of many sizes."""
    _, factor, total = case
    na, nb, nc = MMA[case]
    tiles = 64
    parts = []
    for n, t in ((na, factor), (nb, factor), (nc, total)):
        size = (tiles, n, 32, 2 if t in ("f16", "bf16") else 1)
        values = (
            torch.randint(-8, 9, size).double()
            if exact
            else torch.randn(size) * torch.exp2(torch.randint(-4, 5, size).double())
        )
        parts.append(registers(values, t))
    kernel = cukern.compile(mma_source(case), "tile")
    return kernel, torch.zeros(tiles, nc, 32, dtype=torch.int32), torch.cat(parts, 1)


@pytest.mark.parametrize("mma", MMA, ids="_".join)
def test_the_simulator_knows_mma(mma):
    in_simulator(*mma_case(mma, True), grid=64, block=32)


@gpu
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("mma", MMA, ids="_".join)
def test_mma(mma, exact):
    kernel, out, inputs = mma_case(mma, exact)
    theirs, ours = (run(kernel, out, inputs, grid=64, block=32)[0] for run in (on_gpu, in_simulator))
    if exact:
        assert torch.equal(theirs, ours), (
            f"{mma}: {int((theirs != ours).sum())} of {ours.numel()} registers differ: the layout"
        )
        return
    shape, factor, total = mma
    na, nb, nc = MMA[mma]
    parts = zip(inputs.split((na, nb, nc), 1), (factor, factor, total), strict=True)
    sizes = [part.contiguous().view(_DTYPES[t]).double().abs().flatten(1).amax(1) for part, t in parts]
    largest = torch.maximum(sizes[0] * sizes[1], sizes[2])
    x, y = (r.view(_DTYPES[total]).double() for r in (theirs, ours))
    allowed = ((int(shape.split("k")[1]) + 2) * 2.0**-23 * largest)[:, None, None] + (
        2.0**-10 * y.abs() if total == "f16" else 0
    )
    excess = (x - y).abs() / allowed
    assert bool((excess <= 1).all()), (
        f"{mma}: a difference is {float(excess.max()):.2f} times what is allowed"
    )


# ---- CUDA's functions

FUNCTIONS = {
    "single": (torch.float32, 16, 8),
    "twofold": (torch.float64, 10, 4),
    "halves": (torch.float16, 10, 2),
    "brains": (torch.bfloat16, 10, 2),
}


def function_case(name: str) -> tuple[Any, tuple[Any, ...], dict[str, int]]:
    dtype, rows, _ = FUNCTIONS[name]
    n = 512
    special = torch.from_numpy(
        edges("f64" if dtype == torch.float64 else "f32").view(
            np.float64 if dtype == torch.float64 else np.float32
        )
    )
    drawn = torch.randn(2, n - 2 * len(special), dtype=torch.float64) * torch.tensor([4.0, 1.0])[:, None]
    # the long way of sinf and cosf
    large = torch.exp2(torch.linspace(6, 30, len(special), dtype=torch.float64)).expand(2, -1)
    x = torch.cat((drawn, large, special.double().expand(2, -1)), 1).to(dtype)
    kernel = cukern.load(FOLDER / "functions.cu", name)
    return kernel, (torch.zeros(rows, n, dtype=dtype), x, n), {"grid": 2, "block": n // 2}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_simulator_knows_functions(name):
    kernel, args, geometry = function_case(name)
    out = in_simulator(kernel, *args, **geometry)[0]
    x, y = args[1][:, :300]
    expected = torch.exp(x) if name in ("single", "twofold") else x * y + x
    assert torch.allclose(out[0, :300], expected, rtol=2.0**-6, atol=1e-2)


@gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """Within some ulps: the approximate instructions inside differ by one or two, and what follows may
    enlarge that."""
    kernel, args, geometry = function_case(name)
    dtype, _, ulps = FUNCTIONS[name]
    theirs, ours = (run(kernel, *args, **geometry)[0] for run in (on_gpu, in_simulator))
    info = torch.finfo(dtype)
    x, y = theirs.double(), ours.double()
    near = (
        (x == y)
        | (x.isnan() & y.isnan())
        | ((x - y).abs() <= ulps * info.eps * x.abs() + ulps * info.smallest_normal * info.eps)
    )
    lines = []
    for row in (~near).any(1).nonzero().flatten().tolist():
        shown = [
            f"({args[1][0, i].item()!r}, {args[1][1, i].item()!r}): GPU {theirs[row, i].item()!r}, simulator "
            f"{ours[row, i].item()!r}"
            for i in (~near[row]).nonzero().flatten().tolist()[:4]
        ]
        lines.append(f"row {row}: {int((~near[row]).sum())} differ\n      " + "\n      ".join(shown))
    assert not lines, f"{name}:\n" + "\n".join(lines)
