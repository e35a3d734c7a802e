"""Cost of planning: 100,000 tasks scheduled, with waits and memory planned, and verified.

``python benchmarks/planning.py --markdown planning.md``: CPU seconds on one core by program and policy, without a device. They
are those of the policy, of wait and memory planning, and of the verifier."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of
from result import Result, said, write

from rammer.report.text_table import markdown_table
from rammer.schedule.policy_registry import parse_policy
from rammer.verify.verifier import verify
from rammer_testing.programs import TaskNet, branching_net, device, recurrent_net

HEADERS: Final = (
    "program",
    "operators",
    "policy",
    "tasks",
    "waits",
    "policy s",
    "waits and memory s",
    "verifier s",
    "together s",
)
#: Programs of 100,000 tasks, by name.
NETS: Final[Mapping[str, Callable[[], TaskNet]]] = {
    "cells, 10 layers of 100 steps": lambda: recurrent_net(10, 100, 100),
    "branches, 2,000 of 50": lambda: branching_net(Random(1), 2000, 50, 60),
    "branches, 1,000 of 100": lambda: branching_net(Random(2), 1000, 100, 300),
    "branches, 300 of 334": lambda: branching_net(Random(3), 300, 334, 30),
    "branches, 100 of 1,000": lambda: branching_net(Random(4), 100, 1000, 10),
    "a chain, 10 of 10,000": lambda: branching_net(Random(5), 10, 10_000, 1),
}
Made = TypeVar("Made")


def spent(action: Callable[[], Made]) -> tuple[Made, float]:
    """Return the result of ``action`` and its CPU seconds."""
    begin = time.process_time()
    return action(), time.process_time() - begin


def row(name: str, policy: str, units: int, repeats: int) -> list[str]:
    """Return one row of the table: medians of ``repeats`` measurements."""
    net, chosen = NETS[name](), parse_policy(policy)
    graph, found = net.graph(), list[tuple[float, float, float]]()
    for _ in range(repeats):
        schedule, proposing = spent(lambda: chosen(graph, device(units)))
        program, planning = spent(lambda: net.planned(schedule, policy))  # noqa: B023 - called at once
        report, verifying = spent(lambda: verify(program))  # noqa: B023
        found.append((proposing, planning - verifying, verifying))
    times = sorted(found, key=sum)[len(found) // 2]
    sizes = [str(len(net.operators)), policy, str(report.tasks), str(report.waits)]
    return [name, *sizes, *(f"{t:.2f}" for t in (*times, sum(times)))]


@click.command()
@click.option("--policies", default="sequential,greedy,wavefront,wavefront{lean=0}", show_default=True, help="With commas.")
@click.option("--units", default=132, show_default=True, help="vEUs of the device that is scheduled for.")
@click.option("--repeats", default=3, show_default=True, help="The median counts.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(policies: str, units: int, repeats: int, markdown_file: Path | None) -> None:
    """Measure planning and print the table."""
    rows = list[list[str]]()
    for name in NETS:
        for policy in policies.split(","):
            rows.append(row(name, policy, units, repeats))
            click.echo("  ".join(rows[-1]))
    notes = [f"CPU seconds of one thread, medians of {repeats}, for {units} vEUs. Goal: together at most 2 s."]
    result = Result("Planning of 100,000 tasks", HEADERS, rows, notes, known=3)
    if markdown_file is not None:
        command = said(f"python benchmarks/planning.py --policies {policies} --units {units} --repeats {repeats}")
        write(markdown_file, result.document(command, environment_of(False)))
    click.echo(markdown_table(rows, HEADERS))


if __name__ == "__main__":
    run(main)
