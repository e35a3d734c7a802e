"""Files that outlive a process, and the checks before they are read.

This package has the names with which plugins cache files. Modules of the core import from the submodules."""

from rammer.cache.cache_location import make_private, why_shared, why_untrusted
from rammer.cache.disk_cache import Cache
from rammer.cache.whole_files import warn_of_cached, write_cached

__all__ = ["Cache", "make_private", "warn_of_cached", "why_shared", "why_untrusted", "write_cached"]
