"""The programs of what a policy proposes: those that are legal, of which one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Backend
from rammer.errors import print_warning
from rammer.ir.device import VDevice
from rammer.ir.program import RProgram
from rammer.schedule.policy import Choosing, OperatorGraph, Policy, Schedule
from rammer.tuning.fastest_program import TimeCache, fastest_program, program_opener
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.expressions import VerifyError

__all__ = ["OPEN_LENGTHS", "Chooser", "build_legal_programs", "propose_schedules", "tuned_or_not"]

#: Why a program with lengths that runs tell is chosen by prediction: no one of them is what it will be run at.
OPEN_LENGTHS = "each run has its own lengths"


#: What a program with measured kernels and the one with predicted kernels are called where one of them is chosen.
KERNELS: Final = ("measured kernels", "predicted kernels")


def propose_schedules(policy: Policy, graph: OperatorGraph, device: VDevice) -> Sequence[tuple[Policy, Schedule]]:
    """The policy's schedule, or each that it proposes, with the policy that made it; the best prediction first."""
    if isinstance(policy, Choosing):
        return policy.proposals(graph, device)
    return [(policy, policy(graph, device))]


def build_legal_programs(
    proposals: Sequence[tuple[Policy, Schedule]], build: Callable[[Policy, Schedule], RProgram], most: int | None = None
) -> list[RProgram]:
    """The first ``most`` programs of schedules that can be. One that cannot is left out with a warning, where another one can;
    VerifyError where none can."""
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
    """Chooses among the programs of ``policy``, where it has several proposals: by whole runs on ``backend``, which the store
    keeps; by prediction for the reason ``unmeasured``, where there is one."""

    policy: Policy
    backend: Backend
    store: KernelStore
    unmeasured: str = ""

    def chosen(self, options: Sequence[ProgramSegment]) -> ProgramSegment:
        """One of ``options``, which are of one graph, with why."""
        first = options[0]
        if not isinstance(self.policy, Choosing) or (len(options) == 1 and first.program.policy == str(self.policy)):
            return first
        if self.unmeasured:
            return replace(first, choice=f"{first.program.policy}, by prediction: {self.unmeasured}")
        if len(options) == 1:
            return replace(first, choice=f"{first.program.policy}: no other schedule is legal and near it by prediction")
        programs, values = [o.program for o in options], {n: v for o in options for n, v in o.constants.items()}
        program, why = fastest_program(programs, program_opener(self.backend, values), TimeCache(self.backend, self.store))
        return replace(next(o for o in options if o.program is program), choice=why)


def tuned_or_not(tuned: ProgramSegment, plain: ProgramSegment, backend: Backend, store: KernelStore) -> ProgramSegment:
    """Return the faster of the program with measured kernels and the one with predicted kernels, by whole runs on the device.

    Kernels are measured alone: side by side in a program they share caches and bandwidth, so that a program of the fastest ones
    may be the slower one. The store keeps the times.
    """
    programs = [tuned.program, plain.program]
    if str(tuned.program) == str(plain.program):
        return tuned
    opened = program_opener(backend, {**plain.constants, **tuned.constants})
    program, why = fastest_program(programs, opened, TimeCache(backend, store), KERNELS)
    chosen = tuned if program is tuned.program else plain
    return replace(chosen, choice=f"{chosen.choice or chosen.program.policy}; {why}")
