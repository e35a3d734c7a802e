"""Convolutions of 3 x 3 with less than half of the multiplications."""
