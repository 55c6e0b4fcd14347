"""Reads PTX text as NVRTC writes it. PTX ISA, "Syntax"."""

import math
import re

from cukern.sim.ptx.module import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Kernel,
    Line,
    Module,
    Opaque,
    Operand,
    PtxError,
    Register,
    Symbol,
    Variable,
    Vector,
    immediate_bits,
    immediate_value,
)

# A token, after what is skipped: white space, comments and debug sections.
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
_OUTERMOST: dict[str, Register] = {}  # the scope outside a kernel's body
_FILE = re.compile(r'\.file\s+(\d+)\s+"(.*?)"')


def parse(text: str) -> Module:
    """Read a whole module. Raises PtxError."""
    return _Parser(text).module()


class _Parser:
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

    def error(self, what: str) -> PtxError:
        places = [match.start(1) for match in _TOKEN.finditer(self.text)]
        place = places[self.at] if self.at < len(places) else len(self.text)
        return PtxError(f"PTX line {self.text.count(chr(10), 0, place) + 1}: {what}, found {self.tokens[self.at]!r}")

    def skip_block(self) -> None:
        depth = 1
        while depth:
            token = self.next()
            depth += (token == "{") - (token == "}")

    # ---- a module

    def module(self) -> Module:
        module = Module()
        while self.tokens[self.at]:
            token = self.next()
            if match := _FILE.match(token):
                module.files[int(match[1])] = match[2]
            elif token == ".entry":
                kernel = self.kernel(module)
                module.kernels[kernel.name] = kernel
            elif token in (".func", ".alias"):
                self.skip_function()
            elif token in (".global", ".const", ".shared", ".local"):
                module.variables += self.variables(token[1:])
            elif token == ".pragma":
                self.next()
                self.expect(";")
            elif token not in (".visible", ".weak", ".extern", ".common", ";") and not token.startswith(
                (".version", ".target", ".address")
            ):
                self.at -= 1
                raise self.error("a directive expected")
        return module

    def skip_function(self) -> None:
        while (token := self.next()) not in (";", "{"):
            pass
        if token == "{":
            self.skip_block()

    def variables(self, space: str) -> list[Variable]:
        """The declarations up to the semicolon, after the state space."""
        found = self.declarations(space)
        self.expect(";")
        return found

    def declarations(self, space: str, only_one: bool = False) -> list[Variable]:
        align, element, lanes = 0, "", 1
        while self.tokens[self.at].startswith("."):
            word = self.next()[1:]
            if word == "align":
                align = int(self.next())
            elif word in ("v2", "v4"):
                lanes = int(word[1])
            elif word in WIDTHS:
                element = word
            elif word not in ("ptr", "global", "const", "shared", "local"):
                self.at -= 1
                raise self.error("a type of a variable expected")
        size = WIDTHS[element] // 8 * lanes
        found = []
        while True:
            variable = Variable(self.next(), space, size, align or size)
            while self.accept("["):
                variable.size *= 0 if self.tokens[self.at] == "]" else int(self.next())
                self.expect("]")
            if self.accept("="):
                self.initial_value(variable, element)
            found.append(variable)
            if only_one or not self.accept(","):
                return found

    def initial_value(self, variable: Variable, element: str) -> None:
        data, size, depth = bytearray(), WIDTHS[element] // 8, 0
        while True:
            token = self.tokens[self.at]
            depth += (token == "{") - (token == "}")
            if token in "{},":
                self.at += 1
            elif token[0].isdigit() or token == "-":
                value = self.immediate()
                data += immediate_bits(value, element).to_bytes(size, "little")
            else:
                variable.pointers.append((len(data), self.pointer()))
                data += bytes(size)
            if depth == 0:
                break
        variable.data = bytes(data)

    def pointer(self) -> Symbol:
        name = self.next()
        if name == "generic":
            self.expect("(")
            name = self.next()
            self.expect(")")
        return Symbol(name, self.offset())

    # ---- a kernel

    def kernel(self, module: Module) -> Kernel:
        kernel = Kernel(self.next())
        if self.accept("("):
            while not self.accept(")"):
                self.expect(".param")
                kernel.params += self.declarations("param", only_one=True)
                self.accept(",")
        while (token := self.next()) != "{":
            if token == ".maxntid":
                kernel.max_threads = math.prod(self.numbers())
            elif token == ".reqnctapercluster":
                x, y, z = (*self.numbers(), 1, 1)[:3]
                kernel.cluster = x, y, z
            elif token == ".explicitcluster":
                kernel.explicit_cluster = True
            elif token == ";":
                raise self.error("a kernel's body expected")
        _Body(self, kernel).block(_OUTERMOST)
        return kernel

    def numbers(self) -> list[int]:
        found = [int(self.next())]
        while self.accept(","):
            found.append(int(self.next()))
        return found

    # ---- operands

    def immediate(self) -> Immediate:
        sign = "-" if self.accept("-") else ""
        if not self.tokens[self.at][:1].isdigit():
            raise self.error("a number expected")
        return Immediate(sign + self.next())

    def offset(self) -> int:
        """The sum of all `+ number` that follow; 0 if there are none."""
        total = 0
        while self.tokens[self.at] in ("+", "-"):
            self.accept("+")
            total += int(immediate_value(self.immediate()))
        return total


