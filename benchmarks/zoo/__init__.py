"""The papers' models, built by code with seeded weights and exported to ONNX.

``ZOO[key].build(seed)`` returns the model; weights depend only on the seed. Each builder's entry has the published figures, and
tests compare the models with them. Parameters (learned tensors) match exactly where the source is exact. Multiply-accumulates
(MACs; a FLOP count is twice that) match within the source's rounding. ``find("KEY:small")`` returns a model's small form.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rammer.errors import BadInput
from zoo.entries import ENTRIES
from zoo.entry import SEED, Entry

__all__ = ["FROZEN", "SEED", "SMALL", "ZOO", "Entry", "find"]

ZOO: Final[Mapping[str, Entry]] = MappingProxyType({e.key: e for e in ENTRIES})
#: Suffix of a key for the small form.
SMALL: Final = ":small"
#: The models whose kernels and programs are frozen in tests/golden.
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
    """Return a model by key, or its small form. Raises BadInput for other keys."""
    name = key.removesuffix(SMALL)
    if name not in ZOO:
        raise BadInput(f"unknown model {key!r}", hint=f"one of: {', '.join(ZOO)}; KEY{SMALL} is a model's small form")
    return ZOO[name].narrow() if key.endswith(SMALL) else ZOO[name]
