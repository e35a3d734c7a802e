"""All models by all policies on all devices: compiled, verified, run once, compared with ONNX Runtime.

    python -m benchmarks matrix --small
    python -m benchmarks matrix --device ipu_sim --keep --out FOLDER -- --processes 24 --limit 300 --policies sequential,ios

Each case is a separate process, ``--processes`` at a time, with one thread for NumPy's products. A case that is silent for
``--limit`` seconds is killed, and the others continue. After ``--budget`` seconds no case starts, and running ones are killed
soon after. Models and references are created first. If a result is too far from ONNX Runtime's, both are compared with float64,
and the result is right if it is near float64. Each case is a line of a file next to the page, written when the case ends. With
``--keep`` finished cases of the same environment are not repeated. The exit code is 1 if any requested case is not right.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import onnx
from entry import run
from facts import environment_of
from matrix_page import Case, MatrixPage, Outcome
from measuring import Settings, Way, exported, opened
from peers import reference_outputs
from tables.scheduling import POLICIES
from zoo import SEED, ZOO, find

from rammer.cli.options import parse_options
from rammer.errors import BadInput, RammerError
from rammer.schedule.policy_registry import parse_policy
from rammer_bench.graph import Array
from rammer_bench.prepare import relative_error
from rammer_testing.weights import runner
from rammer_testing.worker_pool import HANG, UNFINISHED, Crew, Line, Member, Work, leave

#: Largest accepted relative L2 distance to the reference.
RIGHT: Final = 1e-4
#: References; the second is computed only if a result is too far from the first.
JUDGES: Final = ("ONNX Runtime", "float64")
#: Seconds after the budget in which running cases may finish.
GRACE: Final = 5.0
#: Each separate process has one thread for products, independent of the number of cores.
ALONE: Final = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}


def reference(path: Path, feeds: Mapping[str, Array], judge: str) -> dict[str, Array]:
    """Return a judge's outputs for the model in a file, cached next to it. The cache file is written atomically."""
    kept = path.with_suffix(f".{JUDGES.index(judge)}.npz")
    if not kept.is_file():
        model = onnx.load(str(path))
        found = runner(model)(feeds) if judge == JUDGES[0] else reference_outputs(model, feeds, "cpu")
        with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".npz", delete=False) as file:
            np.savez(file, **{n: np.asarray(a) for n, a in found.items()})  # type: ignore[arg-type]
        os.replace(file.name, kept)
    with np.load(kept) as data:
        return {n: data[n] for n in data.files}


def prepared(settings: Settings, folder: Path, member: Member) -> Work:
    """Return a worker that creates a model's file and reference."""

    def work(key: str, line: Line) -> None:
        reference(exported(key, folder, settings.seed), find(key).feeds(settings.seed), JUDGES[0])
        line.tell(key)
        leave()

    return work


def judged(case: Case, settings: Settings, folder: Path) -> Outcome:
    """Compile, run and compare a case. If the device declines, the outcome has its reason."""
    path, feeds = exported(case.model, folder, settings.seed), find(case.model).feeds(settings.seed)
    wants = reference(path, feeds, JUDGES[0])
    begin, clock = time.process_time(), time.perf_counter()
    try:
        program = opened(path, feeds, Way(case.policy, {"policy": case.policy}, case.device), settings)
        program.bound.run()
        program.bound.synchronize()
        have = program.bound.to_host()
    except RammerError as problem:
        return Outcome(case, said="declined", why=problem.what.splitlines()[0], seconds=time.process_time() - begin)
    took, clocked = time.process_time() - begin, time.perf_counter() - clock
    error, judge = relative_error(have, wants), JUDGES[0]
    if not error <= RIGHT:
        exact = reference(path, feeds, JUDGES[1])
        why = f"{error:.1e} from ONNX Runtime, which is {relative_error(wants, exact):.1e} from float64"
        error, judge = relative_error(have, exact), JUDGES[1]
        return Outcome(case, error, judge, "" if error <= RIGHT else "wrong", why, took, clocked)
    return Outcome(case, error, judge, seconds=took, clock=clocked)


