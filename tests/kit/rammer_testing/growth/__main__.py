"""``python -m rammer_testing.growth --device D``: find compile steps that grow faster than the model.

Compile graphs of each shape at growing sizes. Print CPU seconds by step with the exponent of the three largest sizes. The exit
code is 1 if a compile fails or a step with noticeable time has an exponent above ``--most``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial

from rammer.errors import RammerError
from rammer_testing.growth.measure import GrowthPlan, begin
from rammer_testing.growth.shapes import SHAPES
from rammer_testing.worker_pool import Crew, Member

#: Multiple of ``--seconds`` per size after which a shape counts as a hang, and the bytes that it may use beyond its device's
#: driver.
PATIENCE, MEMORY = 10, 16 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 0 if every step grows as expected."""
    parser = argparse.ArgumentParser(prog="python -m rammer_testing.growth", description=__doc__)
    parser.add_argument("--device", required=True, help="NAME[:INDEX]")
    parser.add_argument("--target", default="", help="named hardware, as of rammer compile")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the device's own")
    parser.add_argument("--policy", default="wavefront")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="all unless given")
    parser.add_argument("--sizes", default="500,1000,2000,4000")
    parser.add_argument("--most", type=float, default=1.3, help="largest exponent that is not reported")
    parser.add_argument("--seconds", type=float, default=30.0, help="no larger size after a compile of so many CPU seconds")
    parser.add_argument("--processes", type=int, default=1, help="shapes side by side, which disturb each other's times")
    given = parser.parse_args(arguments)
    faults = 0

    def heard(member: Member, part: tuple[str, int]) -> None:
        nonlocal faults
        faults += part[1]
        print(part[0], flush=True)

    def lost(member: Member, shape: str, kind: str, why: str, answered: bool) -> None:
        heard(member, (f"FAILED {shape}: {kind}, {why}", 1))

    options, sizes = dict(o.split("=", 1) for o in given.option), [int(n) for n in given.sizes.split(",")]
    asked = GrowthPlan(given.device, given.target, options, given.policy, sizes, given.seconds, given.most)
    shapes = given.shape or list(SHAPES)
    try:
        Crew(
            partial(begin, asked),
            shapes,
            min(given.processes, len(shapes)),
            math.inf,
            heard,
            lost,
            memory=MEMORY,
            patience=PATIENCE * len(sizes) * given.seconds,
        ).run()
    except RammerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{given.device} {given.policy}: {faults} findings")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
