"""Search for kernels that compute something else: every family, precision and candidate of a device, over sampled operators.

    python -m rammer.testing.families --device rocm --seconds 600 --seed 1

Not the tuner's winners are run but whatever the device's search can offer (``Exhaustive``), as programs of one operator
(``rammer.testing.single``) against float64 with bounds (``rammer.testing.bounds``). Each failure is shrunk and printed as a
line that ``--case`` runs again. Workers are processes: a kernel that hangs or faults costs one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from threading import Lock, Thread
from typing import Any

import click

from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Exhaustive
from rammer.errors import DeviceFailure, RammerError
from rammer.ir.operator import ROperator
from rammer.report.table import markdown
from rammer.testing.cases import Case, Sampler, pick_of, picked, smaller
from rammer.testing.nets import KINDS
from rammer.testing.single import Subject, check, subjects, trial_of

#: Seconds without a sign of life after which a worker is ended, and seconds that shrinking one failure may take.
PATIENCE, SHRINKING = 90.0, 20.0
#: Operators of one case that are tried, and shrunk cases that are printed of each kind of failure.
OPERATORS, SHOWN = 5, 2


@dataclass
class Outcome:
    """What was run and what failed: counters by (family, precision, what), and lines of failures by their kind."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add(self, event: dict[str, Any]) -> None:
        """One line of a worker."""
        for family, precision, what, count in event.get("counts", ()):
            self.counts[family, precision, what] += count
        if "failure" in event:
            self.failures.setdefault(event["kind"], []).append(event["failure"])

    def table(self) -> str:
        """Coverage: candidates run by family and precision, and of what shapes."""
        names = ("run", "partial", "batch", "offset", "strided", "refused", "failed")
        rows = [[f, p, *(str(self.counts[f, p, n]) for n in names)] for f, p in sorted({k[:2] for k in self.counts})]
        return markdown(rows, ("family", "precision", *names))


