"""Models of the corpus over several devices, equal or mixed: results of ONNX Runtime, or an early refusal."""

from __future__ import annotations

import re

import numpy as np
import pytest
from corpus_inputs import Entry, corpus

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.partition.search import compile_spread
from rammer.distributed.runtime.distributed_run import Joined, SpreadRuns
from rammer.distributed.transport.local import LOCAL
from rammer.distributed.transport.protocol import Site
from rammer.errors import BadInput
from rammer.ir.formats import from_carrier, to_carrier
from rammer.jit.onnx_source import open_source
from rammer.runtime.input_checks import check_inputs, shapes_of
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

SETS = ("ipu_sim,ipu_sim", "rocm,ipu_sim", "toy,rocm,rocm")
OPTIONS = {"ipu_sim": {"tiles": "32"}}
#: Reasons for refusal over several devices, reported before anything runs.
REFUSED = r"shapes that do not depend on run-time data|com\.microsoft\.nchwc"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("entry", corpus().values(), ids=corpus())
def test_a_model_over_two_devices(entry: Entry, rng: np.random.Generator) -> None:
    check(entry, "rocm,rocm", rng)


@pytest.mark.large
@pytest.mark.parametrize("devices", SETS)
@pytest.mark.parametrize("entry", corpus().values(), ids=corpus())
def test_a_model_over_devices_of_several_kinds(entry: Entry, devices: str, rng: np.random.Generator) -> None:
    check(entry, devices, rng)


def check(entry: Entry, devices: str, rng: np.random.Generator) -> None:
    """Check two runs in flight."""
    registry, names = Registry(), devices.split(",")
    if any(registry.status(n).state != "ok" for n in names):
        pytest.skip(f"{devices} do not all work here")
    inputs, source = entry.inputs(rng, entry.sizes[0]), open_source(entry.path, registry.operators)
    backends = {n: registry.open(n, options=OPTIONS.get(n, {})) for n in names}
    made = {n: Compiler(b, CompileOptions(), KernelStore(None), registry, device=n) for n, b in backends.items()}
    try:
        arrays = check_inputs(source.head.inputs, inputs)
        spread = compile_spread([(n, made[n]) for n in names], source.model, shapes_of(source.head, arrays))
    except BadInput as problem:
        assert problem.where and problem.hint and re.search(REFUSED, str(problem)), problem
        return
    runs = SpreadRuns(spread, {d: backends[n] for d, n in enumerate(names)}, Joined(tuple(map(Site, names)), LOCAL, 2, 120.0))
    outputs, _ = runs.run_all([{n: to_carrier(a) for n, a in arrays.items()}] * 2)
    runs.close()
    want = entry.expected(inputs)
    for have in some(outputs):
        wrong = [f"{n}: {w}" for n, v in some(want.items()) if (w := entry.differs(from_carrier(have[n], str(v.dtype)), v))]
        assert not wrong, wrong
