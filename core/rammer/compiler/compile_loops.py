"""Compilation of loops with equal iterations as loop programs, and of models for a range of lengths.

A range is one program, or several if the steps of recurrent layers depend on a length. One of several is then a loop program. The
parts before and after the recurrent layers are ranged programs as for any other model. One iteration of the layers is compiled
once, for the greatest values of all other lengths. Its trip count follows from the length of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rammer.compiled.segments import HostSegment, ProgramSegment, Segment
from rammer.device.custom_operators import CustomOperators
from rammer.device.manifest import IterationCost
from rammer.errors import BadInput
from rammer.frontend.bind.loop_body import RolledTurn, bound_turn, is_turns, rolled_turn
from rammer.frontend.bind.partition import SubgraphIndex, split_segments
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.loop_chunk import STATES
from rammer.frontend.lower.graph_lowering import Lowerings, lower
from rammer.frontend.ranges.anti_unify import begins_alike, generalise_programs
from rammer.frontend.ranges.kv_cache import Appended, append_in_place
from rammer.frontend.ranges.length_fit import LengthFit
from rammer.frontend.ranges.range_bounds import RangeBounds, interleave_tasks
from rammer.ir.compute import ComputeGraph
from rammer.ir.extent import AffineExtent, Dim, NoRange, Point, Ranged
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.names import Names
from rammer.ir.program import Port
from rammer.ir.types import TensorType
from rammer.passes.loops.chunk_loop import static_chunk
from rammer.passes.loops.dynamic_recurrent import OpenStack, open_loops, size_of, split_layers
from rammer.plan.loop_program import repeat_program, turn_ports
from rammer.verify.verifier import verify


@dataclass(frozen=True)
class DynamicSteps:
    """The compiler's functions for graphs: passes without those that depend on extents (``ranged``) or all, and compilation."""

    lowerings: Lowerings
    rewritten: Callable[[Graph, bool], Graph]
    program: Callable[[ComputeGraph, tuple[Port, ...], tuple[Port, ...], RangeBounds | None], ProgramSegment]
    between: IterationCost | None  #: Cost between two iterations, or None if the device does not repeat programs.


@dataclass(frozen=True)
class Opened:
    """The graph of the greatest lengths, its programs in order, and their use at all lengths."""

    graph: Graph
    segments: tuple[ProgramSegment, ...]
    ranged: Ranged


def in_common(
    fit: LengthFit, computes: Sequence[ComputeGraph], wanted: Mapping[str, str] | None
) -> tuple[Appended, Ranged, RangeBounds]:
    """Return the common program of all points of ``fit``. Outputs of ``wanted`` (output: input) are stored in place over their
    inputs where possible. None: all inputs hold zeros beyond the lengths. Raises MoreProbes if further points are needed."""
    if wanted is None:
        made = generalise_programs(fit, computes)
        fit.settle()
        return Appended(made.graph), made.ranged, made.ended
    while True:  # inputs without an alias are not guaranteed to be padded
        made = generalise_programs(fit, computes, frozenset(wanted.values()))
        fit.settle()
        found = append_in_place(made.graph, wanted, made.ranged)
        if found.kept == wanted:
            return found, made.ranged, made.ended
        wanted = dict(found.kept)


def check_one(graph: Graph, lowerings: Lowerings) -> None:
    """Raise NoRange unless all of a graph is one program."""
    found = split_segments(graph, lowerings)
    hosted = next((f"{nodes[0].op} runs on the host: {why}" for nodes, why in found if why), "")
    if hosted or len(found) != 1:
        raise NoRange(hosted or "the graph does not compile to a single program", f"graph {graph.name}")


