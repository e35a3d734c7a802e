"""Reading of artifacts from any source: no part of a variant is used before all of it was verified.

Members are stored, not compressed, each once, and together no longer than the file. The seal shows damage. It proves nothing
about the author of the file, since any program can make a seal. Texts contain identifiers and numbers alone
(``rammer.ir.program_text``). Programs pass ``rammer.verify.verifier`` in full. Constants and host operators must fit them, and
the device must support the kernel families (``check_device``). A verified file can only compute, as any model, for an unlimited
time, on the memory that it requests. Machine code cannot be verified: it is read only if the caller trusts the file.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rammer.cache.cached_constants import ConstantCache, ModelWeights
from rammer.cache.parallel_io import in_threads, read_into
from rammer.compiled.artifact import HEADER, LENGTHS, LENGTHS_AT, READABLE, SHARE, Artifact, is_text, seal_of, variant_prefix
from rammer.compiled.segments import Cases, Compiled, HostSegment, ProgramSegment, Segment
from rammer.compiled.signature import unsigned_comment
from rammer.device.custom_operators import CustomOperators
from rammer.device.manifest import Array, Backend, MachineCode
from rammer.errors import BadInput, require_compiler
from rammer.ir.constants.recipes import Constants, Part, parts_of
from rammer.ir.extent import Ranged
from rammer.ir.formats import carrier_dtype
from rammer.ir.graph import Graph, Value
from rammer.ir.names import LIMIT, check_identifier, shorten_name
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.ir.types import SHORT, TensorType
from rammer.ir.untrusted_json import load_json
from rammer.verify.verifier import VerifyError, unknown_layers, verify

Plugins: TypeAlias = "Callable[[], CustomOperators]"

#: Maximum bytes of a head and of a program's text: a hundred times those of the largest observed.
LONGEST_HEAD, LONGEST_PROGRAM = 64 << 20, 256 << 20
#: Maximum number of variants.
MOST_VARIANTS = 64
#: Exceptions that a damaged file can raise: by the zip's checks and every parser of its members.
_DAMAGE = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)


@dataclass(frozen=True)
class Variant:
    """A variant of a compiled file: the device, description and target that it was compiled for, and the target of its machine
    code ("" without machine code). The fields are not verified, except their types."""

    device: str
    hardware: str
    target: str
    code_target: str
    options: Mapping[str, str]


#: Chooses a variant of a file.
Chooser: TypeAlias = "Callable[[Sequence[Variant]], int]"


def load_artifact(
    path: Path,
    plugins: Plugins = dict,
    kept: ConstantCache | None = None,
    choose: Chooser = lambda variants: 0,
    trusted: bool = False,
) -> Artifact:
    """Read a variant of an artifact and verify all of it. Raises BadInput if it is damaged, of another format or invalid.

    ``plugins`` returns the operators that plugins declare, and is called if an operator runs on the host. Large constants of
    cached programs are in the cache ``kept``. Other files have all of their constants, or name arrays in the model's files.
    Machine code is read only if the file is ``trusted``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _Members(archive, path, plugins, kept or ModelWeights(path.parent), trusted).artifact(choose)
    except VerifyError as problem:
        said = f"{problem.what} ({problem.where})" if problem.where else problem.what
        raise _make_refusal(path, said) from problem
    except _DAMAGE as problem:
        raise _make_refusal(path, str(problem).strip('"') or type(problem).__name__) from problem


def _make_refusal(path: Path | None, why: str) -> BadInput:
    return BadInput(f"{path} is not a compiled model: {why}", hint="compile the model again")


@contextmanager
def as_refusal(path: Path | None) -> Iterator[None]:
    """Convert errors of a device's generators on a verified program that no rammer compiler writes to BadInput."""
    try:
        yield
    except (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RecursionError) as problem:
        raise _make_refusal(path, f"the device cannot take its program: {problem}") from problem


