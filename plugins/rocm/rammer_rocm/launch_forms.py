"""The execution forms of an OpenCL GPU: a launch for each group of independent operators, one launch of all levels, or one launch
for each range of small levels.

A launch costs several times as much as a wait of all groups for each other. In one launch, however, all kernels have the
registers and the local memory of the largest one, so fewer groups of each run at a time. The core measures the first and the last
form. A user may choose the second, which is planned with kernels of which several groups fit a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rammer.device.execution_forms import ExecutionForm
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram

WAVES: Final = ExecutionForm("waves")
SINGLE: Final = ExecutionForm("single")
MIXED: Final = ExecutionForm("mixed", keeps=True)
#: The forms by the option ``executor``. A program without a form runs in the first one.
FORMS: Final[Mapping[str, tuple[ExecutionForm, ...]]] = {
    "": (WAVES, MIXED),
    "waves": (WAVES,),
    "single": (SINGLE,),
    "mixed": (MIXED,),
}


def form_of(program: RProgram, forms: Sequence[ExecutionForm]) -> ExecutionForm:
    """Return the form of a program on a device with ``forms``. Raises DeviceFailure for an unknown one."""
    known = {form.name: form for form in (WAVES, SINGLE, MIXED)} | {"": forms[0]}
    if program.form not in known:
        raise DeviceFailure(
            f"program {program.name} is for the execution form {program.form}, which device rocm does not have",
            hint=f"it has {', '.join(filter(None, known))}: compile the model again",
        )
    return known[program.form]
