"""Random models cut in every way, planned but not compiled, to search many cuts for cyclic waits between steps. Their tables are
verified. Some run with several runs in flight, with checksums of inputs as results of steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from zlib import crc32

import numpy as np
import onnx
import pytest
from ranged_models import RANGED
from test_cuts_random import compiler, spots, ways
from test_spread_ranges import open_shapes

from rammer.compiler.compiler import Compiler
from rammer.distributed.distributed_program import DeviceStep, DistributedProgram
from rammer.distributed.partition.cut_graph import Cut, Spot, cut_graph
from rammer.distributed.partition.host_steps import lower_whole_graph, order_spots, outline_program
from rammer.distributed.partition.manual import assign_stages
from rammer.distributed.partition.operator_cost import Costs
from rammer.distributed.partition.pipeline_parallel import assign_pipeline
from rammer.distributed.partition.ranged_model import graph_of_range
from rammer.distributed.partition.search import Spreading
from rammer.distributed.partition.steps import Hosting
from rammer.distributed.partition.tensor_parallel import shared_out
from rammer.distributed.partition.wavefront_parallel import assign_wavefront
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site
from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph
from rammer.ir.graph import Graph
from rammer.ir.types import TensorType
from rammer.passes.compute.slice_time_steps import every_step
from rammer_testing.graphs.generate import graph
from rammer_testing.nonempty import some

Arrays = Mapping[str, np.ndarray]
Spots = Mapping[str, Spot]


@dataclass(frozen=True)
class Mixture:
    """A step that the host computes: every element of an output is a checksum of all inputs."""

    piece: ComputeGraph

    @property
    def title(self) -> str:
        return self.piece.name

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        read = "".join(f"{n} {crc32(np.ascontiguousarray(inputs[n]))} " for n in self.piece.inputs)
        kinds = ((n, self.piece.types[n]) for n in self.piece.outputs)
        return {n: np.full(k.shape, crc32(f"{n} {read}".encode()) % 97, k.dtype) for n, k in kinds}

    def to_bytes(self) -> bytes:
        return str(self.piece).encode()


class Planned(Hosting):
    """Hosting of every step, as host steps in the table of all devices: each output is one task that reads all inputs."""

    def step(self, compiler: Compiler, piece: ComputeGraph) -> DeviceStep:
        table = outline_program(piece, 1e-6, compiler.options.precision)
        return DeviceStep(table, piece.constants, outline=table, host=Mixture(piece))


class Unpriced(Spreading):
    """Partitioning without cost estimates of computes."""

    @property
    def costs(self) -> list[Costs]:
        return [Costs({}, 0.0, frozenset())] * len(self.compilers)


@dataclass(frozen=True)
class Case:
    """A graph to cut, and its states by the user's names."""

    graph: ComputeGraph
    hosting: Hosting
    states: Mapping[str, str]
    devices: int

    def planned(self, graph: ComputeGraph, where: Spots, made: Compiler, random: Random) -> tuple[Cut, DistributedProgram]:
        """Return a cut, and its verified table."""
        names, links = ("ipu_sim",) * self.devices, ways(random, self.devices)
        spreading = Unpriced(graph, [made] * self.devices, names, links, self.hosting, states=self.states)
        found = spreading.made(graph, where, "planned")
        assert found is not None
        return found.found, found.joined(graph.name)

    def placements(self, random: Random) -> Iterator[tuple[str, ComputeGraph, Spots]]:
        """Yield the graph with its placement, for every strategy."""
        graph, devices = self.graph, self.devices
        yield "by hand", graph, assign_stages(graph, spots(graph, random, devices))
        found = assign_pipeline(graph, [costs(graph, random) for _ in range(devices)], ways(random, devices))
        if found is not None:
            yield "pipeline", graph, found
        if self.hosting.host_nodes or self.hosting.ended is not None:
            return
        steps = every_step(graph)
        found = assign_wavefront(steps, costs(steps, random), devices, random.randint(2, 4)) if steps is not graph else None
        if found is not None:
            yield "wavefront", steps, found
        shares = shared_out(graph, costs(graph, random), devices, -1.0)
        if shares is not None:
            yield "shares", *shares