def check_device(path: Path, compiled: Compiled, backend: Backend) -> None:
    """Raise BadInput if a program names a memory layer, a kernel family or a configuration that the device does not have."""

    def refusal(operator: ROperator, what: str) -> BadInput:
        why = f"operator {operator.name} {what} does not have"
        return BadInput(f"{path} does not fit {backend.hardware.name}: {why}", hint="compile the model again, for this device")

    families = backend.families
    for operator, edge in (found for p in compiled.tables for found in unknown_layers(p, backend.vdevice)):
        raise refusal(operator, f"holds a tile in memory layer {edge.layer}, which the device")
    if families is None:
        return
    for operator in (o for p in compiled.tables for o in p.operators):
        keys = families.get(operator.family)
        if keys is None:
            raise refusal(operator, f"is of family {operator.family}, which the device")
        for key, value in operator.config:
            if value not in keys.get(key, ()):
                raise refusal(operator, f"is configured with {key}={value}, which family {operator.family or 'generic'}")


class _Members:
    """The members of one artifact file."""

    def __init__(self, archive: zipfile.ZipFile, path: Path, plugins: Plugins, kept: ConstantCache, trusted: bool) -> None:
        self.archive, self.path, self.plugins, self.kept, self.trusted = archive, path, plugins, kept, trusted
        self.members: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = shorten_name(info.filename)
            if info.filename in self.members:
                raise ValueError(f"member {name!r} occurs twice")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise ValueError(f"member {name!r} is compressed or encrypted")
            self.members[info.filename] = info
        #: Bytes that constants may still take: they never take more memory than the file.
        self.room = path.stat().st_size
        if sum(info.file_size for info in self.members.values()) > self.room:
            raise ValueError("its members are longer than the file")
        self.blocks = {name: info for name, info in self.members.items() if not is_text(name)}
        self.texts = {name: self._read_text(info) for name, info in self.members.items() if is_text(name)}
        self._check_format()
        self.seal = unsigned_comment(archive.comment)
        if self.seal != seal_of(self.texts):
            raise ValueError("it is damaged: its content has another digest than when it was written")

    def _check_format(self) -> None:
        """Raise BadInput if the head is readable and names another format, which may have another seal."""
        with suppress(ValueError, TypeError):
            head = load_json(self.texts.get("head.json", b"{}"))
            if isinstance(head, dict) and head.get("format", READABLE[0]) not in READABLE:
                found, known = shorten_name(str(head["format"])), " and ".join(map(str, READABLE))
                raise BadInput(f"{self.path} has format {found}, this rammer reads {known}", hint="compile the model again")

    def _read_text(self, info: zipfile.ZipInfo) -> bytes:
        longest = LONGEST_HEAD if info.filename == "head.json" else LONGEST_PROGRAM
        if info.file_size > longest:
            raise ValueError(f"member {shorten_name(info.filename)!r} is longer than {longest} bytes")
        return self.archive.read(info)

    def read(self, name: str) -> bytes:
        """Return a whole member, which is read once."""
        del self.members[name]
        return self.texts.pop(name)

    def artifact(self, choose: Chooser) -> Artifact:
        """Return the chosen variant. The members of others are not read."""
        heads = [load_json(self.read("head.json"))]
        count = heads[0].get("variants", 1)
        if type(count) is not int or not 1 <= count <= MOST_VARIANTS:
            raise ValueError("the number of variants is invalid")
        heads += [load_json(self.read(f"{variant_prefix(n)}head.json")) for n in range(1, count)]
        number = choose([_make_variant(head) for head in heads]) if count > 1 else 0
        prefixes = tuple(variant_prefix(n) for n in range(1, count))
        own = variant_prefix(number)
        for name in [*self.members]:
            if not name.startswith(own) or (not own and name.startswith(prefixes)):
                self.members.pop(name)
                self.texts.pop(name, None)
        return self.variant(own, heads[number])

    def variant(self, prefix: str, head: Mapping[str, Any]) -> Artifact:
        """Return the variant with these members."""
        about = _make_variant(head)
        segments = tuple(self.segment(f"{prefix}{i}", s, about.code_target) for i, s in enumerate(head["segments"]))
        constants = self.constants(f"{prefix}constants", head["constants"])
        inputs, outputs = (tuple(map(_make_value, head[k])) for k in ("inputs", "outputs"))
        types = {v.name: v.type for v in (*inputs, *outputs)}
        graph = Graph(check_identifier("the model", head["name"]), inputs, outputs, (), types, constants)
        ranks = {v.name: len(v.type.shape) for v in (*inputs, *outputs)}
        ranged = Ranged.restored(head["ranged"], ranks) if "ranged" in head else None
        if ranged is not None:
            _check_lengths(ranged, (*inputs, *outputs))
        wide = tuple(map(_check_text, head.get("float32", ())))
        types_read = {_check_text(name): _check_printable(op) for name, op in head.get("types", {}).items()}
        compiled = Compiled(graph, segments, ranged=ranged, float32=wide, read_types=types_read)
        if self.members:
            raise ValueError(f"member {shorten_name(next(iter(self.members)))!r} is not used")
        _check_flow(compiled)
        record = {_check_text(k): _check_text(v) for k, v in head["record"].items()}
        fingerprint, key = (_check_text(head[k]) for k in ("fingerprint", "key"))
        seal = self.seal.decode()  # compared above
        facts = (fingerprint, record, about.options, key, seal, about.hardware, about.code_target)
        return Artifact(compiled, about.device, *facts)

    def segment(self, prefix: str, entry: Mapping[str, Any], code_target: str) -> Segment:
        """Return a program, verified, or an operator for the host."""
        if entry["kind"] == "host":
            require_compiler(f"{self.path} has an operator on the host, which")
            from rammer.frontend.host.host_node import HostNode

            try:
                node = HostNode.from_bytes(self.read(f"{prefix}.node"), self.plugins())
            except BadInput as problem:
                raise ValueError(problem.what) from problem
            return HostSegment(node, _check_text(entry["why"]))
        with ThreadPoolExecutor(1) as aside:  # large constants are read and hashed outside Python's lock
            reading = aside.submit(self.constants, f"{prefix}.constants", entry["constants"])
            program = self.program(f"{prefix}.program")
        constants = reading.result()
        _check_constants(program, constants)
        cases = self.cases(prefix, entry["cases"], program, constants) if "cases" in entry else None
        tables = 1 + (len(cases.tables) if cases is not None else 0)
        code = tuple(self.code(f"{prefix}.code{n}", code_target) for n in range(tables)) if code_target else ()
        return ProgramSegment(program, constants, cases=cases, code=tuple(c for c in code if c is not None))

    def code(self, name: str, target: str) -> MachineCode | None:
        """Return machine code, or None if the file is not trusted: then its content does not matter."""
        if not self.trusted:
            self.read(name)
            del self.members[f"{name}.constants"]
            return None
        found = load_json(self.read(name))
        return MachineCode(target, found["record"], dict(self.constants(f"{name}.constants", found["arrays"], check_array_name)))

    def program(self, name: str) -> RProgram:
        """Return a table after verification."""
        program = RProgram.parse(self.read(name).decode())
        verify(program)
        return program

    def cases(self, prefix: str, entry: list[Any], program: RProgram, constants: Mapping[str, Array]) -> Cases:
        """Return the length variants of a program, each verified as the program is."""
        length, until = entry
        tables = tuple(self.program(f"{prefix}.{k}.program") for k in range(len(until)))
        if not all(type(n) is int for n in until) or sorted({*until}) != [*until]:
            raise ValueError("length variants have invalid lengths")
        if not any(p.tensor == length and program.types[length] == TensorType("int64", ()) for p in program.inputs):
            raise ValueError("length variants depend on a length that the program does not read")
        for table in tables:
            _check_constants(table, constants)
            ports = [(p, program.types[p.tensor], table.types[p.tensor]) for p in (*program.inputs, *program.outputs)]
            alike = (table.inputs, table.outputs) == (program.inputs, program.outputs) and all(a == b for _, a, b in ports)
            if not alike or table.repeat is not None or program.repeat is not None:
                raise ValueError("a length variant has other ports than its program")
        return Cases(length, tuple(until), tables)

    def constants(
        self, member: str, index: list[list[Any]], check_name: Callable[[str, str], object] = check_identifier
    ) -> Constants:
        """Return the arrays of a member, read-only. Derived constants are computed on demand. Several threads read and check
        them: through ``archive`` 0.4 GB need half a second."""
        info = self.members.pop(member)
        data = np.empty(info.file_size, np.uint8)
        begin, end, entries = _data_begin(self.path, info), 0, list[_Entry]()
        separate, shared = ([row for row in index if len(row) == n] for n in (4, 6))
        for row in (row for row in index if len(row) == 5):
            entries.append(self._entry(row, check_name))
            if entries[-1].place < end:
                raise ValueError(f"constant {entries[-1].name} has an invalid type, shape or offset")
            end = entries[-1].place + entries[-1].nbytes
        if end > info.file_size or len({row[0] for row in index}) < len(index):
            raise ValueError(f"member {member!r} does not hold each of its constants once")

        def read(share: list[_Entry]) -> dict[str, Array]:
            return {row.name: _read_constant(self.path, begin, data, row) for row in share}

        arrays = {name: array for part in in_threads(read, _group_entries(entries)) for name, array in part.items()}
        arrays |= {row[0]: self._shared_constant(row, check_name) for row in shared}
        for array in arrays.values():
            array.flags.writeable = False
        parts = {**arrays, **dict(zip((row[0] for row in separate), in_threads(self._separate_constant, separate), strict=True))}
        return Constants({row[0]: parts[row[0]] for row in index})

    def _entry(self, row: list[Any], check_name: Callable[[str, str], object]) -> _Entry:
        """Return a constant of an index."""
        name, dtype, shape, place, checksum = row
        check_name("a constant", name)
        if dtype not in SHORT or not all(type(n) is int and n >= 0 for n in (*shape, place)):
            raise ValueError(f"constant {name} has an invalid type, shape or offset")
        return _Entry(name, dtype, tuple(shape), place, checksum)

    def _shared_constant(self, row: list[Any], check_name: Callable[[str, str], object]) -> Array:
        """Return a constant that is in the member of another variant."""
        entry, info = self._entry(row[:5], check_name), self.blocks[row[5]]
        self.room -= entry.nbytes
        if entry.place + entry.nbytes > info.file_size or self.room < 0:
            raise ValueError(f"constant {entry.name} exceeds its member")
        data = np.empty(entry.nbytes, np.uint8)
        begin = _data_begin(self.path, info) + entry.place
        return _read_constant(self.path, begin, data, replace(entry, place=0))

    def _separate_constant(self, row: list[Any]) -> Part:
        """Return a constant that is stored in the cache."""
        name, dtype, shape, where = row
        check_identifier("a constant", name)
        if dtype not in SHORT or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"constant {name} has an invalid type, shape or offset")
        return self.kept.get(where, dtype, tuple(shape))


