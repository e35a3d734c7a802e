"""One table: every distinct matrix-product layer of some models on a CUDA device, candidate by candidate.

``python benchmarks/tune_cuda.py [--models squeezenet,resnet50] [--precision tf32] [--count 6] [--layers 40]
[--families gemm_wgmma3,gemm_chain]``: relative L2 error against float64, predicted and measured microseconds (a link of a
chain in a CUDA graph), the share of the fp32 peak, and what each family's best add up to. Models are those of the zoo.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from zoo import SEED, ZOO

from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.frontend.bind import bind
from rammer.frontend.lower import lower
from rammer.frontend.reader import read_model
from rammer.ir.evaluate import evaluate
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.passes.narrow import NarrowFloats
from rammer.passes.pipeline import Pipeline, default_passes
from rammer.plan.storage import assign_storage
from rammer.plan.views import view_sources
from rammer.runtime.host_memory import random_inputs
from rammer.runtime.options import PRECISIONS
from rammer.tile.connect import connect
from rammer.tile.signature import signature


def operators(names: list[str], backend: Backend, precision: str) -> dict[str, tuple[str, ROperator, Binding, int]]:
    """Signature -> (model, operator, binding, how often) of every contraction."""
    found: dict[str, tuple[str, ROperator, Binding, int]] = {}
    for name in names:
        graph, _ = Pipeline(default_passes()).run(bind(read_model(ZOO[name].build(SEED)), {}))
        if precision == "float16":
            graph, _ = Pipeline((NarrowFloats(), *default_passes())).run(graph)
        compute = lower(graph)
        plan = assign_storage(compute)
        binding = Binding(plan.graph.types, plan.storages, frozenset(plan.graph.constants), precision=precision)
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


def blocked(operator: ROperator, binding: Binding) -> tuple[int, int, bool]:
    """Rows and columns of a task, and whether columns are read without padding: what the cost model sees of it."""
    from rammer.codegen.contraction import product_of

    if operator.family == "gemm_chain":
        return operator.tile[0], operator.tile[-1], True
    kind = binding.types[operator.main.reads[0]].dtype
    product = product_of(operator, binding, kind)
    return product.row_count, product.width, not product.b.guards


def choices_of(operator: ROperator, binding: Binding, backend, families: list[str], count: int, sample: int) -> list:
    """The best predicted ``count`` candidates of every family (of all together without ``families``), and ``sample`` more
    of each at random."""
    from rammer_cuda.kernels.chain_text import chain_candidates
    from rammer_cuda.kernels.choose import Choice, gemm_candidates
    from rammer_cuda.kernels.choose_wide import wide_candidates

    device, most = backend.vdevice, 200 if sample else 4 * count
    found = [Choice(o, seconds) for seconds, o in chain_candidates(operator, binding, device)]
    found += gemm_candidates(operator, binding, device, most)
    found += wide_candidates(operator, binding, device, most) if backend.arch == "sm_90a" else []
    groups = [[c for c in found if c.operator.family == f] for f in families]
    groups = groups or [sorted(found, key=lambda c: c.seconds)]
    return [c for g in groups for c in (*g[:count], *random.sample(g[count:], min(sample, len(g[count:]))))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="squeezenet,resnet50")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--sample", type=int, default=0, help="further candidates, drawn from the best 200")
    parser.add_argument("--families", default="", help="with commas: candidates of each of these, and of no other")
    parser.add_argument("--errors", type=int, default=2, help="candidates of a layer and kind whose results are checked")
    parser.add_argument("--json", default="", help="file for all measurements")
    parser.add_argument("--layers", type=int, default=1000, help="at most so many, drawn at random")
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    families = [f for f in options.families.split(",") if f]
    begin = time.perf_counter()
    backend = Registry().open("cuda")
    found = operators(options.models.split(","), backend, options.precision)
    print(f"{len(found)} layers after {time.perf_counter() - begin:.1f} s", flush=True)
    plans = []
    layers = random.sample(list(found.values()), min(options.layers, len(found)))
    for name, o, binding, times in layers:
        plans.append((name, o, binding, times, choices_of(o, binding, backend, families, options.count, options.sample)))
    backend.profiler.prepare([(c.operator, b) for _, _, b, _, cs in plans for c in cs])
    print(f"compiled {sum(len(p[4]) for p in plans)} kernels after {time.perf_counter() - begin:.1f} s", flush=True)
    peak = backend.vdevice.flops * backend.vdevice.veus
    totals: dict[str, list[float]] = {}
    rows: list[list[object]] = []
    by_family: dict[tuple[str, str], dict[int, float]] = {}
    for name, o, binding, times, choices in plans:
        if time.perf_counter() - begin > options.seconds:
            print("out of time")
            break
        main_ = o.main
        print(f"{name} x{times} {main_.shape} K {[r.extent for r in main_.reduce]} {o.flops / 1e6:.1f} MFLOP "
              f"floor {o.flops / peak * 1e6:.2f} us", flush=True)  # fmt: skip
        best, checked = float("inf"), dict[tuple[object, ...], int]()
        for i, choice in enumerate(choices):
            settings = dict(choice.operator.config)
            kind = (choice.operator.family, settings.get("split", 1) > 1, settings.get("patch", 0))
            checked[kind] = checked.get(kind, 0) + 1
            try:
                error, seconds = check(backend, choice.operator, binding, checked[kind] <= options.errors)
            except Exception as problem:
                print(f"   FAILED {choice.operator.tile} {choice.operator.config}: {problem}")
                continue
            best = min(best, seconds)
            rows.append([name, times, list(main_.shape), [r.extent for r in main_.reduce], list(choice.operator.tile),
                         dict(choice.operator.config), choice.seconds, seconds, error,
                         choice.operator.family, *blocked(choice.operator, binding)])  # fmt: skip
            mine = by_family.setdefault((name, choice.operator.family), {})
            mine[id(o)] = min(mine.get(id(o), float("inf")), seconds * times)
            config = choice.operator.family[4:] + " " + " ".join(f"{k}{v}" for k, v in choice.operator.config)
            print(f"   {choice.operator.tile} {config}: err {error:.1e} predicted {choice.seconds * 1e6:.2f} measured "
                  f"{seconds * 1e6:.2f} us {o.flops / seconds / peak:.0%}", flush=True)  # fmt: skip
            if i == 0:
                totals.setdefault(name, [0.0, 0.0, 0.0])[0] += choice.seconds * times
                totals[name][1] += seconds * times
        if choices:
            totals[name][2] += best * times
    for name, (p, m, b) in totals.items():
        print(f"TOTAL {name}: predicted {p * 1e3:.3f} ms, first choice {m * 1e3:.3f} ms, best {b * 1e3:.3f} ms")
    for (name, family), mine in by_family.items():
        print(f"TOTAL {name} {family}: {len(mine)} layers, best {sum(mine.values()) * 1e3:.3f} ms")
    if options.json:
        Path(options.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
