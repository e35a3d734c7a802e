"""The opened CUDA device: a GPU, or an architecture to compile for."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.tile.search import candidates as tile_candidates
from rammer.tile.traffic import task_cost

from rammer_cuda.compile import compile_cubin, version
from rammer_cuda.kernels.chain import chain_of
from rammer_cuda.kernels.choose import Choice, gemm_choices, gemm_seconds
from rammer_cuda.kernels.choose_wide import wide_choices, wide_seconds
from rammer_cuda.kernels.plain import plain_candidates, plain_seconds, suits
from rammer_cuda.kernels.rows import chain_candidates, chain_seconds
from rammer_cuda.profiler import CudaProfiler
from rammer_cuda.source import task_kernel, translation_unit
from rammer_cuda.targets import TARGETS

if TYPE_CHECKING:
    from rammer_cuda.executor import CudaProgram

#: Tiles offered to the tuner, which measures a dozen at most.
OFFERED = 16
#: Generic kernels that stage tiles on chip reach about this share of the peak (measured on an H200: 0.03 to 0.1).
GENERIC_SHARE = 0.06


def open_backend(options: OpenOptions) -> Backend:
    """A GPU, or a target without one. BadInput for an unknown target, DeviceUnavailable for --require."""
    if options.require and options.require != "gpu":
        raise DeviceUnavailable(f"cuda:{options.index} is a gpu, not a {options.require}")
    if options.target:
        if options.target not in TARGETS:
            raise BadInput(f"unknown CUDA target {options.target!r}", hint=f"one of: {', '.join(TARGETS)}")
        unit = Hardware(0, f"{TARGETS[options.target].description} (compile only)", "gpu", 0)
        return CudaBackend(TARGETS[options.target], unit, options.target, present=False)
    from rammer_cuda.hardware import architecture, probe_gpus, virtual_device

    unit = probe_gpus()[options.index]
    return CudaBackend(virtual_device(options.index, unit), unit, architecture(options.index), present=True)


class CudaBackend:
    """One GPU (``present``) or one architecture."""

    def __init__(self, vdevice: VDevice, hardware: Hardware, arch: str, present: bool) -> None:
        self.vdevice, self.hardware, self.arch, self.present = vdevice, hardware, arch, present

    @property
    def profiler(self) -> CudaProfiler:
        """Measurements on the GPU; resources from ptxas."""
        return CudaProfiler(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hardware, architecture, compiler and the text of the kernel generators."""
        return f"cuda {self.hardware.name} {self.arch} nvrtc {version()} {_generator_hash()}"

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tiles and families whose shared memory fits, best predicted first."""
        if chains := chain_candidates(operator, binding, self.vdevice) if self._warpgroups else []:
            return [o for _, o in chains]
        products = [gemm_choices(operator, binding, self.vdevice)]
        products += [wide_choices(operator, binding, self.vdevice)] if self._warpgroups else []
        plain = (Choice(o, seconds) for seconds, o in plain_candidates(operator, binding, self.vdevice, OFFERED))
        ranked = heapq.merge(*products, plain, key=lambda c: c.seconds)
        found = list(islice((c.operator for c in ranked if self._fits(c.operator, binding)), OFFERED))
        generic = [] if found else tile_candidates(operator, binding, self.vdevice, OFFERED)
        return [*found, *(o for o in generic if self._fits(o, binding))]

    def _fits(self, operator: ROperator, binding: Binding) -> bool:
        """Whether the operator's family can write its kernel, and an SM has the shared memory for it."""
        try:
            return task_kernel(operator, binding).shared <= self.vdevice.layer("veu").capacity
        except DeviceFailure:
            return False

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """The predicted rate of ``gemm_chain``, or what the generic kernel reaches."""
        chains = chain_candidates(operator, binding, self.vdevice) if self._warpgroups else []
        best = chains[0][0] if chains else float("inf")
        return max(GENERIC_SHARE, operator.flops / best / (self.vdevice.flops * self.vdevice.veus))

    @property
    def _warpgroups(self) -> bool:
        """Whether the architecture has warpgroup products (``wgmma`` exists on sm_90a alone)."""
        return self.arch == "sm_90a"

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Text and predicted times; ``profiler.resources`` compiles it."""
        made = task_kernel(operator, binding)
        resources = Resources(made.threads, local_bytes=made.shared)
        predicted = self._predicted(operator, binding)
        if predicted is not None:
            seconds = predicted / -(-operator.task_count // self.vdevice.veus)
            return RKernel(operator, made.text, resources, seconds, seconds)
        cost = task_cost(operator, binding.types, self.vdevice)
        slow = operator.main.flops / max(operator.task_count, 1) / self.vdevice.flops / GENERIC_SHARE
        return RKernel(operator, made.text, resources, max(cost.alone, slow), max(cost.crowded, slow))

    def _predicted(self, operator: ROperator, binding: Binding) -> float | None:
        """Seconds of all tasks without the launch, where the operator's family has a model of its own."""
        if operator.family in ("gemm", "gemm_tf32x3"):
            return gemm_seconds(operator, binding, self.vdevice)
        if operator.family == "gemm_wgmma3":
            return wide_seconds(operator, binding, self.vdevice)
        if operator.family == "gemm_chain":
            return chain_seconds(chain_of(operator, binding), self.vdevice)
        return plain_seconds(operator, binding, self.vdevice) if suits(operator) else None

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Registers, shared memory and spills from ptxas for this architecture."""
        made = task_kernel(operator, binding)
        found = compile_cubin(translation_unit([made]), self.arch).resources[made.entry]
        local = found.shared + made.dynamic  # ptxas knows only what is static
        return Resources(made.threads, found.registers, local, found.spills)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The program, compiled, resident and captured in a CUDA graph."""
        return self.open_program(program, constants)

    def open_program(self, program: RProgram, constants: Mapping[str, Array], repeat: int = 1) -> CudaProgram:
        """``load`` with ``repeat`` copies of the program chained in the graph."""
        if not self.present:
            raise DeviceUnavailable(f"target {self.arch} was compiled for, but there is no such GPU to run on",
                                    hint="leave out --target to use the GPU of this machine")  # fmt: skip
        from rammer_cuda.executor import CudaProgram

        return CudaProgram(program, constants, self.arch, self.hardware.index, repeat)


def _generator_hash() -> str:
    """Content hash of everything that writes kernel text: this package and the core's emitter."""
    import rammer.codegen

    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *map(Path, rammer.codegen.__path__)):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
