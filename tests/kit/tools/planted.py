"""Faults planted into a device's kernels, one at a time, for the kernel search to detect.

    python tests/kit/tools/planted.py --device cuda --seconds 30 --processes 5 --side 3

Each fault changes the plugin's output: kernel texts or a generator's assumptions. The search (``rammer_testing.families``) runs
with it until its first failure. It prints one line per fault: the candidate and the time of detection in seconds. Exits with 1 if
a fault was not detected.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plants import PLANTS

from rammer_testing.families import Drawn, begin
from rammer_testing.worker_pool import Begin, Member, Work
from rammer_testing.workers import HuntOutcome, failed, hunt

#: Elements or products of one case: small cases detect these faults sooner. Candidates per family.
SIZE, EACH = 300_000, 3
#: Messages for an invalid text: then the fault itself is wrong.
BROKEN = ("does not compile", "NVRTC rejected")


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--device", required=True, type=click.Choice(sorted(PLANTS)), help="Device of the kernels.")
@click.option("--seconds", default=30.0, show_default=True, help="Maximum seconds for each fault.")
@click.option("--processes", default=1, show_default=True, help="Processes that search for one fault.")
@click.option("--side", default=1, show_default=True, help="Faults searched concurrently.")
@click.option("--seed", default=1, show_default=True, help="Seed of the cases.")
@click.option("--only", default="", help="Faults whose names contain this.")
@click.option("--option", "options", multiple=True, help="KEY=VALUE of the device.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write the lines there, as JSON.")
def main(
    device: str, seconds: float, processes: int, side: int, seed: int, only: str, options: tuple[str, ...], report: Path | None
) -> None:
    """Plant every fault and print the results."""
    names = [n for n in PLANTS[device] if only in n]
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    search = partial(begin, Drawn(device, seed, EACH, SIZE, options=options))
    lines = list[dict[str, object]]()

    def one(name: str) -> HuntOutcome:
        start = time.monotonic()
        outcome = hunt(partial(planted, device, name, search), seconds, processes, failed, {"device": device, "seeds": [seed]})
        kinds = [k for k, said in outcome.failures.items() if not any(word in said[0] for word in BROKEN)]
        line = {
            "fault": name,
            "found": bool(kinds),
            "candidates": outcome.coverage.candidates,
            "seconds": round(time.monotonic() - start, 1),
            "how": outcome.failures[kinds[0]][0] if kinds else "",
        }
        lines.append(line)
        found = "found" if kinds else "NOT FOUND"
        how = str(line["how"]).replace("\n", " ")[:230]
        click.echo(f"{found} after {line['candidates']} candidates, {line['seconds']} s: {name} ({how})")
        return outcome

    with ThreadPoolExecutor(max_workers=side) as pool:
        list(pool.map(one, names))
    if report is not None:
        report.write_text(json.dumps(lines))
    missed = [line["fault"] for line in lines if not line["found"]]
    click.echo(f"{len(lines) - len(missed)} of {len(lines)} planted faults found; not: {', '.join(map(str, missed)) or 'none'}")
    sys.exit(bool(missed))


def planted(device: str, name: str, search: Begin, member: Member) -> Work:
    """Start a process of the search with the fault planted."""
    PLANTS[device][name]()
    return search(member)


if __name__ == "__main__":
    main()
