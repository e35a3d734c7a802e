"""Programs for ranges of lengths at full size: right at every length, few programs, memory that stays, and times.

    python -m benchmarks ranges --device rocm --models bert_base,gpt2,resnet50 --out benchmarks/results -- --threads 1
    python -m benchmarks ranges --device cuda --out benchmarks/results -- --budget 500
    python -m benchmarks ranges --device ipu_sim --small --models bert_base,gpt2,resnet50 --option tiles=64

BERT-base for sequences of 1 to 512, GPT-2 for one token after 0 to 63, ResNet-50 for batches of 1 to 32, with seeded weights
(``zoo/ranged.py``). First rammer runs alone, at ``--lengths`` lengths in random order, twice: what is compiled and what memory it
takes. Then each result is compared with ONNX Runtime's, and runs of the range's program, of ONNX Runtime (on cuda: torch and
``torch.compile(dynamic=True)``) and, at ``--exact`` lengths, of a program compiled for the length alone take turns. On rocm and
ONNX Runtime times are whole runs, NumPy in and out, on the same ``--threads`` cores; CPU time is that of all threads of the
process and tells of work where others load the machine. On cuda times are GPU events, on a simulator simulated. After
``--budget`` seconds no further length is timed. Caches are empty at the start. It ends with 1 where a result is wrong, memory
grows or a range takes more than 5 programs.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnx
from entry import run
from facts import environment_of
from range_peers import Runner, Took, alternated, error_of, onnx_runtime, ours, torch_peers
from result import Result, write
from zoo.entry import SEED
from zoo.ranged import RANGED, Open, find_ranged

import rammer
from rammer.errors import BadInput, RammerError
from rammer.runtime.executable import Executable
from rammer.runtime.lengths import BUCKETS

#: Relative to the largest value of an output: float32, and sums in another order.
TOLERANCE = 5e-5
#: Bytes that a process may grow by while nothing new is compiled: allocators keep what threads freed.
GROWTH = 16 << 20
RANGE, ALONE = "range", "alone"


@dataclass
class Row:
    """A length: the largest relative error, and what each runner took."""

    length: int
    error: float
    took: dict[str, Took] = field(default_factory=dict)


@dataclass
class Found:
    """What is known of a model. ``resident`` are bytes before, after the first program of each bucket and after all runs;
    ``disk`` bytes of the model's file, of constants kept beside it, and of programs."""

    model: Open
    lengths: int
    programs: int = 0
    compiling: float = 0.0
    resident: tuple[int, int, int] = (0, 0, 0)
    disk: tuple[int, int, int] = (0, 0, 0)
    rows: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  #: Peers that do not run the model, and why.

    @property
    def error(self) -> float:
        """The worst; infinite where one is NaN, or nothing is known."""
        return max((r.error if math.isfinite(r.error) else math.inf for r in self.rows), default=math.inf)

    @property
    def fine(self) -> bool:
        """Whether all lengths are right, by few programs, in memory that stays."""
        grown = self.resident[2] - self.resident[1]
        return self.error <= TOLERANCE and self.programs <= BUCKETS and grown <= GROWTH and len(self.rows) == self.lengths

    def ratio(self, over: str, under: str, cpu: bool) -> str:
        """Geometric mean over the lengths that both were timed at, and how many those are."""
        pairs = [(r.took[over], r.took[under]) for r in self.rows if over in r.took and under in r.took]
        if not pairs:
            return ""
        return f"{math.exp(fmean(math.log((a.cpu / b.cpu) if cpu else (a.seconds / b.seconds)) for a, b in pairs)):.2f}"


def drawn(model: Open, count: int, seed: int) -> list[int]:
    """Lengths of the model's range, both ends among them, in random order."""
    low, high = model.span
    rng, inner = np.random.default_rng(seed), np.arange(low + 1, high)
    chosen = {low, high, *(int(n) for n in rng.choice(inner, min(count - 2, len(inner)), replace=False))}
    return [int(n) for n in rng.permutation(sorted(chosen))]


def resident() -> int:
    """Bytes of this process's memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used() -> float:
    """CPU seconds of all threads, and of processes that ended."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in found)


