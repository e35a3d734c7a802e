"""Rewrites of recurrences and loops."""
