"""Compiled models: segments, host operators, artifacts and their files."""
