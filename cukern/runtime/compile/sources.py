"""Finds .cu files, the headers that they include, and their kernels, and prepares the texts for NVRTC.

Each file is read once, hashed, and passed to NVRTC as text, so the hash in the cache key always matches what
was compiled.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukern.runtime.compile.forks import cached_property

# prefix of all file names passed to NVRTC; not a folder, so NVRTC cannot open files itself
NOWHERE = "/dev/null"

# Files of kernels_cu/std for the headers of the host, which NVRTC lacks. Each <cname> is also <name.h>.
_STANDARD = {
    "cstdint": "integers.h",
    "cinttypes": "integers.h",
    "cstddef": "integers.h",
    "sys/types": "integers.h",
    "climits": "limits.h",
}
_STANDARD |= {
    "cfloat": "floats.h",
    "cmath": "math.h",
    "cassert": "limits.h",
    "ctime": "host.h",
    "cstdarg": "host.h",
    "unistd": "host.h",
}
_STANDARD |= dict.fromkeys(
    ("limits", "type_traits", "utility", "algorithm", "array", "functional", "numeric"), "helpers.h"
)
_HOST = re.findall(
    r"\S+",
    """cctype cerrno cfenv clocale complex csetjmp csignal cstdio cstdlib cstring atomic bitset chrono
condition_variable deque exception filesystem fstream future initializer_list iomanip ios iosfwd
iostream istream iterator list map memory mutex new optional ostream queue random ratio regex set
sstream stack stdexcept streambuf string string_view system_error thread tuple typeindex typeinfo
unordered_map unordered_set valarray variant vector""",
)
_STANDARD |= dict.fromkeys(_HOST, "host.h")
_STANDARD |= {
    f"{name[name.startswith('c') :]}.h": file
    for name, file in _STANDARD.items()
    if name[0] == "c" or "s/" in name or name == "unistd"
}
_STANDARD |= dict.fromkeys(
    ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_profiler_api.h", "device_launch_parameters.h"), "math.h"
)
_STANDARD["cub/cub.cuh"] = "cub.h"
_LIBRARY = re.compile(
    r"(?:torch|ATen|c10|pybind11)/.*|sys/\w+\.h|(?:helper_\w+|cublas\w*|curand|cudnn\w*|cusparse|cusolver\w*|"
    r"cufft|nccl|mpi|nvToolsExt|nvtx3/.*)(?:\.h)?"
)
_CCCL = re.compile(r"<(?:cuda|cub|thrust|cute|cutlass|nv)/|<cooperative_groups")

# An unterminated comment or literal extends to the end of its line or file, so that the search is linear in
# the length of the text.
_LINE = r"[^\n]*(?:(?<=\\)\n[^\n]*)*"
_COMMENT_OR_LITERAL = re.compile(
    rf"""["'/](?:(?P<comment>(?<=/)(?:/{_LINE}|\*.*?(?:\*/|\Z)))"""
    r'|(?P<raw>(?:(?<=\bR")|(?<=\b[uUL]R")|(?<=\bu8R"))(?P<mark>[^()\\\s]{0,16})\(.*?(?:\)(?P=mark)"|\Z))'
    r'|(?<=")[^"\\\n]*(?:\\.[^"\\\n]*)*"?' + r"|(?<=')(?:\\.[^'\n]{0,8}|[^'\\\n])')",
    re.DOTALL,
)
_SPLICE = r"(?:\\\n)*"  # line continuation
_BLANK = r"(?:[ \t\f\v]|\\\n)*"
_INCLUDE = re.compile(
    rf"^(?<!\\\n){_BLANK}(?P<include>(?:#|"
    rf"%{_SPLICE}:){_BLANK}{_SPLICE.join('include')}(?P<next>{_SPLICE}{_SPLICE.join('_next')})?{_BLANK}"
    r'(?:"(?P<quoted>(?:[^"\n\\]|\\\n|\\)+)"|<(?P<angled>(?:[^>\n\\]|\\\n|\\)+)>))',
    re.MULTILINE,
)
DIRECTIVE = re.compile(rf"^(?<!\\\n){_BLANK}(?:#|%{_SPLICE}:){_LINE}", re.MULTILINE)
_FILE_NAME = re.compile(r'"([^"]+)"|<([^<>]+)>')
# strings are blanked first
_TOKEN = re.compile(r"(?P<scope>\b(?:namespace(?:\s+(?P<name>[\w:]+))?|extern)\s*\{)|[{};]|\b__global__\b")
_WORD = re.compile(r"\s*(\w+)(?:\s*\(|\b)")
_INTEGER = r"u?int(?:8|16|32|64|ptr)_t"
_FIXED_WIDTH = re.compile(rf"\b{_INTEGER}\b")
_DEFINES = r"\b(?:typedef\b[^;{}]*\b|using\s+|#\s*define\s+)"
_PATH_IN_CODE = re.compile(r"\b(?:assert|__FILE__)\b")
_SHORT_NAMES = {
    "uint": "unsigned int",
    "ushort": "unsigned short",
    "ulong": "unsigned long",
    "uchar": "unsigned char",
    "ssize_t": "long",
}


