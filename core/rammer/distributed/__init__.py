"""One model over several devices."""
