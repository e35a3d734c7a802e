"""Rows of the peers table: one JSON line each, stored immediately, so that an interrupted run can resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rammer.report.text_table import markdown_table

#: The runner that ratios refer to.
OURS: Final = "rammer"
HEADERS: Final = (
    "model",
    "precision",
    "runner",
    "median ms",
    "p10",
    "p90",
    "rel. L2 error",
    "rammer is faster by",
    "timed",
    "prepare s",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One runner on one model. Times are in ms; ``error`` is relative L2 against float64. ``failure`` is the reason for missing
    times (the numbers are then 0). Rows of one ``run`` were measured in one process on one machine."""

    run: str
    model: str
    precision: str
    runner: str
    hardware: str
    median: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    error: float = 0.0
    iterations: int = 0
    prepare: float = 0.0
    timed: str = ""
    kernels: int = 0
    failure: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of a measurement, which later runs skip."""
        return self.model, self.precision, self.runner, self.hardware

    @property
    def good(self) -> bool:
        """Return True if the runner ran and gave finite outputs."""
        return not self.failure and math.isfinite(self.error)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile in ms."""
    p10, median, p90 = (float(v) * 1e3 for v in np.percentile(seconds, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def read_rows(path: Path) -> list[Row]:
    """Return the rows stored in ``path``, the last of each key; a line truncated by an interrupted write is omitted."""
    kept: dict[tuple[str, str, str, str], Row] = {}
    for data in lines_of(path):
        try:
            row = Row(**data)
        except TypeError:
            continue
        kept.pop(row.key, None)
        kept[row.key] = row
    return list(kept.values())


def keep(path: Path, row: Row) -> None:
    """Append one row to the file."""
    append(path, asdict(row))


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects stored in ``path``, one per line, except truncated ones. A missing file yields none."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            data = json.loads(line)
            if isinstance(data, dict):
                yield data


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Append one object to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(line) + "\n")


def ratio(row: Row, rows: Iterable[Row]) -> str:
    """Return rammer's speed-up over ``row`` or, for rammer's row, over the best peer, which is named. ``*`` marks two rows that
    were not measured in one run."""
    group = row.model, row.precision, row.hardware
    same = [r for r in rows if (r.model, r.precision, r.hardware) == group and r.good]
    ours = next((r for r in same if r.runner == OURS), None)
    peers = [r for r in same if r.runner != OURS]
    if ours is None or not peers or not row.good:
        return ""
    peer = min(peers, key=lambda r: r.median) if row.runner == OURS else row
    mark = "" if peer.run == ours.run else "*"
    against = f" ({peer.runner})" if row.runner == OURS else ""
    return f"{peer.median / ours.median:.2f}x{mark}{against}"


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table's cells, model by model, the fastest first and failures last."""
    order = {m: i for i, m in enumerate(dict.fromkeys((r.model, r.precision) for r in rows))}
    ranked = sorted(rows, key=lambda r: (order[r.model, r.precision], not r.good, r.median))
    table = []
    for r in ranked:
        if r.failure:
            numbers = ["-", "-", "-", "-", r.failure]
        else:
            times = [f"{v:.4g}" for v in (r.median, r.p10, r.p90)]
            numbers = [*times, f"{r.error:.1e}", ratio(r, rows)]
        table.append([r.model, r.precision, r.runner, *numbers, r.timed, f"{r.prepare:.1f}"])
    return table


def document(rows: Sequence[Row], environment: dict[str, str]) -> str:
    """Return the Markdown result file."""
    facts = "\n".join(f"- {k}: {v}" for k, v in environment.items())
    notes = (
        "Batch 1 unless the model's name says otherwise; inputs resident on the device; error is relative L2 against "
        "the same model in float64. Batch norms are folded, LSTM layers stacked and attention fused for the peers, too."
    )
    marked = any("*" in ratio(r, rows) for r in rows)
    star = "\n\n`*`: the two rows come from different runs." if marked else ""
    return f"{markdown_table(cells(rows), HEADERS)}\n\n{notes}{star}\n\n## Environment\n\n{facts}\n"
