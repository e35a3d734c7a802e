"""The command line and the table of ``transfers.py``."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from delayed import far_apart
from entry import run
from facts import environment_of, section
from transfers import KINDS, SIZES, measured

from rammer.report.table import duration, markdown, size

HEADERS = ("between", "tensor", *KINDS, "pickled / ours", "gRPC / ours", "ours, GB/s")

#: What the page says of its table.
WORDS = """\
Until the sender knows that it is there: *ours* is transport `mpi` (a payload, a flag, the receiver's credit), *pickled*
an array through `multiprocessing.connection` and a word back, *gRPC* a unary call with the array's bytes. Between
processes, the peers have a Unix socket and MPI its shared memory; between namespaces all have TCP, and a process holds
every packet back, each way. There ours takes two round trips, the calls one: that a payload is there before its flag is
on the way costs a round trip where the network does not order writes.
"""


@click.command(help=__doc__)
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page.")
@click.option("--json", "raw", type=click.Path(path_type=Path), help="Write seconds as JSON.")
@click.option(
    "--delay", type=float, default=0.0, help="And between two namespaces, with so many milliseconds each way (needs root)."
)
@click.option("--grpc", "python", default=sys.executable, help="An interpreter that has grpcio.")
@click.option("--rounds", default=3, show_default=True, help="Turns of all kinds; the least median of each counts.")
def command(path: Path | None, raw: Path | None, delay: float, python: str, rounds: int) -> None:
    """Measure all kinds in turns, and print."""
    rows, found = list[list[str]](), dict[str, Any]()
    for where, far in (("processes", False), *([(f"namespaces, {delay:g} ms", True)] if delay else [])):
        with far_apart(delay) if far else nullcontext():
            turns = [{kind: measured(kind, far, python) for kind in KINDS} for _ in range(rounds)]
        best = {k: _least([t[k] for t in turns]) for k in KINDS}
        found[where] = best
        rows += [_row(where, n, {k: b["seconds"][str(n)] if b else None for k, b in best.items()}) for n in SIZES]
        found[f"{where}, counted"] = turns[0]["ours"]["counters"] if turns[0]["ours"] else ""
    text = markdown(rows, HEADERS)
    click.echo(text)
    if raw is not None:
        raw.write_text(json.dumps(found, indent=2) + "\n")
    if path is not None:
        path.write_text(_page(text, found, rounds))


def _least(runs: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The least median of each size."""
    there = [r["seconds"] for r in runs if r is not None]
    return {"seconds": {n: min(r[n] for r in there) for n in there[0]}} if there else None


def _row(where: str, nbytes: int, seconds: dict[str, float | None]) -> list[str]:
    own = seconds["ours"]
    assert own is not None
    times = [duration(s) if s is not None else "not there" for s in seconds.values()]
    ratios = [f"{s / own:.1f}x" if s is not None else "" for k, s in seconds.items() if k != "ours"]
    return [where, size(nbytes), *times, *ratios, f"{nbytes / own / 1e9:.3g}"]


def _page(table: str, found: dict[str, Any], rounds: int) -> str:
    said = next(v for k, v in found.items() if k.endswith("counted"))
    return (
        "# One tensor from process to process\n\n"
        f"{WORDS}\n"
        f"Medians, of {rounds} turns of all kinds the least.\n\n{table}\n\n"
        f"Ours counted: {said}.\n\n{section(environment_of(gpu=False))}"
    )


def main() -> None:
    """As a script."""
    run(command)


if __name__ == "__main__":
    main()
