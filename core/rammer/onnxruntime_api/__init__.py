"""ONNX Runtime's Python interface over rammer's devices: with ``import rammer as ort``, code for ONNX Runtime runs unchanged.

Names, arguments and results are those of ONNX Runtime. docs/onnxruntime.md lists the differences."""

from __future__ import annotations

from rammer.onnxruntime_api.errors import Fail, InvalidArgument, InvalidProtobuf, NoSuchFile
from rammer.onnxruntime_api.io_binding import IOBinding
from rammer.onnxruntime_api.metadata import ModelMetadata, NodeArg
from rammer.onnxruntime_api.ort_value import OrtDevice, OrtValue
from rammer.onnxruntime_api.providers import get_all_providers, get_available_providers, get_device
from rammer.onnxruntime_api.session import InferenceSession
from rammer.onnxruntime_api.session_options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
    set_default_logger_severity,
    set_seed,
)

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "Fail",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "InvalidArgument",
    "InvalidProtobuf",
    "ModelMetadata",
    "NoSuchFile",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
    "set_seed",
]
