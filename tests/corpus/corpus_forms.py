"""Recipes: variants of models of the corpus, by ONNX Runtime's optimisers and quantisers and by type converters."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from corpus_inputs import HERE, Entry
from corpus_recipe import Made
from onnxruntime import quantization

LEVELS = onnxruntime.GraphOptimizationLevel
FORM = quantization.QuantFormat
TYPE = quantization.QuantType


def original(name: str, made: Mapping[str, Made]) -> Made:
    """Return a model of the corpus, from this run or an earlier one."""
    if name in made:
        return made[name]
    entry = json.loads((HERE / "corpus.json").read_text())["models"][name]
    return Made(onnx.load(HERE / "models" / f"{name}.onnx"), entry)


def optimised(base: Made, level: Any) -> onnx.ModelProto:
    """Return the model that ONNX Runtime runs after its optimisation."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        options.optimized_model_filepath = str(Path(folder) / "m.onnx")
        onnxruntime.InferenceSession(base.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def fused(base: Made, kind: str) -> onnx.ModelProto:
    """Return the model with the fusions of ``onnxruntime.transformers.optimizer``. It fuses attentions, embeddings and
    normalisations."""
    from onnxruntime.transformers.optimizer import optimize_model

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "m.onnx"
        onnx.save(base.proto, file)
        optimize_model(str(file), kind, num_heads=4, hidden_size=16, opt_level=0).save_model_to_file(str(file))
        return onnx.load(file)


class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Inputs at the exported sizes, from which a quantiser derives ranges."""

    def __init__(self, entry: Entry) -> None:
        rng = np.random.default_rng(3)
        self.values: Iterator[dict[str, np.ndarray]] = iter([entry.inputs(rng, entry.sizes[0]) for _ in range(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self.values, None)


def quantised(base: Made, form: Any, **more: Any) -> onnx.ModelProto:
    """Return the model quantised with ranges of samples."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        before, after, target = (str(Path(folder) / f"{n}.onnx") for n in ("a", "b", "c"))
        onnx.save(base.proto, before)
        quant_pre_process(before, after, skip_symbolic_shape=True)
        samples = Samples(Entry("", base.entry))
        quantization.quantize_static(after, target, samples, quant_format=form, **more)
        return onnx.load(target)


def dynamic(base: Made, **more: Any) -> onnx.ModelProto:
    """Return the model with quantised weights; activations are quantised at run time."""
    with tempfile.TemporaryDirectory() as folder:
        before, target = (str(Path(folder) / f"{n}.onnx") for n in ("a", "c"))
        onnx.save(base.proto, before)
        quantization.quantize_dynamic(before, target, **more)
        return onnx.load(target)


def four_bits(base: Made, qdq: bool) -> onnx.ModelProto:
    """Return products with weights of 4 bits in blocks: MatMulNBits, or DequantizeLinear of int4."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    form = FORM.QDQ if qdq else FORM.QOperator
    copy = onnx.ModelProto.FromString(base.proto.SerializeToString())
    quantiser = MatMulNBitsQuantizer(copy, block_size=16, is_symmetric=True, quant_format=form)
    quantiser.process()
    return quantiser.model.model


def halved(base: Made, keep: bool, library: str = "common") -> onnx.ModelProto:
    """Return the model in float16, with inputs and outputs of float32 if ``keep``."""
    copy = onnx.ModelProto.FromString(base.proto.SerializeToString())
    if library == "common":
        from onnxconverter_common import float16 as lib
    else:
        from onnxruntime.transformers import float16 as lib
    return lib.convert_float_to_float16(copy, keep_io_types=keep, disable_shape_infer=False)


def half_entry(base: Made) -> dict[str, Any]:
    """Return the entry with float16 in the place of float32."""
    inputs = {n: ["float16" if t == "float32" else t, *rest] for n, (t, *rest) in base.entry["inputs"].items()}
    return {**base.entry, "inputs": inputs, "kind": "float16"}


def form(name: str, change: Callable[[Made], onnx.ModelProto], kind: str = "") -> Callable[[dict[str, Made]], Made]:
    """Return a recipe: the model called ``name``, changed."""

    def made(known: dict[str, Made]) -> Made:
        logging.disable(logging.WARNING)
        base = original(name, known)
        return Made(change(base), {**base.entry, **({"kind": kind} if kind else {})})

    return made


def half(name: str, keep: bool, library: str = "common") -> Callable[[dict[str, Made]], Made]:
    """Return a recipe: the model called ``name`` in float16."""

    def made(known: dict[str, Made]) -> Made:
        base = original(name, known)
        entry = {**base.entry, "kind": "float16"} if keep else half_entry(base)
        return Made(halved(base, keep, library), entry)

    return made


def external(name: str) -> Callable[[dict[str, Made]], Made]:
    """Return a recipe: the model called ``name`` with its weights in a separate file."""

    def made(known: dict[str, Made]) -> Made:
        base = original(name, known)
        return Made(base.proto, {**base.entry, "external": True})

    return made


BASIC, EXTENDED, ALL = LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED, LEVELS.ORT_ENABLE_ALL
RECIPES: dict[str, Callable[[dict[str, Made]], Made]] = {
    **{
        f"{n}_ort_{word}": form(n, lambda b, level=level: optimised(b, level))
        for n in ("roberta_script", "llama_dynamo", "mobilenet_v3_script", "densenet_dynamo", "convnext_tv_dynamo")
        for word, level in (("basic", BASIC), ("extended", EXTENDED))
    },
    "resnet_script_ort_extended": form("resnet_script", lambda b: optimised(b, EXTENDED)),
    "t5_script_ort_extended": form("t5_script", lambda b: optimised(b, EXTENDED)),
    "swin_tv_dynamo_ort_all": form("swin_tv_dynamo", lambda b: optimised(b, ALL)),
    "roberta_script_fused": form("roberta_script", lambda b: fused(b, "bert")),
    "roberta_dynamo_fused": form("roberta_dynamo", lambda b: fused(b, "bert")),
    "distilbert_script_fused": form("distilbert_script", lambda b: fused(b, "bert")),
    "gpt2_script_fused": form("gpt2_script", lambda b: fused(b, "gpt2")),
    "bart_script_fused": form("bart_script", lambda b: fused(b, "bart")),
    "resnet_qdq": form("resnet_script", lambda b: quantised(b, FORM.QDQ), "quantised"),
    "resnet_qdq_channels": form("resnet_dynamo", lambda b: quantised(b, FORM.QDQ, per_channel=True), "quantised"),
    "resnet_qoperator": form("resnet_script", lambda b: quantised(b, FORM.QOperator), "quantised"),
    "mobilenet_v3_qdq": form("mobilenet_v3_script", lambda b: quantised(b, FORM.QDQ), "quantised"),
    "mobilenet_v3_qoperator": form(
        "mobilenet_v3_script", lambda b: quantised(b, FORM.QOperator, activation_type=TYPE.QUInt8), "quantised"
    ),
    "roberta_qdq": form("roberta_script", lambda b: quantised(b, FORM.QDQ), "quantised"),
    "roberta_dynamic": form("roberta_script", dynamic, "quantised"),
    "gpt2_dynamic": form("gpt2_script", dynamic, "quantised"),
    "lstm_dynamic": form("lstm_script", dynamic, "quantised"),
    "llama_int4": form("llama_dynamo", lambda b: four_bits(b, False), "float32"),
    "llama_int4_qdq": form("llama_dynamo", lambda b: four_bits(b, True), "float32"),
    "resnet_half": half("resnet_script", False),
    "resnet_half_inside": half("resnet_dynamo", True),
    "roberta_half": half("roberta_script", False),
    "llama_half": half("llama_dynamo", False, "ort"),
    "roberta_external": external("roberta_dynamo"),
    "resnet_external": external("resnet_dynamo"),
}
