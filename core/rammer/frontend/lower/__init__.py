"""The lowering from a Graph to a ComputeGraph: the registry of lowerings, and one module per operator family."""
