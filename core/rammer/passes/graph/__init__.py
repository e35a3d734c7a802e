"""Rewrites of graphs, each a frozen value."""
