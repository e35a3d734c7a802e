"""One model over several devices: the cuts that there are, compiled, and the best of them as a Spread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rammer.compiler.compiler import Compiler
from rammer.distributed.distributed_program import DevicePart, DeviceStep, DistributedProgram, Link, Prediction
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

__all__ = ["GOALS", "compile_open", "compile_spread"]

#: What a user may ask a placement for.
GOALS: Final = ("throughput", "latency")
#: How often a pipeline is balanced anew by what its stretches turned out to take.
ROUNDS: Final = 3


def compile_spread(
    devices: Sequence[tuple[str, Compiler]],
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],
    links: Sequence[Link] | MeasuredDevices = (),
    goal: str = "throughput",
    place: str = "",
) -> DistributedProgram:
    """``model`` at ``shapes`` over all ``devices``: names and compilers, of which one may serve several.

    Of the cuts that fit the model the one with the best prediction for ``goal`` is taken: seconds between results
    (``throughput``) or of one run (``latency``). ``links`` are as measured; others are assumed. With a clock a pipeline is
    balanced by it. ``place``, where given, says it by hand (``distributed.partition.manual``). It is the same in every process
    that is given the same. What has no tensor expression is a step
    of its own. BadInput for a model with shapes that are known late, and for one that cannot be cut."""
    return compile_open(devices, model, OpenShapes(shapes), links, goal, place)


def compile_open(
    devices: Sequence[tuple[str, Compiler]],
    model: Model,
    at: OpenShapes,
    links: Sequence[Link] | MeasuredDevices = (),
    goal: str = "throughput",
    place: str = "",
) -> DistributedProgram:
    """As ``compile_spread``; where dimensions have a range, for every length of it: a pipeline, or by hand, and of what ends at a
    length as much crosses as a run has. NoRange where several lengths have nothing in common."""
    if goal not in GOALS:
        raise BadInput(f"unknown goal {goal!r} of a placement", "place", f"one of: {', '.join(GOALS)}")
    if len(devices) < 2:
        raise BadInput(f"a model is spread over at least two devices, not {len(devices)}", "--device")
    names, compilers = tuple(n for n, _ in devices), [c for _, c in devices]
    if at.spans and at.states:
        raise BadInput("what stays for the next run has one shape over several devices", "states", "give lengths, not ranges")
    if at.spans:
        whole = graph_of_range(compilers[0], model, at)
        graph, hosting, ranged = whole.graph, Hosting(ended=whole.ended), whole.ranged
    else:
        graph, hosting, ranged = *_lower_model(compilers[0], model, at.shapes), None
    known = links if isinstance(links, MeasuredDevices) else MeasuredDevices(links)
    between = {(k.source, k.target): k for k in known.links}
    clock = None if at.spans else known.clock  # of a range, times are those at its greatest
    spreading = Spreading(graph, compilers, names, between, hosting, goal, states=at.states, clock=clock)
    Staying(states=at.states).tensors(graph)
    best = spreading.made(graph, by_hand(place, graph, len(names)), "by hand") if place else spreading.best()
    if best is None:
        raise BadInput(f"the model cannot be cut for {len(names)} devices", f"model {graph.name}", "use fewer devices")
    return best.joined(graph.name, ranged)


def _lower_model(compiler: Compiler, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> tuple[ComputeGraph, Hosting]:
    """All of the model as tensor expressions, after all passes, and what has none."""
    with compiler.step("bind"):
        graph, rest = bind_until(model, shapes, compiler.lowerings)
    if rest is not None:
        raise BadInput(
            f"a model over several devices needs shapes that are known before it runs: {rest.why.what}",
            rest.why.where,
            rest.why.hint or "use one device",
        )
    with compiler.step("passes"):
        graph, _ = compiler.rewritten(graph, compiler.passes)
    with compiler.step("lower"):
        found, apart = lower_whole_graph(graph, compiler.lowerings)
    if not found.computes:
        raise BadInput("the model computes nothing that could be shared out", f"model {graph.name}", "use one device")
    return found, Hosting(graph, apart)


@dataclass(frozen=True)
class MadeCut:
    """A cut whose pieces are compiled. Only the one that is taken is joined and proved, which takes longer than all else."""

    parts: tuple[DevicePart, ...]
    found: Cut
    predicted: Prediction
    how: str

    def joined(self, name: str, ranged: Ranged | None = None) -> DistributedProgram:
        """All of it as one proved program, which serves a range of lengths as ``ranged`` says."""
        whole = link_programs(
            name, self.parts, self.found.transfers, self.found.inputs, self.found.outputs, self.predicted.latency
        )
        found, ports = self.found, (self.found.inputs, self.found.outputs)
        return DistributedProgram(self.parts, found.transfers, whole, *ports, self.predicted, self.how, ranged, found.states)


@dataclass
class Spreading:
    """Everything that cuts of one graph share. ``limit`` is what the best one so far is predicted to take, by the goal."""

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
        """The cut with the best prediction; the first of several."""
        best: MadeCut | None = None
        for made in self._propose_cuts():
            if made is not None and self._objective_value(made.predicted) < self.limit:
                best, self.limit = made, self._objective_value(made.predicted)
        return best

    def _objective_value(self, predicted: Prediction) -> float:
        return predicted.interval if self.goal == "throughput" else predicted.latency

    def _propose_cuts(self) -> Iterator[MadeCut | None]:
        """Each way to cut, at its best."""
        yield self._cut_pipeline()
        if not self.hosting.apart and self.hosting.ended is None:  # of these each device may have a copy; those make new tensors
            yield self._cut_wavefront()
            yield from self._cut_products()

    @property
    def costs(self) -> list[Costs]:
        """Of each device."""
        for compiler in self.compilers:
            if id(compiler) not in self._costs:
                known = self.hosting.seconds(compiler, self.graph)
                self._costs[id(compiler)] = costs_of(compiler, self.graph, known, self.hosting.ended)
        return [self._costs[id(c)] for c in self.compilers]

    def _cut_pipeline(self) -> MadeCut | None:
        """Balanced by what devices' stretches take when they are compiled: as measured, or else as predicted."""
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
        """A cut that says what its parts took, if they were measured, and what follows from that. Its own prediction stays: other
        cuts are compared with it that nobody measures."""
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
        """Stacked layers, chunk of steps by chunk."""
        graph, first = every_step(self.graph), self.compilers[0].backend.vdevice
        if graph is self.graph:
            return None
        costs = costs_of(self.compilers[0], graph)
        ways = [link_between(self.links, d, d + 1) for d in range(len(self.names) - 1)]
        chunks = chunks_worth(graph, costs.alone, len(self.names), first.launch + max(w.latency for w in ways))
        spots = assign_wavefront(graph, costs, len(self.names), chunks)
        return None if spots is None else self.made(graph, spots, f"a wavefront over layers, {chunks} chunks of steps")

    def _cut_products(self) -> Iterator[MadeCut | None]:
        """Large products in shares: those that save more than half of what an exchange takes, and those that do together with
        others between two exchanges."""
        size, seen = len(self.names), set[frozenset[str]]()
        exchange = max(link_between(self.links, a, b).latency for a in range(size) for b in range(size) if a != b)
        for saved in (exchange / 2, exchange / 32):
            made = shared_out(self.graph, self.costs[0], size, saved)
            if made is not None and frozenset(made[1]) not in seen:
                seen.add(frozenset(made[1]))
                yield self.made(*made, f"large products in {size} shares")

    def spread(self, graph: ComputeGraph, spots: Mapping[str, Spot], how: str) -> DistributedProgram | None:
        """``graph`` cut so, compiled and proved; None as ``made``."""
        made = self.made(graph, spots, how)
        return None if made is None else made.joined(graph.name)

    def made(self, graph: ComputeGraph, spots: Mapping[str, Spot], how: str) -> MadeCut | None:
        """``graph`` cut so, and compiled; None where a piece has no room on its device, or where what crosses and the launches
        alone take as long as the best cut so far."""
        apart, staying = self.hosting.apart, Staying(self.hosting.ended or STATIC, self.states)
        ended = staying.ended
        graph, spots = pack_transfers(graph, order_spots(graph, spots, apart), apart.keys() | ended.tensors.keys())
        found = cut_graph(graph, order_spots(graph, spots, apart), staying)
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
        """What no compiled form of a cut is predicted to be faster than: a step with a product takes a launch."""
        steps: list[list[StepTime]] = [[] for _ in self.names]
        for piece, (arrivals, departures) in zip(found.pieces, piece_transfers(found), strict=True):
            device, work = piece.spot.device, any(c.kind == "contraction" for c in piece.graph.computes)
            launch = self.compilers[device].backend.vdevice.launch if work else 0.0
            steps[device].append(StepTime(launch, arrivals, departures))
        return predict_lower_bound(steps, found.transfers, self.links, _result_transfers(found))

    def _parts(self, found: Cut) -> tuple[DevicePart, ...]:
        """Every piece compiled for its device."""
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
    """Steps that give back what they are the last to read, of what is ``arriving``: transfers by tensor."""
    last = {tensor: k for k, s in enumerate(steps) for tensor in s.inputs if tensor in arriving}
    frees: list[list[str]] = [[] for _ in steps]
    for tensor, name in arriving.items():
        if tensor in last:
            frees[last[tensor]].append(name)
    return tuple(replace(s, frees=tuple(f)) for s, f in zip(steps, frees, strict=True))
