"""The layout of the package: no import cycles, and layers that import only those below them."""

import ast
from pathlib import Path

import pytest
from helpers import TREE

# The one cycle that is left; empty this when kron_linear is reorganised.
CYCLE_OF_KRON_TO_BE_BROKEN = {f"cukern.ops.kron_{name}" for name in ("gemm", "groups", "lanes", "quarter", "registers", "sixteen", "split")}
LAYERS_OF_SIM = ("ptx", "numerics", "memory", "machine", "instructions")


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of cukern that its file imports: at the top, under TYPE_CHECKING, and inside functions.

    `from package import module` is an import of the module, `from package import name` one of the package's __init__.py.
    """
    paths = {
        path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in (root / "cukern").rglob("*.py")
    }
    modules, graph = set(paths.values()), {}
    for path, module in paths.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= full & modules | ({node.module} if full - modules else set())
        graph[module] = names & modules
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components with at least one import inside."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        reached[start] = found
    return [set(c) for c in {frozenset(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a]}]


@pytest.mark.parametrize(
    "text",
    [
        "from cukern.b import x",
        "from cukern import b",
        "import cukern.b",
        "if TYPE_CHECKING:\n    from cukern.b import x",
        "def f():\n    from cukern import b",
    ],
)
def test_each_form_of_import_makes_a_cycle(tmp_path, text):
    (tmp_path / "cukern").mkdir()
    for name, source in (("__init__", ""), ("a", text), ("b", "import cukern.a")):
        (tmp_path / "cukern" / f"{name}.py").write_text(source)
    assert cycles(import_graph(tmp_path)) == [{"cukern.a", "cukern.b"}]


def test_no_import_cycles():
    assert [c for c in cycles(import_graph(TREE)) if not c <= CYCLE_OF_KRON_TO_BE_BROKEN] == []


def test_sim_packages_import_only_lower_ones():
    graph = import_graph(TREE)
    for i, layer in enumerate(LAYERS_OF_SIM):
        allowed = tuple(f"cukern.sim.{name}" for name in ("faults", *LAYERS_OF_SIM[: i + 1]))
        modules = [module for module in graph if module.startswith(f"cukern.sim.{layer}.")]
        assert modules
        for module in modules:
            assert [name for name in graph[module] if name.startswith("cukern.sim") and not name.startswith(allowed)] == [], module
