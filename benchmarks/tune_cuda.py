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
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from zoo import SEED, ZOO

from rammer.compiled.options import PRECISIONS
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
from rammer.tile.connect import PriceTerms, connect


def operators(names: list[str], backend: Backend, precision: str) -> dict[str, tuple[str, ROperator, Binding, int]]:
    """Key -> (model, operator, binding, how often) of every contraction."""
    found: dict[str, tuple[str, ROperator, Binding, int]] = {}
    for name in names:
        graph, _ = Pipeline(default_passes()).run(bind(read_model(ZOO[name].build(SEED)), {}))
        if precision == "float16":
            graph, _ = Pipeline((NarrowFloats(), *default_passes())).run(graph)
        compute = lower(graph)
        plan = assign_storage(compute)
        binding = Binding(plan.graph.types, plan.storages, frozenset(plan.graph.constants), precision=precision)
        tiles = connect(
            plan.graph,
            backend.vdevice,
            view_sources(plan.graph, plan.storages),
            PriceTerms(lambda o, b=binding: backend.rate(o, b), lambda o, b=binding: backend.prologue_rate(o, b), binding),
        )
        for o in tiles.operators:
            if o.main.kind == "contraction":
                key = binding.key(o)
                count = found[key][3] + 1 if key in found else 1
                found[key] = (name, o, binding, count)
    return found


def reference(
    operator: ROperator, program: RProgram, inputs: dict[str, np.ndarray], constants: dict[str, np.ndarray]
) -> np.ndarray:
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
    of_products = [f for f in backend.usable if f.product or f.name == "gemm_chain"]
    groups = [[f for f in of_products if f.name == name] for name in families] or [of_products]
    most = 200 if sample else count
    groups = [list(islice(backend.choices(operator, binding, *group), most)) for group in groups]
    return [c for g in groups for c in (*g[:count], *random.sample(g[count:], min(sample, len(g[count:]))))]


@dataclass
class Tally:
    """What was measured: a row a candidate; by model the seconds of all layers as predicted, of the first choices and of
    the best ones; by model and family the best seconds of each layer (by its number). ``peak`` is the GPU's, in FLOP/s."""

    peak: float
    rows: list[list[object]] = field(default_factory=list)
    totals: dict[str, list[float]] = field(default_factory=dict)
    families: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)

    def layer(self, number: int, plan: Plan, backend, errors: int) -> None:
        """Measure every candidate of one layer; the results of ``errors`` of each kind are compared with float64."""
        o, extents = plan.operator, [r.extent for r in plan.operator.main.reduce]
        print(
            f"{plan.model} x{plan.times} {o.main.shape} K {extents} {o.flops / 1e6:.1f} MFLOP "
            f"floor {o.flops / self.peak * 1e6:.2f} us",
            flush=True,
        )
        total, best, checked = self.totals.setdefault(plan.model, [0.0, 0.0, 0.0]), float("inf"), Counter[object]()
        for i, choice in enumerate(plan.choices):
            tiled = choice.operator
            settings = dict(tiled.config)
            kind = (tiled.family, settings.get("split_k", 1) > 1, settings.get("halo", 0))
            checked[kind] += 1
            try:
                error, seconds = check(backend, tiled, plan.binding, checked[kind] <= errors)
            except Exception as problem:  # one kernel that fails must not hide the others
                print(f"   FAILED {tiled.tile} {tiled.config}: {problem}")
                continue
            best = min(best, seconds)
            self.rows.append(
                [
                    plan.model,
                    plan.times,
                    list(o.main.shape),
                    extents,
                    list(tiled.tile),
                    settings,
                    choice.seconds,
                    seconds,
                    error,
                    tiled.family,
                    *blocked(tiled, plan.binding),
                ]
            )
            mine = self.families.setdefault((plan.model, tiled.family), {})
            mine[number] = min(mine.get(number, float("inf")), seconds * plan.times)
            config = tiled.family[4:] + " " + " ".join(f"{k}{v}" for k, v in tiled.config)
            print(
                f"   {tiled.tile} {config}: err {error:.1e} predicted {choice.seconds * 1e6:.2f} measured "
                f"{seconds * 1e6:.2f} us {o.flops / seconds / self.peak:.0%}",
                flush=True,
            )
            if i == 0:
                total[0] += choice.seconds * plan.times
                total[1] += seconds * plan.times
        if plan.choices:
            total[2] += best * plan.times

    def print_totals(self) -> None:
        """What a model's layers add up to."""
        for name, (p, m, b) in self.totals.items():
            print(f"TOTAL {name}: predicted {p * 1e3:.3f} ms, first choice {m * 1e3:.3f} ms, best {b * 1e3:.3f} ms")
        for (name, family), mine in self.families.items():
            print(f"TOTAL {name} {family}: {len(mine)} layers, best {sum(mine.values()) * 1e3:.3f} ms")


@dataclass(frozen=True)
class Plan:
    """One distinct layer of ``model``, which has it so many ``times``, and the candidates to measure."""

    model: str
    operator: ROperator
    binding: Binding
    times: int
    choices: list


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="squeezenet,resnet50", help="keys of the zoo, with commas")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--count", type=int, default=6, help="candidates of a layer, best predicted first")
    parser.add_argument("--sample", type=int, default=0, help="further candidates, drawn from the best 200")
    parser.add_argument("--families", default="", help="with commas: candidates of each of these, and of no other")
    parser.add_argument("--errors", type=int, default=2, help="candidates of a layer and kind whose results are checked")
    parser.add_argument("--json", default="", help="file for all measurements")
    parser.add_argument("--layers", type=int, default=1000, help="at most so many, drawn at random")
    parser.add_argument("--seconds", type=float, default=400, help="no further layer is begun after so many")
    return parser.parse_args()


def main() -> None:
    """Choose the candidates of all layers, compile them together, measure them one by one."""
    options, begin = arguments(), time.perf_counter()
    families = [f for f in options.families.split(",") if f]
    backend = Registry().open("cuda")
    found = operators(options.models.split(","), backend, options.precision)
    print(f"{len(found)} layers after {time.perf_counter() - begin:.1f} s", flush=True)
    plans = [
        Plan(name, o, binding, times, choices_of(o, binding, backend, families, options.count, options.sample))
        for name, o, binding, times in random.sample(list(found.values()), min(options.layers, len(found)))
    ]
    backend.profiler.prepare([(c.operator, p.binding) for p in plans for c in p.choices])
    print(f"compiled {sum(len(p.choices) for p in plans)} kernels after {time.perf_counter() - begin:.1f} s", flush=True)
    tally = Tally(backend.vdevice.flops * backend.vdevice.veus)
    for number, plan in enumerate(plans):
        if time.perf_counter() - begin > options.seconds:
            print("out of time")
            break
        tally.layer(number, plan, backend, options.errors)
    tally.print_totals()
    if options.json:
        Path(options.json).write_text(json.dumps(tally.rows))


if __name__ == "__main__":
    run(main)
