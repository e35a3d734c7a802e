"""The command ``rammer devices``: every plugin with its state, its hardware, and a live self-test if it works.

Its second half shows the links between devices, with their transport and speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from itertools import combinations
from typing import Any, Final

import click

from rammer.device.loader import PLUGINS, DeviceStatus, Registry
from rammer.device.plugin_output import stdout_to_stderr
from rammer.distributed.joining import launched_processes
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.measure_links import measured_links
from rammer.distributed.transport.protocol import Party, Site
from rammer.distributed.transport.transport_registry import choose_transport, list_transports
from rammer.errors import MissingDependency, RammerError
from rammer.report.text_table import format_duration, format_size, plain_table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-test", is_flag=True, help="Skip the self-test.")
def command(as_json: bool, no_test: bool) -> None:
    """List devices with their state, the links between them with their speed, and all transports.

    The exit code is 0 even if no device works. Under mpirun the processes are measured.

    Example: rammer devices
    """
    registry = Registry()
    with stdout_to_stderr():  # plugins may print while they are opened and run
        statuses = list(registry.statuses())
        others = launched_processes() > 1 and mpi_launch.rank_and_size()[0] > 0
        rows = [] if others else [row for status in statuses for row in _device_rows(registry, status, not no_test)]
        ways = [] if no_test else measure_reach(registry, statuses)
    if others:
        return
    for row in rows:
        row["reaches"] = [{k: v for k, v in way.items() if k != "from"} for way in ways if way["from"] == row["device"]]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        table = [[r["device"], r["state"], r["name"], r["kind"], r["memory"], r["veus"], r["self_test"]] for r in rows]
        click.echo(plain_table(table, ["device", "state", "hardware", "kind", "memory", "vEUs", "self-test"]))
        if ways:
            click.echo("\n" + reach_table(ways) + "\n\n" + transport_table(registry))
    else:
        click.echo(f"no devices: no plugin is installed ({PLUGINS})")


#: A row without any information.
UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(("device", "state", "name", "kind", "memory", "veus", "self_test"), "-"),
    "detail": {},
}


def _device_rows(registry: Registry, status: DeviceStatus, test: bool) -> list[dict[str, Any]]:
    if not status.hardware:
        return [{**UNKNOWN, "device": status.name, "state": status.state, "name": status.reason}]
    result = []
    for unit in status.hardware:
        spec = f"{status.name}:{unit.index}"
        veus, verdict = _run_self_test(registry, spec) if test else ("-", "skipped")
        said = {"device": spec, "state": status.state, "name": unit.name, "kind": unit.kind, "memory": format_size(unit.memory)}
        result.append({**UNKNOWN, **said, "veus": veus, "self_test": verdict, "detail": dict(unit.detail)})
    return result


def _run_self_test(registry: Registry, spec: str) -> tuple[str, str]:
    """Compile and run a small program, and return (vEUs, verdict). A failure is a verdict, not an error."""
    from rammer.jit.self_test import self_test

    try:
        with closing(registry.open(spec)) as backend:
            return str(backend.vdevice.veus), self_test(backend)
    except Exception as problem:
        return "-", f"FAILED: {problem}".splitlines()[0]


#: Maximum number of units that are measured in pairs.
MOST: Final = 8
#: Seconds that the peer of a measurement may take.
PATIENCE: Final = 10.0


def measure_reach(registry: Registry, statuses: list[DeviceStatus]) -> list[dict[str, Any]]:
    """Measure every pair of working units of this process, or every pair of processes under an MPI launcher."""
    if launched_processes() > 1:
        names = [f"process {n}" for n in range(launched_processes())]
        return _measure_links(registry, [Site(name, "cpu", n, mpi_launch.is_multi_host()) for n, name in enumerate(names)])
    units = [(f"{s.name}:{u.index}", u.kind) for s in statuses if s.state == "ok" for u in s.hardware][:MOST]
    return [row for pair in combinations(units, 2) for row in _measure_links(registry, [Site(*unit) for unit in pair])]


def _measure_links(registry: Registry, sites: list[Site]) -> list[dict[str, Any]]:
    """Return a row for each pair of ``sites``, or one with the reason if they cannot be measured."""
    names = [s.device for s in sites]
    try:
        transport = choose_transport(registry, sites)
        fabric = transport.open(Party(tuple(sites), PATIENCE))
        failed = True
        try:
            links = measured_links(fabric, names, mpi_launch.start_timeout(PATIENCE), f"measured by {transport.name}")
            failed = False
        finally:
            fabric.close(failed)
    except RammerError as problem:
        return [{"from": names[0], "to": names[1], "by": "", "why": f"{problem.what} {problem.where}".strip()}]
    return [
        {"from": names[k.source], "to": names[k.target], "by": transport.name, "latency": k.latency, "bandwidth": k.bandwidth}
        for k in links
        if k.source < k.target
    ]


def transport_table(registry: Registry) -> str:
    """Return a table of all transports: their devices, and the missing dependency."""
    lines = []
    for transport in list_transports(registry):
        try:
            transport.probe()
            state = "ok"
        except MissingDependency as problem:
            state = problem.reason
        lines.append([transport.name, state, transport.summary])
    return plain_table(lines, ["transport", "state", "joins"])


def reach_table(rows: list[dict[str, Any]]) -> str:
    """Format the measured links as a table."""
    lines = []
    for r in rows:
        fast = (format_duration(r["latency"]), f"{r['bandwidth'] / 1e9:.3g} GB/s") if r["by"] else ("-", r["why"])
        lines.append([r["from"], r["to"], r["by"] or "-", *fast])
    return plain_table(lines, ["from", "to", "by", "latency", "bandwidth"])
