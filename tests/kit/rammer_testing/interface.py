"""The public interface: stable modules and names, their signatures as text, and uses of private names.

``python -m rammer_testing.interface`` prints the signatures. With files or folders of Python it prints every non-public import
from rammer. The exit code is then 1 if it finds any."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rammer.device.manifest import Backend, Bound, Loaded, Profiler

__all__ = ["GROUPS", "MEMBERS", "names_of", "private_uses", "signatures"]

#: Public modules by purpose. The names in ``__all__`` of each are public.
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "To use rammer": ("rammer", "rammer.errors", "rammer.onnx_backend", "rammer.torch"),
    "To write a device": (
        "rammer.child_processes",
        "rammer.cache",
        "rammer.codegen.program_values",
        "rammer.ir.launches",
        "rammer.device.arrays",
        "rammer.device.execution_forms",
        "rammer.device.manifest",
        "rammer.device.hooks",
        "rammer.device.lazy_sequence",
        "rammer.device.loader",
        "rammer.device.shared_constants",
        "rammer.device.driver_calls",
        "rammer.device.shipped_kernels",
        "rammer.ir.constants",
        "rammer.ir.device",
        "rammer.ir.evaluate",
        "rammer.ir.operator",
        "rammer.ir.program",
        "rammer.ir.types",
        "rammer.fusion.tile_search",
        "rammer.fusion.tile_traffic",
        "rammer.ir.fold_rows",
        "rammer.tuning.interleaved_timing",
        "rammer.tuning.kernel_probe",
        "rammer.runtime.host_memory",
        "rammer.runtime.host_bound",
        "rammer.verify",
    ),
    "To join devices": (
        "rammer.distributed.distributed_program",
        "rammer.distributed.transport",
    ),
    "To write kernels in C": (
        "rammer.codegen",
        "rammer.codegen.products",
        "rammer.codegen.emit",
        "rammer.codegen.c_target",
        "rammer.codegen.dialects",
        "rammer.codegen.vector_text",
        "rammer.codegen.writer",
    ),
    "To write fusion rules": (
        "rammer.fusion.fusion_rules",
        "rammer.fusion.connect",
        "rammer.fusion.group_prices",
        "rammer.fusion.tile_graph",
    ),
    "To write operators, passes and policies": (
        "rammer.device.custom_operators",
        "rammer.frontend.lower.lowering_registry",
        "rammer.ir.expr",
        "rammer.ir.compute",
        "rammer.ir.graph",
        "rammer.passes.pass_pipeline",
        "rammer.schedule.policy",
    ),
    "To test": (
        "rammer_testing.conformance",
        "rammer_testing.subject",
        "rammer_testing.interface",
        "rammer_testing.seeds",
    ),
}
#: Classes with only some public members. Classes outside public modules are returned to users, who never import them.
MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "rammer.device.loader.Registry": ("open", "status", "statuses"),
    "rammer.device.loader.DeviceStatus": ("name", "state", "reason", "hardware"),
    "rammer.runtime.executable.Executable": ("run", "submit", "bind", "close", "inputs", "outputs", "head", "timing"),
    "rammer.runtime.bound_call.BoundCall": (
        "inputs",
        "outputs",
        "notes",
        "clock",
        "stream",
        "run",
        "submit",
        "synchronize",
        "seconds",
        "write",
        "to_host",
        "close",
    ),
    "rammer.runtime.model_source.Head": ("name", "inputs", "outputs"),
    "rammer.ir.port.ModelPort": ("name", "dtype", "shape"),
    "rammer.runtime.loaded_model.Timing": ("device", "host", "total", "notes"),
}
#: The most letters of a default or a constant in a signature.
_SHOWN: Final = 80
#: Members with two underscores that callers use.
_SPECIAL: Final = ("__init__", "__call__", "__str__", "__getitem__", "__iter__", "__len__", "__bool__")


def modules() -> tuple[str, ...]:
    """Return all public modules."""
    return tuple(m for group in GROUPS.values() for m in group)


@cache
def names_of(module: str) -> tuple[str, ...]:
    """Return the public names of a public module, in order."""
    return tuple(sorted(import_module(module).__all__))


# --- signatures -------------------------------------------------------------------------------------


def signatures() -> str:
    """Return every public name with its arguments, fields, members and defaults. The text comes from the source, so that it is
    equal on every version of Python."""
    parts = [f"# {group}\n\n" + "".join(f"{m}\n{_indented(_module(m))}\n" for m in members) for group, members in GROUPS.items()]
    others = (path for path in MEMBERS if path.rpartition(".")[0] not in modules())
    given = "".join(f"{path}\n{_indented(_limited(path))}\n" for path in others)
    return "\n".join([*parts, f"# What users are given\n\n{given}"])


def _module(module: str) -> str:
    return "".join(
        f"class {name}\n{_indented(_limited(f'{module}.{name}'))}"
        if f"{module}.{name}" in MEMBERS
        else _described(*_found(module, name))
        for name in names_of(module)
    )


def _limited(path: str) -> str:
    """Return the public members of a class that also has private ones. They may be those of a base class."""
    module, _, name = path.rpartition(".")
    (node,), _ = _found(module, name)
    assert isinstance(node, ast.ClassDef)
    bases = [n for base in node.bases for n in _found(module, ast.unparse(base))[0]]
    classes = [n for n in (*bases, node) if isinstance(n, ast.ClassDef)]
    known = dict(member for n in classes for member in _members(n))
    lacking = [m for m in MEMBERS[path] if m not in known and not any(_set_inside(n, m) for n in classes)]
    if lacking:
        raise ValueError(f"{path} has no member {lacking[0]}")
    return "".join(known.get(m, f"{m}\n") for m in MEMBERS[path])


def _set_inside(node: ast.ClassDef, member: str) -> bool:
    """Return True if a method sets the attribute."""
    return any(isinstance(n, ast.Attribute) and n.attr == member and isinstance(n.ctx, ast.Store) for n in ast.walk(node))


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def _found(module: str, name: str) -> tuple[list[ast.stmt], str]:
    """Return the statements that define ``name``, followed through imports, and the name there."""
    found = list[ast.stmt]()
    body = _tree(module).body
    for node in (*body, *(n for guard in body if isinstance(guard, ast.If) for n in guard.body)):
        if name in _defined(node):
            found.append(node)
        elif isinstance(node, ast.ImportFrom) and node.module and _ours(node.module):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _found(node.module, alias.name)
    if not found:
        raise ValueError(f"{module} has {name!r} in __all__, but does not define it")
    return found, name


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [t.id for t in targets if isinstance(t, ast.Name)]


def _described(nodes: Sequence[ast.stmt], name: str) -> str:
    return "".join(_statement(n, name) for n in nodes)


def _statement(node: ast.stmt, name: str) -> str:
    if isinstance(node, ast.FunctionDef):
        return _function(node)
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        head = f"{_decorators(node)}class {node.name}{f'({bases})' if bases else ''}\n"
        return head + _indented("".join(text for _, text in _members(node)))
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {ast.unparse(node.annotation)}{_value(node.value)}\n"
    assert isinstance(node, ast.Assign)
    return f"{name}{_value(node.value)}\n"


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for member in node.body:
        for name in _defined(member):
            if not name.startswith("_") or name in _SPECIAL:
                yield name, _statement(member, name)


def _function(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{_decorators(node)}def {node.name}({ast.unparse(node.args)}){returns}\n"


def _decorators(node: ast.FunctionDef | ast.ClassDef) -> str:
    return "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list)


def _value(node: ast.expr | None) -> str:
    if node is None:
        return ""
    text = ast.unparse(node)
    return f" = {text}" if len(text) <= _SHOWN else " = ..."


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


# --- capabilities ---


def optional_members() -> dict[tuple[str, str], str]:
    """Return the docstrings of all members of a plugin's objects that have a default, by class and name, in one line each."""
    found = dict[tuple[str, str], str]()
    for kind in (Backend, Profiler, Loaded, Bound):
        for name, member in vars(kind).items():
            text = " ".join((getattr(member, "__doc__", None) or "").split())
            if not name.startswith("_") and name not in kind.__abstractmethods__ and "default" in text:
                found[kind.__name__, name] = text
    return found


