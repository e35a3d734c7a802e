"""Length variants of a ranged program: other tilings of the same operators over the same tensors and constants.

A table for the bound has tiles for the bound: on a GPU 337 rows take four rounds of tiles that suit 512 where three of others
would do. So a range is cut into parts. Each table computes all that the program does and is verified for all of its lengths; the
choice affects time alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.compiled.segments import Cases, Compiled, ProgramSegment
from rammer.compiler.policy_choice import build_legal_programs
from rammer.device.manifest import Backend, Binding
from rammer.errors import attribute_errors
from rammer.frontend.ranges.range_bounds import interleave_tasks
from rammer.ir.device import VDevice
from rammer.ir.extent import Ranged
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.plan.program_builder import Interface, PlacedTensors, build_program
from rammer.plan.waits import find_dependences
from rammer.schedule.policy import OperatorGraph, Policy, Schedule
from rammer.verify.in_place_state import state_pairs
from rammer.verify.verifier import verify

#: Number of lengths of a part at which its operators are priced.
PRICED: Final = 4
#: Minimum gain of a variant's kernel over the program's own, as a fraction of its time: each is text to compile and to load.
WORTH: Final = 0.02


def with_cases(compiled: Compiled, backend: Backend, policy: Policy) -> Compiled:
    """Return ``compiled`` with tables for parts of a range of one length. Tables are added if the device supports them and they
    differ."""
    ranged, segments = compiled.ranged, compiled.segments
    if not backend.cases or ranged is None or len(ranged.spans) != 1 or len(segments) != 1:
        return compiled
    (segment,) = segments
    if not isinstance(segment, ProgramSegment) or segment.program.repeat is not None or state_pairs(segment.program):
        return compiled
    return replace(compiled, segments=(_Tables(backend, policy).segment(segment, ranged),))


def verify_tables(compiled: Compiled, device: VDevice) -> Compiled:
    """Return ``compiled`` after verifying all of its tables. Raises VerifyError for an illegal table."""
    for table in compiled.tables:
        verify(table, device)
    return compiled


def split_span(span: tuple[int, int], count: int) -> list[tuple[int, int]]:
    """Split a span of lengths into at most ``count`` parts of about one size, ascending. They end at multiples of the greatest
    power of two that is no more than that size, as tiles do."""
    low, high = span
    step = 1 << (max((high - low + 1) // count, 1).bit_length() - 1)
    near = {round((low - 1 + (high - low + 1) * k / count) / step) * step for k in range(1, count)}
    ends = [*sorted(n for n in near if low <= n < high), high]
    return [(begin + 1, end) for begin, end in zip([low - 1, *ends], ends, strict=False)]


def priced_at(part: tuple[int, int], longest: int) -> tuple[float, ...]:
    """Return lengths of a part, as fractions of the ``longest`` of all."""
    low, high = part
    return tuple(sorted({max(low + round((high - low) * k / (PRICED - 1)), 1) / longest for k in range(PRICED)}))


@dataclass(frozen=True)
class _Tables:
    """Builder of length variants, for a device that supports them and a policy."""

    backend: Backend
    policy: Policy

    def segment(self, segment: ProgramSegment, ranged: Ranged) -> ProgramSegment:
        """Return the segment with a table for each part of its range; the longest part's is the program."""
        ((symbol, span),) = ranged.spans.items()
        program, binding = segment.program, Binding.of(segment.program, segment.constants)
        until, tables, known = list[int](), list[RProgram](), {program.operators: program}
        for part in split_span(span, self.backend.cases):
            at = replace(binding, parts=priced_at(part, span[1]))
            operators = tuple(self.recast(program.operators, at))
            if operators not in known:
                known[operators] = self.table(program, operators, at)
            if tables and tables[-1] is known[operators]:
                until[-1] = part[1]
            else:
                until.append(part[1])
                tables.append(known[operators])
        shorter = Cases(ranged.lengths[symbol], tuple(until[:-1]), tuple(tables[:-1])) if len(tables) > 1 else None
        return replace(segment, program=tables[-1], cases=shorter)

    def recast(self, operators: Iterable[ROperator], binding: Binding) -> Iterator[ROperator]:
        """Yield each operator as the device tiles it at the lengths of ``binding``. Equal operators are tiled once."""
        known = dict[str, ROperator]()
        for o in operators:
            if not o.lengths:
                yield o
                continue
            sign = binding.key(o)
            found = known.get(sign) or known.setdefault(sign, self.backend.retile_for(o, binding, WORTH))
            yield replace(o, tile=found.tile, family=found.family, config=found.config)

    def table(self, program: RProgram, operators: Sequence[ROperator], binding: Binding) -> RProgram:
        """Build ``program`` with these tilings of its operators."""
        device = self.backend.vdevice
        kernels = {o.name: (self.backend.kernel(o, binding),) for o in operators}
        graph = OperatorGraph(kernels, find_dependences(operators, program.storage), binding.constants)
        ports = Interface(program.name, program.inputs, program.outputs, binding.constants)
        tensors = PlacedTensors.of(program)

        def build(policy: Policy, schedule: Schedule) -> RProgram:
            return build_program(ports, schedule, tensors, policy=str(policy), vdevice=device)

        with attribute_errors(self.policy):
            (made,) = build_legal_programs(self.policy.proposals(graph, device), build, 1)
        return interleave_tasks(replace(made, precision=program.precision))
