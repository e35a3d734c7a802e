"""External data: tensors whose values are in files next to the model, only in its folder or below, and complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx import ModelProto, TensorProto, external_data_helper

from rammer.errors import BadInput
from rammer.frontend.read import wire_format
from rammer.frontend.read.mmap_weights import MappedWeights, is_mappable
from rammer.frontend.read.model_checks import all_graphs, bodies_of, graphs_below
from rammer.frontend.read.proto_checks import check_stored_bytes
from rammer.ir.names import shorten_name
from rammer.ir.untrusted_json import place_in


def _external_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every tensor with external data, including those in functions, their bodies and sparse tensors."""
    inside = [n for f in model.functions for n in f.node]
    graphs = [*all_graphs(model), *graphs_below(list(bodies_of(inside)))]
    attributes = [a for nodes in (inside, *(g.node for g in graphs)) for node in nodes for a in node.attribute]
    sparse = [s for g in graphs for s in g.sparse_initializer]
    sparse += [s for a in attributes for s in (a.sparse_tensor, *a.sparse_tensors)]
    dense = [t for g in graphs for t in g.initializer] + [t for a in attributes for t in (a.t, *a.tensors)]
    dense += [t for s in sparse for t in (s.values, s.indices)]
    return (t for t in dense if external_data_helper.uses_external_data(t))


def load_external_data(model: ModelProto, folder: Path, mapped_weights: MappedWeights) -> None:
    """Load the external tensor values in files of ``folder``, after ``check_external_data``. Large initialisers of the model's
    graph stay memory-mapped; other values are read."""
    for tensor in model.graph.initializer:
        if external_data_helper.uses_external_data(tensor) and is_mappable(tensor):
            raw = _bytes_of(tensor, folder, mapped_weights)
            if len(raw) >= wire_format.LEAST:
                mapped_weights.put(tensor, raw, folder / str(external_data_helper.ExternalDataInfo(tensor).location))
                tensor.data_location = TensorProto.DEFAULT
                del tensor.external_data[:]
    for tensor in _external_tensors(model):
        tensor.raw_data = bytes(_bytes_of(tensor, folder, mapped_weights))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _bytes_of(tensor: TensorProto, folder: Path, mapped_weights: MappedWeights) -> memoryview:
    """Return the bytes of a tensor in an external file. Raise BadInput if the file no longer has them."""
    info = external_data_helper.ExternalDataInfo(tensor)
    path, offset = folder / info.location, info.offset or 0
    data = mapped_weights.bytes_of(path)
    end = len(data) if info.length is None else offset + info.length
    if end > len(data):
        raise BadInput(f"external data {info.location!r} is truncated", str(path), "download or copy the file again")
    return data[offset:end]


def check_external_data(model: ModelProto, folder: Path | None, where: str) -> tuple[str, ...]:
    """Return the files with the model's external data, as unique paths relative to ``folder``. Raise BadInput if a file is
    outside ``folder`` or missing. ``folder`` is None for a model from memory, which cannot have external files."""
    found = dict.fromkeys(_checked_location(tensor, folder, where) for tensor in _external_tensors(model))
    return tuple(found)


def _checked_location(tensor: TensorProto, folder: Path | None, where: str) -> str:
    place = f"tensor {shorten_name(tensor.name)} of {where}"
    try:
        info = external_data_helper.ExternalDataInfo(tensor)
        _check_external_place(tensor, info, folder, place)
        return str(info.location)
    except (OSError, ValueError) as error:  # an invalid offset, or an invalid file name
        what = f"the external data of a tensor cannot be found: {getattr(error, 'strerror', None) or error}"
        raise BadInput(what, place, "export the model again") from error


def _check_external_place(
    tensor: TensorProto, info: external_data_helper.ExternalDataInfo, folder: Path | None, place: str
) -> None:
    if folder is None:
        raise BadInput(
            f"external data {info.location!r} of a model that is loaded from memory",
            place,
            "give the path of the model file, or load the model with its external data",
        )
    path = place_in(folder, info.location)
    if path is None:
        raise BadInput(
            f"external data {info.location!r} is outside the model's folder",
            place,
            "move the file next to the model and store its relative path",
        )
    if not path.is_file():
        hint = f"put the file at {folder / info.location}"
        raise BadInput(f"external data {info.location!r} is missing", place, hint)
    offset, size = info.offset or 0, path.stat().st_size
    length = size - offset if info.length is None else info.length
    if offset < 0 or size < offset + max(length, 0):
        raise BadInput(
            f"external data {info.location!r} is truncated: {offset + length} bytes are needed, {size} exist",
            place,
            "download or copy the file again",
        )
    check_stored_bytes(tensor, length, place)
