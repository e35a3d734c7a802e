"""Recipes: images, sounds, and both with words, by transformers, in tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from corpus_recipe import Named, Torch
from corpus_text import PAIR, SMALL, ids

SIZES = {n: SMALL[n] for n in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
IMAGE = {"image_size": 32, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}


def sight(config: type, model: type, output: str = "last_hidden_state", size: int = 32, batch: bool = True, **more: Any) -> Torch:
    """Return a model of images; their number is open."""
    module = Named(model(config(**more)), (output,), ("pixel_values",))
    axes = {"pixel_values": {0: "batch"}} if batch else {}
    further = ({"batch": 1}, {"batch": 3}) if batch else ()
    return Torch(module, {"pixel_values": torch.randn(2 if batch else 1, 3, size, size)}, ("y",), axes, further)


def detector(config: type, model: type, size: int = 64, **more: Any) -> Torch:
    """Return a model of classes and boxes of a fixed number of queries."""
    module = Named(model(config(**more)), ("logits", "pred_boxes"), ("pixel_values",))
    image = {"pixel_values": torch.randn(2, 3, size, size)}
    return Torch(module, image, ("logits", "boxes"), {"pixel_values": {0: "batch"}}, ({"batch": 1}, {"batch": 3}))


def sound(config: type, model: type, output: str = "last_hidden_state", **more: Any) -> Torch:
    """Return a model of raw sound of open length."""
    settings = {**SIZES, "vocab_size": 30, "conv_dim": (8, 8, 8), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), **more}
    settings |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    module = Named(model(config(**settings)), (output,), ("input_values",))
    inputs = {"input_values": torch.randn(2, 400)}
    return Torch(
        module,
        inputs,
        ("y",),
        {"input_values": {0: "batch", 1: "samples"}},
        ({"batch": 1, "samples": 320}, {"batch": 3, "samples": 517}),
    )


def whisper(part: str) -> Torch:
    """Return Whisper's encoder of a spectrogram, or its decoder."""
    sizes = {**PAIR, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16, "vocab_size": 100}
    config = T.WhisperConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    model = T.WhisperForConditionalGeneration(config)
    if part == "encoder":
        module = Named(model.model.encoder, ("last_hidden_state",), ("input_features",))
        inputs = {"input_features": torch.randn(2, 8, 40)}
        return Torch(module, inputs, ("y",), {"input_features": {0: "batch"}}, ({"batch": 1}, {"batch": 3}))
    module = Named(model.model.decoder, ("last_hidden_state",), ("input_ids", "encoder_hidden_states"), use_cache=False)
    inputs = {"input_ids": ids(2, 4), "encoder_hidden_states": torch.randn(2, 20, 16)}
    axes = {"input_ids": {0: "batch", 1: "tokens"}, "encoder_hidden_states": {0: "batch"}}
    return Torch(module, inputs, ("y",), axes, ({"batch": 1, "tokens": 7}, {"batch": 3, "tokens": 2}))


def pair(kind: str) -> Torch:
    """Return a model that compares images and words: CLIP or a variant."""
    words, image = {**SMALL, "projection_dim": 8}, {**SIZES, **IMAGE, "projection_dim": 8}
    config = {"clip": T.CLIPConfig, "siglip": T.SiglipConfig}[kind](text_config=words, vision_config=image, projection_dim=8)
    module = Named(
        {"clip": T.CLIPModel, "siglip": T.SiglipModel}[kind](config), ("logits_per_image",), ("input_ids", "pixel_values")
    )
    inputs = {"input_ids": ids(3, 6), "pixel_values": torch.randn(2, 3, 32, 32)}
    axes = {"input_ids": {0: "texts", 1: "tokens"}, "pixel_values": {0: "batch"}}
    further = ({"texts": 2, "tokens": 9, "batch": 1}, {"texts": 5, "tokens": 4, "batch": 3})
    return Torch(
        module, inputs, ("y",), axes if kind == "clip" else {"pixel_values": {0: "batch"}}, further[:2], {"input_ids": "below 99"}
    )