def costs(graph: ComputeGraph, random: Random) -> Costs:
    seconds = {c.name: 10 ** random.uniform(-8, -4) for c in graph.computes}
    return Costs(seconds, sum(seconds.values()), frozenset())


def recurrent(random: Random) -> onnx.ModelProto:
    """Return recurrent layers that read any two earlier results, in either direction."""
    helper, hidden, steps = onnx.helper, random.choice([2, 3]), random.randint(4, 9)
    rng, known = np.random.default_rng(random.randrange(2**31)), ["x"]
    nodes, values = [], [onnx.numpy_helper.from_array(np.array([1]), "axes")]
    for k in range(random.randint(2, 5)):
        kind, gates = random.choice([("LSTM", 4), ("GRU", 3), ("RNN", 1)])
        for n in "wr":
            drawn = rng.standard_normal((1, gates * hidden, hidden)).astype(np.float32)
            values.append(onnx.numpy_helper.from_array(drawn, f"{n}{k}"))
        nodes.append(helper.make_node("Add", [random.choice(known[-2:]), random.choice(known)], [f"a{k}"]))
        way = random.choice(["forward", "forward", "reverse"])
        nodes.append(helper.make_node(kind, [f"a{k}", f"w{k}", f"r{k}"], [f"y{k}"], hidden_size=hidden, direction=way))
        nodes.append(helper.make_node("Squeeze", [f"y{k}", "axes"], [f"s{k}"]))
        known.append(f"s{k}")
    nodes.append(helper.make_node("Add", [known[-1], random.choice(known)], ["y"]))
    ports = [[helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [steps, 1, hidden])] for n in "xy"]
    made = helper.make_graph(nodes, "stack", *ports, values)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def bound(seed: int, made: Compiler, random: Random) -> Iterator[Graph]:
    """Yield random models after all passes."""
    for index in range(10**6):
        case = graph(seed, index, longest=random.choice([6, 12, 30]))
        layers = recurrent(random) if random.random() < 0.3 else None
        if case is None or not all(isinstance(v, np.ndarray) for v in case.inputs.values()):
            continue
        try:
            model = read_model(layers or case.model())
            shapes = {p.name: tuple(int(d or 0) for d in p.shape) for p in model.inputs} if layers else {}
            shapes = shapes or {n: v.shape for n, v in case.inputs.items()}
            found, rest = bind_until(model, shapes, made.lowerings)
            if rest is None:
                yield made.rewritten(found, made.passes)[0]
        except (RammerError, CannotLower):
            continue  # the reader refuses it, or a shape is data-dependent


def cases(seed: int, made: Compiler, random: Random) -> Iterator[Case]:
    """Yield cases, most with host operators, some with states, and some for a range of lengths."""
    for whole in bound(seed, made, random):
        kinds, devices = sorted({(n.domain, n.bare) for n in whole.nodes}), random.randint(2, 4)
        hosted = set(random.sample(kinds, min(len(kinds), random.randint(1, 3)))) if random.random() < 0.6 else set()
        found, host_nodes = lower_whole_graph(whole, {k: f for k, f in made.lowerings.items() if k not in hosted})
        if found.computes:
            yield Case(found, Planned(whole, host_nodes), states(found, random) if random.random() < 0.3 else {}, devices)
        if random.random() < 0.03:
            model = RANGED[random.choice(list(RANGED))](np.random.default_rng(random.randrange(2**31)))
            ranged = graph_of_range(made, read_model(model.proto), open_shapes(model))
            yield Case(ranged.graph, Planned(ended=ranged.ended), {}, devices)


