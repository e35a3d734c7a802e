"""Execution of passes to a fixed point. Every result is verified, and a failure names the pass that broke the graph."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from rammer.errors import RammerError, attribute_errors
from rammer.ir.compute import ComputeGraph, verify_compute_graph
from rammer.ir.device import VDevice
from rammer.ir.graph import Graph, verify_graph
from rammer.passes.compute.blocked_scan import scan_in_blocks
from rammer.passes.compute.copy_rows import copy_rows
from rammer.passes.compute.group_norm_epilogue import in_rows
from rammer.passes.compute.inline_maps import inline_conditions, inline_decodings
from rammer.passes.compute.pad_channels import pad_channels
from rammer.passes.compute.rfactor import split_deep
from rammer.passes.compute.simplify import simplify_graph
from rammer.passes.compute.slice_time_steps import slice_steps
from rammer.passes.graph.cancel_transposes import CancelTransposes
from rammer.passes.graph.cse import CommonSubexpressions
from rammer.passes.graph.dce import DeadCode
from rammer.passes.graph.fold_affine import FoldAffine
from rammer.passes.graph.fold_constants import FoldConstants
from rammer.passes.graph.fold_scales import FoldScales
from rammer.passes.graph.fuse_group_norm import FuseGroupNorm
from rammer.passes.graph.fuse_qdq_products import FuseQdqProducts
from rammer.passes.graph.propagate_quantization import PropagateQuantization
from rammer.passes.graph.remove_identity import RemoveIdentity
from rammer.passes.graph.sink_reshapes import SinkReshapes
from rammer.passes.graph.weight_only_quant import WeightOnlyQuant
from rammer.passes.loops.chunk_recurrent import ChunkRecurrent

__all__ = ["AnyPass", "ComputePass", "ComputeTarget", "Pass", "PassError", "PassReport", "Pipeline", "default_passes"]


#: Passes whose result depends on exact extents: a full slice at one length is a partial slice at others.
OF_EXTENTS: Final = (FoldConstants.name, RemoveIdentity.name, ChunkRecurrent.name)
#: Passes that merge equal nodes: extents that coincide at one length may differ at others.
OF_EQUALS: Final = (CommonSubexpressions.name,)
#: The pass that copies rows for products that compute rows before them.
COPY: Final = "copy_rows"
#: Passes that do not run if tasks have masks: they would move a map from the axes of its mask, or copy a masked one.
OF_MASKS: Final = ("group_norm_epilogue", COPY)
#: The pass that merges independent products. Passes after it prepare each program, also a part that is priced.
BATCH: Final = "batch_products"
_G = TypeVar("_G", Graph, ComputeGraph)


@runtime_checkable
class Pass(Protocol):
    """An immutable rewrite. ``str`` is its spelling; a call returns the graph itself if it changes nothing."""

    name: ClassVar[str]

    def __call__(self, graph: Graph) -> Graph:
        """Return the rewritten graph."""

    def __str__(self) -> str: ...


@runtime_checkable
class Explaining(Protocol):
    """A pass that explains which operators it leaves unchanged."""

    def explained(self, graph: Graph) -> tuple[Graph, tuple[str, ...]]:
        """Return the rewritten graph, and lines for the report."""


@dataclass(frozen=True, slots=True)
class ComputeTarget:
    """The device for which Computes are rewritten, the function of the compiler that batches products by price, and True if
    kernels of the device compute rows before a product of few rows (``rows``)."""

    device: VDevice
    batch: Callable[[ComputeGraph], ComputeGraph] = lambda graph: graph
    rows: bool = False


@dataclass(frozen=True, slots=True)
class ComputePass:
    """A named rewrite of tensor expressions. ``rewrite`` returns the graph itself if it changes nothing."""

    name: str
    rewrite: Callable[[ComputeGraph, ComputeTarget], ComputeGraph] = field(compare=False)

    def __call__(self, graph: ComputeGraph, target: ComputeTarget) -> ComputeGraph:
        """Return the rewritten graph."""
        return self.rewrite(graph, target)

    def __str__(self) -> str:
        return self.name


#: A pass of either language.
AnyPass: TypeAlias = Pass | ComputePass


@dataclass(frozen=True, slots=True)
class PassReport:
    """Record of one pass call: nodes (or Computes) and constants before and after, its time (seconds), and explained
    exceptions. ``changes`` is the difference in the number of operators of each type, for types whose number changed."""

    spelling: str
    nodes_before: int
    nodes_after: int
    constants_before: int
    constants_after: int
    seconds: float = field(default=0.0, compare=False)
    details: tuple[str, ...] = ()
    changes: tuple[tuple[str, int], ...] = ()
    unit: str = "nodes"

    def __str__(self) -> str:
        nodes = f"{self.unit} {self.nodes_before} -> {self.nodes_after}"
        line = f"{self.spelling:<22} {nodes:<20} constants {self.constants_before} -> {self.constants_after}"
        return "\n".join((line, *(f"#   float32 {detail}" for detail in self.details)))


class PassError(RammerError):
    """An illegal graph from a pass, or a pass that does not converge: a bug of the pass, not of the model."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A sequence of passes. Those of graphs are repeated until a whole round changes nothing, at most ``rounds`` times. Those of
    Computes run once, in order."""

    passes: tuple[AnyPass, ...]
    rounds: int = 16
    name: ClassVar[str] = "pipeline"

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def __call__(self, graph: Graph) -> Graph:
        return self.run(graph)[0]

    def without(self, names: Collection[str]) -> Pipeline:
        """Return the pipeline without the passes of these names."""
        return replace(self, passes=tuple(p for p in self.passes if p.name not in names))

    def run(self, graph: Graph) -> tuple[Graph, list[PassReport]]:
        """Return the final graph, and a report of every call that changed it. Raises PassError if the graph is illegal after a
        pass or still changes after the last round. It names the pass."""
        reports: list[PassReport] = []
        last: Pass | None = None
        for _ in range(self.rounds):
            before = graph
            for step in self.passes:
                if isinstance(step, ComputePass):
                    continue
                result = _run_pass(step, graph, _explained(step), reports)
                last = last if result is graph else step
                graph = result
            if graph is before:
                return graph, reports
        with attribute_errors(last):
            raise PassError(
                f"pass {last} still changes the graph after {self.rounds} rounds",
                f"graph {graph.name}",
                "a pass must return the graph itself when it has nothing to do",
            )

    def run_computes(self, graph: ComputeGraph, target: ComputeTarget) -> tuple[ComputeGraph, list[PassReport]]:
        """Return the final tensor expressions, and a report of every pass that changed them. Raises PassError as ``run``."""
        reports: list[PassReport] = []
        for step in self.passes:
            if isinstance(step, ComputePass):
                graph = _run_pass(step, graph, partial(_rewritten, step, target), reports)
        return graph, reports


def _rewritten(step: ComputePass, target: ComputeTarget, graph: ComputeGraph) -> tuple[ComputeGraph, tuple[str, ...]]:
    return step(graph, target), ()


def _explained(step: Pass) -> Callable[[Graph], tuple[Graph, tuple[str, ...]]]:
    return step.explained if isinstance(step, Explaining) else lambda graph: (step(graph), ())


def _run_pass(step: AnyPass, graph: _G, rewrite: Callable[[_G], tuple[_G, tuple[str, ...]]], reports: list[PassReport]) -> _G:
    with attribute_errors(step):
        start = time.perf_counter()
        result, details = rewrite(graph)
        seconds = time.perf_counter() - start
        before, after = _operator_types(graph), _operator_types(result)
        counts = before.total(), after.total(), len(graph.constants), len(result.constants)
        if result is not graph or (details and not any(r.details for r in reports)):
            unit = "nodes" if isinstance(graph, Graph) else "computes"
            after.subtract(before)
            changes = tuple((op, count) for op, count in sorted(after.items()) if count)
            reports.append(PassReport(str(step), *counts, seconds, details, changes, unit))
        if result is not graph:
            _verify(step, graph, result)
        return result


def _operator_types(graph: Graph | ComputeGraph) -> Counter[str]:
    """Return the number of operators of each type, or of Computes of each kind."""
    return Counter(n.op for n in graph.nodes) if isinstance(graph, Graph) else Counter(c.kind for c in graph.computes)


def _verify(step: AnyPass, graph: Graph | ComputeGraph, result: Graph | ComputeGraph) -> None:
    """Raise PassError if the result of a pass is illegal or has other inputs or outputs than ``graph``."""
    try:
        verify_graph(result) if isinstance(result, Graph) else verify_compute_graph(result)
    except ValueError as error:
        hint = "the pass must keep the graph legal"
        raise PassError(f"{error}  (pass: {step})", f"graph {graph.name}", hint) from error
    if (result.inputs, result.outputs) != (graph.inputs, graph.outputs):
        raise PassError(
            f"the inputs or outputs of the graph changed  (pass: {step})",
            f"graph {graph.name}",
            "names and types of inputs and outputs belong to the model",
        )


def default_passes(extra: Sequence[AnyPass] = ()) -> tuple[AnyPass, ...]:
    """Return the passes that every model runs through, in order.

    Passes of graphs come first. ``extra`` passes of graphs run after the others, those of Computes before products are batched.
    """
    return (
        PropagateQuantization(),
        FuseQdqProducts(),
        WeightOnlyQuant(),
        FoldConstants(),
        RemoveIdentity(),
        CancelTransposes(),
        FuseGroupNorm(),
        FoldAffine(),
        FoldScales(),
        SinkReshapes(),
        CommonSubexpressions(),
        DeadCode(),
        ChunkRecurrent(),
        ComputePass("inline_conditions", lambda graph, _: inline_conditions(graph)),
        ComputePass("inline_decodings", lambda graph, _: inline_decodings(graph)),
        ComputePass("group_norm_epilogue", lambda graph, _: in_rows(graph)),
        *extra,
        ComputePass("pad_channels", lambda graph, target: pad_channels(graph, target.device)),
        ComputePass(BATCH, lambda graph, target: target.batch(graph)),
        ComputePass("slice_time_steps", lambda graph, target: slice_steps(graph, target.device)),
        ComputePass("blocked_scan", lambda graph, _: scan_in_blocks(graph)),
        ComputePass("rfactor", lambda graph, target: split_deep(graph, target.device)),
        ComputePass("simplify", lambda graph, _: simplify_graph(graph)),
        ComputePass(COPY, lambda graph, target: copy_rows(graph, target.device.few_rows) if target.rows else graph),
    )
