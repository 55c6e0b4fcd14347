"""Reads PTX text as NVRTC writes it. PTX ISA, "Syntax"."""

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from cukern.sim.ptx import module as ptx

# One token, after white space, comments and debug sections, which are skipped.
_TOKEN = re.compile(
    r"""(?:\s+|//[^\n]*|/\*.*?\*/|\.section\s+[^{\s]+\s*\{[^{}]*\})*
    (\.(?:loc|file|version|target|address_size)\b[^\n]*
    |"(?:[^"\\]|\\.)*"
    |\.[A-Za-z_]\w*
    |[%$_A-Za-z](?:[\w.$%]|::)*
    |0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?
    |\Z|\S)""",
    re.VERBOSE | re.DOTALL,
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+"(.*?)"')
_T = TypeVar("_T")


def parse(text: str) -> ptx.Module:
    """Read a whole module. Raises ptx.PtxError."""
    return _Parser(text).module()


class _Parser:
    kernel: ptx.Kernel  # being read, like the three below
    registers: dict[str, Any]  # by name, in the current scope; a Symbol stands for a variable of a call
    line: ptx.Line | None
    callers: dict[tuple[int, int, int], ptx.Line]

    def __init__(self, text: str):
        self.text = text
        self.tokens = _TOKEN.findall(text)  # the last is empty
        self.at = 0

    # ---- tokens

    def next(self) -> str:
        token = self.tokens[self.at]
        if token == "":
            raise self.error("more text expected")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(f"{token!r} expected")

    def list_of(self, item: Callable[[], _T]) -> list[_T]:
        """One or more items, separated by commas."""
        found = [item()]
        while self.accept(","):
            found.append(item())
        return found

    def error(self, what: str, back: int = 0) -> ptx.PtxError:
        """The error at the current token, or `back` tokens before it."""
        self.at -= back
        places = [match.start(1) for match in _TOKEN.finditer(self.text)]
        place = places[self.at] if self.at < len(places) else len(self.text)
        return ptx.PtxError(
            f"PTX line {self.text.count(chr(10), 0, place) + 1}: {what}, found {self.tokens[self.at]!r}"
        )

    def skip(self) -> None:
        """Skip the rest of a statement, or a function with its body."""
        depth = 0
        token = ""
        while depth or token not in (";", "}"):
            token = self.next()
            depth += (token == "{") - (token == "}")

    # ---- a module

    def module(self) -> ptx.Module:
        module = ptx.Module()
        while self.tokens[self.at]:
            token = self.next()
            if match := _FILE.match(token):
                module.files[int(match[1])] = match[2]
            elif token == ".entry":
                self.read_kernel()
                module.kernels[self.kernel.name] = self.kernel
            elif token == ".func":
                self.read_function(module)
            elif token in (".alias", ".pragma"):
                self.skip()
            elif token in (".global", ".const", ".shared", ".local"):
                module.variables += self.variables(token[1:])
            elif not token.startswith(
                (".visible", ".weak", ".extern", ".common", ";", ".version", ".target", ".address")
            ):
                raise self.error("a directive expected", back=1)
        return module

    def variables(self, space: str) -> list[ptx.Variable]:
        """The declarations up to the semicolon, after the state space."""
        type_ = self.variable_type()
        found = self.list_of(lambda: self.variable(space, *type_))
        self.expect(";")
        return found

    def variable_type(self) -> tuple[str, int, int]:
        """The type of an element, the bytes of an element or vector, and the alignment."""
        align = 0
        element = ""
        lanes = 1
        pointer = False
        while self.tokens[self.at].startswith("."):
            word = self.next()[1:]
            if word == "align":
                align = align if pointer else int(self.tokens[self.at])  # after .ptr: of what it points to
                self.at += 1
            elif word in ("v2", "v4"):
                lanes = int(word[1])
            elif word in ptx.WIDTHS:
                element = word
            elif word == "attribute":  # (.managed)
                self.at += 3
            elif word == "ptr":
                pointer = True
            elif word not in ("global", "const", "shared", "local"):
                raise self.error("a type of a variable expected", back=1)
        size = ptx.WIDTHS[element] // 8 * lanes
        return element, size, align or size

    def variable(self, space: str, element: str, size: int, align: int) -> ptx.Variable:
        variable = ptx.Variable(self.next(), space, size, align)
        while self.accept("["):
            variable.size *= 0 if self.tokens[self.at] == "]" else int(self.next())
            self.expect("]")
        if self.accept("="):
            self.initial_value(variable, element)
        return variable

    def initial_value(self, variable: ptx.Variable, element: str) -> None:
        data = bytearray()
        size = ptx.WIDTHS[element] // 8
        depth = 0
        while True:
            token = self.tokens[self.at]
            depth += (token == "{") - (token == "}")
            if token in "{},":
                self.at += 1
            elif token[0].isdigit() or token == "-":
                data += ptx.immediate_bits(self.immediate(), element).to_bytes(size, "little")
            else:
                variable.pointers.append((len(data), self.pointer()))
                data += bytes(size)
            if depth == 0:
                break
        variable.data = bytes(data)

    def pointer(self) -> ptx.Symbol:
        name = self.next()
        if name == "generic":
            self.expect("(")
            name = self.next()
            self.expect(")")
        return ptx.Symbol(name, self.offset())

    # ---- a kernel

    def read_kernel(self) -> None:
        self.kernel = kernel = ptx.Kernel(self.next())
        self.registers = {}
        self.line = None
        self.callers = {}
        kernel.params = self.parameters()
        while (token := self.next()) != "{":
            if token == ".maxntid":
                kernel.max_threads = math.prod(self.list_of(self.number))
            elif token == ".reqnctapercluster":
                x, y, z = (*self.list_of(self.number), 1, 1)[:3]
                kernel.cluster = x, y, z
            elif token == ".explicitcluster":
                kernel.explicit_cluster = True
            elif token == ";":
                raise self.error("a kernel's body expected")
        self.statements()

    def parameters(self) -> list[ptx.Variable]:
        """A list of parameters in parentheses, if there is one."""
        found = []
        if self.accept("("):
            while not self.accept(")"):
                self.expect(".param")
                found.append(self.variable("param", *self.variable_type()))
                self.accept(",")
        return found

    def read_function(self, module: ptx.Module) -> None:
        """.func: a function with its body, or its declaration."""
        self.registers = {}
        self.line = None
        self.callers = {}
        results = self.parameters()
        self.kernel = function = ptx.Kernel(self.next(), results=results)
        function.params = self.parameters()
        module.declared.append(function.name)
        while (token := self.next()) not in ("{", ";"):
            pass
        if token == "{":
            self.statements()
            module.functions[function.name] = function

    def block(self) -> None:
        """The statements between inner braces: a scope of register names and labels."""
        outer = self.registers
        first = len(self.kernel.code)
        labels = set(self.kernel.labels)
        self.registers = dict(outer)
        self.statements()
        self.registers = outer
        self.hide_labels(first, set(self.kernel.labels) - labels)

    def statements(self) -> None:
        """The statements up to the closing brace."""
        while not self.accept("}"):
            token = self.next()
            if token.startswith(".loc") and (match := _LOC.match(token)):
                self.loc(match)
            elif token == "{":
                self.block()
            elif token == ".reg":
                self.declare()
            elif token == ".param":
                self.declare_argument()
            elif token in (".shared", ".local", ".global", ".const"):
                self.kernel.variables += self.variables(token[1:])
            elif token == ".pragma":
                self.skip()
            elif self.accept(":"):
                self.label(token)
            elif token == "@" or token[:1].isalpha():
                self.instruction(token)
            else:
                raise self.error("an instruction expected", back=1)

    def hide_labels(self, first: int, labels: set[str]) -> None:
        """Rename the labels of a block, which are local: inline assembly may use one name many times."""
        code = self.kernel.code
        names = {name: f"{name}@{first}" for name in labels if "@" not in name}
        for name, hidden in names.items():
            self.kernel.labels[hidden] = self.kernel.labels.pop(name)
        for i in range(first, len(code)):
            if code[i].opcode.startswith("bra"):
                (label,) = code[i].operands
                if isinstance(label, ptx.Symbol) and label.name in names:
                    code[i] = code[i]._replace(operands=(ptx.Symbol(names[label.name]),))

    def loc(self, match: re.Match) -> None:
        file, line, column = (int(match[i]) for i in (1, 2, 3))
        if line == 0:  # compiler-generated: belongs to the line before
            return
        caller = None
        if match[4]:
            place = int(match[4]), int(match[5]), int(match[6])
            caller = self.callers.get(place) or ptx.Line(*place)
        self.line = ptx.Line(file, line, column, caller)
        self.callers[file, line, column] = self.line
        self.kernel.start = self.kernel.start or self.line

    def declare(self) -> None:
        """.reg: the registers of one type."""
        width = ptx.WIDTHS.get(self.next()[1:], 0)
        if not width:
            raise self.error("a type of registers expected", back=1)
        for names in self.list_of(self.register_names):
            for name in names:
                self.registers[name] = ptx.Register(
                    len(self.kernel.widths), max(width, 16) if width > 1 else 1
                )
                self.kernel.widths.append(self.registers[name].width)
        self.expect(";")

    def declare_argument(self) -> None:
        """.param in a function: a variable of a call, whose name other calls may use, too."""
        for variable in self.variables("param"):
            hidden = f"{variable.name}@{self.kernel.name}.{len(self.kernel.variables)}"
            self.registers[variable.name] = ptx.Symbol(hidden)
            variable.name = hidden
            self.kernel.variables.append(variable)

    def register_names(self) -> list[str]:
        """A name, or `name<count>` for `count` numbered names."""
        name = self.next()
        if not self.accept("<"):
            return [name]
        names = [f"{name}{i}" for i in range(self.number())]
        self.expect(">")
        return names

    def label(self, name: str) -> None:
        if self.accept(".branchtargets"):
            self.kernel.tables[name] = tuple(self.list_of(self.next))
            self.expect(";")
        elif self.accept(".callprototype"):
            self.skip()
        elif name in self.kernel.labels:
            raise self.error(f"the label {name} is there already")
        else:
            self.kernel.labels[name] = len(self.kernel.code)

    def instruction(self, token: str) -> None:
        guard = None
        if token == "@":
            negated = self.accept("!")
            name = self.next()
            if name not in self.registers:
                raise self.error(f"{name} is no register")
            guard = self.registers[name]._replace(negated=negated)
            token = self.next()
        operands: list[ptx.Operand] = []
        if not self.accept(";"):
            operands = self.list_of(self.operand)
            self.expect(";")
        self.kernel.code.append(ptx.Instruction(token, tuple(operands), guard, self.line))

    # ---- operands

    def number(self) -> int:
        return int(self.next())

    def immediate(self) -> ptx.Immediate:
        sign = "-" if self.accept("-") else ""
        if not self.tokens[self.at][:1].isdigit():
            raise self.error("a number expected")
        return ptx.Immediate(sign + self.next())

    def offset(self) -> int:
        """The sum of all `+ number` that follow; 0 if there are none."""
        total = 0
        while self.tokens[self.at] in ("+", "-"):
            self.accept("+")
            total += int(ptx.immediate_value(self.immediate()))
        return total

    def operand(self) -> ptx.Operand:
        first = self.single()
        return ptx.Vector((first, self.single())) if self.accept("|") else first

    def single(self) -> ptx.Operand:
        token = self.tokens[self.at]
        register = self.registers.get(token)
        if register is None and (token == "-" or token[:1].isdigit()):
            return self.immediate()
        self.at += 1
        if register is not None:
            return register
        if token in ("{", "("):
            return self.vector("}" if token == "{" else ")")
        if token == "[":
            return self.address()
        if token == "!":
            return self.registers[self.next()]._replace(negated=True)
        if not re.match(r"[%$_A-Za-z]", token):
            raise self.error("an operand expected", back=1)
        return ptx.Symbol(token, self.offset())

    def vector(self, end: str) -> ptx.Vector:
        items: list[ptx.Operand] = []
        while not self.accept(end):
            items.append(self.operand())
            self.accept(",")
        return ptx.Vector(tuple(items))

    def address(self) -> ptx.Operand:
        token = self.tokens[self.at]
        base = None
        if token[:1].isdigit() or token == "-":
            offset = int(ptx.immediate_value(self.immediate()))
        else:
            self.at += 1
            base = self.registers.get(token) or ptx.Symbol(token)
            offset = self.offset()
        if self.accept("]"):
            return ptx.Address(base, offset)
        if base is not None and self.tokens[self.at : self.at + 2] == [",", "{"]:
            self.at += 2
            coordinates = self.vector("}")
            self.expect("]")
            return ptx.Address(base, offset, coordinates.items)
        while (token := self.next()) != "]":
            pass
        return ptx.Symbol(f"[{base}, ...]")  # a form that no simulated instruction has
