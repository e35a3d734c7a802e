"""Products of bytes, summed in 32 bits."""
