"""Kernel families: ``generic`` for everything, ``panel`` for contractions on CPUs."""

from __future__ import annotations

from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, ROperator, Written

from rammer_rocm.kernels.generic import CPU_DIALECT, GPU_DIALECT, generic
from rammer_rocm.kernels.panel import panel
from rammer_rocm.kernels.task import TaskFunction

__all__ = ["PANEL", "task_function", "written"]

PANEL = "panel"


def task_function(operator: ROperator, binding: Binding, device: VDevice) -> TaskFunction:
    """The text of one task of a tiled operator; an unknown family is computed by the generic kernel."""
    if operator.family == PANEL and device.threads == 1:
        try:
            return panel(operator, binding, device.vector)
        except Unsuited as problem:
            raise DeviceFailure(
                f"operator {operator.name} is no matrix product for family panel: {problem}",
                where=operator.anchor.origin,
                hint="choose another tile, or no family",
            ) from problem
    return generic(operator, binding, CPU_DIALECT if device.threads == 1 else GPU_DIALECT)


def written(operator: ROperator, binding: Binding, device: VDevice) -> Written:
    """The text of a task, with its work-items and the bytes of local memory (on a CPU: of scratch) that it uses."""
    function = task_function(operator, binding, device)
    return Written(function.text, Resources(threads=device.threads, local_bytes=function.scratch))
