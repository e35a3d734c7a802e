"""The ONNX form of an exported torch program: a model without its weights, which stay in torch's memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, SymIntArgument

from rammer.errors import BadInput
from rammer.ir.extent import GivenLength

if TYPE_CHECKING:
    import onnx

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: The opset that torch's operators are written in; other opsets are converted from it.
OPSET: Final = 18
#: Bytes of a weight that is passed beside the model instead of in it.
LARGE: Final = 1024


@dataclass(frozen=True, slots=True)
class OutputRole:
    """One output of a program: a tensor on ``device`` or a ``number`` with a name in the model, or else a ``constant``."""

    name: str = ""
    constant: Any = None
    number: bool = False
    device: Any = None


@dataclass(frozen=True)
class OnnxForm:
    """An exported program as an ONNX model. ``weights`` are arrays over torch's memory, by initialiser.

    ``inputs`` maps positions of the flattened user inputs to names in the model; other positions are constants of the program.
    ``ranges`` are bounds of the open dimensions as ``rammer.compile`` takes them: all of them, or none if one has no bound."""

    proto: onnx.ModelProto = field(repr=False)
    weights: Mapping[str, Array] = field(repr=False)
    inputs: Mapping[int, str]
    outputs: tuple[OutputRole, ...]
    ranges: Mapping[str, GivenLength]


def written_buffers(program: Any) -> tuple[str, ...]:
    """Return the names of parameters and buffers that an exported program writes to."""
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)
    return tuple(s.target for s in program.graph_signature.output_specs if s.kind in kinds)


def written_inputs(program: Any) -> tuple[int, ...]:
    """Return the positions of the user inputs that an exported program writes to."""
    positions = {name: at for at, name in _inputs_of(program).items()}
    specs = program.graph_signature.output_specs
    return tuple(positions[s.target] for s in specs if s.kind == OutputKind.USER_INPUT_MUTATION)


def export_module(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Any:
    """Return the exported program of a module, with ``dynamic_shapes`` as in ``torch.export.export``. Raises BadInput with
    torch's reason if torch cannot export it."""
    with _quiet_torch(), torch._guards.tracing(None), torch.no_grad():
        try:
            program = torch.export.export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
            if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in program.graph.nodes):
                return program.run_decompositions({})  # lists what is written to among the outputs
            return program
        except Exception as problem:  # torch raises errors of many modules
            raise BadInput(f"torch cannot export the module: {_first_lines(problem)}", "torch.export") from problem


def to_onnx(program: Any) -> OnnxForm:
    """Return the results of an exported program as an ONNX model. Raises BadInput with the names of operators that have no ONNX
    form."""
    random = sorted({str(n.target) for n in program.graph.nodes if _is_random(n)})
    if random:
        raise BadInput(f"operators draw random numbers: {', '.join(random)}", hint="call module.eval() if it has dropout layers")
    if any(_is_training(n) for n in program.graph.nodes):
        raise BadInput("a layer normalises by the statistics of its batch, as in training", hint="call module.eval()")
    roles = tuple(_output_roles(program))
    with _quiet_torch(), torch._guards.tracing(None), torch.no_grad():
        try:
            converted = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False, external_data=False, optimize=False
            )
        except Exception as problem:  # torch and onnxscript raise errors of many modules
            what = f"torch cannot write the module as ONNX: {_first_lines(problem)}"
            raise BadInput(what, ", ".join(_unsupported(problem))) from problem
    model = converted.model
    names = iter(v.name for v in model.graph.outputs)
    outputs = tuple(OutputRole(next(names), r.constant, r.number, r.device) if r.name else r for r in roles)
    weights = _take_weights(model)
    return OnnxForm(_to_proto(model, weights), weights, _inputs_of(program), outputs, _ranges_of(program, model))


def _is_random(node: Any) -> bool:
    """Return True if an operator draws random numbers: its type may, and it is not a dropout that is off."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = _arguments_of(node)
    return given.get("train", True) is not False and given.get("dropout_p") != 0.0


def _is_training(node: Any) -> bool:
    """Return True for a normalisation that updates running statistics. Without these, it is a standardisation of its input."""
    given = _arguments_of(node)
    return given.get("training") is True and given.get("running_mean") is not None


def _arguments_of(node: Any) -> dict[str, Any]:
    """Return the arguments of an operator by name, with its defaults."""
    arguments = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}


def _inputs_of(program: Any) -> dict[int, str]:
    specs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    return {at: s.arg.name for at, s in enumerate(specs) if not isinstance(s.arg, ConstantArgument)}


def _output_roles(program: Any) -> Iterator[OutputRole]:
    """Yield the roles of the outputs, which have the names of torch."""
    values = {n.name: n.meta.get("val") for n in program.graph.nodes}
    for spec in (s for s in program.graph_signature.output_specs if s.kind == OutputKind.USER_OUTPUT):
        if isinstance(spec.arg, ConstantArgument):
            yield OutputRole(constant=spec.arg.value)
            continue
        device = getattr(values.get(spec.arg.name), "device", None)
        yield OutputRole(spec.arg.name, number=isinstance(spec.arg, SymIntArgument), device=device)


def _ranges_of(program: Any, model: Any) -> dict[str, GivenLength]:
    """Return the ranges of all open dimensions of the inputs, or {} if a symbol has no upper bound."""
    bounds = {str(symbol): bound for symbol, bound in program.range_constraints.items()}
    texts = dict.fromkeys(str(d.value) for v in model.graph.inputs for d in v.shape or () if not isinstance(d, int))
    symbols = {text for text in texts if text in bounds}
    if any(not getattr(bounds[s].upper, "is_Integer", False) for s in symbols):
        return {}
    found: dict[str, GivenLength] = {s: (int(bounds[s].lower), int(bounds[s].upper)) for s in symbols}
    return found | {text: text for text in texts if text not in symbols}


def _take_weights(model: Any) -> dict[str, Array]:
    """Return the values of large initialisers, and remove these from ``model``."""
    found = dict[str, Array]()
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor.nbytes >= LARGE and tensor.dtype.bitwidth % 8 == 0:
            found[name] = np.ascontiguousarray(tensor.numpy())
            del model.graph.initializers[name]
    return found


def _to_proto(model: Any, weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Return the protobuf, in which ``weights`` have a type and a shape. It holds no trace of its origin, so that equal modules
    have equal models."""
    import onnx
    from onnx_ir import serde

    model.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    proto = serde.serialize_model(model)
    for name, array in weights.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        proto.graph.initializer.add(name=name, data_type=kind, dims=array.shape)
    assert isinstance(proto, onnx.ModelProto)
    return proto


def _unsupported(problem: BaseException) -> Sequence[str]:
    """Return the names of the torch operators that an exporter's error names."""
    found, error = dict[str, None](), problem
    while error is not None:
        for part in str(error).split("OpOverload(op='")[1:]:
            found[part.partition("'")[0]] = None
        error = error.__cause__  # type: ignore[assignment]
    return tuple(found)


def _first_lines(problem: BaseException) -> str:
    """Return the start of the innermost error's message."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(problem).__name__


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress the exporters' log and warnings: failures are raised, and rammer reports them."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
