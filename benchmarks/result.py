"""A table as a file, and the one page with all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from facts import section, stamp

from rammer.errors import BadInput
from rammer.report.table import markdown

#: The page that shows every table of a folder.
PAGE = "tables.md"
#: What whoever reads the page has to know, a paragraph each.
READING: Final = (
    "A file is `HARDWARE_TABLE.md`: `cpu` is device rocm (OpenCL) on a CPU, `h200` device cuda on an NVIDIA H200, `ipu_sim` a "
    "simulated IPU, whose times are simulated ones. The day and the build (a commit) stand behind the command that made rows; "
    "where they do not, a table is of an earlier build. The machine and its software are at the end of each file.",
    "A time is the median of many runs of a model at batch 1 in float32, unless its table says otherwise: from the first launch "
    "to the end of the last, inputs and outputs on the device, without compiling. Programs of a model took turns in one process. "
    "`predicted` is the cost model's time for the same program; `rel. L2` the distance of the outputs to the reference over its "
    "length, the worst output's; `tasks` are pieces of operators, `waits` what they wait for, `launches` kernels of one run.",
)


@dataclass(frozen=True)
class Result:
    """What a table found. ``notes`` are paragraphs behind it; ``parts`` are more tables, each with a heading. Its first ``known``
    columns say what a row is of."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    parts: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = field(default_factory=dict)
    known: int = 1

    def document(self, commands: str, facts: Mapping[str, str]) -> str:
        """The Markdown file; ``commands`` are ``said``."""
        pieces = [f"# {self.title}", commands, markdown(self.rows, self.headers), *self.notes]
        for heading, (headers, rows) in self.parts.items():
            pieces += [f"## {heading}", markdown(rows, headers)]
        return "\n\n".join((*pieces, section(dict(facts))))


def said(command: str) -> str:
    """A command, with the day and the build of today."""
    return f"`{command}` ({stamp()})"


def both(first: Result, second: Result) -> Result:
    """A table of two calls, of other models each. BadInput where their columns differ."""
    if not first.rows or not second.rows:  # what was not begun tells no columns
        first, second = (first, second) if first.rows else (second, first)
        return replace(first, notes=[*dict.fromkeys((*first.notes, *second.notes))])
    if list(first.headers) != list(second.headers) or first.parts or second.parts:
        raise BadInput(f"the models of {first.title!r} have other columns each", hint="name them in calls of their own")
    rows, notes = [*first.rows, *second.rows], dict.fromkeys((*first.notes, *second.notes))
    return replace(first, rows=rows, notes=[*notes])


def joined(result: Result, command: str, kept: str, facts: Mapping[str, str]) -> tuple[Result, str]:
    """``result`` and its ``said`` command, with what the document ``kept`` says of others (by the columns ``known``) before them.

    BadInput where the two cannot stand in one table: other columns, another environment, or more than one table."""
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
    """BadInput where the document ``kept`` is of another environment."""
    if not kept.endswith(section(dict(facts))):
        raise _other(kept)


def _other(kept: str) -> BadInput:
    hint = "they have other columns, several tables, or another environment: leave out --keep, or name another folder"
    return BadInput(f"the rows of {kept.partition(chr(10))[0].strip('# ')!r} cannot be kept", hint=hint)


def write(path: Path, text: str) -> None:
    """The file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def page(folder: Path, order: Sequence[str]) -> str:
    """Every Markdown file of ``folder`` on one page, one heading level lower; those named in ``order`` first."""
    known = {name: i for i, name in enumerate(order)}
    files = [p for p in folder.glob("*.md") if p.name != PAGE]
    files.sort(key=lambda p: (known.get(p.stem.partition("_")[2], len(known)), p.name))
    head = ["# All tables", "Written by `python -m benchmarks page`; each section is a file of this folder.", *READING]
    head.append("\n".join(f"- [{p.stem}]({p.name})" for p in files))
    return "\n\n".join((*head, *(lowered(p.read_text(), p.stem) for p in files))) + "\n"


def lowered(text: str, title: str) -> str:
    """Headings one level lower, but in fenced code; a text without a title gets ``title``."""
    lines, fenced = [], False
    for line in text.strip().splitlines():
        fenced ^= line.startswith("```")
        lines.append(f"#{line}" if not fenced and re.match(r"#{1,5} ", line) else line)
    return "\n".join(lines if lines and lines[0].startswith("## ") else [f"## {title}", "", *lines])
