"""The opened CUDA device: a GPU, or an architecture to compile for."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from threading import Thread
from typing import TYPE_CHECKING

from rammer.codegen.generators import generator_hash
from rammer.device.lazily import Lazily
from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, OpenOptions, Span
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.device import VDevice
from rammer.ir.operator import Resources, RKernel, ROperator, Written, compared
from rammer.ir.program import RProgram
from rammer.tile.search import candidates as tile_candidates
from rammer.tile.traffic import task_cost

from rammer_cuda.attention.cost import attention_candidates, attention_seconds
from rammer_cuda.cell.recognise import cell_candidates, cell_seconds
from rammer_cuda.chain.kernel import chain_candidates, chain_seconds
from rammer_cuda.chain.recognise import chain_of
from rammer_cuda.compile import compile_cubin, version
from rammer_cuda.contraction.choose import gemm_choices, gemm_seconds
from rammer_cuda.contraction.choose_wide import WIDE_FAMILIES, wide_choices, wide_seconds
from rammer_cuda.contraction.families import FAMILIES
from rammer_cuda.generic.cost import plain_candidates, plain_seconds, suits
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.profiler import CudaProfiler
from rammer_cuda.rows.gemv import gemv_candidates, gemv_seconds
from rammer_cuda.rows.rowwise import rowwise_candidates, rowwise_seconds
from rammer_cuda.source import CONFIGS, task_kernel, translation_unit
from rammer_cuda.window.kernel import window_candidates, window_seconds

if TYPE_CHECKING:
    from rammer_cuda.executor import CudaProgram
    from rammer_cuda.select import Execution

#: Tiles offered to the tuner, which measures a dozen at most: of matrix products, of every other family, and generic ones.
GEMM_TILES, PLAIN_TILES, GENERIC_TILES = 14, 6, 12
#: More than any family has.
EVERY = 1 << 20
#: Families of matrix products, of which only those that fit are offered.
PRODUCTS = {*FAMILIES, *WIDE_FAMILIES}
#: How far behind the best prediction a family's best may be and still be measured among the first: so many times, and seconds.
LEADING, NEAR = 1.3, 2e-6
#: Families of operators that are no matrix product: candidates, and predicted seconds of a tiled one without its launch.
CHOOSERS = (gemv_candidates, rowwise_candidates, window_candidates)
SECONDS = {**dict.fromkeys(FAMILIES, gemm_seconds), **dict.fromkeys(WIDE_FAMILIES, wide_seconds), "gemv": gemv_seconds,
           "rowwise": rowwise_seconds, "window": window_seconds, "attention": attention_seconds}  # fmt: skip
#: Share of the peak that generic kernels which stage tiles on chip reach (measured on an H200: 0.03 to 0.1), and the least of
#: those that keep a contraction's operand there (0.001 to 0.034, 165 kernels of NASNet-A). Times are predicted by what is
#: typical, fusions by the least: a wrong one costs many times what a missed one does.
GENERIC_SHARE, LEAST_SHARE = 0.06, 0.001


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


class CudaBackend:
    """One GPU (``present``) or one to compile for; ``how`` programs are to be run there."""

    def __init__(self, gpu: Gpu, hardware: Hardware, present: bool, how: Execution) -> None:
        self.gpu, self.hardware, self.present = gpu, hardware, present
        self.how = how
        self.context: Thread | None = None  #: Creates the GPU's context.

    @property
    def vdevice(self) -> VDevice:
        """What the core compiles for."""
        return self.gpu.vdevice

    @property
    def profiler(self) -> CudaProfiler:
        """Measurements on the GPU; resources from ptxas."""
        return CudaProfiler(self)

    @cached_property
    def fingerprint(self) -> str:
        """Hardware, architecture, compiler and the text of the kernel generators."""
        return f"cuda {self.hardware.name} {self.gpu.architecture} nvrtc {version()} {generator_hash('rammer_cuda')}"

    @property
    def families(self) -> Mapping[str, Mapping[str, range]]:
        """What kernels there are texts for."""
        return CONFIGS

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Tiles and families whose shared memory fits: the best predicted of each family, then the rest, best first."""
        cells = cell_candidates(operator, binding, self.gpu)
        single = gemv_candidates(operator, binding, self.gpu, 1) and not binding.reused & {*operator.inputs}
        if cells and not single:  # holding weights pays where they are used again
            return cells
        if chains := chain_candidates(operator, binding, self.gpu) if self.gpu.warpgroups else []:
            return [o for _, o in chains]
        if rows := attention_candidates(operator, binding, self.gpu, GEMM_TILES):
            return Lazily(o for _, o in rows if self._fits(o, binding))
        return Lazily(self._ranked(operator, binding))

    def _ranked(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """``candidates`` of all other families, one by one: a kernel is written to see whether it fits."""
        chosen = [f for choose in (plain_candidates, *CHOOSERS) for f in choose(operator, binding, self.gpu, PLAIN_TILES)]
        merged = heapq.merge(self._products(operator, binding), sorted(chosen, key=lambda f: f[0]), key=lambda f: f[0])
        found = False
        for _, tiled in _leaders_first(merged):
            found = True
            if tiled.family in PRODUCTS or self._fits(tiled, binding):
                yield tiled
        if not found:
            tiles = tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)
            yield from (t for t in tiles if self._fits(t, binding))

    def offered(self, operator: ROperator, binding: Binding) -> Iterator[ROperator]:
        """Every choice of every family, whatever its prediction; nothing is kept from cells, chains and attention."""
        yield from cell_candidates(operator, binding, self.gpu)
        yield from (o for _, o in chain_candidates(operator, binding, self.gpu)) if self.gpu.warpgroups else ()
        for choose in (attention_candidates, plain_candidates, *CHOOSERS):
            yield from (o for _, o in choose(operator, binding, self.gpu, EVERY))
        for choices in (gemm_choices, wide_choices)[: 1 + self.gpu.warpgroups]:
            yield from (c.operator for c in choices(operator, binding, self.gpu))
        yield from tile_candidates(operator, binding, self.vdevice, GENERIC_TILES)

    def _products(self, operator: ROperator, binding: Binding, count: int = GEMM_TILES) -> Iterator[tuple[float, ROperator]]:
        """(predicted seconds, tiled copy) of the matrix-product families, best first: no kernel is written in vain."""
        kinds = [gemm_choices(operator, binding, self.gpu)]
        kinds += [wide_choices(operator, binding, self.gpu)] if self.gpu.warpgroups else []
        ranked = heapq.merge(*kinds, key=lambda c: c.seconds)
        return islice(((c.seconds, c.operator) for c in ranked if self._fits(c.operator, binding)), count)

    def _fits(self, operator: ROperator, binding: Binding) -> bool:
        """Whether the operator's family can write its kernel, and an SM has the shared memory for it."""
        try:
            return task_kernel(operator, binding).shared <= self.gpu.shared
        except DeviceFailure:
            return False

    def rate(self, operator: ROperator, binding: Binding) -> float:
        """The predicted rate of the best kernel family, or what the generic kernel reaches. With maps before a contraction: the
        seconds of the best matrix-product kernel, or of another family's, without them over those with them."""
        if operator.prologue:
            return self._prologue_rate(operator, binding)
        seconds = self._held(operator, binding) if operator.holds_operand else self._plain(operator, binding)
        seconds = max(seconds - self.gpu.launch, 1e-9)  # whoever asks counts launches himself
        return max(LEAST_SHARE, operator.flops / seconds / (self.gpu.flops * self.gpu.sms))

    def _held(self, operator: ROperator, binding: Binding) -> float:
        """Predicted seconds of the families that keep a product's operand on chip; infinite where none suits."""
        found = chain_candidates(operator, binding, self.gpu) if self.gpu.warpgroups else []
        found += attention_candidates(operator, binding, self.gpu, 1)
        return min((seconds for seconds, _ in found), default=float("inf"))

    def _plain(self, operator: ROperator, binding: Binding) -> float:
        """Predicted seconds of all other families; infinite where none suits."""
        found = [c.seconds for c in islice(gemm_choices(operator, binding, self.gpu), 1)]
        found += [c.seconds for c in islice(wide_choices(operator, binding, self.gpu), 1)] if self.gpu.warpgroups else []
        for choose in (plain_candidates, *CHOOSERS):
            found += [seconds for seconds, _ in choose(operator, binding, self.gpu, 1)]
        return min(found, default=float("inf"))

    def _prologue_rate(self, operator: ROperator, binding: Binding) -> float:
        """``rate`` of an operator with maps before its contraction."""
        bare, whole = compared(operator)
        for seconds, tiled in self._products(whole, binding, 1):
            same = replace(bare, tile=tiled.tile, family=tiled.family, config=tiled.config)
            apart = [SECONDS[tiled.family](same, binding, self.gpu) + self.gpu.launch]
            apart += [s for choose in CHOOSERS for s, _ in choose(bare, binding, self.gpu, 1)]
            return min(1.0, min(apart) / seconds)
        return GENERIC_SHARE

    def kernel(self, operator: ROperator, binding: Binding) -> RKernel:
        """Text and predicted times; ``profiler.resources`` compiles it."""
        alone, crowded = self._predicted(operator, binding)
        return RKernel(operator, lambda: _written(operator, binding), alone, crowded)

    def _predicted(self, operator: ROperator, binding: Binding) -> tuple[float, float]:
        """Seconds of a task alone and crowded, as the family's own prediction or the core's cost model has them."""
        rounds = -(-operator.task_count // self.gpu.sms)
        if operator.family == "gemm_chain":
            return (chain_seconds(chain_of(operator, binding), self.gpu) / rounds,) * 2
        if operator.family == "cell":
            return (cell_seconds(operator, binding, self.gpu),) * 2
        if predict := SECONDS.get(operator.family) or (plain_seconds if suits(operator) else None):
            return (predict(operator, binding, self.gpu) / rounds,) * 2
        cost = task_cost(operator, binding.types, self.vdevice)
        slow = operator.main.flops / max(operator.task_count, 1) / self.gpu.flops / GENERIC_SHARE
        return max(cost.alone, slow), max(cost.crowded, slow)

    def resources(self, operator: ROperator, binding: Binding) -> Resources:
        """Registers, shared memory and spills from ptxas for this architecture."""
        made = task_kernel(operator, binding)
        found = compile_cubin(translation_unit([made]), self.gpu.architecture).resources[made.entry]
        local = found.shared + made.dynamic  # ptxas knows only what is static
        return Resources(made.threads, found.registers, local, found.spills)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """The program, compiled and resident, for the executor asked for or measured to be the faster."""
        self._need_hardware()
        from rammer_cuda.select import open_executor

        return open_executor(program, constants, self.gpu, self.hardware.index, self.how)

    def trace(self, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Sequence[Span]:
        """Every block of one run with the SM that ran it, from kernels that record it."""
        from rammer_cuda.executor import CudaProgram
        from rammer_cuda.persistent.executor import PersistentProgram
        from rammer_cuda.trace import trace, trace_persistent

        loaded = self.load(program, constants)
        try:
            if isinstance(loaded, PersistentProgram):
                return trace_persistent(loaded, inputs).spans
            assert isinstance(loaded, CudaProgram)
            return trace(loaded, inputs).spans
        finally:
            loaded.close()

    def open_program(self, program: RProgram, constants: Mapping[str, Array], repeat: int = 1) -> CudaProgram:
        """The program as a CUDA graph, ``repeat`` copies of it chained."""
        self._need_hardware()
        from rammer_cuda.executor import CudaProgram

        return CudaProgram(program, constants, self.gpu, self.hardware.index, repeat)

    def _need_hardware(self) -> None:
        """DeviceUnavailable without a GPU; its context is there when this returns."""
        if not self.present:
            raise DeviceUnavailable(f"target {self.gpu.architecture} was compiled for, but there is no such GPU to run on",
                                    hint="leave out --target to use the GPU of this machine")  # fmt: skip
        if self.context is not None:
            self.context.join()


def _written(operator: ROperator, binding: Binding) -> Written:
    made = task_kernel(operator, binding)
    return Written(made.text, Resources(made.threads, local_bytes=made.shared))


def _leaders_first(ranked: Iterable[tuple[float, ROperator]]) -> Iterator[tuple[float, ROperator]]:
    """``ranked`` (by predicted seconds), but each family's best before every second best: tuning measures only the first few,
    and models of different families are less comparable than one family's. A family far behind has no such place."""
    later, seen, limit = list[tuple[float, ROperator]](), set[str](), float("inf")
    rest = iter(ranked)
    for seconds, tiled in rest:
        limit = min(limit, LEADING * seconds + NEAR)
        if seconds > limit:
            later.append((seconds, tiled))
            break
        if tiled.family in seen:
            later.append((seconds, tiled))
        else:
            seen.add(tiled.family)
            yield seconds, tiled
    yield from later
    yield from rest
