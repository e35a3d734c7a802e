"""Chains of matrix products in one launch: all results but the last stay on chip."""
