"""Measuring kernels and programs, and the store of what was measured."""