def _make_variant(head: Mapping[str, Any]) -> Variant:
    """Return the description of a variant; a file of format 9 has neither hardware nor machine code."""
    target = head["record"].get("target", "")
    device, hardware, code = map(_check_text, (head["device"], head.get("hardware", ""), head.get("code", "")))
    options = {_check_text(k): _check_text(v) for k, v in head["options"].items()}
    return Variant(device, hardware, _check_text(target), code, options)


def check_array_name(what: str, name: Any) -> None:
    """Raise TypeError unless the name of an array of machine code is a string."""
    _check_text(name)


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shorten_name(repr(value))} is not a string")
    return value


def _check_printable(value: Any) -> str:
    """Return a text that reports may print."""
    if not _check_text(value).isprintable() or len(value) > LIMIT:
        raise ValueError(f"{shorten_name(repr(value))} is not a printable name")
    return str(value)


def _make_value(port: list[Any]) -> Value:
    name, text, external = map(_check_text, port)
    kind = TensorType.parse(text)
    held = carrier_dtype(kind.dtype)
    return Value(
        check_identifier("a port", name), TensorType(held, kind.shape), external, kind.dtype if held != kind.dtype else ""
    )


def _data_begin(path: Path, info: zipfile.ZipInfo) -> int:
    """Return the offset of an uncompressed member's bytes."""
    head = bytearray(HEADER)
    read_into(path, info.header_offset, memoryview(head))
    name, extra = struct.unpack_from(LENGTHS, head, LENGTHS_AT)
    return int(info.header_offset + HEADER + name + extra)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A constant in the index of its member, with its offset (bytes) and the checksum of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int
    checksum: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def _group_entries(index: list[_Entry]) -> list[list[_Entry]]:
    """Group the rows of the index into reads of about ``SHARE`` bytes."""
    result, end = list[list[_Entry]](), 0
    for row in index:
        if not result or row.place >= end:
            result.append([])
            end = row.place + SHARE
        result[-1].append(row)
    return result


