"""Golden files: JSON lines sorted by record name, and readable differences between two sets of records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]

#: Folder of the golden files.
FOLDER = Path(__file__).with_name("data")
#: Fields that form a record's name, in this order.
NAMES = ("device", "precision", "model", "operator", "case")
#: Printed differences of one kind; all are counted.
SHOWN = 12


def name_of(record: Record) -> tuple[str, ...]:
    return tuple(str(record[n]) for n in NAMES if n in record)


@dataclass(frozen=True, order=True)
class Difference:
    """A changed field of a record, and a description of the change."""

    file: str
    field: str
    name: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        return f"{self.file} {' '.join(self.name)}: {self.field}: {self.how}"


def read(file: str) -> tuple[Record, list[Record]]:
    """Return the head of a golden file and its records. The FileNotFoundError explains how to create the file."""
    path = FOLDER / f"{file}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: python tests/golden --bless writes it")
    head, *records = map(json.loads, path.read_text().splitlines())
    return head, records


def write(file: str, head: Record, records: Iterable[Record]) -> None:
    """Write a golden file."""
    FOLDER.mkdir(exist_ok=True)
    lines = [head, *sorted(records, key=name_of)]
    (FOLDER / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def differences(file: str, old: Iterable[Record], new: Iterable[Record]) -> list[Difference]:
    """Return all differences between two sets of records, sorted."""
    before, after = ({name_of(r): r for r in records} for records in (old, new))
    found = [Difference(file, "all", n, "is no longer made") for n in before.keys() - after.keys()]
    found += [Difference(file, "all", n, "is new") for n in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        a, b = before[name], after[name]
        for field in sorted((a.keys() | b.keys()) - {*NAMES}):
            if a.get(field) != b.get(field):
                words = HOW.get(field, _changed)(a.get(field), b.get(field))
                found += [Difference(file, what or field, name, how) for what, how in words]
    return sorted(found)


def _changed(old: Any, new: Any) -> list[tuple[str, str]]:
    return [("", f"{old} -> {new}")]


def _chosen(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Return the operators whose chosen kernel changed, or that were added or removed."""
    before, after = ({n: pick for pick, names in (side or {}).items() for n in names.split()} for side in (old, new))
    names = sorted(before.keys() | after.keys())
    return [("kernel", f"{n}: {before.get(n)} -> {after.get(n)}") for n in names if before.get(n) != after.get(n)]


#: Functions that describe changes of fields with more than one word.
HOW: Mapping[str, Callable[[Any, Any], list[tuple[str, str]]]] = {"kernels": _chosen}


def report(found: Sequence[Difference]) -> str:
    """Return the differences: the first of each kind in full, and their number."""
    kinds = Counter((d.file, d.field) for d in found)
    shown: Counter[tuple[str, str]] = Counter()
    lines = []
    for d in found:
        shown[d.file, d.field] += 1
        lines += [str(d)] if shown[d.file, d.field] <= SHOWN else []
        if shown[d.file, d.field] == SHOWN + 1:
            lines.append(f"{d.file}: {d.field}: and {kinds[d.file, d.field] - SHOWN} more")
    summary = ", ".join(f"{n} {field} of {file}" for (file, field), n in sorted(kinds.items()))
    return "\n".join([*lines, f"changed: {summary}"]) if found else "as frozen"
