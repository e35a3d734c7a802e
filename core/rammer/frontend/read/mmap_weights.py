"""Memory-mapped weights: arrays over the bytes of a model or of its external files, instead of tensor values. The tensor in the
protobuf has a name, a type and a shape, and refers to external data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import ModelProto, TensorProto, helper

from rammer.frontend.read import wire_format
from rammer.frontend.read.model_checks import parse_model
from rammer.frontend.read.proto_checks import BITS
from rammer.ir.constants.mapped_files import Mapped

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: No memory-mapped weights.
NOTHING: Final[Mapping[str, Array]] = MappingProxyType({})


@dataclass
class MappedWeights:
    """The bytes of initialisers of the main graph by name, and the files that hold them. ``files`` may be open already. ``noted``
    is called with each newly opened file, before it is read."""

    values: dict[str, memoryview] = field(default_factory=dict)
    files: dict[Path, Mapped] = field(default_factory=dict)
    used: set[Path] = field(default_factory=set)
    noted: Callable[[Mapped], object] = lambda file: None

    @property
    def sources(self) -> tuple[Mapped, ...]:
        """The files that hold values."""
        return tuple(self.files[p] for p in self.used if p in self.files)

    def put(self, tensor: TensorProto, raw: memoryview, path: Path | None) -> None:
        """Store the bytes of a tensor, located in a file or in memory, outside the protobuf."""
        self.values[tensor.name] = raw
        self.used.update([path] if path is not None else [])

    def parsed(self, source: Path | bytes, where: str) -> ModelProto:
        """Parse the model in a file or in bytes, without its large weights. Raises BadInput for an invalid model."""
        data = memoryview(source) if isinstance(source, bytes) else self.bytes_of(source)
        short, cut = wire_format.without_weights(data)
        proto = parse_model(short, where, data)
        for place, raw in cut.items():
            tensor = proto.graph.initializer[place]
            if is_mappable(tensor):
                self.put(tensor, raw, source if isinstance(source, Path) else None)
            else:
                tensor.raw_data = bytes(raw)
        return proto

    def bytes_of(self, path: Path) -> memoryview:
        """Return the content of a file, mapped if possible. Raises OSError if the file is unreadable."""
        if path not in self.files:
            self.files[path] = Mapped.of(path)
            self.noted(self.files[path])
        self.files[path].check()  # mapped pages of a truncated file are unreadable
        return memoryview(self.files[path].data)

    def finish(self) -> None:
        """Finish reading and close the files that hold no value. Raises BadInput if a file was modified meanwhile."""
        for path, file in self.files.items():
            file.check(thoroughly=True)
            if path not in self.used:
                file.retire()

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes by tensor name."""
        return {name: len(raw) for name, raw in self.values.items()}

    def arrays(self, model: ModelProto) -> dict[str, Array]:
        """Return the values as read-only arrays. The tensors of ``model``, already checked, then refer to external data."""
        result = dict[str, Array]()
        for tensor in model.graph.initializer:
            raw = self.values.get(tensor.name)
            if raw is not None:
                kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
                result[tensor.name] = np.frombuffer(raw, kind).reshape(tuple(tensor.dims))
                del tensor.external_data[:]
                tensor.data_location = TensorProto.EXTERNAL
                tensor.external_data.add(key="location", value=tensor.name)
        return result


def is_mappable(tensor: TensorProto) -> bool:
    """Return True if a tensor's bytes equal its elements in memory, without sub-byte elements and strings."""
    kind = tensor.data_type
    known = kind in TensorProto.DataType.values() and kind not in (TensorProto.UNDEFINED, TensorProto.STRING)
    return known and kind not in BITS and bool(tensor.name)


def embed_weights(model: ModelProto, weights: Mapping[str, Array]) -> ModelProto:
    """Return ``model`` with all weights embedded, or ``model`` itself if it has no external weights."""
    if not weights:
        return model
    result = ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in weights:
            tensor.raw_data = weights[tensor.name].tobytes()
            tensor.ClearField("data_location")
            del tensor.external_data[:]
    return result


def check_files(files: Iterable[Mapped]) -> None:
    """Raise BadInput if a file with weights was modified since it was opened."""
    for file in files:
        file.check()
