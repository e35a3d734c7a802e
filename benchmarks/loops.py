"""Loops, scans, branches and recurrent layers, compared with ONNX Runtime on the same cores.

    python -m benchmarks loops --device rocm --out results

The table has milliseconds of whole runs, arrays in and arrays out: wall-clock time and processor time (all threads). Each is the
minimum over alternating bursts, so that other load has little effect. ONNX Runtime has one thread per core, without spinning.
``first`` is the time in seconds from a model file to three runs in a separate process, including compilation. ``again`` is that
of the next process, which reads programs from disk. ``error`` is the largest difference from ONNX Runtime's result relative to
its largest value.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section

import rammer
from rammer.report.text_table import markdown_table
from rammer.tuning.interleaved_timing import Rounds, time_interleaved

Array = np.ndarray[Any, np.dtype[Any]]
HEADERS = (
    "case",
    "rammer",
    "ONNX Runtime",
    "ratio",
    "rammer's CPU",
    "ONNX Runtime's CPU",
    "CPU ratio",
    "first",
    "again",
    "error",
)
#: Bursts of each runtime, and warm-up runs: a loop with dynamic trip count is compiled after many iterations.
BURSTS, WARM = 7, 3
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass(frozen=True)
class LoopCase:
    """A model with its inputs; ``ranges`` are those of its dynamic dimensions."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Array]
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)


def _port(name: str, shape: list[Any], kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    **constants: Array | np.generic,
) -> onnx.ModelProto:
    known = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "loops", inputs, outputs, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _body(text: list[str], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.GraphProto:
    """Return a body graph of nodes in the form ``["s_next = Tanh s"]``."""
    nodes = []
    for line in text:
        results, _, rest = line.partition(" = ")
        op, *operands = rest.split()
        more = {"keepdims": 0} if op.startswith("Reduce") else {}
        nodes.append(helper.make_node(op, operands, results.split(), **more))
    return helper.make_graph(nodes, "body", inputs, outputs)


def _floats(*shape: int, scale: float = 1.0, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def counted(known: bool, trips: int, heavy: bool) -> LoopCase:
    """Return a Loop whose condition always holds: three light operators with a scan output, or a product and a norm."""
    shape = [64, 256] if heavy else [64]
    constants: dict[str, Any] = {"w": _floats(256, 256, scale=1 / 16, seed=1), "g": np.ones(256, np.float32)}
    lines = ["sw = MatMul s w", "t = Tanh sw", "r = Add t s", "s_next = LayerNormalization r g", "go = Identity c"]
    if not heavy:
        constants = {"w": _floats(64, seed=1)}
        lines = ["sw = Mul s w", "t = Tanh sw", "s_next = Add t x", "total = ReduceSum s_next", "go = Identity c"]
    gathered = [] if heavy else [_port("total", [])]
    ports = [_port("i", [], INT), _port("c", [], BOOL), _port("s", shape)]
    body = _body(lines, ports, [_port("go", [], BOOL), _port("s_next", shape), *gathered])
    outputs = [_port("last", shape), *([] if heavy else [_port("all", [None])])]
    node = helper.make_node("Loop", ["trips", "", "x"], [o.name for o in outputs], body=body)
    inputs, feeds = [_port("x", shape)], {"x": _floats(*shape)}
    if known:
        constants["trips"] = np.int64(trips)
    else:
        inputs.append(_port("trips", [], INT))
        feeds["trips"] = np.array(trips)
    what = "product and norm" if heavy else "light"
    told = "known" if known else "of a run"
    return LoopCase(f"Loop, {what}, {trips} trips {told}", _model([node], inputs, outputs, **constants), feeds)


def until() -> LoopCase:
    """Return a Loop that iterates until its state is small: about 450 iterations."""
    lines = ["s_next = Mul s k", "norm = ReduceL2 s_next", "go = Greater norm eps"]
    body = _body(
        lines, [_port("i", [], INT), _port("c", [], BOOL), _port("s", [64])], [_port("go", [], BOOL), _port("s_next", [64])]
    )
    node = helper.make_node("Loop", ["", "", "x"], ["last"], body=body)
    model = _model([node], [_port("x", [64])], [_port("last", [64])], k=np.float32(0.98), eps=np.float32(1e-3))
    return LoopCase("while, light", model, {"x": _floats(64)})


def scanned(steps: int, state: bool) -> LoopCase:
    """Return a Scan with a product in its state, or without state."""
    e, e_all = _port("e", [1, 64]), _port("e_all", [steps, 1, 64])
    outputs, o = [_port("all", [steps, 1, 64])], _port("o", [1, 64])
    feeds = {"e_all": _floats(steps, 1, 64)}
    if state:
        body = _body(
            ["sw = MatMul s w", "a = Add sw e", "s_next = Tanh a", "o = Neg s_next"],
            [_port("s", [1, 64]), e],
            [_port("s_next", [1, 64]), o],
        )
        node = helper.make_node("Scan", ["x", "e_all"], ["last", "all"], body=body, num_scan_inputs=1)
        feeds["x"] = _floats(1, 64)
        model = _model(
            [node], [_port("x", [1, 64]), e_all], [_port("last", [1, 64]), *outputs], w=_floats(64, 64, scale=1 / 8, seed=1)
        )
    else:
        body = _body(["m = MatMul e w", "o = Tanh m"], [e], [o])
        node = helper.make_node("Scan", ["e_all"], ["all"], body=body, num_scan_inputs=1)
        model = _model([node], [e_all], outputs, w=_floats(64, 64, scale=1 / 8, seed=1))
    return LoopCase(f"Scan, {steps} steps, {'with' if state else 'without'} state", model, feeds)


def branched() -> LoopCase:
    """Return a network with an If of two small branches, in the form of DETR exporters."""
    shape, out = [100, 256], [_port("b", [100, 256])]
    then = _body(["n = Relu a", "b = Add n bias"], [], out)
    other = _body(["b = Identity a"], [], out)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["top"], keepdims=0),
        helper.make_node("Greater", ["top", "bound"], ["yes"]),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=then, else_branch=other),
        helper.make_node("MatMul", ["chosen", "w"], ["y"]),
    ]
    constants = {"w": _floats(256, 256, scale=1 / 16, seed=1), "bias": _floats(256, seed=2), "bound": np.float32(1.0)}
    return LoopCase(
        "If between two products", _model(nodes, [_port("x", shape)], [_port("y", shape)], **constants), {"x": _floats(*shape)}
    )


