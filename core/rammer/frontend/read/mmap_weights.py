"""Weights that stay where they are: arrays over the bytes of a model, or of the files beside it, in the place of tensors' values.

A tensor in the protobuf then has a name, a type and a shape, and says that its values lie elsewhere.
"""

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

#: No weights are apart.
NOTHING: Final[Mapping[str, Array]] = MappingProxyType({})


@dataclass
class Apart:
    """The bytes of initialisers of a model's own graph by name, and the files that they are in. ``files`` may be open already;
    ``noted`` gets each that is opened, before anything of it is read."""

    values: dict[str, memoryview] = field(default_factory=dict)
    files: dict[Path, Mapped] = field(default_factory=dict)
    used: set[Path] = field(default_factory=set)
    noted: Callable[[Mapped], object] = lambda file: None

    @property
    def sources(self) -> tuple[Mapped, ...]:
        """The files that values stay in."""
        return tuple(self.files[p] for p in self.used if p in self.files)

    def put(self, tensor: TensorProto, raw: memoryview, path: Path | None) -> None:
        """Keep a tensor's bytes apart, which are in a file or in memory."""
        self.values[tensor.name] = raw
        self.used.update([path] if path is not None else [])

    def parsed(self, source: Path | bytes, where: str) -> ModelProto:
        """The model in a file or in bytes, large weights apart. BadInput for what is none."""
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
        """What a file holds, mapped where that is possible. OSError where it cannot be read."""
        if path not in self.files:
            self.files[path] = Mapped.of(path)
            self.noted(self.files[path])
        self.files[path].check()  # what is mapped of a file that was cut cannot be read
        return memoryview(self.files[path].data)

    def finish(self) -> None:
        """End reading. BadInput if a file was written to meanwhile; files that no value stays in are given back."""
        for path, file in self.files.items():
            file.check(thoroughly=True)
            if path not in self.used:
                file.retire()

    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: len(raw) for name, raw in self.values.items()}

    def arrays(self, model: ModelProto) -> dict[str, Array]:
        """The values as arrays, read-only; tensors of ``model``, which have been checked, now say that they lie elsewhere."""
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
    """Whether a tensor's bytes are its elements as they are in memory: none of a part of a byte, no strings."""
    kind = tensor.data_type
    known = kind in TensorProto.DataType.values() and kind not in (TensorProto.UNDEFINED, TensorProto.STRING)
    return known and kind not in BITS and bool(tensor.name)


def embed_weights(model: ModelProto, weights: Mapping[str, Array]) -> ModelProto:
    """``model`` with the values of its weights in it: itself, if it has them."""
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
    """BadInput where a file with weights was written to since it was opened."""
    for file in files:
        file.check()
