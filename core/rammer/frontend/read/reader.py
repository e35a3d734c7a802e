"""Reading of a model file: parsed, checked, functions inlined, opset upgraded; inputs and outputs as declared in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
from onnx import FunctionProto, ModelProto, TensorShapeProto, TypeProto, ValueInfoProto, inliner, shape_inference

import rammer.frontend.lower.contrib
import rammer.frontend.lower.ml  # noqa: F401  (importing it defines those of ai.onnx.ml)
from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput
from rammer.frontend.read import external_data as external_files
from rammer.frontend.read import limits, model_checks, proto_checks
from rammer.frontend.read.function_bodies import with_defaults
from rammer.frontend.read.mmap_weights import MappedWeights, check_files, embed_weights
from rammer.frontend.read.model_rewrites import counted, dense_model, placed
from rammer.frontend.read.node_protos import element_type, first_line
from rammer.frontend.read.onnx_inference_guards import declare_types, hide_indices, open_extents
from rammer.frontend.read.opset_upgrade import TARGET_OPSET, upgrade_opset
from rammer.frontend.read.plugin_operators import NONE, used_custom_operators
from rammer.frontend.read.strip_weights import detach_tensors
from rammer.frontend.read.type_constraints import check_kinds
from rammer.ir.constants.mapped_files import Mapped
from rammer.ir.port import MAP, OPTIONAL, SEQUENCE, ModelPort, onnx_element

__all__ = ["TARGET_OPSET", "Model", "ModelPort", "read_model"]


@dataclass(frozen=True)
class Model:
    """A checked ONNX model. ``notes`` lists problems that reading could not solve (a failed upgrade).

    ``external`` lists the external weight files: the model file alone does not identify the model. ``custom`` holds the plugin
    operators in use. ``known`` maps names to constants outside the protobuf (of a deferred part,
    ``rammer.frontend.bind.deferred``). ``weights`` maps initialisers to values mapped from ``files`` or from the caller's bytes.
    """

    proto: ModelProto = field(repr=False, compare=False)
    path: Path | None
    name: str
    inputs: tuple[ModelPort, ...]
    outputs: tuple[str, ...]
    opset: int
    notes: tuple[str, ...] = ()
    external: tuple[str, ...] = ()
    custom: CustomOperators = field(default_factory=dict, repr=False, compare=False)
    known: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    weights: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    files: tuple[Mapped, ...] = field(default=(), repr=False, compare=False)

    @cached_property
    def output_ports(self) -> tuple[ModelPort, ...]:
        """The outputs with their types and shapes, as far as these are known."""
        return output_ports(self.proto)

    @property
    def whole(self) -> ModelProto:
        """The protobuf with all values embedded, for external tools; it needs memory for all values."""
        return embed_weights(self.proto, self.weights)

    def check_files(self) -> None:
        """Raise BadInput if a file that holds ``weights`` was modified since it was read."""
        check_files(self.files)


def read_model(
    source: str | Path | bytes | ModelProto,
    plugins: CustomOperators = NONE,
    files: Mapping[Path, Mapped] = MappingProxyType({}),
    noted: Callable[[Mapped], object] = lambda file: None,
    values: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Model:
    """Read a model from a path, its bytes or a protobuf. Raises BadInput for an invalid model.

    A ModelProto is not changed, but the Model may share it. ``plugins`` holds the operators that plugins declare; functions of
    the model have priority over them. ``files`` holds open files; ``noted`` is called with each other file before it is read.
    ``values`` are contiguous arrays of initialisers that have a type and a shape only; they are not copied."""
    path = Path(source) if isinstance(source, (str, Path)) else None
    where = str(path) if path is not None else "the model in memory"
    mapped_weights = MappedWeights(files=dict(files), noted=noted)
    mapped_weights.values |= {name: array.reshape(-1).view(np.uint8).data.toreadonly() for name, array in values.items()}
    proto = source if isinstance(source, ModelProto) else _parse_source(source, where, mapped_weights)
    model_checks.check_version(proto, where)
    proto = placed(proto)
    graphs = list(model_checks.all_graphs(proto))
    limits.check_node_count(model_checks.count_nodes(proto, where), where)
    proto_checks.check_names(graphs)
    folder = path.parent if path is not None else None
    external = external_files.check_external_data(proto, folder, where)
    if external and folder is not None:
        external_files.load_external_data(proto, folder, mapped_weights)
    proto_checks.check_tensors(proto, graphs, mapped_weights.sizes())
    weights = mapped_weights.arrays(proto)
    mapped_weights.finish()
    model_checks.check_operators(proto, plugins)
    if proto.functions:
        try:
            proto = inliner.inline_local_functions(with_defaults(proto))
        except Exception as error:  # an assertion of ONNX's C++: the call has more operands than the function
            what = f"the model's functions cannot be inlined: {first_line(error).rpartition('failed: ')[2]}"
            raise BadInput(what, where, "export the model without functions") from error
        limits.check_nesting(proto.graph.node, where)
        model_checks.check_operators(proto, plugins)
    for function in proto.functions:
        raise BadInput(_inlining_failure(function, proto), where, "export the model without functions")
    proto = dense_model(_sort_nodes(proto))
    input_ports(proto)  # ONNX's converter crashes on an input without a type
    proto = counted(proto)
    mine = used_custom_operators((n for g in model_checks.all_graphs(proto) for n in g.node), plugins)
    check_kinds(proto, mine)
    proto = open_extents(proto)
    proto, notes = upgrade_opset(proto)
    return replace(_build_model(proto, path, notes, external, mine), weights=weights, files=mapped_weights.sources)


def _inlining_failure(function: FunctionProto, model: ModelProto) -> str:
    """Return the reason why ONNX's inliner left a function."""
    known = model_checks.opset_versions(model.opset_import)
    for domain, version in model_checks.opset_versions(function.opset_import).items():
        if known.get(domain, version) != version:
            of = f" of {domain}" if domain else ""
            return f"function {function.name} is of opset {version}{of}, the model of opset {known[domain]}"
    return f"function {function.name} calls itself"


