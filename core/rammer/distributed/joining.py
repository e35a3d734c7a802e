"""Options for several devices, without the modules that run over several devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rammer.errors import BadInput
from rammer.ir.untrusted_json import whole_number

#: The objectives of a partition; the first is the default.
GOALS: Final = ("throughput", "latency")
#: Timeout in seconds of a wait for another device.
TIMEOUT: Final = 10.0
#: Variables in which launchers store the number of processes: Open MPI, MPICH and Intel MPI, Slurm's PMIx.
SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")


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


def options_for(name: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of one device: ``tiles=8`` applies to all devices, ``ipu_sim.tiles=8`` to one."""
    plain, found = name.partition(":")[0], dict[str, str]()
    for key, value in options.items():
        owner, dot, rest = key.rpartition(".")
        if not dot or owner in (plain, name):
            found[rest] = value
    return found
