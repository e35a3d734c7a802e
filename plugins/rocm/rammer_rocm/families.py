"""Kernel families of an OpenCL device: products and windows on CPUs, and the generic family for every operator."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rammer.codegen import FamilyBackend, Limits
from rammer.codegen.writer import KernelWriter
from rammer.device.manifest import Array, Binding, Loaded
from rammer.errors import DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, ROperator
from rammer.ir.program import RProgram

from rammer_rocm.channels.kernel import make_channels_family
from rammer_rocm.codes.choose import make_codes_family
from rammer_rocm.dots.choose import make_dots_family
from rammer_rocm.generic.kernel import GPU_CHAIN_RATE, make_generic_family
from rammer_rocm.image.choose import make_image_family
from rammer_rocm.kernels.task import Family, TaskFunction
from rammer_rocm.matrix.choose import make_matrix_families
from rammer_rocm.panel.choose import GENERIC_RATE, make_panel_family
from rammer_rocm.ring.choose import SHARED_LOCAL, make_ring_family
from rammer_rocm.window.choose import make_window_family
from rammer_rocm.winograd.choose import make_winograd_family

__all__ = ["OpenClKernels", "families_of", "task_function"]

#: Number of panel tiles offered to the tuner, before the generic tiles.
PANEL_TILES = 6


def families_of(device: VDevice, without: Collection[str] = (), resident: int = 0) -> tuple[Family, ...]:
    """Return the families whose kernels a device can run, except those named in ``without``. A unit of a GPU runs ``resident``
    groups at a time (0: as many as fit)."""
    made = (
        make_panel_family(device),
        make_dots_family(device),
        make_codes_family(device),
        make_winograd_family(device),
        make_image_family(device),
        make_channels_family(device),
        *make_matrix_families(device, resident),
        make_ring_family(device, resident),
        make_window_family(device),
        make_generic_family(device),
    )
    return tuple(f for f in made if f.supported_by(device) and f.name not in without)


def limit_local(device: VDevice, resident: int = 0) -> int:
    """Return the bytes of local memory that a kernel may use (0: any), ``resident`` of which a unit runs at a time (0: as many
    as fit). A CPU's scratch memory is in device memory."""
    capacity = device.layer("veu").capacity
    return 0 if device.threads == 1 else min(capacity, SHARED_LOCAL) if resident > 1 else capacity


def task_function(operator: ROperator, binding: Binding, device: VDevice) -> TaskFunction:
    """Return the task function of a tiled operator; the generic kernel computes unlisted families. Raises Unsuited if a listed
    family cannot compute the operator."""
    families = {f.name: f for f in families_of(device)}
    return (families.get(operator.family) or families[""]).kernel(operator, binding)


class OpenClKernels(FamilyBackend[VDevice, TaskFunction, None]):
    """Backend functions for a device's kernels, which do not need OpenCL. The families in ``without`` are not offered."""

    def __init__(self, vdevice: VDevice, without: Collection[str] = (), resident: int = 0) -> None:
        self.vdevice: VDevice = vdevice
        self.without = tuple(without)
        self.writer = KernelWriter(lambda operator, binding: task_function(operator, binding, vdevice))
        families, limits = families_of(vdevice, without, resident), Limits(limit_local(vdevice, resident), PANEL_TILES)
        super().__init__(families, vdevice, vdevice.veus, self.writer, self.needs, limits)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Raise DeviceUnavailable: a device that is only described runs no program."""
        raise DeviceUnavailable(f"{self.vdevice.name} is only described: no program runs on it")

    def close(self) -> None:
        """Do nothing: the kernels' texts hold no resources."""

    def needs(self, function: TaskFunction) -> Resources:
        """Return the work-items and the bytes of local memory (on a CPU: of scratch)."""
        return Resources(threads=function.threads, local_bytes=function.scratch)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """Return GENERIC_RATE, on a GPU GPU_CHAIN_RATE: no family computes several sums."""
        return GPU_CHAIN_RATE if self.vdevice.threads > 1 else GENERIC_RATE
