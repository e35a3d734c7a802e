"""The deferred part of a model, compiled at run time for types, shapes and the values that decide shapes. Compiled programs are
cached, like programs of a model's input shapes. Extents that an operator on the host decides, such as the number of selected
rows, get ranges like open dimensions of inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.compiled.segments import HostSegment
from rammer.runtime.auto_ranges import LengthHistory
from rammer.runtime.loaded_model import NO_RUN, LoadedModel, Timing
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.shape_buckets import Lengths, ShapeKey, Shapes, Span, key_for

if TYPE_CHECKING:
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner
    from rammer.frontend.read.reader import Model
    from rammer.ir.port import ModelPort

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: The inputs of the deferred part, and name, element type, shape and bytes of the values that it is compiled for.
Form: TypeAlias = "tuple[tuple[ModelPort, ...], tuple[tuple[str, str, tuple[int, ...], bytes], ...]]"
#: The form, and the range of a program that serves several shapes.
Key: TypeAlias = "tuple[Form, ShapeKey]"
#: The axis of which these operators decide the extent.
OPEN_AXES: Final = {"NonZero": 1, "NonMaxSuppression": 0}


@dataclass
class Continuation:
    """The deferred part ``rest`` on a device. ``make`` compiles and loads a model with static shapes, ``make_open`` one for a
    range, one thread at a time. ``residents`` caches the results, and ``bodies`` runs control flow. ``histories`` are the lengths
    of runs by form."""

    rest: DeferredModel
    make: Callable[[Model], LoadedModel]
    make_open: Callable[[Model, Shapes, Mapping[str, Span], Lengths], LoadedModel]
    residents: LoadedPrograms[Key]
    bodies: BodyRunner
    histories: dict[Form, LengthHistory] = field(default_factory=dict)

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host, including those of programs compiled up to now."""
        from rammer.frontend.host.host_node import HostNode

        first = [HostSegment(HostNode(n, {}), "the shape of its result depends on run-time data") for n in self.rest.first]
        return [*first, *(h for special in list(self.residents.held.values()) for h in special.host_nodes)]

    @property
    def kernels(self) -> int:
        """Kernel launches of one run of the most recently used program."""
        return next((s.kernels for s in reversed(list(self.residents.held.values()))), 0)

    def run(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], Timing]:
        """Return the model's outputs for the values that the deferred part needs, by ONNX name. The caller owns the arrays."""
        start, rest = time.perf_counter(), self.rest
        known: dict[str, Array] = {**rest.known, **values}
        known.update(self._run_host_operators(known))
        host, timing, found = time.perf_counter() - start, NO_RUN, dict[str, Array]()
        if rest.proto.graph.node:
            fixed = {*rest.deciding, *rest.known}
            with self.residents.used(lambda: self._specialise_rest(known)) as special:
                found, timing = special.run({n: to_owned_value(known[n], copied=False) for n in rest.reads if n not in fixed})
        outputs = {n: found[n] if n in found else to_owned_value(known[n]) for n in rest.outputs}
        return outputs, Timing(timing.clocks, host + timing.host, time.perf_counter() - start, timing.notes)

    def _run_host_operators(self, known: dict[str, Array]) -> dict[str, Array]:
        """Return the results of operators whose output shapes depend on run-time data."""
        from rammer.frontend.host.host_node import HostNode

        made: dict[str, Array] = {}
        for node in self.rest.first:
            made |= HostNode(node, {}).values({n: known[n] for n in node.inputs if n}, self.bodies, self.rest.known)
        return made

    def _specialise_rest(self, known: Mapping[str, Array]) -> LoadedModel:
        model = self.rest.model(known)
        values = ((n, a) for n, a in model.known.items() if n not in self.rest.known)
        decided = tuple((n, str(a.dtype), a.shape, a.tobytes()) for n, a in values)
        alone: Key = ((model.inputs, decided), ())
        found, opened = self.residents.find(alone), self._open_model(model)
        if found is None and opened.inputs != model.inputs:
            form = opened.inputs, decided
            history = self.histories.setdefault(form, LengthHistory(on=True, eager=True))
            shapes = {p.name: known[p.name].shape for p in model.inputs if p.numeric}

            def open_program(lengths: Lengths, spans: Mapping[str, Span]) -> LoadedModel:
                longest = lengths.longest(opened.inputs, shapes, spans)
                key = form, key_for(longest, spans, lengths)
                return self._kept(key, lambda: self.make_open(opened, longest, spans, lengths))

            found = history.serve(opened.inputs, shapes, open_program)
        return found or self._kept(alone, lambda: self.make(model))

    def _open_model(self, model: Model) -> Model:
        """Return ``model`` with a symbol for each extent that an operator on the host decides."""
        axes = {o: OPEN_AXES[n.op] for n in self.rest.first if n.op in OPEN_AXES for o in n.outputs}
        ports = (
            replace(p, shape=tuple(f"{p.name}:{d}" if axes.get(p.name) == d else n for d, n in enumerate(p.shape)))
            for p in model.inputs
        )
        return replace(model, inputs=tuple(ports))

    def _kept(self, key: Key, make: Callable[[], LoadedModel]) -> LoadedModel:
        """Return the program for ``key``, from ``make`` if it is not on the device."""
        found = self.residents.find(key)
        if found is None:
            found = make()
            self.residents.keep(key, found)
        return found

    def close(self) -> None:
        """Free the programs on the device."""
        self.residents.close()


def to_owned_value(value: Any, copied: bool = True) -> Any:
    """Return a value for a caller: an owned array (or at least a contiguous one), or a list of arrays."""
    if isinstance(value, list | tuple):
        return [to_owned_value(v, copied) for v in value]
    if value is None:
        return None
    if isinstance(value, dict):  # a map stays a map
        return dict(value)
    return np.array(value) if copied else np.asarray(value, order="C")
