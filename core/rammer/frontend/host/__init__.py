"""Operators without a tensor expression, computed on the host."""
