"""Modules of torchvision, timm and transformers in small forms, drawn by a seed, with their inputs.

``python tests/kit/tools/torch_modules.py --seed 20 --count 60 --device rocm`` compares each drawn module through
``torch.compile(backend="rammer")`` with eager torch."""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import timm
import torch
import torchvision.models as vision
import transformers
from torch import Tensor, nn

import rammer

#: Returns a module and the arguments of one call by name.
Maker: TypeAlias = "Callable[[], tuple[nn.Module, dict[str, Tensor]]]"
#: The tolerance of the comparison with eager torch, as a fraction of the largest value of an output. In half precision both are
#: compared with float64, and an error may be twice eager torch's.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class SmallModule:
    """A module in evaluation mode with one call's arguments by name."""

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]

    def call(self, compiled: Any) -> list[Tensor]:
        """Return the tensors that the module, or a compiled form of it, returns."""
        given = dict(self.inputs)
        found = compiled(given.pop("image"), **given) if "image" in given else compiled(**given)
        return [t for t in torch.utils._pytree.tree_leaves(_plain(found)) if isinstance(t, Tensor)]


def _plain(found: Any) -> Any:
    """Return a module's result with the outputs of transformers as tuples, without caches."""
    if isinstance(found, transformers.utils.ModelOutput):
        found = [v for k, v in found.items() if k != "past_key_values"]
    return found


def _image(size: int, batch: int = 1, channels: int = 3) -> dict[str, Tensor]:
    return {"image": torch.randn(batch, channels, size, size)}


def _vision() -> dict[str, Maker]:
    from torchvision.models import convnext, efficientnet, mobilenetv3, regnet, resnet, segmentation
    from torchvision.models.video import resnet as video

    def resnet_of(block: Any, layers: list[int], **more: Any) -> Maker:
        return lambda: (vision.ResNet(block, layers, num_classes=10, **more), _image(48))

    inverted = [
        mobilenetv3.InvertedResidualConfig(*row, 1, 0.25)
        for row in ((16, 3, 16, 16, True, "RE", 2), (16, 5, 64, 24, True, "HS", 2))
    ]
    fused = [efficientnet.FusedMBConvConfig(1, 3, 1, 8, 8, 1), efficientnet.FusedMBConvConfig(4, 3, 2, 8, 16, 1)]
    fused += [efficientnet.MBConvConfig(4, 3, 2, 16, 24, 1)]
    blocks = [convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 1)]
    return {
        "resnet": resnet_of(resnet.BasicBlock, [1, 1, 1, 1]),
        "resnext": resnet_of(resnet.Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=16),
        "resnet_dilated": resnet_of(resnet.Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[False, True, True]),
        "squeezenet": lambda: (vision.SqueezeNet("1_1", 10), _image(64)),
        "densenet": lambda: (vision.DenseNet(8, (2, 2), 16, 2, num_classes=10), _image(32)),
        "googlenet": lambda: (vision.GoogLeNet(10, aux_logits=False, init_weights=False), _image(64)),
        "shufflenet": lambda: (vision.ShuffleNetV2([1, 2, 1], [8, 16, 32, 64, 64], 10), _image(64)),
        "mobilenet_v2": lambda: (vision.MobileNetV2(10, 0.25), _image(32)),
        "mobilenet_v3": lambda: (vision.MobileNetV3(inverted, 64, 10), _image(32)),
        "mnasnet": lambda: (vision.MNASNet(0.25, 10), _image(32)),
        "efficientnet_v2": lambda: (vision.EfficientNet(fused, 0.1, num_classes=10, last_channel=32), _image(32)),
        "convnext": lambda: (vision.ConvNeXt(blocks, num_classes=10), _image(32)),
        "regnet": lambda: (vision.RegNet(regnet.BlockParams([1, 1], [16, 32], [8, 8], [1.0, 1.0], [2, 2], 0.25), 10), _image(32)),
        "vit": lambda: (vision.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10), _image(32, 2)),
        "swin": lambda: (vision.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10), _image(32)),
        "swin_v2": lambda: (
            vision.SwinTransformer(
                [4, 4],
                16,
                [2, 2],
                [2, 4],
                [4, 4],
                num_classes=10,
                block=vision.swin_transformer.SwinTransformerBlockV2,
                downsample_layer=vision.swin_transformer.PatchMergingV2,
            ),
            _image(32),
        ),
        "maxvit": lambda: (vision.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10), _image(32)),
        "lraspp": lambda: (
            segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4),
            _image(32),
        ),
        "video_r3d": lambda: (
            video.VideoResNet(video.BasicBlock, [video.Conv3DSimple] * 4, [1, 1, 1, 1], video.BasicStem, 10),
            {"image": torch.randn(1, 3, 4, 16, 16)},
        ),
    }


