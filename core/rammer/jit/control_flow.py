"""Bodies of control flow on the device: compiled for each set of types and shapes, and driven from the host.

A body is interpreted on the host (``frontend.bind.evaluator.interpret_body``) in three cases. Its shapes depend on data, it reads
values that devices do not support, or it meets too many shapes. Many iterations of a loop are one program
(``frontend.loops.loop_chunk``); the host checks the condition between programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.device.arrays import on_host
from rammer.errors import BadInput, TooLong
from rammer.ir.formats import numpy_type
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.loaded_model import LoadedModel
from rammer.runtime.loaded_programs import LoadedPrograms

if TYPE_CHECKING:
    from rammer.frontend.loops.control_operators import OuterValues, TurnsAhead, TurnsDone
    from rammer.frontend.loops.loop_chunk import LoopChunk
    from rammer.frontend.read.node_protos import SubGraph
    from rammer.frontend.read.reader import Model
    from rammer.ir.port import ModelPort

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Type and shape of an array; for other values their class.
Kind: TypeAlias = "tuple[Any, tuple[int, ...]] | type"

#: Maximum sets of shapes that are compiled per body: a growing shape would be compiled at every iteration.
MOST_FORMS: Final = 4
#: Iterations of a body that run one by one before a chunk is compiled. Compilation needs seconds.
WARM: Final = 512
#: Maximum predicted seconds of a program of several iterations. Longer programs save little and only waste iterations.
LONGEST: Final = 1e-3
#: The first iteration's index and condition.
_INDEX: Final = np.array(0)
_YES: Final = np.array(True)
#: Models that stay cached although their programs may have been freed.
MOST_MODELS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class SameArray:
    """An array that is compared by identity."""

    array: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameArray) and other.array is self.array

    def __hash__(self) -> int:
        return id(self.array)


@dataclass(frozen=True, eq=False)
class BodyKey:
    """A body or a chunk of its iterations, with its ports and outer constants. The hash is cached, since
    every iteration uses it."""

    what: SubGraph | LoopChunk
    ports: tuple[ModelPort, ...]
    fixed: tuple[tuple[str, SameArray], ...]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BodyKey) and self._key_fields == other._key_fields)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _key_fields(self) -> tuple[Any, ...]:
        return self.what, self.ports, self.fixed

    @cached_property
    def _hash(self) -> int:
        return hash(self._key_fields)


@dataclass(frozen=True)
class BodyPart:
    """A body, or a chunk of its iterations, as a model. ``feeds`` are outer values by name; ``kept`` is True if an earlier
    process compiled it."""

    key: BodyKey
    model: Model
    feeds: Mapping[str, Any]
    kept: bool = False


@dataclass
class BodyPrograms:
    """Compiled programs of control-flow bodies. ``make`` compiles and loads a model with static shapes, or loads it from disk if
    ``kept``. ``residents`` caches the results."""

    make: Callable[[Model], LoadedModel]
    residents: LoadedPrograms[BodyKey]
    kept: Callable[[Model], bool] = lambda _: False
    warm: int = WARM
    forms: dict[SubGraph, set[tuple[ModelPort, ...]]] = field(default_factory=dict)
    refused: dict[SubGraph, str] = field(default_factory=dict)
    models: dict[BodyKey, Model] = field(default_factory=dict)  #: Models of bodies, cached to avoid copying weights.
    on_host: bool = False  #: True if a body was interpreted.
    turned: dict[SubGraph, int] = field(default_factory=dict)  #: Iterations that ran one by one.
    most: dict[SubGraph, int] = field(default_factory=dict)  #: Maximum iterations of a program.
    reached: dict[SubGraph, int] = field(default_factory=dict)  #: Iterations of the last loop with several.
    parts: dict[Any, BodyPart] = field(default_factory=dict)  #: Chunks as models, by their parameters.
    turning: dict[BodyKey, TurningProgram] = field(default_factory=dict)
    _binding: Any = field(default_factory=RLock, repr=False)

    def __call__(self, body: SubGraph, given: Sequence[Any], outer: OuterValues) -> Sequence[Any]:
        """Return the outputs of a body, in order (``frontend.loops.control_operators.BodyRunner``)."""
        if body not in self.refused:
            try:
                return self._run_compiled(body, given, outer)
            except TooLong:  # a nested loop: the host would need as long again
                raise
            except BadInput as problem:
                self.refused[body] = problem.what
        from rammer.frontend.bind.evaluator import interpret_body

        self.on_host = True
        return interpret_body(body, given, outer)

    def hosted(self, operators: list[str]) -> list[str]:
        """Return the operators that the host has computed, given those that it ran: control flow only if it ran a body."""
        from rammer.frontend.loops.control_operators import CONTROL

        return [op for op in operators if op not in CONTROL or self.on_host]

    def several(self, body: SubGraph, ahead: TurnsAhead, outer: OuterValues) -> TurnsDone | None:
        """Run the next iterations as one program (``frontend.loops.control_operators.BodyRunner``). Returns None if they must run
        one by one."""
        if body in self.refused or self.most.get(body) == 1:
            return None
        if ahead.first:
            self.reached[body] = ahead.first
        self.turned[body] = turned = self.turned.get(body, 0) + 1
        # If the loop continued after its first iteration, a steady condition holds in every run.
        if body not in self.reached or not _is_chunk_worthwhile(ahead):
            return None
        try:
            part = self._turns(body, ahead, outer)
            if part is None or (turned <= self.warm and not part.kept):  # cached programs need no warm-up
                return None
            self._specialise_part(part)
        except BadInput:  # single iterations may still compile
            self.most[body] = 1
            return None
        with self.residents.used(lambda: self._specialise_part(part)) as special:
            done = self._bind_chunk_program(special, part).run(ahead, part.feeds)
        self.reached[body] = ahead.first + done.count
        return done

    def _bind_chunk_program(self, special: LoadedModel, part: BodyPart) -> TurningProgram:
        """Return the program of a chunk, bound once for all loops."""
        from rammer.frontend.loops.control_operators import exclude_time
        from rammer.frontend.loops.loop_chunk import LoopChunk

        with self._binding:
            found = self.turning.get(part.key)
            if found is None or found.special is not special:
                assert isinstance(part.key.what, LoopChunk)
                with exclude_time():
                    found = TurningProgram(special, part.key.what, part.model)
                held = self.residents.held.copy()
                self.turning = {k: t for k, t in self.turning.items() if k in held} | {part.key: found}
            return found

    def _run_compiled(self, body: SubGraph, given: Sequence[Any], outer: OuterValues) -> list[Any]:
        """Return the outputs of a program of one iteration. Raises BadInput if the body must be interpreted."""
        from rammer.frontend.loops.control_operators import exclude_time

        own, read, _ = _body_reads(body)
        feeds = {n: _to_dense(a) for n, a in zip(own, given, strict=True) if n in read}
        kinds = tuple(map(_value_kind, feeds.values()))
        part = outer.ready.get((body, kinds))
        if part is None:
            with exclude_time():
                part = outer.ready[body, kinds] = self._part(body, feeds, outer)
        found = self._run(part, {**feeds, **part.feeds})
        return [found[o] for o in part.model.outputs]

    def _run(self, part: BodyPart, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        with self.residents.used(lambda: self._specialise_part(part)) as special:
            return special.run(feeds)[0]

    def _part(self, body: SubGraph, read: Mapping[str, Any], outer: OuterValues) -> BodyPart:
        """Return a body as a model with the inputs that it reads. Raises BadInput if it must be interpreted."""
        fixed, feeds = _split_outer(body, outer)
        part = self._make_part(body, {**read, **feeds}, fixed)
        forms = self.forms.setdefault(body, set())
        forms.add(part.key.ports)
        if len(forms) > MOST_FORMS:
            raise BadInput("its shapes change between iterations")
        return replace(part, feeds=feeds)

    def _make_part(self, what: SubGraph | LoopChunk, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> BodyPart:
        """Return a body or chunk that reads the values ``given`` as a model; ``fixed`` are outer constants. Models are cached; if
        the cache is full, models whose programs were freed are dropped."""
        ports = tuple(map(_make_port, given.items()))
        key = BodyKey(what, ports, tuple((n, SameArray(a)) for n, a in fixed.items()))
        if key not in self.models:
            if not all(p.numeric for p in ports):
                raise BadInput("it reads values that no device supports")
            if len(self.models) > MOST_MODELS:
                self.models = {k: m for k, m in self.models.items() if k in self.residents.held}
            self.models[key] = _as_model(what, ports, fixed)
        return BodyPart(key, self.models[key], {})

    def _turns(self, body: SubGraph, ahead: TurnsAhead, outer: OuterValues) -> BodyPart | None:
        """Return a chunk as a model, sized by the remaining iterations or, if unknown, by the loop's earlier iterations. Returns
        None before the first iteration with these shapes. Raises BadInput if a chunk is not possible."""
        from rammer.frontend.loops.control_operators import exclude_time
        from rammer.frontend.loops.loop_chunk import MOST_STEPS

        scanned = len(ahead.slices)
        own, read, _ = _body_reads(body)
        first = () if scanned else (_INDEX, _YES)
        named = dict(zip(own, (*first, *ahead.state, *(np.asarray(x[0]) for x in ahead.slices)), strict=True))
        fixed, feeds = _split_outer(body, outer)
        if ahead.left is None:  # few sizes, as each is compiled
            wanted = next((n for n in (8, 32) if max(ahead.first, self.reached[body]) <= n), MOST_STEPS)
        else:
            wanted = 1 << max(ahead.left - 1, 1).bit_length()
        kinds = tuple((n, _value_kind(a)) for n, a in (*named.items(), *feeds.items()))
        key = (body, min(self.most.get(body, wanted), wanted), kinds, tuple((n, SameArray(a)) for n, a in fixed.items()))
        part = self.parts.get(key)
        if part is None or part.key not in self.models:
            with exclude_time():
                single = self._part(body, {n: _to_dense(a) for n, a in named.items() if n in read}, outer)
                special = self.residents.find(single.key)
                if special is None or not _keeps_shapes(special, body, ahead):
                    return None
                turns = self._sized_chunk(body, special, ahead, wanted)
                part = self._make_part(turns, {**named, **feeds}, fixed)
            part = replace(part, kept=self.kept(part.model))
            key = (body, turns.count, *key[2:])
            self.parts = {**self.parts, key: part} if len(self.parts) < MOST_MODELS else {key: part}
        return replace(part, feeds=feeds)

    def _sized_chunk(self, body: SubGraph, special: LoadedModel, ahead: TurnsAhead, wanted: int) -> LoopChunk:
        """Return a chunk of at most ``wanted`` iterations, by the operators and predicted time of the program ``special`` of
        one. Raises BadInput if a chunk is not possible."""
        from rammer.frontend.loops.loop_chunk import LoopChunk, has_steady_condition, most_steps

        scanned = len(ahead.slices)
        turns = LoopChunk(body, 1, scanned, bool(scanned) or has_steady_condition(body))
        if body not in self.most:
            if special.compiled.host_nodes:
                raise BadInput("an iteration does not compile to a single program")
            predicted = sum(p.predicted for p in special.compiled.programs)
            self.most[body] = max(min(most_steps(turns.step()), int(LONGEST / max(predicted, 1e-9))), 1)
        count = min(self.most[body], wanted)
        if count < 2:
            raise BadInput("a chunk would have a single iteration")
        return replace(turns, count=count)

    def _specialise_part(self, part: BodyPart) -> LoadedModel:
        from rammer.frontend.loops.control_operators import exclude_time
        from rammer.frontend.read.node_protos import SubGraph

        found = self.residents.find(part.key)
        if found is None:
            with exclude_time():
                found = self.make(part.model)
            if found.compiled.rest is not None:
                found.close()
                raise found.compiled.rest.why
            if (found.host_nodes or len(found.loaded) != 1) and not isinstance(part.key.what, SubGraph):
                found.close()
                raise BadInput("a chunk does not compile to a single program")
            self.residents.keep(part.key, found)
        return found


def _is_chunk_worthwhile(ahead: TurnsAhead) -> bool:
    """Return True if enough iterations remain for a chunk."""
    return ahead.left is None or ahead.left >= 4


def _value_kind(value: Any) -> Kind:
    return (value.dtype, value.shape) if isinstance(value, np.ndarray | np.generic) else type(value)


def _to_dense(value: Any) -> Any:
    return np.asarray(value, order="C") if isinstance(value, np.ndarray | np.generic) else value


def _is_device_constant(value: Any) -> bool:
    """Return True if devices support the type of an outer constant."""
    return isinstance(value, np.ndarray) and _make_port(("", value)).numeric


def _make_port(item: tuple[str, Any]) -> ModelPort:
    from rammer.frontend.bind.deferred import port_of

    return port_of(*item)


@lru_cache(64)
def _body_reads(body: SubGraph) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
    """Return the names of a body's inputs, of all values that it reads, and of outer values."""
    from rammer.frontend.loops.control_operators import graph_of
    from rammer.frontend.read import model_checks

    graph = graph_of(body)
    read = {n for node in graph.node for n in model_checks.node_reads(node)} | {o.name for o in graph.output}
    free = tuple(n for n in model_checks.free_values(graph) if n in body.captures)
    return tuple(v.name for v in graph.input), frozenset(read), free


