"""The transport ``chips``: simulated chips of one process. Tensors are transferred in memory of this process. Transfer times are
those of the chips' links, which are specified, not measured. A run is simulated on all chips at once to obtain its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.transport import LOCAL, Site, Transport
from rammer.errors import DeviceFailure
from rammer.report.text_table import format_duration, format_size
from rammer.verify.multi_device import TRANSFER

from rammer_ipu_sim.chip import GC2
from rammer_ipu_sim.executor import LoadedProgram
from rammer_ipu_sim.links import make_links

__all__ = ["CHIPS", "chip_link_refusal", "chip_links", "simulate_runs"]

#: Runs in flight for estimating the time between results.
RUNS: Final = 8


def chip_link_refusal(a: Site, b: Site) -> str | None:
    """Return the reason why two sites are not chips of one simulation, or None."""
    for site in (a, b):
        if site.device.partition(":")[0] != "ipu_sim":
            return f"{site.device} is not a simulated chip"
    return LOCAL.connects(a, b)


def chip_links(count: int) -> tuple[Link, ...]:
    """Return the links between ``count`` chips."""
    return make_links(replace(GC2, chips=count))


def simulate_runs(spread: DistributedProgram, backend: Any) -> Sequence[str]:
    """Return a report of simulated runs on the chips of ``backend``: seconds of one run, and between results."""
    count, whole = len(spread.parts), spread.whole
    unsupported = sorted({o.family for o in whole.operators if not o.computes and o.family != TRANSFER})
    if unsupported or spread.ranged is not None:
        return [f"runs on {count} chips are not simulated: {', '.join(unsupported) or 'lengths'} are unsupported there"]
    try:
        loaded = LoadedProgram(whole, {}, replace(backend.chip, chips=max(count, backend.chip.chips)), backend.stream)
    except DeviceFailure as problem:
        return [f"runs on {count} chips are not simulated: {problem.what}"]
    one, many = loaded.played(), loaded.played(runs=RUNS)
    between = format_duration((many.whole - one.whole) / (RUNS - 1))
    streamed = sum(whole.buffer[name].nbytes for name in loaded.streamed)
    besides = f", of which constants come from the host: {format_size(streamed)} a run" if streamed else ""
    return [
        f"simulated over the links of {count} chips: {format_duration(one.whole)} a run, "
        f"{between} between {RUNS} in flight{besides}"
    ]


#: The transport that transfers between chips.
CHIPS: Final = Transport(
    "chips",
    "simulated chips of one process: times are those of their links",
    LOCAL.probe,
    chip_link_refusal,
    LOCAL.open,
    rank=1,
    reads=True,
    links=chip_links,
    played=simulate_runs,
)
