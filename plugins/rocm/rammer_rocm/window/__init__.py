"""Windows on GPUs: a strip of neighbouring outputs for each work-item."""
