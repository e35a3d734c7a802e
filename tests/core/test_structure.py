"""Structure of the core: no import from a higher layer, at any place, and no use of another file's private names."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from reading import Search

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
#: Package -> the row of each of its modules, counted from the top.
ROWS: Mapping[str, Mapping[str, int]] = {
    contract["containers"][0]: {
        module.strip(): row for row, names in enumerate(contract["layers"]) for module in names.replace("|", ":").split(":")
    }
    for contract in CONTRACTS
    if contract["type"] == "layers"
}
#: Upward imports for type checking only: hooks have the types that plugins pass to every step.
TYPED = {
    (f"rammer.device.{module}", target)
    for module in ("hooks", "loader")
    for target in (
        "rammer.frontend.lower.lowering_registry",
        "rammer.fusion.fusion_rules",
        "rammer.passes.pass_pipeline",
        "rammer.schedule.policy",
        "rammer.distributed.transport.protocol",
    )
}
#: Private names of others without a public equivalent, and names that only look private.
ALLOWED = {
    **{"_exit": "os", "_sleep": "torch.cuda", "_replace": "a named tuple's", "_dynamo": "torch", "_guards": "torch"},
    **{"_pytree": "torch.utils", "_version": "torch.Tensor", "_schema": "torch.ops"},  # torch has no public names
}
#: Tests that replace the internals of a class.
WHITE_BOX = {
    *(("plugins/cuda/tests/test_single.py", f"_{n}") for n in ("words", "step", "lanes")),
}


def module_of(file: Path) -> str:
    """Return the dotted name of a file of the core."""
    return ".".join(file.relative_to(ROOT / "core").with_suffix("").parts).removesuffix(".__init__")


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield modules that a file imports: at its head, in functions, for types only, and by name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("rammer."):
            yield node.value


def upwards(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield imports of ``module`` from a row above it."""
    for target in imported(nodes):
        for package, rows in ROWS.items():
            if module.startswith(f"{package}.") and target.startswith(f"{package}."):
                here, there = (name.removeprefix(f"{package}.").split(".")[0] for name in (module, target))
                if here in rows and rows.get(there, len(rows)) < rows[here]:
                    yield module, target


CORE = [f for f in (ROOT / "core/rammer").rglob("*.py") if "plugin-template" not in f.parts]
UPWARDS = Search(__file__, CORE, lambda file: {*upwards(module_of(file.path), file.nodes)})


@pytest.mark.slow
def test_no_import_runs_back_up() -> None:
    assert len(CORE) > 200 and len(ROWS) > 3
    assert set().union(*UPWARDS.found().values()) == TYPED


@pytest.mark.parametrize(
    "code",
    [
        "from rammer.plan.program_builder import build_program",
        "def f():\n    from rammer.compiler.compiler import Compiler",
        "if TYPE_CHECKING:\n    import rammer.jit.session",
        "importlib.import_module('rammer.cli.run')",
    ],
)
def test_the_search_finds_imports(code: str) -> None:
    assert [*upwards("rammer.ir.compute", ast.walk(ast.parse(code)))]


#: Folders whose modules import each other by names that begin there.
PLUGINS = tuple(sorted(p.parent for p in (ROOT / "plugins").glob("*/pyproject.toml")))
IMPORT_ROOTS = (ROOT / "core", *PLUGINS, ROOT / "tests/kit", ROOT / "benchmarks")
PACKAGES = (
    "core/rammer",
    *(f"plugins/{p.name}/rammer_{p.name}" for p in PLUGINS),
    "tests/kit",
    "benchmarks",
)
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "plugin-template" not in path.parts
    for root in IMPORT_ROOTS
    if path.is_relative_to(root)
}


def imported_modules(module: str, is_package: bool, nodes: Iterable[ast.AST], known: Container[str]) -> set[str]:
    """Return the ``known`` modules that a module imports anywhere: at its head, in functions and for types only."""
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package else -1]
            before = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*before, *([node.module] if node.module else [])])
            found.update(full if (full := f"{base}.{a.name}") in known else base for a in node.names)
    return {name for name in found if name in known and name != module}


def import_cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of several modules, each sorted (Tarjan's algorithm)."""
    number, low = dict[str, int](), dict[str, int]()
    stack, cycles = list[str](), list[list[str]]()

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for target in graph[module]:
            if target not in number:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], number[target])
        if low[module] == number[module]:
            at = stack.index(module)
            cycles.extend([sorted(stack[at:])] if len(stack) - at > 1 else [])
            del stack[at:]

    for module in graph:
        if module not in number:
            visit(module)
    return cycles


NAMES = {path: module for module, path in MODULES.items()}
IMPORTS = Search(
    __file__, NAMES, lambda file: imported_modules(NAMES[file.path], file.path.name == "__init__.py", file.nodes, MODULES)
)


