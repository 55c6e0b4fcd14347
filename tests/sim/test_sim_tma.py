"""Tensor maps and bulk tensor copies, simulated and on a GPU: boxes of 1 to 5 dimensions, swizzles, edges of
a tensor, multicast; bugs."""

import ctypes

import numpy as np
import pytest
import torch
from sim_kernels import PLACES, line_of, on

import cukern
from cukern import sim
from cukern.runtime.launch import tensor_map

HEAD = """#include "common/ptx/tma.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
"""

# Blocks load a box each, copy it to `seen` as it lies in shared memory, and store it at the same place of
# another tensor. A box with a negative coordinate is not stored: a GPU refuses that.
COPY = (
    HEAD
    + """
__global__ void copy(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
    TYPE* seen, const int* places) {
    __shared__ alignas(1024) TYPE tile[SIZE];
    __shared__ unsigned long long full;
    const int* at = places + blockIdx.x * RANK;
    unsigned barrier = shared_address(&full), box = shared_address(tile);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarriers_made();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&from);
        mbarrier_arrive(barrier, SIZE * sizeof(TYPE));
        tma_load(box, &from, barrier, {PLACE});  // load
    }
    mbarrier_wait_in_block(barrier, 0);
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) seen[blockIdx.x * SIZE + i] = tile[i];
    __syncthreads();
    bool stored = true;
    for (int i = 0; i < RANK; ++i) stored &= at[i] >= 0;
    if (threadIdx.x == 0 && stored) {
        tma_store(&to, box, {PLACE});  // store
        bulk_commit();
        bulk_wait<0>();
    }
}
"""
)
CTYPES = {
    torch.float32: "float",
    torch.bfloat16: "unsigned short",
    torch.uint8: "unsigned char",
    torch.float64: "double",
}
CTYPES |= {torch.float16: "unsigned short", torch.int32: "int", torch.int64: "long long"}


def copied(x, box, places, swizzle=0, text=COPY, **options):
    """The boxes of `x` at these places, as they are in shared memory, and the tensor to which they were
    stored."""
    size, rank = int(np.prod(box)), x.ndim
    place = ", ".join(f"at[{rank - 1 - i}]" for i in range(rank))
    for word, value in {"TYPE": CTYPES[x.dtype], "SIZE": size, "RANK": rank, "PLACE": place}.items():
        text = text.replace(word, str(value))
    plain = {2: torch.int16, 1: torch.uint8}.get(x.dtype.itemsize, x.dtype)
    seen, out = x.new_zeros((len(places), *box)), x.new_empty_strided(x.shape, x.stride()).zero_()
    maps = [cukern.tensor_map(t, box, swizzle, **options) for t in (x, out)]
    view = seen.view(plain)
    text = text.replace("unsigned short", "short") if plain == torch.int16 else text
    with on(x.device.type):
        cukern.compile(text)(
            *maps, view, torch.tensor(places, dtype=torch.int32, device=x.device), grid=len(places), block=32
        )
    return seen, out


def expected(x, box, place, fill=0):
    """The box at a place, with `fill` outside of the tensor; and which elements of the tensor a store of it
    changes."""
    wanted, covered = x.new_full(box, fill), torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    there = tuple(
        slice(max(p, 0), max(0, min(p + b, n))) for p, b, n in zip(place, box, x.shape, strict=True)
    )
    here = tuple(
        slice(s.start - p, s.start - p + max(0, s.stop - s.start)) for s, p in zip(there, place, strict=True)
    )
    wanted[here] = x[there]
    covered[there] = min(place) >= 0
    return wanted, covered


def numbers(shape, dtype, device):
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 200, shape, dtype=torch.int64, device=device).to(dtype)


