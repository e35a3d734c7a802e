"""A compiled model on the device, with the runs and bound calls that keep it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, RLock, get_ident
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import WeakSet

import numpy as np

from rammer.compiled.segments import Compiled, HostSegment, ProgramSegment
from rammer.device.manifest import Array, Backend, Loaded
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.collector import collector_paused
from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import ArrayRecipe, parts_of
from rammer.ir.formats import from_carrier, to_carrier
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.call_lengths import PLAIN, BindSpec, LoadedVariants
from rammer.runtime.host_memory import program_bytes
from rammer.runtime.shape_buckets import crop_outputs, pad_inputs

if TYPE_CHECKING:
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: on the device (simulated if the device is), on the host, and in total. ``clocks`` are those of the
    programs (``RunResult``)."""

    clocks: tuple[float | Callable[[], float], ...]
    host: float
    total: float
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> float:
        """Seconds on the device. A simulator may count them here."""
        return sum([c() if callable(c) else c for c in self.clocks])


#: Timing before the first run.
NO_RUN: Final = Timing((), 0.0, 0.0)


#: The loaded programs of a model, by the number of their segment.
Programs: TypeAlias = "dict[int, Loaded | LoadedVariants]"


def bytes_of(compiled: Compiled) -> int:
    """Return the bytes of the buffers of a compiled model's programs: arenas, inputs, outputs and constants."""
    return sum(program_bytes(program) for program in compiled.programs)


class Continuation(Protocol):
    """The deferred part after the programs of a model (``rammer.jit.continuation``)."""

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host."""
        ...

    @property
    def kernels(self) -> int:
        """Kernel launches of one run."""
        ...

    @property
    def rest(self) -> DeferredModel:
        """The deferred model part."""
        ...

    def run(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], Timing]:
        """Return the model's outputs from the values computed before."""
        ...

    def close(self) -> None:
        """Free the programs on the device."""
        ...


