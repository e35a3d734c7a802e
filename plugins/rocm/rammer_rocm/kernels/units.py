"""The figures of an OpenCL GPU by which the core's families of groups are priced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, cast

from rammer.codegen import KernelFamily
from rammer.ir.device import VDevice

from rammer_rocm.kernels.task import TaskFunction

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

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the device's memory."""
        return self.device.layer("device").bandwidth


def for_devices(family: KernelFamily[Units, TaskFunction, Any]) -> KernelFamily[VDevice, TaskFunction, None]:
    """Return a family of the core for devices with groups of work-items."""
    return replace(
        cast("KernelFamily[Any, TaskFunction, None]", family),
        candidates=lambda operator, binding, device: family.candidates(operator, binding, Units(device)),
        seconds=lambda operator, binding, device: family.seconds(operator, binding, Units(device)),
        supported_by=lambda device: device.threads > 1,
    )
