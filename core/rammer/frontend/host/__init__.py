"""Operators that run on the host, and host implementations of operators without a tensor expression."""
