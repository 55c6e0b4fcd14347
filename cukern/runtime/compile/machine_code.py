"""Kernels that are compiled already, PTX or cubins: their entries, parameters and variables."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from cukern.runtime.compile.forks import cached_property
from cukern.runtime.compile.signature import Param

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_START = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*\.version\b", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?")
_PARAM = re.compile(
    r"\s*\.param(?:\s+\.align\s+(?P<align>\d+))?\s+(?P<type>\.[busf](?P<bits>8|16|32|64))"
    r"(?:\s+\.\w+(?:\s+\d+)?)*\s+(?P<name>[\w$]+)\s*(?:\[\s*(?P<bytes>\d+)\s*\])?\s*"
)
_VARIABLE = re.compile(
    r"^\s*(?:\.(?:visible|weak|common)\s+)*\.(?:const|global)\b[^;={]*?\s(\w+)\s*[\[;=]", re.MULTILINE
)
_INTERNAL = re.compile(r"_GLOBAL__N_|_INTERNAL_")


@dataclass(frozen=True)
class MachineCode:
    """PTX or a cubin, in the place of a Source. `path` is made up for code that is no file."""

    path: Path
    code: bytes
    files: tuple[Path, ...] = ()  # it includes none

    @property
    def is_cubin(self) -> bool:
        return is_cubin(self.code)

    @cached_property
    def text(self) -> str:
        """PTX, or "" for a cubin."""
        return "" if self.is_cubin else self.code.decode()

    @property
    def target(self) -> str:
        found = re.search(r"\.target\s+(\w+)", self.text)
        return found[1] if found else "a cubin's architecture"

    @cached_property
    def kernels(self) -> list[str]:
        """The symbols of the entries."""
        found = symbols(self.code, _FUNCTION) if self.is_cubin else list(self._entries)
        return [name for name in found if "cukern_signature" not in name]

    @cached_property
    def _entries(self) -> dict[str, str]:
        return dict(_ENTRY.findall(_COMMENT.sub("", self.text)))

    def params(self, kernel: str) -> tuple[Param, ...]:
        """The parameters of an entry of PTX. Raises TypeError for one that cannot be passed."""
        given = self._entries[kernel].split(",") if self._entries[kernel].strip() else []
        matches = [_PARAM.fullmatch(one) for one in given]
        if None in matches:
            raise TypeError(
                f"{kernel}: the parameter {given[matches.index(None)].strip()!r} cannot be passed"
            )
        return tuple(_param(match) for match in matches if match)


def _param(match: re.Match[str]) -> Param:
    """A 64-bit integer may be an address. An array of bytes is a struct; of 8 bytes, perhaps an address."""
    name, kind = match["name"], match["type"]
    if match["bytes"]:
        size, align = int(match["bytes"]), int(match["align"] or 1)
        name, kind, pointer = f"{name}[{size}]", f".align {align} {kind}", size == align == 8
        return Param(name, kind, pointer, 0 if pointer else size, 0 if pointer else align, const=pointer)
    pointer = match["bits"] == "64" and kind != ".f64"
    return Param(name, kind, pointer, const=pointer)


def sized_params(layout: list[tuple[int, int]]) -> tuple[Param, ...]:
    """The parameters of a cubin. `layout`: the offset and the size of each, in bytes."""
    found = []
    for i, (offset, size) in enumerate(layout):
        if size in (1, 2, 4, 8) and offset % size == 0:
            found.append(Param(f"arg{i}", f".b{8 * size}", size == 8, const=size == 8))
        else:
            align = offset & -offset or 16
            found.append(Param(f"arg{i}[{size}]", f".align {align} .b8", False, size, align))
    return tuple(found)


def is_cubin(code: object) -> bool:
    return isinstance(code, bytes) and code.startswith(b"\x7fELF")


def is_compiled(code: object) -> bool:
    """Whether it is a cubin, or PTX as text or bytes."""
    if is_cubin(code):
        return True
    text = code.decode(errors="replace") if isinstance(code, bytes) else code
    return isinstance(text, str) and _START.match(text) is not None


# ---- symbols

_VARIABLES, _FUNCTION = 1, 2  # STT_OBJECT, STT_FUNC


def variable(kernel: str, code: bytes, name: str) -> str:
    """The symbol of a `__constant__` or `__device__` variable in PTX or a cubin. Raises ValueError."""
    known = (
        symbols(code, _VARIABLES) if is_cubin(code) else _VARIABLE.findall(_COMMENT.sub("", code.decode()))
    )
    same = [symbol for symbol in known if name in (symbol, source_name(symbol))]
    if len(same) > 1:
        raise ValueError(f"{kernel} has several variables {name!r}: write one of {', '.join(same)}")
    if not same:
        raise ValueError(
            f"{kernel} has no variable {name!r}; it has {', '.join(map(source_name, known)) or 'none'}. The "
            f"compiler drops variables that are not used"
        )
    return same[0]


def symbols(cubin: bytes, kind: int) -> list[str]:
    """The names in the symbol table of an ELF-64 file that are of this type."""
    (table,), (entry, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + entry * i) for i in range(count)]
    found = []
    for _, type_, _, _, start, size, link, *_ in sections:
        for at in range(start, start + size, 24) if type_ == 2 else ():  # SHT_SYMTAB
            name, info = struct.unpack_from("<IB", cubin, at)
            first = sections[link][4] + name
            text = cubin[first : cubin.index(b"\0", first)].decode()
            if info & 15 == kind and text and text[0] != "$":
                found.append(text)
    return found


def source_name(symbol: str) -> str:
    """The name in the source of a mangled symbol, without its template arguments: n::table for _ZN1n5tableE.
    A static variable of a function has its own name."""
    if symbol.startswith("_ZZ"):
        ends = re.finditer(r"E(\d+)(?=[A-Za-z_])", symbol)
        return next((symbol[m.end() :] for m in ends if m.end() + int(m[1]) == len(symbol)), symbol)
    start = re.match(r"_Z[NL]?(?=\d)", symbol)
    at, parts = start.end() if start else 0, list[str]()
    while length := re.compile(r"\d+").match(symbol, at) if start else None:
        at = length.end() + int(length[0])
        parts.append(symbol[length.end() : at])
    return "::".join(part for part in parts if not _INTERNAL.match(part)) or symbol
