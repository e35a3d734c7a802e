"""Cost of each tensor expression on a device: the kernel times of the whole program, distributed over its Computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.distributed.partition.host_steps import remove_host_nodes
from rammer.errors import DeviceFailure
from rammer.frontend.ranges.range_bounds import RangeBounds
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.program import Port

__all__ = ["Costs", "costs_of", "make_ports", "on_its_own"]

NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True)
class Costs:
    """Seconds by Compute on one device, and seconds ``alone`` of the whole program there (0 if it does not fit). ``interior`` are
    the tensors inside fused operators of that program: a cut there would undo the fusion."""

    seconds: Mapping[str, float]
    alone: float
    interior: frozenset[str]


def make_ports(names: tuple[str, ...]) -> tuple[Port, ...]:
    """Return ports with the names of the tensors."""
    return tuple(Port(n, n) for n in names)


def on_its_own(compiler: Compiler, graph: ComputeGraph, ended: RangeBounds | None = None) -> ProgramSegment:
    """Compile ``graph`` as a separate program, for a range if ``ended`` is given. Raises DeviceFailure if memory does not
    suffice."""
    return compiler.program(graph, make_ports(graph.inputs), make_ports(graph.outputs), ended)


def costs_of(
    compiler: Compiler, graph: ComputeGraph, known: Mapping[str, float] = NOTHING, ended: RangeBounds | None = None
) -> Costs:
    """Return predicted costs, or measured ones if the compiler measures. A graph too large for one device is priced by its
    operations and bytes. ``known`` are the seconds of host nodes. With ``ended``, a range is priced at its greatest lengths."""
    if known:
        rest = remove_host_nodes(graph, known)
        costs = costs_of(compiler, rest) if rest.computes else Costs({}, sum(known.values()), frozenset())
        return Costs({**costs.seconds, **known}, costs.alone and costs.alone + sum(known.values()), costs.interior)
    plain = replace(compiler, options=replace(compiler.options, batching="off"))
    try:
        segment = on_its_own(plain, graph, ended)
    except DeviceFailure:
        return Costs({c.name: _roofline_seconds(c, graph, compiler.backend.vdevice) for c in graph.computes}, 0.0, frozenset())
    return Costs(_shared_out(segment, graph, compiler.backend.vdevice), segment.program.predicted, _interior_tensors(segment))


def _roofline_seconds(c: Compute, graph: ComputeGraph, device: VDevice) -> float:
    moved = c.type.nbytes + sum(graph.types[n].nbytes for n in c.reads)
    return max(c.flops / (device.flops * device.veus), moved / device.layer("veu").bandwidth)


def _shared_out(segment: ProgramSegment, graph: ComputeGraph, device: VDevice) -> dict[str, float]:
    """Distribute each operator's seconds over its Computes by operations; the total is the program's time. The time of Computes
    that compilation created (steps and parts of products) is distributed over the Computes that it removed."""
    known, result, loose = graph.producers, dict[str, float](), 0.0
    for name, kernels in segment.kernels.items():
        if name not in segment.program.operator:
            continue
        operator, seconds = kernels[0].operator, kernels[0].operator_time(device.veus)
        mine = [c for c in operator.computes if c.name in known]
        if not mine:
            loose += seconds
        weights = _flop_weights(mine)
        result |= {c.name: seconds * w for c, w in zip(mine, weights, strict=True)}
    rest = [c for c in graph.computes if c.name not in result and loose]
    result |= {c.name: loose * w for c, w in zip(rest, _flop_weights(rest), strict=True)}
    scale = segment.program.predicted / (sum(result.values()) or 1.0)
    return {c.name: result.get(c.name, 0.0) * scale for c in graph.computes}


def _flop_weights(computes: list[Compute]) -> list[float]:
    total = sum(c.flops for c in computes)
    return [c.flops / total if total else 1 / len(computes) for c in computes]


def _interior_tensors(segment: ProgramSegment) -> frozenset[str]:
    operators = segment.program.operators
    return frozenset(c.name for o in operators for c in o.computes) - {t for o in operators for t in o.outputs}
