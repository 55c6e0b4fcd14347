"""Prints the table of docs/guide/triton.md: python tests/sim/triton_table.py. Seconds: the second run."""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import test_sim_fla as fla
import test_sim_liger as liger
import test_sim_triton as tutorials
import torch
import triton
import triton_cases as cases
import triton_kernels as kernels

from cukern import sim

ARCHES = "sm_80", "sm_90", "sm_100"
HEAD = f"| kernel | {' | '.join(ARCHES)} |\n|---|{'---|' * len(ARCHES)}\n"


def tutorial(case, tolerance, arch):
    torch.manual_seed(0)
    with sim.triton(arch):
        cases.close(*case(kernels), tolerance)


def cell(run, *args):
    try:
        run(*args)
        start = time.perf_counter()
        run(*args)
    except sim.NotSimulated as error:
        return f"NotSimulated: `{'.'.join(str(error).split(', in ')[0].split('.')[:2])}`"
    except triton.CompilationError:
        return "Triton refuses"
    return f"right, {float(f'{time.perf_counter() - start:.1g}'):g} s"


def rows():
    """The name of each row, and what fills its cell for a target."""
    found = {what: (tutorial, case, tolerance) for _, what, case, tolerance in tutorials.RIGHT}
    found |= {f"Liger's `{name}`": (liger.forward_and_backward, name) for name in liger.CASES}
    return found | {f"FLA's `{name}`": (fla.forward_and_backward, name) for name in fla.CASES}


if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # see own_cache in triton_cases.py
    print(HEAD, end="")
    for name, (run, *args) in rows().items():
        print(f"| {name} | {' | '.join(cell(run, *args, arch) for arch in ARCHES)} |", flush=True)
