"""The ``window`` family: the core's windows of strips (``rammer.codegen.products.window_strips``), in CUDA."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rammer.codegen import Forms
from rammer.codegen.products import Window, WindowWriter, thread_count, window_of, window_seconds, window_tilings
from rammer.device.manifest import Binding

from rammer_cuda.family import size_keys
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import Frame
from rammer_cuda.kernels.task import TaskKernel


def _write_kernel(w: Window, binding: Binding) -> TaskKernel:
    frame = Frame(w.operator, binding, {c.name: c for c in w.operator.computes}, thread_count(w))
    return WindowWriter(w, frame).kernel()


_WINDOWS: Final[Forms[Window, Gpu, TaskKernel]] = Forms(window_of, window_tilings, window_seconds, _write_kernel)
WINDOW: Final = replace(_WINDOWS.family("window", size_keys("high", "wide")), packable=True)
