"""NVIDIA GPUs for rammer."""
