"""A model file whose ports may be cached from an earlier read, so that warm starts do not import ONNX."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rammer.cache.disk_cache import Cache
from rammer.cache.file_digests import content_digest
from rammer.errors import RammerError
from rammer.ir.constants.mapped_files import Mapped
from rammer.ir.port import ON_HOST, ModelPort
from rammer.ir.untrusted_json import load_json, place_in
from rammer.runtime.specialiser import SpecialiserFactory

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model


#: Entries: ports and external files of a model, by the digest of its file.
_CACHE: Final = Cache("heads", "2")


@dataclass(frozen=True, slots=True)
class Head:
    """Properties of a model that running needs before its graph is read: name and ports."""

    name: str
    inputs: tuple[ModelPort, ...]
    outputs: tuple[ModelPort, ...]

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(p.name for p in self.outputs)


@dataclass
class ModelSource:
    """A model to compile.

    ``specialise`` creates the specialiser of an executable of this model.
    ``digest`` hashes the file's content ("" if unreadable) and, once the ``head`` is read, also the files with its weights.
    ``model`` reads and checks the file on first use. ``known`` are ports from an earlier read. ``opened`` are its files by
    relative path. Each is opened once and hashed before it is read. The compiled content is thus the hashed content, even if
    files are renamed."""

    read: Callable[[], Model] = field(repr=False)
    specialise: SpecialiserFactory = field(repr=False)
    digest: str = ""
    path: Path | None = None
    known: Head | None = None
    opened: dict[str, Mapped] = field(default_factory=dict)
    refused: RammerError | None = field(default=None, init=False)  #: The error of reading the model, cached.
    external: tuple[str, ...] = ()  #: External data files, set once the head is read.

    @cached_property
    def model(self) -> Model:
        """The checked ONNX model."""
        if self.refused is not None:
            raise self.refused
        try:
            return self.read()
        except RammerError as problem:
            self.refused = problem
            raise

    @property
    def files(self) -> tuple[Mapped, ...]:
        """The model's files that weights are mapped from; the weights of a compiled file are in memory."""
        return self.model.files if self.known is None else ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's file and those of its external data."""
        assert self.head
        return () if self.path is None else (self.path, *(self.path.parent / name for name in self.external))

    def check(self, thoroughly: bool = True) -> None:
        """Raise BadInput if a file of the model changed since it was hashed. Call it after all compiled content has been read,
        and with ``thoroughly=False`` before anything is read."""
        for file in self.opened.values():
            file.check(thoroughly)

    @cached_property
    def head(self) -> Head:
        """Name and ports, cached from an earlier read of the same content or read from the file."""
        if self.known is not None:
            return self.known
        key = _CACHE.key(self.digest) if self.digest else ""
        found = _CACHE.get(key, _decode_head) if key else None
        if found is not None:
            head, external = found
            with_files = self._with_files(external)
            if with_files:  # else reading reports the error
                self.digest, self.external = with_files, external
                return head
        external = self.external = self.model.external
        head = Head(self.model.name, self.model.inputs, self.model.output_ports)
        if key:
            _CACHE.put(key, json.dumps({**asdict(head), "external": external}).encode())
        self.digest = self._with_files(external)
        return head

    def _with_files(self, names: tuple[str, ...]) -> str:
        """Return a hash of ``digest`` and the external files; "" if one is unreadable or outside the model's folder."""
        if not names or not self.digest:
            return self.digest
        assert self.path is not None
        folder = self.path.parent
        try:
            if not all(place_in(folder, name) for name in names):
                return ""
            for name in names:
                if name not in self.opened:
                    self.opened[name] = Mapped.of(folder / name)
        except (OSError, ValueError):
            return ""
        found = [content_digest(self.opened[name]) for name in names]
        if not all(found):
            return ""
        return hashlib.sha256(json.dumps([self.digest, *zip(names, found, strict=True)]).encode()).hexdigest()


def _check_file_names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError("file name must be a string")
    return tuple(names)


def _decode_head(record: bytes) -> tuple[Head, tuple[str, ...]]:
    """Return the head and the names of external files in an entry. Raises ValueError or a similar error."""
    data = load_json(record)
    inputs, outputs = (tuple(_decode_port(p) for p in data[role]) for role in ("inputs", "outputs"))
    if not isinstance(data["name"], str) or not all(p.numeric or p.dtype in ON_HOST for p in inputs):
        raise ValueError("a name or an element type is malformed")
    return Head(data["name"], inputs, outputs), _check_file_names(data["external"])


def _decode_port(data: Any) -> ModelPort:
    port = ModelPort(data["name"], data["dtype"], tuple(data["shape"]), data["ranked"], data["container"])
    if not all(isinstance(text, str) for text in (port.name, port.dtype, port.container)):
        raise ValueError("a name or an element type is malformed")
    if not all(d is None or type(d) is str or (type(d) is int and d >= 0) for d in port.shape):
        raise ValueError("an extent is malformed")
    if not (type(port.ranked) is bool and (port.ranked or not port.shape)):
        raise ValueError("cached port has extents without a rank")
    return port
