"""A device of an author with a memory between the vEU's and the device's: an SRAM that four cores share. Kernels are those of
``rammer_c``."""

from __future__ import annotations

from typing import Final

from rammer.device.loader import Registry
from rammer.device.manifest import Device, OpenOptions
from rammer.ir.device import MemoryLayer, VDevice
from rammer_testing.conformance import registry_of

import rammer_c

#: Cores, those of one cluster, and the bytes of a core's memory and of a cluster's SRAM.
CORES: Final = 8
SHARERS: Final = 4
LOCAL: Final = 16 << 10
SRAM: Final = 2 << 20


def clusters(sram: int = SRAM, bandwidth: float = 4e11) -> VDevice:
    """Return the device with clusters of ``sram`` bytes; without the layer if that is 0."""
    between = (MemoryLayer("sram", "cluster", sram, bandwidth, sharers=SHARERS),) if sram else ()
    layers = (
        MemoryLayer("dram", "device", 0, 2e10),
        *between,
        MemoryLayer("local", "veu", LOCAL, 1.6e12),
        MemoryLayer("register", "thread", 512, 6.4e12),
    )
    return VDevice("clusters", "two clusters of four cores", CORES, layers, flops=2e10, launch=2e-6, resident=CORES)


class ClusterBackend(rammer_c.CBackend):
    """The device with the memory layers of ``clusters``."""

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        self.vdevice = clusters()
        self.fingerprint += ", clusters"


def registry() -> Registry:
    """Return a registry with the device."""
    return registry_of(Device("clusters", "two clusters of four cores: an example", rammer_c.probe, ClusterBackend, api=5))
