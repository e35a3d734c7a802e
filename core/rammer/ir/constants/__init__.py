"""Constant arrays: recipes, mapped files, digests."""
