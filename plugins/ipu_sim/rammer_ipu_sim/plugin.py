"""The entry point: the manifest of the ``ipu_sim`` device.

Every start of rammer imports it, so importing it loads no simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions

from rammer_ipu_sim.chip import OPTIONS, make_hardware

if TYPE_CHECKING:
    from rammer.distributed.transport import Transport


def probe() -> Sequence[Hardware]:
    """Return one simulated chip, which is always available."""
    return [make_hardware()]


def open_device(options: OpenOptions) -> Backend:
    """Return the simulator with the chip that the options describe."""
    from rammer_ipu_sim.device import SimulatorBackend

    return SimulatorBackend(options)


DEVICE = Device(
    name="ipu_sim",
    summary="GraphCore GC2 simulator: bulk-synchronous tiles with enforced memory; times are simulated",
    probe=probe,
    open=open_device,
    targets=(),
    simulated=True,
    several="chips",
    options=OPTIONS,
    api=5,
)


@hookimpl
def rammer_transports() -> Sequence[Transport]:
    """Return the transport that transfers between chips."""
    from rammer_ipu_sim.linked import CHIPS

    return [CHIPS]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """Return the manifest of the simulator."""
    return [DEVICE]
