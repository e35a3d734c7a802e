"""Conformance of an opened device: rejected options, offered kernels, freed memory and queued runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Binding
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.expr import rename_tensors
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import RProgram, Task
from rammer_testing.bound_checks import equal, fails, opened
from rammer_testing.small_models import MODELS
from rammer_testing.subject import Subject
from rammer_testing.table_checks import copying_program, program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Models whose operators are offered to the device, and the number of candidates per operator that get a kernel.
OFFERED, KERNELS = ("images", "softmax", "recurrence", "gather", "reductions"), 3
#: Allowed ratio of the first candidate's price to the least price. Tiles are ranked with their launch; prices exclude it.
MISORDERED = 1.25
#: Elements of a program that is loaded and closed, elements per task (``PIECE``), repetitions, and bytes that may leak in total.
LARGE, PIECE, TIMES, STAYS = 1 << 21, 4096, 8, 4 << 21


def check_opening(device: Subject) -> None:
    """Check that an unknown option or a wrong device kind raises an error."""
    options = dict(device.options)

    def open_with(require: str = "", **more: str) -> None:
        device.registry.open(device.spec, require, options={**options, **more})

    fails(device, BadInput, "no_such_option", lambda: open_with(no_such_option="1"))
    fails(device, DeviceUnavailable, "abacus", lambda: open_with("abacus"))
    open_with(device.backend.hardware.kind)


# --- kernels ----------------------------------------------------------------------------------------


def check_kernels(device: Subject) -> None:
    """Check candidates and kernels of every operator: the requested tile, its times, and equal results
    under other tensor names."""
    for name in OFFERED:
        program = program_of(device, MODELS[name]).program
        constants = [n for n, s in program.storage.items() if program.buffer[s.buffer].kind == "constant"]
        binding = Binding.of(program, constants)
        for number, operator in enumerate(program.operators):
            plain = replace(operator, tile=(), family="", config=())
            _offered(device, f"{name}, operator {number}", plain, binding)


def _offered(device: Subject, what: str, operator: ROperator, binding: Binding) -> None:
    backend = device.backend
    found = list(backend.candidates(operator, binding))
    device.expect(bool(found), f"{what}: no candidates")
    same = [replace(c, tile=(), family="", config=()) == operator for c in found]
    device.expect(all(same), f"{what}: a candidate computes something else")
    tiled = all(len(c.tile) == len(c.anchor.axes) and min(c.tile, default=1) > 0 for c in found)
    device.expect(tiled, f"{what}: a candidate without a tile")
    other, names = _renamed(operator, binding)
    again = list(backend.candidates(other, names))
    device.expect(
        [(c.tile, c.family, c.config) for c in again] == [(c.tile, c.family, c.config) for c in found],
        f"{what}: other candidates where tensors have other names, by which nothing is kept",
    )
    made, priced = 0, list[float]()
    for one, two in list(zip(found, again, strict=True))[:KERNELS]:
        try:
            kernel, twin = backend.kernel(one, binding), backend.kernel(two, names)
            device.expect(bool(kernel.source), f"{what}: a kernel without a text")
        except DeviceFailure:
            continue
        made += 1
        priced.append(kernel.operator_time(backend.vdevice.veus))
        device.expect(kernel.operator == one, f"{what}: a kernel for {kernel.operator.head()}, not {one.head()}")
        good = all(0 < t < np.inf for t in (kernel.alone, kernel.crowded))
        device.expect(good, f"{what}: a task takes {kernel.alone} s, with all units busy {kernel.crowded} s")
        device.expect((kernel.alone, kernel.crowded) == (twin.alone, twin.crowded), f"{what}: other times with other names")
    device.expect(made > 0, f"{what}: none of the first {KERNELS} candidates gets a kernel")
    # Without measurements the first candidate is used and scheduled by its price, so rank and price must agree.
    ranked = priced[0] <= MISORDERED * min(priced)
    device.expect(ranked, f"{what}: the first candidate is priced at {priced[0]} s, a later one at {min(priced)} s")


def _renamed(operator: ROperator, binding: Binding) -> tuple[ROperator, Binding]:
    """Return the same operator with every tensor renamed."""
    inside = {c.name for c in operator.computes}
    names = {n: f"other{n}" for n in (*operator.inputs, *inside)}
    computes = tuple(replace(c, name=names[c.name], body=rename_tensors(c.body, names)) for c in operator.computes)
    links = tuple(Connection(names[c.producer], names[c.consumer], c.layer) for c in operator.connections)
    renamed = ROperator(names[operator.anchor.name], computes, links, tuple(names[o] for o in operator.outputs))
    storages = {names[n]: replace(s, tensor=names[n]) for n, s in binding.storages.items() if n in names}
    return renamed, replace(
        binding,
        types={names[n]: t for n, t in binding.types.items() if n in names},
        storages=storages,
        constants=_of(names, binding.constants),
        reused=_of(names, binding.reused),
    )


def _of(names: Mapping[str, str], chosen: frozenset[str]) -> frozenset[str]:
    return frozenset(names[n] for n in chosen if n in names)


# --- memory -----------------------------------------------------------------------------------------


def check_freed(device: Subject) -> None:
    """Check that repeated loading and closing leaks neither memory nor threads, where the system reports them."""
    operator = copying_program(LARGE).operators[0].tiled((PIECE,))
    rows = min(device.backend.vdevice.veus, 64)
    table = tuple(tuple(Task("y", i) for i in range(row, operator.task_count, rows)) for row in range(rows))
    program = replace(copying_program(LARGE), operators=(operator,), rows=table)
    x = {"x": device.rng.standard_normal(LARGE).astype(np.float32)}
    _use(device, program, x)
    _use(device, program, x)
    threads, more = threading.active_count(), STAYS + 1
    for _ in range(2):  # one-time allocations of this process stay once; a leak grows each time
        if more <= STAYS:
            break
        before = _resident()
        for _ in range(TIMES):
            _use(device, program, x)
        more = _resident() - before
    started = threading.active_count() - threads
    device.expect(more <= STAYS, f"{TIMES} programs of {2 * LARGE * 4} bytes were closed, but {more} bytes have stayed")
    device.expect(started < TIMES, f"{TIMES} programs were closed, but {started} threads have stayed")


def _use(device: Subject, program: RProgram, inputs: Mapping[str, Array]) -> None:
    loaded = device.backend.load(program, {})
    same = np.array_equal(loaded.run(inputs).outputs["y"], inputs["x"])
    loaded.close()
    device.expect(same, f"a copy of {inputs['x'].size} floats is no copy")


def _resident() -> int:
    """Return the resident bytes of this process; 0 if the system does not report them."""
    gc.collect()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


# --- queues -----------------------------------------------------------------------------------------


def check_queue(device: Subject) -> None:
    """Check that a bound run may be queued: a later write or read of its outputs waits for it."""
    model = MODELS["product"]
    with opened(device, model) as exe:
        first, second = (model.inputs(device.rng, {}) for _ in range(2))
        want = {id(x): exe.run(x) for x in (first, second)}
        bound = exe.bind({n: np.array(a) for n, a in first.items()})
        for written, ran in ((second, first), (first, second)):
            bound.run()
            bound.write(written)
            equal(device, "a run before a write", bound.to_host(), want[id(ran)])
        bound.run()
        bound.synchronize()
        seen = {n: np.array(a.get() if hasattr(a, "get") else a) for n, a in bound.outputs.items()}
        equal(device, "the bound arrays after synchronize", seen, want[id(first)])
        bound.write(second)
        bound.run()
        shown = bound.to_host()
        equal(device, "read at once after a run", shown, want[id(second)])
        other = exe.bind(first)
        other.run()
        equal(device, "after a run of another bound call", bound.to_host(), want[id(second)])
        _one_program(device, first, second)


def _one_program(device: Subject, first: Mapping[str, Array], second: Mapping[str, Array]) -> None:
    """Check the plugin's own bound call: outputs already copied and inputs not rewritten keep their values."""
    segment = program_of(device, MODELS["product"])
    loaded = device.backend.load(segment.program, segment.constants)
    bound = loaded.bind({n: np.array(a) for n, a in first.items()}, {})
    bound.run()
    shown, mixed = bound.to_host(), {**first, "x": second["x"]}
    bound.write({"x": second["x"]})
    bound.run()
    equal(device, "a write of some inputs", bound.to_host(), loaded.run(mixed).outputs)
    equal(device, "what to_host gave, after later runs", shown, loaded.run(first).outputs)
    loaded.close()