class Measuring:
    """One model on one device."""

    def __init__(self, model: Open, folder: Path, args: argparse.Namespace, end: float) -> None:
        self.model, self.args, self.end = model, args, end
        self.options = dict(o.split("=", 1) for o in args.option)
        self.file, self.programs = folder / "model.onnx", folder / "programs"
        self.proto = model.build(args.seed)
        onnx.save(self.proto, self.file)
        self.lengths = drawn(model, args.lengths, args.seed)
        self.found = Found(model, len(self.lengths))

    def inputs(self, length: int) -> dict[str, np.ndarray]:
        """Those of this length."""
        return self.model.inputs_at(self.proto, length, np.random.default_rng([self.args.seed, length]))

    def compiled(self, spans: dict[str, tuple[int, int]]) -> Executable:
        """For a range, or for what comes first."""
        return rammer.compile(self.file, self.args.device, shapes=spans, options=self.options, tune=self.args.tune)

    def run(self) -> Found:
        """All of it."""
        exe = self.compiled({self.model.symbol: self.model.span})
        exe.programs = self.programs
        try:
            self.alone(exe)
            self.timed(exe)
        finally:
            exe.close()
        return self.found

    def alone(self, exe: Executable) -> None:
        """What rammer compiles and keeps, with nobody else in the process."""
        before, first, compiling = resident(), 0, 0.0
        for again in (False, True):
            for length in self.lengths:
                inputs, start, count = self.inputs(length), used(), len(exe.cache)
                exe.run(inputs)
                if len(exe.cache) > count:
                    compiling += used() - start
                    first = resident()
                    self.say(f"{length}: program {len(exe.cache)}, {used() - start:.1f} CPU s")
            self.say(f"{len(self.lengths)} lengths {'twice' if again else 'once'}")
        self.found.programs, self.found.compiling = len(exe.cache), compiling
        self.found.resident = (before, first, resident())
        kept = [
            sum(f.stat().st_size for f in self.file.parent.rglob(where) if f.is_file()) for where in ("constants/*", "programs/*")
        ]
        self.found.disk = (self.file.stat().st_size, *kept)

    def timed(self, exe: Executable) -> None:
        """Each length: right, and timed while there is time. Those that get a program of their own come first."""
        simulated, gpu = exe.backend.vdevice.simulated, exe.backend.hardware.kind == "gpu"
        mine, judge = ours(RANGE, exe, simulated or gpu), onnx_runtime(self.proto, self.args.threads)
        peers = [] if simulated else self.working(lambda: torch_peers(self.proto)) if gpu else [judge]
        for number, length in enumerate(self.lengths):
            inputs = self.inputs(length)
            row = Row(length, error_of(mine.run(inputs), judge.run(inputs)))
            self.found.rows.append(row)
            if time.perf_counter() < self.end:
                self.time(row, [mine, *peers], number < self.args.exact, simulated or gpu)
            said = " ".join(f"{n} {t.seconds * 1e3:.3f} ({t.cpu * 1e3:.3f} CPU)" for n, t in row.took.items())
            self.say(f"{length}: error {row.error:.1e}; ms: {said}")

    def working(self, peers: Callable[[], list[Runner]]) -> list[Runner]:
        """Those that run the model; why another does not is said, and kept for the table."""
        found = list[Runner]()
        try:
            made = peers()
        except RammerError as problem:
            self.found.missing.append(f"{self.model.key}: {problem.what}")
            return []
        for runner in made:
            try:
                runner.run(self.inputs(self.lengths[0]))
                found.append(runner)
            except Exception as problem:  # a peer's own faults are no reason to lose the rest
                self.found.missing.append(f"{self.model.key}: {runner.name}: {type(problem).__name__}: {str(problem)[:200]}")
        return found

    def time(self, row: Row, runners: list[Runner], exact: bool, device_clock: bool) -> None:
        """Runners in turns, with one for this length where that is asked for."""
        inputs = self.inputs(row.length)
        if exact:
            runners = [*runners, ours(ALONE, self.compiled({}), device_clock)]
        try:
            for runner, took in zip(runners, alternated(runners, inputs, self.args.rounds), strict=True):
                row.took[runner.name] = took
        finally:
            if exact:
                runners[-1].close()

    def say(self, text: str) -> None:
        """Progress."""
        print(f"{self.model.key}: {text}", file=sys.stderr, flush=True)


