"""Shared helpers of the tests of bound calls: an opened model, values, an array of another library."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.compile_options import CompileOptions
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import Subject
from rammer_testing.small_models import SmallModel

TWICE = SmallModel("twice", "(float[3,4] x) => (float[3,4] y, float[4,3] t) { y = Add(x, x)\n t = Transpose(y) }")


def executable(device: str, model: SmallModel) -> Executable:
    subject = Subject(device)
    source = open_source(model.build(subject.rng))
    return Executable(source, subject.backend, device, CompileOptions(), subject.registry, store=KernelStore(None))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Foreign:
    """An array that offers only DLPack."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array, self.device, self.dtype, self.shape = array, device, f"library.{array.dtype}", array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()
