"""Export ``exports/*.onnx``: small models from torch's two exporters, so that tests need no torch.

``python tests/models/export_torch.py [--full] [--out FOLDER] [NAME ...]`` needs torch, transformers, onnx and onnxscript (written
with torch 2.13.0, transformers 5.23.0 and onnxscript 0.7.2). ``--full`` writes the models in their usual sizes, which are too
large to commit. Weights are random with a fixed seed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
import transformers
from torch import Tensor, nn

OPSET = {"script": 17, "dynamo": 18}


@dataclass(frozen=True)
class Export:
    """A model, its inputs, and their dynamic axes: name -> {axis: name of the size}."""

    model: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)


# --- recurrent layers ---------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer that starts from zeros, as most users write it. ``whole`` returns its last states as well."""

    def __init__(self, layer: nn.Module, whole: bool = False) -> None:
        super().__init__()
        self.layer, self.whole = layer, whole

    def forward(self, x: Tensor) -> Any:
        y, state = self.layer(x)
        return (y, *(state if isinstance(state, tuple) else (state,))) if self.whole else y


def recurrent(
    kind: type[nn.Module], layers: int, size: tuple[int, int, int], whole: bool = False, dynamic: bool = False, **more: Any
) -> Export:
    """Return a recurrent export. ``size`` is steps, batch and features in the order of the layer's input; the hidden size equals
    features."""
    layer = kind(size[-1], size[-1], layers, **more)
    outputs = ("y", "h", "c")[: (3 if kind is nn.LSTM else 2) if whole else 1]
    axes = {"x": {0: "batch", 1: "steps"} if more.get("batch_first") else {0: "steps", 1: "batch"}} if dynamic else {}
    return Export(Recurrent(layer, whole), {"x": torch.randn(*size)}, outputs, axes)


# --- transformers -------------------------------------------------------------------------------


class Named(nn.Module):
    """A transformers model with inputs and outputs by position. ``past`` is the number of layers with cached keys and values."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], given: tuple[str, ...], past: int = 0) -> None:
        super().__init__()
        self.model, self.names, self.given, self.past = model, names, given, past

    def forward(self, *inputs: Tensor) -> Any:
        known = dict(zip(self.given, inputs, strict=False))
        if self.past:
            pairs = inputs[len(self.given) :]
            cache = transformers.DynamicCache(tuple(zip(pairs[::2], pairs[1::2], strict=True)))
            known |= {"past_key_values": cache, "use_cache": True}
        found = self.model(**known)
        if self.past:
            layers = found.past_key_values.layers
            return (found[0], *(t for layer in layers for t in (layer.keys, layer.values)))
        return tuple(found[n] for n in self.names)


def bert(full: bool, dynamic: bool = False) -> Export:
    """Return BertModel with an attention mask."""
    small = (
        {}
        if full
        else {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": 100,
            "max_position_embeddings": 64,
        }
    )
    config = transformers.BertConfig(**small)
    shape = (1, 128) if full else (2, 40)  # more elements than NumPy chooses among
    inputs = {"input_ids": torch.randint(0, config.vocab_size, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    model = Named(transformers.BertModel(config), ("last_hidden_state", "pooler_output"), tuple(inputs))
    return Export(model, inputs, ("y", "pooled"), {n: {0: "batch", 1: "tokens"} for n in inputs} if dynamic else {})


def gpt2(full: bool, past: bool = False, dynamic: bool = False) -> Export:
    """Return GPT2LMHeadModel. With ``past`` it processes one more token after cached keys and values."""
    small = {} if full else {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    config = transformers.GPT2Config(**small)
    batch, tokens = (1, 64) if full else (2, 8)
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (batch, 1 if past else tokens))}
    given, outputs = tuple(inputs), ["logits"]
    if past:
        for n in range(config.n_layer):
            for part in ("key", "value"):
                inputs[f"{part}_{n}"] = torch.randn(batch, config.n_head, tokens, config.n_embd // config.n_head)
                outputs.append(f"new_{part}_{n}")
    model = Named(transformers.GPT2LMHeadModel(config), ("logits",), given, config.n_layer if past else 0)
    return Export(model, inputs, tuple(outputs), {"input_ids": {0: "batch", 1: "tokens"}} if dynamic else {})


def vit(full: bool) -> Export:
    """Return ViTForImageClassification as an export."""
    small = (
        {}
        if full
        else {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
            "num_labels": 10,
        }
    )
    config = transformers.ViTConfig(**small)
    model = Named(transformers.ViTForImageClassification(config), ("logits",), ("pixel_values",))
    return Export(model, {"pixel_values": torch.randn(1, 3, config.image_size, config.image_size)}, ("y",))


def convnext(full: bool) -> Export:
    """Return ConvNextForImageClassification as an export."""
    small = {} if full else {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "image_size": 32, "num_labels": 10}
    config = transformers.ConvNextConfig(**small)
    model = Named(transformers.ConvNextForImageClassification(config), ("logits",), ("pixel_values",))
    size = 224 if full else 32
    return Export(model, {"pixel_values": torch.randn(1, 3, size, size)}, ("y",))


# --- lengths behind strides ---------------------------------------------------------------------


def hubert() -> Export:
    """Return HubertModel for any number of samples."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.HubertConfig(
        **sizes, conv_dim=[16] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=32
    )
    model = Named(transformers.HubertModel(config), ("last_hidden_state",), ("input_values",))
    return Export(model, {"input_values": torch.randn(1, 8000)}, ("y",), {"input_values": {1: "samples"}})


