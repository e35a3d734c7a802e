"""The family of windows on GPUs: the core's strips (``rammer.codegen.products.window_strips``) in OpenCL C."""

from __future__ import annotations

from typing import Final

from rammer.codegen import Forms, KernelFamily, Unsuited
from rammer.codegen.products import Window, WindowWriter, thread_count, window_of, window_seconds, window_tilings
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.group_frame import GroupFrame
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.kernels.units import Units, for_devices

NAME: Final = "window"


def make_window_family(device: VDevice) -> KernelFamily[VDevice, TaskFunction, None]:
    """Return the family of windows on GPUs, of groups of ``device.threads`` work-items."""

    def recognise(operator: ROperator, binding: Binding) -> Window:
        if operator.reduce_bounds or operator.skips:
            raise Unsuited("windows of a length")
        return window_of(operator, binding)

    def write(w: Window, binding: Binding) -> TaskFunction:
        if thread_count(w) > device.threads:
            raise Unsuited(f"{thread_count(w)} of {device.threads} work-items")
        frame = GroupFrame(w.operator, binding, {c.name: c for c in w.operator.computes}, device.threads)
        return WindowWriter(w, frame).kernel()

    forms: Forms[Window, Units, TaskFunction] = Forms(recognise, window_tilings, window_seconds, write)
    return for_devices(forms.family(NAME, dict.fromkeys(("high", "wide"), range(0, 1025))))
