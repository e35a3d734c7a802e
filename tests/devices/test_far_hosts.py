"""Hosts with 1 ms between them, as network namespaces: results of one device, and no processes left over."""

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
import onnx
import pytest
from spread_launch import RANKS
from spread_ranks import Wanted
from test_spread_runs import check_counters

from rammer_testing import walkthrough
from rammer_testing.distant_hosts import far_apart, lacking
from rammer_testing.nonempty import some

LACKING = lacking() or ("" if find_spec("mpi4py") and shutil.which("mpirun") else "no MPI")
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no network namespaces here: {LACKING}")
#: Seconds that processes may take to start, run and end on a busy machine.
PATIENCE = 240.0
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
#: Script: create hosts, start a process on one, print the ids of this process and of the hosts' owner, and wait.
ASKS = """
import subprocess, sys
from rammer_testing.distant_hosts import far_apart
with far_apart(1.0) as hosts:
    sleeper = subprocess.Popen(hosts.inside(1, ["sleep", "3600"]))
    print(sleeper.pid, hosts.places[0].split("/")[2], flush=True)
    sleeper.wait()
"""
#: An ``nsenter`` that opens the host's file and enters it later.
ENTERS_LATE = """
import ctypes, os, sys, time
place = os.open(sys.argv[1].split("=", 1)[1], os.O_RDONLY)
time.sleep(0.5)
if ctypes.CDLL(None).setns(place, 0):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def output(line: list[str]) -> str:
    """Return the standard output of a command."""
    environment = os.environ | ROOT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def counted(report: dict[str, Any]) -> dict[str, float]:
    """Return the counters of one run, summed over all processes."""
    return {name: sum(c[name] for c in report["counters"]) for name in report["counters"][0]}


@pytest.mark.slow
def test_tensors_cross_between_hosts(rng: np.random.Generator) -> None:
    count, depth, length = int(rng.integers(2, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 50_000))
    wanted = Wanted("rocm", count, 30, int(rng.integers(2**31)), depth, length, timeout=60, transport="messages")
    with far_apart(1.0, count) as hosts:
        found = json.loads(output(hosts.mpirun([sys.executable, str(RANKS), json.dumps(asdict(wanted))])).splitlines()[-1])
    assert found["runs"] == wanted.runs
    check_counters(found, wanted)


@pytest.mark.slow
def test_a_model_over_two_hosts_is_what_one_device_makes(tmp_path: Path, rng: np.random.Generator) -> None:
    model, alone = tmp_path / "tiny.onnx", tmp_path / "alone.npz"
    onnx.save(walkthrough.model(), model)
    line = [sys.executable, "-m", "rammer.cli.main", "run", str(model), "--device", "rocm", "--seed", str(rng.integers(1000))]
    output([*line, "--save-outputs", str(alone)])
    with far_apart(1.0) as hosts:
        report = json.loads(output(hosts.mpirun([*line, "--expected", str(alone), "--timeout", "60", "--json", "-"])))
    crossed, total = len(report["transfers"]), counted(report)
    assert report["transport"] == "messages" and crossed and all(d["verdict"] == "ok" for d in some(report["differences"]))
    assert total["payload_writes"] == crossed and total["flag_writes"] == 2 * crossed
    assert total["nbytes"] == sum(t["bytes"] for t in report["transfers"])
    assert total["allocations"] == total["serialisations"] == total["copies"] == total["host_copies"] == total["reads"] == 0


@pytest.mark.parametrize("late", [False, True])
def test_hosts_end_with_who_asked_for_them(late: bool, tmp_path: Path) -> None:
    """Check this also if the started process has not entered its host when leftover processes are searched."""
    if late:
        (tmp_path / "nsenter").write_text(f"#!{sys.executable}\n{ENTERS_LATE}")
        (tmp_path / "nsenter").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", ASKS], stdout=subprocess.PIPE, text=True, env=environment) as asker:
        assert asker.stdout is not None
        started = [int(number) for number in asker.stdout.readline().split()]
        assert len(started) == 2 and all(alive(pid) for pid in started)
        time.sleep(0.15 if late else 0.0)
        asker.send_signal(signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    while any(alive(pid) for pid in started) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in started)


def alive(pid: int) -> bool:
    """Return True if a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
