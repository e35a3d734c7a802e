"""The contents of a model's HTML page as plain data: the graph and its passes, and the operators, the schedule and the memory
plan of each device. Lists of numbers replace names where there are many items, so that the page stays small.

Times are in seconds, except those of tasks and buffers, which are in nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

from rammer.compiled.segments import Compiled, HostSegment, ProgramSegment
from rammer.device.manifest import Hardware, Span
from rammer.fusion.tile_graph import BatchTrial, ConnectionTrial, TileGraph
from rammer.ir.device import VDevice
from rammer.ir.graph import Graph, Node
from rammer.ir.names import shorten_name
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, counters_by_operator
from rammer.ir.program_text import group_rows
from rammer.passes.pass_pipeline import PassReport
from rammer.report.operator_times import OperatorShare
from rammer.report.predicted_trace import chosen_kernel, task_seconds, task_spans
from rammer.report.trace_events import operator_traffic

#: Plain data for JSON.
Data: TypeAlias = "dict[str, Any]"
#: The number and the operator type of ONNX nodes, by name.
Nodes: TypeAlias = "Mapping[str, tuple[int, str]]"
#: Maximum number of ONNX operators whose graph is drawn, and of characters of an attribute.
MOST_NODES: Final = 20_000
MOST_TEXT: Final = 120
#: Maximum number of measured tasks of a program. A chart of more needs a tracing tool (``rammer run --trace``).
MOST_SPANS: Final = 60_000


@dataclass(frozen=True)
class Measured:
    """Measurements of one model on a device: seconds of a run, times of operators, and by program the spans of tasks."""

    seconds: float = 0.0
    shares: Sequence[OperatorShare] = ()
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)


@dataclass(frozen=True)
class DevicePage:
    """A compiled model on one device, or the reason why there is none."""

    name: str
    why: str = ""
    compiled: Compiled | None = None
    vdevice: VDevice | None = None
    hardware: Hardware | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    measured: Measured = Measured()


def page_data(name: str, version: str, pages: Sequence[DevicePage]) -> Data:
    """Return the data of a page. The graph is that of the first device that compiled the model."""
    compiled = next((p.compiled for p in pages if p.compiled is not None), None)
    drawn = graph_data(compiled.graph) if compiled is not None else {}
    passes = [pass_data(r) for r in compiled.passes] if compiled is not None else []
    return {
        "model": shorten_name(name),
        "version": version,
        "graph": drawn,
        "passes": passes,
        "devices": [device_data(p) for p in pages],
    }


def graph_data(graph: Graph) -> Data:
    """Return the nodes with their types, attributes, outputs' types and the indices of their producers (-1 - k for input k)."""
    maker = {v.name: -1 - k for k, v in enumerate(graph.inputs)}
    maker |= {o: k for k, n in enumerate(graph.nodes) for o in n.outputs if o}
    nodes = graph.nodes[:MOST_NODES]
    return {
        "nodes": [
            [
                n.op,
                shorten_name(n.name or next((o for o in n.outputs if o), "")),
                list(dict.fromkeys(maker[i] for i in n.inputs if i in maker)),
                ", ".join(str(graph.types.get(o, "?")) for o in n.outputs if o),
                _format_attributes(n),
                [f"{shorten_name(i)}: {graph.types[i]}" for i in n.inputs if i in graph.constants],
            ]
            for n in nodes
        ],
        "total": len(graph.nodes),
        "inputs": [[shorten_name(v.external or v.name), str(v.port)] for v in graph.inputs],
        "outputs": [[shorten_name(v.external or v.name), str(v.port), maker.get(v.name)] for v in graph.outputs],
        "constants": [len(graph.constants), sum(graph.types[c].nbytes for c in graph.constants)],
        "opset": graph.opset,
    }


def _format_attributes(node: Node) -> str:
    text = node.attribute_text
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def pass_data(report: PassReport) -> Data:
    """Return a pass call: nodes and constants before and after, and the changed types of operators."""
    return {
        "pass": report.spelling,
        "nodes": [report.nodes_before, report.nodes_after],
        "constants": [report.constants_before, report.constants_after],
        "changes": [list(c) for c in report.changes],
        "details": list(report.details),
    }


