"""``rammer devices``: every plugin, its state, what it really is, and a live self-test of the working ones."""

from __future__ import annotations

import json
from typing import Any

import click

from rammer.device.loader import PLUGINS, DeviceStatus, Registry
from rammer.report.table import plain, size


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-test", is_flag=True, help="Skip the self-test.")
def command(as_json: bool, no_test: bool) -> None:
    """List devices with their state; exits 0 even when none works.

    Example: rammer devices
    """
    registry = Registry()
    rows = [row for status in registry.statuses() for row in _rows(registry, status, not no_test)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        table = [[r["device"], r["state"], r["name"], r["kind"], r["memory"], r["veus"], r["self_test"]] for r in rows]
        click.echo(plain(table, ["device", "state", "hardware", "kind", "memory", "vEUs", "self-test"]))
    else:
        click.echo(f"no devices: no plugin is installed ({PLUGINS})")


def _rows(registry: Registry, status: DeviceStatus, test: bool) -> list[dict[str, Any]]:
    if not status.hardware:
        return [_row(status.name, status.state, name=status.reason)]
    result = []
    for unit in status.hardware:
        spec = f"{status.name}:{unit.index}"
        veus, verdict = _try(registry, spec) if test else ("-", "skipped")
        result.append(_row(spec, status.state, unit.name, unit.kind, size(unit.memory), veus, verdict, detail=dict(unit.detail)))
    return result


def _row(
    device: str,
    state: str,
    name: str = "-",
    kind: str = "-",
    memory: str = "-",
    veus: str = "-",
    self_test: str = "-",
    detail: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "device": device,
        "state": state,
        "name": name,
        "kind": kind,
        "memory": memory,
        "veus": veus,
        "self_test": self_test,
        "detail": detail or {},
    }


def _try(registry: Registry, spec: str) -> tuple[str, str]:
    """(vEUs, verdict) of compiling and running a small program; a failure is a verdict, not an error."""
    from rammer.testing.selftest import self_test

    try:
        backend = registry.open(spec)
        return str(backend.vdevice.veus), self_test(backend)
    except Exception as problem:
        return "-", f"FAILED: {problem}".splitlines()[0]
