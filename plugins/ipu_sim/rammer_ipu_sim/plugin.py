"""The entry point: the manifest of the ``ipu_sim`` device.

Every start of rammer imports it, so importing it loads no simulator."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.transport import LOCAL, Site, Transport

from rammer_ipu_sim.chip import OPTIONS, make_hardware


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


def chip_link_refusal(a: Site, b: Site) -> str | None:
    """Return the reason why two sites are not chips of one simulation, or None."""
    from rammer_ipu_sim.linked import chip_link_refusal as asked

    return asked(a, b)


def chip_links(count: int) -> Sequence[Link]:
    """Return the links between ``count`` chips."""
    from rammer_ipu_sim.linked import chip_links as asked

    return asked(count)


def simulate_runs(spread: DistributedProgram, backend: Backend) -> Sequence[str]:
    """Return a report of simulated runs on all chips together."""
    from rammer_ipu_sim.linked import simulate_runs as asked

    return asked(spread, backend)


CHIPS = Transport(
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


@hookimpl
def rammer_transports() -> Sequence[Transport]:
    """Return the transport that transfers between chips."""
    return [CHIPS]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """Return the manifest of the simulator."""
    return [DEVICE]