def device_data(page: DevicePage) -> Data:
    """Return the programs and host operators of a device, or the reason why there are none."""
    if page.compiled is None or page.vdevice is None:
        return {"name": page.name, "why": page.why}
    compiled, device = page.compiled, page.vdevice
    nodes = {n.name: (k, n.op) for k, n in enumerate(compiled.graph.nodes[:MOST_NODES]) if n.name}
    shares = {s.operator: s for s in page.measured.shares}
    return {
        "name": page.name,
        "hardware": page.hardware.name if page.hardware else device.description,
        "kind": page.hardware.kind if page.hardware else "",
        "simulated": device.simulated,
        "veus": device.veus,
        "flops": device.flops * device.veus,
        "bandwidth": device.layer("device").bandwidth,
        "layers": [[m.name, m.scope, m.capacity, m.bandwidth] for m in device.layers],
        "options": dict(page.options),
        "steps": {name: _rounded(s) for name, s in compiled.seconds.items()},
        "measured": _rounded(page.measured.seconds),
        "hosts": [[*_host_node(s), s.why] for s in compiled.host_nodes],
        "later": str(compiled.rest) if compiled.rest is not None else "",
        "float32": list(compiled.float32),
        "programs": [
            program_data(s, device, nodes, shares, page.measured.spans.get(s.program.name, ()))
            for s in compiled.segments
            if isinstance(s, ProgramSegment)
        ],
    }


def _host_node(segment: HostSegment) -> tuple[str, str]:
    node = segment.node.node
    return node.op, shorten_name(node.name)


def program_data(
    segment: ProgramSegment, device: VDevice, nodes: Nodes, shares: Mapping[str, OperatorShare], spans: Sequence[Span]
) -> Data:
    """Return a program: operators, edges, decisions, rows and buffers. ``nodes`` has the number and the type of each
    ONNX node by name."""
    program = segment.program
    number = {o.name: k for k, o in enumerate(program.operators)}
    uses = BufferUses.of(program, number)
    return {
        "name": program.name,
        "policy": program.policy,
        "choice": segment.choice,
        "predicted": _rounded(program.predicted),
        "precision": program.precision,
        "veus": program.veus,
        "tasks": program.task_count,
        "repeat": program.turns,
        "variants": len(segment.tables) - 1,
        "arena": program.arena_bytes,
        "constants": sum(b.nbytes for b in program.buffers if b.kind == "constant"),
        **operators_data(segment, device, nodes, shares),
        "edges": uses.edges(),
        "decisions": decision_data(segment.tile, device),
        "buffers": [
            [b.name, b.kind, b.offset, b.nbytes, sorted(uses.writers.get(b.name, ())), sorted(uses.readers.get(b.name, ()))]
            for b in program.buffers
            if b.kind != "constant"
        ],
        **schedule_data(program, task_seconds(program, segment.kernels), number),
        "measured": [[s.veu, number.get(s.operator, -1), s.index, _nano(s.start), _nano(s.end - s.start)] for s in spans]
        if len(spans) <= MOST_SPANS
        else [],
    }


def operators_data(segment: ProgramSegment, device: VDevice, nodes: Nodes, shares: Mapping[str, OperatorShare]) -> Data:
    """Return the operators and their forms. Operators of one form do the same work with the same kernel.

    An operator is [name, form, Computes, ONNX nodes, measured seconds or None, source of the measured time]."""
    forms, found = dict[str, int](), list[Data]()
    operators = list[list[Any]]()
    for o in segment.program.operators:
        form, share = form_data(o, segment, device, nodes), shares.get(o.name)
        number = forms.setdefault(repr(form), len(forms))
        found += [form] if number == len(found) else []
        origins = [nodes[c][0] for c in dict.fromkeys(c.origin for c in o.computes) if c in nodes]
        times = [_rounded(share.seconds), share.how] if share is not None else [None, ""]
        operators.append([o.name, number, [c.name for c in o.computes], origins, *times])
    return {"operators": operators, "forms": found}


def form_data(operator: ROperator, segment: ProgramSegment, device: VDevice, nodes: Nodes) -> Data:
    """Return the kernel of an operator, its work, its predicted times, and the kind of each Compute with the layer before it."""
    types, kernel = segment.program.types, chosen_kernel(segment.program, segment.kernels, operator.name)
    into = {c.consumer: device.layer(c.layer).name for c in operator.connections}
    return {
        "type": nodes[operator.main.origin][1] if operator.main.origin in nodes else operator.main.kind,
        "chain": [[c.kind, into.get(c.name, "")] for c in operator.computes],
        "family": operator.family or "generic",
        "config": " ".join(f"{k}={v}" for k, v in operator.config),
        "tile": f"{_times(operator.tile)} of {_times(operator.anchor.shape)}",
        "tasks": operator.task_count,
        "flops": operator.flops,
        "bytes": operator_traffic(operator, types),
        "task": _nano(kernel.crowded if kernel else 0.0),
        "seconds": _rounded(kernel.operator_time(device.veus) if kernel else 0.0),
        "origin": kernel.origin if kernel else "",
    }


