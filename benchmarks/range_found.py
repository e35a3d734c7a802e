"""Results for models with ranges of lengths: stored as JSON lines, one per model, and shown as a page of tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from range_peers import Took
from result import Result, write

from rammer.errors import BadInput
from rammer.runtime.shape_buckets import BUCKETS

#: Bound relative to the largest value of an output: float32 with another order of summation.
TOLERANCE: Final = 5e-5
#: Bytes that a process may grow by while nothing is compiled: allocators retain memory that threads freed.
GROWTH: Final = 16 << 20
RANGE: Final = "range"
ALONE: Final = "alone"
#: Prefix of a runner name for the range program's times measured alternately with a peer; the peer's name follows.
BESIDE: Final = f"{RANGE} beside "


@dataclass
class Row:
    """The figures of a length: the largest relative error (None: not compared), and the times of each runner."""

    length: int
    error: float | None = None
    took: dict[str, Took] = field(default_factory=dict)


@dataclass
class Found:
    """The results for a model.

    ``asked`` is the number of lengths to compare; ``first`` has the seconds of each runner's first calls, including compilation.
    ``resident`` are bytes before, after the first program of each bucket and after all runs. ``disk`` are bytes of the model's
    file, of constants stored next to it, and of programs. Both are empty if memory was not measured."""

    key: str
    symbol: str
    span: tuple[int, int]
    asked: int
    programs: int = 0
    compiling: float = 0.0
    resident: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
    first: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  #: Peers that fail to run the model, with the reason.

    def row(self, length: int) -> Row:
        """Return the row of a length, created if missing."""
        for row in self.rows:
            if row.length == length:
                return row
        self.rows.append(Row(length))
        return self.rows[-1]

    @property
    def compared(self) -> list[float]:
        """Errors of all compared lengths; infinite for NaN."""
        return [r.error if math.isfinite(r.error) else math.inf for r in self.rows if r.error is not None]

    @property
    def error(self) -> float:
        """The worst error; infinite if no length was compared."""
        return max(self.compared, default=math.inf)

    @property
    def fine(self) -> bool:
        """Return True if all requested lengths are right, the programs are few and memory does not grow."""
        grown = self.resident[2] - self.resident[1] if self.resident else 0
        whole = len(self.compared) == self.asked and self.error <= TOLERANCE
        return (whole or not self.asked) and self.programs <= BUCKETS and grown <= GROWTH

    def ratio(self, over: str, under: str, cpu: bool) -> str:
        """Return the geometric mean of the time ratios over the lengths that have both times, or ""."""
        pairs = [(r.took[over], r.took[under]) for r in self.rows if over in r.took and under in r.took]
        if not pairs:
            return ""
        return f"{math.exp(fmean(math.log((a.cpu / b.cpu) if cpu else (a.seconds / b.seconds)) for a, b in pairs)):.2f}"


@dataclass(frozen=True)
class Record:
    """A model's results, the command that measured them, and the machine: cores and load, packages and processor."""

    found: Found
    command: str
    cores: str
    environment: Mapping[str, str]


def kept(path: Path) -> list[Record]:
    """Return the records of a file; none if it is missing. Raises BadInput for another file."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [_record(line) for line in lines]
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise BadInput(f"{path} has no records of ranges: {problem}", hint="leave out --keep") from problem


def _record(line: dict[str, Any]) -> Record:
    found = line["found"]
    rows = [Row(r["length"], r["error"], {n: Took(**t) for n, t in r["took"].items()}) for r in found["rows"]]
    tuples = {name: tuple(found[name]) for name in ("span", "resident", "disk")}
    return Record(Found(**{**found, **tuples, "rows": rows}), line["command"], line["cores"], line["environment"])


@dataclass
class Page:
    """The results file and its page, rewritten after every new result. ``before`` are records to retain."""

    markdown: Path | None
    command: str
    cores: str
    environment: Mapping[str, str]
    before: list[Record] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """All records; new results of a model replace its old ones."""
        now = [Record(f, self.command, self.cores, self.environment) for f in self.found]
        keys = {f.key for f in self.found}
        return [*(r for r in self.before if r.found.key not in keys), *now]

    def keep(self) -> None:
        """Read the file's records. Raises BadInput if they come from another machine."""
        if self.markdown is None:
            return
        self.before = kept(self.markdown.with_suffix(".jsonl"))
        if any(r.environment != self.environment for r in self.before):
            raise BadInput(f"the rows of {self.markdown.name} are of another environment", hint="leave out --keep")

    def tell(self) -> None:
        """Write the records and the page."""
        if self.markdown is not None:
            write(self.markdown.with_suffix(".jsonl"), "".join(json.dumps(asdict(r)) + "\n" for r in self.records))
            write(self.markdown, self.text())

    def text(self) -> str:
        """Return the page as Markdown text."""
        records = self.records
        found, commands = [r.found for r in records], "\n\n".join(dict.fromkeys(f"`{r.command}`" for r in records))
        parts = {"Ratios": ratios(found)} | {f"{f.key} by length": by_length(f) for f in found}
        result = Result("Programs for ranges of lengths", HEADERS, [summary(f) for f in found], _notes(records), parts)
        return result.document(commands, self.environment)