def _read_constant(path: Path, begin: int, data: NDArray[np.uint8], entry: _Entry) -> Array:
    """Read a constant of a member that begins at ``begin`` of the file into its part of ``data``."""
    flat = data[entry.place : entry.place + entry.nbytes]
    read_into(path, begin + entry.place, flat.data)
    if zlib.crc32(flat.data) != entry.checksum:
        raise zipfile.BadZipFile(f"constant {entry.name} is damaged")
    return flat.view(entry.dtype).reshape(entry.shape)


def _check_constants(program: RProgram, constants: Mapping[str, Array]) -> None:
    """Raise VerifyError unless every constant buffer has one value of its type that fills it. Other tensors in it are views."""
    empty = {b.name for b in program.buffers if b.kind == "constant"}
    for name, value in parts_of(constants).items():
        storage = program.storage.get(name)
        if storage is None or storage.buffer not in empty:
            raise VerifyError(f"constant {name} is not in the program, or its buffer already has a value", program.name)
        buffer = program.buffer[storage.buffer]
        empty.discard(buffer.name)
        if (str(value.dtype), value.shape, value.size) != (buffer.dtype, storage.shape, buffer.size) or not storage.row_major:
            wanted = f"{buffer.dtype}{list(storage.shape)} that fills a buffer of {buffer.size}"
            raise VerifyError(f"constant {name} is {value.dtype}{list(value.shape)}, not {wanted}", program.name)
    for name in empty:
        raise VerifyError(f"constant buffer {name} has no value", program.name)


