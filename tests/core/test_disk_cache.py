"""The disk cache: size bound, eviction by last use, several processes, export and import."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rammer.cache import disk_cache
from rammer.cache.cache_transfer import export_cache, import_cache
from rammer.cache.disk_cache import BLOCK, IN_USE, Cache, cache_lock, clear_cache, evict, list_entries, size_bound
from rammer.errors import BadInput
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some

Capture = pytest.CaptureFixture[str]


def filled(root: Path, count: int, kind: str = "programs", age: float = 2 * IN_USE) -> list[Path]:
    """Store ``count`` entries of one block each, the first one used longest ago, the last one ``age`` seconds ago."""
    cache, made = Cache(kind, root=root), list[Path]()
    for number in range(count):
        key = cache.key(str(number))
        cache.put(key, b"x" * 100)
        made.append(cache.path(key))
        used = time.time() - age - count + number
        os.utime(made[-1], (used, used))
    return made


def test_entries_of_other_versions_and_kinds_are_others(tmp_path: Path) -> None:
    one = Cache("tuned", "1", tmp_path)
    one.put(one.key("a"), b"data")
    assert one.get(one.key("a"), bytes) == b"data"
    for other in (Cache("tuned", "2", tmp_path), Cache("heads", "1", tmp_path)):
        assert other.get(other.key("a"), bytes) is None
    assert len({one.key("a", "b"), one.key("ab"), one.key("", "ab"), one.key("ab", "")}) == 4


@pytest.mark.parametrize("key", ["", "..", "../" * 6 + "x", "a" * 15, "A" * 64, "a" * 65, "a" * 64 + "\n", "a" * 31 + "/"])
def test_a_malformed_key_is_no_path(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="malformed key"):
        Cache("tuned", root=tmp_path).path(key)


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 16 << 30), ("0", float("inf")), ("1000", 1000), ("1.5GiB", 1.5 * 2**30), ("2 MB", 2e6), ("3KiB", 3072)],
)
def test_the_bound_is_settable(text: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE_SIZE", text)
    assert size_bound() == size


@pytest.mark.parametrize("text", ["-1", "a lot", "1e9", "nan", "1 XB", "4gib", "9" * 40])
def test_a_bound_that_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE_SIZE", text)
    with pytest.raises(BadInput, match="which is not a size"):
        Cache("tuned", root=tmp_path).put("a" * 64, b"")


def test_entries_used_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this across kinds, and that an entry that was read counts as used."""
    old, new = filled(tmp_path, 8, "programs"), filled(tmp_path, 8, "constants")
    assert Cache("programs", root=tmp_path).get(old[0].name, bytes)
    monkeypatch.setenv("RAMMER_CACHE_SIZE", str(16 * BLOCK))
    evict(tmp_path)
    assert len(entries(tmp_path)) == 16, "the bound is not exceeded"
    monkeypatch.setenv("RAMMER_CACHE_SIZE", str(8 * BLOCK))
    evict(tmp_path)
    by_use = sorted([*old[1:], *new], key=lambda p: new.index(p) if p in new else old.index(p))
    assert {*entries(tmp_path)} == {old[0], *by_use[-6:]}


def test_entries_in_use_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recent, old, folder = (
        filled(tmp_path, 4, age=IN_USE / 2),
        filled(tmp_path, 4, "tuned"),
        Cache("icd", root=tmp_path).path("b" * 64),
    )
    folder.mkdir(parents=True)
    (folder / "a.icd").write_text("x")
    os.utime(folder, (0, 0))
    monkeypatch.setenv("RAMMER_CACHE_SIZE", "1")
    evict(tmp_path)
    assert {*entries(tmp_path)} == {*recent, folder} and not any(p.exists() for p in some(old))


def test_an_entry_that_is_used_during_eviction_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, listed = filled(tmp_path, 3), list_entries

    def slowly(root: Path) -> list[disk_cache.Entry]:
        found = [*listed(root)]
        assert Cache("programs", root=root).get(made[1].name, bytes)
        return found

    monkeypatch.setattr(disk_cache, "list_entries", slowly)
    monkeypatch.setenv("RAMMER_CACHE_SIZE", "1")
    evict(tmp_path)
    assert [e.path for e in listed(tmp_path)] == [made[1]]


def test_writing_keeps_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMMER_CACHE_SIZE", str(64 * BLOCK))
    monkeypatch.setattr(disk_cache, "IN_USE", -1.0)
    cache, most = Cache("tuned", root=tmp_path), 0
    for number in range(300):
        cache.put(cache.key(str(number)), b"x")
        most = max(most, len(entries(tmp_path)))
    assert len(entries(tmp_path)) >= 56 and most <= 64 + 64 / 16 + 1
    assert cache.get(cache.key("299"), bytes) == b"x"


