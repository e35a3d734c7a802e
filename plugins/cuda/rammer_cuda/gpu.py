"""GPU descriptions: the features, sizes and launch costs of each architecture.

The predefined GPUs serve ``--target``; ``rammer_cuda.hardware`` queries the driver for real ones. Families read their limits
here. Figures fitted to measured kernels stay with the fitted cost, and are marked there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rammer.ir.device import MemoryLayer, VDevice

#: Threads of one task's block in the generic family: four warps, one for each scheduler of an SM.
THREADS: Final = 128
#: Seconds between two dependent kernels of a CUDA graph: 0.55 us for a chain of empty kernels, measured on an H200.
NODE_SECONDS: Final = 0.55e-6
#: Error of the fraction of time that stitching is predicted to save: standard deviation 0.09, and 0.08 too much in the mean. From
#: 69 random graphs on an H200, with unfused operators priced as concurrent.
DOUBT: Final = 0.13
#: The part of their separate times that operators of one launch share: the start of kernels on rows by their fit (``rows.cost``),
#: not measured separately. With it, all of 13 random graphs stitched on an H200 are at least as fast as unfused. Without it 2 are
#: slower (0.90 and 0.94). The median gain is 1.08 in both cases. The value was chosen on these graphs.
START_SECONDS: Final = 0.4e-6
#: Values of float16 in 8 bytes, the least that products copy asynchronously.
LEAST_COPIED: Final = 4
#: FLOP per cycle of the SMs that the families' cost models were fitted on: 128 fp32 lanes.
FITTED: Final = 256.0
#: Bytes that L2 delivers to an SM in a cycle when all SMs read (measured on an H200: 5.5 TB/s).
L2_BYTES: Final = 21.0
#: Parts of a sum: blocks of a cluster. SMs of the graphics processing clusters of an H200; those that lack SMs differ between
#: chips.
SPLITS: Final = (1, 2, 3, 4, 6, 8)
GROUPS: Final = (18, 18, 18, 18, 16, 16, 14, 14)
#: fp32 lanes per SM by compute capability, and of all others (CUDA C++ programming guide, "Compute Capabilities").
LANES: Final = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
MOST_LANES: Final = 128


def capability_of(architecture: str) -> tuple[int, int]:
    """Return the compute capability, such as (9, 0) for ``sm_90a``."""
    digits = architecture.removeprefix("sm_").rstrip("a")
    return int(digits[:-1]), int(digits[-1])


@dataclass(frozen=True)
class Gpu:
    """A GPU with its figures. ``clock`` is in Hz, ``shared`` is a block's maximum shared memory in bytes.

    ``registers`` (of 32 bits) and ``threads`` are per SM. ``l2`` and ``memory`` are bytes, ``bandwidth`` is bytes/s of the
    memory. ``source`` is the origin of the figures."""

    architecture: str
    name: str
    sms: int
    clock: float
    shared: int
    l2: int
    memory: int
    bandwidth: float
    source: str
    registers: int = 64 << 10
    threads: int = 2048

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability, as (major, minor)."""
        return capability_of(self.architecture)

    @property
    def lanes(self) -> int:
        """fp32 lanes per SM, of 2 FLOP per cycle each."""
        return LANES.get(self.capability, MOST_LANES)

    @property
    def copies(self) -> bool:
        """True if threads can copy into shared memory asynchronously (``cp.async``)."""
        return self.capability >= (8, 0)

    @property
    def tf32(self) -> bool:
        """True if tensor cores multiply tf32 and bfloat16 (CUDA C++ programming guide, "Compute Capabilities")."""
        return self.capability >= (8, 0)

    @property
    def clusters(self) -> bool:
        """True if blocks can be launched as clusters that share their SMs' memory."""
        return self.capability >= (9, 0)

    @property
    def dependents(self) -> bool:
        """True if a kernel may start before its predecessors have finished (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def warpgroups(self) -> bool:
        """True if warpgroup products are supported: ``wgmma`` exists only on sm_90a."""
        return self.architecture == "sm_90a"

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that a user may request."""
        return ("float32", "tf32", "float16", "bfloat16") if self.tf32 else ("float32", "float16")

    @property
    def model_clock(self) -> float:
        """Cycles per second in the families' cost models. An SM with fewer lanes than those of the fit counts as a slower one."""
        return self.flops / FITTED

    @property
    def flops(self) -> float:
        """fp32 FLOP/s of an SM."""
        return 2.0 * self.lanes * self.clock

    @property
    def delivered(self) -> float:
        """Bytes per cycle that an SM gets from L2 when all SMs read."""
        return L2_BYTES

    @property
    def splits(self) -> tuple[int, ...]:
        """The numbers of blocks that may share a sum, as a cluster."""
        return SPLITS if self.clusters else (1,)

    def usable(self, split: int) -> int:
        """Return the SMs that clusters of ``split`` blocks can fill at once: a cluster stays inside one processing cluster."""
        groups = [g * self.sms // sum(GROUPS) for g in GROUPS]
        return max(split, sum(g // split * split for g in groups))

    @property
    def launch(self) -> float:
        """Seconds between two dependent kernels."""
        return NODE_SECONDS

    @cached_property
    def vdevice(self) -> VDevice:
        """The device description for the compiler's core: one vEU per SM."""
        guide = "CUDA C++ programming guide"
        layers = (
            MemoryLayer("global", "device", self.memory, self.bandwidth, 32, self.source),
            # 32 banks of 4 bytes per cycle and SM (CUDA C++ programming guide, "Shared Memory").
            MemoryLayer("shared", "veu", self.shared, 128.0 * self.clock * self.sms, 128, guide),
            MemoryLayer("register", "thread", 255 * 4, 12.0 * self.lanes * self.clock * self.sms, 4, guide),
        )
        return VDevice(
            "cuda",
            self.name,
            self.sms,
            layers,
            flops=self.flops,
            launch=self.launch,
            threads=THREADS,
            vector=1,
            resident=self.sms,
            source=self.source,
            precisions=self.precisions,
            doubt=DOUBT,
            start=START_SECONDS,
            channels=LEAST_COPIED if self.copies else 1,
        )


def _h200_gpu(architecture: str) -> Gpu:
    return Gpu(architecture, "H200 SXM", 132, 1.98e9, 227 << 10, 50 << 20, 141 * 10**9, 4.8e12, "NVIDIA H200 datasheet")


#: The predefined GPU of each architecture. Figures are the vendor's, per whole chip. Shared memory and threads are from the CUDA
#: C++ programming guide, "Compute Capabilities".
_KNOWN: Final = (
    Gpu("sm_75", "T4", 40, 1.59e9, 64 << 10, 4 << 20, 16 * 10**9, 3.2e11, "NVIDIA T4 datasheet", threads=1024),
    Gpu("sm_80", "A100 SXM 80 GB", 108, 1.41e9, 163 << 10, 40 << 20, 80 * 10**9, 2.039e12, "NVIDIA A100 datasheet"),
    Gpu("sm_86", "A10", 72, 1.695e9, 99 << 10, 6 << 20, 24 * 10**9, 6e11, "NVIDIA A10 datasheet", threads=1536),
    Gpu("sm_89", "L4", 58, 2.04e9, 99 << 10, 48 << 20, 24 * 10**9, 3e11, "NVIDIA L4 datasheet", threads=1536),
    _h200_gpu("sm_90"),
    _h200_gpu("sm_90a"),
)
TARGETS: Final = {gpu.architecture: gpu for gpu in _KNOWN}
