"""From a Graph to a ComputeGraph: the registry of lowerings and one module per family of operators."""