class WhisperFrames(nn.Module):
    """Whisper's encoder for any number of frames up to its positions; transformers pads all inputs to 30 seconds."""

    def __init__(self, config: transformers.WhisperConfig) -> None:
        super().__init__()
        self.encoder = transformers.WhisperModel(config).encoder

    def forward(self, x: Tensor) -> Tensor:
        e = self.encoder
        x = nn.functional.gelu(e.conv2(nn.functional.gelu(e.conv1(x)))).permute(0, 2, 1)
        x = x + e.embed_positions.weight[: x.shape[1]]
        for layer in e.layers:
            y = layer(x, None)
            x = y[0] if isinstance(y, tuple) else y
        return e.layer_norm(x)


def whisper() -> Export:
    """Return Whisper's encoder as an export."""
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "num_mel_bins": 16}
    rest = {"decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 8, "vocab_size": 60, "pad_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **rest, max_source_positions=400)
    return Export(WhisperFrames(config), {"x": torch.randn(1, 16, 600)}, ("y",), {"x": {2: "frames"}})


def segformer() -> Export:
    """Return SegformerForSemanticSegmentation for images of any size."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        num_labels=5,
    )
    model = Named(transformers.SegformerForSemanticSegmentation(config), ("logits",), ("x",))
    model.given = ("pixel_values",)
    return Export(model, {"x": torch.randn(1, 3, 96, 128)}, ("y",), {"x": {2: "height", 3: "width"}})


# --- convolutional networks ---------------------------------------------------------------------


class Permuted(nn.Module):
    """Layer normalisation over the channels of an image, with permutations around it, as in torchvision's ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A block of torchvision's ConvNeXt: depthwise convolution, normalisation and two products with channels last, scaled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return x + y * self.scale


def convnext_permuted(full: bool) -> Export:
    """Return torchvision's ConvNeXt-Tiny, written out."""
    sizes, depths = ([96, 192, 384, 768], [3, 3, 9, 3]) if full else ([8, 16], [1, 1])
    parts: list[nn.Module] = [nn.Conv2d(3, sizes[0], 4, 4), Permuted(sizes[0])]
    for n, (channels, depth) in enumerate(zip(sizes, depths, strict=True)):
        parts += [Block(channels) for _ in range(depth)]
        parts += [Permuted(channels), nn.Conv2d(channels, sizes[n + 1], 2, 2)] if channels != sizes[-1] else []
    head = [nn.AdaptiveAvgPool2d(1), Permuted(sizes[-1]), nn.Flatten(1), nn.Linear(sizes[-1], 1000 if full else 10)]
    size = 224 if full else 32
    return Export(nn.Sequential(*parts, *head), {"x": torch.randn(1, 3, size, size)}, ("y",))


