"""The family of products in a ring on GPUs: the core's tiles, block shapes and cost, with the figures of an OpenCL GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rammer.codegen import Choice
from rammer.codegen.products.ring_choice import ring_choices, ring_time
from rammer.codegen.products.ring_cost import REGISTERS, LaunchCycles, RingCost
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.task import Family
from rammer_rocm.ring.kernel import MOST_LOCAL, Fma, ring_kernel

NAME: Final = "ring"
#: Registers (of 32 bits) and work-items of a compute unit: equal on NVIDIA's SMs (compute capability 7 to 9) and AMD's CDNA.
REGISTER_COUNT, ITEMS = 64 << 10, 2048
#: Groups of a compute unit that local memory should leave room for.
GROUPS: Final = 2
#: Groups that may share a sum.
SPLITS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
#: FLOP per cycle of a unit of the fitted model (``ring_cost``).
FITTED: Final = 256.0
#: Bytes that the second-level cache delivers to a unit per cycle.
DELIVERED: Final = 21.0
#: Block depths with their slices.
BLOCKS: Final = ((8, 1), (16, 1), (16, 2), (16, 4), (32, 1), (32, 2), (32, 4), (32, 8))
KEYS: Final = ("tm", "tn", "bk", "split_k", "slice_k", "stages")


@dataclass(frozen=True)
class Units:
    """The figures of a device by which products are priced (``ring_cost.Processor``)."""

    device: VDevice
    registers: int = REGISTER_COUNT
    threads: int = ITEMS
    delivered: float = DELIVERED
    splits: tuple[int, ...] = SPLITS

    @property
    def sms(self) -> int:
        """Compute units."""
        return self.device.veus

    @property
    def shared(self) -> int:
        """Bytes of local memory of a unit."""
        return GROUPS * self.device.layer("veu").capacity

    @property
    def model_clock(self) -> float:
        """Cycles per second in the model."""
        return self.device.flops / FITTED

    @property
    def launch(self) -> float:
        """Seconds between dependent launches."""
        return self.device.launch

    def usable(self, split: int) -> int:
        """Return all units: groups that share a sum may be anywhere."""
        return self.device.veus


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
