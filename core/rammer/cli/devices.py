"""The command ``rammer devices``: every plugin with its state, its hardware, and a live self-test if it works."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import click

from rammer.cli.reach import measure_reach, reach_table, transport_table
from rammer.device.loader import PLUGINS, DeviceStatus, Registry
from rammer.device.plugin_output import stdout_to_stderr
from rammer.distributed.joining import launched_processes
from rammer.distributed.transport import mpi_launch
from rammer.report.text_table import format_size, plain_table


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
