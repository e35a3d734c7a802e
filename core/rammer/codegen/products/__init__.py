"""Matrix products in blocks: tiles, the walk over the sum, operands in local memory, and the cost of a ring of blocks.

Plugins whose devices have groups of threads with a local memory write their kernels from these parts."""
