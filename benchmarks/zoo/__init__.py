"""The papers' models, built by code with seeded weights and exported to ONNX.

``ZOO[key].build(seed)`` gives the model; weights depend on the seed alone. Published figures stand beside each
builder and tests hold the models to them: parameters (learned tensors) exactly where the source is exact, and
multiply-accumulates (MACs; a FLOP count is twice that) within the source's rounding.
``find("KEY:small")`` is a model's small form.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rammer.errors import BadInput
from zoo.entries import ENTRIES
from zoo.entry import SEED, Entry

__all__ = ["FROZEN", "SEED", "SMALL", "ZOO", "Entry", "find"]

#: Every model by key.
ZOO: Final[Mapping[str, Entry]] = MappingProxyType({e.key: e for e in ENTRIES})
#: What a key ends in that means the small form.
SMALL: Final = ":small"
#: The models that kernels and programs are frozen for (tests/golden).
FROZEN: Final = (
    "lstm_tc",
    "lstm_tc_bs4",
    "resnext29",
    "inception_v3",
    "squeezenet",
    "mobilenet_v2",
    "resnet50",
    "densenet121",
    "nasnet_cifar",
    "bert_base",
    "nerf_mlp",
)


def find(key: str) -> Entry:
    """A model by key, or its small form. BadInput for others."""
    name = key.removesuffix(SMALL)
    if name not in ZOO:
        raise BadInput(f"unknown model {key!r}", hint=f"one of: {', '.join(ZOO)}; KEY{SMALL} is a model's small form")
    return ZOO[name].narrow() if key.endswith(SMALL) else ZOO[name]
