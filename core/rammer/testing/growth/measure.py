"""The cost of compiling a model, step by step, and how it grows: seconds of CPU, or operations that do not flake."""

from __future__ import annotations

import cProfile
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.reader import read_model
from rammer.profile.store import KernelStore
from rammer.runtime.options import CompileOptions
from rammer.testing.crew import Line, Member, Work
from rammer.testing.growth.shapes import DEEP, SHAPES

#: Cost by step.
Costs = Mapping[str, float]


@dataclass
class _Clocked(Compiler):
    """A Compiler that notes the CPU seconds of each step, of this process alone."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        start = time.process_time()
        with super()._step(name):
            yield
        self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - start


def seconds(shape: str, size: int, backend: Backend, policy: str = "wavefront", device: str = "",
            registry: Registry | None = None) -> Costs:  # fmt: skip
    """CPU seconds by step of reading and compiling ``SHAPES[shape](size)``; "read" is the first."""
    data = SHAPES[shape](size).SerializeToString()
    compiler = _Clocked(backend, CompileOptions(policy), KernelStore(None), registry, device=device)
    start = time.process_time()
    model = read_model(data)
    read = time.process_time() - start
    compiler.compile_model(model, {})
    return {"read": read, **compiler.spent}


@dataclass(frozen=True)
class Asked:
    """What is compiled for what: no larger size after a compile of ``most`` CPU seconds."""

    device: str
    target: str
    options: dict[str, str]
    policy: str
    sizes: tuple[int, ...]
    most: float


def begin(asked: Asked, member: Member) -> Work:
    """What compiles all sizes of one shape, in a process: it tells the shape, a size and its costs or what went wrong, and at the
    end None."""
    registry = Registry()
    backend = registry.open(asked.device, "", asked.target, asked.options)

    def work(shape: str, line: Line) -> None:
        for size in asked.sizes if shape not in DEEP else [n // 4 for n in asked.sizes]:
            try:
                costs = seconds(shape, size, backend, asked.policy, asked.device.partition(":")[0], registry)
            except Exception as problem:  # anything: a search goes on
                where = "".join(traceback.format_tb(problem.__traceback__)[-2:])
                line.tell((shape, size, f"{type(problem).__name__} {str(problem)[:300]}\n{where}"))
                break
            line.tell((shape, size, costs))
            if sum(costs.values()) > asked.most:
                break
        line.tell((shape, 0, None))

    return work


def operations(action: Callable[[], object]) -> int:
    """Calls of functions during ``action``, Python's and C's: a count that machines and their load do not change."""
    profile = cProfile.Profile()
    profile.runcall(action)
    return sum(entry.callcount for entry in profile.getstats())


def growth(action: Callable[[int], object], size: int) -> float:
    """How the operations of ``action(n)`` grow from n = ``size`` on: their increase from 2n to 4n over that from n to 2n, which
    is 2 where every node costs the same, whatever the rest costs, and 4 where every pair of nodes costs something."""
    action(size)  # what is made once
    counts = [operations(lambda n=n: action(n)) for n in (size, 2 * size, 4 * size)]  # type: ignore[misc]
    return (counts[2] - counts[1]) / (counts[1] - counts[0])


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of log(cost) over log(size), by least squares."""
    points = [(math.log(n), math.log(max(c, 1e-9))) for n, c in zip(sizes, costs, strict=True)]
    middle = [sum(p[i] for p in points) / len(points) for i in (0, 1)]
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    return sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread
