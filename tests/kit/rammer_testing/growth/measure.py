"""The cost of compiling a model by step, and its growth: CPU seconds, or deterministic operation counts."""

from __future__ import annotations

import cProfile
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.growth.shapes import DEEP, SHAPES
from rammer_testing.worker_pool import Line, Member, Work

#: Cost by step.
Costs = Mapping[str, float]
#: CPU seconds below which a step is too short to measure its growth.
LEAST = 0.1


@dataclass
class _Clocked(Compiler):
    """A Compiler that records the CPU seconds of each step in this process."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.process_time()
        with super().step(name):
            yield
        self.spent[name] = self.spent.get(name, 0.0) + time.process_time() - start


def seconds(
    shape: str, size: int, backend: Backend, policy: str = "wavefront", device: str = "", registry: Registry | None = None
) -> Costs:
    """Return CPU seconds by step of reading and compiling ``SHAPES[shape](size)``; "read" is the first."""
    data = SHAPES[shape](size).SerializeToString()
    compiler = _Clocked(backend, CompileOptions(policy), KernelStore(None), registry, device=device)
    start = time.process_time()
    model = read_model(data)
    read = time.process_time() - start
    compiler.compile_model(model, {})
    return {"read": read, **compiler.spent}


@dataclass(frozen=True)
class GrowthPlan:
    """The device, options and sizes for compiling shapes. No larger size follows a compile that needed ``long`` CPU seconds.
    ``most`` is the largest allowed exponent of a step."""

    device: str
    target: str
    options: Mapping[str, str]
    policy: str
    sizes: Sequence[int]
    long: float
    most: float


def begin(asked: GrowthPlan, member: Member) -> Work:
    """Return the function that compiles all sizes of one shape in a process; it sends the report and the number of findings."""
    registry = Registry()
    backend = registry.open(asked.device, "", asked.target, asked.options)

    def work(shape: str, line: Line) -> None:
        rows = list[tuple[int, Costs]]()
        for size in asked.sizes if shape not in DEEP else [n // 4 for n in asked.sizes]:
            try:
                rows.append((size, seconds(shape, size, backend, asked.policy, asked.device.partition(":")[0], registry)))
            except Exception as problem:  # any exception: the search continues
                where = "".join(traceback.format_tb(problem.__traceback__)[-2:])
                line.tell((f"FAILED {shape} {size}: {type(problem).__name__} {str(problem)[:300]}\n{where}", 1))
                break
            if sum(rows[-1][1].values()) > asked.long:
                break
        if rows:
            line.tell(report(shape, rows, asked.most))

    return work


def report(shape: str, rows: Sequence[tuple[int, Costs]], most: float) -> tuple[str, int]:
    """Return the costs of one shape as text, and the number of steps that grow too fast."""
    found = 0
    lines = [f"{shape}: {' '.join(f'{size}:{sum(costs.values()):.2f}' for size, costs in rows)} s of CPU"]
    for step in rows[-1][1]:
        last = [(size, costs.get(step, 0.0)) for size, costs in rows[-3:]]
        if last[-1][1] < LEAST or len(last) < 2:
            continue
        slope = exponent(*map(list, zip(*last, strict=True)))
        figures = " ".join(f"{cost:.2f}" for _, cost in last)
        found += slope > most
        lines.append(f"  {'GROWS' if slope > most else '     '} {step:<10} n^{slope:.2f}  {figures}")
    return "\n".join(lines), found


def operations(action: Callable[[], object]) -> int:
    """Return the number of Python and C function calls during ``action``, independent of the machine and its load."""
    profile = cProfile.Profile()
    profile.runcall(action)
    return sum(entry.callcount for entry in profile.getstats())


def growth(action: Callable[[int], object], size: int) -> float:
    """Return the growth of the operations of ``action(n)`` from n = ``size``. The result is the increase from 2n to 4n over that
    from n to 2n, independent of fixed costs. It is 2 for a constant cost per node and 4 for a cost per pair of nodes."""
    action(size)  # one-time work
    counts = [operations(lambda n=n: action(n)) for n in (size, 2 * size, 4 * size)]  # type: ignore[misc]
    return (counts[2] - counts[1]) / (counts[1] - counts[0])


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of log(cost) over log(size), by least squares."""
    points = [(math.log(n), math.log(max(c, 1e-9))) for n, c in zip(sizes, costs, strict=True)]
    middle = [sum(p[i] for p in points) / len(points) for i in (0, 1)]
    spread = sum((x - middle[0]) ** 2 for x, _ in points)
    return sum((x - middle[0]) * (y - middle[1]) for x, y in points) / spread