def test_partial_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (made,) = filled(tmp_path, 1)
    old, new = (made.with_name(f"{name}.partial") for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    evict(tmp_path)
    assert not old.exists() and new.exists() and made.exists()


def test_one_process_evicts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 4)
    monkeypatch.setenv("RAMMER_CACHE_SIZE", "1")
    with cache_lock(tmp_path, wait=True) as held:
        assert held
        evict(tmp_path)
        assert len(entries(tmp_path)) == 4
    evict(tmp_path)
    assert not entries(tmp_path)


WORKER = """
import sys
from pathlib import Path
from rammer.cache import disk_cache
from rammer.cache.disk_cache import Cache
disk_cache.IN_USE = -1.0
cache = Cache("tuned", root=Path(sys.argv[1]))
for step in range(400):
    name = str((step * 7 + int(sys.argv[2])) % 60)
    data = cache.get(cache.key(name), bytes)
    assert data in (None, name.encode() * 3000), data
    cache.put(cache.key(name), name.encode() * 3000)
"""


@pytest.mark.slow
def test_processes_write_read_and_evict_at_once(tmp_path: Path) -> None:
    """Check that every entry that is read is whole, without a warning, and that the bound holds."""
    environment = {**os.environ, "RAMMER_CACHE_SIZE": str(32 * BLOCK)}
    words = [sys.executable, "-c", WORKER, str(tmp_path)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen([*words, str(n)], env=environment, stderr=pipe, text=True) for n in range(3)]
    for process in some(started):
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0
    assert 0 < sum(e.nbytes for e in list_entries(tmp_path)) <= (32 + 3 * 3) * BLOCK
    assert not list(tmp_path.rglob("*.partial"))


def test_a_full_disk_leaves_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    cache = Cache("tuned", root=tmp_path)
    key = cache.key("a")
    cache.put(key, b"old")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        for _ in range(2):
            cache.put(key, b"new")
    assert capsys.readouterr().err.count("No space left on device; later processes start slower") == 1
    assert cache.get(key, bytes) == b"old" and not list(tmp_path.rglob("*.partial"))


# --- export and import --------------------------------------------------------------------------------


def exported(root: Path, target: Path, *kinds: str) -> Path:
    with target.open("wb") as file:
        export_cache(root, file, kinds)
    return target


def test_what_was_exported_is_imported(tmp_path: Path) -> None:
    for kind in ("programs", "tuned", "cuda-cubins", "digests"):
        filled(tmp_path / "a", 3, kind)
    file = exported(tmp_path / "a", tmp_path / "all.tar")
    assert import_cache(tmp_path / "b", file) == ({"programs": 3, "tuned": 3}, {"cuda-cubins": 3})
    assert import_cache(tmp_path / "b", file, trust_code=True) == ({"cuda-cubins": 3}, {})
    for path in some(entries(tmp_path / "a")):
        made = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert made.exists() == ("digests" not in path.parts)
        assert "digests" in path.parts or made.read_bytes() == path.read_bytes()
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in some(entries(tmp_path / "b")))
    few = exported(tmp_path / "a", tmp_path / "few.tar", "tuned")
    assert import_cache(tmp_path / "c", few) == ({"tuned": 3}, {})


def test_untrusted_entries_are_not_exported(tmp_path: Path, capsys: Capture) -> None:
    good, bad, link = filled(tmp_path / "a", 3)
    bad.chmod(0o666)
    link.unlink()
    link.symlink_to("/etc/hostname")
    import_cache(tmp_path / "b", exported(tmp_path / "a", tmp_path / "all.tar"))
    assert [p.name for p in entries(tmp_path / "b")] == [good.name]
    assert capsys.readouterr().err.count("is not used") == 2


def test_entries_that_are_here_are_not_replaced(tmp_path: Path) -> None:
    """Check that damaged content of an imported entry is found when it is read."""
    (path,) = filled(tmp_path / "a", 1)
    file = exported(tmp_path / "a", tmp_path / "all.tar")
    (own,) = filled(tmp_path / "b", 1)
    own.write_bytes(b"mine")
    assert import_cache(tmp_path / "b", file) == ({}, {}) and own.read_bytes() == b"mine"
    path.write_bytes(b"damaged")
    import_cache(tmp_path / "c", exported(tmp_path / "a", tmp_path / "all.tar"))
    assert Cache("programs", root=tmp_path / "c").get(path.name, bytes) is None


