"""What compute-sanitizer is asked for, without it."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings")

from sanitize import knows_barriers


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("Version 2025.3.1.0 (build 36414624) (public-release)", False),
        ("Version 2026.2.1.0", False),
        ("Version 2026.3.0.0", True),
        ("Version 2026.4.0.0 (build 39022338) (public-release)", True),
        ("Version 2027.1.0.0", True),
        ("", False),
    ],
)
def test_old_versions_report_races_across_barriers(version: str, known: bool) -> None:
    assert knows_barriers(version) is known
