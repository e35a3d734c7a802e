"""The ``--check`` run: a repeated run with every operator's result as an output, checked operator by operator. The same compiler,
device and options compute the results, so every device is checked in the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.ir.formats import to_readable
from rammer.ir.names import quote_text, shorten_name

if TYPE_CHECKING:
    from onnx import NodeProto

    from rammer.frontend.read.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Operators whose results are not tensors.
_NO_TENSORS: Final = ("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence", "String", "RegexFullMatch", "ZipMap")
_HINT: Final = "check the input, or the model"


@dataclass(frozen=True)
class IndexRule:
    """The positions of an operator's index operand and of its data operand.

    By default, the indices refer to axis ``axis`` (or to the attribute ``attribute``). With ``vector``, the last axis of the
    indices has one index for each axis of the data, after ``batch_dims``."""

    indices: int
    data: int = 0
    axis: int = 0
    attribute: str = ""
    vector: bool = False
    negative: bool = True
    ignored: str = ""  #: The attribute with an index value that is ignored.

    def extents(self, node: NodeProto, indices: Array, shape: tuple[int, ...]) -> Iterator[tuple[Array, list[int], int, int]]:
        """Yield indices, their trailing index in the operand, the axis that they refer to, and its extent."""
        given = {a.name: a.i for a in node.attribute}
        if not self.vector:
            axis = given.get(self.attribute, self.axis)
            if -len(shape) <= axis < len(shape):
                yield indices, [], axis % len(shape), shape[axis]
            return
        first = given.get("batch_dims", 0)
        for place in range(indices.shape[-1] if indices.ndim else 0):
            yield indices[..., place], [place], first + place, shape[first + place]


#: Operators with indices, by name. The domain precedes the name if two domains define the operator with different operands.
RULES: Final[Mapping[str, tuple[IndexRule, ...]]] = {
    "Gather": (IndexRule(1, attribute="axis"),),
    "GatherElements": (IndexRule(1, attribute="axis"),),
    "GatherND": (IndexRule(1, vector=True),),
    "GatherBlockQuantized": (IndexRule(1, attribute="gather_axis"),),
    "Scatter": (IndexRule(1, attribute="axis"),),
    "ScatterElements": (IndexRule(1, attribute="axis"),),
    "ScatterND": (IndexRule(1, vector=True),),
    "ArrayFeatureExtractor": (IndexRule(1, axis=-1, negative=False),),
    "EmbedLayerNormalization": (IndexRule(0, 2, negative=False), IndexRule(1, 4, negative=False)),
    "RotaryEmbedding": (IndexRule(3, 1, negative=False),),
    "com.microsoft.RotaryEmbedding": (IndexRule(1, 2, negative=False),),
    "RoiAlign": (IndexRule(2, negative=False),),
    "NegativeLogLikelihoodLoss": (IndexRule(1, axis=1, negative=False, ignored="ignore_index"),),
    "SoftmaxCrossEntropyLoss": (IndexRule(1, axis=1, negative=False, ignored="ignore_index"),),
}


def with_results(model: Model) -> Model:
    """Return ``model`` with the results of all operators outside bodies as additional outputs."""
    from onnx import ModelProto, ValueInfoProto

    proto, known = ModelProto(), set(model.outputs)
    proto.CopyFrom(model.proto)
    typed = {v.name: v.type.WhichOneof("value") for v in proto.graph.value_info}
    made = [o for n in proto.graph.node if _gives_tensors(n) for o in n.output if o and o not in known]
    made = [o for o in made if typed.get(o, "tensor_type") == "tensor_type"]
    proto.graph.output.extend(ValueInfoProto(name=o) for o in made)
    return replace(model, proto=proto, outputs=(*model.outputs, *made))


def _gives_tensors(node: NodeProto) -> bool:
    """Return True unless a result of the operator, or of a body in it, is not a tensor."""
    kinds = {o.type.WhichOneof("value") for a in node.attribute for g in (a.g, *a.graphs) for o in g.output}
    return not node.op_type.startswith(_NO_TENSORS) and kinds <= {None, "tensor_type"}


def check_values(model: Model, values: Mapping[str, Any]) -> None:
    """Raise BadInput for the first operator with an index out of range or a new NaN or infinity.

    The operands of the operator must be free of NaN and infinity. ``values`` are inputs and results by name. Constants, and
    results that depend on constants only, are exempt."""
    from onnx import numpy_helper

    graph = model.proto.graph
    known = {t.name: model.weights[t.name] if t.name in model.weights else numpy_helper.to_array(t) for t in graph.initializer}
    known |= {n: a for n, a in values.items() if isinstance(a, np.ndarray)}
    spoilt = {name: _nonfinite_kinds(array) for name, array in known.items()}
    for name in (p.name for p in model.inputs if p.name in spoilt):
        if spoilt[name]:
            raise BadInput(
                f"input {quote_text(shorten_name(name))} has {_describe_nonfinite(known[name], spoilt[name])}", hint=_HINT
            )
    fixed = {t.name for t in graph.initializer}
    for node in graph.node:
        _check_indices(node, known)
        reads = _node_inputs(node)
        if fixed.issuperset(reads):
            fixed.update(node.output)
        if fixed.issuperset(reads) or any(n in known and not known[n].size for n in reads):  # an empty minimum is infinite
            continue
        read = frozenset[str]().union(*(spoilt.get(n, frozenset()) for n in reads))
        for name in node.output:
            fresh = spoilt.get(name, frozenset()) - (read | ({"Inf"} if "NaN" in read else set()))
            if fresh:
                _raise_bad_input(
                    node,
                    f"makes {_describe_nonfinite(known[name], fresh)} in {quote_text(shorten_name(name))}, "
                    "of operands that have none",
                )


def _node_inputs(node: NodeProto) -> list[str]:
    from rammer.frontend.read import model_checks

    return list(model_checks.node_reads(node))


def _check_indices(node: NodeProto, known: Mapping[str, Array]) -> None:
    for rule in RULES.get(f"{node.domain}.{node.op_type}", RULES.get(node.op_type, ())):
        names = [node.input[p] if p < len(node.input) else "" for p in (rule.indices, rule.data)]
        if not all(n in known for n in names):
            continue
        indices, shape = known[names[0]], known[names[1]].shape
        ignored = [a.i for a in node.attribute if a.name == rule.ignored]
        for part, rest, axis, extent in rule.extents(node, indices, shape):
            low = -extent if rule.negative else 0
            wrong = ((part < low) | (part >= extent)) & ~np.isin(part, ignored)
            if wrong.any():
                at = np.argwhere(wrong)[0].tolist()
                span = f"takes {low} to {extent - 1}" if extent else "has no elements"
                what = f"index {part[tuple(at)]} at {at + rest} of {quote_text(shorten_name(names[0]))}"
                _raise_bad_input(node, f"has {what}, and axis {axis} of {quote_text(shorten_name(names[1]))} {span}")


def _raise_bad_input(node: NodeProto, what: str) -> None:
    from rammer.frontend.read.node_protos import node_title

    raise BadInput(f"{node_title(node)} {what}", "--check", _HINT)


def _nonfinite_kinds(array: Array) -> frozenset[str]:
    """Return the subset of ``NaN`` and ``Inf`` that occurs in an array."""
    array = to_readable(array)
    if array.dtype.kind not in "fc" or not array.size:
        return frozenset()
    return frozenset(w for w, has in (("NaN", np.isnan(array).any()), ("Inf", np.isinf(array).any())) if has)


def _describe_nonfinite(array: Array, kinds: frozenset[str]) -> str:
    """Return the number of non-finite elements and the index of the first."""
    array = to_readable(array)
    wrong = np.isnan(array) if "NaN" in kinds else np.isinf(array)
    word = "NaN" if "NaN" in kinds else "an infinity"
    return f"{word} at {np.argwhere(wrong)[0].tolist()} ({int(wrong.sum())} of {array.size} elements)"
