"""A kernel's parameters as the compiler saw them; packs arguments for a launch.

The parameter types come from the mangled name of `cukern_signature<decltype(&kernel)>`, a template in PROBE. An argument of the wrong type
raises an error; without the check, the GPU would reinterpret its bits.
"""

import re
import struct
from dataclasses import dataclass

import torch

CTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float", torch.float64: "double"}

PROBE = '\n\n#line 1 "/cukern_signature"\ntemplate <class F> __global__ void cukern_signature(F) {}\n'

# By the letter in a mangled name: the C++ type, its `struct` format if it can be passed by value, and the dtypes of tensors for a pointer.
_TYPES: dict[str, tuple[str, str, tuple[torch.dtype, ...]]] = {
    "v": ("void", "", ()),  # void* accepts any tensor
    "b": ("bool", "?", (torch.bool,)),
    "c": ("char", "b", (torch.int8,)),
    "a": ("signed char", "b", (torch.int8,)),
    "h": ("unsigned char", "B", (torch.uint8, torch.bool)),
    "s": ("short", "h", (torch.int16,)),
    "t": ("unsigned short", "H", (torch.uint16,)),
    "i": ("int", "i", (torch.int32,)),
    "j": ("unsigned int", "I", (torch.uint32,)),
    "l": ("long", "q", (torch.int64,)),
    "m": ("unsigned long", "Q", (torch.uint64,)),
    "x": ("long long", "q", (torch.int64,)),
    "y": ("unsigned long long", "Q", (torch.uint64,)),
    "f": ("float", "f", (torch.float32,)),
    "d": ("double", "d", (torch.float64,)),
}
_OTHERS = {"n": "__int128", "o": "unsigned __int128", "e": "long double", "w": "wchar_t", "Dn": "nullptr_t", "Ds": "char16_t"}
_BUILTINS = {letter: name for letter, (name, _, _) in _TYPES.items()} | _OTHERS
_SCALARS = {name: form for name, form, _ in _TYPES.values() if form} | {"__half": "e"}
_POINTEES = {name: dtypes for name, _, dtypes in _TYPES.values()} | {name: (dtype,) for dtype, name in CTYPES.items()}
_POINTEES |= {"__half2": (torch.float16,), "__nv_bfloat162": (torch.bfloat16,)}
_POINTEES |= {"__nv_fp8_e4m3": (torch.float8_e4m3fn,), "__nv_fp8_e5m2": (torch.float8_e5m2,)}
for _letter in "chstijlmxyfd":  # vectors, such as uchar4
    _element, _, _dtypes = _TYPES[_letter]
    _vector = _element.replace("unsigned ", "u").replace(" ", "")
    _complex = {"f": (torch.complex64,), "d": (torch.complex128,)}.get(_letter, ())
    _POINTEES |= {f"{_vector}{n}": _dtypes[:1] + _complex * (n == 2) for n in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Param:
    """One parameter: its name, its C++ type without qualifiers, and whether it is a pointer."""

    name: str
    ctype: str
    pointer: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The tensor dtypes that a pointer accepts; empty for any."""
        return _POINTEES.get(self.ctype, ())

    @property
    def format(self) -> str:
        """The `struct` format of the value."""
        return "Q" if self.pointer else _SCALARS[self.ctype]

    def __str__(self) -> str:
        return f"{self.ctype}{'*' if self.pointer else ''} {self.name}"


def probe(kernel: str) -> str:
    """An NVRTC name expression whose mangled name contains the kernel's parameter types. The program must end with PROBE."""
    return f"cukern_signature<decltype(&{kernel})>"


def params(kernel: str, mangled: str, text: str = "") -> tuple[Param, ...]:
    """The parameters from the mangled name of a kernel's probe. Their names come from the text of the parameter list, if it matches.

    Raises TypeError for a type that cannot be passed.
    """
    types = demangled(mangled)
    names = [_name_in(declaration) for declaration in split_list(text)]
    if len(names) != len(types):
        names = [""] * len(types)
    return tuple(_param(kernel, name or f"arg{i}", ctype) for i, (name, ctype) in enumerate(zip(names, types, strict=True)))


def _param(kernel: str, name: str, ctype: str) -> Param:
    pointer, plain = ctype.endswith("*"), re.sub(r"^(?:const |volatile |__restrict )+", "", ctype).removesuffix("*")
    if pointer and plain not in _POINTEES:
        raise TypeError(f"{kernel}: cukern does not know what a tensor for {ctype} {name} must hold; declare it void*, which takes any")
    if not pointer and plain not in _SCALARS:
        raise TypeError(f"{kernel}: {ctype} {name} cannot be passed by value; the types that can are {', '.join(_SCALARS)}, and pointers")
    return Param(name, plain, pointer)


def packer(params: tuple[Param, ...]) -> struct.Struct:
    """Packs arguments in the layout of a kernel's parameters: each at the next multiple of its size, as in `struct`'s native mode."""
    return struct.Struct("@" + "".join(p.format for p in params))


def offsets(params: tuple[Param, ...]) -> list[int]:
    """The offset in bytes of each argument in what `packer` packs."""
    return [packer(params[: i + 1]).size - packer((p,)).size for i, p in enumerate(params)]


def explain_misfit(kernel: str, params: tuple[Param, ...], args: tuple) -> Exception:
    """The error for arguments that `packer` refused. It names the parameter and the value."""
    if len(args) != len(params):
        return TypeError(f"{kernel} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(args)}")
    for param, value in zip(params, args, strict=True):
        try:
            struct.pack(param.format, value)
        except OverflowError:
            return ValueError(f"{kernel}: {value!r} does not fit the parameter {param}")
        except struct.error:
            kind = ValueError if isinstance(value, int) else TypeError
            return kind(f"{kernel}: {value!r} ({type(value).__name__}) does not fit the parameter {param}")
    raise AssertionError("every argument fits")


# ---- the text of a parameter list


def split_list(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[<(\[{>)\]},]", text):
        depth += (match[0] in "<([{") - (match[0] in ">)]}")
        if match[0] == "," and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [p for p in (*parts, text[start:].strip()) if p]


_UNNAMED = re.compile(r"[*&\d].*|__.*|void|bool|char|short|int|long|float|double|unsigned|signed|const|volatile")


def _name_in(declaration: str) -> str:
    """The parameter name in a declaration, or ""."""
    words = re.findall(r"\w+|[*&]", re.sub(r"\[.*", "", declaration.partition("=")[0], flags=re.DOTALL))
    return words[-1] if len(words) > 1 and not _UNNAMED.fullmatch(words[-1]) else ""


# ---- mangled names, after the Itanium C++ ABI, https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling

_BUILTIN = re.compile("|".join(_BUILTINS))
_QUALIFIERS = {"r": "__restrict ", "V": "volatile ", "K": "const "}


def demangled(mangled: str) -> list[str]:
    """The C++ types of the parameters, from a probe's mangled name. Raises TypeError for an unsupported form."""
    reader = _Types(mangled)
    reader.expect("_Z16cukern_signatureIPF")
    types = reader.until_end()[1:]  # the first is the result
    return [] if types == ["void"] else types


class _Types:
    """A recursive-descent parser of the types in a mangled name. `seen`: the types that substitutions such as S0_ refer to."""

    def __init__(self, mangled: str):
        self.mangled, self.at, self.seen = mangled, 0, ["cukern_signature"]

    def accept(self, pattern: str | re.Pattern[str]) -> str:
        match = re.compile(pattern).match(self.mangled, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def expect(self, pattern: str) -> str:
        if not self.accept(pattern):
            raise TypeError(f"cukern cannot read the parameter types {self.mangled!r} at character {self.at}: no {pattern}")
        return ""

    def remember(self, name: str) -> str:
        self.seen.append(name)
        return name

    def until_end(self) -> list[str]:
        types = []
        while not self.accept("E"):
            types.append(self.type())
        return types

    def type(self) -> str:
        if builtin := self.accept(_BUILTIN):
            return _BUILTINS[builtin]
        if sign := self.accept("[PRO]"):
            return self.remember(self.type() + {"P": "*", "R": "&", "O": "&&"}[sign])
        if qualifiers := self.accept("[rVK]+"):
            inner, words = self.type(), "".join(_QUALIFIERS[q] for q in qualifiers)
            return self.remember(f"{inner} {words.strip()}" if inner.endswith("*") else words + inner)
        if self.accept("F"):
            result, types = self.type(), self.until_end()
            return self.remember(f"{result}({', '.join(types)})")
        if array := self.accept(r"A\d*_"):
            return self.remember(f"{self.type()}[{array[1:-1]}]")
        if self.accept("M"):
            return self.remember(f"{self.type()}::*{self.type()}")
        if self.accept("L"):  # a template argument that is a value
            return f"({self.type()}){self.accept('n?[0-9a-f]+')}{self.expect('E')}"
        if self.accept("J"):
            return ", ".join(self.until_end())
        return self.named()

    def named(self) -> str:
        """A class or enum: its qualified name with template arguments, or a substitution."""
        nested, name = self.accept("N"), ""
        while True:
            if substitution := self.accept("S[0-9A-Z]*_"):
                index = int(substitution[1:-1], 36) + 1 if len(substitution) > 2 else 0
                part = self.seen[index] if index < len(self.seen) else self.expect("a type that was seen")
            elif part := self.accept("St"):
                part = "std"
            else:
                length = int(self.accept(r"\d+") or self.expect("a name"))
                part, self.at = self.mangled[self.at : self.at + length], self.at + length
                part = "(anonymous namespace)" if part.startswith("_GLOBAL__N_") else part
                part = self.remember(f"{name}::{part}" if name else part)
            name = part
            if self.accept("I"):
                name = self.remember(f"{name}<{', '.join(self.until_end())}>")
            if self.accept("E") if nested else name != "std":
                return name
