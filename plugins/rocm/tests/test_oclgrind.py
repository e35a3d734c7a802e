"""GPU kernels of rocm under Oclgrind, if installed: planted faults are detected, and a few random cases are clean."""

from __future__ import annotations

from pathlib import Path

import oclgrind
import pytest

from rammer.errors import DeviceUnavailable

try:
    LIBRARY = oclgrind.find_library()
except DeviceUnavailable:
    LIBRARY = Path()
pytestmark = pytest.mark.skipif(not LIBRARY.name, reason="oclgrind is not installed (apt-get install oclgrind)")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("tool", oclgrind.TOOLS)
def test_planted_faults_are_found(tool: str) -> None:
    oclgrind.check_planted(LIBRARY, tool)


#: Cases of one second each: shared reductions, layers that stay in local memory, float16, views.
CASES = {
    "races": ("kit:attention @float32 layout=keep seed=2", "kit:normalisation @float16 layout=keep seed=4"),
    "values": ("kit:views seed=3",),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("tool", "case"), [(t, c) for t, cases in CASES.items() for c in cases])
def test_a_case_is_clean(tool: str, case: str) -> None:
    events = list(oclgrind.child(LIBRARY, tool, "--case", case))
    assert [e["found"] for e in events if "found" in e] == [[]]
    assert events[-1]["covered"]["launches"] > 0
