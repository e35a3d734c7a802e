"""A table as a Markdown file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from facts import section, stamp

from rammer.errors import BadInput
from rammer.report.text_table import markdown_table


@dataclass(frozen=True)
class Result:
    """The result of a table. ``notes`` are paragraphs after it; ``parts`` are more tables, each with a heading. Its first
    ``known`` columns identify a row."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    parts: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = field(default_factory=dict)
    known: int = 1

    def document(self, commands: str, facts: Mapping[str, str]) -> str:
        """Return the Markdown file; ``commands`` are formatted by ``said``."""
        pieces = [f"# {self.title}", commands, markdown_table(self.rows, self.headers), *self.notes]
        for heading, (headers, rows) in self.parts.items():
            pieces += [f"## {heading}", markdown_table(rows, headers)]
        return "\n\n".join((*pieces, section(dict(facts))))


def said(command: str) -> str:
    """Return a command with today's date and the build."""
    return f"`{command}` ({stamp()})"


def both(first: Result, second: Result) -> Result:
    """Return one table from two calls with different models. Raises BadInput if their columns differ."""
    if not first.rows or not second.rows:  # a model that never started has no columns
        first, second = (first, second) if first.rows else (second, first)
        return replace(first, notes=[*dict.fromkeys((*first.notes, *second.notes))])
    if list(first.headers) != list(second.headers) or first.parts or second.parts:
        raise BadInput(f"the models of {first.title!r} have other columns each", hint="name them in calls of their own")
    rows, notes = [*first.rows, *second.rows], dict.fromkeys((*first.notes, *second.notes))
    return replace(first, rows=rows, notes=[*notes])


def joined(result: Result, command: str, kept: str, facts: Mapping[str, str]) -> tuple[Result, str]:
    """Return ``result`` after the rows of other models in the document ``kept``, and the commands of both. The ``known`` columns
    identify the rows. Raises BadInput if the two are incompatible: other columns, another environment, or more than one table."""
    table = re.search(r"^\|.*\n\|[-|: ]+\|\n((?:\|.*\n)*)", kept, re.MULTILINE)
    commands = re.findall(r"^`.*`(?: \(.*\))?$", kept.partition("\n|")[0], re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table[0].splitlines()] if table else [[]]
    if cells[0] != list(result.headers) or result.parts:
        raise _other(kept)
    check_kept(kept, facts)
    measured = {tuple(row[: result.known]) for row in result.rows}
    rows = [row for row in cells[2:] if tuple(row[: result.known]) not in measured]
    others = [c for c in commands if c.rpartition("`")[0] != command.rpartition("`")[0]] if rows else []
    return replace(result, rows=[*rows, *result.rows]), "\n\n".join((*others, command))


def check_kept(kept: str, facts: Mapping[str, str]) -> None:
    """Raise BadInput if the document ``kept`` comes from another environment."""
    if not kept.endswith(section(dict(facts))):
        raise _other(kept)


def _other(kept: str) -> BadInput:
    hint = "they have other columns, several tables, or another environment: leave out --keep, or name another folder"
    return BadInput(f"the rows of {kept.partition(chr(10))[0].strip('# ')!r} cannot be kept", hint=hint)


def write(path: Path, text: str) -> None:
    """Write the file atomically: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
