"""``python -m rammer_testing.mutants``: run a campaign in one or more processes, or rerun saved cases."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rammer.errors import RammerError
from rammer_testing.mutants.crew import MutantPlan, search
from rammer_testing.sandbox import Machinery
from rammer_testing.worker_pool import check_tried


def main() -> int:
    """Run the command line; the exit code is 1 if a mutant fails, or that of a RammerError if a mutant cannot be run."""
    args = _arguments()
    # Set before NumPy is imported: its threads would not survive a fork, and each maps memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from rammer_testing.mutants.kinds import KINDS

    try:
        if args.again:
            return _again(args.again)
        start, device = time.monotonic(), ["--device", args.device, *(w for o in args.option for w in ("--option", o))]
        keep = args.keep and args.keep.resolve()
        kinds = args.kind or list(KINDS)
        total = search(MutantPlan(kinds, device, args.seed, keep), args.count, args.processes, args.seconds, args.report)
        seconds = time.monotonic() - start
        print(f"seed {args.seed}, on {' '.join([args.device, *args.option])}, {seconds:.0f} s\n{total}")
        check_tried(total.mutants + len(total.faults) + total.unbegun.total(), "mutant", seconds)
    except RammerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 1 if total.faults else Machinery.exit_code if total.unbegun else 0


def _again(path: Path) -> int:
    from rammer_testing.mutants.campaign import again

    ends = [again(line) for line in path.read_text().splitlines()]
    for number, (fault, end) in enumerate(ends):
        print(f"{path}:{number + 1}: {fault or f'exit code {end.code}'}\n{end.err}")
    return int(any(fault for fault, _ in ends))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rammer_testing.mutants", description=__doc__)
    parser.add_argument(
        "--kind", action="append", help="model, compiled, signed, store, kept or head; repeatable; all unless given"
    )
    parser.add_argument("--device", default="ipu_sim", help="a device; one with OpenCL takes longer for every mutant")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the device")
    parser.add_argument("--count", type=int, default=500, help="mutants in all")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="share the mutants; each process has a seed of its own")
    parser.add_argument("--report", type=Path, help="a file with the table and all counts, written every few seconds")
    parser.add_argument("--keep", type=Path, help="a file for failing mutants: a line for each fault and process")
    parser.add_argument("--again", type=Path, help="run the cases of such a file again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
