"""The steps of a cut: pieces of tensor expressions as programs, and nodes apart as what their device makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rammer.compiled.host_node import HostNode
from rammer.compiled.segments import HostSegment, Segment
from rammer.compiler.compiler import Compiler
from rammer.distributed.distributed_program import DeviceStep
from rammer.distributed.partition.host_steps import NodeApart, outline_program
from rammer.distributed.partition.operator_cost import on_its_own
from rammer.frontend.ranges.range_bounds import Ended, interleave_tasks
from rammer.ir.compute import ComputeGraph
from rammer.ir.graph import Graph

__all__ = ["Hosting"]

#: What an operator on the host is taken to need, where nobody has measured: seconds, and bytes a second.
ASSUMED: Final = (2e-5, 2e9)


@dataclass(frozen=True)
class Renamed:
    """An operator on the host whose operands have other names where it runs: of what has no elements each device has its own."""

    node: HostNode
    names: Mapping[str, str]

    @property
    def title(self) -> str:
        """The node's."""
        return self.node.title

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by the node's names."""
        return self.node.run({n: inputs[there] for n, there in self.names.items()})

    def to_bytes(self) -> bytes:
        """The node's, and the names."""
        return self.node.to_bytes() + repr(sorted(self.names.items())).encode()


@dataclass
class Hosting:
    """The nodes of ``graph`` that are no tensor expressions, by the tensors that they make; each is compiled once a device.
    Of a range of lengths there are none, and what is ``ended``."""

    graph: Graph | None = None
    apart: Mapping[str, NodeApart] = field(default_factory=dict)
    ended: Ended | None = None
    _made: dict[tuple[int, int], Segment] = field(default_factory=dict)

    def step(self, compiler: Compiler, piece: ComputeGraph) -> DeviceStep:
        """What computes ``piece``, all of which is apart or nothing. DeviceFailure where the device has no room for it."""
        first = self.apart.get(piece.computes[0].name)
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
        """What each Compute apart is predicted to take on a device: of a node all at its first one."""
        result, seen = dict[str, float](), set[int]()
        for c in graph.computes:
            node = self.apart.get(c.name)
            if node is not None:
                result[c.name] = 0.0 if id(node) in seen else self._segment_seconds(self._compile_segment(compiler, node), graph)
                seen.add(id(node))
        return result

    def _compile_segment(self, compiler: Compiler, apart: NodeApart) -> Segment:
        key = id(compiler), id(apart)
        if key not in self._made:
            assert self.graph is not None
            self._made[key] = compiler.apart(self.graph, apart.node, apart.why)
        return self._made[key]

    @staticmethod
    def _segment_seconds(segment: Segment, graph: ComputeGraph) -> float:
        if not isinstance(segment, HostSegment):
            return segment.program.predicted
        kinds = [*segment.node.types.values(), *(graph.types[n] for n in segment.node.inputs if n in graph.types)]
        return ASSUMED[0] + sum(t.nbytes for t in kinds) / ASSUMED[1]
