"""Peer runtimes for ``rammer bench``: each is an entry point of an installed distribution, such as rammer-bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.device.loader import find_entry_points

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Entry points of peers: the name of each is the peer's, and its value is an ``OpenPeer``.
GROUP: Final = "rammer.peers"
#: Entry points of stream delays.
DELAYS: Final = "rammer.stream_delays"


@dataclass(frozen=True)
class Prepared:
    """A model that a peer can run.

    Args:
        seconds: Runs the model once and returns its time.
        outputs: Runs the model once and returns its outputs by name.
        prepare_seconds: The time of loading, compiling and tuning.
        timed: The clock of ``seconds``, and whether copies are included.
        close: Releases what the peer holds.
        hardware: The name of the peer's hardware; "" for the CPU of this host.
    """

    seconds: Callable[[], float]
    outputs: Callable[[], dict[str, Array]]
    prepare_seconds: float
    timed: str
    close: Callable[[], None] = field(default=lambda: None)
    hardware: str = ""


#: Queue an idle period on a device's stream, so that a run is queued before the period ends.
StreamDelay: TypeAlias = Callable[[Any], None]
#: Prepare a model for inputs of these shapes, in a precision.
OpenPeer: TypeAlias = "Callable[[Model, Mapping[str, Array], str], Prepared]"


def peer_names() -> tuple[str, ...]:
    """Return the names of the installed peers in alphabetical order. Nothing is imported."""
    return tuple(dict.fromkeys(point.name for point in find_entry_points(GROUP)))


def load_peer(name: str) -> OpenPeer:
    """Import the installed peer ``name``."""
    (point,) = (p for p in find_entry_points(GROUP) if p.name == name)
    found: OpenPeer = point.load()
    return found


def stream_delays() -> tuple[StreamDelay, ...]:
    """Import the stream delays of the installed distributions."""
    return tuple(point.load() for point in find_entry_points(DELAYS))
