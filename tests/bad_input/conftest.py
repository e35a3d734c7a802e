"""Fixtures of this folder: a separate cache for each test."""

from command import own_cache

__all__ = ["own_cache"]
