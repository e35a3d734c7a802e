"""Runs of one operator as a program between guard bands, checked element by element.

Every tensor has a separate, larger buffer. It keeps the planner's strides and its offset modulo 64 elements. The program's ports
are those whole buffers. Elements around an operand are NaN; elements around a result must stay unchanged. Results are NaN before
the run. All other kernel memory is NaN too, if the device supports poisoning.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Backend, Binding
from rammer.frontend.read.reader import read_model
from rammer.fusion.group_prices import CostModel
from rammer.fusion.stitch_latency import Evaluator
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Load, Ref
from rammer.ir.operator import ROperator
from rammer.ir.program import ALIGNMENT, Buffer, BufferKind, Counter, Port, RProgram, Storage, Task, Wait
from rammer.ir.types import TensorType, is_float, row_major
from rammer.runtime.host_memory import storage_view
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner
from rammer_testing.bounds import Bounded, bounded_results
from rammer_testing.cases import VIEWS, NetCase
from rammer_testing.nets import model_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Guard elements before and after every tensor. Offsets are preserved modulo this number.
GUARD = 64
#: Elements per task of a slow copy, and how often the task reads each element (less often for more than ``MANY`` elements). On a
#: GPU this lasts about 50 us: a consumer that ignores its wait has started by then and reads too early.
PIECE, READS, MANY = 4096, 256, 1 << 17
#: Factor by which a fusion may be slower if everything is to be fused.
FAST = 1e3
#: Wrong results that a report shows.
SHOWN = 3


@dataclass(frozen=True)
class UntiledOperator:
    """An untiled operator as the compiler passes it to the tuner, with the values of the model's constants."""

    operator: ROperator
    binding: Binding
    constants: Mapping[str, Array]


class _Stop(Exception):
    """Signal that stops compilation once the operators are recorded."""


class _Recorder:
    """A substitute for the tuner that records the operators passed to it."""

    def __init__(self, tuner: Tuner) -> None:
        # The kernels decide fusion and constant layouts.
        self.kernels, self.first, self.first_kernel = tuner.kernels, tuner.first, tuner.first_kernel
        self.backend, self.store, self.level = tuner.backend, tuner.store, tuner.level
        self.found: tuple[Sequence[ROperator], Binding] = ((), Binding({}, {}))

    def prepare(self, operators: Sequence[ROperator], binding: Binding) -> None:
        """Record the operators and stop compilation."""
        self.found = operators, binding
        raise _Stop


def subjects(case: NetCase, backend: Backend) -> list[UntiledOperator]:
    """Return the operators of a case's model on this device: all, or the one that the case names."""
    fusion = "elementwise" if "elementwise" in case.tags else "full"
    compiler = Compiler(backend, CompileOptions(precision=case.precision, layout=case.layout, fusion=fusion), KernelStore(None))
    recorder = _Recorder(compiler.tuner)
    compiler.tuner = recorder  # type: ignore[assignment]
    values: dict[str, Array] = {}
    graph_of = compiler.program

    def program(compute: Any, *ports: Any) -> Any:
        values.update(compute.constants)
        return graph_of(compute, *ports)

    compiler.program = program  # type: ignore[method-assign, assignment]
    if "fuse" in case.tags:  # fuse everything that can be connected on chip, even if it is predicted slower
        compiler.cost_model = lambda binding, ends=None: CostModel(binding=binding, doubt=-FAST)  # type: ignore[method-assign]
    if case.kind == "stitched":  # likewise stitch if the fused operator is faster than its parts in sequence, not concurrently
        asked = compiler.latency
        compiler.latency = lambda binding: _in_turn(asked(binding))  # type: ignore[method-assign]
    with suppress(_Stop):
        compiler.compile_model(read_model(model_of(case.kind, case.sizes, case.tags, case.seed)), {})
    operators, binding = recorder.found
    found = [UntiledOperator(o, moved(o, binding, case.views), values) for o in operators]
    return found if case.operator < 0 else found[case.operator : case.operator + 1]


def _in_turn(latency: Evaluator) -> Evaluator:
    """Return an evaluator that predicts operators in sequence, not concurrently."""
    return replace(latency, seconds=lambda operators, after: sum(latency.seconds({n: k}, {}) for n, k in operators.items()))


