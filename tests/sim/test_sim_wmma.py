"""wmma.load, wmma.mma and wmma.store, through PTX and, where NVIDIA's headers are installed, through
nvcuda::wmma."""

import itertools

import pytest
import torch
from sim_kernels import simulate

from cukern import sim
from cukern.runtime.compile import compiler

# The names of a combination: shape, type of a and b, of c, registers of a, b, c, and their C++ types
F16, F16_SUM, BF16, TF32, S8, F64 = (
    ("m16n16k16", "f16", "f32", 8, 8, 8),
    ("m16n16k16", "f16", "f16", 8, 8, 4),
    ("m16n16k16", "bf16", "f32", 4, 4, 8),
    ("m16n16k8", "tf32", "f32", 4, 4, 8),
    ("m16n16k16", "s8", "s32", 2, 2, 8),
    ("m8n8k4", "f64", "f64", 1, 1, 2),
)
WIDE, TALL, WIDE_S8, TALL_BF16, WIDE_SUM = (
    ("m8n32k16", "f16", "f32", 8, 8, 8),
    ("m32n8k16", "f16", "f32", 8, 8, 8),
    ("m8n32k16", "s8", "s32", 1, 4, 8),
    ("m32n8k16", "bf16", "f32", 8, 2, 8),
    ("m8n32k16", "f16", "f16", 8, 8, 4),
)
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "f32": torch.float32,
    "s8": torch.int8,
    "s32": torch.int32,
}
DTYPES["f64"] = torch.float64
LETTERS = {"f32": ("f", "float"), "f64": ("d", "double")}


def asm(name: str, outputs: list[str], inputs: list[str], operands: str, c_type: str, ab_type: str) -> str:
    """An asm statement; an operand is "register array:type"."""

    def bound(expanded: list[str], sign: str) -> str:
        return ", ".join(
            f'"{sign}{LETTERS.get(x.split(":")[1], ("r", ""))[0]}"({x.split(":")[0]})' for x in expanded
        )

    return f'asm volatile("{name} {operands};" : {bound(outputs, "=")} : {bound(inputs, "")});'


def kernel(combination, a_layout="row", b_layout="col", d_layout="row", space="global", edit=""):
    """d = a b + c of one tile per warp. `n` is the leading dimension of all."""
    shape, ab, cd, na, nb, nc = combination
    declared = {x: LETTERS.get(t, ("r", "unsigned"))[1] for x, t in (("a", ab), ("b", ab), ("c", cd))}
    lists = {
        x: [f"f{x}[{i}]:{t}" for i in range(n)] for x, t, n in (("a", ab, na), ("b", ab, nb), ("c", cd, nc))
    }

    def braces(first: int, n: int) -> str:
        return "{" + ", ".join(f"%{first + i}" for i in range(n)) + "}"

    body = [f"{declared[x]} f{x}[{len(lists[x])}];" for x in "abc"]
    for x, layout, t in (("a", a_layout, ab), ("b", b_layout, ab), ("c", d_layout, cd)):
        name, n = f"wmma.load.{x}.sync.aligned.{layout}.{shape}.{space}.{t}", len(lists[x])
        name = name.replace(".generic", "")
        body.append(
            asm(name, lists[x], [f"p{x}:addr", "n:int"], f"{braces(0, n)}, [%{n}], %{n + 1}", cd, ab).replace(
                '"r"(p', '"l"(p'
            )
        )
    types = f"{cd}.{cd}" if ab == "f16" else f"{cd}.{ab}.{ab}.{cd}"
    start = list(itertools.accumulate((nc, na, nb), initial=nc))
    braced = ", ".join(
        (braces(0, nc), braces(start[0], na), braces(start[0] + na, nb), braces(start[0] + na + nb, nc))
    )
    inputs = lists["a"] + lists["b"] + lists["c"]
    rn = ".rn" if ab == "f64" else ""
    body.append(
        asm(
            f"wmma.mma.sync.aligned.{a_layout}.{b_layout}.{shape}{rn}.{types}",
            lists["c"],
            inputs,
            braced,
            cd,
            ab,
        )
    )
    body.append(edit)
    name = f"wmma.store.d.sync.aligned.{d_layout}.{shape}.{space}.{cd}".replace(".generic", "")
    body.append(
        asm(name, [], ["pd:addr", *lists["c"], "n:int"], f"[%0], {braces(1, nc)}, %{nc + 1}", cd, ab).replace(
            '"r"(p', '"l"(p'
        )
    )
    lines = "\n    ".join(body)
    return (
        f"\n__global__ void k(void* pd, const void* pa, const void* pb, const void* pc, int n) {{\n    "
        f"{lines}\n}}\n"
    )


