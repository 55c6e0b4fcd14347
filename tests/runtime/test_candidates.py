"""`--kernel` and `--without`: every candidate of a plan can be forced and excluded. Plans are made for an
H200; nothing runs."""

import contextlib

import pytest
import torch

import cukern
from cukern.bench import environment
from cukern.runtime.device import KNOWN, restricted
from cukern.runtime.registry import CASES
from cukern.runtime.warmup import planned

F, B, T = torch.float32, torch.bfloat16, "tf32"
# bfloat16 by a version; float32 by v6 and v7 as 3xTF32
V6, V7, THREE, THREE7 = "v6", "v7", "3xtf32", "3xtf32 by v7"
CHOSEN = {  # candidate: a shape and a dtype for which the default plan chooses it
    "kron_linear tile": ((1024, 32, 32, 32), B),
    "kron_linear chain_wgmma": ((1024, 64, 64), B),
    "kron_linear split_wgmma": ((1024, 64, 64), F),
    "kron_linear split_wgmma_one": ((16, 64, 64, 64), F),
    "kron_linear few_rows": ((32, 128, 128), F),
    "kron_linear cublas": ((2048, 160, 160), B),
    "matmul Tile128x128": ((4096, 4096, 4096), F),
    "matmul Tile64x64": ((256, 256, 256), F),
    "matmul Tile128x32": ((4096, 16, 4096), F),
    "matmul Tile32x128": ((16, 4096, 4096), F),
    "matmul Direct1k": ((1, 768, 768), V6),
    "matmul Direct4k": ((3, 520, 1201), V6),
    "matmul Direct1": ((1, 768, 768), V6),
    "matmul Direct4": ((4, 2304, 768), F),
    "matmul Mma128x256": ((4096, 4096, 4096), V6),
    "matmul Mma128x128": ((3072, 3072, 3072), V6),
    "matmul Mma64x64": ((256, 256, 256), V6),
    "matmul Mma16x128": ((16, 4096, 4096), V6),
    "matmul MmaSplit128x128": ((4096, 4096, 4096), THREE),
    "matmul MmaSplit64x64": ((256, 256, 256), THREE),
    "matmul Wgmma128x256": ((8192, 8192, 8192), V7),
    "matmul Wgmma128x192": ((4096, 768, 3072), V7),
    "matmul Wgmma128x128": ((512, 2304, 768), V7),
    "matmul Wgmma128x64": ((256, 256, 256), V7),
    "matmul Wgmma128x64k2": ((512, 768, 3072), V7),
    "matmul WgmmaSplit128x128": ((4096, 4096, 4096), THREE7),
}


def chosen(case, dims, dtype, kernel="", without=()):
    """The kernels of forward and backward."""
    version = {V6: V6, V7: V7, THREE: V6, THREE7: V7}.get(dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment.float32_products(dtype is T))
        stack.enter_context(restricted(kernel, without))
        if version:
            stack.enter_context(cukern.use(case.name, version))
        return set(
            planned(
                case, [dims], ({V6: B, V7: B, T: F, THREE: F, THREE7: F}.get(dtype, dtype),), KNOWN["h200"]
            )
        )


@pytest.mark.parametrize("name", CHOSEN)
def test_a_candidate_is_excluded_and_forced(name):
    case, candidate = CASES[name.split()[0]], name.split()[1]
    usual = chosen(case, *CHOSEN[name])
    others = chosen(case, *CHOSEN[name], without=[candidate])
    assert others - usual, "other kernels take its place"
    assert chosen(case, *CHOSEN[name], kernel=candidate) != others
    assert chosen(case, *CHOSEN[name]) == usual, "the restriction ends with its block"


@pytest.mark.parametrize("candidate", ("Mma64x64", "Wgmma128x256", "Wgmma128x128"))
def test_a_forced_tile_of_v7_is_used(candidate):
    """Even if the cost models of v6 and v7 prefer another tile."""
    for dims in ((4096, 4096, 4096), (256, 512, 512)):
        tiles = {
            name.split(", ")[-1]
            for name in chosen(CASES["matmul"], dims, V7, kernel=candidate)
            if "reduce" not in name
        }
        assert tiles == {f"{candidate}>"}


def test_every_candidate_is_tested():
    assert {
        f"{case.name} {c}" for case in CASES.values() for c in case.candidates if case.name == case.op.stem
    } == set(CHOSEN)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.candidates])
def test_every_shape_has_a_plan_without_any_candidate(name):
    """If the only candidate that fits is excluded, the kernels for any shape are used, or cuBLAS for
    kron_linear."""
    for candidate in CASES[name].candidates:
        for dims in CASES[name].check_dims[:3]:
            for kernels in (
                chosen(CASES[name], dims, F, without=[candidate]),
                chosen(CASES[name], dims, F, kernel=candidate),
            ):
                assert kernels or name.startswith("kron_linear")