def open_layers(fit: LengthFit, graphs: Sequence[Graph]) -> dict[str, AffineExtent]:
    """Return the recurrent layers whose steps differ between the points of ``fit``, with the steps as a function of the lengths.
    Keys are their first results after splitting into one direction each. Raises NoRange without a common function."""
    found = [split_layers(g)[1] for g in graphs]
    if any(f.keys() != found[0].keys() for f in found):
        raise NoRange("recurrent layers differ between lengths", f"graph {graphs[0].name}")
    steps = {n: fit.extent([f[n] for f in found], f"the steps of {n}") for n in found[0]}
    return {n: extent for n, extent in steps.items() if isinstance(extent, AffineExtent)}


def open_programs(fit: LengthFit, extents: Mapping[str, AffineExtent], graphs: Sequence[Graph], steps: DynamicSteps) -> Opened:
    """Return the programs of graphs with ``open_layers`` of these ``extents``. Raises NoRange without programs for all
    lengths."""
    between = steps.between
    if between is None:
        what = "the steps of recurrent layers depend on a length, and the device does not support loop programs"
        raise NoRange(what)
    ahead = [split_layers(g)[0] for g in graphs]
    sizes = {n: size_of(ahead[0], n, (fit.least(e), fit.values(e)[0]), _is_single_length(e), between) for n, e in extents.items()}
    same = {n for n in ahead[0].constants if begins_alike([g.constants.get(n) for g in ahead])}
    made = [open_loops(g, sizes, same) for g in ahead]
    stacks = [{s.node.outputs: s for s in found} for _, found in made]
    if any(s.keys() != stacks[0].keys() for s in stacks):
        raise NoRange("recurrent layers differ between lengths", f"graph {graphs[0].name}")
    opening = _Opening(fit, [g for g, _ in made], stacks, steps)
    return opening.result({n: (extents[n], size.turn) for n, size in sizes.items()})


def _is_single_length(extent: AffineExtent) -> bool:
    """Return True if the extent is a length itself."""
    return not extent.offset and [f for _, f in extent.terms] == [1]


