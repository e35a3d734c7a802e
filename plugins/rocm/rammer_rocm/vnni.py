"""``RM_DOT``: four unsigned by four signed bytes in each lane, summed into 32 bits.

x86 has one instruction for it (``vpdpbusd``, of AVX512-VNNI and AVX-VNNI), which OpenCL C cannot name: ``dot_acc_sat`` compiles
to shifts and multiplications. Runtimes based on clang pass a function with an intrinsic's name on to LLVM, which recognises it. A
runtime that does not would crash the process. Support is therefore tested in a subprocess, once for every driver and processor.
Products of all 64 bytes of a vector then take a cycle; in plain OpenCL C they take six or more.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any, Final

from rammer.cache import Cache
from rammer.child_processes import python_command, run_program

from rammer_rocm.opencl_runtime import import_opencl, units

#: Supported numbers of 32-bit lanes per vector.
LANES: Final = (4, 8, 16)
#: The processor's flag for either extension, in /proc/cpuinfo.
_FLAGS: Final = re.compile(r"^flags\s*:.*\b(avx512_vnni|avx_vnni)\b", re.MULTILINE)
#: Seconds for the trial: starting Python and building a kernel.
_PATIENCE: Final = 60.0
#: Cached results of a trial.
_ANSWERS: Final = (b"works", b"does not")
_CACHE: Final = Cache("rocm-vnni")
#: The exit code of a trial with wrong products or a failed build; and the signals if the instruction or the compiler crashes. Any
#: other exit says nothing about the instruction.
REFUSED: Final = 9
_FATAL: Final = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGTRAP)
#: Bytes that a trial multiplies: any values that distinguish signs and positions.
_TRIAL: Final = ((255, 1, 128, 7), (-128, 127, -1, 3))

# Since LLVM 22 the operands are bytes.
_NATIVE = """
#if __clang_major__ >= 22
typedef char rm_quads{w} __attribute__((ext_vector_type({bytes})));
#else
typedef int{w} rm_quads{w};
#endif
int{w} rm_dpbusd{w}(int{w}, rm_quads{w}, rm_quads{w}) __asm("llvm.x86.avx512.vpdpbusd.{bits}");
#define RM_DOT{w}(s, u, v) rm_dpbusd{w}(s, __builtin_astype(u, rm_quads{w}), __builtin_astype(v, rm_quads{w}))
"""
_PLAIN = """
inline static int{w} rm_dot{w}(int{w} s, int{w} u, int{w} v) {{
  return s + ((u & 255) * ((v << 24) >> 24) + ((u >> 16) & 255) * ((v << 8) >> 24))
      + (((u >> 8) & 255) * ((v << 16) >> 24) + ((u >> 24) & 255) * (v >> 24));
}}
#define RM_DOT{w}(s, u, v) rm_dot{w}(s, u, v)
"""


def dot_text(lanes: int, native: bool) -> str:
    """Return the definition of ``RM_DOT`` for ``lanes`` lanes: sum ``s``, unsigned bytes ``u`` and signed bytes ``v``."""
    return (_NATIVE if native else _PLAIN).format(w=lanes, bytes=4 * lanes, bits=32 * lanes)


def has_dots(device: Any, lanes: int) -> bool:
    """Return True if an OpenCL CPU supports the instruction."""
    if lanes not in LANES:
        return False
    try:
        if not _FLAGS.search(Path("/proc/cpuinfo").read_text()):
            return False
    except OSError:
        return False
    name = [device.name.strip(), device.platform.name, device.platform.version, device.driver_version, str(lanes), str(_TRIAL)]
    key = _CACHE.key(*name, _NATIVE)
    known = _CACHE.get(key, _ANSWERS.index)
    if known is not None:
        return not known
    found = _try_instruction(device, lanes)
    if found is not None:  # otherwise the next process tries again
        _CACHE.put(key, _ANSWERS[not found])
    return bool(found)


def _try_instruction(device: Any, lanes: int) -> bool | None:
    """Return the result of a trial process, or None if it did not finish for another reason. True: the products are right. False:
    they are wrong, or the instruction or the compiler crashed."""
    import subprocess  # slow to import, and the result is usually cached

    command = python_command("rammer_rocm.vnni", device.platform.name, device.name, lanes)
    try:
        code = run_program(command, timeout=_PATIENCE).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return True if code == 0 else False if code == REFUSED or -code in _FATAL else None


def run_trial(platform: str, name: str, lanes: int) -> bool:
    """Return True if the instruction multiplies correctly in this process, which may crash."""
    import numpy as np

    cl = import_opencl()
    device = next(d for d in units() if d.platform.name == platform and d.name == name)
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    text = dot_text(lanes, native=True) + (
        "__kernel void f(__global int *p) {"
        f" vstore{lanes}(RM_DOT{lanes}(vload{lanes}(0, p), vload{lanes}(1, p), vload{lanes}(2, p)), 0, p); }}"
    )
    first, second = (np.array(row).astype(np.uint8) for row in _TRIAL)
    words = np.concatenate([np.arange(lanes, dtype=np.int32), *(np.tile(row.view(np.int32), lanes) for row in (first, second))])
    buffer = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=words)
    try:
        program = cl.Program(context, text).build(cache_dir=False)
    except cl.Error:
        return False
    program.f(queue, (1,), (1,), buffer)
    cl.enqueue_copy(queue, words, buffer)
    wanted = int(np.dot(*(np.array(row, np.int64) for row in _TRIAL)))
    return bool((words[:lanes] == np.arange(lanes) + wanted).all())


if __name__ == "__main__":
    sys.exit(0 if run_trial(sys.argv[1], sys.argv[2], int(sys.argv[3])) else REFUSED)
