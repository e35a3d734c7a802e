"""The family of products in a ring on GPUs: the core's tiles, block shapes and cost, with the figures of an OpenCL GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rammer.codegen import Choice
from rammer.codegen.products import REGISTERS, LaunchCycles, RingCost, ring_choices, ring_time
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import Family
from rammer_rocm.kernels.units import ITEMS, Units
from rammer_rocm.ring.kernel import MOST_LOCAL, Fma, ring_kernel

NAME: Final = "ring"
#: Most local memory of a group in bytes if a unit must hold several.
SHARED_LOCAL: Final = 32 << 10
#: Block depths with their slices.
BLOCKS: Final = ((8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (32, 8))
KEYS: Final = ("tm", "tn", "bk", "split_k", "slice_k", "stages")


def ring_cost(device: VDevice, resident: int = 0) -> RingCost:
    """Return the costs on ``device``, of whose units each runs ``resident`` groups (0: as many as fit).

    Fitted to 700 kernels of 22 products and convolutions on an H200. The measured time over the predicted has a standard
    deviation of 0.085, with more weight on the faster kernels of an operator. The first choice is 7% slower than the best
    measured one in the mean. The costs of cuda's FFMA kernels, from which the fit began, have a deviation of 0.15 and 10%."""
    return RingCost(
        Fma(NAME, device.threads),
        REGISTERS,
        BLOCKS,
        LaunchCycles(4620, 620, 5980),
        240,
        1.35,
        0.38,
        0.08,
        28.0,
        0.21,
        0.09,
        (0.25, 0.25),
        port=True,
        write=24,
        threads=(64, device.threads),
        items=device.threads,
        local=SHARED_LOCAL if resident > 1 else MOST_LOCAL,
    )


def make_ring_family(device: VDevice, resident: int = 0) -> Family:
    """Return the family of products on GPUs, of groups of ``device.threads`` work-items. A unit runs ``resident`` groups."""
    cost, items = ring_cost(device, resident), resident * device.threads or ITEMS
    instruction = Fma(NAME, device.threads)

    def candidates(operator: ROperator, binding: Binding, unit: VDevice) -> Iterable[Choice]:
        return ring_choices(cost, operator, binding, Units(unit, threads=items))

    return Family(
        NAME,
        dict.fromkeys(KEYS, range(0, 1025)),
        candidates,
        lambda operator, binding, unit: ring_time(cost, operator, binding, Units(unit, threads=items)),
        lambda operator, binding: ring_kernel(operator, binding, instruction),
        lambda unit: unit.threads > 1,
        product=True,
        spread=lambda operator: max(1, dict(operator.config).get("split_k", 1)),
        fused_forms=frozenset({"trailing maps", "leading maps"}),
    )
