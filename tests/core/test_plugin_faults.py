"""Plugins that are newer, print, are slow or have wrong names: each is reported, and the others work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rammer.device import loader
from rammer.device.loader import Registry
from rammer.device.manifest import API_VERSION, Device, Hardware
from rammer.device.plugin_output import stdout_to_stderr
from rammer_testing.conformance import registry_of

NEWER = """
from rammer.device.hooks import hookimpl
from rammer.device.manifest import Device, {wanted}

{api}
@hookimpl
def rammer_devices():
    return [Device("newer", "a device of the future", list, list, api={number})]
"""
PRINTS = """
import ctypes, os
import rammer_toy
from rammer.device.hooks import hookimpl
from rammer.device.manifest import Device, Hardware

print("imported")
os.write(1, b"written\\n")
libc = ctypes.CDLL(None)
libc.puts(b"put")

def probe():
    print("probed")
    libc.puts(b"put")
    return rammer_toy.probe()

def open_it(options):
    print("opened")
    libc.puts(b"put")
    return rammer_toy.ToyBackend(options)

@hookimpl
def rammer_devices():
    print("asked")
    return [Device("loud", "prints", probe, open_it, api=5)]
"""


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """Write a new module and return its entry point."""
    path = folder / Path(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    return EntryPoint("newer", name, "rammer.devices")


@pytest.mark.parametrize("wanted", ["Hardware", "OfTheFuture"])
@pytest.mark.parametrize(("api", "number"), [("", "99"), ("API = 99", "API")])
@pytest.mark.parametrize("name", ["rammer_newer_{}", "rammer_newer_{}.parts.plugin"])
def test_a_newer_plugin_is_not_imported(
    name: str, api: str, number: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = name.format(abs(hash((name, api, wanted))))
    point = module(tmp_path, full, NEWER.format(wanted=wanted, api=api, number=number), monkeypatch)
    (status,) = Registry([point]).statuses()
    assert (status.name, status.state) == ("newer", "api-mismatch")
    assert "API version 99, this core" in status.reason
    assert full.partition(".")[0] not in sys.modules


def test_a_newer_plugin_whose_manifest_is_elsewhere_fails_to_load_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module(tmp_path, "rammer_split_1.manifest", NEWER.format(wanted="OfTheFuture", api="", number=99), monkeypatch)
    point = module(tmp_path, "rammer_split_1.__init__", "from rammer_split_1.manifest import rammer_devices", monkeypatch)
    (status,) = Registry([EntryPoint("newer", "rammer_split_1", point.group)]).statuses()
    assert (status.name, status.state) == ("newer", "api-mismatch")


def test_a_plugin_of_this_version_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = module(tmp_path, "rammer_current_1", NEWER.format(wanted="Hardware", api="", number=API_VERSION), monkeypatch)
    (status,) = Registry([point]).statuses()
    assert status.state == "no-hardware"
    broken = module(tmp_path, "rammer_current_2", NEWER.format(wanted="OfTheFuture", api="", number=API_VERSION), monkeypatch)
    (status,) = Registry([broken]).statuses()
    assert (status.state, "OfTheFuture" in status.reason) == ("load-error", True)


@pytest.mark.slow
def test_output_of_plugins_is_not_in_json(tmp_path: Path) -> None:
    (tmp_path / "rammer_loud.py").write_text(PRINTS)
    folder = tmp_path / "rammer_loud-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rammer-loud\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[rammer.devices]\nloud = rammer_loud\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RAMMER_DISABLE": "cuda,rocm,ipu_sim"}
    command = [sys.executable, "-c", "from rammer.cli.main import main; main()", "devices", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    rows = {row["device"]: row for row in json.loads(done.stdout)}
    assert rows["loud:0"]["state"] == "ok" and rows["loud:0"]["self_test"].startswith("ok")
    for said in ("imported", "written", "put", "asked", "probed", "opened"):
        assert said in done.stderr.splitlines()


def test_stdout_is_what_it_was_after_a_redirection(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_to_stderr(), stdout_to_stderr():
        print("inside")
        os.write(1, b"below\n")
    print("after")
    os.write(1, b"again\n")
    said = capfd.readouterr()
    assert said.err.splitlines() == ["inside", "below"]
    assert sorted(said.out.split()) == ["after", "again"]


def test_a_slow_probe_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "PROBING", 0.5)

    def slow() -> list[Hardware]:
        time.sleep(30)
        return []

    def quick() -> list[Hardware]:
        time.sleep(0.2)
        return [Hardware(0, "one", "cpu", 0)]

    devices = [Device("slow", "", slow, list, api=5), *(Device(f"quick{n}", "", quick, list, api=5) for n in range(4))]  # type: ignore[arg-type]
    start = time.monotonic()
    found = {s.name: s for s in registry_of(*devices).statuses()}
    assert time.monotonic() - start < 10
    assert (found["slow"].state, found["slow"].reason) == ("load-error", "probe did not finish within 0.5 s")
    assert all(found[f"quick{n}"].state == "ok" for n in range(4))


@pytest.mark.parametrize(("name", "words"), [("tyo", "did you mean 'toy'?"), ("abacus", "no plugin has that name; installed: ")])
def test_a_mistyped_name_in_the_environment_is_reported(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", f"cuda, {name}")
    assert Registry().status("toy").state == "ok"
    warning = capsys.readouterr().err
    assert warning.startswith(f"rammer: warning: RAMMER_DISABLE names {name!r}") and words in warning and "'cuda'" not in warning
