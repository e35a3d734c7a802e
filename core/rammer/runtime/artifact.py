"""Artifacts: a compiled model in one file, for ``rammer compile -o``, ``rammer run F`` and warm starts.

A zip of JSON, program texts and constants, these uncompressed with a checksum each. No pickle; reading it imports no ONNX
tooling unless an operator runs on the host. A file of another version or a damaged one is refused.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.errors import BadInput
from rammer.ir.graph import Graph, Value
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType
from rammer.ir.verify import VerifyError, verify
from rammer.runtime.files import write_whole
from rammer.runtime.segments import Compiled, HostSegment, ProgramSegment, Segment
from rammer.runtime.shares import in_threads, read_into

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Bumped whenever what is written changes meaning.
FORMAT = 4
#: Constants begin at multiples of so many bytes of their member, and are read so many at a time.
ALIGNED, SHARE = 64, 4 << 20
#: Of a zip's local header: where the lengths of name and extra field are, their form, and the bytes before the name.
LENGTHS_AT, LENGTHS, HEADER = 26, "<HH", 30


@dataclass(frozen=True)
class Artifact:
    """A compiled model with what is needed to check and run it: the device, its ``--option`` values and its
    fingerprint."""

    compiled: Compiled
    device: str
    target: str
    fingerprint: str
    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    precision: str = "float32"


def save_artifact(path: Path, artifact: Artifact) -> None:
    """Write in one step, as ``write_whole`` does. OSError if that fails."""
    compiled = artifact.compiled
    head: dict[str, Any] = {
        "format": FORMAT, "device": artifact.device, "target": artifact.target, "fingerprint": artifact.fingerprint,
        "policy": artifact.policy, "precision": artifact.precision, "name": compiled.graph.name,
        "inputs": [_port(v) for v in compiled.graph.inputs], "outputs": [_port(v) for v in compiled.graph.outputs],
        "options": dict(artifact.options), "segments": [],
    }  # fmt: skip

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            constants = {n: v for n, v in compiled.graph.constants.items() if n in _host_needs(compiled)}
            head["constants"] = _pack(archive, "constants", constants)
            for number, segment in enumerate(compiled.segments):
                head["segments"].append(_write_segment(archive, number, segment))
            archive.writestr("head.json", json.dumps(head))

    write_whole(path, fill)


def _write_segment(archive: zipfile.ZipFile, number: int, segment: Segment) -> dict[str, Any]:
    if isinstance(segment, HostSegment):
        archive.writestr(f"{number}.node", segment.node.to_bytes())
        return {"kind": "host", "why": segment.why}
    archive.writestr(f"{number}.program", str(segment.program))
    return {"kind": "program", "constants": _pack(archive, f"{number}.constants", segment.constants)}


def _host_needs(compiled: Compiled) -> set[str]:
    """Constants that host operators read or that are outputs themselves."""
    needed = {n for s in compiled.segments if isinstance(s, HostSegment) for n in s.node.inputs}
    return needed | {v.name for v in compiled.graph.outputs}


def _port(value: Value) -> list[str]:
    return [value.name, str(value.type), value.external]


def _pack(archive: zipfile.ZipFile, member: str, arrays: Mapping[str, Array]) -> list[list[Any]]:
    """Write arrays one after another into a member; returns name, type, shape, first byte and checksum of each."""
    index, place = list[list[Any]](), 0
    with archive.open(member, "w", force_zip64=True) as file:
        for name, array in arrays.items():
            data = np.ascontiguousarray(array)
            flat = data.reshape(-1).view(np.uint8).data
            index.append([name, array.dtype.name, list(array.shape), place, zlib.crc32(flat)])
            file.write(flat)
            file.write(bytes(-data.nbytes % ALIGNED))
            place += data.nbytes + -data.nbytes % ALIGNED
    return index


def is_artifact(path: Path) -> bool:
    """Whether the file begins like a zip; an ONNX file never does. Opening a pipe would wait for its writer."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


