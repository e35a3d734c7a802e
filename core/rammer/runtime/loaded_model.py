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
from rammer.device.capabilities import can_repeat
from rammer.device.manifest import Backend, Loaded
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.collector import collector_paused
from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import ArrayRecipe, parts_of
from rammer.ir.formats import from_carrier, to_carrier
from rammer.runtime.bound_call import ModelBound
from rammer.runtime.ranged_call import PLAIN, BindSpec, RangedCall
from rammer.runtime.shape_buckets import crop_outputs, pad_inputs
from rammer.runtime.variant_call import load_tables

if TYPE_CHECKING:
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: on the device (simulated where the device is), on the host, and in all."""

    device: float
    host: float
    total: float
    notes: tuple[str, ...] = ()


#: Before the first run.
NO_RUN: Final = Timing(0.0, 0.0, 0.0)


class Following(Protocol):
    """What comes after the programs of a model (``rammer.runtime.continuation``)."""

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
        """What waits."""
        ...

    def run(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], Timing]:
        """The model's outputs, of what was computed before."""
        ...

    def close(self) -> None:
        """Free the device."""
        ...


@dataclass
class LoadedModel:
    """A compiled model whose programs are loaded on the device. Any thread may call it; its programs take turns. With a
    ``following`` part, the programs compute what that waits for; ``bodies`` runs those of control flow."""

    compiled: Compiled
    loaded: dict[int, Loaded]
    compile_seconds: float
    following: Following | None = None
    bodies: BodyRunner | None = None
    bounds: WeakSet[ModelBound] = field(default_factory=WeakSet)
    loose: WeakSet[ModelBound] = field(default_factory=WeakSet)  #: Bound calls that do not keep it.
    users: list[int] = field(default_factory=list)  #: Threads whose calls are running.
    closed: bool = False
    _changed: Condition = field(default_factory=Condition, repr=False)
    _freeing: Any = field(default_factory=RLock, repr=False)

    @property
    def kernels(self) -> int:
        """Kernel launches (or supersteps) of one run."""
        return sum(p.kernels for p in self.loaded.values()) + (self.following.kernels if self.following else 0)

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host, as far as is known: what waits for values shows them when it has run."""
        return [*self.compiled.host_nodes, *(self.following.host_nodes if self.following else ())]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Not closed meanwhile. DeviceFailure where it is closed already."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Here a call of this thread begins; DeviceFailure where it is closed already."""
        with self._changed:
            if self.closed:
                raise DeviceFailure(f"{self.compiled.graph.name} was closed", hint="open or compile the model again")
            self.users.append(get_ident())

    def leave(self) -> None:
        """The call that began last has returned."""
        with self._changed:
            self.users.remove(get_ident())
            self._changed.notify_all()

    def run(
        self, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None = None
    ) -> tuple[dict[str, Array], Timing]:
        """One run through all segments, by ONNX names; ``watch`` is told every program's inputs before it runs. The outputs
        are the caller's own."""
        ranged, graph = self.compiled.ranged, self.compiled.graph
        with self.used():
            if ranged is None:
                return self._run(inputs, watch)
            wide, point = pad_inputs(ranged, graph.inputs, inputs)
            outputs, timing = self._run(wide, watch)
            return crop_outputs(ranged, graph.outputs, outputs, point), timing

    def _run(
        self, inputs: Mapping[str, Array], watch: Callable[[ProgramSegment, Mapping[str, Array]], None] | None
    ) -> tuple[dict[str, Array], Timing]:
        start, device, host, notes = time.perf_counter(), 0.0, 0.0, list[str]()
        graph = self.compiled.graph
        values: dict[str, Array] = {v.name: to_carrier(inputs[v.external or v.name]) for v in graph.inputs}
        fresh = set[str]()  # what a program wrote into new arrays
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
                device += self._device(number, segment, feeds, values, notes)
                fresh.update(p.tensor for p in segment.program.outputs)
        outputs: dict[str, Array] = {}
        for port in graph.outputs:
            value = values[port.name] if port.name in values else graph.constants[port.name]
            # An operator on the host may give a view of what it reads, a model an input or one tensor twice.
            own = value if port.name in fresh else np.array(value)
            outputs[port.external or port.name] = from_carrier(own, port.port.dtype)
            fresh.discard(port.name)
        if self.following is not None:
            given = {**inputs, **outputs}
            outputs, more = self.following.run({n: given[n] for n in self.following.rest.inputs})
            device, host, notes = device + more.device, host + more.host, [*notes, *more.notes]
        return outputs, Timing(device, host, time.perf_counter() - start, tuple(dict.fromkeys(notes)))

    def _device(
        self, number: int, segment: ProgramSegment, feeds: Mapping[str, Array], values: dict[str, Array], notes: list[str]
    ) -> float:
        result = self.loaded[number].run(feeds)
        for port in segment.program.outputs:
            values[port.tensor] = result.outputs[port.external]
        notes += result.notes
        return result.seconds

    def bind(
        self,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        stream: Any = None,
        terms: BindSpec = PLAIN,
        pinned: bool = True,
    ) -> ModelBound:
        """A call with these arrays by ONNX name; inputs have been checked. One that is not ``pinned`` does not keep the
        program on the device. BadInput where a part waits for values."""
        if self.following is not None:
            why = self.following.rest.why
            raise BadInput(f"fixed arrays need fixed shapes, but {why.what}", why.where, "call run instead of bind")
        with self.used():
            if terms == PLAIN and self.compiled.ranged is None:
                made = ModelBound(self.compiled, self.loaded, inputs, outputs, stream)
            else:
                made = RangedCall(self.compiled, self.loaded, inputs, outputs, stream, terms)
            with self._changed:
                (self.bounds if pinned else self.loose).add(made)
            return made

    def retire(self) -> bool:
        """Refuse further calls, unless one is running or a bound call is open; whether it did."""
        with self._changed:
            if self.users or any(not b.closed for b in self.bounds):
                return False
            self.closed = True
            return True

    def check_outside(self) -> None:
        """DeviceFailure where this thread is in a call."""
        if get_ident() in self.users:
            raise DeviceFailure(f"{self.compiled.graph.name} cannot be closed from within a call of it")

    def close(self) -> None:
        """Free the device when the calls that are running have returned; bound calls are closed, too. DeviceFailure from
        within a call, which could only wait for itself: a callback may try, or what Python collects during a run."""
        with self._changed:
            self.check_outside()
            self.closed = True
            self._changed.wait_for(lambda: not self.users)
            bounds = [*self.bounds, *self.loose]
        with self._freeing:
            for bound in bounds:
                bound.close()
            for program in self.loaded.values():
                program.close()
            if self.following is not None:
                self.following.close()


def load_segments(backend: Backend, compiled: Compiled, verify: Callable[[], object] = lambda: None) -> dict[int, Loaded]:
    """Load every device segment. ``verify`` is called before and after constants are read; what was loaded is freed again if that
    or a later segment fails."""
    loaded: dict[int, Loaded] = {}
    try:
        with collector_paused():
            for number, segment in enumerate(compiled.segments):
                if isinstance(segment, ProgramSegment):
                    if segment.program.repeat is not None and not can_repeat(backend):
                        raise DeviceFailure(f"program {segment.program.name} repeats, which {backend.hardware.name} cannot")
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
