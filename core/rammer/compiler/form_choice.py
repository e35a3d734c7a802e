"""The choice of a program's execution form: programs for the suitable forms of a device, and the fastest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf

from rammer.codegen.writer import kinds_of
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.form_planning import FormPlanner
from rammer.compiler.policy_choice import Chooser, segment_opener
from rammer.device.execution_forms import ExecutionForm
from rammer.schedule.policy import Policy
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.fastest_program import TimeCache, time_programs

__all__ = ["FormChooser"]


@dataclass(frozen=True)
class FormChooser:
    """A chooser among programs in the execution forms of a device.

    ``chooser`` chooses among policies. ``extra`` are the policies of plugins. Forms are chosen by prediction if ``unmeasured``
    has a reason."""

    chooser: Chooser
    extra: Sequence[Policy] = ()
    unmeasured: str = ""

    def chosen(self, options: Sequence[ProgramSegment]) -> ProgramSegment:
        """Return the fastest of ``options`` in any form. They are of one graph, and for the device's first form."""
        if len(self.chooser.backend.forms) == 1:
            return self.chooser.chosen(options)
        rivals = [self._rivals(o) for o in options]
        if not any(r.first for r in rivals):  # another form was requested
            return self.chooser.chosen([next(r.programs(), r.base) for r in rivals])
        made = self.chooser.chosen(options)
        if not any(r.forms for r in rivals):
            return made
        mine = next(r for r in rivals if r.base.program is made.program)
        raced = [mine] if self.chooser.unmeasured else rivals
        return self._by_prediction(made, mine) if self.unmeasured else self._by_measurement(made, mine, raced)

    def _rivals(self, base: ProgramSegment) -> _Rivals:
        backend = self.chooser.backend
        planner = FormPlanner(base, backend, self.extra)
        suitable = backend.suitable_forms(base.program, planner.binding)
        others = tuple(f for f in suitable if f != backend.forms[0])
        return _Rivals(base, planner, len(others) < len(suitable), others)

    def _by_prediction(self, made: ProgramSegment, mine: _Rivals) -> ProgramSegment:
        """Return the program in a form that needs no measurement, if one suits it."""
        found = next(replace(mine, forms=tuple(f for f in mine.forms if f.preferred)).programs(), made)
        return replace(found, choice=made.choice)

    def _by_measurement(self, made: ProgramSegment, mine: _Rivals, raced: Sequence[_Rivals]) -> ProgramSegment:
        """Return the fastest program in any form. ``raced`` have the base programs that other forms are built for."""
        chooser, cache = self.chooser, TimeCache(self.chooser.backend, self.chooser.store)
        limited = any(f.limits.near < inf for r in raced for f in r.forms)
        opener = segment_opener(chooser.backend, [r.base for r in raced])
        alone = time_programs([r.base.program for r in raced], opener, cache) if limited else None
        if alone is not None and alone.absent:
            return self._by_prediction(made, mine)
        seconds = dict(enumerate([inf] * len(raced))) if alone is None else alone.seconds
        options = [made, *(p for i, r in enumerate(raced) if i in seconds for p in r.programs(seconds[i]))]
        if len(options) == 1:
            return made
        times = time_programs([o.program for o in options], segment_opener(chooser.backend, options), cache)
        if times.absent:
            return self._by_prediction(made, mine)
        first = chooser.backend.forms[0].name
        place, why = times.fastest([o.program.form or first for o in options], "form ")
        return replace(options[place], choice=f"{made.choice or options[place].program.policy}; form {why}")


@dataclass(frozen=True)
class _Rivals:
    """The programs of ``base`` in other ``forms``. ``first`` is True if the first form of the device suits it."""

    base: ProgramSegment
    planner: FormPlanner
    first: bool
    forms: tuple[ExecutionForm, ...]

    def programs(self, seconds: float = inf) -> Iterator[ProgramSegment]:
        """Yield a program for each group of forms, if it may be faster than the base, which takes ``seconds`` (inf: in any
        case)."""
        kernels = len({*kinds_of(self.base.program.operators, self.planner.binding).values()}) if seconds < inf else 0
        groups = [[*forms] for _, forms in groupby(self.forms, key=lambda f: f.group)]
        waves = seconds == inf or self.planner.policy == Wavefront()
        for forms in (g for g in groups if waves or not g[0].like_first):
            limits = forms[0].limits
            most = seconds * (limits.near if kernels <= limits.many else limits.clearly)
            if limits.least * self.base.program.predicted >= most or (kernels > limits.many and self._tasks > limits.crowded):
                continue
            made = self.planner.plan_group(forms)
            if made is None or made.program.predicted >= most:
                continue
            if not forms[0].like_first or replace(made.program, form="") != self.base.program:
                yield made

    @property
    def _tasks(self) -> float:
        """The mean number of an operator's tasks per row."""
        program = self.base.program
        return program.task_count / max(program.veus * len(program.operators), 1)
