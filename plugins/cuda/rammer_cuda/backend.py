"""The opened CUDA device: a GPU, or an architecture to compile for. Measurements replay one-operator programs as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from rammer.codegen.family_backend import FamilyBackend, Limits
from rammer.codegen.writer import generator_hash
from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, OpenOptions, Recorded
from rammer.errors import BadInput, DeviceUnavailable
from rammer.fusion.tile_search import candidates as tile_candidates
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, prologue_variants
from rammer.ir.program import RProgram
from rammer.tuning.kernel_probe import probe_program, random_inputs

from rammer_cuda.cell.recognise import MOST_ROWS
from rammer_cuda.compile import compile_all, compile_cubin, nvrtc_version
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.family import Held
from rammer_cuda.generic.cost import SHARE
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import Writer, translation_unit

if TYPE_CHECKING:
    from rammer_cuda.executor import CudaProgram
    from rammer_cuda.select import Execution

#: Replays of one measurement (the median counts), and copies of the operator chained in one replay: they make
#: the events' own resolution, about a microsecond, small.
REPLAYS, CHAIN = 9, 20


class CudaProfiler:
    """Measures on the backend's GPU; ``resources`` needs none."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:
        """Compile the kernels of many candidates side by side, so that measuring finds them made."""
        kernels = {k.entry: k for k in (self.backend.writer.written(o, b) for o, b in options)}
        compile_all({e: translation_unit([k]) for e, k in kernels.items()}, self.backend.gpu.architecture)

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Seconds of a task while the other SMs idle, and with all of them busy.

        The first is a launch of one task as a link of a chain, less an empty link. The second is such that rounds of tasks at
        ``RKernel.task_time`` take what the whole operator takes: how its blocks share SMs is the hardware's choice, so it may be
        less than the first, where several blocks fit into an SM.
        """
        operator, sms = kernel.operator, self.backend.gpu.sms
        whole = self._link_time(operator, binding, operator.task_count)
        if operator.task_count <= 1:
            return whole, whole
        alone = self._link_time(operator, binding, 1)
        if kernel.shares >= sms:
            return alone, whole / -(-kernel.shares // sms)
        alone = min(alone, whole)  # a clock's error: fewer tasks of one launch take no longer
        return alone, alone + (whole - alone) * sms / kernel.shares

    def _link_time(self, operator: ROperator, binding: Binding, tasks: int) -> float:
        """Seconds of the first ``tasks`` of an operator, without those of an empty launch."""
        return max(self.operator_time(operator, binding, tasks) - self.backend.gpu.launch, 1e-9)

    def operator_time(self, operator: ROperator, binding: Binding, tasks: int | None = None) -> float:
        """Seconds of all tasks of one operator, or of its first ``tasks``, as a link of a chain, on fresh random values."""
        program, constants = probe_program(operator, binding, operator.task_count if tasks is None else tasks)
        loaded = self.backend.open_program(program, constants, CHAIN)
        try:
            loaded.run(random_inputs(program, np.random.default_rng()))
            return float(np.median([loaded.replay() for _ in range(REPLAYS)])) / CHAIN
        finally:
            loaded.close()

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Registers, shared memory and spills, from ptxas."""
        return self.backend.resources(kernel.operator, binding)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Median seconds of the graph on fresh random inputs, after two warm-up runs."""
        loaded: Any = self.backend.load(program, constants)
        try:
            rng = np.random.default_rng()
            inputs = random_inputs(program, rng)
            for _ in range(2):
                loaded.run(inputs)
            return float(np.median([loaded.replay() for _ in range(iterations)]))
        finally:
            loaded.close()


def whole_program(operator: ROperator, binding: Binding) -> tuple[RProgram, dict[str, Array]]:
    """All tasks of ``operator``, one a row, and random constants."""
    return probe_program(operator, binding, operator.task_count)


#: Tiles offered to the tuner, which measures a dozen at most: of matrix products, and generic ones where no family suits.
PRODUCT_TILES, GENERIC_TILES = 14, 12
#: The least share of the peak that generic kernels reach which keep a contraction's operand on chip (measured on an H200: 0.001
#: to 0.034, 165 kernels of NASNet-A). Times are predicted by what is typical, fusions by the least: a wrong one costs many times
#: what a missed one does.
LEAST_SHARE = 0.001
#: Parts of a program's range that have tables of their own.
CASES = 4


def open_backend(options: OpenOptions) -> Backend:
    """A GPU, or a target without one. BadInput for an unknown target, DeviceUnavailable for --require."""
    if options.require and options.require != "gpu":
        raise DeviceUnavailable(f"cuda:{options.index} is a gpu, not a {options.require}")
    from rammer_cuda.select import Execution

    how = Execution.of(options.options)
    if options.target:
        if options.target not in TARGETS:
            raise BadInput(f"unknown CUDA target {options.target!r}", hint=f"one of: {', '.join(TARGETS)}")
        unit = Hardware(0, f"{TARGETS[options.target].name} (compile only)", "gpu", 0)
        return CudaBackend(TARGETS[options.target], unit, False, how)
    from rammer_cuda.hardware import create_context, gpu_of, probe_gpus

    unit = probe_gpus()[options.index]
    opened = CudaBackend(gpu_of(unit), unit, True, how)
    opened.context = create_context(options.index)
    return opened


def block_resources(kernel: TaskKernel) -> Resources:
    """What one block of a kernel takes, as far as its text tells."""
    return Resources(kernel.threads, local_bytes=kernel.shared)


class CudaBackend(FamilyBackend[Gpu, TaskKernel, Held]):
    """One GPU (``present``) or one to compile for; ``how`` programs are to be run there."""

    def __init__(self, gpu: Gpu, hardware: Hardware, present: bool, how: Execution) -> None:
        self.gpu, self.hardware, self.present = gpu, hardware, present
        self.how, self.writer = how, Writer()
        super().__init__(FAMILIES, gpu, gpu.sms, self.writer, block_resources, Limits(gpu.shared, PRODUCT_TILES))
        self.context: Thread | None = None  #: Creates the GPU's context.

    @cached_property
    def vdevice(self) -> VDevice:
        """What the core compiles for."""
        return replace(self.gpu.vdevice, few_rows=MOST_ROWS)

    @property
    def profiler(self) -> CudaProfiler:
        """Measurements on the GPU; resources from ptxas."""
        return CudaProfiler(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hardware, architecture, compiler and the text of the kernel generators."""
        return f"cuda {self.hardware.name} {self.gpu.architecture} nvrtc {nvrtc_version()} {generator_hash('rammer_cuda')}"

    def otherwise(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Generic tiles, as the core counts bytes."""
        return tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """The predicted rate of the best kernel family, or what the generic kernel reaches."""
        asked = [f for f in self.usable if (f.holds if operator.holds_operand else f.first is None)]
        seconds = self.best(operator, binding, asked) - self.gpu.launch  # whoever asks counts launches himself
        return max(LEAST_SHARE, operator.flops / max(seconds, 1e-9) / (self.gpu.flops * self.gpu.sms))

    def prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """The seconds of the best matrix-product kernel, or of another family's, without the maps over those with them."""
        bare, whole = prologue_variants(operator)
        for seconds, tiled in self.choices(whole, binding, *(f for f in self.usable if f.product)):
            same = replace(bare, tile=tiled.tile, family=tiled.family, config=tiled.config)
            alike = family_of(tiled).seconds(same, binding, self.gpu) + self.gpu.launch
            others = [f for f in self.usable if f.first is None and not f.product]
            return min(1.0, min(alike, self.best(bare, binding, others)) / seconds)
        return SHARE

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Registers, shared memory and spills from ptxas for this architecture."""
        made = self.writer.written(operator, binding)
        found = compile_cubin(translation_unit([made]), self.gpu.architecture).resources[made.entry]
        local = found.shared + made.dynamic  # ptxas knows only what is static
        return Resources(made.threads, found.registers, local, found.spills)

    @property
    def repeats(self) -> bool:
        """Turns are launched one behind the other."""
        return True

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The program, compiled and resident, for the executor asked for or measured to be the faster."""
        self._need_hardware()
        from rammer_cuda.select import open_executor

        return open_executor(program, constants, self.gpu, self.hardware.index, self.how, self.writer)

    @property
    def cases(self) -> int:
        """As many as were found to pay: what a round of blocks more costs is a step, and tables take little memory."""
        return CASES

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """A graph in the memory of ``first``, where that is one."""
        from rammer_cuda.executor import CudaProgram, Room

        if not isinstance(first, CudaProgram):
            return self.load(program, constants)
        return CudaProgram(program, constants, Room(self.gpu, self.hardware.index, first.resident), 1, self.writer)

    def close(self) -> None:
        """Nothing is this object's own: programs hold modules and memory, and the GPU's context is the process's."""
        if self.context is not None:
            self.context.join()

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Every block of one run with the SM that ran it, from kernels that record it."""
        from rammer_cuda.executor import CudaProgram
        from rammer_cuda.persistent.persistent_executor import PersistentProgram
        from rammer_cuda.trace import record_trace, trace_persistent

        loaded = self.load(program, constants)
        try:
            if isinstance(loaded, PersistentProgram):
                return trace_persistent(loaded, inputs).run
            assert isinstance(loaded, CudaProgram)
            return record_trace(loaded, inputs).run
        finally:
            loaded.close()

    def open_program(self, program: RProgram, constants: Mapping[str, Array], repeat: int = 1) -> CudaProgram:
        """The program as a CUDA graph, ``repeat`` copies of it chained."""
        self._need_hardware()
        from rammer_cuda.executor import CudaProgram, Room

        return CudaProgram(program, constants, Room(self.gpu, self.hardware.index), repeat, self.writer)

    def _need_hardware(self) -> None:
        """DeviceUnavailable without a GPU; its context is there when this returns."""
        if not self.present:
            raise DeviceUnavailable(
                f"target {self.gpu.architecture} was compiled for, but there is no such GPU to run on",
                hint="leave out --target to use the GPU of this machine",
            )
        if self.context is not None:
            self.context.join()
