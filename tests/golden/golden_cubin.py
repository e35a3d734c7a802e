"""Digests of machine code: instructions and constants by section, without names, notes and debugging data.

A cubin is an ELF file. Its ``.text`` sections are the instructions of kernels and of functions that are not inlined.
``.nv.constant`` is constant memory (and room for the parameters), and ``.nv.global`` holds initial values. Sections are sorted by
content, since their names, and so their order, are hashes of the kernels' texts. Symbols, notes (the compiler's version and
options) and debugging data are left out. Relocations count by offset and kind.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from golden_text import digest

from rammer_cuda.compile import compile_cubin, nvrtc_version

#: Section types: initialised bytes (code and constants), and reserved bytes without content (shared memory).
_PROGBITS, _NOBITS = 1, 8
_RELOCATIONS = {4: "<QQq", 9: "<QQ"}
_BYTES = (".text.", ".nv.constant", ".nv.global")
_ROOM = (".nv.shared.", ".nv.local.")


def sections(code: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """Yield (name, type, bytes, size) of every section of a 64-bit little-endian ELF file."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    table, each, count, names = struct.unpack_from("<Q", code, 40)[0], *struct.unpack_from("<HHH", code, 58)
    heads = [struct.unpack_from("<IIQQQQ", code, table + each * i) for i in range(count)]
    start = heads[names][4]
    for name, kind, _, _, offset, size in heads:
        at = start + name
        yield code[at : code.index(b"\0", at)].decode(), kind, b"" if kind == _NOBITS else code[offset : offset + size], size


def code_digest(code: bytes) -> str:
    """Return the hash of the code that the GPU runs."""
    parts = []
    for name, kind, data, size in sections(code):
        if kind == _PROGBITS and name.startswith(_BYTES):
            # The name of a constant bank has the bank's number, followed by a kernel's name.
            parts.append((re.match(r"\.\w+(\.constant\d+)?", name)[0], data.hex()))  # type: ignore[index]
        elif kind == _NOBITS and name.startswith(_ROOM) and size:
            parts.append((name.split(".")[2], str(size)))
        elif kind in _RELOCATIONS and ".text." in name and data:
            found = struct.iter_unpack(_RELOCATIONS[kind], data)
            parts.append(("relocations", repr(sorted((r[0], r[1] & 0xFFFFFFFF, *r[2:]) for r in found))))
    if not any(name == ".text" for name, _ in parts):
        raise ValueError("no code")
    return digest(repr(sorted(parts)))


def compiler() -> str:
    """Return the exact version of NVRTC, which determines the code: ``V13.0.88``."""
    code = compile_cubin('extern "C" __global__ void k() {}', "sm_80").code
    found = re.search(rb"V\d+\.\d+\.\d+", code)
    return found[0].decode() if found else nvrtc_version()
