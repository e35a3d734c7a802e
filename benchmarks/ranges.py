"""Programs for ranges of lengths at full size: correctness at every length, number of programs, memory growth, times.

    python -m benchmarks ranges --device rocm --models bert_base,gpt2,resnet50 --out benchmarks/results -- --threads 1
    python -m benchmarks ranges --device cuda --models bert_base --budget 150 --keep --out benchmarks/results -- --checks 4
    python -m benchmarks ranges --device ipu_sim --small --models bert_base,gpt2,resnet50 --option tiles=64

BERT-base for sequences of 1 to 512, GPT-2 for one token after 0 to 63, ResNet-50 for batches of 1 to 32, with seeded weights
(``zoo/ranged.py``). Three steps, in this order:

1. memory: rammer runs alone, at ``--memory`` lengths, twice: compile time, memory and disk (with ``--budget``: skipped);
2. times: at the first ``--exact`` lengths, runs of the range's program alternate with runs of a program compiled for the
   length alone. Then, for one of ``--peers`` after another, runs of the range's program alternate with runs of the peer. This
   covers all lengths, or the first ``--beside``. Lengths come in a fixed order (with peers 0 and 1 last, for which torch
   compiles again). Any number of first lengths is spread evenly over the range. With ``--edges`` they are the longest, one
   between, the shortest, then edges of the programs alternating with others. No length starts once the model's share of
   ``--budget`` seconds has passed (with peers, ``--peers-budget`` seconds more). Compilation counts, and is also reported
   separately as seconds of first calls. With ``--ahead N``, N processes at a time compile the timed programs first;
3. errors: results of the range's ends and of the first lengths, ``--checks`` in all, are compared with ONNX Runtime's,
   independent of the budget.

Peers are ``onnxruntime`` or, on cuda, ``torch`` and ``torch.compile`` (with ``dynamic=True``). On rocm and ONNX Runtime times are
whole runs, NumPy in and out, on the same ``--threads`` cores. CPU time is that of all threads of the process and measures work
under other load. On cuda times are GPU events, on a simulator simulated. Results are written after each length. Caches are empty
at the start unless ``--cache`` names a folder. The exit code is 1 if a result is wrong, memory grows or a range needs more than 5
programs.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnx
from entry import run
from facts import environment_of
from range_ahead import Job, ahead, kept
from range_found import ALONE, BESIDE, RANGE, Found, Page
from range_peers import TORCH, Runner, TorchPeers, alternated, error_of, onnx_runtime, ours
from zoo.entry import SEED
from zoo.ranged import RANGED, Open, find_ranged

import rammer
from rammer.cache.disk_cache import list_entries
from rammer.errors import BadInput, RammerError
from rammer.runtime.executable import Executable
from rammer.runtime.shape_buckets import bucket_bounds, find_bucket

#: Position of the golden section in an interval.
GOLDEN = (math.sqrt(5) - 1) / 2
#: All peers; a device's clock determines which of them it supports.
PEERS = ("onnxruntime", *TORCH)


def ordered(model: Open, count: int, seed: int, edges: bool = False) -> list[int]:
    """Return ``count`` lengths of the model's range, evenly spread for every count; fewer lengths are a prefix of more.

    They start at an offset drawn from ``seed`` and advance in steps of the golden section (Weyl, 1916). With ``edges`` they are
    the longest, one between and the shortest, then edges of programs alternating with others."""
    low, high = model.span
    size, draw = high - low + 1, np.random.default_rng(seed)
    if not edges:
        places = (draw.random() + GOLDEN * np.arange(64 * size)) % 1.0
        return list(dict.fromkeys(low + int(n) for n in places * size))[:count]
    drawn = [int(n) for n in draw.permutation(np.arange(low + 1, high))]
    ends = [n for bound in bucket_bounds(model.span)[1:] for n in (bound + 1, bound)]
    later = [n for pair in zip_longest(ends, drawn[1:]) for n in pair if n is not None]
    return list(dict.fromkeys([high, *drawn[:1], low, *later]))[:count]


def resident() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used() -> float:
    """Return CPU seconds of all threads and of ended child processes."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in found)


