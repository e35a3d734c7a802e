"""Steps of a cut: pieces of tensor expressions compiled to programs, and host nodes compiled for their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rammer.compiled.segments import HostSegment, Segment
from rammer.compiler.compiler import Compiler
from rammer.distributed.distributed_program import DeviceStep
from rammer.distributed.partition.host_steps import UnloweredNode, outline_program
from rammer.distributed.partition.operator_cost import on_its_own
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.ranges.range_bounds import RangeBounds, interleave_tasks
from rammer.ir.compute import ComputeGraph
from rammer.ir.graph import Graph

__all__ = ["Hosting"]

#: Assumed cost of an unmeasured host operator: seconds, and bytes a second.
ASSUMED: Final = (2e-5, 2e9)


@dataclass(frozen=True)
class Renamed:
    """A host operator with renamed operands: each device has a separate copy of tensors without elements."""

    node: HostNode
    names: Mapping[str, str]

    @property
    def title(self) -> str:
        """The title of the node."""
        return self.node.title

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the node and return its outputs by the node's names."""
        return self.node.run({n: inputs[there] for n, there in self.names.items()})

    def to_bytes(self) -> bytes:
        """Return the serialised node and the names."""
        return self.node.to_bytes() + repr(sorted(self.names.items())).encode()


@dataclass
class Hosting:
    """The nodes of ``graph`` without tensor expressions, by the tensors that they write; each is compiled once a device. For a
    range of lengths the mapping is empty, and ``ended`` describes the masked tensors."""

    graph: Graph | None = None
    host_nodes: Mapping[str, UnloweredNode] = field(default_factory=dict)
    ended: RangeBounds | None = None
    _made: dict[tuple[int, int], Segment] = field(default_factory=dict)

    def step(self, compiler: Compiler, piece: ComputeGraph) -> DeviceStep:
        """Compile a step for ``piece``, which consists of host nodes entirely or not at all. Raises DeviceFailure if memory does
        not suffice."""
        first = self.host_nodes.get(piece.computes[0].name)
        if first is None:
            segment = on_its_own(compiler, piece, self.ended)
            program = segment.program if self.ended is None else interleave_tasks(segment.program)
            return DeviceStep(program, segment.constants)
        found, reads = self._compile_segment(compiler, first), [n for n in dict.fromkeys(first.node.inputs) if n]
        table = outline_program(piece, self._segment_seconds(found, piece), compiler.options.precision)
        names = dict(zip(reads, piece.computes[0].reads, strict=True))
        if isinstance(found, HostSegment):
            assert isinstance(found.node, HostNode)
            return DeviceStep(table, piece.constants, outline=table, host=Renamed(found.node, names))
        inputs = tuple(replace(p, external=names.get(p.external, p.external)) for p in found.program.inputs)
        return DeviceStep(replace(found.program, inputs=inputs), found.constants, outline=table)

    def seconds(self, compiler: Compiler, graph: ComputeGraph) -> dict[str, float]:
        """Return the predicted seconds of each host node on a device, assigned to its first Compute."""
        result, seen = dict[str, float](), set[int]()
        for c in graph.computes:
            node = self.host_nodes.get(c.name)
            if node is not None:
                result[c.name] = 0.0 if id(node) in seen else self._segment_seconds(self._compile_segment(compiler, node), graph)
                seen.add(id(node))
        return result

    def _compile_segment(self, compiler: Compiler, host_nodes: UnloweredNode) -> Segment:
        key = id(compiler), id(host_nodes)
        if key not in self._made:
            assert self.graph is not None
            self._made[key] = compiler.host_segment(self.graph, host_nodes.node, host_nodes.why)
        return self._made[key]

    @staticmethod
    def _segment_seconds(segment: Segment, graph: ComputeGraph) -> float:
        if not isinstance(segment, HostSegment):
            return segment.program.predicted
        kinds = [*segment.node.types.values(), *(graph.types[n] for n in segment.node.inputs if n in graph.types)]
        return ASSUMED[0] + sum(t.nbytes for t in kinds) / ASSUMED[1]
