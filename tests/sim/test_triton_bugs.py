"""Bugs planted in Triton kernels: the fault names the kernel, the argument and the Python line."""

import difflib
import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from cukern import sim

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton_cases as cases
import triton_kernels as kernels
from triton_cases import own_cache  # noqa: F401

KERNELS = Path(cases.__file__).with_name("triton_kernels.py")
pytestmark = cases.MARKS

LOCKED = "    while tl.atomic_cas(lock, 0, 1) == 1:\n        pass\n"
WAITED = '        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:\n            pass\n'
SUM = "    tl.store(sums + pid, before + tl.sum(own, axis=0))\n    tl.debug_barrier()\n"
FLAG = '    tl.atomic_xchg(flags + pid, 1, sem="release")\n'

# The case, the fault, the text and what replaces it, what the message says, and a part of the line that is
# named, which otherwise is a line that the bug changed.
BUGS = {
    "no mask on a load": (
        cases.add,
        sim.OutOfBounds,
        "tl.load(x + i, mask=inside) + ",
        "tl.load(x + i) + ",
        "argument 'x'",
    ),
    "no mask on a store": (
        cases.add,
        sim.OutOfBounds,
        "mask=inside), mask=inside)",
        "mask=inside))",
        "writes .* argument 'out'",
    ),
    "one too many": (
        functools.partial(cases.add, n=1025),
        sim.OutOfBounds,
        "inside = i < n\n    tl.store",
        "inside = i <= n\n    tl.store",
        "4 bytes .* 0 bytes after",
        "+ tl.load(y + i",
    ),
    "a program too far": (
        cases.add,
        sim.OutOfBounds,
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside = i < n",
        "i = (tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)\n    inside = i < n + BLOCK",
        "block",
        "tl.store(out + i, tl.load(x + i",
    ),
    "int32 overflow of an offset": (
        cases.add,
        sim.OutOfBounds,
        "tl.load(x + i, mask=inside)",
        "tl.load(x + i * 1048576 // 1048576, mask=inside)",
        "argument '|no argument|before",
    ),
    "a wrong stride": (
        cases.softmax,
        sim.OutOfBounds,
        "tl.load(x + row * stride + i",
        "tl.load(x + row * (stride + 1) + i",
        "argument 'x'",
    ),
    "columns beyond the row": (
        cases.softmax,
        sim.OutOfBounds,
        "mask=i < cols, other",
        "mask=i < BLOCK, other",
        "argument 'x'",
    ),
    "no mask along k": (
        cases.matmul,
        sim.OutOfBounds,
        " & (p[None, :] < k - start)",
        "",
        "argument 'a'",
        "x = tl.load(at",
    ),
    "no mask on a tile's store": (
        cases.matmul,
        sim.Fault,
        "tl.store(at, total.to(c.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))",
        "tl.store(at, total.to(c.dtype.element_ty))",
        "argument 'c'",
    ),
    "the step of another dimension": (
        cases.matmul,
        sim.OutOfBounds,
        "at += BK * sak",
        "at += BK * sam",
        "argument 'a'",
        "x = tl.load(at",
    ),
    "a size of the next group": (
        cases.grouped,
        sim.OutOfBounds,
        "tl.load(sizes + 3 * g + 2)",
        "tl.load(sizes + 3 * g + 3)",
        "argument 'sizes'",
    ),
    "no mask on q": (
        cases.attention,
        sim.OutOfBounds,
        "d[None, :], mask=i[:, None] < T, other=0.0)",
        "d[None, :])",
        "argument 'q'",
    ),
    "no mask on k": (
        functools.partial(cases.attention, causal=False),
        sim.OutOfBounds,
        "d[:, None], mask=j[None, :] < T, other=0.0)",
        "d[:, None])",
        "argument 'k'",
    ),
    "no mask on the result": (
        cases.attention,
        sim.Fault,
        "(out.dtype.element_ty), mask=i[:, None] < T)",
        "(out.dtype.element_ty))",
        "argument 'out'",
    ),
    "heads that overlap": (
        cases.attention,
        sim.Race,
        "head = tl.program_id(1) * T * D",
        "head = tl.program_id(1) * T",
        "block",
        "tl.store(to,",
    ),
    "no mask on random numbers": (
        cases.dropout,
        sim.OutOfBounds,
        ", v / (1 - p), 0.0), mask=i < n)",
        ", v / (1 - p), 0.0))",
        "argument 'out'",
    ),
    "the next row's mean": (
        cases.layernorm,
        sim.OutOfBounds,
        "tl.store(mean + row, mu)",
        "tl.store(mean + row + 1, mu)",
        "argument 'mean'",
    ),
    "one mean for all rows": (
        cases.layernorm,
        sim.Race,
        "tl.store(mean + row, mu)",
        "tl.store(mean, mu)",
        "argument 'mean', (that|where) block",
    ),
    "an unlock that orders nothing": (
        cases.layernorm_bwd,
        sim.Race,
        "tl.atomic_xchg(lock, 0)",
        'tl.atomic_xchg(lock, 0, sem="relaxed")',
        "nothing orders two blocks",
        " + group * n + i",
    ),
    "sums that start with nothing": (
        cases.layernorm_bwd,
        sim.Uninitialized,
        "tl.load(filled) == 0",
        "tl.load(filled) == 5",
        "argument 'dw'",
        "part_w += tl.load(dw",
    ),
    "no mask on rows": (
        cases.layernorm_bwd,
        sim.OutOfBounds,
        "mask=(r[:, None] < rows) & (i[None, :] < n)",
        "mask=r[:, None] < rows",
        "argument 'part'",
    ),
    "a lock that nobody unlocks": (
        cases.layernorm_bwd,
        sim.StepLimit,
        "    tl.atomic_xchg(lock, 0)\n",
        "",
        "does its loop end",
        "while tl.atomic_cas",
    ),
    "a histogram without atomics": (
        cases.histogram,
        sim.Race,
        "tl.atomic_add(counts + bins, 1, mask=i < n)",
        "tl.store(counts + bins, tl.load(counts + bins, mask=i < n) + 1, mask=i < n)",
        "argument 'counts'",
    ),
    "a sum without atomics": (
        cases.total,
        sim.Race,
        "tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))",
        "tl.store(out, tl.load(out) + tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))",
        "argument 'out', that block",
    ),
    "a scan beyond the end": (
        cases.cumsum,
        sim.OutOfBounds,
        "tl.load(x + i, mask=i < n, other=0.0), axis=0), mask=i < n)",
        "tl.load(x + i), axis=0), mask=i < n)",
        "argument 'x'",
    ),
    "a row too many": (
        cases.softmax,
        sim.OutOfBounds,
        "tl.program_id(0), rows, tl",
        "tl.program_id(0), rows + 1, tl",
        "argument 'x'",
        "tl.load(x + row * stride + i",
    ),
    "swapped strides": (
        cases.matmul,
        sim.Race,
        "c + i[:, None] * scm + j[None, :] * scn",
        "c + i[:, None] * scn + j[None, :] * scm",
        "argument 'c'",
        "tl.store(at, total.to(c",
    ),
    "the stride of another matrix": (
        cases.persistent,
        sim.OutOfBounds,
        "            c + i[:, None] * n",
        "            c + i[:, None] * m",
        "argument 'c'",
        "tl.store(",
    ),
    "no mask before random numbers": (
        cases.dropout,
        sim.OutOfBounds,
        "tl.load(x + i, mask=i < n)\n    tl.store(out + i, tl.where",
        "tl.load(x + i)\n    tl.store(out + i, tl.where",
        "argument 'x'",
    ),
    "no mask on weights": (
        cases.layernorm,
        sim.OutOfBounds,
        "tl.load(w + i, mask=i < n), tl.load(b",
        "tl.load(w + i), tl.load(b",
        "argument 'w'",
    ),
    "one row for all programs": (
        cases.softmax,
        sim.Race,
        "tl.store(out + row * stride + i, e",
        "tl.store(out + i, e",
        "argument 'out'",
    ),
    "tiles of other programs": (
        cases.persistent,
        sim.Race,
        "tile % tiles_n * BN + tl.arange",
        "tile // tiles_n * BN + tl.arange",
        "argument 'c'",
        "tl.store(",
    ),
    "tiles of the other program": (
        cases.grouped,
        sim.Race,
        "i, j = own // tiles_n * BM",
        "i, j = own % tiles_n * BM",
        "where block",
        "tl.store(",
    ),
    "the lock of another group": (
        cases.layernorm_bwd,
        sim.Race,
        "lock += group\n",
        "lock += row // GROUPS\n",
        "argument 'd[wb]', (that|where) block",
        " + group * n + i",
    ),
    "no lock": (cases.layernorm_bwd, sim.Race, LOCKED, "", "nothing orders two blocks", "(filled"),
    "a column too many": (
        cases.layernorm,
        sim.Fault,
        "* r * scale + shift, mask=i < n)",
        "* r * scale + shift, mask=i <= n)",
        "argument 'y'",
    ),
    "the mean of another row": (
        cases.layernorm_bwd,
        sim.OutOfBounds,
        "tl.load(mean + row)",
        "tl.load(mean + row + 1)",
        "argument 'mean'",
    ),
    "no mask on a gradient": (
        cases.layernorm_bwd,
        sim.Fault,
        "        mask=inside,\n    )\n    group",
        "    )\n    group",
        "argument 'dx'",
        "tl.store(",
    ),
    "a group that nobody sums": (
        cases.layernorm_bwd,
        sim.Uninitialized,
        "group = row % GROUPS",
        "group = row % (GROUPS - 1)",
        "argument 'part'",
        "sums += tl.load(at,",
    ),
    "a sum too many": (
        cases.layernorm_bwd,
        sim.OutOfBounds,
        "tl.sum(sums, axis=0), mask=i < n)",
        "tl.sum(sums, axis=0), mask=i <= n)",
        "argument 'total'",
    ),
    "the stride of a padded head": (
        cases.attention,
        sim.OutOfBounds,
        "j[None, :] * D + d[:, None]",
        "j[None, :] * (D + 1) + d[:, None]",
        "argument 'k'",
    ),
    "a descriptor with too many rows": (
        cases.device_descriptor,
        sim.OutOfBounds,
        "descriptor(x, shape=[m, n]",
        "descriptor(x, shape=[m + 4, n]",
        "argument 'x'",
        "dx.load([i, j])",
    ),
    "a descriptor with a wrong stride": (
        cases.device_descriptor,
        sim.OutOfBounds,
        "descriptor(out, shape=[m, n], strides=[n, 1]",
        "descriptor(out, shape=[m, n], strides=[n + 4, 1]",
        "argument 'out'",
        "do.store([i, j]",
    ),
    "a bin too far": (
        cases.histogram,
        sim.OutOfBounds,
        "tl.load(x + i, mask=i < n, other=0)\n",
        "tl.load(x + i, mask=i < n, other=0) + 1\n",
        "argument 'counts'",
        "tl.atomic_add(counts + bins",
    ),
    "a place of each program": (
        cases.total,
        sim.OutOfBounds,
        "tl.atomic_add(out, tl.sum",
        "tl.atomic_add(out + tl.program_id(0), tl.sum",
        "argument 'out'",
    ),
    "a term too many": (
        cases.total,
        sim.OutOfBounds,
        "tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))",
        "tl.sum(tl.load(x + i, mask=i <= n, other=0.0), axis=0))",
        "argument 'x'",
    ),
    "a shifted scan": (
        cases.cumsum,
        sim.OutOfBounds,
        "tl.store(out + i, tl.cumsum",
        "tl.store(out + i + 1, tl.cumsum",
        "argument 'out'",
    ),
    "a padded stride": (
        functools.partial(cases.dot, dtype=torch.float16),
        sim.OutOfBounds,
        "tl.load(a + i[:, None] * K",
        "tl.load(a + i[:, None] * (K + 1)",
        "argument 'a'",
    ),
    "int32 overflow of a row's offset": (
        cases.first_of_rows,
        sim.OutOfBounds,
        "tl.program_id(0).to(tl.int64), tl.arange",
        "tl.program_id(0), tl.arange",
        "before|no argument",
        "tl.load(x + row * pitch",
    ),
    "no barrier between threads": (
        cases.reverse,
        sim.Race,
        "    tl.debug_barrier()\n    tl.store(out + i, tl.load(scratch",
        "    tl.store(out + i, tl.load(scratch",
        "argument 'scratch'",
        "tl.load(scratch",
    ),
    "a wrong reduction axis of an index": (
        cases.largest,
        sim.OutOfBounds,
        "tl.argmax(v, axis=1)",
        "tl.argmax(v, axis=0)",
        "argument 'table'",
        "tl.load(table + best",
    ),
    "a flag before its value": (
        cases.prefix_sum,
        sim.Fault,
        SUM + FLAG,
        FLAG + SUM,
        "argument 'sums'",
        "(sums + pid",
    ),
    "no wait for another program": (
        cases.prefix_sum,
        sim.Fault,
        WAITED,
        "",
        "argument 'sums'",
        "(sums + pid",
    ),
    "a wait that orders nothing": (
        cases.prefix_sum,
        sim.Race,
        '0, sem="acquire")',
        '0, sem="relaxed")',
        "argument 'sums'",
        "(sums + pid",
    ),
    "a copy that nobody waits for": (
        cases.gluon_copy,
        sim.Fault,
        "    async_copy.wait_group(0)\n",
        "",
        "shared",
        "tile.load(layout)",
    ),
}


