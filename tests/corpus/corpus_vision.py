"""Recipes: torchvision's and timm's networks and detectors, narrow and shallow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from corpus_recipe import Call, Torch
from torch import nn
from torchvision.models import detection

OPEN = {"x": {0: "batch"}}


def image(model: nn.Module, size: int = 32, batch: int = 2, outputs: tuple[str, ...] = ("y",), free: bool = False) -> Torch:
    """Return a network over an open number of images. With ``free``, their height and width are open too."""
    axes = {"x": {0: "batch", 2: "height", 3: "width"}} if free else OPEN
    other = ({"height": size + 32, "width": size}, {"height": size, "width": size + 64}) if free else ({}, {})
    further = tuple({"batch": n, **o} for n, o in zip((1, 3), other, strict=True))
    return Torch(model, {"x": torch.randn(batch, 3, size, size)}, outputs, axes, further)


def by_timm(name: str, size: int = 32, free: bool = False, **more: Any) -> Torch:
    """Return a network of timm."""
    return image(timm.create_model(name, pretrained=False, num_classes=10, **more), size, free=free)


def mobilenet_v3() -> nn.Module:
    """Return torchvision's MobileNetV3 of four blocks."""
    from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

    block = partial(InvertedResidualConfig, width_mult=1.0)
    rows = [
        block(8, 3, 8, 8, True, "RE", 2, 1),
        block(8, 3, 24, 12, False, "RE", 2, 1),
        block(12, 5, 32, 16, True, "HS", 2, 1),
        block(16, 5, 40, 16, True, "HS", 1, 1),
    ]
    return MobileNetV3(rows, 32, num_classes=10)


def efficientnet() -> nn.Module:
    """Return torchvision's EfficientNet of three stages."""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    rows = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 12, 2), MBConvConfig(4, 5, 2, 12, 16, 1)]
    return EfficientNet(rows, 0.1, num_classes=10, last_channel=32)


def convnext() -> nn.Module:
    """Return torchvision's ConvNeXt of two stages."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=10)


def swin(block: Any = None) -> nn.Module:
    """Return torchvision's Swin transformer of two stages, with shifted windows."""
    from torchvision.models.swin_transformer import PatchMerging, PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    merging = PatchMergingV2 if block is SwinTransformerBlockV2 else PatchMerging
    return SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=10, block=block, downsample_layer=merging)


def swin_v2() -> nn.Module:
    """Return the second version of Swin."""
    from torchvision.models.swin_transformer import SwinTransformerBlockV2

    return swin(SwinTransformerBlockV2)


class Features(nn.Module):
    """Two stages of strided convolutions: images of a half and a quarter of the size."""

    out_channels = 8

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 2, dilation=2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> Any:
        from collections import OrderedDict

        a = self.first(x)
        return OrderedDict([("0", a), ("out", self.second(a))])


def segmenter(head: nn.Module) -> Torch:
    """Return torchvision's segmentation model: features, a head, and their resizing to the image."""
    from torchvision.models.segmentation import DeepLabV3

    model = Call(DeepLabV3(Features(), head), lambda m, x: m(x)["out"])
    return image(model, 32, free=True)


def deeplab() -> Torch:
    """Return DeepLabV3's head: parallel dilated convolutions and pooling."""
    from torchvision.models.segmentation.deeplabv3 import ASPP

    return segmenter(nn.Sequential(ASPP(8, (2, 4, 6), 8), nn.Conv2d(8, 5, 1)))


def detected(model: nn.Module, size: int, names: tuple[str, ...]) -> Torch:
    """Return a detector over one image, with boxes, labels and scores."""
    call = Call(model, lambda m, x: tuple(m([x])[0][n] for n in names))
    return Torch(call, {"x": torch.rand(3, size, size)}, names, values={"x": "unit"})


BOXES = ("boxes", "labels", "scores")
DETECT = {"min_size": 64, "max_size": 64, "num_classes": 4}


def anchors(levels: int = 1) -> Any:
    """Return a small anchor generator."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((16, 32),) * levels, ((0.5, 1.0),) * levels)


class Last(Features):
    """A module that returns only the last features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)["out"]


