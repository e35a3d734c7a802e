"""Metadata of models: inputs and outputs, and the properties that their producers recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rammer.ir.port import ModelPort
from rammer.runtime.executable import Executable

#: ONNX Runtime's version of a model without one.
_NO_VERSION: Final = 2**63 - 1


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a session. ``type`` is ONNX's text, for example ``tensor(float)``. An extent of ``shape`` is a
    number, a symbol, or None if it is unknown."""

    name: str
    type: str
    shape: list[int | str | None]

    @staticmethod
    def of(port: ModelPort, fixed: Mapping[str, int]) -> NodeArg:
        """Return the metadata of a port, with dimensions in ``fixed`` as numbers."""
        dims = [fixed.get(d, d) if isinstance(d, str) else d for d in port.shape]
        return NodeArg(port.name, port.onnx_type if port.dtype else "", dims)

    def __str__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


@dataclass(frozen=True)
class ModelMetadata:
    """The properties that a model's producer recorded. A compiled file has only a graph name."""

    producer_name: str = ""
    graph_name: str = ""
    graph_description: str = ""
    description: str = ""
    domain: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(executable: Executable) -> ModelMetadata:
        """Return the metadata of an executable's model, which is read on the first call."""
        source = executable.source
        if source.known is not None:
            return ModelMetadata(graph_name=source.known.name)
        proto = source.model.proto
        return ModelMetadata(
            proto.producer_name,
            proto.graph.name,
            proto.graph.doc_string,
            proto.doc_string,
            proto.domain,
            proto.model_version if proto.HasField("model_version") else _NO_VERSION,
            {p.key: p.value for p in proto.metadata_props},
        )
