"""Bodies of control flow on the device: compiled for the types and shapes that they meet, and driven from the host.

A body whose shapes hang on what it reads, that reads what no device holds, or that meets too many shapes is interpreted on the
host instead (``frontend.bind.evaluator.interpreted``). Many turns of a loop are one program (``frontend.loops.loop_chunk``):
between programs the host asks whether to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput, TooLong
from rammer.runtime.loaded_model import LoadedModel
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.loop_iterations import TurningProgram

if TYPE_CHECKING:
    from rammer.frontend.loops.control_operators import OuterValues, TurnsAhead, TurnsDone
    from rammer.frontend.loops.loop_chunk import Turns
    from rammer.frontend.read.node_protos import SubGraph
    from rammer.frontend.read.reader import Model
    from rammer.ir.port import InputPort

#: Type and shape of an array; of other values their class.
Kind: TypeAlias = "tuple[Any, tuple[int, ...]] | type"

#: Sets of shapes of one body that are compiled: what grows with every step would be compiled at every step.
MOST_FORMS: Final = 4
#: Turns of a body that run one by one before several are compiled as one program, which takes seconds.
WARM: Final = 512
#: Most turns of a program, and predicted seconds: where the host asks seldom enough, longer ones only do more than is wanted.
MOST_TURNS: Final = 128
LONGEST: Final = 1e-3
#: A first turn's index and condition.
_INDEX: Final = np.array(0)
_YES: Final = np.array(True)
#: Models that are kept although their programs may be gone.
MOST_MODELS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class SameArray:
    """An array that equals itself alone."""

    array: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameArray) and other.array is self.array

    def __hash__(self) -> int:
        return id(self.array)


@dataclass(frozen=True, eq=False)
class BodyKey:
    """A body, or turns of one, with its ports and the constants of outside. Its hash is worked out once: every turn asks."""

    what: SubGraph | Turns
    ports: tuple[InputPort, ...]
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
    """A body, or several turns of one, as a model. ``feeds`` are values of outside by their names; ``kept`` says whether
    an earlier process compiled it."""

    key: BodyKey
    model: Model
    feeds: Mapping[str, Any]
    kept: bool = False


@dataclass
class BodyPrograms:
    """``make`` compiles and loads a model whose shapes are all known, or loads what is ``kept`` of it on disk; ``residents`` hold
    what was made."""

    make: Callable[[Model], LoadedModel]
    residents: LoadedPrograms[BodyKey]
    kept: Callable[[Model], bool] = lambda _: False
    warm: int = WARM
    forms: dict[SubGraph, set[tuple[InputPort, ...]]] = field(default_factory=dict)
    refused: dict[SubGraph, str] = field(default_factory=dict)
    models: dict[BodyKey, Model] = field(default_factory=dict)  #: Bodies as models, which every step would copy the weights into.
    on_host: bool = False  #: Whether a body was interpreted.
    turned: dict[SubGraph, int] = field(default_factory=dict)  #: Turns that ran one by one.
    most: dict[SubGraph, int] = field(default_factory=dict)  #: Most turns of a program; 1 where each is one.
    reached: dict[SubGraph, int] = field(default_factory=dict)  #: Turns of the last loop that had more than one.
    parts: dict[Any, BodyPart] = field(default_factory=dict)  #: Turns as models, by what decides them.
    turning: dict[BodyKey, TurningProgram] = field(default_factory=dict)
    _binding: Any = field(default_factory=RLock, repr=False)

    def __call__(self, body: SubGraph, given: Sequence[Any], outer: OuterValues) -> Sequence[Any]:
        """The outputs of a body, in order (``frontend.loops.control_operators.BodyRunner``)."""
        if body not in self.refused:
            try:
                return self._run_compiled(body, given, outer)
            except TooLong:  # a loop in it: the host would take as long again, and is out of time
                raise
            except BadInput as problem:
                self.refused[body] = problem.what
        from rammer.frontend.bind.evaluator import interpret_body

        self.on_host = True
        return interpret_body(body, given, outer)

    def several(self, body: SubGraph, ahead: TurnsAhead, outer: OuterValues) -> TurnsDone | None:
        """The next turns by one program, or None where they run one by one (``frontend.loops.control_operators.BodyRunner``)."""
        if body in self.refused or self.most.get(body) == 1:
            return None
        if ahead.first:
            self.reached[body] = ahead.first
        self.turned[body] = turned = self.turned.get(body, 0) + 1
        # Once the first turn went on, a steady condition holds: it is the same in every run.
        if body not in self.reached or not _is_chunk_worthwhile(ahead):
            return None
        if body not in self.most and self._find_body_program(body) is None:
            return None
        try:
            part = self._turns(body, ahead, outer)
            if turned <= self.warm and not part.kept:  # what is kept need not be waited for
                return None
            self._specialise_part(part)
        except BadInput:  # of one turn each it may still be compiled
            self.most[body] = 1
            return None
        with self.residents.used(lambda: self._specialise_part(part)) as special:
            done = self._bind_chunk_program(special, part).run(ahead, part.feeds)
        self.reached[body] = ahead.first + done.count
        return done

    def _bind_chunk_program(self, special: LoadedModel, part: BodyPart) -> TurningProgram:
        """A program of several turns, bound: once for all loops."""
        from rammer.frontend.loops.control_operators import exclude_time
        from rammer.frontend.loops.loop_chunk import Turns

        with self._binding:
            found = self.turning.get(part.key)
            if found is None or found.special is not special:
                assert isinstance(part.key.what, Turns)
                with exclude_time():
                    found = TurningProgram(special, part.key.what, part.model)
                held = self.residents.held.copy()
                self.turning = {k: t for k, t in self.turning.items() if k in held} | {part.key: found}
            return found

    def _find_body_program(self, body: SubGraph) -> LoadedModel | None:
        """A program of one turn."""
        return next((s for k, s in self.residents.held.copy().items() if k.what == body), None)

    def _run_compiled(self, body: SubGraph, given: Sequence[Any], outer: OuterValues) -> list[Any]:
        """The outputs by a program of one turn. BadInput for a body that is to be interpreted."""
        from rammer.frontend.loops.control_operators import exclude_time

        own, read, _ = _body_reads(body)
        kinds = tuple(_value_kind(a) for n, a in zip(own, given, strict=True) if n in read)
        part = outer.ready.get((body, kinds))
        if part is None:
            with exclude_time():
                part = outer.ready[body, kinds] = self._part(body, given, outer)
        feeds = {n: _to_dense(a) for n, a in zip(own, given, strict=True) if n in read}
        found = self._run(part, {**feeds, **part.feeds})
        return [found[o] for o in part.model.outputs]

    def _run(self, part: BodyPart, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        with self.residents.used(lambda: self._specialise_part(part)) as special:
            return special.run(feeds)[0]

    def _part(self, body: SubGraph, given: Sequence[Any], outer: OuterValues) -> BodyPart:
        """A body as a model with these inputs; BadInput for one that is to be interpreted."""
        own, read, free = _body_reads(body)
        named = {n: _to_dense(a) for n, a in zip(own, given, strict=True) if n in read}
        ports, fixed, feeds = self._make_ports(named, free, outer)
        key = BodyKey(body, ports, tuple((n, SameArray(a)) for n, a in fixed.items()))
        if key not in self.models:
            if not all(p.numeric for p in ports):
                raise BadInput("it reads what no device holds")
            forms = self.forms.setdefault(body, set())
            forms.add(ports)
            if len(forms) > MOST_FORMS:
                raise BadInput("its shapes change from step to step")
            self._record_model(key, _as_model(body, ports, fixed))
        return BodyPart(key, self.models[key], feeds)

    def _record_model(self, key: BodyKey, model: Model) -> None:
        """Note a model; those of programs that were freed meanwhile need not be kept for ever."""
        if len(self.models) > MOST_MODELS:
            self.models = {k: m for k, m in self.models.items() if k in self.residents.held}
        self.models[key] = model

    def _make_ports(
        self, named: Mapping[str, Any], free: Collection[str], outer: OuterValues
    ) -> tuple[tuple[InputPort, ...], dict[str, Any], dict[str, Any]]:
        """Inputs, constants of outside, and its other values."""
        fixed = {n: outer[n] for n in free if n in outer.constants and _is_device_constant(outer[n])}
        feeds = {n: _to_dense(outer[n]) for n in free if n not in fixed}
        return tuple(map(_make_port, {**named, **feeds}.items())), fixed, feeds

    def _turns(self, body: SubGraph, ahead: TurnsAhead, outer: OuterValues) -> BodyPart:
        """Several turns as a model: as many as are left, where that is known, else as the loop had before. BadInput where that
        cannot be."""
        from rammer.frontend.loops.control_operators import exclude_time
        from rammer.frontend.loops.loop_chunk import Turns, has_steady_condition

        scanned = len(ahead.slices)
        if body not in self.most:
            self.most[body] = self._most(Turns(body, MOST_TURNS, scanned, bool(scanned) or has_steady_condition(body)))
        wanted = _turns_of(max(ahead.first, self.reached[body])) if ahead.left is None else _next_power_of_two(ahead.left)
        count = min(self.most[body], wanted)
        if count < 2:
            raise BadInput("one turn is long enough")
        own, _, free = _body_reads(body)
        first = () if scanned else (_INDEX, _YES)
        named = dict(zip(own, (*first, *ahead.state, *(np.asarray(x[0]) for x in ahead.slices)), strict=True))
        fixed = {n: outer[n] for n in free if n in outer.constants and _is_device_constant(outer[n])}
        feeds = {n: _to_dense(outer[n]) for n in free if n not in fixed}
        kinds = tuple((n, _value_kind(a)) for n, a in (*named.items(), *feeds.items()))
        key = (body, count, kinds, tuple((n, SameArray(a)) for n, a in fixed.items()))
        part = self.parts.get(key)
        if part is None or part.key not in self.models:
            turns = Turns(body, count, scanned, bool(scanned) or has_steady_condition(body))
            with exclude_time():
                part = self._turns_part(turns, {**named, **feeds}, fixed)
            self.parts = {**self.parts, key: part} if len(self.parts) < MOST_MODELS else {key: part}
        return replace(part, feeds=feeds)

    def _turns_part(self, turns: Turns, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> BodyPart:
        """Turns of a body that reads what is ``given``; ``fixed`` are constants of outside."""
        ports = tuple(map(_make_port, given.items()))
        if not all(p.numeric for p in ports):
            raise BadInput("it reads what no device holds")
        key = BodyKey(turns, ports, tuple((n, SameArray(a)) for n, a in fixed.items()))
        if key not in self.models:
            self._record_model(key, turns.model({p.name: p for p in ports}, fixed))
        return BodyPart(key, self.models[key], {}, self.kept(self.models[key]))

    def _most(self, turns: Turns) -> int:
        """Turns of a program, by how long one is predicted to take and how many operators it is."""
        from rammer.frontend.bind.bind_state import MOST_UNROLLED

        special = self._find_body_program(turns.body)
        if special is None or special.compiled.host_nodes:
            raise BadInput("a turn is no one program")
        predicted = sum(p.predicted for p in special.compiled.programs)
        return max(min(MOST_TURNS, MOST_UNROLLED // turns.size, int(LONGEST / max(predicted, 1e-9))), 1)

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
                raise BadInput("several turns are no one program")
            self.residents.keep(part.key, found)
        return found

    def close(self) -> None:
        """Free the device."""
        self.residents.close()


def _is_chunk_worthwhile(ahead: TurnsAhead) -> bool:
    """Whether there are turns enough for a program of several."""
    return ahead.left is None or ahead.left >= 4


def _next_power_of_two(turns: int) -> int:
    """The least power of two that is as many."""
    return 1 << max(turns - 1, 1).bit_length()


def _turns_of(reached: int) -> int:
    """Turns of a program for a loop that reached so many and may go on: few sizes, as each is compiled."""
    return next((n for n in (8, 32) if reached <= n), MOST_TURNS)


def _value_kind(value: Any) -> Kind:
    return (value.dtype, value.shape) if isinstance(value, np.ndarray | np.generic) else type(value)


def _to_dense(value: Any) -> Any:
    return np.asarray(value, order="C") if isinstance(value, np.ndarray | np.generic) else value


def _is_device_constant(value: Any) -> bool:
    """Whether a constant of outside is one that devices hold."""
    return isinstance(value, np.ndarray) and _make_port(("", value)).numeric


def _make_port(item: tuple[str, Any]) -> InputPort:
    from rammer.frontend.bind.deferred import port_of

    return port_of(*item)


@lru_cache(64)
def _body_reads(body: SubGraph) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
    """Names of a body's own inputs, of all values that it reads, and of those of outside."""
    from rammer.frontend.loops.control_operators import graph_of
    from rammer.frontend.read import model_checks

    graph = graph_of(body)
    read = {n for node in graph.node for n in model_checks.node_reads(node)} | {o.name for o in graph.output}
    free = tuple(n for n in model_checks.free_values(graph) if n in body.captures)
    return tuple(v.name for v in graph.input), frozenset(read), free


def _as_model(body: SubGraph, ports: tuple[InputPort, ...], known: Mapping[str, Any]) -> Model:
    """A body as a model of its own, with what it reads of outside as inputs and as ``known`` constants."""
    from onnx import ModelProto, OperatorSetIdProto

    from rammer.frontend.loops.control_operators import graph_of
    from rammer.frontend.read.reader import Model

    graph, opsets = graph_of(body), dict(body.opsets)
    proto = ModelProto(opset_import=[OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()])
    proto.graph.CopyFrom(graph)
    outputs = tuple(o.name for o in graph.output)
    return Model(proto, None, graph.name or "body", ports, outputs, opsets.get("", 0), known=known)
