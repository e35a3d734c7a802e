"""The choice among the legal programs of a policy's proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Backend
from rammer.errors import print_warning
from rammer.ir.program import RProgram
from rammer.schedule.policy import Policy, Schedule
from rammer.tuning.fastest_program import Opener, TimeCache, fastest_program, program_opener
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.expressions import VerifyError

__all__ = ["OPEN_LENGTHS", "Chooser", "build_legal_programs", "segment_opener", "tuned_or_not"]

#: Reason for choosing a program with run-time lengths by prediction: no single length is representative.
OPEN_LENGTHS = "each run has its own lengths"


#: Names of a program with measured kernels and of one with predicted kernels, if one of them is chosen.
KERNELS: Final = ("measured kernels", "predicted kernels")


def build_legal_programs(
    proposals: Sequence[tuple[Policy, Schedule]], build: Callable[[Policy, Schedule], RProgram], most: int | None = None
) -> list[RProgram]:
    """Return the first ``most`` programs of legal schedules. Illegal schedules are left out with a warning if another one is
    legal. Raises VerifyError if none is legal."""
    made, problems = list[RProgram](), list[VerifyError]()
    for policy, schedule in proposals:
        if len(made) == most:
            break
        try:
            made.append(build(policy, schedule))
        except VerifyError as problem:
            problems.append(problem)
            if len(problems) == len(proposals):
                raise problems[0] from None
            print_warning(f"policy {policy} is left out: {problem.what}")
    return made


@dataclass(frozen=True)
class Chooser:
    """Chooser among the programs of ``policy``, if it has several proposals. It measures whole runs on ``backend``, which the
    store caches. It uses predictions if ``unmeasured`` has a reason."""

    policy: Policy
    backend: Backend
    store: KernelStore
    unmeasured: str = ""

    def chosen(self, options: Sequence[ProgramSegment]) -> ProgramSegment:
        """Return one of ``options``, which are of one graph, with the reason."""
        first = options[0]
        if len(options) == 1 and first.program.policy == str(self.policy):
            return first
        if self.unmeasured:
            return replace(first, choice=f"{first.program.policy}, by prediction: {self.unmeasured}")
        if len(options) == 1:
            return replace(first, choice=f"{first.program.policy}: no other schedule is legal and near it by prediction")
        opener, programs = segment_opener(self.backend, options), [o.program for o in options]
        program, why = fastest_program(programs, opener, TimeCache(self.backend, self.store))
        return replace(next(o for o in options if o.program is program), choice=why)


def segment_opener(backend: Backend, options: Sequence[ProgramSegment]) -> Opener:
    """Return an opener for the programs of ``options``, each with its own constants."""
    return program_opener(backend, lambda program: next(o.constants for o in options if o.program is program))


def tuned_or_not(tuned: ProgramSegment, plain: ProgramSegment, backend: Backend, store: KernelStore) -> ProgramSegment:
    """Return the faster of the program with measured kernels and the one with predicted kernels, by whole runs on the device.

    Kernels are measured alone. In a program they share caches and bandwidth, so a program of the fastest ones may be slower. The
    store caches the times."""
    programs = [tuned.program, plain.program]
    if str(tuned.program) == str(plain.program):
        return tuned
    program, why = fastest_program(programs, segment_opener(backend, (tuned, plain)), TimeCache(backend, store), KERNELS)
    chosen = tuned if program is tuned.program else plain
    return replace(chosen, choice=f"{chosen.choice or chosen.program.policy}; {why}")
