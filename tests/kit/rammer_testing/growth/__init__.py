"""How the cost of compiling grows with a model: ``shapes`` (graphs of any size), ``measure`` (steps and their exponents)."""
