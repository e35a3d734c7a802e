"""Parts that several kernel families share."""
