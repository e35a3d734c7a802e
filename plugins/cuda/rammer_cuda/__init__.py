"""NVIDIA GPU device plugin for rammer."""
