"""The models of the zoo, with their published figures and a form small enough for every test."""

from __future__ import annotations

from functools import partial
from typing import Final

from zoo.branches import alexnet, randwire, resnext29_branches, squeezenet_bypass
from zoo.cnn import densenet121, mobilenet_v2, resnet50, resnext29, squeezenet
from zoo.entry import Entry
from zoo.inception import inception_v3
from zoo.modern import convnext_t, efficientnet_b0
from zoo.nasnet import nasnet_cifar, nasnet_large
from zoo.restoration import bsrn, mobilevit_s, nafnet, restormer
from zoo.sequence import bert_base, lstm_tc, nerf_mlp
from zoo.speech import conformer, crnn, deepspeech2, quartznet
from zoo.steps import dien, lstm80, seq2seq, transformer
from zoo.vision import swin_t, vit


def _image(size: int) -> dict[str, tuple[int, ...]]:
    return {"image": (1, 3, size, size)}


_TORCHVISION: Final = "torchvision's table of pre-trained weights (num_params, GFLOPS, which counts MACs)"
_RAMMER: Final = "OSDI'20 Rammer, section 5.1: 10 layers, hidden 256, 100 steps; counts follow from the dimensions"
_SHAPES: Final = "no count is published for this form; arithmetic from the dimensions"
_LSTM: Final = {"layers": 3, "hidden": 16, "steps": 7}

