"""Binding of a Model to input shapes: inference, folding, if-conversion."""
