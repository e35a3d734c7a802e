"""MPI initialisation and shutdown in launched processes, the number of processes, and their hosts.

MPI has no time limits, and mpi4py holds Python's lock during initialisation and shutdown. Both are therefore called without the
lock, and a watchdog thread ends a process whose peers do not arrive."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from rammer.distributed.joining import TIMEOUT, launched_processes
from rammer.distributed.transport.watchdog import Watch
from rammer.errors import DeviceFailure, MissingDependency
from rammer.ir.untrusted_json import whole_number

__all__ = [
    "ENDS",
    "STARTS",
    "cancel_leave",
    "end_timeout",
    "first_on_host",
    "is_multi_host",
    "leave_at_exit",
    "load_mpi",
    "rank_and_size",
    "said_by_ranks",
    "start_timeout",
]

#: Variables with the number of processes on this host.
NEAR: Final = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
#: Factors on the transfer timeout (``Joining.timeout``). Start: other processes may load slowly, on a busy machine or from a
#: remote disk. End: other processes may still write large files.
STARTS, ENDS = 6, 12
_LEAVING: Final[list[Watch]] = []


def is_multi_host() -> bool:
    """Return True if the launcher reports processes on several hosts."""
    said = [os.environ[name] for name in NEAR if name in os.environ]
    return any(number < launched_processes() for s in said if (number := whole_number(s)) is not None)


def start_timeout(timeout: float) -> float:
    """Return the seconds within which processes must start, for a transfer timeout of ``timeout`` seconds."""
    return STARTS * timeout


def end_timeout(timeout: float) -> float:
    """Return the seconds within which processes must end, for a transfer timeout of ``timeout`` seconds."""
    return ENDS * timeout


def load_mpi(timeout: float = TIMEOUT) -> Any:
    """Return ``mpi4py.MPI`` after initialising MPI, which all processes do within ``start_timeout(timeout)`` or end.

    Raises MissingDependency if mpi4py or MPI is not installed. Threads must serialise their MPI calls: Open MPI has no windows
    over TCP if several may call at once. MPI is not finalised at exit: a process whose peer has died would wait for it."""
    try:
        import mpi4py
    except ImportError as problem:
        raise MissingDependency("mpi4py", "pip install 'rammer-core[mpi]', and MPI itself (openmpi-bin)") from problem
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as problem:
        raise MissingDependency("MPI", f"install openmpi-bin or another MPI ({problem})") from problem
    if not MPI.Is_initialized():
        given = ctypes.c_int()
        with watch_collective("beginning MPI", start_timeout(timeout)):
            code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_SERIALIZED, ctypes.byref(given))
        if code:
            raise DeviceFailure(f"MPI initialisation failed: {MPI.Get_error_string(code)}")
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # as in mpi4py's initialisation
    return MPI


@contextmanager
def watch_collective(doing: str, seconds: float) -> Iterator[None]:
    """Watch a collective operation in this context; the process ends if it takes longer than ``seconds``."""
    watch = Watch("a process", seconds)
    watch.doing(f"{doing} together with the other processes")
    try:
        yield
    finally:
        watch.close()


def rank_and_size(timeout: float = TIMEOUT) -> tuple[int, int]:
    """Return this process's rank and the number of processes; ``timeout`` is that of ``load_mpi``."""
    comm = load_mpi(timeout).COMM_WORLD
    return comm.rank, comm.size


def first_on_host(timeout: float = TIMEOUT) -> int:
    """Return the lowest rank of the processes that share memory with this one. All processes must call it."""
    mpi = load_mpi(timeout)
    with watch_collective("finding the processes of each host", start_timeout(timeout)):
        here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        first = int(here.allreduce(mpi.COMM_WORLD.rank, mpi.MIN))
        here.Free()
    return first


def said_by_ranks(numbers: Sequence[int], timeout: float = TIMEOUT) -> list[list[int]]:
    """Return the ``numbers`` of each rank, equally many each. All processes must call it."""
    comm = load_mpi(timeout).COMM_WORLD
    found = np.zeros((comm.size, len(numbers)), np.int64)
    with watch_collective("exchanging numbers", start_timeout(timeout)):
        comm.Allgather(np.array(numbers, np.int64), found)
    return [[int(n) for n in row] for row in found]


def leave_at_exit(timeout: float = TIMEOUT) -> None:
    """Finalise MPI at exit, together with all processes, within ``end_timeout(timeout)`` of the first call's timeout. The watch
    starts now: threads cannot start at exit."""
    if not _LEAVING:
        _LEAVING.append(Watch("a process", end_timeout(timeout), hears=False))
        atexit.register(_finalize_mpi, load_mpi(), _LEAVING[0])


def cancel_leave() -> None:
    """Cancel ``leave_at_exit`` after a failure: the process then ends without waiting for others."""
    atexit.unregister(_finalize_mpi)


def _finalize_mpi(mpi: Any, watch: Watch) -> None:
    if not mpi.Is_finalized():
        watch.doing("leaving MPI together with the other processes")
        ctypes.CDLL(mpi.__file__).MPI_Finalize()
        watch.doing("")
