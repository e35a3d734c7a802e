"""Random models cut at random, or in tensor-parallel slices: one device's results, and equal programs in all processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram, Link
from rammer.distributed.partition.host_steps import lower_whole_graph
from rammer.distributed.partition.manual import assign_stages
from rammer.distributed.partition.operator_cost import costs_of, on_its_own
from rammer.distributed.partition.search import Spreading
from rammer.distributed.partition.steps import Hosting
from rammer.distributed.partition.tensor_parallel import shared_out
from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph
from rammer.ir.graph import Graph
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.graphs.case import GraphCase
from rammer_testing.graphs.generate import graph
from rammer_testing.graphs.perturbed_reference import tracker
from rammer_testing.small_models import dense_layers
from rammer_testing.spreads import run_steps, run_whole


def compiler() -> Compiler:
    registry = Registry()
    return Compiler(registry.open("ipu_sim", options={"tiles": "4"}), CompileOptions(), KernelStore(None), registry)


def drawn(seed: int, made: Compiler) -> Iterator[tuple[ComputeGraph, GraphCase, Graph]]:
    """Yield tensor expressions, cases and graphs of random models of one program."""
    for index in range(10**6):
        case = graph(seed, index, longest=12)
        if case is None or not all(isinstance(v, np.ndarray) for v in case.inputs.values()):
            continue
        try:
            bound, rest = bind_until(read_model(case.model()), {n: v.shape for n, v in case.inputs.items()}, made.lowerings)
            if rest is None:
                bound, _ = made.rewritten(bound, made.passes)
                found, _ = lower_whole_graph(bound, made.lowerings)
                if len(found.computes) > 1:
                    on_its_own(made, found)
                    yield found, case, bound
        except (RammerError, CannotLower):
            continue  # unsupported on this device, at least in part


def spots(found: ComputeGraph, random: Random, devices: int) -> dict[str, int]:
    """Return a device for each compute, mostly that of its operands."""
    where: dict[str, int] = {}
    for c in found.computes:
        near = [where[n] for n in c.reads if n in where]
        where[c.name] = near[-1] if near and random.random() < 0.6 else random.randrange(devices)
    return where


def difference(case: GraphCase, name: str, have: np.ndarray, want: np.ndarray) -> str:
    """Return the first element that differs from one device's result by more than roundings explain, or an empty string."""
    if np.allclose(have, want, rtol=1e-3, atol=1e-4, equal_nan=True):
        return ""
    # A device rounds sums in another order, and a float16 result or a rounding tie shows it: the oracle decides.
    oracle = tracker(read_model(case.model()), case.inputs, np.random.default_rng(0), trajectories=24, amplified=32.0)
    return oracle.run(case.inputs)[name].differs(have)


def check(spread: DistributedProgram, found: ComputeGraph, case: GraphCase, made: Compiler) -> None:
    """Compare a partition of ``found``, the tensor expressions of all of ``case``, with one device."""
    inputs = case.inputs
    assert RProgram.parse(str(spread.whole)) == spread.whole
    one = on_its_own(made, found)
    loaded = made.backend.load(one.program, one.constants)
    want = loaded.run({n: inputs[found.aliases.get(n, n)] for n in found.inputs}).outputs
    loaded.close()
    large = Registry().open("ipu_sim", options={"tiles": str(max(8, spread.whole.veus))})
    results = [run_steps(spread, inputs, [made.backend] * len(spread.parts))]
    if all(s.outline is None for p in spread.parts for s in p.steps):
        results.append(run_whole(spread, inputs, large))
    assert found.outputs
    for name in found.outputs:
        for got in results:
            assert not difference(case, name, got[found.aliases.get(name, name)], want[name])


