"""One table: every distinct operator of some models that is no large matrix product, by every kernel family on a CUDA device.

``python benchmarks/families_cuda.py [--models mobilenet_v2,bert_base] [--count 4]``: for each operator the floor (its bytes
at the bandwidth that copies reach, and a launch), then for the generic kernel and each family the best of ``count``
candidates: relative L2 error against float64, predicted and measured microseconds (a link of a chain in a CUDA graph).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
from entry import run
from tune_cuda import check
from zoo import ZOO

from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.operator import ROperator
from rammer.passes.pipeline import Pipeline, default_passes
from rammer.plan.storage import assign_storage
from rammer.plan.views import view_sources
from rammer.tile.connect import connect

#: Bytes a second that a copy reaches on an H200, and seconds of a launch in a chain of empty kernels.
BANDWIDTH, LAUNCH = 4.3e12, 0.55e-6

Found = tuple[str, ROperator, Binding, int]


def operators(names: list[str], backend: Backend) -> list[Found]:
    """(model, operator, binding, how often) of every distinct operator of the models."""
    found: dict[str, Found] = {}
    for name in names:
        path = Path(tempfile.mkdtemp()) / f"{name}.onnx"
        onnx.save(ZOO[name].build(), path)
        graph, _ = Pipeline(default_passes()).run(bind(read_model(path), {}))
        plan = assign_storage(lower(graph))
        tiles = connect(plan.graph, backend.vdevice, view_sources(plan.graph, plan.storages))
        binding = Binding(plan.graph.types, plan.storages, frozenset(plan.graph.constants))
        for o in tiles.operators:
            key = binding.key(o)
            known = found.get(key, (name, o, binding, 0))
            found[key] = (*known[:3], known[3] + 1)
    return list(found.values())


def floor(operator: ROperator, binding: Binding) -> float:
    """Seconds below which no kernel of the operator can come: its distinct bytes, once, and its launch."""
    moved = sum(binding.types[n].nbytes for n in {*operator.inputs, *operator.outputs})
    return moved / BANDWIDTH + LAUNCH


def choices(backend: Any, operator: ROperator, binding: Binding, count: int) -> dict[str, list[ROperator]]:
    """Family -> its best predicted candidates; ``generic`` is the core's emitter."""
    found: dict[str, list[ROperator]] = {}
    for o in backend.candidates(operator, binding):
        found.setdefault(o.family or "generic", []).append(o)
    return {family: listed[:count] for family, listed in found.items()}


def _concerns(backend: Any, operator: ROperator, binding: Binding) -> bool:
    """Whether the operator is no large matrix product."""
    others = [f for f in backend.usable if f.name and f.first is None and not f.product]
    return operator.main.kind != "contraction" or any(True for _ in backend.choices(operator, binding, *others))


def measure(backend: Any, listed: list[Found], count: int, limit: float) -> list[dict[str, Any]]:
    """Rows of the table, printed as they come, until ``limit`` seconds have passed."""
    begin, rows = time.perf_counter(), list[dict[str, Any]]()
    plans = [(f, choices(backend, f[1], f[2], count)) for f in listed if _concerns(backend, f[1], f[2])]
    backend.profiler.prepare([(o, f[2]) for f, by in plans for each in by.values() for o in each])
    print(f"{len(plans)} operators, compiled after {time.perf_counter() - begin:.1f} s", flush=True)
    for (model, operator, binding, times), by in plans:
        if time.perf_counter() - begin > limit:
            print("out of time")
            break
        row: dict[str, Any] = {
            "model": model,
            "name": operator.name,
            "times": times,
            "kind": operator.main.kind,
            "shape": operator.main.shape,
            "reduce": [r.extent for r in operator.main.reduce],
            "computes": len(operator.computes),
            "floor": floor(operator, binding),
        }
        for family, each in by.items():
            row[family] = [_one(backend, o, binding, i == 0) for i, o in enumerate(each)]
        rows.append(row)
        print(_text(row), flush=True)
    return rows


def _one(backend: Any, operator: ROperator, binding: Binding, want_error: bool) -> dict[str, Any]:
    kernel = backend.kernel(operator, binding)
    predicted = kernel.operator_time(backend.vdevice.veus) + backend.vdevice.launch
    try:
        error, seconds = check(backend, operator, binding, want_error)
    except Exception as problem:  # one kernel that fails must not hide the others
        print(f"FAILED {operator.head()}: {problem}")
        error, seconds = float("inf"), float("inf")
    return {"tile": operator.tile, "config": dict(operator.config), "predicted": predicted, "seconds": seconds, "error": error}


def _text(row: dict[str, Any]) -> str:
    head = f"{row['model'][:9]} x{row['times']} {row['kind'][:6]}+{row['computes'] - 1} {list(row['shape'])} {row['reduce']}"
    parts = [f"{head} floor {row['floor'] * 1e6:.2f}"]
    for family in ("generic", "gemm", "gemm_tf32x3", "gemv", "rowwise", "window"):
        for best in [min(row[family], key=lambda c: float(c["seconds"]))] if family in row else []:
            first = row[family][0]
            parts.append(
                f"{family} {best['predicted'] * 1e6:.2f}/{best['seconds'] * 1e6:.2f}"
                f" (1st {first['seconds'] * 1e6:.2f}) e{first['error']:.0e}"
            )
    return " | ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--json", default="", help="file for all measurements")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    backend = Registry().open("cuda")
    rows = measure(backend, operators(options.models.split(","), backend), options.count, options.seconds)
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    run(main)
