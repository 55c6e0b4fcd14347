"""What a kernel's own parameter list says: which arguments it takes, and how they are packed for a launch.

The .cu file is the one declaration. An argument that does not fit it is refused here, instead of being read as other bits on the GPU.
"""

import re
import struct
from dataclasses import dataclass

import torch

from cukern.runtime.sources import Source

CTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float", torch.float64: "double"}

_POINTEES = {name: (dtype,) for dtype, name in CTYPES.items()} | {
    "half": (torch.float16,),
    "bool": (torch.bool,),
    "char": (torch.int8,),
    "signed char": (torch.int8,),
    "unsigned char": (torch.uint8, torch.bool),
    "short": (torch.int16,),
    "unsigned short": (torch.uint16,),
    "int": (torch.int32,),
    "unsigned int": (torch.uint32,),
    "unsigned": (torch.uint32,),
    "long": (torch.int64,),
    "long long": (torch.int64,),
    "unsigned long long": (torch.uint64,),
    "float2": (torch.float32, torch.complex64),
    "float4": (torch.float32,),
}

_SCALARS = {
    "bool": "?",
    "char": "b",
    "signed char": "b",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "long": "q",
    "long long": "q",
    "unsigned long": "Q",
    "unsigned long long": "Q",
    "size_t": "Q",
    "float": "f",
    "double": "d",
}


@dataclass(frozen=True)
class Param:
    """One parameter: its name, its C++ type without qualifiers, and whether it is a pointer."""

    name: str
    ctype: str
    pointer: bool

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The torch dtypes that a pointer may point to; empty where any may."""
        return _POINTEES.get(self.ctype, ())

    @property
    def format(self) -> str:
        """The `struct` format of the value."""
        return "Q" if self.pointer else _SCALARS[self.ctype]

    def __str__(self) -> str:
        return f"{self.ctype}{'*' if self.pointer else ''} {self.name}"


def kernel_names(source: Source) -> list[str]:
    """The names of all __global__ functions of a source, in order."""
    return [match["name"] for match in _GLOBAL.finditer(source.code)]


def parse(source: Source, name: str) -> tuple[Param, ...]:
    """The parameters of the kernel `name`, of the source or a file that it includes, template arguments put in. Raises ValueError and
    TypeError."""
    base, _, rest = name.partition("<")
    values = split_list(rest.rpartition(">")[0])
    match = _find(source.code, base) or _find(source.included, base)
    if not match:
        raise ValueError(f"{source.path} has no __global__ function {base!r}; it has {', '.join(kernel_names(source)) or 'none'}")
    formals = [_template_parameter(t) for t in split_list(match["template"] or "")]
    if sum(default is None for _, default in formals) > len(values) or len(values) > len(formals):
        raise ValueError(f"kernel {base!r} has {len(formals)} template parameters, {name!r} gives {len(values)}")
    types: dict[str, str] = {}
    for i, (formal, default) in enumerate(formals):
        value = values[i] if i < len(values) else default or ""
        types[formal] = types.get(value, value)
    end = _closing(match.string, match.end() - 1)
    return tuple(_param(text, types, name) for text in split_list(match.string[match.end() : end]))


def _find(code: str, kernel: str) -> re.Match[str] | None:
    return next((match for match in _GLOBAL.finditer(code) if match["name"] == kernel.strip()), None)


def packer(params: tuple[Param, ...]) -> struct.Struct:
    """Packs a call's arguments as the kernel reads them: each at the next multiple of its size, which is `struct`'s native order too."""
    return struct.Struct("@" + "".join(p.format for p in params))


def offsets(params: tuple[Param, ...]) -> list[int]:
    """Where in what `packer` packs each argument begins."""
    formats = [p.format for p in params]
    return [struct.calcsize("@" + "".join(formats[:i]) + "0" + formats[i]) for i in range(len(formats))]


def explain_misfit(kernel: str, params: tuple[Param, ...], args: tuple) -> Exception:
    """The error for arguments that `packer` refused: a TypeError or ValueError that names the parameter, the value and the rule."""
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


# Qualifiers and attributes, such as __launch_bounds__(256), may stand between __global__ and the name.
_GLOBAL = re.compile(
    r"(?:template\s*<(?P<template>[^;{}]*?)>\s*)?"
    r'(?:extern\s*"C"\s*)?(?:static\s+)?__global__\s+'
    r"(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*(?:static\s+)?void\s+(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*"
    r"(?P<name>\w+)\s*\("
)


def split_list(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    parts, depth, part = [], 0, ""
    for char in text:
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += char
    return [p for p in (*parts, part.strip()) if p]


def _template_parameter(text: str) -> tuple[str, str | None]:
    declaration, _, default = text.partition("=")
    return declaration.split()[-1], default.strip() or None


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError("a parameter list that does not end")


def _param(text: str, types: dict[str, str], kernel: str) -> Param:
    words = re.sub(r"\s+|\b(?:const|volatile|struct|typename|__restrict__|__restrict|__grid_constant__)\b", " ", text)
    match = re.fullmatch(r"\s*(?P<type>[\w:<>, ]*[\w>])\s*(?P<pointer>[*\s]*?)\s*\b(?P<name>\w+)\s*(?P<array>\[\w*\])?\s*", words)
    if not match or match["pointer"].count("*") > 1:
        raise TypeError(f"cukern cannot read the parameter {text.strip()!r} of kernel {kernel!r}")
    ctype = " ".join(match["type"].split())
    ctype = types.get(ctype, ctype)
    param = Param(match["name"], ctype, "*" in match["pointer"] or match["array"] is not None)
    if not param.pointer and ctype not in _SCALARS:
        raise TypeError(f"{text.strip()!r} of kernel {kernel!r} cannot be passed by value; the types that can are {', '.join(_SCALARS)}")
    return param