def load_artifact(path: Path, proved: bool = False) -> Artifact:
    """Read an artifact and verify its programs, unless they were ``proved`` before this version of rammer wrote the
    file. BadInput when it is damaged or of another format."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path, proved)
    except (VerifyError, *_DAMAGE) as problem:
        said = problem.what if isinstance(problem, VerifyError) else str(problem).strip('"')
        raise BadInput(f"{path} is not a compiled model: {said}", hint="compile the model again") from problem


#: What a damaged file can raise: the zip's own checks, a decompressor, and every parser of its members.
_DAMAGE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, LookupError, ValueError, TypeError,
           AttributeError)  # fmt: skip


def _read(archive: zipfile.ZipFile, path: Path, proved: bool) -> Artifact:
    head = json.loads(archive.read("head.json"))
    if head["format"] != FORMAT:
        raise BadInput(f"{path} has format {head['format']}, this rammer reads {FORMAT}",
                       hint="compile the model again")  # fmt: skip
    segments = tuple(_read_segment(archive, path, i, s, proved) for i, s in enumerate(head["segments"]))
    constants = _unpack(archive, path, "constants", head["constants"])
    inputs, outputs = (tuple(_value(p) for p in head[k]) for k in ("inputs", "outputs"))
    types = {v.name: v.type for v in (*inputs, *outputs)}
    graph = Graph(head["name"], inputs, outputs, (), types, constants)
    options = {str(k): str(v) for k, v in head["options"].items()}
    device, target, fingerprint, policy, precision = (
        str(head[k]) for k in ("device", "target", "fingerprint", "policy", "precision")
    )
    return Artifact(Compiled(graph, segments), device, target, fingerprint, policy, options, precision)


def _value(port: list[str]) -> Value:
    name, text, external = port
    return Value(name, TensorType.parse(text), external)


def _read_segment(archive: zipfile.ZipFile, path: Path, number: int, entry: Mapping[str, Any], proved: bool) -> Segment:
    if entry["kind"] == "host":
        from rammer.runtime.host import HostNode

        return HostSegment(HostNode.from_bytes(archive.read(f"{number}.node")), entry["why"])
    program = RProgram.parse(archive.read(f"{number}.program").decode())
    if not proved:
        verify(program)
    return ProgramSegment(program, _unpack(archive, path, f"{number}.constants", entry["constants"]))


def _unpack(archive: zipfile.ZipFile, path: Path, member: str, index: list[list[Any]]) -> dict[str, Array]:
    """The arrays of a member, read-only. They are read and checked by several threads: through ``archive`` it takes half a
    second for 0.4 GB."""
    info = archive.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
        raise ValueError(f"member {member} is compressed, or longer than the file")
    data = np.empty(info.file_size, np.uint8)
    begin = _data_begin(path, info)

    def read(share: list[list[Any]]) -> dict[str, Array]:
        return {row[0]: _constant(path, begin, data, *row) for row in share}

    arrays = {name: array for part in in_threads(read, _shares(index)) for name, array in part.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _data_begin(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an uncompressed member begin."""
    head = bytearray(HEADER)
    read_into(path, info.header_offset, memoryview(head))
    name, extra = struct.unpack_from(LENGTHS, head, LENGTHS_AT)
    return int(info.header_offset + HEADER + name + extra)


def _shares(index: list[list[Any]]) -> list[list[list[Any]]]:
    """Rows of the index that are read together: about ``SHARE`` bytes."""
    result, end = list[list[list[Any]]](), 0
    for row in index:
        if not result or row[3] >= end:
            result.append([])
            end = row[3] + SHARE
        result[-1].append(row)
    return result


def _constant(path: Path, begin: int, data: NDArray[np.uint8], name: str, dtype: str, shape: list[int], place: int,
              checksum: int) -> Array:  # fmt: skip
    """A constant of a member that begins at ``begin`` of the file, read to its place in ``data``."""
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise ValueError(f"constant {name} has type {dtype}")
    flat = data[place : place + math.prod(shape) * kind.itemsize]
    read_into(path, begin + place, flat.data)
    if zlib.crc32(flat.data) != checksum:
        raise zipfile.BadZipFile(f"constant {name} is damaged")
    return flat.view(kind).reshape(shape)
