"""Conformance of memory layers between the device's and the vEU's: tasks hold tiles of every kind of reader there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import BufferKind, Task
from rammer_testing.judge import relative_error
from rammer_testing.long_checks import program_of_operators
from rammer_testing.subject import Subject

#: Readers of a tile ``t`` that a task holds, by kind, with a tile of their result. ``u`` is held in the vEU's memory.
READERS: Final[Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]] = {
    "rows": (("t: f32[i:24, j:40] = x[i, j] * 0.5", "y: f32[i:24] = sum[k:40] t[i, k]"), (5,)),
    "windows with halos": (
        ("t: f32[i:24, j:40] = x[i, j] + 1.0", "y: f32[i:22, j:38] = max[k:3, l:3] t[i + k, j + l]"),
        (7, 12),
    ),
    "products": (("t: f32[i:24, j:40] = tanh(x[i, j])", "y: f32[i:24, j:8] = sum[k:40] t[i, k] * w[k, j]"), (6, 8)),
    "two layers": (
        ("t: f32[i:24, j:40] = x[i, j] - 2.0", "u: f32[i:24] = sum[k:40] t[i, k]", "y: f32[i:24, j:40] = u[i] * t[i, j]"),
        (4, 40),
    ),
}
#: Maximum relative L2 error.
TOLERANCE: Final = 1e-5


def check_shared_layers(device: Subject) -> None:
    """Check that tasks hold tiles in memory that several vEUs share, for each kind of reader, next to tiles of the vEU's memory.
    Skipped if the device has no such layer."""
    layers = device.backend.vdevice.tile_layers[1:]
    if not layers:
        return device.skip_whole("it has no layer between the device's and the vEU's")
    values = {"x": device.rng.standard_normal((24, 40)).astype(np.float32)}
    values["w"] = device.rng.standard_normal((40, 8)).astype(np.float32)
    for layer in layers:
        for kind, (lines, tile) in READERS.items():
            computes = tuple(map(Compute.parse, lines))
            held = {c.name: "veu" if c.name == "u" else layer.scope for c in computes[:-1]}
            links = tuple(Connection(n, c.name, held[n]) for c in computes for n in c.reads if n in held)
            error = _error(device, ROperator("y", computes, links, ("y",), tile), values)
            device.expect(error <= TOLERANCE, f"{kind} of tiles in {layer.name}: relative L2 error {error:.1e}")


def _error(device: Subject, operator: ROperator, values: Mapping[str, np.ndarray]) -> float:
    """Return the relative error of the operator's result, with its tasks on four rows."""
    kinds: list[tuple[str, BufferKind, tuple[int, ...]]] = [(n, "input", values[n].shape) for n in operator.inputs]
    kinds.append((operator.name, "output", operator.anchor.shape))
    rows = [[Task(operator.name, k) for k in range(first, operator.task_count, 4)] for first in range(4)]
    program = program_of_operators("shared", [operator], kinds, (), rows)
    device.backend.kernel(operator, Binding.of(program, {}))
    given, known = {n: values[n] for n in operator.inputs}, dict(values)
    for c in operator.computes:
        known[c.name] = np.asarray(evaluate_compute(c, known, precise=True))
    loaded = device.backend.load(program, {})
    have = loaded.run(given).outputs[operator.name]
    loaded.close()
    return relative_error(have, known[operator.name])
