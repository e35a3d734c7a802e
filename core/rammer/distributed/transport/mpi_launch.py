"""How MPI begins and ends in a process that a launcher has started, who else was started, and on which host each one is.

MPI has no time limits, and mpi4py holds Python's lock while MPI begins and ends. So both are called without it, and a thread that
watches ends a process whose peers do not come.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from rammer.distributed.transport.watchdog import TIMEOUT, Watch
from rammer.errors import DeviceFailure, MissingDependency
from rammer.ir.untrusted_json import whole_number

__all__ = [
    "ENDS",
    "STARTS",
    "cancel_leave",
    "end_timeout",
    "first_on_host",
    "is_multi_host",
    "launched_processes",
    "leave_at_exit",
    "load_mpi",
    "rank_and_size",
    "said_by_ranks",
    "start_timeout",
]

#: Variables by which launchers tell a process how many there are: Open MPI, MPICH and Intel MPI, Slurm's PMIx.
SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
#: How many of them are on this host.
NEAR: Final = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
#: How much longer than for one transfer (``Joining.timeout``) a process waits for others to start, on a busy machine or from a
#: disk that is far away; and to end when its own work is over: one of them may still write large files.
STARTS, ENDS = 6, 12
_LEAVING: Final[list[Watch]] = []


def launched_processes() -> int:
    """How many processes a launcher of MPI has started; 1 where none did."""
    said = [os.environ[name] for name in SIZES if name in os.environ]
    return max([1, *(number for s in said if (number := whole_number(s)) is not None)])


def is_multi_host() -> bool:
    """Whether the launcher says that the processes are of several hosts."""
    said = [os.environ[name] for name in NEAR if name in os.environ]
    return any(number < launched_processes() for s in said if (number := whole_number(s)) is not None)


def start_timeout(timeout: float) -> float:
    """Seconds that processes may start one behind the other, where one waits ``timeout`` seconds for another."""
    return STARTS * timeout


def end_timeout(timeout: float) -> float:
    """Seconds that processes may end one behind the other, where one waits ``timeout`` seconds for another."""
    return ENDS * timeout


def load_mpi(timeout: float = TIMEOUT) -> Any:
    """``mpi4py.MPI``, and begins MPI, which all processes do within ``starting(timeout)`` or end; MissingDependency where it or
    MPI is not there.

    With threads that call in turns: Open MPI has no windows over TCP where several may call at once. And without an end at
    exit: in a process whose peer has died that would wait for it.
    """
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
            raise DeviceFailure(f"MPI does not begin: {MPI.Get_error_string(code)}")
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does where it begins MPI itself
    return MPI


@contextmanager
def watch_collective(doing: str, seconds: float) -> Iterator[None]:
    """What all processes do together; the process ends where that takes longer."""
    watch = Watch("a process", seconds)
    watch.doing(f"{doing} together with the other processes")
    try:
        yield
    finally:
        watch.close()


def rank_and_size(timeout: float = TIMEOUT) -> tuple[int, int]:
    """This process's rank, and how many there are; ``timeout`` as of ``load_mpi``."""
    comm = load_mpi(timeout).COMM_WORLD
    return comm.rank, comm.size


def first_on_host(timeout: float = TIMEOUT) -> int:
    """The lowest rank of those that share memory with this one. All processes ask together."""
    mpi = load_mpi(timeout)
    with watch_collective("asking who is on one host", start_timeout(timeout)):
        here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        first = int(here.allreduce(mpi.COMM_WORLD.rank, mpi.MIN))
        here.Free()
    return first


def said_by_ranks(numbers: Sequence[int], timeout: float = TIMEOUT) -> list[list[int]]:
    """What each rank says, as many numbers each. All processes ask together."""
    comm = load_mpi(timeout).COMM_WORLD
    found = np.zeros((comm.size, len(numbers)), np.int64)
    with watch_collective("telling each other numbers", start_timeout(timeout)):
        comm.Allgather(np.array(numbers, np.int64), found)
    return [[int(n) for n in row] for row in found]


def leave_at_exit(timeout: float = TIMEOUT) -> None:
    """At the end of the process, leave MPI when all others do, within ``ending(timeout)``, of which the first call says how long
    that is. The watch begins now: no thread does at the end."""
    if not _LEAVING:
        _LEAVING.append(Watch("a process", end_timeout(timeout), hears=False))
        atexit.register(_finalize_mpi, load_mpi(), _LEAVING[0])


def cancel_leave() -> None:
    """After a failure nobody is waited for, also where ``leave_at_exit`` was asked before."""
    atexit.unregister(_finalize_mpi)


def _finalize_mpi(mpi: Any, watch: Watch) -> None:
    if not mpi.Is_finalized():
        watch.doing("leaving MPI together with the other processes")
        ctypes.CDLL(mpi.__file__).MPI_Finalize()
        watch.doing("")
