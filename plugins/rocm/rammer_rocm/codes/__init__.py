"""Products of floats with weights of a few bits."""
