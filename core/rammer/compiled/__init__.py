"""Compiled models: segments, artifacts and their files."""
