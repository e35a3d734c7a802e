"""Bodies of control flow on the device: compiled for the types and shapes that they meet, and driven from the host.

A body whose shapes hang on what it reads, that reads what no device holds, or that meets too many shapes is interpreted on the
host instead (``frontend.evaluator.interpreted``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.runtime.residents import Residents
from rammer.runtime.specialised import Specialised

if TYPE_CHECKING:
    from rammer.frontend.nodes import SubGraph
    from rammer.frontend.reader import Model
    from rammer.ir.port import InputPort

Key: TypeAlias = "tuple[SubGraph, tuple[InputPort, ...]]"

#: Sets of shapes of one body that are compiled: what grows with every step would be compiled at every step.
MOST_FORMS: Final = 4


@dataclass
class BodyPrograms:
    """``make`` compiles and loads a model whose shapes are all known; ``residents`` hold what was made."""

    make: Callable[[Model], Specialised]
    residents: Residents[Key]
    forms: dict[SubGraph, set[tuple[InputPort, ...]]] = field(default_factory=dict)
    refused: dict[SubGraph, str] = field(default_factory=dict)
    models: dict[Key, Model] = field(default_factory=dict)  #: Bodies as models, which every step would copy the weights into.
    on_host: bool = False  #: Whether a body was interpreted.

    def __call__(self, body: SubGraph, given: Sequence[Any], outer: Mapping[str, Any]) -> Sequence[Any]:
        """The outputs of a body, in order (``frontend.control.Bodies``)."""
        if body not in self.refused:
            values = _values(body, given, outer)
            try:
                model = self._model(body, values)
                with self.residents.used(lambda: self._specialised(body, model)) as special:
                    found, _ = special.run({p.name: values[p.name] for p in model.inputs})
                return [found[o] for o in model.outputs]
            except BadInput as problem:
                self.refused[body] = problem.what
        from rammer.frontend.evaluator import interpreted

        self.on_host = True
        return interpreted(body, given, outer)

    def _model(self, body: SubGraph, values: Mapping[str, Any]) -> Model:
        """A body as a model with these inputs; BadInput for one that is to be interpreted."""
        ports = tuple(map(_port, values.items()))
        found = self.models.get((body, ports))
        if found is None:
            found = _as_model(body, ports)
            self._check(body, found)
            self.models[body, ports] = found
        return found

    def _check(self, body: SubGraph, model: Model) -> None:
        """BadInput for a body that is to be interpreted."""
        if not all(p.numeric for p in model.inputs):
            raise BadInput("it reads what no device holds")
        forms = self.forms.setdefault(body, set())
        forms.add(model.inputs)
        if len(forms) > MOST_FORMS:
            raise BadInput("its shapes change from step to step")

    def _specialised(self, body: SubGraph, model: Model) -> Specialised:
        found = self.residents.find((body, model.inputs))
        if found is None:
            found = self.make(model)
            if found.compiled.rest is not None:
                found.close()
                raise found.compiled.rest.why
            self.residents.keep((body, model.inputs), found)
        return found

    def close(self) -> None:
        """Free the device."""
        self.residents.close()


def _port(item: tuple[str, Any]) -> InputPort:
    from rammer.frontend.later import port_of

    return port_of(*item)


@lru_cache(64)
def _reads(body: SubGraph) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of a body's own inputs, and of all values that it reads."""
    from rammer.frontend import checks
    from rammer.frontend.control import graph_of

    graph = graph_of(body)
    read = {n for node in graph.node for n in checks.node_reads(node)} | {o.name for o in graph.output}
    return tuple(v.name for v in graph.input), frozenset(read)


def _values(body: SubGraph, given: Sequence[Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a body reads: its own inputs and those of outside."""
    own, read = _reads(body)
    known = {**outer, **dict(zip(own, given, strict=True))}
    return {n: np.asarray(a, order="C") if isinstance(a, np.generic) else a for n, a in known.items() if n in read}


def _as_model(body: SubGraph, ports: tuple[InputPort, ...]) -> Model:
    """A body as a model of its own, with what it reads of outside as inputs."""
    from onnx import ModelProto, OperatorSetIdProto

    from rammer.frontend.control import graph_of
    from rammer.frontend.reader import Model

    graph, opsets = graph_of(body), dict(body.opsets)
    proto = ModelProto(opset_import=[OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()])
    proto.graph.CopyFrom(graph)
    outputs = tuple(o.name for o in graph.output)
    return Model(proto, None, graph.name or "body", ports, outputs, opsets.get("", 0))
