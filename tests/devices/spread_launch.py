"""Runs of ``spread_ranks`` in processes of MPI, some of which are killed, stopped or paused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from spread_ranks import Wanted

RANKS = Path(__file__).with_name("spread_ranks.py")
#: Seconds that processes may take to start and to end on a busy machine.
STARTING = 60.0
#: Seconds until a run is given up, and further seconds for each expected run. Hanging processes end long before, so this limit is
#: for busy machines. ALONE: polls (each half a second) until a stopped process that is left alone continues. A launcher ends such
#: processes sooner after a failure of others. EMPTY: polls until a launcher without processes counts as hanging.
LONGEST, EACH = 200.0, 0.5
ALONE, EMPTY = 16, 60
#: Signals that faulty processes receive, by fault.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun (openmpi-bin) and mpi4py"
)


@dataclass(frozen=True)
class Ended:
    """The end of a run's processes.

    ``seconds`` counts from the fault on, or from the start, and ``files`` of shared memory are left over. ``begun`` is false if
    the fault came before MPI had begun in its process. ``hung`` is true if the launcher stays when all its processes have ended.
    """

    code: int
    out: str
    err: str
    seconds: float
    faulty: bool
    files: tuple[str, ...]
    begun: bool = True
    hung: bool = False


def launched(wanted: Wanted) -> Ended:
    """Run processes with a separate folder of shared memory, and with the wanted fault."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.exists() else None) as memory, TemporaryDirectory() as told:
        line = ["mpirun", "-n", str(wanted.devices), "--oversubscribe", sys.executable, str(RANKS)]
        line.append(json.dumps(asdict(replace(wanted, told=told))))
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings(memory), start_new_session=True
        ) as process:
            try:
                begin = time.monotonic()
                faulty = wanted.fault in SIGNALS and faulted(process, wanted, Path(told))
                begun = not faulty or Path(told, f"begun {wanted.victim}").exists()
                begin = time.monotonic() if faulty else begin
                longest = LONGEST + EACH * wanted.runs * (wanted.fault not in ("kill", "stop"))
                out, err, hung = waited(process, Path(told), wanted.victim if wanted.fault == "stop" else -1, longest)
                seconds = time.monotonic() - begin
            finally:
                until = time.monotonic() + 2.0  # terminated processes may still be ending
                while (left := members(process.pid)) and time.monotonic() < until:
                    time.sleep(0.05)
                if left:
                    os.killpg(process.pid, signal.SIGKILL)
        assert not left, f"processes are left: {left}"
        files = tuple(sorted(str(f) for f in Path(memory).rglob("*")))
    return Ended(process.returncode, out, err, seconds, faulty, files, begun, hung)


def waited(process: subprocess.Popen[str], told: Path, stopped: int, longest: float) -> tuple[str, str, bool]:
    """Return stdout, stderr, and True if the launcher hung. A stopped process continues if only the launcher waits for it. A
    launcher that hangs without processes is killed."""
    until, alone, empty, hung = time.monotonic() + longest, 0, 0, False
    while True:
        try:
            return *process.communicate(timeout=0.5), hung
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
        ranks = {int(f.name): int(f.read_text()) for f in told.glob("[0-9]*")}
        living = {rank for rank, pid in ranks.items() if alive(pid)}
        alone += not living - {stopped}
        empty += bool(ranks) and not living
        if alone == ALONE and stopped in living:
            os.kill(ranks[stopped], signal.SIGCONT)
        if empty == EMPTY:
            process.kill()
            hung = True


def alive(pid: int) -> bool:
    """Return True if a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def surroundings(memory: str) -> dict[str, str]:
    """Return environment variables of processes whose shared memory is in a folder."""
    places = {f"OMPI_MCA_{n}_backing_directory": memory for n in ("btl_vader", "osc_sm", "osc_rdma")}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return os.environ | places | root


def faulted(process: subprocess.Popen[str], wanted: Wanted, told: Path) -> bool:
    """Wait for all processes, and then send one its signal. Return False if the process had ended."""
    until, files = time.monotonic() + STARTING, [told / str(n) for n in range(wanted.devices)]
    while not all(f.exists() for f in files) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(wanted.after)
    if process.poll() is not None or not files[wanted.victim].exists():
        return False
    try:
        pid = int(files[wanted.victim].read_text())
        os.kill(pid, SIGNALS[wanted.fault])
        if wanted.fault == "pause":
            time.sleep(wanted.pause)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def members(group: int) -> list[str]:
    """Return command lines of the processes in a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == group and state != "Z":
                found.append(stat.with_name("cmdline").read_text())
        except (OSError, ValueError):
            continue
    return found
