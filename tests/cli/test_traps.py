"""Commands in a directory full of traps: neither a command nor its child processes execute any file of it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rammer.cli.group import COMMANDS
from rammer.device.loader import GROUP
from rammer_testing.host_c import COMPILER
from rammer_testing.small_models import SmallModel

RAMMER = Path(sys.executable).with_name("rammer")
MODEL = SmallModel("tiny", "(float[2,8] x, float[8,8] w) => (float[2,8] y) { p = MatMul(x, w)\n y = Relu(p) }", below=1)
#: Programs that compilers, drivers and packages look up in PATH.
PROGRAMS = (
    *("gcc", "g++", "cc", "c++", "as", "ld", "ld.lld", "ld.gold", "clang", "ldconfig", "objdump", "lscpu", "uname", "git"),
    *(f"{name}-{n}" for name in ("clang", "lld", "ld.lld") for n in range(15, 22)),
    *("nvcc", "nvidia-smi", "rocminfo", "clinfo", "pip", "python", "python3", "env", "sh", "mpirun"),
)
#: Modules that a Python child imports before anything else.
EARLY = ("sitecustomize", "usercustomize", "encodings", "site", "runpy", "multiprocessing", "signal", "pip", "rammer_toy")
#: Arguments for every command that make it do its work. ``tune`` starts a measuring process.
COMMAND_LINES = {
    "devices": ["devices"],
    "tune": ["run", "tiny.onnx", "--device", "rocm", "--tune", "quick"],
    "run": ["run", "tiny.onnx", "--device", "rocm", "--policy", "auto"],
    "compare": ["compare", "tiny.onnx", "--device", "rocm"],
    "inspect": ["inspect", "tiny.onnx", "--device", "rocm", "--target", "gfx906", "--stage", "source"],
    "report": ["report", "tiny.onnx", "--device", "rocm", "-o", "page.html"],
    "bench": ["bench", "tiny.onnx", "--device", "rocm", "--runs", "1"],
    "compile": ["compile", "tiny.onnx", "--device", "rocm", "-o", "tiny.rammer"],
    "onnx-tests": ["onnx-tests", "--device", "ipu_sim", "-k", "^test_relu$", "--processes", "2"],
    "cache": ["cache", "info"],
    "plugins": ["plugins", "new", "extra"],
}


def trap_source(sprung: Path) -> str:
    return f"import sys\nopen({str(sprung)!r}, 'a').write(__name__ + ' by ' + ' '.join(sys.argv) + chr(10))\n"


def write_trap_modules(folder: Path, sprung: Path) -> None:
    """Shadow every module that this process has imported, and register trap modules as plugins of every kind."""
    names = {name.partition(".")[0] for name in sys.modules} - set(sys.builtin_module_names) - {"__main__"}
    for name in (*names, *EARLY, "trap_plugin"):
        if name.isidentifier():
            (folder / f"{name}.py").write_text(trap_source(sprung))
    (folder / "trap.pth").write_text(f"import sys; open({str(sprung)!r}, 'a').write('pth')\n")
    for package in ("trap", "onnx", "numpy", "intel-opencl-rt", "rammer-core"):
        information = folder / f"{package.replace('-', '_')}-99.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99\n")
        (information / "RECORD").write_text("libintelocl.so,,\nlibtbb.so.12,,\n")
        groups = {GROUP, *(g for g in importlib.metadata.entry_points().groups if g.startswith("rammer"))}
        text = "".join(f"[{group}]\ntrap = trap_plugin:DEVICE\n" for group in sorted(groups))
        (information / "entry_points.txt").write_text(text)


def write_trap_programs(folder: Path, sprung: Path) -> None:
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> '{sprung}'\nexit 1\n")
        (folder / name).chmod(0o755)


def write_trap_libraries(folder: Path, sprung: Path, names: Sequence[str]) -> None:
    """Write a shared library under each of ``names`` whose constructor leaves a note."""
    if COMPILER is None:
        return
    source = folder / "trap.c"
    text = f'Dl_info i; dladdr(trap, &i); FILE *f = fopen("{sprung}", "a"); fprintf(f, "%s\\n", i.dli_fname); fclose(f);'
    include = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n"
    source.write_text(f"{include}__attribute__((constructor)) static void trap(void) {{ {text} }}\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libtrap.so", source, "-ldl"], check=True)
    for name in names:
        if not (folder / name).exists():
            shutil.copyfile(folder / "libtrap.so", folder / name)


def searched_libraries(words: Sequence[object], folder: Path) -> set[str]:
    """Return the libraries that the dynamic loader searches by bare name while a command runs."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env={**os.environ, "LD_DEBUG": "libs"},
        capture_output=True,
        text=True,
        errors="replace",
    )
    return set(re.findall(r"find library=(\S+)", done.stderr))


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Yield a directory full of traps with a model in it, and the file that a sprung trap writes."""
    folder, sprung = tmp_path_factory.mktemp("trapped"), tmp_path_factory.mktemp("sprung") / "sprung"
    (folder / "tiny.onnx").write_bytes(MODEL.build(np.random.default_rng(0)).SerializeToString())
    # Libraries of the interpreter itself are loaded before any of our code runs.
    names = searched_libraries([RAMMER, "devices"], folder) - searched_libraries([sys.executable, "-I", "-c", ""], folder)
    write_trap_modules(folder, sprung)
    write_trap_programs(folder, sprung)
    write_trap_libraries(folder, sprung, sorted({*names, "libcuda.so.1", "libOpenCL.so.1", "libintelocl.so", "libtbb.so.12"}))
    yield folder, sprung


def run_in_traps(trapped: tuple[Path, Path], words: Sequence[object], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the directory of traps; fail if a trap was sprung."""
    folder, sprung = trapped
    found = os.environ
    environment = {**found, "PATH": f".:{found.get('PATH', '')}:", "LD_LIBRARY_PATH": f":.:{found.get('LD_LIBRARY_PATH', '')}"}
    # A process that exceeds its time limit may have been hung by a trap.
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment | variables, capture_output=True, text=True, timeout=300
    )
    assert not sprung.exists(), f"{words}: {sprung.read_text()}{sprung.unlink()}{done.stderr}"
    return done


