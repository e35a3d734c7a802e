"""Operators without a tensor expression: loops with equal iterations as a loop program, all others on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rammer.compiled.segments import HostSegment, ProgramSegment, Segment
from rammer.compiler.subgraphs import SubgraphIndex
from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput
from rammer.frontend.bind.loop_body import bound_turn, rolled_turn
from rammer.frontend.bind.partition import split_segments
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.loops.loop_chunk import STATES
from rammer.frontend.lower.graph_lowering import Lowerings
from rammer.ir.graph import Graph, Node
from rammer.passes.loops.chunk_loop import static_chunk
from rammer.plan.loop_program import repeat_program, turn_ports
from rammer.verify.verifier import verify


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
        program = repeat_program(made.program, turn_ports(turn, made.program), graph.types, graph.constants)
        verify(program)
        first = {name: graph.constants[name] for name in program.moved_constants}
        return replace(made, program=program, constants={**made.constants, **first}, compute=None)


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
