"""Before anything runs, all devices say what they are and what they will run; whoever differs is named."""

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
    """What must be the same wherever parts of one program run."""
    return {"rammer": __version__, "byte order": sys.byteorder, "NumPy": np.__version__, "Python": platform.python_version()}


def said_by_all(fabric: Fabric, words: Mapping[int, Any], seconds: float) -> list[Any]:
    """What every device says, anything that JSON has."""
    return [json.loads(text) for text in fabric.meet({n: json.dumps(w) for n, w in words.items()}, seconds)]


def check_agreement(fabric: Fabric, facts: Mapping[str, str], devices: Sequence[str], seconds: float) -> None:
    """DeviceUnavailable unless all say the same of all ``facts``; it names the device and what differs from device 0."""
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
    """All devices' counters."""
    return [Counters.of(v) for v in said_by_all(fabric, {n: c.values() for n, c in counters.items()}, seconds)]
