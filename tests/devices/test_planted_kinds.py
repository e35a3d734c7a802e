"""The conformance kit finds planted mistakes of every kind (``broken_kinds``), by checks that are independent of them."""

from __future__ import annotations

import broken_claims
import pytest
from broken_devices import subject
from broken_kinds import CHECKS_OF, KINDS

from rammer_testing import thread_checks
from rammer_testing.conformance import CHECKS, ConformanceError
from rammer_testing.nonempty import some
from rammer_testing.subject import DISTURBED, disturbance

PLANTED = [(kind, name) for kind, broken in KINDS.items() for name in broken]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "name"), PLANTED)
def test_the_kit_finds(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_checks, "PATIENCE", 4.0)
    for _ in range(2):  # races need not show every time on a machine with other work
        for check in some(CHECKS_OF[kind]):
            try:
                CHECKS[check](subject(KINDS[kind][name]))
            except Exception as found:
                assert not isinstance(found, MemoryError)
                return
    if kind in ("prices", "clocks") and disturbance() > DISTURBED:
        pytest.skip("the machine is busy with other work, so that no time is wrong")
    pytest.fail(f"{', '.join(CHECKS_OF[kind])} found nothing")


def test_every_kind_has_several_mistakes() -> None:
    assert len(PLANTED) >= 48 and all(len(broken) >= 3 for broken in some(KINDS.values()))


def test_spans_of_a_right_device_pass() -> None:
    CHECKS["trace"](subject(broken_claims.Traced))


@pytest.mark.parametrize("check", ["odd operators", "large tiles"])
@pytest.mark.parametrize("right", [broken_claims.Small, broken_claims.Familiar])
def test_right_claims_pass(right: type, check: str) -> None:
    CHECKS[check](subject(right))


def test_a_check_that_does_not_apply_says_why() -> None:
    device = subject(broken_claims.Small)
    CHECKS["trace"](device)
    assert device.whole and device.skipped == ["it records no spans (Backend.trace)"]
    with pytest.raises(ConformanceError, match="is it a formula"):
        device.expect(False, "is it a formula")
