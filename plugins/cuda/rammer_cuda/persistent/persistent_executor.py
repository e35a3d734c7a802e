"""A program, or its constant-holding part, as one cooperative launch: blocks walk their rows, ordered by counters and words.

When a run gives up, one wait is at fault. An endless wait soon stops every row, and the block that notices first is random. The
wait at fault waits for tasks that no stopped row still has before it: either all of them ran, or none ever will."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Binding
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram, Task

from rammer_cuda.bound import GpuProgram
from rammer_cuda.cell.kernel import word_span
from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.executor import CapturedGraph, Recipe, add_launches, instantiate_graph
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernel_cache import Cached
from rammer_cuda.launch_planning import plan_launches
from rammer_cuda.persistent.bodies import MOST_THREADS, operator_bodies
from rammer_cuda.persistent.dataflow import as_planned, cached_words
from rammer_cuda.persistent.kernel_text import CONTROL, EMPTY, LINE, kernel_text
from rammer_cuda.persistent.partition import MixedParts, split_parts
from rammer_cuda.persistent.task_table import RowTable, make_table
from rammer_cuda.resident import Resident
from rammer_cuda.source import Writer

#: Nanoseconds that a block waits for a counter before it reports a hang: far beyond any program's run time.
LIMIT = 2_000_000_000


@dataclass(frozen=True)
class Around:
    """The launches before and after a persistent kernel."""

    before: Recipe | None = None
    after: Recipe | None = None

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes that are not None."""
        return tuple(r for r in (self.before, self.after) if r is not None)

    def made_anew(self, build: Callable[[Recipe], Recipe]) -> Around:
        """Return the same with recipes from ``build``, called in order."""
        before = build(self.before) if self.before is not None else None
        return Around(before, build(self.after) if self.after is not None else None)

    @property
    def kernels(self) -> list[str]:
        """The entry point of every launch."""
        return [r.kernels[launch.operator].entry for r in self.recipes for launch in r.plan]