SHAPES = [
    ((100,), (32,), [[0], [48], [-16], [96], [304]]),
    ((20, 48), (8, 16), [[0, 0], [16, 32], [-3, -16], [-3, 32], [13, 16], [50, 0], [0, 48]]),
    ((20, 41), (8, 32), [[0, 0], [16, 32], [5, -16]]),
    ((5, 20, 40), (2, 8, 16), [[0, 0, 0], [4, 16, 32], [-1, 3, 16]]),
    ((3, 5, 9, 24), (2, 2, 4, 16), [[0, 0, 0, 0], [2, 4, 7, 16], [1, -1, 5, -16]]),
    ((2, 3, 5, 9, 24), (1, 2, 2, 4, 32), [[0, 0, 0, 0, 0], [1, 2, 4, 7, 16], [1, 1, -1, 5, -16]]),
]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", CTYPES, ids=str)
@pytest.mark.parametrize("shape, box, places", SHAPES, ids=["1d", "2d", "odd", "3d", "4d", "5d"])
def test_boxes_of_every_rank(shape, box, places, dtype, device):
    padded = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    x = numbers((*shape[:-1], padded), dtype, device)[..., : shape[-1]]
    seen, out = copied(x, box, places)
    whole = torch.zeros(x.shape, dtype=torch.bool, device=device)
    for i, place in enumerate(places):
        wanted, covered = expected(x, box, place)
        assert torch.equal(seen[i], wanted), place
        whole |= covered
    assert torch.equal(out, torch.where(whole, x, torch.zeros_like(x)))


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_swizzles(swizzle, dtype, device):
    """The 16-byte unit i of row r is at i ^ (r * row bytes / 128) % units; a store undoes it."""
    n = swizzle // dtype.itemsize
    x = numbers((40, 3 * n), dtype, device)
    places = [[0, 0], [8, n], [32, 2 * n]]
    seen, out = copied(x, (16, n), places, swizzle)
    units = swizzle // 16
    r, i = np.arange(16)[:, None], np.arange(units)[None]
    found = seen.contiguous().view(torch.uint8).view(3, 16, units, 16)[:, r, i ^ r * swizzle // 128 % units]
    for j, (row, column) in enumerate(places):
        wanted, _ = expected(x, (16, n), (row, column))
        assert torch.equal(found[j].reshape(16, -1), wanted.contiguous().view(torch.uint8).view(16, -1))
        assert torch.equal(out[row : row + 16, column : column + n], wanted[: 40 - row])


@pytest.mark.parametrize("device", PLACES)
def test_what_is_outside_can_be_nan(device):
    seen, _ = copied(torch.randn(20, 40, device=device), (8, 16), [[16, 32]], fill="nan")
    assert seen[0, :4, :8].isfinite().all() and seen[0, 4:].isnan().all() and seen[0, :, 8:].isnan().all()


@pytest.mark.parametrize("device", PLACES)
def test_strided_views(device):
    base = torch.randn(6, 20, 64, device=device)
    for x in (base[:, ::2, :48], base[1:, 3:, 4:52], base.transpose(0, 1), base[:, 5:6]):
        box = (2, 4, 16)
        seen, out = copied(x, box, [[1, 0, 16]])
        wanted, covered = expected(x, box, (1, 0, 16))
        assert torch.equal(seen[0], wanted) and torch.equal(out, torch.where(covered, x, torch.zeros_like(x)))


ADD = (
    HEAD
    + """
__global__ void add(const __grid_constant__ CUtensorMap out, const float* x) {
    __shared__ alignas(128) float tile[4][32];
    for (int i = 0; i < 4; ++i) tile[i][threadIdx.x] = x[blockIdx.x] * (threadIdx.x + 1);
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_add(&out, shared_address(tile), {16, 6});
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""
)


@pytest.mark.parametrize("device", PLACES)
def test_blocks_add_to_one_box(device):
    out, wanted = torch.ones(8, 32, device=device), torch.ones(8, 32, device=device)
    with on(device):
        cukern.compile(ADD)(
            cukern.tensor_map(out, (4, 32)), torch.tensor([1.0, 2, 4], device=device), grid=3, block=32
        )
    wanted[6:, 16:] += 7 * torch.arange(1, 17, device=device)
    assert torch.equal(out, wanted)


MULTICAST = (
    HEAD
    + """
__global__ void __cluster_dims__(4, 1, 1) share(const __grid_constant__ CUtensorMap map, float* out) {
    __shared__ alignas(128) float tile[4][32];
    __shared__ unsigned long long full;
    unsigned barrier = shared_address(&full), rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarriers_made();
        mbarrier_arrive(barrier, BYTES);
    }
    SYNC
    if (threadIdx.x == 0) tma_multicast(shared_address(tile[rank]), &map, barrier, {0, int(rank)}, RANKS);
    mbarrier_wait(barrier, 0);
    for (int i = 0; i < 4; ++i) {
        bool mine = i == rank || RANKS >> rank & 1;
        out[(blockIdx.x * 4 + i) * 32 + threadIdx.x] = mine ? tile[i][threadIdx.x] : -1;
    }
    cluster_sync();
}
"""
)


def multicast(ranks, bytes_, sync="cluster_sync();", device="cpu"):
    out, x = torch.full((8, 4, 32), torch.nan, device=device), torch.randn(4, 32, device=device)
    text = MULTICAST.replace("RANKS", ranks).replace("BYTES", bytes_).replace("SYNC", sync)
    with on(device):
        cukern.compile(text)(cukern.tensor_map(x, (1, 32)), out, grid=8, block=32)
    return out, x


@pytest.mark.parametrize("device", PLACES)
def test_multicast(device):
    out, x = multicast("0xf", "512", device=device)
    assert torch.equal(out, x.expand(8, 4, 32))


def test_a_multicast_before_the_others_have_started():
    with pytest.raises(sim.Race, match="may not have started yet"):
        multicast("0xf", "512", "__syncthreads();")


# ---- what the simulator says of wrong copies

MISSING = "still reads 16 bytes, offset 0 of shared memory .tile . 0., when its thread ends: "
WRONG = [
    (
        "bulk_wait<0>();",
        "",
        sim.Race,
        MISSING + r"a wait for the copy \(cp.async.bulk.wait_group\) is missing before the end",
    ),
    ("bulk_wait<0>();", "bulk_wait<1>();", sim.Race, MISSING + "a wait"),
    ("bulk_commit();", "", sim.Race, MISSING + "a cp.async.bulk.commit_group and a wait"),
    (
        "mbarrier_wait_in_block(barrier, 0);",
        "",
        sim.Race,
        "that the asynchronous copy of thread .* wrote at .*: a wait at its mbarrier is missing",
    ),
    (
        "SIZE * sizeof(TYPE)",
        "SIZE",
        sim.BarrierFault,
        "for 0 arrivals, and 384 bytes more have come than its arrivals announced",
    ),
    (
        "SIZE * sizeof(TYPE)",
        "2 * SIZE * sizeof(TYPE)",
        sim.BarrierFault,
        "waits at an mbarrier for 0 arrivals and 512 bytes",
    ),
    (
        "box = shared_address(tile)",
        "box = shared_address(tile) + 16",
        sim.Misaligned,
        "offset 16 of shared memory, which is not a multiple of 128",
    ),
    ("const __grid_constant__ CUtensorMap from", "const CUtensorMap from", sim.Fault, "__grid_constant__"),
    (
        "{PLACE}",
        "{at[0]}",
        sim.Fault,
        "a box of 1 dimensions, but what is at its address is one of a tensor with 2 dimensions",
    ),
    (
        "&from, barrier",
        "(const CUtensorMap*)seen, barrier",
        sim.Fault,
        "what is at its address is no tensor map",
    ),
    (
        "bulk_wait<0>();",
        "tile[5] = 1; bulk_wait<0>();",
        sim.Race,
        "still reads .* when block .* thread .* writes there .*wait_group",
    ),
    (
        "bulk_wait<0>();",
        "tile[5] = 1;",
        sim.Race,
        "still reads .* when block .* thread .* writes there .*wait_group",
    ),
]


@pytest.mark.parametrize("change, to, fault, words", WRONG, ids=range(len(WRONG)))
def test_wrong_copies(change, to, fault, words):
    assert change in COPY
    with pytest.raises(fault, match=words):
        copied(torch.randn(20, 48), (8, 16), [[8, 16]], text=COPY.replace(change, to))


@pytest.mark.parametrize(
    "end", ["bulk_wait_read<0>();", "bulk_commit(); bulk_wait<1>(); bulk_wait_read<0>();"]
)
def test_waits_for_a_store_before_the_end(end):
    copied(torch.randn(20, 48), (8, 16), [[8, 16], [0, 0]], text=COPY.replace("bulk_wait<0>();", end))


STORES = COPY.replace("threadIdx.x == 0 && stored", "threadIdx.x == 0")
ELSEWHERE = COPY.replace("barrier, {PLACE}", "barrier, {0, 0}")
INNER = "innermost coordinate is"


@pytest.mark.parametrize(
    "text, dtype, place, mended, fault, mark, words",
    [
        (
            COPY,
            torch.bfloat16,
            (0, 4),
            (0, 8),
            sim.Misaligned,
            "load",
            rf"{INNER} 4, but it must be .* 8 elements \(16 bytes\)",
        ),
        (
            COPY,
            torch.float32,
            (0, -3),
            (0, -4),
            sim.Misaligned,
            "load",
            rf"{INNER} -3, but it must be .* 4 elements \(16 bytes\)",
        ),
        (
            ELSEWHERE,
            torch.uint8,
            (3, 17),
            (3, 16),
            sim.Misaligned,
            "store",
            f"{INNER} 17, but it must be a multiple of 16 elements",
        ),
        (
            STORES,
            torch.float32,
            (0, -4),
            (0, 0),
            sim.OutOfBounds,
            "store",
            f"{INNER} -4, but it must not be negative in a store",
        ),
        (
            STORES,
            torch.float32,
            (-1, 0),
            (19, 0),
            sim.OutOfBounds,
            "store",
            r"coordinate 1 \(.* is 0\) is -1, but it must not be negative",
        ),
        (
            STORES,
            torch.float32,
            (-9, 0),
            (99, 0),
            sim.OutOfBounds,
            "store",
            r"coordinate 1 \(the innermost is 0\) is -9, but",
        ),
    ],
    ids=["load", "negative load", "store", "negative store", "store above", "store outside"],
)
def test_coordinates_that_a_gpu_refuses(text, dtype, place, mended, fault, mark, words):
    x = numbers((20, 48), dtype, "cpu")
    with pytest.raises(fault, match=f"thread .0, 0, 0., <.*>:{line_of(COPY, mark)} \\(in tma.*{words}"):
        copied(x, (8, 16), [place], text=text)
    copied(x, (8, 16), [mended], text=text)


# ---- the Python side

REFUSED = [
    ((torch.randn(4, 4, 4, 4, 4, 4), (1,) * 6), {}, ValueError, "1 to 5 dimensions"),
    ((torch.tensor(1.0), ()), {}, ValueError, "1 to 5 dimensions"),
    (
        (torch.randn(8, 32), (8, 32, 1)),
        {},
        ValueError,
        r"box must have one size for each of the 2 dimensions, got \(8, 32, 1\)",
    ),
    ((torch.randn(8, 32), (8, 257)), {}, ValueError, r"box\[1\] must be in 1..256, got 257"),
    ((torch.randn(8, 32), (0, 32)), {}, ValueError, r"box\[0\] must be in 1..256, got 0"),
    ((torch.randn(8, 32), (8.0, 32)), {}, TypeError, r"box\[0\] must be an int, got float 8.0"),
    ((torch.randn(8, 30), (8, 16)), {}, ValueError, "must be multiples of 16 bytes, got 120"),
    (
        (torch.randn(8, 32), (8, 15)),
        {},
        ValueError,
        "the last size of box must be a multiple of 16 bytes, got 60",
    ),
    ((torch.randn(8, 33)[:, 1:], (8, 16)), {}, ValueError, "address .* must be a multiple of 16"),
    (
        (torch.randn(8, 32).t(), (16, 8)),
        {},
        ValueError,
        r"last stride of a tensor with a tensor map must be 1, got \(1, 32\)",
    ),
    ((torch.randn(8, 1).expand(8, 4), (8, 4)), {}, ValueError, "last stride"),
    ((torch.randn(1, 32).expand(8, 32), (8, 4)), {}, ValueError, r"in 1..2\^40-1 bytes, got 0"),
    ((torch.randn(0, 32), (8, 32)), {}, ValueError, r"must be in 1..2\^32, got \(0, 32\)"),
    (
        (torch.randn(8, 32), (8, 32)),
        {"swizzle": 64},
        ValueError,
        "must be at most the swizzle, 64 bytes, got 128",
    ),
    ((torch.randn(8, 32), (8, 32)), {"swizzle": 48}, ValueError, "swizzle must be one of .*, got 48"),
    ((torch.randn(8, 32), (8, 32)), {"swizzle": "128B"}, TypeError, "swizzle must be an int, got str '128B'"),
    ((torch.randn(8, 32), (8, 32)), {"l2": 32}, ValueError, "l2 must be one of .*, got 32"),
    ((torch.randn(8, 32), (8, 32)), {"fill": "one"}, ValueError, "fill"),
    (
        (torch.ones(8, 32, dtype=torch.int32), (8, 32)),
        {"fill": "nan"},
        ValueError,
        "needs a floating-point tensor",
    ),
    (
        (torch.ones(8, 32, dtype=torch.complex64), (8, 2)),
        {},
        TypeError,
        "a tensor map takes .*, got torch.complex64",
    ),
    (([1.0], (1,)), {}, TypeError, "tensor must be a torch.Tensor"),
    ((torch.randn(8, 32), 8), {}, TypeError, "box must be a sequence of ints, got int 8"),
]


@pytest.mark.parametrize("args, options, error, words", REFUSED, ids=range(len(REFUSED)))
def test_refused_arguments(args, options, error, words):
    with pytest.raises(error, match=words):
        cukern.tensor_map(*args, **options)


def test_equal_calls_share_one_encoding_and_the_simulator_reads_it():
    x = torch.randn(3, 8, 32, dtype=torch.float64)
    first = tensor_map.encode(-1, x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), (1, 8, 16), 128)
    assert first is tensor_map.encode(-1, x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), (1, 8, 16), 128)
    assert bytes(cukern.tensor_map(x, (1, 8, 16), 128)) == first and len(first) == 128
    box = tensor_map.decode(first)
    assert (
        box.sizes == (32, 8, 3)
        and box.strides == (256, 2048)
        and box.box == (16, 8, 1)
        and box.address == x.data_ptr()
    )
    assert (box.itemsize, box.code, box.swizzle, box.l2, box.fill) == (8, 8, 128, 128, "zeros")
    assert tensor_map.decode(bytes(128)) is None
    # whatever the stride of the middle
    assert tensor_map.decode(bytes(cukern.tensor_map(x[:, :1], (1, 1, 2)))).sizes == (32, 1, 3)


def test_a_driver_that_has_tensor_maps(monkeypatch):
    """The arguments of cuTensorMapEncodeTiled, with a function in its place."""
    calls = []

    def driver(to, *args):
        calls.append((args[:3], *(list(a) for a in args[3:7]), args[7:]))
        assert to % 64 == 0
        ctypes.memmove(to, bytes(range(128)), 128)
        return len(calls) - 1

    monkeypatch.setattr(tensor_map, "_encoder", lambda: driver)
    found = tensor_map.encode(0, 4096, torch.bfloat16, (3, 8, 64), (512, 64, 1), (1, 8, 32), 64, 256, "nan")
    assert found == bytes(range(128))
    assert calls == [((9, 3, 4096), [64, 8, 3], [128, 1024], [32, 8, 1], [1, 1, 1], (0, 2, 3, 1))]
    with pytest.raises(RuntimeError, match="CUresult 1"):
        tensor_map.encode(1, 4096, torch.bfloat16, (3, 8, 64), (512, 64, 1), (1, 8, 32), 64, 256, "nan")
