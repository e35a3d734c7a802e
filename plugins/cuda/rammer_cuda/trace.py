"""Measured traces: the same kernels built again, with each block recording its SM and its working time.

In a traced kernel, ``rm_after()`` also declares an object whose lifetime is the task's (``device/trace.cuh``): from the end of
the wait for earlier kernels to the end of the kernel. Work before that wait (fetching constants) is thus excluded. The persistent
kernel has macros at the same places of its walk (``device/record.cuh``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rammer.device.manifest import Array, Recorded, Span
from rammer.errors import DeviceFailure
from rammer.ir.launches import Launch
from rammer.ir.program import RProgram

from rammer_cuda.bound import GpuProgram, Launchable
from rammer_cuda.compile import compile_cubin
from rammer_cuda.driver import check_result, import_driver
from rammer_cuda.executor import CapturedGraph, CudaProgram, Recipe, build_graph
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.kernel_text import kernel_text
from rammer_cuda.persistent.persistent_executor import PersistentProgram, Walk
from rammer_cuda.resident import Resident

#: Words of 8 bytes of one RmRecord.
WORDS = 3
#: Replays of one trace: the replay with the median time is reported.
REPLAYS = 11


@dataclass(frozen=True)
class Trace:
    """Tasks of one run with the SMs that ran them, times in seconds from the first start. ``seconds`` is that run by events,
    ``plain`` the median of the ordinary kernels; the difference is the cost of tracing."""

    run: Recorded
    seconds: float
    plain: float


def record_trace(loaded: CudaProgram, inputs: Mapping[str, Array]) -> Trace:
    """Run the program on ``inputs`` with traced kernels and read the records back."""
    resident, recipe = loaded.resident, loaded.recipe
    tasks = list(traced_tasks(recipe.plan, _written(recipe)))
    with resident.device:
        records = resident.cp.zeros((len(tasks), WORDS), np.uint64)
        graph = CapturedGraph(build_graph(resident, _trace_recipe(resident, recipe, int(records.data.ptr))), resident)
    return trace_launch(loaded, inputs, graph, records, tasks)


def trace_persistent(loaded: PersistentProgram, inputs: Mapping[str, Array]) -> Trace:
    """Trace a program that is one launch, perhaps with others around it. Its kernel is built with records, one for each entry of
    the table."""
    resident, parts, rows = loaded.resident, loaded.parts, loaded.walked.rows
    listed = [
        [(t.operator, t.index) for row in rows for t in row],
        *(list(traced_tasks(r.plan, _written(r))) for r in loaded.around.recipes),
    ]
    with resident.device:
        text = kernel_text(parts.bodies, loaded.table(resident).form, parts.threads, traced=True, blocks=loaded.blocks)
        function = resident.function(compile_cubin(text, resident.gpu.architecture).code, "rm_persistent", parts.shared)
        records = resident.cp.zeros((sum(map(len, listed)), WORDS), np.uint64)
        first, begins = int(records.data.ptr), resident.table(np.cumsum([0, *map(len, rows)], dtype=np.uint32))
        for name, address in (("rm_records", first), ("rm_begins", begins)):
            set_pointer(resident.modules[-1], name, address)
        places = iter(np.cumsum([len(tasks) for tasks in listed]).tolist())
        around = loaded.around.made_anew(lambda recipe: _trace_recipe(resident, recipe, first + next(places) * WORDS * 8))
        launch = Walk(loaded, resident, function, around)
    return trace_launch(loaded, inputs, launch, records, [task for tasks in listed for task in tasks])


def _written(recipe: Recipe) -> Mapping[str, TaskKernel]:
    """Return the kernels of a program that was compiled here, with their texts."""
    return cast(Mapping[str, TaskKernel], recipe.kernels)


def _trace_recipe(resident: Resident, recipe: Recipe, first: int) -> Recipe:
    """Return the recipe with recording kernels and the address of each launch's first record, from ``first`` on."""
    kernels = {name: replace(k, traced=True) for name, k in _written(recipe).items()}
    counts = [len(launch.tasks) * kernels[launch.operator].blocks for launch in recipe.plan]
    places = tuple(first + int(n) * WORDS * 8 for n in np.cumsum([0, *counts])[:-1])
    return replace(recipe, kernels=kernels, functions=resident.load(kernels.values()), records=places)


def set_pointer(module: Any, name: str, address: int) -> None:
    """Set a pointer variable of a module."""
    api = import_driver()
    place, _size = check_result(api.cuModuleGetGlobal(module, name.encode()), f"finding {name}")
    value = np.array([address], np.uint64)
    check_result(api.cuMemcpyHtoD(place, value.ctypes.data, value.nbytes), f"setting {name}")


def trace_launch(
    loaded: GpuProgram,
    inputs: Mapping[str, Array],
    launch: Launchable,
    records: Any,
    tasks: list[tuple[str, int]],
) -> Trace:
    """Replay ``launch``, which is closed afterwards, to fill ``records``, one for each of ``tasks``."""
    resident = loaded.resident
    resident.ready()
    resident.copy_in(inputs)
    plain = float(np.median([loaded.replay() for _ in range(REPLAYS)]))
    runs = [_replay_once(resident, launch, records) for _ in range(REPLAYS + 2)][2:]
    loaded.check_finished()
    launch.close()
    seconds, found = sorted(runs, key=lambda r: r[0])[len(runs) // 2]
    return Trace(Recorded(loaded.program, _make_spans(loaded.program, tasks, found)), seconds, plain)


def _replay_once(resident: Resident, launch: Launchable, records: Any) -> tuple[float, Array]:
    """Return the seconds and records of one replay."""
    with resident.device, resident.stream:
        records.fill(0)
    seconds = resident.timed(lambda: launch.launch(resident.stream.ptr))
    return seconds, np.asarray(resident.cp.asnumpy(records))


def _make_spans(program: RProgram, tasks: list[tuple[str, int]], records: Array) -> list[Span]:
    """Return one span per record. Raises DeviceFailure if a task left its record empty."""
    missing = [task for task, (start, end) in zip(tasks, records[:, :2], strict=True) if not 0 < start <= end]
    if missing:
        name, index = missing[0]
        what = f"program {program.name}: {len(missing)} of {len(tasks)} tasks recorded no times"
        raise DeviceFailure(what, f"task {index} of {program.operator[name].head()} first")
    first = int(records[:, 0].min())
    times = (records[:, :2] - np.uint64(first)).astype(np.float64) * 1e-9
    return [
        Span(int(sm), name, index, float(start), float(end))
        for (name, index), (start, end), sm in zip(tasks, times, records[:, 2], strict=True)
    ]


def traced_tasks(plan: Sequence[Launch], kernels: Mapping[str, TaskKernel]) -> Iterable[tuple[str, int]]:
    """Yield operator and task of every block, in the order of the records."""
    for launch in plan:
        blocks = kernels[launch.operator].blocks
        for operator, tasks in launch.parts or ((launch.operator, launch.tasks),):
            for task in tasks:
                yield from [(operator, task)] * blocks