class _Body:
    """Reads the statements between a kernel's braces. Each pair of braces is a scope of register names."""

    def __init__(self, parser: _Parser, kernel: Kernel):
        self.parser, self.kernel = parser, kernel
        self.line: Line | None = None
        self.callers: dict[tuple[int, int, int], Line] = {}

    def block(self, outer: dict[str, Register]) -> None:
        parser, registers, first, labels = self.parser, dict(outer), len(self.kernel.code), set(self.kernel.labels)
        while not parser.accept("}"):
            token = parser.next()
            if token.startswith(".loc") and (match := _LOC.match(token)):
                self.loc(match)
            elif token == "{":
                self.block(registers)
            elif token == ".reg":
                self.declare(registers)
            elif token in (".shared", ".local", ".param", ".global", ".const"):
                self.kernel.variables += parser.variables(token[1:])
            elif token == ".pragma":
                parser.next()
                parser.expect(";")
            elif parser.tokens[parser.at] == ":":
                parser.at += 1
                self.label(token)
            elif token == "@" or token[:1].isalpha():
                self.instruction(token, registers)
            else:
                parser.at -= 1
                raise parser.error("an instruction expected")
        if outer is not _OUTERMOST:
            self.hide_labels(first, set(self.kernel.labels) - labels)

    def hide_labels(self, first: int, labels: set[str]) -> None:
        """Rename labels inside inner braces, which are local: inline assembly may use one name many times."""
        code, names = self.kernel.code, {name: f"{name}@{first}" for name in labels if "@" not in name}
        for name, hidden in names.items():
            self.kernel.labels[hidden] = self.kernel.labels.pop(name)
        for i in range(first, len(code)):
            if code[i].opcode.startswith("bra"):
                (label,) = code[i].operands
                if isinstance(label, Symbol) and label.name in names:
                    code[i] = code[i]._replace(operands=(Symbol(names[label.name]),))

    def loc(self, match: re.Match) -> None:
        file, line, column = (int(match[i]) for i in (1, 2, 3))
        if line == 0:  # compiler-generated: belongs to the line before
            return
        caller = None
        if match[4]:
            place = int(match[4]), int(match[5]), int(match[6])
            caller = self.callers.get(place) or Line(*place)
        self.line = Line(file, line, column, caller)
        self.callers[file, line, column] = self.line
        self.kernel.start = self.kernel.start or self.line

    def declare(self, registers: dict[str, Register]) -> None:
        parser = self.parser
        width = WIDTHS.get(parser.next()[1:], 0)
        if not width:
            parser.at -= 1
            raise parser.error("a type of registers expected")
        while True:
            name = parser.next()
            names = [name]
            if parser.accept("<"):
                names = [f"{name}{i}" for i in range(int(parser.next()))]
                parser.expect(">")
            for n in names:
                registers[n] = Register(len(self.kernel.widths), max(width, 16) if width > 1 else 1)
                self.kernel.widths.append(registers[n].width)
            if not parser.accept(","):
                break
        parser.expect(";")

    def label(self, name: str) -> None:
        parser = self.parser
        if parser.accept(".branchtargets"):
            targets = [parser.next()]
            while parser.accept(","):
                targets.append(parser.next())
            parser.expect(";")
            self.kernel.tables[name] = tuple(targets)
        elif parser.accept(".callprototype"):
            parser.skip_function()
        elif name in self.kernel.labels:
            raise parser.error(f"the label {name} is there already")
        else:
            self.kernel.labels[name] = len(self.kernel.code)

    def instruction(self, token: str, registers: dict[str, Register]) -> None:
        parser, guard = self.parser, None
        if token == "@":
            negated = parser.accept("!")
            name = parser.next()
            if name not in registers:
                raise parser.error(f"{name} is no register")
            guard = registers[name]._replace(negated=negated)
            token = parser.next()
        operands = []
        if not parser.accept(";"):
            operands.append(self.operand(registers))
            while parser.accept(","):
                operands.append(self.operand(registers))
            parser.expect(";")
        self.kernel.code.append(Instruction(token, tuple(operands), guard, self.line))

    def operand(self, registers: dict[str, Register]) -> Operand:
        first = self.single(registers)
        return Vector((first, self.single(registers))) if self.parser.accept("|") else first

    def single(self, registers: dict[str, Register]) -> Operand:
        parser = self.parser
        token = parser.tokens[parser.at]
        register = registers.get(token)
        if register is not None:
            parser.at += 1
            return register
        if token in ("{", "("):
            return self.vector(registers, "}" if token == "{" else ")")
        if token == "[":
            return self.address(registers)
        if token == "-" or token[:1].isdigit():
            return parser.immediate()
        parser.at += 1
        if token == "!":
            return registers[parser.next()]._replace(negated=True)
        if not re.match(r"[%$_A-Za-z]", token):
            parser.at -= 1
            raise parser.error("an operand expected")
        return Symbol(token, parser.offset())

    def vector(self, registers: dict[str, Register], end: str) -> Vector:
        self.parser.at += 1
        items: list[Operand] = []
        while not self.parser.accept(end):
            items.append(self.operand(registers))
            self.parser.accept(",")
        return Vector(tuple(items))

    def address(self, registers: dict[str, Register]) -> Operand:
        parser = self.parser
        parser.at += 1
        token, base = parser.tokens[parser.at], None
        if token[:1].isdigit() or token == "-":
            offset = int(immediate_value(parser.immediate()))
        else:
            parser.at += 1
            base = registers.get(token) or Symbol(token)
            offset = parser.offset()
        if parser.accept("]"):
            return Address(base, offset)
        while (token := parser.next()) != "]":
            pass
        return Opaque(f"[{base}, ...]")
