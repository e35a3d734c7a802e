"""GPUs by architecture name, for compiling without one. Figures are the vendor's, per whole chip."""

from __future__ import annotations

from rammer.ir.device import MemoryLayer, VDevice

#: Threads of one task's block in the generic family: four warps, one for each scheduler of an SM.
THREADS = 128
#: Seconds between two dependent kernels of a CUDA graph: 0.55 us for a chain of empty kernels, measured on an H200.
NODE_SECONDS = 0.55e-6


def gpu(name: str, description: str, *, sms: int, clock: float, cores: int, shared: int, memory: int, bandwidth: float,
        source: str, precisions: tuple[str, ...] = ("float32", "tf32", "float16")) -> VDevice:  # fmt: skip
    """A VDevice: one vEU an SM; ``clock`` in Hz, ``cores`` fp32 lanes an SM (2 FLOP each a cycle),
    ``shared`` bytes of shared memory a block may have, ``memory`` bytes, ``bandwidth`` bytes/s."""
    layers = (
        MemoryLayer("global", "device", memory, bandwidth, 32, source),
        # 32 banks of 4 bytes a cycle and SM (CUDA C++ programming guide, "Shared Memory").
        MemoryLayer("shared", "veu", shared, 128.0 * clock * sms, 128, "CUDA C++ programming guide"),
        MemoryLayer("register", "thread", 255 * 4, 12.0 * cores * clock * sms, 4, "CUDA C++ programming guide"),
    )
    return VDevice("cuda", description, sms, layers, flops=2.0 * cores * clock, launch=NODE_SECONDS, threads=THREADS,
                   vector=1, resident=sms, source=source, precisions=precisions)  # fmt: skip


def model_clock(device: VDevice) -> float:
    """Cycles a second by which the families' cost models count. They were fitted on SMs of 128 fp32 lanes (256 FLOP a
    cycle); an SM with fewer lanes counts as a slower one."""
    return device.flops / 256.0


#: Architecture -> the GPU that stands for it.
TARGETS: dict[str, VDevice] = {
    "sm_80": gpu("sm_80", "A100 SXM 80 GB", sms=108, clock=1.41e9, cores=64, shared=163 << 10, memory=80 * 10**9,
                 bandwidth=2.039e12, source="NVIDIA A100 datasheet"),
    "sm_90": gpu("sm_90", "H200 SXM", sms=132, clock=1.98e9, cores=128, shared=227 << 10, memory=141 * 10**9,
                 bandwidth=4.8e12, source="NVIDIA H200 datasheet"),
    "sm_90a": gpu("sm_90a", "H200 SXM", sms=132, clock=1.98e9, cores=128, shared=227 << 10, memory=141 * 10**9,
                  bandwidth=4.8e12, source="NVIDIA H200 datasheet"),
}  # fmt: skip
