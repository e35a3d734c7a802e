"""The opened CUDA device: a GPU, or an architecture to compile for. Measurements replay one-operator programs as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from rammer.codegen import FamilyBackend, Limits
from rammer.codegen.writer import generator_hash
from rammer.device.execution_forms import ExecutionForm
from rammer.device.manifest import (
    Array,
    Backend,
    Binding,
    Hardware,
    IterationCost,
    Loaded,
    MachineCode,
    OpenOptions,
    Profiler,
    Recorded,
)
from rammer.errors import BadInput, DeviceUnavailable, NoMachineCode
from rammer.fusion.tile_search import candidates as tile_candidates
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_probe import probe_program, random_inputs

from rammer_cuda.cell.recognise import MOST_ROWS
from rammer_cuda.compile import compile_all, compile_cubin, nvrtc_version
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.family import Held
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.row_kernels import RowKernels
from rammer_cuda.source import Writer, translation_unit

if TYPE_CHECKING:
    from rammer_cuda.executor import CudaProgram
    from rammer_cuda.forms import Execution

#: Replays of one measurement (the median counts), and copies of the operator chained in one replay, which make the resolution of
#: events, about a microsecond, negligible.
REPLAYS, CHAIN = 9, 20


class CudaProfiler(Profiler):
    """A profiler that measures on the backend's GPU; ``resources`` works without a GPU."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend

    def prepare(self, options: Sequence[tuple[ROperator, Binding]]) -> None:
        """Compile the kernels of many candidates in parallel before measuring."""
        kernels = {k.entry: k for k in (self.backend.writer.written(o, b) for o, b in options)}
        compile_all({e: translation_unit([k]) for e, k in kernels.items()}, self.backend.gpu.architecture)

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Return the seconds of a task while the other SMs idle, and with all of them busy.

        The first is a launch of one task as a link of a chain, less an empty link. The second is chosen so that rounds of tasks
        at ``RKernel.task_time`` add up to the whole operator's time. The hardware decides how blocks share SMs. So the second may
        be less than the first if several blocks fit into an SM.
        """
        operator, sms = kernel.operator, self.backend.gpu.sms
        whole = self._link_time(operator, binding, operator.task_count)
        if operator.task_count <= 1:
            return whole, whole
        alone = self._link_time(operator, binding, 1)
        if kernel.shares >= sms:
            return alone, whole / -(-kernel.shares // sms)
        alone = min(alone, whole)  # a clock error: a launch of fewer tasks is not slower
        return alone, alone + (whole - alone) * sms / kernel.shares

    def _link_time(self, operator: ROperator, binding: Binding, tasks: int) -> float:
        """Return the seconds of the first ``tasks`` of an operator, less an empty launch."""
        return max(self.operator_time(operator, binding, tasks) - self.backend.gpu.launch, 1e-9)

    def operator_time(self, operator: ROperator, binding: Binding, tasks: int | None = None) -> float:
        """Return the seconds of all tasks of one operator, or of its first ``tasks``, as a link of a
        chain, on new random values."""
        program, constants = probe_program(operator, binding, operator.task_count if tasks is None else tasks)
        loaded = self.backend.open_program(program, constants, CHAIN)
        try:
            loaded.run(random_inputs(program, np.random.default_rng()))
            return float(np.median([loaded.replay() for _ in range(REPLAYS)])) / CHAIN
        finally:
            loaded.close()

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return registers, shared memory and spills, from ptxas."""
        return self.backend.resources(kernel.operator, binding)

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Return the median seconds of the graph on new random inputs, after two warm-up runs."""
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
    """Return a program of all tasks of ``operator``, one a row, and random constants."""
    return probe_program(operator, binding, operator.task_count)


#: Tiles offered to the tuner, which measures a dozen at most: of matrix products, and of generic kernels if all families are
#: unsuitable.
PRODUCT_TILES, GENERIC_TILES = 14, 12
#: The least share of the peak of generic kernels with a contraction's operand on chip (measured on an H200: 0.001 to 0.034, 165
#: kernels of NASNet-A). Times are predicted with the typical share, fusions with the least: a wrong fusion costs many times a
#: missed one.
LEAST_SHARE = 0.001
#: Number of length variants that pay: one more round of blocks is a step in time, and tables need little memory.
CASES = 4


def open_backend(options: OpenOptions) -> Backend:
    """Open a GPU, or a target without one. Raise BadInput for an unknown target, DeviceUnavailable for --require."""
    if options.require and options.require != "gpu":
        raise DeviceUnavailable(f"cuda:{options.index} is a gpu, not a {options.require}")
    from rammer_cuda.forms import Execution

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
    """Return the resources of one block of a kernel, from its text only."""
    return Resources(kernel.threads, local_bytes=kernel.shared)


class CudaBackend(FamilyBackend[Gpu, TaskKernel, Held]):
    """A GPU (``present``) or a target to compile for; ``how`` selects the execution form of programs."""

    cases = CASES

    def __init__(self, gpu: Gpu, hardware: Hardware, present: bool, how: Execution) -> None:
        self.gpu, self.hardware, self.present = gpu, hardware, present
        self.how, self.writer = how, Writer()
        super().__init__(FAMILIES, gpu, gpu.sms, self.writer, block_resources, Limits(gpu.shared, PRODUCT_TILES))
        self.iteration_cost = IterationCost()  # iterations are launched one after another
        self.context: Thread | None = None  #: The thread that creates the GPU's context.

    @cached_property
    def vdevice(self) -> VDevice:
        """The virtual device that the core compiles for."""
        return replace(self.gpu.vdevice, few_rows=MOST_ROWS)

    @cached_property
    def profiler(self) -> CudaProfiler:
        """The profiler: measurements on the GPU, and resources from ptxas."""
        return CudaProfiler(self)

    @cached_property
    def fingerprint(self) -> str:
        """The hardware, architecture, compiler and the hash of the kernel generators."""
        without, code = "".join(f" without {name}" for name in self.excluded), generator_hash("rammer_cuda")
        return f"cuda {self.hardware.name} {self.gpu.architecture} nvrtc {nvrtc_version()} {code}{without}"

    def otherwise(self, operator: ROperator, binding: Binding) -> Iterable[ROperator]:
        """Return generic tiles, ranked by the core's byte counts."""
        return tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """Return the predicted share of peak of the best kernel family, or at least that of the generic kernel."""
        asked = [f for f in self.usable if f.keeps_operand_on_chip >= operator.holds_operand]
        seconds = self.best(operator, binding, asked) - self.gpu.launch  # the caller counts launches separately
        return max(LEAST_SHARE, operator.flops / max(seconds, 1e-9) / (self.gpu.flops * self.gpu.sms))

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Return registers, shared memory and spills from ptxas for this architecture."""
        made = self.writer.written(operator, binding)
        found = compile_cubin(translation_unit([made]), self.gpu.architecture).resources[made.entry]
        local = found.shared + made.dynamic  # ptxas reports only static shared memory
        return Resources(made.threads, found.registers, local, found.spills)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Load the program unchanged, for its execution form."""
        self._need_hardware()
        from rammer_cuda.forms import open_executor

        return open_executor(program, constants, self.gpu, self.hardware.index, self.how, self.writer)

    @cached_property
    def code_target(self) -> str:
        """The architecture: a cubin runs on all of its GPUs."""
        return self.gpu.architecture

    def export_code(self, program: RProgram, constants: Mapping[str, Array]) -> MachineCode:
        """Return the machine code of a program that is a graph of launches. Raises NoMachineCode for other forms."""
        from rammer_cuda.executor import compile_launches
        from rammer_cuda.shipped_launches import machine_code

        if (program.form and program.form not in self.how.launched_forms) or program.repeat is not None:
            what = "a loop program" if program.repeat is not None else f"the execution form {program.form}"
            raise NoMachineCode(
                f"machine code of {what} cannot be written", f"program {program.name}", "compile with --option executor=graph"
            )
        made = compile_launches(program, constants, self.gpu, self.writer, kept=True)
        return machine_code(program, made, constants, self.code_target)

    def load_code(self, program: RProgram, constants: Mapping[str, Array], code: MachineCode) -> Loaded:
        """Return the program with the kernels in ``code``."""
        self._need_hardware()
        from rammer_cuda.run_only import load_code

        return load_code(program, constants, code, self.gpu, self.hardware.index)

    @cached_property
    def forms(self) -> Sequence[ExecutionForm]:
        """The execution forms of the chosen executor."""
        return self.how.forms

    def suitable_forms(self, program: RProgram, binding: Binding) -> Sequence[ExecutionForm]:
        """Return the forms that may be the fastest for a program that was planned for the first one."""
        return self.how.suitable_forms(program, binding)

    def form_kernels(self, form: ExecutionForm, operator: ROperator, binding: Binding, part: bool = False) -> list[RKernel]:
        """Return the kernels that a block of ``form`` can call for an operator, priced on its rows."""
        found = self.row_kernels.of(form, operator, binding, part)
        return [RKernel(o, partial(self.write_kernel, o, binding), *times) for (_, o), times in found]

    def holds_constants(self, operator: ROperator) -> bool:
        """Return True if a persistent kernel keeps the operator's constants in registers."""
        return family_of(operator).persistent is not None

    @cached_property
    def row_kernels(self) -> RowKernels:
        """The kernels that persistent kernels can call."""
        return RowKernels(self.gpu, Writer(), self.usable)

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """Load a length variant as a graph in the memory of ``first``, if ``first`` is a graph."""
        from rammer_cuda.executor import CudaProgram, Room

        if not isinstance(first, CudaProgram):
            return self.load(program, constants)
        return CudaProgram(program, constants, Room(self.gpu, self.hardware.index, first.resident), 1, self.writer)

    def device_array(self, values: Array) -> Any:
        """Return a CuPy array with these values."""
        self._need_hardware()
        import cupy as cp

        with cp.cuda.Device(self.hardware.index):
            return cp.asarray(values)

    def host_array(self, array: Any) -> Array:
        """Return a copy of a CuPy array, or of an array with its interface, after all work of the GPU."""
        import cupy as cp

        with cp.cuda.Device(self.hardware.index) as device:
            device.synchronize()
            return np.asarray(cp.asnumpy(array))

    def close(self) -> None:
        """Wait for the context's creation. Programs hold modules and memory, and the GPU's context is the process's."""
        if self.context is not None:
            self.context.join()

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
        """Record every block of one run with its SM, using kernels that write the record."""
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
        """Return the program as a CUDA graph, ``repeat`` copies of it chained."""
        self._need_hardware()
        from rammer_cuda.executor import CudaProgram, Room

        return CudaProgram(program, constants, Room(self.gpu, self.hardware.index), repeat, self.writer)

    def _need_hardware(self) -> None:
        """Raise DeviceUnavailable without a GPU; wait until its context is created."""
        if not self.present:
            raise DeviceUnavailable(
                f"the program was compiled for target {self.gpu.architecture}, and no GPU of this target is present",
                hint="leave out --target to use the GPU of this machine",
            )
        if self.context is not None:
            self.context.join()
