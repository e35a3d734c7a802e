"""Execution forms: the core plans a verified program for each form, measures them, and loads the fastest one unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.compiler.form_planning import FormPlanner, cut_phases
from rammer.device.execution_forms import ExecutionForm, FormLimits
from rammer.device.loader import Registry
from rammer.device.manifest import Binding, RunResult
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import Port, RProgram, waves
from rammer.jit.self_test import tiny_graph
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.verifier import verify
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, adding, summing

PLAIN = ExecutionForm("plain")
#: A form of two rows per vEU, with limits, and one that runs programs as the first form does.
LIMITS = FormLimits(near=1.2, clearly=0.8, many=100, least=0.5, crowded=0.5)
WIDE = ExecutionForm("wide", "rows", threads=2, rows=2, limits=LIMITS)
ALIKE = ExecutionForm("alike", "alike", threads=1, like_first=True, limits=LIMITS)
#: A form that holds constants, in phases or in one.
INNER = ExecutionForm("inner", "held", keeps=True, phases=True, private=1 << 20, similar=inf, preferred=True)
WHOLE = ExecutionForm("whole", "held", keeps=True, private=1 << 20, similar=inf, preferred=True)


@dataclass
class Formed:
    """The toy device with execution forms, of which ``suitable`` suit every program.

    A run in a form takes ``seconds``, as a multiple of the prediction for the first form; a form without seconds fails. Operators
    named in ``held`` hold constants. A task of a form's kernel is as long as ``larger`` tasks of the operator's own."""

    suitable: Sequence[ExecutionForm]
    seconds: Mapping[str, float] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    larger: int = 1
    first: ExecutionForm = PLAIN
    absent: bool = False
    loaded: list[RProgram] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain: Any = Registry().open("toy")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    @property
    def forms(self) -> Sequence[ExecutionForm]:
        return self.first, *(f for f in self.suitable if f != self.first)

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        return self.suitable

    def form_kernels(self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool = False) -> list[RKernel]:
        axis = max(range(len(operator.tile)), key=lambda d: operator.grid[d])
        tile = tuple(n * self.larger if d == axis else n for d, n in enumerate(operator.tile))
        return [] if part else [self.plain.kernel(replace(operator, tile=tile), binding)]

    def holds_constants(self, operator: ROperator) -> bool:
        return operator.name in self.held

    def load(self, program: RProgram, constants: Mapping[str, Any]) -> Any:
        if self.absent:
            raise DeviceUnavailable("no such device here")
        self.loaded.append(program)
        name = program.form or self.first.name
        if name not in self.seconds:
            raise DeviceFailure(f"{name} does not fit")
        return Timed(self.seconds[name] * self.loaded[0].predicted)


@dataclass
class Timed:
    """A loaded program whose runs take ``seconds``."""

    seconds: float

    def run(self, inputs: Mapping[str, Any]) -> RunResult:
        return RunResult({}, self.seconds)

    def close(self) -> None: ...


def compiled(backend: Formed, policy: str = "wavefront") -> ProgramSegment:
    """Return the program that the core compiles for ``backend``, verified again."""
    compiler = Compiler(backend, CompileOptions(policy), KernelStore(None))
    made = compiler.program(tiny_graph(3), (Port("x", "x"),), (Port("y", "y"),))
    verify(made.program)
    assert RProgram.parse(str(made.program)) == made.program
    return made


def forms_of(backend: Formed) -> list[str]:
    """Return the forms of the programs that were loaded, without repetitions."""
    return list(dict.fromkeys(p.form for p in backend.loaded))


@pytest.mark.parametrize("rows, want", [(0.5, "wide"), (2.0, "")])
def test_the_fastest_form_is_measured_and_named(rows: float, want: str) -> None:
    backend = Formed((PLAIN, WIDE), {"plain": 1.0, "wide": rows})
    made = compiled(backend)
    assert forms_of(backend) == ["", "wide"] and made.program.form == want
    assert made.choice.startswith(f"wavefront; form {want or 'plain'}, by measurement: plain ")
    assert made.program in some(backend.loaded), "another program was measured"
    assert made.program.veus == backend.vdevice.veus * (2 if want else 1)


def planned(backend: Formed, form: ExecutionForm) -> float:
    """Return the predicted time in a form, as a multiple of that in the first form."""
    base = compiled(Formed((PLAIN,)))
    return FormPlanner(base, backend).plan(form).program.predicted / base.program.predicted


@pytest.mark.parametrize("changed", [{}, {"many": 0}, {"many": 0, "clearly": 1.2}, {"least": 1.0}, {"many": 0, "crowded": 1e9}])
@pytest.mark.parametrize("times", [0.95, 1.05, 0.99 / 1.2, 1.01 / 1.2, 0.99 / 0.8, 1.01 / 0.8])
def test_a_form_is_measured_if_its_prediction_is_near(times: float, changed: dict[str, Any]) -> None:
    """Check the limits: the base takes ``times`` the prediction for the form."""
    limits = replace(LIMITS, **changed)
    form = replace(WIDE, limits=limits)
    share = planned(Formed((PLAIN, form)), form)
    backend = Formed((PLAIN, form), {"plain": times * share, "wide": 0.1})
    compiled(backend)
    near = limits.near if limits.many else limits.clearly
    tasks = compiled(Formed((PLAIN,))).program.task_count / backend.vdevice.veus / 1  # of one operator
    tried = share < near * times * share and limits.least < near * times * share and (limits.many or tasks <= limits.crowded)
    assert forms_of(backend) == (["", "wide"] if tried else [""])


def test_the_first_block_that_is_similar_to_the_best_is_used() -> None:
    backend = Formed((PLAIN, WIDE))
    planner = FormPlanner(ProgramSegment(middle(), {}), backend)
    single = replace(WIDE, name="single", rows=1)
    better = min((single, WIDE), key=lambda f: planner.plan(f).program.predicted)
    worse = WIDE if better is single else single
    ratio = planner.plan(worse).program.predicted / planner.plan(better).program.predicted
    assert ratio > 1.01, "the blocks are equal"
    for similar, want in ((0.99 * ratio, better), (1.01 * ratio, worse)):
        made = planner.plan_group([replace(worse, similar=similar), replace(better, similar=similar)])
        assert made is not None and made.program.form == want.name


def test_a_form_like_the_first_is_built_for_other_kernels_only() -> None:
    same, other = (Formed((PLAIN, ALIKE), {"plain": 9.0, "alike": 0.5}, larger=n) for n in (1, 2))
    assert compiled(same).program.form == "" and forms_of(same) == [""]
    assert compiled(other).program.form == "alike"
    stages = Formed((PLAIN, ALIKE), {"plain": 9.0, "alike": 0.5}, larger=2)
    assert compiled(stages, "sequential").program.form == "", "kernels are not chosen wave by wave"


def test_a_form_that_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Formed((PLAIN, WIDE), {"plain": 9.0})
    assert compiled(backend).program.form == "" and forms_of(backend) == ["", "wide"]
    assert "form wide is left out: wide does not fit" in capsys.readouterr().err


@pytest.mark.parametrize("held, form", [({"y"}, "whole"), (set(), "")])
def test_without_the_device_a_preferred_form_is_used(held: set[str], form: str) -> None:
    backend = Formed((PLAIN, WIDE, INNER, WHOLE) if held else (PLAIN, WIDE), held=frozenset(held), absent=True)
    made = compiled(backend)
    assert made.program.form == form and not made.choice


@pytest.mark.parametrize("policy", ["wavefront", "auto"])
def test_a_requested_form_competes_with_no_other(policy: str) -> None:
    backend = Formed((WIDE,), {"plain": 0.1, "wide": 1.0})
    made = compiled(backend, policy)
    assert made.program.form == "wide" and "" not in forms_of(backend)


def test_each_policys_program_competes_in_every_form() -> None:
    backend = Formed((PLAIN, WIDE), {"plain": 9.0, "wide": 1.0})
    made = compiled(backend, "auto")
    policies = {p.policy for p in backend.loaded if p.form == "wide"}
    assert made.program.form == "wide" and policies == {p.policy for p in backend.loaded if not p.form}


def middle() -> RProgram:
    """Return a program in which ``b`` can hold constants, ``a`` comes first, ``d`` last, and ``c`` is independent of ``b``."""
    net = TaskNet().tensor("x", 12)
    for operator in (
        adding("a", 12, ["x"], 2),
        summing("b", 12, "a", 2, 12),
        adding("c", 12, ["a"], 3),
        summing("d", 12, "b", 2, 12),
        adding("y", 12, ["c", "d"], 4),
    ):
        net = net.add(operator)
    return net.program(Wavefront(), 3)


def test_phases_are_what_holds_constants_and_all_between() -> None:
    program = middle()
    assert cut_phases(program, {"b"}) == {"a": 0, "b": 1, "c": 0, "d": 2, "y": 2}
    assert cut_phases(program, {"b", "d"}) == {"a": 0, "b": 1, "c": 0, "d": 1, "y": 2}
    assert cut_phases(program, {"a", "c", "y"}) is None and cut_phases(program, ()) is None


def test_a_program_in_phases_runs_them_one_after_another() -> None:
    program = middle()
    backend = Formed((PLAIN, INNER), held=frozenset({"b"}))
    made = FormPlanner(ProgramSegment(program, {}), backend).plan(INNER).program
    phase = {"a": 0, "b": 1, "c": 0, "d": 2, "y": 2}
    assert [phase[o.name] for o in made.operators] == [0, 0, 1, 2, 2] and made.form == "inner"
    assert all([phase[t.operator] for t in row] == sorted(phase[t.operator] for t in row) for row in some(made.rows))
    spans = sorted((b.offset, b.offset + b.nbytes) for b in made.buffers if b.kind == "arena")
    assert all(first[1] <= second[0] for first, second in some(pairwise(spans)))
    assert sorted((t.operator, t.index) for row in made.rows for t in row) == sorted(
        (placed.task.operator, placed.task.index) for wave in waves(program) for placed in wave
    )


def test_a_program_that_needs_too_much_memory_keeps_its_arena() -> None:
    net, names = TaskNet().tensor("x", 12), "xabcdy"
    for name, read in zip(names[1:], names, strict=False):
        net = net.add(summing(name, 12, read, 2, 12))
    program = net.program(Wavefront(), 3)
    backend = Formed((PLAIN, WHOLE), held=frozenset({"b"}))
    planner = FormPlanner(ProgramSegment(program, {}), backend)
    assert planner.plan(replace(WHOLE, private=64)).program.buffers == program.buffers
    assert planner.plan(WHOLE).program.arena_bytes > program.arena_bytes
