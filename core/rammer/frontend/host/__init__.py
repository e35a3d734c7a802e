"""Host implementations of operators without a tensor expression."""
