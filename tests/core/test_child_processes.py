"""Child processes: one way of starting them, which executes no file of the current directory."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rammer import child_processes
from rammer.child_processes import (
    child_environment,
    find_program,
    isolate_environment,
    python_command,
    python_path,
    run_program,
    spawn_process,
)

ROOT = Path(__file__).parents[2]
SOURCES = [
    p
    for folder in ("core", "plugins", "tests/kit/rammer_testing", "benchmarks/rammer_bench")
    for p in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in p.relative_to(ROOT / folder).parts and p.name != "child_processes.py"
]
#: Names that start a process, or that search for a program or a library in possibly relative directories.
REFUSED = {
    *(f"subprocess.{n}" for n in ("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput")),
    *("os.system", "os.popen", "os.startfile", "os.posix_spawn", "os.posix_spawnp", "pty.spawn", "sys.executable"),
    *(f"os.{kind}{end}" for kind in ("exec", "spawn") for end in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"multiprocessing.{n}" for n in ("Process", "Pool", "Manager", "get_context", "set_start_method")),
    *("concurrent.futures.ProcessPoolExecutor", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *("shutil.which", "platform.processor", "ctypes.util.find_library", "distutils.spawn.find_executable"),
}
LOADERS = ("ctypes.CDLL", "ctypes.PyDLL", "ctypes.cdll.LoadLibrary", "ctypes.WinDLL")


def refused_names(text: str) -> Iterator[str]:
    """Yield the names of REFUSED that a module uses, and libraries that it loads by a bare name."""
    tree = ast.parse(text)
    known = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                (a.asname or a.name.partition(".")[0]): (a.name if a.asname else a.name.partition(".")[0]) for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return known.get(node.id, "") if isinstance(node, ast.Name) else ""

    annotations = {id(inner) for node in ast.walk(tree) for part in _annotations(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in annotations and full(node) in REFUSED:
            yield full(node)
        if isinstance(node, ast.Call) and full(node.func) in LOADERS and node.args:
            (name, *_) = node.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and not os.path.isabs(name.value):
                yield f"{full(node.func)}({name.value!r})"


def _annotations(node: ast.AST) -> list[ast.expr]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [a for a in found if isinstance(a, ast.expr)]


def test_search_finds_every_form() -> None:
    """Check that aliases and directly imported names are resolved, and that annotations and errors are accepted."""
    cases = {
        "import subprocess as s\ns.run(['x'])": ["subprocess.run"],
        "from subprocess import Popen as P\nP(['x'])": ["subprocess.Popen"],
        "import sys\n[sys.executable, '-m', 'x']": ["sys.executable"],
        "from os import execv\nexecv('x', [])": ["os.execv"],
        "import multiprocessing.context\nmultiprocessing.get_context('spawn')": ["multiprocessing.get_context"],
        "from concurrent import futures\nfutures.ProcessPoolExecutor()": ["concurrent.futures.ProcessPoolExecutor"],
        "import ctypes\nctypes.CDLL('libx.so')": ["ctypes.CDLL('libx.so')"],
        "import ctypes\nctypes.CDLL(None), ctypes.CDLL('/lib/libx.so')": [],
        "import subprocess\na: subprocess.Popen[bytes]\ntry: pass\nexcept subprocess.TimeoutExpired: pass": [],
    }
    assert {text: list(refused_names(text)) for text in cases} == cases


@pytest.mark.slow
def test_only_one_module_starts_processes() -> None:
    """Check that all other modules call ``rammer.child_processes``."""
    found = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := list(refused_names(path.read_text())))}
    # Programs for tests: a browser, compilers and C programs, network namespaces.
    for tool in ("browser", "c_runtime", "distant_hosts"):
        del found[f"tests/kit/rammer_testing/{tool}.py"]
    assert len(SOURCES) > 500 and not found


def test_benchmarks_start_python_in_safe_path_mode() -> None:
    """Check that interpreter command lines with -m or -c have -P first."""
    found = list[str]()
    for path in (f for folder in ("benchmarks", "tests/kit/tools") for f in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List) and len(node.elts) > 1 and isinstance(node.elts[1], ast.Constant):
                found += [f"{path.name}:{node.lineno}"] * (node.elts[1].value in ("-m", "-c"))
    assert not found


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that is written when a module of the current directory is imported."""
    folder, sprung = tmp_path / "folder", tmp_path / "sprung"
    folder.mkdir()
    for name in ("numpy", "onnx", "json", "runpy", "signal", "multiprocessing", "pickle", "rammer", "pip", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(sprung)!r}, 'a').write(__name__)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])  # the user of python -c chooses the directory
    return sprung


@pytest.mark.slow
@pytest.mark.parametrize("module", ["rammer.tuning.measure_worker", "pip"])
def test_python_child_imports_nothing_of_the_directory(module: str, trapped: Path) -> None:
    """Check each module that runs as a child; without valid arguments it exits soon."""
    done = run_program(python_command(module, 99 if module == "rammer.tuning.measure_worker" else "none", "none", 4))
    assert not trapped.exists(), trapped.read_text()
    assert "No module named" not in done.stderr, done.stderr


def write_note(path: str) -> None:
    """Write a note from a spawned process."""
    Path(path).write_text(f"{os.environ.get('PYTHONSAFEPATH')} {os.environ['PATH']}")


def test_spawned_process_imports_nothing_of_the_directory(trapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also that the environment of this process is restored."""
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}:")
    before = dict(os.environ)
    process = spawn_process(write_note, (str(tmp_path / "note"),))
    process.join(120)
    assert process.exitcode == 0 and not trapped.exists()
    assert (tmp_path / "note").read_text() == f"1 {before['PATH'][2:-1]}" and dict(os.environ) == before


def test_child_has_the_path_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a module in the parent's ``sys.path`` only is importable, in the parent's order, with its arguments."""
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_module.py").write_text(
            f"import sys\nprint({folder!r}, *sys.argv[1:])\nprint(*sys.path, sep='|')\n"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path, str(tmp_path / "second")])
    told, path = run_program(python_command("own_module", "a b", 3)).stdout.splitlines()
    assert told == "first a b 3" and path.split("|") == python_path()


def test_relative_entry_of_path_is_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that "" refers to the directory in which the process started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "lib", *sys.path])
    assert python_path()[:2] == [child_processes.STARTED_IN, os.path.join(child_processes.STARTED_IN, "lib")]
    assert str(tmp_path) not in python_path()


def test_programs_of_relative_directories_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this process and a child: empty and relative entries are dropped, and so is a variable without other entries."""
    (tmp_path / "own_program").write_text("#!/bin/sh\n")
    (tmp_path / "own_program").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ".:")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"lib:{tmp_path}::")
    assert find_program("own_program") is None
    assert "PATH" not in child_environment() and child_environment()["LD_LIBRARY_PATH"] == str(tmp_path)
    monkeypatch.setenv("PATH", f":{tmp_path}")
    assert find_program("own_program") == str(tmp_path / "own_program")


def test_isolation_ends_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that relative entries of PYTHONPATH are removed from ``sys.path``, even if Python converted them to absolute ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":lib:{tmp_path / 'kept'}")
    monkeypatch.setattr(sys, "path", [sys.path[0], str(tmp_path), str(tmp_path / "lib"), str(tmp_path / "kept"), *sys.path[1:]])
    before, path = dict(os.environ), list(sys.path)
    with isolate_environment():
        assert sys.path == [path[0], *path[3:]]
        assert os.environ["PYTHONPATH"] == str(tmp_path / "kept") and os.environ["PYTHONSAFEPATH"] == "1"
    assert dict(os.environ) == before and sys.path == path