KEY = "ab" + "0" * 62


def member(name: str, data: bytes = b"x", **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


GOOD = member(f"tuned/ab/{KEY}")
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "junk": b"junk" * 300,
    "compressed": b"\x1f\x8b\x08" + bytes(600),
    "no end": GOOD,
    "parent": member(f"../tuned/ab/{KEY}"),
    "parent within": member(f"tuned/../ab/{KEY}"),
    "absolute": member(f"/tuned/ab/{KEY}"),
    "layout": member(f"v2/tuned/ab/{KEY}"),
    "short name": member("lock"),
    "other digits": member(f"tuned/ac/{KEY}"),
    "upper case": member(f"tuned/AB/{KEY.upper()}"),
    "hidden": member(f".tuned/ab/{KEY}"),
    "newline": member(f"tuned/ab/{KEY[:-1]}\n"),
    "symbolic link": member(f"tuned/ab/{KEY}", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": member(f"tuned/ab/{KEY}", b"", type=tarfile.LNKTYPE, linkname=f"tuned/ab/{KEY}"),
    "device": member(f"tuned/ab/{KEY}", b"", type=tarfile.CHRTYPE),
    "pipe": member(f"tuned/ab/{KEY}", b"", type=tarfile.FIFOTYPE),
    "folder": member(f"tuned/ab/{KEY}", b"", type=tarfile.DIRTYPE),
    "sparse": member(f"tuned/ab/{KEY}", type=tarfile.GNUTYPE_SPARSE),
    "long name": member("././@LongLink", b"x" * 300, type=tarfile.GNUTYPE_LONGNAME),
    "extended header": member(f"tuned/ab/{KEY}", b"20 size=99999999999\n", type=tarfile.XHDTYPE),
    "longer than the file": member(f"tuned/ab/{KEY}", size=1 << 40),
    "negative": member(f"tuned/ab/{KEY}", size=-512),
    "checksum": GOOD[:150] + b"7" + GOOD[151:],
}


@pytest.mark.parametrize("before", [b"", GOOD], ids=["first", "second"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_with_other_members_is_refused_whole(case: str, before: bytes, tmp_path: Path) -> None:
    end = b"" if case in ("empty", "no end") else bytes(1024)
    (tmp_path / "f.tar").write_bytes(before + HOSTILE[case] + end)
    with pytest.raises(BadInput, match="is not an exported cache"):
        import_cache(tmp_path / "c", tmp_path / "f.tar", trust_code=True)
    assert not (tmp_path / "c").exists()


def test_a_file_larger_than_the_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.tar").write_bytes(member(f"tuned/ab/{KEY}", b"x" * 5000) * 2 + bytes(1024))
    monkeypatch.setenv("RAMMER_CACHE_SIZE", "9000")
    with pytest.raises(BadInput, match="is larger than the cache may be"):
        import_cache(tmp_path / "c", tmp_path / "f.tar")
    assert not (tmp_path / "c").exists()


SPECIAL: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "folder": Path.mkdir}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_files_are_not_read(kind: str, tmp_path: Path) -> None:
    SPECIAL[kind](tmp_path / "f")
    with pytest.raises((BadInput, IsADirectoryError)):
        import_cache(tmp_path / "c", tmp_path / "f")


def test_a_target_outside_the_cache_is_not_written(tmp_path: Path) -> None:
    """Check a planted link in the place of an entry: the link is replaced, not followed."""
    (tmp_path / "mine").write_text("mine")
    path = Cache("tuned", root=tmp_path / "c").path(KEY)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "mine")
    (tmp_path / "f.tar").write_bytes(GOOD + bytes(1024))
    assert import_cache(tmp_path / "c", tmp_path / "f.tar") == ({"tuned": 1}, {})
    assert (tmp_path / "mine").read_text() == "mine" and path.read_bytes() == b"x" and not path.is_symlink()


def test_exports_are_ordinary_tar_files(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    file = io.BytesIO()
    export_cache(tmp_path, file)
    file.seek(0)
    with tarfile.open(fileobj=file) as archive:
        members = archive.getmembers()
    assert len(members) == 3 and all(m.isreg() and m.name.startswith("programs/") and m.mode == 0o600 for m in members)


def test_clearing_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    filled(tmp_path / "c", 2)
    for name in ("v2/heads", "constants"):
        (tmp_path / "c" / name).symlink_to(tmp_path / "mine")
    assert clear_cache(tmp_path / "c")["programs"] == 2
    assert (tmp_path / "mine" / "file").read_text() == "mine" and {p.name for p in (tmp_path / "c").rglob("*")} == {"v2", "lock"}
