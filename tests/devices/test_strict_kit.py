"""Conformance kit on ``broken_devices``: one planted mistake per device is detected, and correct devices pass."""

from __future__ import annotations

import broken_rows
import pytest
from broken_devices import HARMLESS, MISTAKES, subject

from rammer_testing import thread_checks
from rammer_testing.conformance import CHECKS
from rammer_testing.subject import DISTURBED, disturbance


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = MISTAKES[mistake]
    if "has not ended" in planted.says:
        monkeypatch.setattr(thread_checks, "PATIENCE", 2.0)
    with pytest.raises(Exception, match=planted.says):
        for _ in range(3):  # a fault between threads need not occur every time on a loaded machine
            CHECKS[planted.check](subject(planted.broken))
        if planted.check == "clocks" and disturbance() > DISTURBED:
            pytest.skip("the machine is busy with other work, so that no time is wrong")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("check", sorted({m.check for m in MISTAKES.values()}))
def test_the_kit_passes_what_is_right(check: str) -> None:
    CHECKS[check](subject(broken_rows.Rows))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", HARMLESS)
def test_the_core_makes_harmless(mistake: str) -> None:
    planted = HARMLESS[mistake]
    CHECKS[planted.check](subject(planted.broken))
