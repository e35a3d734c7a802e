"""The shared folder of OpenCL drivers: several processes may create it at once."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rammer_rocm.icd")

from rammer_rocm.icd import VENDORS_VARIABLE


def prepared() -> Path:
    """Return the folder that another process would prepare."""
    spec = importlib.util.find_spec("rammer_rocm.icd")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report: Any = module.prepare_icd()
    if report.embedded is None:
        pytest.skip(report.why)
    return Path(report.vendors_dir)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VENDORS_VARIABLE, raising=False)
    return prepared()


def test_a_folder_that_another_process_made_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the folder is kept: its removal, even for a moment, would leave a reading process without a driver."""
    monkeypatch.delenv(VENDORS_VARIABLE)
    others, make = folder.rename(tmp_path / "others"), tempfile.mkdtemp
    inode = others.stat().st_ino

    def meanwhile(*words: Any, **named: Any) -> str:
        others.rename(folder)
        return make(*words, **named)

    monkeypatch.setattr(tempfile, "mkdtemp", meanwhile)
    assert prepared() == folder and folder.stat().st_ino == inode
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_folder_that_somebody_changed_is_made_again(folder: Path) -> None:
    kept = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert kept
    next(folder.iterdir()).write_text("/nowhere\n")
    (folder / "more.icd").write_text("/nowhere\n")
    assert prepared() == folder and {p.name: p.read_bytes() for p in folder.iterdir()} == kept


def test_a_folder_that_others_may_write_is_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a folder writable by others: its files name libraries that are executed."""
    for change in (lambda: folder.chmod(0o777), lambda: next(folder.iterdir()).chmod(0o666)):
        before = folder.stat().st_ino
        change()
        assert prepared() == folder and folder.stat().st_ino != before and not folder.stat().st_mode & 0o022
        assert f"cached file {folder} is not used" in capsys.readouterr().err
