"""Products of half precision on AMD GPUs: matrix instructions of whole waves."""
