"""Matrix products and convolutions: one kernel, several instructions."""
