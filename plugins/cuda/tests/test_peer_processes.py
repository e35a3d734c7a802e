"""GPUs of one host with one process each: mapped memory, transfers and termination. The host emulates the GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rammer.distributed.transport.counters import Counters
from rammer.errors import DeviceUnavailable
from rammer_testing.nonempty import some

ROOT, RANKS = Path(__file__).parents[3], "plugins.cuda.tests.peer_ranks"
needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or find_spec("mpi4py") is None, reason="needs mpirun (openmpi-bin) and mpi4py"
)


def launched(count: int, folder: Path, **asked: object) -> subprocess.CompletedProcess[str]:
    """Start processes with GPU memory in ``gpus`` of a folder and results in files of ``told``."""
    for name in ("gpus", "told"):
        (folder / name).mkdir()
    line = ["mpirun", "-n", str(count), "--oversubscribe", sys.executable, "-m", RANKS]
    line.append(json.dumps({"folder": str(folder / "gpus"), "told": str(folder / "told"), **asked}))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(line, env=os.environ | root, capture_output=True, text=True, timeout=200)


TRANSPORTS = ["cuda-peer", "nvshmem"]


@pytest.mark.slow
@pytest.mark.sampled(1)
@needs_mpi
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_write_into_each_others_memory(transport: str, tmp_path: Path, rng: np.random.Generator) -> None:
    count, depth, runs = int(rng.integers(2, 4)), int(rng.integers(1, 4)), 8
    done = launched(count, tmp_path, runs=runs, depth=depth, seed=int(rng.integers(2**31)), transport=transport)
    assert done.returncode == 0, done.stderr
    for said in some([json.loads(file.read_text()) for file in (tmp_path / "told").iterdir()]):
        assert said["runs"] == (0 if said["rank"] else runs) and said["links"] == count * (count - 1) and not said["left"]
        for values in some(said["counters"]):
            counters = Counters.of(values)
            assert counters.payload_writes and counters.flag_writes
            assert counters.host_copies == counters.serialisations == 0
            assert counters.copies == (counters.payload_writes if transport == "nvshmem" else 0)
    assert not list((tmp_path / "gpus").iterdir())


@needs_mpi
@pytest.mark.large
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_process_that_ends_ends_all(fault: str, transport: str, tmp_path: Path) -> None:
    done = launched(2, tmp_path, fault=fault, timeout=3.0, transport=transport)
    assert done.returncode != 0
    assert fault == "kill" or "device 0 waited 3 s for device 1" in done.stderr, done.stderr


@pytest.mark.slow
@needs_mpi
def test_memory_that_cannot_be_mapped_is_told_of(tmp_path: Path) -> None:
    done = launched(2, tmp_path, fault="map", timeout=30.0)
    assert done.returncode == DeviceUnavailable.exit_code, done.stderr
    assert "mapping memory of process" in done.stderr and "--transport mpi" in done.stderr
