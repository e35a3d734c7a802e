"""Files that outlive a process, and the checks before they are read.

This package has the names with which plugins cache files. Modules of the core import from the submodules."""

from rammer.cache.cache_location import cache_folder, make_private, why_shared, why_untrusted
from rammer.cache.whole_files import cache_text, cached_bytes, cached_text, warn_of_cached, write_cached

__all__ = ["cache_folder", "cache_text", "cached_bytes", "cached_text", "make_private", "warn_of_cached", "why_shared"]
__all__ += ["why_untrusted", "write_cached"]
