"""Small operators, devices and random programs for tests of policies, planners, verifiers and executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from rammer.ir.compute import Axis, Compute
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.expr import Load, Op, Ref, make_add
from rammer.ir.operator import Resources, RKernel, ROperator, Written
from rammer.ir.program import Port, RProgram, Storage, dense
from rammer.plan.program_builder import Interface, build_program
from rammer.schedule.policy import OperatorGraph, Policy, Schedule


def device(veus: int, launch: float = 1e-6, resident: int = 0) -> VDevice:
    """Return a device with ``veus`` units and 1 KiB of local memory each; ``launch`` is in seconds."""
    layers = (MemoryLayer("global", "device", 0, 1e11), MemoryLayer("local", "veu", 1024, 1e12))
    return VDevice("small", "a device for tests", veus, layers, 1e9, launch, resident=resident)


def adding(name: str, length: int, reads: Sequence[str], tile: int, shift: int = 0) -> ROperator:
    """Return ``name[i] = sum of t[i + shift]`` over ``reads``, in tasks of ``tile`` elements; zero beyond the end."""
    loads = [Load(t, (make_add("i", shift),), 0.0 if shift else None) for t in reads]
    body: Load | Op = loads[0]
    for load in loads[1:]:
        body = Op("add", (body, load))
    return ROperator(name, (Compute(name, "float32", (Axis("i", length),), body),), (), (name,), (tile,))


def stencil(name: str, length: int, read: str, tile: int, reach: int = 1) -> ROperator:
    """Return ``name[i] = read[i - reach] + read[i + reach]``, zero outside, in tasks of ``tile`` elements."""
    left, right = (Load(read, (make_add("i", d),), 0.0) for d in (-reach, reach))
    return ROperator(name, (Compute(name, "float32", (Axis("i", length),), Op("add", (left, right))),), (), (name,), (tile,))


def summing(name: str, length: int, read: str, tile: int, extent: int) -> ROperator:
    """Return ``name[i] = sum over k of read[k]``: every task reads all ``extent`` elements."""
    body = Load(read, (Ref("k"),))
    compute = Compute(name, "float32", (Axis("i", length),), body, (Axis("k", extent),), "sum")
    return ROperator(name, (compute,), (), (name,), (tile,))


def copying(name: str, shape: tuple[int, ...], read: str, tile: tuple[int, ...]) -> ROperator:
    """Return an element-wise copy, ``name = read``."""
    axes = tuple(Axis(f"i{k}", n) for k, n in enumerate(shape))
    body = Load(read, tuple(Ref(a.name) for a in axes))
    return ROperator(name, (Compute(name, "float32", axes, body),), (), (name,), tile)


def kernel(operator: ROperator, alone: float = 1e-6, crowded: float = 0.0) -> RKernel:
    """Return a kernel without source. ``alone`` and ``crowded`` are seconds per task; ``crowded`` defaults to ``alone``."""
    return RKernel(operator, lambda: Written("", Resources()), alone, crowded or alone)


@dataclass
class TaskNet:
    """Operators over buffers, in the form of the storage planner's output. The last operator feeds the output."""

    operators: list[ROperator] = field(default_factory=list)
    storages: dict[str, Storage] = field(default_factory=dict)
    buffers: dict[str, tuple[str, int]] = field(default_factory=dict)
    constants: tuple[str, ...] = ()

    def tensor(self, name: str, *shape: int) -> TaskNet:
        """Add a float32 tensor in a separate buffer."""
        self.storages[name] = dense(name, f"b_{name}", shape)
        self.buffers[f"b_{name}"] = ("float32", self.storages[name].span()[1])
        return self

    def add(self, operator: ROperator) -> TaskNet:
        """Add an operator, with buffers for its new outputs."""
        self.operators.append(operator)
        for c in operator.computes:
            if c.name in operator.outputs and c.name not in self.storages:
                self.tensor(c.name, *c.shape)
        return self

    @property
    def after(self) -> Mapping[str, tuple[str, ...]]:
        """The data dependences by operator."""
        from rammer.plan.waits import find_dependences

        return find_dependences(self.operators, self.storages)

    def graph(self, seconds: Mapping[str, float] | None = None) -> OperatorGraph:
        """Return a graph with one kernel per operator; ``seconds`` per task by operator, default 1 us."""
        times = seconds or {}
        kernels = {o.name: (kernel(o, times.get(o.name, 1e-6)),) for o in self.operators}
        return OperatorGraph(kernels, self.after)

    def schedule(self, policy: Policy, veus: int) -> Schedule:
        """Return the schedule that ``policy`` proposes for ``veus`` units."""
        return policy(self.graph(), device(veus))

    def program(self, policy: Policy, veus: int, outputs: Sequence[str] = ()) -> RProgram:
        """Return a verified program; its inputs are the unwritten tensors that are not constants."""
        return self.planned(self.schedule(policy, veus), policy.name, outputs)

    def planned(self, schedule: Schedule, policy: str, outputs: Sequence[str] = ()) -> RProgram:
        """Return the verified program of a schedule that ``policy`` proposed."""
        made = {t for o in self.operators for t in o.outputs}
        read = dict.fromkeys(t for o in self.operators for t in o.inputs)
        inputs = [t for t in read if t not in made and self._is_source(t)]
        results = outputs or [self.operators[-1].anchor.name]
        ports, ends = (tuple(Port(t, t) for t in tensors) for tensors in (inputs, results))
        return build_program(Interface("net", ports, ends, self.constants), schedule, self, policy=policy)

    def _is_source(self, tensor: str) -> bool:
        """Return True if the tensor is neither a constant nor a view of a computed tensor."""
        written = {self.storages[t].buffer for o in self.operators for t in o.outputs}
        return tensor not in self.constants and self.storages[tensor].buffer not in written


def recurrent_net(layers: int, steps: int, tasks: int) -> TaskNet:
    """Return a grid of cells that each read the cell below and the previous one: the shape of an unrolled LSTM."""
    net = TaskNet().tensor("x", tasks)
    for t in range(steps):
        for layer in range(layers):
            below = f"h{layer - 1}_{t}" if layer else "x"
            reads = [below, f"h{layer}_{t - 1}"] if t else [below]
            net.add(adding(f"h{layer}_{t}", tasks, reads, 1))
    return net


def branching_net(random: Random, operators: int, tasks: int, near: int) -> TaskNet:
    """Return a random DAG of operators of ``tasks`` tasks each, which read one to three of the ``near`` previous ones."""
    net, names = TaskNet().tensor("x", tasks), ["x"]
    for i in range(operators):
        recent = names[-near:]
        reads = random.sample(recent, min(len(recent), random.randint(1, 3)))
        net.add(stencil(f"t{i}", tasks, reads[0], 1) if random.random() < 0.3 else adding(f"t{i}", tasks, reads, 1))
        names.append(f"t{i}")
    return net


def random_net(random: Random, operators: int, length: int = 24) -> TaskNet:
    """Return a random DAG of additions and stencils over vectors with random task sizes; the last
    operator reads unread results."""
    net = TaskNet().tensor("x", length)
    names, unread = ["x"], set[str]()
    for i in range(operators):
        reads = random.sample(names, min(len(names), random.randint(1, 3)))
        tile = random.randint(1, length)
        op = stencil(f"t{i}", length, reads[0], tile) if random.random() < 0.3 else adding(f"t{i}", length, reads, tile)
        unread = (unread - set(op.inputs)) | {op.name}
        names.append(op.name)
        net.add(op)
    return net.add(adding("y", length, sorted(unread), random.randint(1, length)))
