"""Many runs from many Python threads, each with new inputs and compared with float64.

``python -m rammer_testing.threads --device rocm --runs 10000`` runs them and exits with 1 if an output is wrong. Threads
alternate on one executable and on several, some of whose sets of shapes are freed and loaded again meanwhile."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from rammer.errors import RammerError
from rammer_testing.subject import ConformanceError, Subject
from rammer_testing.thread_checks import closing, jobs_of, run_many

#: Executables that the threads of a round share, and runs per thread; outputs are kept until the end of the round. The last has
#: five sets of shapes, more than stay resident, so it compiles all the time.
ROUNDS = ((("product",), 50), (("convolution", "branches", "softmax"), 50), (("dynamic",), 1))
#: Sets of shapes that stay on the device.
RESIDENT = 4


def hammer(device: Subject, runs: int, threads: int) -> tuple[int, int]:
    """Execute at least ``runs`` runs from ``threads`` threads; return the numbers of runs and of wrong runs."""
    groups = [(jobs_of(device, *names, resident=RESIDENT), length) for names, length in ROUNDS]
    made = wrong = 0
    with closing([job for jobs, _ in groups for job in jobs]):
        while made < runs:
            for jobs, most in groups:
                length = min(most, -(-(runs - made) // threads))
                wrong += run_many(device, jobs, threads, length)
                made += threads * length
    return made, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 if all runs are correct."""
    parser = argparse.ArgumentParser(prog="python -m rammer_testing.threads", description=__doc__)
    parser.add_argument("--device", required=True, help="NAME[:INDEX]")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=int(np.random.SeedSequence().generate_state(1)[0]))
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the device's own")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        device = Subject(given.device, options=dict(o.split("=", 1) for o in given.option), seed=given.seed)
        made, wrong = hammer(device, given.runs, given.threads)
    except (RammerError, ConformanceError) as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code if isinstance(problem, RammerError) else 1
    verdict = f"{wrong} wrong" if wrong else "all right"
    print(
        f"{given.device}: {made} runs from {given.threads} threads, seed {given.seed}: {verdict} "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
