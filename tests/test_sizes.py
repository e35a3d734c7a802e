"""Length limits of files and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from reading import Parsed, Search

ROOT = Path(__file__).parents[1]
FILES = [p for folder in ("core", "plugins", "tests", "benchmarks", "docs") for p in sorted((ROOT / folder).rglob("*.py"))]
#: Maximal lines of a file and of a function.
FILE, FUNCTION = 800, 60


def too_long(file: Parsed) -> Iterator[str]:
    """Yield the parts of a file that are too long."""
    lines = file.text.count("\n")
    if lines > FILE:
        yield f"{file.path}: {lines} lines"
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            size = node.end_lineno - node.lineno + 1
            if size > FUNCTION:
                yield f"{file.path}:{node.lineno}: {node.name} has {size}"


LONG = Search(__file__, (p for p in FILES if not {"build", "_build"} & {*p.parts}), lambda file: [*too_long(file)])


def test_files_and_functions_are_short() -> None:
    assert len(LONG.found()) > 500
    long = [told for found in LONG.found().values() for told in found]
    assert not long, "\n".join(long)
