"""One-sided transfers between devices."""
