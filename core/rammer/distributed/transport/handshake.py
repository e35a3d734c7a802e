"""Handshake before the first run: all devices compare facts, and an error names the device that differs."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.protocol import Fabric
from rammer.errors import DeviceUnavailable
from rammer.version import __version__


def component_versions() -> dict[str, str]:
    """Return the versions that must be equal in all processes of one program."""
    return {"rammer": __version__, "byte order": sys.byteorder, "NumPy": np.__version__, "Python": platform.python_version()}


def said_by_all(fabric: Fabric, words: Mapping[int, Any], seconds: float) -> list[Any]:
    """Return the value of every device, any JSON value, exchanged over the fabric."""
    return [json.loads(text) for text in fabric.meet({n: json.dumps(w) for n, w in words.items()}, seconds)]


def check_agreement(fabric: Fabric, facts: Mapping[str, str], devices: Sequence[str], seconds: float) -> None:
    """Raise DeviceUnavailable unless all ``facts`` are equal on all devices; it names the device and the
    difference to device 0."""
    found = said_by_all(fabric, {n: dict(facts) for n in fabric.mine}, seconds)
    for number, other in enumerate(found):
        for name in (*found[0], *(n for n in other if n not in found[0])):
            if other.get(name) != found[0].get(name):
                raise DeviceUnavailable(
                    f"device {number} ({devices[number]}) has another {name} than device 0 ({devices[0]})",
                    where=f"{other.get(name)} and {found[0].get(name)}",
                    hint="start the same rammer with the same model and options everywhere",
                )


def gather_counters(fabric: Fabric, counters: Mapping[int, Counters], seconds: float) -> list[Counters]:
    """Return the counters of all devices."""
    return [Counters.of(v) for v in said_by_all(fabric, {n: c.values() for n, c in counters.items()}, seconds)]
