"""Runs over several devices are what one device makes, whoever is late; and whoever ends takes the others with it, in time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spread_ranks import Wanted, main

from rammer.errors import DeviceFailure, RammerError
from rammer.testing.some import some
from rammer.transport.counters import Counters

RANKS = Path(__file__).with_name("spread_ranks.py")
#: Seconds that processes may take to start and to end, on a machine that does other things.
STARTING = 60.0
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun (openmpi-bin) and mpi4py"
)


def launched(wanted: Wanted) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr, and seconds from when all had met, of a run in processes."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = ["mpirun", "-n", str(wanted.devices), "--oversubscribe", sys.executable, str(RANKS), json.dumps(asdict(wanted))]
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | root, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            begin = time.monotonic()
            out, err = process.communicate(timeout=STARTING + wanted.timeout)
        finally:
            until = time.monotonic() + 2.0  # what was told to end may still be ending
            while (left := members(process.pid)) and time.monotonic() < until:
                time.sleep(0.05)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
    assert not left, f"processes are left: {left}"
    return process.returncode, first + out, err, time.monotonic() - begin


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


def check_counters(found: dict[str, Any], wanted: Wanted) -> None:
    """Of each tensor and run one payload and nothing else; one flag behind it, and one to give the slot back."""
    for values in some(found["counters"]):
        counters = Counters.of(values)
        assert counters.payload_writes == wanted.runs and counters.flag_writes == 2 * wanted.runs
        assert counters.nbytes == wanted.runs * 4 * wanted.length
        assert counters.allocations == counters.serialisations == counters.copies == counters.host_copies == counters.reads == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_devices_of_one_process(device: str, rng: np.random.Generator) -> None:
    depth, devices, seed = int(rng.integers(1, 4)), int(rng.integers(2, 4)), int(rng.integers(2**31))
    wanted = Wanted(device, devices, 12, seed, depth, int(rng.integers(1, 400)), delay=0.004)
    found = main(wanted)
    assert found["runs"] == wanted.runs
    check_counters(found, wanted)


def test_an_error_in_one_thread_ends_all(rng: np.random.Generator) -> None:
    victim = int(rng.integers(3))
    with pytest.raises(RammerError, match="a planted fault"):
        main(Wanted("rocm", 3, 50, victim=victim, fault="raise", after=float(rng.random() * 0.05), delay=0.004))


def test_who_waits_for_too_long_ends_all() -> None:
    with pytest.raises(DeviceFailure, match=r"device \d \(rocm\) waits for device \d \(rocm\):.* transfer t\d of run 0"):
        main(Wanted("rocm", 2, 3, delay=3.0, timeout=0.05))


@needs_mpi
def test_devices_of_several_processes(rng: np.random.Generator) -> None:
    devices, seed = int(rng.integers(2, 4)), int(rng.integers(2**31))
    wanted = Wanted("rocm", devices, 60, seed, int(rng.integers(1, 4)), int(rng.integers(1, 5000)), delay=0.002, timeout=30)
    code, out, err, _ = launched(wanted)
    assert code == 0, err
    check_counters(json.loads(out.splitlines()[-1]), wanted)


@needs_mpi
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_process_that_ends_ends_all(fault: str, rng: np.random.Generator) -> None:
    victim = int(rng.integers(2))
    wanted = Wanted("rocm", 2, 3000, delay=0.01, timeout=2.0, victim=victim, fault=fault, after=float(rng.random() * 0.3))
    check_fault(wanted)


def check_fault(wanted: Wanted) -> None:
    """It ends in time, and somebody says why. Shared memory of the run is gone."""
    before = unmapped()
    code, _, err, seconds = launched(wanted)
    assert code != 0 and seconds < wanted.timeout + 15, (code, seconds, err)
    other = "was computing" if wanted.fault == "kill" else "waits for device"
    assert "waits for device" in err or other in err, err
    assert unmapped() <= before


def unmapped() -> set[str]:
    """Names of memory that MPI's processes shared, and that none of this machine has any more."""
    there = {p.name for pattern in ("*vader*", "*osc*") for p in Path("/dev/shm").glob(pattern)}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            held = maps.read_text()
        except OSError:
            continue
        there = {name for name in there if name not in held}
    return {name for name in there if Path("/dev/shm", name).exists()}


@needs_mpi
def test_other_programs_are_refused() -> None:
    code, out, err, _ = launched(Wanted("rocm", 2, 3, lie=True))
    assert code == 3 and "begun" not in out
    assert "device 1 (rocm) has another program than device 0 (rocm)" in err


@needs_mpi
@pytest.mark.large
@pytest.mark.parametrize("number", range(50))
def test_fifty_kills(number: int, rng: np.random.Generator) -> None:
    devices, depth = int(rng.integers(2, 4)), int(rng.integers(1, 4))
    fault = "stop" if number % 5 == 4 else "kill"
    victim, after = int(rng.integers(devices)), float(rng.random() * 0.5)
    check_fault(Wanted("rocm", devices, 20000, length=64, depth=depth, timeout=2.0, victim=victim, fault=fault, after=after))


@needs_mpi
@pytest.mark.large
@pytest.mark.parametrize("devices", [2, 3])
def test_a_thousand_runs_of_late_processes(devices: int, rng: np.random.Generator) -> None:
    depth, seed = int(rng.integers(1, 5)), int(rng.integers(2**31))
    wanted = Wanted("rocm", devices, 1000, seed, depth, 3000, delay=0.005, timeout=30)
    code, out, err, _ = launched(wanted)
    assert code == 0, err
    check_counters(json.loads(out.splitlines()[-1]), wanted)
