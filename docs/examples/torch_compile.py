"""A torch module through ``torch.compile``, on the device that holds its tensors: ``python docs/examples/torch_compile.py``."""

import torch
from torch import nn


class Classifier(nn.Module):
    """Two convolutions, an average over the image, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of ten classes."""
        return self.head(self.body(x).mean((2, 3)))


def main() -> float:
    """Return the largest difference from eager torch."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().eval().to(place)
    compiled = torch.compile(model, backend="rammer", options={"precision": "float32"})
    worst = 0.0
    with torch.inference_mode():
        for batch in (1, 4):
            x = torch.randn(batch, 3, 32, 32, device=place)
            worst = max(worst, float((compiled(x) - model(x)).abs().max()))
    print(f"largest difference from eager torch: {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