def tried(settings: Settings, folder: Path, member: Member) -> Work:
    """Return a worker that runs one case and exits, so that each case has a separate process."""

    def work(case: Case, line: Line) -> None:
        line.tell(judged(case, settings, folder))
        leave()

    return work


def ended(case: Case, kind: str, why: str) -> Outcome:
    """Return the outcome of a case whose process died or was killed."""
    words = [w for w in why.splitlines() if w.strip()] or [kind]
    return Outcome(case, said="did not end" if kind in (HANG, UNFINISHED) else "failed", why=words[0])


def together(args: argparse.Namespace, settings: Settings, folder: Path, page: MatrixPage) -> None:
    """Run all cases missing from the page: models and references first, then policy by policy."""
    begun = time.monotonic()
    end = begun + args.budget
    cases = [Case(m, d, p) for p in args.policies for d in settings.devices for m in settings.models]
    missing = [c for c in cases if c not in page.found]
    models = list(dict.fromkeys(c.model for c in missing))

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} s  {text}", file=sys.stderr, flush=True)

    def made(member: Member, key: str) -> None:
        say(f"{key}: model and reference")

    def no_model(member: Member, key: str, kind: str, why: str, answered: bool) -> None:
        if not answered:
            for case in [c for c in missing if c.model == key]:
                heard(member, ended(case, kind, f"no reference: {why}"))

    def heard(member: Member, outcome: Outcome) -> None:
        page.add(outcome)
        say(f"[{sum(c in page.found for c in cases)}/{len(cases)}] {outcome}")

    def lost(member: Member, case: Case, kind: str, why: str, answered: bool) -> None:
        if not answered:
            heard(member, ended(case, kind, why))

    crew = partial(Crew, end=end, grace=GRACE, patience=args.limit, pinned=True, environment=ALONE)
    if models:
        crew(partial(prepared, settings, folder), models, min(args.processes, len(models)), heard=made, lost=no_model).run()
    missing = [c for c in missing if c not in page.found]
    if missing and time.monotonic() < end:
        crew(partial(tried, settings, folder), missing, min(args.processes, len(missing)), heard=heard, lost=lost).run()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="rocm,ipu_sim", help="with commas")
    made.add_argument("--models", default=",".join(ZOO), help="in this order, with each policy")
    made.add_argument("--policies", default=",".join(POLICIES), help="with commas, in this order")
    made.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    made.add_argument("--tune", default="off")
    made.add_argument("--seed", type=int, default=SEED)
    made.add_argument("--processes", type=int, default=1)
    made.add_argument("--limit", type=float, default=3600.0, help="seconds for a case")
    made.add_argument("--budget", type=float, default=math.inf, help="seconds for all")
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "rammer-zoo", help="of models and references")
    made.add_argument("--markdown", type=Path, help="the page; its lines are beside it, as .jsonl")
    made.add_argument("--keep", action="store_true", help="what that file has is not done again")
    return made


def settled(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and check it before any work starts."""
    args = parser().parse_args(words)
    args.policies = re.split(r",(?![^{]*\})", args.policies)  # not at commas within braces
    for policy in args.policies:
        parse_policy(policy)
    if args.processes < 1:
        raise BadInput("fewer than one process", "--processes")
    for key in args.models.split(","):
        find(key)
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Run the matrix and return the exit code."""
    args = settled(words)
    devices, options = tuple(args.device.split(",")), parse_options(tuple(args.option))
    settings = Settings(devices, tuple(args.models.split(",")), args.tune, seed=args.seed, options=options)
    facts: dict[str, Any] = environment_of(any(d.partition(":")[0] == "cuda" for d in devices))
    os.environ.update(ALONE)  # children read it when they start
    page = MatrixPage(args.markdown, facts, args.keep)
    together(args, settings, args.folder, page)
    print(page.text())
    asked = {Case(m, d, p) for m in settings.models for d in devices for p in args.policies}
    return int(any(o.said for c, o in page.found.items() if c in asked))


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
