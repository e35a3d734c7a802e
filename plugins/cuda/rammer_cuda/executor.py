"""The graph executor: every launch of a program as a node of one CUDA graph with explicit edges."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.codegen.task import Argument
from rammer.device.manifest import Array, Binding, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram

from rammer_cuda.compile import compile_all
from rammer_cuda.driver import check, driver
from rammer_cuda.hardware import cupy
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.launches import Launch, consecutive, launches
from rammer_cuda.source import task_kernels, translation_unit


class CudaProgram:
    """A program resident on a GPU. Buffers keep their addresses, so the graph is built once.

    ``repeat`` chains as many copies of the program in the graph, for measuring what a launch costs in a chain.
    """

    def __init__(self, program: RProgram, constants: Mapping[str, Array], arch: str, index: int,
                 repeat: int = 1) -> None:  # fmt: skip
        self.program, self.closed, self.repeat = program, False, repeat
        self.programmatic = int(arch.removeprefix("sm_").rstrip("a")) >= 90
        self.cp = cupy()
        self.device = self.cp.cuda.Device(index)
        with self.device:
            self.stream = self.cp.cuda.Stream(non_blocking=True)
            self.buffers = self._allocate(constants)
            binding = Binding(program.types, program.storage, frozenset(constants))
            kernels = task_kernels(program.operators, binding)
            self.packed = self._pack(kernels, constants)
            self.modules, self.functions = self._load(kernels, arch)
            self.plan = launches(program)
            self.keep: list[Any] = []
            self.graph = self._graph(kernels)

    @property
    def kernels(self) -> int:
        """Kernel launches of one run."""
        return len(self.plan)

    def _allocate(self, constants: Mapping[str, Array]) -> dict[str, Any]:
        """Buffer name -> device bytes: one arena, one allocation for each other buffer."""
        cp, program = self.cp, self.program
        values = {program.storage[n].buffer: v for n, v in constants.items()}
        need = program.arena_bytes + sum(b.nbytes for b in program.buffers if b.kind != "arena")
        free = int(cp.cuda.runtime.memGetInfo()[0])
        if need > free:
            raise DeviceFailure(f"out of memory: program {program.name} needs {need} bytes, {free} are free",
                                hint="a smaller batch or input, or a GPU with more memory")  # fmt: skip
        try:
            arena = cp.full(max(program.arena_bytes, 1), 0xFF, cp.uint8)  # NaN in every float type
            result: dict[str, Any] = {}
            for b in program.buffers:
                if b.kind == "arena":
                    result[b.name] = arena[b.offset : b.offset + b.nbytes]
                elif b.name in values:
                    flat = np.ascontiguousarray(values[b.name]).reshape(-1).view(np.uint8)
                    result[b.name] = cp.asarray(flat) if flat.size else cp.zeros(1, cp.uint8)
                else:
                    result[b.name] = cp.full(max(b.nbytes, 1), 0xFF, cp.uint8)
            return result
        except cp.cuda.memory.OutOfMemoryError as problem:
            raise DeviceFailure(f"out of memory: {problem}", where=f"program {program.name}") from problem

    def _pack(self, kernels: Mapping[str, TaskKernel], constants: Mapping[str, Array]) -> dict[tuple[str, str], Any]:
        """(tensor, arrangement) -> device array, for every constant that a kernel wants arranged."""
        result: dict[tuple[str, str], Any] = {}
        for argument in (a for k in kernels.values() for a in k.arguments):
            if argument.packing is not None and (key := (argument.tensor, argument.packing.key)) not in result:
                result[key] = self.cp.asarray(argument.packing.make(np.asarray(constants[argument.tensor])).reshape(-1))
        return result

    def _load(self, kernels: Mapping[str, TaskKernel], arch: str) -> tuple[list[Any], dict[str, Any]]:
        """Modules, and functions by entry point; every distinct kernel is compiled on its own, in parallel."""
        api = driver()
        distinct = {k.entry: k for k in kernels.values()}
        cubins = compile_all({e: translation_unit([k]) for e, k in distinct.items()}, arch)
        modules, functions = [], {}
        for entry, kernel in distinct.items():
            modules.append(check(api.cuModuleLoadData(cubins[entry].code), "loading a module"))
            functions[entry] = check(api.cuModuleGetFunction(modules[-1], entry.encode()), f"finding {entry}")
            if kernel.dynamic:
                key = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(api.cuFuncSetAttribute(functions[entry], key, kernel.dynamic), "asking for shared memory")
        return modules, functions

    def _graph(self, kernels: Mapping[str, TaskKernel]) -> Any:
        """Nodes for the launches with their edges, instantiated."""
        api = driver()
        graph = check(api.cuGraphCreate(0), "creating a graph")
        ends: list[Any] = []
        for _ in range(self.repeat):
            nodes: list[Any] = []
            for launch in self.plan:
                node = self._node(kernels[launch.operator], launch)
                made = check(api.cuGraphAddKernelNode(graph, [], 0, node), f"adding {launch.operator}")
                self._depend(graph, [nodes[i] for i in launch.after] or ends, made)
                nodes.append(made)
            followed = {p for launch in self.plan for p in launch.after}
            ends = [n for i, n in enumerate(nodes) if i not in followed]
        made = check(api.cuGraphInstantiate(graph, 0), "instantiating a graph")
        check(api.cuGraphDestroy(graph), "freeing a graph")
        return made

    def _depend(self, graph: Any, before: list[Any], node: Any) -> None:
        """Order ``node`` after others; where the GPU can, its blocks start early and wait on the device."""
        api = driver()
        if not before:
            return
        edges = None
        if self.programmatic:
            edge = api.CUgraphEdgeData()
            edge.from_port = api.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
            edge.type = int(api.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
            edges = [edge] * len(before)
        after = [node] * len(before)
        check(api.cuGraphAddDependencies(graph, before, after, edges, len(before)), "adding edges to a graph")

    def _node(self, kernel: TaskKernel, launch: Launch) -> Any:
        api = driver()
        first = consecutive(launch.tasks)
        order = 0
        if first is None:
            table = self.cp.asarray(np.array(launch.tasks, np.int32))
            self.keep.append(table)
            order = table.data.ptr
        values = [ctypes.c_void_p(self._address(a)) for a in kernel.arguments]
        packed: list[Any] = [*values, ctypes.c_void_p(order), ctypes.c_int(first or 0)]
        pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(v) for v in packed])
        self.keep += [packed, pointers]
        node = api.CUDA_KERNEL_NODE_PARAMS()
        node.func = self.functions[kernel.entry]
        node.gridDimX, node.gridDimY, node.gridDimZ = len(launch.tasks) * kernel.blocks, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = kernel.threads, 1, 1
        node.sharedMemBytes = kernel.dynamic
        node.kernelParams = ctypes.addressof(pointers)
        return node

    def _address(self, argument: Argument) -> int:
        if argument.packing is not None:
            return int(self.packed[argument.tensor, argument.packing.key].data.ptr)
        storage = self.program.storage[argument.tensor]
        item = np.dtype(self.program.types[argument.tensor].dtype).itemsize
        return int(self.buffers[storage.buffer].data.ptr) + storage.offset * item

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Copy in, replay the graph, copy out; ``seconds`` is the graph alone, by events."""
        if self.closed:
            raise DeviceFailure(f"program {self.program.name} was closed")
        with self.device, self.stream:
            for port in self.program.inputs:
                data = np.ascontiguousarray(inputs[port.external]).reshape(-1).view(np.uint8)
                if data.size:
                    self.buffers[self.program.storage[port.tensor].buffer].set(data, stream=self.stream)
            seconds = self.replay()
            outputs = {p.external: self._fetch(p.tensor) for p in self.program.outputs}
        return RunResult(outputs, seconds)

    def replay(self) -> float:
        """One graph launch; its seconds on the GPU."""
        events = self.cp.cuda.Event(), self.cp.cuda.Event()
        events[0].record(self.stream)
        check(driver().cuGraphLaunch(self.graph, self.stream.ptr), "launching a graph")
        events[1].record(self.stream)
        try:
            events[1].synchronize()
        except self.cp.cuda.runtime.CUDARuntimeError as problem:
            raise DeviceFailure(f"program {self.program.name} failed on the GPU: {problem}") from problem
        return float(self.cp.cuda.get_elapsed_time(*events)) * 1e-3

    def _fetch(self, tensor: str) -> Array:
        kind = self.program.types[tensor]
        raw = self.cp.asnumpy(self.buffers[self.program.storage[tensor].buffer], stream=self.stream)
        self.stream.synchronize()
        return np.asarray(raw[: kind.nbytes].view(kind.dtype).reshape(kind.shape))

    def close(self) -> None:
        """Free the graph, the module and all buffers."""
        if not self.closed:
            self.closed = True
            api = driver()
            check(api.cuGraphExecDestroy(self.graph), "freeing a graph")
            for module in self.modules:
                check(api.cuModuleUnload(module), "unloading a module")
            self.buffers.clear()
            self.packed.clear()
            self.keep.clear()
