"""The version, in a separate module that imports nothing else."""

from __future__ import annotations

__version__ = "0.1.0"
