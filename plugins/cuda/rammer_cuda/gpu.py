"""A GPU as data: the one place that says what an architecture has, and how much of it.

Known GPUs stand for ``--target``; ``rammer_cuda.hardware`` asks the driver for real ones. What families count by is read
here; figures that were fitted to measured kernels stay with the cost that was fitted, and are called so there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rammer.ir.device import MemoryLayer, VDevice

#: Threads of one task's block in the generic family: four warps, one for each scheduler of an SM.
THREADS: Final = 128
#: Seconds between two dependent kernels of a CUDA graph: 0.55 us for a chain of empty kernels, measured on an H200.
NODE_SECONDS: Final = 0.55e-6
#: By how much the share of time that stitching is predicted to save is off, of 69 random graphs on an H200, operators apart
#: priced side by side: 0.09 (standard deviation), and 0.08 too much in the mean.
DOUBT: Final = 0.13
#: What operators of one launch share of their times alone: as long as kernels on rows take to start by their fit
#: (``rows.rowcost``), not measured by itself. Of 13 random graphs that were stitched on an H200 none is slower than apart with it
#: and 2 are without it (0.90 and 0.94), at the same median gain, 1.08; it was chosen with these at hand.
START_SECONDS: Final = 0.4e-6
#: FLOP a cycle of the SMs that the families' cost models were fitted on: 128 fp32 lanes.
FITTED: Final = 256.0
#: fp32 lanes an SM by compute capability, and of any other (CUDA C++ programming guide, "Compute Capabilities").
LANES: Final = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
MOST_LANES: Final = 128


def capability_of(architecture: str) -> tuple[int, int]:
    """(9, 0) of ``sm_90a``."""
    digits = architecture.removeprefix("sm_").rstrip("a")
    return int(digits[:-1]), int(digits[-1])


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``clock`` in Hz; ``shared`` bytes of shared memory a block may have; ``registers`` of 32 bits and ``threads``
    an SM; ``l2`` and ``memory`` bytes; ``bandwidth`` bytes/s of the memory; ``source`` of the figures."""

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
        """Compute capability."""
        return capability_of(self.architecture)

    @property
    def lanes(self) -> int:
        """fp32 lanes an SM, of 2 FLOP a cycle each."""
        return LANES.get(self.capability, MOST_LANES)

    @property
    def copies(self) -> bool:
        """Whether threads copy into shared memory without waiting (``cp.async``)."""
        return self.capability >= (8, 0)

    @property
    def tf32(self) -> bool:
        """Whether tensor cores multiply tf32 and bfloat16 (CUDA C++ programming guide, "Compute Capabilities")."""
        return self.capability >= (8, 0)

    @property
    def clusters(self) -> bool:
        """Whether blocks can be launched as clusters that share an SM's memory with each other."""
        return self.capability >= (9, 0)

    @property
    def dependents(self) -> bool:
        """Whether a kernel may start before those that it depends on have finished (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def warpgroups(self) -> bool:
        """Whether there are warpgroup products: ``wgmma`` exists on sm_90a alone."""
        return self.architecture == "sm_90a"

    @property
    def precisions(self) -> tuple[str, ...]:
        """What a user may ask for."""
        return ("float32", "tf32", "float16", "bfloat16") if self.tf32 else ("float32", "float16")

    @property
    def model_clock(self) -> float:
        """Cycles a second by which the families' cost models count: an SM with fewer lanes than those of the fit counts as
        a slower one."""
        return self.flops / FITTED

    @property
    def flops(self) -> float:
        """fp32 FLOP/s of an SM."""
        return 2.0 * self.lanes * self.clock

    @property
    def launch(self) -> float:
        """Seconds between two dependent kernels."""
        return NODE_SECONDS

    @cached_property
    def vdevice(self) -> VDevice:
        """What the compiler's core knows of it: one vEU an SM."""
        guide = "CUDA C++ programming guide"
        layers = (
            MemoryLayer("global", "device", self.memory, self.bandwidth, 32, self.source),
            # 32 banks of 4 bytes a cycle and SM (CUDA C++ programming guide, "Shared Memory").
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
        )


def _h200_gpu(architecture: str) -> Gpu:
    return Gpu(architecture, "H200 SXM", 132, 1.98e9, 227 << 10, 50 << 20, 141 * 10**9, 4.8e12, "NVIDIA H200 datasheet")


#: The GPU that stands for each architecture. Figures are the vendor's, per whole chip; shared memory and threads are those of
#: the CUDA C++ programming guide, "Compute Capabilities".
_KNOWN: Final = (
    Gpu("sm_75", "T4", 40, 1.59e9, 64 << 10, 4 << 20, 16 * 10**9, 3.2e11, "NVIDIA T4 datasheet", threads=1024),
    Gpu("sm_80", "A100 SXM 80 GB", 108, 1.41e9, 163 << 10, 40 << 20, 80 * 10**9, 2.039e12, "NVIDIA A100 datasheet"),
    Gpu("sm_86", "A10", 72, 1.695e9, 99 << 10, 6 << 20, 24 * 10**9, 6e11, "NVIDIA A10 datasheet", threads=1536),
    Gpu("sm_89", "L4", 58, 2.04e9, 99 << 10, 48 << 20, 24 * 10**9, 3e11, "NVIDIA L4 datasheet", threads=1536),
    _h200_gpu("sm_90"),
    _h200_gpu("sm_90a"),
)
TARGETS: Final = {gpu.architecture: gpu for gpu in _KNOWN}
