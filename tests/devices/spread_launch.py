"""Runs of ``spread_ranks`` in processes of MPI, some of which are killed, stopped or held."""

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
#: Seconds that processes may take to start and to end, on a machine that does other things.
STARTING = 60.0
#: Seconds until a run is given up, and each of those that shall all be done besides: what hangs ends by itself long before, so
#: this is for a machine that does other things. Looks (each half a second) until one that was left alone goes on: a launcher ends
#: who is left in less where others have failed. Looks until a launcher that has no process any more is one that hangs.
LONGEST, EACH = 200.0, 0.5
ALONE, EMPTY = 16, 60
#: What processes get that shall fail, by fault.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun (openmpi-bin) and mpi4py"
)


@dataclass(frozen=True)
class Ended:
    """How processes ended; ``seconds`` from the fault on, or from their begin, and ``files`` of shared memory
    that they leave. A fault comes before MPI has ``begun`` in its process, or later. ``hung`` is a launcher that stays when all
    its processes have ended."""

    code: int
    out: str
    err: str
    seconds: float
    faulty: bool
    files: tuple[str, ...]
    begun: bool = True
    hung: bool = False


def launched(wanted: Wanted) -> Ended:
    """A run in processes, with shared memory in a folder of its own, and the fault that is wanted."""
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
                until = time.monotonic() + 2.0  # what was told to end may still be ending
                while (left := members(process.pid)) and time.monotonic() < until:
                    time.sleep(0.05)
                if left:
                    os.killpg(process.pid, signal.SIGKILL)
        assert not left, f"processes are left: {left}"
        files = tuple(sorted(str(f) for f in Path(memory).rglob("*")))
    return Ended(process.returncode, out, err, seconds, faulty, files, begun, hung)


def waited(process: subprocess.Popen[str], told: Path, stopped: int, longest: float) -> tuple[str, str, bool]:
    """Stdout and stderr. A stopped process that is left alone, for whom only the launcher waits, goes on. A launcher that hangs
    when it has no process any more is killed, which is told last."""
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
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def surroundings(memory: str) -> dict[str, str]:
    """Variables of processes whose shared memory is in a folder."""
    places = {f"OMPI_MCA_{n}_backing_directory": memory for n in ("btl_vader", "osc_sm", "osc_rdma")}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return os.environ | places | root


def faulted(process: subprocess.Popen[str], wanted: Wanted, told: Path) -> bool:
    """Wait for all processes, and then give one its signal; False where it had ended."""
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
    """Command lines of the processes in a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == group and state != "Z":
                found.append(stat.with_name("cmdline").read_text())
        except (OSError, ValueError):
            continue
    return found
