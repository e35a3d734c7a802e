"""The entry point: what ``rammer.devices`` loads."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Device

from rammer_ipu_sim.device import DEVICE


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """The simulator's manifest."""
    return [DEVICE]
