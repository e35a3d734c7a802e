"""Files and functions are short."""

from __future__ import annotations

import ast
from pathlib import Path

from rammer.testing.some import some

ROOT = Path(__file__).parents[1]
FILES = [p for folder in ("core", "plugins", "tests", "benchmarks", "docs") for p in sorted((ROOT / folder).rglob("*.py"))]
#: Lines of a file and of a function, at most.
FILE, FUNCTION = 400, 60


def test_files_and_functions_are_short() -> None:
    assert len(FILES) > 500
    long = list[str]()
    for path in some(p for p in FILES if not {"build", "_build"} & {*p.parts}):
        text = path.read_text()
        long += [f"{path}: {text.count(chr(10))} lines"] if text.count("\n") > FILE else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                size = node.end_lineno - node.lineno + 1
                long += [f"{path}:{node.lineno}: {node.name} has {size}"] if size > FUNCTION else []
    assert not long, "\n".join(long)
