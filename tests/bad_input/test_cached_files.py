"""Damage of every kind to every file of the cache: the result is right, a warning names the file, and it is rewritten."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import Capture

import rammer
from rammer.cache import file_digests
from rammer.cache.cache_location import make_private, why_untrusted
from rammer.cache.disk_cache import LAYOUT, Cache
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel

#: Its constants are large enough for separate files, whose damage does not affect the model itself.
MODEL = SmallModel(
    "cached",
    """(float[2,160] x, float[160,160] w_a, float[160,160] w_b) => (float[2,160] y) {
    t = Transpose<perm=[1,0]>(w_a)
    m = MatMul(t, w_b)
    h = MatMul(x, m)
    y = Relu(h)
}""",
    below=1,
)

Damage = Callable[[Path, Path], None]


def _rewritten(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path, other: (path.write_bytes(change(path.read_bytes())), None)[1]


def _replaced(path: Path, make: Callable[[], object]) -> None:
    path.unlink()
    make()


def _linked(path: Path, other: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(aside)


#: Changes to a file; the second argument is another file of the cache. The first ones do not change its content.
UNTRUSTED: dict[str, Damage] = {
    "writable by its group": lambda path, other: path.chmod(0o660),
    "writable by anybody": lambda path, other: path.chmod(0o602),
    "of another user": lambda path, other: os.chown(path, 4711, -1),
    "with a second name": lambda path, other: os.link(path, path.with_name("second")),
    "a symbolic link": _linked,
}
DAMAGES: dict[str, Damage] = {
    **UNTRUSTED,
    "empty": _rewritten(lambda data: b""),
    "cut": _rewritten(lambda data: data[: len(data) // 2]),
    "no text": _rewritten(lambda data: b"\xff\xfe"),
    "zeros": _rewritten(lambda data: bytes(len(data))),
    "bits": _rewritten(lambda data: data[: len(data) // 2 - 8] + bytes(b ^ 129 for b in data[len(data) // 2 - 8 :])),
    "of another": lambda path, other: (shutil.copyfile(other, path), None)[1],
    "a circle of links": lambda path, other: _replaced(path, lambda: path.symlink_to(path)),
    "a pipe": lambda path, other: _replaced(path, lambda: os.mkfifo(path)),
    "a folder": lambda path, other: _replaced(path, path.mkdir),
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Path:
    """Write a model whose digest is cached, too, as for a large file that was unmodified for a minute."""
    monkeypatch.setattr(file_digests, "SHARE", 1 << 10)
    path = tmp_path / "m.onnx"
    path.write_bytes(MODEL.build(rng).SerializeToString())
    monkeypatch.setattr(file_digests, "SETTLED", -1.0)
    return path


def files_of(cache: Path) -> list[Path]:
    """Return the files of all entries."""
    return [p for p in entries(cache) if p.is_file()]


def result(path: Path, device: str, given: dict[str, np.ndarray]) -> np.ndarray:
    exe = rammer.compile(path, device=device)
    try:
        return exe.run(given)["y"]
    finally:
        exe.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["toy", "rocm"])
def test_damaged_files_are_made_again(
    device: str, model: Path, own_cache: Path, capsys: Capture, rng: np.random.Generator
) -> None:
    given = MODEL.inputs(rng, MODEL.shapes[0])
    want = result(model, device, given)
    names = [p.relative_to(own_cache) for p in files_of(own_cache)]
    assert {n.parts[1] for n in names} >= {"programs", "constants", "heads", "digests"}
    capsys.readouterr()
    for name in some(names):
        path = own_cache / name
        whole, other = path.read_bytes(), own_cache / names[0 if name != names[0] else 1]
        kinds = list(DAMAGES) if device == "toy" else rng.choice(list(DAMAGES), 5, replace=False).tolist()
        for kind, damage in ((k, DAMAGES[k]) for k in kinds):
            if kind == "of another user" and os.geteuid() != 0:
                continue
            damage(path, other)
            where = f"{name}, {kind}"
            np.testing.assert_array_equal(result(model, device, given), want, where)
            said = capsys.readouterr().err
            assert "rammer: warning: " in said and path.name[:16] in said, f"{where}: {said or 'no warning'}"
            if kind == "a folder":
                path.rmdir()
            for left in ("aside", "second"):
                path.with_name(left).unlink(missing_ok=True)
            np.testing.assert_array_equal(result(model, device, given), want, where)
            said = capsys.readouterr().err
            assert not said or kind == "a folder", f"{where}: again {said}"
            assert not why_untrusted(path) and stat.S_IMODE(path.stat().st_mode) == 0o600, where
            path.write_bytes(whole)
    assert command_clears(own_cache)


def command_clears(cache: Path) -> bool:
    """Return True if ``rammer cache clear`` leaves nothing."""
    from click.testing import CliRunner

    from rammer.cli.cache import clear

    (folder := cache / LAYOUT / "programs" / "aa" / "a folder").mkdir(parents=True)
    assert CliRunner().invoke(clear, catch_exceptions=False).exit_code == 0
    return not entries(cache) and not folder.exists()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_measurements_are_made_again(kind: str, own_cache: Path, capsys: Capture) -> None:
    """Check that a damaged entry is a miss with one warning, and is replaced."""
    if kind == "of another user" and os.geteuid() != 0:
        pytest.skip("needs root")
    for key in ("key", "other"):
        KernelStore.default().put_seconds(key, 1.0)
    path, other = entries(own_cache, "tuned")
    DAMAGES[kind](path, other)
    found = [KernelStore.default().seconds(key) for key in ("key", "other")]
    assert found.count(None) == 1 and capsys.readouterr().err.count(f"cached file {path} is not used") == 1
    if kind == "a folder":
        path.rmdir()
    KernelStore.default().put_seconds("other" if found[0] else "key", 2.0)
    assert [KernelStore.default().seconds(key) for key in ("key", "other")] == [f or 2.0 for f in found]
    assert capsys.readouterr().err == "" and not path.is_symlink()


def test_old_folders_become_private(own_cache: Path) -> None:
    """Check that files are private to their user, whatever the umask and the modes of folders."""
    cache, key, mask = Cache("toy"), "a" * 64, os.umask(0)
    path = cache.path(key)
    try:
        path.parent.mkdir(parents=True)
        cache.put(key, b"text")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert cache.get(key, bytes) == b"text"


def test_link_in_the_cache_is_not_written_through(own_cache: Path, tmp_path: Path) -> None:
    """Check a planted link to another file of the user."""
    (tmp_path / "mine").write_text("mine")
    cache, key = Cache("heads"), "a" * 64
    make_private(cache.path(key).parent)
    cache.path(key).symlink_to(tmp_path / "mine")
    cache.put(key, b"text")
    assert (tmp_path / "mine").read_text() == "mine" and cache.get(key, bytes) == b"text"
