"""Execution of passes to a fixed point. Every result is verified, and a failure names the pass that broke the graph."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol, runtime_checkable

from rammer.errors import BadInput, RammerError, attribute_errors
from rammer.ir.graph import Graph, verify_graph
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

__all__ = ["Pass", "PassError", "PassReport", "Pipeline", "default_passes"]


#: Passes whose result depends on exact extents: a full slice at one length is a partial slice at others.
OF_EXTENTS: Final = (FoldConstants.name, RemoveIdentity.name, ChunkRecurrent.name)
#: Passes that merge equal nodes: extents that coincide at one length may differ at others.
OF_EQUALS: Final = (CommonSubexpressions.name,)


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
class PassReport:
    """Record of one pass call: nodes and constants before and after, its time (seconds), and explained exceptions. ``changes`` is
    the difference in the number of operators of each type, for types whose number changed."""

    spelling: str
    nodes_before: int
    nodes_after: int
    constants_before: int
    constants_after: int
    seconds: float = field(default=0.0, compare=False)
    details: tuple[str, ...] = ()
    changes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        nodes = f"nodes {self.nodes_before} -> {self.nodes_after}"
        line = f"{self.spelling:<22} {nodes:<20} constants {self.constants_before} -> {self.constants_after}"
        return "\n".join((line, *(f"#   float32 {detail}" for detail in self.details)))


class PassError(RammerError):
    """An illegal graph from a pass, or a pass that does not converge: a bug of the pass, not of the model."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A sequence of passes, repeated until a whole round changes nothing; at most ``rounds`` times."""

    passes: tuple[Pass, ...]
    rounds: int = 16
    name: ClassVar[str] = "pipeline"

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def __call__(self, graph: Graph) -> Graph:
        return self.run(graph)[0]

    def run(self, graph: Graph) -> tuple[Graph, list[PassReport]]:
        """Return the final graph, and a report of every call that changed it. Raises PassError if the graph is illegal after a
        pass or still changes after the last round. It names the pass."""
        reports: list[PassReport] = []
        last: Pass | None = None
        for _ in range(self.rounds):
            before = graph
            for step in self.passes:
                result = _run_with_blame(step, graph, reports)
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


def _run_with_blame(step: Pass, graph: Graph, reports: list[PassReport]) -> Graph:
    with attribute_errors(step):
        return _run_pass(step, graph, reports)


def _run_pass(step: Pass, graph: Graph, reports: list[PassReport]) -> Graph:
    start = time.perf_counter()
    result, details = step.explained(graph) if isinstance(step, Explaining) else (step(graph), ())
    seconds = time.perf_counter() - start
    counts = len(graph.nodes), len(result.nodes), len(graph.constants), len(result.constants)
    if result is not graph or (details and not any(r.details for r in reports)):
        reports.append(PassReport(str(step), *counts, seconds, details, _type_changes(graph, result)))
    if result is graph:
        return graph
    try:
        verify_graph(result)
    except ValueError as error:
        hint = "the pass must keep the graph legal"
        raise PassError(f"{error}  (pass: {step})", f"graph {graph.name}", hint) from error
    ports = (graph.inputs, graph.outputs)
    if (result.inputs, result.outputs) != ports:
        raise PassError(
            f"the inputs or outputs of the graph changed  (pass: {step})",
            f"graph {graph.name}",
            "names and types of inputs and outputs belong to the model",
        )
    return result


def _type_changes(before: Graph, after: Graph) -> tuple[tuple[str, int], ...]:
    """Return the types of operators whose number differs, with the difference."""
    found = Counter(n.op for n in after.nodes)
    found.subtract(Counter(n.op for n in before.nodes))
    return tuple((op, count) for op, count in sorted(found.items()) if count)


def default_passes() -> tuple[Pass, ...]:
    """Return the passes that every model runs through, in order."""
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
    )


_KNOWN: Final[Mapping[str, Callable[..., Pass]]] = {
    PropagateQuantization.name: PropagateQuantization,
    FuseQdqProducts.name: FuseQdqProducts,
    WeightOnlyQuant.name: WeightOnlyQuant,
    FoldConstants.name: FoldConstants,
    RemoveIdentity.name: RemoveIdentity,
    CancelTransposes.name: CancelTransposes,
    FuseGroupNorm.name: FuseGroupNorm,
    FoldAffine.name: FoldAffine,
    FoldScales.name: FoldScales,
    SinkReshapes.name: SinkReshapes,
    CommonSubexpressions.name: CommonSubexpressions,
    DeadCode.name: DeadCode,
    ChunkRecurrent.name: ChunkRecurrent,
}
_SPELLING: Final = re.compile(r"\s*(\w+)(?:\{([^}]*)\})?\s*(?:,|$)")


def parse_passes(text: str, known: Mapping[str, Callable[..., Pass]] = _KNOWN) -> tuple[Pass, ...]:
    """Parse the spelling of ``str(Pipeline)``: ``fold{limit=1024},cse``. Raises BadInput for unknown passes or options."""
    passes: list[Pass] = []
    position = 0
    while position < len(text):
        match = _SPELLING.match(text, position)
        if match is None:
            where = f"column {position + 1}"
            raise BadInput(f"not a list of passes: {text!r}", where, "write for example fold,cse,dce")
        passes.append(_build_pass(match[1], match[2] or "", known))
        position = match.end()
    return tuple(passes)


def _build_pass(name: str, options: str, known: Mapping[str, Callable[..., Pass]]) -> Pass:
    if name not in known:
        raise BadInput(f"unknown pass {name!r}", f"pass {name}", f"the passes are {', '.join(known)}")
    try:
        pairs: Iterable[list[str]] = (item.split("=") for item in options.split(",") if item)
        return known[name](**{key.strip(): int(value) for key, value in pairs})
    except (TypeError, ValueError) as error:
        hint = f"its default is {known[name]()}"
        raise BadInput(f"pass {name} does not take {{{options}}}", f"pass {name}", hint) from error
