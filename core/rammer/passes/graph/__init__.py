"""Rewrites of graphs, which are immutable values."""