def moved(operator: ROperator, binding: Binding, views: str) -> Binding:
    """Return ``binding`` with the operator's non-constant tensors moved, by the ``VIEWS`` that the digits of ``views`` select."""
    names = [n for n in dict.fromkeys((*operator.inputs, *operator.outputs)) if not _constant(n, binding)]
    storages = dict(binding.storages)
    for name, digit in zip(names, cycle(views or "0"), strict=False):
        storage, (later, wider) = storages[name], VIEWS[int(digit)]
        shape = storage.shape
        if wider and len(shape) > 1 and storage.row_major and 0 not in shape:
            storage = replace(storage, strides=row_major((*shape[:-1], shape[-1] + wider)))
        storages[name] = replace(storage, offset=storage.offset + later)
    return replace(binding, storages=storages)


@dataclass(frozen=True)
class Feed:
    """Values of the non-constant operands, and the expected results with their error bounds."""

    inputs: Mapping[str, Array]
    wanted: Mapping[str, Bounded]


@dataclass(frozen=True)
class Trial:
    """A subject with its values: constants shared by all runs, and the feed of each run. ``late`` is passed to ``placed``."""

    subject: UntiledOperator
    constants: Mapping[str, Array]
    feeds: tuple[Feed, ...]
    late: str = ""


def trial_of(subject: UntiledOperator, seed: int, late: str = "") -> Trial:
    """Return a trial with values from ``seed``: integers (mostly), fractions, and integers with a NaN in some operands."""
    rng = np.random.default_rng(seed)
    operator, binding = subject.operator, subject.binding
    fixed = [n for n in operator.inputs if _constant(n, binding)]
    whole = bool(seed % 4)
    constants = {n: _kept(subject.constants.get(n), binding.types[n], rng, whole) for n in fixed}
    feeds = []
    for kind, spoilt in ((whole, False), (False, False), (True, True)):
        given = {n: _values(binding.types[n], rng, kind) for n in operator.inputs if n not in constants}
        free = [n for n, v in given.items() if n not in subject.constants and v.dtype.kind == "f" and v.size > 1]
        for n in rng.permutation(free)[: 1 + int(rng.integers(2))] if spoilt else ():
            given[n].reshape(-1)[int(rng.integers(given[n].size))] = np.nan
        given |= {n: _kept(subject.constants[n], binding.types[n], rng, kind) for n in given if n in subject.constants}
        given = {n: _at_once(values, binding.storages[n]) for n, values in given.items()}
        feeds.append(Feed(given, bounded_results(operator, {**constants, **given}, binding.precision)))
    return Trial(subject, constants, tuple(feeds), late)


def _constant(name: str, binding: Binding) -> bool:
    storage, kind = binding.storages[name], binding.types[name]
    return name in binding.constants and storage.strides == row_major(kind.shape) and 0 not in kind.shape


def _kept(values: Array | None, kind: TensorType, rng: np.random.Generator, whole: bool) -> Array:
    """Return new values for a constant, unless it may be an index or a scalar of the model."""
    if values is not None and (values.size == 1 or values.dtype.kind != "f"):
        return np.asarray(values).reshape(kind.shape)
    return _values(kind, rng, whole)


def _values(kind: TensorType, rng: np.random.Generator, whole: bool) -> Array:
    dtype = np.dtype(kind.dtype)
    if dtype.itemsize == 1 and dtype.kind != "b":  # too few values for an index: draw from the whole range, the extremes often
        ends = np.iinfo(dtype)
        drawn = rng.integers(ends.min, ends.max + 1, kind.shape)
        return np.where(rng.random(kind.shape) < 0.2, np.where(drawn % 2, ends.min, ends.max), drawn).astype(dtype)
    if dtype.kind != "f":
        return rng.integers(0, 2, kind.shape).astype(dtype)
    if whole:
        return rng.integers(-2, 3, kind.shape).astype(dtype)
    return np.asarray(rng.standard_normal(kind.shape, np.float32)).astype(dtype)


def _at_once(values: Array, storage: Storage) -> Array:
    """Return ``values`` as read back from a view whose elements may overlap, as in a repeated axis."""
    if 0 in storage.shape:
        return values
    low, high = storage.span()
    image = np.empty(high - low, values.dtype)
    seen = storage_view(image, replace(storage, offset=storage.offset - low))
    seen[...] = values
    return np.array(seen)


@dataclass(frozen=True)
class Placed:
    """A program around one tiled operator, with whole buffers as ports. ``given`` maps each input port to its operands;
    ``results`` maps each result to its tensor."""

    program: RProgram
    given: Mapping[str, tuple[str, ...]]
    results: Mapping[str, str]