HEADERS = (
    "model",
    "range",
    "lengths",
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
    low, high = found.model.span
    sizes = [f"{n / 2**20:.0f}" for n in (*found.resident, *found.disk)]
    where = f"{found.model.symbol} {low} to {high}"
    verdict = "" if found.fine else " NOT FINE"
    head = [found.model.key + verdict, where, str(found.lengths), f"{found.error:.1e}", str(found.programs)]
    return [*head, f"{found.compiling:.1f}", *sizes]


def ratios(found: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    """Geometric means by both clocks."""
    headers, lines = ["model", "ratio", "lengths", "by time", "by CPU time"], list[list[str]]()
    for f in found:
        peers = dict.fromkeys(n for r in f.rows for n in r.took if n not in (RANGE, ALONE))
        for over, under in ((RANGE, ALONE), *((p, RANGE) for p in peers)):
            count = sum(over in r.took and under in r.took for r in f.rows)
            lines.append([f.model.key, f"{over} / {under}", str(count), f.ratio(over, under, False), f.ratio(over, under, True)])
    return headers, lines


def by_length(found: Found) -> tuple[list[str], list[list[str]]]:
    """All lengths of a model."""
    names = list(dict.fromkeys(n for r in found.rows for n in r.took))
    headers = [found.model.symbol, "error", *(f"{n}, ms{c}" for n in names for c in ("", " CPU"))]
    lines = list[list[str]]()
    for r in sorted(found.rows, key=lambda r: r.length):
        times = [f"{t * 1e3:.3f}" for n in names if n in r.took for t in (r.took[n].seconds, r.took[n].cpu)]
        lines.append([str(r.length), f"{r.error:.1e}", *times, *[""] * (len(headers) - 2 - len(times))])
    return headers, lines


def document(found: Sequence[Found], args: argparse.Namespace) -> str:
    """The Markdown file."""
    notes = [
        "Errors are the largest difference to ONNX Runtime, relative to the largest value. MiB are of the whole process, in "
        "which nothing but rammer ran until then. Ratios are geometric means: `range / alone` is the program of the range to "
        "one compiled for the length (less is better), others are a peer's time to that of the range's program (more is better).",
        f"Cores: {args.threads or 'all'}; load of the machine before and after: {args.load} and {os.getloadavg()[0]:.1f}.",
        *(f"No peer: {why}." for f in found for why in f.missing),
    ]
    parts = {"Ratios": ratios(found)} | {f"{f.model.key} by length": by_length(f) for f in found}
    result = Result("Programs for ranges of lengths", HEADERS, [summary(f) for f in found], notes, parts)
    return result.document(" ".join(["python -m benchmarks ranges", *args.words]), environment_of(args.device.startswith("cuda")))


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="rocm")
    made.add_argument("--models", default=",".join(RANGED))
    made.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--tune", default="off")
    for name, value in {"--seed": SEED, "--lengths": 100, "--exact": 8, "--rounds": 5, "--threads": 0}.items():
        made.add_argument(name, type=int, default=value)
    made.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing more is timed")
    made.add_argument("--markdown", type=Path)
    return made


def measured(args: argparse.Namespace) -> list[Found]:
    """The models, each with its share of the time that is left."""
    models, start = [find_ranged(k) for k in args.models.split(",") if k], time.perf_counter()
    found = list[Found]()
    for number, model in enumerate(models):
        now = time.perf_counter()
        end = now + max(start + args.budget - now, 0.0) / (len(models) - number)
        with tempfile.TemporaryDirectory() as folder:
            found.append(Measuring(model, Path(folder), args, end).run())
        if args.markdown:  # what is known is not lost with the rest
            write(args.markdown, document(found, args))
    return found


def main() -> None:
    """Entry point."""
    args = parser().parse_args()
    args.words = [Path(w).name if before == "--markdown" else w for before, w in pairwise(sys.argv)]
    if args.lengths < 2:
        raise BadInput("fewer than two lengths are no range", "--lengths")
    if args.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    args.load = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        found = measured(args)
    print(document(found, args))
    sys.exit(0 if all(f.fine for f in found) else 1)


if __name__ == "__main__":
    run(main)
