"""The rest of a model, compiled when the values that it waits for are there: for their types and shapes, and for the values of
those that decide shapes. What was compiled is held, as programs of a model's input shapes are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rammer.compiled.segments import HostSegment
from rammer.runtime.loaded_model import NO_RUN, LoadedModel, Timing
from rammer.runtime.loaded_programs import LoadedPrograms

if TYPE_CHECKING:
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner
    from rammer.frontend.read.reader import Model
    from rammer.ir.port import InputPort

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: The inputs of the rest, and name, element type, shape and bytes of the values that it is compiled for.
Key: TypeAlias = "tuple[tuple[InputPort, ...], tuple[tuple[str, str, tuple[int, ...], bytes], ...]]"


@dataclass
class Continuation:
    """``rest`` on a device: ``make`` compiles and loads a model whose shapes are all known, one thread at a time; ``residents``
    hold what was made, and ``bodies`` runs those of control flow."""

    rest: DeferredModel
    make: Callable[[Model], LoadedModel]
    residents: LoadedPrograms[Key]
    bodies: BodyRunner

    @property
    def host_nodes(self) -> list[HostSegment]:
        """Operators that run on the host, those of the programs made so far among them."""
        from rammer.compiled.host_node import HostNode

        first = [HostSegment(HostNode(n, {}), "the shape of its result depends on run-time data") for n in self.rest.first]
        return [*first, *(h for special in list(self.residents.held.values()) for h in special.host_nodes)]

    @property
    def kernels(self) -> int:
        """Kernel launches of one run of what was used last."""
        return next((s.kernels for s in reversed(list(self.residents.held.values()))), 0)

    def run(self, values: Mapping[str, Array]) -> tuple[dict[str, Array], Timing]:
        """The model's outputs, of the values that the rest waits for, by ONNX names. The arrays are the caller's own."""
        start, rest = time.perf_counter(), self.rest
        known: dict[str, Array] = {**rest.known, **values}
        known.update(self._run_host_operators(known))
        host, timing, found = time.perf_counter() - start, NO_RUN, dict[str, Array]()
        if rest.proto.graph.node:
            with self.residents.used(lambda: self._specialise_rest(known)) as special:
                found, timing = special.run({n: to_owned_value(known[n], copied=False) for n in rest.reads})
        outputs = {n: found[n] if n in found else to_owned_value(known[n]) for n in rest.outputs}
        return outputs, Timing(timing.device, host + timing.host, time.perf_counter() - start, timing.notes)

    def _run_host_operators(self, known: dict[str, Array]) -> dict[str, Array]:
        """What the operators compute whose results show their shapes only then."""
        from rammer.compiled.host_node import HostNode

        made: dict[str, Array] = {}
        for node in self.rest.first:
            made |= HostNode(node, {}).values({n: known[n] for n in node.inputs if n}, self.bodies, self.rest.known)
        return made

    def _specialise_rest(self, known: Mapping[str, Array]) -> LoadedModel:
        model = self.rest.model(known)
        decided = ((n, a) for n, a in model.known.items() if n not in self.rest.known)
        key = (model.inputs, tuple((n, str(a.dtype), a.shape, a.tobytes()) for n, a in decided))
        found = self.residents.find(key)
        if found is None:
            found = self.make(model)
            self.residents.keep(key, found)
        return found

    def close(self) -> None:
        """Free the device."""
        self.residents.close()


def to_owned_value(value: Any, copied: bool = True) -> Any:
    """A value for a caller: an array of its own (or at least a contiguous one), or a list of such."""
    if isinstance(value, list | tuple):
        return [to_owned_value(v, copied) for v in value]
    if value is None:
        return None
    if isinstance(value, dict):  # a map stays one
        return dict(value)
    return np.array(value) if copied else np.asarray(value, order="C")
