"""Windows that slide over an image: depthwise convolutions and pools."""
