"""Judgement of a changed model's numbers by the references that judge random graphs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from onnx import AttributeProto, ModelProto, helper, numpy_helper

from rammer.frontend.read.model_rewrites import dense
from rammer_testing.graphs.case import Array, Call, GraphCase
from rammer_testing.graphs.judge import Judge, Setting
from rammer_testing.graphs.outside import Outside
from rammer_testing.mutants.kinds import INPUTS, OUTPUTS
from rammer_testing.sandbox import forked

#: Seconds for a judgement.
PATIENCE: Final = 30.0
#: Kinds of attributes that a ``GraphCase`` can hold.
_PLAIN: Final = frozenset(
    {
        AttributeProto.FLOAT,
        AttributeProto.INT,
        AttributeProto.STRING,
        AttributeProto.TENSOR,
        AttributeProto.FLOATS,
        AttributeProto.INTS,
        AttributeProto.STRINGS,
    }
)


@dataclass
class _Told(Outside):
    """Cached answers of ONNX Runtime."""

    said: list[Array] | None = None

    def __call__(self, model: bytes, inputs: object, outputs: object) -> list[Array] | None:
        return self.said


@dataclass
class Voices:
    """The reference implementations. ONNX Runtime is first, in a separate process. A model that it or ONNX's checker refuses is
    not judged. The remaining references run in a child, since ONNX's code is untested with invalid models."""

    outside: Outside = field(default_factory=Outside)

    def __call__(self, model: bytes, folder: Path) -> str:
        """Return the fault of the outputs in ``folder``; "" if they are right, "not judged" if they cannot be judged."""
        with np.load(folder / INPUTS) as given, np.load(folder / OUTPUTS) as made:
            inputs, have = {n: given[n] for n in given.files}, {n: made[n] for n in made.files}
        said = self.outside(model, inputs, list(have))
        if said is None:
            return NOT_JUDGED
        verdict = folder / "verdict"
        forked(lambda: _judge(model, inputs, have, said, verdict), folder / "judge.out", folder / "judge.err", PATIENCE)
        return json.loads(verdict.read_text()) if verdict.exists() else NOT_JUDGED


#: The result for models that ONNX disallows, or on which the judges themselves fail.
NOT_JUDGED: Final = "not judged"


def _judge(model: bytes, inputs: dict[str, Array], have: dict[str, Array], said: list[Array], verdict: Path) -> int:
    case = as_case(ModelProto.FromString(model), inputs)
    if case is None:
        return 0
    case.typed()  # raises if the checker rejects it
    told = Judge(outside=_Told(said=said)).compared(case, have, Setting(""))
    if told.kind != "evaluator":
        verdict.write_text(json.dumps("" if told.good else f"{told.kind}: {told.detail}"))
    return 0


def as_case(model: ModelProto, inputs: dict[str, Array]) -> GraphCase | None:
    """Return the model as a GraphCase; None for functions, bodies, foreign domains and other unsupported features."""
    graph = model.graph
    opsets = {i.domain: i.version for i in model.opset_import}
    attributes = [a for n in graph.node for a in n.attribute]
    if model.functions or set(opsets) - {"", "ai.onnx"} or any(a.type not in _PLAIN or a.ref_attr_name for a in attributes):
        return None
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    constants |= {s.values.name: dense(s) for s in graph.sparse_initializer}
    nodes = tuple(Call(n.op_type, tuple(n.input), tuple(n.output), {a.name: _value(a) for a in n.attribute}) for n in graph.node)
    return GraphCase(opsets.get("", opsets.get("ai.onnx", 1)), inputs, constants, nodes, tuple(o.name for o in graph.output))


def _value(attribute: AttributeProto) -> object:
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(attribute.t)
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return [v.decode() if isinstance(v, bytes) else v for v in value] if not isinstance(value, (int, float)) else value
