"""Recurrent cells as a kernel family."""

from __future__ import annotations

from typing import Final

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.cell.kernel import cell
from rammer_cuda.cell.recognise import THREADS, cell_candidates, cell_seconds, vectors_of
from rammer_cuda.family import Family, Held
from rammer_cuda.gpu import Gpu
from rammer_cuda.rows.gemv import GEMV


def pays(operator: ROperator, binding: Binding, gpu: Gpu) -> bool:
    """Whether to hold weights: where they are used again, or where nothing else multiplies few rows."""
    return bool(binding.reused & {*operator.inputs}) or not GEMV.candidates(operator, binding, gpu)


CELL: Final = Family(
    "cell", {}, cell_candidates, cell_seconds, cell, most=1 << 10, first=pays, own=Held(THREADS, cell, vectors_of)
)