def _keeps_shapes(special: LoadedModel, body: SubGraph, ahead: TurnsAhead) -> bool:
    """Return True if ``special``, an iteration of ``body``, returns states of the shapes of those ``ahead``."""
    from rammer.frontend.loops.control_operators import graph_of

    names = [o.name for o in graph_of(body).output][0 if ahead.slices else 1 :]
    shapes = {v.external or v.name: v.type.shape for v in special.compiled.graph.outputs}
    return all(shapes[n] == np.shape(a) for n, a in zip(names, ahead.state, strict=False))


def _split_outer(body: SubGraph, outer: OuterValues) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outer constants and the other outer values that a body reads."""
    free = _body_reads(body)[2]
    fixed = {n: outer[n] for n in free if n in outer.constants and _is_device_constant(outer[n])}
    return fixed, {n: _to_dense(outer[n]) for n in free if n not in fixed}


def _as_model(what: SubGraph | LoopChunk, ports: tuple[ModelPort, ...], known: Mapping[str, Any]) -> Model:
    """Return a body or chunk as a separate model, with outer values as inputs and as ``known`` constants."""
    from rammer.frontend.loops.control_operators import graph_of
    from rammer.frontend.loops.loop_chunk import LoopChunk, body_model

    return what.model(ports, known) if isinstance(what, LoopChunk) else body_model(what, graph_of(what), ports, known)


# --- chunks of iterations ------------------------------------------------------------------------------


class TurningProgram:
    """A loop chunk ``turns`` as a loaded program of one segment, whose ports are those of ``model``.

    The program is bound twice: each call reads the other's states, which stay on the device. Between calls the host passes slices
    and counts, and reads the gathered values and the condition. Any thread may call it; loops are serialised."""

    def __init__(self, special: LoadedModel, turns: LoopChunk, model: Model) -> None:
        self.special, self.turns, self._lock = special, turns, Lock()
        blank = {p.name: np.zeros([int(str(n)) for n in p.shape], numpy_type(p.dtype)) for p in model.inputs}
        states = range(len(turns.states))
        there = special.bind(blank, {}, pinned=False)
        again = {turns.name("state", i): there.outputs[turns.name("after", i)] for i in states}
        # An unread state stays in the host's array, which a device with separate memory cannot and need not write.
        pairs = [(turns.name("after", i), there.inputs[turns.name("state", i)]) for i in states]
        into = {after: array for after, array in pairs if on_host(array) == on_host(there.outputs[after])}
        back = special.bind({**there.inputs, **again}, into, pinned=False)
        self._bounds = there, back
        self._after = [turns.name("after", i) for i in states]
        self._going = [] if turns.steady else [turns.name("going")]

    def run(self, ahead: TurnsAhead, outer: Mapping[str, Any]) -> TurnsDone:
        """Run all iterations ahead, until none remains or the condition fails. ``outer`` are outer values by name."""
        from rammer.frontend.loops.control_operators import TurnsDone

        gathered: list[list[Any]] = [[] for _ in self.turns.gathered]
        with self._lock:
            first, going, now = ahead.first, True, 0
            _write_inputs(self._bounds[0], {**outer, **{self.turns.name("state", i): a for i, a in enumerate(ahead.state)}})
            while True:
                bound = self._bounds[now]
                done, going, found = self._run_iterations(bound, ahead, first)
                first += done
                for parts, values in zip(gathered, found, strict=True):
                    parts.append(values)
                if not going or first - ahead.first == ahead.left:
                    break
                ahead.check(first)
                now = 1 - now
            state = list(_copy_outputs(bound, self._after).values())
        return TurnsDone(first - ahead.first, going, state, [p[0] if len(p) == 1 else np.concatenate(p) for p in gathered])

    def _run_iterations(self, bound: BoundCall, ahead: TurnsAhead, first: int) -> tuple[int, bool, list[Any]]:
        """Run the iterations of one call. Return their number, True if the loop continues, and their gathered values."""
        most, name = self.turns.count, self.turns.name
        count = most if ahead.left is None else min(most, ahead.left - (first - ahead.first))
        given = {name("slices", i): _pad_slices(x, first, count, most) for i, x in enumerate(ahead.slices)}
        given[name("until")] = np.array(count if self.turns.scanned else first + count)
        if not self.turns.scanned:
            given[name("first")] = np.array(first)
        _write_inputs(bound, given)
        bound.run()
        found = _copy_outputs(bound, [*self._going, *self.turns.gathered])
        going = found.pop(self._going[0])[:count] if self._going else np.ones(0, bool)
        done = count if going.all() else int(going.argmin()) + 1
        return done, bool(going.all()), [a[:done] for a in found.values()]


def _write_inputs(bound: BoundCall, values: Mapping[str, Any]) -> None:
    """Write values to the inputs of a call. Runs that read host arrays must not be queued."""
    far = dict[str, Any]()
    for name, value in values.items():
        array = bound.inputs[name]
        if isinstance(array, np.ndarray):
            np.copyto(array, value)
        else:
            far[name] = value
    if far:
        bound.write(far)


def _copy_outputs(bound: BoundCall, names: list[str]) -> dict[str, Any]:
    """Return owned copies of outputs after the run has ended."""
    bound.synchronize()
    near = {n: bound.outputs[n] for n in names if isinstance(bound.outputs[n], np.ndarray)}
    far = bound.to_host(*(n for n in names if n not in near)) if len(near) < len(names) else {}
    return {n: near[n].copy() if n in near else far[n] for n in names}


def _pad_slices(slices: Any, first: int, count: int, wanted: int) -> Any:
    """Return the slices of ``count`` iterations, padded to ``wanted`` by repeating the last one."""
    found = slices[first : first + count]
    return found if count == wanted else np.concatenate([found, np.repeat(found[-1:], wanted - count, axis=0)])