def test_no_modules_import_each_other() -> None:
    graph = {NAMES[path]: sorted(targets) for path, targets in IMPORTS.found().items()}
    assert len(graph) > 600 and sum(map(len, graph.values())) > 3000
    cycles = import_cycles(graph)
    assert not cycles, "\n".join(" <-> ".join(cycle) for cycle in cycles)


@pytest.mark.parametrize(
    "code",
    [
        "from a.two import f",
        "from a import two",
        "import a.two",
        "from .two import f",
        "from . import two",
        "def f():\n    from a.two import g",
        "if TYPE_CHECKING:\n    from a.two import T",
    ],
)
def test_import_cycles_are_found(code: str) -> None:
    texts = {"a": "", "a.one": code, "a.two": "import a.three", "a.three": "from a.one import f"}
    graph = {name: imported_modules(name, name == "a", ast.walk(ast.parse(text)), texts) for name, text in texts.items()}
    assert import_cycles(graph) == [["a.one", "a.three", "a.two"]]


def private(name: str) -> bool:
    """Return True if a name is private to its owner."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def owned(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names that a file defines: functions, classes, fields, variables, and attributes of ``self``."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id in ("self", "cls") else set()
    return names


def borrowed(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield private names of other files that a file imports or reads from objects."""
    mine = owned(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "_typeshed"):
            yield from (a.name for a in node.names if private(a.name))
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in mine:
            yield node.attr


@dataclass(frozen=True)
class Class:
    """The searched facts about a class."""

    name: str
    file: Path
    methods: frozenset[str]
    bases: tuple[str, ...]


def classes(file: Path, nodes: Iterable[ast.AST]) -> Iterator[Class]:
    """Yield the classes of a file."""
    for c in nodes:
        if isinstance(c, ast.ClassDef):
            methods = frozenset(m.name for m in c.body if isinstance(m, ast.FunctionDef))
            yield Class(c.name, file, methods, tuple(ast.unparse(b).split(".")[-1] for b in c.bases))


def inherited(known: Iterable[Class]) -> Iterator[tuple[str, str]]:
    """Yield private methods that a class replaces in a class of another file."""
    named = {c.name: c for c in known}
    for c in named.values():
        for base in c.bases:
            other = named.get(base, c)
            both = {m for m in c.methods & other.methods if private(m)}
            yield from ((f"{c.name}({base})", method) for method in both if other.file != c.file)


ALL = [f for folder in ("core", "plugins", "tests", "benchmarks", "docs") for f in (ROOT / folder).rglob("*.py")]
BORROWED = Search(__file__, ALL, lambda file: {*borrowed(file.nodes)} - {*ALLOWED})
CLASSES = Search(__file__, ALL, lambda file: [*classes(file.path, file.nodes)])


def test_no_file_needs_anothers_private_names() -> None:
    assert len(ALL) > 500
    assert {(str(f.relative_to(ROOT)), name) for f, names in BORROWED.found().items() for name in names} == WHITE_BOX
    assert not {*inherited(c for found in CLASSES.found().values() for c in found)}


@pytest.mark.parametrize(
    "code", ["from a import _b", "x._rates = 1", "x._db", "class A(B):\n    def f(self):\n        self._over()", "a._b().c()"]
)
def test_the_search_finds_private_names(code: str) -> None:
    assert [*borrowed([*ast.walk(ast.parse(code))])]


def test_the_search_finds_what_is_inherited() -> None:
    one, two = "class A:\n    def _f(self): ...", "class B(a.A):\n    def _f(self): ..."
    known = [c for file, text in (("a", one), ("b", two)) for c in classes(Path(file), ast.walk(ast.parse(text)))]
    assert [*inherited(known)] == [("B(A)", "_f")]


#: Maximal number of parameters of a function. Parameters that belong together form a value.
MOST = 6
#: The public entry point has the options of the command line as keywords.
DOORS = {("core/rammer/__init__.py", "compile")}


def crowded(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield functions with too many parameters."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]
            if len([n for n in names if n not in ("self", "cls")]) > MOST:
                yield node.name


FOLDERS = (
    "core/rammer",
    "tests/kit/rammer_testing",
    "benchmarks/rammer_bench",
    "plugins/rocm/rammer_rocm",
    "plugins/ipu_sim/rammer_ipu_sim",
)
CROWDED = Search(__file__, [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")], lambda file: [*crowded(file.nodes)])


def test_no_function_takes_more_than_six_parameters() -> None:
    found = CROWDED.found()
    assert len(found) > 240
    assert {(str(f.relative_to(ROOT)), name) for f, names in found.items() for name in names} == DOORS


@pytest.mark.parametrize("parameters", ["a, b, c, d, e, f, g", "a, /, b, c, *, d, e, f, g=1", "a, b, c, d, e, f, **others"])
def test_the_search_finds_crowds(parameters: str) -> None:
    assert [*crowded(ast.walk(ast.parse(f"class A:\n    def f(self, {parameters}): ...")))] == ["f"]