class _Opening:
    """Programs under construction: ``graphs`` and ``stacks`` are those of the points of ``fit``."""

    def __init__(
        self, fit: LengthFit, graphs: Sequence[Graph], stacks: Sequence[Mapping[tuple[str, ...], OpenStack]], steps: DynamicSteps
    ) -> None:
        self.fit, self.points, self.graphs, self.stacks, self.steps = fit, fit.points, graphs, stacks, steps
        fit.name_inputs(Names(n for g in graphs for n in g.types))
        self.lengths = fit.lengths

    def result(self, sizes: Mapping[str, tuple[AffineExtent, int]]) -> Opened:
        """Return all programs; ``sizes`` are the steps of a layer and of its iteration."""
        first, cuts = self.graphs[0], [split_segments(g, self.steps.lowerings) for g in self.graphs]
        hosted = next((why for nodes, why in cuts[0] if why and not is_turns(nodes[0])), "")
        forms = [[nodes[0].outputs if why else () for nodes, why in cut] for cut in cuts]
        if hosted or any(f != forms[0] for f in forms):
            raise NoRange(hosted or "the parts between recurrent layers differ", f"graph {first.name}")
        uses, made = [SubgraphIndex(g) for g in self.graphs], list[ProgramSegment]()
        for number, (nodes, why) in enumerate(cuts[0]):
            if why:
                made.append(self._turns(nodes[0], *sizes[self.stacks[0][nodes[0].outputs].layer]))
            else:
                parts = [u.subgraph(cut[number][0], number) for u, cut in zip(uses, cuts, strict=True)]
                made.append(self._part(parts))
        shapes = {v.name: self._affine_dims(v.name) for v in (*first.inputs, *first.outputs)}
        self.fit.settle()
        lengths = tuple(Value(t, TensorType("int64", ()), f"length of {d}") for d, t in self.lengths.items())
        ranged = Ranged(dict(self.lengths), shapes, formulas=dict(self.fit.formulas))
        return Opened(replace(first, inputs=(*first.inputs, *lengths)), tuple(made), ranged)

    def _affine_dims(self, name: str) -> tuple[Dim, ...]:
        """Return the shape of a value as a function of the lengths."""
        if name in self.graphs[0].constants and name in {v.name for v in self.graphs[0].outputs}:
            raise NoRange(f"output {name} is a constant")
        if any(name not in g.types for g in self.graphs):
            raise NoRange(f"{name} is computed at some lengths only")
        shapes = [g.types[name].shape for g in self.graphs]
        if len({len(s) for s in shapes}) != 1:
            raise NoRange(f"the rank of {name} changes between lengths")
        return tuple(self.fit.extent(extents, f"the shape of {name}") for extents in zip(*shapes, strict=True))

    def _part(self, parts: Sequence[Graph]) -> ProgramSegment:
        """Compile a part without recurrent layers for all points. Results of other programs are undefined beyond the lengths."""
        given = {v.name for v in self.graphs[0].inputs}
        computes = [lower(g, self.steps.lowerings, ranged=True) for g in parts]
        made = generalise_programs(self.fit, computes, given & {*computes[0].inputs})
        self.fit.settle()
        ports = (*ports_of(parts[0].inputs), *(Port(f"length of {d}", t) for d, t in self.lengths.items()))
        segment = self.steps.program(made.graph, ports, ports_of(parts[0].outputs), made.ended)
        return replace(segment, program=interleave_tasks(segment.program))

    def _turns(self, node: Node, extent: AffineExtent, step: int) -> ProgramSegment:
        """Compile recurrent layers of ``extent`` steps, with ``step`` steps in an iteration."""
        told = [(i, t) for i, s in enumerate(self.stacks) if (t := s[node.outputs].turn) is not None]
        turn, first, steps = told[0][1], self.graphs[0], self.stacks[0][node.outputs].steps
        if len(told) == len(self.points):
            rest = self._iteration_lengths(node, turn)
            fixed = [i for i, p in enumerate(self.points) if all(p[d] == self.points[0][d] for d in p if d not in rest)]
            told = [(i, t) for i, t in told if i in fixed]
        else:
            rest = self._other_lengths(node, extent, [i for i, _ in told])
        places, names = [i for i, _ in told], {d: f"turn_{t}" for d, t in self.lengths.items() if d in rest}
        segment = self._turn(
            [(self.graphs[i], t) for i, t in told], [{d: self.points[i][d] for d in rest} for i in places], names
        )
        ports = turn_ports(turn, segment.program)
        given = [(i, self.lengths[extent.terms[0][0]] if v == steps and _is_single_length(extent) else v) for i, v in ports.fixed]
        ports = replace(ports, fixed=(*given, *((names[d], self.lengths[d]) for d in names)))
        types = {**first.types, **{t: TensorType("int64", ()) for t in self.lengths.values()}}
        until = replace(extent, terms=tuple((self.lengths[d], f) for d, f in extent.terms))
        return _repeat_segment(segment, ports, types, first.constants, until, step)

    def _iteration_lengths(self, node: Node, turn: RolledTurn) -> list[str]:
        """Return the lengths that an iteration depends on, besides the number of steps."""
        found, along = set[str](), {v for _, v, _ in (*turn.slices, *turn.gathered)}
        for name in filter(None, (*node.inputs, *node.outputs)):
            dims = self._affine_dims(name)[name in along :]
            found.update(d for dim in dims if isinstance(dim, AffineExtent) for d, _ in dim.terms)
            if not begins_alike([g.constants.get(name) for g in self.graphs]):
                found.update(self.points[0])
        return [d for d in self.points[0] if d in found]

    def _other_lengths(self, node: Node, extent: AffineExtent, places: Sequence[int]) -> list[str]:
        """Return the other lengths that an iteration depends on, which differ between the points at ``places``."""
        found = [d for d in self.points[0] if len({self.points[i][d] for i in places}) > 1]
        for name in (*(i for i in node.inputs if i), *node.outputs):
            for dim in self._affine_dims(name):
                if isinstance(dim, AffineExtent) and dim != extent and not {d for d, _ in dim.terms} <= {*found}:
                    raise NoRange(f"the shape of {name} changes with the steps of a recurrent layer")
        return found

    def _turn(
        self, told: Sequence[tuple[Graph, RolledTurn]], points: Sequence[Point], names: Mapping[str, str]
    ) -> ProgramSegment:
        """Return the program of one iteration for all ``points``; ``names`` are those of their lengths in it."""
        parts = list[Graph]()
        for graph, turn in told:
            try:
                bound = self.steps.rewritten(bound_turn(turn, graph, self.steps.lowerings), bool(names))
                (nodes, why), *others = split_segments(bound, self.steps.lowerings)
            except BadInput as problem:
                raise NoRange(problem.what, problem.where) from problem
            if why or others:
                raise NoRange(why or "an iteration of recurrent layers does not compile to a single program")
            parts.append(SubgraphIndex(bound).subgraph(nodes, 0))
        computes = [lower(g, self.steps.lowerings, ranged=bool(names)) for g in parts]
        whole = computes[0]
        if names:
            fit = LengthFit(points, lengths=dict(names))
            whole = generalise_programs(fit, computes, ()).graph
            if fit.formulas or not fit.is_settled:
                raise NoRange("an iteration of recurrent layers depends on a derived length")
        ports = (*ports_of(parts[0].inputs), *(Port(t, t) for t in names.values()))
        return self.steps.program(whole, ports, ports_of(parts[0].outputs), None)


