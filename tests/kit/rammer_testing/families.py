"""Search for wrong kernels: every family, precision and candidate of a device, over sampled operators.

    python -m rammer_testing.families --device rocm --seconds 600 --seed 1 --processes 2 --report found.json
    python -m rammer_testing.families --merge found.json others.json

The search runs all candidates of the device (``Exhaustive``), not only the tuner's best, as programs of one operator
(``rammer_testing.single``) against float64 with bounds (``rammer_testing.bounds``). Each failure is shrunk and printed as a line
that ``--case`` runs again. Workers are processes (``rammer_testing.search``): a kernel that hangs or faults ends one of them. To
search on several GPUs, start one command per GPU with a different seed and merge the reports.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import click

from rammer.cache.whole_files import write_whole
from rammer.commands import gather_options
from rammer.errors import RammerError
from rammer_testing.cases import NetCase, Sampler
from rammer_testing.nets import KINDS
from rammer_testing.search import Hunt, Search, again
from rammer_testing.worker_pool import Member, check_tried
from rammer_testing.workers import HuntOutcome, failed, hunt

#: Shrunk cases printed for each kind of failure.
SHOWN = 2


@dataclass(frozen=True)
class Drawn:
    """The sampling options of a device. ``each`` bounds the candidates of a family and ``size`` the products of a case. ``kinds``
    and ``precisions`` are separated by commas; "" selects all precisions of the device."""

    device: str
    seed: int = 1
    each: int = 3
    size: int = 1_000_000
    kinds: str = ",".join(KINDS)
    precisions: str = ""
    options: tuple[str, ...] = ()

    def search(self) -> Search:
        """Return a search on the opened device."""
        return Search(self.device, dict(o.split("=", 1) for o in self.options), self.each)


@dataclass(frozen=True)
class Patience:
    """The duration and number of processes, and a flag that stops at the first failure."""

    seconds: float
    processes: int
    stop: bool


@click.command()
@click.option("--device", default="", help="NAME or NAME:INDEX.")
@click.option("--seconds", default=60.0, show_default=True, help="How long to search.")
@click.option("--seed", default=1, show_default=True, help="Seed of the cases.")
@click.option("--processes", "--workers", default=1, show_default=True, type=click.IntRange(1), help="Number of processes.")
@click.option("--each", default=3, show_default=True, type=click.IntRange(1), help="Maximum number of candidates of a family.")
@click.option("--size", default=1_000_000, show_default=True, help="Approximate maximum number of products of one case.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Comma-separated kinds of cases.")
@click.option("--precisions", default="", help="Comma-separated precisions; default: all of the device.")
@click.option("--option", "options", multiple=True, help="KEY=VALUE of the device.")
@click.option("--case", "text", default="", help="Run this case, as printed with a failure.")
@click.option("--stop", is_flag=True, help="End at the first failure.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write coverage and failures there, as JSON.")
@click.option("--merge", is_flag=True, help="Add up the reports FILES without a search.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@gather_options("drawn", Drawn, "device", "seed", "each", "size", "kinds", "precisions", "options")
@gather_options("effort", Patience, "seconds", "processes", "stop")
def main(drawn: Drawn, effort: Patience, text: str, report: Path | None, merge: bool, files: tuple[Path, ...]) -> None:
    """Search, print the coverage and every failure, and exit with 1 if there was one."""
    if merge:
        return finish(merged(files), report)
    if not drawn.device or files:
        raise click.UsageError("--device NAME searches, --merge FILES adds up")
    if text:
        problem = again(drawn.search(), NetCase.parse(text))
        click.echo(problem or "good")
        sys.exit(bool(problem))
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))  # processes use the cores
    facts = {"device": drawn.device, "seeds": [drawn.seed]}
    try:
        told, over = partial(keep, report=report), lambda outcome: effort.stop and failed(outcome)
        found = hunt(partial(begin, drawn), effort.seconds, effort.processes, over, facts, told)
        check_tried(found.coverage.candidates + len(found.failures), "candidate", effort.seconds)
    except RammerError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    finish(found, report)


def begin(drawn: Drawn, member: Member) -> Hunt:
    """Return the search of one process."""
    search = drawn.search()
    offered = tuple(p for p in drawn.precisions.split(",") if p) or tuple(search.backend.vdevice.precisions)
    return Hunt(
        search, Sampler(Random(f"{drawn.seed}/{member.seed}"), drawn.size, offered, tuple(drawn.kinds.split(","))), member
    )


def merged(files: tuple[Path, ...]) -> HuntOutcome:
    """Return the sum of reports. Raises UsageError for a file that is not a report."""
    total = HuntOutcome({})
    for path in files:
        try:
            total.merge(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise click.UsageError(f"{path} is not a report of this search: {problem}") from problem
    return total


def keep(outcome: HuntOutcome, report: Path | None) -> None:
    """Write the report if a path was passed."""
    if report is not None:
        text = json.dumps(outcome.listed()).encode()
        write_whole(report, lambda file: file.write(text))


def finish(outcome: HuntOutcome, report: Path | None) -> None:
    """Print the coverage, and the count and first examples of each kind of failure. Exit with 1 after any failure."""
    keep(outcome, report)
    click.echo(outcome.coverage.table())
    never = [f for f in outcome.families if f not in {c[0] for c in outcome.coverage.cells}]
    click.echo(f"families never run: {', '.join(never) or 'none'}")
    facts: dict[str, Any] = outcome.facts
    click.echo(
        f"{outcome.coverage.candidates} candidates in {facts['seconds']:.0f} s ({facts['cpu_seconds']:.0f} s of CPUs), "
        f"{facts['device']}, seeds {', '.join(map(str, facts['seeds']))}, {facts['started']} processes, "
        f"at most {facts['peak'] / 2**20:.0f} MiB each"
    )
    for kind, lines in sorted(outcome.failures.items()):
        click.echo(f"{kind}: {len(lines)} failed")
        for line in lines[:SHOWN]:
            click.echo(f"  --case {line!r}" if "\n" not in line else "  " + line)
    click.echo("nothing was found" if not outcome.failures else "")
    sys.exit(bool(outcome.failures))


if __name__ == "__main__":
    main()
