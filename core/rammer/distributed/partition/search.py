"""Search for the best partition of a model over several devices: candidates are compiled and compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rammer.compiler.compiler import Compiler
from rammer.distributed.distributed_program import DevicePart, DeviceStep, DistributedProgram, Link, Prediction
from rammer.distributed.joining import GOALS
from rammer.distributed.link import link_programs
from rammer.distributed.partition.coalesce_transfers import pack_transfers
from rammer.distributed.partition.cut_graph import STATIC, Cut, Spot, Staying, cut_graph, piece_transfers
from rammer.distributed.partition.host_steps import lower_whole_graph, order_spots
from rammer.distributed.partition.manual import by_hand
from rammer.distributed.partition.measured_links import Clock, MeasuredDevices
from rammer.distributed.partition.operator_cost import Costs, costs_of
from rammer.distributed.partition.pipeline_parallel import assign_pipeline
from rammer.distributed.partition.predict import StepTime, link_between, predict_lower_bound, predict_run, step_times
from rammer.distributed.partition.ranged_model import OpenShapes, graph_of_range
from rammer.distributed.partition.steps import Hosting
from rammer.distributed.partition.tensor_parallel import shared_out
from rammer.distributed.partition.wavefront_parallel import assign_wavefront, chunks_worth
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.read.reader import Model
from rammer.ir.compute import ComputeGraph
from rammer.ir.extent import Ranged
from rammer.passes.compute.slice_time_steps import every_step

__all__ = ["compile_open", "compile_spread"]

#: Number of times that a pipeline is rebalanced by the actual times of its sections.
ROUNDS: Final = 3


def compile_spread(
    devices: Sequence[tuple[str, Compiler]],
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    links: Sequence[Link] | MeasuredDevices = (),
    goal: str = GOALS[0],
    place: str = "",
) -> DistributedProgram:
    """Compile ``model`` at ``shapes`` over all ``devices``: names and compilers, of which one may serve several.

    Of all partitions that fit, the one with the best prediction for ``goal`` is selected: seconds between results
    (``throughput``) or of one run (``latency``). Missing ``links`` are assumed. A clock balances pipelines by measured times.
    ``place``, if given, specifies the partition by hand (``distributed.partition.manual``). The result is deterministic, so that
    it is equal in every process. Each node without a tensor expression is a separate step. Raises BadInput for a model with
    data-dependent shapes, or one that cannot be partitioned."""
    return compile_open(devices, model, OpenShapes(shapes), links, goal, place)


def compile_open(
    devices: Sequence[tuple[str, Compiler]],
    model: Model,
    at: OpenShapes,
    links: Sequence[Link] | MeasuredDevices = (),
    goal: str = GOALS[0],
    place: str = "",
) -> DistributedProgram:
    """Compile like ``compile_spread``, for every length of dimensions with a range. With a range, the partition is a pipeline or
    specified by hand; masked tensors cross at their current length. Raises NoRange if lengths lack a common program."""
    if goal not in GOALS:
        raise BadInput(f"unknown goal {goal!r} of a placement", "place", f"one of: {', '.join(GOALS)}")
    if len(devices) < 2:
        raise BadInput(f"a partition needs at least two devices, not {len(devices)}", "--device")
    names, compilers = tuple(n for n, _ in devices), [c for _, c in devices]
    if at.spans and at.states:
        raise BadInput("states have fixed shapes on several devices", "states", "give lengths, not ranges")
    if at.spans:
        whole = graph_of_range(compilers[0], model, at)
        graph, hosting, ranged = whole.graph, Hosting(ended=whole.ended), whole.ranged
    else:
        graph, hosting, ranged = *_lower_model(compilers[0], model, at.shapes), None
    known = links if isinstance(links, MeasuredDevices) else MeasuredDevices(links)
    between = {(k.source, k.target): k for k in known.links}
    clock = None if at.spans else known.clock  # a range is timed at its greatest lengths
    spreading = Spreading(graph, compilers, names, between, hosting, goal, states=at.states, clock=clock)
    Staying(states=at.states).tensors(graph)
    best = spreading.made(graph, by_hand(place, graph, len(names)), "by hand") if place else spreading.best()
    if best is None:
        raise BadInput(f"the model cannot be partitioned for {len(names)} devices", f"model {graph.name}", "use fewer devices")
    return best.joined(graph.name, ranged)


def _lower_model(compiler: Compiler, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> tuple[ComputeGraph, Hosting]:
    """Lower all of the model to tensor expressions, after all passes, and collect the nodes that have none."""
    with compiler.step("bind"):
        graph, rest = bind_until(model, shapes, compiler.lowerings)
    if rest is not None:
        raise BadInput(
            f"a model over several devices needs shapes that do not depend on run-time data: {rest.why.what}",
            rest.why.where,
            rest.why.hint or "use one device",
        )
    with compiler.step("passes"):
        graph, _ = compiler.rewritten(graph, compiler.passes)
    with compiler.step("lower"):
        found, host_nodes = lower_whole_graph(graph, compiler.lowerings)
    if not found.computes:
        raise BadInput("the model has no computation to partition", f"model {graph.name}", "use one device")
    return found, Hosting(graph, host_nodes)


@dataclass(frozen=True)
class MadeCut:
    """A cut with compiled pieces. Only the selected cut is linked and verified, which is the slowest step."""

    parts: tuple[DevicePart, ...]
    found: Cut
    predicted: Prediction
    how: str

    def joined(self, name: str, ranged: Ranged | None = None) -> DistributedProgram:
        """Return the cut as one verified program, which serves a range of lengths described by ``ranged``."""
        whole = link_programs(
            name, self.parts, self.found.transfers, self.found.inputs, self.found.outputs, self.predicted.latency
        )
        found, ports = self.found, (self.found.inputs, self.found.outputs)
        return DistributedProgram(self.parts, found.transfers, whole, *ports, self.predicted, self.how, ranged, found.states)


@dataclass
class Spreading:
    """The search state shared by all cuts of one graph. ``limit`` is the predicted objective of the best cut found."""

    graph: ComputeGraph
    compilers: Sequence[Compiler]
    names: tuple[str, ...]
    links: Mapping[tuple[int, int], Link]
    hosting: Hosting = field(default_factory=Hosting)
    goal: str = GOALS[0]
    limit: float = math.inf
    states: Mapping[str, str] = field(default_factory=dict)
    clock: Clock | None = None
    _costs: dict[int, Costs] = field(default_factory=dict)

    def best(self) -> MadeCut | None:
        """Return the cut with the best prediction; the first one wins ties."""
        best: MadeCut | None = None
        for made in self._propose_cuts():
            if made is not None and self._objective_value(made.predicted) < self.limit:
                best, self.limit = made, self._objective_value(made.predicted)
        return best

    def _objective_value(self, predicted: Prediction) -> float:
        return predicted.interval if self.goal == "throughput" else predicted.latency

    def _propose_cuts(self) -> Iterator[MadeCut | None]:
        """Yield the best cut of each strategy."""
        yield self._cut_pipeline()
        if not self.hosting.host_nodes and self.hosting.ended is None:  # they copy nodes and create unmasked tensors
            yield self._cut_wavefront()
            yield from self._cut_products()

    @property
    def costs(self) -> list[Costs]:
        """The costs on each device."""
        for compiler in self.compilers:
            if id(compiler) not in self._costs:
                known = self.hosting.seconds(compiler, self.graph)
                self._costs[id(compiler)] = costs_of(compiler, self.graph, known, self.hosting.ended)
        return [self._costs[id(c)] for c in self.compilers]

    def _cut_pipeline(self) -> MadeCut | None:
        """Return a pipeline balanced by the times of compiled sections: measured, or else predicted."""
        best, scale, seen = None, [1.0] * len(self.names), list[dict[str, Spot]]()
        slowest = math.inf
        for _ in range(ROUNDS):
            spots = assign_pipeline(self.graph, self.costs, self.links, scale)
            if spots is None or spots in seen:
                break
            seen.append(spots)
            made = self.made(self.graph, spots, "a pipeline over layers")
            if made is None:
                break
            made, found = self._measure_cut(made)
            best, slowest = (made, found.interval) if found.interval < slowest else (best, slowest)
            thought = [sum(self.costs[s.device].seconds[n] for n, s in spots.items() if s.device == d) for d in range(len(scale))]
            scale = [b / t if t else 1.0 for b, t in zip(found.busy, thought, strict=True)]
        return best

    def _measure_cut(self, made: MadeCut) -> tuple[MadeCut, Prediction]:
        """Return the cut with measured times in its description, and the prediction that follows from them. The cut's prediction
        stays unchanged, since it is compared with unmeasured cuts."""
        seconds = self.clock(made.parts) if self.clock is not None and self.goal == "throughput" else None
        if seconds is None:
            return made, made.predicted
        steps = [
            [replace(s, seconds=t) for s, t in zip(part, times, strict=True)]
            for part, times in zip(step_times(made.parts), seconds, strict=True)
        ]
        found = predict_run(steps, made.found.transfers, self.links, _result_transfers(made.found))
        took = ", ".join(f"{t * 1e6:.0f}" for t in found.busy)
        return replace(made, how=f"{made.how}, balanced by what the parts took alone: {took} us"), found

    def _cut_wavefront(self) -> MadeCut | None:
        """Return a wavefront over stacked layers, in chunks of steps."""
        graph, first = every_step(self.graph), self.compilers[0].backend.vdevice
        if graph is self.graph:
            return None
        costs = costs_of(self.compilers[0], graph)
        ways = [link_between(self.links, d, d + 1) for d in range(len(self.names) - 1)]
        chunks = chunks_worth(graph, costs.alone, len(self.names), first.launch + max(w.latency for w in ways))
        spots = assign_wavefront(graph, costs, len(self.names), chunks)
        return None if spots is None else self.made(graph, spots, f"a wavefront over layers, {chunks} chunks of steps")

    def _cut_products(self) -> Iterator[MadeCut | None]:
        """Yield tensor-parallel cuts: large products sliced if each saves more than half of an exchange's time. A second cut
        slices smaller products too, which save enough together between two exchanges."""
        size, seen = len(self.names), set[frozenset[str]]()
        exchange = max(link_between(self.links, a, b).latency for a in range(size) for b in range(size) if a != b)
        for saved in (exchange / 2, exchange / 32):
            made = shared_out(self.graph, self.costs[0], size, saved)
            if made is not None and frozenset(made[1]) not in seen:
                seen.add(frozenset(made[1]))
                yield self.made(*made, f"large products in {size} shares")

    def spread(self, graph: ComputeGraph, spots: Mapping[str, Spot], how: str) -> DistributedProgram | None:
        """Compile and verify ``graph`` cut at ``spots``. Returns None under the conditions of ``made``."""
        made = self.made(graph, spots, how)
        return None if made is None else made.joined(graph.name)

    def made(self, graph: ComputeGraph, spots: Mapping[str, Spot], how: str) -> MadeCut | None:
        """Compile ``graph`` cut at ``spots``. Returns None if a piece does not fit on its device. Also returns None if transfers
        and launches alone take as long as the best cut found."""
        host_nodes, staying = self.hosting.host_nodes, Staying(self.hosting.ended or STATIC, self.states)
        ended = staying.ended
        graph, spots = pack_transfers(graph, order_spots(graph, spots, host_nodes), host_nodes.keys() | ended.tensors.keys())
        found = cut_graph(graph, order_spots(graph, spots, host_nodes), staying)
        if self._objective_value(self.least(found)) >= self.limit:
            return None
        try:
            parts = self._parts(found)
        except DeviceFailure:
            return None
        alone = tuple(c.alone for c in self.costs)
        predicted = predict_run(step_times(parts), found.transfers, self.links, _result_transfers(found), alone)
        return MadeCut(parts, found, predicted, how)

    def least(self, found: Cut) -> Prediction:
        """Return a lower bound of the predictions for a cut: each step with a product takes at least a launch."""
        steps: list[list[StepTime]] = [[] for _ in self.names]
        for piece, (arrivals, departures) in zip(found.pieces, piece_transfers(found), strict=True):
            device, work = piece.spot.device, any(c.kind == "contraction" for c in piece.graph.computes)
            launch = self.compilers[device].backend.vdevice.launch if work else 0.0
            steps[device].append(StepTime(launch, arrivals, departures))
        return predict_lower_bound(steps, found.transfers, self.links, _result_transfers(found))

    def _parts(self, found: Cut) -> tuple[DevicePart, ...]:
        """Compile every piece for its device."""
        steps: list[list[DeviceStep]] = [[] for _ in self.names]
        for piece, (arrivals, departures) in zip(found.pieces, piece_transfers(found), strict=True):
            step = self.hosting.step(self.compilers[piece.spot.device], piece.graph)
            steps[piece.spot.device].append(replace(step, arrivals=arrivals, departures=departures))
        kept = {o.transfer for o in found.outputs} | {n for s in found.states for n in s.transfers}
        tensors: list[dict[str, str]] = [{} for _ in self.names]
        for t in found.transfers:
            tensors[t.target] |= {} if t.name in kept else {t.tensor: t.name}
        return tuple(DevicePart(n, _assign_frees(s, t)) for n, s, t in zip(self.names, steps, tensors, strict=True))


def _result_transfers(found: Cut) -> list[str]:
    return [o.transfer for o in found.outputs if o.transfer]


def _assign_frees(steps: Sequence[DeviceStep], arriving: Mapping[str, str]) -> tuple[DeviceStep, ...]:
    """Return steps that free the ``arriving`` tensors (transfers by tensor) after their last read."""
    last = {tensor: k for k, s in enumerate(steps) for tensor in s.inputs if tensor in arriving}
    frees: list[list[str]] = [[] for _ in steps]
    for tensor, name in arriving.items():
        if tensor in last:
            frees[last[tensor]].append(name)
    return tuple(replace(s, frees=tuple(f)) for s, f in zip(steps, frees, strict=True))
