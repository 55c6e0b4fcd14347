"""A kernel's parameters as the compiler saw them; packs arguments for a launch.

The parameter types come from the mangled name of `cukern_signature<decltype(&kernel)>`, a template in PROBE.
An argument of the wrong type raises an error; without the check, the GPU would reinterpret its bits.
"""

import ctypes
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

CTYPES = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}

PROBE = '\n\n#line 1 "/cukern_signature"\ntemplate <class F> __global__ void cukern_signature(F) {}\n'

# By the letter in a mangled name: the C++ type, its `struct` format if it can be passed by value, and the
# dtypes of tensors for a pointer.
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
_OTHERS = {
    "n": "__int128",
    "o": "unsigned __int128",
    "e": "long double",
    "w": "wchar_t",
    "Dn": "nullptr_t",
    "Ds": "char16_t",
}
_BUILTINS = {letter: name for letter, (name, _, _) in _TYPES.items()} | _OTHERS
_SCALARS = {name: form for name, form, _ in _TYPES.values() if form} | {"__half": "e"}
_POINTEES = {name: dtypes for name, _, dtypes in _TYPES.values()} | {
    name: (dtype,) for dtype, name in CTYPES.items()
}
_SCALARS["__nv_bfloat16"] = "H"
_POINTEES |= {"__half2": (torch.float16,), "__nv_bfloat162": (torch.bfloat16,)}
_POINTEES |= {"__nv_fp8_e4m3": (torch.float8_e4m3fn,), "__nv_fp8_e5m2": (torch.float8_e5m2,)}
_SCALARS |= {f".{t}{8 * n}": code for n, code in zip((1, 2, 4, 8), "BHIQ", strict=True) for t in "bus"}
_SCALARS |= {".f32": "f", ".f64": "d"}  # types of PTX, whose integers have no sign
STRUCTS = bytes, bytearray, memoryview, ctypes.Structure, ctypes.Union, np.void  # structs by value
_VECTORS: dict[str, str] = {}  # `struct` format of the elements
for _letter in "chstijlmxyfd":  # vectors, such as uchar4
    _element, _, _dtypes = _TYPES[_letter]
    _vector = _element.replace("unsigned ", "u").replace(" ", "")
    _complex = {"f": (torch.complex64,), "d": (torch.complex128,)}.get(_letter, ())
    _POINTEES |= {f"{_vector}{n}": _dtypes[:1] + _complex * (n == 2) for n in (1, 2, 3, 4)}
    _VECTORS |= {f"{_vector}{n}": _TYPES[_letter][1] * n for n in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Param:
    """One parameter: its name, its C++ type without qualifiers, and whether it is a pointer. `size`: bytes of
    a struct or vector."""

    name: str
    ctype: str
    pointer: bool
    size: int = 0
    align: int = 0
    const: bool = field(default=False, compare=False)  # a pointer to const

    @property
    def written(self) -> bool:
        """True if the kernel may write through the pointer."""
        return self.pointer and (self.untyped or not self.const)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The tensor dtypes that a pointer accepts; empty for any."""
        return _POINTEES.get(self.ctype, ()) if not self.ctype.endswith("*") else (torch.int64, torch.uint64)

    @property
    def format(self) -> str:
        """The `struct` format of the value."""
        return "Q" if self.pointer else f"{self.size}s" if self.size else _SCALARS[self.ctype]

    @property
    def untyped(self) -> bool:
        """True for a parameter of PTX of 8 bytes, which takes an address, a number or a struct."""
        return self.pointer and self.ctype.startswith(".")

    def __str__(self) -> str:
        if self.ctype.startswith("."):  # of PTX
            return f"{self.ctype} {self.name}"
        return f"{'const ' if self.const else ''}{self.ctype}{'*' if self.pointer else ''} {self.name}"


def probe(kernel: str) -> str:
    """An NVRTC name expression whose mangled name contains the kernel's parameter types. The program must end
    with PROBE."""
    return f"cukern_signature<decltype(&{kernel})>"


def params(
    kernel: str, mangled: str, text: str = "", ptx: Callable[[], tuple[str, str]] = lambda: ("", "")
) -> tuple[Param, ...]:
    """The parameters from the mangled name of a kernel's probe. Their names come from the text of the
    parameter list, if it matches, and the sizes of structs from `ptx()`, the text and the symbol of the
    kernel in PTX.

    Raises TypeError for a type that cannot be passed.
    """
    types = demangled(mangled)
    names = [_name_in(declaration) for declaration in split_list(text)]
    if len(names) != len(types):
        names = [""] * len(types)
    found = [
        _param(kernel, name or f"arg{i}", ctype)
        for i, (name, ctype) in enumerate(zip(names, types, strict=True))
    ]
    if any(p.size for p in found):
        layout = _layout(*ptx())
        for i, (align, size) in enumerate(layout):
            if found[i].size:  # an enum is no array of bytes
                found[i] = (
                    replace(found[i], size=size, align=align)
                    if size
                    else Param(found[i].name, "int", pointer=False)
                )
    return tuple(found)


def _layout(ptx: str, symbol: str) -> list[tuple[int, int]]:
    """The alignment and the size in bytes of each parameter that is an array of bytes in PTX, as structs are;
    zeros for the others."""
    found = []
    for param in ptx.partition(f".entry {symbol}(")[2].partition(")")[0].split(","):
        align, size = re.search(r"\.align (\d+)", param), re.search(r"\[(\d+)\]", param)
        found.append((int(align[1]), int(size[1])) if align and size else (0, 0))
    return found


def _param(kernel: str, name: str, ctype: str) -> Param:
    pointer = ctype.endswith("*")
    plain = re.sub(r"^(?:const |volatile |__restrict )+", "", ctype).removesuffix("*")
    plain = re.sub(r"\*(?: const| volatile| __restrict)+$", "*", plain)
    if pointer and plain not in _POINTEES and not plain.endswith("*"):
        raise TypeError(
            f"{kernel}: cukern does not know what a tensor for {ctype} {name} must hold; declare it void*, "
            f"which takes any"
        )
    if (not pointer and plain.endswith(("&", "]", ")"))) or plain in _OTHERS.values():
        raise TypeError(
            f"{kernel}: {ctype} {name} cannot be passed; {', '.join(_SCALARS)}, structs by value and "
            f"pointers can"
        )
    const = pointer and ctype.startswith(("const ", "volatile const "))
    # a size is filled in later
    return Param(name, plain, pointer, size=int(not pointer and plain not in _SCALARS), const=const)


def packer(params: tuple[Param, ...]) -> struct.Struct:
    """Packs arguments in the layout of a kernel's parameters: each at the next multiple of its size, as in
    `struct`'s native mode."""
    form, at = "@", 0
    for p in params:
        gap = -at % p.align if p.size else 0
        form += f"{gap}x{p.format}" if gap else p.format
        at = struct.calcsize(form)
    return struct.Struct(form)


def by_value(kernel: str, param: Param, value: Any) -> Any:
    """The argument of a scalar, vector or struct as `packer` takes it.

    A struct is bytes, a ctypes.Structure or a numpy record of its size; a vector such as float2 may also be a
    sequence of its elements. A bfloat16 is a number. Raises TypeError for another type, and ValueError for
    the wrong size or a number that is too large.
    """
    if param.ctype == "__nv_bfloat16":
        return _bfloat16(kernel, param, value)
    if param.untyped or (param.ctype in _SCALARS and param.ctype.startswith((".b", ".u", ".s"))):
        return _bits(param, value)
    if not param.size:
        return value
    elements = _VECTORS.get(param.ctype)
    if elements and isinstance(value, tuple | list):
        if len(value) != len(elements):
            raise ValueError(f"{kernel}: {param} has {len(elements)} elements, got {len(value)}: {value!r}")
        try:
            return struct.pack(f"@{elements}", *value).ljust(param.size, b"\0")
        except (struct.error, OverflowError) as error:
            raise TypeError(f"{kernel}: {value!r} does not fit the parameter {param}: {error}") from None
    takes = (
        f"{'a sequence of its elements, ' if elements else ''}bytes, a ctypes.Structure or a numpy record "
        f"of {param.size} bytes"
    )
    if not isinstance(value, (*STRUCTS, np.ndarray)):
        raise TypeError(f"{kernel}: {param} takes {takes}, got {value!r}")
    data = _bytes(value)
    if len(data) != param.size:
        kind = TypeError if param.ctype.startswith(".") else ValueError  # PTX has no types but sizes
        raise kind(f"{kernel}: {param} has {param.size} bytes, got {len(data)}")
    return data


def _bytes(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.void | np.ndarray) else bytes(value)


def _bits(param: Param, value: Any) -> Any:
    """A value as the bits of a parameter of PTX: an int of either sign, bytes or a structure of its size, or
    for a .b32 or .b64 a float."""
    form = param.format
    size = struct.calcsize(form)
    if isinstance(value, STRUCTS):
        data = _bytes(value)
        return int.from_bytes(data, "little") if len(data) == size else value
    if isinstance(value, float) and param.ctype in (".b32", ".b64"):
        return struct.unpack(form, struct.pack({4: "f", 8: "d"}[size], value))[0]
    wraps = isinstance(value, int) and -(1 << 8 * size - 1) <= value < 0
    return value + (1 << 8 * size) if wraps else value


def _bfloat16(kernel: str, param: Param, value: Any) -> int:
    try:
        number = ctypes.c_float(float(value)).value if isinstance(value, int | float | np.number) else None
    except OverflowError:
        number = math.inf
    if number is None:
        raise TypeError(f"{kernel}: {value!r} ({type(value).__name__}) does not fit the parameter {param}")
    rounded = torch.tensor(number, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    if rounded.isinf() and abs(value) != math.inf:
        raise ValueError(f"{kernel}: {value!r} does not fit the parameter {param}")
    return int(rounded.view(torch.int16).item()) & 0xFFFF


def offsets(params: tuple[Param, ...]) -> list[int]:
    """The offset in bytes of each argument in what `packer` packs."""
    return [packer(params[: i + 1]).size - packer((p,)).size for i, p in enumerate(params)]


def explain_misfit(kernel: str, params: tuple[Param, ...], args: tuple) -> Exception:
    """The error for arguments that `packer` refused. It names the parameter and the value."""
    if len(args) != len(params):
        return TypeError(
            f"{kernel} takes {len(params)} arguments ({', '.join(map(str, params))}), got {len(args)}"
        )
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


_UNNAMED = re.compile(
    r"[*&\d].*|__.*|void|bool|char|short|int|long|float|double|unsigned|signed|const|volatile"
)


def _name_in(declaration: str) -> str:
    """The parameter name in a declaration, or ""."""
    words = re.findall(r"\w+|[*&]", re.sub(r"\[.*", "", declaration.partition("=")[0], flags=re.DOTALL))
    return words[-1] if len(words) > 1 and not _UNNAMED.fullmatch(words[-1]) else ""


# ---- mangled names, after the Itanium C++ ABI, https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling

_BUILTIN = re.compile("|".join(_BUILTINS))
_QUALIFIERS = {"r": "__restrict ", "V": "volatile ", "K": "const "}


def demangled(mangled: str) -> list[str]:
    """The C++ types of the parameters, from a probe's mangled name. Raises TypeError for an unsupported
    form."""
    reader = _Types(mangled)
    reader.expect("_Z16cukern_signatureIPF")
    types = reader.until_end()[1:]  # the first is the result
    return [] if types == ["void"] else types


class _Types:
    """A recursive-descent parser of the types in a mangled name. `seen`: the types that substitutions such as
    S0_ refer to."""

    def __init__(self, mangled: str):
        self.mangled, self.at, self.seen = mangled, 0, ["cukern_signature"]

    def accept(self, pattern: str | re.Pattern[str]) -> str:
        match = re.compile(pattern).match(self.mangled, self.at)
        self.at = match.end() if match else self.at
        return match[0] if match else ""

    def expect(self, pattern: str) -> str:
        if not self.accept(pattern):
            raise TypeError(
                f"cukern cannot read the parameter types {self.mangled!r} at character {self.at}: no "
                f"{pattern}"
            )
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