def planted(folder, old, new):
    """The module of kernels with `old` replaced, from a file of its own, its path, and the changed lines."""
    text = KERNELS.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {KERNELS.name}"
    path = folder / "planted.py"
    path.write_text(text.replace(old, new))
    before, after = text.split("\n"), path.read_text().split("\n")
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = {
        line for tag, _, _, start, end in edits if tag != "equal" for line in range(start + 1, end + 1)
    }
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path, changed


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named_with_its_line(tmp_path, bug):
    case, fault, old, new, says, *line = BUGS[bug]
    module, path, changed = planted(tmp_path, old, new)
    steps = 5_000 if fault is sim.StepLimit else None
    with sim.triton("sm_80"), sim.checks(steps=steps), pytest.raises(fault, match=says) as caught:
        case(module)
    named, number = re.match(r"(.*?):(\d+)", caught.value.where.location).groups()
    assert named == str(path)
    text = path.read_text().split("\n")[int(number) - 1]
    assert line[0] in text if line else int(number) in changed, caught.value


def test_a_grid_that_is_too_small_leaves_a_result_unwritten():
    with (
        sim.triton(),
        pytest.raises(sim.Uninitialized, match=r"argument 'x'; the value is used for") as caught,
    ):
        x, y, out = torch.randn(1000), torch.empty(1000), torch.empty(1000)
        kernels.add[(3,)](x, x, y, 1000, BLOCK=256)
        kernels.add[(4,)](y, x, out, 1000, BLOCK=256)
    text = KERNELS.read_text().split("\n")
    assert "tl.store(out + i" in text[int(re.search(r":(\d+)", caught.value.where.location)[1]) - 1]


@pytest.mark.parametrize(
    "case, old, new",
    [
        (functools.partial(cases.attention, columns=64), "tl.sum(p, axis=1)", "tl.sum(p, axis=0)"),
        (cases.softmax, 'mask=i < cols, other=-float("inf")', "mask=i < cols, other=0.0"),
    ],
    ids=["a wrong reduction axis", "a wrong value outside of the mask"],
)
def test_only_wrong_values_need_a_reference(tmp_path, case, old, new):
    module, _, _ = planted(tmp_path, old, new)
    torch.manual_seed(0)
    with sim.triton("sm_80"):
        got, want = case(module)
        with pytest.raises(AssertionError):
            cases.close(got, want, 2e-3)
        right, want = case(kernels)
    cases.close(right, want, 2e-3)
