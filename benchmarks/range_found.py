"""What is known of models with ranges of lengths: kept as JSON lines, one a model, and told as a page of tables."""

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

#: Relative to the largest value of an output: float32, and sums in another order.
TOLERANCE: Final = 5e-5
#: Bytes that a process may grow by while nothing new is compiled: allocators keep what threads freed.
GROWTH: Final = 16 << 20
RANGE: Final = "range"
ALONE: Final = "alone"
#: What the range's program took by turns with a peer is called so, with the peer's name behind.
BESIDE: Final = f"{RANGE} beside "


@dataclass
class Row:
    """A length: the largest relative error (None: not compared), and what each runner took."""

    length: int
    error: float | None = None
    took: dict[str, Took] = field(default_factory=dict)


@dataclass
class Found:
    """What is known of a model. ``asked`` are lengths to compare, ``first`` seconds of each runner's first calls (compiling among
    them). ``resident`` are bytes before, after the first program of each bucket and after all runs; ``disk`` bytes of the model's
    file, of constants kept beside it, and of programs; both are empty where memory was not measured."""

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
    missing: list[str] = field(default_factory=list)  #: Peers that do not run the model, and why.

    def row(self, length: int) -> Row:
        """That of a length, new where there is none."""
        for row in self.rows:
            if row.length == length:
                return row
        self.rows.append(Row(length))
        return self.rows[-1]

    @property
    def compared(self) -> list[float]:
        """Errors of all lengths that were compared; infinite where one is NaN."""
        return [r.error if math.isfinite(r.error) else math.inf for r in self.rows if r.error is not None]

    @property
    def error(self) -> float:
        """The worst; infinite where nothing is known."""
        return max(self.compared, default=math.inf)

    @property
    def fine(self) -> bool:
        """Whether all lengths that were asked for are right, by few programs, in memory that stays."""
        grown = self.resident[2] - self.resident[1] if self.resident else 0
        whole = len(self.compared) == self.asked and self.error <= TOLERANCE
        return (whole or not self.asked) and self.programs <= BUCKETS and grown <= GROWTH

    def ratio(self, over: str, under: str, cpu: bool) -> str:
        """Geometric mean over the lengths that both were timed at, and how many those are."""
        pairs = [(r.took[over], r.took[under]) for r in self.rows if over in r.took and under in r.took]
        if not pairs:
            return ""
        return f"{math.exp(fmean(math.log((a.cpu / b.cpu) if cpu else (a.seconds / b.seconds)) for a, b in pairs)):.2f}"


@dataclass(frozen=True)
class Record:
    """A model, the command that measured it, and the machine: cores and load, packages and processor."""

    found: Found
    command: str
    cores: str
    environment: Mapping[str, str]


def kept(path: Path) -> list[Record]:
    """The records of a file; none where it is not there. BadInput for another file."""
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
    """The file with what is found and the page of it, written anew whenever more is known. ``before`` are records that stay."""

    markdown: Path | None
    command: str
    cores: str
    environment: Mapping[str, str]
    before: list[Record] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    @property
    def records(self) -> list[Record]:
        """All; what is measured now replaces what was known of a model."""
        now = [Record(f, self.command, self.cores, self.environment) for f in self.found]
        keys = {f.key for f in self.found}
        return [*(r for r in self.before if r.found.key not in keys), *now]

    def keep(self) -> None:
        """Read what the file has. BadInput where that is of another machine."""
        if self.markdown is None:
            return
        self.before = kept(self.markdown.with_suffix(".jsonl"))
        if any(r.environment != self.environment for r in self.before):
            raise BadInput(f"the rows of {self.markdown.name} are of another environment", hint="leave out --keep")

    def tell(self) -> None:
        """Write both files."""
        if self.markdown is not None:
            write(self.markdown.with_suffix(".jsonl"), "".join(json.dumps(asdict(r)) + "\n" for r in self.records))
            write(self.markdown, self.text())

    def text(self) -> str:
        """The page."""
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
    """A line of the table."""
    low, high = found.span
    sizes = [f"{n / 2**20:.0f}" for n in (*found.resident, *found.disk)] or [""] * 6
    verdict = "" if found.fine else " NOT FINE"
    error = f"{found.error:.1e}" if found.compared else ""
    head = [found.key + verdict, f"{found.symbol} {low} to {high}", str(len(found.compared)), error, str(found.programs)]
    return [*head, f"{found.compiling:.1f}", *sizes]


def ratios(found: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    """Geometric means by both clocks."""
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
    """All lengths of a model."""
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
