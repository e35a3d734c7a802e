"""``python -m rammer.testing.mutants``: a campaign, or kept cases again."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Exit code 1 where a mutant fails."""
    args = _arguments()
    # Before NumPy is imported: its threads would not survive a fork, and each maps memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from rammer.testing.mutants.campaign import Campaign, again
    from rammer.testing.mutants.kinds import KINDS

    if args.again:
        ends = [(place, again(place)) for place in args.again]
        for place, end in ends:
            print(f"{place}: {end.fault or f'exit code {end.code}'}\n{end.err}")
        return int(any(end.fault for _, end in ends))
    device = ["--device", args.device, *(w for o in args.option for w in ("--option", o))]
    kinds = args.kind or list(KINDS)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            start = time.monotonic()
            campaign = Campaign(kind, device, args.seed, Path(folder) / kind, args.keep)
            tally = campaign.run(args.count // len(kinds), args.seconds / len(kinds))
            print(f"{kind}, seed {args.seed}, on {' '.join(device[1:])}, {time.monotonic() - start:.0f} s\n{tally}", flush=True)
            failed = failed or bool(tally.faults)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rammer.testing.mutants", description=__doc__)
    parser.add_argument("--kind", action="append", help="model, compiled, store or kept; repeatable; all unless given")
    parser.add_argument("--device", default="ipu_sim", help="a device that forked processes can open: no OpenCL")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the device")
    parser.add_argument("--count", type=int, default=500, help="mutants in all")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for failing files, one of each fault")
    parser.add_argument("--again", type=Path, nargs="+", help="run kept cases again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
