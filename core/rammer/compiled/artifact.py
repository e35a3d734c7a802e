"""Artifacts: a compiled model in one file, for ``rammer compile -o``, ``rammer run F`` and warm starts.

A zip of JSON, program texts and constants, all uncompressed. Its comment is a digest of all members (``seal_of``); constants
enter by their checksums, which the head has. A damaged file never runs. No pickle is used. Reading
(``rammer.compiled.artifact_reader``) imports no ONNX tooling unless an operator runs on the host.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from rammer.cache.cached_constants import LARGE, ConstantCache
from rammer.cache.whole_files import write_whole
from rammer.compiled.segments import Compiled, HostSegment, Segment, host_needs
from rammer.ir.constants.mapped_files import Mapped, check_file, release_pages
from rammer.ir.graph import Value

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Bumped whenever the meaning of written data changes.
FORMAT = 9
#: Alignment of constants in their member, and bytes that are read at a time.
ALIGNED, SHARE = 64, 4 << 20
#: A zip's local header: offset of the lengths of name and extra field, their format, and the bytes before the name.
LENGTHS_AT, LENGTHS, HEADER = 26, "<HH", 30


@dataclass(frozen=True)
class Artifact:
    """A compiled model with the facts to check and run it: the device, its fingerprint, the ``record`` of its compile options and
    the device's ``options``. ``key`` is its key in the cache, "" in a file of the user's; ``seal`` is that of a file that was
    read."""

    compiled: Compiled
    device: str
    fingerprint: str
    record: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    seal: str = field(default="", compare=False)


@dataclass(frozen=True)
class SeparateConstants:
    """The cache of large constants of cached programs, except constants in the files ``sources``."""

    kept: ConstantCache
    sources: tuple[Mapped, ...]


def save_artifact(path: Path, artifact: Artifact) -> None:
    """Write an artifact to a path in one step. Raises OSError if that fails."""
    write_whole(path, lambda file: write_artifact(file, artifact))


def write_artifact(
    file: BinaryIO, artifact: Artifact, separate: SeparateConstants | None = None, verify: Callable[[], object] = lambda: None
) -> None:
    """Write a compiled model with all constants in it, or large ones in the cache ``separate``. ``verify`` is called when all
    constants have been read; its exception ends the writing."""
    compiled = artifact.compiled
    head: dict[str, Any] = {
        "format": FORMAT,
        "device": artifact.device,
        "fingerprint": artifact.fingerprint,
        "record": dict(artifact.record),
        "name": compiled.graph.name,
        "inputs": [_port_record(v) for v in compiled.graph.inputs],
        "outputs": [_port_record(v) for v in compiled.graph.outputs],
        "options": dict(artifact.options),
        "key": artifact.key,
        "segments": [],
        "float32": list(compiled.float32),
        "types": dict(compiled.node_types),
    }

    if compiled.ranged is not None:
        head["ranged"] = compiled.ranged.record()

    texts = dict[str, bytes]()
    with zipfile.ZipFile(file, "w") as archive:
        needed, known = host_needs(compiled), compiled.graph.constants
        constants = {n: known[n] for n in known if n in needed}  # others may be computed on demand
        head["constants"] = _pack_arrays(archive, "constants", constants, separate)
        for number, segment in enumerate(compiled.segments):
            head["segments"].append(_write_segment(archive, texts, number, segment, separate))
        texts["head.json"] = json.dumps(head).encode()
        for name, text in texts.items():
            archive.writestr(name, text)
        archive.comment = seal_of(texts)
    verify()


def seal_of(texts: Mapping[str, bytes]) -> bytes:
    """Return the comment of a file, a digest of its text members (``is_text``). The head has the constants' checksums."""
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{len(name)} {name} {len(text)} ".encode("utf-8", "surrogatepass") + text)
    return f"rammer {digest.hexdigest()}".encode()


def is_text(member: str) -> bool:
    """Return True unless a member is a block of constants."""
    return not member.endswith("constants")


def _write_segment(
    archive: zipfile.ZipFile, texts: dict[str, bytes], number: int, segment: Segment, separate: SeparateConstants | None
) -> dict[str, Any]:
    if isinstance(segment, HostSegment):
        texts[f"{number}.node"] = segment.node.to_bytes()
        return {"kind": "host", "why": segment.why}
    texts[f"{number}.program"] = str(segment.program).encode()
    entry = {"kind": "program", "constants": _pack_arrays(archive, f"{number}.constants", segment.constants, separate)}
    if (cases := segment.cases) is not None:
        entry["cases"] = [cases.length, cases.until]
        texts |= {f"{number}.{k}.program": str(table).encode() for k, table in enumerate(cases.tables)}
    return entry


def _port_record(value: Value) -> list[str]:
    return [value.name, str(value.port), value.external]


def _pack_arrays(
    archive: zipfile.ZipFile, member: str, arrays: Mapping[str, Array], separate: SeparateConstants | None
) -> list[list[Any]]:
    """Write arrays one after another into a member. Returns name, type, shape, first byte and checksum of each, or its row of
    ``ConstantCache`` if it is stored in ``separate``."""
    index, place = list[list[Any]](), 0
    with archive.open(member, "w", force_zip64=True) as file:
        for name, array in arrays.items():
            check_file(array)
            if separate is not None and array.nbytes >= LARGE:
                index.append([name, array.dtype.name, list(array.shape), separate.kept.put(array, separate.sources)])
                continue
            data = np.ascontiguousarray(array)
            flat = data.reshape(-1).view(np.uint8).data
            index.append([name, array.dtype.name, list(array.shape), place, zlib.crc32(flat)])
            file.write(flat)
            file.write(bytes(-data.nbytes % ALIGNED))
            place += data.nbytes + -data.nbytes % ALIGNED
            release_pages(array)
    return index


def is_artifact(path: Path) -> bool:
    """Return True if the file begins like a zip, which an ONNX file never does. Pipes are not opened: that would wait for their
    writers."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False