def _notes(records: Sequence[Record]) -> list[str]:
    firsts = [f"{r.found.key}: {', '.join(f'{n} {s:.1f}' for n, s in r.found.first.items())}" for r in records if r.found.first]
    return [
        "Errors are the largest difference to ONNX Runtime, relative to the largest value; where none stands, the length was not "
        "compared. MiB are of the whole process, in which nothing but rammer ran until then; where none stand, memory was not "
        "measured. Ratios are geometric means: `range / alone` is the program of the range to one compiled for the length (less "
        "is better), others are a peer's time to that of the range's program (more is better).",
        *dict.fromkeys(r.cores for r in records),
        *([f"Seconds of first calls at each timed length, compiling among them: {'; '.join(firsts)}."] if firsts else []),
        *(f"No peer: {why}." for r in records for why in r.found.missing),
    ]


HEADERS: Final = (
    "model",
    "range",
    "compared",
    "worst error",
    "programs",
    "compiling, CPU s",
    "MiB before",
    "MiB at the last program",
    "MiB at the end",
    "file, MiB",
    "constants beside it, MiB",
    "programs, MiB",
)


def summary(found: Found) -> list[str]:
    """Return a row of the table for a model."""
    low, high = found.span
    sizes = [f"{n / 2**20:.0f}" for n in (*found.resident, *found.disk)] or [""] * 6
    verdict = "" if found.fine else " NOT FINE"
    error = f"{found.error:.1e}" if found.compared else ""
    head = [found.key + verdict, f"{found.symbol} {low} to {high}", str(len(found.compared)), error, str(found.programs)]
    return [*head, f"{found.compiling:.1f}", *sizes]


def ratios(found: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of the geometric means by both clocks."""
    headers, lines = ["model", "ratio", "lengths", "by time", "by CPU time"], list[list[str]]()
    for f in found:
        peers = dict.fromkeys(n for r in f.rows for n in r.took if f"{BESIDE}{n}" in r.took)
        for over, under in ((RANGE, ALONE), *((p, f"{BESIDE}{p}") for p in peers)):
            count = sum(over in r.took and under in r.took for r in f.rows)
            lines.append(
                [
                    f.key,
                    f"{over} / {RANGE if under != ALONE else ALONE}",
                    str(count),
                    f.ratio(over, under, False),
                    f.ratio(over, under, True),
                ]
            )
    return headers, lines


def by_length(found: Found) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of all lengths of a model."""
    names = list(dict.fromkeys(n for r in found.rows for n in r.took))
    headers = [found.symbol, "error", *(f"{n}, ms{c}" for n in names for c in ("", " CPU"))]
    lines = list[list[str]]()
    for r in sorted(found.rows, key=lambda r: r.length):
        error = "" if r.error is None else f"{r.error:.1e}"
        pairs = [r.took.get(n) for n in names]
        lines.append([str(r.length), error, *(f"{t * 1e3:.3f}" if p else "" for p in pairs for t in _both(p))])
    return headers, lines


def _both(took: Took | None) -> tuple[float, float]:
    return (took.seconds, took.cpu) if took else (0.0, 0.0)
