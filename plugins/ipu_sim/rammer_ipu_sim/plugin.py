"""The entry point: the manifest of the ``ipu_sim`` device. Importing it loads no simulator: every start of rammer does."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions

from rammer_ipu_sim.chip import hardware


def probe() -> Sequence[Hardware]:
    """Always one simulated chip."""
    return [hardware()]


def open_device(options: OpenOptions) -> Backend:
    """The simulator with the chip that the options describe."""
    from rammer_ipu_sim.device import SimulatorBackend

    return SimulatorBackend(options)


DEVICE = Device(
    name="ipu_sim",
    summary="GraphCore GC2 simulator: bulk-synchronous tiles with enforced memory; times are simulated",
    probe=probe,
    open=open_device,
    targets=(),
    simulated=True,
    api=3,
)


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """The simulator's manifest."""
    return [DEVICE]