class PersistentProgram(GpuProgram):
    """A program resident on a GPU, run by one cooperative launch with a block per row.

    A block has at most ``threads``; generic functions replace the kernels that it cannot call. ``blocks`` of an SM share its
    registers and memory. A program in three parts (``mixed``) has launches around that of its inner part. Raises DeviceFailure if
    the blocks cannot all run at once. ``limit`` is a block's timeout before it reports a hang, in ns. Without ``words``, all
    waits are those of the program.
    """

    def __init__(
        self,
        program: RProgram,
        constants: Mapping[str, Array],
        gpu: Gpu,
        index: int,
        limit: int = LIMIT,
        words: bool = True,
        threads: int = MOST_THREADS,
        blocks: int = 1,
        mixed: bool = False,
    ) -> None:
        parts = split_parts(program) if mixed else MixedParts(None, program, None)
        binding = Binding.of(parts.rows, constants)
        flow = cached_words(parts.rows, binding) if words else as_planned(parts.rows, binding)
        self.walked = flow.program  #: The program that the blocks walk.
        super().__init__(Resident(program, constants, gpu, index))
        self.limit, self.blocks = limit, blocks
        with self.resident.device:
            self.parts = operator_bodies(flow, binding, threads)
            self.resident.pack((a for arguments in self.parts.arguments.values() for a in arguments), constants)
            self.words = self._words({t for tensors in flow.words.values() for t in tensors})
            self.counters = self.resident.cp.zeros(max(len(self.walked.counters), 1) * LINE, np.uint32)
            self.control = self.resident.cp.zeros(len(CONTROL) + self.walked.veus, np.uint32)
            form = self.table(self.resident).form
            text = kernel_text(self.parts.bodies, form, self.parts.threads, blocks=self.blocks)
            self.function = self.resident.function(compile_cubin(text, gpu.architecture).code, "rm_persistent", self.parts.shared)
            self._check_resident()
            self.around = Around(self._make_recipe(parts.before, constants), self._make_recipe(parts.after, constants))
            self.launchable = self.turning(Walk(self, self.resident, self.function, self.around), self.resident)
        self.resident.ready()
        if gpu.dependents and self.around.kernels:
            self._choose_pdl(Cached(program, "pdl_around", gpu.architecture))

    def _choose_pdl(self, cached: Cached) -> None:
        """Choose the kernels around the persistent one that let their dependents start early, as before or by measurement."""
        switches = self.resident.switches({e: f for r in self.around.recipes for e, f in r.functions.items()})
        if not switches.recall(cached.read()):
            switches.choose(self.around.kernels, self.replay)
            cached.write(sorted(switches.on))

    def _make_recipe(self, part: RProgram | None, constants: Mapping[str, Array]) -> Recipe | None:
        if part is None:
            return None
        gpu = self.resident.gpu
        plan, kernels = plan_launches(part, Binding.of(part, constants), gpu, Writer(), kept=True)
        self.resident.pack((a for k in kernels.values() for a in k.arguments), constants)
        return Recipe(plan, kernels, self.resident.load(kernels.values()), gpu.dependents)

    @property
    def kernels(self) -> int:
        """The number of kernel launches per run."""
        return 1 + len(self.around.kernels) if self.program.repeat is None else 2 * self.program.turns + 1

    def _words(self, tensors: Collection[str]) -> dict[str, Any]:
        """Return device memory for both sets of words of each tensor, empty."""
        spans = {t: word_span(self.walked.storage[t]) for t in sorted(tensors)}
        return {t: self.resident.cp.asarray(np.full(2 * span, EMPTY, np.uint32)) for t, span in spans.items()}

    def _check_resident(self) -> None:
        """Raise DeviceFailure if the blocks, which wait for each other, cannot all be resident."""
        api = import_driver()
        query = api.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.parts.threads, self.parts.shared)
        room = int(check_result(query, "querying occupancy")) * self.resident.device.multiprocessors()
        if room < self.walked.veus:
            raise DeviceFailure(
                f"{self.walked.veus} rows need as many blocks at once, this GPU runs {room}",
                where=f"program {self.program.name}",
                hint="--option executor=graph",
            )

    def table(self, resident: Resident) -> RowTable:
        """Return the program's table on the addresses of ``resident``."""
        pointers = {
            name: [*map(resident.address, arguments), *(int(self.words[t].data.ptr) for t in self.parts.words[name])]
            for name, arguments in self.parts.arguments.items()
        }
        return make_table(self.walked, self.parts.number, pointers, self.parts.held())

    def launchable_on(self, resident: Resident) -> Walk:
        """Return a launch with a separate table on the addresses of ``resident``."""
        return Walk(self, resident, self.function, self.around)

    def check_finished(self) -> None:
        """Raise DeviceFailure with the vEU and the wait if the last run gave up, and reset the counters."""
        words = self.resident.cp.asnumpy(self.control, stream=self.resident.stream).tolist()
        epoch, _, aborted, *stopped = words
        if not aborted:
            return
        counts = self.resident.cp.asnumpy(self.counters, stream=self.resident.stream)[::LINE].tolist()
        with self.resident.device, self.resident.stream:
            for memory in (self.counters, self.control):  # an aborted run leaves them between two epochs
                memory.fill(0)
            for memory in self.words.values():
                memory.fill(EMPTY)
        self.resident.wait(self.resident.stream)  # the next run may be on another stream
        seen = {c.name: n for c, n in zip(self.walked.counters, counts, strict=False)}
        hang = find_hang(self.walked, stopped, seen, max(epoch - 1, 0), self.parts.words)
        raise DeviceFailure(
            f"vEU {hang.veu} waited {self.limit / 1e9:.3g} s for {hang.awaited}",
            where=f"program {self.program.name}, task {hang.task.operator}[{hang.task.index}], entry {hang.order} of its row",
            hint="the awaited signal never arrives: `rammer inspect --stage program` shows the rows",
        )