def ways(random: Random, devices: int) -> dict[tuple[int, int], Link]:
    """Return links of random speed, some of which share a segment; others are left to defaults."""
    found = dict[tuple[int, int], Link]()
    for pair in [(a, b) for a in range(devices) for b in range(devices) if a != b and random.random() < 0.8]:
        bandwidth = 10 ** random.uniform(7, 11)
        through = (("shared", bandwidth * random.uniform(1, 4)),) if random.random() < 0.5 else ()
        found[pair] = Link(*pair, 10 ** random.uniform(-8, -4), bandwidth, "drawn", through)
    return found


def search(seed: int, count: int) -> tuple[int, int, int]:
    """Return the number of cuts, of tensor-parallel cuts, and of transfers."""
    made, cuts, shares, moves = compiler(), 0, 0, 0
    for number, (found, case, _) in zip(range(count), drawn(seed, made), strict=False):
        random = Random(seed + number)
        devices = random.randint(2, 4)
        spreading = Spreading(found, [made] * devices, ("ipu_sim",) * devices, ways(random, devices))
        asked = [(found, assign_stages(found, spots(found, random, devices)))]
        shared = shared_out(found, costs_of(made, found), devices, -1.0)
        shares += shared is not None
        for part, where in (*asked, *([shared] if shared else [])):
            cut = spreading.made(part, where, "at random")
            assert cut is not None
            least, spread = spreading.least(cut.found), cut.joined(found.name)
            assert least.latency <= cut.predicted.latency * (1 + 1e-9)
            assert least.interval <= cut.predicted.interval * (1 + 1e-9)
            check(spread, found, case, made)
            cuts, moves = cuts + 1, moves + len(spread.transfers)
    return cuts, shares, moves


@pytest.mark.slow
def test_random_models_cut_at_random(seed: int) -> None:
    cuts, _, moves = search(seed, 5)
    assert cuts >= 5 and moves


@pytest.mark.large
def test_many_random_models_cut_at_random(seed: int) -> None:
    cuts, shares, moves = search(seed, 150)
    assert cuts >= 150 and shares and moves >= 300


def apart(seed: int, count: int) -> int:
    """Check cuts of models with one or two operators without a lowering, which the host computes. Return the number of host
    steps."""
    made, hosted = compiler(), 0
    for number, (found, case, bound) in zip(range(count), drawn(seed, made), strict=False):
        random = Random(seed + number)
        kinds = sorted({(n.domain, n.bare) for n in bound.nodes})
        missing = set(random.sample(kinds, min(len(kinds), random.randint(1, 2))))
        part, nodes = lower_whole_graph(bound, {k: f for k, f in made.lowerings.items() if k not in missing})
        devices = random.randint(2, 3)
        spreading = Spreading(part, [made] * devices, ("ipu_sim",) * devices, {}, Hosting(bound, nodes))
        spread = spreading.spread(part, assign_stages(part, spots(part, random, devices)), "at random")
        assert spread is not None
        check(spread, found, case, made)
        steps = [s for p in spread.parts for s in p.steps if s.host is not None]
        assert len(steps) == len({id(n) for n in nodes.values()})
        hosted += len(steps)
    return hosted


@pytest.mark.slow
def test_random_models_with_operators_on_the_host(seed: int) -> None:
    assert apart(seed, 5)


@pytest.mark.large
def test_many_random_models_with_operators_on_the_host(seed: int) -> None:
    assert apart(seed, 150) >= 100


PROGRAM = """
import sys
sys.path[:0] = [{folder!r}]
from test_cuts_random import digests
print(*digests())
"""


def digests() -> list[str]:
    """Return digests of a pipeline, a wavefront and a tensor-parallel cut."""
    from test_place import lstms, spread_of
    from test_shares import model_of
    from test_shares import spread_of as shared

    wave = spread_of(lstms(2, 4, 4), 2, goal="latency")
    return [s.digest for s in (spread_of(dense_layers(4), 3), wave, shared(model_of("two layers", 0), 2))]


@pytest.mark.slow
def test_every_process_makes_the_same() -> None:
    """Check this for any iteration order of sets."""
    here = digests()
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    code = PROGRAM.format(folder=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == here and len(set(here)) == 3
