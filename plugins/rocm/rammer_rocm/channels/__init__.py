"""Windows that slide over an image with channels last."""