def test_every_command_has_a_line() -> None:
    """Check that a new command is added to the trap tests, too."""
    assert {words[0] for words in COMMAND_LINES.values()} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMAND_LINES)
def test_command_executes_nothing_of_its_directory(name: str, trapped: tuple[Path, Path], tmp_path: Path) -> None:
    """Check that relative entries of the search paths are ignored with a warning."""
    done = run_in_traps(trapped, [RAMMER, *COMMAND_LINES[name]], RAMMER_CACHE=str(tmp_path / "cache"))
    assert "relative search paths are ignored: PATH=., LD_LIBRARY_PATH=." in done.stderr
    assert "Traceback" not in done.stderr
    if name not in ("bench", "inspect"):  # peers and compilers may be missing
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_relative_python_path_is_ignored(tmp_path: Path) -> None:
    """Check that neither the command nor its child imports from a relative entry of PYTHONPATH. Absolute entries remain."""
    (tmp_path / "tiny.onnx").write_bytes(MODEL.build(np.random.default_rng(0)).SerializeToString())
    own, sprung = tmp_path / "own", tmp_path / "sprung"
    (own / "kept-1.dist-info").mkdir(parents=True)
    (own / "kept-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kept\nVersion: 1\n")
    (own / "kept-1.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nkept = kept_plugin:DEVICE\n")
    for name in ("numpy", "onnx", "pyopencl", "sqlite3"):  # modules that are not imported before the command starts
        (tmp_path / f"{name}.py").write_text(trap_source(sprung))
    environment = {**os.environ, "PYTHONPATH": f":.:{own}", "RAMMER_CACHE": str(tmp_path / "cache")}
    words = [RAMMER, "run", "tiny.onnx", "--device", "rocm", "--tune", "quick"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not sprung.exists(), done.stderr
    listed = subprocess.run([RAMMER, "devices"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "kept" in listed.stdout and not sprung.exists(), listed.stdout
