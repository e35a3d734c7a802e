"""What the device's own compiler says that kernels need."""

from __future__ import annotations

from dataclasses import replace

from rammer.compiled.segments import Compiled, ProgramSegment, Segment
from rammer.device.manifest import Backend, Binding, Preparing


def with_needs(compiled: Compiled, backend: Backend) -> Compiled:
    """``compiled``, every candidate kernel with the threads, registers and local memory that the device's compiler reports.
    DeviceFailure where one cannot be compiled."""
    segments = (_known(s, backend) if isinstance(s, ProgramSegment) else s for s in compiled.segments)
    return replace(compiled, segments=tuple(segments))


def _known(segment: ProgramSegment, backend: Backend) -> Segment:
    binding, profiler = Binding.of(segment.program, segment.constants), backend.profiler
    if isinstance(profiler, Preparing):
        profiler.prepare([(k.operator, binding) for kernels in segment.kernels.values() for k in kernels])
    kernels = {
        name: tuple(replace(k, compiled=profiler.resources(k, binding)) for k in kernels)
        for name, kernels in segment.kernels.items()
    }
    return replace(segment, kernels=kernels)