@dataclass
class _Parts:
    """Buffers, storages, operators and ports of a program under construction."""

    storages: list[Storage] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    operators: list[ROperator] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    inputs: list[Port] = field(default_factory=list)
    outputs: list[Port] = field(default_factory=list)
    given: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arena: int = 0

    def whole(self, name: str, buffer: str, dtype: str, size: int, kind: BufferKind) -> str:
        """Add a buffer and a tensor that covers all of it."""
        offset = self.arena if kind == "arena" else 0
        self.buffers.append(Buffer(buffer, dtype, size, kind, offset))
        self.storages.append(Storage(name, buffer, 0, (size,), (1,)))
        self.arena += -(-self.buffers[-1].nbytes // ALIGNMENT) * ALIGNMENT if kind == "arena" else 0
        return name

    def between(self, buffer: str, storages: Sequence[Storage]) -> int:
        """Add tensors to a buffer one after another, separated by guards, and return the buffer size."""
        size = GUARD
        for storage in storages:
            low, high = storage.span()
            first = size + low % GUARD
            self.storages.append(replace(storage, buffer=buffer, offset=first + storage.offset - low))
            size = -(-(first + high - low) // GUARD) * GUARD + GUARD
        return size

    def operands(self, name: str, dtype: str, storages: Sequence[Storage], late: bool) -> None:
        """Add an input port with these operands. If ``late``, a slow operator copies them to the arena."""
        size = self.between(f"b_{name}", storages)
        self.given[name] = tuple(s.tensor for s in storages)
        if not late:
            self.inputs.append(Port(name, self.whole(f"whole_{name}", f"b_{name}", dtype, size, "input")))
            return
        size = PIECE << max(0, (size - 1).bit_length() - (PIECE - 1).bit_length())  # few sizes, so that few kernels are compiled
        given = self.whole(f"given_{name}", f"g_{name}", dtype, size, "input")
        held = self.whole(f"held_{name}", f"b_{name}", dtype, size, "arena")
        slow = (Axis("k", READS if size <= MANY else READS // 8),) if is_float(dtype) else ()
        copy = Compute(held, dtype, (Axis("i", size),), Load(given, (Ref("i"),)), slow, "max" if slow else None)
        self.operators.append(ROperator(held, (copy,), (), (held,), (PIECE,)))
        self.counters.append(Counter(held, held, 0, self.operators[-1].task_count))
        self.inputs.append(Port(name, given))


def placed(tiled: ROperator, binding: Binding, constants: Mapping[str, Array], veus: int, late: str = "") -> Placed:
    """Return the program, its tasks dealt to at most ``veus`` rows. Ports are whole buffers named after tensors.

    ``late`` (of ``LATE``) selects operands that slow operators write in every run, just before the tested operator. The choices
    are all floats of one type by one copy, each operand by a separate copy, or the operand at one position."""
    parts, results = _Parts(), dict[str, str]()
    for name in (n for n in tiled.inputs if n in constants):
        storage = binding.storages[name]
        parts.storages.append(Storage(name, f"b_{name}", 0, storage.shape, storage.strides))
        parts.buffers.append(Buffer(f"b_{name}", binding.types[name].dtype, constants[name].size, "constant"))
    for names, slow in _ports([n for n in tiled.inputs if n not in constants], binding, late):
        dtype = binding.types[names[0]].dtype
        parts.operands(names[0] if len(names) == 1 else "together", dtype, [binding.storages[n] for n in names], slow)
    for name in tiled.outputs:
        size = parts.between(f"b_{name}", [binding.storages[name]])
        results[name] = parts.whole(f"whole_{name}", f"b_{name}", binding.types[name].dtype, size, "output")
        parts.outputs.append(Port(name, results[name]))
    operators = (*parts.operators, tiled)
    waits = tuple(Wait(c.name, c.total) for c in parts.counters)
    program = RProgram(
        "single",
        "single",
        tuple(parts.inputs),
        tuple(parts.outputs),
        tuple(parts.buffers),
        tuple(parts.storages),
        operators,
        tuple(parts.counters),
        _rows(operators, waits, veus),
        precision=binding.precision,
    )
    return Placed(program, parts.given, results)


def _ports(names: Sequence[str], binding: Binding, late: str) -> list[tuple[list[str], bool]]:
    """Return the operands of each input port, and True for the ports whose operands are late."""
    if late != "all":
        return [([n], late == "each" or late == str(i)) for i, n in enumerate(names, 1)]
    kinds = Counts(k for n in names if is_float(k := binding.types[n].dtype))
    most = kinds.most_common(1)[0][0] if kinds else ""
    together = [n for n in names if binding.types[n].dtype == most]
    return [*([(together, True)] if together else []), *(([n], False) for n in names if n not in together)]


def _rows(operators: Sequence[ROperator], waits: tuple[Wait, ...], veus: int) -> tuple[tuple[Task, ...], ...]:
    """Return tasks dealt to rows, operator by operator. The last operator's first task in each row waits."""
    count = min(veus, max(o.task_count for o in operators))
    rows: list[list[Task]] = [[] for _ in range(count)]
    for operator in operators:
        for i in range(operator.task_count):
            late = operator is operators[-1] and i < count
            rows[i % count].append(Task(operator.name, i, waits if late else ()))
    return tuple(map(tuple, rows))


def images(place: Placed, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the buffer contents for each port: the inputs, surrounded by NaN (all bits set)."""
    result = {}
    for port, names in place.given.items():
        buffer = place.program.buffer[place.program.storage[names[0]].buffer]
        result[port] = np.full(buffer.nbytes, 0xFF, np.uint8).view(buffer.dtype)
        for name in names:
            storage_view(result[port], place.program.storage[name])[...] = inputs[name]
    return result


def judge(place: Placed, have: Mapping[str, Array], wanted: Mapping[str, Bounded]) -> str:
    """Return a description of errors in the result buffers ``have``, or "" if they are correct."""
    problems = []
    for name, want in wanted.items():
        storage, image = place.program.storage[name], np.array(have[name])
        outside = np.ones(image.size, bool)
        storage_view(outside, storage)[...] = False
        around = image[outside].view(np.uint8).reshape(int(outside.sum()), -1)
        # A device may poison memory two bytes at a time. One-byte elements are then equal at even offsets, and at odd offsets.
        turns = np.flatnonzero(outside) % 2 if image.itemsize == 1 else np.zeros(len(around), int)
        first = np.array([around[np.argmax(turns == turn)] for turn in (0, 1)])
        strays = np.flatnonzero((around != first[turns]).any(axis=1))
        if strays.size or (image.dtype.kind == "f" and not np.isnan(image[0])):
            places = np.flatnonzero(outside)[strays][:SHOWN] - storage.offset
            where = f"at {list(map(int, places))} from its first"
            problems.append(f"{name}: {strays.size or 'all'} elements outside were written, {where}")
        problem = differences(np.array(storage_view(image, storage)), want)
        problems += [f"{name}: {problem}"] if problem else []
    return "; ".join(problems)


def differences(have: Array, want: Bounded) -> str:
    """Return the differences of ``have`` from the bounded values, or "" if it is within the bounds."""
    value = want.value
    if value.dtype.kind != "f":
        wrong = have.astype(np.float64) != value.astype(np.float64)
        wrong &= np.broadcast_to(np.zeros(1) if want.error is None else want.error, value.shape) == 0
        allowed = np.zeros(value.shape)
    else:
        allowed = np.zeros(value.shape) if want.error is None else np.broadcast_to(want.error, value.shape)
        exact = have.astype(np.float64)
        with np.errstate(all="ignore"):
            far = np.abs(exact - value) > allowed * (1 + 1e-9)
            far = np.where(np.isinf(value), exact != value, far)
            limit = float(np.finfo(have.dtype).max)
            over = np.isinf(exact) & (exact * value > 0) & (np.abs(value) + allowed >= limit * (1 - 2.0**-11))
        wrong = (np.isnan(exact) != np.isnan(value)) | (far & ~np.isnan(value) & ~over)
        wrong &= ~(np.isinf(allowed) | (np.isnan(allowed) & ~np.isnan(value)))
    if not wrong.any():
        return ""
    first = np.argwhere(wrong)[:SHOWN]
    shown = ", ".join(f"{have[p]} for {value[p]:.6g} +- {allowed[p]:.2g} at {list(map(int, p))}" for p in map(tuple, first))
    return f"{int(wrong.sum())} of {wrong.size} wrong: {shown}"


def check(backend: Backend, tiled: ROperator, trial: Trial) -> str:
    """Return a description of wrong results of ``tiled`` on the device, or "". Raises DeviceFailure if loading it fails."""
    place = placed(tiled, trial.subject.binding, trial.constants, backend.vdevice.veus, trial.late)
    loaded = backend.load(place.program, trial.constants)
    try:
        for number, feed in enumerate(trial.feeds):
            loaded.poison()
            have = loaded.run(images(place, feed.inputs)).outputs
            problem = judge(place, have, feed.wanted)
            if problem:
                return f"run {number}: {problem}"
    finally:
        loaded.close()
    return ""