def recurrent(steps: int, most: int = 0) -> LoopCase:
    """Return an LSTM of 128 units; with ``most``, for any number of steps up to ``most``."""
    weights = {"w": _floats(1, 512, 64, scale=1 / 8, seed=1), "r": _floats(1, 512, 128, scale=1 / 12, seed=2)}
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y", "h", "c"], hidden_size=128)
    ends = [_port(n, [1, 1, 128]) for n in "hc"]
    x = _port("x", ["seq" if most else steps, 1, 64])
    model = _model([node], [x], [_port("y", ["seq" if most else steps, 1, 1, 128]), *ends], **weights)
    name = f"LSTM, {steps} steps{f' of 1 to {most}' if most else ''}"
    return LoopCase(name, model, {"x": _floats(steps, 1, 64)}, {"seq": (1, most)} if most else {})


def cases() -> list[LoopCase]:
    """Return all cases of the table."""
    loops = [counted(known, trips, False) for known in (True, False) for trips in (100, 1000)]
    loops += [counted(known, 50, True) for known in (True, False)]
    scans = [scanned(steps, state) for state in (True, False) for steps in (100, 300, 1000)]
    layers = [recurrent(steps, most) for most in (0, 5000) for steps in (50, 500, 5000)]
    return [*loops, until(), *scans, branched(), *layers]


def least(calls: list[Callable[[], Any]], seconds: float) -> list[tuple[float, float]]:
    """Return the least milliseconds of each call: wall-clock and processor time."""
    best = [(float("inf"), float("inf"))] * len(calls)

    def burst(i: int) -> float:
        end = time.perf_counter() + seconds / BURSTS
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            calls[i]()
            took = time.perf_counter() - wall, time.process_time() - cpu
            best[i] = min(best[i][0], took[0]), min(best[i][1], took[1])
            if time.perf_counter() > end:
                return took[0]

    time_interleaved({i: partial(burst, i) for i in range(len(calls))}, Rounds.exactly(BURSTS)).all_run()
    return [(1e3 * w, 1e3 * c) for w, c in best]


def measured(case: LoopCase, device: str, seconds: float) -> list[str]:
    """Return a row of the table for a case."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = len(os.sched_getaffinity(0)), 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    theirs = ort.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(case.model, path)
        np.savez(Path(folder) / "feeds.npz", **case.feeds)
        again = [_process(path, device, case.ranges) for _ in range(2)]
        exe = rammer.compile(case.model, device, shapes=case.ranges or None)
        for _ in range(WARM):
            got = exe.run(case.feeds)
        want = theirs.run(None, case.feeds)
        error = max(_apart(got[o.name], a) for o, a in zip(theirs.get_outputs(), want, strict=True))
        ours, others = least([lambda: exe.run(case.feeds), lambda: theirs.run(None, case.feeds)], seconds)
        exe.close()
    parts = [f"{t:.3f}" for t in (ours[0], others[0], ours[0] / others[0], ours[1], others[1], ours[1] / others[1])]
    return [case.name, *parts, *(f"{s:.1f}" for s in again), f"{error:.0e}"]


def _process(path: Path, device: str, ranges: dict[str, tuple[int, int]]) -> float:
    """Return seconds from a model file to its ``WARM`` runs in a separate process. The cache is in the file's folder."""
    text = (
        "import sys, time, numpy as np, rammer\n"
        f"start = time.perf_counter(); exe = rammer.compile({str(path)!r}, {device!r}, shapes={ranges or None!r})\n"
        f"feeds = dict(np.load({str(path.with_name('feeds.npz'))!r}))\n"
        f"for _ in range({WARM}): exe.run(feeds)\n"
        "print(time.perf_counter() - start); exe.close()\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent / "cache")}
    done = subprocess.run([sys.executable, "-P", "-c", text], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _apart(have: Array, want: Array) -> float:
    """Return the largest difference relative to the largest value; infinite if shapes differ or a value is not finite."""
    if have.shape != want.shape:
        return float("inf")
    gap = float(np.abs(have - want).max(initial=0) / max(np.abs(want).max(initial=0), 1e-30))
    return gap if np.isfinite(gap) else float("inf")


@click.command(help=__doc__)
@click.option("--device", default="rocm", show_default=True, help="Where rammer runs.")
@click.option("--seconds", default=1.0, show_default=True, help="For each case and runtime.")
@click.option("--only", default="", help="Cases whose names have this.")
@click.option("--markdown", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write the table there.")
def main(device: str, seconds: float, only: str, out: Path | None) -> None:
    """Measure all cases and print the table; an error of 1e-3 or more fails."""
    rows = []
    for case in cases():
        if only in case.name:
            rows.append(measured(case, device, seconds))
            click.echo("  ".join(rows[-1]), err=True)
    table = markdown_table(rows, HEADERS)
    click.echo(table)
    if out is not None:
        title = "# Loops on a CPU\n\n" + (__doc__ or "")
        out.write_text(f"{title}\n{table}\n\n{section(environment_of(gpu=False))}")
    if not all(float(r[-1]) < 1e-3 for r in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