def states(found: ComputeGraph, random: Random) -> dict[str, str]:
    """Return outputs that are an input of their type in the next run."""
    chosen, free = dict[str, str](), list(found.inputs)
    for name in found.outputs:
        fitting = [n for n in free if found.types[n] == found.types[name]]
        if fitting:
            free.remove(into := random.choice(fitting))
            chosen[found.aliases.get(name, name)] = found.aliases.get(into, into)
    return chosen


def check_runs(found: Cut, spread: DistributedProgram, random: Random) -> None:
    """Check that concurrent runs give the results of the pieces computed one after another."""
    count, made = len(spread.parts), compiler().backend
    inputs = [{i.name: drawn(i.type, random) for i in spread.inputs} for _ in range(5)]
    joined = Joined((Site("ipu_sim"),) * count, LOCAL, random.randint(1, 3), 20.0)
    runs = SpreadRuns(spread, dict.fromkeys(range(count), made), joined)
    kept = {s.input for s in spread.states}
    outputs, _ = runs.run_all([{n: a for n, a in given.items() if n not in kept} for given in inputs])
    runs.close()
    held = {i.tensor: np.zeros(i.type.shape, i.type.dtype) for i in spread.inputs}
    for given, got in some(list(zip(inputs, outputs, strict=True))):
        values = held | {i.tensor: given[i.name] for i in spread.inputs if i.name not in kept}
        for piece in found.pieces:
            values |= Mixture(piece.graph).run({**piece.graph.constants, **values})
        for o in spread.outputs:
            np.testing.assert_array_equal(got[o.name], values[o.tensor])
        held = {s.into: values[s.tensor] for s in spread.states}


def drawn(kind: TensorType, random: Random) -> np.ndarray:
    return np.full(kind.shape, random.randrange(97), kind.dtype)


def search(seed: int, count: int) -> Counter[str]:
    """Return the number of verified cuts of each kind, and of runs."""
    made, random, found = compiler(), Random(seed), Counter[str]()
    for _, case in zip(range(count), cases(seed, made, random), strict=False):
        for how, part, where in case.placements(random):
            pieces, spread = case.planned(part, where, made, random)
            features = {
                how: True,
                "host": case.hosting.host_nodes,
                "states": case.states,
                "range": case.hosting.ended is not None,
            }
            if case.hosting.ended is None and random.random() < 0.2:
                check_runs(pieces, spread, random)
                features["run"] = True
            found.update(n for n, there in features.items() if there)
    return found


@pytest.mark.slow
def test_no_steps_wait_for_each_other(seed: int) -> None:
    found = search(seed, 30)
    assert found["by hand"] == 30 and found["pipeline"] and found["host"] and found["run"]


@pytest.mark.large
@pytest.mark.parametrize("part", range(2))
def test_no_steps_of_many_models_wait_for_each_other(part: int, seed: int) -> None:
    found = search(seed, 300)
    kinds = ("by hand", "pipeline", "wavefront", "shares", "host", "states", "range", "run")
    assert all(found[kind] for kind in kinds), found


def test_spots_are_put_in_order_and_others_are_refused() -> None:
    """Check that of devices at one stage the lower one comes first. Reads from a higher device move it to the next stage."""
    made = compiler()
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[4] x) => (float[4] c) { a = Tanh(x) b = Neg(a) c = Add(a, b) }'
    whole, _ = bind_until(read_model(onnx.parser.parse_model(text)), {"x": (4,)}, made.lowerings)
    found, _ = lower_whole_graph(whole, made.lowerings)
    where = {"a": Spot(0, 1), "b": Spot(0, 0), "c": Spot(0, 1)}
    with pytest.raises(ValueError, match=r"b at .* reads a, which is computed later"):
        cut_graph(found, where)
    ordered = order_spots(found, where, {})
    assert ordered == {"a": Spot(0, 1), "b": Spot(1, 0), "c": Spot(1, 1)}
    assert [p.spot for p in cut_graph(found, ordered).pieces] == [Spot(0, 1), Spot(1, 0), Spot(1, 1)]
