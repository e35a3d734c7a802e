"""Wheels of all distributions in fresh environments outside the checkout: the runtime alone, the core, then everything else. No
network is used: wheels are built here, and this environment's other packages are linked into the new one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.frontend.read.reader import read_model
from rammer.reference.outputs import run_onnxruntime
from rammer.version import __version__
from rammer_testing.conformance import CHECKS
from rammer_testing.models import fetch
from rammer_testing.small_models import MODELS

ROOT = Path(__file__).parents[1]
PLUGINS = {"cuda": "rammer_cuda", "rocm": "rammer_rocm", "ipu_sim": "rammer_ipu_sim"}
#: The distributions of the import package ``rammer``.
CORE = ("rammer_runtime", "rammer_core")
#: Distribution -> source folder.
FOLDERS = {
    "rammer_runtime": ROOT / "core",
    "rammer_core": ROOT,
    **{package: ROOT / "plugins" / name for name, package in PLUGINS.items()},
    "rammer_testing": ROOT / "tests" / "kit",
    "rammer_bench": ROOT / "benchmarks",
    "rammer_toy": ROOT / "core" / "rammer" / "plugin-template",
}


#: The packages that rammer-runtime and rammer-rocm require, and those that they require.
RUNTIME_PACKAGES = (
    *("numpy", "platformdirs", "pluggy", "pyopencl", "pytools", "siphash24", "typing_extensions"),
    *("intel_opencl_rt", "intel_cmplr_lib_rt", "intel_cmplr_lib_ur", "intel_openmp", "tbb", "tcmlib", "umf"),
)


def run(*words: object, cwd: Path, code: int = 0, errors: bool = False) -> str:
    """Return the standard output, or ``errors``, of a command run without this session's import paths."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAMMER_DISABLE", "VIRTUAL_ENV")}
    env["RAMMER_CACHE"] = str(cwd / "cache")
    done = subprocess.run([str(w) for w in words], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stderr if errors else done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheels by distribution, each built from its sdist as by ``make dist``. Copies are built, since building leaves
    files."""
    folder = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", ".*")
    (folder / "rammer_core").mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "rammer_core")
    shutil.copytree(ROOT / "core" / "rammer", folder / "rammer_core" / "core" / "rammer", ignore=ignore)
    for name in FOLDERS.keys() - {"rammer_core"}:
        shutil.copytree(FOLDERS[name], folder / name, ignore=ignore)
    for name in FOLDERS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / name, cwd=folder)
    assert {path.name.split("-")[0] for path in (folder / "dist").glob("*.tar.gz")} == FOLDERS.keys()
    return {path.name.split("-")[0]: path for path in (folder / "dist").glob("*.whl")}


def make_environment(folder: Path, *packages: str) -> Path:
    """Return ``folder`` with a fresh environment ``env``: this environment's ``packages``, or all of them except rammer."""
    venv.create(folder / "env", symlinks=True)
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
    for entry in (e for place in sys.path if Path(place).name == there.name for e in Path(place).iterdir()):
        known = not packages or entry.name.partition(".")[0].partition("-")[0] in packages
        if known and "rammer" not in entry.name.lower() and entry.suffix != ".pth" and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    # Some wheels store shared libraries next to site-packages' parent.
    for entry in (Path(sys.prefix) / "lib").iterdir():
        if not (folder / "env" / "lib" / entry.name).exists():
            (folder / "env" / "lib" / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment that has all packages of this one except rammer."""
    return make_environment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def bare_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment that has the requirements of rammer-runtime and of rammer-rocm only."""
    return make_environment(tmp_path_factory.mktemp("bare"), *RUNTIME_PACKAGES)


def install(home: Path, *what: Path | str) -> None:
    """Install packages with pip from wheels and folders only."""
    python = home / "env" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-compile",
        "--no-deps",
        "--no-index",
        *what,
        cwd=home,
    )


def files_of(wheel: Path) -> set[str]:
    """Return the files of a wheel except its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


def metadata_of(wheel: Path) -> str:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()


@pytest.mark.slow
def test_the_wheels_ship_types_device_code_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == FOLDERS.keys()
    for name, path in wheels.items():
        package, names = "rammer" if name in CORE else name, files_of(path)
        assert name in ("rammer_toy", "rammer_core") or f"{package}/py.typed" in names
        own = FOLDERS[name]
        if name in PLUGINS.values():
            assert {str(p.relative_to(own)) for p in own.rglob("*.cuh")} <= names, "device code is data of its package"
        assert {n.split("/")[0] for n in names} == {package}
        metadata = metadata_of(path)
        assert "\nLicense" not in metadata and "\nDescription-Content-Type: text/markdown\n" in metadata
        assert name == "rammer_toy" or "\nAuthor: The rammer authors\n" in metadata
        needed = {"rammer_core": f"rammer-runtime=={__version__}", "rammer_runtime": "numpy>=1.26"}
        of_plugin = name in (*PLUGINS.values(), "rammer_toy")
        other = "rammer-runtime<0.2,>=0.1" if of_plugin else "rammer-core<0.2,>=0.1"
        assert f"Requires-Dist: {needed.get(name, other)}\n" in metadata
        assert f"\nVersion: {__version__}\n" in metadata


@pytest.mark.slow
def test_runtime_and_core_are_disjoint_and_together_complete(wheels: dict[str, Path]) -> None:
    runtime, core = (files_of(wheels[name]) for name in CORE)
    assert not runtime & core
    source = (p.relative_to(ROOT / "core") for p in (ROOT / "core/rammer").rglob("*") if p.is_file())
    built = ("__pycache__", "build", ".egg-info")
    assert runtime | core == {str(p) for p in source if not any(part.endswith(built) for part in p.parts)}


RUN_FILE = """
import sys
import numpy as np
import rammer

compiled, arrays = sys.argv[1:]
exe = rammer.compile(compiled, trust=True)
with np.load(arrays) as given:
    inputs = {p.name: given[p.name] for p in exe.head.inputs}
    outputs, expected = exe.run(inputs), {n: given[n] for n in given.files if n not in inputs}
    assert outputs.keys() == expected.keys()
    assert all(np.array_equal(outputs[n], e) for n, e in expected.items())
bound = exe.bind(inputs)
bound.run()
assert all(np.array_equal(bound.to_host()[n], e) for n, e in expected.items())
exe.close()
print(*sorted({"onnx", "google", "rich", "tabulate", "click", "rammer.compiler"} & {*sys.modules}))
try:
    rammer.compile("model.onnx")
except rammer.errors.RammerError as problem:
    print(problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim", "toy"])
def test_the_runtime_alone_runs_compiled_files(
    wheels: dict[str, Path], bare_home: Path, device: str, rng: np.random.Generator
) -> None:
    model = MODELS["branches"]
    inputs, path = model.inputs(rng, {}), bare_home / f"{device}.onnx"
    onnx.save(model.build(rng), path)
    exe = rammer.compile(path, device)
    outputs = exe.run(inputs)
    compiled = exe.with_code(exe.compile_whole({n: a.shape for n, a in inputs.items()}))
    save_artifact(path.with_suffix(".rammer"), exe.artifact(compiled))
    exe.close()
    np.savez(bare_home / "arrays.npz", **inputs, **outputs)
    install(bare_home, wheels["rammer_runtime"], wheels[f"rammer_{device}"])
    python = bare_home / "env" / "bin" / "python"
    said = run(python, "-c", RUN_FILE, path.with_suffix(".rammer"), "arrays.npz", cwd=bare_home)
    assert said == "\nrammer.compile of a model needs rammer-core, the compiler\n  hint: pip install rammer-core\n"
    if device == "rocm":
        code = f"import rammer; rammer.compile({str(path.with_suffix('.rammer'))!r})"
        failed = subprocess.run([python, "-c", code], cwd=bare_home, capture_output=True, text=True, check=False)
        assert "compiling kernels for device rocm needs rammer-core, the compiler\n  hint: pip install" in failed.stderr


@pytest.mark.slow
def test_a_fresh_environment(wheels: dict[str, Path], home: Path, rng: np.random.Generator) -> None:
    command, python = home / "env" / "bin" / "rammer", home / "env" / "bin" / "python"
    install(home, wheels["rammer_runtime"], wheels["rammer_core"])
    assert run(command, "devices", cwd=home).startswith("no devices: no plugin is installed")
    assert json.loads(run(command, "devices", "--json", cwd=home)) == []
    model = MODELS["branches"]
    path, given = home / "m.onnx", model.inputs(rng, {})
    onnx.save(model.build(rng), path)
    run(command, "run", path, cwd=home, code=3)

    install(home, *(wheels[name] for name in PLUGINS.values()))
    where = f"import rammer, {', '.join(PLUGINS.values())}; print(rammer.__file__)"
    assert Path(run(python, "-c", where, cwd=home).strip()).is_relative_to(home)
    rows = {r["device"].split(":")[0]: r for r in json.loads(run(command, "devices", "--json", cwd=home))}
    assert sorted(rows) == sorted(PLUGINS)
    working = [name for name in ("ipu_sim", "rocm") if rows[name]["state"] == "ok"]
    assert "ipu_sim" in working
    np.savez(home / "in.npz", **given)  # type: ignore[arg-type]
    np.savez(home / "want.npz", **run_onnxruntime(read_model(path), given))  # type: ignore[arg-type]
    for name in working:
        assert rows[name]["self_test"].startswith("ok")
        text = run(command, "run", path, "--device", name, "--inputs", "in.npz", "--expected", "want.npz", cwd=home)
        assert f"device    {name}:0" in text

    # A missing distribution is named in the error, and works once it is installed.
    missing = run(command, "plugins", "test", "ipu_sim", cwd=home, code=2, errors=True)
    assert "hint: pip install rammer-testing" in missing
    install(home, wheels["rammer_testing"], wheels["rammer_bench"])
    assert "1 passed" in run(command, "plugins", "test", "ipu_sim", "--check", "manifest", cwd=home)
    peer = ("--peer", "onnxruntime", "--iterations", "1", "--duration", "0")
    assert "onnxruntime" in run(command, "bench", path, "--device", "ipu_sim", *peer, cwd=home)

    install(home, wheels["rammer_toy"])
    rows = {r["device"]: r for r in json.loads(run(command, "devices", "--json", cwd=home))}
    assert rows["toy:0"]["self_test"].startswith("ok")

    # Any subset of distributions works, also after the others are removed.
    gone = ("rammer-cuda", "rammer-rocm", "rammer-toy")
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "-q", "-y", *gone, cwd=home)
    left = json.loads(run(command, "devices", "--json", cwd=home))
    assert [(r["device"], r["state"]) for r in left] == [("ipu_sim:0", "ok")]


@pytest.mark.slow
@pytest.mark.parametrize("checks", [6, pytest.param(len(CHECKS), marks=pytest.mark.large)])
def test_a_new_plugin(wheels: dict[str, Path], home: Path, checks: int, rng: np.random.Generator) -> None:
    """Check that a plugin written by the installed core installs unchanged and passes ``checks`` checks
    of the conformance kit."""
    install(home, *(wheels[name] for name in (*CORE, "rammer_testing")))
    python = home / "env" / "bin" / "python"
    name = f"chip_{checks}"
    run(home / "env" / "bin" / "rammer", "plugins", "new", name, cwd=home)
    folder = home / f"rammer-chip-{checks}"
    install(home, "--no-build-isolation", "-e", folder)
    rest = rng.permutation(sorted(CHECKS))[checks:]
    left = [f"--deselect=tests/test_device.py::test_conformance[{name}]" for name in rest]
    said = run(python, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", folder, *left, cwd=home)
    assert " passed" in said and (not left or f"{len(left)} deselected" in said), said
    rows = {r["device"]: r for r in json.loads(run(home / "env" / "bin" / "rammer", "devices", "--json", cwd=home))}
    assert rows[f"{name}:0"]["self_test"].startswith("ok")


def test_the_demo_runs_without_the_checkout(wheels: dict[str, Path], home: Path) -> None:
    fetch("ppocr_cls")  # skips the test if unavailable
    install(home, *(wheels[name] for name in (*CORE, "rammer_rocm", "rammer_ipu_sim", "rammer_testing", "rammer_bench")))
    shutil.copy(ROOT / "benchmarks" / "demo.py", home)
    said = run(home / "env" / "bin" / "python", "demo.py", cwd=home)
    assert "ipu_sim: " in said and "ONNX Runtime on the CPU" in said
