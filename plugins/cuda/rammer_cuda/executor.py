"""The graph executor: every launch of a program as a node of one CUDA graph with explicit edges."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Binding, RunResult
from rammer.errors import DeviceFailure
from rammer.ir.program import RProgram

from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check, driver
from rammer_cuda.hardware import cupy
from rammer_cuda.launches import Launch, consecutive, launches
from rammer_cuda.source import TaskKernel, task_kernel, translation_unit


class CudaProgram:
    """A program resident on a GPU. Buffers keep their addresses, so the graph is built once."""

    def __init__(self, program: RProgram, constants: Mapping[str, Array], arch: str, index: int) -> None:
        self.program, self.closed = program, False
        self.cp = cupy()
        self.device = self.cp.cuda.Device(index)
        with self.device:
            self.stream = self.cp.cuda.Stream(non_blocking=True)
            self.buffers = self._allocate(constants)
            binding = Binding(program.types, program.storage)
            kernels = {o.name: task_kernel(o, binding) for o in program.operators}
            self.module = self._module(kernels, arch)
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

    def _module(self, kernels: Mapping[str, TaskKernel], arch: str) -> Any:
        if not kernels:
            return None
        cubin = compile_cubin(translation_unit(kernels.values()), arch)
        return check(driver().cuModuleLoadData(cubin.code), "loading a module")

    def _graph(self, kernels: Mapping[str, TaskKernel]) -> Any:
        """Nodes for the launches with their edges, instantiated."""
        api = driver()
        graph = check(api.cuGraphCreate(0), "creating a graph")
        nodes: list[Any] = []
        for launch in self.plan:
            node = self._node(kernels[launch.operator], launch)
            after = [nodes[i] for i in launch.after]
            nodes.append(check(api.cuGraphAddKernelNode(graph, after, len(after), node), f"adding {launch.operator}"))
        made = check(api.cuGraphInstantiate(graph, 0), "instantiating a graph")
        check(api.cuGraphDestroy(graph), "freeing a graph")
        return made

    def _node(self, kernel: TaskKernel, launch: Launch) -> Any:
        api = driver()
        first = consecutive(launch.tasks)
        order = 0
        if first is None:
            table = self.cp.asarray(np.array(launch.tasks, np.int32))
            self.keep.append(table)
            order = table.data.ptr
        values = [ctypes.c_void_p(self._address(t)) for t, _ in kernel.arguments]
        packed: list[Any] = [*values, ctypes.c_void_p(order), ctypes.c_int(first or 0)]
        pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(v) for v in packed])
        self.keep += [packed, pointers]
        node = api.CUDA_KERNEL_NODE_PARAMS()
        node.func = check(api.cuModuleGetFunction(self.module, kernel.entry.encode()), f"finding {kernel.entry}")
        node.gridDimX, node.gridDimY, node.gridDimZ = len(launch.tasks), 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = kernel.threads, 1, 1
        node.sharedMemBytes = 0
        node.kernelParams = ctypes.addressof(pointers)
        return node

    def _address(self, tensor: str) -> int:
        storage = self.program.storage[tensor]
        item = np.dtype(self.program.types[tensor].dtype).itemsize
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
            if self.module is not None:
                check(api.cuModuleUnload(self.module), "unloading a module")
            self.buffers.clear()
            self.keep.clear()
