"""Traces of several devices on one clock: every event is recorded once, and each read starts after the data arrived."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from spread_launch import launched, needs_mpi
from spread_ranks import Wanted, chain, main

from rammer_testing.nonempty import some

#: Microseconds of rounding: times are stored in whole nanoseconds.
ROUND = 2e-3


def check_trace(text: str, wanted: Wanted) -> list[float]:
    """Check a trace of ``chain`` over several devices and runs. Return the clock errors in microseconds."""
    read, spread = json.loads(text), chain(wanted.devices, wanted.length)
    events = read["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    errors = [c["error"] * 1e6 for c in read["otherData"]["clocks_seconds"]]
    runs = {e["args"]["run"] for e in spans}
    assert len(runs) == wanted.runs
    there = Counter((e["pid"], e["cat"], e["name"], e["args"]["run"]) for e in spans if e["cat"] in ("step", "write"))
    steps = [(d, "step", f"step {n}", r) for d, p in enumerate(spread.parts) for n in range(len(p.steps)) for r in runs]
    assert there == Counter([*steps, *((t.source, "write", t.name, r) for t in spread.transfers for r in runs)])
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in spans:
        rows.setdefault((e["pid"], e["tid"]), []).append(e)
    for row in some(rows.values()):
        row.sort(key=lambda e: (e["ts"], e["dur"]))
        assert all(a["ts"] + a["dur"] <= b["ts"] + ROUND for a, b in pairwise(row)), row
    check_arrows(events, spans, errors, len(spread.transfers) * len(runs))
    return errors


def check_arrows(events: list[dict[str, Any]], spans: list[dict[str, Any]], errors: list[float], count: int) -> None:
    """Check that each arrow begins in a transfer's write and ends at a span's start, after its flag was written."""
    begins, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert begins.keys() == ends.keys() and len(begins) == count
    for name in some(begins):
        a, b = begins[name], ends[name]
        slack = errors[a["pid"]] + errors[b["pid"]] + ROUND
        assert a["ts"] <= b["ts"] + slack, (a, b, errors)
        (write,) = [e for e in spans if (e["pid"], e["name"]) == (a["pid"], a["name"]) and e["args"].get("flag_us") == a["ts"]]
        assert write["ts"] <= a["ts"] + ROUND and a["ts"] <= write["ts"] + write["dur"] + ROUND
        (read,) = [e for e in spans if (e["pid"], e["tid"], e["ts"]) == (b["pid"], 0, b["ts"])]
        assert read["args"]["run"] == write["args"]["run"] and read["pid"] == write["args"]["to"]


def drawn(rng: np.random.Generator, device: str) -> Wanted:
    devices, depth, seed = int(rng.integers(2, 4)), int(rng.integers(1, 4)), int(rng.integers(2**31))
    return Wanted(device, devices, 6, seed, depth, int(rng.integers(1, 400)), delay=0.002, trace=True, timeout=60)


@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_threads_have_one_clock(device: str, rng: np.random.Generator) -> None:
    wanted = drawn(rng, device)
    text = main(wanted)["trace"]
    assert check_trace(text, wanted) == [0.0] * wanted.devices
    late = json.loads(text)
    for e in late["traceEvents"]:
        if e["ph"] == "s":
            e["ts"] += 1e6
    with pytest.raises(AssertionError):
        check_trace(json.dumps(late), wanted)


@pytest.mark.slow
@pytest.mark.sampled(1)
@needs_mpi
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_clocks_of_processes_are_known(device: str, rng: np.random.Generator) -> None:
    """Check the estimated clock offsets within the reported error. Processes of one host share a clock, so the offsets set by the
    test are expected."""
    wanted = replace(drawn(rng, device), ahead=float(rng.uniform(-100, 100)))
    ended = launched(wanted)
    assert ended.code == 0, ended
    text = json.loads(ended.out.splitlines()[-1])["trace"]
    check_trace(text, wanted)
    for number, clock in some(enumerate(json.loads(text)["otherData"]["clocks_seconds"])):
        assert abs(clock["ahead"] - number * wanted.ahead) <= clock["error"] + 1e-9, clock
