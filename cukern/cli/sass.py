"""`cukern sass`: the machine code of an op's kernels, by kind of instruction and by source line, without a
GPU."""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

import cukern
from cukern.cli import common, own_file
from cukern.cli.common import console, say

if TYPE_CHECKING:
    from cukern.runtime.compile.compiler import Cubin
    from cukern.runtime.launch.kernel import Kernel

_NOT_INSTALLED = """\
nvdisasm is not on the PATH, in $CUDA_HOME/bin or in a wheel. Run: pip install "cukern[sass]". It also
comes with the CUDA toolkit, with Triton, and alone with conda install -c nvidia cuda-nvdisasm"""

# Kinds of instructions by the first part of their names; the first that fits counts.
KINDS = {
    "tensor cores": r"[HDIQ]?G?MMA",
    "global memory": r"LDG|STG|LD$|ST$|LDGSTS|RED|ATOM(?!S)|UBLK|UTMA",
    "shared memory": r"LDS|STS|LDSM|STSM|ATOMS",
    "local memory (spills)": r"LDL|STL",
    "special functions": r"MUFU",
    "float32": r"F(?:ADD|MUL|FMA|MNMX|SET|SETP|SEL|CHK|SWZADD)",
    "float64": r"D(?:ADD|MUL|FMA|SETP)",
    "16-bit floats": r"H(?:ADD|MUL|FMA|SET|MNMX)",
    "conversions": r"F2|I2|FRND",
    "integers and addresses": r"U?(?:IMAD|IADD|LEA|ISETP|IMNMX|VIADD|VIMNMX|SHF|LOP|PRMT|IABS|POPC|FLO|SEL|"
    r"PLOP|BMSK|SGXT|ISCADD)",
    "barriers and shuffles": r"BAR|SHFL|VOTE|WARPSYNC|SYNCS|MEMBAR|FENCE|DEPBAR|LDGDEPBAR|REDUX|MATCH|"
    r"UCGABAR",
    "branches": r"BRA|EXIT|BSSY|BSYNC|CALL|RET|BRX|BREAK|NANOSLEEP|YIELD|BPT",
    "moves and constants": r"U?MOV|CS2|S2|LDC|ULDC|R2|P2R|UR2",
}
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([\w.]*)")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')


def sass(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op, or a file: my_op.py, my.cu.")],
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_90a", help="The architecture; by default this GPU's, else sm_90a."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only kernels with this in their name, such as v2_bwd; of a .cu file 'scale<float>'.",
        ),
    ] = None,
    lines: Annotated[int, typer.Option(min=0, help="The source lines with the most instructions.")] = 8,
    text: Annotated[
        bool, typer.Option("--text", help="Print the machine code itself, between its source lines.")
    ] = False,
) -> None:
    """Count the machine instructions of OP's kernels by kind and by source line. Needs nvdisasm, and no
    GPU."""
    from cukern.cli.compile import capability_of, targets

    program, (target, _) = disassembler(), targets(arch, None)[-1]
    for name, one in _kernels(op, kernel, capability_of(target)).items():
        _show(name, one, one.compile(target), program, lines, text)


def _kernels(op: str, kernel: str | None, capability: int) -> "dict[str, Kernel]":
    if own_file.is_source(op):
        return own_file.kernels_of(op, [kernel] if kernel else [])
    known = common.find_case(op).op.kernels(capability)
    found = {name: one for name, one in known.items() if kernel is None or kernel in name}
    if not found:
        raise ValueError(
            f"{op} has no kernel with {kernel!r} in its name; it has {', '.join(known) or 'none'}"
        )
    return found


def disassembler() -> str:
    """The path of nvdisasm. Raises SetupError."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for wheel, place in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        spec = find_spec(wheel)
        roots = spec.submodule_search_locations or () if spec else ()
        folders += [folder for root in roots for folder in Path(root).glob(place)]
    program = shutil.which("nvdisasm") or next(
        (str(f / "nvdisasm") for f in folders if (f / "nvdisasm").is_file()), None
    )
    if program is None:
        raise cukern.SetupError(_NOT_INSTALLED)
    return program


def disassembled(program: str, code: bytes) -> str:
    """The machine code of a cubin as text, with its source lines. Raises SetupError for an nvdisasm that is
    too old."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run([program, "-c", "-g", file.name], capture_output=True, text=True)
    if done.returncode:
        raise cukern.SetupError(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def counted(listing: str) -> tuple[Counter[str], Counter[tuple[str, int]]]:
    """The instructions of a listing by kind and by (file, line). NOP, which only fills, does not count."""
    kinds, places, here = Counter[str](), Counter[tuple[str, int]](), ("", 0)
    for row in listing.splitlines():
        place, instruction = _LINE.search(row), _INSTRUCTION.match(row)
        if place:
            here = (Path(place[1]).name, int(place[2]))
        elif instruction and instruction[1] != "NOP":
            kinds[
                next((kind for kind, names in KINDS.items() if re.match(names, instruction[1])), "other")
            ] += 1
            places[here] += 1
    return kinds, places


def _show(name: str, kernel: "Kernel", cubin: "Cubin", program: str, most: int, text: bool) -> None:
    listing = disassembled(program, cubin.code)
    if text:
        return say(listing)
    kinds, places = counted(listing)
    total, r = sum(kinds.values()), cubin.report
    say(f"{name} for {cubin.arch}", "bold")
    spills = (
        f"spills {r.spill_stores} + {r.spill_loads} bytes" if r.spill_stores or r.spill_loads else "no spills"
    )
    say(
        f"  {total} instructions, {r.registers} registers, {spills}, {r.shared} bytes of static shared memory"
    )
    shown = common.table("", "kind", "instructions", "%")
    for kind, count in kinds.most_common():
        shown.add_row(kind, str(count), f"{100 * count / total:.0f}")
    console.print(shown)
    sources = {**kernel.source.program.files, kernel.source.path: kernel.source.text}
    rows = {
        (path.name, i): row.strip()
        for path, text in sources.items()
        for i, row in enumerate(text.splitlines(), 1)
    }
    shown = common.table("", "source line", "instructions", "text")
    shown.columns[2].justify, shown.columns[2].no_wrap = "left", False  # it gets the rest of the width
    for (file, line), count in [pair for pair in places.most_common() if rows.get(pair[0])][:most]:
        shown.add_row(f"{file}:{line}", str(count), Text(rows[file, line], no_wrap=True, overflow="ellipsis"))
    if shown.rows:
        console.print(shown)