def sam() -> Torch:
    """Return SAM: an image, points on it, masks."""
    vision = {
        **SIZES,
        "output_channels": 8,
        "image_size": 64,
        "patch_size": 16,
        "num_pos_feats": 4,
        "window_size": 2,
        "global_attn_indexes": [1],
    }
    prompt = {"hidden_size": 8, "image_size": 64, "patch_size": 16, "mask_input_channels": 4, "image_embedding_size": 4}
    mask = {
        "hidden_size": 8,
        "mlp_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 8,
        "attention_downsample_rate": 1,
    }
    config = T.SamConfig(vision_config={**vision, "mlp_dim": 32}, prompt_encoder_config=prompt, mask_decoder_config=mask)
    module = Named(T.SamModel(config), ("pred_masks", "iou_scores"), ("pixel_values", "input_points"))
    inputs = {"pixel_values": torch.randn(1, 3, 64, 64), "input_points": torch.rand(1, 1, 3, 2) * 60}
    axes = {"input_points": {2: "points"}}
    return Torch(module, inputs, ("masks", "scores"), axes, ({"points": 1}, {"points": 5}), {"input_points": "unit"})


def patch_series() -> Torch:
    """Return PatchTST, which forecasts series."""
    config = T.PatchTSTConfig(
        num_input_channels=3,
        context_length=24,
        patch_length=6,
        patch_stride=6,
        prediction_length=8,
        d_model=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    module = Named(T.PatchTSTForPrediction(config), ("prediction_outputs",), ("past_values",))
    return Torch(
        module, {"past_values": torch.randn(2, 24, 3)}, ("y",), {"past_values": {0: "batch"}}, ({"batch": 1}, {"batch": 3})
    )


DETR = {
    **PAIR,
    "num_queries": 5,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_labels": 4,
}
RT = {
    "encoder_hidden_dim": 16, "encoder_in_channels": [8, 16, 16], "feat_strides": [8, 16, 32], "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4, "d_model": 16, "num_queries": 5, "decoder_in_channels": [16, 16, 16], "decoder_ffn_dim": 32,
    "decoder_layers": 2, "decoder_attention_heads": 4, "num_labels": 4, "num_denoising": 0, "anchor_image_size": None,
    "use_pretrained_backbone": False,
}  # fmt: skip
SEG = {
    "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16,
    "num_labels": 5,
}  # fmt: skip


def rt_detr() -> Torch:
    """Return RT-DETR over a small ResNet."""
    backbone = T.RTDetrResNetConfig(**RESNET, out_features=["stage2", "stage3", "stage4"])
    return detector(T.RTDetrConfig, T.RTDetrForObjectDetection, backbone_config=backbone, **RT)


def detr() -> Torch:
    """Return DETR over a small ResNet."""
    return detector(
        T.DetrConfig, T.DetrForObjectDetection, backbone_config=T.ResNetConfig(**RESNET, out_features=["stage4"]), **DETR
    )


RECIPES: dict[str, Callable[[], Torch]] = {
    "whisper_encoder": lambda: whisper("encoder"),
    "whisper_decoder": lambda: whisper("decoder"),
    "wav2vec2": lambda: sound(T.Wav2Vec2Config, T.Wav2Vec2ForCTC, "logits"),
    "hubert": lambda: sound(T.HubertConfig, T.HubertModel),
    "clip": lambda: pair("clip"),
    "siglip": lambda: pair("siglip"),
    "detr": detr,
    "rt_detr": rt_detr,
    "yolos": lambda: detector(T.YolosConfig, T.YolosForObjectDetection, **{**SIZES, "image_size": [64, 64], "patch_size": 16}),
    "sam": sam,
    "segformer": lambda: sight(T.SegformerConfig, T.SegformerForSemanticSegmentation, "logits", 64, **SEG),
    "dinov2": lambda: sight(T.Dinov2Config, T.Dinov2Model, **SIZES, **IMAGE),
    "beit": lambda: sight(T.BeitConfig, T.BeitModel, **SIZES, **IMAGE, use_relative_position_bias=True),
    "deit": lambda: sight(T.DeiTConfig, T.DeiTForImageClassification, "logits", **SIZES, **IMAGE),
    "convnext_v2": lambda: sight(
        T.ConvNextV2Config, T.ConvNextV2Model, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], image_size=32
    ),
    "mobilevit": lambda: sight(
        T.MobileViTConfig,
        T.MobileViTModel,
        size=64,
        image_size=64,
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
        num_attention_heads=4,
    ),
    "patch_series": patch_series,
}