# --- imports ----------------------------------------------------------------------------------------


def private_uses(text: str) -> list[str]:
    """Return the private names of rammer that Python source imports: ``line 3: rammer.device.loader.GROUP``."""
    tree = ast.parse(text)
    found, bound = list[_Use](), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _ours(node.module) and not node.level:
            found += [_Use(node.lineno, f"{node.module}.{a.name}") for a in node.names if not _public(node.module, a.name)]
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in modules()}
        elif isinstance(node, ast.Import):
            ours = [a for a in node.names if _ours(a.name)]
            found += [_Use(node.lineno, a.name) for a in ours if a.name not in modules()]
            bound |= {a.asname: a.name for a in ours if a.asname} | {a.name: a.name for a in ours if not a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (module := bound.get(ast.unparse(node.value))) and not _public(module, node.attr):
            found.append(_Use(node.lineno, f"{module}.{node.attr}"))
    return [f"line {use.line}: {use.name}" for use in sorted(set(found))]


@dataclass(frozen=True, order=True)
class _Use:
    line: int
    name: str


def _ours(module: str) -> bool:
    return module.partition(".")[0] in ("rammer", "rammer_testing")


def _public(module: str, name: str) -> bool:
    """Return True if ``name`` of ``module`` is public: in its ``__all__``, or a public module or its package."""
    whole = f"{module}.{name}"
    return (module in modules() and name in names_of(module)) or any(f"{m}.".startswith(f"{whole}.") for m in modules())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description="The public interface of rammer, and who uses more than that.")
    parser.add_argument("paths", nargs="*", type=Path, help="Python files, or folders of them")
    paths = parser.parse_args(arguments).paths
    if not paths:
        print(signatures(), end="")
        return 0
    files = [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]
    uses = [f"{f}: {use}" for f in files for use in private_uses(f.read_text())]
    print("\n".join([*uses, f"{len(files)} files take {len(uses)} private names from rammer"]))
    return 1 if uses else 0


if __name__ == "__main__":
    sys.exit(main())
