"""Constant arrays: recipes, mapped files, digests.

This package has the names with which plugins read and release constants. Modules of the core import from the submodules."""

from rammer.ir.constants.digest import digest_array
from rammer.ir.constants.mapped_files import in_memory, release_pages
from rammer.ir.constants.recipes import ArrayRecipe, Part, as_array, parts_of

__all__ = ["ArrayRecipe", "Part", "as_array", "digest_array", "in_memory", "parts_of", "release_pages"]
