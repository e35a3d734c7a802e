"""Lengths of sentences in README.md, docs and public docstrings. Run as a script, it lists the long ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
CODE: Final = ("core/rammer", "plugins/cuda/rammer_cuda", "plugins/rocm/rammer_rocm", "plugins/ipu_sim/rammer_ipu_sim")
MOST_WORDS: Final = 25
#: Largest fraction of long sentences in each part.
LIMITS: Final = {"README.md": 0.0, "docs": 0.01, "docstrings": 0.01}
_BLOCKS: Final = re.compile(r"<!-- generated.*?<!-- end -->|<!--.*?-->|^ *```.*?^ *```|\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
_ITEM: Final = re.compile(r"^ *([-*+]|\d+\.|#+|>) |^ *:\w|^\s*$|^\s*(Args|Returns|Raises):|^ +\w+( \([^)]*\))?: ")
_END: Final = re.compile(r"(?<=[.!?])[)*\"'`]*\s+")


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown or of a docstring. A code span or a link counts as its words without addresses."""
    text = re.sub(r"\]\([^)]*\)", "]", _BLOCKS.sub("\n\n", text))
    text = re.sub(r"(`+)[^`]*\1", "`code`", text)
    paragraph = list[str]()
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            yield from (s for cell in line.split("|") for s in _END.split(cell.strip()) if s)
        elif _ITEM.match(line):
            yield from (s for s in _END.split(" ".join(paragraph)) if s)
            paragraph = [line.strip()]
        else:
            paragraph.append(line.strip())
    yield from (s for s in _END.split(" ".join(paragraph)) if s)


def read_docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module and of its public classes and functions."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                nodes += [n for n in node.body if isinstance(n, kinds) and not n.name.startswith("_")]


def read_texts(part: str) -> Iterator[tuple[Path, str]]:
    """Yield the texts of a part, each with its file."""
    if part == "docstrings":
        for path in sorted(p for folder in CODE for p in (ROOT / folder).rglob("*.py")):
            yield from ((path, text) for text in read_docstrings(path))
    else:
        paths = [ROOT / part] if part.endswith(".md") else sorted((ROOT / part).rglob("*.md"))
        yield from ((path, path.read_text()) for path in paths if "_build" not in path.parts)


def count_words(sentence: str) -> int:
    """Count words: a code span is one word, and a sign on its own is none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def find_long(part: str) -> tuple[int, list[tuple[Path, int, str]]]:
    """Return the number of sentences in a part, and its long ones with file and words."""
    sentences = [(path.relative_to(ROOT), s) for path, text in read_texts(part) for s in split_sentences(text)]
    counted = [(path, count_words(s), s) for path, s in sentences]
    return len([n for _, n, _ in counted if n > 1]), [c for c in counted if c[1] > MOST_WORDS]


@pytest.mark.parametrize("part", LIMITS)
def test_few_sentences_are_long(part: str) -> None:
    count, long = find_long(part)
    assert count and len(long) <= LIMITS[part] * count, "\n".join(f"{p}: {n} words: {s}" for p, n, s in long)


def test_long_sentences_are_found() -> None:
    clause = "one " * 14
    assert [count_words(s) for s in split_sentences(f"Short `a b c` text. {clause}\n{clause}end.\n\n- item")] == [3, 29, 1]
    assert [count_words(s) for s in split_sentences(f"```\n{clause * 2}\n```\n| {clause} | {clause * 2}|")] == [14, 28]


if __name__ == "__main__":
    for part in LIMITS:
        count, long = find_long(part)
        print(f"{part}: {len(long)} of {count} ({len(long) / count:.1%})")
        print(*(f"  {path}: {words} words: {sentence}" for path, words, sentence in long), sep="\n")
