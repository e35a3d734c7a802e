"""Compiled models: segments, host operators, artifacts and their files, and what a user chooses when compiling."""
