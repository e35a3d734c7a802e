"""One table: every distinct matrix-product layer of some models on a CUDA device, candidate by candidate.

``python benchmarks/tune_cuda.py [--models squeezenet,nerf_mlp] [--count 6] [--layers 40] [--families gemm,gemm_wgmma3]``:
relative L2 error against float64, predicted and measured microseconds (a link of a chain in a CUDA graph), and the share
of the fp32 peak. Models are those of the zoo and the light models of the onnx package.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
from zoo import ZOO

from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.evaluate import evaluate
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.passes.pipeline import Pipeline, default_passes
from rammer.plan.storage import assign_storage
from rammer.plan.views import view_sources
from rammer.profile.probe import random_inputs
from rammer.testing.models import light_model
from rammer.tile.connect import connect
from rammer.tile.signature import signature

#: Families by how many candidates of each are timed.
FAMILIES = ("gemm", "gemm_tf32x3", "gemm_wgmma3", "gemm_chain")


def operators(names: list[str], backend: Backend) -> dict[str, tuple[str, ROperator, Binding, int]]:
    """Signature -> (model, operator, binding, how often) of every contraction."""
    found: dict[str, tuple[str, ROperator, Binding, int]] = {}
    for name in names:
        graph, _ = Pipeline(default_passes()).run(bind(read_model(ZOO[name].build() if name in ZOO else light_model(name)), {}))
        compute = lower(graph)
        plan = assign_storage(compute)
        binding = Binding(plan.graph.types, plan.storages, frozenset(plan.graph.constants))
        tiles = connect(plan.graph, backend.vdevice, view_sources(plan.graph, plan.storages),
                        lambda o, b=binding: backend.rate(o, b))  # fmt: skip
        for o in tiles.operators:
            if o.main.kind == "contraction":
                key = signature(o, binding.types, binding.storages)
                count = found[key][3] + 1 if key in found else 1
                found[key] = (name, o, binding, count)
    return found


def reference(operator: ROperator, program: RProgram, inputs: dict[str, np.ndarray],
              constants: dict[str, np.ndarray]) -> np.ndarray:  # fmt: skip
    """The anchor in float64."""
    values = {n: v.astype(np.float64) for n, v in constants.items()}
    for port in program.inputs:
        s = program.storage[port.tensor]
        flat = inputs[port.external]
        strides = [st * flat.itemsize for st in s.strides]
        values[port.tensor] = np.lib.stride_tricks.as_strided(flat[s.offset :], s.shape, strides).astype(np.float64)
    for c in operator.computes:
        values[c.name] = evaluate(c, values, precise=True)
    return values[operator.anchor.name]


def check(backend, operator: ROperator, binding: Binding, want_error: bool) -> tuple[float, float]:
    """(relative L2 error or NaN, seconds) of one tiled operator."""
    from rammer_cuda.profiler import CHAIN, whole_program

    program, constants = whole_program(operator, binding)
    inputs = random_inputs(program, np.random.default_rng())
    loaded = backend.open_program(program, constants, CHAIN)
    try:
        first = loaded.run(inputs).outputs
        again = loaded.run(inputs).outputs
        seconds = float(np.median([loaded.replay() for _ in range(9)])) / CHAIN
    finally:
        loaded.close()
    name = operator.anchor.name
    if first[name].tobytes() != again[name].tobytes():
        return float("inf"), seconds
    if not want_error:
        return float("nan"), seconds
    want = reference(operator, program, inputs, constants)
    storage = binding.storages[name]
    have = first[name]
    if have.shape != want.shape:
        have = have.reshape(storage.shape)
    return float(np.linalg.norm(have - want) / np.linalg.norm(want)), seconds


def choices_of(operator: ROperator, binding: Binding, backend, families: list[str], count: int, sample: int) -> list:
    """The best predicted ``count`` candidates of every family, and ``sample`` more of each at random."""
    from rammer_cuda.kernels.choose import Choice, gemm_candidates
    from rammer_cuda.kernels.choose_wide import wide_candidates
    from rammer_cuda.kernels.rows import chain_candidates

    device = backend.vdevice
    found = [Choice(o, seconds) for seconds, o in chain_candidates(operator, binding, device)]
    found += wide_candidates(operator, binding, device, 200 if sample else count)
    found += gemm_candidates(operator, binding, device, 400 if sample else 4 * count)
    result = []
    for family in families:
        mine = [c for c in found if c.operator.family == family]
        rest = mine[count:]
        result += mine[:count] + random.sample(rest, min(sample, len(rest)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="squeezenet,resnet50")
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--errors", type=int, default=3, help="candidates of a kind whose results are checked, a model")
    parser.add_argument("--sample", type=int, default=0, help="further candidates, drawn from the best 200")
    parser.add_argument("--json", default="", help="file for all measurements")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    families = options.families.split(",")
    begin = time.perf_counter()
    backend = Registry().open("cuda")
    found = operators(options.models.split(","), backend)
    print(f"{len(found)} layers after {time.perf_counter() - begin:.1f} s", flush=True)
    plans = []
    for name, o, binding, times in list(found.values())[: options.layers]:
        plans.append((name, o, binding, times, choices_of(o, binding, backend, families, options.count, options.sample)))
    print(f"chose {sum(len(p[4]) for p in plans)} kernels after {time.perf_counter() - begin:.1f} s", flush=True)
    if options.sample:
        random.shuffle(plans)
    backend.profiler.prepare([(c.operator, b) for _, _, b, _, cs in plans for c in cs])
    print(f"compiled them after {time.perf_counter() - begin:.1f} s", flush=True)
    peak = backend.vdevice.flops * backend.vdevice.veus
    totals: dict[str, list[float]] = {}
    rows: list[list[object]] = []
    checked: dict[tuple[object, ...], int] = {}
    for name, o, binding, times, choices in plans:
        if time.perf_counter() - begin > options.seconds:
            print("out of time")
            break
        best: dict[str, tuple[float, float, float, str]] = {}
        for choice in choices:
            family, config = choice.operator.family, dict(choice.operator.config)
            kind = (name, family, config.get("split", 1) > 1, config.get("patch", 0))
            checked[kind] = checked.get(kind, 0) + 1
            try:
                error, seconds = check(backend, choice.operator, binding, checked[kind] <= options.errors)
            except Exception as problem:
                print(f"   FAILED {choice.operator.head()}: {problem}")
                continue
            rows.append([name, times, list(o.main.shape), [r.extent for r in o.main.reduce], list(choice.operator.tile),
                         dict(choice.operator.config), choice.seconds, seconds, error, family])  # fmt: skip
            known = best.get(family, (float("inf"), 0.0, float("nan"), ""))
            worst = float(np.fmax(known[2], error))  # NaN where it was not checked
            text = " ".join(f"{k}{v}" for k, v in choice.operator.config)
            faster = min(known, (seconds, choice.seconds, 0.0, f"{choice.operator.tile} {text}"))
            best[family] = (*faster[:2], worst, faster[3])
        print(f"{name} x{times} {o.main.shape} K {[r.extent for r in o.main.reduce]} floor {o.flops / peak * 1e6:.2f} us")
        for family, (seconds, predicted, error, text) in best.items():
            print(f"   {family:<12} {seconds * 1e6:7.2f} us, predicted {predicted * 1e6:7.2f}, error {error:.1e}  {text}")
        for family in families:
            total = totals.setdefault(f"{name} {family}", [0.0, 0.0])
            for i in (0, 1):
                total[i] += times * min((b[i] for f, b in best.items() if f in (family, families[0])), default=0.0)
    for name, (measured, predicted) in totals.items():
        print(f"TOTAL {name} (or {families[0]}): measured {measured * 1e3:.3f} ms, predicted {predicted * 1e3:.3f} ms")
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
