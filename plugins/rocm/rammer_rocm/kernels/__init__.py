"""Kernel families, and what a unit offers of them: ``panel`` for contractions on CPUs, the generic one for everything."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite

from rammer.codegen.family_backend import FamilyBackend, Limits
from rammer.codegen.writer import KernelWriter
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, ROperator, prologue_variants

from rammer_rocm.kernels.channels import make_channels_family
from rammer_rocm.kernels.choose import GENERIC_RATE, make_panel_families
from rammer_rocm.kernels.generic import generic_tiles
from rammer_rocm.kernels.sliding.choose import make_image_family
from rammer_rocm.kernels.task import Family, TaskFunction
from rammer_rocm.kernels.winograd.choose import make_winograd_family

__all__ = ["OpenClKernels", "families_of", "task_function"]

#: Panel tiles offered to the tuner, before the generic ones.
PANEL_TILES = 6


def families_of(device: VDevice, without: Collection[str] = ()) -> tuple[Family, ...]:
    """The families whose kernels a unit can run, ``without`` some."""
    made = (
        *make_panel_families(device),
        make_winograd_family(device),
        make_image_family(device),
        make_channels_family(device),
        generic_tiles(device),
    )
    return tuple(f for f in made if f.needs(device) and f.name not in without)


def task_function(operator: ROperator, binding: Binding, device: VDevice) -> TaskFunction:
    """The text of one task of a tiled operator; an unknown family is computed by the generic kernel. Unsuited where a known one
    cannot compute it."""
    families = {f.name: f for f in families_of(device)}
    return (families.get(operator.family) or families[""]).kernel(operator, binding)


class OpenClKernels(FamilyBackend[VDevice, TaskFunction, None]):
    """What a backend says of a unit's kernels: no OpenCL is needed for it. Families that it is ``without`` are not offered."""

    def __init__(self, vdevice: VDevice, without: Collection[str] = ()) -> None:
        self.vdevice: VDevice = vdevice
        self.without = tuple(without)
        self.writer = KernelWriter(lambda operator, binding: task_function(operator, binding, vdevice))
        families = families_of(vdevice, without)
        super().__init__(families, vdevice, vdevice.veus, self.writer, self.needs, Limits(products=PANEL_TILES))

    def needs(self, function: TaskFunction) -> Resources:
        """Work-items, and bytes of local memory (on a CPU: of scratch)."""
        return Resources(threads=self.vdevice.threads, local_bytes=function.scratch)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """What the generic kernel reaches of the peak where an operand is held, or sums follow a product: the panel family
        reads its operands from memory, and has one sum."""
        sums = [c for c in operator.computes if c.kind != "map"]
        several = len(sums) > 1 and any(c.kind == "contraction" for c in sums)
        return GENERIC_RATE if several or operator.holds_operand else 1.0

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """The panel family computes the maps while it gathers the columns: the seconds without them over those with them."""
        products = [f for f in self.usable if f.product]
        bare, whole = (self.best(o, binding, products) - self.vdevice.launch for o in prologue_variants(operator))
        return min(1.0, bare / whole) if isfinite(bare) and isfinite(whole) else GENERIC_RATE