def ports_of(values: Sequence[Value]) -> tuple[Port, ...]:
    """Return the ports of a program with these inputs or outputs."""
    return tuple(Port(v.external or v.name, v.name) for v in values)


@dataclass(frozen=True)
class LoopSteps:
    """The compiler's functions for the graph of an iteration: all passes, and compilation to a program."""

    lowerings: Lowerings
    rewritten: Callable[[Graph], Graph]
    segment: Callable[[Graph], ProgramSegment]

    def all_turns(self, graph: Graph, node: Node) -> ProgramSegment:
        """Return the iterations of a Scan or Loop as one program. Raises BadInput if an iteration is not one program."""
        if node.op == "Scan" and _many_steps(node):
            turn = rolled_turn(graph, node)
        else:
            graph, turn = static_chunk(graph, node)
        bound = self.rewritten(bound_turn(turn, graph, self.lowerings))
        (nodes, why), *others = split_segments(bound, self.lowerings)
        if why or others:
            raise BadInput(why or "a part of an iteration runs on the host")
        made = self.segment(SubgraphIndex(bound).subgraph(nodes, 0))
        return _repeat_segment(made, turn_ports(turn, made.program), graph.types, graph.constants)


def _repeat_segment(
    segment: ProgramSegment,
    ports: RolledTurn,
    types: Mapping[str, TensorType],
    known: Mapping[str, np.ndarray],
    until: AffineExtent | None = None,
    step: int = 1,
) -> ProgramSegment:
    """Return the segment of all iterations, given that of one (``plan.loop_program.repeat_program``). The program is verified."""
    program = repeat_program(segment.program, ports, types, known, until, step)
    verify(program)
    constants = {name: known[name] for name in program.moved_constants}
    return replace(segment, program=program, constants={**segment.constants, **constants}, compute=None)


def _many_steps(node: Node) -> bool:
    """Return True if an iteration has recurrent layers, as those of pass ``roll`` do. Lighter iterations are chunked."""
    return any(n.op_type in STATES for n in graph_of(node.attributes["body"]).node)


def make_fallback_segment(graph: Graph, node: Node, why: str, steps: LoopSteps | None, custom: CustomOperators) -> Segment:
    """Return the segment of an operator without a tensor expression, for the reason ``why``. ``steps`` is set for devices that
    repeat programs."""
    if steps is not None and node.op in ("Scan", "Loop") and not node.domain:
        try:
            return steps.all_turns(graph, node)
        except BadInput as problem:
            why += f"; it does not compile to a loop program: {problem.what}"
    return HostSegment(HostNode.of(graph, node, custom), why)
