"""Products on GPUs: a ring of blocks in local memory, and register tiles."""
