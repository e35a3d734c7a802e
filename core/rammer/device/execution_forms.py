"""Execution forms: the ways in which a device runs a program, as data.

The core plans, verifies and prices a program for each form, and measures the programs. ``Backend.load`` runs the form that the
program names."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

__all__ = ["ExecutionForm", "FormLimits"]


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
