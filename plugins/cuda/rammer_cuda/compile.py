"""NVRTC compilation: source to cubin, without a GPU, with the resources that ptxas reports. Cubins are cached on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rammer.cache import Cache
from rammer.errors import DeviceFailure

from rammer_cuda.driver import check_result, import_nvrtc

#: Without -use_fast_math, float32 keeps IEEE division, square root and denormals. FMA contraction stays on, as in every peer.
OPTIONS = ("--std=c++17", "--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_CACHE = Cache("cuda-cubins")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """The ptxas report of one kernel: registers a thread, static shared bytes, bytes spilled a thread."""

    registers: int
    shared: int
    spills: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code with the ptxas report by kernel name."""

    code: bytes
    resources: dict[str, KernelResources]


def compile_cubin(source: str, arch: str) -> Cubin:
    """Return machine code of ``source`` for ``arch`` (``sm_90a``). Raise DeviceFailure with the compiler's first errors."""
    key = _CACHE.key(source, arch, nvrtc_version(), *OPTIONS)
    known = _CACHE.get(key, _decode_cubin)
    if known is not None:
        return known
    code, log_text = _compile_source(source, arch)
    log_bytes = log_text.encode()
    _CACHE.put(key, b"%d\n%b%b" % (len(log_bytes), log_bytes, code))
    return Cubin(code, parse_ptxas(log_text))


def compile_all(sources: Mapping[str, str], arch: str) -> dict[str, Cubin]:
    """Return machine code by key, compiled by as many threads as there are cores (NVRTC runs outside Python's lock)."""
    with ThreadPoolExecutor(max_workers=max(1, min(len(sources), os.cpu_count() or 1))) as pool:
        return dict(zip(sources, pool.map(lambda text: compile_cubin(text, arch), sources.values()), strict=True))


def nvrtc_version() -> str:
    """Return NVRTC's version, for example ``13.0``."""
    major, minor = check_result(import_nvrtc().nvrtcVersion(), "querying NVRTC's version")
    return f"{major}.{minor}"


def _compile_source(source: str, arch: str) -> tuple[bytes, str]:
    api = import_nvrtc()
    program = check_result(api.nvrtcCreateProgram(source.encode(), b"rammer.cu", 0, [], []), "creating a program")
    # Results from NVRTC's internal cache lack the ptxas report; the option is as old as that cache.
    fresh = ("--no-cache",) if tuple(map(int, nvrtc_version().split("."))) >= (12, 9) else ()
    flags = [f.encode() for f in (*OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v", *fresh)]
    try:
        status = api.nvrtcCompileProgram(program, len(flags), flags)[0]
        log = b" " * check_result(api.nvrtcGetProgramLogSize(program), "reading the log's size")
        check_result(api.nvrtcGetProgramLog(program, log), "reading the log")
        text = log.decode(errors="replace").rstrip("\0 ")
        if int(status) != 0:
            errors = [line for line in text.splitlines() if "error" in line] or text.splitlines()
            raise DeviceFailure("NVRTC rejected a kernel:\n" + "\n".join(errors[:5]), where=f"target {arch}")
        code = b" " * check_result(api.nvrtcGetCUBINSize(program), "reading the code's size")
        check_result(api.nvrtcGetCUBIN(program, code), "reading the code")
        return code, text
    finally:
        api.nvrtcDestroyProgram(program)


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SPILL = re.compile(r"(\d+) bytes spill stores")


def parse_ptxas(log: str) -> dict[str, KernelResources]:
    """Parse resources by kernel from the text of ``ptxas -v``."""
    result: dict[str, KernelResources] = {}
    for part in re.split(r"(?=Compiling entry function)", log):
        entry = _ENTRY.search(part)
        if entry:
            found = [int(m.group(1)) if (m := p.search(part)) else 0 for p in (_USED, _SHARED, _SPILL)]
            result[entry.group(1)] = KernelResources(*found)
    return result


def _decode_cubin(data: bytes) -> Cubin:
    """Return the cubin in a cache entry: the length of the log, the log and the code. Raises ValueError if it is malformed."""
    length, _, rest = data.partition(b"\n")
    return Cubin(rest[int(length) :], parse_ptxas(rest[: int(length)].decode()))
