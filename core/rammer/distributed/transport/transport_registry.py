"""Selection of the transport between devices, among those of the core and of plugins."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.loader import Registry
from rammer.distributed.distributed_program import Link
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.messages import MESSAGES
from rammer.distributed.transport.mpi import MPI
from rammer.distributed.transport.protocol import Site, Transport
from rammer.errors import DeviceUnavailable, MissingDependency

BUILT_IN = (LOCAL, MPI, MESSAGES)


def list_transports(registry: Registry, multi_host: bool = False) -> list[Transport]:
    """Return all transports, best first; ``multi_host`` orders them for devices on different hosts."""
    return sorted((*BUILT_IN, *registry.transports()), key=lambda t: (-(t.far if multi_host else t.rank), t.name))


def choose_transport(registry: Registry, sites: Sequence[Site], name: str = "") -> Transport:
    """Return the best transport, or the one called ``name``, that connects all ``sites`` and works here. Raises DeviceUnavailable
    with the reason for each transport."""
    why = dict[str, str]()
    known = list_transports(registry, any(s.multi_host for s in sites))
    for transport in known:
        if name and transport.name != name:
            continue
        reason = transport.joins(sites)
        if reason is None:
            try:
                transport.probe()
                return transport
            except MissingDependency as problem:
                reason = problem.reason
        why[transport.name] = reason
    said = "; ".join(f"{n}: {r}" for n, r in why.items()) or f"there is no transport {name!r}"
    raise DeviceUnavailable(
        f"no transport joins {', '.join(s.device for s in sites)}", where=said, hint="`rammer devices` lists them"
    )


def known_links(registry: Registry, sites: Sequence[Site]) -> Sequence[Link]:
    """Return the fixed links between ``sites`` of the best transport, or an empty sequence if they must be measured."""
    best = next((t for t in list_transports(registry, any(s.multi_host for s in sites)) if t.joins(sites) is None), None)
    return best.links(len(sites)) if best is not None and best.links is not None else ()
