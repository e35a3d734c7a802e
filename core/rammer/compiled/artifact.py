"""Artifacts: a compiled model in one file, for ``rammer compile -o``, ``rammer run F`` and warm starts.

A zip of JSON, program texts, constants and machine code, all uncompressed. A file for several targets has one variant for each,
and each constant once. The comment is a digest of all members (``seal_of``); constants and machine code enter by their checksums.
A signature may follow it (``rammer.compiled.signature``). A damaged file never runs. No pickle is used. Reading
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
from rammer.ir.constants.digest import digest_array
from rammer.ir.constants.mapped_files import Mapped, check_file, release_pages
from rammer.ir.graph import Value

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: The format that is written, bumped whenever the meaning of written data changes, and the formats that are read: those of this
#: and the previous minor version. Format 10 added variants, machine code, signatures and weights in the model's file.
FORMAT, READABLE = 10, (9, 10)
#: Alignment of constants in their member, and bytes that are read at a time.
ALIGNED, SHARE = 64, 4 << 20
#: A zip's local header: offset of the lengths of name and extra field, their format, and the bytes before the name.
LENGTHS_AT, LENGTHS, HEADER = 26, "<HH", 30


@dataclass(frozen=True)
class Artifact:
    """A compiled model with the facts to check and run it: the device, its fingerprint, the ``record`` of its compile options and
    the device's ``options``. ``key`` is its key in the cache, "" in a file of the user's; ``seal`` is that of a file that was
    read. ``hardware`` describes the unit that it was compiled for, and ``code_target`` the target of its machine code: "" in
    files of format 9 and in cached programs."""

    compiled: Compiled
    device: str
    fingerprint: str
    record: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    seal: str = field(default="", compare=False)
    hardware: str = field(default="", compare=False)
    code_target: str = field(default="", compare=False)


@dataclass(frozen=True)
class SeparateConstants:
    """A store of constants outside of an artifact: the cache of large constants of cached programs, or the model's own files
    ``sources``. Constants below ``least`` bytes are in the artifact, and so are those that ``kept`` refuses."""

    kept: ConstantCache
    sources: tuple[Mapped, ...]
    least: int = LARGE


@dataclass
class _Writer:
    """An artifact file in writing: its text members, and the place of each constant by content if a file has several variants."""

    archive: zipfile.ZipFile
    separate: SeparateConstants | None
    texts: dict[str, bytes] = field(default_factory=dict)
    places: dict[tuple[str, ...], list[Any]] | None = None


def save_artifact(path: Path, *artifacts: Artifact) -> None:
    """Write an artifact, or the variants of several targets, to a path in one step. Raises OSError if that fails."""
    write_whole(path, lambda file: write_artifact(file, *artifacts))


def write_artifact(
    file: BinaryIO,
    *artifacts: Artifact,
    separate: SeparateConstants | None = None,
    verify: Callable[[], object] = lambda: None,
    comment: bytes = b"",
) -> None:
    """Write a compiled model, or its variants for several targets, with all constants in it, or some of them ``separate``.
    ``verify`` is called when all constants have been read; its exception ends the writing. ``comment`` follows the seal."""
    with zipfile.ZipFile(file, "w") as archive:
        writer = _Writer(archive, separate, places={} if len(artifacts) > 1 else None)
        for number, artifact in enumerate(artifacts):
            _write_variant(writer, variant_prefix(number), artifact, len(artifacts))
        for name, text in writer.texts.items():
            archive.writestr(name, text)
        archive.comment = seal_of(writer.texts) + comment
    verify()


def variant_prefix(number: int) -> str:
    """Return the prefix of the members of a variant; those of the first one have none."""
    return f"v{number}/" if number else ""


def _write_variant(writer: _Writer, prefix: str, artifact: Artifact, variants: int) -> None:
    compiled = artifact.compiled
    head: dict[str, Any] = {
        "format": FORMAT,
        "variants": variants,
        "device": artifact.device,
        "fingerprint": artifact.fingerprint,
        "hardware": artifact.hardware,
        "code": artifact.code_target,
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
    needed, known = host_needs(compiled), compiled.graph.constants
    constants = {n: known[n] for n in known if n in needed}  # others may be computed on demand
    head["constants"] = _pack_arrays(writer, f"{prefix}constants", constants)
    for number, segment in enumerate(compiled.segments):
        head["segments"].append(_write_segment(writer, f"{prefix}{number}", segment))
    writer.texts[f"{prefix}head.json"] = json.dumps(head).encode()


def seal_of(texts: Mapping[str, bytes]) -> bytes:
    """Return the comment of a file, a digest of its text members (``is_text``). The head has the constants' checksums."""
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{len(name)} {name} {len(text)} ".encode("utf-8", "surrogatepass") + text)
    return f"rammer {digest.hexdigest()}".encode()


def is_text(member: str) -> bool:
    """Return True unless a member is a block of constants or machine code."""
    return not member.endswith("constants")


def _write_segment(writer: _Writer, prefix: str, segment: Segment) -> dict[str, Any]:
    if isinstance(segment, HostSegment):
        writer.texts[f"{prefix}.node"] = segment.node.to_bytes()
        return {"kind": "host", "why": segment.why}
    writer.texts[f"{prefix}.program"] = str(segment.program).encode()
    entry = {"kind": "program", "constants": _pack_arrays(writer, f"{prefix}.constants", segment.constants)}
    if (cases := segment.cases) is not None:
        entry["cases"] = [cases.length, cases.until]
        writer.texts |= {f"{prefix}.{k}.program": str(table).encode() for k, table in enumerate(cases.tables)}
    for number, code in enumerate(segment.code):
        index = _pack_arrays(writer, f"{prefix}.code{number}.constants", code.arrays)
        writer.texts[f"{prefix}.code{number}"] = json.dumps({"record": code.record, "arrays": index}).encode()
    return entry


def _port_record(value: Value) -> list[str]:
    return [value.name, str(value.port), value.external]


def _pack_arrays(writer: _Writer, member: str, arrays: Mapping[str, Array]) -> list[list[Any]]:
    """Write arrays one after another into a member. Returns name, type, shape, first byte and checksum of each, and the member if
    it is another one; or its row of ``ConstantCache`` if it is stored separately."""
    index, place = list[list[Any]](), 0
    with writer.archive.open(member, "w", force_zip64=True) as file:
        for name, array in arrays.items():
            check_file(array)
            about, separate = [name, array.dtype.name, list(array.shape)], writer.separate
            if separate is not None and array.nbytes >= separate.least and (row := separate.kept.put(array, separate.sources)):
                index.append([*about, row])
                continue
            key = (array.dtype.name, str(array.shape), digest_array(array)) if writer.places is not None else ()
            if writer.places and key in writer.places:
                index.append([*about, *writer.places[key]])
                continue
            data = np.ascontiguousarray(array)
            flat = data.reshape(-1).view(np.uint8).data
            index.append([*about, place, zlib.crc32(flat)])
            if writer.places is not None:
                writer.places[key] = [place, zlib.crc32(flat), member]
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