class Walk:
    """A launch of a program's persistent kernel on the addresses of ``resident``, with the launches ``around`` it.

    ``function`` is this build of the kernel or another. The launch is always a graph, which the host queues faster than a single
    cooperative launch. Early starts are disabled around the persistent kernel: its blocks need all SMs and occupy them until they
    end.
    """

    def __init__(self, owner: PersistentProgram, resident: Resident, function: Any, around: Around) -> None:
        table = owner.table(resident)
        self.arrays = [owner.resident.cp.asarray(a) for a in (table.entries, table.rows)]
        graph = check_result(import_driver().cuGraphCreate(0), "creating a graph")
        ends = add_launches(graph, resident, around.before, []) if around.before else []
        ends = [self._add_kernel_node(graph, owner, function, ends)]
        if around.after:
            add_launches(graph, resident, around.after, ends, early=False)
        self.graph = CapturedGraph(instantiate_graph(graph), owner.resident)

    def _add_kernel_node(self, graph: Any, owner: PersistentProgram, function: Any, before: list[Any]) -> Any:
        """Add the persistent kernel as a node of ``graph`` after the nodes ``before``."""
        pointers = [ctypes.c_void_p(a.data.ptr) for a in (*self.arrays, owner.counters, owner.control)]
        values: list[Any] = [*pointers, ctypes.c_uint64(owner.limit)]
        parameters = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        api = import_driver()
        node = api.CUDA_KERNEL_NODE_PARAMS()
        node.func = function
        node.gridDimX, node.gridDimY, node.gridDimZ = owner.walked.veus, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = owner.parts.threads, 1, 1
        node.sharedMemBytes = owner.parts.shared
        node.kernelParams = ctypes.addressof(parameters)  # adding the node copies the values
        made = check_result(api.cuGraphAddKernelNode(graph, before, len(before), node), "adding a persistent kernel")
        together = api.CUkernelNodeAttrValue()
        together.cooperative = 1
        kind = api.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        check_result(api.cuGraphKernelNodeSetAttribute(made, kind, together), "making a launch cooperative")
        return made

    def launch(self, stream: int) -> None:
        self.graph.launch(stream)

    def close(self) -> None:
        """Free the graph and the table."""
        self.graph.close()
        self.arrays.clear()


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang: ``veu`` stopped before entry ``order`` of its row, ``task``, waiting for ``awaited``."""

    veu: int
    order: int
    task: Task
    awaited: str


def find_hang(
    program: RProgram, stopped: Sequence[int], seen: Mapping[str, int], epoch: int, words: Mapping[str, Sequence[str]]
) -> Hang:
    """Return the wait at fault. ``stopped`` is, for each row, one more than the entry that it stopped before (0: it finished).
    ``seen`` are the counters' values in run ``epoch``. ``words`` are the tensors that an operator may receive as words."""
    place = {(t.operator, t.index): (v, i) for v, row in enumerate(program.rows) for i, t in enumerate(row)}
    writer = {t: o for o in program.operators for t in o.outputs}
    hangs = list[Hang]()
    for veu, order in ((v, n - 1) for v, n in enumerate(stopped) if n):
        task = program.rows[veu][order]
        for awaited, tasks in _unfinished_waits(program, task, seen, epoch):
            if not any(stopped[v] and i >= stopped[v] - 1 for v, i in (place[t] for t in tasks)):
                return Hang(veu, order, task, awaited)
            hangs.append(Hang(veu, order, task, awaited))
        for tensor in words.get(task.operator, ()):
            hangs += [Hang(veu, order, task, f"words of {tensor}")] if writer[tensor].name != task.operator else []
    return hangs[0]  # rows that wait in a cycle, or for lost words


def _unfinished_waits(
    program: RProgram, task: Task, seen: Mapping[str, int], epoch: int
) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return the unfinished waits of ``task``, as (text, contributing tasks)."""
    result = list[tuple[str, list[tuple[str, int]]]]()
    for wait in task.waits:
        counter = program.counter[wait.counter]
        wanted = epoch * counter.total + wait.threshold
        if seen[counter.name] < wanted:
            text = f"counter {counter.name} to reach {wanted}, but it stayed at {seen[counter.name]}"
            result.append((text, [(counter.operator, i) for i in range(counter.first, counter.last)]))
    return result