@functools.cache
def kernels_dir() -> Path:
    """The folder of the shipped .cu files: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "kernels_cu"
    return inside if inside.is_dir() else package.parent / "kernels_cu"


@dataclass(frozen=True)
class Source:
    """One program for NVRTC. Compiler messages name `path`, which is made up for a source given as text.
    `defines`: lines of #define before the text. `options`: those of the compiler. `include_dirs`: folders to
    search after that of the source."""

    path: Path
    text: str
    defines: str = ""
    options: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()

    @staticmethod
    def read(path: str | Path, *more: Any) -> "Source":
        path = Path(path).resolve()
        return Source(path, _read(path), *more)

    @staticmethod
    def from_text(text: str, *more: Any) -> "Source":
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return Source(Path(f"<cukern.compile {digest}>"), text.removeprefix("\ufeff"), *more)

    def digest(self) -> str:
        """SHA-256 of the text and of the names and contents of all files that it can include; of their folder
        only if it is in the code."""
        files = sorted((self.name_of(path), text) for path, text in self.program.files.items())
        parts = [self.defines + self.text, files, *[list(self.options)] * bool(self.options)]
        if self.foreign:
            parts.append(_standard_headers())
            if any(map(_PATH_IN_CODE.search, (self.text, *self.program.files.values()))):
                parts.append([str(path) for path in (self.path, *sorted(self.program.files))])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def name_of(self, path: Path) -> str:
        """A name that does not depend on where the files are installed."""
        if path.is_relative_to(kernels_dir()):
            return f"cukern:{path.relative_to(kernels_dir())}"
        return os.path.relpath(path, self.folder)

    def path_of(self, name: str) -> str:
        """The path of a file by the name that `name_of` gives it."""
        return next(
            (str(path) for path in (self.path, *self.program.files) if self.name_of(path) == name), name
        )

    @property
    def foreign(self) -> bool:
        """False for cukern's own kernels, which are compiled without the headers of kernels_cu/std."""
        return not self.path.is_relative_to(kernels_dir())

    @property
    def files(self) -> Iterable[Path]:
        """The files that it includes."""
        return self.program.files

    @property
    def folder(self) -> Path:
        """The first folder to search for quoted includes."""
        return self.path.parent.absolute()

    @cached_property
    def program(self) -> "Program":
        """The texts for NVRTC, made once: later edits of the files do not affect this source."""
        return Program(self)

    @cached_property
    def host_program(self) -> "Program":
        """The same texts after all headers of kernels_cu/std, as torch's load_inline adds its own, and
        without `__host__`."""
        return Program(self, self.program)

    @cached_property
    def kernels(self) -> dict[str, str]:
        """The parameter list of each kernel in the file, as text, by its qualified name, in order."""
        return find_kernels(self.text)

    @cached_property
    def included_kernels(self) -> dict[str, str]:
        """The same for the included files."""
        return {
            name: text for file in self.program.files.values() for name, text in find_kernels(file).items()
        }