def _check_lengths(ranged: Ranged, values: tuple[Value, ...]) -> None:
    """Raise ValueError unless ports have at least the shapes of the greatest lengths, and no extent is negative."""
    low, high = ({n: s[end] for n, s in ranged.spans.items()} for end in (0, 1))
    for v in (v for v in values if v.name not in ranged.lengths.values()):
        least, most = ranged.shape(v.name, low), ranged.shape(v.name, high)
        if any(not 0 <= min(a, b) <= max(a, b) <= n for a, b, n in zip(least, most, v.type.shape, strict=True)):
            raise ValueError(f"port {v.name} is too small for its lengths")


def _check_flow(compiled: Compiled) -> None:
    """Raise VerifyError unless every segment reads values that exist before it, with the same types, and all outputs exist."""
    graph = compiled.graph
    known = {v.name: v.type for v in graph.inputs}
    for ports in (graph.inputs, graph.outputs):
        if len({v.external or v.name for v in ports}) < len(ports):
            raise VerifyError("two inputs or two outputs of the model have the same name", graph.name)
    fixed = {n: TensorType(str(a.dtype), a.shape) for n, a in graph.constants.items()}
    for number, segment in enumerate(compiled.segments):
        where = f"segment {number}"
        if isinstance(segment, HostSegment):
            reads = {n: (known | fixed).get(n) for n in segment.node.inputs}
            made = dict(segment.node.types)
        else:
            types = segment.program.types
            wrong = next((p for p in segment.program.inputs if known.get(p.tensor) != types[p.tensor]), None)
            reads = {wrong.tensor: None} if wrong is not None else {}
            made = {p.tensor: types[p.tensor] for p in segment.program.outputs}
        for name, kind in reads.items():
            if kind is None:
                raise VerifyError(f"{name} is read, but is undefined or of another type", where)
        for name in made:
            if name in known or name in fixed:
                raise VerifyError(f"{name} is already defined", where)
        known |= made
    for value in graph.outputs:
        if (known | fixed).get(value.name) != value.type:
            raise VerifyError(f"output {value.name} is never computed, or of another type", graph.name)
