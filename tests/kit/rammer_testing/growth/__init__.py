"""The growth of compile cost with model size: ``shapes`` (graphs of any size), ``measure`` (steps and their exponents)."""
