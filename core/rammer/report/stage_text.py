"""Printed forms of all compilation steps, for ``inspect`` and ``--dump``."""

from __future__ import annotations

from collections.abc import Callable

from rammer.compiled.segments import Compiled, HostSegment, ProgramSegment
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel
from rammer.report.predicted_trace import chrome_trace, gantt_chart, task_seconds
from rammer.report.text_table import format_duration


def _join_segments(compiled: Compiled, text: Callable[[ProgramSegment], str]) -> str:
    parts = []
    for segment in compiled.segments:
        if isinstance(segment, HostSegment):
            parts.append(f"host {segment.node}  ({segment.why})")
        else:
            parts.append(text(segment))
    if compiled.rest is not None:
        parts.append(f"later: {compiled.rest}")
    return "\n".join(parts)


def graph_text(compiled: Compiled, device: VDevice) -> str:
    """Return the Graph after all passes, and the changes of each pass."""
    reports = "\n".join(f"# pass {r}" for r in compiled.passes)
    later = f"\n# later: {compiled.rest}" if compiled.rest is not None else ""
    return f"{compiled.graph}\n{reports}{later}"


def compute_text(compiled: Compiled, device: VDevice) -> str:
    """Return the tensor expressions after all passes, and the changes of each pass."""
    return _join_segments(compiled, lambda s: "\n".join((str(s.compute), *(f"# pass {r}" for r in s.passes))))


def tile_text(compiled: Compiled, device: VDevice) -> str:
    """Return the tile graph with the device's memory layers, the use of each layer, and the log of connections tried."""
    return _join_segments(compiled, lambda s: s.tile.describe(device, s.program) if s.tile else "")


def kernel_text(compiled: Compiled, device: VDevice) -> str:
    """Return every operator's candidate kernels with resources and task times."""
    return _join_segments(compiled, lambda s: "\n".join(_operator_kernels(name, ks, device) for name, ks in s.kernels.items()))


def _operator_kernels(name: str, found: tuple[RKernel, ...], device: VDevice) -> str:
    thrifty = min(found, key=RKernel.busy_time)
    quick = min(found, key=lambda k: k.operator_time(device.veus))
    lines = [f"operator {name}"]
    for number, k in enumerate(found):
        r = k.resources
        marks = [m for m, yes in (("fastest", k is quick), ("least vEU time", k is thrifty)) if yes]
        registers = "?" if r.registers < 0 else str(r.registers)
        lines.append(
            f"  kernel {name}.{number}  {k.operator.head()}  {k.operator.task_count} tasks  {r.threads} threads  "
            f"{registers} regs  {r.local_bytes} B local  {format_duration(k.alone)} alone  {format_duration(k.crowded)} crowded  "
            f"({k.origin})  {', '.join(marks)}"
        )
    return "\n".join(lines)


def source_text(compiled: Compiled, device: VDevice) -> str:
    """Return the source of every chosen kernel."""
    return _join_segments(compiled, lambda s: "\n".join(f"// {n}\n{ks[0].source}" for n, ks in s.kernels.items()))


def program_text(compiled: Compiled, device: VDevice) -> str:
    """Return the text of the RProgram."""
    return _join_segments(compiled, lambda s: str(s.program))


def schedule_text(compiled: Compiled, device: VDevice) -> str:
    """Return a chart of every vEU's tasks over time, predicted from task times."""
    return _join_segments(compiled, _segment_schedule)


def _segment_schedule(segment: ProgramSegment) -> str:
    drawn = gantt_chart(segment.program, task_seconds(segment.program, segment.kernels))
    return f"{drawn}\npolicy {segment.choice}" if segment.choice else drawn


def trace_text(compiled: Compiled, device: VDevice) -> str:
    """Return the predicted schedule as a Chrome trace (JSON), for Perfetto."""
    programs = [s for s in compiled.segments if isinstance(s, ProgramSegment)]
    return chrome_trace([(s.program, task_seconds(s.program, s.kernels)) for s in programs], compiled.node_types)


STAGES: dict[str, Callable[[Compiled, VDevice], str]] = {
    "graph": graph_text,
    "compute": compute_text,
    "tile": tile_text,
    "kernels": kernel_text,
    "source": source_text,
    "program": program_text,
    "schedule": schedule_text,
    "trace": trace_text,
}


def dump_texts(compiled: Compiled, device: VDevice) -> dict[str, str]:
    """Return the text of every step by file name, such as ``00-graph.txt``."""
    return {
        f"{number:02d}-{name}.{'json' if name == 'trace' else 'txt'}": text(compiled, device) + "\n"
        for number, (name, text) in enumerate(STAGES.items())
    }
