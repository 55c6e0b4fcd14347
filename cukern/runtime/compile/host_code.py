"""Takes host functions out of a program that NVRTC does not compile as it is.

libclang finds the functions, with macros expanded. Only the functions in which NVRTC reports an error are
changed: the body becomes a call that cannot be linked, and the declaration stays, so that no overload or
specialization is lost. A function whose declaration has the error is removed if the rest of the program never
names it. Constants, types, directives, and functions that are `__device__`, `__global__` or constexpr are
never changed: their error is the answer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cukern.runtime.compile.sources import DIRECTIVE, NOWHERE, Program, blanked

_ERROR = re.compile(r"^(.+)\((\d+)\): (?:\w+ )?error", re.MULTILINE)
_BODY = "{::cukern_host_code_was_removed();"  # declared in kernels_cu/std/host.h and never defined
_NEVER = {
    "__device__", "__global__", "__constant__", "constexpr", "consteval", "auto", "CUDADEVICE_ATTR",
    "CUDAGLOBAL_ATTR",
}  # fmt: skip
_OTHER = {
    "struct", "class", "union", "enum", "namespace", "using", "typedef", "template", "static_assert",
    "extern", "operator",
}  # fmt: skip
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_IF = re.compile(r"\s*(?:#|%:)\s*(?:if|el|endif)")
_SCOPES = [
    "NAMESPACE",
    "LINKAGE_SPEC",
    "UNEXPOSED_DECL",
    "CLASS_DECL",
    "STRUCT_DECL",
    "UNION_DECL",
    "CLASS_TEMPLATE",
]
_FUNCTIONS = [
    "FUNCTION_DECL",
    "FUNCTION_TEMPLATE",
    "CXX_METHOD",
    "CONSTRUCTOR",
    "DESTRUCTOR",
    "CONVERSION_FUNCTION",
]
_CLANG = re.findall(
    r"\S+",
    """-x cuda -std=c++17 -nocudainc -nocudalib -nostdinc -nostdinc++ -nobuiltininc --cuda-host-only
