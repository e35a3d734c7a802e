"""Loops of assertions over computed collections: the test asserts that the collection is not empty,
since an empty loop passes. And names that tests replace in modules: they exist there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from reading import Search

from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[1]
#: Tests and shared test modules, without the test kit.
FILES = sorted({*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")} - {*ROOT.glob("tests/kit/**/*.py")})
#: Calls that preserve the number of elements.
SAME = {"enumerate", "sorted", "list", "tuple", "set", "dict", "reversed", "zip", "islice"}
#: Methods that preserve the number of elements.
PARTS = {"items", "values", "keys", "split", "splitlines", "finditer"}
#: Loops that may be empty for a single document. A test asserts that all documents together have elements.
ALLOWED = {
    "tests/documents/test_documents.py": {
        "LINK.findall(path.read_text())",
        "set(MODULE.findall(text))",
        "MEMBER.findall(text)",
        "set(FILE.findall(text)) - {'docs/_build/html'}",
        "COMMAND.findall(text)",
    },
}

Comp = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Loop = tuple[int, ast.expr, set[str]]


def base(e: ast.expr) -> ast.expr:
    """Return the subexpression that determines if ``e`` is empty."""
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id in SAME and e.args:
        return base(e.args[0])
    if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr in PARTS and not e.args:
        return base(e.func.value)
    return base(e.value) if isinstance(e, ast.Subscript) and isinstance(e.slice, ast.Slice) else e


def written(e: ast.expr, known: set[str]) -> bool:
    """Return True if the text itself shows that ``e`` is not empty: a literal, a range, or ``some``."""
    e = base(e)
    if isinstance(e, ast.Tuple | ast.List | ast.Set):
        return any(not isinstance(x, ast.Starred) or written(x.value, known) for x in e.elts)
    if isinstance(e, ast.Dict):
        return any(k is not None or written(v, known) for k, v in zip(e.keys, e.values, strict=True))
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add | ast.BitOr):
        return written(e.left, known) or written(e.right, known)
    if isinstance(e, ast.IfExp):
        return written(e.body, known) and written(e.orelse, known)
    if isinstance(e, ast.Call):
        return ast.unparse(e.func) in ("range", "some", "count", "dict.fromkeys", "product")
    return isinstance(e, ast.JoinedStr) or (isinstance(e, ast.Constant) and bool(e.value)) or ast.unparse(e) in known


def assigned(body: list[ast.stmt], known: set[str]) -> set[str]:
    """Return ``known`` and the names assigned to expressions that ``written`` accepts."""
    names = set(known)
    for node in (n for s in body for n in ast.walk(s)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = zip(target.elts, node.value.elts, strict=False) if _both(target, node.value) else [(target, node.value)]
                names |= {ast.unparse(t) for t, v in pairs if written(v, names)}
    return names


def _both(*nodes: ast.expr) -> bool:
    return all(isinstance(n, ast.Tuple) for n in nodes)


def parts_of(test: ast.expr) -> list[ast.expr]:
    """Return the operands of a conjunction."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def asserted(nodes: list[ast.AST]) -> set[str]:
    """Return the expressions whose size or content an assertion (or hypothesis' ``assume``) checks."""
    said = set[str]()
    assumed = [n.args[0] for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "assume"]
    for test in (*assumed, *(n.test for n in nodes if isinstance(n, ast.Assert))):
        for part in parts_of(test):
            sides = [part.left, *part.comparators] if isinstance(part, ast.Compare) else [part]
            for side in sides:
                whole = isinstance(side, ast.Call) and ast.unparse(side.func) == "len"
                said.add(ast.unparse(base(side.args[0] if whole else side)))  # type: ignore[attr-defined]
    return said


def said_of_all(part: ast.expr, lists: dict[str, Comp]) -> Iterator[Comp]:
    """Yield the comprehension that ``assert part`` checks for all or no elements, directly or through a name."""
    none = isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
    side = part.operand if none else part.left if isinstance(part, ast.Compare) else part  # type: ignore[attr-defined]
    none |= isinstance(part, ast.Compare) and ast.unparse(part.comparators[0]) in ("[]", "{}", "set()", "()")
    if isinstance(side, ast.Call) and ast.unparse(side.func) == ("any" if none else "all"):
        side, none = side.args[0], True
    side = lists.get(ast.unparse(side), side)
    if none and isinstance(side, Comp):
        yield side


