"""Proof that a program is legal, from its text alone."""
