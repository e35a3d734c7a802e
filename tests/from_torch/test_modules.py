"""Small modules of torchvision, timm and transformers through ``torch.compile`` against eager torch, and the examples."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

for package in ("torch", "onnxscript", "torchvision", "timm", "transformers"):
    pytest.importorskip(package, reason=f"needs {package}: make test-torch")
modules: Any = importlib.import_module("torch_modules")


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", modules.names())
def test_module_equals_eager(name: str, seed: int) -> None:
    """A module is right within 1e-4, whole on the device, and has at most one graph break more than torch."""
    found = modules.compare(modules.make(name, seed), "rocm", seed)
    assert found.right, found


@pytest.mark.parametrize("name", ["torch_compile", "torch_range"])
def test_example(name: str) -> None:
    """An example of ``docs/examples`` is right."""
    assert importlib.import_module(f"examples.{name}").main() < 1e-4
