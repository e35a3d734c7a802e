"""Which transport joins some devices: those of the core, and plugins'."""

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


def list_transports(registry: Registry, apart: bool = False) -> list[Transport]:
    """All there are, the best first; the best between hosts where devices are ``apart``."""
    return sorted((*BUILT_IN, *registry.transports()), key=lambda t: (-(t.far if apart else t.rank), t.name))


def choose_transport(registry: Registry, sites: Sequence[Site], name: str = "") -> Transport:
    """The best one, or that of this ``name``, that joins all ``sites`` and works here. DeviceUnavailable says what each lacks."""
    why = dict[str, str]()
    known = list_transports(registry, any(s.apart for s in sites))
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
    """The ways between ``sites`` where the best transport that joins them knows them, else none."""
    best = next((t for t in list_transports(registry, any(s.apart for s in sites)) if t.joins(sites) is None), None)
    return best.links(len(sites)) if best is not None and best.links is not None else ()
