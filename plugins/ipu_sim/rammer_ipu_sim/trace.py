"""When the simulated tiles compute: a span for every task of a run."""

from __future__ import annotations

from collections.abc import Mapping

from rammer.device.manifest import Array, Span

from rammer_ipu_sim.executor import LoadedProgram
from rammer_ipu_sim.supersteps import ended, lengths_of


def trace(loaded: LoadedProgram, inputs: Mapping[str, Array]) -> list[Span]:
    """The tasks of a run with these inputs, in seconds by the chip's clock.

    Of a superstep, what goes before and behind (streaming, syncs, exchanges both ways) is drawn before all compute phases. Tasks
    that end at a run's length take no time.
    """
    accountant, clock, now, spans = loaded.accountant(), loaded.chip.clock, 0.0, list[Span]()
    point = lengths_of(loaded.program, loaded.lengths, inputs)
    for group, step in zip(loaded.whole, loaded.at(inputs), strict=True):
        kept = [b for whole in group for b in (ended(whole, point)[0] if point else [whole])]
        begin = now + step.cycles.total - step.cycles.compute
        times = accountant.compute_times(kept) if kept else []
        spans += [Span(t.tile, t.operator, t.index, (begin + t.start) / clock, (begin + t.end) / clock) for t in times]
        here = {(t.operator, t.index) for t in times}
        all_tasks = ((b.operator.name, int(i), int(v)) for b in group for v, i in zip(b.veus.flat, b.tasks.flat, strict=True))
        spans += [Span(v, name, i, begin / clock, begin / clock) for name, i, v in all_tasks if (name, i) not in here]
        now += step.cycles.total
    return spans
