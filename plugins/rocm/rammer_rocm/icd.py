"""Setup of an OpenCL runtime before pyopencl is imported.

The loader in the pyopencl wheel reads one folder of ``*.icd`` files, each naming a driver library. A machine without a
system-wide driver can still run OpenCL on its CPU through the PyPI packages ``intel-opencl-rt`` and ``intel-cmplr-lib-rt``.
However, their ``.icd`` file names a path that does not exist. The libraries also find each other only if pip installs both
packages into one folder. :func:`prepare_icd` therefore builds a private folder with two kinds of ``.icd`` files. The system's
files keep AMD GPUs and PoCL visible; one more file names the installed Intel library. The function then loads the library's
dependencies and points ``OCL_ICD_VENDORS`` at the folder.

A missing runtime raises no error: the report contains the drivers and the reasons.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.metadata
import mmap
import os
import shutil
import site
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from rammer.cache import Cache, make_private, warn_of_cached, why_untrusted, write_cached

VENDORS_VARIABLE: Final = "OCL_ICD_VENDORS"
SYSTEM_VENDORS: Final = Path("/etc/OpenCL/vendors")
EMBEDDED_ICD: Final = "rammer-intel.icd"
RUNTIME_PACKAGE: Final = "intel-opencl-rt"
SUPPORT_PACKAGE: Final = "intel-cmplr-lib-rt"
_RUNTIME_LIBRARY: Final = "libintelocl.so"
# libintlc.so itself is a linker script; only the versioned file can be loaded. It is first because the other three resolve
# symbols in it.
_PRELOADED: Final = ("libintlc.so.5", "libirng.so", "libimf.so", "libsvml.so")
#: The runtime's search path has empty entries, which denote the current directory. Its system dependencies are therefore loaded
#: first, through this process's search path. The loader does not search for a library that is already loaded.
_SYSTEM: Final = ("libdl.so.2", "librt.so.1", "libm.so.6", "libz.so.1", "libgcc_s.so.1", "libpthread.so.0", "libstdc++.so.6")
#: The runtime's threading library, loaded by path. If the process has another copy of that name (OpenVINO ships an older one),
#: the loader would use that copy, which lacks functions. Without the package, the system's library is used.
_THREADS_PACKAGE: Final = "tbb"
_THREADS_LIBRARY: Final = "libtbb.so.12"
#: The runtime's variables start with this prefix; they change the code that it generates.
CONFIG_PREFIX: Final = "CL_CONFIG_"
_LLVM_OPTIONS: Final = f"{CONFIG_PREFIX}LLVM_OPTIONS"
_TARGET: Final = f"{CONFIG_PREFIX}CPU_TARGET_ARCH"
#: Switches off an LLVM pass that the compiler of 2026.2 applies wrongly with AVX-512: where an integer minimum or maximum meets a
#: bitwise NOT, the constant of all ones is encoded as a write to a mask register. The kernel computes wrong numbers or executes
#: an illegal instruction.
_SAFE_OPTION: Final = "disable-x86-scalar-to-vector"
#: Entries: folders of ``.icd`` files, by their content.
_CACHE: Final = Cache("rocm-icd")


@dataclass(frozen=True)
class IcdReport:
    """The result of :func:`prepare_icd`.

    ``vendors_dir`` is the folder that the OpenCL loader reads. ``system_icds`` are the file names of the system's drivers in it.
    ``embedded`` is the path of the pip-installed driver library, or None with the reason in ``why``."""

    vendors_dir: str
    system_icds: tuple[str, ...]
    embedded: str | None
    why: str


_lock = threading.Lock()
_report: IcdReport | None = None


def prepare_icd() -> IcdReport:
    """Point the OpenCL loader at every runtime of this machine; call it before ``import pyopencl``. Later calls return the first
    report and change nothing. An ``OCL_ICD_VENDORS`` value that the user sets is respected."""
    global _report
    with _lock:
        if _report is None:
            _report = _prepare_vendors()
        return _report


def _prepare_vendors() -> IcdReport:
    chosen = os.environ.get(VENDORS_VARIABLE)
    # A child process inherits its parent's folder, which may have been removed. It must load the support libraries itself.
    if chosen and Path(chosen).parts[-3:-2] != (_CACHE.kind,) and not (Path(chosen) / EMBEDDED_ICD).is_file():
        return IcdReport(chosen, _icd_names(Path(chosen)), None, f"{VENDORS_VARIABLE} was set by the user")
    system = _system_icds()
    names = tuple(sorted(system))
    library, why = _load_runtime()
    if library is None:
        if chosen:
            # The inherited folder names a library that this process cannot load; the default is better.
            del os.environ[VENDORS_VARIABLE]
        return IcdReport(str(SYSTEM_VENDORS), names, None, why)
    if "pyopencl" in sys.modules:
        why += "; pyopencl was imported before, so its loader may not look again"
    folder = _vendors_folder({**system, EMBEDDED_ICD: f"{library}\n".encode()})
    os.environ[VENDORS_VARIABLE] = str(folder)
    return IcdReport(str(folder), names, str(library), why)


def _icd_names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in folder.glob("*.icd")))
    except OSError:
        return ()


def _system_icds() -> dict[str, bytes]:
    """Return the system's readable ``.icd`` files by name. Unreadable files are skipped, as the loader does."""
    found: dict[str, bytes] = {}
    for name in _icd_names(SYSTEM_VENDORS):
        try:
            found[name] = (SYSTEM_VENDORS / name).read_bytes()
        except OSError:
            continue
    return found


