"""The entry point: the manifest of the ``ipu_sim`` device. Importing it loads no simulator: every start of rammer does."""

from __future__ import annotations

from collections.abc import Sequence

from rammer.device.hooks import hookimpl
from rammer.device.manifest import Backend, Device, Hardware, OpenOptions
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site, Transport

from rammer_ipu_sim.chip import make_hardware


def probe() -> Sequence[Hardware]:
    """Always one simulated chip."""
    return [make_hardware()]


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
    several="chips",
    api=4,
)


def chip_link_refusal(a: Site, b: Site) -> str | None:
    """Why two sites are not chips of one simulation, or None."""
    from rammer_ipu_sim.linked import chip_link_refusal as asked

    return asked(a, b)


def chip_links(count: int) -> Sequence[Link]:
    """The links between so many chips."""
    from rammer_ipu_sim.linked import chip_links as asked

    return asked(count)


def simulate_runs(spread: DistributedProgram, backend: Backend) -> Sequence[str]:
    """What runs take on all chips together."""
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
    """Transfers between chips."""
    return [CHIPS]


@hookimpl
def rammer_devices() -> Sequence[Device]:
    """The simulator's manifest."""
    return [DEVICE]
