"""``rammer plugins``: the listing, and new plugins that are complete, have a valid name and replace no file."""

from __future__ import annotations

import ast
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command import Command

from rammer.cli import plugins
from rammer.device.loader import Registry
from rammer.errors import BadInput

#: Invalid names of devices.
WRONG = ("", "a", "Chip", "9a", "a-b", "a.b", "a__b", "_a", "a_", "é9", "my chip", "../up", "class", "a\0b", "a" * 41, "ａｂ")


def test_every_plugin_is_listed(rammer: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "rocm")
    rows = {line.split()[0]: line.split()[2:] for line in rammer("plugins", "list").out.splitlines()[2:]}
    assert rows["toy"] == ["ok", "rammer_devices"]
    assert rows["rocm"] == ["disabled", "named", "in", "RAMMER_DISABLE"]


def test_a_new_plugin_is_the_toy_under_another_name(rammer: Command, tmp_path: Path) -> None:
    done = rammer("plugins", "new", "my_chip", "--into", tmp_path)
    target = tmp_path / "rammer-my-chip"
    assert (done.code, done.err) == (0, "")
    assert f"wrote {target}: pyproject.toml, README.md, rammer_my_chip/__init__.py, tests/test_device.py" in done.out
    found = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}
    assert sorted(found) == ["README.md", "pyproject.toml", "rammer_my_chip/__init__.py", "tests/test_device.py"]
    assert not any("toy" in text.lower() for text in found.values())
    project = tomllib.loads(found["pyproject.toml"])["project"]
    assert (project["name"], project["entry-points"]["rammer.devices"]) == ("rammer-my-chip", {"my_chip": "rammer_my_chip"})
    module = ast.parse(found["rammer_my_chip/__init__.py"])
    assert {"MyChipProgram", "MyChipProfiler", "MyChipBackend"} == {n.name for n in module.body if isinstance(n, ast.ClassDef)}
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE((target / "tests").stat().st_mode)


def test_the_template_under_its_own_name_is_what_is_installed() -> None:
    import rammer_toy

    assert plugins.template_texts("toy")["rammer_toy/__init__.py"] == Path(rammer_toy.__file__).read_text()
    folder = Path(rammer_toy.__file__).parents[1]
    kept = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert set(plugins.FILES) == {k for k in kept if not {"build", "__pycache__", "rammer_toy.egg-info"} & set(Path(k).parts)}


@pytest.mark.parametrize("name", WRONG)
def test_a_name_must_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a valid device name"):
        plugins.write_plugin(name, tmp_path, Registry())
    assert not list(tmp_path.iterdir())


def test_a_name_must_be_free(rammer: Command, tmp_path: Path) -> None:
    for name, words in (
        ("toy", "device 'toy' already exists"),
        ("cuda", "device 'cuda' already exists"),
        ("runtime", "rammer-runtime is a distribution of rammer itself"),
        ("core", "rammer-core is a distribution of rammer itself"),
        ("testing", "rammer-testing is a distribution of rammer itself"),
        ("bench", "rammer-bench is a distribution of rammer itself"),
    ):
        done = rammer("plugins", "new", name, "--into", tmp_path)
        assert done.code == 2 and words in done.err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(rammer: Command, tmp_path: Path) -> None:
    file, folder, link = (tmp_path / f"rammer-{n}" for n in ("file", "folder", "link"))
    file.write_text("kept")
    folder.mkdir()
    link.symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        done = rammer("plugins", "new", name, "--into", tmp_path)
        assert (done.code, "it exists" in done.err) == (2, True)
    assert file.read_text() == "kept" and not list(folder.iterdir()) and link.is_symlink()
    done = rammer("plugins", "new", "other", "--into", tmp_path / "none")
    assert done.code == 2 and "is not a folder" in done.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["rammer-file", "rammer-folder", "rammer-link"]


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", range(len(plugins.FILES)))
def test_nothing_is_half_written(problem: BaseException, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = Path.open, list[Path]()

    def opened(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
        if "x" in mode:
            if len(written) == after:
                raise problem
            written.append(path)
        return real(path, mode, *given, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(BadInput if isinstance(problem, OSError) else KeyboardInterrupt) as found:
        plugins.write_plugin("chip", tmp_path, Registry())
    assert not isinstance(problem, OSError) or "No space left on device" in str(found.value)
    assert not list(tmp_path.iterdir())