def loops(node: ast.AST, bound: set[str], lists: dict[str, Comp]) -> Iterator[Loop]:
    """Yield loops that assert, ``assert all(...)`` and ``assert not [...]``: line, iterable, and the names bound by enclosing
    loops."""
    for child in ast.iter_child_nodes(node):
        inner = bound
        if isinstance(child, ast.For):
            if any(isinstance(n, ast.Assert) for s in child.body for n in ast.walk(s)):
                yield child.lineno, child.iter, bound
            inner = bound | {n.id for n in ast.walk(child) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        elif isinstance(child, ast.Assert):
            for part in parts_of(child.test):
                yield from ((child.lineno, c.generators[0].iter, bound) for c in said_of_all(part, lists))
        yield from loops(child, inner, lists)


def blind(tree: ast.Module) -> Iterator[tuple[int, ast.expr]]:
    """Yield the loops that pass on an empty iterable. Loops over part of an enclosing loop's element are left to that loop."""
    consts = assigned([s for s in tree.body if isinstance(s, ast.Assign | ast.AnnAssign)], set())
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        nodes = [*ast.walk(function)]
        if not any(isinstance(n, ast.Assert) for n in nodes):
            continue
        known, said = assigned(function.body, consts), asserted(nodes)
        given = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, Comp)]
        lists = {ast.unparse(t): n.value for n in given for t in n.targets if isinstance(n.value, Comp)}
        for line, over, bound in loops(function, set(), lists):
            names = {n.id for n in ast.walk(over) if isinstance(n, ast.Name)}
            if not (names & bound or written(over, known) or ast.unparse(base(over)) in said):
                yield line, over


BLIND = Search(__file__, FILES, lambda file: {(n, ast.unparse(e)) for n, e in blind(file.tree)})


@pytest.mark.slow
def test_no_loop_of_assertions_passes_over_nothing() -> None:
    paths = {str(p.relative_to(ROOT)): p for p in some(FILES)}
    found = {name: BLIND.found()[p] for name, p in paths.items()}
    told = [f"{p}:{n}: {text}" for p in some(found) for n, text in sorted(found[p]) if text not in ALLOWED.get(p, ())]
    assert not told, "\n".join(["say some(...) of rammer_testing.nonempty, or assert it:", *told])
    assert {p: {text for _, text in found[p]} for p in ALLOWED} == ALLOWED, "an exception that nothing needs"


@pytest.mark.parametrize(
    ("code", "sees"),
    [
        ("for p in folder.glob('*.py'):\n  assert p", True),
        ("assert all(k.right for k in kernels)", True),
        ("for k, v in found.items():\n  if v:\n    assert k", True),
        ("found = [x for x in y]\nfor k in found[:3]:\n  assert k", True),
        ("for k in some(found):\n  assert k", False),
        ("for k in kernels:\n  for o in k.operators:\n    assert o\nassert len(kernels) > 3", False),
        ("assert found and all(k for k in found)", False),
        ("found = ('a', 'b')\nfor k in found:\n  assert k", False),
        ("for k in range(9):\n  for j in others:\n    assert j", True),
        ("for k in found:\n  print(k)", False),
        ("wrong = [k for k in found if k < 0]\nassert not wrong, wrong", True),
        ("assert not any(k < 0 for k in found)", True),
        ("assert [k for k in found if k < 0] == []", True),
        ("assert len(found) > 9 and {k for k in found if k < 0} == set()", False),
    ],
)
def test_the_search_finds(code: str, sees: bool) -> None:
    text = "def test():\n" + "".join(f"  {line}\n" for line in code.splitlines())
    assert bool(list(blind(ast.parse(text)))) == sees


def test_some_is_lazy_and_never_empty() -> None:
    assert list(some(x for x in (1, 2))) == [1, 2]
    with pytest.raises(AssertionError, match="nothing was found"):
        some([])


def replaced(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the module, the object imported from it or "", and the attribute of each ``monkeypatch.setattr(name, "...")``."""
    known = dict[str, tuple[str, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {a.asname or a.name: (node.module, a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            known |= {a.asname: (a.name, "") for a in node.names if a.asname}
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr="setattr"), [ast.Name(owner), ast.Constant(str(attribute)), *_], keywords):
                if owner in known and not any(k.arg == "raising" for k in keywords):
                    yield *known[owner], attribute


def test_replaced_names_exist() -> None:
    """Check the names that slow tests replace too: ``make test`` does not run these tests."""
    found = {r: file for file in FILES for r in replaced(ast.parse(file.read_text())) if r[0].startswith("rammer")}
    missing = list[str]()
    for (module, name, attribute), file in some(found.items()):
        owner = importlib.import_module(module)
        if name:
            owner = getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
        if not hasattr(owner, attribute):
            missing.append(f"{file.name}: {module} {name} has no {attribute}")
    assert not missing