class Sound(nn.Module):
    """A 1-D convolution network with a gated residual and normalisation over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 16, 5, stride=2, padding=2)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 3, padding=d, dilation=d) for d in (1, 2, 4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.back = nn.ConvTranspose1d(16, 8, 4, stride=2, padding=1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.first(x))
        for gate, norm in zip(self.gates, self.norms, strict=True):
            a, b = gate(x).chunk(2, 1)
            x = norm((x + torch.tanh(a) * torch.sigmoid(b)).transpose(1, 2)).transpose(1, 2)
        x = nn.functional.max_pool1d(self.back(x), 3, 2)
        return self.last(torch.cat([x.mean(-1), x.amax(-1)], 0))


class Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        same = stride == 1 and before == after
        short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.short: nn.Module = nn.Identity() if same else short

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.short(x))


def resnet(dynamic: bool = False) -> Export:
    """Return a ResNet of two blocks."""
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(16, 10)]
    axes = {"x": {0: "batch"}} if dynamic else {}
    return Export(nn.Sequential(*stem, *blocks, *head), {"x": torch.randn(2, 3, 40, 40)}, ("y",), axes)


class Inverted(nn.Module):
    """A MobileNet block with squeeze and excitation."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 3 * before
        self.same = stride == 1 and before == after
        self.up = nn.Sequential(nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        deep = nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False)
        self.deep = nn.Sequential(deep, nn.BatchNorm2d(wide), nn.Hardswish())
        gate = [nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1), nn.Hardsigmoid()]
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), *gate)
        self.down = nn.Sequential(nn.Conv2d(wide, after, 1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.up(x))
        y = self.down(y * self.squeeze(y))
        return x + y if self.same else y


def mobilenet() -> Export:
    """Return a MobileNetV3 of two blocks."""
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()]
    blocks = [Inverted(8, 8, 1), Inverted(8, 12, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(12, 10)]
    return Export(nn.Sequential(*stem, *blocks, *head), {"x": torch.randn(1, 3, 32, 32)}, ("y",))


SMALL: dict[str, Callable[[], Export]] = {
    "lstm": lambda: recurrent(nn.LSTM, 1, (5, 2, 16), whole=True),
    "lstm10": lambda: recurrent(nn.LSTM, 10, (4, 1, 16)),
    "lstm_two_ways": lambda: recurrent(nn.LSTM, 2, (4, 2, 8), whole=True, bidirectional=True),
    "lstm_batch_first": lambda: recurrent(nn.LSTM, 2, (2, 5, 16), whole=True, dynamic=True, batch_first=True),
    "gru": lambda: recurrent(nn.GRU, 2, (5, 2, 16), whole=True),
    "gru_two_ways": lambda: recurrent(nn.GRU, 1, (2, 4, 8), batch_first=True, bidirectional=True),
    "bert": lambda: bert(False),
    "bert_dynamic": lambda: bert(False, dynamic=True),
    "gpt2": lambda: gpt2(False),
    "gpt2_dynamic": lambda: gpt2(False, dynamic=True),
    "gpt2_past": lambda: gpt2(False, past=True),
    "vit": lambda: vit(False),
    "convnext": lambda: convnext(False),
    "convnext_permuted": lambda: convnext_permuted(False),
    "sound": lambda: Export(Sound(), {"x": torch.randn(2, 3, 40)}, ("y",)),
    "resnet": lambda: resnet(dynamic=True),
    "mobilenet": mobilenet,
    "hubert": hubert,
    "whisper": whisper,
    "segformer": segformer,
}
FULL: dict[str, Callable[[], Export]] = {
    "lstm_tc": lambda: recurrent(nn.LSTM, 10, (100, 1, 256)),
    "gru_tc": lambda: recurrent(nn.GRU, 10, (100, 1, 256)),
    "bert_base": lambda: bert(True),
    "gpt2_small": lambda: gpt2(True),
    "vit_b16": lambda: vit(True),
    "convnext_tiny": lambda: convnext_permuted(True),
}


def randomised(model: nn.Module) -> nn.Module:
    """Return ``model`` with weights that make every layer affect the result. Torch's default weights
    fade in untrained networks."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not value.is_floating_point():
            continue
        with torch.no_grad():
            if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
                value.uniform_(0.5, 1.5)
            else:
                fan = value[0].numel() if value.ndim > 1 else 25
                value.normal_(0.0, (1.5 / fan) ** 0.5)
    return model


def export(made: Export, exporter: str, path: Path) -> None:
    """Write ``made`` with one of torch's exporters, as one file without traces of its origin."""
    values, names = tuple(made.inputs.values()), list(made.inputs)
    more: dict[str, Any] = {"dynamic_axes": made.dynamic} if made.dynamic else {}
    if exporter == "dynamo" and made.dynamic:
        shapes = tuple({d: torch.export.Dim(n) for d, n in made.dynamic.get(name, {}).items()} for name in names)
        varied = isinstance(made.model, Named)  # its inputs are one parameter, *inputs
        more = {"dynamic_shapes": (shapes,) if varied else shapes}
    logging.disable(logging.WARNING)  # missing packages are reported
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            randomised(made.model.eval()),
            values,
            str(path),
            input_names=names,
            output_names=list(made.outputs),
            opset_version=OPSET[exporter],
            dynamo=exporter == "dynamo",
            external_data=False,
            **more,
        )
    onnx.save(stripped(onnx.load(str(path))), str(path))


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without the exporter's notes, which contain source lines and folders."""
    del proto.metadata_props[:]
    parts: list[Any] = [
        proto.graph,
        *proto.graph.node,
        *proto.graph.value_info,
        *proto.graph.input,
        *proto.graph.output,
        *proto.graph.initializer,
        *proto.functions,
        *(n for f in proto.functions for n in f.node),
    ]
    for part in parts:
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    return proto


def main() -> int:
    """Write the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "exports")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    models, failed = FULL if given.full else SMALL, 0
    for name in given.names or models:
        for exporter in OPSET:
            torch.manual_seed(0)
            try:
                export(models[name](), exporter, given.out / f"{name}_{exporter}.onnx")
            except Exception as problem:
                failed += 1
                print(f"{name} by {exporter}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