def _parse_source(source: str | Path | bytes, where: str, mapped_weights: MappedWeights) -> ModelProto:
    if isinstance(source, bytes):
        return mapped_weights.parsed(source, where)
    path = Path(source)
    try:
        if path.is_dir():
            raise BadInput("the model is a folder", str(path), "give the .onnx file in it")
        if path.exists() and not path.is_file():
            raise BadInput("the model is not an ordinary file", str(path), "give a .onnx file: a model is read more than once")
        return mapped_weights.parsed(path, where)
    except FileNotFoundError as error:
        raise BadInput("model file not found", str(path), "check the path") from error
    except (OSError, ValueError) as error:  # ValueError: the path contains a zero byte
        what = f"the model file cannot be read: {getattr(error, 'strerror', None) or error}"
        raise BadInput(what, str(path), "check its permissions") from error


def _sort_nodes(model: ModelProto) -> ModelProto:
    """Return the model with its nodes in topological order, or the model itself if they already are."""
    order = model_checks.checked_order(model.graph)
    if all(a is b for a, b in zip(order, model.graph.node, strict=True)):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(order)
    return result


def _build_model(
    proto: ModelProto, path: Path | None, notes: tuple[str, ...], external: tuple[str, ...], custom: CustomOperators
) -> Model:
    graph = proto.graph
    inputs = input_ports(proto)
    for value in graph.output:
        # Exporters may omit the type of an output.
        if value.type.WhichOneof("value") is not None:
            model_checks.check_port_type("output", value.name, value.type)
    name = graph.name or (path.stem if path is not None else "model")
    outputs = tuple(v.name for v in graph.output)
    opset = model_checks.opset_versions(proto.opset_import).get("", TARGET_OPSET)
    return Model(proto, path, name, inputs, outputs, opset, notes, external, custom)


# --- inputs and outputs: types and shapes as declared and, for outputs, as ONNX infers them -------------------


