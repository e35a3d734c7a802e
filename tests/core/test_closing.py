"""Closing of devices: by the opener, once, whatever the outcome."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from rammer.cli.main import main
from rammer.compile_options import Request
from rammer.compiled.artifact import save_artifact
from rammer.device import loader
from rammer.device.loader import Registry
from rammer.device.manifest import Array, Device, OpenOptions, RunResult
from rammer.errors import BadInput, DeviceFailure
from rammer.ir.program import RProgram
from rammer.jit.onnx_source import open_source
from rammer.jit.session import open_executable
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import registry_of

import rammer_toy

MODEL = parser.parse_model('<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y) { y = Abs(x) }')
X = {"x": np.array([-1, 2, -3, 4], np.float32)}


class Counting(rammer_toy.ToyBackend):
    """A backend that counts openings and closings. ``inside`` is called in the middle of a run."""

    opened = closed = 0
    inside: Any = None

    def __init__(self, options: OpenOptions) -> None:
        super().__init__(options)
        type(self).opened += 1

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Any:
        backend = self

        class Program(rammer_toy.ToyProgram):
            def run(self, inputs: Mapping[str, Array]) -> RunResult:
                if backend.inside is not None:
                    backend.inside()
                return super().run(inputs)

        return Program(program, constants, self.limit)

    def close(self) -> None:
        type(self).closed += 1
        super().close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    Counting.opened, Counting.closed, Counting.inside = 0, 0, None
    return registry_of(Device("toy", "", rammer_toy.probe, Counting, options=(rammer_toy.MEMORY,), api=5))


def counts() -> tuple[int, int]:
    return Counting.opened, Counting.closed


def test_an_executable_closes_the_device_that_was_opened_for_it(registry: Registry, tmp_path: Path) -> None:
    exe = open_executable(MODEL, "toy", registry=registry)
    assert exe.run(X)["y"].tolist() == [1, 2, 3, 4]
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.compile_only({})))
    assert counts() == (1, 0)
    backend = exe.backend
    exe.close()
    exe.close()
    backend.close()
    assert counts() == (1, 1)
    with pytest.raises(DeviceFailure, match="device toy was closed"):
        exe.compile_only({})
    assert backend.vdevice.veus and backend.hardware.name and backend.fingerprint
    again = open_executable(tmp_path / "m.rammer", "", registry=registry)
    again.close()
    assert counts() == (2, 2)


def test_a_device_that_somebody_else_opened_stays_open(registry: Registry) -> None:
    backend = registry.open("toy")
    for _ in range(2):
        exe = Executable(open_source(MODEL), backend, "toy:0", registry=registry, store=KernelStore(None))
        exe.run(X)
        exe.close()
    assert counts() == (1, 0)
    backend.close()
    assert counts() == (1, 1)


def test_closing_the_device_closes_its_programs(registry: Registry) -> None:
    exe = open_executable(MODEL, "toy", registry=registry)
    bound = exe.bind(X)
    exe.backend.close()
    for call in (bound.run, lambda: exe.run(X)):
        with pytest.raises(DeviceFailure, match="closed"):
            call()
    exe.close()
    assert counts() == (1, 1)


def test_a_device_is_not_closed_from_within_a_run(registry: Registry) -> None:
    exe, told = open_executable(MODEL, "toy", registry=registry), list[str]()

    def close() -> None:
        with pytest.raises(DeviceFailure, match="cannot be closed from within a call") as caught:
            exe.backend.close()
        told.append(caught.value.what)

    exe.run(X)
    exe.backend.inside = close
    Counting.inside = staticmethod(close)
    assert exe.run(X)["y"].tolist() == [1, 2, 3, 4] and told
    Counting.inside = None
    assert exe.run(X)["y"].tolist() == [1, 2, 3, 4] and counts() == (1, 0)
    exe.close()
    assert counts() == (1, 1)


def test_what_was_opened_for_nothing_is_closed(registry: Registry) -> None:
    with pytest.raises(BadInput, match="precision"):
        open_executable(MODEL, "toy", Request(precision="tf32"), registry=registry)
    assert counts() == (1, 1)


#: Commands and their exit codes; the last one is refused after the device was opened.
COMMANDS = {"run": 0, "inspect": 0, "compile": 0, "compare --against reference": 0, "run --trace t.json": 2}


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_close_what_they_open(words: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, (name, *more) = tmp_path / "m.onnx", words.split()
    onnx.save(MODEL, path)
    monkeypatch.setattr(loader.Registry, "manager", registry.manager)
    monkeypatch.setattr(sys, "argv", ["rammer", name, str(path), "--device", "toy", *more])
    code = 0
    try:
        main()
    except SystemExit as done:
        code = int(done.code or 0)
    assert (code, counts()) == (COMMANDS[words], (1, 1))
