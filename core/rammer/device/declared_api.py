"""Static reader of the API version in a plugin's source: a newer plugin may fail to import with this core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

#: The value of a keyword argument ``api``, up to a separator.
_API: Final = re.compile(r"\bapi\s*=\s*([^\s,)]+)")
#: Maximum number of files read per package.
MOST: Final = 400


@dataclass(frozen=True, slots=True)
class DeclaredDevice:
    """A ``Device(...)`` call in a plugin's source: its API version, and its name if that is a literal."""

    name: str
    api: int


def devices_of_other_api(point: Any, api: int, whole: bool = False) -> tuple[DeclaredDevice, ...]:
    """Return the devices with a literal API version other than ``api`` in the module of an entry point, or in its ``whole``
    package. Imports nothing. Returns an empty tuple if the source is unavailable."""
    module = getattr(point, "module", "")
    if not isinstance(module, str) or not module:
        return ()
    return tuple(device for path in _module_files(module, whole) for device in _in_file(path, api) if device.api != api)


def _module_files(module: str, whole: bool) -> Iterator[Path]:
    """Yield the files of ``module``, located from its top package: a lookup by submodule name would import its parents."""
    top, _, rest = module.partition(".")
    try:
        spec: ModuleSpec | None = find_spec(top)
    except (ImportError, ValueError):
        return
    if spec is None:
        return
    folders = [Path(p) for p in spec.submodule_search_locations or ()]
    if whole:
        yield from (p for folder in folders for p, _ in zip(sorted(folder.rglob("*.py")), range(MOST), strict=False))
    elif not rest:
        yield from [Path(spec.origin)] if spec.origin else []
    else:
        inner = Path(*rest.split("."))
        yield from (p for f in folders for p in (f / inner.with_suffix(".py"), f / inner / "__init__.py") if p.is_file())


def _in_file(path: Path, api: int) -> Iterator[DeclaredDevice]:
    """Yield the calls of ``Device`` whose ``api`` is a number, or a name to which the module assigns a number. A file in which
    every ``api=`` is followed by the number ``api`` is not parsed: every start reads the plugins."""
    try:
        text = path.read_text()
        tree = ast.parse(text) if {*_API.findall(text)} - {str(api)} else None
    except (OSError, ValueError, SyntaxError):
        return
    if tree is None:
        return
    numbers = dict(_literal_assignments(tree))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = {k.arg: k.value for k in call.keywords}
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        declared = _constant_value(given.get("api"), numbers)
        if called.endswith("Device") and type(declared) is int:
            name = _constant_value(given.get("name", call.args[0] if call.args else None), numbers)
            yield DeclaredDevice(name if isinstance(name, str) else "", declared)


def _literal_assignments(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Yield the names to which the module assigns a literal."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Constant):
            yield from ((t.id, value.value) for t in targets if isinstance(t, ast.Name))


def _constant_value(node: ast.expr | None, names: dict[str, object]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    return names.get(node.id) if isinstance(node, ast.Name) else None
