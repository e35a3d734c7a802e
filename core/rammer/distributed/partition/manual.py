"""Manual placement: a file that maps names of a model to devices.

A line is a name and the number of a device, ``conv1 0``. A name is that of a tensor or a node in the model. ``#`` starts a
comment line. An unnamed Compute runs on the device of the last of its operands, or else of its first reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rammer.distributed.partition.cut_graph import Spot
from rammer.errors import BadInput
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.untrusted_json import whole_number

__all__ = ["assign_stages", "by_hand"]


def by_hand(text: str, graph: ComputeGraph, devices: int, where: str = "--place") -> dict[str, Spot]:
    """Return the spots that ``text`` requests. ``where`` names the file. Raises BadInput for a malformed line, an unknown name or
    an unknown device."""
    named: dict[str, list[Compute]] = {}
    for c in graph.computes:
        for name in {c.name, graph.aliases.get(c.name, c.name), c.origin} - {""}:
            named.setdefault(name, []).append(c)
    chosen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        at = f"{where} line {number}"
        name, _, device = line.strip().rpartition(" ")
        name = name.strip()
        place = whole_number(device)
        if not name or place is None:
            raise BadInput(f"{line.strip()[:80]!r} is not a name followed by a device number", at, "for example: conv1 0")
        if place >= devices:
            raise BadInput(f"{name!r} is placed on device {place}, but there are {devices} devices", at, f"0 to {devices - 1}")
        if name not in named:
            raise BadInput(
                f"the model does not compute {name!r}", at, f"names are, for example, {', '.join(_example_names(graph))}"
            )
        for c in named[name]:
            if chosen.setdefault(c.name, place) != place:
                raise BadInput(f"{name!r} is placed on two devices", at)
    if not chosen:
        raise BadInput("the placement is empty", where)
    return assign_stages(graph, _assign_devices(graph, chosen))


def _example_names(graph: ComputeGraph) -> Iterable[str]:
    names = dict.fromkeys(n for c in graph.computes for n in (c.origin, graph.aliases.get(c.name, c.name)) if n)
    return list(names)[:4]


def _assign_devices(graph: ComputeGraph, chosen: Mapping[str, int]) -> dict[str, int]:
    """Return a device for every Compute."""
    found = dict(chosen)
    for c in graph.computes:
        near = [found[n] for n in c.reads if n in found]
        if c.name not in found and near:
            found[c.name] = near[-1]
    readers = graph.consumers()
    for c in reversed(graph.computes):
        if c.name not in found:
            found[c.name] = next((found[r.name] for r in readers[c.name] if r.name in found), 0)
    return found


def assign_stages(graph: ComputeGraph, devices: Mapping[str, int]) -> dict[str, Spot]:
    """Return stages for an assignment of devices: the stage increases when a value crosses devices, so steps cannot deadlock."""
    spots: dict[str, Spot] = {}
    for c in graph.computes:
        here, before = devices[c.name], [spots[n] for n in c.reads if n in spots]
        spots[c.name] = Spot(max((s.stage + (s.device != here) for s in before), default=0), here)
    return spots
