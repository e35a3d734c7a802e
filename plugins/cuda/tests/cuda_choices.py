"""Choices of some kernel families, as the backend ranks them, and programs planned for rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from rammer.codegen.kernel_family import Choice
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.form_planning import FormPlanner
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import Backend, Binding
from rammer.ir.operator import ROperator

from rammer_cuda.backend import CudaBackend
from rammer_cuda.contraction.choose import PRODUCTS
from rammer_cuda.families import FAMILIES
from rammer_cuda.family import Family
from rammer_cuda.forms import ROWS
from rammer_cuda.gpu import TARGETS

#: Products of warps and threads, products of warpgroups, and the families of other operators.
WARPS = tuple(f for f in PRODUCTS if f.supported_by(TARGETS["sm_80"]))
WARPGROUPS = tuple(f for f in PRODUCTS if f not in WARPS)
OTHERS = tuple(f for f in FAMILIES if f.name and f.exclusive is None and not f.product)


def choices(
    backend: CudaBackend, operator: ROperator, binding: Binding, families: Iterable[Family], count: int = 200
) -> list[Choice]:
    """Return the first ``count`` choices that can be written and fit, best predicted first."""
    return list(islice(backend.choices(operator, binding, *families), count))


def others(backend: CudaBackend, operator: ROperator, binding: Binding, count: int) -> list[ROperator]:
    """Return the first ``count`` candidates of each of ``OTHERS``."""
    return [c.operator for f in OTHERS for c in choices(backend, operator, binding, (f,), count)]


def planned_rows(backend: Backend, segment: ProgramSegment, forms: Sequence[ExecutionForm] = ROWS) -> ProgramSegment:
    """Return a program planned for the rows of a persistent kernel, in one of ``forms``."""
    made = FormPlanner(segment, backend).plan_group(forms)
    assert made is not None
    return made
