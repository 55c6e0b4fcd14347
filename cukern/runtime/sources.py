"""Finds .cu files, the headers that they include, and their kernels, and prepares the texts for NVRTC.

Each file is read once, hashed, and passed to NVRTC as text, so the hash in the cache key always matches what was compiled.
"""

import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

NOWHERE = "/dev/null"  # prefix of all file names passed to NVRTC; not a folder, so NVRTC cannot open files itself

# NVRTC has no <cstdint>. The types match those of CUDA's own headers.
_STDINT = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t; typedef long long intptr_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long long uint64_t;
typedef uint64_t uintptr_t;
namespace std { using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::intptr_t;
using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t; }
"""
# Stands for the headers of the host's C++ library: what kernels use of them.
_HOST = """#pragma once
#include <cstdint>
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-LLONG_MAX - 1)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#define M_PI 3.14159265358979323846
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
"""
_OWN_HEADERS = {"cstdint": _STDINT, "stdint.h": "#include <cstdint>\n", "cukern_host.h": _HOST}

# An unterminated comment or literal extends to the end of its line or file, so that the search is linear in the length of the text.
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
    rf"^(?<!\\\n){_BLANK}(?P<include>(?:#|%{_SPLICE}:){_BLANK}{_SPLICE.join('include')}(?P<next>{_SPLICE}{_SPLICE.join('_next')})?{_BLANK}"
    r'(?:"(?P<quoted>(?:[^"\n\\]|\\\n|\\)+)"|<(?P<angled>(?:[^>\n\\]|\\\n|\\)+)>))',
    re.MULTILINE,
)
_DIRECTIVE = re.compile(rf"^(?<!\\\n){_BLANK}(?:#|%{_SPLICE}:){_LINE}", re.MULTILINE)
_FILE_NAME = re.compile(r'"([^"]+)"|<([^<>]+)>')
_TOKEN = re.compile(r"(?P<scope>\b(?:namespace(?:\s+(?P<name>[\w:]+))?|extern)\s*\{)|[{};]|\b__global__\b")  # strings are blanked first
_WORD = re.compile(r"\s*(\w+)(?:\s*\(|\b)")
_HOST_ONLY = re.compile(r"<<<|\b(?:torch|at|c10|pybind11)::|\bPYBIND11_MODULE\b|\bTORCH_LIBRARY|\bint\s+main\s*\(")
_HOST_API = re.compile(r"\bstd::|\b(?:cuda|cublas|curand|cudnn)[A-Z]\w*|\bcublas\w*_t\b")  # in device code, too, some of them
_ON_DEVICE = re.compile(r"\b__(?:global|device|constant|managed)__\b|\bconstexpr\b")
_FUNCTION = re.compile(r"(?![^({]*\b(?:struct|class|union|enum|namespace|using|typedef)\b)[^={;(]*\([^{;]*\)[\s\w]*\{", re.S)
_LIBRARY = r"torch|ATen|c10|cuda_runtime|cuda_runtime_api|device_launch_parameters|cublas|curand|cudnn|helper_|nvToolsExt"
_STANDARD = r"""c?(?:assert|ctype|errno|fenv|float|inttypes|limits|locale|math|setjmp|signal|stdarg|stddef|stdio|stdlib|string|time)
algorithm any array atomic bitset chrono complex condition_variable deque exception fstream functional future initializer_list iomanip
ios iostream istream iterator list map memory mutex new numeric optional ostream queue random ratio regex set sstream stack stdexcept
string string_view thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray variant vector"""
_HOST_INCLUDE = re.compile(
    rf"^[ \t]*#[ \t]*include[ \t]*<(?:(?:{_LIBRARY})[^>\n]*|(?:{'|'.join(_STANDARD.split())})(?:\.h)?|sys/\w+\.h|unistd\.h)>", re.M
)
_FIXED_WIDTH = re.compile(r"\bu?int(?:8|16|32|64|ptr)_t\b")
_SHORT_NAMES = {"uint": "unsigned int", "ushort": "unsigned short", "ulong": "unsigned long", "uchar": "unsigned char", "ssize_t": "long"}


@functools.cache
def kernels_dir() -> Path:
    """The folder of the shipped .cu files: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "kernels_cu"
    return inside if inside.is_dir() else package.parent / "kernels_cu"


@dataclass(frozen=True)
class Source:
    """One program for NVRTC. Compiler messages name `path`, which is made up for a source given as text. `defines`: lines of #define
    before the text."""

    path: Path
    text: str
    defines: str = ""

    @staticmethod
    def read(path: str | Path, defines: str = "") -> "Source":
        path = Path(path).resolve()
        return Source(path, without_host_code(_read(path)), defines)

    @staticmethod
    def from_text(text: str, defines: str = "") -> "Source":
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return Source(Path(f"<cukern.compile {digest}>"), without_host_code(text.removeprefix("\ufeff")), defines)

    def digest(self) -> str:
        """SHA-256 of the text and of the names and contents of all files that it can include."""
        files = {self._name(path): text for path, text in self.program.files.items()}
        own = {name: text for name, text in self.program.headers.items() if name in _OWN_HEADERS}
        return hashlib.sha256(json.dumps([self.defines + self.text, sorted(files.items()), sorted(own.items())]).encode()).hexdigest()

    def _name(self, path: Path) -> str:
        """A name that does not depend on where the files are installed."""
        if path.is_relative_to(kernels_dir()):
            return f"cukern:{path.relative_to(kernels_dir())}"
        return os.path.relpath(path, self.folder)

    @property
    def folder(self) -> Path:
        """The first folder to search for quoted includes."""
        return self.path.parent.absolute()

    @functools.cached_property
    def program(self) -> "Program":
        """The texts for NVRTC, made once: later edits of the files do not affect this source."""
        return Program(self)

    @functools.cached_property
    def kernels(self) -> dict[str, str]:
        """The parameter list of each kernel in the file, as text, by its qualified name, in order."""
        return find_kernels(self.text)

    @functools.cached_property
    def included_kernels(self) -> dict[str, str]:
        """The same for the included files."""
        return {name: text for file in self.program.files.values() for name, text in find_kernels(file).items()}


