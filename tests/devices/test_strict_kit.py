"""The conformance kit finds planted mistakes, one a device (``broken_devices``), and nothing where there are none."""

from __future__ import annotations

import broken_rows
import pytest
from broken_devices import HARMLESS, MISTAKES, subject

from rammer.testing.conformance import CHECKS


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_kit_finds(mistake: str) -> None:
    planted = MISTAKES[mistake]
    with pytest.raises(Exception, match=planted.says):
        CHECKS[planted.check](subject(planted.broken))


@pytest.mark.parametrize("check", sorted({m.check for m in MISTAKES.values()}))
def test_the_kit_passes_what_is_right(check: str) -> None:
    CHECKS[check](subject(broken_rows.Rows))


@pytest.mark.parametrize("mistake", HARMLESS)
def test_the_core_makes_harmless(mistake: str) -> None:
    planted = HARMLESS[mistake]
    CHECKS[planted.check](subject(planted.broken))
