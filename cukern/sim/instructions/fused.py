"""Arithmetic of a straight-line stretch as one Python function, generated when the stretch has run a few
times.

A value has up to four forms: `v`, the bits, as in a register; `x`, a float32 array; `e`, the same with one
bit pattern for NaN; `d`, the same as float64. A form is made when an instruction first needs it, so most
views and conversions vanish. Constants are arrays without dimensions (`z`: of bits), with which numpy is
quickest. Instructions without a template call their function of raw bits. Registers that nothing reads later
are not written."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukern.runtime.compile.forks import cached_property
from cukern.sim.machine.batch import Array, Group
from cukern.sim.machine.machine import Machine
from cukern.sim.numerics import floats
from cukern.sim.ptx.module import Register

# before that many, a stretch is interpreted: generating a function takes as long as running it several times
_RUNS = 6
_MOST_LANES = 4096  # with more, the cost of a call does not matter, and float64 arrays do not fit the cache

# From the opcode to the form of the operands, the expression, and the form of the result (x: a NaN may have
# any bits).
_SIGNS = {"add": "+", "add.rn": "+", "sub": "-", "sub.rn": "-", "mul": "*", "mul.rn": "*", "div.rn": "/"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_TEMPLATES = {
    **{f"{name}.f32": ("x", f"{{}} {sign} {{}}", "x") for name, sign in _SIGNS.items()},
    **{f"setp.{name}.f32": ("x", f"{{}} {sign} {{}}", "v") for name, sign in _COMPARISONS.items()},
    **{f"{name}.f32": ("x", f"{name}({{}}, {{}})", "x") for name in ("max", "min")},
    **{f"fma.{mode}.f32": ("d", f"fma_{mode}({{}} * {{}}, {{}})", "e") for mode in ("rn", "rm")},
    **{"neg.f32": ("e", "-{}", "e"), "abs.f32": ("e", "abs({})", "e"), "sqrt.rn.f32": ("x", "sqrt({})", "x")},
    **{
        "ex2.approx.ftz.f32": ("x", "ex2({})", "x"),
        "cvt.sat.f32.f32": ("x", "fmin(fmax({} + ZERO, ZERO), ONE)", "e"),
    },
}
_NAMES = {
    **{"F4": np.dtype("f4"), "F8": np.dtype("f8"), "U4": np.dtype("u4"), "ZERO": np.array(0, "f4"),
       "ONE": np.array(1, "f4")},
    **{"sqrt": np.sqrt, "fmin": np.fmin, "fmax": np.fmax, "abs": np.abs, "exact": floats.exact32},
    **{"fma_rn": floats.fma32, "fma_rm": floats.fma32_down, "ex2": floats.ex2_ftz, "max": floats.largest32,
       "min": floats.least32},
}  # fmt: skip
# From which form another one is made, and how.
_FORMS = {
    "v": ("e", "{}.view(U4)"),
    "e": ("x", "exact({})"),
    "x": ("v", "{}.view(F4)"),
    "d": ("x", "{}.astype(F8)"),
}
# Instructions whose functions take constants without dimensions, with these types.
_PLAIN = {"add", "sub", "mul", "mad", "and", "or", "xor", "shl", "shr", "min", "max", "setp", "selp"}
_PLAIN_TYPES = {"u32", "s32", "b32", "u64", "s64", "b64"}


def _is_plain(opcode: str) -> bool:
    base, *parts = opcode.split(".")
    return base in _PLAIN and _PLAIN_TYPES.issuperset(p for p in parts if p[-1].isdigit())


def _has_template(opcode: str, sources: list[int]) -> bool:
    """min and max may have three operands, from sm_100 on. Their templates have two."""
    return opcode in _TEMPLATES and _TEMPLATES[opcode][1].count("{}") == len(sources)


class Compute:
    """An instruction that only computes: registers = functions(sources). A destination may also be an
    operand."""

    def __init__(self, results: Sequence[tuple[Callable[..., Array], Register]], sources: list[int]):
        self.functions, self.targets, self.sources = (
            [f for f, _ in results],
            [register.number for _, register in results],
            sources,
        )

    def __call__(self, m: Machine, group: Group) -> None:
        operands = [m.get(group, s) for s in self.sources]
        for target, values in zip(
            self.targets, [function(*operands) for function in self.functions], strict=True
        ):
            m.put(group, target, values)


class Fused:
    def __init__(self, steps: list[tuple[str, Compute]], outputs: list[int], constants: dict[int, Array]):
        """`steps`: opcodes and computations; `outputs`: the registers that may be read after them."""
        self.steps, self.outputs, self.constants, self.runs = steps, outputs, constants, 0

    def __call__(self, m: Machine, group: Group) -> None:
        self.runs += 1
        if self.runs < _RUNS or len(group.lanes) > _MOST_LANES:
            for _, step in self.steps:
                step(m, group)
            return
        function, inputs = self.function
        if group.whole:
            for register, values in zip(self.outputs, function(*[m.regs[r] for r in inputs]), strict=True):
                m.regs[register] = values
        else:
            for register, values in zip(
                self.outputs, function(*[m.get(group, r) for r in inputs]), strict=True
            ):
                m.put(group, register, values)

    @cached_property
    def function(self) -> tuple[Callable[..., tuple[Array, ...]], list[int]]:
        """A function from the values of the input registers to those of the output registers, and the input
        registers."""
        writer = _Writer(self.constants)
        for opcode, step in self.steps:
            writer.add(opcode, step)
        results = "".join(f"{writer.form(writer.value_of(r), 'v')}, " for r in self.outputs)
        exec(
            "\n    ".join(
                (f"def run({', '.join(writer.inputs.values())}):", *writer.lines, f"return ({results})")
            ),
            writer.names,
        )
        return writer.names["run"], list(writer.inputs)


class _Writer:
    def __init__(self, constants: dict[int, Array]):
        self.constants, self.lines, self.names = constants, list[str](), dict[str, Any](_NAMES)
        self.inputs: dict[int, str] = {}  # register -> name of its value
        self.values: dict[int, int] = {}  # register -> the number of its current value
        self.forms: list[dict[str, str]] = []  # by value: form -> name

    def new(self, form: str) -> int:
        """The number of a value that has this form."""
        self.forms.append({form: f"{form}{len(self.forms)}"})
        return len(self.forms) - 1

    def value_of(self, register: int) -> int:
        if register not in self.values:
            value = self.values[register] = self.new("v")
            if register not in self.constants:
                self.inputs[register] = f"v{value}"
                return value
            bits = self.constants[register]
            found = {"v": bits, "z": bits.reshape(())}
            if bits.itemsize == 4:
                single = bits.view(np.float32).reshape(())
                found |= {"x": single, "d": single.astype(np.float64)}
            self.names |= {f"{form}{value}": constant for form, constant in found.items()}
            self.forms[value] = {form: f"{form}{value}" for form in found}
        return self.values[register]

    def form(self, value: int, form: str) -> str:
        """The name of a value in this form."""
        forms = self.forms[value]
        if form == "x" and "e" in forms:
            return forms["e"]
        if form == "e" and "v" in forms:
            return self.form(value, "x")
        if form not in forms:
            source, text = _FORMS[form]
            self.lines.append(f"{form}{value} = {text.format(self.form(value, source))}")
            forms[form] = f"{form}{value}"
        return forms[form]

    def add(self, opcode: str, step: Compute) -> None:
        sources = [self.value_of(s) for s in step.sources]
        variable = any("z" not in self.forms[s] for s in sources)
        if step.functions == [np.copy]:
            self.values[step.targets[0]] = sources[0]
        elif variable and len(step.targets) == 1 and _has_template(opcode, sources):
            form, text, result = _TEMPLATES[opcode]
            operands = [self.form(s, form) for s in sources]
            value = self.values[step.targets[0]] = self.new(result)
            self.lines.append(f"{result}{value} = {text.format(*operands)}")
        else:
            plain = variable and _is_plain(opcode)
            operands = [
                self.forms[s]["z"] if plain and "z" in self.forms[s] else self.form(s, "v") for s in sources
            ]
            for function, target, value in [
                (f, t, self.new("v")) for f, t in zip(step.functions, step.targets, strict=True)
            ]:
                self.names[f"f{value}"], self.values[target] = function, value
                self.lines.append(f"v{value} = f{value}({', '.join(operands)})")
