"""Windows over images without a contraction: depthwise convolutions and pooling."""