class Program:
    """The texts for NVRTC: `text` of the source, and `headers` by their names in #include lines. `files`: all texts that were read.

    NVRTC finds a header by the exact name in the #include line, so each literal name is replaced by the path. A name in a #define or #if
    line may reach an #include through a macro, or be tested by __has_include. For it, a header of that name is added, which includes it.
    """

    def __init__(self, source: Source):
        self.files: dict[Path, str] = {}
        self.headers: dict[str, str] = {}
        self._source, self._named = source, dict[str, set[Path]]()
        todo = [(source.path, source.text)]
        while todo:
            path, text = todo.pop()
            rewritten, reached = self._rewrite(path, text)
            if path is source.path:
                self.text = source.defines + self._typedefs(blanked(text)) + rewritten
            else:
                self.headers[_header(path)] = rewritten
            for target in reached - self.files.keys():
                self.files[target] = _read(target)
                todo.append((target, self.files[target]))
        for name, paths in self._named.items():
            several = f"#error {json.dumps(name)} may be any of {', '.join(sorted(map(str, paths)))}: include it by a literal name\n"
            self.headers[name] = several if len(paths) > 1 else f'#include "{_header(*paths)}"\n'

    def _rewrite(self, path: Path, text: str) -> tuple[str, set[Path]]:
        """The text with a path in each #include, and the files that it includes or may include through a macro."""
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
            elif name in _OWN_HEADERS:
                self.headers |= _OWN_HEADERS
        for match in _DIRECTIVE.finditer(code):
            line = match[0].replace("\\\n", "")
            if re.match(r"\s*(?:#|%:)\s*(?:define|if|elif)\b", line):
                for quoted, angled in _FILE_NAME.findall(line):
                    target = self._find(quoted or angled, path, bool(quoted), False)
                    if target:
                        reached.add(target)
                        self._named.setdefault(quoted or angled, set()).add(target)
        return "".join((*pieces, text[at:])), reached

    def _typedefs(self, code: str) -> str:
        """Declares the integer types that a source uses and does not define: the host's headers have them, and NVRTC does not."""
        found = []
        if _FIXED_WIDTH.search(code):
            self.headers |= _OWN_HEADERS
            found.append("#include <cstdint>")
        for name, meaning in _SHORT_NAMES.items():
            if re.search(rf"\b{name}\b", code) and not re.search(rf"\b(?:typedef\b[^;{{}}]*|using\s+|#\s*define\s+){name}\b", code):
                found.append(f"typedef {meaning} {name};")
        return "\n".join((*found, ""))

    def _find(self, name: str, includer: Path, quoted: bool, after: bool) -> Path | None:
        """The file that an #include refers to. `after`: skip the including file, for include_next."""
        folders = [includer.parent] * quoted + [self._source.folder, kernels_dir()]
        found = (Path(os.path.realpath(folder / name)) for folder in folders if os.path.isfile(folder / name))
        return next((path for path in found if not after or path != includer), None)


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
    """The text with comments and raw strings replaced by blanks, with `literals` all strings and characters too. The length is kept."""

    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0]) if literals or match["comment"] or match["raw"] else match[0]

    return _COMMENT_OR_LITERAL.sub(blank, text)


def without_host_code(text: str) -> str:
    """Remove code for the host compiler: torch's headers, and functions that use torch:: or <<<...>>>.

    The source of a `torch.utils.cpp_extension.load_inline` call then compiles unchanged, and so does a program with a `main`: of one that
    includes headers of the host's libraries, functions that are not for the device are removed. Line numbers are kept. The headers are
    replaced by one with integer types and the constants of <cfloat>, <climits> and <cmath>.
    """
    text, headers = _HOST_INCLUDE.subn("#include <cukern_host.h>", text)
    code = blanked(text, literals=True)
    if not headers and not _HOST_ONLY.search(code):
        return text
    pieces, start, depth = [], 0, 0
    for match in _TOKEN.finditer(code):
        if depth or match[0] == "{":  # braces of namespaces are not counted
            depth += match[0].endswith("{") - (match[0] == "}")
        if depth == 0 and match[0] != "__global__":
            pieces.append((start, match.end()))
            start = match.end()
    pieces.append((start, len(text)))
    return "".join(_directives(text[a:b]) if _is_host_code(code[a:b]) else text[a:b] for a, b in pieces)


def _is_host_code(code: str) -> bool:
    if _HOST_ONLY.search(code):
        return True
    code = _DIRECTIVE.sub("", code)
    return not _ON_DEVICE.search(code) and bool(_HOST_API.search(code) or _FUNCTION.match(code))


def _directives(text: str) -> str:
    return "\n".join(line if line.lstrip().startswith("#") else "" for line in text.split("\n"))


def find_kernels(text: str) -> dict[str, str]:
    """The parameter list of each __global__ function, as text, by its qualified name. The last of several declarations counts."""
    found: dict[str, str] = {}
    if "__global__" not in text:
        return found
    code = _DIRECTIVE.sub(lambda line: " " * len(line[0]), blanked(text, literals=True))
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