def rcnn(masks: bool) -> Torch:
    """Return Faster or Mask R-CNN with narrow heads."""
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    more: dict[str, Any] = {
        "rpn_anchor_generator": anchors(),
        "box_roi_pool": MultiScaleRoIAlign(["0"], 3, 2),
        "box_head": TwoMLPHead(8 * 9, 16),
        "box_predictor": FastRCNNPredictor(16, 4),
        "rpn_pre_nms_top_n_test": 50,
        "rpn_post_nms_top_n_test": 20,
        "box_detections_per_img": 10,
    }
    settings = {**DETECT, **more, "num_classes": None, "box_score_thresh": 0.01}
    if masks:
        settings |= {"mask_roi_pool": MultiScaleRoIAlign(["0"], 6, 2)}
        settings |= {"mask_head": MaskRCNNHeads(8, (8,), 1), "mask_predictor": MaskRCNNPredictor(8, 8, 4)}
        return detected(detection.MaskRCNN(Last(), **settings), 64, (*BOXES, "masks"))
    return detected(detection.FasterRCNN(Last(), **settings), 64, BOXES)


def ssd() -> Torch:
    """Return SSD over two levels."""
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD, SSDHead

    boxes = DefaultBoxGenerator([[2], [2]])
    head = SSDHead([8, 8], boxes.num_anchors_per_location(), 4)
    settings = {"score_thresh": 0.01, "detections_per_img": 10, "topk_candidates": 20}
    return detected(SSD(Features(), boxes, (32, 32), 4, head=head, **settings), 32, BOXES)


def retina() -> Torch:
    """Return RetinaNet or FCOS on one level."""
    settings = {**DETECT, "score_thresh": 0.01, "topk_candidates": 20, "detections_per_img": 10}
    return detected(detection.RetinaNet(Last(), anchor_generator=anchors(), **settings), 64, BOXES)


def fcos() -> Torch:
    """Return FCOS on one level."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    settings = {**DETECT, "score_thresh": 0.01, "topk_candidates": 20, "detections_per_img": 10}
    return detected(detection.FCOS(Last(), anchor_generator=AnchorGenerator(((8,),), ((1.0,),)), **settings), 64, BOXES)


V = torchvision.models
RESNET = {"channels": (8, 8, 16, 16), "stem_width": 8, "layers": (1, 1, 1, 1)}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4}
RECIPES: dict[str, Callable[[], Torch]] = {
    "mobilenet_v2": lambda: image(V.MobileNetV2(10, 0.1, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]]), free=True),
    "mobilenet_v3": lambda: image(mobilenet_v3()),
    "efficientnet": lambda: image(efficientnet()),
    "convnext_tv": lambda: image(convnext()),
    "swin_tv": lambda: image(swin()),
    "swin_v2_tv": lambda: image(swin_v2()),
    "densenet": lambda: image(V.DenseNet(4, (2, 2, 2), 8, num_classes=10)),
    "shufflenet": lambda: image(V.ShuffleNetV2([1, 1, 1], [8, 16, 24, 32, 32], num_classes=10)),
    "mnasnet": lambda: image(V.MNASNet(0.1, 10)),
    "vit_tv": lambda: image(V.VisionTransformer(32, 8, 2, 4, 16, 32, num_classes=10)),
    "deeplab": deeplab,
    "faster_rcnn": lambda: rcnn(False),
    "mask_rcnn": lambda: rcnn(True),
    "ssd": ssd,
    "retinanet": retina,
    "fcos": fcos,
    "resnet": lambda: by_timm("resnet18", **RESNET),
    "seresnet": lambda: by_timm("seresnet18", **RESNET),
    "resnext": lambda: by_timm("resnext50_32x4d", **{**RESNET, "cardinality": 4, "base_width": 4}),
    "ghostnet": lambda: by_timm("ghostnet_050", width=0.1),
    "mixer": lambda: by_timm("mixer_s32_224", img_size=32, patch_size=8, num_blocks=2, embed_dim=16),
    "eva": lambda: by_timm("eva02_tiny_patch14_224", **VIT),
    "xcit": lambda: by_timm("xcit_nano_12_p16_224", **{**VIT, "patch_size": 16}),
    "edgenext": lambda: by_timm("edgenext_xx_small", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), size=64, heads=(2, 2, 2, 2)),
    "inception_next": lambda: by_timm("inception_next_tiny", depths=(1, 1), dims=(16, 32)),
    "repvgg": lambda: by_timm("repvgg_a0"),
}
