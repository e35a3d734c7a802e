"""Rewrites of compute graphs."""
