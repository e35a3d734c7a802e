"""Options for several devices, and the devices that an option names, without the modules that run over several devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rammer.device.loader import Registry
from rammer.device.manifest import Device
from rammer.errors import BadInput, DeviceUnavailable
from rammer.ir.untrusted_json import whole_number

#: The objectives of a partition; the first is the default.
GOALS: Final = ("throughput", "latency")
#: Timeout in seconds of a wait for another device.
TIMEOUT: Final = 10.0
#: Variables in which launchers store the number of processes: Open MPI, MPICH and Intel MPI, Slurm's PMIx.
SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
#: Maximum number of units that one device's option may request; plugins refuse larger numbers.
MOST: Final = 64


@dataclass(frozen=True)
class Joining:
    """User options for several devices.

    ``transport`` defaults to the best one, ``timeout`` is in seconds for one transfer, ``depth`` is the number of runs in flight.
    ``goal`` is the objective, ``place`` a file for manual placement. ``states`` are outputs that are inputs of the next run
    (``OUTPUT=INPUT``)."""

    transport: str = ""
    timeout: float = TIMEOUT
    depth: int = 2
    goal: str = GOALS[0]
    place: Path | None = None
    states: tuple[str, ...] = ()

    @property
    def kept(self) -> dict[str, str]:
        """State inputs by output. Raises BadInput for malformed options."""
        found = dict(word.partition("=")[::2] for word in self.states)
        if not all(o and i for o, i in found.items()) or len(found) < len(self.states):
            raise BadInput(
                f"{' '.join(self.states)} does not define states", "--state", "write OUTPUT=INPUT, with each output once"
            )
        return found


def launched_processes() -> int:
    """Return the number of processes that an MPI launcher has started; 1 without a launcher."""
    said = [os.environ[name] for name in SIZES if name in os.environ]
    return max([1, *(number for s in said if (number := whole_number(s)) is not None)])


def resolve_devices(device: str, timeout: float = TIMEOUT, options: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the devices that ``--device`` names for this run, in order, or one device repeated as its ``options`` request.

    Returns an empty tuple for one device in one process. Raises DeviceUnavailable if processes and names do not match. Processes
    must start within ``mpi_launch.start_timeout(timeout)``."""
    names = tuple(n.strip() for n in device.split(",")) if "," in device else (device,)
    count = launched_processes()
    if not all(names) and len(names) > 1:
        raise BadInput(f"--device {device!r} has an empty name", hint="write NAME[:INDEX],NAME[:INDEX]")
    if count == 1:
        return names if len(names) > 1 else units_of(device, options or {})
    if len(names) not in (1, count):
        raise DeviceUnavailable(
            f"{len(names)} devices for {count} processes: {device}",
            where=f"mpirun -n {count}",
            hint=f"start mpirun -n {len(names)}, or name one device for all",
        )
    if not device:
        raise BadInput("several processes need a device by name", hint="name one with --device")
    from rammer.distributed.transport import mpi_launch

    rank, size = mpi_launch.rank_and_size(timeout)
    if size != count:
        raise DeviceUnavailable(
            f"the launcher started {count} processes, but MPI reports {size}",
            where=f"rank {rank}",
            hint="mpirun and mpi4py must be of the same MPI",
        )
    return names * (count // len(names))


def units_of(device: str, options: Mapping[str, str]) -> tuple[str, ...]:
    """Return one device's name, repeated as its option requests (``Device.several``), or an empty tuple for a single unit."""
    own = options_for(device, options)
    manifest = Registry().devices.get(device.partition(":")[0]) if own else None
    count = own.get(manifest.several, "1") if isinstance(manifest, Device) else "1"
    number = whole_number(count, MOST) or 1
    return (device,) * number if number > 1 else ()


def options_for(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of one device: ``tiles=8`` applies to all devices, ``ipu_sim.tiles=8`` to one."""
    plain, found = name.partition(":")[0], dict[str, str]()
    for key, value in options.items():
        owner, dot, rest = key.rpartition(".")
        if not dot or owner in (plain, name):
            found[rest] = value
    return found
