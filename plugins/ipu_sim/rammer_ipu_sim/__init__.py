"""A simulator of GraphCore's GC2: bulk-synchronous supersteps over tiles with enforced local memory."""
