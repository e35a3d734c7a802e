"""Distributions besides rammer-core that some commands need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from rammer.errors import BadInput

#: Distribution -> its folder in a checkout.
FOLDERS: Final = {"rammer-testing": "tests/kit", "rammer-bench": "benchmarks"}


def not_installed(command: str, distribution: str) -> BadInput:
    """Return the error of a command that needs a missing distribution."""
    hint = f"pip install {distribution}; in a checkout, pip install -e {FOLDERS[distribution]}"
    return BadInput(f"{command} needs {distribution}, which is not installed", hint=hint)


def require_kit(command: str) -> None:
    """Raise BadInput if the test kit is not installed."""
    if find_spec("rammer_testing") is None:
        raise not_installed(command, "rammer-testing")