class Program:
    """The texts for NVRTC: `text` of the source, and `headers` by their names in #include lines. `files`: all
    texts that were read.

    NVRTC finds a header by the exact name in the #include line, so each literal name is replaced by the path.
    A name in a #define or #if line may reach an #include through a macro, or be tested by __has_include. For
    it, a header of that name is added, which includes it.
    """

    def __init__(self, source: Source, first: "Program | None" = None):
        self.files: dict[Path, str] = {}
        self.headers: dict[str, str] = {}
        self.name = f"{NOWHERE}/{str(source.path).lstrip('/')}"
        self.path = str(source.path)
        self._source, self._named = source, dict[str, set[Path]]()
        prefix = self._standard_includes(blanked(source.text), first is not None) if source.foreign else ""
        todo = [(source.path, prefix + source.defines + self._typedefs(blanked(source.text)), source.text)]
        while todo:
            path, before, text = todo.pop()
            rewritten, reached = self._rewrite(path, text)
            if path is source.path:
                more, also = self._rewrite(path, before)
                self.text, reached = more.partition("\n")[2] + rewritten, reached | also
            else:
                self.headers[_header(path)] = rewritten
            for target in reached - self.files.keys():
                self.files[target] = (first and first.files.get(target)) or _read(target)
                todo.append((target, "", self.files[target]))
        if first:  # CUDA's own headers may include these
            standard = {
                name: f'#include "{_header(kernels_dir() / "std" / file)}"\n'
                for name, file in _STANDARD.items()
            }
            self.headers |= standard
        for name, paths in self._named.items():
            several = (
                f"#error {json.dumps(name)} may be any of {', '.join(sorted(map(str, paths)))}: include it "
                f"by a literal name\n"
            )
            self.headers[name] = several if len(paths) > 1 else f'#include "{_header(*paths)}"\n'

    def _rewrite(self, path: Path, text: str) -> tuple[str, set[Path]]:
        """The text with a path in each #include, and the files that it includes or may include through a
        macro."""
        code, reached = blanked(text), set()
        pieces, at = [f"#line 1 {json.dumps(str(path), ensure_ascii=False)}\n"], 0
        for match in _INCLUDE.finditer(code):
            name = (match["quoted"] or match["angled"]).replace("\\\n", "")
            target = self._find(name, path, match["quoted"] is not None, match["next"] is not None)
            if target:
                reached.add(target)
                start, end = match.span("include")
                pieces += text[at:start], f'#include "{_header(target)}"', "\n" * text.count("\n", start, end)
                at = end
        for match in DIRECTIVE.finditer(code):
            line = match[0].replace("\\\n", "")
            if re.match(r"\s*(?:#|%:)\s*(?:define|if|elif)\b", line):
                for quoted, angled in _FILE_NAME.findall(line):
                    target = self._find(quoted or angled, path, bool(quoted), False)
                    if target:
                        reached.add(target)
                        self._named.setdefault(quoted or angled, set()).add(target)
        return "".join((*pieces, text[at:])), reached

    @staticmethod
    def _standard_includes(code: str, everything: bool) -> str:
        """Includes what nvcc includes in every source: <cmath>, <climits>, and <cstdint> if the source uses
        its types."""
        names = ["limits.h", "math.h"]
        if _FIXED_WIDTH.search(code) and not re.search(rf"{_DEFINES}{_INTEGER}\b", code):
            names.append("integers.h")
        lines = ["#define CUKERN_INT64 long long\n"] * bool(_CCCL.search(code))
        lines += [f"#include <{kernels_dir()}/std/{name}>\n" for name in (*names, *["host.h"] * everything)]
        return "".join((*lines, "#undef __host__\n#define __host__\n" * everything))

    @staticmethod
    def _typedefs(code: str) -> str:
        """Declares the short names of integer types that a source uses and does not define, as the host's
        headers do."""
        used = {name: meaning for name, meaning in _SHORT_NAMES.items() if re.search(rf"\b{name}\b", code)}
        return "".join(f"typedef {used[n]} {n};\n" for n in used if not re.search(rf"{_DEFINES}{n}\b", code))

    def _find(self, name: str, includer: Path, quoted: bool, after: bool) -> Path | None:
        """The file that an #include refers to. `after`: skip the including file, for include_next."""
        folders = [includer.parent] * quoted + [
            self._source.folder,
            *self._source.include_dirs,
            kernels_dir(),
        ]
        found = (Path(os.path.realpath(folder / name)) for folder in folders if os.path.isfile(folder / name))
        standard = (
            _STANDARD.get(name) or ("host.h" if _LIBRARY.fullmatch(name) else None)
            if self._source.foreign
            else None
        )
        if standard and not quoted:
            return kernels_dir() / "std" / standard
        file = next((path for path in found if not after or path != includer), None)
        return kernels_dir() / "std" / standard if standard and file is None else file


@functools.cache
def _standard_headers() -> str:
    """A digest of kernels_cu/std."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted((kernels_dir() / "std").iterdir()))
    ).hexdigest()


def _header(path: Path) -> str:
    """The name of a file for NVRTC."""
    return NOWHERE + str(path).replace('"', "''")


def _read(path: Path) -> str:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return text.replace("\r\n", "\n")


def blanked(text: str, literals: bool = False) -> str:
    """The text with comments and raw strings replaced by blanks, with `literals` all strings and characters
    too. The length is kept."""

    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0]) if literals or match["comment"] or match["raw"] else match[0]

    return _COMMENT_OR_LITERAL.sub(blank, text)


def find_kernels(text: str) -> dict[str, str]:
    """The parameter list of each __global__ function, as text, by its qualified name. The last of several
    declarations counts."""
    found: dict[str, str] = {}
    if "__global__" not in text:
        return found
    code = DIRECTIVE.sub(lambda line: " " * len(line[0]), blanked(text, literals=True))
    scopes: list[str] = []
    end = 0
    for match in _TOKEN.finditer(code):
        if match.start() < end:
            continue
        if match[0].endswith("{"):
            scopes.append(match["name"] or "")
        elif match[0] == "}":
            del scopes[-1:]
        elif match[0] == "__global__":
            end = match.end()
            while (word := _WORD.match(code, end)) and word[1] != "__global__":
                end = start = word.end()
                if code[start - 1] == "(":
                    end = _closing(code, start)
                    if not re.fullmatch(r"__\w+__", word[1]):  # such as __launch_bounds__(256)
                        found["::".join((*filter(None, scopes), word[1]))] = code[start : end - 1]
                        break
    return found


def _closing(code: str, at: int) -> int:
    """The position behind the bracket that closes the one opened before `at`."""
    depth = 1
    for match in re.compile(r"[()]").finditer(code, at):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(code)
