"""Every test of this folder has a cache of its own."""

from command import own_cache

__all__ = ["own_cache"]
