"""Matrix products and convolutions: one kernel for several instructions."""
