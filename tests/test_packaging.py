"""Wheels of all distributions in a fresh environment outside the checkout: first the core alone, then everything else. No network
is used: wheels are built here, and this environment's other packages are linked into the new one."""

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

from rammer.frontend.read.reader import read_model
from rammer.reference.outputs import run_onnxruntime
from rammer_testing.conformance import CHECKS
from rammer_testing.models import fetch
from rammer_testing.small_models import MODELS

ROOT = Path(__file__).parents[1]
PLUGINS = {"cuda": "rammer_cuda", "rocm": "rammer_rocm", "ipu_sim": "rammer_ipu_sim"}
#: Distribution -> source folder.
FOLDERS = {
    "rammer_core": ROOT,
    **{package: ROOT / "plugins" / name for name, package in PLUGINS.items()},
    "rammer_testing": ROOT / "tests" / "kit",
    "rammer_bench": ROOT / "benchmarks",
    "rammer_toy": ROOT / "core" / "rammer" / "plugin-template",
}


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
    shutil.copytree(ROOT / "core", folder / "rammer_core" / "core", ignore=ignore)
    for name in FOLDERS.keys() - {"rammer_core"}:
        shutil.copytree(FOLDERS[name], folder / name, ignore=ignore)
    for name in FOLDERS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / name, cwd=folder)
    assert {path.name.split("-")[0] for path in (folder / "dist").glob("*.tar.gz")} == FOLDERS.keys()
    return {path.name.split("-")[0]: path for path in (folder / "dist").glob("*.whl")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a fresh environment ``env``: all packages of this environment except rammer."""
    folder = tmp_path_factory.mktemp("home")
    venv.create(folder / "env", symlinks=True)
    here, there = (Path(sysconfig.get_path("purelib", vars={"base": str(b)})) for b in (sys.prefix, folder / "env"))
    for entry in here.iterdir():
        if "rammer" not in entry.name.lower() and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    # Some wheels store shared libraries next to site-packages' parent.
    for entry in (Path(sys.prefix) / "lib").iterdir():
        if not (folder / "env" / "lib" / entry.name).exists():
            (folder / "env" / "lib" / entry.name).symlink_to(entry)
    return folder


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


@pytest.mark.slow
def test_the_wheels_ship_types_device_code_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == FOLDERS.keys()
    for name, path in wheels.items():
        package = "rammer" if name == "rammer_core" else name
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
        assert name == "rammer_toy" or f"{package}/py.typed" in names
        own = FOLDERS[name]
        if name in PLUGINS.values():
            assert {str(p.relative_to(own)) for p in own.rglob("*.cuh")} <= {*names}, "device code is data of its package"
        assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {package}
        if name != "rammer_core":
            assert "Requires-Dist: rammer-core<0.2,>=0.1" in metadata


@pytest.mark.slow
def test_a_fresh_environment(wheels: dict[str, Path], home: Path, rng: np.random.Generator) -> None:
    command, python = home / "env" / "bin" / "rammer", home / "env" / "bin" / "python"
    install(home, wheels["rammer_core"])
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
    install(home, wheels["rammer_core"], wheels["rammer_testing"])
    python = home / "env" / "bin" / "python"
    run(home / "env" / "bin" / "rammer", "plugins", "new", "my_chip", cwd=home)
    folder = home / "rammer-my-chip"
    install(home, "--no-build-isolation", "-e", folder)
    rest = rng.permutation(sorted(CHECKS))[checks:]
    left = [f"--deselect=tests/test_device.py::test_conformance[{name}]" for name in rest]
    said = run(python, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={folder}", folder, *left, cwd=home)
    assert " passed" in said and (not left or f"{len(left)} deselected" in said), said
    rows = {r["device"]: r for r in json.loads(run(home / "env" / "bin" / "rammer", "devices", "--json", cwd=home))}
    assert rows["my_chip:0"]["self_test"].startswith("ok")


def test_the_demo_runs_without_the_checkout(wheels: dict[str, Path], home: Path) -> None:
    fetch("ppocr_cls")  # skips the test if unavailable
    install(home, *(wheels[name] for name in ("rammer_core", "rammer_rocm", "rammer_ipu_sim", "rammer_testing", "rammer_bench")))
    shutil.copy(ROOT / "benchmarks" / "demo.py", home)
    said = run(home / "env" / "bin" / "python", "demo.py", cwd=home)
    assert "ipu_sim: " in said and "ONNX Runtime on the CPU" in said