class Search:
    """Runs cases on one opened device."""

    def __init__(self, device: str, options: dict[str, str], each: int) -> None:
        self.backend: Backend = Registry().open(device, options=options)
        self.each = each

    def candidates(self, subject: Subject, random: Random) -> list[ROperator]:
        """Up to ``each`` of every family, at random."""
        backend, families = self.backend, dict[str, list[ROperator]]()
        offered = backend.offered if isinstance(backend, Exhaustive) else backend.candidates
        for tiled in dict.fromkeys(offered(subject.operator, subject.binding)):
            families.setdefault(tiled.family, []).append(tiled)
        # Maps and copies are in every model, and their kernels the core's: contractions are worth more of the time.
        each = self.each if any(c.kind == "contraction" for c in subject.operator.computes) else -(-self.each // 3)
        return [o for f in families.values() for o in random.sample(f, min(each, len(f)))]

    def possible(self, tiled: ROperator, subject: Subject) -> bool:
        """Whether the device makes this kernel at all."""
        capacity = self.backend.vdevice.layer("veu").capacity
        try:
            made = self.backend.kernel(tiled, subject.binding)
        except DeviceFailure:
            return False
        return not capacity or made.resources.local_bytes <= capacity

    def problem(self, case: Case) -> str:
        """What is wrong with the candidate that ``case`` names, of any of its operators; "" if nothing or there is none."""
        for subject in subjects(replace(case, operator=-1), self.backend):
            try:
                tiled = picked(subject.operator, case.pick)
            except ValueError:
                continue
            if self.possible(tiled, subject) and (found := check(self.backend, tiled, trial_of(subject, case.seed))):
                return found
        return ""

    def shrunk(self, case: Case) -> Case:
        """A smaller case that fails, too."""
        end = time.monotonic() + SHRINKING
        again = True
        while again and time.monotonic() < end:
            again = False
            for option in smaller(case):
                if time.monotonic() > end:
                    break
                try:
                    failed = bool(self.problem(option))
                except RammerError:
                    failed = False
                if failed:
                    case, again = option, True
                    break
        return case


def shapes_of(tiled: ROperator, subject: Subject) -> Iterator[str]:
    """The classes of shapes that a candidate covers."""
    storages = [subject.binding.storages[n] for n in (*tiled.inputs, *tiled.outputs)]
    if any(a.extent % t for a, t in zip(tiled.anchor.axes, tiled.tile, strict=True)):
        yield "partial"
    if len(tiled.anchor.axes) > 2 and tiled.anchor.axes[0].extent > 1:
        yield "batch"
    if any(s.offset % 16 for s in storages):
        yield "offset"
    if any(not s.row_major for s in storages):
        yield "strided"


def partial_tiles(search: Search, sampler: Sampler, each: int, tries: int) -> Iterator[Case]:
    """Up to ``each`` cases of every family and precision whose last tiles are partial, from ``tries`` sampled ones."""
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(tries):
        case = sampler.next()
        for number, subject in enumerate(subjects(case, search.backend)):
            for tiled in search.candidates(subject, sampler.random):
                key = tiled.family, case.precision
                if seen[key] < each and "partial" in shapes_of(tiled, subject) and search.possible(tiled, subject):
                    seen[key] += 1
                    yield replace(case, operator=number, pick=pick_of(tiled))


def work(search: Search, sampler: Sampler, seconds: float) -> None:
    """A worker: cases until the time is over, events as lines of JSON. Ends after a failure of the device itself."""
    end, shrunk = time.monotonic() + seconds, set[tuple[str, ...]]()
    while time.monotonic() < end:
        case = sampler.next()
        emit({"start": str(case)})
        numbered = list(enumerate(subjects(case, search.backend)))
        for number, subject in sampler.random.sample(numbered, min(OPERATORS, len(numbered))):
            trial = None
            for tiled in search.candidates(subject, sampler.random):
                one = replace(case, operator=number, pick=pick_of(tiled))
                family = tiled.family or "generic"
                if not search.possible(tiled, subject):
                    emit({"counts": [(family, case.precision, "refused", 1)]})
                    continue
                trial = trial or trial_of(subject, case.seed)
                emit({"start": str(one)})
                counts = [(family, case.precision, what, 1) for what in ("run", *shapes_of(tiled, subject))]
                try:
                    problem, broken = check(search.backend, tiled, trial), False
                except DeviceFailure as failure:
                    problem, broken = f"{failure}".replace("\n", " ")[:300], True
                if not problem:
                    emit({"counts": counts})
                    continue
                key = (family, case.precision, case.kind)
                kind = f"{family} {case.precision} {case.kind}"
                line = f"{one}\n    {problem}"
                emit({"counts": [*counts, (family, case.precision, "failed", 1)], "kind": kind, "failure": line})
                if broken:
                    sys.exit(3)
                if key not in shrunk:
                    shrunk.add(key)
                    emit({"start": str(one)})
                    least = search.shrunk(replace(one, operator=-1))
                    emit({"kind": f"{kind} (shrunk)", "failure": f"{least}\n    {search.problem(least)}"})
                if time.monotonic() > end:
                    return


def emit(event: dict[str, Any]) -> None:
    """One event to the parent."""
    print(json.dumps(event), flush=True)


@dataclass
class Worker:
    """A process that searches, started again where it dies, until ``end``."""

    number: int
    command: list[str]
    end: float
    outcome: Outcome
    lock: Lock

    def run(self) -> None:
        """Start processes one after another."""
        turn = 0
        while (left := self.end - time.monotonic()) > 1:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            command = [*self.command, "--seconds", str(left), "--child", f"{self.number}.{turn}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                self._follow(process)
            turn += 1

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        last, alive = "", [time.monotonic()]
        watch = Thread(target=self._watch, args=(process, alive), daemon=True)
        watch.start()
        for line in process.stdout:
            alive[0] = time.monotonic()
            try:
                event = json.loads(line)
            except ValueError:
                continue
            last = event.get("start", last)
            with self.lock:
                self.outcome.add(event)
        code = process.wait()
        if code not in (0, 3) and time.monotonic() < self.end + PATIENCE / 2:
            with self.lock:
                self.outcome.add({"kind": f"process ended with {code}", "failure": last})

    def _watch(self, process: subprocess.Popen[str], alive: list[float]) -> None:
        while process.poll() is None:
            if time.monotonic() - alive[0] > PATIENCE or time.monotonic() > self.end + PATIENCE:
                process.kill()
            time.sleep(0.5)


def again(search: Search, case: Case) -> str:
    """Run one case, all candidates or the one that it names; what is wrong."""
    found = list[str]()
    if case.pick and case.operator < 0:
        return search.problem(case)
    for subject in subjects(case, search.backend):
        options = [picked(subject.operator, case.pick)] if case.pick else search.candidates(subject, Random(case.seed))
        for tiled in options:
            if search.possible(tiled, subject):
                problem = check(search.backend, tiled, trial_of(subject, case.seed))
                found += [f"{tiled.name} {pick_of(tiled)}: {problem}"] if problem else []
    return "\n".join(found)


@click.command()
@click.option("--device", required=True, help="NAME or NAME:INDEX.")
@click.option("--seconds", default=60.0, show_default=True, help="How long to search.")
@click.option("--seed", default=1, show_default=True, help="Of the cases.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="Processes side by side.")
@click.option("--each", default=6, show_default=True, type=click.IntRange(1), help="Most candidates of a family.")
@click.option("--size", default=1_000_000, show_default=True, help="Most products (or so) of one case.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="With commas.")
@click.option("--precisions", default="", help="With commas; else all that the device has.")
@click.option("--option", "options", multiple=True, help="KEY=VALUE of the device.")
@click.option("--case", "text", default="", help="Run this one, as a failure was printed.")
@click.option("--log", type=click.Path(path_type=Path), help="Write every failure there.")
@click.option("--child", default="", hidden=True)
def main(device: str, seconds: float, seed: int, workers: int, each: int, size: int, kinds: str, precisions: str,
         options: tuple[str, ...], text: str, log: Path | None, child: str) -> None:  # fmt: skip
    """Search, print what was covered and every failure, and exit with 1 if there was one."""
    pairs = dict(o.split("=", 1) for o in options)
    if text:
        problem = again(Search(device, pairs, each), Case.parse(text))
        click.echo(problem or "good")
        sys.exit(bool(problem))
    if child:
        search = Search(device, pairs, each)
        offered = tuple(p for p in precisions.split(",") if p) or tuple(search.backend.vdevice.precisions)
        return work(search, Sampler(Random(f"{seed}/{child}"), size, offered, tuple(kinds.split(","))), seconds)
    command = [sys.executable, "-m", "rammer.testing.families", "--device", device, "--seed", str(seed), "--each", str(each),
               "--size", str(size), "--kinds", kinds, "--precisions", precisions,
               *(x for o in options for x in ("--option", o))]  # fmt: skip
    outcome, lock, end = Outcome(), Lock(), time.monotonic() + seconds
    threads = [Thread(target=Worker(i, command, end, outcome, lock).run) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(outcome, seconds, seed)
    if log is not None:
        log.write_text("".join(f"{kind}\n  {line}\n" for kind, lines in sorted(outcome.failures.items()) for line in lines))
    sys.exit(bool(outcome.failures))


def report(outcome: Outcome, seconds: float, seed: int) -> None:
    """Print the coverage, and of each kind of failure how many and the first ones."""
    click.echo(outcome.table())
    total = sum(n for (_, _, what), n in outcome.counts.items() if what == "run")
    click.echo(f"{total} candidates in {seconds:.0f} s, seed {seed}")
    for kind, lines in sorted(outcome.failures.items()):
        click.echo(f"{kind}: {len(lines)} failed")
        for line in lines[:SHOWN]:
            click.echo(f"  --case {line!r}" if "\n" not in line else "  " + line)


if __name__ == "__main__":
    main()
