"""How tensors cross between devices: one one-sided write into memory that was exchanged before, and a flag behind it."""
