"""Contract tests of every rammer device, one per check, and tests of this device."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from rammer.device.loader import Registry
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer_testing.conformance import CHECKS, copying_program, subject
from rammer_testing.interface import private_uses


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    with subject("toy") as device:
        CHECKS[check](device)
        if device.whole:
            pytest.skip("; ".join(device.skipped))


def test_it_uses_public_names_alone() -> None:
    assert not private_uses(Path(str(import_module("rammer_toy").__file__)).read_text())


def test_limits_are_named() -> None:
    with pytest.raises(DeviceFailure, match=r"out of memory: program copy needs 800 bytes, the limit is 799"):
        Registry().open("toy", options={"memory": "799"}).load(copying_program(100), {})
    with pytest.raises(BadInput, match="device toy has no option 'speed'"):
        Registry().open("toy", options={"speed": "1"})
    with pytest.raises(DeviceUnavailable, match="toy is a cpu, not a gpu"):
        Registry().open("toy", "gpu")
