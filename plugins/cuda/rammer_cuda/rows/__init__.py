"""Reductions along contiguous rows: products with a vector, and chains of row reductions."""
