"""The papers' models, built by code with seeded weights and exported to ONNX.

``ZOO[key].build(seed)`` gives the model; weights depend on the seed alone. Published figures stand beside each
builder and tests hold the models to them: parameters (learned tensors) exactly where the source is exact, and
multiply-accumulates (MACs; a FLOP count is twice that) within the source's rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import onnx

from zoo.cnn import densenet121, mobilenet_v2, resnet50, resnext29, squeezenet
from zoo.inception import inception_v3
from zoo.nasnet import nasnet_cifar
from zoo.net import Array
from zoo.sequence import bert_base, lstm_tc, nerf_mlp

SEED: Final = 2026


@dataclass(frozen=True)
class Entry:
    """One model. ``parameters`` and ``gmacs`` are as published, ``places`` the digits that ``parameters`` has
    (None: exact; -5: rounded to 100,000); ``tolerance`` is the relative rounding of ``gmacs``."""

    key: str
    builder: Callable[[int], onnx.ModelProto] = field(repr=False)
    inputs: Mapping[str, tuple[int, ...]]
    parameters: int
    gmacs: float
    tolerance: float
    source: str
    places: int | None = None
    integers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def build(self, seed: int = SEED) -> onnx.ModelProto:
        """The model with weights drawn from ``seed``."""
        return self.builder(seed)

    def feeds(self, seed: int) -> dict[str, Array]:
        """Random inputs by name: floats N(0, 1), integers uniform below the bound in ``integers``."""
        rng = np.random.default_rng(seed)
        return {
            n: rng.integers(0, self.integers[n], s) if n in self.integers else rng.standard_normal(s, np.float32)
            for n, s in self.inputs.items()
        }


def _image(size: int) -> dict[str, tuple[int, ...]]:
    return {"image": (1, 3, size, size)}


_TORCHVISION: Final = "torchvision's table of pre-trained weights (num_params, GFLOPS, which counts MACs)"
_RAMMER: Final = "OSDI'20 Rammer, section 5.1: 10 layers, hidden 256, 100 steps; counts follow from the dimensions"

_ENTRIES: Final = (
    Entry("lstm_tc", lstm_tc, {"sequence": (100, 1, 256)}, 5_263_360, 0.524288, 1e-9, _RAMMER),
    Entry("lstm_tc_bs4", partial(lstm_tc, batch=4), {"sequence": (100, 4, 256)}, 5_263_360, 2.097152, 1e-9, _RAMMER),
    Entry(
        "resnext29",
        resnext29,
        _image(32),
        68_160_000,
        10.7,
        0.005,
        "parameters: github.com/bearpaw/pytorch-classification, 68.16M (arXiv 1611.05431, table 7, cuts that to "
        "68.1M); MACs: 21.4 GFLOP, the project's table of targets",
        -4,
    ),
    Entry(
        "inception_v3",
        inception_v3,
        _image(299),
        23_834_568,
        5.71,
        0.005,
        f"{_TORCHVISION}; parameters without the auxiliary classifier's 3,326,696",
    ),
    Entry("squeezenet", squeezenet, _image(224), 1_248_424, 0.82, 0.01, _TORCHVISION),
    Entry("mobilenet_v2", mobilenet_v2, _image(224), 3_504_872, 0.30, 0.02, _TORCHVISION),
    Entry("resnet50", resnet50, _image(224), 25_557_032, 4.09, 0.005, _TORCHVISION),
    Entry("densenet121", densenet121, _image(224), 7_978_856, 2.83, 0.015, _TORCHVISION),
    Entry(
        "nasnet_cifar",
        nasnet_cifar,
        _image(32),
        3_300_000,
        0.0,
        0.0,
        "arXiv 1707.07012, table 1: NASNet-A (6 @ 768), 3.3M parameters; no FLOP count is published",
        -5,
    ),
    Entry(
        "bert_base",
        bert_base,
        {"input_ids": (1, 128), "token_type_ids": (1, 128)},
        108_891_648,
        11.25,
        0.01,
        "parameters: Hugging Face's bert-base-uncased, 109,482,240, less the pooler's 590,592; "
        "FLOPs: arXiv 2004.02984 (MobileBERT), table 4: 22.5 G at 128 tokens",
        integers={"input_ids": 30522, "token_type_ids": 2},
    ),
    Entry(
        "nerf_mlp",
        nerf_mlp,
        {"samples": (65536, 60)},
        33_284,
        2.147483648,
        1e-9,
        "arithmetic: 65,536 rows of 60x64 + 7 x 64x64 + 64x4 MACs",
    ),
)

#: Every model by key.
ZOO: Final[Mapping[str, Entry]] = MappingProxyType({e.key: e for e in _ENTRIES})