def _timm() -> dict[str, Maker]:
    from timm import layers
    from timm.models import convmixer, focalnet, metaformer, mlp_mixer

    def of(name: str, size: int, **more: Any) -> Maker:
        return lambda: (timm.create_model(name, num_classes=10, **more), _image(size))

    found = {
        name: of(name, 64)
        for name in (
            "test_byobnet",
            "test_convnext",
            "test_convnext2",
            "test_efficientnet",
            "test_efficientnet_gn",
            "test_efficientnet_ln",
            "test_efficientnet_evos",
            "test_mambaout",
            "test_nfnet",
            "test_resnet",
        )
    }
    found |= {name: of(name, 64, img_size=64) for name in ("test_vit", "test_vit2", "test_vit3", "test_vit4")}
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    stages: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (16, 32, 32, 32)}
    mixer: dict[str, Any] = {"num_classes": 10, "img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32}
    return found | {
        "deit3": of("deit3_small_patch16_224", 32, **vit),
        "beit": of("beit_base_patch16_224", 32, **vit),
        "eva": of("eva02_tiny_patch14_224", 32, **vit),
        "cait": of("cait_xxs24_224", 32, **vit),
        "xcit": of("xcit_nano_12_p16_224", 32, img_size=32, embed_dim=32, depth=2, num_heads=2),
        "mixer": lambda: (mlp_mixer.MlpMixer(**mixer), _image(32)),
        "gmlp": lambda: (
            mlp_mixer.MlpMixer(**mixer, block_layer=mlp_mixer.SpatialGatingBlock, mlp_layer=layers.GatedMlp, mlp_ratio=4),
            _image(32),
        ),
        "resmlp": lambda: (
            mlp_mixer.MlpMixer(**mixer, block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, mlp_ratio=2),
            _image(32),
        ),
        "convmixer": lambda: (convmixer.ConvMixer(32, 2, 5, 4, num_classes=10), _image(32)),
        "poolformer": lambda: (metaformer.MetaFormer(**stages, num_classes=10), _image(64)),
        "focalnet": lambda: (focalnet.FocalNet(depths=(1, 1, 1, 1), embed_dim=16, num_classes=10), _image(64)),
        "pvt": of("pvt_v2_b0", 64, depths=(1, 1, 1, 1)),
        "efficientformer_v2": of("efficientformerv2_s0", 64, img_size=64),
        "edgenext": of("edgenext_xx_small", 64, depths=(1, 1, 1, 1)),
        "levit": of("levit_128s", 64, img_size=64, embed_dim=(32, 32, 32), depth=(1, 1, 1), num_heads=(2, 2, 2)),
        "twins": of("twins_svt_small", 64, img_size=64, embed_dims=(16, 32, 32, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 2)),
        "repvgg": of("repvgg_a0", 32),
        "ghostnet": of("ghostnet_050", 32),
        "hardcorenas": of("mobilenetv3_small_050", 32),
        "fastvit": of("fastvit_t8", 64, layers=(1, 1, 1, 1), **{"embed_dims": (16, 32, 32, 32)}),
        "repghost": of("repghostnet_050", 32),
        "starnet": of("starnet_s050", 64),
        "davit": of("davit_tiny", 64, depths=(1, 1, 1, 1), **{"embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)}),
        "mobileone": of("mobileone_s0", 32),
    }


#: Values of the fields that configurations of transformers share.
_SMALL = {
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "intermediate_size": 64,
    "d_ff": 64,
    "ffn_dim": 64,
    "hidden_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(kind: str, **more: Any) -> Any:
    """Return a configuration with small values for the fields that it has."""
    made = getattr(transformers, kind)
    known = made().to_dict()
    return made(**{n: v for n, v in _SMALL.items() if n in known} | more)


def _text(*names: str, length: int = 12, batch: int = 1) -> dict[str, Tensor]:
    found = {"input_ids": torch.randint(3, 128, (batch, length))}
    return found | {n: torch.ones(batch, length, dtype=torch.int64) for n in names}


def _language(model: str, config: str, *names: str, batch: int = 1, inputs: Any = None, **more: Any) -> Maker:
    return lambda: (getattr(transformers, model)(_config(config, **more)), inputs() if inputs else _text(*names, batch=batch))


def _pixels(model: str, config: str, size: int = 32, **more: Any) -> Maker:
    return lambda: (getattr(transformers, model)(_config(config, **more)), {"pixel_values": torch.randn(1, 3, size, size)})


def _decoded() -> dict[str, Tensor]:
    return _text() | {"decoder_input_ids": torch.randint(3, 128, (1, 6))}


def _texts() -> dict[str, Maker]:
    return {
        "bert": _language("BertModel", "BertConfig", "attention_mask", batch=2),
        "bert_classes": _language("BertForSequenceClassification", "BertConfig", "attention_mask"),
        "roberta": _language("RobertaModel", "RobertaConfig", "attention_mask", pad_token_id=1),
        "distilbert": _language("DistilBertModel", "DistilBertConfig", "attention_mask"),
        "albert": _language("AlbertModel", "AlbertConfig", "attention_mask"),
        "electra": _language("ElectraModel", "ElectraConfig", "attention_mask"),
        "mpnet": _language("MPNetModel", "MPNetConfig", "attention_mask"),
        "deberta": _language("DebertaV2Model", "DebertaV2Config", "attention_mask"),
        "modernbert": _language("ModernBertModel", "ModernBertConfig", "attention_mask"),
        "gpt2": _language("GPT2LMHeadModel", "GPT2Config"),
        "gpt_neox": _language("GPTNeoXForCausalLM", "GPTNeoXConfig"),
        "gptj": _language("GPTJForCausalLM", "GPTJConfig", rotary_dim=4),
        "opt": _language("OPTForCausalLM", "OPTConfig"),
        "llama": _language("LlamaForCausalLM", "LlamaConfig"),
        "mistral": _language("MistralForCausalLM", "MistralConfig"),
        "qwen2": _language("Qwen2ForCausalLM", "Qwen2Config"),
        "qwen3": _language("Qwen3ForCausalLM", "Qwen3Config"),
        "phi": _language("PhiForCausalLM", "PhiConfig"),
        "gemma": _language("GemmaForCausalLM", "GemmaConfig"),
        "gemma2": _language("Gemma2ForCausalLM", "Gemma2Config"),
        "olmo": _language("OlmoForCausalLM", "OlmoConfig"),
        "stablelm": _language("StableLmForCausalLM", "StableLmConfig"),
        "falcon": _language("FalconForCausalLM", "FalconConfig"),
        "bloom": _language("BloomForCausalLM", "BloomConfig"),
        "t5_encoder": _language("T5EncoderModel", "T5Config"),
        "t5": _language("T5ForConditionalGeneration", "T5Config", inputs=_decoded),
        "bart": _language("BartForConditionalGeneration", "BartConfig", inputs=_decoded),
        "mamba": _language("MambaForCausalLM", "MambaConfig", state_size=4, expand=2, time_step_rank=4),
    }


def _images() -> dict[str, Maker]:
    return {
        "vit": _pixels("ViTForImageClassification", "ViTConfig"),
        "deit": _pixels("DeiTForImageClassification", "DeiTConfig"),
        "dinov2": _pixels("Dinov2Model", "Dinov2Config"),
        "swin": _pixels(
            "SwinForImageClassification", "SwinConfig", embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2, patch_size=4
        ),
        "convnext": _pixels(
            "ConvNextForImageClassification", "ConvNextConfig", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]
        ),
        "segformer": _pixels(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            64,
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[16, 32],
            num_attention_heads=[1, 2],
            sr_ratios=[4, 2],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
        "mobilevit": _pixels(
            "MobileViTForImageClassification",
            "MobileViTConfig",
            64,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 16, 16, 16, 24, 32],
            image_size=64,
            patch_size=2,
        ),
    }


def _encoders() -> dict[str, Maker]:
    return {
        "clip_vision": lambda: (
            transformers.CLIPVisionModel(
                transformers.CLIPVisionConfig(
                    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
                )
            ),
            {"pixel_values": torch.randn(1, 3, 32, 32)},
        ),
        "whisper_encoder": lambda: (
            transformers.WhisperModel(
                _config(
                    "WhisperConfig", num_mel_bins=8, max_source_positions=20, max_target_positions=20, decoder_start_token_id=1
                )
            ).encoder,
            {"input_features": torch.randn(1, 8, 40)},
        ),
        "wav2vec2": lambda: (
            transformers.Wav2Vec2Model(
                _config(
                    "Wav2Vec2Config",
                    conv_dim=[16, 16],
                    conv_kernel=[5, 3],
                    conv_stride=[4, 2],
                    num_feat_extract_layers=2,
                    num_conv_pos_embeddings=8,
                    num_conv_pos_embedding_groups=2,
                )
            ),
            {"input_values": torch.randn(1, 400)},
        ),
    }


def _transformers() -> dict[str, Maker]:
    return _texts() | _images() | _encoders()


def names() -> list[str]:
    """Return the names of all modules, as LIBRARY/MODULE."""
    return [f"{library}/{name}" for library, made in _LIBRARIES.items() for name in made()]


_LIBRARIES = {"torchvision": _vision, "timm": _timm, "transformers": _transformers}


def make(name: str, seed: int) -> SmallModule:
    """Return a module with weights and inputs of ``seed``. Constant and tiny weights become random: every layer counts."""
    library, _, own = name.partition("/")
    torch.manual_seed(seed)
    module, inputs = _LIBRARIES[library]()[own]()
    with torch.no_grad():
        for key, value in [*module.named_parameters(), *module.named_buffers()]:
            if not value.is_floating_point() or value.numel() < 2 or float(value.std()) > 0.01:
                continue
            if value.ndim > 1 and value.shape[-1] > 1:
                value.normal_(0.0, (1.5 / value[0].numel()) ** 0.5)
            elif key.endswith(("weight", "var", "gamma")):
                value.uniform_(0.5, 1.5)
            else:
                value.uniform_(-0.1, 0.1)
    return SmallModule(name, module.eval(), inputs)


def draw(seed: int, count: int) -> list[str]:
    """Return ``count`` names, drawn equally from the three libraries."""
    chosen = random.Random(seed)
    groups = [[n for n in names() if n.startswith(f"{library}/")] for library in _LIBRARIES]
    for group in groups:
        chosen.shuffle(group)
    mixed = [name for row in zip(*(g + [""] * 99 for g in groups), strict=False) for name in row if name]
    return mixed[:count]


@dataclass(frozen=True)
class Comparison:
    """The largest error of a compiled module as a fraction of an output's largest value, the accepted error, the graph breaks of
    the module and of eager torch, the graphs that were left to torch, and the seconds of the first call."""

    error: float
    limit: float
    breaks: int
    torch_breaks: int
    refused: tuple[str, ...]
    seconds: float

    @property
    def right(self) -> bool:
        """True if the module is right, whole on the device, and has at most one more graph break than torch."""
        return self.error <= self.limit and not self.refused and self.breaks <= max(self.torch_breaks, 1)


def compare(small: SmallModule, device: str, seed: int) -> Comparison:
    """Compare a module through the backend with eager torch, on the drawn inputs and then on others of the same shapes."""
    with torch.no_grad():
        want = [small.call(small.module)]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        small.call(torch.compile(small.module, backend="eager"))
        torch_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(small.module, backend=rammer.torch.backend, options={"device": device})
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = [small.call(compiled)]
        seconds = time.perf_counter() - start
        other = SmallModule(small.name, small.module, {n: _again(t, seed) for n, t in small.inputs.items()})
        want, found = [*want, other.call(small.module)], [*found, other.call(compiled)]
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        limit = TOLERANCE
        if any(t.dtype in (torch.float16, torch.bfloat16) for outputs in want for t in outputs):
            precise = [_double(small), _double(other)]
            eager, want = want, [s.call(s.module) for s in precise]
            limit = max(limit, 2 * _largest_error(eager, want))
    refused = tuple(str(w.message) for w in seen if str(w.message).startswith("rammer leaves"))
    return Comparison(_largest_error(found, want), limit, breaks, torch_breaks, refused, seconds)


def _again(tensor: Tensor, seed: int) -> Tensor:
    """Return other values of the same type and shape; masks stay."""
    chosen = torch.Generator().manual_seed(seed + 1)
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=chosen).to(tensor)
    return tensor if bool((tensor == 1).all()) else torch.randint(3, 128, tensor.shape, generator=chosen).to(tensor)


def _double(small: SmallModule) -> SmallModule:
    """Return a copy of the module and its inputs in float64."""
    inputs = {n: t.double() if t.is_floating_point() else t for n, t in small.inputs.items()}
    return SmallModule(small.name, copy.deepcopy(small.module).double(), inputs)


def _largest_error(found: list[list[Tensor]], want: list[list[Tensor]]) -> float:
    return max(_error(f, w) for got, expected in zip(found, want, strict=True) for f, w in zip(got, expected, strict=True))


def _error(found: Tensor, want: Tensor) -> float:
    if (found.dtype != want.dtype and want.dtype != torch.float64) or found.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return float((found != want).any())
    scale = float(want.abs().max()) or 1.0
    worst = float((found.double() - want.double()).abs().max()) / scale
    return worst if worst == worst else float("inf")


@dataclass(frozen=True)
class Setting:
    """The form in which modules are compared: rammer's device, torch's device, element type, batch, and whether to time."""

    device: str
    place: str
    dtype: torch.dtype
    batch: int
    timed: bool

    def prepare(self, small: SmallModule) -> SmallModule:
        """Return the module and its inputs in this form."""
        inputs = {n: t.repeat(self.batch, *[1] * (t.ndim - 1)).to(self.place) for n, t in small.inputs.items()}
        inputs = {n: t.to(self.dtype) if t.is_floating_point() else t for n, t in inputs.items()}
        return SmallModule(small.name, small.module.to(self.place, self.dtype), inputs)

    def wait(self) -> None:
        """Wait for queued work."""
        if self.place != "cpu":
            getattr(torch, self.place).synchronize()


#: Held by the one process that measures, where several compile.
_measuring: AbstractContextManager[Any] = nullcontext()


def _share(lock: Any) -> None:
    """Take the lock of the processes that compile side by side, and make eager torch a reference in float32."""
    global _measuring
    _measuring = lock
    torch.backends.cudnn.allow_tf32 = False


def median_times(small: SmallModule, setting: Setting, rounds: int = 40) -> dict[str, float]:
    """Return the median seconds of a call, with the wait for its results, in eager torch, by ``torch.compile``'s default backend
    and by rammer. Calls are interleaved; no other process measures meanwhile."""
    torch._dynamo.reset()
    forms = {"eager": small.module, "default": torch.compile(small.module)}
    forms["rammer"] = torch.compile(small.module, backend=rammer.torch.backend, options={"device": setting.device})

    def turn(found: dict[str, list[float]]) -> None:
        for name, form in forms.items():
            setting.wait()
            start = time.perf_counter()
            small.call(form)
            setting.wait()
            found.setdefault(name, []).append(time.perf_counter() - start)

    found = dict[str, list[float]]()
    with torch.inference_mode():
        turn({})  # compiles
        with _measuring:
            for number in range(rounds + 5):
                turn(found if number >= 5 else {})
    return {name: statistics.median(times) for name, times in found.items()}


def _judge(name: str, seed: int, setting: Setting) -> tuple[str, bool, dict[str, float]]:
    """Return the line of a module, whether it is right, and its median seconds."""
    try:
        small = setting.prepare(make(name, seed))
        found = compare(small, setting.device, seed)
        times = median_times(small, setting) if setting.timed else {}
    except Exception as problem:
        return f"FAIL {name}: {type(problem).__name__}: {' '.join(str(problem).split())[:600]}", False, {}
    refused = "".join(f"\n     {' '.join(r.split())[:600]}" for r in found.refused)
    counts = f"error {found.error:.1e} of {found.limit:.0e}, breaks {found.breaks} (torch {found.torch_breaks})"
    counts += f", first call {found.seconds:.1f} s"
    counts += "".join(f", {form} {seconds * 1e3:.3f} ms" for form, seconds in times.items())
    return f"{'ok  ' if found.right else 'FAIL'} {name}: {counts}{refused}", found.right, times


def main() -> int:
    """Compare the named modules, or ``--count`` drawn ones, and return the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--device", default="rocm", help="of rammer")
    parser.add_argument("--place", default="cpu", help="of torch's tensors, for example cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--times", action="store_true", help="time the calls beside eager torch and torch.compile's default backend"
    )
    parser.add_argument("--processes", type=int, default=1, help="that compile side by side; one at a time measures")
    given = parser.parse_args()
    setting = Setting(given.device, given.place, getattr(torch, given.dtype), given.batch, given.times)
    results = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, context, _share, (context.Lock(),)) as pool:
        for job in as_completed(
            [pool.submit(_judge, n, given.seed, setting) for n in given.names or draw(given.seed, given.count)]
        ):
            line, right, times = job.result()
            print(line, flush=True)
            results.append((right, times))
    wrong = sum(not right for right, _ in results)
    print(f"{len(results) - wrong} of {len(results)} modules are right")
    for form in ("eager", "default") if given.times else ():
        ratios = [times[form] / times["rammer"] for _, times in results if times]
        print(f"geometric mean of {form} / rammer over {len(ratios)} modules: {statistics.geometric_mean(ratios):.2f}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
