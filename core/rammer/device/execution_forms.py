"""Execution forms: the ways in which a device runs a program, as data, and the capability of a backend with several forms.

The core plans, verifies and prices a program for each form, and measures the programs. ``Backend.load`` runs the form that the
program names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, runtime_checkable

from rammer.device.manifest import Binding
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import RProgram

__all__ = ["ExecutionForm", "FormLimits", "MultiForm"]


@dataclass(frozen=True, slots=True)
class FormLimits:
    """The limits within which a program of new kernels is planned and measured in a form. The base is the program in the device's
    first form.

    - ``near``: maximum predicted time, as a multiple of the base's measured time.
    - ``many``: number of distinct kernels above which ``clearly`` takes the place of ``near``.
    - ``least``: least ratio of the predicted time to the base's predicted time. A program that cannot be near is not planned.
    - ``crowded``: maximum mean number of an operator's tasks per vEU, for programs of more than ``many`` kernels."""

    near: float = inf
    clearly: float = inf
    many: int = 0
    least: float = 0.0
    crowded: float = inf


@dataclass(frozen=True, slots=True)
class ExecutionForm:
    """A way in which a device runs programs. ``name`` is the form's name in texts.

    - ``group``: forms of one group differ only in their block. One of them is measured: the first whose prediction is at most
      ``similar`` times the best.
    - ``threads``: threads of every task, or 0 if each kernel has its own. ``rows``: rows of a program per vEU.
    - ``keeps``: operators keep their kernels if the form can run them. Otherwise each operator's kernel is chosen again.
    - ``like_first``: the form differs from the device's first one in the program alone. It is used only for other kernels, which
      policy ``wavefront`` chooses wave by wave.
    - ``phases``: the form runs operators that hold constants and all between them. The others are launched before and after.
    - ``private``: buffers of a program that holds constants share no memory, if they need at most these bytes.
    - ``split``: least seconds of a product whose sum is also offered in parts.
    - ``preferred``: the form is used without a measurement for programs that suit it.
    - ``limits``: see ``FormLimits``."""

    name: str
    group: str = ""
    threads: int = 0
    rows: int = 1
    similar: float = 1.0
    keeps: bool = False
    like_first: bool = False
    phases: bool = False
    private: int = 0
    split: float = inf
    preferred: bool = False
    limits: FormLimits = FormLimits()


@runtime_checkable
class MultiForm(Protocol):
    """A Backend that runs programs in several execution forms."""

    @property
    def forms(self) -> Sequence[ExecutionForm]:
        """The forms. A program without a form runs in the first one."""
        ...

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        """Return the forms that may be the fastest for a program that was planned for the first form. The program is planned for
        another one if the first form is missing."""
        ...

    def form_kernels(self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool = False) -> Sequence[RKernel]:
        """Return the kernels of a tiled operator that ``form`` can run, priced in it, the best prediction first. The only one is
        that of the operator itself if it is to be kept, or if there is no other. A ``part`` of a split sum has no kernel yet; the
        result may be empty."""
        ...

    def holds_constants(self, operator: ROperator) -> bool:
        """Return True if a form with ``phases`` or ``private`` keeps the operator's constants on chip from task to task."""
        ...