def matrices(combination, ld=32):
    shape, ab, cd, *_ = combination
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    a, b, c = (torch.randint(-8, 9, size).double() for size in ((m, k), (k, n), (m, n)))
    return a, b, c, DTYPES[ab], DTYPES[cd]


def stored(x, layout, dtype, ld):
    """A matrix in memory with `ld` elements from line to line, and nothing behind its last element."""
    x = x if layout == "row" else x.T
    memory = torch.zeros(x.shape[0], ld, dtype=dtype)
    memory[:, : x.shape[1]] = x.to(dtype)
    return memory.view(-1)[: (x.shape[0] - 1) * ld + x.shape[1]].clone()


def aligned(x):
    """A copy at a multiple of 32 bytes."""
    whole = torch.zeros(x.numel() + 32, dtype=x.dtype)
    return whole[(-whole.data_ptr() % 32) // x.itemsize :][: x.numel()].copy_(x)


@pytest.mark.parametrize("space", ["global", "generic"])
@pytest.mark.parametrize("layouts", [("row", "col", "row"), ("col", "row", "col"), ("row", "row", "col")])
@pytest.mark.parametrize(
    "combination",
    [F16, F16_SUM, BF16, TF32, S8, F64, WIDE, TALL, WIDE_S8, TALL_BF16, WIDE_SUM],
    ids=lambda x: "-".join(map(str, x[:3])),
)
def test_a_product_of_tiles(combination, layouts, space):
    a, b, c, ab, cd = matrices(combination)
    memory = [
        aligned(stored(x, layout, dtype, 32))
        for x, layout, dtype in zip((a, b, c), layouts, (ab, ab, cd), strict=True)
    ]
    d = aligned(torch.zeros_like(memory[2]))
    simulate(kernel(combination, *layouts, space=space), d, *memory, 32)
    assert torch.equal(d, stored(a @ b + c, layouts[2], cd, 32))


def test_elements_of_an_accumulator_are_where_they_were():
    a, b, c, ab, cd = matrices(F16)
    memory = [aligned(stored(x, "row", dtype, 16)) for x, dtype in ((a, ab), (b, ab), (c, cd))]
    d = aligned(torch.zeros(256))
    simulate(
        kernel(F16, "row", "row", edit="for (int i = 0; i < 8; ++i) fc[i] = 2 * fc[i] + 1;"), d, *memory, 16
    )
    assert torch.equal(d.view(16, 16), (2 * (a @ b + c) + 1).float())


def run(text, ld=16, shift=0, short=0, names="abcd"):
    a, b, c, ab, cd = matrices(F16)
    memory = [aligned(stored(x, "row", dtype, ld)) for x, dtype in ((c, cd), (a, ab), (b, ab), (c, cd))]
    memory[1] = aligned(torch.cat((memory[1], memory[1])))[shift : 256 + shift - short]
    simulate(text, *memory, ld)


@pytest.mark.parametrize(
    "change, fault, words",
    [
        ({"shift": 8}, sim.Misaligned, "matrix whose address is not a multiple of 32 bytes"),
        ({"ld": 20}, sim.Misaligned, "matrix whose stride is not one of 16 bytes"),
        (
            {"short": 1},
            sim.OutOfBounds,
            "thread \\(31, 0, 0\\).*reads 16 bytes .* across the end of the tensor of argument 'pa'",
        ),
    ],
)
def test_wrong_operands(change, fault, words):
    text = kernel(F16, "row", "row")
    run(text)
    with pytest.raises(fault, match=words):
        run(text, **change)


def test_lanes_that_are_not_there_or_differ():
    text = kernel(F16, "row", "row")
    with pytest.raises(sim.BarrierFault, match="lane"):
        run(text.replace("asm volatile", "if (threadIdx.x < 31) asm volatile", 1))
    with pytest.raises(sim.BarrierFault, match="has another address than lane 0"):
        run(text.replace("{\n", "{ if (threadIdx.x == 5) pa = pb;\n", 1))


SHARED = """
__global__ void k(float* out, int filled) {
    __shared__ alignas(32) float tile[256];
    unsigned at = (unsigned)__cvta_generic_to_shared(tile);
    float v[8];
    for (int i = threadIdx.x; i < filled; i += 32) tile[i] = i;
    SYNC
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]),
                     "=f"(v[7]) : "r"(at));
    __syncwarp();
    asm volatile("wmma.store.d.sync.aligned.col.m16n16k16.shared.f32 [%0], {%1, %2, %3, %4, %5, %6, %7, "
                 "%8}, %9;"
                 :: "r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]),
                     "f"(v[7]), "r"(16) : "memory");
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32)
        if (i % 16 < filled / 16) out[i] = tile[i];
}
"""


def test_shared_memory_and_uninitialized_elements():
    """The unused rows of a tile in shared memory may be uninitialized."""
    out = torch.full((256,), -1.0)
    simulate(SHARED.replace("SYNC", "__syncwarp();"), out, 256)
    assert torch.equal(out.view(16, 16), torch.arange(256.0).view(16, 16).T)
    out.fill_(-1)
    simulate(SHARED.replace("SYNC", "__syncwarp();"), out, 160)
    assert (
        torch.equal(out.view(16, 16)[:, :10], torch.arange(160.0).view(10, 16).T)
        and (out.view(16, 16)[:, 10:] == -1).all()
    )
    with pytest.raises(sim.Uninitialized, match="bytes that nobody wrote"):
        simulate(SHARED.replace("SYNC", "__syncwarp();").replace("filled / 16)", "16)"), out, 160)
    with pytest.raises(sim.Race, match="__syncwarp"):
        simulate(SHARED.replace("SYNC", ""), out, 256)


def test_an_uninitialized_operand_of_a_product():
    """Column 12 of b reaches column 12 of d alone, which lanes 2, 6, ... have in registers 4 and 6."""
    edit = "if (threadIdx.x % 4 == LANE) fc[4] = fc[6] = 0;"
    for lane, fault in ((2, None), (1, sim.Uninitialized)):
        a, b, c, ab, cd = matrices(F16)
        d, *memory = [
            aligned(stored(x, layout, t, 16))
            for x, layout, t in ((c, "row", cd), (a, "row", ab), (b, "col", ab), (c, "row", cd))
        ]
        with sim.memory.scope() as scope:
            scope.add(memory[1], written=False)
            scope.mark_written(memory[1][: 12 * 16])
            scope.mark_written(memory[1][13 * 16 :])
            text = kernel(F16, edit=edit.replace("LANE", str(lane)))
            if fault is None:
                simulate(text, d, *memory, 16)
                assert (d.view(16, 16)[:, 12] == 0).all()
            else:
                with pytest.raises(
                    fault,
                    match=r"thread \(25, 0, 0\).*reads 16 bytes that nobody wrote, byte 400 .* for a "
                    r"wmma.store",
                ):
                    simulate(text, d, *memory, 16)


def test_what_is_not_there_is_named():
    with pytest.raises(
        sim.NotSimulated, match=r"wmma.load.a.sync.aligned.row.m8n8k32.global.s4, in k, .*:\d+"
    ):
        run(kernel(("m8n8k32", "s4", "s32", 1, 1, 2), "row", "col"))


WMMA = """
#include <mma.h>
using namespace nvcuda;
__global__ void k(float* c, const half* a, const half* b, int n) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.0f);
    int row = 16 * blockIdx.x, column = 16 * threadIdx.y;
    for (int i = 0; i < n; i += 16) {
        wmma::load_matrix_sync(fa, a + row * n + i, n);
        wmma::load_matrix_sync(fb, b + column * n + i, n);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    for (int i = 0; i < fc.num_elements; ++i) fc.x[i] *= 0.5f;
    wmma::store_matrix_sync(c + row * 32 + column, fc, 32, wmma::mem_row_major);
}
"""


def test_a_gemm_of_nvcuda():
    if not any(
        (folder / "crt/mma.h").is_file() for folder in (compiler.cuda_include(), *compiler._more_includes())
    ):
        pytest.skip("crt/mma.h is not installed: pip install nvidia-cuda-nvcc-cu12")
    a, b = torch.randint(-4, 5, (48, 64)).half(), torch.randint(-4, 5, (32, 64)).half()
    c = torch.full((48, 32), torch.nan)
    simulate(WMMA, c, a, b, 64, grid=3, block=(32, 2))
    assert torch.equal(c, (a.float() @ b.float().T) / 2)
