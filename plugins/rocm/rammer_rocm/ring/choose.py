"""The family of products in a ring on GPUs: the core's tiles, block shapes and cost, with the figures of an OpenCL GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rammer.codegen import Choice
from rammer.codegen.products.ring_choice import ring_choices, ring_time
from rammer.codegen.products.ring_cost import REGISTERS, LaunchCycles, RingCost
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import Family
from rammer_rocm.kernels.units import Units
from rammer_rocm.ring.kernel import MOST_LOCAL, Fma, ring_kernel

NAME: Final = "ring"
#: Block depths with their slices.
BLOCKS: Final = ((8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (32, 8))
KEYS: Final = ("tm", "tn", "bk", "split_k", "slice_k", "stages")


def ring_cost(device: VDevice) -> RingCost:
    """Return the costs on ``device``. They are those of cuda's FFMA kernels, with the exchange of partial sums in memory."""
    return RingCost(
        Fma(NAME, device.threads),
        REGISTERS,
        BLOCKS,
        LaunchCycles(1900, 850, 4000),
        160,
        2.1,
        0.1,
        7.0,
        6.0,
        0.0,
        0.3,
        (0.25, 0.25),
        port=True,
        write=30,
        threads=(64, device.threads),
        items=device.threads,
        local=MOST_LOCAL,
    )


def make_ring_family(device: VDevice) -> Family:
    """Return the family of products on GPUs, of groups of ``device.threads`` work-items."""
    cost = ring_cost(device)
    instruction = Fma(NAME, device.threads)

    def candidates(operator: ROperator, binding: Binding, unit: VDevice) -> Iterable[Choice]:
        return ring_choices(cost, operator, binding, Units(unit))

    return Family(
        NAME,
        dict.fromkeys(KEYS, range(0, 1025)),
        candidates,
        lambda operator, binding, unit: ring_time(cost, operator, binding, Units(unit)),
        lambda operator, binding: ring_kernel(operator, binding, instruction),
        lambda unit: unit.threads > 1,
        product=True,
        spread=lambda operator: max(1, dict(operator.config).get("split_k", 1)),
    )