@dataclass
class LoadedModel:
    """A compiled model whose programs are loaded on the device. Any thread may call it; runs of one copy of its programs are
    serialised. If all copies run, ``load_copy`` loads another, at most ``spare`` times. Bound calls use the first copy. With a
    ``following`` part, the programs compute its inputs; ``bodies`` runs control flow."""

    compiled: Compiled
    loaded: Programs
    compile_seconds: float
    following: Continuation | None = None
    bodies: BodyRunner | None = None
    spare: int = 0
    load_copy: Callable[[], Programs] | None = None
    further: list[Programs] = field(default_factory=list)  #: The copies after the first.
    _idle: list[Programs] = field(default_factory=list, repr=False)
    bounds: WeakSet[BoundCall] = field(default_factory=WeakSet)
    loose: WeakSet[BoundCall] = field(default_factory=WeakSet)  #: Bound calls that do not pin it.
    users: list[int] = field(default_factory=list)  #: Threads whose calls are running.
    closed: bool = False
    _changed: Condition = field(default_factory=Condition, repr=False)
    _freeing: Any = field(default_factory=RLock, repr=False)

    def __post_init__(self) -> None:
        self._idle.append(self.loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all copies on the device. Constants are counted for each copy."""
        return (1 + len(self.further)) * bytes_of(self.compiled)

    @property
    def kernels(self) -> int:
        """Kernel launches (or supersteps) of one run."""
        return sum(p.kernels for p in self.loaded.values()) + (self.following.kernels if self.following else 0)

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host. Those of deferred parts are included after their first run."""
        return [*self.compiled.host_nodes, *(self.following.host_nodes if self.following else ())]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the model open in this context. Raises DeviceFailure if it is already closed."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begin a call of this thread. Raises DeviceFailure if the model is already closed."""
        with self._changed:
            if self.closed:
                raise DeviceFailure(f"{self.compiled.graph.name} was closed", hint="open or compile the model again")
            self.users.append(get_ident())

    def leave(self) -> None:
        """End the last call of this thread."""
        with self._changed:
            self.users.remove(get_ident())
            self._changed.notify_all()

    def run(
        self, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None = None
    ) -> tuple[dict[str, Array], Timing]:
        """Run once through all segments, by ONNX name. The caller owns the outputs. ``watch`` is called with every program and
        its inputs before it runs."""
        self.enter()  # not ``used``: its generator costs a small call microseconds
        try:
            return self.run_entered(inputs, watch)
        finally:
            self.leave()

    def run_entered(
        self, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None = None
    ) -> tuple[dict[str, Array], Timing]:
        """Run as ``run`` does, after ``enter``."""
        ranged, graph = self.compiled.ranged, self.compiled.graph
        if ranged is None:
            return self._run(inputs, watch)
        wide, point = pad_inputs(ranged, graph.inputs, inputs)
        outputs, timing = self._run(wide, watch)
        return crop_outputs(ranged, graph.outputs, outputs, point), timing

    def _run(
        self, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None
    ) -> tuple[dict[str, Array], Timing]:
        if self.load_copy is None:
            return self._run_copy(self.loaded, inputs, watch)
        loaded = self._take_copy(self.load_copy)
        try:
            return self._run_copy(loaded, inputs, watch)
        finally:
            with self._changed:
                self._idle.append(loaded)
                self._changed.notify_all()

    def _take_copy(self, load_copy: Callable[[], Programs]) -> Programs:
        """Return a copy of the programs for one run: an idle one, a new one, or the first that a run returns."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self.spare)
            if self._idle:
                return self._idle.pop()
            self.spare -= 1
        made = load_copy()  # without the lock, since it waits for compilations
        with self._changed:
            self.further.append(made)
        return made

    def _run_copy(
        self, loaded: Programs, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None
    ) -> tuple[dict[str, Array], Timing]:
        start, clocks, host, notes = time.perf_counter(), list[float | Callable[[], float]](), 0.0, list[str]()
        graph = self.compiled.graph
        values: dict[str, Array] = {v.name: to_carrier(inputs[v.external or v.name]) for v in graph.inputs}
        fresh = set[str]()  # tensors in arrays that a program allocated
        for number, segment in enumerate(self.compiled.segments):
            if isinstance(segment, HostSegment):
                begin = time.perf_counter()
                known = {n: values[n] if n in values else graph.constants[n] for n in segment.node.inputs if n}
                values.update(segment.node.run(known, self.bodies, graph.constants))
                host += time.perf_counter() - begin
            else:
                feeds = {p.external: values[p.tensor] for p in segment.program.inputs}
                if watch is not None:
                    watch(segment, feeds)
                clocks.append(self._device(loaded[number], segment, feeds, values, notes))
                fresh.update(p.tensor for p in segment.program.outputs)
        outputs: dict[str, Array] = {}
        for port in graph.outputs:
            value = values[port.name] if port.name in values else graph.constants[port.name]
            # A host operator may return a view of an operand; a model may return an input, or a tensor twice.
            own = value if port.name in fresh else np.array(value)
            outputs[port.external or port.name] = from_carrier(own, port.port.dtype)
            fresh.discard(port.name)
        if self.following is not None:
            given = {**inputs, **outputs}
            outputs, more = self.following.run({n: given[n] for n in self.following.rest.inputs})
            clocks, host, notes = [*clocks, *more.clocks], host + more.host, [*notes, *more.notes]
        return outputs, Timing(tuple(clocks), host, time.perf_counter() - start, tuple(dict.fromkeys(notes)))

    def _device(
        self,
        loaded: Loaded | LoadedVariants,
        segment: ProgramSegment,
        feeds: Mapping[str, Array],
        values: dict[str, Array],
        notes: list[str],
    ) -> float | Callable[[], float]:
        result = loaded.run(feeds)
        for port in segment.program.outputs:
            values[port.tensor] = result.outputs[port.external]
        notes += result.notes
        return result.clock

    def bind(
        self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], spec: BindSpec = PLAIN, pinned: bool = True
    ) -> BoundCall:
        """Return a bound call with these checked arrays, by ONNX name. A call that is not ``pinned`` does not keep the program on
        the device. Raises BadInput if a part is deferred."""
        if self.following is not None:
            why = self.following.rest.why
            raise BadInput(f"fixed arrays need fixed shapes, but {why.what}", why.where, "call run instead of bind")
        with self.used():
            made = BoundCall(self.compiled, self.loaded, inputs, outputs, spec, self.bodies)
            with self._changed:
                (self.bounds if pinned else self.loose).add(made)
            return made

    def retire(self) -> bool:
        """Reject further calls and return True, unless a call is running or a bound call is open."""
        with self._changed:
            if self.users or any(not b.closed for b in self.bounds):
                return False
            self.closed = True
            return True

    def check_outside(self) -> None:
        """Raise DeviceFailure if this thread is in a call."""
        if get_ident() in self.users:
            raise DeviceFailure(f"{self.compiled.graph.name} cannot be closed from within a call of it")

    def close(self) -> None:
        """Free the device and close bound calls when the running calls have returned. Raises DeviceFailure from within a call,
        which would deadlock: a callback, or garbage collection during a run, may try it."""
        with self._changed:
            self.check_outside()
            self.closed = True
            self._changed.wait_for(lambda: not self.users)
            bounds = [*self.bounds, *self.loose]
        with self._freeing:
            for bound in bounds:
                bound.close()
            for program in (p for programs in (self.loaded, *self.further) for p in programs.values()):
                program.close()
            if self.following is not None:
                self.following.close()


def load_segments(backend: Backend, compiled: Compiled, verify: Callable[[], object] = lambda: None) -> Programs:
    """Load every device segment, and free all if a segment or ``verify`` fails. ``verify`` is called before and after constants
    are read."""
    loaded: Programs = {}
    try:
        with collector_paused():
            for number, segment in enumerate(compiled.segments):
                if isinstance(segment, ProgramSegment):
                    if segment.program.repeat is not None and backend.iteration_cost is None:
                        raise DeviceFailure(
                            f"program {segment.program.name} is a loop program, which {backend.hardware.name} does not support"
                        )
                    verify()
                    loaded[number] = load_tables(backend, segment)
                    for part in parts_of(segment.constants).values():
                        if not isinstance(part, ArrayRecipe):
                            release_pages(part)
        verify()
    except BaseException:
        for program in loaded.values():
            program.close()
        raise
    return loaded


def load_tables(backend: Backend, segment: ProgramSegment) -> Loaded | LoadedVariants:
    """Load a program with its length variants, or without them if the device does not support them."""
    first = load_program(backend, segment, 0)
    if segment.cases is None or not backend.cases:
        return first
    shorter = list[Loaded]()
    try:
        for number, table in enumerate(segment.cases.tables, 1):
            case = load_program(backend, segment, number) if segment.code else backend.load_case(table, segment.constants, first)
            shorter.append(case)
    except BaseException:
        for program in (*shorter, first):
            program.close()
        raise
    port = next(p.external for p in segment.program.inputs if p.tensor == segment.cases.length)
    return LoadedVariants(segment.cases, port, (*shorter, first))


def load_program(backend: Backend, segment: ProgramSegment, number: int) -> Loaded:
    """Load table ``number`` of a segment, with its machine code if there is any."""
    program = segment.tables[number]
    if not segment.code:
        return backend.load(program, segment.constants)
    return backend.load_code(program, segment.constants, segment.code[number])
