"""Where the .cu files are, what they include, and what they say of their kernels."""

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")', re.DOTALL)
_HOST_ONLY = re.compile(r"<<<|\b(?:torch|at|c10|pybind11)::|\bPYBIND11_MODULE\b|\bTORCH_LIBRARY")
_HOST_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?:torch|ATen|c10|cuda_runtime)[^>]*>", re.M)


@functools.cache
def kernels_dir() -> Path:
    """The folder of the shipped .cu files: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "kernels_cu"
    return inside if inside.is_dir() else package.parent / "kernels_cu"


@dataclass(frozen=True)
class Source:
    """One program for NVRTC. `path` is what the compiler's messages name; a source given as text has a made-up one."""

    path: Path
    text: str

    @staticmethod
    def read(path: str | Path) -> "Source":
        path = Path(path).resolve()
        return Source(path, without_host_code(path.read_text()))

    @staticmethod
    def from_text(text: str) -> "Source":
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return Source(Path(f"<cukern.compile {digest}>"), without_host_code(text))

    def digest(self) -> str:
        """SHA-256 of the text and of every file of ours that its #include lines reach, by relative name and content."""
        sha = hashlib.sha256(self.text.encode())
        for name, content in sorted(self._closure().items()):
            sha.update(f"\0{name}\0".encode() + content)
        return sha.hexdigest()

    def _closure(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        todo = [(self.path.parent, self.text.encode())]
        while todo:
            folder, text = todo.pop()
            for include in (m.decode() for m in _INCLUDE.findall(text)):
                places = (place / include for place in (folder, self.path.parent, kernels_dir()))
                path = next((p.resolve() for p in places if p.is_file()), None)
                if path and (name := self._name(path)) not in found:
                    found[name] = path.read_bytes()
                    todo.append((path.parent, found[name]))
        return found

    def _name(self, path: Path) -> str:
        """A name that is the same on two machines that hold the same files."""
        shipped = path.is_relative_to(kernels_dir())
        return os.path.relpath(path, kernels_dir() if shipped else self.path.parent)

    @functools.cached_property
    def code(self) -> str:
        """The text without comments, of the same number of lines."""
        return without_comments(self.text)

    @functools.cached_property
    def included(self) -> str:
        """What its #include lines reach of ours, without comments."""
        return "\n".join(without_comments(content.decode()) for content in self._closure().values())


def without_comments(text: str) -> str:
    """Replace each comment by its newlines, so that line numbers stay."""
    return _COMMENT.sub(lambda m: m[1] or "\n" * m[0].count("\n") or " ", text)


def without_host_code(text: str) -> str:
    """Blank out what only a host compiler can read: torch's headers, and functions that use torch:: or <<<...>>>.

    So the source of a `torch.utils.cpp_extension.load_inline` call compiles as it stands. Line numbers stay.
    """
    if not _HOST_ONLY.search(text):
        return _HOST_INCLUDE.sub("", text)
    text = without_comments(_HOST_INCLUDE.sub("", text))
    pieces, start, depth = [], 0, 0
    for match in re.finditer(r"[{};]", text):
        depth += {"{": 1, "}": -1, ";": 0}[match[0]]
        if depth == 0:
            pieces.append(text[start : match.end()])
            start = match.end()
    pieces.append(text[start:])
    return "".join(_directives(p) if _HOST_ONLY.search(p) else p for p in pieces)


def _directives(text: str) -> str:
    return "\n".join(line if line.lstrip().startswith("#") else "" for line in text.split("\n"))
