"""The graph executor: every launch of a program as a node of one CUDA graph with explicit edges."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from rammer.device.manifest import Array, Binding, RunResult
from rammer.ir.program import RProgram

from rammer_cuda.driver import check, driver
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.launches import Launch, consecutive, launches
from rammer_cuda.resident import Resident
from rammer_cuda.source import task_kernels


class CudaProgram:
    """A program resident on a GPU. Buffers keep their addresses, so the graph is built once.

    ``repeat`` chains as many copies of the program in the graph, for measuring what a launch costs in a chain.
    """

    def __init__(self, program: RProgram, constants: Mapping[str, Array], arch: str, index: int,
                 repeat: int = 1) -> None:  # fmt: skip
        self.program, self.repeat = program, repeat
        self.programmatic = int(arch.removeprefix("sm_").rstrip("a")) >= 90
        self.resident = Resident(program, constants, index)
        with self.resident.device:
            kernels = task_kernels(program.operators, Binding(program.types, program.storage, frozenset(constants)))
            self.resident.pack((a for k in kernels.values() for a in k.arguments), constants)
            self.functions = self.resident.load(kernels.values(), arch)
            self.plan = launches(program)
            self.graph = self._graph(kernels)

    @property
    def kernels(self) -> int:
        """Kernel launches of one run."""
        return len(self.plan)

    @property
    def stream(self) -> Any:
        """The CuPy stream that runs are queued on."""
        return self.resident.stream

    def _graph(self, kernels: Mapping[str, TaskKernel]) -> Any:
        """Nodes for the launches with their edges, instantiated."""
        api = driver()
        graph = check(api.cuGraphCreate(0), "creating a graph")
        ends: list[Any] = []
        for _ in range(self.repeat):
            nodes: list[Any] = []
            for launch in self.plan:
                parameters, _keep = self._node(kernels[launch.operator], launch)
                made = check(api.cuGraphAddKernelNode(graph, [], 0, parameters), f"adding {launch.operator}")
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

    def _node(self, kernel: TaskKernel, launch: Launch) -> tuple[Any, list[Any]]:
        """A node's parameters, and the values that they point to: adding the node copies them."""
        first = consecutive(launch.tasks)
        order = 0 if first is not None else self.resident.table(np.array(launch.tasks, np.int32))
        values = [ctypes.c_void_p(self.resident.address(a)) for a in kernel.arguments]
        packed: list[Any] = [*values, ctypes.c_void_p(order), ctypes.c_int(first or 0)]
        pointers = (ctypes.c_void_p * len(packed))(*[ctypes.addressof(v) for v in packed])
        node = driver().CUDA_KERNEL_NODE_PARAMS()
        node.func = self.functions[kernel.entry]
        node.gridDimX, node.gridDimY, node.gridDimZ = len(launch.tasks) * kernel.blocks, 1, 1
        node.blockDimX, node.blockDimY, node.blockDimZ = kernel.threads, 1, 1
        node.sharedMemBytes = kernel.dynamic
        node.kernelParams = ctypes.addressof(pointers)
        return node, [packed, pointers]

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        """Copy in, replay the graph, copy out; ``seconds`` is the graph alone, by events."""
        self.resident.copy_in(inputs)
        seconds = self.replay()
        return RunResult(self.resident.copy_out(), seconds)

    def replay(self) -> float:
        """One graph launch on the inputs already there; its seconds on the GPU."""
        return self.resident.timed(self._launch)

    def _launch(self) -> None:
        check(driver().cuGraphLaunch(self.graph, self.resident.stream.ptr), "launching a graph")

    def close(self) -> None:
        """Free the graph, the modules and all buffers."""
        if not self.resident.closed:
            check(driver().cuGraphExecDestroy(self.graph), "freeing a graph")
            self.resident.close()
