"""Measurement of kernels and programs, and the store of results."""
