"""Recipes of the corpus, and the steps from a recipe to a file: export by torch, cleaning and checks."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor, nn

#: The opset that each of torch's exporters writes by default, or close to it.
OPSET = {"script": 17, "dynamo": 18}


@dataclass(frozen=True)
class Torch:
    """A module with example inputs. ``open`` names the axes that may change: input -> {axis: name of the size}. ``further`` are
    sizes of these names besides the example's. ``values`` names the filling of an input (``corpus_inputs.filled``)."""

    model: nn.Module
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    open: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    further: tuple[Mapping[str, int], ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    kind: str = "float32"
    exporters: tuple[str, ...] = ("script", "dynamo")
    sane: bool = True  #: True if weights are redrawn (``sane``).


@dataclass(frozen=True)
class Made:
    """A model, and the entry that ``corpus.json`` gets for it."""

    proto: onnx.ModelProto
    entry: dict[str, Any]


def entry_of(torch_model: Torch) -> dict[str, Any]:
    """Return the entry of a model. It has inputs (type, shape with names of open sizes, filling) and sizes: the example's, then
    the further ones."""
    inputs, sizes = dict[str, Any](), dict[str, int]()
    for name, value in torch_model.inputs.items():
        axes = torch_model.open.get(name, {})
        sizes |= {axes[a]: value.shape[a] for a in axes}
        kind = torch_model.values.get(name, "normal" if value.is_floating_point() else "below 100")
        shape = [axes.get(a, size) for a, size in enumerate(value.shape)]
        inputs[name] = [str(value.dtype).removeprefix("torch."), shape, kind]
    return {
        "inputs": inputs,
        "sizes": [sizes, *({n: f[n] for n in sizes} for f in torch_model.further)],
        "kind": torch_model.kind,
    }


def sane(model: nn.Module) -> nn.Module:
    """Redraw the weights of ``model`` so that every layer shows in the result. Signals fade in untrained networks with torch's
    initialisation."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        last = name.rpartition(".")[2]
        if not value.is_floating_point() or last in KEPT or ("buffer" in last) or name in model.__dict__.get("kept", ()):
            continue
        is_buffer = name in dict(model.named_buffers())
        if is_buffer and last not in ("running_mean", "running_var"):
            continue
        with torch.no_grad():
            if last == "running_var" or (value.ndim == 1 and last in ("weight", "gamma", "scale", "layer_scale")):
                value.uniform_(0.5, 1.5)
            else:
                fan = value[0].numel() if value.ndim > 1 else 25
                value.normal_(0.0, (1.5 / max(fan, 1)) ** 0.5)
    return model


#: Parameters that are not weights: decays and steps of state-space models.
KEPT = ("A_log", "dt_bias", "inv_freq", "logit_scale")


def exported(made: Torch, exporter: str) -> onnx.ModelProto:
    """Export ``made`` by one of torch's exporters."""
    values, names = tuple(made.inputs.values()), list(made.inputs)
    more: dict[str, Any] = {"dynamic_axes": {n: dict(a) for n, a in made.open.items()}} if made.open else {}
    if exporter == "dynamo" and made.open:
        shapes = tuple({a: torch.export.Dim.DYNAMIC for a in made.open.get(n, {})} for n in names)
        more = {"dynamic_shapes": (shapes,) if isinstance(made.model, Named | Call) else shapes}
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        file = str(Path(folder) / "model.onnx")
        torch.onnx.export(
            sane(made.model.eval()) if made.sane else made.model.eval(),
            values,
            file,
            input_names=names,
            output_names=list(made.outputs),
            opset_version=OPSET[exporter],
            dynamo=exporter == "dynamo",
            external_data=False,
            verbose=False,
            **more,
        )
        return stripped(onnx.load(file))


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Remove notes of the tools from graphs, bodies and functions. These notes contain source lines and folders."""
    del proto.metadata_props[:]
    proto.doc_string = ""

    def clean(part: Any) -> None:
        for name in ("doc_string", "metadata_props"):
            if name in part.DESCRIPTOR.fields_by_name:
                part.ClearField(name)
        for descriptor, value in part.ListFields():
            if descriptor.type == descriptor.TYPE_MESSAGE:
                for each in value if hasattr(value, "__len__") else (value,):
                    clean(each)

    clean(proto.graph)
    for function in proto.functions:
        clean(function)
    return proto


class Named(nn.Module):
    """A model of transformers with inputs and outputs by position. It has keys and values of ``past`` layers as inputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], given: tuple[str, ...], past: int = 0, **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.given, self.past, self.fixed = model, names, given, past, fixed

    def forward(self, *inputs: Tensor) -> Any:
        from transformers import DynamicCache

        known = {**dict(zip(self.given, inputs, strict=False)), **self.fixed}
        if self.past:
            pairs = inputs[len(self.given) :]
            cache = DynamicCache(tuple(zip(pairs[::2], pairs[1::2], strict=True)))
            known |= {"past_key_values": cache, "use_cache": True}
        found = self.model(**known)
        if self.past:
            layers = found.past_key_values.layers
            return (found[0], *(t for layer in layers for t in (layer.keys, layer.values)))
        return tuple(found[n] for n in self.names)


class Call(nn.Module):
    """A function of tensors around a module, as a module: ``call(module, *inputs)``."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.module, *inputs)


def numpy_type(value_info: onnx.ValueInfoProto) -> str:
    """Return the NumPy type of a model's input or output."""
    return str(np.dtype(helper.tensor_dtype_to_np_dtype(value_info.type.tensor_type.elem_type)))
