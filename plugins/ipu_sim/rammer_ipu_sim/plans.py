"""Plans of batches that the host's memory allows."""

from __future__ import annotations

import math
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.compute import contraction_operands
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize

from rammer_ipu_sim.batch import BatchPlan, plan_batch
from rammer_ipu_sim.supersteps import Batch, halves

#: Bytes of the host's memory that one batch may take while it is simulated.
BUDGET: Final = 1 << 28


def affordable(batch: Batch, program: RProgram) -> list[BatchPlan]:
    """The batch's plan, or several of smaller batches where simulating it at once takes too much memory."""
    plan = plan_batch(batch, program.types)
    if batch.tasks.size <= 1 or _host_bytes(plan, program) <= BUDGET:
        return [plan]
    return [p for half in halves(batch) for p in affordable(half, program)]


def _host_bytes(plan: BatchPlan, program: RProgram) -> int:
    """Bytes of host memory to simulate a plan: staged boxes, interior tensors, unfolded operands."""
    total = 0
    for stage in plan.stages:
        total += math.prod((*stage.dims, *stage.extents)) * itemsize(program.types[stage.tensor].dtype)
    for step in plan.steps:
        extents = {a.name: a.extent for a in (*step.compute.axes, *step.compute.reduce)}
        total += math.prod(step.shape) * itemsize(step.compute.dtype)
        for load in contraction_operands(step.compute) or ():
            total += math.prod(extents[a] for a in ex.axes_of(load)) * itemsize(step.compute.dtype)
    return total
