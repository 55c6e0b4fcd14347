"""The parsed name of an ALU instruction."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cukern.sim.numerics import floats, integers
from cukern.sim.numerics.floats import FORMATS, Format, Function

PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16", "f32x2": "f32"}
_INTEGERS = {sign + width for sign in "us" for width in ("8", "16", "32", "64")}
_TYPES = {*FORMATS, *PACKED, *_INTEGERS, "b8", "b16", "b32", "b64", "pred"}


@dataclass(frozen=True)
class Opcode:
    """ "setp.lt.and.f32" has base setp, types (f32,) and modifiers (lt, and)."""

    name: str
    base: str
    types: tuple[str, ...]
    modifiers: tuple[str, ...]

    @property
    def type(self) -> str:
        return self.types[0]

    @property
    def is_float(self) -> bool:
        return PACKED.get(self.type, self.type) in FORMATS

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, *modifiers: str) -> str | None:
        return next((m for m in modifiers if m in self.modifiers), None)

    def only(self, *allowed: str) -> None:
        """KeyError for modifiers that the base has, but not with these types."""
        if not set(self.modifiers) <= set(allowed):
            raise KeyError(self.name)

    def each(self, make: Callable[[str], Function]) -> Function:
        """make(type); for a packed type, make(type of a half), applied to both halves."""
        return (
            functools.partial(integers.packed, 32 if self.type == "f32x2" else 16, make(PACKED[self.type]))
            if self.type in PACKED
            else make(self.type)
        )

    def flushed(self, fmt: Format, function: Function) -> Function:
        """`function`, on operands flushed to zero if the instruction says .ftz."""
        return (
            (lambda *args: function(*(floats.flush(fmt, x) for x in args))) if self.has("ftz") else function
        )


def parse(name: str) -> Opcode:
    base, *rest = name.split(".")
    return Opcode(
        name, base, tuple(p for p in rest if p in _TYPES), tuple(p for p in rest if p not in _TYPES)
    )
