"""A transformer layer for every length from 1 to 64, compiled once: ``python docs/examples/torch_range.py``."""

import torch
from torch import nn

import rammer


def main() -> float:
    """Return the largest difference from eager torch."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    length = torch.export.Dim("length", min=1, max=64)
    compiled = rammer.torch.compile(model, (torch.randn(1, 16, 32),), dynamic_shapes={"src": {1: length}})
    worst = 0.0
    with torch.inference_mode():
        for n in (64, 40, 7, 1):
            x = torch.randn(1, n, 32)
            worst = max(worst, float((compiled(x) - model(x)).abs().max()))
    compiled.close()
    print(f"largest difference from eager torch: {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