def _load_runtime() -> tuple[Path | None, str]:
    """Load the Intel CPU driver's support libraries; return the driver's path, or None, and a status sentence."""
    if not sys.platform.startswith("linux"):
        return None, f"the embedded runtime is set up on Linux only, this is {sys.platform}"
    library = installed_file(RUNTIME_PACKAGE, _RUNTIME_LIBRARY)
    if library is None:
        return None, f"{RUNTIME_PACKAGE} is not installed (pip install {RUNTIME_PACKAGE} {SUPPORT_PACKAGE})"
    for name in _SYSTEM:
        with contextlib.suppress(OSError):  # the system may provide it in another library
            ctypes.CDLL(name)
    threads = installed_file(_THREADS_PACKAGE, _THREADS_LIBRARY)
    for name in (*_PRELOADED, *([_THREADS_LIBRARY] if threads else [])):
        support = threads if name == _THREADS_LIBRARY else installed_file(SUPPORT_PACKAGE, name)
        if support is None:
            return None, f"{name} is missing (pip install {SUPPORT_PACKAGE})"
        try:
            # RTLD_GLOBAL: the loader opens the driver later, which must find these symbols.
            ctypes.CDLL(str(support), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            return None, f"{support} cannot be loaded: {error}"
    _disable_wrong_pass(library)
    version = importlib.metadata.version(RUNTIME_PACKAGE) if _has_package(RUNTIME_PACKAGE) else "of unknown version"
    return library, f"{RUNTIME_PACKAGE} {version}"


def _disable_wrong_pass(library: Path) -> None:
    """Add ``_SAFE_OPTION`` to the compiler's options on CPUs with AVX-512. An unknown option would end the process, so the
    library must contain its name."""
    options = os.environ.get(_LLVM_OPTIONS, "")
    with Path("/proc/cpuinfo").open(errors="replace") as cores:
        affected = _TARGET in os.environ or "avx512" in cores.read(8192)  # the flags of the first core
    if not affected or _SAFE_OPTION in options:
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(_SAFE_OPTION.encode()) >= 0:
            os.environ[_LLVM_OPTIONS] = f"{options} -{_SAFE_OPTION}".strip()


def _has_package(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def installed_file(package: str, name: str) -> Path | None:
    """Return the path of file ``name`` of the pip package ``package``; the prefixes' lib folders are searched as well."""
    candidates: list[Path] = []
    if _has_package(package):
        distribution = importlib.metadata.distribution(package)
        candidates += [Path(str(file.locate())) for file in distribution.files or () if file.name == name]
    roots = dict.fromkeys((sys.prefix, sys.base_prefix, site.getuserbase()))
    candidates += [Path(root) / "lib" / name for root in roots]
    # normpath, not resolve: the file may be a link whose target's folder lacks the sibling libraries.
    return next((Path(os.path.normpath(path)) for path in candidates if path.is_file()), None)


def _vendors_folder(files: dict[str, bytes]) -> Path:
    """Return a folder with exactly ``files`` in the user's cache, or a temporary folder if the cache is not writable."""
    key = _CACHE.key(*(part for name, content in sorted(files.items()) for part in (name, content.hex())))
    try:
        target = _CACHE.path(key).absolute()
        make_private(target.parent)
        return _publish_files(files, target.parent, target)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="rammer-icd-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _write_all(files, folder)
        return folder


def _publish_files(files: dict[str, bytes], parent: Path, target: Path) -> Path:
    """Write ``files`` next to ``target`` and rename, so that other processes never see a half-written folder."""
    if _has_same_files(target, files):
        return target
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    new = staging / "new"
    try:
        new.mkdir()
        _write_all(files, new)
        try:
            new.rename(target)
        except OSError:
            # If another process published the same content meanwhile, it may be reading it, so its folder stays. A modified
            # folder is replaced, because its name is a hash of the content.
            if not _has_same_files(target, files):
                warn_of_cached(target, "its content was changed")
                target.rename(staging / "replaced")
                new.rename(target)
    except OSError:
        if not _has_same_files(target, files):
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _write_all(files: dict[str, bytes], folder: Path) -> None:
    for name, content in files.items():
        write_cached(folder / name, partial(_write_content, content))


def _write_content(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _has_same_files(folder: Path, files: dict[str, bytes]) -> bool:
    try:
        return set(_icd_names(folder)) == set(files) and all(
            not why_untrusted(folder / name) and (folder / name).read_bytes() == content for name, content in files.items()
        )
    except OSError:
        return False
