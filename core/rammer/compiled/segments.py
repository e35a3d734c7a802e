"""Segments: a compiled model as an ordered list of device programs and host operators."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from rammer.device.manifest import Backend, Binding, MachineCode
from rammer.ir.compute import ComputeGraph
from rammer.ir.constants.mapped_files import in_memory
from rammer.ir.constants.recipes import Constants, Contents, as_array
from rammer.ir.extent import Ranged
from rammer.ir.graph import Graph, Node
from rammer.ir.operator import RKernel
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType

if TYPE_CHECKING:
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner
    from rammer.fusion.tile_graph import TileGraph
    from rammer.passes.pass_pipeline import PassReport


class HostOperator(Protocol):
    """An operator that runs on the host (``rammer.frontend.host.host_node.HostNode``)."""

    @property
    def node(self) -> Node:
        """The operator as a graph node."""
        ...

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that it reads; "" for an absent one."""
        ...

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Types of its outputs, by tensor name."""
        ...

    def run(
        self, inputs: Mapping[str, np.ndarray], bodies: BodyRunner | None = None, constants: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Return the outputs by tensor name. ``bodies`` runs those of control flow, ``constants`` are the inputs that every run
        has."""
        ...

    def to_bytes(self) -> bytes:
        """Return the serialised form."""
        ...


@dataclass(frozen=True)
class Cases:
    """Length variants of a program: ``tables[i]`` runs up to ``until[i]`` (ascending) of the scalar input ``length``. Each is
    valid at all lengths, with the program's ports and constants."""

    length: str
    until: tuple[int, ...]
    tables: tuple[RProgram, ...]

    def at(self, value: int) -> int:
        """Return the number of the table for this length; ``len(tables)`` is the program."""
        return bisect_left(self.until, value)


@dataclass(frozen=True)
class ProgramSegment:
    """A part of the model that runs on the device, with every step of its compilation (None when reloaded). ``choice`` is the
    reason for its policy if several were tried. ``cases`` run at shorter lengths of a range. ``passes`` are the calls
    that changed its tensor expressions. ``code`` is the machine code of each of its ``tables``, if a trusted file has it."""

    program: RProgram
    constants: Mapping[str, np.ndarray]
    compute: ComputeGraph | None = None
    tile: TileGraph | None = None
    kernels: Mapping[str, tuple[RKernel, ...]] = field(default_factory=dict)
    choice: str = ""
    cases: Cases | None = None
    passes: tuple[PassReport, ...] = ()
    code: tuple[MachineCode, ...] = ()

    @property
    def tables(self) -> tuple[RProgram, ...]:
        """The program and its length variants."""
        return (self.program, *(self.cases.tables if self.cases is not None else ()))

    def with_contents(self, contents: Contents) -> ProgramSegment:
        """Return the segment with constants replaced by equal ones in ``contents``."""
        constants, compute, tile = contents.of(self.constants), self.compute, self.tile
        if compute is not None:
            compute = replace(compute, constants=contents.of(compute.constants))
        if tile is not None:
            tile = replace(tile, graph=replace(tile.graph, constants=contents.of(tile.graph.constants)))
        return replace(self, constants=constants, compute=compute, tile=tile)

    def busy_time(self) -> float:
        """Return the vEU seconds that the kernels of all tasks take together."""
        made = {o: k for kernels in self.kernels.values() for k in kernels for o in (k.operator,)}
        return sum(made[o].busy_time() for o in self.program.operators if o in made)


@dataclass(frozen=True)
class HostSegment:
    """An operator without a tensor expression, run on the host and shown with the reason ``why``."""

    node: HostOperator
    why: str


Segment: TypeAlias = "ProgramSegment | HostSegment"


@dataclass(frozen=True)
class Compiled:
    """A model specialised to input shapes and a device.

    ``passes`` are the calls that changed the graph, ``seconds`` the time of each step. ``rest`` is compiled when the segments
    have computed the graph's outputs, which it needs. ``ranged`` describes how a program for the longest of a range, whose shapes
    the graph has, serves other lengths. ``float32`` lists the operators that precision float16 left in float32, with the reasons.
    ``read_types`` are ``node_types`` of a model read from a file, whose graph has no nodes."""

    graph: Graph
    segments: tuple[Segment, ...]
    passes: tuple[PassReport, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    rest: DeferredModel | None = None
    ranged: Ranged | None = None
    float32: tuple[str, ...] = ()
    read_types: Mapping[str, str] = field(default_factory=dict)

    @property
    def node_types(self) -> Mapping[str, str]:
        """The ONNX operator types of the nodes that programs compute, by node name."""
        known = {**self.read_types, **{n.name: n.op for n in self.graph.nodes}}
        computed = {c.origin for p in self.programs for o in p.operators for c in o.computes}
        return {name: op for name, op in known.items() if name in computed}

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host."""
        return [s for s in self.segments if isinstance(s, HostSegment)]

    @property
    def programs(self) -> list[RProgram]:
        """The device programs in order."""
        return [s.program for s in self.segments if isinstance(s, ProgramSegment)]

    @property
    def tables(self) -> list[RProgram]:
        """The programs and their length variants."""
        return [t for s in self.segments if isinstance(s, ProgramSegment) for t in s.tables]


def host_needs(compiled: Compiled) -> set[str]:
    """Return the constants that host operators read or that are outputs themselves."""
    needed = {n for s in compiled.segments if isinstance(s, HostSegment) for n in s.node.inputs}
    return needed | {v.name for v in compiled.graph.outputs}


def with_contents(compiled: Compiled, contents: Contents) -> Compiled:
    """Return ``compiled`` with constants replaced by equal ones in ``contents``. Constants of ``host_needs`` are also copied to
    memory: a file may be written to later."""
    segments = tuple(s.with_contents(contents) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    needed, held = host_needs(compiled), contents.of(compiled.graph.constants)
    constants = Constants({n: in_memory(as_array(p)) if n in needed else p for n, p in held.parts.items()})
    return replace(compiled, graph=replace(compiled.graph, constants=constants), segments=segments)


def with_code(compiled: Compiled, backend: Backend) -> Compiled:
    """Return ``compiled`` with the machine code of all programs for the opened device. Raises DeviceFailure if it has none."""

    def exported(segment: ProgramSegment) -> ProgramSegment:
        return replace(segment, code=tuple(backend.export_code(t, segment.constants) for t in segment.tables))

    segments = (exported(s) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def without_code(compiled: Compiled) -> Compiled:
    """Return ``compiled`` without machine code."""
    segments = (replace(s, code=()) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def with_needs(compiled: Compiled, backend: Backend) -> Compiled:
    """Return ``compiled`` with the resources of every candidate kernel as the device's compiler reports them. They are threads,
    registers and local memory. Raises DeviceFailure if a kernel cannot be compiled."""
    segments = (_known(s, backend) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def _known(segment: ProgramSegment, backend: Backend) -> Segment:
    binding, profiler = Binding.of(segment.program, segment.constants), backend.profiler
    profiler.prepare([(k.operator, binding) for kernels in segment.kernels.values() for k in kernels])
    kernels = {
        name: tuple(replace(k, compiled=profiler.resources(k, binding)) for k in kernels)
        for name, kernels in segment.kernels.items()
    }
    return replace(segment, kernels=kernels)
