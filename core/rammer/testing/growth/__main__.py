"""``python -m rammer.testing.growth --device D``: which steps of compiling grow faster than the model does.

Compiles graphs of each shape at growing sizes, prints CPU seconds by step with the exponent of the three largest sizes, and
exits with 1 where a step that takes a noticeable time has an exponent above ``--most``, or a compile fails.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial

from rammer.errors import RammerError
from rammer.testing.crew import Crew, Member
from rammer.testing.growth.measure import Asked, Costs, begin, exponent
from rammer.testing.growth.shapes import SHAPES

#: CPU seconds of a step that are too few to tell how they grow.
LEAST = 0.1
#: One compile hangs where nothing is heard for so many times ``--seconds``; what it may take beside its device's driver.
PATIENCE, MEMORY = 20, 16 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where everything grows as it should."""
    parser = argparse.ArgumentParser(prog="python -m rammer.testing.growth", description=__doc__)
    parser.add_argument("--device", required=True, help="NAME[:INDEX]")
    parser.add_argument("--target", default="", help="named hardware, as of rammer compile")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the device's own")
    parser.add_argument("--policy", default="wavefront")
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="all unless given")
    parser.add_argument("--sizes", default="500,1000,2000,4000")
    parser.add_argument("--most", type=float, default=1.3, help="largest exponent that is no finding")
    parser.add_argument("--seconds", type=float, default=30.0, help="no larger size after a compile of so many CPU seconds")
    parser.add_argument("--processes", type=int, default=1, help="shapes side by side, which disturb each other's times")
    given = parser.parse_args(arguments)
    rows, faults = dict[str, list[tuple[int, Costs]]](), 0

    def failed(text: str) -> None:
        nonlocal faults
        faults += 1
        print(f"FAILED {text}", flush=True)

    def heard(member: Member, part: tuple[str, int, Costs | str | None]) -> None:
        nonlocal faults
        shape, size, costs = part
        if isinstance(costs, str):
            failed(f"{shape} {size}: {costs}")
        elif costs is None:
            faults += report(shape, rows.pop(shape, []), given.most)
        else:
            rows.setdefault(shape, []).append((size, costs))

    def lost(member: Member, shape: str, kind: str, why: str, answered: bool) -> None:
        failed(f"{shape}: {kind}, {why}")

    asked = Asked(given.device, given.target, dict(o.split("=", 1) for o in given.option), given.policy,
                  tuple(int(n) for n in given.sizes.split(",")), given.seconds)  # fmt: skip
    shapes = given.shape or list(SHAPES)
    try:
        Crew(partial(begin, asked), shapes, min(given.processes, len(shapes)), math.inf, heard, lost, memory=MEMORY,
             patience=PATIENCE * given.seconds).run()  # fmt: skip
    except RammerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{given.device} {given.policy}: {faults} findings")
    return int(faults > 0)


def report(shape: str, rows: Sequence[tuple[int, Costs]], most: float) -> int:
    """Print the costs of one shape; how many steps grow too fast."""
    found = 0
    if not rows:
        return 0
    totals = " ".join(f"{size}:{sum(costs.values()):.2f}" for size, costs in rows)
    print(f"{shape}: {totals} s of CPU", flush=True)
    for step in rows[-1][1]:
        last = [(size, costs.get(step, 0.0)) for size, costs in rows[-3:]]
        if last[-1][1] < LEAST or len(last) < 2:
            continue
        slope = exponent(*map(list, zip(*last, strict=True)))
        figures = " ".join(f"{cost:.2f}" for _, cost in last)
        found += slope > most
        print(f"  {'GROWS' if slope > most else '     '} {step:<10} n^{slope:.2f}  {figures}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
