"""The graph executor: every launch of a program as a node of one CUDA graph with explicit edges."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rammer.device.manifest import Array, Binding
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.program import RProgram

from rammer_cuda.bound import GpuProgram
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.gpu import Gpu
from rammer_cuda.pdl import Switches
from rammer_cuda.resident import Resident

if TYPE_CHECKING:
    from rammer_cuda.source import Writer


class LaunchedKernel(Protocol):
    """A kernel as its launches see it: a ``TaskKernel``, or one of a compiled file."""

    @property
    def entry(self) -> str:
        """The name of the function."""
        ...

    @property
    def arguments(self) -> Sequence[Any]:
        """The pointers that it takes."""
        ...

    @property
    def threads(self) -> int:
        """The threads of a block."""
        ...

    @property
    def blocks(self) -> int:
        """The blocks of a task."""
        ...

    @property
    def dynamic(self) -> int:
        """The bytes of shared memory that a launch requests."""
        ...


@dataclass(frozen=True)
class PlannedLaunches:
    """The launches of a program in order, their kernels by operator, and machine code by entry point."""

    plan: Sequence[Launch]
    kernels: Mapping[str, LaunchedKernel]
    cubins: Mapping[str, bytes]


@dataclass(frozen=True)
class Recipe:
    """The inputs of a graph: launches with their kernels (by operator) and functions (by entry point).

    With ``programmatic`` edges the blocks of a dependent kernel start early and wait on the device. ``records`` holds one address
    per launch, the last argument of kernels built for a trace."""

    plan: Sequence[Launch]
    kernels: Mapping[str, LaunchedKernel]
    functions: Mapping[str, Any]
    programmatic: bool
    records: tuple[int, ...] = ()


@dataclass(frozen=True)
class Room:
    """The destination of a program: GPU ``index``, in the memory of another program that never runs at the same time."""

    gpu: Gpu
    index: int
    arena_of: Resident | None = None


class CudaProgram(GpuProgram):
    """A program resident on a GPU. Buffers keep their addresses, so the graph is built once. ``repeat`` chains this number of
    copies in the graph, to measure the cost of a launch in a chain. The launches and kernels are planned and compiled, or
    ``shipped`` with the program; then no kernel lets its dependents start early."""

    def __init__(
        self,
        program: RProgram,
        constants: Mapping[str, Array],
        where: Room,
        repeat: int = 1,
        writer: Writer | None = None,
        shipped: PlannedLaunches | None = None,
    ) -> None:
        gpu = where.gpu
        made = shipped or compile_launches(program, constants, gpu, writer, kept=repeat == 1)
        plan, kernels = made.plan, made.kernels
        arguments = [a for k in kernels.values() for a in k.arguments]
        read = {program.storage[a.tensor].buffer for a in arguments if a.packing is None}
        read |= program.moved_constants
        super().__init__(Resident(program, constants, gpu, where.index, read, where.arena_of))
        with self.resident.device:
            self.resident.pack(arguments, constants)
            functions = {k.entry: k for k in kernels.values()}
            functions = {e: self.resident.function(made.cubins[e], e, k.dynamic) for e, k in functions.items()}
            self.recipe = Recipe(plan, kernels, functions, gpu.dependents)
            graph = CapturedGraph(build_graph(self.resident, self.recipe, repeat), self.resident)
            self.launchable = self.turning(graph, self.resident)
        self.resident.ready()
        self.pdl: Switches | None = None
        if shipped is None and self.recipe.programmatic and repeat == 1 and len(self.recipe.plan) > 1:
            self.pdl = self.resident.switches(functions)
            self._choose_pdl(self.pdl)

    def _choose_pdl(self, switches: Switches) -> None:
        """Choose the kernels that let their dependents start early, as before or by measurement."""
        from rammer.tuning.kernel_probe import usual_lengths

        from rammer_cuda.kernel_cache import Cached

        cached = Cached(self.program, "pdl", self.resident.gpu.architecture)
        if switches.recall(cached.read()):
            return
        lengths = usual_lengths(self.program)
        for port in (p for p in self.program.inputs if p.external in lengths):
            self.resident.write(port.tensor, lengths[port.external])  # at length zero every kernel would exit at once
        switches.choose((self.recipe.kernels[launch.operator].entry for launch in self.recipe.plan), self.replay)
        cached.write(sorted(switches.on))

    @property
    def kernels(self) -> int:
        """The number of kernel launches per run."""
        turns = self.program.turns
        return len(self.recipe.plan) * turns + (turns + 1 if self.program.repeat is not None else 0)

    def launchable_on(self, resident: Resident) -> CapturedGraph:
        """Return a graph on the addresses of ``resident``."""
        return CapturedGraph(build_graph(resident, self.recipe), self.resident)

    def check_finished(self) -> None:
        """Do nothing: a graph's kernels wait only for earlier kernels, so none gives up."""

    def poison(self) -> bool:
        """Poison memory, and let all dependents start early from now on."""
        if self.pdl is not None:
            self.pdl.set(self.pdl.address)
        self.resident.poison()
        return True