def input_ports(proto: ModelProto) -> tuple[ModelPort, ...]:
    """Return the inputs without initialisers, which are constants. Up to IR version 3 initialisers are also listed as inputs."""
    graph = proto.graph
    constants = {t.name for t in graph.initializer}
    return tuple(_to_port("input", v) for v in graph.input if v.name not in constants)


def output_ports(proto: ModelProto) -> tuple[ModelPort, ...]:
    """Return the outputs. ONNX's inference completes missing types and extents, unless the model has sub-graphs: their inference
    may abort the process. An output without a type has the element type ""."""
    declared = {v.name: v for v in proto.graph.output}
    symbols = {d for v in (*proto.graph.input, *proto.graph.output) for d in _extents(v.type) if isinstance(d, str)}
    if not all(map(_is_static, declared.values())) and len(list(model_checks.all_graphs(proto))) == 1:
        declared |= _inferred_outputs(proto)
    ports = []
    for value in proto.graph.output:
        port = _to_port("output", declared[value.name])
        dims = tuple(d if isinstance(d, int) or d in symbols else None for d in port.shape)
        ports.append(ModelPort(port.name, port.dtype, dims, port.ranked, port.container))
    return tuple(ports)


def _inferred_outputs(proto: ModelProto) -> dict[str, ValueInfoProto]:
    """Return the outputs as ONNX infers them, by name; {} if inference fails."""
    outline, _ = detach_tensors(proto)
    hide_indices(outline)
    declare_types(model_checks.all_graphs(outline))
    try:
        found = shape_inference.infer_shapes(outline, data_prop=True)
    except Exception:  # a fault of the model, which compiling reports
        return {}
    # Binding reports an inferred shape beyond the limits with its operator.
    return {v.name: v for v in found.graph.output if limits.is_allowed_shape(d.dim_value for d in v.type.tensor_type.shape.dim)}


def _is_static(value: ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return value.type.WhichOneof("value") not in (None, "tensor_type") or (
        kind.HasField("shape") and all(isinstance(d, int) for d in _extents(value.type))
    )


def _extents(kind: TypeProto) -> Iterable[int | str | None]:
    return map(_parse_extent, kind.tensor_type.shape.dim)


def _to_port(what: str, value: ValueInfoProto) -> ModelPort:
    tensor = value.type.tensor_type
    if what == "output" and (value.type.WhichOneof("value") is None or (_is_tensor(value.type) and not tensor.elem_type)):
        return ModelPort(value.name, "", (), ranked=False)
    dtype = model_checks.check_port_type(what, value.name, value.type)
    if dtype in (SEQUENCE, OPTIONAL, MAP):
        return ModelPort(value.name, dtype, (), container=_type_text(value.type))
    if not tensor.HasField("shape"):
        return ModelPort(value.name, dtype, (), ranked=False)
    limits.check_shape((max(0, d.dim_value) for d in tensor.shape.dim), f"{what} {value.name}")
    return ModelPort(value.name, dtype, tuple(_extents(value.type)))


def _is_tensor(kind: TypeProto) -> bool:
    return bool(kind.WhichOneof("value") == "tensor_type")


def _type_text(kind: TypeProto) -> str:
    """Return ONNX's text of a type, for example ``seq(map(int64,tensor(float)))``."""
    match kind.WhichOneof("value"):
        case "sequence_type":
            return f"seq({_type_text(kind.sequence_type.elem_type)})"
        case "optional_type":
            return f"optional({_type_text(kind.optional_type.elem_type)})"
        case "map_type":
            return f"map({onnx_element(element_type(kind.map_type.key_type))},{_type_text(kind.map_type.value_type)})"
    return f"tensor({onnx_element(element_type(kind.tensor_type.elem_type))})"


def _parse_extent(dim: TensorShapeProto.Dimension) -> int | str | None:
    if dim.WhichOneof("value") == "dim_value":
        # Old exporters write -1 for "any extent". An extent of 0 is valid, as in ONNX Runtime.
        return dim.dim_value if dim.dim_value >= 0 else None
    # "?" and similar names mean "any extent", independent at each use.
    return dim.dim_param if any(c.isalnum() for c in dim.dim_param) else None