def _times(extents: Iterable[int]) -> str:
    return "x".join(map(str, extents))


def decision_data(tile: TileGraph | None, device: VDevice) -> list[list[Any]]:
    """Return the decisions on the tile graph, with equal ones counted. A decision is [kind, layer, verdict, seconds of both
    variants (two numbers), reason, number of decisions, subject of the first]."""
    found = dict[tuple[Any, ...], list[Any]]()
    for d in tile.decisions if tile is not None else ():
        if isinstance(d, ConnectionTrial):
            facts = "connect", d.layer, d.kept, _rounded(d.separate), _rounded(d.together), d.why
        elif isinstance(d, BatchTrial):
            facts = "batch", d.way or "", d.way is not None, _rounded(d.separate), _rounded(d.together), d.why
        else:
            facts = "cut", "", d.kept, _rounded(d.whole), _rounded(d.separate), ""
        found.setdefault(facts, [0, d.subject])[0] += 1
    return [[*facts, *counted] for facts, counted in found.items()]


@dataclass(frozen=True)
class BufferUses:
    """The operators that write and read each buffer, by number, with the range of elements of each use."""

    writes: Mapping[str, Sequence[tuple[int, tuple[int, int]]]]
    reads: Mapping[str, Sequence[tuple[int, tuple[int, int]]]]

    @staticmethod
    def of(program: RProgram, number: Mapping[str, int]) -> BufferUses:
        """Return the uses of all buffers of a program."""
        writes, reads = dict[str, list[tuple[int, tuple[int, int]]]](), dict[str, list[tuple[int, tuple[int, int]]]]()
        for o in program.operators:
            for found, tensors in ((writes, o.outputs), (reads, o.inputs)):
                for storage in [program.storage[t] for t in tensors if t in program.storage]:
                    found.setdefault(storage.buffer, []).append((number[o.name], storage.span()))
        return BufferUses(writes, reads)

    @cached_property
    def writers(self) -> Mapping[str, set[int]]:
        """The numbers of the operators that write each buffer."""
        return {name: {o for o, _ in found} for name, found in self.writes.items()}

    @cached_property
    def readers(self) -> Mapping[str, set[int]]:
        """The numbers of the operators that read each buffer."""
        return {name: {o for o, _ in found} for name, found in self.reads.items()}

    def edges(self) -> list[list[int]]:
        """Return pairs of operators of which the second reads elements that the first writes."""
        found = dict[tuple[int, int], None]()
        for name, writes in self.writes.items():
            for reader, (low, high) in self.reads.get(name, ()):
                found |= {(w, reader): None for w, (first, last) in writes if first < high and low < last and w != reader}
        return [list(pair) for pair in found]


def schedule_data(program: RProgram, seconds: Mapping[str, float], number: Mapping[str, int]) -> Data:
    """Return the predicted schedule: rows in groups of equal times with runs of tasks, and when each counter is full.

    A run is [operator, first task, shift of it per row, tasks, step, waits (counter, threshold, ...), start]. Tasks of a run
    follow each other without waiting. A counter is [operator, first task, end of its tasks, full at, vEU of the last task]."""
    starts: list[list[float]] = [[] for _ in range(program.veus)]
    feeds, counter = counters_by_operator(program), {c.name: k for k, c in enumerate(program.counters)}
    full = [[number[c.operator], c.first, c.last, 0.0, 0] for c in program.counters]
    for span in task_spans(program, seconds):
        starts[span.veu].append(span.start)
        for c in feeds.get(span.operator, ()):
            if c.first <= span.index < c.last and _nano(span.end) > full[counter[c.name]][3]:
                full[counter[c.name]][3:] = _nano(span.end), span.veu
    rows = list[list[Any]]()
    for group in group_rows(program.rows):
        order, runs = 0, list[list[Any]]()
        for run, shift in zip(group.runs, group.shifts, strict=True):
            waits = [n for w in run.waits for n in (counter[w.counter], w.threshold)]
            runs.append([number[run.operator], run.start, shift, run.count, run.step, waits, _nano(starts[group.first][order])])
            order += run.count
        rows.append([group.first, group.last, runs])
    return {"rows": rows, "counters": full}


def _nano(seconds: float) -> float:
    """Return nanoseconds to one decimal."""
    return round(seconds * 1e9, 1)


def _rounded(number: float) -> float | None:
    """Return a number to four significant digits, or None if it is not finite."""
    return float(f"{number:.4g}") if math.isfinite(number) else None
