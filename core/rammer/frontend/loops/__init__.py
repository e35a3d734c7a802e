"""Control flow: unrolling, loop bodies, loop chunks."""
