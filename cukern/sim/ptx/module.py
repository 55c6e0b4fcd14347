"""PTX as data: the variables of a module, and a kernel's parameters, registers, labels and instructions.
parser.py creates it."""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16}
WIDTHS |= {t: 32 for t in ("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32")} | {
    t: 64 for t in ("b64", "u64", "s64", "f64", "f32x2")
}
WIDTHS |= {"b128": 128}


class PtxError(ValueError):
    """Text that the parser does not accept; the message has the line."""


class Register(NamedTuple):
    number: int
    width: int  # 1 for a predicate, else 16, 32, 64 or 128 bits
    negated: bool = False


class Immediate(NamedTuple):
    text: str


class Symbol(NamedTuple):
    """A variable, label or function by its name, or a special register such as %tid.x."""

    name: str
    offset: int = 0


class Address(NamedTuple):
    base: Register | Symbol | None
    offset: int
    coordinates: tuple = ()  # of a tensor map's box


class Vector(NamedTuple):
    """Operands in braces or parentheses, or the pair `p|q`."""

    items: tuple


Operand = Register | Immediate | Symbol | Address | Vector


class Line(NamedTuple):
    """A .loc: a line of a file, and the line where its function was inlined."""

    file: int
    line: int
    column: int
    caller: "Line | None" = None


class Instruction(NamedTuple):
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: Line | None


@dataclass
class Variable:
    name: str
    space: str  # global, const, shared, local, param
    size: int  # in bytes; 0 for dynamic shared memory
    align: int
    data: bytes = b""
    # offsets in `data` that hold the address of a variable
    pointers: list[tuple[int, Symbol]] = field(default_factory=list)


@dataclass
class Kernel:
    name: str
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)  # of a function
    variables: list[Variable] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # of the registers
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)  # .branchtargets
    max_threads: int = 1024
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks of a cluster along each axis
    explicit_cluster: bool = False
    start: Line | None = None

    def is_parameter(self, name: str) -> bool:
        return any(p.name == name for p in self.params)


@dataclass
class Module:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    functions: dict[str, Kernel] = field(default_factory=dict)  # that are not inlined
    declared: list[str] = field(default_factory=list)  # functions without a body, too
    variables: list[Variable] = field(default_factory=list)
    files: dict[int, str] = field(default_factory=dict)

    def location(self, line: Line | None) -> str:
        """file:line, then the line of a header of CUDA or common/ptx/ that it called, and the lines of its
        calls if it was inlined."""
        if line is None:
            return "a line that is not known"
        places = [self.place(line)]
        while line := line.caller:
            places.append(self.place(line))
        own = next((i for i, place in enumerate(places) if not _in_library(place)), 0)
        notes = [f"in {place.rpartition('/')[2]}" for place in places[:own][:1]]
        last = places[own].rpartition(":")[0]
        callers = []
        for place in places[own + 1 :]:
            callers.append(place.rpartition(":")[2] if place.rpartition(":")[0] == last else place)
            last = place.rpartition(":")[0]
        notes += [f"inlined at {', '.join(callers)}"] if callers else []
        return f"{places[own]} ({'; '.join(notes)})" if notes else places[own]

    def place(self, line: Line) -> str:
        """file:line, without the calls."""
        path = self.files.get(line.file, "?")
        # a source given as text has a name in <>; NVRTC prepends the current folder
        made_up = path.rfind("<")
        return f"{path[made_up:] if made_up >= 0 and path.endswith('>') else path}:{line.line}"


def _in_library(place: str) -> bool:
    """True for a header of a CUDA toolkit, of a wheel of NVIDIA's, of NVRTC itself, or of common/ptx/."""
    folder, _, file = place.rpartition("/")
    if folder.endswith("/common/ptx") or file.startswith("__nv_nvrtc_builtin"):
        return True
    return "/include" in folder and ("/nvidia/" in folder or "/cuda" in folder.partition("/include")[0])


def immediate_value(immediate: Immediate) -> int | float:
    """The value of a literal; for 0f and 0d literals, their bits."""
    text = immediate.text.rstrip("U")
    sign, digits = (-1, text[1:]) if text[0] == "-" else (1, text)
    prefix = digits[:2].lower()
    if prefix in ("0f", "0d"):
        return sign * int(digits[2:], 16)
    if prefix == "0x":
        return sign * int(digits, 16)
    if "." in digits:
        return sign * float(digits)
    return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)


def immediate_bits(immediate: Immediate, type_: str) -> int:
    """A literal as the bits of a register or variable of that type."""
    value = immediate_value(immediate)
    width = WIDTHS[type_]
    prefix = immediate.text.lstrip("-")[:2].lower()
    if prefix == "0f" and type_ == "f64":
        value = struct.unpack("<f", struct.pack("<I", value))[0]
    elif prefix == "0d" and type_ == "f32":
        value = struct.unpack("<d", struct.pack("<Q", value))[0]
    if isinstance(value, float):
        code, whole = {16: ("e", "H"), 32: ("f", "I"), 64: ("d", "Q")}[width]
        value = struct.unpack("<" + whole, struct.pack("<" + code, value))[0]
    return int(value) & ((1 << max(width, 1)) - 1)