-ferror-limit=0 -undef -w -D__LP64__ -D__EDG__ -D__CUDACC__ -D__CUDACC_RTC__ -D__CUDA_ARCH__=800
-D__CUDA_ARCH_LIST__=800 -D__cdecl= -D__grid_constant__= -D__forceinline__=inline -D__noinline__=
-D__managed__= -D__launch_bounds__(...)= -D__cluster_dims__(...)= -D__align__(n)=alignas(n)
-D__device__=__attribute__((device)) -D__global__=__attribute__((global))
-D__constant__=__attribute__((constant)) -D__shared__=__attribute__((shared))""",
)


@dataclass(frozen=True)
class Function:
    """A host function: its place in the program's text `file`, in bytes, and its lines in the user's file
    `path`. `body`: the place of its body, or None. `whole`: True if all of it may be removed."""

    name: str
    file: str
    path: str
    lines: tuple[int, int]
    start: int
    end: int
    body: tuple[int, int] | None
    whole: bool


class HostCode:
    """The host functions of a program, and those that were taken out of it."""

    def __init__(self, program: Program):
        self.texts = {program.name: program.text, **program.headers}
        # one character per byte
        self._raw = {name: text.encode().decode("latin-1") for name, text in self.texts.items()}
        self._paths = {
            program.name: program.path,
            **{name: name.removeprefix(NOWHERE) for name in program.headers},
        }
        self._main = program.name
        self._functions = list(self._found())
        self._cuts: dict[Function, tuple[int, int]] = {}

    @property
    def removed(self) -> tuple[str, ...]:
        """The functions that were taken out, as "host (file.cu:3-9)"."""
        cuts = sorted(self._cuts, key=lambda f: (f.path, f.lines))
        return tuple(f"{f.name} ({f.path.rpartition('/')[2]}:{f.lines[0]}-{f.lines[1]})" for f in cuts)

    def cut(self, log: str) -> bool:
        """Take out more functions, those in which NVRTC's log reports errors. False if there are none, or
        none may be taken out."""
        before = dict(self._cuts)
        places = {(path, int(line)) for path, line in _ERROR.findall(log)}
        for function in self._functions:
            first, last = function.lines
            if any(path == function.path and first <= line <= last for path, line in places):
                if function.body and function not in before:
                    self._cuts[function] = function.body
                elif function.whole:
                    self._cuts[function] = function.start, function.end
        remaining = self._remaining_names()
        for function, place in list(self._cuts.items()):
            if place == (function.start, function.end) and function.name in remaining:
                self._cuts[function] = before.get(function, place)
                if function not in before:
                    del self._cuts[function]
        self.texts = {name: self._without(name).encode("latin-1").decode() for name in self._raw}
        return self._cuts != before

    def _without(self, name: str, filler: str = _BODY) -> str:
        """A text without the functions. Line numbers and directives stay."""
        text, at, pieces = self._raw[name], 0, list[str]()
        for function, (start, end) in sorted(self._cuts.items(), key=lambda item: item[1]):
            if function.file == name and start >= at:
                inside, is_body = text[start:end], (start, end) == function.body
                pieces += (
                    text[at:start],
                    filler if is_body else ";",
                    _only_directives(inside),
                    "}" if is_body else "",
                )
                at = end
        return "".join((*pieces, text[at:]))

    def _remaining_names(self) -> set[str]:
        """All identifiers of the program but for those in comments, strings, and functions that were taken
        out."""
        return {
            word
            for name in self._raw
            for word in _IDENTIFIER.findall(blanked(self._without(name), literals=True))
        }

    # ---- libclang

    def _found(self) -> Iterator[Function]:
        from clang import cindex

        try:
            index = cindex.Index.create()
        except cindex.LibclangError as error:
            raise ImportError(str(error)) from error
        files = [(name, text) for name, text in self.texts.items() if name.startswith(NOWHERE)]
        # a record of macros; keep going
        unit = index.parse(self._main, _CLANG, unsaved_files=files, options=1 | 0x200)
        macros: dict[str, set[str]] = {}
        for cursor in unit.cursor.get_children():
            if cursor.kind.name == "MACRO_DEFINITION" and cursor.location.file:
                place = cursor.extent
                text = self._raw.get(cursor.location.file.name, "")[place.start.offset : place.end.offset]
                macros.setdefault(cursor.spelling, set()).update(_IDENTIFIER.findall(text))
        cursors = list(_declarations(unit.cursor))
        places = [(c.location.file.name, c.extent.start.offset) for c, _ in cursors]
        for cursor, in_class in cursors:
            if (
                cursor.kind.name in _FUNCTIONS
                and cursor.is_definition()
                and "#line 1 " in self._raw[cursor.location.file.name]
            ):
                alone = places.count((cursor.location.file.name, cursor.extent.start.offset)) == 1
                if function := self._function(cursor, in_class, macros, alone):
                    yield function

    def _function(
        self, cursor: Any, in_class: bool, macros: dict[str, set[str]], alone: bool
    ) -> Function | None:
        """The function of a cursor, or None if it may not be changed."""
        file, start, end = cursor.location.file.name, cursor.extent.start.offset, cursor.extent.end.offset
        text, children = self._raw[file], list(cursor.get_children())
        body = _body(text, start, children)
        head = blanked(text[start : body[0] if body else end], literals=True)
        names = _reachable(head, macros).union(c.kind.name for c in children)
        if names & _NEVER or DIRECTIVE.search(head) or (body and not _balanced(text[slice(*body)])):
            return None
        # Without a body of its own, a macro makes the function.
        alone = body is not None or (alone and not names & _OTHER)
        whole = (
            alone and cursor.kind.name == "FUNCTION_DECL" and not (in_class or head.startswith("template"))
        )
        if not (body or whole):
            return None
        above, path = text.index("#line 1 "), self._paths[file]
        lines = text.count("\n", above, start), text.count("\n", above, end)
        return Function(cursor.spelling, file, path, lines, start, end, body, whole)


def _body(text: str, start: int, children: list[Any]) -> tuple[int, int] | None:
    """The place of a function's body, or None if a macro makes it."""
    blocks = [child.extent for child in children if child.kind.name == "COMPOUND_STMT"]
    first, last = (blocks[-1].start.offset, blocks[-1].end.offset) if blocks else (start, start)
    return (first, last) if start < first and text[first] == "{" and text[last - 1] == "}" else None


def _declarations(cursor: Any, in_class: bool = False) -> Iterator[tuple[Any, bool]]:
    """The declarations of a translation unit, at the level of namespaces and classes, and whether each is in
    a class."""
    for child in cursor.get_children():
        if (
            child.location.file is None
            or not child.location.file.name.startswith(NOWHERE)
            or child.kind.is_preprocessing()
        ):
            continue
        if "/kernels_cu/std/" not in child.location.file.name:
            yield child, in_class
            if child.kind.name in _SCOPES:
                yield from _declarations(child, in_class or child.kind.name not in _SCOPES[:3])


def _reachable(text: str, macros: dict[str, set[str]]) -> set[str]:
    """The identifiers of a text and of all macros that it names."""
    names, todo = set[str](), set(_IDENTIFIER.findall(text))
    while todo:
        names |= todo
        todo = set().union(*(macros.get(name, ()) for name in todo)) - names
    return names


def _balanced(text: str) -> bool:
    """True if the braces of a body are balanced, also where its #if directives are not taken into account."""
    code = blanked(text, literals=True)
    if not any(map(_IF.match, DIRECTIVE.findall(code))):
        return True
    depth = 0
    for match in re.finditer(r"[{}]", code):
        depth += 1 if match[0] == "{" else -1
        if depth <= 0 and match.end() < len(code):
            return False
    return depth == 0


def _only_directives(text: str) -> str:
    """The directives of a text, on their lines."""
    code = blanked(text, literals=True)
    kept = [match.span() for match in DIRECTIVE.finditer(code)]
    pieces, at = list[str](), 0
    for start, end in kept:
        pieces += "\n" * text.count("\n", at, start), text[start:end]
        at = end
    return "".join((*pieces, "\n" * text.count("\n", at)))