class Measuring:
    """The measurement of one model on one device. ``told`` is called after every new result."""

    def __init__(self, model: Open, folder: Path, args: argparse.Namespace, end: float, told: Callable[[], None]) -> None:
        self.model, self.args, self.end, self.told = model, args, end, told
        self.begun = time.perf_counter()
        self.options = dict(o.split("=", 1) for o in args.option)
        self.file, self.cache = folder / "model.onnx", args.cache or folder
        self.proto = model.build(args.seed)
        onnx.save(self.proto, self.file)
        self.lengths = ordered(model, args.lengths, args.seed, args.edges)
        self.checks = list(dict.fromkeys([*model.span[::-1], *self.lengths]))[: args.checks]
        self.found = Found(model.key, model.symbol, model.span, len(self.checks))
        self.torch = TorchPeers(self.proto)
        self.opened = dict[str, Runner]()  #: Peers by name.

    def inputs(self, length: int) -> dict[str, np.ndarray]:
        """Return the inputs of this length."""
        return self.model.inputs_at(self.proto, length, np.random.default_rng([self.args.seed, length]))

    def compiled(self, spans: dict[str, tuple[int, int]]) -> Executable:
        """Return an executable for a range or, without ``spans``, for the shapes of its first run."""
        exe = rammer.compile(self.file, self.args.device, shapes=spans, options=self.options, tune=self.args.tune)
        exe.cache_root = self.cache if spans or self.args.cache or self.args.ahead else exe.cache_root
        return exe

    def run(self) -> Found:
        """Run the three steps and return the results."""
        exe = self.compiled({self.model.symbol: self.model.span})
        try:
            device_clock = exe.backend.vdevice.simulated or exe.backend.hardware.kind == "gpu"
            self.alone(exe)
            self.timed(exe, device_clock)
            self.checked(exe)
        finally:
            exe.close()
        return self.found

    def alone(self, exe: Executable) -> None:
        """Measure rammer's compilation and memory without peers in the process."""
        before, first = resident(), 0
        lengths = self.lengths[: self.args.memory]
        for again in (False, True) if lengths else ():
            for length in lengths:
                if self.ran(exe, length):
                    first = resident()
            self.say(f"{len(lengths)} lengths {'twice' if again else 'once'}")
        if lengths:
            self.found.resident, self.found.disk = (before, first, resident()), self.disk()
            self.told()

    def ran(self, exe: Executable, length: int) -> bool:
        """Run a length with the program of the range; return True if the run compiled a program."""
        inputs, start, count = self.inputs(length), used(), len(exe.cache)
        exe.run(inputs)
        self.found.programs = len(exe.cache)
        if len(exe.cache) == count:
            return False
        self.found.compiling += used() - start
        self.say(f"{length}: program {len(exe.cache)}, {used() - start:.1f} CPU s")
        return True

    def disk(self) -> tuple[int, ...]:
        """Return the bytes of the model's file, and of stored constants and programs."""
        found = [*list_entries(self.cache)]
        sizes = (sum(e.nbytes for e in found if e.kind == kind) for kind in ("constants", "programs"))
        return (self.file.stat().st_size, *sizes)

    def timed(self, exe: Executable, device_clock: bool) -> None:
        """Time lengths within the budget: alternately with programs for a single length, then with peers."""
        mine = ours(RANGE, exe, device_clock)
        exact = self.lengths[: self.args.exact]
        if self.args.ahead and exact:
            self.ahead(exact)
        for length in self.within(0.0, "beside programs for them alone", exact):
            self.ran(exe, length)
            alone = ours(ALONE, self.compiled({}), device_clock)
            try:
                self.begin(alone, length)
                self.turns(length, [mine, alone])
            finally:
                alone.close()
        late = sorted(self.lengths[: self.args.beside], key=lambda length: length <= 1)
        for name, make in self.peers(exe).items():
            for length in self.within(self.args.peers_budget, f"beside {name}", late):
                self.ran(exe, length)
                peer = self.peer(name, make, length)
                if peer is None:
                    break
                self.turns(length, [replace(mine, name=f"{BESIDE}{peer.name}"), peer])

    def within(self, more: float, what: str, lengths: Sequence[int]) -> Iterator[int]:
        """Yield lengths until the budget plus ``more`` seconds has passed."""
        for number, length in enumerate(lengths):
            if time.perf_counter() >= self.end + more:
                self.say(f"{number} of {len(lengths)} lengths are timed {what}: there is no time for more")
                return
            yield length

    def ahead(self, exact: Sequence[int]) -> None:
        """Compile the programs for these lengths and their range programs, so that they are on disk."""
        whole = {self.model.symbol: self.model.span}
        wanted = [(n, dict[str, tuple[int, int]]()) for n in exact]
        wanted += [(n, whole) for n in {find_bucket(self.model.span, n): n for n in exact}.values()]
        args = self.args
        jobs = [Job(self.file, args.device, self.cache, n, s, self.inputs(n), self.options, args.tune) for n, s in wanted]
        for job, took in ahead(jobs, args.ahead, kept):
            said = took if isinstance(took, str) else f"{took:.1f} CPU s"
            self.say(f"{job.length}: {RANGE if job.spans else ALONE} ahead: {said}")
            if job.spans and not isinstance(took, str):
                self.found.compiling += took

    def turns(self, length: int, runners: list[Runner]) -> None:
        """Time the runners alternately, report and store the times."""
        row = self.found.row(length)
        times = alternated(runners, self.inputs(length), self.args.rounds)
        row.took |= {runner.name: took for runner, took in zip(runners, times, strict=True)}
        said = " ".join(f"{r.name} {t.seconds * 1e3:.3f} ({t.cpu * 1e3:.3f} CPU)" for r, t in zip(runners, times, strict=True))
        self.say(f"{length}: ms: {said}")
        self.told()

    def begin(self, runner: Runner, length: int) -> None:
        """Run the first call of a runner and record its seconds."""
        took = runner.begin(self.inputs(length))
        self.found.first[runner.name] = self.found.first.get(runner.name, 0.0) + took
        if took > 1.0:
            self.say(f"{length}: first call of {runner.name} took {took:.1f} s")

    def peers(self, exe: Executable) -> dict[str, Callable[[], Runner]]:
        """Return functions that open the requested peers, by default those that this device's clock can time."""
        if exe.backend.vdevice.simulated:
            return {}  # simulated time is not comparable
        have = TORCH if exe.backend.hardware.kind == "gpu" else PEERS[:1]
        makes = {n: partial(self.torch.open, n) for n in TORCH} | {PEERS[0]: self.judge}
        return {name: makes[name] for name in (have if self.args.peers is None else self.args.peers)}

    def judge(self) -> Runner:
        """Return ONNX Runtime as the reference, reused if open."""
        return self.opened.get(PEERS[0]) or onnx_runtime(self.proto, self.args.threads)

    def peer(self, name: str, make: Callable[[], Runner], length: int) -> Runner | None:
        """Return the peer after its first call at this length, or None if it fails. The reason is reported and stored for the
        table."""
        try:
            found = self.opened.get(name) or make()
            self.begin(found, length)
            self.opened[name] = found
            return found
        except RammerError as problem:
            why = f"{name}: {problem.what}"
        except Exception as problem:  # a peer's errors must not lose the other results
            why = f"{name}: {type(problem).__name__}: {str(problem)[:200]}"
        self.found.missing.append(f"{self.model.key}: {why}")
        self.say(why)
        return None

    def checked(self, exe: Executable) -> None:
        """Compare results with ONNX Runtime's."""
        judge = self.judge() if self.checks else None
        for length in self.checks if judge else ():
            inputs = self.inputs(length)
            self.ran(exe, length)
            row = self.found.row(length)
            row.error = error_of(exe.run(inputs), judge.run(inputs))
            self.say(f"{length}: error {row.error:.1e}")
        self.told()

    def say(self, text: str) -> None:
        """Print progress with the elapsed seconds."""
        print(f"{self.model.key} {time.perf_counter() - self.begun:7.1f} s  {text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="rocm")
    made.add_argument("--models", default=",".join(RANGED))
    made.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--tune", default="off")
    for name, value in {"--seed": SEED, "--lengths": 100, "--exact": 8, "--rounds": 5, "--threads": 0}.items():
        made.add_argument(name, type=int, default=value)
    made.add_argument("--budget", type=float, default=math.inf, help="seconds after which no length is begun to be timed")
    made.add_argument("--beside", type=int, metavar="N", help="lengths to time beside peers (all)")
    made.add_argument("--peers-budget", type=float, default=0.0, help="seconds more for peers")
    made.add_argument("--ahead", type=int, default=0, metavar="N", help="compile ahead, N programs at a time")
    made.add_argument("--peers", help=f"with commas, of {', '.join(PEERS)}; none for rammer alone (the device's)")
    made.add_argument("--memory", type=int, help="lengths to measure memory with (all; with a budget none)")
    made.add_argument("--checks", type=int, help="lengths to compare with ONNX Runtime (all)")
    made.add_argument("--cache", type=Path, help="a folder with kernels and programs of earlier runs (an empty one)")
    made.add_argument("--markdown", type=Path, help="the page; its records are beside it, as .jsonl")
    made.add_argument("--most", type=int, default=0, metavar="N", help="the greatest length, instead of the model's")
    made.add_argument("--edges", action="store_true", help="lengths that favour the ends of programs, instead of even ones")
    made.add_argument("--keep", action="store_true", help="what the records say of other models stays")
    return made


def settled(args: argparse.Namespace) -> argparse.Namespace:
    """Derive dependent options. Raises BadInput for invalid ones."""
    if args.lengths < 3:
        raise BadInput("fewer than three lengths are no range", "--lengths")
    args.peers = tuple(p for p in args.peers.split(",") if p and p != "none") if args.peers is not None else None
    for name in set(args.peers or ()) - {*PEERS}:
        raise BadInput(f"unknown peer {name!r}", "--peers", f"some of: {', '.join(PEERS)}; or none")
    for name, default in (("memory", args.lengths if args.budget == math.inf else 0), ("checks", args.lengths)):
        given = getattr(args, name)
        setattr(args, name, default if given is None else max(given, 0))
    return args


def measured(args: argparse.Namespace, page: Page) -> None:
    """Measure the models, each with its share of the remaining time."""
    models, start = [find_ranged(k) for k in args.models.split(",") if k], time.perf_counter()
    models = [m.until(args.most) for m in models] if args.most else models
    for number, model in enumerate(models):
        now = time.perf_counter()
        end = now + max(start + args.budget - now, 0.0) / (len(models) - number)
        with tempfile.TemporaryDirectory() as folder:
            at_work = Measuring(model, Path(folder), args, end, page.tell)
            page.found.append(at_work.found)
            at_work.run()


def main() -> None:
    """Run the command line."""
    args = settled(parser().parse_args())
    words = [Path(w).name if before == "--markdown" else w for before, w in pairwise(sys.argv)]
    if args.threads:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    cores = f"Cores: {args.threads or 'all'}; load of the machine before: {os.getloadavg()[0]:.1f}."
    facts = environment_of(args.device.startswith("cuda"))
    page = Page(args.markdown, " ".join(["python -m benchmarks ranges", *words]), cores, facts)
    if args.keep:
        page.keep()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = str(args.cache.resolve()) if args.cache else cache
        measured(args, page)
    print(page.text())
    sys.exit(0 if all(f.fine for f in page.found) else 1)


if __name__ == "__main__":
    run(main)
