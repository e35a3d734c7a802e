"""From a Model and input shapes to a Graph: inference, folding, if-conversion."""
