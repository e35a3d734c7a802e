"""One-sided transfers between devices: the manifest of a transport, its base classes, and the transports of the core.

This package has the names with which plugins add a transport. Modules of the core import from the submodules."""

from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.endpoint import MemoryEndpoint
from rammer.distributed.transport.event_log import Log
from rammer.distributed.transport.local import LOCAL, aligned_zeros
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.mpi import MPI
from rammer.distributed.transport.mpi_launch import start_timeout, watch_collective
from rammer.distributed.transport.protocol import Deliver, Endpoint, Fabric, Feed, Party, Reach, Runs, Site, StepRunner, Transport

__all__ = ["LOCAL", "MPI", "Counters", "Deliver", "Endpoint", "Exposed", "Fabric", "Feed", "Log", "MemoryEndpoint", "Party"]
__all__ += ["Reach", "Runs", "Site", "StepRunner", "Transport", "aligned_zeros", "start_timeout", "watch_collective"]
