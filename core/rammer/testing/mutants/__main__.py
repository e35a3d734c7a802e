"""``python -m rammer.testing.mutants``: a campaign, in one process or several, or kept cases again."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rammer.errors import RammerError
from rammer.testing.mutants.tally import Tally


def main() -> int:
    """Exit code 1 where a mutant fails, a RammerError's own where none can be run."""
    try:
        return _main(_arguments())
    except RammerError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _main(args: argparse.Namespace) -> int:
    # Before NumPy is imported: its threads would not survive a fork, and each maps memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if args.again:
        return _again(args.again)
    start = time.monotonic()
    if args.processes > 1 or args.report:
        from rammer.testing.mutants.crew import crew

        total = crew(_words(args), max(args.processes, 1), args.seed, args.seconds, args.report)
    else:
        total = _campaign(args)
    if not args.stream:
        print(f"seed {args.seed}, on {' '.join([args.device, *args.option])}, {time.monotonic() - start:.0f} s\n{total}")
    return int(bool(total.faults))


def _words(args: argparse.Namespace) -> list[str]:
    """The arguments of one of several processes, which share the count."""
    kinds = [w for k in args.kind or [] for w in ("--kind", k)]
    options = [w for o in args.option for w in ("--option", o)]
    keep = ["--keep", str(args.keep.resolve())] if args.keep else []
    return [*kinds, "--device", args.device, *options, *keep, "--count", str(-(-args.count // max(args.processes, 1)))]


def _campaign(args: argparse.Namespace) -> Tally:
    from rammer.testing.mutants.campaign import Campaign
    from rammer.testing.mutants.kinds import KINDS

    device = ["--device", args.device, *(w for o in args.option for w in ("--option", o))]
    kinds, end = args.kind or list(KINDS), time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        # Rounds, so that an early end leaves some of every kind.
        made = [Campaign(kind, device, args.seed, Path(folder) / kind, args.keep) for kind in kinds]
        try:
            for number in range(args.count):
                if time.monotonic() > end:
                    break
                campaign = made[number % len(made)]
                campaign.one(campaign.drawn())
                if args.stream:
                    print(json.dumps(Tally.sum(c.tally for c in made).data()), flush=True)
        finally:
            for campaign in made:
                campaign.close()
        return Tally.sum(c.tally for c in made)


def _again(path: Path) -> int:
    from rammer.testing.mutants.campaign import again

    ends = [again(line) for line in path.read_text().splitlines()]
    for number, (fault, end) in enumerate(ends):
        print(f"{path}:{number + 1}: {fault or f'exit code {end.code}'}\n{end.err}")
    return int(any(fault for fault, _ in ends))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rammer.testing.mutants", description=__doc__)
    parser.add_argument("--kind", action="append", help="model, compiled, store, kept or head; repeatable; all unless given")
    parser.add_argument("--device", default="ipu_sim", help="a device; one with OpenCL takes longer for every mutant")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the device")
    parser.add_argument("--count", type=int, default=500, help="mutants in all")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="share the mutants; each process has a seed of its own")
    parser.add_argument("--report", type=Path, help="a file with the table and all counts, written every few seconds")
    parser.add_argument("--keep", type=Path, help="a file for failing mutants: a line for each fault and process")
    parser.add_argument("--again", type=Path, help="run the cases of such a file again")
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