def compile_launches(
    program: RProgram, constants: Mapping[str, Array], gpu: Gpu, writer: Writer | None, kept: bool
) -> PlannedLaunches:
    """Return a program's launches with the machine code of their kernels."""
    from rammer_cuda.launch_planning import compile_kernels, plan_launches
    from rammer_cuda.source import Writer

    plan, kernels = plan_launches(program, Binding.of(program, constants), gpu, writer or Writer(), kept)
    return PlannedLaunches(plan, kernels, compile_kernels(kernels.values(), gpu))


class CapturedGraph:
    """An instantiated graph of a program, which keeps the program's modules loaded."""

    def __init__(self, executable: Any, resident: Resident) -> None:
        self.executable, self.api = executable, import_driver()
        self.close = weakref.finalize(self, _destroy_graph, executable, resident)  #: Free the graph; repeated calls do nothing.
        self.close.atexit = False  # the driver may be gone by then

    def launch(self, stream: int) -> None:
        check_result(self.api.cuGraphLaunch(self.executable, stream), "launching a graph")


def _destroy_graph(executable: Any, resident: Resident) -> None:
    with resident.device:  # any thread may collect it
        check_result(import_driver().cuGraphExecDestroy(executable), "freeing a graph")


def build_graph(resident: Resident, recipe: Recipe, repeat: int = 1) -> Any:
    """Build a graph of the launches and their edges, on the addresses of ``resident``; ``repeat`` copies in a chain."""
    graph = check_result(import_driver().cuGraphCreate(0), "creating a graph")
    ends: list[Any] = []
    for _ in range(repeat):
        ends = add_launches(graph, resident, recipe, ends)
    return instantiate_graph(graph)


def add_launches(graph: Any, resident: Resident, recipe: Recipe, ends: list[Any], early: bool = True) -> list[Any]:
    """Add a program's launches to ``graph`` after the kernel nodes ``ends``; return the nodes without successors. With ``early``,
    ``ends`` may let the launches start early."""
    nodes: list[Any] = []
    for number, launch in enumerate(recipe.plan):
        last = [ctypes.c_void_p(recipe.records[number])] if recipe.records else []
        parameters, _keep = _node_params(resident, recipe, launch, last)
        made = check_result(import_driver().cuGraphAddKernelNode(graph, [], 0, parameters), f"adding {launch.operator}")
        before = [nodes[i] for i in launch.after]
        _add_dependencies(graph, before or ends, made, recipe.programmatic and (early or bool(before)))
        nodes.append(made)
    followed = {p for launch in recipe.plan for p in launch.after}
    return [n for i, n in enumerate(nodes) if i not in followed] or ends


def instantiate_graph(graph: Any) -> Any:
    """Return the graph, ready to launch; ``graph`` itself is freed."""
    made = check_result(import_driver().cuGraphInstantiate(graph, 0), "instantiating a graph")
    check_result(import_driver().cuGraphDestroy(graph), "freeing a graph")
    return made


def _add_dependencies(graph: Any, before: list[Any], node: Any, programmatic: bool) -> None:
    api = import_driver()
    if not before:
        return
    edges = None
    if programmatic:
        edge = api.CUgraphEdgeData()
        edge.from_port = api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        edge.type = int(api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        edges = [edge] * len(before)
    after = [node] * len(before)
    check_result(api.cuGraphAddDependencies(graph, before, after, edges, len(before)), "adding edges to a graph")


def _node_params(resident: Resident, recipe: Recipe, launch: Launch, last: list[Any]) -> tuple[Any, list[Any]]:
    """Return a node's parameters and the values that they point to. Adding the node copies the values. ``last`` are additional
    values."""
    kernel = recipe.kernels[launch.operator]
    first = first_consecutive(launch.tasks)
    order = 0 if first is not None else resident.table(np.array(launch.tasks, np.int32))
    values = [ctypes.c_void_p(resident.address(a)) for a in kernel.arguments]
    packed: list[Any] = [*values, ctypes.c_void_p(order), ctypes.c_int(first or 0), *last]
    pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(v) for v in packed])
    node = import_driver().CUDA_KERNEL_NODE_PARAMS()
    node.func = recipe.functions[kernel.entry]
    node.gridDimX, node.gridDimY, node.gridDimZ = len(launch.tasks) * kernel.blocks, 1, 1
    node.blockDimX, node.blockDimY, node.blockDimZ = kernel.threads, 1, 1
    node.sharedMemBytes = kernel.dynamic
    node.kernelParams = ctypes.addressof(pointers)
    return node, [packed, pointers]
