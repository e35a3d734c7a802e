"""Time per operator of a model: from the device's trace if it records one, else from its profiler, which runs each operator
alone. Host operators are listed by operator type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.compiled.segments import HostSegment, ProgramSegment
from rammer.device.guard import compile_lock
from rammer.device.manifest import Array, Backend, Binding
from rammer.errors import DeviceUnavailable
from rammer.ir.operator import ROperator
from rammer.jit.continuation import Continuation
from rammer.report.measured_trace import union_length
from rammer.report.text_table import format_duration
from rammer.report.trace_events import describe_nodes
from rammer.runtime.loaded_model import LoadedModel

#: Sources of seconds: the device's record of a run; each operator alone, by the device's clock; simulated cycles; the cost model;
#: the host's clock.
TRACED, MEASURED, SIMULATED, PREDICTED, HOST = "traced", "measured alone", "simulated", "predicted", "host"
HEADERS: Final = ["time", "share", "count", "operator", "ONNX nodes", "family", "tasks", "how"]
#: Rows of a table.
MOST_ROWS: Final = 20
#: Maximum letters of an operator, of its ONNX nodes and of a family in a table, so that it fits 120 columns.
WIDTHS: Final = (24, 34, 12)


@dataclass(frozen=True)
class OperatorShare:
    """Time of an operator of the programs, or of all host operators of a type. It lists the contained ONNX nodes with their types
    and ``tasks`` (calls on the host). ``seconds`` are for one run, and ``how`` is their source. Operators of one ``form`` do the
    same work with the same kernel."""

    operator: str
    nodes: tuple[str, ...]
    types: tuple[str, ...]
    family: str
    tasks: int
    seconds: float
    how: str
    form: int = -1


def operator_shares(backend: Backend, special: LoadedModel, inputs: Mapping[str, Array]) -> list[OperatorShare]:
    """Return the time of each operator in a run on ``inputs``, longest first. Deferred parts are those of this run."""
    from rammer.frontend.host.host_node import collect_host_times  # other runs do not import the compiler

    feeds: dict[int, Mapping[str, Array]] = {}
    special.run(inputs)  # one-time work
    with collect_host_times() as spent:
        special.run(inputs, lambda segment, given: feeds.update({id(segment): given}))
    found = [OperatorShare("", (), (op,), "", spent.calls[op], s, HOST) for op, s in spent.seconds.items()]
    known, forms = dict[str, tuple[float, str]](), dict[str, int]()
    for segment, kinds in _iterate_programs(special):
        traced = _traced_seconds(backend, segment, feeds.get(id(segment)))
        binding = Binding.of(segment.program, segment.constants)
        for operator in segment.program.operators:
            nodes = tuple(dict.fromkeys(c.origin for c in operator.computes if c.origin))
            key = f"{binding.key(operator)} {operator.tile} {operator.family} {operator.config}"
            if operator.name in traced:
                seconds, how = traced[operator.name], TRACED
            else:
                if key not in known:
                    with compile_lock(backend):
                        known[key] = isolated_seconds(backend, operator, binding)
                seconds, how = known[key]
            types = tuple(kinds.get(n, "") for n in nodes)
            family = operator.family or "generic"
            form = forms.setdefault(key, len(forms))
            found.append(OperatorShare(operator.name, nodes, types, family, operator.task_count, seconds, how, form))
    return sorted(found, key=lambda s: -s.seconds)


def _iterate_programs(special: LoadedModel) -> Iterator[tuple[ProgramSegment, Mapping[str, str]]]:
    """Yield the programs of a run, including deferred ones, with types of ONNX nodes by name."""
    kinds = special.compiled.node_types
    for segment in special.compiled.segments:
        if isinstance(segment, ProgramSegment):
            yield segment, kinds
    if isinstance(special.following, Continuation):
        for last in [*special.following.residents.held.values()][-1:]:
            yield from _iterate_programs(last)


def _traced_seconds(backend: Backend, segment: ProgramSegment, feeds: Mapping[str, Array] | None) -> dict[str, float]:
    """Return the seconds in which any unit ran a task of an operator, if the device records them. Simulated devices are excluded:
    only their profiler attributes exchanges and syncs to an operator."""
    if feeds is None or not backend.records_tasks or backend.vdevice.simulated:
        return {}
    spans: dict[str, list[tuple[float, float]]] = {}
    for span in backend.trace(segment.program, segment.constants, feeds).spans:
        spans.setdefault(span.operator, []).append((span.start, span.end))
    return {name: union_length(intervals) for name, intervals in spans.items()}


def isolated_seconds(backend: Backend, operator: ROperator, binding: Binding) -> tuple[float, str]:
    """Return the seconds of all tasks from the profiler's time of one, and the source of that time."""
    kernel, veus = backend.kernel(operator, binding), backend.vdevice.veus
    if not operator.task_count:
        return 0.0, PREDICTED
    try:
        one, crowded = backend.profiler.task_time(kernel, binding)
    except DeviceUnavailable:  # compiled for an absent target
        return kernel.operator_time(veus), PREDICTED
    timed = replace(kernel, alone=one, crowded=crowded)
    return timed.operator_time(veus), SIMULATED if backend.vdevice.simulated else MEASURED


def table_rows(found: Sequence[OperatorShare]) -> list[list[str]]:
    """Return the rows of a table of at most 120 columns, with the longest first. Equal operators are one row; the last row sums
    the omitted ones."""
    whole = sum(s.seconds for s in found) or 1.0
    groups = dict[object, list[OperatorShare]]()
    for s in found:
        groups.setdefault((s.form, s.how) if s.form >= 0 else s, []).append(s)
    ranked = sorted(groups.values(), key=lambda group: -sum(s.seconds for s in group))
    rows = [_group_row(group, whole) for group in ranked[:MOST_ROWS]]
    rest = [s for group in ranked[MOST_ROWS:] for s in group]
    if rest:
        seconds = sum(s.seconds for s in rest)
        rows.append([format_duration(seconds), f"{seconds / whole:.1%}", str(len(rest)), "more", "", "", "", ""])
    return rows


def _group_row(group: Sequence[OperatorShare], whole: float) -> list[str]:
    first, seconds = group[0], sum(s.seconds for s in group)
    names = [
        text if len(text) <= most else f"{text[: most - 2]}.."
        for text, most in zip((first.operator, _share_label(first), first.family), WIDTHS, strict=True)
    ]
    return [format_duration(seconds), f"{seconds / whole:.1%}", str(len(group)), *names, str(first.tasks), first.how]


def _share_label(share: OperatorShare) -> str:
    if not share.nodes:
        return f"{', '.join(share.types)} on the host" if share.how == HOST else ""
    return describe_nodes(list(share.nodes), dict(zip(share.nodes, share.types, strict=True)))


def grouped(segments: Sequence[HostSegment]) -> list[str]:
    """Return a line for each type of operator and reason, most frequent first: ``GridSample x 6: why``."""
    found = Counter((s.node.node.op, s.why) for s in segments)
    return [f"{op} x {count}: {why}" for (op, why), count in found.most_common()]


def summarise_float32(lines: Sequence[str]) -> list[str]:
    """Return one line with the number of operators of each type that float16 left in float32; empty if all were converted."""
    found = Counter(line.partition(" ")[0] for line in lines)
    return [f"{len(lines)} operators stay float32: {', '.join(f'{n} {op}' for op, n in found.most_common())}"] if lines else []
