"""Links between devices, with their transport and speed: the second half of ``rammer devices``."""

from __future__ import annotations

from itertools import combinations
from typing import Any, Final

from rammer.device.loader import DeviceStatus, Registry
from rammer.distributed.joining import launched_processes
from rammer.distributed.transport import mpi_launch
from rammer.distributed.transport.measure_links import measured_links
from rammer.distributed.transport.protocol import Party, Site
from rammer.distributed.transport.transport_registry import choose_transport, list_transports
from rammer.errors import MissingDependency, RammerError
from rammer.report.text_table import format_duration, plain_table

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