ENTRIES: Final = (
    Entry("lstm_tc", lstm_tc, {"sequence": (100, 1, 256)}, 5_263_360, 0.524288, 1e-9, _RAMMER, small=_LSTM),
    Entry("lstm_tc_bs4", partial(lstm_tc, batch=4), {"sequence": (100, 4, 256)}, 5_263_360, 2.097152, 1e-9, _RAMMER, small=_LSTM),
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
        small={"size": 16, "width": 2},
    ),
    Entry(
        "inception_v3",
        inception_v3,
        _image(299),
        23_834_568,
        5.71,
        0.005,
        f"{_TORCHVISION}; parameters without the auxiliary classifier's 3,326,696",
        small={"size": 171, "part": 16},
    ),
    Entry("squeezenet", squeezenet, _image(224), 1_248_424, 0.82, 0.01, _TORCHVISION, small={"size": 48, "part": 8}),
    Entry("mobilenet_v2", mobilenet_v2, _image(224), 3_504_872, 0.30, 0.02, _TORCHVISION, small={"size": 128, "part": 8}),
    Entry("resnet50", resnet50, _image(224), 25_557_032, 4.09, 0.005, _TORCHVISION, small={"size": 128, "width": 4}),
    Entry("densenet121", densenet121, _image(224), 7_978_856, 2.83, 0.015, _TORCHVISION, small={"size": 128, "growth": 4}),
    Entry(
        "nasnet_cifar",
        nasnet_cifar,
        _image(32),
        3_300_000,
        0.0,
        0.0,
        "arXiv 1707.07012, table 1: NASNet-A (6 @ 768), 3.3M parameters; no FLOP count is published",
        -5,
        small={"cells": 3, "filters": 4},
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
        small={"tokens": 9, "layers": 2, "width": 24, "heads": 3, "vocabulary": 50},
    ),
    Entry(
        "nerf_mlp",
        nerf_mlp,
        {"samples": (65536, 60)},
        33_284,
        2.147483648,
        1e-9,
        "arithmetic: 65,536 rows of 60x64 + 7 x 64x64 + 64x4 MACs",
        small={"rows": 33},
    ),
    Entry(
        "alexnet",
        alexnet,
        _image(227),
        60_965_224,
        0.724,
        0.001,
        "parameters: Caffe's bvlc_alexnet; MACs: Sze et al., arXiv 1703.09039, table II",
        small={"size": 67, "width": 2, "classes": 10},
    ),
    Entry(
        "resnext29_branches",
        resnext29_branches,
        _image(32),
        7_908_298,
        3.13491712,
        1e-9,
        f"{_SHAPES}: 16 branches of c x 64 and 9 x 64 x 64 weights, 1,024 x o behind them, and norms, for (c, o) = (64, 64) x 3, "
        "(64, 128), (128, 128) x 2, (128, 256), (256, 256) x 2",
        small={"size": 16, "width": 4, "cardinality": 3, "blocks": 2},
    ),
    Entry(
        "deepspeech2",
        deepspeech2,
        {"spectrogram": (1, 1, 300, 171)},
        6_498_813,
        2.1793824,
        1e-9,
        f"{_SHAPES}: 32 x 41 x 11 and 32 x 32 x 21 x 11 weights at 150 x 86 and 75 x 86 places; 75 steps of 1024 x (2752 + 256), "
        "six times 1024 x 512, and 256 x 29",
        small={"frames": 24, "bins": 17, "channels": 4, "hidden": 16, "layers": 2, "kernels": ((11, 5), (5, 5))},
    ),
    Entry(
        "seq2seq",
        seq2seq,
        {"sequence": (100, 1, 128)},
        1_585_152,
        0.12058624,
        1e-9,
        f"{_SHAPES}: 12 layers of 512 x 256 weights and 1,024 biases; 8 x 100 + 4 x 30 steps",
        small={"hidden": 16, "encoder": (3, 5), "decoder": (2, 4)},
    ),
    *(
        Entry(
            f"lstm80_{units}",
            partial(lstm80, units=units),
            {"sequence": (80, 1, units), "output": (1, units), "state": (1, units)},
            8 * units**2 + 4 * units,
            80 * 8 * units**2 / 1e9,
            1e-9,
            f"{_SHAPES}: 80 steps of eight products with {units} x {units} weights",
            small={"units": 16, "steps": 6},
        )
        for units in (128, 512)
    ),
    Entry(
        "randwire",
        randwire,
        _image(224),
        61_500_000,
        7.9,
        0.0203,
        "arXiv 1904.01569, table 4: WS(4, 0.75), C = 154: 61.5 +- 1.32 M parameters, 7.9 +- 0.16 G MACs over graphs",
        spread=1_320_000,
        small={"size": 128, "width": 8, "nodes": 12, "classes": 10},
    ),
    Entry(
        "nasnet_large",
        nasnet_large,
        _image(331),
        88_753_150,
        23.8,
        0.005,
        "parameters: nasnetalarge of github.com/Cadene/pretrained-models.pytorch; MACs: arXiv 1707.07012, table 2",
        small={"size": 83, "cells": 3, "filters": 8, "stem": 8, "classes": 10},
    ),
    Entry(
        "squeezenet_bypass",
        squeezenet_bypass,
        _image(224),
        1_248_424 + 97 * 128 + 129 * 256 + 257 * 384 + 385 * 512,
        1.16529872,
        1e-9,
        "parameters: torchvision's squeezenet1_0 and four 1x1 convolutions with biases (arXiv 1602.07360, figure 2; its table 3 "
        "says 7.7 MB, which no reading of that figure gives); MACs by arithmetic",
        small={"size": 48, "width": 4, "classes": 10},
    ),
    Entry(
        "transformer",
        transformer,
        {"source": (1, 64), "target": (1, 64)},
        65_000_000,
        4.10648576,
        1e-9,
        "parameters: arXiv 1706.03762, table 3, 65 M, whose table of words is larger than the about 37,000 of section 5.1; "
        "MACs by arithmetic",
        spread=2_000_000,
        integers={"source": 37000, "target": 37000},
        small={"source": 7, "target": 5, "layers": 1, "width": 24, "heads": 3, "vocabulary": 50},
    ),
    Entry(
        "dien",
        dien,
        {"user": (128,), "item": (128,), "kind": (128,), "items": (128, 100), "kinds": (128, 100), "seen": (128, 100)},
        (543_060 + 367_983 + 1_601) * 18 + 81_571,
        0.394375168,
        1e-9,
        f"{_SHAPES} in github.com/mouna99/dien: tables of 18 columns, 7,992 in the GRU, 16,249 in the attention, 7,884 in the "
        "AUGRU, 49,446 in the last layers",
        integers={"user": 543060, "item": 367983, "kind": 1601, "items": 367983, "kinds": 1601, "seen": 2},
        small={"batch": 3, "steps": 6, "embedding": 4, "users": 50, "items": 40, "kinds": 16},
    ),
    Entry(
        "crnn",
        crnn,
        {"line": (1, 1, 32, 100)},
        8_300_000,
        0.0,
        0.0,
        "arXiv 1507.05717, section 3.3: 8.3M parameters; no FLOP count is published",
        -5,
        small={"width": 24, "channels": 4, "hidden": 12},
    ),
    Entry(
        "quartznet",
        quartznet,
        {"features": (1, 64, 1, 800)},
        18_900_000,
        0.0,
        0.0,
        "arXiv 1910.10261, table 2: QuartzNet-15x5, 18.9M parameters; no FLOP count is published",
        -5,
        small={"frames": 40, "part": 32, "repeats": 1, "inner": 2},
    ),
    Entry(
        "conformer",
        conformer,
        {"frames": (1, 512, 512)},
        12 * 6_323_712,
        43.580915712,
        1e-9,
        f"{_SHAPES}: a block has 4,201,472 in the half steps, 1,314,816 in the attention, 806,400 in the convolution, "
        "1,024 in the norm",
        small={"frames": 12, "layers": 1, "width": 24, "heads": 3, "kernel": 5},
    ),
    Entry(
        "vit_b16",
        vit,
        _image(224),
        86_567_656,
        17.56,
        0.005,
        _TORCHVISION,
        small={"size": 32, "layers": 2, "width": 24, "heads": 3, "classes": 10},
    ),
    Entry(
        "swin_t",
        swin_t,
        _image(224),
        28_288_354,
        4.49,
        0.005,
        _TORCHVISION,
        small={"size": 56, "width": 12, "depths": (2, 2), "classes": 10},
    ),
    Entry(
        "efficientnet_b0",
        efficientnet_b0,
        _image(224),
        5_288_548,
        0.39,
        0.015,
        _TORCHVISION,
        small={"size": 128, "part": 8, "classes": 10},
    ),
    Entry(
        "convnext_t",
        convnext_t,
        _image(224),
        28_589_128,
        4.46,
        0.005,
        _TORCHVISION,
        small={"size": 32, "width": 8, "depths": (1, 1, 2, 1), "classes": 10},
    ),
    Entry(
        "vit_s32",
        partial(vit, patch=32, width=384, heads=6),
        _image(224),
        22_878_952,
        1.12,
        0.05,
        "github.com/huggingface/pytorch-image-models, vit_small_patch32_224: 22.88M parameters, 1.1 GMACs",
        small={"size": 64, "layers": 2, "width": 24, "heads": 3, "classes": 10},
    ),
    Entry(
        "mobilevit_s",
        mobilevit_s,
        _image(256),
        5_600_000,
        2.0,
        0.05,
        "arXiv 2110.02178, table 7: 5.6M parameters, 2.0 GFLOPs, which counts MACs",
        -5,
        small={"size": 64, "part": 4, "classes": 10},
    ),
    Entry(
        "nafnet",
        nafnet,
        _image(256),
        7_022_400 + 349_523,
        4.12922368,
        1e-9,
        f"{_SHAPES}: a block of c channels has 7 c^2 + 33 c, and 349,523 are in the other convolutions",
        small={"size": 32, "width": 4, "depths": (1, 1, 1), "up": 1},
    ),
    Entry(
        "restormer",
        restormer,
        _image(256),
        26_130_000,
        140.99 + 13.892,
        1e-4,
        "arXiv 2111.09881, supplementary table: 26.13M parameters, 140.99 G MACs for 256x256, to which the products of "
        "attention (13.892 G) are added",
        -4,
        small={"size": 16, "width": 6, "depths": (1, 1, 1, 1), "refinement": 1},
    ),
    Entry(
        "bsrn",
        bsrn,
        _image(256),
        352_000,
        22.1,
        0.02,
        "arXiv 2205.05996, table 6: 352K parameters, 19.4 G MACs for 320x180, in proportion",
        -3,
        small={"size": 32, "width": 16, "blocks": 1},
    ),
)
